"""Ways to train a model, and comparison of their bits with those of plain PyTorch."""

from __future__ import annotations

import dataclasses
import functools
import linecache
import math
import random
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from same import whole_weights
from torch import Tensor, nn

import hvd_ckpt as hc

STEPS = 2
ROUNDING = 1e-5
"""A difference up to this part of a tensor's norm is one of rounding."""
LIBRARY = str(Path(hc.__file__).parent)
Prepare = Callable[[nn.Module, dict[str, Any]], str | None]
"""What is done to a model before it is trained with a sample; returns a note."""
Outcome = dict[str, Tensor | None]
"""What is compared: losses, gradients and buffers of all steps, and the random state behind them."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model to be trained.

    Attributes:
        make: makes the model, with the same weights each time.
        sample: makes the keyword arguments of its forward pass, with the same values each time.
    """

    name: str
    make: Callable[[], nn.Module]
    sample: Callable[[], dict[str, Any]]


class Differs(Exception):
    """A result that is silently wrong."""


def seed(number: int) -> None:
    """Seeds all generators."""
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number)


def random_state() -> dict[str, Tensor]:
    """The state of all generators, as tensors."""
    _, keys, position, *_ = numpy.random.get_state()
    return {
        "random state of torch": torch.get_rng_state(),
        "random state of numpy": torch.tensor([*map(int, keys), position]),
        "random state of Python": torch.tensor(random.getstate()[1]),
    }


