"""Requests for plans, ``hc.plan`` and ``hc.largest_batch``: one plan for all ranks, from the cache or from a new planner."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hvd_ckpt.planning.budget import Budget, BudgetError, Given, parse_budget
from hvd_ckpt.planning.cache import cached, key_of
from hvd_ckpt.planning.inputs import tensors_of
from hvd_ckpt.planning.plan import Plan
from hvd_ckpt.planning.planner import Layout, Planner, free_failed_step
from hvd_ckpt.planning.step import Sample, as_outside, device_of, surrounding_autocast
from hvd_ckpt.utils.memory import free_memory
from hvd_ckpt.utils.text import check_instance, one_line, show_bytes, talking

_SILENT_SECONDS = 10.0  # before progress is printed, by default


def plan(
    model: nn.Module,
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    budget: Given = None,
    blocks: Sequence[str] | None = None,
    autocast: torch.dtype | None = None,
    chunk_head: bool = True,
    verbose: bool | None = None,
    layout: Layout | None = None,
    cache: str | os.PathLike[str] | None = None,
) -> Plan:
    """Chooses for each block of ``model`` what its forward pass keeps, so that a training step fits ``budget`` and loses least
    time.

    With a ``layout``, the plan also cuts a chain into pipeline stages. The longest stage takes the least possible time, and each
    stage fits ``budget`` with its own number of micro-batches in flight. The sample is then *one micro-batch*, and the plan is for
    ``hc.Pipeline(model, plan=plan)``. Such a plan is predicted from blocks that are measured on one process, so one process can
    make it.

    Args:
        model: a module in training mode, on its device, with a chain of blocks in an ``nn.Sequential`` or ``nn.ModuleList``.
        args, kwargs: a sample batch: the step is ``loss(model(*args, **kwargs)).backward()``.
        loss: takes the output of the model and returns one number. By default, it is the output if that is one number, else its
            ``loss`` attribute, else the sum of its tensors.
        budget: limit of the peak of a step above its start, where the gradients of the parameters exist already. It is given as
            bytes, or as text: ``"6GiB"``; ``"0.3x"`` of the peak without recomputation; ``"80%"`` of the device's memory.
            ``"min"`` is the smallest peak that does not double the time, and None means the fastest plan at any memory.
        blocks: names of the modules that are the blocks (``"encoder.layer.*"`` for all children); by default, the planner finds
            them.
        autocast: dtype of :class:`torch.autocast`, if the forward pass will run under it; by default, that of the autocast that
            surrounds this call, if any.
        chunk_head: whether the cross entropy of a language model's head may be computed in chunks of rows (as by
            :func:`hvd_ckpt.chunked_cross_entropy`). Results are then equal up to float32 rounding. With False, they keep their
            bits. With a ``layout``, the head is never computed in chunks.
        verbose: whether to print progress on standard error of rank 0; None to print it once planning has taken 10 seconds.
        layout: pipeline stages, as a :class:`hvd_ckpt.StageLayout`. The model must be a chain of this library or an
            ``nn.Sequential``, and its children are the blocks. The budget then covers all memory of a stage: parameters, gradients
            and optimizer state, activations, and gradients that are sent between stages. ``"0.3x"`` is a share of the memory of
            the largest stage without recomputation. ``"min"`` is the smallest budget that does not double the time of the longest
            stage.
        cache: a folder for plans. A plan in it is returned without a measurement if nothing has changed. Compared are model (code,
            settings, shapes), shapes of the sample, loss, options, device, threads and versions. ``"80%"`` is always measured.

    Planning runs training steps of the model and restores parameters, buffers, gradients and random state. It can be called before
    or after an optimizer is wrapped. All ranks must call it: rank 0 plans with the smallest budget of all ranks.

    Returns:
        The measured plan, which is not applied yet: call ``plan.apply(model)``.

    Raises:
        ValueError: the model has no blocks, or is on ``meta`` or on another device than the sample. Or the budget is invalid, or
            the loss is not a single number. Or ``layout`` is set for a model that is not a chain or has too few blocks.
        TypeError: ``model`` is not a module.
        BudgetError: no plan fits the budget, or the batch does not fit the device with any plan. The message has the smallest peak
            and the block that sets it, and the error has the plan that reaches it.
    """
    from hvd_ckpt.planning.ranks import on_rank_0

    check_instance(model, nn.Module, "model must be a torch.nn.Module")
    device = device_of(model, args)
    autocast = surrounding_autocast(device) if autocast is None else autocast
    sample = Sample(args, kwargs or {}, loss)
    options: dict[str, Any] = {"blocks": blocks, "autocast": autocast, "chunk_head": chunk_head}

    def make(limit: Budget, say: Callable[[str], None]) -> Plan:
        with as_outside(device), _out_of_memory_exceeds_budgets(device), _explained(model, sample):
            parts = {} if layout is None else {"blocks": layout.blocks_of(model), "chunk_head": False}
            planner = Planner(model, *args, kwargs=kwargs, loss=loss, say=say, **{**options, **parts})
            return planner.plan(limit) if layout is None else planner.plan_parts(layout, limit)

    def find(limit: Budget) -> Plan:
        if layout is not None and blocks is not None:
            raise ValueError("blocks: with a layout the blocks are the children of the chain")
        if autocast not in (None, torch.bfloat16, torch.float16):
            raise ValueError(f"autocast must be torch.bfloat16 or torch.float16, not {autocast!r}")
        quiet = contextlib.nullcontext(lambda text: None)
        after = 0.0 if verbose else _SILENT_SECONDS
        with quiet if verbose is False else talking("plan", after) as say:
            if cache is None or limit.kind == "device":  # its bytes depend on the free memory
                return make(limit, say)
            key = key_of(model, (args, kwargs), loss, device, {"budget": limit, "layout": layout, **options})
            return cached(cache, key, model, functools.partial(make, limit, say), say)

    try:
        return on_rank_0(find, budget, device)
    except KeyboardInterrupt:
        # Without the frames of the model and the planner, which say nothing about the reason.
        raise KeyboardInterrupt("interrupted while planning; no plan was made") from None


def largest_batch(
    model: nn.Module,
    make_sample: Callable[[int], Any],
    budget: int | float | str,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    most: int = 65536,
    autocast: torch.dtype | None = None,
) -> tuple[int, Plan]:
    """The largest batch whose step fits ``budget``, and the plan that makes it fit.

    Args:
        make_sample: takes a batch size and returns the model's arguments, a tensor or a tuple of tensors.
        budget: bytes, text with a unit, or a share of the device, as in :func:`plan`.
        most: the largest batch to try.

    Returns:
        The batch size and the plan.

    Raises:
        ValueError: the budget depends on the batch (``"0.3x"``, ``"min"``, None), or ``most`` is not a number from 1.
        BudgetError: a batch of one does not fit.
    """
    bound = parse_budget(budget)
    if not bound.is_absolute:
        raise ValueError(
            f"largest_batch needs a budget that does not depend on the batch, such as '6GiB' or '80%', got {budget!r}"
        )
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise ValueError(f"most must be a number from 1, not {most!r}")

    def attempt(batch: int) -> Plan:
        sample = make_sample(batch)
        return plan(
            model,
            *(sample if isinstance(sample, tuple) else (sample,)),
            loss=loss,
            budget=bound,
            autocast=autocast,
        )

    best, chosen = 1, attempt(1)
    limit = chosen.budget or 0
    too_large: int | None = None
    # A batch of `best` always fits, and one of `too_large`, once there is one, never does.
    while best < most and (too_large is None or too_large - best > 1):
        if too_large is None:  # the smallest peak grows about linearly with the batch
            guess = min(int(0.98 * limit * best / chosen.smallest.peak_bytes), 4 * best, most)
        else:
            guess = (best + too_large) // 2
        guess = max(guess, best + 1)
        try:
            best, chosen = guess, attempt(guess)
        except BudgetError:
            too_large = guess
    return best, chosen


@contextlib.contextmanager
def _out_of_memory_exceeds_budgets(device: torch.device) -> Iterator[None]:
    """Raises a BudgetError in place of an OutOfMemoryError."""
    try:
        yield
        return
    except torch.OutOfMemoryError:
        pass
    # Behind the except clause: while it runs, the traceback holds the frames of the failed step, and so their tensors.
    free_failed_step()
    free = free_memory(device)
    raise BudgetError(
        f"No budget is enough for this batch: planning has run out of memory with {show_bytes(free)} free on {device}. Give a "
        "smaller batch.",
        free,
    )


@contextlib.contextmanager
def _explained(model: nn.Module, sample: Sample) -> Iterator[None]:
    """Raises a ValueError in place of an error of a model that has no values, is on other devices than the sample, or was given all
    arguments in one container."""
    try:
        yield
    except (AttributeError, TypeError) as error:
        args = sample.args
        if len(args) != 1 or not isinstance(args[0], (tuple, list, dict)):
            raise
        raise ValueError(
            f"the model was given one {type(args[0]).__name__} as its argument, and failed: give its arguments as in a call of it, "
            f"hc.plan(model, x, y) or hc.plan(model, kwargs=...) ({one_line(str(error))})"
        ) from error
    except RuntimeError as error:
        places = sorted({str(tensor.device) for tensor in (*model.parameters(), *model.buffers())})
        given = sorted({str(tensor.device) for tensor in tensors_of(sample[:2])})
        if "meta" in (*places, *given):
            what = "need values, which the device 'meta' has not"
            way = "build them on the device on which they will run"
        elif places and given and not set(places) & set(given):
            what = f"are on different devices, the model on {', '.join(places)} and the sample on {', '.join(given)}"
            way = "move one to the device of the other"
        else:
            raise
        raise ValueError(f"model and sample {what}: {way} ({one_line(str(error))})") from None
