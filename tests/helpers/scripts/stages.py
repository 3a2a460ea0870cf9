"""A job with pipeline stages: every case trains like the whole model on each rank. Arguments: stages, and a case that fails."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from residual import Residual
from torch import Tensor, nn
from torch.nn import functional

import hvd_ckpt as hc
from hvd_ckpt.app.models.gpt import gpt
from hvd_ckpt.data.objectives import Batch
from hvd_ckpt.parallel.pipeline.chain import Chain
from hvd_ckpt.planning import kinds
from hvd_ckpt.processes.grid import current

STEPS = 2
CHECKPOINTS = ("always", "except_last", "never", "auto")
WIDTH, CLASSES = 6, 5
AdamW = functools.partial(torch.optim.AdamW, lr=0.01)
SGD = functools.partial(torch.optim.SGD, lr=0.2, momentum=0.9)


class Layer(nn.Module):
    def __init__(self, outputs: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, outputs)


class Mixed(Layer):
    """Hands on a tuple with None, a number and a tensor, sometimes one tensor twice; takes a mask and draws random numbers."""

    def forward(
        self, x: Tensor, memory: Tensor | None = None, nothing: None = None, depth: int = 0, *, mask: Tensor
    ) -> tuple[Tensor, Tensor, None, int]:
        memory = x if memory is None else memory
        y = functional.dropout(self.linear(x) * mask, 0.2, self.training) + 0.1 * depth * memory * x
        y = y.transpose(0, 1).contiguous().transpose(0, 1)  # dense, in another order of dimensions
        return y, y if depth % 2 else memory, None, depth + 1


class Last(Layer):
    def forward(self, x: Tensor, memory: Tensor, nothing: None, depth: int) -> Tensor:
        assert depth > 0
        return self.linear(x + memory)


@hc.skip.skippable(stash=["skip"])
class Down(Layer):
    def forward(self, x: Tensor) -> Any:
        x = functional.dropout(torch.tanh(self.linear(x)) + x, 0.1, self.training)
        yield hc.skip.stash("skip", x)
        return x


@hc.skip.skippable(pop=["skip"])
class Up(Layer):
    def forward(self, x: Tensor) -> Any:
        skip = yield hc.skip.pop("skip")
        return torch.tanh(self.linear(x + skip) * skip) + x


def transformer(tied: bool = False, frozen: int = 0) -> nn.Sequential:
    model = gpt(vocabulary=CLASSES, length=5, width=8, heads=2, layers=4, dropout=0.1, tied=tied)
    model[:frozen].requires_grad_(False)
    return model


tied_transformer = functools.partial(transformer, tied=True)


def convolutions() -> nn.Sequential:
    """One module is at two places, where it draws different numbers."""
    shared = nn.Dropout(0.1)
    layers = [
        nn.Sequential(nn.Conv2d(channels, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU())
        for channels in (2, 3, 3, 3)
    ]
    head = nn.Sequential(nn.Dropout(0.1), nn.Flatten(), nn.Linear(48, CLASSES))
    return nn.Sequential(layers[0], shared, layers[1], shared, *layers[2:], head)


def mixed() -> nn.Sequential:
    return Chain(*(Mixed() for _ in range(5)), Last(CLASSES))


def skips() -> nn.Sequential:
    outer, inner = Down().isolate("outer"), Down().isolate("inner")
    back = Up().isolate("inner"), Up().isolate("outer")
    return nn.Sequential(outer, inner, Residual(WIDTH), Residual(WIDTH), *back, nn.Linear(WIDTH, CLASSES))


def tokens(samples: int) -> Batch:
    """Predicted tokens are unevenly many; -100 is none."""
    targets = torch.randint(CLASSES, (samples, 4))
    targets[-1, 1:] = -100
    return Batch((torch.randint(CLASSES, (samples, 4)),), targets)


def labelled(samples: int, *shape: int) -> Batch:
    return Batch((torch.randn(samples, *shape),), torch.randint(CLASSES, (samples,)))


def images(samples: int) -> Batch:
    return labelled(samples, 2, 4, 4)


def rows(samples: int) -> Batch:
    return labelled(samples, WIDTH)


def masked_rows(samples: int) -> Batch:
    mask = (torch.rand(samples, 1) > 0.2).float()
    return dataclasses.replace(rows(samples), shared={"mask": mask})


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    total = functional.cross_entropy(output.flatten(0, -2), targets.flatten(), reduction="sum")
    return total / (targets != -100).sum()


def weight(part: Batch) -> Tensor:
    return (part.targets != -100).sum()


Made = Callable[[], nn.Sequential]
CASES: dict[str, tuple[Made, Callable[[int], Batch]]] = {
    "transformer": (transformer, tokens),
    "batch norm": (convolutions, images),
    "deferred batch norm": (lambda: hc.DeferredBatchNorm.convert(convolutions()), images),
    "mixed values": (mixed, masked_rows),
    "skips": (skips, rows),
    "frozen blocks": (functools.partial(transformer, frozen=3), tokens),
}


def optimizer_of(model: nn.Module, make: Callable[..., Any] = SGD, /, **options: Any) -> Any:
    trained = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    bare = make([one for _, one in trained] or [nn.Parameter(torch.zeros(1))])
    return hc.DistributedOptimizer(bare, named_parameters=trained or None, **options)


def batches(make: Callable[[int], Batch]) -> list[Batch]:
    """Those of this rank, whose random numbers follow in training."""
    torch.manual_seed(50 + hc.rank())
    made = [make(7 - 2 * step) for step in range(STEPS)]  # in four parts: uneven
    torch.manual_seed(100 + hc.rank())
    return made


def in_stages(make_model: Made, **arguments: Any) -> Any:
    torch.manual_seed(3)
    return hc.Pipeline(make_model(), **arguments)


class Trained(NamedTuple):
    """A model, its losses and norms with the random state at the end, and its outputs in evaluation mode."""

    model: Any
    told: list[Tensor]
    outputs: list[Any]


def train(
    make_model: Made,
    data: Sequence[Batch],
    arguments: dict[str, Any] | None = None,
    loss_fn: Callable[[Tensor, Tensor], Tensor] = loss_of,
    weight: Callable[[Batch], Tensor] | None = weight,
    chunks: int = 4,
) -> Trained:
    """Trains in stages, or without ``arguments`` the whole model on this rank."""
    if arguments is None:
        torch.manual_seed(3)
        model: Any = hc.seed_blocks(make_model())
    else:
        model = in_stages(make_model, **({} if "plan" in arguments else {"chunks": chunks}), **arguments)
    optimizer = optimizer_of(model)
    torch.manual_seed(100 + hc.rank())
    told = []
    for batch in data:
        optimizer.zero_grad()
        if arguments is None:
            loss, _ = hc.accumulate(
                lambda part: loss_fn(model(*part.inputs, **part.shared), part.targets),
                batch, chunks, weight=weight, across_ranks=True,
            )  # fmt: skip
            optimizer.reduce_for_caller()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            with optimizer.without_reduction():
                optimizer.step()
        else:
            loss, _ = model.accumulate(batch, loss_fn, weight=weight, across_ranks=True)
            norm = model.clip_grad_norm_(0.3)
            optimizer.step()
        told += [loss, norm]
        hc.commit_batch_norm(model)
    model.eval()
    with torch.no_grad():
        parts = data[0].split(chunks) if arguments is None else data[:1]
        outputs = [model(*part.inputs, **part.shared) for part in parts]
    return Trained(model, [*told, torch.get_rng_state()], outputs)


def differences(whole: Trained, staged: Trained) -> list[str]:
    """What has other bits in stages."""
    expected, own = whole.model.state_dict(), staged.model.state_dict()
    wrong = [name for name, value in own.items() if not torch.equal(value, expected[name])]
    wrong += ["no weights"] * (not own)
    if not all(map(torch.equal, staged.told, whole.told)):
        wrong.append("losses, norms or random state")
    if hc.grid().stage < hc.grid().stages - 1:
        return wrong + ["outputs of an earlier stage"] * (staged.outputs != [None])
    return wrong + ["outputs"] * (not torch.equal(torch.cat(staged.outputs), torch.cat(whole.outputs)))


def check(name: str, arguments: dict[str, Any]) -> None:
    make_model, make_batch = CASES[name]
    data = batches(make_batch)
    wrong = differences(train(make_model, data), train(make_model, data, arguments))
    assert not wrong, f"{name} {arguments} on stage {hc.grid().stage} of {hc.grid().stages}: {wrong}"


def equality(cases: Iterable[str]) -> None:
    """Of all pairs of a schedule and what is kept, one for each model; all pairs: parallel/pipeline/test_pipeline.py."""
    pairs = itertools.cycle(list(itertools.product(["gpipe", "1f1b", "interleaved"], CHECKPOINTS))[::5])
    for name, (schedule, checkpoint) in zip(cases, pairs):
        if schedule == "interleaved" and 2 * hc.grid().stages > len(CASES[name][0]()):
            schedule = "1f1b"
        check(name, {"schedule": schedule, "checkpoint": checkpoint})
    whole, tied = (train(tied_transformer, batches(tokens), how) for how in (None, {"schedule": "1f1b"}))
    expected = whole.model.state_dict()
    for key, value in tied.model.state_dict().items():
        torch.testing.assert_close(value, expected[key], msg=f"tied: {key}")


def plan_of(model: Any, part: Batch, budget: Any, **arguments: Any) -> Any:
    """A plan for micro-batches like this one; for the smallest budget that works if this one is too small."""
    try:
        return hc.plan(
            model,
            *part.inputs,
            kwargs=part.shared,
            loss=lambda output: loss_of(output, part.targets),
            budget=budget,
            layout=hc.StageLayout(chunks=4, **arguments),
        )
    except hc.BudgetError as error:
        return error.nearest


def planned() -> None:
    """Rank 0 plans for all, and each stage does what the plan says: the bits of the whole model."""
    kinds._SECONDS_PER_KIND = 0.0
    part = batches(tokens)[0].split(4)[0]
    torch.manual_seed(3)
    plan = plan_of(transformer(), part, 1 + hc.grid().stage, stages=hc.grid().stages)
    assert plan.budget == 1  # the smallest of all ranks
    facts = current().gather_objects((plan.pipeline, [block.policy.title for block in plan.blocks]))
    assert all(one == facts[0] for one in facts)
    assert [part.recompute for part in plan.pipeline.parts] == [True, False]
    check("transformer", {"plan": plan})
    for given in ({"chunks": 4}, {"schedule": "gpipe"}, {"virtual_stages": 2}):
        with pytest.raises(ValueError, match="cannot be used with a plan of stages"):
            hc.Pipeline(transformer(), plan=plan, **given)


def frees_other_stages() -> None:
    for make_model in (tied_transformer, mixed):
        model = make_model()
        parameters = [weakref.ref(one) for one in model.parameters()]
        pipeline = hc.Pipeline(model, chunks=2)
        left = [one for one in parameters if one() is not None]
        assert len(left) == len(list(pipeline.parameters()))
        assert len(left) < len(parameters)


def copies_of_tied_parameters() -> None:
    """They stay equal bit for bit, however the gradients are reduced."""
    weights = []
    for shard, passes in (("none", 6), ("optimizer", 1)):
        model = in_stages(tied_transformer, chunks=3)
        optimizer = optimizer_of(model, AdamW, shard=shard, model=model, backward_passes_per_step=passes)
        batch = batches(tokens)[0].split(2)[0]
        for _ in range(2):
            optimizer.zero_grad()
            model.accumulate(batch, loss_of, weight=weight)
            model.accumulate(batch, loss_of, weight=weight)  # accumulates
            optimizer.step()
        weights.append(model.state_dict())
        named = dict(model.named_parameters())
        copied = named.get("embedding.tokens.weight", named.get("head.1.weight", torch.zeros(CLASSES, 8)))
        first, *_, last = current().gather(copied.detach().double().flatten())
        assert first.any() and torch.equal(first, last)
    for name, value in weights[0].items():
        assert hc.size() > 2 or torch.equal(value, weights[1][name]), name


ORDERS = (2.0, 0.0, float("inf"))


def norms_in_stages() -> None:
    """Norms of models in several dtypes have the dtype that torch gives them, on every stage."""
    double, single, half = torch.float64, torch.float32, torch.bfloat16
    count = 2 * hc.grid().stages
    for dtypes in ((double,), (half,), (half, double), (single, half)):
        kinds = [dtypes[number * len(dtypes) // count] for number in range(count)]
        for shard in (0, 1, 2, 3):
            torch.manual_seed(0)
            chain = nn.Sequential(*(nn.Linear(4, 4, dtype=kind) for kind in kinds))
            for layer in chain:
                layer.register_forward_pre_hook(lambda layer, inputs: inputs[0].to(layer.weight.dtype))
            batch = torch.randn(4, 4), torch.randn(4, 4, dtype=dtypes[-1])
            functional.mse_loss(chain(batch[0]), batch[1]).backward()
            expected = nn.utils.get_total_norm([one.grad for one in chain.parameters()])
            chain.zero_grad()
            model = hc.Pipeline(chain, chunks=1)
            optimizer = optimizer_of(model, shard=shard, model=model)
            model.accumulate(batch, functional.mse_loss)
            norm = hc.clip_grad_norm_(model.parameters(), 1e9)
            torch.testing.assert_close(norm, expected, rtol=2e-2 if half in dtypes else 1e-12, atol=0.0)
            optimizer.step()


def sharded_in_stages() -> None:
    """Shards of a stage's states over its replicas: the bits of a run without, and the norm over all, finite or not."""
    torch.manual_seed(3)
    whole = hc.seed_blocks(transformer())
    whole_optimizer = optimizer_of(whole)
    data = batches(tokens)
    hc.accumulate(lambda part: loss_of(whole(*part.inputs), part.targets), data[0], 4, weight=weight)
    whole_optimizer.reduce_for_caller()
    expected = [nn.utils.get_total_norm([one.grad for one in whole.parameters()], order) for order in ORDERS]
    states: list[dict[str, Tensor]] = []
    for shard in ("none", "optimizer", "gradients", "parameters"):
        model = in_stages(transformer, chunks=4, checkpoint="always")
        optimizer = optimizer_of(
            model, AdamW, shard=shard, model=model if shard != "none" else None, backward_passes_per_step=4
        )
        data = batches(tokens)
        model.accumulate(data[0], loss_of, weight=weight)
        for order, norm in zip(ORDERS, expected):
            found = hc.clip_grad_norm_(model.parameters(), 1e9, order)
            torch.testing.assert_close(found, norm, msg=f"{shard}, {order}")
        torch.manual_seed(100 + hc.rank())
        for batch in data:
            optimizer.zero_grad()
            model.accumulate(batch, loss_of, weight=weight, across_ranks=True)
            optimizer.step()
        optimizer.zero_grad()
        overflows = hc.grid().stage == 0
        first = next(model.parameters())
        hook = first.register_hook(lambda gradient, to=float("inf") if overflows else 0.0: gradient + to)
        model.accumulate(data[0], loss_of, weight=weight)
        hook.remove()
        # Zeros but for the first parameter's, as in torch.
        assert hc.clip_grad_norm_(model.parameters(), 1.0) == float("inf")
        optimizer.step()
        with optimizer.gathered_parameters():
            assert first.isnan().all() == overflows
            states.append({name: one.clone() for name, one in model.state_dict().items()})
        assert sum(int(one.isnan().any()) for one in states[-1].values()) == overflows
        for name, value in states[0].items():
            assert torch.equal(value.nan_to_num(), states[-1][name].nan_to_num()), f"{shard}: {name}"


