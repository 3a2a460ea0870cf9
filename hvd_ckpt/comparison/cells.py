"""What is compared: each cell is one workload trained with one way of recomputing its activations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["VARIANTS", "Cell", "Variant", "make_cells"]


@dataclass(frozen=True)
class Variant:
    """A way to recompute.

    Attributes:
        name: what it is called on the command line.
        recomputes: whether anything is recomputed.
        use_reentrant: PyTorch's argument of that name.
        explicit: by ``CheckpointFunction``, which gets the parameters as arguments.
    """

    name: str
    recomputes: bool = True
    use_reentrant: bool = False
    explicit: bool = False


VARIANTS: dict[str, Variant] = {
    variant.name: variant
    for variant in (
        Variant("none", recomputes=False),
        Variant("reentrant", use_reentrant=True),
        Variant("non-reentrant"),
        Variant("explicit", explicit=True),
    )
}


@dataclass(frozen=True)
class Cell:
    """One workload, one variant and the number of segments (``chunks``; 0 where nothing is recomputed)."""

    workload: str
    variant: str
    chunks: int

    @property
    def key(self) -> str:
        """A name for events and logs, such as ``bert/reentrant/4``."""
        return f"{self.workload}/{self.variant}/{self.chunks}"

    @classmethod
    def from_key(cls, key: str) -> Cell:
        workload, variant, chunks = key.split("/")
        return cls(workload, variant, int(chunks))


def make_cells(
    workloads: Mapping[str, Sequence[str]], variants: Sequence[str], chunks: Sequence[int]
) -> list[Cell]:
    """Every combination, once; chunks mean nothing to a variant that recomputes nothing, so it gives one cell.

    Args:
        workloads: for each workload the variants that mean something for it.
        variants: those that are wanted.
        chunks: numbers of segments.
    """
    return [
        Cell(workload, variant, count)
        for workload, meaningful in workloads.items()
        for variant in variants
        if variant in meaningful
        for count in (chunks if VARIANTS[variant].recomputes else (0,))
    ]
