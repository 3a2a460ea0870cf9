"""Gradients in flight: packed into flat buffers, sent to the ranks that keep them, and added to this rank's shards."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hvd_ckpt.collectives.asynchronous import GRADIENTS, Work
from hvd_ckpt.collectives.exchange import Exchange
from hvd_ckpt.collectives.formats import WireFormat, sum_dtype
from hvd_ckpt.offload.shards import Offload
from hvd_ckpt.sharding.layout import Group, Layout
from hvd_ckpt.utils.spans import span
from hvd_ckpt.utils.torch_private import foreach_copy_, foreach_zero_
from hvd_ckpt.utils.waits import pauses

IN_FLIGHT = 2  # groups; more only while they are small
SMALL_BYTES = 4 << 20
PATIENCE_SECONDS = 30.0


def flat_gradients(
    layout: Layout, group: Group, gradients: Sequence[torch.Tensor | None], prescale: float
) -> tuple[torch.Tensor, list[int]]:
    """Copies a group's gradients, times ``prescale``, into a new flat buffer; missing ones are zero.

    Returns:
        The buffer, of the group's padded size, and the indices of the parameters that had a gradient.
    """
    # Zeroed only where no gradient is copied: padding and missing gradients, which count as zeros in the sum.
    flat = torch.empty(group.padded, dtype=group.dtype, device=group.device)
    gaps = [flat[start:stop] for start, stop in group.gaps()]
    targets, sources, used = [], [], []
    for index, gradient, view in zip(group.indices, gradients, layout.views(group, flat)):
        if gradient is None or not layout.fits(index):
            gaps.append(view)
            continue
        used.append(index)
        if gradient.numel():
            targets.append(view)
            sources.append(gradient.detach() if gradient.layout is torch.strided else gradient.to_dense())
    with torch.no_grad():
        if targets:
            foreach_copy_(targets, sources)
        if gaps:
            foreach_zero_(gaps)
        if prescale != 1.0:
            flat.mul_(prescale)
    return flat, used


@dataclass(frozen=True)
class _Launch:
    group: Group
    work: Work
    nbytes: int
    position: int


class InFlight:
    """The reduce-scatters in flight, and this rank's shards of those that have arrived.

    Args:
        scale: scale of the sums over the ranks.
        offload: has the memory of the shards, if that is not the parameters' own.
        groups: have that memory from the start, if they are trained.
        adds: what arrives of a group once more is added, and does not take the place of the first.

    Attributes:
        shards: sums so far, by the group's position.

    Raises:
        OffloadError: there is no room.
    """

    def __init__(
        self,
        exchange: Exchange,
        format: WireFormat,
        scale: float,
        offload: Offload | None,
        groups: Sequence[Group],
        adds: bool = True,
    ) -> None:
        self._adds = adds
        self.shards: dict[int, torch.Tensor] = {}
        self._offload = offload
        self._room: dict[int, torch.Tensor] = {}
        if offload is not None:
            for group in groups:
                if group.requires_grad:
                    self._room[group.position] = offload.empty(group.shard_numel, sum_dtype(group.dtype))
        self._exchange = exchange
        self._format = format
        self._scale = scale
        self._launches: deque[_Launch] = deque()
        self._copied: Any = None  # on a CUDA device: the end of the copies to that memory so far

    def launch(self, group: Group, flat: torch.Tensor, position: int, number: int) -> None:
        """Sends a group's buffer at a position of the schedule, its launch ``number`` in this step."""
        what = f"gradients.{group.position}.{number}"
        with span(None, f"send gradients of group {group.position}"):
            work = self._exchange.reduce_scatter(flat, what, self._scale, self._format)
        self._launches.append(_Launch(group, work, flat.nbytes, position))

    def poll(self) -> None:
        """Takes what has arrived, and sends what follows on it."""
        for launch in self._launches:
            launch.work.advance(block=False)
        while self._launches and self._launches[0].work.done():
            self._wait()

    def make_room(self, group: Group, before: float = float("inf"), patience: float | None = None) -> bool:
        """Waits until at most one other group (or only small ones) is in flight.

        Args:
            group: that is to leave.
            before: do not wait for launches from this position of the schedule on.
            patience: seconds; by default as long as it takes.

        Returns:
            False if patience has run out.
        """
        nbytes = group.padded_bytes
        self.poll()
        while len(self._launches) >= IN_FLIGHT:
            if sum(launch.nbytes for launch in self._launches) + nbytes <= SMALL_BYTES:
                break
            oldest = self._launches[0]
            # Beyond ``before`` another rank may not launch in this backward pass at all: waiting for it would never end.
            if oldest.position >= before:
                break
            if patience is not None and not _arrives(oldest.work, patience):
                return False
            self._wait()
        return True

    def discard(self, group: Group, index: int) -> None:
        """Leaves out what has arrived of a parameter's gradient."""
        for part in group.spans(self._exchange.rank) if group.position in self.shards else ():
            if part.parameter == index:
                part.of(self.shards[group.position]).zero_()

    def wait_all(self) -> None:
        """Waits for everything; the host may read shards then."""
        for launch in self._launches:  # what follows on one need not wait for the end of the one before
            launch.work.advance(block=True, awaited=GRADIENTS)
        while self._launches:
            self._wait()
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None

    def _wait(self) -> None:
        # Always the oldest first, whichever arrives first: a group's rounds are added in their order on every run.
        launch = self._launches.popleft()
        result = launch.work.wait(GRADIENTS)
        position = launch.group.position
        with torch.no_grad():
            if position in self.shards and self._adds:
                self.shards[position].add_(result.to(self.shards[position].device))
            # Offloaded: a copy that the device still makes. wait_all() waits for its event before the host reads the shard.
            elif position in self._room:
                self.shards[position] = self._room[position].copy_(result, non_blocking=True)
                if result.is_cuda:
                    self._copied = torch.cuda.current_stream(result.device).record_event()
            else:
                self.shards[position] = result
        self._release(position)

    def _release(self, position: int) -> None:
        if position in self._room:
            assert self._offload is not None
            self._offload.release(self._room[position])

    def clear(self) -> None:
        """Forgets what has arrived."""
        for position in self.shards:
            self._release(position)
        self.shards.clear()

    def drop(self) -> None:
        """Forgets everything; what is in flight completes by itself."""
        for launch in self._launches:
            launch.work.forget()
        self._launches.clear()
        self.clear()


def _arrives(work: Work, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    for _ in pauses():
        if work.done() or time.monotonic() > deadline:
            break
    return work.done()
