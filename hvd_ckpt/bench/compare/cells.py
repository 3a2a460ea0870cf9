"""Cells: each is one workload trained with one way of recomputing its activations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["PRECISIONS", "VARIANTS", "Cell", "Settings", "Variant", "find_variant", "make_cells", "planned"]

PRECISIONS = ("fp32", "fp16", "bf16", "apex-O1")
PLAN = "plan "  # and a budget: the name of a variant


@dataclass(frozen=True)
class Settings:
    """Settings that all training runs of a comparison share.

    Attributes:
        steps: steps of each training run.
        seed: of weights, batches and random states.
        scale: of the workloads, such as ``default``.
        text: a text file, or None for the standard library's source.
        precision: ``fp32``, ``fp16``, ``bf16`` or ``apex-O1``.
        device: ``cpu`` or ``cuda``.
    """

    steps: int
    seed: int
    scale: str = "default"
    text: str | None = None
    precision: str = "fp32"
    device: str = "cpu"


@dataclass(frozen=True)
class Variant:
    """A way to recompute.

    Attributes:
        name: what it is called on the command line and in reports.
        segmented: the model's chain is cut into segments, each of which is recomputed.
        use_reentrant: PyTorch's argument of that name.
        explicit: by ``CheckpointFunction``, which gets the parameters as arguments.
        budget: what is recomputed is left to a plan for this budget, or None.
    """

    name: str
    segmented: bool = True
    use_reentrant: bool = False
    explicit: bool = False
    budget: str | None = None


VARIANTS: dict[str, Variant] = {
    variant.name: variant
    for variant in (
        Variant("none", segmented=False),
        Variant("reentrant", use_reentrant=True),
        Variant("non-reentrant"),
        Variant("explicit", explicit=True),
    )
}


def planned(budget: str) -> Variant:
    """The variant that :func:`hvd_ckpt.plan` makes for a budget, such as ``plan 0.5x``."""
    return Variant(f"{PLAN}{budget}", segmented=False, budget=budget)


def find_variant(name: str) -> Variant:
    """The variant of that name: one of :data:`VARIANTS`, or a planned one."""
    return planned(name.removeprefix(PLAN)) if name.startswith(PLAN) else VARIANTS[name]


@dataclass(frozen=True)
class Cell:
    """One workload, one variant and the number of segments (``chunks``; 0 where nothing is recomputed by segment)."""

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
    """Every combination, once; chunks mean nothing to a variant without segments, so it gives one cell.

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
        for count in (chunks if find_variant(variant).segmented else (0,))
    ]
