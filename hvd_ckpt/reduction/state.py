"""The schemas of an optimizer's ``reduction_state_dict()``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

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

    @model_validator(mode="after")
    def _has_each_once(self) -> ReducerState:
        if len(set(self.order)) < len(self.order):
            raise ValueError("order has a name twice")
        twice = sorted(set(self.order) & set(self.sparse))
        if twice:
            raise ValueError(f"{shown(twice[0])} is both in a bucket and unbucketed")
        return self


class GradientsState(State):
    """What the next ``zero_grad()`` finds.

    Attributes:
        gradients: names of the parameters that have a gradient.
        zeros: whether the last one has set gradients to zero.
        sparse_gradients: the numbers of sparse dimensions of sparse ones.
    """

    gradients: list[str] = Field(default=[])
    zeros: bool = False
    sparse_gradients: dict[str, Count] = Field(default={})


def parts_of(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divides a reduction state into the fields of :class:`GradientsState` and the reducer's state, empty without a reducer."""
    if not isinstance(state, Mapping):
        raise ValueError(
            f"reduction state cannot be loaded: it is a {type(state).__name__}, and must be a dict"
        )
    names = GradientsState.model_fields
    return (
        {name: value for name, value in state.items() if name in names},
        {name: value for name, value in state.items() if name not in names},
    )
