"""Tests of parameters that are split over the ranks and whole while their unit runs: bits as without shards."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import itertools
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint

import hvd_ckpt as hc
from hvd_ckpt.collectives.exchange import Exchange
from hvd_ckpt.planning.plan import BlockPlan, Plan, parameter_shapes
from hvd_ckpt.planning.policy import KEEP, CheckpointPolicy, apply_policy
from hvd_ckpt.recompute.tape import Policy
from hvd_ckpt.sharding.layout import Layout
from hvd_ckpt.sharding.parameters import ShardedParameters
from hvd_ckpt.sharding.units import find_units
from hvd_ckpt.sharding.unshard import Gathering
from hvd_ckpt.utils.memory import measure_peak

pytestmark = pytest.mark.ranks(gloo=(2,), mpi=(4,))

WIDTH = 12
_number = itertools.count()


class Split:
    """A model with split parameters, and a step of gradient descent on the shards."""

    def __init__(self, model: nn.Module, units: Any = None) -> None:
        self.model = model
        found = find_units(model, units)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.exchange = Exchange(hc.global_process_set, f"parameters.{next(_number)}")
        self.layout = Layout(hc.size())
        self.units = [
            (unit.modules, self.layout.add([(names[id(one)], one) for one in unit.parameters]))
            for unit in found
        ]
        self.store = ShardedParameters(model, self.units, Gathering(self.layout, self.exchange))

    @property
    def sent(self) -> int:
        return self.exchange.traffic.sent["all_gather"]

    @property
    def whole(self) -> list[int]:
        """Which units have memory."""
        return [
            number
            for number, (_, groups) in enumerate(self.units)
            if any(one.untyped_storage().nbytes() > 8 for one in self.layout.parameters_of(groups))
        ]

    def step(self, gradients: dict[str, torch.Tensor]) -> None:
        self.store.reshard()
        with torch.no_grad():
            for group in self.layout.groups:
                for index, start, stop, offset in group.spans(hc.rank()):
                    gradient = gradients.get(self.layout.names[index])
                    if gradient is not None:
                        own = self.store.shards[group.position][offset : offset + stop - start]
                        own.add_(gradient.reshape(-1)[start:stop], alpha=-0.1)
        self.store.shards_changed()


def step(plain: nn.Module, split: Split) -> None:
    """Gradient descent in both, with the average of their gradients over the ranks."""
    assert_same_gradients(plain, split.model)
    named = {name: one for name, one in plain.named_parameters() if one.grad is not None}
    flat = torch.cat([one.grad.flatten() for one in named.values()])
    parts = hc.allreduce(flat, name="gradients").split([one.numel() for one in named.values()])
    gradients = {name: part.view_as(one) for (name, one), part in zip(named.items(), parts)}
    split.step(gradients)
    with torch.no_grad():
        for name, gradient in gradients.items():
            named[name].add_(gradient, alpha=-0.1)
    plain.zero_grad()
    split.model.zero_grad()


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, 3 * width)
        self.outer = nn.Linear(3 * width, width)

    def forward(self, x: Any) -> Any:
        return x + self.outer(nn.functional.gelu(self.inner(self.norm(x))))


class Stack(nn.Module):
    """Blocks, run by ``around``."""

    def __init__(self, blocks: int | list[nn.Module] = 3, around: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)] if isinstance(blocks, int) else blocks)
        self.around = around

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x) if self.around is None else self.around(block, x)
        return x


class Net(Stack):
    """A tied embedding around the blocks."""

    def __init__(self, around: Callable[..., Any] | None = None) -> None:
        super().__init__(3, around)
        self.embed = nn.Embedding(10, WIDTH)
        self.head = nn.Linear(WIDTH, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(super().forward(self.embed(x)))


def reentrant(block: Any, x: torch.Tensor) -> Any:
    return hc.checkpoint(block, x, use_reentrant=True)


def with_torch(block: Any, x: torch.Tensor) -> Any:
    return torch_checkpoint.checkpoint(block, x, use_reentrant=False)


def listed(block: Any, x: torch.Tensor) -> Any:
    return hc.CheckpointFunction.apply(block, 1, x, *block.parameters())


def rows(number: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * number + hc.rank()))


def tokens(number: int) -> torch.Tensor:
    return torch.randint(0, 10, (3, 5), generator=torch.Generator().manual_seed(100 * number + hc.rank()))


def pair(build: Callable[[], nn.Module], units: Callable[[Any], Any] | None = None) -> tuple[Any, Split]:
    """A whole model, and the same one split."""
    torch.manual_seed(3)
    plain = build()
    model = copy.deepcopy(plain)
    return plain, Split(model, None if units is None else units(model))


def assert_same_gradients(plain: nn.Module, split: nn.Module) -> None:
    for (name, one), (_, other) in zip(split.named_parameters(), plain.named_parameters()):
        assert (one.grad is None) == (other.grad is None), name
        assert one.grad is None or torch.equal(one.grad, other.grad), name


def assert_same_weights(plain: nn.Module, split: Split) -> None:
    with split.store.gathered():
        for (name, one), (_, other) in zip(split.model.named_parameters(), plain.named_parameters()):
            assert torch.equal(one, other), name


def train(
    plain: Any,
    split: Split,
    sample: Callable[[int], torch.Tensor] = rows,
    loss: Callable[[Any], torch.Tensor] = lambda output: output.square().mean(),
    steps: int = 2,
) -> None:
    """Trains both; losses, gradients and weights are the same, and nothing stays whole."""
    for number in range(steps):
        ours, theirs = loss(split.model(sample(number))), loss(plain(sample(number)))
        assert torch.equal(ours, theirs)
        ours.backward()
        theirs.backward()
        assert split.whole == []
        step(plain, split)
    assert_same_weights(plain, split)


def assert_gathered_once(split: Split, steps: int) -> None:
    """Once in forward and once in backward; the model's own stay whole in between."""
    *blocks, model = [sum(group.padded for group in groups) for _, groups in split.units]
    once_more = sum(blocks) + model  # to compare the weights
    elements = steps * (2 * sum(blocks) + model) + once_more
    assert split.sent == 4 * elements * (hc.size() - 1) // hc.size()


