"""Heads that a plan computes in chunks: budgets below the logits, the same numbers to rounding, models that stay as they are."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional

import hvd_ckpt as hc
from hvd_ckpt.cli.plan_models import build
from hvd_ckpt.memory import measure_peak
from hvd_ckpt.models.objectives import NextOrHiddenToken
from hvd_ckpt.planning.plan import BlockPlan, parameter_shapes
from hvd_ckpt.planning.planner import Planner
from hvd_ckpt.planning.policy import in_chunks
from hvd_ckpt.recompute.deferred import DeferredLogits

VOCABULARY, LENGTH, BATCH = 7000, 32, 8
SIZES = {"width": 32, "layers": 2, "heads": 2, "dropout": 0.0}
LOGITS = 4 * VOCABULARY * LENGTH * BATCH


@pytest.fixture(autouse=True)
def _seeded(quick_planner):
    torch.manual_seed(0)


def job_of(name):
    if not name.startswith("gpt-"):
        pytest.importorskip("transformers")
    return build(name, {"batch": BATCH, "length": LENGTH, "vocabulary": VOCABULARY}, SIZES)


def transformers_model(name):
    """A model of transformers as its user trains it, with labels, and its sample."""
    wrapped = job_of(f"{name}-tiny").model.transformers_model
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH))
    labels = ids if name == "gpt2" else ids.masked_fill(torch.rand(ids.shape) > 0.15, -100)
    return wrapped, {"input_ids": ids, "labels": labels}


def step(model, args, kwargs, loss):
    """Loss and gradients; the peak of a step with gradients there."""

    def run():
        value = loss(model(*args, **kwargs))
        value.backward()
        return value.detach()

    model.zero_grad()
    value = run()
    found = [value, *(one.grad.clone() for one in model.parameters() if one.grad is not None)]
    return found, measure_peak(run).peak_bytes


def assert_near(expected, actual):
    most = max(one.norm() for one in expected[1:])  # some gradients are zero but for rounding
    assert len(expected) == len(actual)
    for one, other in zip(expected, actual):
        assert (one - other).norm() <= 1e-6 * max(one.norm(), most)


def chunks_of(plan):
    return [block.policy.chunks for block in plan.blocks if block.policy.chunks is not None]


@pytest.mark.parametrize("name", ["gpt-tiny", "bert", "roberta", "xlnet", "gpt2"])
def test_a_budget_below_the_whole_head_is_met(name):
    if "-" in name:
        model, args, kwargs, loss = job_of(name)
    else:
        (model, kwargs), args, loss = transformers_model(name), (), lambda output: output.loss
    expected, whole_peak = step(copy.deepcopy(model), args, kwargs, loss)
    with pytest.raises(hc.BudgetError) as caught:
        Planner(model, *args, kwargs=kwargs, loss=loss, budget=1, chunk_head=False)
    budget = int(0.6 * caught.value.smallest)
    planner = Planner(model, *args, kwargs=kwargs, loss=loss, budget=budget)
    plan = planner.plan(budget, rounds=0)
    assert plan.measured.peak_bytes <= budget < 0.6 * whole_peak
    assert plan.predicted.peak_bytes == pytest.approx(plan.measured.peak_bytes, rel=0.25)
    assert len(chunks_of(plan)) == 1 and plan.blocks[-1].kind == "Linear"
    planned = plan.apply(copy.deepcopy(model))
    actual, peak = step(planned, args, kwargs, loss)
    assert peak == pytest.approx(plan.measured.peak_bytes, rel=0.01)
    assert_near(expected, actual)


def test_in_evaluation_the_metrics_are_the_same_in_the_memory_of_chunks():
    model, args, _, _ = job_of("gpt-tiny")
    objective, batch = NextOrHiddenToken(), hc.Batch(args, args[0].roll(-1, 1))

    def run():
        def work():
            output = model(*batch.inputs)
            found.update(loss=objective.loss(output, batch), **objective.metrics(output, batch))

        found = {}
        with torch.no_grad():
            return measure_peak(work).peak_bytes, found

    model.eval()
    whole_peak, whole = run()
    head = BlockPlan(("head.1",), "Linear", parameter_shapes([model.head[1]]), in_chunks(8))
    hc.Plan((head,), (0,)).apply(model)
    peak, found = run()
    assert torch.equal(found["accuracy"], whole["accuracy"])
    torch.testing.assert_close(found["loss"], whole["loss"])
    assert whole_peak >= 2 * LOGITS > LOGITS > peak


class Tagger(nn.Module):
    """Layers and a wide last layer, whose result goes where ``use`` says."""

    def __init__(self, use):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(16, VOCABULARY)
        self.use = use

    def forward(self, hidden, targets):
        for layer in self.layers:
            hidden = layer(hidden)
        return self.use(self.head(hidden), targets)


def of_slices(logits, targets):
    return functional.cross_entropy(
        logits[:, :-1].float().reshape(-1, logits.size(-1)), targets[:, 1:].flatten()
    )


USES = {
    "slices": of_slices,
    "a mask": lambda logits, targets: functional.cross_entropy(logits[targets > 5], targets[targets > 5]),
    "a module": lambda logits, targets: nn.CrossEntropyLoss()(logits.view(-1, VOCABULARY), targets.view(-1)),
}
OTHER_USES = {
    "softmax": lambda logits, targets: functional.nll_loss(logits.log_softmax(-1)[0], targets[0]),
    "classes first": lambda logits, targets: functional.cross_entropy(logits.transpose(1, 2), targets),
    "class weights": lambda logits, targets: functional.cross_entropy(
        logits[0], targets[0], weight=torch.ones(VOCABULARY)
    ),
    "twice": lambda logits, targets: of_slices(logits, targets) + logits.square().mean(),
    "part of the classes": lambda logits, targets: functional.cross_entropy(
        logits[0, :, :99], targets[0] % 99
    ),
}


@pytest.mark.parametrize("name", [*USES, *OTHER_USES])
def test_a_loss_of_ones_own(name):
    """Found where cross entropy is all that is made of the logits; with chunks the numbers are right whatever is made of them."""
    model = Tagger({**USES, **OTHER_USES}[name])
    args = torch.randn(BATCH, LENGTH, 16), torch.randint(VOCABULARY, (BATCH, LENGTH))
    (expected, _), head = step(copy.deepcopy(model), args, {}, torch.sum), model.head
    plan = hc.Plan((BlockPlan(("head",), "Linear", parameter_shapes([head]), in_chunks(4)),), (0,))
    assert_near(expected, step(plan.apply(copy.deepcopy(model)), args, {}, torch.sum)[0])
    types = [type(module) for module in model.modules()]
    planner = Planner(model, *args)
    assert [type(module) for module in model.modules()] == types
    assert bool(chunks_of(planner.plan("min", rounds=0))) == (name in USES)


def test_deferred_logits_are_a_tensor_like_any_other():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 50))
    hidden, targets = torch.randn(6, 8), torch.randint(50, (6,))
    expected = model(hidden)
    plan = hc.Plan((BlockPlan(("1",), "Linear", parameter_shapes([model[1]]), in_chunks(2)),), (0,))
    plan.apply(model)
    logits = model(hidden)
    assert isinstance(logits, DeferredLogits) and isinstance(logits, torch.Tensor)
    assert (logits.shape, logits.dtype, logits.requires_grad) == (expected.shape, expected.dtype, True)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    with torch.no_grad():  # looked at there, and trained with all the same
        assert float(logits.max()) == float(expected.max())
    functional.cross_entropy(logits, targets).backward()
    assert model[0].weight.grad is not None
    assert torch.equal(model(hidden) + 1, expected + 1) and torch.equal(copy.copy(model(hidden)), expected)
    with torch.no_grad():  # a reentrant region would keep what is not computed yet
        assert not isinstance(model(hidden), DeferredLogits)
        assert isinstance(model.eval()(hidden), DeferredLogits)
    logits = model.train()(hidden)
    with torch.no_grad():
        model[1].weight += 1
    with pytest.raises(RuntimeError, match="changed in place"):
        functional.cross_entropy(logits, targets)
    assert not isinstance(hc.checkpoint(model, hidden), DeferredLogits)


def test_plan_files_and_models_that_do_not_fit(tmp_path):
    model = Tagger(of_slices)
    head = BlockPlan(("head",), "Linear", parameter_shapes([model.head]), in_chunks(4))
    plan = hc.Plan((head,), (0,))
    plan.save(tmp_path / "plan.json")
    assert hc.Plan.load(tmp_path / "plan.json") == plan
    text = (tmp_path / "plan.json").read_text()
    (tmp_path / "plan.json").write_text(text.replace('"chunks": 4', '"chunks": 0'))
    with pytest.raises(hc.PlanError, match="chunks"):
        hc.Plan.load(tmp_path / "plan.json")
    shapes = parameter_shapes([model.layers[0]])
    layer = dataclasses.replace(head, members=("layers.0",), kind="Sequential", parameters=shapes)
    with pytest.raises(hc.PlanError, match=r"'layers\.0' is of class Sequential"):
        hc.Plan((layer,), (0,)).apply(model)
