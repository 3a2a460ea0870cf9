"""What the wrapped optimizer of a sharded job steps: this rank's pieces of the parameters, each a 1-D parameter of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hvd_ckpt.sharding.layout import flat_view, packed_stride

__all__ = ["Form", "Piece"]


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
