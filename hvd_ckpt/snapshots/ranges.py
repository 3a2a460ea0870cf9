"""Ranges of elements of tensors, which a snapshot consists of.

Reading is one function, :meth:`.reader.Snapshot.read`: which elements are wanted, which ranks have them, copy. A rank that resumes
wants its shards, or whole tensors, or its part of them; an export wants whole weights. What ranks, stages and parts there were does
not matter.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from hvd_ckpt.snapshots.schema import TensorMetadata

OTHER_MODEL = "the snapshot is of another model"


class Range(NamedTuple):
    """Elements ``start`` to ``stop`` of a tensor in a snapshot.

    Attributes:
        name: of the tensor, with its kind.
        whole: the whole tensor, and the order of its elements.
        values: the elements, 1-D.
        changing: whether they may change right after a save, such as the buffers of a batch norm.
    """

    name: str
    start: int
    stop: int
    whole: TensorMetadata
    values: Tensor
    changing: bool = False


class Elements(NamedTuple):
    """Elements ``start`` to ``stop`` of a tensor that are to be read, in the order that the tensor ``whole`` has here."""

    name: str
    start: int
    stop: int
    whole: TensorMetadata
