"""Buckets: storage for the gradients of several parameters, and the assignment of parameters to buckets."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from hvd_ckpt.processes.grid import current
from hvd_ckpt.reduction.accumulation import moved
from hvd_ckpt.reduction.state import ReducerState
from hvd_ckpt.utils.cuts import is_uneven, shape_of_first
from hvd_ckpt.utils.torch_private import foreach_copy_, foreach_zero_

# Flat gradient buckets: how gradients are laid out in memory to be reduced together.
#
# A bucket is one flat tensor of one dtype on one device; the gradient of each of its parameters is a view into it, so that
# backward accumulates where the allreduce reads and nothing is copied. Storage is allocated when a bucket is first filled.


MEBIBYTE = 1 << 20
LAST_BUCKET_BYTES = MEBIBYTE

T = TypeVar("T")


@dataclass
class GradientEntry:
    """The place of one parameter in its bucket."""

    index: int
    parameter: torch.Tensor
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    dense: bool  # its elements fill consecutive places
    view: torch.Tensor | None = None
    pointer: int = 0
    filled: bool = False  # there was a gradient when the bucket was last gathered

    @property
    def numel(self) -> int:
        return self.shape.numel()

    def is_home(self) -> bool:
        """True if the parameter's ``grad`` is the view itself, in its place: the usual case, at little cost."""
        view = self.view
        return view is not None and self.parameter.grad is view and view.data_ptr() == self.pointer

    def holds(self, gradient: torch.Tensor) -> bool:
        """True if ``gradient`` lies here. Compares memory, not identity: ``Module.to`` keeps the tensor object and moves it."""
        view = self.view
        if view is None or gradient.layout is not torch.strided or gradient.data_ptr() != self.pointer:
            return False
        return (
            gradient.dtype is view.dtype
            and gradient.shape == view.shape
            and gradient.stride() == view.stride()
            and gradient.device == view.device
        )


