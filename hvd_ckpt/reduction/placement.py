"""Which parameter is reduced where, and in which order: agreed by all ranks, and part of the training state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .buckets import Bucket, Slot, lay_out

VERSION = 1


class Placement:
    """The places of the parameters. One has none until it is first used.

    Attributes:
        names, parameters: all parameters, by index; the same on every rank.
        order: those that are placed in buckets, in the order in which their gradients become final.
        sparse: those whose gradients are sparse, with their number of sparse dimensions; gathered, in no bucket.
        densified: those whose gradients are sparse but travel dense, in a bucket.
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
        self.densified: set[int] = set()
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

    def state_dict(self, counts: Sequence[int] | None) -> dict[str, Any]:
        """Everything as plain data, by name; ``counts`` are the learned fires of each parameter, if they are."""
        return {
            "version": VERSION,
            "order": [self.names[index] for index in self.order],
            "sparse": {self.names[index]: dims for index, dims in self.sparse.items()},
            "densified": [self.names[index] for index in sorted(self.densified)],
            "bucket_cap_bytes": self.cap_bytes,
            "counts": None if counts is None else dict(zip(self.names, counts)),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> list[int] | None:
        """Takes up a state; returns its counts.

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
        self.densified = {index_of[name] for name in state["densified"]}
        self.cap_bytes = float(state["bucket_cap_bytes"])
        self.make_buckets()
        counts = state["counts"]
        return None if counts is None else [int(counts.get(name, 0)) for name in self.names]
