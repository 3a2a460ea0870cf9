"""Weights of stages 1 and 2: whole parameters on every rank, each a view into the flat tensor of its group, into which gathers
write.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence

import torch

from hvd_ckpt.collectives.asynchronous import Work
from hvd_ckpt.collectives.exchange import Exchange
from hvd_ckpt.collectives.formats import WireFormat
from hvd_ckpt.sharding.in_flight import IN_FLIGHT
from hvd_ckpt.sharding.layout import Group, Layout
from hvd_ckpt.utils.unmaterialized import is_split

SPREAD = 65_537
WEIGHTS = "the weights that the other ranks have updated (each must call optimizer.step())"


class FlatParameters:
    """The weights of stages 1 and 2; see :class:`.parameters.ShardedParameters` for those of stage 3.

    Args:
        layout: the parameters; each is given a place in its group's flat tensor, with its value.
        format: communication format of the weights. A lossy one makes the ranks' weights differ from the exact ones in the shards.

    Attributes:
        shards: by group: this rank's exact values, 1-D; a view into the flat tensor unless the format is lossy.
    """

    def __init__(self, layout: Layout, exchange: Exchange, format: WireFormat) -> None:
        self._layout, self._exchange, self._format = layout, exchange, format
        self._flats: list[torch.Tensor] = []
        # Of each group's parameters that have elements: indices, where they begin, and how many.
        self._places: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._views: dict[int, torch.Tensor] = {}  # of each parameter
        self._versions: dict[int, int] = {}  # of each parameter, when it was last looked at
        self.shards: list[torch.Tensor] = []
        self.add_groups(layout.groups)

    def add_groups(self, groups: Sequence[Group]) -> None:
        """Adds groups that are new in the layout."""
        for group in groups:
            flat = torch.zeros(group.padded, dtype=group.dtype, device=group.device)
            self._flats.append(flat)
            whole = [place for place in zip(group.indices, group.offsets, group.numels) if place[2]]
            columns = torch.tensor(whole, dtype=torch.int64, device=group.device).view(-1, 3).t()
            self._places.append((columns[0], columns[1], columns[2]))
            for index, view in zip(group.indices, self._layout.views(group, flat)):
                self._views[index] = view
                self._place(index)
            own = group.shard_of(flat, self._exchange.rank)
            self.shards.append(own.clone() if self._format.changes(group.dtype) else own)

    @property
    def is_lossy(self) -> bool:
        """Whether the model's weights may differ from the exact ones in the shards."""
        return any(self._format.changes(group.dtype) for group in self._layout.groups)

    def shards_changed(self, groups: Collection[Group] | None = None) -> None:
        """Gathers the shards of these groups, or of all, into the parameters. Collective."""
        wanted = list(self._layout.groups if groups is None else groups)
        in_flight: deque[Work] = deque()
        for group in wanted:
            if len(in_flight) == IN_FLIGHT:  # what arrives lies beside the parameters until it is waited for
                in_flight.popleft().wait(WEIGHTS)
            shard, flat = self.shards[group.position], self._flats[group.position]
            in_flight.append(
                self._exchange.all_gather(shard, flat, f"weights.{group.position}", self._format)
            )
        for work in in_flight:
            work.wait(WEIGHTS)
        # Gathers write past version counters. A graph that has saved the old weights must notice and refuse to go backward.
        torch.autograd.graph.increment_version(self._layout.parameters_of(wanted))
        for group in wanted:
            for index in group.indices:
                self._versions[index] += 1

    def changed_since(self) -> list[torch.Tensor]:
        """The parameters that somebody has written since the last call; writes by way of ``data`` leave no trace."""
        found = []
        for index, parameter in enumerate(self._layout.parameters):
            version = parameter._version
            if version != self._versions[index] or parameter.data_ptr() != self._views[index].data_ptr():
                self._versions[index] = version
                found.append(parameter)
        return found

    def sample(self, number: int, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        """The bits of an element of each parameter, as int64 [parameters]; each number is of other elements."""
        bits = torch.zeros(len(self._layout.parameters) + 1, dtype=torch.int64, device=self._flats[0].device)
        for group, flat, (indices, offsets, numels) in zip(self._layout.groups, self._flats, self._places):
            if len(indices):
                values = flat[offsets + number * SPREAD % numels]
                words = values.view(torch.int16 if group.dtype.itemsize > 1 else torch.int8)
                factors = SPREAD ** torch.arange(len(words) // len(values), device=words.device)
                bits[indices.to(bits.device)] = (words.view(len(values), -1) * factors).sum(1).to(bits.device)
        places = [self._layout.index(parameter) for parameter in parameters]
        return bits[[-1 if place is None else place for place in places]]

    def sync_from_model(self) -> None:
        """Reads what was written to the parameters from outside: values, or other tensors in place of theirs.

        Raises:
            RuntimeError: a parameter has another dtype, device or shape than when it was split.
        """
        for shard, current in zip(self.shards, self.current_shards()):
            if current is not shard:
                shard.copy_(current)

    def current_shards(self) -> Iterator[torch.Tensor]:
        """The shards with what :meth:`sync_from_model` reads, whose errors it raises. Those of lossy formats are copies: the exact
        values stay as they are."""
        for index, parameter in enumerate(self._layout.parameters):
            # Still in its place. What was written there in place is in the shards already, which are views of
            # that memory.
            if parameter.data_ptr() == self._views[index].data_ptr() or not parameter.numel():
                continue
            if is_split(parameter):
                raise RuntimeError(
                    f"parameter '{self._layout.names[index]}' is split over the ranks by another DistributedOptimizer, which "
                    "alone can step it now; step that one, or call unshard() on it"
                )
            if not self._layout.fits(index):
                raise RuntimeError(self._layout.changed(index))
            self._place(index)
        # With a lossy format the model has rounded weights. Where it still has what the exact
        # one rounds to, nobody has written to it.
        for group, flat, exact in zip(self._layout.groups, self._flats, self.shards):
            if self._format.changes(group.dtype):
                own = group.shard_of(flat, self._exchange.rank)
                yield torch.where(own == self._format.rounded(exact), exact, own)
            else:
                yield exact

    def _place(self, index: int) -> None:
        """Moves a parameter to its view."""
        parameter, view = self._layout.parameters[index], self._views[index]
        with torch.no_grad():
            view.copy_(parameter)
            parameter.data = view
        self._versions.setdefault(index, parameter._version)
