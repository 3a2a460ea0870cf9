"""What the sizes of a transformer must be, whoever builds it."""

from __future__ import annotations

__all__ = ["ATTENTION", "check_sizes"]

ATTENTION = ("sdpa", "eager")
"""Implementations of attention: fused, or one operation after the other."""


def check_sizes(
    *,
    vocabulary: int,
    width: int,
    heads: int,
    layers: int,
    dropout: float,
    length: int = 1,
    attention: str = "sdpa",
) -> None:
    """Refuses what no transformer can be built from.

    Raises:
        ValueError: heads do not divide the width, another size is below 1, the dropout is outside [0, 1), or the attention is none
            of :data:`ATTENTION`.
    """
    for name, value in (("vocabulary", vocabulary), ("length", length), ("layers", layers), ("heads", heads)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if width < 1 or width % heads:
        raise ValueError(f"width must be a multiple of heads, got width={width} and heads={heads}")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be at least 0 and below 1, got {dropout}")
    if attention not in ATTENTION:
        raise ValueError(f"attention must be one of {', '.join(map(repr, ATTENTION))}, got {attention!r}")
