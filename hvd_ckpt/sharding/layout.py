"""Which elements of which parameter lie on which rank, and the 1-D parameters that the wrapped optimizer steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

__all__ = [
    "ALIGNMENT",
    "Form",
    "Group",
    "Layout",
    "Piece",
    "Span",
    "flat_view",
    "is_packed",
    "lay_out",
    "packed_stride",
]

# Which part of which parameter lies on which rank: pure arithmetic, the same on every rank.
#
# Parameters are laid one after the other in *groups*, each one flat run of elements of one dtype on one device. A group is
# padded so that it divides into one equal *shard* per rank; a parameter that lies across an edge is split there. A *span* is
# the part of one parameter that lies in one shard. What splits parameters this way must work on each element by itself.


ALIGNMENT = 64  # elements; shards begin where vector instructions and cache lines do


class Span(NamedTuple):
    """Elements ``start`` to ``stop`` of parameter number ``parameter``, in memory order, at ``offset`` in a shard."""

    parameter: int
    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass
class Group:
    """One flat run of elements that travels together.

    Attributes:
        position: the group's number in its layout.
        indices: of its parameters, in the layout's list.
        offsets: where each begins, in elements.
        numel: elements of all parameters; ``padded``: with what makes it divide by the ranks.
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
        self.offsets.append(self.numel)
        self.numels.append(numel)
        self.numel += numel

    @property
    def shard_numel(self) -> int:
        """Elements of each rank's shard."""
        each = -(-self.numel // self.ranks)
        return -(-each // ALIGNMENT) * ALIGNMENT

    @property
    def padded(self) -> int:
        return self.shard_numel * self.ranks

    @property
    def nbytes(self) -> int:
        """Bytes of all its parameters, padding not counted."""
        return self.numel * self.dtype.itemsize

    def spans(self, rank: int) -> list[Span]:
        """The parts of its parameters that lie in one rank's shard, in order."""
        first = rank * self.shard_numel
        last = first + self.shard_numel
        found = []
        for index, offset, numel in zip(self.indices, self.offsets, self.numels):
            start, stop = max(offset, first), min(offset + numel, last)
            if start < stop:
                found.append(Span(index, start - offset, stop - offset, start - first))
        return found


class Layout:
    """The groups of some parameters.

    Attributes:
        names, parameters: all of them, by index.
        strides: of each when it was laid out: its memory order; that of its rows where it had gaps.
        ranks: how many ranks they are split over.
        groups: by position.
        group_of: each parameter's group.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.names: list[str] = []
        self.parameters: list[torch.Tensor] = []
        self.strides: list[tuple[int, ...]] = []
        self.groups: list[Group] = []
        self.group_of: list[Group] = []
        self._index_of: dict[int, int] = {}

    def index(self, parameter: torch.Tensor) -> int | None:
        """The index of a parameter, or None if it is not here."""
        return self._index_of.get(id(parameter))

    def add(self, named: Sequence[tuple[str, torch.Tensor]], cap_bytes: float) -> list[Group]:
        """Lays parameters out in new groups: in the order given, each group of one kind and at most ``cap_bytes`` (one parameter
        may be larger by itself). Those that are here already are passed over.

        Returns:
            The new groups.
        """
        first = len(self.groups)
        open_groups: dict[object, Group] = {}
        for name, parameter in named:
            if id(parameter) in self._index_of:
                continue
            index = self._index_of[id(parameter)] = len(self.parameters)
            self.names.append(name)
            self.parameters.append(parameter)
            self.strides.append(packed_stride(parameter))
            kind = (parameter.dtype, parameter.device, parameter.requires_grad)
            group = open_groups.get(kind)
            size = parameter.numel() * parameter.dtype.itemsize
            if group is None or (group.numel and group.nbytes + size > cap_bytes):
                group = Group(len(self.groups), self.ranks, *kind)
                open_groups[kind] = group
                self.groups.append(group)
            group.add(index, parameter.numel())
            self.group_of.append(group)
        return self.groups[first:]


def lay_out(
    named: Sequence[tuple[str, torch.Tensor]],
    ranks: int,
    cap_bytes: float,
    units: Sequence[Sequence[tuple[str, torch.Tensor]]] | None = None,
) -> tuple[Layout, list[list[Group]]]:
    """Lays parameters out.

    Args:
        named: all parameters, in the model's order.
        ranks: how many ranks they are split over.
        cap_bytes: largest group, where there are no units.
        units: parameters that are used together; each gets groups of its own, and no cap. Together they are ``named``.

    Returns:
        The layout, and the groups of each unit. Without units, groups follow the reverse of the model's order, which is about
        that in which gradients become final.
    """
    layout = Layout(ranks)
    if units is None:
        layout.add(list(reversed(named)), cap_bytes)
        return layout, []
    return layout, [layout.add(unit, float("inf")) for unit in units]


def is_packed(tensor: torch.Tensor) -> bool:
    """Whether a tensor fills consecutive memory, each place with one element."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size != 1 and stride != expected:
            return not tensor.numel()
        expected *= size
    return True


def packed_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """The tensor's strides, or those of its contiguous copy where it has gaps or elements that share memory."""
    if is_packed(tensor):
        return tensor.stride()
    return torch.empty(tensor.shape, device="meta").stride()


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor that fills consecutive memory, as 1-D in memory order; shares its storage.

    Raises:
        ValueError: it has gaps, or elements that share memory.
    """
    if not is_packed(tensor):
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} has gaps")
    return tensor.detach().as_strided((tensor.numel(),), (1,))


@dataclass(frozen=True)
class Form:
    """Shape and strides of a whole parameter, which say what its memory order is."""

    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, parameter: torch.Tensor) -> Form:
        return cls(parameter.shape, packed_stride(parameter))

    @property
    def numel(self) -> int:
        return self.shape.numel()

    def flatten(self, whole: torch.Tensor) -> torch.Tensor:
        """The elements of a tensor of this shape in the parameter's memory order, 1-D; a view where its strides allow."""
        whole = whole.detach()
        if whole.layout is not torch.strided:
            whole = whole.to_dense()
        if whole.stride() != self.stride:
            whole = torch.empty_strided(
                self.shape, self.stride, dtype=whole.dtype, device=whole.device
            ).copy_(whole)
        return flat_view(whole)

    def unflatten(self, flat: torch.Tensor) -> torch.Tensor:
        """A view of consecutive elements as the whole parameter."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset())


@dataclass(frozen=True)
class Piece:
    """A part of one parameter that this rank holds and updates.

    Attributes:
        name: of the whole parameter.
        start, stop: its elements, in the parameter's memory order.
        offset: where they begin in this rank's shard of the parameter's group.
        form: shape and strides of the whole.
        group: index of the optimizer's parameter group.
        index: of the whole parameter in the layout.
        parameter: what the wrapped optimizer steps, 1-D; float32 where there are master weights.
        weights: the part of this rank's shard that it stands for: the same memory but for master weights.
    """

    name: str
    start: int
    stop: int
    offset: int
    form: Form
    group: int
    index: int
    parameter: torch.nn.Parameter
    weights: torch.Tensor

    @property
    def has_master(self) -> bool:
        """Whether ``parameter`` is a float32 copy."""
        return self.parameter.data_ptr() != self.weights.data_ptr()

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """This part of a tensor of the whole parameter's shape, 1-D."""
        return self.form.flatten(whole)[self.start : self.stop]


def key(pieces: Sequence[Piece]) -> list[list[str | int]]:
    """Which parts these are, as plain data."""
    return [[piece.name, piece.start, piece.stop] for piece in pieces]
