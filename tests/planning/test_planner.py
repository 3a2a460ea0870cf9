"""Tests of plans through the public API: budgets are kept, training is equal, and the model is left unchanged."""

from __future__ import annotations

import copy
import dataclasses
import gc
import warnings
import weakref

import pytest
import torch
from random_text import random_step
from residual import Residual
from same import assert_same
from torch import nn
from torch.nn import functional

import hvd_ckpt as hc
from hvd_ckpt.planning.planner import Planner
from hvd_ckpt.planning.step import Step
from hvd_ckpt.processes import uncaught
from hvd_ckpt.utils.memory import measure_peak


@pytest.fixture(autouse=True)
def _seeded(quick_planner):
    torch.manual_seed(0)


class Convolution(nn.Module):
    def __init__(self, channels=8):
        super().__init__()
        self.convolve = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm, self.act = nn.BatchNorm2d(channels), nn.ReLU(inplace=True)

    def forward(self, x):
        return self.act(self.norm(self.convolve(x)))


class Listed(nn.Module):
    """Layers that a forward pass walks, with keyword arguments; the head has the weight of the embedding."""

    def __init__(self, depth=4, width=16):
        super().__init__()
        self.embed = nn.Embedding(20, width)
        self.layers = nn.ModuleList(Residual(width) for _ in range(depth))
        self.head = nn.Linear(width, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class Marked(Residual):
    """A block whose author recomputes a part of it."""

    def forward(self, x):
        hidden = hc.checkpoint(lambda y: functional.gelu(self.up(self.norm(y))), x)
        return x + self.drop(self.down(hidden))


def listed():
    return Listed(), (torch.randint(20, (16, 16)),), {}


def frozen():
    model, args, _ = listed()
    for part in (*model.layers[:2], model.embed):
        part.requires_grad_(False)
    return model, args, {}


def sequential():
    return nn.Sequential(*[Residual(32) for _ in range(4)]), (torch.randn(512, 32),), {}


def marked():
    return nn.Sequential(*[Marked(16) for _ in range(4)]), (torch.randn(512, 16),), {}


def convolutions():
    stages = [nn.Sequential(Convolution(), Convolution()) for _ in range(2)]
    model = nn.Sequential(nn.Conv2d(3, 8, 3), *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    return model, (torch.randn(32, 3, 12, 12),), {}


def hugging_face(kind):
    pytest.importorskip("transformers")
    sizes = {"width": 16, "layers": 3, "heads": 2}
    model = random_step(f"{kind}-tiny", 8, 16, 40, sizes).model.transformers_model
    model.config.use_cache = True
    ids = torch.randint(5, 40, (8, 16))
    return model.train(), (), {"input_ids": ids, "labels": ids}


MODELS = {
    "list": listed,
    "sequential": sequential,
    "convolutions": convolutions,
    "bert": lambda: hugging_face("bert"),
    "xlnet": lambda: hugging_face("xlnet"),
    "frozen blocks": frozen,
    "marked regions": marked,
    # Each block adds keys and values to one object, which lives as long as the model's output.
    "gpt2 with its cache": lambda: hugging_face("gpt2"),
}
ROUGHLY_PREDICTED = ("frozen blocks", "marked regions", "gpt2 with its cache")


def loss_of(output):
    if isinstance(output, torch.Tensor):
        return output.square().mean()
    return output.loss


def train(model, args, kwargs, steps=3, forward=None):
    """Weights, buffers and losses of some steps."""
    torch.manual_seed(5)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of((forward or model)(*args, **kwargs))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(value.detach().clone() for value in model.state_dict().values())]


def assert_same_training(model, args, kwargs, plan):
    """Training with and without the plan, from the same start, is the same bit for bit."""
    expected = train(copy.deepcopy(model), args, kwargs)
    assert_same(expected, train(plan.apply(model), args, kwargs))


def step_peak(model, args, kwargs):
    """Independent of the planner: gradients there, one step."""

    def step():
        loss_of(model(*args, **kwargs)).backward()

    step()
    return measure_peak(step).peak_bytes


@pytest.mark.parametrize("name", MODELS)
def test_budget_is_kept_and_training_is_the_same(name):
    model, args, kwargs = MODELS[name]()
    predicted = name not in ROUGHLY_PREDICTED
    planner = Planner(model, *args, kwargs=kwargs, loss=loss_of)
    everything = step_peak(copy.deepcopy(model), args, kwargs)
    with pytest.raises(hc.BudgetError) as caught:
        planner.plan(1)
    smallest = caught.value.smallest
    if predicted:
        assert planner.baseline.peak_bytes == pytest.approx(everything, rel=0.02)
        assert planner.smallest.peak_bytes == pytest.approx(smallest, rel=0.05)
    for budget in ((smallest + everything) // 2, smallest):
        plan = planner.plan(budget)
        assert plan.measured.peak_bytes <= plan.budget == budget
        if predicted and not any(isinstance(item, tuple) for item in plan.items):
            assert plan.predicted.peak_bytes == pytest.approx(plan.measured.peak_bytes, rel=0.05)
        planned = plan.apply(copy.deepcopy(model))
        assert step_peak(planned, args, kwargs) == pytest.approx(plan.measured.peak_bytes, rel=0.01)
        assert_same_training(copy.deepcopy(model), args, kwargs, plan)


def state_of(model):
    """Tensors, and facts and identities of modules and parameters, that planning must leave as they were."""
    gradients = [parameter.grad for parameter in model.parameters()]
    tensors = [*model.state_dict().values(), *gradients, torch.get_rng_state()]
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    modules = [
        (type(one), one.training, *(len(getattr(one, name)) for name in hooks)) for one in model.modules()
    ]
    parameters = [(id(one), id(one.grad), one._version) for one in model.parameters()]
    return [tensor.clone() for tensor in tensors], modules + parameters


def test_planning_leaves_the_model_alone():
    model, args, _ = convolutions()
    model[1].eval()
    fired = []
    next(model.parameters()).register_post_accumulate_grad_hook(lambda parameter: fired.append("hook"))
    loss_of(model(*args)).backward()
    del fired[:]
    before = state_of(model)
    plan = hc.plan(model, *args, loss=loss_of, budget="0.8x")
    assert fired == []
    assert_same(state_of(model), before)
    with pytest.raises(ValueError, match=r"one number.*shape \(32, 3\)"):
        hc.plan(model, *args, loss=lambda output: output)
    assert_same(state_of(model), before)
    loss_of(plan.apply(model)(*args)).backward()
    assert fired == ["hook"]


def test_an_impossible_budget_names_the_smallest_and_what_sets_it():
    model, args, _ = listed()
    planner = Planner(model, *args)
    with pytest.raises(hc.BudgetError, match="smallest peak is .* KiB") as caught:
        planner.plan(1000)
    assert "layers." in str(caught.value) or "last block" in str(caught.value)
    assert caught.value.nearest.measured.peak_bytes <= caught.value.smallest
    assert planner.plan(None).budget is None
    least = planner.plan("min")
    assert least.measured.peak_bytes <= least.budget < planner.baseline.peak_bytes


def test_planning_prints_progress_if_verbose_or_slow(monkeypatch, capsys):
    kinds = ["measuring block 'layers.0' (kind 1 of 1)"]

    def told(**options):
        model, args, _ = listed()
        hc.plan(model, *args, **options)
        return kinds_told(capsys)

    assert told(verbose=True) == kinds
    assert told() == []
    monkeypatch.setattr("hvd_ckpt.planning.request._SILENT_SECONDS", 0.0)
    assert told(verbose=False) == []
    assert told() == kinds


def kinds_told(capsys):
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("plan: ") for line in lines)
    return [line.removeprefix("plan: ") for line in lines if "(kind " in line]


def test_plans_keep_neither_model_nor_sample_alive():
    model, (ids,), _ = listed()
    plan = hc.plan(model, ids, budget="min")
    weak = [weakref.ref(value) for value in (model, ids, model.layers[0])]
    del model, ids
    gc.collect()
    assert [value() for value in weak] == [None] * 3
    assert plan.blocks


def test_a_plan_that_needs_more_than_predicted_is_corrected():
    """Segments hold a random state each, which this prediction is made to leave out; for "min" there is no slack."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6)])
    planner = Planner(model, torch.randn(512, 16), loss=loss_of)
    planner.chain = [dataclasses.replace(block, frame=0) for block in planner.chain]
    least = planner.plan("min")
    assert least.measured.peak_bytes <= least.budget < least.baseline.peak_bytes
    first = planner.plan((least.budget + 3 * least.baseline.peak_bytes) // 4)
    budget = first.predicted.peak_bytes
    assert first.measured.peak_bytes > budget
    second = planner.plan(budget)
    assert 0.85 * budget < second.measured.peak_bytes <= budget


def test_keeping_a_chain_of_linear_and_relu_to_the_byte():
    """Forward: each relu's output stays (it is the next linear's input, too), the linears' outputs do not. The last block's
    backward pass sees all of them, the loss's gradient of its output, and the gradient of that relu's input."""
    rows, width, depth = 128, 32, 5
    model = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)])
    planner = Planner(model, torch.randn(rows, width), loss=torch.sum)
    activation = rows * width * 4
    gradient = width * width * 4  # of a weight, before it is added to what is there
    expected = depth * activation + 2 * activation + max(gradient - activation, 0)
    assert planner.baseline.peak_bytes == pytest.approx(expected, abs=64)


def test_segments_of_a_sequential():
    """Far below what single blocks can give: nested segments."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(12)])
    args = (torch.randn(8192, 16),)
    planner = Planner(model, *args, loss=loss_of)
    plan = planner.plan(int(planner.smallest.peak_bytes * 1.05))

    def nesting(item):
        return 1 + max(map(nesting, item)) if isinstance(item, tuple) else 0

    assert max(map(nesting, plan.items)) >= 2
    assert plan.measured.peak_bytes <= plan.budget < 0.5 * planner.baseline.peak_bytes
    assert plan.predicted.peak_bytes == pytest.approx(plan.measured.peak_bytes, rel=0.05)
    assert_same_training(model, args, {}, plan)


