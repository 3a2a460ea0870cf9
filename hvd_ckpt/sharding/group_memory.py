"""One group of a unit at stage 3: this rank's shard, and a flat tensor that has memory while the unit is gathered."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hvd_ckpt.sharding.exchange import Exchange
from hvd_ckpt.sharding.layout import Group, Layout
from hvd_ckpt.sharding.offload import Offload
from hvd_ckpt.utils.torch_private import identity_of


class Member(NamedTuple):
    """A parameter, by its number in the layout, its data in both states, and its class while it is whole."""

    number: int
    parameter: torch.Tensor
    whole: torch.Tensor
    placeholder: torch.Tensor
    kind: type[torch.Tensor]


class GroupMemory:
    """One group of the unit.

    Attributes:
        shard: this rank's exact values, 1-D.
        secondary: with ``within``, this rank's part of the copy that its group of ranks keeps of what was gathered last, 1-D.
        current: whether ``secondary`` is up to date.
        identity, absence: identities of the storages of ``whole`` and of the placeholders.
        whole: all ranks' values, 1-D; without memory while the unit is sharded.
    """

    def __init__(self, layout: Layout, group: Group, exchange: Exchange, offload: Offload | None) -> None:
        self.group = group
        rank, within = exchange.rank, exchange.within
        self.what = f"gather.{group.position}"

        def memory(numel: int) -> torch.Tensor:
            if offload is not None:
                return offload.empty(numel, group.dtype)
            return torch.zeros(numel, dtype=group.dtype, device=group.device)

        self.shard = memory(group.shard_numel)
        self.secondary = None if within is None else memory(group.padded // within.ranks)
        self.current = False
        self.whole = torch.empty(group.padded, dtype=group.dtype, device=group.device)
        self._storage = self.whole.untyped_storage()
        self.identity = identity_of(self._storage)
        self._nbytes = self.whole.nbytes
        for span in group.spans(rank):
            index = span.parameter
            span.of(self.shard).copy_(
                layout.specs[index].flatten(layout.parameters[index])[span.start : span.stop]
            )
        # The shards have their values now. Parameters keep memory of their own until
        # UnitParameters.split() makes them placeholders.
        nothing = _nothing(group)
        self.absence = identity_of(nothing.untyped_storage())
        self.members = []
        for index, whole in zip(group.indices, layout.views(group, self.whole)):
            parameter = layout.parameters[index]
            self.members.append(Member(index, parameter, whole, nothing.expand(whole.shape), type(parameter)))
        # The views are made by now, and need no memory of their own: they read what is gathered into the storage later.
        self.release()

    @property
    def source(self) -> torch.Tensor:
        """The tensor that is gathered, unless exact values are needed."""
        return self.secondary if self.current and self.secondary is not None else self.shard

    def allocate(self) -> None:
        self._storage.resize_(self._nbytes)

    def release(self) -> None:
        """Gives the memory back, or leaves it to a numpy array that shares it, and has another storage from then on."""
        # PyTorch cannot resize a storage whose memory numpy shares. The old one lives
        # on for the array; views move to a new one.
        if not self._storage.resizable():
            self._storage = torch.empty_like(self.whole).untyped_storage()
            self.identity = identity_of(self._storage)
            for view in (self.whole, *(member.whole for member in self.members)):
                view.set_(self._storage, view.storage_offset(), view.shape, view.stride())
        self._storage.resize_(0)


def _nothing(group: Group) -> torch.Tensor:
    """One element for what reads as nan everywhere."""
    inexact = group.dtype.is_floating_point or group.dtype.is_complex
    return torch.full((), float("nan") if inexact else 0, dtype=group.dtype, device=group.device)
