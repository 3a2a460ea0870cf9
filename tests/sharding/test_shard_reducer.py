"""Tests of gradients that are split over the ranks during the backward pass: all of them, in one order, never whole."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from one_process import WIDTH, batch, difference, fingerprint
from sharded import distribute
from torch import nn
from torch.utils.checkpoint import checkpoint

import hvd_ckpt as hc
from hvd_ckpt.utils.memory import recording_peak

pytestmark = pytest.mark.ranks(gloo=(1, 2), mpi=(4,))

several = pytest.mark.ranks(gloo=(2,), mpi=(4,))
ONE_LAYER = 300 / 2**20  # MiB: each layer is a group


@pytest.fixture(autouse=True)
def _small_is_not_special(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else these small groups would never wait for each other."""
    monkeypatch.setattr("hvd_ckpt.sharding.in_flight.SMALL_BYTES", 0)


def chain(layers: int = 4) -> nn.Sequential:
    return nn.Sequential(*[module for _ in range(layers) for module in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])


def split(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **options: Any) -> Any:
    return distribute(
        optimizer or torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        named_parameters=model.named_parameters(),
        model=model,
        **{"shard": 2, "bucket_cap_mb": ONE_LAYER, **options},
    )


def backward(model: nn.Module, step: int, rank: int, part: int = 0) -> None:
    (model(batch(step, rank, part)) - 0.3).square().mean().backward()


def passes(count: Callable[[int, int], int]) -> Callable[[nn.Module, int, int], None]:
    def run(model: nn.Module, step: int, rank: int) -> None:
        for part in range(count(step, rank)):
            backward(model, step, rank, part)

    return run


@dataclass
class Scenario:
    """A model, and what happens in one step of one rank.

    Attributes:
        build: makes the model; seeded, so every rank gets the same one.
        backward: forward and backward passes of (model, step, rank); no optimizer.
        between: called before each step with (model, optimizer, step), also by the reference.
        tolerance: largest difference allowed, absolute.
        options: of the distributed optimizer.
    """

    build: Callable[[], nn.Module]
    backward: Callable[[Any, int, int], Any]
    between: Callable[[Any, Any, int], Any] = lambda model, optimizer, step: None
    tolerance: float = 2e-6
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = lambda parameters: torch.optim.SGD(
        parameters, lr=0.05, momentum=0.9
    )
    options: dict[str, Any] = field(default_factory=dict)
    steps: int = 5


def seeded_build(scenario: Scenario) -> nn.Module:
    torch.manual_seed(7)
    return scenario.build()


def train_one_process(scenario: Scenario) -> nn.Module:
    """The reference, which adds the ranks' gradients in their order and in their own precision."""
    model = seeded_build(scenario)
    optimizer = scenario.optimizer(list(model.parameters()))
    for step in range(scenario.steps):
        scenario.between(model, optimizer, step)
        sums: list[torch.Tensor | None] = [None for _ in model.parameters()]
        for rank in range(hc.size()):
            for parameter in model.parameters():
                parameter.grad = None
            torch.manual_seed(10_000 * step + rank)
            scenario.backward(model, step, rank)
            for index, parameter in enumerate(model.parameters()):
                if parameter.grad is not None:
                    total, gradient = sums[index], parameter.grad.clone()
                    sums[index] = gradient if total is None else total + gradient
        for parameter, total in zip(model.parameters(), sums):
            parameter.grad = None if total is None else total / hc.size()
        optimizer.step()
    return model


def train_split(scenario: Scenario, **options: Any) -> tuple[nn.Module, Any, list[Any]]:
    """Weights, optimizer and the statistics of each step; ranks must agree on the order of launches and on the weights."""
    model = seeded_build(scenario)
    optimizer = split(model, scenario.optimizer(list(model.parameters())), **scenario.options, **options)
    steps = []
    for step in range(scenario.steps):
        scenario.between(model, optimizer, step)
        optimizer.zero_grad()
        torch.manual_seed(10_000 * step + hc.rank())
        scenario.backward(model, step, hc.rank())
        optimizer.step()
        steps.append(optimizer.reduction_stats.last)
    orders = [step.launch_order for step in steps]
    for order, weights in hc.allgather_object((orders, fingerprint(model))):
        assert order == orders, "ranks launched groups in different orders"
        assert weights == fingerprint(model), "ranks differ"
    return model, optimizer, steps


