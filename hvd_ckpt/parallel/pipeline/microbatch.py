"""Micro-batches: the gradients of a large batch in the memory of a small one.

A mini-batch is split into micro-batches, and each of them runs forward and backward before the next begins. Gradients add up as
over several backward passes. Their weights differ, since the loss of a mini-batch is a mean over terms (samples, or predicted
tokens), and micro-batches and ranks may have different numbers of terms.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from horovod.torch import mpi_ops
from torch import Tensor

from hvd_ckpt.collectives.asynchronous import Collectives
from hvd_ckpt.data.objectives import samples_of
from hvd_ckpt.distributed.replicas import computing_replica
from hvd_ckpt.utils.frames import without_recomputation
from hvd_ckpt.utils.spans import span
from hvd_ckpt.utils.text import CHECKPOINTS
from hvd_ckpt.utils.torch_private import pytree

T = TypeVar("T")


class Accumulated(NamedTuple):
    """The result of :func:`accumulate`.

    Attributes:
        loss: loss of this rank's mini-batch, detached; 0 if it has no terms.
        weight: number of terms that the loss is the mean of.
    """

    loss: Tensor
    weight: float


def accumulate(
    compute: Callable[[T], Tensor],
    batch: T,
    micro_batches: int,
    *,
    checkpoint: str = "always",
    weight: Callable[[T], float | Tensor] | None = None,
    across_ranks: bool = False,
    mean_terms: float | Callable[[], float] | None = None,
    backward: Callable[[Tensor, bool], Any] | None = None,
) -> Accumulated:
    """Adds the gradients of a mini-batch to the parameters' ``grad``, micro-batch by micro-batch.

    The backward pass of a micro-batch runs before the next forward pass, so the memory is that of one micro-batch. Without batch
    norm and dropout, loss and gradients equal those of the whole mini-batch up to rounding, with any weights::

        loss, _ = hc.accumulate(lambda part: criterion(model(*part.inputs), part.targets), batch, 4)
        optimizer.step()

    Batch norms normalize by the micro-batch; see :class:`hvd_ckpt.DeferredBatchNorm` for their running statistics.

    Args:
        compute: takes a micro-batch and returns its mean loss, a tensor with one element.
        batch: an object with ``split(parts)``, such as :class:`hvd_ckpt.data.objectives.Batch`, or tensors whose first dimension
            counts the samples, which may be nested in lists, tuples and dicts.
        micro_batches: number of micro-batches; there are fewer if there are fewer samples.
        checkpoint: the micro-batches whose checkpointed parts are recomputed in the backward pass, as in GPipe (Huang et al.,
            2019). ``"always"``, ``"except_last"`` (the backward pass of the last one follows at once) or ``"never"``.
        weight: takes a micro-batch and returns the number of terms that its loss is the mean of; by default its number of samples.
        across_ranks: whether to weight by the terms of all ranks. The gradients that a ``DistributedOptimizer`` averages are then
            those of the mean over the terms of all ranks. One number is summed over the ranks during the first forward pass.
            Collective; a rank may have no terms. Without it, all ranks have equal weights.
        mean_terms: the mean number of terms of all mini-batches of the step, or a function that returns it, in place of
            ``across_ranks``. For logical replicas: ``optimizer.replicas.mean(...)``.
        backward: takes a loss and whether it is the last, and runs the backward pass in place of ``loss.backward()``, such as
            ``lambda loss, last: precision.backward(loss, optimizer, last)``.

    A micro-batch without terms runs like the others and adds gradients of zero, even if its loss is nan. The exception is a nan
    inside a region that the reentrant variant recomputes.

    Raises:
        TypeError: ``micro_batches`` is not an int, the batch cannot be split, or ``compute`` does not return a tensor with one
            element.
        ValueError: ``micro_batches`` is less than 1, ``checkpoint`` is unknown, tensors have different numbers of samples, a weight
            or ``mean_terms`` is negative, inf or nan, or ``across_ranks`` is set within a logical replica.
    """
    check_options(micro_batches, checkpoint)
    if across_ranks and mean_terms is None and computing_replica():
        raise ValueError(
            "across_ranks counts the terms of ranks, and a logical replica is being computed: give "
            "mean_terms=optimizer.replicas.mean(...) instead, of the terms of this rank's replicas"
        )
    parts = split_batch(batch, micro_batches)
    terms = [terms_of(part, weight) for part in parts]
    accumulation = Accumulation(terms, across_ranks, mean_terms, backward)
    for index, part in enumerate(parts):
        kept = keeps_activations(checkpoint, index == len(parts) - 1)
        try:
            with span("forward"), without_recomputation() if kept else contextlib.nullcontext():
                loss = one_element(compute(part))
        finally:
            accumulation.factor()  # always waited for, since the next call sends under the same name
        accumulation.add(index, loss)
        with span("backward"):
            accumulation.backward(index, loss)
        # Drops the graph of this micro-batch before the next forward pass builds another one.
        del loss
    assert accumulation.loss is not None
    return Accumulated(accumulation.loss, accumulation.weight)


# Weights. Micro-batch i of this rank has t_i terms and the mean loss l_i. Its backward pass starts from l_i times
#
#     t_i / terms of this rank                         by default: the mean over this rank's mini-batch
#     t_i * number of ranks / terms of all ranks       with across_ranks, since the optimizer then averages over the ranks
#     t_i / mean terms of the mini-batches             with mean_terms, since the optimizer then averages over the mini-batches
#
# In each case, the averaged gradient is that of the mean over all terms that count.


class Accumulation:
    """The mean loss of a mini-batch, and the backward passes of its micro-batches, which count by their terms.

    The number of terms of all ranks is summed while this rank computes.

    Args:
        terms: those of each micro-batch.
        across_ranks, mean_terms, backward: as in :func:`accumulate`.

    Attributes:
        loss: the mean loss of the micro-batches so far, detached; None before the first one.
        weight: number of terms of the mini-batch.
    """

    def __init__(
        self,
        terms: Sequence[float],
        across_ranks: bool,
        mean_terms: float | Callable[[], float] | None = None,
        backward: Callable[[Tensor, bool], Any] | None = None,
    ) -> None:
        self.terms, self.weight, self._backward = terms, math.fsum(terms), backward
        self.loss: Tensor | None = None
        self._total: float | Callable[[], float] = self.weight if mean_terms is None else mean_terms
        self._ranks = mpi_ops.size() if mean_terms is None and across_ranks else 1
        if self._ranks > 1:
            # The name is the same in each step, and Horovod refuses a name that is in flight. So each call must be waited for.
            everyone = Collectives(mpi_ops.global_process_set, "hvd_ckpt.accumulate")
            work = everyone.allreduce(torch.tensor([self.weight], dtype=torch.float64), "terms")
            self._total = lambda: float(work.wait("the terms of all ranks").item())

    def factor(self) -> float:
        """The factor of the loss of one term."""
        if callable(self._total):
            # If this fails, the call that ends the batch must not fail in another way and hide the error.
            total, self._total = self._total, 0.0
            self._total = total()
        if not 0 <= self._total < math.inf:
            raise ValueError(f"The number of terms must be 0 or more, got {self._total}.")
        return self._ranks / self._total if self._total else 0.0

    def add(self, index: int, loss: Tensor) -> None:
        """Adds the mean loss of a micro-batch."""
        if self.loss is None:
            # At least float32: a sum in half precision would lose the small shares of many micro-batches.
            dtype = torch.promote_types(loss.dtype, torch.float32)
            self.loss = torch.zeros((), dtype=dtype, device=loss.device)
        # A loss without terms may be nan, which 0 as a factor would keep.
        if terms := self.terms[index]:
            self.loss = self.loss + loss.detach().reshape(()).to(self.loss.dtype) * (terms / self.weight)

    def backward(self, index: int, loss: Tensor) -> None:
        """Runs the backward pass of the mean loss of a micro-batch, weighted by its number of terms."""
        terms = self.terms[index]
        scaled = loss * (terms * self.factor())
        if not terms:
            silence(scaled)
        if self._backward is None:
            scaled.backward()  # type: ignore[no-untyped-call]
        else:
            self._backward(scaled, index == len(self.terms) - 1)


def check_options(micro_batches: Any, checkpoint: Any, known: Sequence[str] = CHECKPOINTS) -> None:
    if isinstance(micro_batches, bool) or not isinstance(micro_batches, int):
        raise TypeError(f"micro_batches must be an int, got {micro_batches!r}.")
    if micro_batches < 1:
        raise ValueError(f"micro_batches must be at least 1, got {micro_batches}.")
    if checkpoint not in known:
        raise ValueError(f"checkpoint must be one of {', '.join(known)}, got {checkpoint!r}.")


def keeps_activations(checkpoint: str, last: bool) -> bool:
    """Whether a micro-batch keeps its activations and is not recomputed."""
    return checkpoint == "never" or (checkpoint == "except_last" and last)


def split_batch(batch: Any, parts: int) -> Sequence[Any]:
    if not isinstance(batch, Tensor) and callable(getattr(batch, "split", None)):
        return list(batch.split(parts))
    leaves, structure = pytree.tree_flatten(batch)
    samples = _samples(leaves)
    parts = max(min(parts, samples), 1)
    cut = [leaf.tensor_split(parts) if isinstance(leaf, Tensor) else [leaf] * parts for leaf in leaves]
    return [pytree.tree_unflatten(list(part), structure) for part in zip(*cut)]


def fields_of(part: Any) -> tuple[tuple[Any, ...], Any, dict[str, Any]]:
    """Positional inputs, targets and shared keyword arguments of a micro-batch."""
    if hasattr(part, "inputs"):
        return part.inputs, part.targets, part.shared
    shared = part[2] if isinstance(part, (tuple, list)) and len(part) == 3 else {}
    if not isinstance(part, (tuple, list)) or len(part) not in (2, 3) or not isinstance(shared, dict):
        raise TypeError(
            f"a batch of a pipeline is a Batch, (inputs, targets) or (inputs, targets, dict of shared arguments), got a "
            f"{type(part).__name__}"
        )
    inputs = part[0] if isinstance(part[0], tuple) else (part[0],)
    return inputs, part[1], shared


def concatenated(outputs: Sequence[Any]) -> Any:
    """The outputs of micro-batches as one: tensors joined along their first dimension, or stacked if they have none."""
    leaves, structure = zip(*map(pytree.tree_flatten, outputs))
    joined = [
        (torch.cat if parts[0].dim() else torch.stack)(parts) if isinstance(parts[0], Tensor) else parts[-1]
        for parts in zip(*leaves)
    ]
    return pytree.tree_unflatten(joined, structure[0])


def _samples(leaves: Sequence[Any]) -> int:
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not tensors:
        kinds = sorted({type(leaf).__name__ for leaf in leaves}) or ["nothing"]
        raise TypeError(
            f"The batch has no tensors and no split(parts) to split it by, it holds: {', '.join(kinds)}."
        )
    return samples_of(tensors)


def terms_of(part: Any, weight: Callable[[Any], float | Tensor] | None) -> float:
    if weight is not None:
        terms = float(weight(part))
    elif hasattr(part, "split") and not isinstance(part, Tensor):
        terms = float(len(part))
    else:
        terms = float(_samples(pytree.tree_leaves(part)))
    if not 0 <= terms < math.inf:
        raise ValueError(f"The weight of a micro-batch must be a number of terms, 0 or more, got {terms}.")
    return terms


def one_element(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"one of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise TypeError(
            f"compute must return the mean loss of a micro-batch, a tensor with one element, got {got}."
        )
    return loss


def silence(loss: Tensor) -> None:
    """Makes the gradients of a loss without terms zero even if it is nan, since 0 times nan is nan.

    The backward pass must run nevertheless. It takes part in collectives of the other ranks' backward passes, and the gradients
    that a synchronized batch norm receives from their losses are not zero.
    """
    # Each node between the loss and the leaves gets a hook that replaces nan by 0 in the gradients that it passes on.
    pending, seen = [loss.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen or not node.next_functions:
            continue
        seen.add(node)
        node.register_hook(_without_nan)
        pending.extend(following for following, _ in node.next_functions)


def _without_nan(inputs: Sequence[Tensor | None], outputs: Any) -> tuple[Tensor | None, ...]:
    # Infinities stay as they are: by default, nan_to_num() makes the
    # largest number of them, and an overflow would go unnoticed.
    return tuple(
        None if gradient is None else gradient.nan_to_num(0.0, math.inf, -math.inf) for gradient in inputs
    )