def overflow() -> None:
    """An overflow on the first stage skips the step on all."""
    model = in_stages(transformer, chunks=2)
    optimizer, scaler = optimizer_of(model), hc.GradScaler("cpu", init_scale=4.0)
    before = copy.deepcopy(model.state_dict())
    batch = batches(tokens)[0]
    for overflows in (True, False):
        optimizer.zero_grad()
        model.accumulate(
            batch, loss_of, weight=weight, backward=lambda loss, last: scaler.scale(loss).backward()
        )
        if overflows and hc.grid().stage == 0:
            first = next(one for one in model.parameters() if one.grad is not None)
            first.grad = torch.full_like(first, float("inf"))
        scaler.step(optimizer)
        scaler.update()
        same = all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        assert same == overflows
        assert scaler.get_scale() == 2.0


def one_stage_alone() -> None:
    """What one stage has alone is an error on all: gradients in float16, and weights that differ between its replicas."""
    first, second = hc.grid().stage == 0, hc.grid().stage == 1
    for shard in ("none", hc.Shard("optimizer", master_weights=False)):
        model = nn.Linear(4, 4, dtype=torch.float16 if first else torch.float32)
        optimizer, scaler = optimizer_of(model, shard=shard, model=model), hc.GradScaler("cpu")
        loss: Any = scaler.scale(model.weight.sum() + model.bias.sum())
        loss.backward()
        with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients.$"):
            scaler.unscale_(optimizer)
    if hc.size() > 1:
        model = nn.Linear(4, 4, bias=False)
        nn.init.constant_(model.weight, float(second and hc.rank() == 1))
        with pytest.raises(hc.WeightsDiffer, match="parameter 'weight' differs: rank 1 "):
            hc.verify(model)


