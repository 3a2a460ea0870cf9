"""What is compared: each cell is one workload trained with one way of recomputing its activations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["VARIANTS", "Cell", "Variant", "make_cells"]


@dataclass(frozen=True)
class Variant:
    """A checkpoint variant: ``use_reentrant`` as PyTorch's argument of that name, None where nothing is recomputed."""

    name: str
    use_reentrant: bool | None

    @property
    def recomputes(self) -> bool:
        return self.use_reentrant is not None


VARIANTS: dict[str, Variant] = {
    variant.name: variant
    for variant in (Variant("none", None), Variant("reentrant", True), Variant("non-reentrant", False))
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


def make_cells(workloads: Iterable[str], variants: Sequence[str], chunks: Sequence[int]) -> list[Cell]:
    """Every combination, once; chunks mean nothing to a variant that recomputes nothing, so it gives one cell."""
    return [
        Cell(workload, variant, count)
        for workload in workloads
        for variant in variants
        for count in (chunks if VARIANTS[variant].recomputes else (0,))
    ]
