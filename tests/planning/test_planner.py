"""Tests of plans through the public API: budgets are kept, training is equal, and the model is left unchanged."""

from __future__ import annotations

import copy
import dataclasses
import gc
import io
import pickle
import warnings
import weakref

import pytest
import torch
from random_text import random_step
from residual import Listed, Residual
from same import assert_same
from selective import drop_all
from torch import nn
from torch.nn import functional

import hvd_ckpt as hc
from hvd_ckpt.planning.plan import BlockPlan
from hvd_ckpt.planning.planner import Planner
from hvd_ckpt.planning.policy import KEEP, CheckpointPolicy
from hvd_ckpt.processes import uncaught
from hvd_ckpt.utils.memory import measure_peak


@pytest.fixture(autouse=True)
def _seeded(quick_planner):
    torch.manual_seed(0)


class LanguageModel(Listed):
    """Layers with arguments by name; the head has the weight of the embedding."""

    def __init__(self):
        super().__init__(*(Residual() for _ in range(4)), scale=0.5)
        self.embed, self.head = nn.Embedding(20, 16), nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        scores = self.head(super().forward(self.embed(ids)))
        return functional.cross_entropy(scores.flatten(0, 1), ids.flatten())


class Marked(Residual):
    """A block whose author recomputes a part of it."""

    def forward(self, x):
        hidden = hc.checkpoint(lambda y: functional.gelu(self.up(self.norm(y))), x)
        return x + self.drop(self.down(hidden))


def listed():
    return LanguageModel(), torch.randint(20, (16, 16))


def frozen():
    model, ids = listed()
    for part in (*model.layers[:2], model.embed):
        part.requires_grad_(False)
    return model, ids


def sequential(block=Residual, width=32):
    return nn.Sequential(*[block(width) for _ in range(4)]), torch.randn(512, width)


def tanh_chain(depth):
    return nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(depth)])


def convolutions():
    blocks = [
        nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        for _ in range(4)
    ]
    stages = [nn.Sequential(*blocks[:2]), nn.Sequential(*blocks[2:])]
    model = nn.Sequential(nn.Conv2d(3, 8, 3), *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    return model, torch.randn(32, 3, 12, 12)


def tied_weights():
    """The gradient of the weight waits from the head to the embedding."""
    embed = nn.Sequential(nn.Embedding(2000, 64), nn.LayerNorm(64))
    scores = nn.Linear(64, 2000, bias=False)
    scores.weight = embed[0].weight
    model = nn.Sequential(embed, *(Residual(64) for _ in range(4)), nn.Sequential(nn.LayerNorm(64), scores))
    return model, torch.randint(2000, (1, 16))


def hugging_face(kind):
    pytest.importorskip("transformers")
    sizes = {"width": 16, "layers": 3, "heads": 2}
    model = random_step(f"{kind}-tiny", 8, 16, 40, sizes).model.transformers_model
    model.config.use_cache = True
    ids = torch.randint(5, 40, (8, 16))
    return model.train(), {"input_ids": ids, "labels": ids}


MODELS = {
    "list": listed,
    "sequential": sequential,
    "convolutions": convolutions,
    "tied weights": tied_weights,
    "bert": lambda: hugging_face("bert"),
    "xlnet": lambda: hugging_face("xlnet"),
    "frozen blocks": frozen,
    "marked regions": lambda: sequential(Marked, 16),
    # Each block adds keys and values to one object, which lives as long as the model's output.
    "gpt2 with its cache": lambda: hugging_face("gpt2"),
}
ROUGHLY_PREDICTED = ("frozen blocks", "marked regions", "gpt2 with its cache")


def loss_of(output):
    return output.square().mean() if isinstance(output, torch.Tensor) else output.loss


def run(model, sample):
    return model(**sample) if isinstance(sample, dict) else model(sample)


@torch.no_grad()
def evaluate(model, sample):
    return loss_of(run(copy.deepcopy(model).eval(), sample))


def planner_of(model, sample):
    args, kwargs = ((), sample) if isinstance(sample, dict) else ((sample,), {})
    return Planner(model, *args, kwargs=kwargs, loss=loss_of)


def train(model, sample, forward=run):
    """Weights, buffers and losses of three steps of a copy."""
    model = copy.deepcopy(model)
    torch.manual_seed(5)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = loss_of(forward(model, sample))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *model.state_dict().values()]