@pytest.mark.parametrize(("make", "budget"), [(listed, "0.7x"), (sequential, "min")])
def test_autocast_and_a_warning_under_another_one(make, budget):
    model, args, _ = make()
    plain = hc.plan(model, *args, budget=budget)
    mixed = hc.plan(model, *args, budget=budget, autocast=torch.bfloat16)
    assert plain.autocast is None and mixed.autocast == "bfloat16"
    assert mixed.measured.peak_bytes <= mixed.budget

    def step(*args, enabled=True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            return model(*args).float()

    def warned(plan, enabled):
        plan.apply(model)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            step(*args, enabled=enabled).sum().backward()
        return {str(one.message) for one in found if "plan was made" in str(one.message)}

    assert warned(plain, False) == warned(mixed, True) == set()
    (said,) = warned(plain, True)
    assert "made without autocast" in said and "autocast=torch.bfloat16" in said
    (said,) = warned(mixed, False)
    assert "made under autocast to bfloat16" in said and "autocast=None" in said
    mixed.remove(model)
    start = copy.deepcopy(model.state_dict())
    expected = train(model, args, {}, forward=step)
    model.load_state_dict(start)
    mixed.apply(model)
    assert_same(expected, train(model, args, {}, forward=step))


def test_the_surrounding_autocast_is_that_of_the_plan():
    model, args = nn.Sequential(*[Residual(16) for _ in range(4)]), (torch.randn(256, 16),)
    plain = hc.plan(model, *args, loss=loss_of, budget="0.6x")
    mixed = hc.plan(model, *args, loss=loss_of, budget="0.6x", autocast=torch.bfloat16)
    for around in (torch.no_grad(), torch.inference_mode(), torch.enable_grad()):
        with torch.autocast("cpu", torch.bfloat16), around:
            within = hc.plan(model, *args, loss=loss_of, budget="0.6x")
            other = hc.plan(model, *args, loss=loss_of, budget="0.6x", autocast=torch.float16)
        assert (within.autocast, other.autocast) == ("bfloat16", "float16")
        # To the byte: with the casts that autocast frees at its end. Other peaks depend on the seconds that were measured.
        assert within.baseline.peak_bytes == mixed.baseline.peak_bytes != plain.baseline.peak_bytes
    with torch.autocast("cpu", torch.bfloat16):
        with torch.autocast("cpu", enabled=False):
            assert hc.plan(model, *args, loss=loss_of, budget="0.6x").autocast is None
        _, plan = hc.largest_batch(model, lambda batch: torch.randn(batch, 16), 400_000, loss=loss_of, most=8)
        assert plan.autocast == "bfloat16"
    assert plain.autocast is None


def test_arguments_in_one_container_are_named():
    model, (ids,), _ = listed()
    for sample in ((ids, ids), [ids], {"x": ids}):
        with pytest.raises(ValueError, match=f"one {type(sample).__name__}.*hc.plan\\(model, x, y\\)"):
            hc.plan(model, sample)


@pytest.mark.parametrize("autocast", [torch.float32, "bfloat16"])
def test_an_autocast_that_pytorch_does_not_have_is_named(autocast):
    model, args, _ = sequential()
    with pytest.raises(
        ValueError, match=f"autocast must be torch.bfloat16 or torch.float16, not {autocast!r}"
    ):
        hc.plan(model, *args, autocast=autocast)


def test_what_cannot_be_planned_is_named():
    _, args, _ = sequential()
    with pytest.raises(TypeError, match="model must be a torch.nn.Module, got builtin_function_or_method"):
        hc.plan(torch.sin, *args)


def test_applied_removed_copied_and_applied_again():
    model, args, _ = listed()
    start = copy.deepcopy(model)
    plan = hc.plan(model, *args, budget="0.5x")
    assert all(parameter.grad is None for parameter in model.parameters())
    expected = train(copy.deepcopy(start), args, {})

    kept = step_peak(copy.deepcopy(start), args, {})
    planned = plan.apply(model)
    assert planned is model and list(model.state_dict()) == list(start.state_dict())
    twin = copy.deepcopy(model)
    assert step_peak(copy.deepcopy(twin), args, {}) <= plan.budget < kept
    with torch.no_grad():
        assert torch.equal(twin.eval()(*args), copy.deepcopy(start).eval()(*args))
    assert_same(expected, train(twin.train(), args, {}))
    plan.remove(model)
    assert [type(module) for module in model.modules()] == [type(module) for module in start.modules()]
    assert step_peak(copy.deepcopy(model), args, {}) == kept
    plan.apply(plan.apply(model))
    assert step_peak(copy.deepcopy(model), args, {}) <= plan.budget
    assert_same(expected, train(model, args, {}))


def test_largest_batch_is_the_largest():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2)])

    def sample(batch):
        return torch.randn(batch * 256, 16)

    budget = 200_000
    batch, plan = hc.largest_batch(model, sample, budget, loss=loss_of)
    assert plan.measured.peak_bytes <= budget
    assert plan.sample == (("float32", (batch * 256, 16)),)
    with pytest.raises(hc.BudgetError):
        hc.plan(model, sample(batch + 1), loss=loss_of, budget=budget)
    with pytest.raises(ValueError, match="most must be a number from 1, not 0"):
        hc.largest_batch(model, sample, budget, most=0)
    for relative in ("0.5x", "min", None):
        with pytest.raises(ValueError, match="does not depend on the batch"):
            hc.largest_batch(model, sample, relative)