class Tied(nn.Module):
    """One layer used in three segments: it accumulates once per segment when they are recomputed by the reentrant variant."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(3):
            x = checkpoint(lambda y: self.shared(y).tanh(), x, use_reentrant=True)
        return self.last(x)


class Choosing(nn.Module):
    """Uses the layers that it is told to, registered in the order of their use or against it."""

    def __init__(self, layers: int = 4, against: bool = False) -> None:
        super().__init__()
        made = [nn.Linear(WIDTH, WIDTH) for _ in range(layers)]
        self.layers = nn.ModuleList(reversed(made) if against else made)
        self.use = list(reversed(range(layers))) if against else list(range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.use:
            x = self.layers[number](x).tanh()
        return x


def using(choose: Callable[[int, int], list[int]]) -> Callable[[Any, int, int], None]:
    def run(model: Any, step: int, rank: int) -> None:
        model.use = choose(step, rank)
        backward(model, step, rank)

    return run


def thaw(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    model[0].requires_grad_(step >= 2)


def by_hand(model: Any, step: int, rank: int) -> None:
    """The gradient of one parameter is made by its user, that of another replaced, a third has a graph."""
    model[0].bias.requires_grad_(False)
    loss = (model(batch(step, rank)) - 0.3).square().mean()
    loss.backward(create_graph=True)
    if rank == 0:
        model[0].bias.grad = torch.full_like(model[0].bias, 0.5)


def dynamic(model: Any, step: int, rank: int) -> None:
    """Any number of passes, each through any layers, any number of times."""
    draw = torch.Generator().manual_seed(100 * step + rank)
    for part in range(int(torch.randint(0, 4, (), generator=draw))):
        length = int(torch.randint(1, 7, (), generator=draw))
        model.use = torch.randint(0, 4, (length,), generator=draw).tolist()
        backward(model, step, rank, part)


class Words(nn.Module):
    """A sparse gradient, and weights whose memory order is not that of their shape."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 2 * WIDTH, sparse=True)
        self.blur = nn.Conv2d(2, 3, 3, padding=1).to(memory_format=torch.channels_last)
        self.out = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = self.table((x.abs() * 7).long() % 6)  # [4, 8, 16]
        image = words.view(4, WIDTH, 2, WIDTH).transpose(1, 2)
        return self.out(self.blur(image).mean(2).flatten(1))


EXACT = 0.0  # in ranks' order, as the reference adds
SCENARIOS = {
    "plain": Scenario(chain, backward, tolerance=EXACT),
    "sum, predivided": Scenario(chain, backward, options={"gradient_predivide_factor": 2.0}),
    "against the order of registration": Scenario(lambda: Choosing(against=True), backward, tolerance=EXACT),
    "three passes at once": Scenario(
        chain,
        passes(lambda step, rank: 3 if step < 3 else 2),
        tolerance=EXACT,
        options={"backward_passes_per_step": 3},
    ),
    "one pass on rank 0, three elsewhere": Scenario(chain, passes(lambda step, rank: 3 if rank else 1)),
    "more passes later": Scenario(chain, passes(lambda step, rank: 1 + step % 3)),
    "no pass on rank 0": Scenario(
        chain, passes(lambda step, rank: int(rank > 0 or step == 3 or hc.size() == 1)), tolerance=EXACT
    ),
    "reentrant, tied": Scenario(Tied, backward),
    "unused": Scenario(Choosing, using(lambda step, rank: [0, 1, 3]), tolerance=EXACT),
    "unused on rank 0": Scenario(
        Choosing, using(lambda step, rank: [0, 1, 3] if rank == 0 else [0, 1, 2, 3]), tolerance=EXACT
    ),
    "used first in the third step": Scenario(
        Choosing, using(lambda step, rank: [0, 1, 3] if step < 2 else [0, 1, 2, 3]), tolerance=EXACT
    ),
    "frozen, then not": Scenario(chain, backward, between=thaw, tolerance=EXACT),
    "set by hand": Scenario(chain, by_hand, tolerance=EXACT),
    "sparse and channels last": Scenario(Words, backward, tolerance=1e-5),
    "anything": Scenario(Choosing, dynamic, steps=8, tolerance=5e-6),
}