def apart() -> None:
    """Arguments and weights that one process has alone, or that no pipeline takes: one error on all."""
    several: dict[str, Any] = {
        "chunks": 3, "balance": [1, 3], "schedule": "gpipe", "checkpoint": "never", "sample": torch.ones(2, 4),
        "virtual_stages": 1,
    }  # fmt: skip
    wrong: list[dict[str, Any]] = [
        {"chunks": None}, {"chunks": 2, "sample": torch.ones(2, 4), "balance": "bytes"},
        {"chunks": 2, "balance": [4]}, {"chunks": 2, "schedule": "x"},
    ]  # fmt: skip
    stage, stages = hc.grid().stage, hc.grid().stages

    def build(**arguments: Any) -> Any:
        return in_stages(lambda: nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]), **arguments)

    for owner, (name, value) in itertools.product((0, current().size - 1), several.items()):
        given = {"chunks": 2, **({name: value} if current().number == owner else {})}
        with pytest.raises(ValueError, match=f"Pipeline: {name} differs between ranks"):
            build(**given)
    for arguments in wrong:
        with pytest.raises(ValueError, match=list(arguments)[-1]):
            build(**arguments)
    built = build(chunks=2)
    with pytest.raises(ValueError, match=f"replicas=.* cannot be used with stages={stages}"):
        optimizer_of(built, replicas=4, model=built)
    torch.manual_seed(stage)
    with pytest.raises(ValueError, match="different values of 'embedding.tokens.weight'"):
        hc.Pipeline(tied_transformer(), chunks=4)


