"""Which parameter is reduced where, and in which order: agreed by all ranks, and part of the training state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hvd_ckpt.reduction.buckets import Bucket, Slot, lay_out

VERSION = 2


class Placement:
    """The places of the parameters. One has none until it is first used.

    Attributes:
        names, parameters: all parameters, by index; the same on every rank.
        order: those that are placed in buckets, in the order in which their gradients become final.
        sparse: those whose gradients are sparse, with their number of sparse dimensions; gathered, in no bucket.
        densified: those whose gradients are sparse but travel dense, in a bucket; with their number of sparse dimensions.
        buckets: in launch order.
        bucket_of, slot_of: the bucket of each parameter and its place in it, or None.
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, torch.Tensor]],
        cap_bytes: float,
        groups: Sequence[Sequence[torch.Tensor]] | int | None,
    ) -> None:
        self.names = [name for name, _ in named_parameters]
        self.parameters = [parameter for _, parameter in named_parameters]
        self.cap_bytes = cap_bytes
        self.groups = groups
        self._index_of = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        self.forget()

    def forget(self) -> None:
        """Takes every parameter's place away."""
        self.order: list[int] = []
        self.sparse: dict[int, int] = {}
        self.densified: dict[int, int] = {}
        self.make_buckets()

    def add(self, name: str, parameter: torch.Tensor) -> int | None:
        """Adds a parameter, without a place; returns its index, or None if it is here already."""
        if id(parameter) in self._index_of:
            return None
        index = self._index_of[id(parameter)] = len(self.parameters)
        self.names.append(name)
        self.parameters.append(parameter)
        self.bucket_of.append(None)
        self.slot_of.append(None)
        return index

    def has(self, index: int) -> bool:
        """True if the parameter has a place."""
        return index in self.sparse or self.bucket_of[index] is not None

    def facts(self, fresh: Sequence[int], last_fire: Sequence[int] | None) -> torch.Tensor:
        """What a rank adds to the ranks' sum about parameters without a place, [3, n], for :meth:`extend`.

        Args:
            last_fire: of all parameters, on the leader: places in its sequence of gradients.
        """
        facts = torch.zeros(3, len(fresh), dtype=torch.float64)
        for column, index in enumerate(fresh):
            gradient = self.parameters[index].grad
            if last_fire is not None:
                facts[0, column] = last_fire[index]
            if gradient is not None and gradient.is_sparse:
                facts[1, column] = 1
                facts[2, column] = gradient.sparse_dim()
        return facts

    def extend(
        self, fresh: Sequence[int], facts: Sequence[Sequence[float]], sparse_as_dense: bool
    ) -> tuple[list[int], list[int]]:
        """Takes parameters that are used for the first time into the order; returns the dense ones, in order, and the sparse ones.

        The order is the leader's. What did not fire there comes last, later layers first.
        """
        last_fire, sparse_ranks, sparse_dims = facts
        dims = {
            index: round(total / ranks)
            for index, ranks, total in zip(fresh, sparse_ranks, sparse_dims)
            if ranks > 0
        }
        if sparse_as_dense:
            self.densified.update(dims)
            dims = {}
        self.sparse.update(dims)
        never = float("inf")
        fires = sorted((last or never, -index) for index, last in zip(fresh, last_fire) if index not in dims)
        dense = [-negative for _, negative in fires]
        self.order.extend(dense)
        return dense, list(dims)

    def make_buckets(self) -> None:
        """Makes buckets for ``order``. Gradients stay where they are until their new bucket is filled."""
        groups: Sequence[Sequence[int]] | int | None
        if self.groups is None or isinstance(self.groups, int):
            groups = self.groups
        else:
            known = self._index_of
            groups = [[known[id(one)] for one in group if id(one) in known] for group in self.groups]
        self.buckets: list[Bucket] = lay_out(self.order, self.parameters, self.cap_bytes, groups)
        self.bucket_of: list[Bucket | None] = [None] * len(self.parameters)
        self.slot_of: list[Slot | None] = [None] * len(self.parameters)
        for bucket in self.buckets:
            for slot in bucket.slots:
                self.bucket_of[slot.index] = bucket
                self.slot_of[slot.index] = slot

    def state_dict(self) -> dict[str, Any]:
        """Everything as plain data, by name."""
        return {
            "version": VERSION,
            "order": [self.names[index] for index in self.order],
            "sparse": {self.names[index]: dims for index, dims in self.sparse.items()},
            "densified": {self.names[index]: dims for index, dims in self.densified.items()},
            "bucket_cap_bytes": self.cap_bytes,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up a state.

        Raises:
            ValueError: the state names a parameter that is not here, or is of another version.
        """
        if state.get("version") != VERSION:
            raise ValueError(
                f"reduction state of version {state.get('version')!r} cannot be read; "
                f"this library reads version {VERSION}"
            )
        index_of = {name: index for index, name in enumerate(self.names)}
        for name in [*state["order"], *state["sparse"], *state["densified"]]:
            if name not in index_of:
                raise ValueError(
                    f"reduction state names parameter '{name}', which this optimizer does not have; "
                    f"load a state that was saved with the same model"
                )
        self.order = [index_of[name] for name in state["order"]]
        self.sparse = {index_of[name]: int(dims) for name, dims in state["sparse"].items()}
        self.densified = {index_of[name]: int(dims) for name, dims in state["densified"].items()}
        self.cap_bytes = float(state["bucket_cap_bytes"])
        self.make_buckets()
