"""Tests of weights that a caller, a forward pass or a hook reads or writes: as without shards, or at stage 3 one error on every
rank, where outside of their module no values are there."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_process import WIDTH, loss, train, wrap
from same import assert_same, assert_same_weights, whole_weights
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
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
    return wrap(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        shard=stage,
        bucket_cap_mb=25.0,
        **options,
    )


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


# -------------------------------------------------------------------------------------- outside of their module

GATHERED = r"optimizer\.gathered_parameters\(\)"


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor([2.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


@pytest.fixture
def split() -> tuple[nn.Module, Any]:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Scale(), nn.Linear(WIDTH, WIDTH))
    return model, wrap(model, shard=3)


# More: tests/differential/hand.py
USES: dict[str, Callable[[Any], Any]] = {
    "norm": lambda model: sum(one.norm() for one in model.parameters()),
    "detach": lambda model: [one.detach() for one in model.parameters()],
    "data": lambda model: [one.data for one in model.parameters()],
    "numpy": lambda model: [one.numpy(force=True) for one in model.parameters()],
    "item": lambda model: model[1].factor.item(),
    "comparison": lambda model: torch.equal(model[0].weight, model[2].weight),
    "foreach": lambda model: torch._foreach_norm(list(model.parameters())),
    "one element written": lambda model: model[1].factor.data.fill_(0.0),
    "written": lambda model: nn.init.ones_(model[0].weight),
    "vector": lambda model: nn.utils.parameters_to_vector(model.parameters()),
    "from a vector": lambda model: nn.utils.vector_to_parameters(torch.ones(145), model.parameters()),
    "converted": lambda model: model.double(),
    "moved": lambda model: model.to("meta"),
    "copied": copy.deepcopy,
    "one copied": lambda model: copy.deepcopy(model[0].weight),
    "pickled": pickle.dumps,
    "saved": lambda model: torch.save(model, io.BytesIO()),
    "state": lambda model: model.state_dict(),
    "state of a part": lambda model: model[0].state_dict(),
    "loaded": lambda model: model.load_state_dict({}),
    "saved parameter": lambda model: torch.save(model[0].weight, io.BytesIO()),
    "averaged": AveragedModel,
}


def test_reading_or_writing_values_is_an_error_that_says_what_to_do() -> None:
    """Also for an average that was made before, which would be nan."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Scale(), nn.Linear(WIDTH, WIDTH))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = wrap(model, shard=3)
    for _ in range(2):
        train(model, optimizer, range(1))
        for name, use in {**USES, "averaged once more": average.update_parameters}.items():
            with pytest.raises(RuntimeError, match=rf"split over the ranks.*{GATHERED}"):
                print(name, use(model))
        with pytest.raises(RuntimeError, match=r"parameter '1\.factor'"):
            model[1].factor.mul(2)
        with optimizer.gathered_parameters():
            average.update_parameters(model)
    assert all(one.isfinite().all() for one in average.parameters())


def test_within_gathered_parameters_a_model_is_as_without_shards(split: tuple[Any, Any]) -> None:
    """It is read, copied, written and run; other data, and another dtype, are refused."""
    model, optimizer = split
    x, weight = torch.ones(2, WIDTH), model[0].weight
    train(model, optimizer, range(1))
    with torch.no_grad():
        wanted = model(x)
    with optimizer.gathered_parameters():
        assert USES["norm"](model) > 0 and type(weight) is nn.Parameter
        twins = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        assert torch.equal(model(x), wanted)
        state = {name: value / 2 for name, value in model.state_dict().items()}
        model.load_state_dict(state)
        model[2].bias.data = torch.ones(WIDTH)
    for twin in twins:
        assert all(type(one) is nn.Parameter for one in twin.parameters())
        twin(x).sum().backward()
        assert torch.equal(twin(x), wanted)
    twins[0].load_state_dict(state)
    twins[0][2].bias.data.fill_(1)
    assert torch.equal(model(x), twins[0](x))

    with pytest.raises(RuntimeError, match="has become torch.float64"), optimizer.gathered_parameters():
        model.double()
    optimizer.full_state_dict()
    weight.data = torch.zeros_like(weight)
    for use in (optimizer.full_state_dict, lambda: model(x)):
        with pytest.raises(RuntimeError, match=r"'0\.weight' was given data outside"):
            use()
    optimizer.unshard()
    assert torch.equal(model(x), twins[0](x)) and torch.equal(copy.deepcopy(model)(x), model(x))
    model.load_state_dict(model.state_dict())


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_whole_state_of_the_model_is_one_call_and_memory_of_its_own(stage: int) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), Scale(), nn.Linear(WIDTH, WIDTH))
    model[3].weight = model[0].weight  # tied
    optimizer = wrap(model, shard=stage)

    def step() -> None:
        optimizer.zero_grad()
        loss(model, 0, 0).backward()  # the same statistics on every rank
        optimizer.step()

    step()
    state = optimizer.full_model_state_dict(model)
    assert (state is None) == (hc.rank() > 0)
    if stage == 3:
        assert {one.untyped_storage().nbytes() for one in model.parameters()} == {4}
    copies = [optimizer.full_model_state_dict(model, all_ranks=True)]
    with optimizer.gathered_parameters():
        copies.append(optimizer.full_model_state_dict(model, all_ranks=True))
        wanted = copy.deepcopy(model.state_dict())
    step()  # changes none of the copies
    for found in copies if state is None else [*copies, state]:
        assert_same(dict(found), dict(wanted))
        assert found["0.weight"].data_ptr() == found["3.weight"].data_ptr()
    with optimizer.gathered_parameters():
        assert not torch.equal(wanted["0.weight"], model[0].weight)
        model.load_state_dict(copies[0])
    assert_same(dict(optimizer.full_model_state_dict(model, all_ranks=True)), dict(wanted))
    model[2].register_forward_hook(lambda *_: optimizer.full_model_state_dict(model))
    if stage == 3:
        with pytest.raises(RuntimeError, match="inside a forward or backward pass"):
            model(torch.ones(2, WIDTH))


def test_what_needs_no_values_works(split: tuple[Any, Any]) -> None:
    model, optimizer = split
    weight, seen = model[0].weight, []
    handle = weight.register_post_accumulate_grad_hook(lambda one: seen.append(one.shape))
    assert isinstance(weight, nn.Parameter) and weight.shape == (WIDTH, WIDTH) and weight.dim() == 2
    assert weight.dtype is torch.float32 and weight.device.type == "cpu" and weight.grad is None
    assert weight.is_leaf and weight.requires_grad and weight.numel() == len(weight) * WIDTH == 64
    assert "0.weight" in repr(weight) and "0.weight" in f"{weight}"
    assert torch.zeros_like(weight).sum() == 0 and weight.new_ones(2).sum() == 2
    assert model.to("cpu") is model and model.float() is model
    assert torch.equal(weight, weight) and not torch.equal(weight, model[0].bias)
    assert {weight: 1}[weight] == 1 and sum(one.numel() for one in model.parameters()) == 145
    train(model, optimizer, range(1))
    model.requires_grad_(False)
    model.requires_grad_(True)
    assert seen == [(WIDTH, WIDTH)]
    handle.remove()
    hc.verify(model)
