"""Tests of gradients that are split over the ranks during the backward pass (stages 2 and 3): reading or replacing ``p.grad``
works, or is an error before the step; all of them are sent, in one order, and none stays whole."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_process import WIDTH, chain, difference, fingerprint, loss, same_everywhere, train, wrap
from same import assert_same, assert_same_weights as same_weights
from torch import nn

import hvd_ckpt as hc
from hvd_ckpt.utils.memory import recording_peak

pytestmark = pytest.mark.ranks(gloo=(2,), mpi=(4,))

STAGES = (2, 3)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(n, 6), nn.Tanh()) for n in (WIDTH, 6, 6))
        self.unused = nn.Linear(6, 6)
        self.last = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def build(stage: int, **options: Any) -> tuple[Model, Any]:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    return model, wrap(model, optimizer, shard=stage, **options)


def gradients(model: Model) -> list[Any]:
    return [one.grad for one in model.parameters() if one.grad is not None]


def parameters_of(pieces: Any) -> list[nn.Parameter]:
    return [piece.parameter for piece in pieces]


def unscale(optimizer: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", 2.0)
    scaler.scale(torch.ones(1))
    scaler.unscale_(optimizer)


# More: tests/differential/hand.py
READERS: dict[str, Callable[[Model, Any], Any]] = {
    "a norm": lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False),
    "largest values": lambda model, _: nn.utils.clip_grad_value_(model.parameters(), 0.1, foreach=False),
    "scaled": lambda model, _: nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, torch.tensor(9.0)),
    "detached": lambda model, _: [one.detach() for one in gradients(model)],
    "a list": lambda model, _: model.last.bias.grad.tolist(),
    "a vector": lambda model, _: nn.utils.parameters_to_vector(gradients(model)),
    "a pickle": lambda model, _: pickle.dumps(model.last.weight.grad),
    "a file": lambda model, _: torch.save(model.last.weight.grad, io.BytesIO()),
    "a collective": lambda model, _: hc.allreduce(model.last.weight.grad, name="gradient"),
    "pieces": lambda _, optimizer: nn.utils.clip_grad_norm_(parameters_of(optimizer.pieces), 1.0),
    "torch's scaler": lambda _, optimizer: unscale(optimizer),
}


@pytest.mark.parametrize("stage", STAGES)
def test_reading_values_is_an_error_that_says_what_to_do(stage: int) -> None:
    (model, optimizer), (wanted, plain) = pairs = build(stage), build(0)
    for number in range(2):
        for one, its in pairs:
            its.zero_grad()
            loss(one, number).backward()
        # In the first step nothing leaves early: "unused" is waited for.
        for name, read in READERS.items() if number else ():
            with pytest.raises(RuntimeError, match="gradient of parameter '.*'"):
                print(name, read(model, optimizer))
        optimizer.step()
        plain.step()
    same_weights(model, optimizer, wanted, plain)


def test_gradients_of_parameters_that_no_step_updates_need_not_be_cleared() -> None:
    pairs = [
        (model, wrap(model, torch.optim.SGD(model.blocks.parameters(), lr=0.1), shard=stage))
        for model, stage in ((Model(), 3), (Model(), 0))
    ]
    for model, optimizer in pairs:
        for number in range(3):
            loss(model, number).backward()
            optimizer.step()
            optimizer.zero_grad()
    same_weights(*pairs[0], *pairs[1])


@pytest.mark.parametrize("stage", STAGES)
def test_metadata_of_gradients_is_as_without_shards(stage: int) -> None:
    model, optimizer = build(stage)
    trained = [parameter for name, parameter in model.named_parameters() if "unused" not in name]
    train(model, optimizer, range(1))
    for by_hand in (False, True):
        optimizer.zero_grad()
        assert gradients(model) == []
        loss(model, 0).backward()
        if by_hand:
            optimizer.synchronize()
        for parameter in trained:
            gradient: Any = parameter.grad
            assert gradient is not None and gradient.shape == parameter.shape
            assert gradient.dtype is parameter.dtype and gradient.device == parameter.device
            assert not gradient.is_sparse and gradient.grad_fn is None and not gradient.requires_grad
            assert torch.zeros_like(gradient).shape == parameter.shape
            assert "split over the ranks" in repr(gradient)
        twin = copy.deepcopy(model) if stage == 2 else None  # at any time, as without shards
        assert twin is None or twin.last.weight.grad is None
        with optimizer.skip_synchronize() if by_hand else contextlib.nullcontext():
            optimizer.step()
        assert len(gradients(model)) == len(trained)  # until they are cleared
    optimizer.zero_grad(set_to_none=False)
    gradient = model.last.weight.grad
    assert gradient.shape == model.last.weight.shape and gradient.untyped_storage().nbytes() <= 8
    assert model.unused.weight.grad is None
    with pytest.raises(RuntimeError, match="gradient of parameter 'last.weight' is split"):
        gradient.norm()


@pytest.mark.parametrize("stage", [1, *STAGES])
def test_clipping_takes_the_model_or_the_optimizer_and_no_pieces(stage: int) -> None:
    model, optimizer = build(stage)
    for number, parameters in enumerate((model.parameters(), list(model.parameters()), optimizer)):
        optimizer.zero_grad()
        loss(model, number).backward()
        for clip in (nn.utils.clip_grad_norm_, hc.clip_grad_norm_):
            if any(piece.name.startswith("last") for piece in optimizer.pieces):
                with pytest.raises(
                    RuntimeError, match=r"optimizer\.pieces.*hc\.clip_grad_norm_\(model\.parameters\(\)"
                ):
                    clip(parameters_of(optimizer.pieces), 1.0)
        assert hc.clip_grad_norm_(parameters, 1e-3) > 1e-3
        norm = hc.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        torch.testing.assert_close(norm, torch.tensor(1e-3), rtol=1e-2, atol=0.0)
        optimizer.step()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("to_none", [True, False])
def test_dropped_gradients_have_a_norm_of_zero(stage: int, to_none: bool) -> None:
    model, optimizer = build(stage)
    loss(model, 0).backward()
    optimizer.synchronize()
    optimizer.zero_grad(set_to_none=to_none)
    assert hc.clip_grad_norm_(model.parameters(), 1.0) == 0


def test_a_model_is_compiled_while_gradients_are_in_shards() -> None:
    """``torch.compile`` describes the gradients of parameters, too."""
    model, optimizer = build(2)
    run = torch.compile(model, backend="eager")
    try:
        for number in range(2):
            optimizer.zero_grad()
            for part in range(2):
                loss(run, 2 * number + part).backward()
                torch._dynamo.reset()
            optimizer.step()
    finally:
        del run
        torch._dynamo.reset()


# -------------------------------------------------------------------------------------- sending

alone_too = pytest.mark.ranks(gloo=(1, 2), mpi=(4,))
ONE_LAYER = 300 / 2**20  # MiB: each layer is a group


@pytest.fixture(autouse=True)
def _small_is_not_special(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else these small groups would never wait for each other."""
    monkeypatch.setattr("hvd_ckpt.sharding.in_flight.SMALL_BYTES", 0)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def split(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Any:
    return wrap(model, optimizer or momentum(model), shard=2, bucket_cap_mb=ONE_LAYER)


class Choosing(nn.Module):
    """Uses the layers that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.use: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.use:
            x = self.layers[number](x).tanh()
        return x


@alone_too
def test_the_same_bits_whenever_gradients_arrive() -> None:
    """In steps of any number of passes, each through any layers, any number of times."""
    runs = []
    for pause in (0.0, 0.01):
        torch.manual_seed(7)
        model, orders = Choosing(), []
        optimizer = split(model)
        for step in range(4):
            time.sleep(pause * (hc.rank() + step) % 0.03)
            draw = torch.Generator().manual_seed(100 * step + hc.rank())
            optimizer.zero_grad()
            for part in range(int(torch.randint(0, 4, (), generator=draw))):
                length = int(torch.randint(1, 7, (), generator=draw))
                model.use = torch.randint(0, 4, (length,), generator=draw).tolist()
                loss(model, 4 * step + part).backward()
            optimizer.step()
            orders.append(optimizer.reduction_stats.last.launch_order)
        runs.append((fingerprint(model), orders))
    assert runs[0] == runs[1]
    assert all(each == runs[0] for each in hc.allgather_object(runs[0]))


@alone_too
def test_groups_are_sent_in_the_learned_order_and_added_in_that_of_ranks() -> None:
    """Here against the order of registration; one process that adds the ranks' gradients in turn has the same bits."""
    torch.manual_seed(7)
    model = Choosing()
    model.use = [3, 2, 1, 0]
    whole = copy.deepcopy(model)
    optimizer, plain = split(model), momentum(whole)
    for step in range(4):
        train(model, optimizer, range(step, step + 1))
        plain.zero_grad()
        for rank in range(hc.size()):
            loss(whole, step, rank).backward()
        for parameter in whole.parameters():
            parameter.grad /= hc.size()
        plain.step()
        order = optimizer.reduction_stats.last.launch_order
        assert order == sorted(order, reverse=step > 0)
    assert difference(model, whole) == 0


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


@alone_too
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
    same_everywhere(model)


def test_a_converted_parameter_is_an_error_on_every_rank() -> None:
    model = chain()
    optimizer = split(model)
    train(model, optimizer, range(2))
    optimizer.zero_grad()
    if hc.rank() == 1:
        model[2][0].double()
        model[2][0].register_forward_pre_hook(lambda _, inputs: inputs[0].double())
        model[2][0].register_forward_hook(lambda *call: call[2].float())
    loss(model, 2).backward()
    with pytest.raises(RuntimeError, match=r"parameter '2\.0\.\w+' has become torch.float64.* torch.float32"):
        optimizer.step()
    assert hc.allgather_object(hc.rank()) == list(range(hc.size()))


@alone_too
def test_half_precision_is_added_in_float32() -> None:
    model = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
    optimizer = split(model)
    torch.manual_seed(5)
    rows = [torch.randn(WIDTH, WIDTH).bfloat16() for _ in range(hc.size())]
    model.weight.grad = rows[hc.rank()]
    optimizer.synchronize()
    mean = sum(row.float() for row in rows) / hc.size()
    for piece in optimizer.pieces:
        wanted = mean.flatten()[piece.start : piece.stop] if piece.name == "weight" else None
        assert_same(piece.parameter.grad, wanted)
