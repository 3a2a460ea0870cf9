"""Types of the options of models, which their builders validate."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, validate_call

validated = validate_call(config=ConfigDict(strict=True))
Size = Annotated[int, Field(ge=1)]
Interval = Annotated[int, Field(ge=0)]
Probability = Annotated[float, Field(ge=0, lt=1)]
Attention = Literal["sdpa", "eager"]
"""Implementations of attention: fused, or one operation after the other."""


def check_heads(width: int, heads: int) -> None:
    """Raises ValueError if heads do not divide the width of a transformer."""
    if width % heads:
        raise ValueError(f"width must be a multiple of heads, got width={width} and heads={heads}")
