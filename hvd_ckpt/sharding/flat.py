"""Whole parameters on every rank (stages 1 and 2): each a view into its group's flat tensor, where gathering writes."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Collection, Iterator, Sequence

import torch

from hvd_ckpt.sharding.exchange import Exchange, Transfer
from hvd_ckpt.sharding.flights import IN_FLIGHT
from hvd_ckpt.sharding.formats import WireFormat
from hvd_ckpt.sharding.layout import Form, Group, Layout
from hvd_ckpt.unmaterialized import is_split

__all__ = ["FlatParameters"]

WEIGHTS = "the weights that the other ranks have updated (each must call optimizer.step())"


class FlatParameters:
    """The weights of stages 1 and 2.

    Args:
        layout: the parameters; each is given a place in its group's flat tensor, with its value.
        exchange: how the ranks' shards are gathered.
        format: in which they travel. A lossy one makes the ranks' weights differ from the exact ones in the shards.

    Attributes:
        shards: by group: this rank's exact values, 1-D; a view into the flat tensor unless the format is lossy.
    """

    def __init__(self, layout: Layout, exchange: Exchange, format: WireFormat) -> None:
        self._layout, self._exchange, self._format = layout, exchange, format
        self._flats: list[torch.Tensor] = []
        self._forms: dict[int, Form] = {}
        self.shards: list[torch.Tensor] = []
        self.add_groups(layout.groups)

    def add_groups(self, groups: Sequence[Group]) -> None:
        """Takes in groups that the layout has got."""
        for group in groups:
            flat = torch.zeros(group.padded, dtype=group.dtype, device=group.device)
            self._flats.append(flat)
            for index, offset in zip(group.indices, group.offsets):
                parameter = self._layout.parameters[index]
                form = self._forms[index] = Form.of(parameter)
                self._place(parameter, flat, offset, form)
            own = self._own(group)
            self.shards.append(own.clone() if self._format.changes(group.dtype) else own)

    def publish(self, groups: Collection[Group] | None = None) -> None:
        """Gathers the shards of these groups, or of all, into the parameters. Collective."""
        wanted = self._layout.groups if groups is None else groups
        flying: deque[Transfer] = deque()
        for group in wanted:
            if len(flying) == IN_FLIGHT:  # what arrives lies beside the parameters until it is waited for
                flying.popleft().wait(WEIGHTS)
            shard, flat = self.shards[group.position], self._flats[group.position]
            flying.append(self._exchange.all_gather(shard, flat, f"weights.{group.position}", self._format))
        while flying:
            flying.popleft().wait(WEIGHTS)
        torch.autograd.graph.increment_version(
            [self._layout.parameters[index] for group in wanted for index in group.indices]
        )

    def adopt(self) -> None:
        """Takes up what was written to the parameters from outside: values, or other tensors in place of theirs.

        Raises:
            RuntimeError: a parameter has another dtype, device or shape than when it was split.
        """
        for group, flat in zip(self._layout.groups, self._flats):
            for index, offset in zip(group.indices, group.offsets):
                parameter = self._layout.parameters[index]
                expected = flat.data_ptr() + offset * flat.element_size()
                if parameter.data_ptr() == expected or not parameter.numel():
                    continue
                if is_split(parameter):
                    raise RuntimeError(
                        f"parameter '{self._layout.names[index]}' is split over the ranks by another DistributedOptimizer, which "
                        "alone can step it now; step that one, or call unshard() on it"
                    )
                form = self._forms[index]
                if (
                    parameter.dtype is not flat.dtype
                    or parameter.device != flat.device
                    or parameter.shape != form.shape
                ):
                    raise RuntimeError(
                        f"parameter '{self._layout.names[index]}' has become {parameter.dtype} of shape "
                        f"{tuple(parameter.shape)} on {parameter.device} after it was split over the ranks as {flat.dtype} of "
                        f"shape {tuple(form.shape)} on {flat.device}; convert the model before DistributedOptimizer"
                    )
                self._place(parameter, flat, offset, form)
            if self._format.changes(group.dtype):
                own, exact = self._own(group), self.shards[group.position]
                exact.copy_(torch.where(own == self._format.rounded(exact), exact, own))

    def check_apart(self, what: str) -> None:
        """Nothing to raise: parameters are whole everywhere."""

    def finish(self) -> None:
        """The backward passes are over; whole parameters stay."""

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Within it parameters are whole, as they always are."""
        yield

    def remove(self) -> None:
        """Lets go of the parameters, which are whole."""

    def _own(self, group: Group) -> torch.Tensor:
        first = self._exchange.rank * group.shard_numel
        return self._flats[group.position][first : first + group.shard_numel]

    @staticmethod
    def _place(parameter: torch.Tensor, flat: torch.Tensor, offset: int, form: Form) -> None:
        place = form.unflatten(flat[offset : offset + form.numel])
        with torch.no_grad():
            place.copy_(parameter)
            parameter.data = place
