"""The schema of a reducer's state."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from hvd_ckpt.utils.schema import shown
from hvd_ckpt.utils.states import NUMBER, Count, State


class ReducerState(State):
    """The state of a reducer of whole gradients; empty where it has none."""

    version: Count
    order: list[str]
    sparse: dict[str, Count]
    densified: dict[str, Count]
    bucket_cap_bytes: Annotated[float, Field(gt=0, allow_inf_nan=True), NUMBER]
    counts: dict[str, Count] | None
    lower_counts: dict[str, Count]
    verified_part: Count = 0
    zeros: list[str] = Field(default=[])

    @model_validator(mode="after")
    def _has_each_once(self) -> ReducerState:
        if len(set(self.order)) < len(self.order):
            raise ValueError("order has a name twice")
        twice = sorted(set(self.order) & set(self.sparse))
        if twice:
            raise ValueError(f"{shown(twice[0])} is both in a bucket and unbucketed")
        return self