@pytest.mark.filterwarnings("ignore:Using backward.* with create_graph")
@pytest.mark.parametrize("name", SCENARIOS)
def test_sums_are_those_of_whole_gradients(name: str) -> None:
    scenario = SCENARIOS[name]
    model, _, steps = train_split(scenario)
    reference = train_one_process(scenario)
    distance = difference(model, reference)
    assert distance <= scenario.tolerance
    assert difference(reference, seeded_build(scenario)) > 1e-3, "the reference did not train"
    if name in ("plain", "against the order of registration", "reentrant, tied", "unused on rank 0"):
        last = steps[-1]
        assert last.launches_in_backward == len(last.launch_order) == len(set(last.launch_order))
        assert not last.late_gradients
    if name == "against the order of registration":
        assert steps[0].launch_order == sorted(steps[0].launch_order)
        assert steps[-1].launch_order == sorted(steps[0].launch_order, reverse=True)
    if name == "reentrant, tied":
        assert set(steps[0].late_gradients) == {"shared.weight", "shared.bias"}
    if name == "unused":
        assert 1 not in steps[-1].launches, "a group that nobody uses is still sent"
    if name == "three passes at once":
        assert steps[1].launches_in_backward == 4 and set(steps[1].launches.values()) == {1}


def test_the_same_bits_whenever_gradients_arrive() -> None:
    runs = []
    for pause in (0.0, 0.01):

        def backward_with_pause(model: Any, step: int, rank: int, pause: float = pause) -> None:
            time.sleep(pause * (rank + step) % 0.03)
            dynamic(model, step, rank)

        model, _, steps = train_split(Scenario(Choosing, backward_with_pause, steps=4))
        runs.append((fingerprint(model), [step.launch_order for step in steps]))
    assert runs[0] == runs[1]


@several
def test_few_groups_exist_at_once() -> None:
    """Also in the first step, and where another rank is behind: this one waits for it before it packs more."""
    layers, width = 24, 256
    nbytes = 4 * width * width
    kept = layers * nbytes // hc.size()
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])
    optimizer = split(model, torch.optim.SGD(model.parameters(), lr=0.1))
    peaks: list[int] = []
    few = 4 * nbytes + nbytes // 2
    for step in range(32):
        # How soon Horovod's thread lets go of buffers depends on the machine: a busy one needs more steps to show a low peak.
        if step >= 8 and all(hc.allgather_object(min(peaks) < few)):
            break
        x = torch.randn(2, width)
        optimizer.zero_grad()
        with recording_peak() as memory:
            time.sleep(0.3 if hc.rank() == hc.size() - 1 else 0.0)
            model(x).sum().backward()
            held = {parameter.grad.untyped_storage().nbytes() for parameter in model.parameters()}
            assert held == {4}  # one element, which stands for a gradient that has left
            optimizer.synchronize()
        assert len(optimizer.reduction_stats.last.launch_order) == layers, step
        peaks.append(memory.peak_bytes - kept)
        with optimizer.skip_synchronize():
            optimizer.step()
    # A gradient and the buffer that it is packed into, one in flight, and what arrives; at times also buffers of groups that
    # have arrived, until Horovod's thread lets go of them.
    assert min(peaks) < few
    assert max(peaks) <= layers // 2 * nbytes


class MeetInBackward(torch.autograd.Function):
    """A collective in the backward pass, as those of a synchronized batch norm or of gathered parameters."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str) -> torch.Tensor:
        ctx.name = name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        hc.allreduce(torch.zeros(1), name=ctx.name)
        return gradient, None


class Resynchronization(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.left_out: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = MeetInBackward.apply(x, f"meet.{number}")
            x = x if number == self.left_out else layer(x)
        return x


def test_no_hang_where_the_backward_pass_has_other_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that leaves a layer out sends nothing until the end, and the others must meet it before."""
    monkeypatch.setattr("hvd_ckpt.sharding.in_flight.PATIENCE_SECONDS", 0.2)
    torch.manual_seed(7)
    model = Resynchronization()
    optimizer = split(model)
    for step in range(3):
        model.left_out = 3 if step == 1 and hc.rank() == 0 else None
        optimizer.zero_grad()
        (model(torch.ones(1, WIDTH)) * (1 + hc.rank())).sum().backward()
        optimizer.step()
    weights = fingerprint(model)
    assert all(other == weights for other in hc.allgather_object(weights))


