"""The assignment of parameters to buckets: their order, and which of them share a bucket."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from hvd_ckpt.processes.grid import current
from hvd_ckpt.reduction.buckets import MEBIBYTE, Bucket, GradientEntry

LAST_BUCKET_BYTES = MEBIBYTE

T = TypeVar("T")


def lay_out(
    order: Sequence[int],
    parameters: Sequence[torch.Tensor],
    cap_bytes: float,
    groups: Iterable[Sequence[int]] | int | None = None,
) -> list[Bucket]:
    """Packs parameters into buckets.

    Args:
        order: indices of the parameters to place, in the order in which their gradients become final.
        parameters: all parameters, by index.
        cap_bytes: a bucket is closed before it grows past this size (one parameter may be larger by itself).
        groups: instead of the cap, a number of buckets, or lists of parameter indices that each share a bucket (the meaning of
            ``groups`` in Horovod). A parameter in no list has its own bucket.

    Returns:
        Buckets in launch order. Without ``groups`` the last one is small (about 1 MiB): it cannot leave before the backward
        pass is over, so the less it holds the more can leave early.
    """
    placed = [parameters[index] for index in order]
    nbytes, uneven = [parameter.nbytes for parameter in placed], [False] * len(placed)
    if current().model_parallel_size > 1:
        from hvd_ckpt.processes.whole_model import is_uneven, shape_of_first

        # The parts of tensor parallelism must lay out alike what each has whole: an allreduce of three ranks or more adds up
        # elements in an order that depends on their place, and the sums of the parts would differ in their last bits.
        nbytes = [math.prod(shape_of_first(each)) * each.dtype.itemsize for each in placed]
        uneven = list(map(is_uneven, placed))
    keys = _group_keys(order, groups)
    total_tail = 0
    tail_from = len(order)
    # The tail becomes the last bucket: the gradient that is final last, and as many before it as fit in with it.
    for size in reversed(nbytes) if keys is None else ():
        if tail_from < len(order) and total_tail + size > min(cap_bytes, LAST_BUCKET_BYTES):
            break
        total_tail += size
        tail_from -= 1

    kinds = [(parameter.dtype, parameter.device) for parameter in placed]
    group_of = [place >= tail_from if keys is None else keys[index] for place, index in enumerate(order)]
    places = zip(range(len(order)), zip(kinds, uneven, group_of), nbytes)
    runs = pack(places, cap_bytes if keys is None else float("inf"))
    buckets = []
    # Sorted by when their last gradient is final, not their first: of the order f32, bf16, bf16, f32 the bucket of bf16 is
    # complete first, although that of f32 was begun first.
    for position, run in enumerate(sorted(runs, key=lambda run: run[-1])):
        bucket = Bucket(position, *kinds[run[0]])
        for place in run:
            bucket.add(order[place], placed[place])
        buckets.append(bucket)
    return buckets


def pack(items: Iterable[tuple[T, Hashable, int]], cap_bytes: float) -> list[list[T]]:
    """Packs items into runs that are sent together, in order of their first items.

    Args:
        items: each with its kind, which all items of a run share, and its bytes.
        cap_bytes: a run is closed before it grows past this size; one item may be larger by itself.
    """
    runs: list[list[T]] = []
    open_runs: dict[Hashable, tuple[list[T], int]] = {}
    for item, kind, nbytes in items:
        # A run stays open while items of other kinds go by. Of the order f32, bf16, f32 the two f32 travel
        # together.
        run, total = open_runs.get(kind, (None, 0))
        if run is None or (total and total + nbytes > cap_bytes):
            run, total = [], 0
            runs.append(run)
        run.append(item)
        open_runs[kind] = run, total + nbytes
    return runs


def _group_keys(
    order: Sequence[int], groups: Iterable[Sequence[int]] | int | None
) -> dict[int, object] | None:
    if groups is None or groups == 0:
        return None
    if isinstance(groups, int):
        parts = np.array_split(
            order, min(groups, max(len(order), 1))
        )  # 10 parameters in 4 groups are 3, 3, 2 and 2
        return {int(index): group for group, part in enumerate(parts) for index in part}
    keys: dict[int, object] = {index: ("alone", index) for index in order}
    for number, group_of_indices in enumerate(groups):
        for index in group_of_indices:
            keys[index] = number
    return keys


VERSION = 2  # of the reduction state


class BucketAssignment:
    """The places of the parameters. One has none until it is first used.

    Attributes:
        names, parameters: all parameters, by index; the same on every rank.
        order: those that are placed in buckets, in the order in which their gradients become final.
        sparse: those whose gradients are sparse, with their number of sparse dimensions; gathered, in no bucket.
        densified: those whose gradients are sparse but are sent dense, in a bucket; with their number of sparse dimensions.
        buckets: in launch order.
        bucket_of, entry_of: the bucket of each parameter and its place in it, or None.
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
        self.entry_of.append(None)
        return index

    def has(self, index: int) -> bool:
        """True if the parameter has a place."""
        return index in self.sparse or self.bucket_of[index] is not None

    def placement_votes(self, fresh: Sequence[int], last_arrival: Sequence[int] | None) -> torch.Tensor:
        """This rank's summand of the sum [3, n] over ranks that :meth:`extend` takes, for n parameters without a bucket.

        Rows: place of the last arrival (leader only), whether the gradient is sparse here, its sparse dimensions.

        Args:
            last_arrival: last position of each parameter in the leader's sequence of gradients.
        """
        votes = torch.zeros(3, len(fresh), dtype=torch.float64)
        for column, index in enumerate(fresh):
            gradient = self.parameters[index].grad
            if last_arrival is not None:
                votes[0, column] = last_arrival[index]
            if gradient is not None and gradient.is_sparse:
                votes[1, column] = 1
                votes[2, column] = gradient.sparse_dim()
        return votes

    def extend(
        self, fresh: Sequence[int], votes: Sequence[Sequence[float]], sparse_as_dense: bool
    ) -> tuple[list[int], list[int]]:
        """Takes parameters that are used for the first time into the order; returns the dense ones, in order, and the sparse ones.

        The order is that of rank 0 of the process set, the leader. What has no gradient there (place 0) comes last, later layers
        first.

        Args:
            votes: the sum over the ranks of their :meth:`placement_votes`.
        """
        last_arrival, sparse_ranks, sparse_dims = votes
        # Each rank with a sparse gradient votes for its number of sparse dimensions, which
        # is the same on all: so it is their mean.
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
        accumulations = sorted(
            (last or never, -index) for index, last in zip(fresh, last_arrival) if index not in dims
        )
        dense = [-negative for _, negative in accumulations]
        self.order.extend(dense)
        return dense, list(dims)

    def make_buckets(self) -> None:
        """Makes buckets for ``order``. Gradients stay where they are until their new bucket is filled."""
        groups: Sequence[Sequence[int]] | int | None
        if self.groups is None or isinstance(self.groups, int):
            groups = self.groups
        else:
            known = self._index_of
            groups = [
                [known[id(parameter)] for parameter in group if id(parameter) in known]
                for group in self.groups
            ]
        self.buckets: list[Bucket] = lay_out(self.order, self.parameters, self.cap_bytes, groups)
        self.bucket_of: list[Bucket | None] = [None] * len(self.parameters)
        self.entry_of: list[GradientEntry | None] = [None] * len(self.parameters)
        for bucket in self.buckets:
            for entry in bucket.entries:
                self.bucket_of[entry.index] = bucket
                self.entry_of[entry.index] = entry

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
        """Loads a state.

        Raises:
            ValueError: the state is of another version, not valid, or names a parameter that is not here.
        """
        if state.get("version") != VERSION:
            raise ValueError(
                f"reduction state of version {state.get('version')!r} cannot be read; "
                f"this library reads version {VERSION}"
            )
        from hvd_ckpt.reduction.state import ReducerState

        ReducerState.check(state, "reduction state")
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
        # The saved cap replaces this optimizer's own. Other buckets would place elements elsewhere in their
        # messages, and the sums of a resumed run could differ in the last bits.
        self.cap_bytes = float(state["bucket_cap_bytes"])
        self.make_buckets()
