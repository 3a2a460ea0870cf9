"""Every graph that breaks other tools ends in the reference's weights: once, in one order, with one bucket and with many."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from one_process import WIDTH, Scenario, batch, check
from torch import nn

import hvd_ckpt as hc

pytestmark = pytest.mark.ranks(gloo=(1, 2), mpi=(4,))

ONE_BUCKET, MANY_BUCKETS = 25.0, 0.0006  # MiB: everything together, or about two layers each


def linear_chain(layers: int = 6) -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(layers)])


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return (output - 0.3).square().mean()


class Plain:
    """A chain in four segments."""

    build = staticmethod(linear_chain)

    @staticmethod
    def backward(model: Any, step: int, rank: int, reentrant: bool) -> None:
        loss_of(hc.checkpoint_sequential(model, 4, batch(step, rank), use_reentrant=reentrant)).backward()


class Tied:
    """One layer in three segments, and layers before it, so that its bucket could leave too early."""

    caps = (25.0, 0.0002)  # with the second, each parameter has a bucket of its own

    @staticmethod
    def build() -> nn.Module:
        shared, (first, second, third, fourth) = nn.Linear(WIDTH, WIDTH), linear_chain(4)
        return nn.Sequential(first, second, third, shared, nn.Tanh(), fourth, shared, nn.Tanh(), shared)

    @staticmethod
    def backward(model: Any, step: int, rank: int, reentrant: bool) -> None:
        x = batch(step, rank)
        loss_of(
            hc.checkpoint_sequential(model, [2, 2, 2, 2, 1], x, use_reentrant=reentrant, keep_last=False)
        ).backward()


class Nested:
    build = staticmethod(linear_chain)

    @staticmethod
    def backward(model: Any, step: int, rank: int, reentrant: bool) -> None:
        def inner(x: torch.Tensor) -> torch.Tensor:
            return model[1](hc.checkpoint(model[0], x, use_reentrant=reentrant))

        def outer(x: torch.Tensor) -> torch.Tensor:
            return model[3](hc.checkpoint(inner, model[2](x), use_reentrant=reentrant))

        loss_of(
            model[5](model[4](hc.checkpoint(outer, batch(step, rank), use_reentrant=reentrant)))
        ).backward()


class Unused:
    """One parameter that no rank ever uses."""

    build = staticmethod(linear_chain)

    @staticmethod
    def backward(model: Any, step: int, rank: int, reentrant: bool) -> None:
        loss_of(hc.checkpoint_sequential(model[:3], 3, batch(step, rank), use_reentrant=reentrant)).backward()
        assert model[5][0].weight.grad is None


class UnusedOnOneRank:
    build = staticmethod(linear_chain)

    @staticmethod
    def backward(model: Any, step: int, rank: int, reentrant: bool) -> None:
        layers = model[:4] if rank == 0 else model
        loss_of(hc.checkpoint_sequential(layers, 3, batch(step, rank), use_reentrant=reentrant)).backward()


class Accumulation:
    """Two backward passes per step."""

    build = staticmethod(linear_chain)

    @staticmethod
    def backward(model: Any, step: int, rank: int, reentrant: bool) -> None:
        for part in range(2):
            loss_of(
                hc.checkpoint_sequential(model, 3, batch(step, rank, part), use_reentrant=reentrant)
            ).backward()


class ShortLastGroup:
    """Three backward passes per step, and one in every third step."""

    build = staticmethod(linear_chain)
    steps = 9

    @staticmethod
    def backward(model: Any, step: int, rank: int, reentrant: bool) -> None:
        for part in range(1 if step % 3 == 2 else 3):
            loss_of(
                hc.checkpoint_sequential(model, 3, batch(step, rank, part), use_reentrant=reentrant)
            ).backward()


class ChangingGraph:
    """Each step and each rank uses other layers, one of them several times."""

    build = staticmethod(linear_chain)
    static = False

    @staticmethod
    def backward(model: Any, step: int, rank: int, reentrant: bool) -> None:
        layers = [model[(step + rank + i) % 6] for i in range(2 + step % 3)] + [model[step % 6]] * (step % 3)
        loss_of(hc.checkpoint_sequential(layers, 2, batch(step, rank), use_reentrant=reentrant)).backward()


class LateOnOneRank:
    """From step 3 on one rank uses the last layer, whose bucket leaves first, once more: recomputed, or in a second pass."""

    build = staticmethod(linear_chain)
    static = False

    @staticmethod
    def backward(model: Any, step: int, rank: int, reentrant: bool) -> None:
        x = batch(step, rank)
        late = step >= 3 and rank == 0
        if late and reentrant:
            x = hc.checkpoint(model[5], x, use_reentrant=True)
        loss_of(hc.checkpoint_sequential(model, 3, x, use_reentrant=reentrant)).backward()
        if late and not reentrant:
            loss_of(model[5](batch(step, rank, 1))).backward()


class TwoForwards:
    """Two forward passes before one backward pass."""

    build = staticmethod(linear_chain)

    @staticmethod
    def backward(model: Any, step: int, rank: int, reentrant: bool) -> None:
        outputs = [
            hc.checkpoint_sequential(model, 3, batch(step, rank, part), use_reentrant=reentrant)
            for part in range(2)
        ]
        (loss_of(outputs[0]) + loss_of(outputs[1])).backward()


class TwoBackwards:
    """Two backward passes through one recomputed part of the graph."""

    build = staticmethod(linear_chain)

    @staticmethod
    def backward(model: Any, step: int, rank: int, reentrant: bool) -> None:
        shared = hc.checkpoint(model[:3], batch(step, rank), use_reentrant=reentrant)
        loss_of(model[3](shared)).backward(retain_graph=True)
        loss_of(model[5](model[4](shared))).backward()


class ForwardWithoutGrad:
    """A forward pass under no_grad in every step, through the same checkpoints."""

    build = staticmethod(linear_chain)

    @staticmethod
    def backward(model: Any, step: int, rank: int, reentrant: bool) -> None:
        with torch.no_grad():
            hc.checkpoint_sequential(model, 3, batch(step, rank, 1), use_reentrant=reentrant)
        loss_of(hc.checkpoint_sequential(model, 3, batch(step, rank), use_reentrant=reentrant)).backward()
        with torch.no_grad():
            hc.checkpoint_sequential(model, 3, batch(step, rank, 2), use_reentrant=reentrant)


class ExplicitParameters:
    """CheckpointFunction: the parameters are arguments, so a tied layer accumulations once per segment."""

    build = staticmethod(Tied.build)

    @staticmethod
    def backward(model: Any, step: int, rank: int, reentrant: bool) -> None:
        x = batch(step, rank).requires_grad_()
        for part in (model[:4], model[4:7], model[7:]):
            x = hc.CheckpointFunction.apply(part, 1, x, *part.parameters())
        loss_of(x).backward()


class Dropout:
    @staticmethod
    def build() -> nn.Module:
        return nn.Sequential(
            *[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.Tanh()) for _ in range(5)]
        )

    @staticmethod
    def backward(model: Any, step: int, rank: int, reentrant: bool) -> None:
        loss_of(hc.checkpoint_sequential(model, 3, batch(step, rank), use_reentrant=reentrant)).backward()


class MixedDtypes:
    """Parameters of four dtypes; bfloat16 travels as float32."""

    tolerance = 1e-3
    steps = 4

    @staticmethod
    def build() -> nn.Module:
        return nn.ModuleList(
            [
                nn.Linear(WIDTH, WIDTH).to(dtype)
                for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.float32)
            ]
        )

    @staticmethod
    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    @staticmethod
    def backward(model: Any, step: int, rank: int, reentrant: bool) -> None:
        x = batch(step, rank)
        for layer in model:
            x = hc.checkpoint(layer, x.to(layer.weight.dtype), use_reentrant=reentrant)
        (x - 3).square().mean().backward()


class Frozen:
    """Layers are frozen and unfrozen in mid-training; one is frozen from the start."""

    static = False
    steps = 9

    @staticmethod
    def build() -> nn.Module:
        model = linear_chain()
        model[4].requires_grad_(False)
        return model

    @staticmethod
    def between(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
        model[1].requires_grad_(step not in (3, 4))
        model[4].requires_grad_(step >= 5)
        if step == 3:
            for parameter in model[1].parameters():
                parameter.grad = None

    @staticmethod
    def backward(model: Any, step: int, rank: int, reentrant: bool) -> None:
        loss_of(hc.checkpoint_sequential(model, 3, batch(step, rank), use_reentrant=reentrant)).backward()


class Converted:
    """The model becomes float64 between two steps, and float32 again."""

    static = False
    tolerance = 5e-6

    build = staticmethod(linear_chain)

    @staticmethod
    def between(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step in (2, 4):
            model.to(torch.float64 if step == 2 else torch.float32)
            for state in optimizer.state.values():
                state["momentum_buffer"] = state["momentum_buffer"].to(next(model.parameters()).dtype)

    @staticmethod
    def backward(model: Any, step: int, rank: int, reentrant: bool) -> None:
        x = batch(step, rank).to(next(model.parameters()).dtype)
        loss_of(hc.checkpoint_sequential(model, 3, x, use_reentrant=reentrant)).backward()


class GradientsByHand:
    """Autograd.grad on parameters in between, a gradient set by hand before backward, one after it that autograd never makes."""

    @staticmethod
    def build() -> nn.Module:
        model = linear_chain()
        model.register_parameter("by_hand", nn.Parameter(torch.ones(WIDTH)))
        return model

    @staticmethod
    def backward(model: Any, step: int, rank: int, reentrant: bool) -> None:
        layers = list(model)
        output = hc.checkpoint_sequential(layers, 3, batch(step, rank), use_reentrant=False)
        torch.autograd.grad(loss_of(output), layers[5][0].weight, retain_graph=True)
        loss_of(output).backward(retain_graph=True)
        torch.autograd.grad(loss_of(output), [layers[5][0].weight, layers[0][0].bias])
        model.by_hand.grad = torch.full((WIDTH,), float(rank + step))


class GradInsideBackward:
    """A hook that runs ``torch.autograd.grad`` on a parameter in mid-backward, when its bucket has left."""

    build = staticmethod(linear_chain)

    @staticmethod
    def backward(model: Any, step: int, rank: int, reentrant: bool) -> None:
        x = hc.checkpoint_sequential(model[:3], 2, batch(step, rank), use_reentrant=reentrant)
        if x.requires_grad:

            def during(gradient: torch.Tensor) -> None:
                with torch.enable_grad():
                    torch.autograd.grad(loss_of(model[5](batch(step, rank))), list(model[5].parameters()))

            x.register_hook(during)
        loss_of(model[3:](x)).backward()


SCENARIOS = [
    Plain,
    Tied,
    Nested,
    Unused,
    UnusedOnOneRank,
    Accumulation,
    ShortLastGroup,
    ChangingGraph,
    LateOnOneRank,
    TwoForwards,
    TwoBackwards,
    ForwardWithoutGrad,
    ExplicitParameters,
    Dropout,
    MixedDtypes,
    Frozen,
    Converted,
    GradientsByHand,
    GradInsideBackward,
]


def hardest_on_four_ranks(case: Any) -> None:
    if hc.size() >= 4 and case not in (Tied, UnusedOnOneRank):
        pytest.skip("with four ranks, where a step takes long, the hardest graphs only")


def make(case: Any, reentrant: bool, **changes: Any) -> Scenario:
    options = {
        name: getattr(case, name)
        for name in ("static", "tolerance", "steps", "between", "optimizer")
        if hasattr(case, name)
    }
    return Scenario(
        case.build,
        lambda model, step, rank: case.backward(model, step, rank, reentrant),
        **{**options, **changes},
    )


UNEVEN = (Tied, UnusedOnOneRank, ChangingGraph, LateOnOneRank, ShortLastGroup)


@pytest.mark.ranks(gloo=(1, 2, 3, 4), mpi=(2, 4))
@pytest.mark.parametrize("reentrant", [False, True], ids=["nonreentrant", "reentrant"])
@pytest.mark.parametrize("case", SCENARIOS, ids=lambda case: case.__name__)
def test_equals_one_process(case: Any, reentrant: bool) -> None:
    if hc.size() == 3 and not (reentrant and case in UNEVEN):
        pytest.skip("three ranks try what sums without an order may break")
    # On four ranks, where a step takes long, the harder of the two is enough.
    caps = getattr(case, "caps", (ONE_BUCKET, MANY_BUCKETS))
    scenario = make(case, reentrant)
    for cap in caps if hc.size() < 4 else caps[1:]:
        optimizer = check(scenario, bucket_cap_mb=cap)
        stats = optimizer.reduction_stats
        if hc.size() > 1 and cap == caps[1] and case in (Plain, Tied, Nested, Accumulation, Dropout):
            assert stats.last.launches_in_backward == len(stats.last.launch_order) - 1 >= 1
            assert stats.last.control_messages == 0
        if hc.size() > 1 and case is Frozen:  # unfrozen layers are in a bucket and waited for, as all others
            assert stats.last.unbucketed_gradients == [] and stats.last.control_messages == 0


@pytest.mark.parametrize("clear", ["none", "zero", "model", "never"])
@pytest.mark.parametrize("case", [Plain, Tied, UnusedOnOneRank, Accumulation], ids=lambda case: case.__name__)
def test_any_way_to_clear_gradients(case: Any, clear: str) -> None:
    scenario = make(
        case, True, clear=clear, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01)
    )
    check(scenario, bucket_cap_mb=MANY_BUCKETS)


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
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "case", [Tied, UnusedOnOneRank, LateOnOneRank, Accumulation], ids=lambda case: case.__name__
)
@pytest.mark.filterwarnings("ignore:Parameter `num_groups`")
def test_horovods_arguments(case: Any, options: dict[str, Any]) -> None:
    hardest_on_four_ranks(case)
    scenario = lossy(case) if "compression" in options else summed(case) if "op" in options else exact(case)
    check(scenario, bucket_cap_mb=MANY_BUCKETS, **options)


@functools.cache
def exact(case: Any) -> Scenario:
    return make(case, False, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.02))


def summed(case: Any) -> Scenario:
    return make(case, False, optimizer=exact(case).optimizer, scale=float(hc.size()))


def lossy(case: Any) -> Scenario:
    optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.3)  # noqa: E731
    return make(case, False, optimizer=optimizer, tolerance=1e-4)


def test_groups_as_lists_of_parameters() -> None:
    class Grouped(Plain):
        pass

    for pick in (slice(0, 4), slice(6, 12)):
        torch.manual_seed(7)
        model = linear_chain()
        parameters = list(model.parameters())
        scenario = make(Grouped, False)
        scenario.build = lambda model=model: model  # type: ignore[misc]
        optimizer = hc.DistributedOptimizer(
            torch.optim.SGD(parameters, lr=0.1),
            named_parameters=model.named_parameters(),
            groups=[parameters[pick]],
        )
        for step in range(3):
            optimizer.zero_grad()
            scenario.backward(model, step, hc.rank())
            optimizer.step()
        if hc.size() > 1:
            assert len(optimizer.reduction_stats.last.launch_order) == 1 + len(parameters) - len(
                parameters[pick]
            )


@pytest.mark.ranks(gloo=(1, 2, 4), mpi=(2, 4))
@pytest.mark.parametrize("reentrant", [False, True], ids=["nonreentrant", "reentrant"])
def test_late_gradients_heal_and_are_learned(reentrant: bool) -> None:
    if hc.size() == 1:
        pytest.skip("one rank reduces nothing")
    stats = check(make(LateOnOneRank, reentrant, steps=4), bucket_cap_mb=MANY_BUCKETS).reduction_stats
    assert stats.last.late_gradients == ["5.0.weight", "5.0.bias"] == stats.last.unbucketed_gradients
    stats = check(make(LateOnOneRank, reentrant, steps=5), bucket_cap_mb=MANY_BUCKETS).reduction_stats
    assert stats.late_gradients == 2
    assert stats.last.late_gradients == [] == stats.last.unbucketed_gradients


def test_unused_parameter_keeps_no_gradient_and_no_storage() -> None:
    optimizer = check(make(Unused, False, steps=2))
    if hc.size() > 1:
        names = optimizer.reduction_state_dict()["order"]
        assert names and not any(name.startswith(("3.", "4.", "5.")) for name in names)
