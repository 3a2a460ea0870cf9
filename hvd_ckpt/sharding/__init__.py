"""ZeRO over Horovod: optimizer state, gradients and parameters split over the ranks.

Rajbhandari, Rasley, Ruwase, He, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020).
"""

from __future__ import annotations

STAGES = ("none", "optimizer", "gradients", "parameters")


def stage_of(shard: object) -> int:
    """The stage, 0 to 3, that a name of :data:`STAGES` or a number (also as a text) stands for.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(shard, str) and shard in STAGES:
        return STAGES.index(shard)
    if isinstance(shard, str) and shard in map(str, range(len(STAGES))):
        return int(shard)
    if isinstance(shard, int) and not isinstance(shard, bool) and 0 <= shard < len(STAGES):
        return shard
    raise ValueError(f"shard must be one of {', '.join(map(repr, STAGES))}, or 0 to 3, not {shard!r}")


def stage_name(shard: object) -> object:
    """The name of its stage, or what was given where that is wrong."""
    try:
        return STAGES[stage_of(shard)]
    except ValueError:
        return shard
