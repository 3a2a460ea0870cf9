"""Tests of weights written by a forward pass, a hook or a caller: as without shards, or at stage 3 one error on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_process import WIDTH, loss, train, wrap
from same import assert_same, assert_same_weights, whole_weights
from torch import Tensor, nn
from ways import plainly

import hvd_ckpt as hc

pytestmark = pytest.mark.ranks(gloo=(2,), mpi=(4,))

STAGES = (1, 2)  # at stage 3 it is an error

Write = Callable[[Any], Any]


@torch.no_grad()
def replace_data(layer: Any) -> None:
    layer.weight.data = layer.weight.data.clamp(-0.1, 0.1)


@torch.no_grad()
def normalize(layer: Any) -> None:
    layer.weight.div_(layer.weight.norm())


@torch.no_grad()
def move(layer: Any) -> None:
    layer.weight.mul_(0.9).add_(0.01)


@torch.no_grad()
def renormalize(layer: Any) -> None:
    """As nn.Embedding(max_norm=...) does."""
    torch.embedding_renorm_(layer.weight, torch.arange(3), 0.2, 2.0)


WRITES: dict[str, Write] = {
    "clamped data": lambda layer: layer.weight.data.clamp_(-0.1, 0.1),
    "a part of the data": lambda layer: layer.weight.data[1].fill_(0.05),
    "one element of the data": lambda layer: layer.weight.data[-1, -1].zero_(),
    "data replaced": replace_data,
    "normalized in place": normalize,
    "a moving average": move,
    "renormalized": renormalize,
    "detached": lambda layer: layer.weight.detach().clamp_(-0.1, 0.1),
    "a copy": lambda layer: layer.weight.detach().copy_(torch.full((WIDTH, WIDTH), 0.1)),
    "initialized": lambda layer: nn.init.constant_(layer.weight, 0.1),
}


class Writes(nn.Linear):
    """Writes its weight in each forward pass in training mode (or whatever the mode)."""

    write: Write | None = None
    always = False

    def forward(self, x: Tensor) -> Tensor:
        if self.write is not None and (self.training or self.always):
            self.write(self)
        return super().forward(x)


class Model(nn.Module):
    """One layer writes: that of the third block, in a unit of its own; or ``first``, in the unit of the model."""

    def __init__(self, write: Write | None = None, first: bool = False, around: Any = plainly) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = Writes(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), Writes(WIDTH, WIDTH)) for _ in range(3)
        )
        self.around = around
        self.name = "first.weight" if first else "blocks.2.1.weight"
        self.writer.write = write

    @property
    def writer(self) -> Any:
        return self.get_submodule(self.name.removesuffix(".weight"))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = self.around(block, x)
        return x


def wrapped(model: nn.Module, stage: int, **options: Any) -> Any:
    return wrap(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), shard=stage, **options)


def backward(model: nn.Module, optimizer: Any, number: int = 5) -> None:
    optimizer.zero_grad()
    loss(model, number).backward()


# -------------------------------------------------------------------------------------- stages 1 and 2


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("where", ["block", "model", "recomputed"])
@pytest.mark.parametrize("case", WRITES)
def test_what_a_forward_pass_writes_is_kept_once(case: str, where: str, stage: int) -> None:
    around = hc.checkpoint if where == "recomputed" else plainly
    model, wanted = (Model(WRITES[case], where == "model", one) for one in (around, plainly))
    optimizer, plain = wrapped(model, stage), wrapped(wanted, 0)
    train(model, optimizer, range(3))
    train(wanted, plain, range(3))
    assert_same_weights(model, optimizer, wanted, plain)


@pytest.mark.parametrize("wire", ["fp32", {"parameters": "bf16"}, {"parameters": "int8"}], ids=str)
@pytest.mark.parametrize("stage", STAGES)
def test_what_is_written_after_a_step_is_saved(stage: int, wire: Any) -> None:
    model = Model()
    optimizer = wrapped(model, stage, wire=wire)
    for write in WRITES.values():
        train(model, optimizer, range(1))
        rounded = model.writer.weight.detach().clone().flatten()
        write(model.writer)
        written = model.writer.weight.detach().flatten()
        for name, start, stop, values in optimizer.weight_pieces():
            if name == model.name:
                changed = (written != rounded)[start:stop]
                assert torch.equal(values[changed], written[start:stop][changed])


@pytest.mark.parametrize("stage", STAGES)
def test_half_precision_weights_take_their_masters_along(stage: int) -> None:
    model = Model(WRITES["clamped data"]).bfloat16()
    optimizer = wrapped(model, stage)
    train(model, optimizer, range(3))
    loss(model, 7)  # between a step and the state
    for number, master in optimizer.state_dict()["master_weights"].items():
        assert torch.equal(master.bfloat16(), optimizer.pieces[number].weights)
    assert whole_weights(model, optimizer)["blocks.2.1.weight"].abs().max() <= 0.1


@pytest.mark.parametrize("stage", STAGES)
def test_writes_of_hooks_parametrizations_and_evaluation_are_kept(stage: int) -> None:
    def run(stage: int) -> tuple[nn.Module, Any]:
        model = Model()
        model.blocks[0][0].register_forward_pre_hook(lambda layer, _: WRITES["clamped data"](layer))
        model.blocks[1].register_forward_pre_hook(lambda block, _: normalize(block[1]))
        nn.utils.parametrizations.weight_norm(model.blocks[2][0])
        optimizer = wrapped(model, stage)
        train(model, optimizer, range(3))
        model.blocks[0][1].write, model.blocks[0][1].always = move, True
        model.eval()
        with torch.no_grad():
            loss(model, 0)
        loss(model, 1)
        model.train()
        train(model, optimizer, range(2))
        return model, optimizer

    assert_same_weights(*run(stage), *run(0))


# -------------------------------------------------------------------------------------- stage 3


def check_refused(model: Model, optimizer: Any, pass_: Callable[[], Any], again: bool) -> None:
    """The pass is refused by the next call that all ranks make together; what follows is as if it had not been."""
    before = whole_weights(model, optimizer)
    pass_()
    with pytest.raises(RuntimeError, match=rf"'{model.name}' was written .*gathered_parameters\(\)"):
        optimizer.step() if again else whole_weights(model, optimizer)
    assert_same(whole_weights(model, optimizer), before)


@pytest.mark.parametrize("first", [False, True], ids=["block", "model"])
@pytest.mark.parametrize("case", WRITES)
def test_what_a_pass_writes_is_an_error_on_every_rank(case: str, first: bool) -> None:
    """In a unit that is freed between forward and backward pass, and in that of the model, which is not. One rank alone writes."""
    model = Model(first=first)
    optimizer = wrapped(model, 3)
    train(model, optimizer, range(2))
    for everywhere in (True, False):
        model.writer.write = WRITES[case] if everywhere or hc.rank() == 0 else None
        check_refused(model, optimizer, lambda: backward(model, optimizer), again=True)
        model.writer.write = None
        train(model, optimizer, range(1))


OPTIONS: list[dict[str, Any]] = [{}, {"offload": "parameters"}, {"units": []}]
OPTIONS += [{"within": [[0, 1], [2, 3]]}] if hc.size() == 4 else []


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("around", [plainly, hc.checkpoint])
def test_writes_are_refused_in_evaluation_and_wherever_shards_are(
    options: dict[str, Any], around: Any
) -> None:
    model = Model(WRITES["clamped data"], around=around)
    optimizer = wrapped(model.eval(), 3, **options)
    train(model, optimizer, range(2))
    model.train()
    with torch.no_grad():
        check_refused(model, optimizer, lambda: loss(model, 3), again=False)
    check_refused(model, optimizer, lambda: backward(model, optimizer), again=True)
    with optimizer.gathered_parameters():
        loss(model, 3)
    assert whole_weights(model, optimizer)[model.name].abs().max() <= 0.1


def test_different_writes_that_are_broadcast_later_are_allowed() -> None:
    model = Model()
    optimizer = wrapped(model, 3)
    train(model, optimizer, range(1))
    with optimizer.gathered_parameters():
        if hc.rank() == 0:
            nn.init.constant_(model.first.weight, 0.25)
        hc.broadcast_parameters(model.state_dict(), root_rank=0)
    train(model, optimizer, range(1))
    with optimizer.gathered_parameters():
        for parameter in model.first.parameters() if hc.rank() == 0 else ():  # and on no other rank
            nn.init.constant_(parameter, 0.75)
    backward(model, optimizer)
    with pytest.raises(RuntimeError, match=r"different values to parameter 'first\.\w+'"):
        optimizer.step()


def test_a_step_inside_gathered_parameters_is_not_lost() -> None:
    pairs = [(model, wrapped(model, stage)) for model, stage in ((Model(), 3), (Model(), 0))]
    for model, optimizer in pairs:
        train(model, optimizer, range(1))
        backward(model, optimizer)
        with optimizer.gathered_parameters():
            optimizer.step()
            first = model.first.weight.detach().clone()
        with optimizer.gathered_parameters():
            assert torch.equal(first, model.first.weight)
    assert_same_weights(*pairs[0], *pairs[1])


# -------------------------------------------------------------------------------------- what is written, and states


@pytest.mark.parametrize(
    ("stage", "options"), [(1, {"wire": {"parameters": "int8"}}), (2, {"wire": "int8"}), (3, {})]
)
def test_states_and_averages_have_weights_that_were_written_since(
    stage: int, options: dict[str, Any]
) -> None:
    """With master weights, where what is sent is rounded, or weights are gathered. A state that is loaded leaves weights alone."""
    model = Model().bfloat16()
    optimizer = wrapped(model, stage, **options)
    average = hc.AveragedWeights(optimizer)
    train(model, optimizer, range(1))
    state = optimizer.full_state_dict(all_ranks=True)
    with optimizer.gathered_parameters():
        model.load_state_dict({name: torch.full_like(one, 0.25) for name, one in model.named_parameters()})
        masters = optimizer.state_dict()["master_weights"].values()
        assert all(bool((one.bfloat16() == 0.25).all()) for one in masters)
        average.update_parameters()
        optimizer.load_state_dict(state)
    assert all(bool((one == 0.25).all()) for one in whole_weights(model, optimizer).values())
    with average.applied():
        for value in whole_weights(model, optimizer).values():
            assert bool(((value - 0.25).abs() < 0.01).all())  # as sent in 8 bits
