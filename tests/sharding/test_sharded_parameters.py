"""Tests of parameters that are whole only while their unit runs (stage 3): values, gathers and memory, whatever a unit is."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from one_process import wrap
from same import assert_same, assert_same_weights, whole_weights
from torch import nn
from torch.utils import checkpoint as torch_checkpoint
from ways import by_function, plainly, reentrant

import hvd_ckpt as hc
from hvd_ckpt.planning.plan import BlockPlan, Plan, parameter_shapes
from hvd_ckpt.planning.policy import KEEP, CheckpointPolicy, apply_policy, in_chunks
from hvd_ckpt.recompute.tape import Policy
from hvd_ckpt.sharding.units import find_units
from hvd_ckpt.utils.memory import measure_peak

pytestmark = pytest.mark.ranks(gloo=(2,), mpi=(4,))

WIDTH = 12
with_torch = functools.partial(torch_checkpoint.checkpoint, use_reentrant=False)


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, 3 * width)
        self.outer = nn.Linear(3 * width, width)

    def forward(self, x: Any) -> Any:
        return x + self.outer(nn.functional.gelu(self.inner(self.norm(x))))


class Stack(nn.Module):
    """Blocks, each run by ``around``."""

    def __init__(self, blocks: list[nn.Module], around: Callable[..., Any] = plainly) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.around = around

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = self.around(block, x)
        return x


class Net(Stack):
    """A tied embedding around three blocks."""

    def __init__(self, around: Callable[..., Any], tied: bool = True) -> None:
        super().__init__([Block() for _ in range(3)], around)
        self.embed = nn.Embedding(10, WIDTH)
        self.head = nn.Linear(WIDTH, 10, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(super().forward(self.embed((10 * x).long() % 10)))


def stack(count: int, around: Callable[..., Any] = plainly) -> Stack:
    return Stack([Block() for _ in range(count)], around)


def rows(number: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * number + hc.rank()))


Pair = tuple[Any, Any]  # a model, and its optimizer


def pairs_of(
    build: Callable[[], nn.Module], units: Callable[[Any], Any] = lambda model: None
) -> tuple[Pair, Pair]:
    """A model at stage 3, and the same one without shards."""

    def made(stage: int) -> Pair:
        torch.manual_seed(3)
        model = build()
        return model, wrap(model, shard=stage, **({"units": units(model)} if stage else {}))

    return made(3), made(0)


def whole(model: nn.Module) -> list[str]:
    """The parameters that have memory."""
    return [name for name, one in model.named_parameters() if one.untyped_storage().nbytes() > 8]


def train(
    pairs: tuple[Pair, Pair], loss: Callable[[Any, Any], Any] = lambda model, output: output.square().mean()
) -> None:
    """Two steps and an evaluation of both: losses and weights are the same, and nothing stays whole.

    The inputs of the second step need gradients.
    """
    losses: tuple[list[Any], list[Any]] = ([], [])
    for number in range(3):
        for found, (model, optimizer) in zip(losses, pairs):
            optimizer.zero_grad()
            with torch.set_grad_enabled(number < 2):
                found.append(loss(model, model(rows(number).requires_grad_(number == 1))))
            if number < 2:
                found[-1].backward()
                optimizer.step()
        assert whole(pairs[0][0]) == []
    assert_same(*losses, tolerance=0.0 if hc.size() <= 2 else 1e-5)
    assert_same_weights(*pairs[0], *pairs[1])


# -------------------------------------------------------------------------------------- gathers and memory

CALLS = ("layer_norm", "linear", "gelu", "linear", "add")
DROPS = CheckpointPolicy("drop all", Policy(CALLS, frozenset(range(5))))


def chain(use_reentrant: bool) -> nn.Module:
    layers = [nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(4)), nn.Linear(WIDTH, 4)]
    return hc.CheckpointSequential(layers, 3, use_reentrant=use_reentrant)


def blocks() -> Any:
    return nn.Sequential(*(Block() for _ in range(5)))


def planned(model: Any) -> Any:
    shapes = parameter_shapes([model[0]])
    policies = [DROPS, DROPS, KEEP, KEEP, KEEP]
    parts = [BlockPlan((str(number),), "Block", shapes, policy) for number, policy in enumerate(policies)]
    return Plan(tuple(parts), (0, (1, 2), (3,), 4)).apply(model)


def replayed(model: Any) -> None:
    for block in model.blocks:
        apply_policy(block, DROPS)


def shared() -> nn.Module:
    model = stack(3)
    model.blocks[2].inner.weight = model.blocks[0].inner.weight
    model.blocks.append(model.blocks[1])
    return model


class Holder(nn.Module):
    """Never runs itself."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.ParameterList([torch.ones(WIDTH)])
        self.parts = nn.ModuleDict({"one": Block(), "two": Block()})


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Holder() for _ in range(2)])
        self.last = nn.ModuleList([Block(), nn.ModuleList([Block(), Block()])])

    def forward(self, x: Any) -> Any:
        for holder in self.blocks:
            for part in holder.parts.values():
                x = part(x) + holder.shift[0]
        return self.last[1][1](self.last[1][0](self.last[0](x)))