def step_peak(model, sample):
    """Of a copy; independent of the planner: gradients there, one step."""
    model = copy.deepcopy(model)

    def step():
        loss_of(run(model, sample)).backward()

    step()
    return measure_peak(step).peak_bytes


@pytest.mark.parametrize("name", MODELS)
def test_budget_is_kept_and_training_is_the_same(name):
    model, sample = MODELS[name]()
    predicted = name not in ROUGHLY_PREDICTED
    planner = planner_of(model, sample)
    everything, expected = step_peak(model, sample), [evaluate(model, sample), *train(model, sample)]
    types, shown = [type(module) for module in model.modules()], (repr(model), list(model.state_dict()))
    with pytest.raises(hc.BudgetError, match="smallest peak is .*iB, set by (block|what runs)") as caught:
        planner.plan(1)
    smallest = caught.value.smallest
    assert caught.value.nearest.measured.peak_bytes <= smallest
    if predicted:
        assert planner.baseline.peak_bytes == pytest.approx(everything, rel=0.02)
        assert planner.smallest.peak_bytes == pytest.approx(smallest, rel=0.05)
    for budget in ((smallest + everything) // 2, smallest):
        plan = planner.plan(budget)
        assert plan.measured.peak_bytes <= plan.budget == budget
        if predicted and not any(isinstance(item, tuple) for item in plan.items):
            assert plan.predicted.peak_bytes == pytest.approx(plan.measured.peak_bytes, rel=0.05)
        assert plan.apply(plan.apply(model)) is model
        assert (repr(model), list(model.state_dict())) == shown
        assert step_peak(model, sample) == pytest.approx(plan.measured.peak_bytes, rel=0.01)
        assert_same(expected, [evaluate(model, sample), *train(model, sample)])
    plan.remove(plan.remove(model))
    assert [type(module) for module in model.modules()] == types
    assert not any(name.startswith("_hvd_ckpt") for module in model.modules() for name in vars(module))
    assert step_peak(model, sample) == everything


@pytest.mark.parametrize("case", ["list", "sequential", "gpt2 with its cache"])
def test_a_model_with_a_plan_is_planned_as_without_and_keeps_it(case):
    model, sample = MODELS[case]()
    without = planner_of(model, sample)
    without.plan("min").apply(model)
    peak = step_peak(model, sample)
    planner = planner_of(model, sample)
    assert planner.baseline.peak_bytes == pytest.approx(without.baseline.peak_bytes, rel=0.05)
    assert planner.plan("min").measured.peak_bytes < planner.baseline.peak_bytes
    assert step_peak(model, sample) == peak


@pytest.mark.parametrize(
    ("chain", "autocast", "width"), [(nn.Sequential, None, 128), (Listed, torch.bfloat16, 64)]
)
def test_predicted_peaks_stay_within_the_budget_and_fall_with_it(chain, autocast, width):
    """Within 1 %; under autocast the weights that it remembers are a third of a small peak."""
    model = chain(*(Residual(width) for _ in range(6)), nn.Linear(width, 8))
    planner = Planner(model, torch.randn(8 * width, width), autocast=autocast)
    least, most = int(1.02 * planner.smallest.peak_bytes), planner.baseline.peak_bytes
    before = most
    for number in range(5):
        budget = most - (most - least) * number // 4
        plan = planner.plan(budget)
        assert plan.measured.peak_bytes == pytest.approx(plan.predicted.peak_bytes, rel=0.01)
        assert plan.measured.peak_bytes <= min(budget, before)
        before = plan.measured.peak_bytes
    assert before < 0.5 * most


def test_segments_of_a_sequential():
    """Far below what single blocks can give: nested segments."""
    model, x = tanh_chain(12), torch.randn(8192, 16)
    planner, expected = planner_of(model, x), train(model, x)
    plan = planner.plan(int(planner.smallest.peak_bytes * 1.05))
    assert any(
        isinstance(item, tuple) and any(isinstance(inner, tuple) for inner in item) for item in plan.items
    )
    assert plan.measured.peak_bytes <= plan.budget < 0.5 * planner.baseline.peak_bytes
    assert plan.predicted.peak_bytes == pytest.approx(plan.measured.peak_bytes, rel=0.05)
    assert_same(expected, train(plan.apply(model), x))


def test_a_plan_that_needs_more_than_predicted_is_corrected():
    """Segments hold a random state each, which this prediction is made to leave out; for "min" there is no slack."""
    planner = planner_of(tanh_chain(6), torch.randn(512, 16))
    planner.chain = [dataclasses.replace(block, frame=0) for block in planner.chain]
    least = planner.plan("min")
    assert least.measured.peak_bytes <= least.budget < least.baseline.peak_bytes
    first = planner.plan((least.budget + 3 * least.baseline.peak_bytes) // 4)
    budget = first.predicted.peak_bytes
    assert first.measured.peak_bytes > budget
    second = planner.plan(budget)
    assert 0.85 * budget < second.measured.peak_bytes <= budget


# ---- the model and the caller's objects ----


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
    model, x = convolutions()
    model[1].eval()
    fired = []
    next(model.parameters()).register_post_accumulate_grad_hook(lambda parameter: fired.append("hook"))
    loss_of(model(x)).backward()
    before = state_of(model)
    plan = hc.plan(model, x, loss=loss_of, budget="0.8x")
    assert_same(state_of(model), before)
    with pytest.raises(ValueError, match=r"one number.*shape \(32, 3\)"):
        hc.plan(model, x, loss=lambda output: output)
    assert_same(state_of(model), before)
    assert fired == ["hook"]
    loss_of(plan.apply(model)(x)).backward()
    assert fired == ["hook"] * 2


def test_plans_keep_neither_model_nor_sample_alive():
    model, ids = listed()
    plan = hc.plan(model, ids, budget="min")
    weak = [weakref.ref(value) for value in (model, ids, model.layers[0])]
    del model, ids
    gc.collect()
    assert [value() for value in weak] == [None] * 3
    assert plan.blocks


class Logging(Residual):
    """A block with something that cannot be pickled."""

    def __init__(self, width):
        super().__init__(width)
        self.log = open("/dev/null")  # noqa: SIM115

    def __getstate__(self):
        return {name: value for name, value in self.__dict__.items() if name != "log"}


def through_file(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), through_file],
    ids=["deepcopy", "pickle", "torch.save"],
)
def test_copies_of_a_planned_model_have_the_plan(copied):
    """By blocks, and of a chain that runs some in a segment."""
    model, x = sequential(Logging)
    expected, kept = train(model, x), step_peak(model, x)
    drop = CheckpointPolicy("drop all", drop_all(model[0], x))
    blocks = [
        BlockPlan.of({name: block}, drop if name != "3" else KEEP) for name, block in model.named_children()
    ]
    other = copied(hc.Plan(tuple(blocks), (0, (1, 2), 3)).apply(model))
    assert type(other) is type(model) is not nn.Sequential and type(other[0]) is type(model[0])
    assert type(model[3]) is Logging  # which is kept as it is
    assert not hasattr(other[0], "log")  # its own way of being copied is respected
    assert not {*map(id, other.parameters())} & {*map(id, model.parameters())}
    assert_same(expected, train(other, x))
    assert step_peak(other, x) < kept
    hc.Plan((), ()).remove(other)
    assert type(other) is nn.Sequential and type(model) is not nn.Sequential