def tensors_of(value: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """The floating point tensors of an output that need a gradient; caches, attentions and hidden states left out."""
    seen = set() if seen is None else seen
    inner: list[Any] = []
    if isinstance(value, Tensor):
        if value.requires_grad and value.is_floating_point() and id(value) not in seen:
            seen.add(id(value))
            yield value
    elif isinstance(value, dict):
        left_out = ("past_key_values", "hidden_states", "attentions")
        inner = [part for key, part in value.items() if key not in left_out]
    elif isinstance(value, (list, tuple)):
        inner = list(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        inner = [getattr(value, field.name) for field in dataclasses.fields(value)]
    for part in inner:
        yield from tensors_of(part, seen)


def loss_of(output: Any) -> Tensor:
    """The output's loss, or a sum of its tensors in which no element weighs what its neighbour does."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor) and loss.requires_grad and loss.numel() == 1:
        return loss
    parts = [
        (tensor * torch.cos(torch.arange(tensor.numel(), dtype=tensor.dtype)).view(tensor.shape)).mean()
        for tensor in tensors_of(output)
        if tensor.numel()
    ]
    return torch.stack([part.float() for part in parts]).sum()


def train(
    subject: Subject, prepare: Prepare = lambda model, sample: None, shard: str = ""
) -> tuple[Outcome, str]:
    """Trains for a few steps and returns what came out, with the note.

    Args:
        shard: of a job's parameters; each rank has its own random numbers and order of the batch.
    """
    rank = hc.rank() if shard else 0

    def sample() -> dict[str, Any]:
        return {
            name: value.flip(0) if rank % 2 and isinstance(value, Tensor) and value.dim() else value
            for name, value in subject.sample().items()
        }

    seed(1)
    model = subject.make().train()
    with torch.no_grad():
        model(**subject.sample())  # some models choose their attention now, or make parts of themselves
    seed(2 + rank)
    before, given = random_state(), sample()
    note = prepare(model, given) or ""
    for what, now, wanted in (("the ", random_state(), before), ("the sample ", given, sample())):
        for name, value in wanted.items():
            if isinstance(value, Tensor) and not same_bits(value, now[name]):
                raise Differs(f"planning changed {what}{name}")
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    if shard:
        optimizer = hc.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), shard=shard, model=model
        )
    seed(2 + rank)
    values: Outcome = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model(**sample()))
        loss.backward()
        values[f"loss {step}"] = loss.detach().clone()
        if not shard:
            gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
            values |= {f"gradient {step} of {name}": copied(gradient) for name, gradient in gradients.items()}
        optimizer.step()
        if shard:
            weights = whole_weights(model, optimizer)
            values |= {f"weight {step} of {name}": weight for name, weight in weights.items()}
    values |= {f"buffer {name}": copied(buffer) for name, buffer in model.named_buffers()}
    return {**values, **random_state()}, note


def copied(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether shapes, dtypes and bits are equal (not a number is equal to itself)."""
    if one.shape != other.shape or one.dtype != other.dtype or one.layout != other.layout:
        return False
    if one.is_sparse:
        one, other = one.to_dense(), other.to_dense()
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor.reshape(-1)


def compare(outcome: Outcome, plain: Outcome) -> tuple[str, str]:
    """``equal``, ``rounding`` or ``wrong``, and the first value that differs with its relative difference.

    A gradient that is all but zero (of a bias before a batch norm) is compared with the largest one. Behind a rounding in the first
    step, the second is that of other weights, and only its random state is compared.
    """
    if outcome.keys() != plain.keys():
        return "wrong", f"other values: {sorted(outcome.keys() ^ plain.keys())[:3]}"
    first = [value for name, value in plain.items() if " 0" in name and value is not None]
    scale = max((value.double().norm().item() for value in first if not value.is_sparse), default=0.0)
    detail, count = "", 0
    for name, value in outcome.items():
        wanted = plain[name]
        if value is None or wanted is None:
            if value is wanted:
                continue
            there = "missing" if value is None else "there, where plain PyTorch has None"
            return "wrong", f"{name} is {there}"
        if same_bits(value, wanted):
            continue
        if "random state" in name or not value.is_floating_point() or value.shape != wanted.shape:
            return "wrong", f"{name} differs"
        size = wanted.double().norm().item()
        difference = (value.double() - wanted.double()).norm().item()
        relative = difference / size if size else difference
        small = relative <= ROUNDING or difference <= ROUNDING * scale
        found = f"{name} differs by {relative:.1e} of its norm"
        if not small and (count == 0 or " 0" in name or not math.isfinite(relative)):
            return "wrong", found
        count += 1
        detail = detail or found
    if not count:
        return "equal", ""
    return "rounding", f"{detail} ({count} of {len(plain)} values differ)"


def planned(budget: str, chunk_head: bool = False) -> Prepare:
    """Applies a plan for the budget, or where none stays within it the one that comes nearest."""

    def prepare(model: nn.Module, sample: dict[str, Any]) -> str:
        try:
            plan = hc.plan(
                model, kwargs=sample, loss=loss_of, budget=budget, chunk_head=chunk_head, verbose=False
            )
        except hc.BudgetError as error:
            if error.nearest is None:
                raise
            plan = error.nearest
        plan.apply(model)
        changed = sum(block.policy.title != "keep" for block in plan.blocks)
        segments = sum(isinstance(item, tuple) for item in plan.items)
        return f"{changed} of {len(plan.blocks)} blocks, {segments} segments"

    return prepare


def in_segments(use_reentrant: bool) -> Prepare:
    """Recomputes each block of the outermost lists, and the outermost sequences in two segments."""

    def wrap(module: nn.Module) -> int:
        count = 0
        in_list = isinstance(module, (nn.ModuleList, nn.Sequential))
        for name, child in list(module.named_children()):
            if type(child) is nn.Sequential and len(child) > 1 and not isinstance(module, nn.ModuleList):
                setattr(module, name, hc.CheckpointSequential(child, 2, use_reentrant=use_reentrant))
                count += 1
            elif in_list and not isinstance(child, (nn.ModuleList, nn.ModuleDict)):
                child.forward = functools.partial(hc.checkpoint, child.forward, use_reentrant=use_reentrant)
                count += 1
            else:
                count += wrap(child)
        return count

    return lambda model, sample: f"{wrap(model)} regions"


MODES: dict[str, Prepare] = {
    "min": planned("min"),
    "half": planned("0.5x"),
    "chunks": planned("min", chunk_head=True),
    "segments": in_segments(False),
    "reentrant": in_segments(True),
}


def classify(error: BaseException) -> tuple[str, str]:
    """``refused`` where the library says so in a sentence of its own, else ``error``; and the last line."""
    text = f"{type(error).__name__}: {str(error).strip()[:300]}".replace("\n", " ")
    if isinstance(error, Differs):
        return "wrong", str(error)
    if isinstance(error, MemoryError) or "can't allocate memory" in text:
        return "memory", text
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1]
    inside = [frame for frame in frames if frame.filename.startswith(LIBRARY)]
    place = inside[-1] if inside else last
    said = linecache.getline(last.filename, last.lineno or 0).strip()
    own = last in inside and said.startswith("raise ")
    own &= isinstance(error, (ValueError, RuntimeError, TypeError))
    own |= type(error).__module__.startswith("hvd_ckpt")
    where = f"{place.filename.removeprefix(f'{LIBRARY}/')}:{place.lineno}"
    return "refused" if own else "error", f"{text} [{where}]"
