"""Every graph that breaks other tools ends in the reference's weights: once, in one order, with one bucket and with many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_process import SMALL, WIDTH, Scenario, batch, chain, check
from torch import nn

import hvd_ckpt as hc

pytestmark = pytest.mark.ranks(gloo=(2,), mpi=(4,))

ONE_BUCKET, MANY_BUCKETS = 25.0, 0.0006  # MiB: everything together, or about two layers each
Backward = Callable[[Any, int, int, bool], None]
CASES: dict[str, tuple[Backward, dict[str, Any]]] = {}


def case(build: Callable[[], nn.Module] = lambda: chain(6), **options: Any) -> Any:
    """Enters what one step of a rank does with a model, and with reentrant recomputation or not."""

    def enter(backward: Backward) -> Backward:
        CASES[backward.__name__] = backward, {"build": build, **options}
        return backward

    return enter


def make(name: str, reentrant: bool, **changes: Any) -> Scenario:
    backward, options = CASES[name]
    return Scenario(
        backward=lambda model, step, rank: backward(model, step, rank, reentrant), **{**options, **changes}
    )


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return (output - 0.3).square().mean()


def run(layers: Any, x: torch.Tensor, reentrant: bool, segments: Any = 3) -> None:
    loss_of(hc.checkpoint_sequential(layers, segments, x, use_reentrant=reentrant)).backward()


@case()
def plain(model: Any, step: int, rank: int, reentrant: bool) -> None:
    run(model, batch(step, rank), reentrant, 4)


def tied_chain() -> nn.Module:
    shared, (first, second, third, fourth) = nn.Linear(WIDTH, WIDTH), chain()
    return nn.Sequential(first, second, third, shared, nn.Tanh(), fourth, shared, nn.Tanh(), shared)


@case(tied_chain)
def tied(model: Any, step: int, rank: int, reentrant: bool) -> None:
    """One layer in three segments, and layers before it, so that its bucket could leave too early."""
    parts = [2, 2, 2, 2, 1]
    x = hc.checkpoint_sequential(model, parts, batch(step, rank), use_reentrant=reentrant, keep_last=False)
    loss_of(x).backward()


@case()
def nested(model: Any, step: int, rank: int, reentrant: bool) -> None:
    def inner(x: torch.Tensor) -> torch.Tensor:
        return model[1](hc.checkpoint(model[0], x, use_reentrant=reentrant))

    def outer(x: torch.Tensor) -> torch.Tensor:
        return model[3](hc.checkpoint(inner, model[2](x), use_reentrant=reentrant))

    loss_of(model[4:](hc.checkpoint(outer, batch(step, rank), use_reentrant=reentrant))).backward()


@case()
def unused(model: Any, step: int, rank: int, reentrant: bool) -> None:
    """Parameters that no rank ever uses."""
    run(model[:3], batch(step, rank), reentrant)
    assert model[5][0].weight.grad is None


@case()
def unused_on_one_rank(model: Any, step: int, rank: int, reentrant: bool) -> None:
    run(model[:4] if rank == 0 else model, batch(step, rank), reentrant)


@case()
def accumulation(model: Any, step: int, rank: int, reentrant: bool) -> None:
    for part in range(2):
        run(model, batch(step, rank, part), reentrant)


@case(steps=7)
def short_last_group(model: Any, step: int, rank: int, reentrant: bool) -> None:
    """Three backward passes per step, and one in every third step."""
    for part in range(1 if step % 3 == 2 else 3):
        run(model, batch(step, rank, part), reentrant)


@case(static=False)
def changing_graph(model: Any, step: int, rank: int, reentrant: bool) -> None:
    """Each step and each rank uses other layers, one of them several times."""
    layers = [model[(step + rank + i) % 6] for i in range(2 + step % 3)] + [model[step % 6]] * (step % 3)
    run(layers, batch(step, rank), reentrant, 2)


@case(static=False)
def late_on_one_rank(model: Any, step: int, rank: int, reentrant: bool) -> None:
    """From step 3 on one rank uses the last layer, whose bucket leaves first, once more: recomputed, or in a second pass."""
    x = batch(step, rank)
    late = step >= 3 and rank == 0
    if late and reentrant:
        x = hc.checkpoint(model[5], x, use_reentrant=True)
    run(model, x, reentrant)
    if late and not reentrant:
        loss_of(model[5](batch(step, rank, 1))).backward()


@case()
def two_forwards(model: Any, step: int, rank: int, reentrant: bool) -> None:
    """Two forward passes before one backward pass."""
    xs = [batch(step, rank, part) for part in range(2)]
    first, second = (hc.checkpoint_sequential(model, 3, x, use_reentrant=reentrant) for x in xs)
    (loss_of(first) + loss_of(second)).backward()


@case()
def two_backwards(model: Any, step: int, rank: int, reentrant: bool) -> None:
    """Two backward passes through one recomputed part of the graph."""
    shared = hc.checkpoint(model[:3], batch(step, rank), use_reentrant=reentrant)
    loss_of(model[3](shared)).backward(retain_graph=True)
    loss_of(model[4:](shared)).backward()


@case()
def forward_without_grad(model: Any, step: int, rank: int, reentrant: bool) -> None:
    """A forward pass under no_grad in every step, through the same checkpoints."""
    for part in range(3):
        with torch.set_grad_enabled(part == 1):
            x = hc.checkpoint_sequential(model, 3, batch(step, rank, part), use_reentrant=reentrant)
            loss_of(x).backward() if part == 1 else None


@case(tied_chain)
def explicit_parameters(model: Any, step: int, rank: int, reentrant: bool) -> None:
    """CheckpointFunction: the parameters are arguments, so a tied layer accumulates once per segment."""
    x = batch(step, rank).requires_grad_()
    for part in (model[:4], model[4:7], model[7:]):
        x = hc.CheckpointFunction.apply(part, 1, x, *part.parameters())
    loss_of(x).backward()


@case(lambda: nn.Sequential(*[nn.Sequential(one, nn.Dropout(0.3)) for one in chain(5)]))
def dropout(model: Any, step: int, rank: int, reentrant: bool) -> None:
    run(model, batch(step, rank), reentrant)


DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.float32)


@case(
    lambda: nn.ModuleList([nn.Linear(WIDTH, WIDTH).to(dtype) for dtype in DTYPES]),
    tolerance=1e-3,
    steps=4,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
)
def mixed_dtypes(model: Any, step: int, rank: int, reentrant: bool) -> None:
    """Parameters of four dtypes; bfloat16 travels as float32."""
    x = batch(step, rank)
    for layer in model:
        x = hc.checkpoint(layer, x.to(layer.weight.dtype), use_reentrant=reentrant)
    (x - 3).square().mean().backward()


def partly_frozen() -> nn.Module:
    model = chain(6)
    model[4].requires_grad_(False)
    return model


def freeze(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    model[1].requires_grad_(step not in (3, 4))
    model[4].requires_grad_(step >= 5)
    if step == 3:
        model[1].zero_grad()


@case(partly_frozen, between=freeze, static=False, steps=9)
def frozen(model: Any, step: int, rank: int, reentrant: bool) -> None:
    """Layers are frozen and unfrozen in mid-training; one is frozen from the start."""
    run(model, batch(step, rank), reentrant)


def convert(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step in (2, 4):
        dtype = torch.float64 if step == 2 else torch.float32
        model.to(dtype)
        for state in optimizer.state.values():
            state["momentum_buffer"] = state["momentum_buffer"].to(dtype)


@case(between=convert, static=False, tolerance=5e-6)
def converted(model: Any, step: int, rank: int, reentrant: bool) -> None:
    """The model becomes float64 between two steps, and float32 again."""
    run(model, batch(step, rank).to(model[0][0].weight.dtype), reentrant)


def chain_and_one_by_hand() -> nn.Module:
    model = chain(6)
    model.register_parameter("by_hand", nn.Parameter(torch.ones(WIDTH)))
    return model


@case(chain_and_one_by_hand)
def gradients_by_hand(model: Any, step: int, rank: int, reentrant: bool) -> None:
    """Autograd.grad on parameters in between, and a gradient set by hand that autograd never makes."""
    layers = list(model)
    output = hc.checkpoint_sequential(layers, 3, batch(step, rank), use_reentrant=False)
    torch.autograd.grad(loss_of(output), layers[5][0].weight, retain_graph=True)
    loss_of(output).backward(retain_graph=True)
    torch.autograd.grad(loss_of(output), [layers[5][0].weight, layers[0][0].bias])
    model.by_hand.grad = torch.full((WIDTH,), float(rank + step))


@case()
def grad_inside_backward(model: Any, step: int, rank: int, reentrant: bool) -> None:
    """A hook that runs ``torch.autograd.grad`` on a parameter in mid-backward, when its bucket has left."""
    x = hc.checkpoint_sequential(model[:3], 2, batch(step, rank), use_reentrant=reentrant)

    def during(gradient: torch.Tensor) -> None:
        with torch.enable_grad():
            torch.autograd.grad(loss_of(model[5](batch(step, rank))), list(model[5].parameters()))

    if x.requires_grad:
        x.register_hook(during)
    loss_of(model[3:](x)).backward()


UNEVEN = ("tied", "unused_on_one_rank", "changing_graph", "late_on_one_rank", "short_last_group")


@pytest.mark.ranks(gloo=(2, 3), mpi=(4,))
@pytest.mark.parametrize("reentrant", [False, True], ids=["nonreentrant", "reentrant"])
@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(name: str, reentrant: bool) -> None:
    if hc.size() == 3 and not (reentrant and name in UNEVEN):
        pytest.skip("three ranks try what sums without an order may break")
    if reentrant and name in ("explicit_parameters", "gradients_by_hand"):
        pytest.skip("it is the same")
    stats = check(
        make(name, reentrant), bucket_cap_mb=SMALL if name == "tied" else MANY_BUCKETS
    ).reduction_stats
    if name in ("plain", "tied", "nested", "accumulation", "dropout"):
        assert stats.last.launches_in_backward == len(stats.last.launch_order) - 1 >= 1
        assert stats.last.control_messages == 0
    if name == "frozen":  # unfrozen layers are in a bucket and waited for, as all others
        assert stats.last.unbucketed_gradients == [] and stats.last.control_messages == 0


@pytest.mark.ranks(gloo=(1, 2))
@pytest.mark.parametrize("name", [*UNEVEN, "accumulation", "mixed_dtypes", "frozen", "converted"])
def test_equals_one_process_with_one_bucket(name: str) -> None:
    check(make(name, True), bucket_cap_mb=ONE_BUCKET)


@pytest.mark.parametrize("clear", ["zero", "model", "never"])
@pytest.mark.parametrize("name", ["unused_on_one_rank", "accumulation"])
def test_any_way_to_clear_gradients(name: str, clear: str) -> None:
    optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.01)  # noqa: E731
    check(make(name, True, clear=clear, optimizer=optimizer), bucket_cap_mb=MANY_BUCKETS)


@pytest.mark.parametrize("name", ["unused_on_one_rank", "late_on_one_rank"])
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
@pytest.mark.filterwarnings("ignore:Parameter `num_groups`")
def test_horovods_arguments(name: str, options: dict[str, Any]) -> None:
    lossy = "compression" in options
    scenario = make(
        name,
        False,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.3 if lossy else 0.02),
        tolerance=1e-4 if lossy else 2e-6,
        scale=float(hc.size()) if "op" in options else 1.0,
    )
    check(scenario, bucket_cap_mb=MANY_BUCKETS, **options)


def test_groups_as_lists_of_parameters() -> None:
    for pick in (slice(0, 4), slice(6, 12)):
        model = chain(6)
        parameters = list(model.parameters())
        optimizer = hc.DistributedOptimizer(
            torch.optim.SGD(parameters, lr=0.1),
            named_parameters=model.named_parameters(),
            groups=[parameters[pick]],
        )
        for step in range(3):
            optimizer.zero_grad()
            plain(model, step, hc.rank(), False)
            optimizer.step()
        apart = len(parameters) - len(parameters[pick])
        assert len(optimizer.reduction_stats.last.launch_order) == 1 + apart


@pytest.mark.parametrize("reentrant", [False, True], ids=["nonreentrant", "reentrant"])
def test_late_gradients_heal_and_are_learned(reentrant: bool) -> None:
    stats = check(make("late_on_one_rank", reentrant, steps=4), bucket_cap_mb=MANY_BUCKETS).reduction_stats
    assert stats.last.late_gradients == ["5.0.weight", "5.0.bias"] == stats.last.unbucketed_gradients
    stats = check(make("late_on_one_rank", reentrant, steps=5), bucket_cap_mb=MANY_BUCKETS).reduction_stats
    assert stats.late_gradients == 2
    assert stats.last.late_gradients == [] == stats.last.unbucketed_gradients


def test_unused_parameters_are_in_no_bucket() -> None:
    names = check(make("unused", False, steps=2)).reduction_state_dict()["order"]
    assert names and not any(name.startswith(("3.", "4.", "5.")) for name in names)
