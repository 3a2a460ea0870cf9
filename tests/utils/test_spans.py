"""Spans: seconds of each kind without those of inner spans, events of a GPU, and regions in the trace of a loop of one's own."""

import functools
import itertools
from types import SimpleNamespace

import pytest
import torch
from same import gradients, same
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import hvd_ckpt as hc
from hvd_ckpt.utils import spans
from hvd_ckpt.utils.spans import SpanTimes, recording, span


def clock():
    """A second later at each call."""
    return functools.partial(next, itertools.count(1.0))


def events(now):
    """Those of a GPU whose stream reaches one a second later than the one before."""

    class Event(SimpleNamespace):
        def record(self):
            self.time = now()

        def synchronize(self):
            self.reached = True

        def elapsed_time(self, end):
            assert self.enable_timing and end.reached
            return 1000 * (end.time - self.time)

    return Event


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_seconds_of_inner_spans_are_their_own(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", events(clock()))
    monkeypatch.setattr(spans, "MOST_EVENTS", 2)
    times = SpanTimes(device, clock())
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


def test_traces_of_any_loop_have_regions_and_its_bits_stay():
    def policy(context, operator, *arguments, **options):
        is_saved = operator is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
    data = torch.randn(2, 8)

    def step():
        model.zero_grad()
        hidden = hc.checkpoint_sequential(model[:3], 3, data)
        inner = functools.partial(hc.checkpoint, model[3], use_reentrant=False)
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        hc.checkpoint(inner, hidden, use_reentrant=False, context_fn=contexts).sum().backward()
        return gradients(model)

    kept = step()
    with torch.profiler.profile() as profiler:
        assert same(step(), kept)
    names = {event.key.removeprefix("hvd_ckpt: recompute ") for event in profiler.key_averages()}
    assert names >= {"segment 1 of 3 (layer 0: Sequential)", "checkpoint", "Sequential"}
