"""Copies of tensors in main memory, made while training goes on, in memory that is used over and over.

The memory is kept from one snapshot to the next: getting fresh pages from the system costs more than the copying. A copy lies in
memory as its tensor does, so that copying is one pass from end to end.

From a CUDA device copies go into pinned memory. Those that must be done before training goes on are put into its stream, which
changes nothing before they are through; the others go through a stream of their own, beside training.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hvd_ckpt.json_file import Wrong
from hvd_ckpt.torch_private import foreach_copy_

__all__ = ["Copying", "Staging"]

ALIGNMENT = 64  # bytes


class Staging:
    """Memory for the copies of one snapshot."""

    def __init__(self) -> None:
        self._layout: list[Any] = []
        self._copies: list[Tensor] = []

    def copies_of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """For each tensor one on the CPU that can take its content; those of the call before are lost.

        Raises:
            Wrong: there is no memory for them.
        """
        layout = [(one.dtype, one.shape, one.stride(), one.is_cuda) for one in tensors]
        if layout != self._layout:
            self.free()
            self._copies = self._laid_out(tensors)
            self._layout = layout
        return self._copies

    def free(self) -> None:
        """Gives the memory back, once no copy is used any more."""
        self._layout, self._copies = [], []

    def _laid_out(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        starts, size = [], 0
        for tensor in tensors:
            starts.append(size)
            size += -(-tensor.numel() * tensor.dtype.itemsize // ALIGNMENT) * ALIGNMENT
        try:
            pinned = any(tensor.is_cuda for tensor in tensors)
            with torch.inference_mode(False):
                memory = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        except RuntimeError as error:
            reason = str(error).splitlines()[0][:200]
            raise Wrong(
                f"there is no memory for a copy of {size >> 20} MiB of state ({reason}): let snapshots be blocking"
            ) from None
        return [_place(tensor, memory, start) for tensor, start in zip(tensors, starts)]


def _place(tensor: Tensor, memory: Tensor, start: int) -> Tensor:
    """Where the copy of a tensor is: in the order of its own memory if that has no gaps."""
    size = tensor.numel() * tensor.dtype.itemsize
    flat = memory[start : start + size].view(tensor.dtype)
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dimension: -strides[dimension])
    if tensor.is_contiguous() or not tensor.permute(order).is_contiguous():
        return flat.view(tensor.shape)
    return flat.view([tensor.shape[dimension] for dimension in order]).permute(
        [order.index(dimension) for dimension in range(tensor.dim())]
    )


class Copying:
    """Copies under way: some are made at once, the others by a thread while their tensors stay as they are.

    Args:
        now: tensors that may change when this returns, each with its copy.
        later: tensors that stay as they are until :meth:`run` has returned, each with its copy.
    """

    def __init__(self, now: Sequence[tuple[Tensor, Tensor]], later: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._later = list(later)
        _copy(now)
        devices = {source.device for source, _ in (*now, *later) if source.is_cuda}
        self._ready = {device: torch.cuda.current_stream(device).record_event() for device in devices}

    def run(self) -> None:
        """Copies, and forgets the tensors; all copies are there when this returns."""
        later, self._later = self._later, []
        streams = [torch.cuda.Stream(device) for device in self._ready]  # type: ignore[no-untyped-call]
        for stream, ready in zip(streams, self._ready.values()):
            stream.wait_event(ready)
            with torch.cuda.stream(stream):
                _copy([pair for pair in later if pair[0].device == stream.device])
        _copy([pair for pair in later if not pair[0].is_cuda])
        for stream in streams:
            stream.synchronize()


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copies, in one call, which leaves Python to other threads; from a CUDA device in its current stream, without waiting."""
    if pairs:
        with torch.no_grad():
            foreach_copy_([copy for _, copy in pairs], [source for source, _ in pairs], non_blocking=True)
