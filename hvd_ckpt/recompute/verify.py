"""Verification of recomputation: whether the recomputed tensors equal those of the first pass, bit for bit.

A recomputation that computes something else gives the gradients of another function, and nothing fails. So the first training pass
through each region (and each planned block) observes the tensors that the backward pass will need, and the recomputation is
compared with it. Two observations are compared by a fingerprint of the bits (:mod:`hvd_ckpt.utils.fingerprint`). If the
fingerprints differ, 64 sampled elements tell a rounding from another result.

A difference by a rounding is a warning where kernels may be nondeterministic, unless deterministic algorithms are in use. Any other
difference is a :class:`RecomputationMismatch`.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.checkpoint import CheckpointError

from hvd_ckpt.recompute.keeper import in_layout
from hvd_ckpt.utils.backward_errors import begin_forward, hand_over
from hvd_ckpt.utils.fingerprint import distinct, fingerprints
from hvd_ckpt.utils.frames import aside
from hvd_ckpt.utils.text import read_when
from hvd_ckpt.utils.torch_private import current_graph_task_id, execution_engine, identity_of
from hvd_ckpt.utils.unmaterialized import absent_storages, is_absent

VARIABLE = "HVD_CKPT_VERIFY_RECOMPUTATION"
_SAMPLE = 64
_ROUNDING = 1e4  # most that sums in another order may differ by, in units of the dtype's epsilon times the largest element
_SHOWN = 3  # mismatches named in an error


class RecomputationMismatch(CheckpointError):
    """A recomputation gave other values than its first pass, so the gradients would be wrong."""


# ---------------------------------------------------------------------------------------- when


def verify_recomputation(when: str | int) -> None:
    """Sets which passes verify recomputation: compare its tensors, bit for bit, with those of the first pass.

    Verification covers :func:`hvd_ckpt.checkpoint` in both variants, ``CheckpointFunction``, segments, pipeline stages and plans. A
    verified pass reads each saved tensor two more times than other passes do.

    Args:
        when: ``"first"`` (the default): the first training pass through each region in this process, and again for other modules
            or another training mode. ``"always"``: every pass. ``"never"``: no pass. A number n: every n-th pass. The environment
            variable ``HVD_CKPT_VERIFY_RECOMPUTATION`` sets the default.

    Raises:
        ValueError: ``when`` has another value.
    """
    global _when
    _when = read_when(when, "recomputation")


@contextlib.contextmanager
def verifying(when: str | int) -> Iterator[None]:
    """A context in which :func:`verify_recomputation` is set to ``when``."""
    global _when
    before, _when = _when, when
    try:
        yield
    finally:
        _when = before


_when: str | int = read_when(os.environ.get(VARIABLE) or "first", VARIABLE)


@dataclass
class Passes:
    """The passes through one region so far: first passes and their recomputations.

    Attributes:
        begun: number of passes.
        verified: whether a recomputation has been compared and was right, or needed no comparison.
    """

    begun: int = 0
    verified: bool = False


_passes: weakref.WeakKeyDictionary[Any, dict[Hashable, Passes]] = weakref.WeakKeyDictionary()
"""By an object that lives as long as the region, such as a module, and by what else the region depends on."""


def begin_pass(
    owner: Any, key: Hashable, title: Callable[[], str], may_verify: bool = True
) -> tuple[Passes, Verification | None]:
    """Begins a pass through a region; its verification observes and compares tensors, and is None if it is not verified.

    Args:
        owner: a module or another object that lives as long as the region.
        key: what else the region depends on, such as the training modes of modules.
        title: returns a description of the region, for errors.
        may_verify: False for a region whose recomputation may differ by design.
    """
    passes = _passes.setdefault(owner, {}).setdefault(key, Passes())
    passes.begun += 1
    if isinstance(_when, int):
        due = (passes.begun - 1) % _when == 0
    else:
        due = _when == "always" or (_when == "first" and not passes.verified)
    return passes, Verification(title, passes) if due and may_verify else None


# ---------------------------------------------------------------------------------------- what


@dataclass(frozen=True, eq=False)
class Observation:
    """Facts of a tensor at one time, by which it can be compared later.

    Attributes:
        facts: shape, dtype and device.
        strides: strides of its elements.
        bits: the fingerprint; None for a tensor without values.
        sample: at most 64 elements; None for a tensor without values.
        module: the innermost module whose code was running when the tensor was saved, if known.
        only_sample: whether the fingerprint is that of the sample.
    """

    facts: tuple[torch.Size, torch.dtype, torch.device]
    strides: tuple[int, ...]
    bits: Tensor | None
    sample: Tensor | None
    module: nn.Module | None
    only_sample: bool

    def __str__(self) -> str:
        shape, dtype, _ = self.facts
        return f"{str(dtype).removeprefix('torch.')} {list(shape)}"

    @property
    def where(self) -> str:
        """The module that has computed the tensor, in words."""
        return "in" if self.module is None else f"in {type(self.module).__name__},"


def observe_all(
    tensors: Iterable[tuple[Tensor, nn.Module | None, Observation | None]],
) -> list[Observation]:
    """The observations of some tensors.

    Args:
        tensors: each tensor with the module that has computed it and with the observation that it will be compared with.

    A parameter is compared by its sample only, as an optimizer changes all of its elements.
    """
    # Nothing here waits for a GPU: fingerprints and samples are tensors on the device of what they are taken of. aside() hides the
    # kernels from modes that count operations and from autograd.
    observed: list[tuple[Any, ...]] = []
    rows: list[Tensor] = []
    with aside():
        for tensor, module, like in tensors:
            facts = (tensor.shape, tensor.dtype, tensor.device)
            if not _has_values(tensor):
                observed.append((facts, (), None, None, module, False))
                continue
            is_parameter = type(tensor) is nn.Parameter or type(tensor._base) is nn.Parameter
            only_sample = is_parameter if like is None else like.only_sample
            tensor = tensor.detach()
            strides = () if tensor.layout is not torch.strided else tensor.stride()
            if like is not None and like.facts == facts and like.strides:
                tensor = in_layout(tensor, like.strides)
            row = _row(tensor)
            few = _sample(row)
            observed.append((facts, strides, len(rows), few, module, only_sample))
            rows.append(few if only_sample else row if strides else tensor)
        bits = fingerprints(rows)
    return [
        Observation(facts, strides, None if index is None else bits[index], *rest)
        for facts, strides, index, *rest in observed
    ]


def _has_values(tensor: Tensor) -> bool:
    """Whether the elements can be read. Wrapper subclasses and parameters that are split over the ranks have none."""
    if is_absent(tensor) or tensor.device.type == "meta":
        return False
    if tensor.layout is not torch.strided:
        return tensor.layout in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)
    try:
        storage = tensor.untyped_storage()
        size = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride())) + 1
        end = (int(tensor.storage_offset()) + (size if tensor.numel() else 0)) * tensor.element_size()
        return identity_of(storage) not in absent_storages and storage.nbytes() >= end
    except RuntimeError:  # a wrapper has no storage that can be asked for
        return False


def _row(tensor: Tensor) -> Tensor:
    """The elements of a tensor in the order in which they lie in memory, each once; a view if the tensor is contiguous."""
    if tensor.layout is not torch.strided:
        return (tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()).reshape(-1)
    if tensor.is_contiguous():
        return tensor.view(-1)
    tensor = distinct(tensor)
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).contiguous().view(-1)


def _sample(row: Tensor) -> Tensor:
    return row[:: max(1, -(-row.numel() // _SAMPLE))].clone()


def sample(tensor: Tensor) -> Tensor:
    """A copy of at most 64 elements of a tensor; empty for a tensor that has no values, is sparse or is not contiguous."""
    if tensor.layout is not torch.strided or not _has_values(tensor) or not tensor.is_contiguous():
        return torch.empty(0, dtype=torch.uint8)
    return _sample(tensor.view(-1))


class _Thread(threading.local):
    modules: list[nn.Module] | None = None  # those that are running; None outside of naming_modules()


_thread = _Thread()


@contextlib.contextmanager
def naming_modules() -> Iterator[None]:
    """A context in which :func:`running_module` knows the modules that this thread calls."""
    if _thread.modules is not None:
        yield
        return
    _thread.modules = []
    # Of all modules, for the time of a verified first pass, which is rare.
    handles = [
        register_module_forward_pre_hook(_begins),
        register_module_forward_hook(_ends, always_call=True),
    ]
    try:
        yield
    finally:
        _thread.modules = None
        for handle in handles:
            handle.remove()


def _begins(module: nn.Module, args: Any) -> None:
    if not torch.compiler.is_compiling() and _thread.modules is not None:
        _thread.modules.append(module)


def _ends(module: nn.Module, args: Any, result: Any) -> None:
    if not torch.compiler.is_compiling() and _thread.modules and _thread.modules[-1] is module:
        _thread.modules.pop()


def running_module() -> nn.Module | None:
    """The innermost module that runs on this thread, within :func:`naming_modules`."""
    return _thread.modules[-1] if _thread.modules else None


@dataclass(eq=False)
class Verification:
    """Comparison of the recomputations of one pass with its first pass.

    Attributes:
        forward: number of the first pass, for :func:`hand_over`.
    """

    _title: Callable[[], str]
    _passes: Passes
    # Whether the first pass is over: a recomputation in the middle of it proves nothing about the rest.
    is_over: bool = True
    _pairs: list[tuple[Observation, Observation, str]] = field(default_factory=list)
    forward: int = field(default_factory=begin_forward)

    def compare(self, tensors: Iterable[tuple[Observation, Tensor]], what: str) -> None:
        """Notes tensors for the comparison with their observations, which is read at the end of the backward pass that is running.

        A difference is an error then, or, if the gradients are reduced, on every rank in the synchronization that follows.

        Args:
            what: the kind of tensor in words, such as "an output".
        """
        pairs = list(tensors)
        observed = observe_all((tensor, None, first) for first, tensor in pairs)
        is_begun = bool(self._pairs)
        self._pairs.extend((first, again, what) for (first, _), again in zip(pairs, observed))
        if self._pairs and not is_begun:
            _finish_later(self)

    def differences(self) -> list[str]:
        """Descriptions of tensors that differ by more than a rounding; warns of roundings."""
        # The only place that waits for a GPU: once for each device, for the mask of all its fingerprints. Elements are compared
        # only where the mask is set.
        pairs, self._pairs = self._pairs, []
        by_device: dict[Any, list[tuple[Observation, Observation, str]]] = {}
        mismatches: list[str] = []
        roundings: list[str] = []
        for first, again, what in pairs:
            if first.facts != again.facts:
                mismatches.append(f"{first.where} {what} was {first} and is {again}")
            elif first.bits is not None and again.bits is not None and not _is_workspace(first):
                by_device.setdefault(first.bits.device, []).append((first, again, what))
        for same_device in by_device.values():
            ours = torch.stack([first.bits for first, _, _ in same_device if first.bits is not None])
            theirs = torch.stack([again.bits for _, again, _ in same_device if again.bits is not None])
            for index in (ours != theirs).nonzero().flatten().tolist():
                first, again, what = same_device[index]
                difference, is_rounding = _difference(first, again)
                text = f"{first.where} {what} ({first}) {difference}"
                (roundings if is_rounding else mismatches).append(text)
        if roundings:
            warnings.warn(
                f"Recomputing {self._title()} rounds in another way than its first pass: {_listed(roundings)}. If kernels that are "
                "not deterministic are the reason, torch.use_deterministic_algorithms(True) (hvd-ckpt train --deterministic) "
                "chooses others.",
                stacklevel=2,
            )
        # One right pass is enough for "first". A wrong one leaves the region unverified, so that the next
        # pass is observed too.
        self._passes.verified = self._passes.verified or (self.is_over and not mismatches)
        return mismatches

    def error(self, differences: list[str]) -> RecomputationMismatch:
        """The error that names some differences."""
        return RecomputationMismatch(
            f"Recomputing {self._title()} gave other values than its first pass, so its gradients would be wrong: "
            f"{_listed(differences)}. It depends on something that changes between the two and is not restored, such as a Python "
            "number or a generator that no module holds: change it only if not hc.is_recomputing(), make a generator an "
            "attribute of a module, or run it within hc.without_recomputation()."
        )


def _listed(texts: list[str]) -> str:
    more = len(texts) - _SHOWN
    return "; ".join(texts[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")


def _is_workspace(observation: Observation) -> bool:
    """Whether a tensor is likely the workspace of a kernel: bytes for that kernel alone, some of which may never be written."""
    shape, dtype, _ = observation.facts
    return dtype is torch.uint8 and len(shape) == 1


def _difference(first: Observation, again: Observation) -> tuple[str, bool]:
    """A description of how much two tensors differ, and whether a rounding may be the reason."""
    assert first.sample is not None and again.sample is not None
    dtype, device = first.facts[1:]
    strict = torch.are_deterministic_algorithms_enabled() or not (dtype.is_floating_point or dtype.is_complex)
    # A rounding may explain a difference of floating point numbers, relative to the largest sampled element: sums in another order
    # differ by their terms, not by their result. Equal samples with different fingerprints mean few different elements, which
    # nondeterministic kernels of a GPU (atomic additions) leave.
    ours, theirs = first.sample.cpu(), again.sample.cpu()
    different = int((ours != theirs).sum())
    if not different:
        return "differs in few elements", not strict and device.type != "cpu"
    if strict and not dtype.is_floating_point:
        return f"differs in {different} of {ours.numel()} sampled elements", False
    ours, theirs = (
        sample.to(torch.complex128 if dtype.is_complex else torch.float64) for sample in (ours, theirs)
    )
    largest, scale = float((ours - theirs).abs().max()), float(ours.abs().max())
    is_rounding = not strict and largest <= _ROUNDING * torch.finfo(dtype).eps * scale
    return f"differs by up to {largest:.3g} in {different} of {ours.numel()} sampled elements", is_rounding


# ---------------------------------------------------------------------------------------- the end of a backward pass

_open: dict[int, list[Verification]] = {}
_lock = threading.Lock()


def _finish_later(verification: Verification) -> None:
    """Reads the comparisons at the end of the backward pass that is running, or at once outside of a backward pass."""
    # One callback for each backward pass. The engine runs it after the last node and before backward() returns, so backward()
    # raises its errors. A nested backward pass has a number and a callback of its own.
    task = current_graph_task_id()
    if task == -1:
        _finish([verification])
        return
    # Tensors are unpacked on autograd's threads, one for each device, in one backward pass.
    with _lock:
        is_first = task not in _open
        _open.setdefault(task, []).append(verification)
    if is_first:
        execution_engine.queue_callback(lambda: _finish(_open.pop(task, [])))


def _finish(verifications: list[Verification]) -> None:
    for verification in reversed(verifications):  # in the order of the forward pass, usually
        differences = verification.differences()
        if differences:
            error = verification.error(differences)
            if not hand_over(error, verification.forward):
                raise error