@pytest.mark.parametrize("around", [None, hc.checkpoint, reentrant, with_torch, listed])
def test_a_block_is_gathered_once_forward_and_once_backward_recomputed_or_kept(around: Any) -> None:
    plain, split = pair(lambda: Net(around))
    train(plain, split, tokens)
    assert_gathered_once(split, 2)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_the_segments_of_a_chain_are_its_units(use_reentrant: bool) -> None:
    def chain() -> nn.Module:
        layers = [nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(4)), nn.Linear(WIDTH, 4)]
        return hc.CheckpointSequential(layers, 3, use_reentrant=use_reentrant)

    plain, split = pair(chain)
    assert [len(modules) for modules, _ in split.units] == [2, 2, 2, 1]
    train(plain, split)
    assert_gathered_once(split, 2)


CALLS = ("layer_norm", "linear", "gelu", "linear", "add")
DROPS = CheckpointPolicy("drop all", Policy(CALLS, frozenset(range(5))))


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_plan_is_followed_whether_it_is_applied_before_or_after(when: str) -> None:
    torch.manual_seed(3)
    plain = nn.Sequential(*(Block() for _ in range(5)))
    shapes = parameter_shapes([plain[0]])
    blocks = [
        BlockPlan((str(number),), "Block", shapes, DROPS if number < 2 else KEEP) for number in range(5)
    ]
    plan = Plan(tuple(blocks), (0, (1, 2), (3,), 4))
    model = copy.deepcopy(plain)
    if when == "before":
        plan.apply(model)
    split = Split(model)
    if when == "after":
        plan.apply(model)
    assert len(split.units) == (5 if when == "before" else 6)
    train(plain, split)
    assert_gathered_once(split, 2)


def test_operations_that_are_replayed_find_parameters_of_other_units() -> None:
    plain, split = pair(
        lambda: Stack(2),
        lambda model: [part for block in model.blocks for part in (block.inner, block.outer)],
    )
    for block in split.model.blocks:
        apply_policy(block, DROPS)
    train(plain, split)
    assert_gathered_once(split, 2)


def test_no_more_than_two_units_have_memory_at_a_time() -> None:
    row = torch.randn(1, 64)
    for around in (None, hc.checkpoint):
        model = Stack([Block(64) for _ in range(8)], around)
        split = Split(model)
        unit = sum(group.padded * 4 for group in split.units[0][1])
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda one: setattr(one, "grad", None))
        model(row).sum().backward()  # learns the order

        def evaluate(model: nn.Module = model) -> None:
            with torch.no_grad():
                model(row)

        def train(model: nn.Module = model) -> None:
            model(row).sum().backward()

        evaluate()
        forward, both = measure_peak(evaluate), measure_peak(train)
        assert 2 * unit <= forward.peak_bytes < 2.1 * unit
        assert both.peak_bytes < 3.1 * unit  # and a gradient or two
        assert both.held_bytes < unit / 8
        assert split.whole == []


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor
    losses: dict[str, list[torch.Tensor]]


