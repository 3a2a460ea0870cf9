"""Spans: seconds of each kind without those of inner spans, events of a GPU, and regions in the trace of a loop of one's own."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import hvd_ckpt as hc
from hvd_ckpt.utils import spans
from hvd_ckpt.utils.spans import SpanTimes, recording, span


class Clock:
    now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


class Event:
    """An event of a GPU whose stream reaches one a second later than the one before."""

    clock = Clock()

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.reached = False

    def record(self) -> None:
        self.time = self.clock()

    def synchronize(self) -> None:
        self.reached = True

    def elapsed_time(self, end: Event) -> float:
        assert end.reached
        return 1000 * (end.time - self.time)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_seconds_of_inner_spans_are_their_own(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(spans, "MOST_EVENTS", 2)
    times = SpanTimes(device, Clock())
    with span("data"):
        pass  # not recorded
    with recording(times):
        with span("backward"):  # 1 to 8
            with span("recompute"), span("wait"):  # 2 to 5, 3 to 4
                pass
            with pytest.raises(KeyError), span("recompute"):  # 6 to 7
                raise KeyError
            with span(None, "a region"):
                pass
        with recording(None), span("wait"):
            pass
    nothing = dict.fromkeys(spans.KINDS, 0.0)
    assert times.read() == {**nothing, "backward": 3.0, "recompute": 3.0, "wait": 1.0}
    assert times.read() == nothing


def test_traces_of_any_loop_have_regions_and_its_bits_stay() -> None:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return (
            CheckpointPolicy.MUST_SAVE
            if op is torch.ops.aten.addmm.default
            else CheckpointPolicy.PREFER_RECOMPUTE
        )

    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
    data = torch.randn(2, 8)

    def step() -> list[torch.Tensor]:
        model.zero_grad()
        hidden = hc.checkpoint_sequential(model[:3], 3, data)
        inner = functools.partial(hc.checkpoint, model[3], use_reentrant=False)
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        hc.checkpoint(inner, hidden, use_reentrant=False, context_fn=contexts).sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    kept = step()
    with torch.profiler.profile() as profiler:
        traced = step()
    assert all(torch.equal(*pair) for pair in zip(kept, traced, strict=True))
    names = [event.key for event in profiler.key_averages() if event.key.startswith("hvd_ckpt: ")]
    assert "hvd_ckpt: recompute segment 1 of 3 (layer 0: Sequential)" in names
    assert "hvd_ckpt: recompute checkpoint" in names and "hvd_ckpt: recompute Sequential" in names