def test_a_model_without_values_is_named():
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    for sample in (torch.randn(4, 8), torch.randn(4, 8, device="meta")):
        with pytest.raises(ValueError, match="'meta'"):
            hc.plan(model, sample, loss=torch.sum, budget="0.5x")


def test_an_interrupt_says_so_without_frames_of_the_planner(capsys):
    def interrupt(output):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="while planning") as caught:
        hc.plan(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.zeros(2, 4), loss=interrupt, budget="min")
    assert len(caught.traceback) == 2
    uncaught.show(caught.value)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "while planning" in said and "Traceback" not in said


def test_the_gradient_of_a_tied_weight_waits_for_its_first_use():
    embed = nn.Sequential(nn.Embedding(2000, 64), nn.LayerNorm(64))
    scores = nn.Linear(64, 2000, bias=False)
    scores.weight = embed[0].weight
    model = nn.Sequential(embed, *(Residual(64) for _ in range(4)), nn.Sequential(nn.LayerNorm(64), scores))
    for budget in ("min", "1x"):
        plan = hc.plan(model, torch.randint(2000, (1, 16)), loss=torch.sum, budget=budget)
        assert plan.measured.peak_bytes == pytest.approx(plan.predicted.peak_bytes, rel=0.05)


class SmallDevice:
    """A device on which a step that needs more than ``capacity`` bytes runs out of memory."""

    def __init__(self, monkeypatch):
        self.capacity, peak = float("inf"), Step.peak

        def limited(step):
            found = peak(step)
            if found[0] > self.capacity:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return found

        monkeypatch.setattr(Step, "peak", limited)


