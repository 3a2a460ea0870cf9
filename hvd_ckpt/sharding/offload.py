"""Optimizer state that is not in the way: in memory-mapped files, or in pinned memory beside a CUDA device.

As in ZeRO-Offload (Ren et al., 2021), with the update where the weights are. The optimizer steps one chunk of the elements after
the other. What it steps is a stand-in: a parameter that is a view of a part of a piece, with views of its gradient and state; so
each element goes through the wrapped optimizer's own arithmetic, and the numbers are those of a step without offload.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hvd_ckpt.sharding.elementwise import StepFacts, probe
from hvd_ckpt.sharding.host_memory import (
    HostMemory,
    MappedFiles,
    OffloadError,
    PinnedMemory,
    raised_everywhere,
)
from hvd_ckpt.sharding.layout import ALIGNMENT

__all__ = ["CHUNK_ELEMENTS", "OffloadError", "OptimizerOffload", "raised_everywhere"]

CHUNK_ELEMENTS = 1 << 24
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


@dataclass
class _Part:
    """Elements ``start`` to ``stop`` of a piece, and what the optimizer steps in their place."""

    group: int
    piece: torch.Tensor
    start: int
    stop: int
    stand_in: torch.nn.Parameter = field(init=False)

    @property
    def is_last(self) -> bool:
        return self.stop == self.piece.numel()

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.detach()[self.start : self.stop]


class OptimizerOffload:
    """Keeps the state of an optimizer elsewhere and steps it chunk by chunk.

    Args:
        folder: on a CPU: where the files are; by default the temporary folder.
        device: of the parameters. On CUDA devices state is in pinned memory.
        chunk_elements: elements that are stepped at a time; at least :data:`.layout.ALIGNMENT`.
    """

    def __init__(
        self, folder: Path | None, device: torch.device, chunk_elements: int = CHUNK_ELEMENTS
    ) -> None:
        self._device = device
        self._memory: HostMemory = PinnedMemory() if device.type == "cuda" else MappedFiles(folder)
        self._chunk_elements = max(chunk_elements, ALIGNMENT)
        self._homes: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        self._facts: dict[Any, StepFacts] = {}

    @property
    def bytes(self) -> int:
        """The offloaded state."""
        return self._memory.nbytes

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
        """Memory for weights that are used in the step alone. On CUDA devices these stay on the device.

        Raises:
            OffloadError: there is no room for it.
        """
        if self._device.type == "cuda":
            return torch.empty(numel, dtype=dtype, device=device or self._device)
        return self._memory.allocate([(numel, dtype)])[0]

    def release(self, tensor: torch.Tensor) -> None:
        """A tensor of :meth:`empty` has been used and may leave memory; its values stay."""
        self._memory.release(tensor)

    def reserve(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes the room that the state of all trained parameters will need, and changes nothing else.

        Args:
            optimizer: its parameters are 1-D.

        Raises:
            OffloadError: there is too little.
            ValueError: the optimizer keeps what a step changes outside its state, so it cannot be stepped in chunks.
        """
        pieces = [
            (number, piece)
            for number, group in enumerate(optimizer.param_groups)
            for piece in group["params"]
        ]
        homes = {piece: self._homes.get(piece, {}) for _, piece in pieces}
        missing = [
            (piece, name, dtype)
            for number, piece in pieces
            for name, dtype in self._wanted(optimizer, number, piece).items()
            if name not in homes[piece]
            or homes[piece][name].dtype is not dtype
            or not self._memory.owns(homes[piece][name])
        ]
        found = self._memory.allocate([(piece.numel(), dtype) for piece, _, dtype in missing])
        for (piece, name, _), home in zip(missing, found):
            homes[piece][name] = home
        self._homes = homes

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Moves state that exists, after loading say, to where it belongs.

        Raises:
            OffloadError, ValueError: as :meth:`reserve`.
        """
        self.reserve(optimizer)
        for piece, homes in self._homes.items():
            state = optimizer.state.get(piece, {})
            for name, home in homes.items():
                value = state.get(name)
                if value is not None and value is not home:
                    self._move(value, home)
                    state[name] = home

    def _move(self, value: torch.Tensor, home: torch.Tensor) -> None:
        for start in range(0, home.numel(), self._chunk_elements):
            part = home[start : start + self._chunk_elements]
            part.copy_(value[start : start + self._chunk_elements])
            self._memory.release(part)

    def step(self, optimizer: torch.optim.Optimizer, local_step: Callable[[], Any]) -> None:
        """One step, chunk by chunk.

        Args:
            optimizer: its parameters are 1-D, with their gradients.
            local_step: steps the optimizer over what is in its ``param_groups``; no closure. The optimizer's own step hooks
                run once, around all chunks.

        Raises:
            OffloadError, ValueError: as :meth:`reserve`; nothing has changed, and the step can be taken again.
        """
        self.adopt(optimizer)
        with _hooks_once(optimizer):
            chunks = self._chunks(optimizer)
            if self._device.type == "cuda":
                self._step_on_device(optimizer, local_step, chunks)
                return
            for chunk, following in zip(chunks, [*chunks[1:], []]):
                for tensor in self._used_by(following):
                    self._memory.prefetch(tensor)
                with _stand_ins(optimizer, chunk, self._load(optimizer, chunk)):
                    local_step()
                    self._store(optimizer, chunk)
                for tensor in self._used_by(chunk):
                    self._memory.release(tensor)

    # -------------------------------------------------------------------------------- what state there is

    def _wanted(
        self, optimizer: torch.optim.Optimizer, number: int, piece: torch.Tensor
    ) -> dict[str, torch.dtype]:
        """The state of one piece that has an element for each of its: names and dtypes."""
        if piece.dim() != 1:
            raise ValueError(
                f"only state of 1-D parameters can be offloaded, not of one of shape {tuple(piece.shape)}"
            )
        wanted = {}
        if piece.requires_grad or piece.grad is not None:
            facts = self._facts_of(optimizer, number, piece.dtype)
            if facts.mutates_groups:
                kind = getattr(optimizer, "_wrapped_class", type(optimizer)).__name__
                raise ValueError(
                    f"the state of optimizer {kind} cannot be offloaded: its step changes values in param_groups or attributes, so "
                    f"it cannot be taken in chunks; leave offload at None"
                )
            wanted.update(facts.state_keys)
        for name, value in optimizer.state.get(piece, {}).items():
            if isinstance(value, torch.Tensor) and value.shape == piece.shape:
                wanted[name] = value.dtype
        return wanted

    def _facts_of(self, optimizer: torch.optim.Optimizer, number: int, dtype: torch.dtype) -> StepFacts:
        """Looked up by what the state's structure depends on: options, and which numbers are 0."""
        options = {
            name: bool(value) if isinstance(value, (int, float)) or value is None else None
            for name, value in optimizer.param_groups[number].items()
        }
        key = (number, dtype, tuple(options.items()))
        if key not in self._facts:
            self._facts[key] = probe(optimizer, number, dtype)
        return self._facts[key]

    # -------------------------------------------------------------------------------- chunks

    def _chunks(self, optimizer: torch.optim.Optimizer) -> list[list[_Part]]:
        """All elements that have a gradient, in order, in lists of at most ``chunk_elements``."""
        chunks: list[list[_Part]] = [[]]
        room = self._chunk_elements
        for number, group in enumerate(optimizer.param_groups):
            for piece in group["params"]:
                start = stop = 0
                while piece.grad is not None and stop < piece.numel():
                    rest = piece.numel() - start
                    stop = start + (rest if rest <= room else room // ALIGNMENT * ALIGNMENT)
                    if stop > start:
                        chunks[-1].append(_Part(number, piece, start, stop))
                    room -= stop - start
                    start = stop
                    if stop < piece.numel():
                        chunks.append([])
                        room = self._chunk_elements
        return chunks

    def _used_by(self, chunk: Sequence[_Part]) -> Iterator[torch.Tensor]:
        """The tensors of a chunk that can be in mapped memory: its state, and weights of :meth:`empty`."""
        for part in chunk:
            yield part.of(part.piece)
            yield from map(part.of, self._homes[part.piece].values())

    def _load(self, optimizer: torch.optim.Optimizer, chunk: Sequence[_Part]) -> list[dict[str, Any]]:
        """Makes the stand-ins of a chunk; returns their states: views of the pieces' (on CUDA copies), scalars copied."""
        states = []
        for part in chunk:
            assert part.piece.grad is not None
            part.stand_in = torch.nn.Parameter(part.of(part.piece), part.piece.requires_grad)
            part.stand_in.grad = part.of(part.piece.grad)
            homes = self._homes[part.piece]
            states.append(
                {
                    name: part.of(homes[name]).to(self._device, non_blocking=True)
                    if name in homes and value is homes[name]
                    else copy.deepcopy(value)
                    for name, value in optimizer.state.get(part.piece, {}).items()
                }
            )
        return states

    def _store(self, optimizer: torch.optim.Optimizer, chunk: Sequence[_Part]) -> None:
        """Writes the state of stand-ins to where it belongs: what the optimizer has made, replaced, or updated on the device."""
        for part in chunk:
            stepped = optimizer.state.get(part.stand_in, {})
            homes = self._homes[part.piece]
            whole: dict[str, Any] = {}
            for name, value in stepped.items():
                if not isinstance(value, torch.Tensor) or value.shape != part.stand_in.shape:
                    whole[name] = value
                    continue
                home = homes.get(name)
                if (
                    home is None or home.dtype is not value.dtype
                ):  # not foreseen: in files from the next step on
                    home = homes[name] = torch.empty(part.piece.shape, dtype=value.dtype)
                target = whole[name] = home
                if part.of(target).data_ptr() != value.data_ptr():
                    part.of(target).copy_(value, non_blocking=True)
            if part.is_last and stepped:
                optimizer.state[part.piece] = whole

    # -------------------------------------------------------------------------------- CUDA

    def _step_on_device(
        self,
        optimizer: torch.optim.Optimizer,
        local_step: Callable[[], Any],
        chunks: Sequence[Sequence[_Part]],
    ) -> None:
        """State is copied to the device before a chunk is stepped, and back after it, on a stream beside the one that steps: while
        one chunk is stepped, the next arrives and the last leaves."""
        current = torch.cuda.current_stream(self._device)
        beside: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        beside.wait_stream(current)
        with torch.cuda.stream(beside):
            states = self._load(optimizer, chunks[0])
            arrived = beside.record_event()
        for position, chunk in enumerate(chunks):
            current.wait_event(arrived)
            now, following = states, chunks[position + 1 : position + 2]
            for next_chunk in following:
                with torch.cuda.stream(beside):
                    states = self._load(optimizer, next_chunk)
                    arrived = beside.record_event()
            _used_on(current, now)
            with _stand_ins(optimizer, chunk, now):
                local_step()
                stepped = current.record_event()
                with torch.cuda.stream(beside):
                    beside.wait_event(stepped)
                    _used_on(beside, [optimizer.state.get(part.stand_in, {}) for part in chunk])
                    self._store(optimizer, chunk)
        beside.synchronize()


@contextmanager
def _stand_ins(
    optimizer: torch.optim.Optimizer, chunk: Sequence[_Part], states: Sequence[dict[str, Any]]
) -> Iterator[None]:
    """Within it the optimizer has the stand-ins of a chunk and nothing else to step."""
    groups = optimizer.param_groups
    pieces = [group["params"] for group in groups]
    try:
        for number, group in enumerate(groups):
            group["params"] = [part.stand_in for part in chunk if part.group == number]
        optimizer.param_groups = [group for group in groups if group["params"]] or groups
        for part, state in zip(chunk, states):
            if state:
                optimizer.state[part.stand_in] = state
        yield
    finally:
        optimizer.param_groups = groups
        for group, own in zip(groups, pieces):
            group["params"] = own
        for part in chunk:
            optimizer.state.pop(part.stand_in, None)


@contextmanager
def _hooks_once(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Runs the optimizer's own step hooks around it, and not within."""
    before, after = (getattr(optimizer, name) for name in _HOOKS)
    for hook in list(before.values()):
        hook(optimizer, (optimizer,), {})
    try:
        for name in _HOOKS:
            setattr(optimizer, name, OrderedDict())
        yield
    finally:
        for name, hooks in zip(_HOOKS, (before, after)):
            setattr(optimizer, name, hooks)
    for hook in list(after.values()):
        hook(optimizer, (optimizer,), {})


def _used_on(stream: Any, states: Sequence[dict[str, Any]]) -> None:
    """The memory of these tensors is not given to others before the stream has done with it."""
    for state in states:
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.is_cuda:
                value.record_stream(stream)
