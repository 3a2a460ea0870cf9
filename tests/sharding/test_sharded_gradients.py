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
from one_process import wrap
from same import assert_same_weights as same_weights
from torch import nn

import hvd_ckpt as hc

pytestmark = pytest.mark.ranks(gloo=(1, 2), mpi=(4,))

STAGES = (2, 3)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
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


def backward(model: nn.Module, number: int, *ranks: int) -> None:
    """On these ranks, or on all."""
    if ranks and hc.rank() not in ranks:
        return
    generator = torch.Generator().manual_seed(10 * number + hc.rank())
    model(torch.randn(5, 6, generator=generator)).square().mean().backward()


def trained_parameters(model: Model) -> list[nn.Parameter]:
    return [parameter for name, parameter in model.named_parameters() if "unused" not in name]


def gradients(model: Model) -> list[Any]:
    return [one.grad for one in model.parameters() if one.grad is not None]


def unscale(optimizer: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", 2.0)
    scaler.scale(torch.ones(1))
    scaler.unscale_(optimizer)


READERS: dict[str, Callable[[Model, Any], Any]] = {  # more: tests/differential/acts.py
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
            backward(other, number)
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
    backward(model, 0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    gradient: Any = model.last.weight.grad
    assert gradient.shape == model.last.weight.shape and gradient.untyped_storage().nbytes() <= 8
    assert model.unused.weight.grad is None
    with pytest.raises(RuntimeError, match="gradient of parameter 'last.weight' is split"):
        gradient.norm()


@pytest.mark.parametrize("clear", ["to none", "to zero", "by hand"])
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_of_a_step_are_cleared_by_any_means(stage: int, clear: str) -> None:
    """Of a parameter that is frozen then: None is left alone by an optimizer, and zeros are stepped on."""
    (model, optimizer), (wanted, plain) = pairs = build(stage), build(0)
    for one, its in pairs:
        backward(one, 0)
        its.step()
        one.last.requires_grad_(False)
        if clear == "by hand":
            for parameter in one.parameters():
                parameter.grad = None
        else:
            one.zero_grad(set_to_none=clear == "to none")
        backward(one, 1)
        its.step()
        its.zero_grad(set_to_none=False)
        backward(one, 2)
        its.step()
    same_weights(model, optimizer, wanted, plain)


UNCLEARED: dict[str, Callable[[Model, Any], Any]] = {
    "another pass": lambda model, optimizer: (backward(model, 1), optimizer.step()),
    "a pass on one rank": lambda model, optimizer: (backward(model, 1, 0), optimizer.step()),
    "a pass through a part": lambda model, optimizer: (model.last(torch.ones(1, 6)).sum().backward(), optimizer.step()),
    "a pass that only asks": lambda model, optimizer: (
        torch.autograd.grad(model(torch.ones(1, 6)).sum(), trained_parameters(model)), optimizer.step()
    ),
    "no pass": lambda _, optimizer: optimizer.step(),
    "by hand": lambda model, optimizer: (backward(model, 1), optimizer.synchronize(), step_alone(optimizer)),
    "a closure": lambda model, optimizer: optimizer.step(lambda: backward(model, 1)),
    "a scaler": lambda model, optimizer: scaled_step(model, optimizer),
}  # fmt: skip


def step_alone(optimizer: Any) -> None:
    with optimizer.skip_synchronize():
        optimizer.step()


def scaled_step(model: Model, optimizer: Any) -> None:
    scaler = hc.GradScaler("cpu", 2.0)
    scaler.scale(model(torch.ones(1, 6)).sum()).backward()
    scaler.step(optimizer)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("way", UNCLEARED)
def test_gradients_that_nobody_has_cleared_are_an_error_on_every_rank(stage: int, way: str) -> None:
    """Without shards they are added to, or used again."""
    if stage == 3 and way in ("a pass on one rank", "a pass that only asks"):
        pytest.skip("is refused")
    (model, optimizer), (wanted, plain) = pairs = build(stage), build(0)
    for number in (0, 2):
        for one, its in pairs:
            its.zero_grad()
            backward(one, number)
            its.step()
        with pytest.raises(RuntimeError, match=r"nobody has cleared.*call optimizer\.zero_grad\(\)"):
            UNCLEARED[way](model, optimizer)
    for one, its in pairs:
        its.synchronize()  # no step has missed anything yet
        one.zero_grad()
        backward(one, 3)
        one.zero_grad()
        backward(one, 4)
        its.step()
    same_weights(model, optimizer, wanted, plain)


def test_gradients_of_parameters_that_no_step_updates_need_not_be_cleared() -> None:
    (model, optimizer), (wanted, plain) = pairs = [
        (model, wrap(model, torch.optim.SGD(model.blocks.parameters(), lr=0.1), shard=stage))
        for model, stage in ((Model(), 3), (Model(), 0))
    ]
    for number in range(3):
        for one, its in pairs:
            backward(one, number)
            its.step()
            its.zero_grad()
    same_weights(model, optimizer, wanted, plain)


@pytest.mark.parametrize("stage", STAGES)
def test_metadata_of_gradients_is_as_without_shards(stage: int) -> None:
    model, optimizer = build(stage)
    backward(model, 0)
    optimizer.step()
    for after in (lambda: None, optimizer.synchronize):
        optimizer.zero_grad()
        assert all(one.grad is None for one in model.parameters())
        backward(model, 0)
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
    backward(model, 0)
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
        backward(model, 0)
        norm = hc.clip_grad_norm_(parameters, 1e-3)
        assert norm > 1e-3
        torch.testing.assert_close(
            hc.clip_grad_norm_(model.parameters(), 1.0), torch.tensor(1e-3), rtol=1e-2, atol=0.0
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
                backward(run, 2 * number + part)
                torch._dynamo.reset()
            optimizer.step()
    finally:
        del run
        torch._dynamo.reset()


@pytest.mark.parametrize("stage", STAGES)
def test_the_number_of_passes_is_set_while_gradients_are_on_their_way(stage: int) -> None:
    """It counts from the next step on."""
    (model, optimizer), (wanted, plain) = pairs = build(stage), build(0)
    for number, passes in enumerate((1, 1, 1, 2, 2)):
        for one, its in pairs:
            its.zero_grad()
            for part in range(passes):
                backward(one, 10 * number + part)
            if number == 2:
                its.set_backward_passes_per_step(2)
            its.step()
    same_weights(model, optimizer, wanted, plain, exact=False)