@dataclass
class Bucket:
    """One flat tensor and the parameters whose gradients are views into it.

    Args:
        position: the bucket's place in the order of launches.
        dtype, device: of the storage, and of every parameter in it when it was laid out.
        flags: extra elements at the end that carry control flags (see :mod:`.reducer`).
    """

    position: int
    dtype: torch.dtype
    device: torch.device
    entries: list[GradientEntry] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)  # of the entries
    numel: int = 0
    flags: int = 0
    flat: torch.Tensor | None = None

    # State of the current step.
    waiting: int = 0  # parameters whose gradient is not complete yet
    launched: bool = False
    void: bool = False  # was sent as zeros, since a parameter has been converted
    # Of the storage when it was sent, or has arrived. Horovod writes through a pointer, which moves no version, so
    # another one later tells of a change in place.
    version: int = 0
    # Other ranks' gradients may have been replaced by hand in flight, so that ours are needed again.
    keeps_sources: bool = False
    sources: dict[int, torch.Tensor] = field(default_factory=dict)  # the gradients that were copied here

    def add(self, index: int, parameter: torch.Tensor) -> None:
        shape, stride = parameter.shape, parameter.stride()
        dense = parameter.numel() > 0 and is_dense(shape, stride)
        self.entries.append(GradientEntry(index, parameter, self.numel, shape, stride, dense=dense))
        self.indices.append(index)
        self.numel += parameter.numel()

    @property
    def nbytes(self) -> int:
        """Bytes of the gradients in it, control flags not counted."""
        return self.numel * self.dtype.itemsize

    def allocate(self) -> torch.Tensor:
        """The storage, made if need be and cut into views."""
        if self.flat is None:
            self.flat = torch.empty(self.numel + self.flags, dtype=self.dtype, device=self.device)
        with torch.no_grad():
            for entry in self.entries:
                view = entry.view
                # ``Module.to`` may have moved the view, which was the parameter's ``grad``, out of this storage.
                if view is None or view.data_ptr() != entry.pointer or view.dtype is not self.dtype:
                    self.view(entry)
        return self.flat

    def view(self, entry: GradientEntry) -> torch.Tensor:
        """The part of the storage that belongs to an entry."""
        flat, view = self.flat, entry.view
        if flat is None:
            flat = self.allocate()
        expected = flat.data_ptr() + entry.offset * self.dtype.itemsize
        # A conversion of the model (``Module.to``) moves the view object itself.
        if view is None or view.data_ptr() != expected or view.dtype is not self.dtype:
            view = entry.view = view_of(flat, entry)
            entry.pointer = view.data_ptr()
        return view

    def free(self) -> None:
        """Forgets the storage; it lives on while some parameter's ``grad`` is still a view into it."""
        self.flat = None
        for entry in self.entries:
            entry.view = None

    def fits_parameters(self) -> bool:
        """False if a parameter changed its dtype, device, size or layout since the bucket was laid out."""
        dtype, device = self.dtype, self.device
        return all(
            entry.parameter.dtype is dtype
            and entry.parameter.device == device
            and entry.parameter.shape == entry.shape
            and entry.parameter.stride() == entry.stride
            for entry in self.entries
        )

    def may_leave(self, arrived: Sequence[int]) -> bool:
        """False if some gradient was made with ``create_graph=True``: a view into the storage would lose its graph.

        Args:
            arrived: how many accumulations of each parameter there were in this step.
        """
        for entry in self.entries:
            gradient = entry.parameter.grad
            if gradient is None:
                self.keeps_sources |= arrived[entry.index] > 0  # was dropped by hand
            elif gradient.requires_grad:
                return False
        return True

    def adopt(self, entry: GradientEntry) -> bool:
        """Brings the gradient of one parameter into the storage and makes it its ``grad``; False if it cannot lie there."""
        gradient = entry.parameter.grad
        if gradient is None or gradient.requires_grad or gradient.layout is not torch.strided:
            return False
        if (gradient.dtype, gradient.device, gradient.shape) != (self.dtype, self.device, entry.shape):
            return False
        if not entry.holds(gradient):
            with torch.no_grad():
                view = self.view(entry)
            view.detach().copy_(gradient)
            entry.parameter.grad = moved(gradient, view)
        return True

    def gather(self) -> torch.Tensor:
        """Brings every gradient into the storage and makes it the parameter's ``grad``; missing ones count as zero.

        A gradient that arrived elsewhere (after ``zero_grad(set_to_none=True)``, say) is copied in and let go.

        Returns:
            The storage: 1-D, control flags at the end.
        """
        flat = self.allocate()
        sources: list[torch.Tensor] = []
        targets: list[torch.Tensor] = []
        missing: list[torch.Tensor] = []
        copied: list[tuple[GradientEntry, torch.Tensor, torch.Tensor]] = []
        for entry in self.entries:
            gradient, view = entry.parameter.grad, entry.view
            assert view is not None
            entry.filled = gradient is not None
            if gradient is view:
                continue  # in its place: allocate() has looked
            if gradient is None:
                missing.append(view)
            elif not entry.holds(gradient):
                sources.append(gradient if gradient.layout is torch.strided else gradient.to_dense())
                targets.append(view)
                copied.append((entry, gradient, view))
                if self.keeps_sources:
                    self.sources[entry.index] = gradient.detach()
            else:
                entry.parameter.grad = moved(gradient, view)
        with torch.no_grad():
            if targets:
                foreach_copy_(targets, sources)
            if missing:
                foreach_zero_(missing)
        for entry, gradient, view in copied:
            entry.parameter.grad = moved(gradient, view)
        return flat


