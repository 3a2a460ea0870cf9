"""The parameters of one unit (sharded, in flight, or whole), and the tensors that autograd has saved of them.

A parameter is the same object all the time. While its unit is gathered, its data is a view into the unit's flat tensor. In
between, the flat tensor's storage has no bytes, the data is one nan that is expanded to the shape, and the parameter's
class makes reading it an error. A parameter that autograd has saved, or a view of it such as ``weight.t()``, refers to that
same storage, and is valid again once the storage is filled. PyTorch's FSDP frees memory in this way.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hvd_ckpt.collectives.asynchronous import Work
from hvd_ckpt.collectives.exchange import Exchange
from hvd_ckpt.collectives.formats import FP32, WireFormat
from hvd_ckpt.offload.shards import Offload
from hvd_ckpt.processes.watchdog import waiting
from hvd_ckpt.sharding.divergence import Divergence
from hvd_ckpt.sharding.layout import Group, Layout
from hvd_ckpt.sharding.module_hooks import UnitCall
from hvd_ckpt.utils.fingerprint import fingerprints
from hvd_ckpt.utils.torch_private import identity_of
from hvd_ckpt.utils.unmaterialized import absent_class, absent_storages


# What a unit has in each state, and what leads out of it. ``whole`` is its flat tensor, a parameter the same object throughout.
#
#   state        storage of whole    parameter.data     class of a parameter        next
#   SHARDED      0 bytes             nan, expanded      absent: reading raises      unshard()
#   UNSHARDING   filling             nan, expanded      absent                      wait_for_unshard(), or reshard()
#   WHOLE        all ranks' values   views of whole     watched, or its own class   reshard()
#                                                       where gathered exactly
class _State(enum.Enum):
    SHARDED = "sharded"
    UNSHARDING = "unsharding"
    WHOLE = "whole"


_DATA: Any = torch.Tensor.data
_ALIAS = "_data_of_hvd_ckpt"


class _Watched:
    """Mixin of a parameter's class while it is whole for a pass: writes by way of ``data`` leave a trace."""

    @property
    def data(self) -> Any:
        # ``data`` has a version counter of its own, so the first one is kept, and later ones share its counter.
        alias = _DATA.__get__(self)
        first = vars(self).setdefault(_ALIAS, alias)
        return first.detach() if first.data_ptr() == alias.data_ptr() else alias

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        _DATA.__set__(self, value)


@functools.cache
def _watched_class(kind: type[torch.Tensor]) -> type[torch.Tensor]:
    """The class that a parameter of class ``kind`` has while it is whole for a pass."""
    made: Any = type(kind)
    watched: type[torch.Tensor] = made(kind.__name__, (_Watched, kind), {})
    return watched


@dataclass(frozen=True)
class Gathering:
    """Options for gathering the units of a model, and their common objects.

    Attributes:
        exchange: the ranks. Where its groups of ranks have shards of their own (hpZ of ZeRO++, Wang et al., 2023), all but the
            first gather after a change are within the group.
        offload: has the memory of the shards; None for memory of the parameters' device.
    """

    layout: Layout
    exchange: Exchange
    format: WireFormat = FP32
    offload: Offload | None = None


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
        within = exchange.within
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
        for span in group.spans(exchange.rank):
            index = span.parameter
            span.of(self.shard).copy_(
                layout.specs[index].flatten(layout.parameters[index])[span.start : span.stop]
            )
        # The shards have their values now. Parameters keep memory of their own until ShardedUnit.split() makes them placeholders:
        # one element for what reads as nan everywhere.
        inexact = group.dtype.is_floating_point or group.dtype.is_complex
        nothing = torch.full((), float("nan") if inexact else 0, dtype=group.dtype, device=group.device)
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


