"""Float32 copies of half-precision weights, in the shards only: small updates are not lost to rounding.

Micikevicius et al., "Mixed Precision Training" (2018).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from hvd_ckpt.sharding.layout import Group, Span

__all__ = ["Masters"]

HALF = (torch.float16, torch.bfloat16)


class Masters:
    """The master weights of one rank's shards.

    Args:
        wanted: whether half-precision groups get any.
        empty: makes the memory for them, of a number of elements and a dtype.
        release: lets a tensor of it leave memory until it is used again.
    """

    def __init__(
        self,
        wanted: bool,
        empty: Callable[[int, torch.dtype, torch.device], torch.Tensor],
        release: Callable[[torch.Tensor], None],
    ) -> None:
        self._wanted = wanted
        self._empty = empty
        self._release = release
        self.by_group: dict[int, torch.Tensor] = {}

    def add(self, groups: Iterable[Group], shards: Sequence[torch.Tensor]) -> None:
        """Makes those of groups that are new."""
        for group in groups:
            if self._wanted and group.dtype in HALF:
                master = self._empty(group.shard_numel, torch.float32, group.device)
                self.by_group[group.position] = master.copy_(shards[group.position])
                self._release(master)

    def part(self, group: Group, span: Span) -> torch.Tensor | None:
        """The master weights of one span, or None."""
        master = self.by_group.get(group.position)
        return None if master is None else master[span.offset : span.offset + span.numel]

    def follow(self, shards: Sequence[torch.Tensor]) -> None:
        """Where a weight is not what its master rounds to, somebody has set it: the master becomes that."""
        for position, master in self.by_group.items():
            shard = shards[position]
            same = master.to(shard.dtype) == shard
            if not bool(same.all()):
                master.copy_(torch.where(same, master, shard.to(torch.float32)))
            self._release(master)

    def round_into(self, shards: Sequence[torch.Tensor]) -> None:
        """Makes the weights what their masters round to."""
        for position, master in self.by_group.items():
            shards[position].copy_(master)
            self._release(master)
