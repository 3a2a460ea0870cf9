"""Tests of estimates: bytes by formula, thousands of ranks, bad arguments."""

from __future__ import annotations

import re

import pytest
import torch
from same import assert_same
from torch import nn

import hvd_ckpt as hc
from hvd_ckpt.app.models.gpt import gpt

with torch.device("meta"):
    MODEL = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)])
COUNT = sum(parameter.numel() for parameter in MODEL.parameters())


@pytest.mark.parametrize(("stage", "bytes_per_parameter"), [(0, 16), (1, 10), (2, 7), (3, 4)])
def test_model_states_are_the_theorys(stage, bytes_per_parameter):
    estimate = hc.estimate_memory(MODEL, 4, stage, optimizer="adam")
    assert estimate.model_state == pytest.approx(bytes_per_parameter * COUNT, rel=0.001)
    assert estimate.activations is None and "without activations" in str(estimate)
    assert estimate.peak >= estimate.model_state
    assert hc.estimate_memory(MODEL, 4, stage, optimizer="adam", device="cpu") == estimate


@pytest.mark.parametrize(
    ("optimizer", "bytes_per_parameter"),
    [
        ("sgd", 0),
        (torch.optim.RMSprop, 4),
        (torch.optim.Adam(MODEL.parameters(), amsgrad=True), 12),
    ],
)
def test_the_optimizers_class_and_options_decide_its_state(optimizer, bytes_per_parameter):
    estimate = hc.estimate_memory(MODEL, 1, optimizer=optimizer)
    assert estimate.optimizer_state == pytest.approx(bytes_per_parameter * COUNT, rel=0.001)


def test_half_precision_parameters_have_masters_where_they_are_split():
    def estimate(shard, **options):
        return hc.estimate_memory(MODEL, 4, shard, precision="bf16-params", **options)

    whole, split = estimate(0), estimate(2)
    assert (whole.parameters, whole.master_weights) == (2 * COUNT, 0)
    assert split.master_weights == pytest.approx(COUNT, rel=0.001)
    assert split.optimizer_state == pytest.approx(2 * COUNT, rel=0.001)
    offloaded = estimate(hc.Shard(2, offload="optimizer"))
    assert offloaded.optimizer_state == offloaded.master_weights == 0
    assert offloaded.offloaded == split.optimizer_state + split.master_weights
    assert offloaded.peak < split.peak
    third, grouped = estimate(3), estimate(3, within=2)
    assert grouped.parameters == 3 * third.parameters and grouped.peak == third.peak + 2 * third.parameters
    most = estimate(hc.Shard(3, offload="parameters"))
    assert most.model_state == 0 and most.offloaded == third.model_state
    states = third.parameters + third.optimizer_state + third.master_weights
    assert most.peak == third.peak - states - third.at_peak["gradients"]


def test_thousands_of_ranks_take_no_memory_here_and_little_there():
    shares = [hc.estimate_memory(MODEL, 4096, stage).model_state / COUNT for stage in range(4)]
    assert shares == pytest.approx([16, 8, 4, 16 / 4096], rel=0.15)  # shards are padded


def test_averages_of_local_sgd_take_an_anchor_and_each_rank_a_part_of_the_outer_optimizer():
    def estimate(**local):
        return hc.estimate_memory(MODEL, 8, optimizer="adam", local=local)

    step = hc.estimate_memory(MODEL, 1, optimizer="adam")
    outer = {"outer": hc.Nesterov()}
    diloco = estimate(**outer, delay=100)
    for found, bytes_per_parameter in (
        (estimate(), 4 * (1 + 1 / 8)),
        (diloco, 4 * (1 + 2 / 8)),
        (estimate(wire="int8"), 4 * (2 + 1 / 8)),
        (estimate(within=8), 0),
        (estimate(**outer, within=4), 4 / 2),
    ):
        assert found.averages == pytest.approx(bytes_per_parameter * COUNT, rel=0.001)
    assert step.peak < estimate().peak < diloco.peak
    assert estimate(**outer, delay=100, fragments=4).peak == diloco.peak
    assert estimate(**outer, delay=20, fragments=4).peak < diloco.peak
    assert sum(diloco.at_peak.values()) == diloco.peak
    assert "averages" in str(diloco) and "averages" not in str(step)


def test_recomputation_lowers_activations_only_and_the_model_stays_as_it_was():
    kept, recomputed = (
        gpt(vocabulary=64, length=32, width=32, heads=2, layers=3, checkpoint_interval=interval)
        for interval in (0, 1)
    )
    before = {name: value.clone() for name, value in kept.state_dict().items()}
    much, little = (
        hc.estimate_memory(model, 8, 3, sample=torch.zeros(8, 32, dtype=torch.long))
        for model in (kept, recomputed)
    )
    assert much.activations > 1.5 * little.activations
    assert much.model_state == little.model_state
    assert sum(much.at_peak.values()) == much.peak
    assert_same(before, dict(kept.state_dict()))
    assert all(parameter.grad is None for parameter in kept.parameters())


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((0,), {}, "np must be a number of ranks from 1, not 0"),
        ((2.0,), {}, "np must be"),
        ((2, 4), {}, "shard must be one of"),
        ((2, hc.Shard(0, offload="optimizer")), {}, "needs shard"),
        ((2, hc.Shard(1, wire="int8")), {}, "int8"),
        ((2, hc.Shard(3, units=[nn.Linear(1, 1)])), {}, "units[0] has a Linear"),
        ((4, 3), {"within": "host"}, "within must be a number of ranks from 2 that divides np=4"),
        ((2,), {"optimizer": "adamv"}, "did you mean 'adam"),
        ((2,), {"optimizer": 3}, "optimizer must be the name"),
        ((2,), {"optimizer": torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1)}, "none of the model's"),
        ((2, 1), {"optimizer": "lbfgs"}, "does not work on each element by itself"),
        ((2,), {"precision": "int4"}, "precision must be one of fp32, bf16, fp16, bf16-params, not 'int4'"),
        ((2,), {"bucket_cap_mb": 0}, "bucket_cap_mb must be > 0"),
        ((2,), {"device": "tpu"}, "device 'tpu': give cpu, cuda, or cuda:N"),
        ((2,), {"local": {"evry": 4}}, "no argument of local 'evry': did you mean 'every'?"),
        ((2,), {"local": 5}, "local must be a dict of arguments of LocalSGD, not 5"),
        ((2,), {"local": {"outer": 3}}, "outer must make an optimizer of parameters, not 3"),
        ((2,), {"local": {"outer": lambda parameters: 3}}, "outer must make an optimizer of parameters"),
        ((2,), {"local": {"delay": 101}}, "delay=101 must be at most every=100"),
        ((4,), {"local": {"within": 3}}, "within=3 does not divide np=4"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(arguments, options, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        hc.estimate_memory(MODEL, *arguments, **options)
    assert "\n" not in str(caught.value)