class Structured(Block):
    def forward(self, x: Any) -> Any:
        hidden = super().forward(x.hidden if isinstance(x, Output) else x)
        return Output(hidden, {"penalty": [hidden.square().mean()]})


class LeavesALoss(Block):
    def forward(self, x: Any) -> Any:
        self.losses = [self.inner(x).square().mean()]
        return super().forward(x)


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


def test_whatever_a_unit_takes_and_returns() -> None:
    plain, split = pair(lambda: Stack([Structured() for _ in range(2)]))
    train(plain, split, loss=lambda output: output.hidden.sum() + output.losses["penalty"][0])

    plain, split = pair(lambda: Stack([LeavesALoss() for _ in range(2)]))
    for model in (plain, split.model):
        model(rows(0).requires_grad_())
        sum(block.losses[0] for block in model.blocks).backward()
    assert_same_gradients(plain, split.model)

    def with_the_changed_input(block: Any, x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        return block(x) + x

    train(*pair(lambda: Stack([ChangesItsInput() for _ in range(2)], with_the_changed_input)))

    train(*pair(lambda: Stack([TakesOneTwice() for _ in range(2)], lambda block, x: block(x, x))))

    def with_the_parameters(block: Any, x: torch.Tensor) -> torch.Tensor:
        hidden, bias, weight = block(x)
        return hidden @ weight + bias

    plain, split = pair(lambda: Stack([ReturnsParameters() for _ in range(2)], with_the_parameters))
    train(plain, split)
    with torch.no_grad():
        assert torch.equal(plain(rows(1)), split.model(rows(1)))


class Slots:
    __slots__ = ("kept",)

    def __init__(self) -> None:
        self.kept: dict[str, list[torch.Tensor]] = {"inner": []}


class Leaves(Block):
    """Leaves what it computes inside in some place, where its output may be the only thing that is not used."""

    place = ""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.kept: Any = None
        self.hand_on: Any = None

    def forward(self, x: Any, cache: Any = None) -> Any:
        hidden = nn.functional.gelu(self.inner(self.norm(x)))
        if self.place == "cache":
            cache.layers.append(hidden)
        elif self.place == "slots":
            cache.kept["inner"] += [hidden, x * self.scale]
        elif self.place == "attribute":
            self.kept = hidden
        elif self.place == "objects in an attribute":
            self.kept = [{"inner": Output(hidden, {"scaled": [x * self.scale]})}]
        elif self.place == "what nobody sees":
            self.hand_on(x * self.scale + nn.functional.linear(x, self.inner.weight[:WIDTH].t()))
        elif self.place == "part of the output":
            return x + self.outer(hidden), hidden
        return x + self.outer(hidden)


@dataclasses.dataclass
class Cache:
    layers: list[torch.Tensor] = dataclasses.field(default_factory=list)


def left_by(model: Any, place: str, x: torch.Tensor) -> list[torch.Tensor]:
    """What the blocks leave in a place; their outputs are used by the next block alone."""
    left: list[torch.Tensor] = []
    hooked = model.blocks if place == "a list of a hook" else []
    handles = [
        block.inner.register_forward_hook(lambda module, args, out: left.append(out)) for block in hooked
    ]
    cache: Any = Slots() if place == "slots" else Cache()
    for block in model.blocks:
        block.place, block.hand_on = place, left.append
        given = {"cache": cache} if place in ("cache", "slots") else {}
        out = block(x, **given)
        if place == "part of the output":
            left.append(out[1])
        x = out[0] if isinstance(out, tuple) else out
    for handle in handles:
        handle.remove()
    if place == "cache":
        left += cache.layers
    elif place == "slots":
        left += cache.kept["inner"]
    elif place == "attribute":
        left += [block.kept for block in model.blocks]
    elif place == "objects in an attribute":
        held = [block.kept[0]["inner"] for block in model.blocks]
        left += [one.hidden for one in held] + [one.losses["scaled"][0] for one in held]
    return left


PLACES = [
    "cache", "slots", "attribute", "objects in an attribute", "part of the output", "a list of a hook",
    "what nobody sees",
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_whatever_a_unit_leaves_elsewhere_than_in_its_output(place: str) -> None:
    plain, split = pair(lambda: Stack([Leaves() for _ in range(3)]))
    for number in range(2):
        for model in (plain, split.model):
            # Over two steps: what the first call has left is used twice, and with that of a second call.
            x = rows(number).requires_grad_()
            first = sum(one.square().mean() for one in left_by(model, place, x))
            first.backward(retain_graph=True)
            (slope,) = torch.autograd.grad(first, x, retain_graph=True)
            second = sum(one.square().mean() for one in left_by(model, place, x + slope))
            (first * second).backward()
            for block in model.blocks:
                block.kept = None
        assert split.whole == []
        step(plain, split)
    assert_same_weights(plain, split)


def test_a_graph_of_weights_that_have_changed_is_refused() -> None:
    split = Split(Stack(1))
    loss = split.model(rows(0)).sum()
    loss.backward(retain_graph=True)
    split.step({})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_outside_of_passes_parameters_are_read_inside_gathered_alone() -> None:
    plain, split = pair(Net)
    model = split.model
    weight = model.blocks[0].inner.weight
    assert weight.shape == (3 * WIDTH, WIDTH)
    for refused in (
        lambda: model.load_state_dict({}),
        lambda: model.blocks[0].state_dict(),
        lambda: model.embed.state_dict(),
    ):
        with pytest.raises(RuntimeError, match=r"optimizer\.gathered_parameters\(\)"):
            refused()
    with split.store.gathered():
        copied, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        assert model(tokens(0)).isfinite().all()
        state = {name: value / 2 for name, value in model.state_dict().items()}
        model.load_state_dict(state)
        model.blocks[0].norm.bias.data = torch.ones(WIDTH)
    for other in (copied, loaded):
        other(tokens(0)).sum().backward()
        assert torch.equal(other(tokens(0)), plain(tokens(0)))
    plain.load_state_dict(state)
    plain.blocks[0].norm.bias.data.fill_(1)
    train(plain, split, tokens)

    with pytest.raises(RuntimeError, match="has become torch.float64"), split.store.gathered():
        model.double()
    split.store.sync_from_model()
    weight.data = torch.zeros_like(weight)
    with pytest.raises(RuntimeError, match=r"'blocks\.0\.inner\.weight' was given data outside"):
        split.store.sync_from_model()
    with pytest.raises(RuntimeError, match="was given data outside"):
        model(tokens(0))
    assert torch.equal(model(tokens(0)), plain(tokens(0)))

    split.store.unshard()
    assert torch.equal(model(tokens(0)), plain(tokens(0)))
    assert_same_gradients(plain, copy.deepcopy(model))
    model.load_state_dict(model.state_dict())


def test_the_model_keeps_its_parameters_and_nothing_keeps_the_model() -> None:
    split = Split(Stack(2, hc.checkpoint))
    with contextlib.ExitStack() as stack:
        gc.collect()
        gc.disable()
        stack.callback(gc.enable)
        split.model(rows(0)).sum().backward()
        model, store = split.model, weakref.ref(split.store)
        parameters = weakref.ref(model.blocks[0].inner.weight)
        shard = weakref.ref(split.store.shards[0])
        del split
        assert model(rows(0)).isfinite().all()
        del model
        assert store() is None
        assert parameters() is None
        assert shard() is None


def test_what_cannot_be_grouped_is_named() -> None:
    model = Stack(2)
    with pytest.raises(TypeError, match=r"units\[1\] must be a module .* 'blocks'"):
        find_units(model, [model.blocks[0], "blocks"])
    with pytest.raises(ValueError, match="not part of this Stack"):
        find_units(model, [Block()])
    with pytest.raises(ValueError, match=r"'blocks\.0', which is in a unit already"):
        find_units(model, [model.blocks[0], [model.blocks[1], model.blocks[0]]])


def test_units_may_share_and_lie_in_one_another() -> None:
    def build() -> nn.Module:
        model = Stack(3)
        model.blocks[2].inner.weight = model.blocks[0].inner.weight
        model.blocks.append(model.blocks[1])
        return model

    plain, split = pair(build)
    whole = {split.layout.names[index] for group in split.units[-1][1] for index in group.indices}
    assert "blocks.0.inner.weight" in whole
    train(plain, split)

    plain, split = pair(
        lambda: Stack(3),
        lambda model: [model.blocks[0], model.blocks[0].inner, [model.blocks[1], model.blocks[2]]],
    )
    train(plain, split)
    assert_gathered_once(split, 2)


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


def test_units_that_never_run_are_replaced_by_their_children_or_refused() -> None:
    for units, count in (
        (None, 7),
        (lambda model: [model.last, model.blocks[0].parts], 5),
        (lambda model: [[model.last], [model.blocks[0].parts, model.blocks[1].parts["one"]]], 2),
    ):
        plain, split = pair(Nested, units)
        assert len(split.units) == count + 1
        train(plain, split)
    for refused, name in (
        (lambda model: model.blocks, r"blocks\.0', a Holder"),
        (lambda model: [model.last, model.blocks[1].shift], r"blocks\.1\.shift', a ParameterList"),
    ):
        model = Nested()
        with pytest.raises(ValueError, match=rf"units\[\d\] has '{name} without a forward"):
            find_units(model, refused(model))
