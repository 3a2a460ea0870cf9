"""Gradients on their way to the ranks that keep them: packed into flat buffers, sent, and added to this rank's shards."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hvd_ckpt.reduction.communicator import GRADIENTS, POLL_SECONDS
from hvd_ckpt.sharding.exchange import Exchange, Transfer
from hvd_ckpt.sharding.formats import WireFormat
from hvd_ckpt.sharding.layout import Group, Layout
from hvd_ckpt.torch_private import foreach_copy_, foreach_zero_

__all__ = ["Flights", "Packer"]

IN_FLIGHT = 2  # groups; more only while they are small
SMALL_BYTES = 4 << 20
PATIENCE_SECONDS = 30.0


class Packer:
    """Takes the gradients of a group's parameters into a flat buffer.

    Args:
        layout: the parameters, in their memory order.
        prescale: factor of every gradient.
    """

    def __init__(self, layout: Layout, prescale: float) -> None:
        self._layout = layout
        self._prescale = prescale
        self._shapes: list[torch.Size] = []
        self.grow()

    def grow(self) -> None:
        """The layout has grown."""
        layout = self._layout
        self._shapes.extend(parameter.shape for parameter in layout.parameters[len(self._shapes) :])

    def pack(self, group: Group) -> tuple[torch.Tensor, list[int]]:
        """Moves the group's gradients into a new flat buffer of its padded size; missing ones are zero. Each ``grad`` is None then.

        Returns:
            The buffer, and the indices of the parameters that had a gradient.
        """
        parameters = self._layout.parameters
        flat = torch.empty(group.padded, dtype=group.dtype, device=group.device)
        gaps = [flat[group.numel :]]
        targets, sources, used = [], [], []
        for index, offset, numel in zip(group.indices, group.offsets, group.numels):
            gradient = parameters[index].grad
            if gradient is None or not self.fits(index):
                gaps.append(flat[offset : offset + numel])
                continue
            used.append(index)
            if numel:
                targets.append(self._view(index, flat, offset))
                sources.append(gradient.detach() if gradient.layout is torch.strided else gradient.to_dense())
        with torch.no_grad():
            if targets:
                foreach_copy_(targets, sources)
            foreach_zero_(gaps)
            if self._prescale != 1.0:
                flat.mul_(self._prescale)
        for index in group.indices:
            parameters[index].grad = None
        return flat, used

    def views(self, group: Group, flat: torch.Tensor) -> list[torch.Tensor]:
        """The parts of a flat buffer of the group that are its parameters' gradients."""
        return [self._view(index, flat, offset) for index, offset in zip(group.indices, group.offsets)]

    def _view(self, index: int, flat: torch.Tensor, offset: int) -> torch.Tensor:
        return flat.as_strided(self._shapes[index], self._strides(index), offset)

    def fits(self, index: int) -> bool:
        """False if a parameter has got another dtype, device or shape since it was laid out."""
        parameter, group = self._layout.parameters[index], self._layout.group_of[index]
        return (
            parameter.dtype is group.dtype
            and parameter.device == group.device
            and parameter.shape == self._shapes[index]
        )

    def _strides(self, index: int) -> Sequence[int]:
        """The parameter's own if it fills consecutive memory, else those of a contiguous one."""
        shape, strides = self._shapes[index], self._layout.strides[index]
        expected = 1
        for stride, size in sorted(zip(strides, shape)):
            if size != 1 and stride != expected:
                return torch.empty(shape, device="meta").stride()
            expected *= size
        return strides


@dataclass(frozen=True)
class Flight:
    group: Group
    transfer: Transfer
    nbytes: int
    position: int


class Flights:
    """Groups in flight, and this rank's shards of those that have landed.

    Attributes:
        shards: sums so far, by the group's position.
    """

    def __init__(self, exchange: Exchange, format: WireFormat, scale: float) -> None:
        self.shards: dict[int, torch.Tensor] = {}
        self._exchange = exchange
        self._format = format
        self._scale = scale
        self._flying: deque[Flight] = deque()

    def launch(self, group: Group, flat: torch.Tensor, position: int, number: int) -> None:
        """Sends a group's buffer at a position of the sequence, its launch ``number`` in this step."""
        what = f"gradients.{group.position}.{number}"
        transfer = self._exchange.reduce_scatter(flat, what, self._scale, self._format)
        self._flying.append(Flight(group, transfer, flat.nbytes, position))

    def poll(self) -> None:
        """Takes what has arrived."""
        while self._flying and self._flying[0].transfer.done():
            self._land()

    def make_room(self, group: Group, before: float = float("inf"), patience: float | None = None) -> bool:
        """Waits until at most one other group (or only small ones) is in flight.

        Args:
            group: that is to leave.
            before: do not wait for launches from this position of the sequence on.
            patience: seconds; by default as long as it takes.

        Returns:
            False if patience has run out.
        """
        nbytes = group.padded * group.dtype.itemsize
        self.poll()
        while len(self._flying) >= IN_FLIGHT:
            if sum(flight.nbytes for flight in self._flying) + nbytes <= SMALL_BYTES:
                break
            oldest = self._flying[0]
            if oldest.position >= before:
                break
            if patience is not None and not _arrives(oldest.transfer, patience):
                return False
            self._land()
        return True

    def land_all(self) -> None:
        """Waits for everything."""
        while self._flying:
            self._land()

    def _land(self) -> None:
        flight = self._flying.popleft()
        result = flight.transfer.wait(GRADIENTS)
        shard = self.shards.get(flight.group.position)
        if shard is None:
            self.shards[flight.group.position] = result
        else:
            with torch.no_grad():
                shard.add_(result)

    def drop(self) -> None:
        """Forgets everything; what is in flight goes on by itself."""
        for flight in self._flying:
            flight.transfer.forget()
        self._flying.clear()
        self.shards.clear()


def _arrives(transfer: Transfer, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not transfer.done():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True