def comes_to_grief(case: str) -> None:
    if case.startswith("hangs"):
        hc.init(stages=hc.grid().stages, stall_timeout=8)
    model, data = in_stages(transformer, chunks=4), batches(tokens)

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        if case == "hangs":
            time.sleep(1000)
        raise ArithmeticError("the last stage raises")

    if case == "hangs before clipping":
        model.accumulate(data[0], loss_of)
        time.sleep(1000 * hc.grid().stage)
        hc.clip_grad_norm_(model.parameters(), 1.0)
    if case == "differ":
        torch.manual_seed(hc.grid().stage)
    # Of the last stage the targets are used.
    model.accumulate(data[hc.grid().stage if case == "other batch" else 0], loss)


def main() -> None:
    stages, case = int(sys.argv[1]), " ".join(sys.argv[2:])
    with pytest.raises(ValueError, match=r"stages=5 does not divide the number of processes, \d; .* -np 5"):
        hc.init(stages=5)
    hc.init(stages=stages, stall_timeout=60)
    assert (hc.grid().stages, 0 <= hc.grid().stage < stages) == (stages, True)
    if case not in ("", "messages"):
        comes_to_grief(case)
    equality(["mixed values"] if case else CASES)
    apart()
    one_stage_alone()
    copies_of_tied_parameters()
    if hc.size() > 1:
        sharded_in_stages()
    if not case:
        norms_in_stages()
        planned()
    overflow()
    frees_other_stages()
    hc.shutdown()
    assert (hc.grid().stages, hc.grid().stage) == (1, 0)
    print("equal", flush=True)


if __name__ == "__main__":
    main()
