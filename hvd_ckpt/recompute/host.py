"""Saved tensors in host memory: copied to the host during the forward pass, and back when the backward pass reaches their block.

The idea is that of vDNN (Rhu et al., "vDNN: Virtualized deep neural networks for scalable, memory-efficient neural network design",
MICRO 2016). Host memory is pinned, and copies of each direction have a stream of their own. So neither the host nor the computation
waits for them, unless the backward pass needs a tensor that has not arrived yet.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

LEAST_BYTES = 1 << 20  # smaller tensors are not worth a copy

_streams: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}  # to the host, and back


def may_leave(tensor: Tensor) -> bool:
    """Whether a tensor can be kept in host memory and is large enough to be worth it."""
    return tensor.is_cuda and tensor.layout is torch.strided and tensor.nbytes >= LEAST_BYTES


def _streams_of(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _streams[device]


class HostTensors:
    """The tensors of one forward pass of a block in host memory. The first one that is needed brings all of them back."""

    def __init__(self) -> None:
        self._all: list[weakref.ref[HostTensor]] = []

    def take(self, tensor: Tensor) -> HostTensor:
        """Starts the copy of a tensor to host memory. The tensor may be freed at once, and must not be changed."""
        taken = HostTensor(self, tensor)
        self._all.append(weakref.ref(taken))
        return taken

    def bring_back(self) -> None:
        """Starts to copy all of them back, in reverse order, which is the order in which the backward pass needs them."""
        for reference in reversed(self._all):
            tensor = reference()
            if tensor is not None:
                tensor.bring_back()
        # In a second backward pass through the graph nothing is brought ahead: each tensor comes when it is needed.
        self._all.clear()


class HostTensor:
    """A device tensor in host memory."""

    __slots__ = ("__weakref__", "_back", "_copied", "_device", "_host", "_others")

    def __init__(self, others: HostTensors, tensor: Tensor) -> None:
        self._others, self._device = others, tensor.device
        self._back: tuple[Tensor, torch.cuda.Event] | None = None
        to_host, _ = _streams_of(tensor.device)
        # The copy waits for the kernel that computes the tensor. record_stream() below keeps the allocator from reusing its memory
        # before the copy has ended.
        to_host.wait_event(torch.cuda.current_stream(tensor.device).record_event())
        with torch.no_grad(), torch.cuda.stream(to_host):
            self._host = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, pin_memory=True
            )
            self._host.copy_(tensor.detach(), non_blocking=True)
            self._copied = to_host.record_event()
        tensor.record_stream(to_host)

    def bring_back(self) -> None:
        """Starts to copy the tensor back."""
        if self._back is not None:
            return
        _, from_host = _streams_of(self._device)
        from_host.wait_event(self._copied)
        with torch.no_grad(), torch.cuda.stream(from_host):
            host = self._host
            tensor = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=self._device)
            tensor.copy_(host, non_blocking=True)
            self._back = tensor, from_host.record_event()

    def get(self) -> Tensor:
        """The tensor, which the current stream may use."""
        self._others.bring_back()
        self.bring_back()
        # The tensor is handed out once. A second backward pass through the graph copies it again.
        assert self._back is not None
        (tensor, ready), self._back = self._back, None
        current = torch.cuda.current_stream(self._device)
        current.wait_event(ready)
        # Its memory is that of the stream which has copied it. Freed, it must not be used there while this
        # stream reads it.
        tensor.record_stream(current)
        return tensor
