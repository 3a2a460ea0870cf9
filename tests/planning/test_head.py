"""Tests of heads that a plan computes in chunks: budgets below the logits, results equal up to rounding, unchanged models."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from odd_blocks import Square
from random_text import RandomStep, random_step
from torch import nn
from torch.nn import functional

import hvd_ckpt as hc
from hvd_ckpt.planning.deferred import DeferredLogits
from hvd_ckpt.planning.plan import BlockPlan
from hvd_ckpt.planning.planner import Planner
from hvd_ckpt.planning.policy import in_chunks
from hvd_ckpt.utils.memory import measure_peak

VOCABULARY, LENGTH, BATCH = 7000, 32, 8
SIZES = {"width": 32, "layers": 2, "heads": 2, "dropout": 0.0}


@pytest.fixture(autouse=True)
def _seeded(quick_planner):
    torch.manual_seed(0)


def job_of(name):
    """A chain of the catalogue, or a model of transformers as its user trains it, with labels."""
    if name != "gpt-tiny":
        pytest.importorskip("transformers")
    if "-" in name:
        return random_step(name, BATCH, LENGTH, VOCABULARY, SIZES)
    model = job_of(f"{name}-tiny").model.transformers_model
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH))
    labels = ids if name == "gpt2" else ids.masked_fill(torch.rand(ids.shape) > 0.15, -100)
    return RandomStep(model, (), {"input_ids": ids, "labels": labels}, lambda output: output.loss)


def step(job):
    """Loss and gradients; the peak of a step with gradients there."""

    def run():
        value = job.loss(job.model(*job.args, **job.kwargs))
        value.backward()
        return value.detach()

    job.model.zero_grad()
    value = run()
    found = [value, *(one.grad.clone() for one in job.model.parameters() if one.grad is not None)]
    return found, measure_peak(run).peak_bytes


def assert_near(expected, actual):
    most = max(one.norm() for one in expected[1:])  # some gradients are zero but for rounding
    assert len(expected) == len(actual)
    for one, other in zip(expected, actual):
        assert (one - other).norm() <= 5e-6 * max(one.norm(), most)


def in_plan(name, head, chunks):
    """A plan by hand: which one a planner makes hangs on measured times."""
    return hc.Plan((BlockPlan.of({name: head}, in_chunks(chunks)),), (0,))


def chunks_of(plan):
    return [block.policy.chunks for block in plan.blocks if block.policy.chunks is not None]


@pytest.mark.parametrize("name", ["gpt-tiny", "bert", "roberta", "xlnet", "gpt2"])
def test_a_budget_below_the_whole_head_is_met(name):
    job = job_of(name)
    model, args, kwargs, loss = job
    expected, whole_peak = step(job)
    whole = Planner(model, *args, kwargs=kwargs, loss=loss, chunk_head=False)
    budget = int(0.6 * whole.smallest.peak_bytes)
    plan = Planner(model, *args, kwargs=kwargs, loss=loss).plan(budget)
    assert plan.measured.peak_bytes <= budget < 0.6 * whole_peak
    assert plan.predicted.peak_bytes == pytest.approx(plan.measured.peak_bytes, rel=0.25)
    assert len(chunks_of(plan)) == 1 and plan.blocks[-1].kind == "Linear"
    plan.apply(model)
    actual, peak = step(job)
    assert peak == pytest.approx(plan.measured.peak_bytes, rel=0.01)
    assert_near(expected, actual)


def test_two_streams():
    """XLNet's chain has logits of predicted positions only."""
    job = job_of("xlnet-tiny")
    expected, _ = step(job)
    in_plan("head.head", job.model.head.head, 4).apply(job.model)
    assert isinstance(job.model(*job.args, **job.kwargs), DeferredLogits)
    assert_near(expected, step(job)[0])


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
    hidden, targets = torch.randn(BATCH, LENGTH, 16), torch.randint(VOCABULARY, (BATCH, LENGTH))
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)]
    model = nn.Sequential(*layers, nn.Linear(16, VOCABULARY))
    job = RandomStep(model, (hidden,), {}, partial({**USES, **OTHER_USES}[name], targets=targets))
    expected, _ = step(job)
    types = [type(module) for module in model.modules()]
    planner = Planner(model, hidden, loss=job.loss)
    assert [type(module) for module in model.modules()] == types
    assert bool(chunks_of(planner.plan("min"))) == (name in USES)
    in_plan("3", model[3], 4).apply(model)
    assert_near(expected, step(job)[0])


