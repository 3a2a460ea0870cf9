"""Tests of the graphs that break other tools: the weights of the reference, with one bucket and with many."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_process import check
from torch import nn

import hvd_ckpt as hc
from hvd_ckpt.app.compare.cells import Chain, Recompute
from hvd_ckpt.app.compare.scenarios import LAYERS, SCENARIOS, WIDTH, Scenario, layer, run_along
from hvd_ckpt.app.compare.workloads import RankStep, Workload
from hvd_ckpt.data.objectives import Batch

pytestmark = pytest.mark.ranks(gloo=(2,), mpi=(4,))

# MiB: everything together, about two layers each, a parameter each
ONE_BUCKET, MANY_BUCKETS, SMALLEST_BUCKETS = 25.0, 0.0024, 0.0005


class LateOnOneRank(Scenario):
    """From step 3 on one rank uses the last layer, whose bucket leaves first, once more: in a second pass."""

    static = False

    def run(self, step: RankStep) -> list[torch.Tensor]:
        losses = run_along(self, step, range(LAYERS))
        return losses + (run_along(self, step, [LAYERS - 1]) if self.is_late(step) else [])

    def is_late(self, step: RankStep) -> bool:
        return step.number >= 3 and step.rank == 0


class LateInBackward(LateOnOneRank):
    """The same within one backward pass, in which a reentrant recomputation accumulates once per use."""

    variants = ("reentrant",)

    def run(self, step: RankStep) -> list[torch.Tensor]:
        return run_along(self, step, [*[LAYERS - 1] * self.is_late(step), *range(LAYERS)])


class TwoBackwards(Scenario):
    """Two backward passes through one recomputed part of the graph."""

    def run(self, step: RankStep) -> list[torch.Tensor]:
        (batch,), model = step.batches, step.model
        shared = model(*batch.inputs, path=[0, 1, 2])
        losses = [
            self.loss(rest(shared), batch.targets)
            for rest in (model.chain[3], nn.Sequential(*model.chain[4:]))
        ]
        losses[0].backward(retain_graph=True)
        losses[1].backward()
        return [loss.detach() for loss in losses]


class Dropout(Scenario):
    """Recomputation draws what the forward pass drew."""

    def model(self, recompute: Recompute) -> nn.Module:
        return Chain([nn.Sequential(layer(), nn.Dropout(0.3)) for _ in range(LAYERS)], recompute)


class Converted(Scenario):
    """The model becomes float64 between two steps, and float32 again."""

    static = False

    def before_step(self, model: nn.Module, number: int) -> None:
        if number in (2, 4):
            model.to(torch.float64 if number == 2 else torch.float32)

    def run(self, step: RankStep) -> list[torch.Tensor]:
        (batch,), dtype = step.batches, next(step.model.parameters()).dtype
        converted = Batch((batch.inputs[0].detach().to(dtype).requires_grad_(),), batch.targets)
        return run_along(self, RankStep(**{**vars(step), "batches": [converted]}), range(LAYERS))


class GradientsByHand(Scenario):
    """``autograd.grad`` on parameters in between, and a gradient set by hand that autograd never makes."""

    variants = ("non-reentrant",)

    def model(self, recompute: Recompute) -> nn.Module:
        model = Chain([layer() for _ in range(LAYERS)], recompute)
        model.register_parameter("by_hand", nn.Parameter(torch.ones(WIDTH)))
        return model

    def run(self, step: RankStep) -> list[torch.Tensor]:
        (batch,), layers = step.batches, step.model.chain
        loss = self.loss(step.model(*batch.inputs), batch.targets)
        torch.autograd.grad(loss, layers[5][0].weight, retain_graph=True)
        loss.backward(retain_graph=True)
        torch.autograd.grad(loss, [layers[5][0].weight, layers[0][0].bias])
        step.model.by_hand.grad = torch.full((WIDTH,), float(step.rank + step.number))
        return [loss.detach()]


class GradInsideBackward(Scenario):
    """A hook runs ``torch.autograd.grad`` on a parameter in mid-backward, when its bucket has left."""

    def run(self, step: RankStep) -> list[torch.Tensor]:
        (batch,), last = step.batches, step.model.chain[5]
        x = step.model(*batch.inputs, path=[0, 1, 2])

        def during(gradient: torch.Tensor) -> None:
            with torch.enable_grad():
                loss = self.loss(last(batch.inputs[0].detach()), batch.targets)
                torch.autograd.grad(loss, list(last.parameters()))

        x.register_hook(during)
        loss = self.loss(nn.Sequential(*step.model.chain[3:])(x), batch.targets)
        loss.backward()
        return [loss.detach()]


CASES: dict[str, Callable[..., Workload]] = {
    **SCENARIOS,
    "late-on-one-rank": LateOnOneRank,
    "late-in-backward": LateInBackward,
    "two-backwards": TwoBackwards,
    "dropout": Dropout,
    "converted": Converted,
    "gradients-by-hand": GradientsByHand,
    "grad-inside-backward": GradInsideBackward,
}
VARIANTS = [(name, variant) for name, case in CASES.items() for variant in case.variants]
# What is refused is left out, and half precision, which has float32 masters there.
IN_SHARDS = [pair for pair in VARIANTS if pair[0] not in ("uneven-data", "converted", "mixed-dtypes")]
UNEVEN = ("tied", "unused-on-one-rank", "changing-graph", "late-in-backward", "short-last-group")
TOLERANCES = {"mixed-dtypes": 1e-3, "converted": 5e-6}


def make(name: str, **changes: Any) -> Workload:
    """A scenario with the learning rate or momentum changed."""
    workload = CASES[name]("default", 7, None)
    if changes:
        workload.optimizer = lambda parameters: torch.optim.SGD(parameters, **changes)  # type: ignore[method-assign]
    return workload


def run(name: str, variant: str, **options: Any) -> Any:
    return check(
        make(name),
        variant,
        **{"bucket_cap_mb": MANY_BUCKETS, "tolerance": TOLERANCES.get(name, 2e-6), **options},
    )


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_equals_one_process(name: str, variant: str) -> None:
    cap = SMALLEST_BUCKETS if name == "tied" else MANY_BUCKETS
    engine = run(name, variant, bucket_cap_mb=cap, steps=9 if name == "frozen" else 7)
    last = engine.optimizer.reduction_stats.last
    if name in ("plain", "tied", "nested", "accumulation", "dropout"):
        assert last.launches_in_backward == len(last.launch_order) - 1 >= 1
        assert last.control_messages == 0
    if name == "frozen":  # unfrozen layers are in a bucket and waited for, as all others
        assert last.unbucketed_gradients == [] and last.control_messages == 0
    if name == "unused":
        assert engine.model.chain[LAYERS - 1][0].weight.grad is None
        names = engine.optimizer.reduction_state_dict()["order"]
        assert names and not any(name.startswith(f"chain.{LAYERS - 1}.") for name in names)


@pytest.mark.parametrize(("name", "variant"), IN_SHARDS)
def test_equals_one_process_with_gradients_in_shards(name: str, variant: str) -> None:
    last = run(name, variant, shard=2).optimizer.reduction_stats.last
    if name in ("plain", "tied", "unused-on-one-rank"):
        assert last.launches_in_backward == len(last.launch_order) == len(set(last.launch_order))
        assert not last.late_gradients
    if name == "unused":
        assert LAYERS - 1 not in last.launches, "a group that nobody uses is still sent"


@pytest.mark.ranks(gloo=(3,))
@pytest.mark.parametrize("name", UNEVEN)
def test_three_ranks_whose_sums_depend_on_their_order_equal_one_process(name: str) -> None:
    run(name, "reentrant")


@pytest.mark.ranks(gloo=(1, 2))
@pytest.mark.parametrize("name", [*UNEVEN, "accumulation", "mixed-dtypes", "frozen", "converted"])
def test_equals_one_process_with_one_bucket(name: str) -> None:
    run(name, "reentrant", bucket_cap_mb=ONE_BUCKET)


CLEAR: dict[str, Callable[[nn.Module, Any], Callable[[], Any]]] = {
    "zero": lambda model, optimizer: functools.partial(optimizer.zero_grad, set_to_none=False),
    "model": lambda model, optimizer: model.zero_grad,
    "never": lambda model, optimizer: lambda: None,
}


@pytest.mark.parametrize("clear", CLEAR)
@pytest.mark.parametrize("name", ["unused-on-one-rank", "accumulation"])
def test_any_way_to_clear_gradients(name: str, clear: str) -> None:
    sums = make(
        name, lr=0.01, momentum=1.0
    )  # adds up the gradients of all steps, as those that are never cleared
    expected = sums if clear == "never" else None
    check(make(name, lr=0.01), "reentrant", expected=expected, clear=CLEAR[clear], bucket_cap_mb=MANY_BUCKETS)


@pytest.mark.parametrize("name", ["unused-on-one-rank", "late-on-one-rank"])
@pytest.mark.parametrize(
    "options",
    [
        {"op": hc.Sum},
        {"gradient_predivide_factor": 4.0},
        {"groups": 2},
        {"num_groups": 3},
        {"keep_buckets": False},
        {"compression": hc.Compression.fp16},
        {"backward_passes_per_step": 2},
        {"shard": 2, "gradient_predivide_factor": 4.0},
        {"shard": 2, "backward_passes_per_step": 2},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Parameter `num_groups`")
def test_horovods_arguments(name: str, options: dict[str, Any]) -> None:
    lossy = "compression" in options
    rate = 0.3 if lossy else 0.02
    check(
        make(name, lr=rate),
        expected=make(name, lr=rate * hc.size()) if "op" in options else None,
        tolerance=1e-4 if lossy else 2e-6,
        bucket_cap_mb=MANY_BUCKETS,
        **options,
    )


def test_groups_as_lists_of_parameters() -> None:
    for pick in (slice(0, 4), slice(6, 12)):
        model = nn.Sequential(*[layer() for _ in range(LAYERS)])
        parameters = list(model.parameters())
        optimizer = hc.DistributedOptimizer(
            torch.optim.SGD(parameters, lr=0.1),
            named_parameters=model.named_parameters(),
            groups=[parameters[pick]],
        )
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, WIDTH)).sum().backward()
            optimizer.step()
        apart = len(parameters) - len(parameters[pick])
        assert len(optimizer.reduction_stats.last.launch_order) == 1 + apart


@pytest.mark.parametrize(
    ("name", "variant"), [("late-on-one-rank", "non-reentrant"), ("late-in-backward", "reentrant")]
)
def test_late_gradients_heal_and_are_learned(name: str, variant: str) -> None:
    *_, fourth, fifth = run(name, variant).steps
    layer_name = f"chain.{LAYERS - 1}.0"
    assert (
        fourth.late_gradients == [f"{layer_name}.weight", f"{layer_name}.bias"] == fourth.unbucketed_gradients
    )
    assert fifth.late_gradients == [] == fifth.unbucketed_gradients
