"""Tests of estimates: bytes by formula, thousands of ranks, bad arguments."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import hvd_ckpt as hc
from hvd_ckpt.app.models.gpt import gpt


def meta_model() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)])


def numel(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("stage", "bytes_per_parameter"), [(0, 16), (1, 10), (2, 7), (3, 4)])
def test_model_states_are_the_theorys(stage, bytes_per_parameter):
    model = meta_model()
    estimate = hc.estimate_memory(model, 4, stage, optimizer="adam")
    assert estimate.model_state == pytest.approx(bytes_per_parameter * numel(model), rel=0.001)
    assert estimate.activations is None and "without activations" in str(estimate)
    assert estimate.peak >= estimate.model_state


@pytest.mark.parametrize(
    ("optimizer", "bytes_per_parameter"),
    [("sgd", 0), (torch.optim.RMSprop, 4), ("amsgrad", 12)],
)
def test_the_optimizers_class_and_options_decide_its_state(optimizer, bytes_per_parameter):
    model = meta_model()
    if optimizer == "amsgrad":
        optimizer = torch.optim.Adam(model.parameters(), amsgrad=True)
    estimate = hc.estimate_memory(model, 1, optimizer=optimizer)
    assert estimate.optimizer_state == pytest.approx(bytes_per_parameter * numel(model), rel=0.001)


def test_half_precision_parameters_have_masters_where_they_are_split():
    model = meta_model()
    count = numel(model)
    whole = hc.estimate_memory(model, 4, 0, precision="bf16-params")
    split = hc.estimate_memory(model, 4, 2, precision="bf16-params")
    offloaded = hc.estimate_memory(model, 4, hc.Shard(2, offload="optimizer"), precision="bf16-params")
    assert (whole.parameters, whole.master_weights) == (2 * count, 0)
    assert split.master_weights == pytest.approx(count, rel=0.001)
    assert split.optimizer_state == pytest.approx(2 * count, rel=0.001)
    assert offloaded.optimizer_state == offloaded.master_weights == 0
    assert offloaded.offloaded == split.optimizer_state + split.master_weights
    assert offloaded.peak < split.peak
    third = hc.estimate_memory(model, 4, 3, precision="bf16-params")
    grouped = hc.estimate_memory(model, 4, 3, precision="bf16-params", within=2)
    assert grouped.parameters == 3 * third.parameters and grouped.peak == third.peak + 2 * third.parameters
    most = hc.estimate_memory(model, 4, hc.Shard(3, offload="parameters"), precision="bf16-params")
    assert most.model_state == 0 and most.offloaded == third.model_state
    assert (
        most.peak
        == third.peak
        - sum(getattr(third, name) for name in ("parameters", "optimizer_state", "master_weights"))
        - third.at_peak["gradients"]
    )


def test_thousands_of_ranks_take_no_memory_here_and_little_there():
    model = meta_model()
    estimates = [hc.estimate_memory(model, 4096, stage) for stage in range(4)]
    count = numel(model)
    shares = [one.model_state / count for one in estimates]
    assert shares == pytest.approx([16, 8, 4, 16 / 4096], rel=0.15)  # shards are padded


def test_without_a_sample_a_model_stays_where_it_is():
    assert hc.estimate_memory(meta_model(), 2, device="cpu") == hc.estimate_memory(meta_model(), 2)


def test_averages_of_local_sgd_take_an_anchor_and_each_rank_a_part_of_the_outer_optimizer():
    model = meta_model()
    count = numel(model)

    def estimate(**local):
        return hc.estimate_memory(model, 8, optimizer="adam", local=local)

    step = hc.estimate_memory(model, 1, optimizer="adam")
    diloco = {"outer": hc.Nesterov(), "delay": 100}
    assert estimate().averages == pytest.approx(4 * count * (1 + 1 / 8), rel=0.001)
    assert estimate(**diloco).averages == pytest.approx(4 * count * (1 + 2 / 8), rel=0.001)
    assert estimate(wire="int8").averages == pytest.approx(4 * count * (2 + 1 / 8), rel=0.001)
    assert estimate(within=8).averages == 0
    assert estimate(within=4, outer=hc.Nesterov()).averages == pytest.approx(4 * count / 2, rel=0.001)
    assert step.peak < estimate().peak < estimate(**diloco).peak
    assert estimate(**diloco, fragments=4).peak == estimate(**diloco).peak
    assert estimate(outer=hc.Nesterov(), delay=20, fragments=4).peak < estimate(**diloco).peak
    found = estimate(**diloco)
    assert (
        sum(found.at_peak.values()) == found.peak and "averages" in str(found) and "averages" not in str(step)
    )


def test_recomputation_lowers_activations_only_and_the_model_stays_as_it_was():
    torch.manual_seed(0)
    model = gpt(vocabulary=64, length=32, width=32, heads=2, layers=3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    tokens = torch.zeros(8, 32, dtype=torch.long)
    kept = hc.estimate_memory(model, 8, 3, sample=tokens)
    lean = gpt(vocabulary=64, length=32, width=32, heads=2, layers=3, checkpoint_interval=1)
    recomputed = hc.estimate_memory(lean, 8, 3, sample=tokens)
    assert kept.activations > 1.5 * recomputed.activations
    assert kept.model_state == recomputed.model_state
    assert sum(kept.at_peak.values()) == kept.peak
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((0,), {}, "np must be a number of ranks from 1, not 0"),
        ((2.0,), {}, "np must be"),
        ((2, 4), {}, "shard must be one of"),
        (
            (2, hc.Shard(1, offload="weights")),
            {},
            "offload must be None, 'optimizer' or 'parameters', not 'weights'",
        ),
        ((2, hc.Shard(0, offload="optimizer")), {}, "needs shard"),
        ((2,), {"optimizer": "adamv"}, "did you mean 'adam"),
        ((2,), {"optimizer": 3}, "optimizer must be the name"),
        ((2, 1), {"optimizer": "lbfgs"}, "does not work on each element by itself"),
        ((2,), {"precision": "int4"}, "precision must be one of fp32, bf16, fp16, bf16-params, not 'int4'"),
        ((2, hc.Shard(1, wire="int8")), {}, "int8"),
        (
            (2, hc.Shard(2, wire="int3")),
            {},
            "wire must be one of 'fp32', 'fp16', 'bf16', 'int8', 'int4', not 'int3'",
        ),
        ((2,), {"local": {"evry": 4}}, "no argument of local 'evry': did you mean 'every'?"),
        ((2,), {"local": 5}, "local must be a dict of arguments of LocalSGD, not 5"),
        ((2,), {"local": {"outer": 3}}, "outer must make an optimizer of parameters, not 3"),
        ((2,), {"local": {"outer": lambda parameters: 3}}, "outer must make an optimizer of parameters"),
        ((2,), {"device": "tpu"}, "device 'tpu': give cpu, cuda, or cuda:N"),
        ((2,), {"local": {"delay": 101}}, "delay=101 must be at most every=100"),
        ((4,), {"local": {"within": 3}}, "within=3 does not divide np=4"),
        ((4, 3), {"within": "host"}, "within must be a number of ranks from 2 that divides np=4"),
        ((2,), {"bucket_cap_mb": 0}, "bucket_cap_mb must be > 0"),
        ((2, hc.Shard(3, units=[nn.Linear(1, 1)])), {}, "units[0] has a Linear"),
        ((2,), {"optimizer": torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1)}, "none of the model's"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(arguments, options, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        hc.estimate_memory(meta_model(), *arguments, **options)
    assert "\n" not in str(caught.value)
