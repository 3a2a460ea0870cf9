"""Tests of gradients in shards (stages 2 and 3): reading or replacing ``p.grad`` works, or is an error before the step."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_process import WIDTH, loss, wrap
from same import assert_same_weights as same_weights
from torch import nn

import hvd_ckpt as hc

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


def trained_parameters(model: Model) -> list[nn.Parameter]:
    return [parameter for name, parameter in model.named_parameters() if "unused" not in name]


def gradients(model: Model) -> list[Any]:
    return [one.grad for one in model.parameters() if one.grad is not None]


def unscale(optimizer: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", 2.0)
    scaler.scale(torch.ones(1))
    scaler.unscale_(optimizer)


READERS: dict[str, Callable[[Model, Any], Any]] = {  # more: tests/differential/hand.py
    "clipping by norm, one by one": lambda model, _: nn.utils.clip_grad_norm_(
        model.parameters(), 1.0, foreach=False
    ),
    "clipping by value, one by one": lambda model, _: nn.utils.clip_grad_value_(
        model.parameters(), 0.1, foreach=False
    ),
    "scaling by a norm": lambda model, _: nn.utils.clip_grads_with_norm_(
        model.parameters(), 1.0, torch.tensor(9.0)
    ),
    "detached": lambda model, _: [one.detach() for one in gradients(model)],
    "a list": lambda model, _: model.last.bias.grad.tolist(),
    "a vector": lambda model, _: nn.utils.parameters_to_vector(gradients(model)),
    "a pickle": lambda model, _: pickle.dumps(model.last.weight.grad),
    "a file": lambda model, _: torch.save(model.last.weight.grad, io.BytesIO()),
    "a collective": lambda model, _: hc.allreduce(model.last.weight.grad, name="gradient"),
    "clipping of pieces": lambda _, optimizer: nn.utils.clip_grad_norm_(
        [piece.parameter for piece in optimizer.pieces], 1.0
    ),
    "torch's scaler": lambda _, optimizer: unscale(optimizer),
}


@pytest.mark.parametrize("stage", STAGES)
def test_reading_values_is_an_error_that_says_what_to_do(stage: int) -> None:
    model, optimizer = build(stage)
    wanted, plain = build(0)
    for number in range(2):
        for one, other in ((optimizer, model), (plain, wanted)):
            one.zero_grad()
            loss(other, number).backward()
        for name, read in (
            READERS.items() if number else ()
        ):  # in the first step nothing leaves early: "unused" is waited for
            with pytest.raises(RuntimeError, match="gradient of parameter '.*'"):
                print(name, read(model, optimizer))
        optimizer.step()
        plain.step()
    same_weights(model, optimizer, wanted, plain)


@pytest.mark.parametrize("stage", STAGES)
def test_zeros_hold_no_memory_and_cannot_be_read(stage: int) -> None:
    model, optimizer = build(stage)
    loss(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    gradient: Any = model.last.weight.grad
    assert gradient.shape == model.last.weight.shape and gradient.untyped_storage().nbytes() <= 8
    assert model.unused.weight.grad is None
    with pytest.raises(RuntimeError, match="gradient of parameter 'last.weight' is split"):
        gradient.norm()


def test_gradients_of_parameters_that_no_step_updates_need_not_be_cleared() -> None:
    (model, optimizer), (wanted, plain) = pairs = [
        (model, wrap(model, torch.optim.SGD(model.blocks.parameters(), lr=0.1), shard=stage))
        for model, stage in ((Model(), 3), (Model(), 0))
    ]
    for number in range(3):
        for one, its in pairs:
            loss(one, number).backward()
            its.step()
            its.zero_grad()
    same_weights(model, optimizer, wanted, plain)


@pytest.mark.parametrize("stage", STAGES)
def test_metadata_of_gradients_is_as_without_shards(stage: int) -> None:
    model, optimizer = build(stage)
    loss(model, 0).backward()
    optimizer.step()
    for after in (lambda: None, optimizer.synchronize):
        optimizer.zero_grad()
        assert all(one.grad is None for one in model.parameters())
        loss(model, 0).backward()
        after()
        for parameter in trained_parameters(model):
            gradient: Any = parameter.grad
            assert gradient is not None and gradient.shape == parameter.shape
            assert gradient.dtype is parameter.dtype and gradient.device == parameter.device
            assert not gradient.is_sparse and gradient.grad_fn is None and not gradient.requires_grad
            assert torch.zeros_like(gradient).shape == parameter.shape
            assert "split over the ranks" in repr(gradient)
        assert model.unused.weight.grad is None
        twin = copy.deepcopy(model) if stage == 2 else None  # at any time, as without shards
        assert twin is None or twin.last.weight.grad is None
        with optimizer.skip_synchronize() if after == optimizer.synchronize else contextlib.nullcontext():
            optimizer.step()
        assert all(one.grad is not None for one in trained_parameters(model))  # until they are cleared


@pytest.mark.parametrize("stage", [1, *STAGES])
def test_pieces_do_not_pass_for_parameters_without_gradients(stage: int) -> None:
    model, optimizer = build(stage)
    loss(model, 0).backward()
    for clip in (nn.utils.clip_grad_norm_, hc.clip_grad_norm_):
        if any(piece.name.startswith("last") for piece in optimizer.pieces):
            with pytest.raises(
                RuntimeError, match=r"optimizer\.pieces.*hc\.clip_grad_norm_\(model\.parameters\(\)"
            ):
                clip([piece.parameter for piece in optimizer.pieces], 1.0)
    optimizer.step()


@pytest.mark.parametrize("stage", STAGES)
def test_clipping_of_this_library_works_in_between(stage: int) -> None:
    model, optimizer = build(stage)
    for parameters in (model.parameters(), list(model.parameters()), optimizer):
        optimizer.zero_grad()
        loss(model, 0).backward()
        norm = hc.clip_grad_norm_(parameters, 1e-3)
        assert norm > 1e-3
        torch.testing.assert_close(
            hc.clip_grad_norm_(model.parameters(), 1.0, foreach=False),
            torch.tensor(1e-3),
            rtol=1e-2,
            atol=0.0,
        )
        optimizer.step()
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("to_none", [True, False])
def test_dropped_gradients_have_a_norm_of_zero(stage: int, to_none: bool) -> None:
    model = nn.Linear(3, 2)
    optimizer = hc.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), shard=stage, model=model)
    model(torch.ones(4, 3)).square().sum().backward()
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