def view_of(flat: torch.Tensor, entry: GradientEntry) -> torch.Tensor:
    """An entry's part of ``flat``, with the parameter's strides where they are dense (channels-last weights, say)."""
    if entry.dense:
        return flat.as_strided(entry.shape, entry.stride, entry.offset)
    return flat[entry.offset : entry.offset + entry.numel].view(entry.shape)


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements, of which there are some, fill consecutive places, in whatever order of dimensions."""
    # In channels-last memory a shape of [2, 3, 4, 4] has the strides 48, 1, 12, 3: in ascending order 1, 3, 12, 48. Each must
    # be the product of the sizes that come before it: 1, 3, 3 * 4, 3 * 4 * 4.
    expected = 1
    for stride, size in sorted(zip(strides, shape)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


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
        groups: instead of the cap, a number of buckets, or lists of parameter indices that each travel together
            (the meaning of ``groups`` in Horovod); a parameter in no list travels alone.

    Returns:
        Buckets in launch order. Without ``groups`` the last one is small (about 1 MiB): it cannot leave before the backward
        pass is over, so the less it holds the more can leave early.
    """
    # The parts of tensor parallelism must lay out alike what each has whole: an allreduce of three ranks or more adds up elements
    # in an order that depends on their place, and the sums of the parts would differ in their last bits.
    parts = current().tensor
    nbytes = [
        math.prod(shape_of_first(parameter, parts)) * parameter.dtype.itemsize for parameter in parameters
    ]
    keys = _group_keys(order, groups)
    total_tail = 0
    tail_from = len(order)
    if keys is None:
        # The tail becomes the last bucket: the gradient that is final last, and those before it that fit in with it.
        while tail_from > 0:
            size = nbytes[order[tail_from - 1]]
            if tail_from < len(order) and total_tail + size > min(cap_bytes, LAST_BUCKET_BYTES):
                break
            total_tail += size
            tail_from -= 1

    kinds = [(parameter.dtype, parameter.device) for parameter in parameters]
    uneven = [is_uneven(parameter, parts) for parameter in parameters]
    places = (
        (
            place,
            (kinds[index], uneven[index], place >= tail_from if keys is None else keys[index]),
            nbytes[index],
        )
        for place, index in enumerate(order)
    )
    runs = pack(places, cap_bytes if keys is None else float("inf"))
    buckets = []
    # By when the last gradient of each is final, which is not the order of their first ones: of the order f32, bf16, bf16, f32
    # the bucket of bf16 is complete first, although that of f32 was begun first.
    for position, run in enumerate(sorted(runs, key=lambda run: run[-1])):
        bucket = Bucket(position, *kinds[order[run[0]]])
        for place in run:
            bucket.add(order[place], parameters[order[place]])
        buckets.append(bucket)
    return buckets


def pack(items: Iterable[tuple[T, Hashable, int]], cap_bytes: float) -> list[list[T]]:
    """Packs items into runs that travel together, in order of their first items.

    Args:
        items: each with its kind, which all items of a run share, and its bytes.
        cap_bytes: a run is closed before it grows past this size; one item may be larger by itself.
    """
    runs: list[list[T]] = []
    open_runs: dict[Hashable, tuple[list[T], int]] = {}
    for item, kind, nbytes in items:
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
        count = min(groups, max(len(order), 1))
        base, longer = divmod(len(order), count)
        keys: dict[int, object] = {}
        start = 0
        for group in range(count):
            size = base + (group < longer)
            for index in order[start : start + size]:
                keys[index] = group
            start += size
        return keys
    keys = {index: ("alone", index) for index in order}
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
        densified: those whose gradients are sparse but travel dense, in a bucket; with their number of sparse dimensions.
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
        """What this rank adds to the sum [3, n] over ranks that :meth:`extend` takes, for n parameters without a bucket.

        Rows: place of the last arrival (leader only), whether the gradient is sparse here, its sparse dimensions.

        Args:
            last_arrival: of all parameters, on the leader: places in its sequence of gradients.
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

        The order is the leader's. What has no gradient there comes last, later layers first.

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
        self.cap_bytes = float(state["bucket_cap_bytes"])
        self.make_buckets()
