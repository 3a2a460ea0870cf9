"""Watch of the tensors that autograd saves while a region runs; hands them on once they have their values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from hvd_ckpt.recompute.keeper import bytes_of
from hvd_ckpt.recompute.verify import running_module, sample
from hvd_ckpt.utils.fingerprint import fingerprint
from hvd_ckpt.utils.frames import aside
from hvd_ckpt.utils.torch_private import disable_dynamo, sequence_number

# Some operations save a tensor before their kernel fills it (the noise of nn.RReLU, the statistics of a batch norm). So a tensor is
# handed on only when this many more have been saved.
_RECENT = 8
# Limits of the tensors that wait. Tensors are handed on together, which is faster.
_MANY, _BYTES = 64, 1 << 20


class Watch:
    """Watches one run of a region.

    Args:
        note: called with saved tensors, each with the module that has computed it (in a first pass; else None).
        is_first: whether the run is a first pass.
    """

    def __init__(self, note: Callable[[list[tuple[Tensor, nn.Module | None]]], None], is_first: bool) -> None:
        self._note, self._is_first = note, is_first
        self._recent: list[tuple[Tensor, nn.Module | None]] = []
        self._bytes = 0  # of the recent ones
        self._operation = -1
        # The tensors without gradients that the last operation has saved (noise, statistics, masks), and samples of them from the
        # time when it saved its latest tensor. In the end they tell whether the operation has filled them afterwards.
        self._last: list[Tensor] = []
        self._samples: list[Tensor] = []

    @disable_dynamo
    def pack(self, pack: Callable[[Tensor], Any], tensor: Tensor) -> Any:
        """Watches a tensor that autograd saves, and calls the hook in use."""
        if self._is_first:
            self._sample_last(tensor)
        self._recent.append((tensor, running_module() if self._is_first else None))
        self._bytes += bytes_of(tensor)
        if len(self._recent) > _MANY or (self._bytes > _BYTES and len(self._recent) > _RECENT):
            self.hand_on(but=_RECENT)
        return pack(tensor)

    def _sample_last(self, tensor: Tensor) -> None:
        operation = sequence_number()
        if operation != self._operation:
            self._operation = operation
            self._last = []
        if not tensor.requires_grad:
            self._last.append(tensor.detach())
        if self._last:
            with aside():
                self._samples = [sample(saved) for saved in self._last]

    def hand_on(self, but: int = 0) -> None:
        """Hands on the tensors that wait, ``but`` for some of the last."""
        count = len(self._recent) - but
        self._note(self._recent[:count])
        del self._recent[:count]
        self._bytes = sum(bytes_of(tensor) for tensor, _ in self._recent)

    def filled_late(self) -> list[Tensor]:
        """For each tensor of the last operation: a 0-d bool that tells whether it was filled after all of them were saved."""
        with aside():
            pairs = [(sample(tensor), before) for tensor, before in zip(self._last, self._samples)]
            return [
                fingerprint(now) != fingerprint(before) for now, before in pairs if len(now) == len(before)
            ]