class ShardedUnit:
    """A unit: its parameters, and the passes that need them (which :mod:`.passes` notes).

    Args:
        gathering: how its shards are gathered.
        groups: those of the unit; its parameters still have their values, until :meth:`split`.
        modules: how many run, one after the other.
        title: names its modules, in messages.
        divergence: hears what this rank waits for.

    Attributes:
        flats: its groups.
        begun: for each call of its modules that has begun and not ended, the number of autograd's next node then.
        call: in which its modules run now.
        in_backward: calls whose backward pass has begun and not ended.
        lasting: its memory is needed beyond its backward pass (that pass is differentiated itself).
        awaited: it stays whole for a backward pass that is to come.
        written: fingerprints of parameters that were written within ``gathered_parameters()`` since the last synchronization, by
            index; all ranks must have written the same, since each keeps its own part.
        error: of a write in a forward or backward pass, whose values are gone with the unit's memory.
    """

    def __init__(
        self, gathering: Gathering, groups: Sequence[Group], modules: int, title: str, divergence: Divergence
    ) -> None:
        self._layout, self._exchange = gathering.layout, gathering.exchange
        self._format, self._offload = gathering.format, gathering.offload
        self.modules, self._title, self._divergence = modules, title, divergence
        self.begun: list[int] = []
        self.call: UnitCall | None = None
        self.in_backward: set[UnitCall] = set()
        self.lasting = self.awaited = False
        self.written: dict[int, int] = {}
        self.error: RuntimeError | None = None
        # Of the parameters since they are whole; empty once it is known what was written, or after an error.
        self._versions: list[int] = []
        self._prints: list[int] = []  # of their values, while these are watched
        self._awaited = (
            f"the parameters of {title} (stage 3 splits them: all ranks must run the model, or enter "
            "optimizer.gathered_parameters(), inside which one rank may run it alone)"
        )
        self.flats = [GroupMemory(self._layout, group, self._exchange, self._offload) for group in groups]
        self._identities = {flat.identity for flat in self.flats}
        self._absences = {flat.absence for flat in self.flats}
        self._members = [member for flat in self.flats for member in flat.members]
        self._bring: Callable[[], None] = lambda: None
        # Another storage may get the identity of one that is gone, so no entry may outlast
        # the unit. The sets are updated in place.
        weakref.finalize(self, _forget, self._identities)
        weakref.finalize(self, _forget, self._absences)
        self._in_flight: list[Work] = []
        self._exact = False
        # Until split() the parameters have memory of their own, and are whole without anything being gathered.
        self._state = _State.WHOLE

    def split(self) -> None:
        """Makes the parameters placeholders, of which this rank has its shards."""
        self.reshard()
        self._release_shards()

    @property
    def whole(self) -> bool:
        return self._state is _State.WHOLE or not self.flats

    @property
    def sharded(self) -> bool:
        return self._state is _State.SHARDED and bool(self.flats)

    @property
    def unsharding(self) -> bool:
        return self._state is _State.UNSHARDING

    def unshard(self, exactly: bool = False) -> None:
        """Begins to gather, with ``exactly`` what the shards hold, whatever the format. Collective."""
        assert self._state is _State.SHARDED
        self._state = _State.UNSHARDING
        with waiting(self._awaited):  # another rank may have gone before this one begins
            for flat in self.flats:
                flat.allocate()
                exchange, shard, format = self._exchange, flat.shard, FP32 if exactly else self._format
                if not exactly and flat.source is not shard:
                    # The secondary copy has what was gathered before, rounded where the format rounds: it travels as it is.
                    assert exchange.within is not None
                    exchange, shard, format = exchange.within, flat.source, FP32
                if shard.device != flat.whole.device:  # is offloaded: copied from pinned memory to its place
                    # By ``data``, which has a version counter of its own: what graphs have saved of the parameters stays valid.
                    place = flat.whole.data[exchange.rank * shard.numel() :][: shard.numel()]
                    shard = place.copy_(shard, non_blocking=True)
                self._in_flight.append(exchange.all_gather(shard, flat.whole, flat.what, format))
        self._exact = exactly

    def prefetch(self) -> None:
        """The unit is gathered soon: shards that are offloaded are read."""
        if self._offload is not None:
            for flat in self.flats:
                self._offload.prefetch(flat.source)

    def _release_shards(self) -> None:
        if self._offload is not None:
            for flat in self.flats:
                self._offload.release(flat.shard)
                if flat.secondary is not None:
                    self._offload.release(flat.secondary)

    def wait_for_unshard(self) -> None:
        """Waits for what was launched; the parameters are whole then.

        Raises:
            RuntimeError: a parameter has another dtype, device or shape by now.
        """
        self._arrive()
        try:
            self.check()
        except RuntimeError:
            self.reshard()
            raise
        # After check(), which knows by the state what a parameter's data must be: its placeholder until here.
        self._state = _State.WHOLE
        self._keep_secondary()
        # Versions are noted last: they count what a pass writes from here on.
        self._present([member.whole for member in self._members], watched=not self._exact)
        self._versions = [member.parameter._version for member in self._members]

    def watch_values(self) -> None:
        """From here on writes to the whole parameters are found by their values: those through ``p.data`` leave no other trace."""
        self._prints = [int(value) for value in fingerprints([member.whole for member in self._members])]

    def find_written(self) -> None:
        """Notes what a pass has written to the parameters, as an error: their memory is given back after it."""
        if self._exact:
            return
        for member, version in zip(self._members, self._versions):
            alias = vars(member.parameter).get(_ALIAS)
            by_data = alias is not None and alias._version
            if member.parameter._version == version and not by_data and self.holds(member.parameter):
                continue
            self._versions = []
            self.check()
            self.error = self.error or RuntimeError(
                f"parameter '{self._layout.names[member.number]}' was written in a forward or backward pass (as "
                "nn.Embedding(max_norm=...) does, or a clamp in forward()), and it is split over the ranks (stage 3), so that "
                "what is written there would be lost; write it between steps, inside 'with optimizer.gathered_parameters():' on "
                "all ranks, or use shard=2"
            )
            return

    def _keep_secondary(self) -> None:
        """Copies this rank's part of what was gathered, for the next gathers within its group."""
        within = self._exchange.within
        if within is None or self._exact:
            return
        for flat in self.flats:
            if not flat.current:
                assert flat.secondary is not None
                flat.secondary.copy_(flat.whole.view(within.ranks, -1)[within.rank], non_blocking=True)
                flat.current = True
        self._release_shards()

    def shards_changed(self, groups: Collection[Group]) -> None:
        """Marks earlier gathers of these groups as outdated, and forgets what was written to them before."""
        changed = {group.position for group in groups}
        for flat in self.flats:
            if flat.group.position in changed:
                flat.current = False
                for index in flat.group.indices:
                    self.written.pop(index, None)

    def _present(self, values: Iterable[torch.Tensor], watched: bool) -> None:
        for member, value in zip(self._members, values):
            member.parameter.data = value
            member.parameter.__class__ = _watched_class(member.kind) if watched else member.kind
        # Reading is right now, so that a replay must not gather the unit because of these storages.
        _forget(self._identities | self._absences)

    @contextlib.contextmanager
    def lent(self, values: Sequence[torch.Tensor]) -> Iterator[None]:
        """A context in which the parameters, which are sharded, have these values, to be read: those of :meth:`copied`."""
        assert self._state is _State.SHARDED
        self._present(values, watched=False)
        try:
            yield
        finally:
            self.make_absent()
            self.on_missing(self._bring)

    def copied(self) -> list[torch.Tensor]:
        """Copies of the whole values, on the CPU."""
        assert self.whole
        return [member.whole.to("cpu", copy=True) for member in self._members]

    def on_missing(self, bring: Callable[[], None]) -> None:
        """Sets what is called when a recomputation is about to read parameters that are sharded."""
        # A replay may be given the parameter, whose data is the placeholder, or a view of ``whole`` that autograd saved.
        self._bring = bring
        for identity in self._identities | self._absences:
            absent_storages[identity] = bring

    def _arrive(self) -> None:
        assert self._state is _State.UNSHARDING
        with self._divergence.awaiting(self._title):
            for work in self._in_flight:
                work.wait(self._awaited)
        self._in_flight.clear()
        self._release_shards()

    def reshard(self) -> None:
        """Gives the memory back; what is on its way is waited for first, since it is written there."""
        if self._state is _State.UNSHARDING:
            self._arrive()
        else:
            self.find_written()
        self._versions = []
        self._state = _State.SHARDED
        self.make_absent()
        for flat in self.flats:
            flat.release()
        self._identities.update(flat.identity for flat in self.flats)
        self.on_missing(self._bring)

    def make_absent(self) -> None:
        """Makes the parameters placeholders, whatever they are now."""
        for member in self._members:
            vars(member.parameter).pop(_ALIAS, None)
            member.parameter.data = member.placeholder
            member.parameter.__class__ = absent_class(member.kind)

    def write_back(self) -> None:
        """Copies this rank's part of the whole parameters, which are exact, into the shards.

        Raises:
            RuntimeError: a parameter has another dtype, device or shape by now.
        """
        assert self.whole
        self.check()
        with torch.no_grad():
            for member in self._members:
                if not self.holds(member.parameter):  # somebody has given it data of its own
                    member.whole.copy_(member.parameter)
                    member.parameter.data = member.whole
            for flat in self.flats:
                # Into pinned memory, where shards are offloaded; watch_values() waits for it below.
                flat.shard.copy_(flat.group.shard_of(flat.whole, self._exchange.rank), non_blocking=True)
                flat.current = False
        self._release_shards()
        before = self._prints
        self.watch_values()
        for member, old, new in zip(self._members, before, self._prints):
            if new != old:
                self.written[member.number] = new

    def materialize(self) -> None:
        """Makes the whole values the parameters' own."""
        assert self.whole
        for member in self._members:
            member.parameter.data = member.whole.clone()
        for flat in self.flats:
            flat.release()
        self._members = []
        self.flats = []

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in the memory that :meth:`reshard` gives back."""
        return tensor.layout is torch.strided and identity_of(tensor.untyped_storage()) in self._identities

    def check(self) -> None:
        """Raises RuntimeError if a parameter was given another dtype, device or shape, or data while it was sharded."""
        for index, parameter, *_ in self._members:
            if not self._layout.fits(index):
                raise RuntimeError(self._layout.changed(index))
            if (
                self._state is not _State.WHOLE
                and identity_of(parameter.untyped_storage()) not in self._absences
            ):
                raise RuntimeError(
                    f"parameter '{self._layout.names[index]}' was given data outside optimizer.gathered_parameters(), where only "
                    "a part of it is on this rank; assign inside it"
                )


def _forget(identities: Iterable[int]) -> None:
    for identity in identities:
        absent_storages.pop(identity, None)
