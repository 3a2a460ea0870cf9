"""The schema of the state of averages."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hvd_ckpt.utils.states import Count, OptimizerState, State, Weight


class RunState(State):
    """State of one average of local SGD: what is under way, and of parameters the anchor and the outer optimizer."""

    sent: Tensor | None
    row: Tensor | None = None
    gathering: bool = False
    anchor: Tensor | None = None
    exact: Tensor | None = None
    rest: Tensor | None = None
    outer: OptimizerState | None = None


class FragmentState(State):
    sent_at: Count | None
    gathering: bool
    weight: Weight
    marks: tuple[Count, Weight]
    moved: Weight
    squares: Weight
    runs: dict[str, RunState]


class AveragesState(State):
    key: dict[str, Any]
    step: Count
    skipped: Count
    tokens: Weight
    worked: Count
    moments: list[str]
    fragments: list[FragmentState]