def test_deferred_logits_are_a_tensor_like_any_other():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 50))
    hidden, targets = torch.randn(6, 8), torch.randint(50, (6,))
    expected = model(hidden)
    in_plan("1", model[1], 2).apply(model)
    logits = model(hidden)
    assert isinstance(logits, DeferredLogits) and isinstance(logits, torch.Tensor)
    assert (logits.shape, logits.dtype, logits.requires_grad) == (expected.shape, expected.dtype, True)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    assert model(hidden[:0]).argmax(-1).shape == (0,)
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


@pytest.mark.parametrize(
    ("vocabulary", "use", "is_deferred"),
    [
        (5, lambda logits: logits.view(-1, 5)[:, :5], False),
        (6, lambda logits: logits[:, :, 0], False),
        (6, lambda logits: logits[..., 0], False),
        (6, lambda logits: logits[..., :6], False),
        (6, lambda logits: logits[0, :, None, 2], False),
        (6, lambda logits: logits[:, -1], True),
        (8, lambda logits: logits[0, 1:, :], True),
        (8, lambda logits: logits[:, 0], True),
    ],
)
def test_only_rows_of_deferred_logits_stay_deferred(vocabulary, use, is_deferred):
    """Of 3 x 6 rows, from hidden states of width 8."""
    hidden, head = torch.randn(3, 6, 8), nn.Linear(8, vocabulary)
    expected = use(head(hidden))
    model = in_plan("0", head, 2).apply(nn.Sequential(head))
    found = use(model(hidden))
    assert isinstance(found, DeferredLogits) == is_deferred
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
    torch.testing.assert_close(torch.as_tensor(found + 0), expected)
    if expected.dim() == 2:
        targets = torch.zeros(len(expected), dtype=torch.int64)
        losses = [functional.cross_entropy(scores, targets) for scores in (use(model(hidden)), expected)]
        torch.testing.assert_close(*losses)


def change_a_view(logits):
    logits[:, 0].mul_(3)
    logits.flatten(0, 1)[:, 3] = 1
    return logits.view(-1, 50)


def change_what_has_a_view(logits):
    view, copied = logits.view(-1, 50), logits[:, 1:].reshape(-1, 50)
    logits[..., 3] = 1
    return torch.cat([view, copied])


def view_without_gradient(logits):
    with torch.no_grad():
        return logits.view(-1, 50)


def read_without_gradient(logits):
    view = logits.view(-1, 50)
    with torch.no_grad():
        view.max()
    return view


def classes(logits):
    torch.manual_seed(1)
    return functional.cross_entropy(logits, torch.randint(50, logits.shape[:1]))


LOSSES = {
    "a view is changed": lambda logits: classes(change_a_view(logits)),
    "it is changed after": lambda logits: classes(change_what_has_a_view(logits)),
    "its view has no gradient": lambda logits: classes(view_without_gradient(logits)),
    "its view is read first": lambda logits: classes(read_without_gradient(logits)),
    "a function of autograd": lambda logits: (
        Square.apply(logits)[:, 0] + Square.apply(logits.view(-1, 50))[0]
    ).sum(),
    "no targets": lambda logits: functional.cross_entropy(logits[0], torch.full((6,), -100)),
    "a compiled loss": lambda logits: torch.compile(classes, backend="eager")(logits.view(-1, 50)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_deferred_logits_equal_the_logits_in_any_use(name):
    hidden, found = torch.randn(3, 6, 8), []
    whole = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 50))
    for model in (whole, in_plan("1", whole[1], 2).apply(copy.deepcopy(whole))):
        loss = LOSSES[name](model(hidden))
        (loss + model[0](hidden).square().sum()).backward()
        gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
        found.append({"loss": loss.detach(), **gradients})
    torch.testing.assert_close(*found, equal_nan=True)
