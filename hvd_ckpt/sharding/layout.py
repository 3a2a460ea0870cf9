"""Layout of shards: the elements of each parameter on each rank, by arithmetic that is the same on every rank.

Parameters lie one after the other in *groups*, each a flat run of elements of one dtype on one device. Each parameter begins at a
multiple of ``ALIGNMENT`` elements, like a separate allocation. Kernels choose their code by the alignment of their operands, so
with another alignment they would round in another way. A group is padded so that it divides into one equal *shard* per rank; a
parameter that lies across an edge is split there. Padding is zero. A *piece* is the part of one parameter that lies in this rank's
shard: a 1-D parameter, which the wrapped optimizer updates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from hvd_ckpt.reduction.assignment import pack
from hvd_ckpt.reduction.buckets import MEBIBYTE, TensorSpec

RUN_BYTES = 32 * MEBIBYTE  # of what local SGD averages together, counted in memory estimates, too
ALIGNMENT = 64  # elements, so at least the 64 bytes at which PyTorch allocates on a CPU; parameters and shards begin at multiples


class ShardSpan(NamedTuple):
    """Elements ``start`` to ``stop`` of parameter number ``parameter``, in memory order, at ``offset`` in a shard."""

    parameter: int
    start: int
    stop: int
    offset: int

    def of(self, shard: torch.Tensor) -> torch.Tensor:
        """These elements, as a view of the shard."""
        return shard[self.offset : self.offset + self.stop - self.start]


# Parameters A of 200 elements and B of 30, on two ranks: one group of 384 elements, two shards of 192.
#
#   elements   0 ... 191    192 ... 199   200 ... 255   256 ... 285   286 ... 383
#   hold       A[0:192]     A[192:200]    padding       B[0:30]       padding
#   shard of   rank 0       rank 1, where A's rest is at offset 0 and B at 256 - 192 = 64
#
# So rank 1 has two pieces, [192, 200) of A and [0, 30) of B, and rank 0 has one.
@dataclass
class Group:
    """One flat run of elements that are sent together.

    Attributes:
        position: the group's number in its layout.
        indices: indices of its parameters, in the layout's list.
        offsets, numels: where each begins, and its size, in elements.
        numel: elements of all parameters; ``padded``: with what aligns them and makes the group divide by the ranks.
        requires_grad: whether its parameters did when it was laid out (all or none).
    """

    position: int
    ranks: int
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool = True
    indices: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    numels: list[int] = field(default_factory=list)
    numel: int = 0

    def add(self, index: int, numel: int) -> None:
        self.indices.append(index)
        self.offsets.append(_aligned(self._end))
        self.numels.append(numel)
        self.numel += numel

    @property
    def _end(self) -> int:
        return self.offsets[-1] + self.numels[-1] if self.offsets else 0

    @property
    def shard_numel(self) -> int:
        """Elements of each rank's shard."""
        return _aligned(-(-self._end // self.ranks))

    @property
    def padded(self) -> int:
        return self.shard_numel * self.ranks

    @property
    def padded_bytes(self) -> int:
        """Bytes of the group with its padding, as it is sent."""
        return self.padded * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all its parameters, padding not counted."""
        return self.numel * self.dtype.itemsize

    def spans(self, rank: int) -> list[ShardSpan]:
        """The parts of its parameters that lie in one rank's shard, in order."""
        first = rank * self.shard_numel
        last = first + self.shard_numel
        spans = []
        for index, offset, numel in zip(self.indices, self.offsets, self.numels):
            start, stop = max(offset, first), min(offset + numel, last)
            if start < stop:
                spans.append(ShardSpan(index, start - offset, stop - offset, start - first))
        return spans

    def gaps(self) -> list[tuple[int, int]]:
        """The first and last + 1 element of each run of padding."""
        ends = [0, *map(sum, zip(self.offsets, self.numels))]
        return [(end, start) for end, start in zip(ends, [*self.offsets, self.padded]) if end < start]

    def shard_of(self, flat: torch.Tensor, rank: int) -> torch.Tensor:
        """The shard of one rank, as a view of a flat tensor of the group."""
        return flat[rank * self.shard_numel : (rank + 1) * self.shard_numel]


def _aligned(numel: int) -> int:
    return -(-numel // ALIGNMENT) * ALIGNMENT


class Layout:
    """The groups of some parameters."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.names: list[str] = []
        self.parameters: list[torch.Tensor] = []
        self.specs: list[TensorSpec] = []
        self.groups: list[Group] = []
        self.group_of: list[Group] = []
        self._index_of: dict[int, int] = {}

    def index(self, parameter: torch.Tensor) -> int | None:
        """The index of a parameter, or None if it is not here."""
        return self._index_of.get(id(parameter))

    def add(self, named: Sequence[tuple[str, torch.Tensor]], cap_bytes: float = float("inf")) -> list[Group]:
        """Lays parameters out in new groups: in the order given, each group of one kind and at most ``cap_bytes`` (one parameter
        may be larger by itself). Those that are here already are passed over.

        Without units, give the reverse of the model's order, which is about that in which gradients become final; else all
        parameters of one unit, without a cap.

        Returns:
            The new groups.
        """
        first, fresh = len(self.groups), []
        for name, parameter in named:
            if id(parameter) in self._index_of:
                continue
            index = self._index_of[id(parameter)] = len(self.parameters)
            self.names.append(name)
            self.parameters.append(parameter)
            self.specs.append(TensorSpec.of(parameter))
            # Frozen parameters lie in groups of their own: these are gathered, but the schedule of gradients leaves them out.
            kind = (parameter.dtype, parameter.device, parameter.requires_grad)
            fresh.append(((index, kind), kind, parameter.numel() * parameter.dtype.itemsize))
        group_of = {}
        for run in pack(fresh, cap_bytes):
            group = Group(len(self.groups), self.ranks, *run[0][1])
            for index, _ in run:
                group.add(index, self.parameters[index].numel())
                group_of[index] = group
            self.groups.append(group)
        self.group_of.extend(group_of[index] for (index, _), _, _ in fresh)
        return self.groups[first:]

    def views(self, group: Group, flat: torch.Tensor) -> list[torch.Tensor]:
        """The parts of a flat tensor of the group that are its parameters."""
        return [self.specs[index].unflatten(flat, at) for index, at in zip(group.indices, group.offsets)]

    def parameters_of(self, groups: Sequence[Group]) -> list[torch.Tensor]:
        return [self.parameters[index] for group in groups for index in group.indices]

    def fits(self, index: int) -> bool:
        """False if a parameter has another dtype, device or shape than when it was laid out."""
        parameter, group = self.parameters[index], self.group_of[index]
        return (
            parameter.dtype is group.dtype
            and parameter.device == group.device
            and parameter.shape == self.specs[index].shape
        )

    def changed(self, index: int) -> str:
        """One sentence about a parameter that does not fit."""
        parameter, group = self.parameters[index], self.group_of[index]
        return (
            f"parameter '{self.names[index]}' has become {parameter.dtype} of shape {tuple(parameter.shape)} on "
            f"{parameter.device} after it was split over the ranks as {group.dtype} of shape "
            f"{tuple(self.specs[index].shape)} on {group.device}; convert the model before DistributedOptimizer"
        )


@dataclass(frozen=True)
class Piece:
    """A part of one parameter that this rank holds and updates.

    Attributes:
        name: name of the whole parameter.
        start, stop: its elements, in the parameter's memory order.
        spec: shape and strides of the whole.
        index: index of the whole parameter in the layout.
        parameter: what the wrapped optimizer steps, 1-D; float32 where there are master weights.
        weights: the part of this rank's shard that it stands for: the same memory but for master weights.
        span: where it lies in the shard of its group.
    """

    name: str
    start: int
    stop: int
    spec: TensorSpec
    index: int
    parameter: torch.nn.Parameter
    weights: torch.Tensor
    span: ShardSpan

    @property
    def has_master(self) -> bool:
        """Whether ``parameter`` is a float32 copy."""
        return self.parameter.data_ptr() != self.weights.data_ptr()
