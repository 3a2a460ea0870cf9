"""Cuts of parameters over the parts of tensor parallelism: which slices of a whole tensor a part has.

A cut is along one dimension. A dimension may consist of several blocks of equal size, which are cut separately. For example, the
rows of a fused query-key-value weight are three blocks, and a part has the rows of its heads in each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_ATTRIBUTE = "_hvd_ckpt_cut"


@dataclass(frozen=True)
class Cut:
    """The cut of a tensor: along ``dim``, of ``size`` elements in ``blocks`` blocks.

    A block that the number of parts does not divide gives the first parts one element more.
    """

    dim: int
    size: int
    blocks: int = 1

    def ranges(self, parts: int, part: int) -> list[tuple[int, int]]:
        """The first and last + 1 element of this part along the dimension, in each block."""
        # Of 10 elements, 4 parts have 0-2, 3-5, 6-7 and 8-9. With several blocks a part has a range of each:
        #
        #     blocks         [ query          | key            | value          ]
        #     part 0 of 2    [ xxxxxxx        | xxxxxxx        | xxxxxxx        ]
        block = self.size // self.blocks
        each, more = divmod(block, parts)
        start = part * each + min(part, more)
        stop = start + each + (part < more)
        return [(number * block + start, number * block + stop) for number in range(self.blocks)]

    def length(self, parts: int, part: int) -> int:
        """The number of elements of this part along the dimension."""
        return sum(stop - start for start, stop in self.ranges(parts, part))

    def whole_shape(self, shape: Sequence[int]) -> list[int]:
        """The shape of the whole tensor, of that of a part's slice."""
        return [self.size if dim == self.dim else length for dim, length in enumerate(shape)]

    def of(self, whole: Tensor, parts: int, part: int) -> Tensor:
        """A copy of what a part has of the whole tensor."""
        slices = [whole.narrow(self.dim, a, b - a) for a, b in self.ranges(parts, part)]
        return (
            torch.cat(slices, self.dim)
            if len(slices) > 1
            else slices[0].clone(memory_format=torch.contiguous_format)
        )

    def whole(self, pieces: Sequence[Tensor]) -> Tensor:
        """The whole tensor of those of all parts, in their order."""
        whole = pieces[0].new_empty(self.whole_shape(pieces[0].shape))
        for part, piece in enumerate(pieces):
            reached = 0
            for start, stop in self.ranges(len(pieces), part):
                whole.narrow(self.dim, start, stop - start).copy_(
                    piece.narrow(self.dim, reached, stop - start)
                )
                reached += stop - start
        return whole


def cut_of(parameter: Tensor) -> Cut | None:
    """The cut of a parameter; None for one that every part has whole."""
    cut: Cut | None = getattr(parameter, _ATTRIBUTE, None)
    return cut


def mark(parameter: Tensor, cut: Cut) -> None:
    """Notes how a parameter, which holds its part, is cut."""
    # An attribute does not go over to a new parameter, nor through copy.deepcopy(): whoever makes one must mark it again.
    setattr(parameter, _ATTRIBUTE, cut)