def test_compiled_blocks_are_recomputed_as_a_whole():
    model, x = sequential()
    expected = train(model, x)
    for block in model:
        block.compile(backend="eager")
    plan = hc.plan(model, x, loss=loss_of, budget="min")
    assert {block.policy.selective for block in plan.blocks} == {None}
    assert plan.measured.peak_bytes < plan.baseline.peak_bytes
    assert_same(expected, train(plan.apply(model), x))


# ---- autocast ----


@pytest.mark.parametrize(("make", "budget"), [(listed, "0.7x"), (sequential, "min")])
def test_autocast_and_a_warning_under_another_one(make, budget):
    model, x = make()
    plain = hc.plan(model, x, budget=budget)
    mixed = hc.plan(model, x, budget=budget, autocast=torch.bfloat16)
    assert plain.autocast is None and mixed.autocast == "bfloat16"
    assert mixed.measured.peak_bytes <= mixed.budget

    def forward(model, x, enabled=True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            return model(x).float()

    def warned(plan, enabled):
        plan.apply(model)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            forward(model, x, enabled).sum().backward()
        return {str(one.message) for one in found if "plan was made" in str(one.message)}

    expected = train(model, x, forward)
    assert warned(plain, False) == warned(mixed, True) == set()
    (said,) = warned(plain, True)
    assert "made without autocast" in said and "autocast=torch.bfloat16" in said
    (said,) = warned(mixed, False)
    assert "made under autocast to bfloat16" in said and "autocast=None" in said
    assert_same(expected, train(model, x, forward))


def test_the_surrounding_autocast_is_that_of_the_plan():
    model, x = sequential(width=16)
    options = {"loss": loss_of, "budget": "0.6x"}
    plain = hc.plan(model, x, **options)
    mixed = hc.plan(model, x, **options, autocast=torch.bfloat16)
    for around in (torch.no_grad(), torch.inference_mode(), torch.enable_grad()):
        with torch.autocast("cpu", torch.bfloat16), around:
            within = hc.plan(model, x, **options)
            other = hc.plan(model, x, **options, autocast=torch.float16)
        assert (within.autocast, other.autocast) == ("bfloat16", "float16")
        # To the byte: with the casts that autocast frees at its end. Other peaks depend on the seconds that were measured.
        assert within.baseline.peak_bytes == mixed.baseline.peak_bytes != plain.baseline.peak_bytes
    with torch.autocast("cpu", torch.bfloat16):
        with torch.autocast("cpu", enabled=False):
            assert hc.plan(model, x, **options).autocast is None
        _, plan = hc.largest_batch(model, lambda batch: torch.randn(batch, 16), 400_000, loss=loss_of, most=8)
        assert plan.autocast == "bfloat16"


# ---- what is said ----


def test_planning_prints_progress_if_verbose_or_slow(monkeypatch, capsys):
    def told(**options):
        hc.plan(*listed(), **options)
        lines = capsys.readouterr().err.splitlines()
        assert all(line.startswith("plan: ") for line in lines)
        return [line for line in lines if "(kind " in line]

    kinds = ["plan: measuring block 'layers.0' (kind 1 of 1)"]
    assert (told(verbose=True), told()) == (kinds, [])
    monkeypatch.setattr("hvd_ckpt.planning.request._SILENT_SECONDS", 0.0)
    assert (told(verbose=False), told()) == ([], kinds)


@pytest.mark.parametrize(
    ("request_plan", "error", "says"),
    [
        (lambda model, x: hc.plan(model, (x, x)), ValueError, r"one tuple.*hc.plan\(model, x, y\)"),
        (lambda model, x: hc.plan(model, [x]), ValueError, "one list"),
        (lambda model, x: hc.plan(model, {"x": x}), ValueError, "one dict"),
        (lambda model, x: hc.plan(model, x, autocast=torch.float32), ValueError, "or torch.float16, not torch.float32"),
        (lambda model, x: hc.plan(model, x, autocast="bfloat16"), ValueError, "must be torch.bfloat16 or .*, not 'bfloat16'"),
        (lambda model, x: hc.plan(torch.sin, x), TypeError, "must be a torch.nn.Module, got builtin"),
        (lambda model, x: hc.plan(model, x).apply(3), TypeError, "model must be a torch.nn.Module, got int"),
        (lambda model, x: hc.plan(model.to("meta"), x, loss=torch.sum), ValueError, "'meta'"),
        (lambda model, x: hc.plan(model.to("meta"), x.to("meta"), loss=torch.sum), ValueError, "'meta'"),
        (lambda model, x: hc.largest_batch(model, lambda _: x, 9, most=0), ValueError, "most must be a number from 1, not 0"),
        (lambda model, x: hc.largest_batch(model, lambda _: x, "0.5x"), ValueError, "does not depend on the batch"),
        (lambda model, x: hc.largest_batch(model, lambda _: x, "min"), ValueError, "does not depend on the batch"),
        (lambda model, x: hc.largest_batch(model, lambda _: x, None), ValueError, "does not depend on the batch"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_named(request_plan, error, says):
    with pytest.raises(error, match=says):
        request_plan(*sequential())


def test_an_interrupt_says_so_without_frames_of_the_planner(capsys):
    def interrupt(output):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="while planning") as caught:
        hc.plan(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.zeros(2, 4), loss=interrupt, budget="min")
    assert len(caught.traceback) == 2
    uncaught.show(caught.value)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "while planning" in said and "Traceback" not in said
