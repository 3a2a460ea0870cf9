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
from one_process import WIDTH, loss, train, wrap
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


def gradients(model: Model) -> list[Any]:
    return [one.grad for one in model.parameters() if one.grad is not None]


def unscale(optimizer: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", 2.0)
    scaler.scale(torch.ones(1))
    scaler.unscale_(optimizer)


# More: tests/differential/hand.py
READERS: dict[str, Callable[[Model, Any], Any]] = {
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
        pieces = [piece.parameter for piece in optimizer.pieces]
        for clip in (nn.utils.clip_grad_norm_, hc.clip_grad_norm_):
            if any(piece.name.startswith("last") for piece in optimizer.pieces):
                with pytest.raises(
                    RuntimeError, match=r"optimizer\.pieces.*hc\.clip_grad_norm_\(model\.parameters\(\)"
                ):
                    clip(pieces, 1.0)
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