@several
def test_a_converted_parameter_is_an_error_on_every_rank() -> None:
    model = seeded_build(Scenario(chain, backward))
    optimizer = split(model)
    for step in range(2):
        backward(model, step, hc.rank())
        optimizer.step()
    if hc.rank() == 1:
        model[2].double()
        model[2].register_forward_pre_hook(lambda _, inputs: inputs[0].double())
        model[2].register_forward_hook(lambda *call: call[2].float())
    backward(model, 2, hc.rank())
    with pytest.raises(RuntimeError, match=r"parameter '2\.\w+' has become torch.float64.* torch.float32"):
        optimizer.step()
    assert hc.allgather_object(hc.rank()) == list(range(hc.size()))


def test_a_gradient_that_comes_late_is_sent_and_named() -> None:
    torch.manual_seed(7)
    model = nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH), "b": nn.Linear(WIDTH, WIDTH)})
    optimizer = split(model, torch.optim.SGD(model.parameters(), lr=1.0))
    x = torch.ones(1, WIDTH)
    for late in (False, False, True):
        before = model["b"].bias.detach().clone()
        optimizer.zero_grad()
        model["b"](model["a"](x)).sum().backward()
        if late and hc.rank() == 0:
            model["b"](x).sum().backward()
        optimizer.step()
        assert optimizer.reduction_stats.last.late_gradients == (["b.bias", "b.weight"] if late else [])
        assert torch.allclose(before - model["b"].bias, torch.full((WIDTH,), 1.0 + late / hc.size()))


def test_half_precision_is_added_in_float32() -> None:
    torch.manual_seed(7)
    model = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
    optimizer = split(model)
    rows = [torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(r)) for r in range(hc.size())]
    rows = [row.bfloat16() for row in rows]
    model.weight.grad = rows[hc.rank()]
    optimizer.synchronize()
    mean = sum(row.float() for row in rows) / hc.size()
    for piece in optimizer.pieces:
        if piece.name == "weight":
            assert torch.equal(piece.parameter.grad, mean.flatten()[piece.start : piece.stop])
        else:
            assert piece.parameter.grad is None


def test_added_parameters_are_reduced_in_the_backward_pass_soon() -> None:
    scenario = Scenario(
        chain,
        backward,
        tolerance=EXACT,
        optimizer=lambda parameters: torch.optim.SGD(parameters[2:], lr=0.05, momentum=0.9),
        between=lambda model, optimizer, step: (
            optimizer.add_param_group({"params": list(model[0].parameters())}) if step == 2 else None
        ),
    )
    model, _, steps = train_split(scenario)
    assert difference(model, train_one_process(scenario)) == 0
    assert steps[-1].launches_in_backward == len(steps[-1].launch_order) == 4


def test_learned_order_is_part_of_the_training_state() -> None:
    scenario = Scenario(Tied, backward, steps=2)
    _, optimizer, steps = train_split(scenario)
    state = optimizer.reduction_state_dict()
    torch.manual_seed(7)
    model = Tied()
    resumed = split(model)
    resumed.load_reduction_state_dict(state)
    backward(model, 0, hc.rank())
    resumed.step()
    last = resumed.reduction_stats.last
    assert last.launch_order == steps[-1].launch_order and not last.late_gradients
    assert last.launches_in_backward == len(last.launch_order)
    assert resumed.reduction_state_dict() == state
    for wrong in ({**state, "version": 0}, {**state, "order": ["no.such.weight"]}):
        with pytest.raises(ValueError, match="version 0|'no.such.weight'"):
            resumed.load_reduction_state_dict(wrong)