@pytest.mark.parametrize("budget", [None, "2x", "1GiB", "min"])
def test_a_step_that_runs_out_of_memory_is_one_that_does_not_fit(budget, monkeypatch):
    device, (model, args, _) = SmallDevice(monkeypatch), sequential()
    whole = hc.plan(model, *args).baseline.peak_bytes
    device.capacity = 0.75 * whole
    plan = hc.plan(copy.deepcopy(model), *args, budget=budget)
    assert plan.measured.peak_bytes <= device.capacity
    device.capacity = 1
    with pytest.raises(hc.BudgetError, match="smaller batch"):
        hc.plan(copy.deepcopy(model), *args, budget=budget)


@pytest.mark.parametrize("case", ["list", "sequential", "gpt2 with its cache"])
def test_a_model_with_a_plan_is_planned_as_without_and_keeps_it(case):
    model, args, kwargs = MODELS[case]()
    loss = None if case != "sequential" else (lambda output: output.square().mean())
    hc.plan(model, *args, kwargs=kwargs, loss=loss, budget="min").apply(model)

    def step():
        output = model(*args, **kwargs)
        (getattr(output, "loss", output) if loss is None else loss(output)).backward()
        model.zero_grad()

    step()
    peak = measure_peak(step).peak_bytes
    planner = Planner(model, *args, kwargs=kwargs, loss=loss)
    fresh, *_ = MODELS[case]()
    without = Planner(fresh, *args, kwargs=kwargs, loss=loss)
    assert planner.baseline.peak_bytes == pytest.approx(without.baseline.peak_bytes, rel=0.05)
    assert planner.plan("min").measured.peak_bytes < planner.baseline.peak_bytes
    assert measure_peak(step).peak_bytes == peak