class Case(NamedTuple):
    """A model; its number of units, with that of the model; the units, if they are not found; what is done to the split model."""

    build: Callable[[], nn.Module]
    count: int
    units: Callable[[Any], Any] = lambda model: None
    act: Callable[[Any], object] = lambda model: None


CASES = {
    "kept": Case(lambda: Net(plainly), 4),
    "recomputed": Case(lambda: Net(hc.checkpoint), 4),
    "reentrant": Case(lambda: Net(reentrant), 4),
    "by torch": Case(lambda: Net(with_torch), 4),
    "by a function": Case(lambda: Net(by_function), 4),
    "segments": Case(lambda: chain(False), 4),
    "reentrant segments": Case(lambda: chain(True), 4),
    "planned": Case(lambda: planned(blocks()), 5),
    "planned later": Case(blocks, 6, act=planned),
    "replays that read other units": Case(
        lambda: stack(2),
        5,
        lambda model: [part for block in model.blocks for part in (block.inner, block.outer)],
        replayed,
    ),
    "one in another, and two together": Case(
        lambda: stack(3),
        4,
        lambda model: [model.blocks[0], model.blocks[0].inner, [model.blocks[1], model.blocks[2]]],
    ),
    "shared parts": Case(shared, 3),
    "parts of modules that never run": Case(Nested, 8),
    "parts of those that are named": Case(Nested, 6, lambda model: [model.last, model.blocks[0].parts]),
    "parts of those that are named together": Case(
        Nested, 3, lambda model: [[model.last], [model.blocks[0].parts, model.blocks[1].parts["one"]]]
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_unit_is_gathered_once_forward_and_once_backward(name: str) -> None:
    """But that of the model, which stays whole in between."""
    case = CASES[name]
    pairs = pairs_of(case.build, case.units)
    model, optimizer = pairs[0]
    case.act(model)
    train(pairs)
    *units, last = [sum(flat.group.padded for flat in unit.flats) for unit in optimizer.sharding.passes.units]
    assert len(units) + 1 == case.count
    # Two steps, an evaluation, and the comparison of weights.
    elements = 2 * (2 * sum(units) + last) + 2 * (sum(units) + last)
    assert optimizer.traffic.sent["all_gather"] == 4 * elements * (hc.size() - 1) // hc.size()


@pytest.mark.parametrize("around", [plainly, hc.checkpoint])
def test_no_more_than_two_units_have_memory_at_a_time(around: Any) -> None:
    """The input's gradient needs all blocks, which are frozen: nothing but their weights takes memory."""
    model = Stack([Block(64) for _ in range(8)], around).requires_grad_(False)
    model.head = nn.Linear(64, 1, bias=False)
    optimizer = wrap(model, torch.optim.SGD(model.head.parameters(), lr=0.1), shard=3)
    unit = 4 * optimizer.sharding.layout.groups[0].padded
    row = torch.randn(1, 64, requires_grad=True)

    def train() -> None:
        model.head(model(row)).sum().backward()

    def evaluate() -> None:
        with torch.no_grad():
            model(row)

    train()  # learns the order
    evaluate()
    forward, both = measure_peak(evaluate), measure_peak(train)
    assert 2 * unit <= forward.peak_bytes < 2.1 * unit
    assert 2 * unit <= both.peak_bytes < 2.6 * unit
    assert both.held_bytes < unit / 8
    assert whole(model) == []


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_head_in_chunks_is_reduced_once_and_whole_until_its_loss_is_computed(
    stage: int, tied: bool
) -> None:
    ends = []
    for each, is_in_chunks in ((0, False), (stage, True)):
        torch.manual_seed(3)
        model = Net(plainly, tied)
        if is_in_chunks:
            head = BlockPlan(("head",), "Linear", parameter_shapes([model.head]), in_chunks(4))
            Plan((head,), (0,)).apply(model)
        optimizer = wrap(model, shard=each, bucket_cap_mb=25.0)
        accumulated: list[Any] = []
        model.head.weight.register_post_accumulate_grad_hook(accumulated.append)
        for number in range(6):
            with torch.set_grad_enabled(number < 3):
                logits = model.train(number < 3)(rows(number)).flatten(0, 1)
                loss = nn.functional.cross_entropy(logits, torch.arange(len(logits)) % 10)
            if number < 3:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            assert loss > 0
        assert len(accumulated) == 3
        if not each:
            assert optimizer.reduction_stats.late_gradients == 0
            assert set(optimizer.reduction_stats.launches.values()) == {3}
        ends.append(whole_weights(model, optimizer))
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-5, atol=1e-6)


def test_a_graph_of_weights_that_have_changed_is_refused() -> None:
    (model, optimizer), _ = pairs_of(lambda: stack(1))
    loss = model(rows(0)).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_model_runs_without_its_optimizer_and_nothing_keeps_the_model() -> None:
    (model, optimizer), _ = pairs_of(lambda: stack(2, hc.checkpoint))
    with contextlib.ExitStack() as stack_of_exits:
        gc.collect()
        gc.disable()
        stack_of_exits.callback(gc.enable)
        model(rows(0)).sum().backward()
        store = optimizer.sharding.store
        left = [weakref.ref(one) for one in (store, store.shards[0], model.blocks[0].inner.weight)]
        del store, optimizer, _
        assert model(rows(0)).isfinite().all()
        del model
        assert [one() for one in left] == [None] * 3


def test_what_units_share_belongs_to_that_of_the_model() -> None:
    model: Any = shared()
    *_, last = find_units(model)
    assert [id(one) for one in last.parameters] == [
        id(model.blocks[0].inner.weight),
        *map(id, model.blocks[1].parameters()),
    ]


@pytest.mark.parametrize(
    ("units", "kind", "message"),
    [
        (lambda model: [model.last, "blocks"], TypeError, r"units\[1\] must be a module .* 'blocks'"),
        (lambda model: [Block()], ValueError, "not part of this Nested"),
        (
            lambda model: [model.last[0], [model.last[1], model.last[0]]],
            ValueError,
            r"units\[1\] has module 'last\.0', which is in a unit already",
        ),
        (lambda model: model.blocks, ValueError, r"units\[0\] has 'blocks\.0', a Holder without a forward"),
        (
            lambda model: [model.last, model.blocks[1].shift],
            ValueError,
            r"units\[1\] has 'blocks\.1\.shift', a ParameterList without a forward",
        ),
    ],
)
def test_what_cannot_be_a_unit_is_named(units: Any, kind: type[Exception], message: str) -> None:
    model = Nested()
    with pytest.raises(kind, match=message):
        find_units(model, units(model))


# -------------------------------------------------------------------------------------- what a unit takes, returns and leaves


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor
    losses: dict[str, list[torch.Tensor]]


class Structured(Block):
    def forward(self, x: Any) -> Any:
        hidden = super().forward(x.hidden if isinstance(x, Output) else x)
        return Output(hidden, {"penalty": [hidden.square().mean()]})


class ChangesItsInput(Block):
    def forward(self, x: Any) -> Any:
        return self.outer(self.inner(nn.functional.relu_(x)))


class TakesOneTwice(Block):
    def forward(self, x: Any, same: Any) -> Any:
        assert x is same
        return super().forward(x)


class ReturnsParameters(Block):
    def forward(self, x: Any) -> Any:
        return super().forward(x) * self.norm.weight, self.norm.bias, self.inner.weight.t()[:, :WIDTH]


def with_the_changed_input(block: Any, x: torch.Tensor) -> torch.Tensor:
    x = x * 2
    return block(x) + x


def with_the_parameters(block: Any, x: torch.Tensor) -> torch.Tensor:
    hidden, bias, weight = block(x)
    return hidden @ weight + bias


def mean(model: Any, output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


@pytest.mark.parametrize(
    ("kind", "around", "loss"),
    [
        (Structured, plainly, lambda model, output: output.hidden.sum() + output.losses["penalty"][0]),
        (ChangesItsInput, with_the_changed_input, mean),
        (TakesOneTwice, lambda block, x: block(x, x), mean),
        (ReturnsParameters, with_the_parameters, mean),
    ],
)
def test_whatever_a_unit_takes_and_returns(kind: Any, around: Any, loss: Any) -> None:
    train(pairs_of(lambda: Stack([kind() for _ in range(2)], around)), loss)


class Slots:
    __slots__ = ("kept",)

    def __init__(self) -> None:
        self.kept: dict[str, list[torch.Tensor]] = {"inner": []}


@dataclasses.dataclass
class Cache:
    layers: list[torch.Tensor] = dataclasses.field(default_factory=list)


class Leaves(Block):
    """Leaves what it computes inside in some place, where its output may be the only thing that is not used."""

    def __init__(self, leave: Callable[..., Any]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.kept: Any = None
        self.leave = leave

    def forward(self, x: Any, cache: Any = None) -> Any:
        hidden = nn.functional.gelu(self.inner(self.norm(x)))
        returned = self.leave(self, cache, hidden, x)
        out = x + self.outer(hidden)
        return out if returned is None else (out, returned)


unseen: list[torch.Tensor] = []


def keep_objects(block: Any, cache: Any, hidden: torch.Tensor, x: torch.Tensor) -> None:
    block.kept = [{"inner": Output(hidden, {"scaled": [x * block.scale]})}]


def hide(block: Any, cache: Any, hidden: torch.Tensor, x: torch.Tensor) -> None:
    unseen.append(x * block.scale + nn.functional.linear(x, block.inner.weight[:WIDTH].t()))


def hook(block: Any, cache: Any, hidden: torch.Tensor, x: torch.Tensor) -> None:
    """What a hook on a layer inside has handed on."""


# How a block leaves something, given itself, the cache, what it computes inside and its input; and what blocks have left.
PLACES: dict[str, tuple[Callable[..., Any], Callable[[Any, Any], list[torch.Tensor]]]] = {
    "a cache": (
        lambda block, cache, hidden, x: cache.layers.append(hidden),
        lambda block, cache: cache.layers[-1:],
    ),
    "slots": (
        lambda block, cache, hidden, x: cache.kept["inner"].extend([hidden, x * block.scale]),
        lambda block, cache: cache.kept["inner"][-2:],
    ),
    "an attribute": (
        lambda block, cache, hidden, x: setattr(block, "kept", hidden),
        lambda block, cache: [block.kept],
    ),
    "objects in an attribute": (
        keep_objects,
        lambda block, cache: [block.kept[0]["inner"].hidden, *block.kept[0]["inner"].losses["scaled"]],
    ),
    "the output": (lambda block, cache, hidden, x: hidden, lambda block, cache: []),
    "a list of a hook": (hook, lambda block, cache: unseen[-1:]),
    "what nobody sees": (hide, lambda block, cache: unseen[-1:]),
}


@pytest.mark.parametrize("place", PLACES)
def test_whatever_a_unit_leaves_elsewhere_than_in_its_output(place: str) -> None:
    leave, left = PLACES[place]

    def build() -> nn.Module:
        made = [Leaves(leave) for _ in range(3)]
        for block in made if leave is hook else []:
            block.inner.register_forward_hook(lambda module, args, out: unseen.append(out))
        return Stack(made)

    def loss(model: Any, x: torch.Tensor) -> Any:
        """Of what the blocks leave; their outputs are used by the next block alone."""
        found: list[torch.Tensor] = []
        cache: Any = Slots() if place == "slots" else Cache() if place == "a cache" else None
        for block in model.blocks:
            x, *more = out if isinstance(out := block(x, cache), tuple) else (out,)
            found += [*more, *left(block, cache)]
        unseen.clear()
        return sum(one.square().mean() for one in found)

    pairs = pairs_of(build)
    for number in range(2):
        for model, optimizer in pairs:
            # Over two steps: what the first call has left is used twice, and with that of a second call.
            optimizer.zero_grad()
            x = rows(number).requires_grad_()
            first = loss(model, x)
            first.backward(retain_graph=True)
            (slope,) = torch.autograd.grad(first, x, retain_graph=True)
            (first * loss(model, x + slope)).backward()
            for block in model.blocks:
                block.kept = None
            optimizer.step()
        assert whole(pairs[0][0]) == []
    assert_same_weights(*pairs[0], *pairs[1], exact=False)  # the rounds of two passes add up in another order
