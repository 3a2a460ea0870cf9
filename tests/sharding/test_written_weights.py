"""Tests of weights written by a forward pass, a hook or a caller: as without shards, or at stage 3 one error on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from same import assert_same_weights as same, whole_weights
from sharded import distribute
from torch import Tensor, nn

import hvd_ckpt as hc

pytestmark = pytest.mark.ranks(gloo=(2,), mpi=(4,))

STAGES = (1, 2)  # at stage 3 it is an error
WIDTH = 6

Write = Callable[[nn.Module], Any]


@torch.no_grad()
def replace_data(layer: Any) -> None:
    layer.weight.data = layer.weight.data.clamp(-0.1, 0.1)


@torch.no_grad()
def normalize(layer: Any) -> None:
    layer.weight.div_(layer.weight.norm())


@torch.no_grad()
def move(layer: Any) -> None:
    layer.weight.mul_(0.9).add_(0.01)


WRITES: dict[str, Write] = {
    "clamped data": lambda layer: layer.weight.data.clamp_(-0.1, 0.1),
    "a part of the data": lambda layer: layer.weight.data[1].fill_(0.05),
    "one element of the data": lambda layer: layer.weight.data[-1, -1].zero_(),
    "data replaced": replace_data,
    "normalized in place": normalize,
    "a moving average": move,
    "detached": lambda layer: layer.weight.detach().clamp_(-0.1, 0.1),
    "a copy": lambda layer: layer.weight.detach().copy_(torch.full((WIDTH, WIDTH), 0.1)),
    "initialized": lambda layer: nn.init.constant_(layer.weight, 0.1),
}


class Writes(nn.Linear):
    """Writes its weight in each forward pass in training mode (or whatever the mode)."""

    write: Write
    always = False

    def forward(self, x: Tensor) -> Tensor:
        if self.training or self.always:
            self.write(self)
        return super().forward(x)


class Model(nn.Module):
    """The third block writes, in a unit of its own; ``first`` is in the unit of the model."""

    def __init__(self, write: Write, first: bool = False, around: Any = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = Writes(WIDTH, WIDTH) if first else nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), Writes(WIDTH, WIDTH)) for _ in range(3)
        )
        for module in self.modules():
            if isinstance(module, Writes):
                module.write = (
                    write if (module is self.first or module is self.blocks[2][1]) else lambda _: None
                )
        self.around = around

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x) if self.around is None else self.around(block, x)
        return x


def wrapped(model: nn.Module, stage: int, **options: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return distribute(optimizer, model.named_parameters(), shard=stage, model=model, **options)


def rows(number: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * number + hc.rank()))


def train(model: nn.Module, optimizer: Any, steps: int = 3) -> list[float]:
    losses = []
    for number in range(steps):
        optimizer.zero_grad()
        loss = model(rows(number)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("first", [False, True], ids=["block", "model"])
@pytest.mark.parametrize("case", WRITES)
def test_what_a_forward_pass_writes_is_kept(case: str, first: bool, stage: int) -> None:
    model, wanted = (Model(WRITES[case], first) for _ in range(2))
    optimizer, plain = wrapped(model, stage), wrapped(wanted, 0)
    losses, expected = train(model, optimizer), train(wanted, plain)
    assert losses == expected or hc.size() > 2
    same(model, optimizer, wanted, plain)


@pytest.mark.parametrize("wire", ["fp32", {"parameters": "bf16"}, {"parameters": "int8"}], ids=str)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("case", WRITES)
def test_what_is_written_after_a_step_is_saved(case: str, stage: int, wire: Any) -> None:
    model = Model(lambda layer: None)
    optimizer = wrapped(model, stage, wire=wire)
    train(model, optimizer, steps=1)
    layer = model.blocks[2][1]
    rounded = layer.weight.detach().clone()
    WRITES[case](layer)
    written = layer.weight.detach().flatten()
    for name, start, stop, values in optimizer.weight_pieces():
        if name == "blocks.2.1.weight":
            changed = (written != rounded.flatten())[start:stop]
            assert torch.equal(values[changed], written[start:stop][changed])


OPTIONS: list[dict[str, Any]] = [{}, {"offload": "parameters"}, {"within": [[0, 1], [2, 3]]}, {"units": []}]


def check_refused(model: nn.Module, optimizer: Any, name: str, pass_: Callable[[], Any], again: bool) -> None:
    """The pass is refused by the next call that all ranks make together; what follows is as if it had not been."""
    before = whole_weights(model, optimizer)
    pass_()
    with pytest.raises(RuntimeError, match=rf"'{name}' was written .*gathered_parameters\(\)"):
        optimizer.step() if again else whole_weights(model, optimizer)
    for key, value in whole_weights(model, optimizer).items():
        assert torch.equal(value, before[key]), key


@pytest.mark.parametrize("first", [False, True], ids=["block", "model"])
@pytest.mark.parametrize("case", WRITES)
def test_at_stage_3_what_a_pass_writes_is_an_error_on_every_rank(case: str, first: bool) -> None:
    """In a unit that is freed between forward and backward pass, and in that of the model, which is not. One rank alone writes."""
    model = Model(lambda _: None, first)
    optimizer = wrapped(model, 3)
    train(model, optimizer, 2)
    layer: Any = model.first if first else model.blocks[2][1]
    for everywhere in (True, False):
        layer.write = WRITES[case] if everywhere or hc.rank() == 0 else lambda _: None
        optimizer.zero_grad()
        name = r"first\.weight" if first else r"blocks\.2\.1\.weight"
        check_refused(model, optimizer, name, lambda: model(rows(3)).square().mean().backward(), again=True)
        layer.write = lambda _: None
        train(model, optimizer, 1)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("around", [None, hc.checkpoint])
def test_writes_are_refused_in_evaluation_and_wherever_shards_are(
    options: dict[str, Any], around: Any
) -> None:
    if "within" in options and hc.size() != 4:
        pytest.skip("needs groups of ranks")
    model = Model(WRITES["clamped data"], around=around)
    optimizer = wrapped(model.eval(), 3, **options)
    train(model, optimizer, 2)
    model.train()
    with torch.no_grad():
        check_refused(model, optimizer, r"blocks\.2\.1\.weight", lambda: model(rows(3)), again=False)
    optimizer.zero_grad()
    check_refused(
        model, optimizer, r"blocks\.2\.1\.weight", lambda: model(rows(3)).sum().backward(), again=True
    )
    with optimizer.gathered_parameters():
        model(rows(3))
    assert whole_weights(model, optimizer)["blocks.2.1.weight"].abs().max() <= 0.1


@pytest.mark.parametrize("stage", STAGES)
def test_half_precision_weights_take_their_masters_along(stage: int) -> None:
    def run(stage: int) -> dict[str, Tensor]:
        model = Model(WRITES["clamped data"]).bfloat16()
        optimizer = wrapped(model, stage)
        for number in range(3):
            optimizer.zero_grad()
            model(rows(number).bfloat16()).square().mean().backward()
            optimizer.step()
        model(rows(7).bfloat16())  # between a step and the state
        if stage:
            for number, master in optimizer.state_dict()["master_weights"].items():
                assert torch.equal(master.bfloat16(), optimizer.pieces[number].weights)
        return whole_weights(model, optimizer)

    weights = run(stage)
    assert weights["blocks.2.1.weight"].abs().max() <= 0.1
    assert not torch.equal(weights["blocks.1.1.weight"], weights["blocks.2.1.weight"])


@pytest.mark.parametrize("stage", STAGES)
def test_writes_of_hooks_parametrizations_and_evaluation_are_kept(stage: int) -> None:
    def run(stage: int) -> tuple[nn.Module, Any]:
        model = Model(lambda _: None)
        model.blocks[0][0].register_forward_pre_hook(lambda layer, _: WRITES["clamped data"](layer))
        model.blocks[1].register_forward_pre_hook(lambda block, _: normalize(block[1]))
        nn.utils.parametrizations.weight_norm(model.blocks[2][0])
        optimizer = wrapped(model, stage)
        train(model, optimizer)
        model.blocks[0][1].write, model.blocks[0][1].always = WRITES["a moving average"], True
        model.eval()
        with torch.no_grad():
            model(rows(0))
        model(rows(1))
        model.train()
        train(model, optimizer, 2)
        return model, optimizer

    same(*run(stage), *run(0))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("case", ["clamped data", "initialized"])
def test_writes_within_recomputed_blocks_are_kept_once(stage: int, case: str) -> None:
    model, wanted = (Model(WRITES[case], around=around) for around in (hc.checkpoint, None))
    optimizer, plain = wrapped(model, stage), wrapped(wanted, 0)
    train(model, optimizer)
    train(wanted, plain)
    same(model, optimizer, wanted, plain)


def test_a_renormalized_embedding_is_refused_and_is_not_within_gathered_parameters() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(10, WIDTH, max_norm=0.5), nn.Linear(WIDTH, 3))
    optimizer = wrapped(model, 3)
    model(torch.arange(5) + 5 * (hc.rank() % 2)).sum().backward()
    with pytest.raises(RuntimeError, match=r"'0\.weight' was written .*gathered_parameters\(\)"):
        optimizer.step()
    with optimizer.gathered_parameters():
        model(torch.arange(10))
    assert whole_weights(model, optimizer)["0.weight"].norm(dim=1).max() <= 0.5001


def test_different_writes_that_are_broadcast_later_are_allowed() -> None:
    model = Model(lambda _: None)
    optimizer = wrapped(model, 3)
    train(model, optimizer, 1)
    with optimizer.gathered_parameters():
        with torch.no_grad():
            if hc.rank() == 0:
                model.first.weight.fill_(0.25)
        hc.broadcast_parameters(model.state_dict(), root_rank=0)
    train(model, optimizer, 1)
    with optimizer.gathered_parameters(), torch.no_grad():
        if hc.rank() == 0:  # and nobody else
            model.first.weight.fill_(0.75)
            model.first.bias.fill_(0.75)
    optimizer.zero_grad()
    model(rows(0)).sum().backward()
    with pytest.raises(RuntimeError, match=r"different values to parameter 'first\.\w+'"):
        optimizer.step()


def test_a_step_inside_gathered_parameters_is_not_lost() -> None:
    model, wanted = (Model(lambda _: None) for _ in range(2))
    optimizer, plain = wrapped(model, 3), wrapped(wanted, 0)
    for one, other in ((model, optimizer), (wanted, plain)):
        train(one, other, 1)
        other.zero_grad()
        one(rows(5)).sum().backward()
        with other.gathered_parameters():
            other.step()
            first = one.first.weight.detach().clone()
        with other.gathered_parameters():
            assert torch.equal(first, one.first.weight)
    same(model, optimizer, wanted, plain)


HALF = [
    (1, {"wire": {"parameters": "int8"}}),
    (2, {"wire": "int8"}),
    (3, {}),
]  # masters; what is sent is rounded, or weights are gathered


@pytest.mark.parametrize(("stage", "options"), HALF)
def test_weights_that_were_loaded_stay_when_a_state_is_loaded(stage: int, options: dict[str, Any]) -> None:
    model = Model(lambda _: None).bfloat16()
    optimizer = wrapped(model, stage, **options)
    model(rows(0).bfloat16()).square().mean().backward()
    optimizer.step()
    state = optimizer.full_state_dict(all_ranks=True)
    with optimizer.gathered_parameters():
        model.load_state_dict({name: torch.full_like(one, 0.25) for name, one in model.named_parameters()})
        optimizer.load_state_dict(state)
    assert all(bool((value == 0.25).all()) for value in whole_weights(model, optimizer).values())


@pytest.mark.parametrize(("stage", "options"), HALF)
def test_states_and_averages_have_weights_that_were_written_since(
    stage: int, options: dict[str, Any]
) -> None:
    model = Model(lambda _: None).bfloat16()
    optimizer = wrapped(model, stage, **options)
    average = hc.AveragedWeights(optimizer)
    with optimizer.gathered_parameters():
        nn.init.constant_(model.first.weight, 0.25)
        masters = optimizer.state_dict()["master_weights"]
        average.update_parameters()
    for number, piece in enumerate(optimizer.pieces):
        assert piece.name != "first.weight" or bool((masters[number] == 0.25).all())
    with average.applied():
        whole = whole_weights(model, optimizer)["first.weight"]
        assert bool(((whole - 0.25).abs() < 0.01).all())  # as sent in 8 bits
