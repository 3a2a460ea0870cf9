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
from same import whole_weights
from sharded import distribute
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
    return model, distribute(optimizer, model.named_parameters(), shard=stage, model=model, **options)


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


READERS: dict[str, Callable[[Model, Any], Any]] = {
    "clipping by norm": lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "clipping by norm, one by one": lambda model, _: nn.utils.clip_grad_norm_(
        model.parameters(), 1.0, foreach=False
    ),
    "clipping by value": lambda model, _: nn.utils.clip_grad_value_(model.parameters(), 0.1),
    "clipping by value, one by one": lambda model, _: nn.utils.clip_grad_value_(
        model.parameters(), 0.1, foreach=False
    ),
    "a total norm": lambda model, _: nn.utils.get_total_norm(gradients(model)),
    "scaling by a norm": lambda model, _: nn.utils.clip_grads_with_norm_(
        model.parameters(), 1.0, torch.tensor(9.0)
    ),
    "a norm for the log": lambda model, _: sum(one.norm() for one in gradients(model)),
    "its data": lambda model, _: [one.data.abs().max() for one in gradients(model)],
    "detached": lambda model, _: [one.detach() for one in gradients(model)],
    "noise": lambda model, _: [one.add_(torch.randn(one.shape)) for one in gradients(model)],
    "centralization": lambda model, _: [one.sub_(one.mean()) for one in gradients(model)],
    "an operator": lambda model, _: model.last.weight.grad * 2,
    "an element": lambda model, _: model.last.weight.grad[0],
    "an element set": lambda model, _: model.last.weight.grad.__setitem__(0, 0.0),
    "a finite check": lambda model, _: torch.isfinite(model.last.weight.grad).all(),
    "numpy": lambda model, _: model.last.weight.grad.numpy(),
    "a list": lambda model, _: model.last.bias.grad.tolist(),
    "foreach": lambda model, _: torch._foreach_mul_(gradients(model), 0.5),
    "a vector": lambda model, _: nn.utils.parameters_to_vector(gradients(model)),
    "zeros in place": lambda model, _: model.zero_grad(set_to_none=False),
    "a copy": lambda model, _: copy.deepcopy(model.last.weight.grad),
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


def same_weights(model: nn.Module, optimizer: Any, wanted: nn.Module, plain: Any, exact: bool = True) -> None:
    theirs = whole_weights(wanted, plain)
    for name, value in whole_weights(model, optimizer).items():
        if exact and hc.size() <= 2:
            assert torch.equal(value, theirs[name]), name
        else:
            torch.testing.assert_close(value, theirs[name])


def short(model: Model, number: int) -> None:
    """As :func:`backward` on all ranks, without the blocks after the first one."""
    generator = torch.Generator().manual_seed(10 * number + hc.rank())
    model.last(model.blocks[0](torch.randn(5, 6, generator=generator))).square().mean().backward()


def set_to_zero(model: Model, optimizer: Any) -> None:
    optimizer.zero_grad(set_to_none=False)


CLEARED: dict[str, Callable[[Model, Any], Any]] = {
    "zeros": set_to_zero,
    "zeros of zeros": lambda model, optimizer: [set_to_zero(model, optimizer) for _ in range(2)],
    "None": lambda _, optimizer: optimizer.zero_grad(),
    "zeros, then None": lambda model, optimizer: (set_to_zero(model, optimizer), optimizer.zero_grad()),
    "zeros, then None by hand": lambda model, optimizer: (
        set_to_zero(model, optimizer),
        [setattr(one, "grad", None) for one in model.blocks[1].parameters()],
    ),
    "zeros, then None by the model": lambda model, optimizer: (
        set_to_zero(model, optimizer),
        model.zero_grad(),
    ),
    "zeros after a state was loaded": lambda model, optimizer: (
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
        set_to_zero(model, optimizer),
    ),
}


@pytest.mark.parametrize("case", CLEARED)
@pytest.mark.parametrize("options", [{"shard": 2}, {"shard": 3}, {"shard": 3, "units": []}], ids=str)
def test_a_gradient_that_was_set_to_zero_counts_as_zeros(case: str, options: dict[str, Any]) -> None:
    """Weight decay and momentum move a parameter whose gradient is zeros, and not one whose gradient is None."""
    model, optimizer = build(options["shard"], **{k: v for k, v in options.items() if k != "shard"})
    wanted, plain = build(0)
    for number in range(9):
        for one, other in ((optimizer, model), (plain, wanted)):
            if case.startswith("zeros") and number == 6:
                set_to_zero(other, one)
            else:
                CLEARED[case](other, one)
            if number in (0, 1, 6):
                backward(other, number)
            elif number == 4 and options["shard"] == 2:  # at stage 3 all ranks run the model
                backward(other, number, 0)
            elif number == 7:
                pass  # all gradients are zeros, or None
            else:
                short(other, number)
            one.step()
    same_weights(model, optimizer, wanted, plain)
    before = wanted.blocks[1][0].weight.detach().clone()
    for one, other in ((optimizer, model), (plain, wanted)):
        CLEARED[case](other, one)
        short(other, 9)
        if hc.rank() == 0:
            hc_gradient: Any = other.blocks[1][0].weight.grad
            assert (hc_gradient is None) == ("None" in case)
        one.step()
    assert torch.equal(before, wanted.blocks[1][0].weight.detach()) == ("None" in case)
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


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_zeros_beside_gradients_with_values(stage: int, foreach: bool) -> None:
    results = []
    for of in (0, stage):
        model = Model()
        wrapped = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1, foreach=foreach)
        optimizer = hc.DistributedOptimizer(wrapped, model.named_parameters(), shard=of, model=model)
        for number in range(3):
            optimizer.zero_grad(set_to_none=False)
            model.unused.weight.grad = torch.ones(6, 6)
            optimizer.zero_grad(set_to_none=False)
            backward(model, number) if number == 0 else short(model, number)
            optimizer.step()
        results += [model, optimizer]
    same_weights(*results[2:], *results[:2])


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
        assert all(one.grad is None for one in model.parameters())


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


def as_whole(
    act: Callable[[Any, Any, int], Any], stage: int, steps: int = 3, exact: bool = True, **options: Any
) -> None:
    """What users do in each step leads to the weights of whole gradients."""
    pairs = [build(stage, **options), build(0)]
    for number in range(steps):
        for model, optimizer in pairs:
            act(model, optimizer, number)
    same_weights(*pairs[0], *pairs[1], exact)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("passes", [1, 2])
def test_gradients_that_all_ranks_drop_are_dropped(stage: int, passes: int) -> None:
    """Whether they had left or not; what is accumulated anew counts."""

    def act(model: Model, optimizer: Any, number: int) -> None:
        optimizer.zero_grad()
        backward(model, number)
        if number == 2:  # the gradients of all
            optimizer.synchronize()
            model.zero_grad()
            with optimizer.skip_synchronize():
                optimizer.step()
            return
        model.last.weight.grad = None
        if number == 1:
            for parameter in model.blocks[0].parameters():
                parameter.grad = None
        optimizer.step()

    as_whole(act, stage, 4, backward_passes_per_step=passes)


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("again", [(), (0,), (0, 1, 2, 3)], ids=["on no rank", "on one rank", "on all ranks"])
def test_ranks_drop_gradients_after_different_numbers_of_passes(passes: int, again: tuple[int, ...]) -> None:
    """So other rounds have left on each of them; what comes on some ranks since counts."""

    def act(model: Model, optimizer: Any, number: int) -> None:
        optimizer.zero_grad()
        for part in range(2 + 2 * (number % 2 == 1 and hc.rank() == 0)):
            backward(model, 10 * number + part)
        if number % 2:
            model.last.weight.grad = None
            if again:
                backward(model, 10 * number + 5, *again)
        optimizer.step()

    as_whole(act, 2, 4, exact=False, backward_passes_per_step=passes)  # passes are added up in another order


@pytest.mark.parametrize("stage", STAGES)
def test_a_late_gradient_that_is_dropped_takes_what_has_left_with_it(stage: int) -> None:
    def act(model: Model, optimizer: Any, number: int) -> None:
        optimizer.zero_grad()
        for part in range(1 + (number == 1)):
            backward(model, 10 * number + part)
        if number == 1:
            model.last.weight.grad = None
        optimizer.step()

    as_whole(act, stage)


@pytest.mark.parametrize(("stage", "ranks"), [(2, ()), (3, ()), (2, (0,))], ids=["2", "3", "2, one rank"])
def test_gradients_that_the_model_clears_after_a_synchronization(stage: int, ranks: tuple[int, ...]) -> None:
    """Whichever ranks have gradients in the next step."""

    def act(model: Model, optimizer: Any, number: int) -> None:
        backward(model, number, *(ranks if number in (2, 3) else ()))
        optimizer.synchronize() if number in (0, 1, 3) else optimizer.step()
        model.zero_grad()

    as_whole(act, stage, 5, bucket_cap_mb=0.0002)


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_that_the_model_clears_after_they_have_left(stage: int) -> None:
    def act(model: Model, optimizer: Any, number: int) -> None:
        for part in range(3):
            if part == number:
                model.zero_grad()
            if part == 2:
                model.last.weight.grad = None
            backward(model, 10 * number + part)
        optimizer.step()
        optimizer.zero_grad()

    as_whole(act, stage, exact=False)  # passes are added up in another order


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_set_by_hand_are_reduced(stage: int) -> None:
    def act(model: Model, optimizer: Any, number: int) -> None:
        optimizer.zero_grad()
        for place, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(100 * number + 10 * place + hc.rank())
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()

    as_whole(act, stage)


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_asked_for_by_autograd_changes_nothing(stage: int) -> None:
    def act(model: Model, optimizer: Any, number: int) -> None:
        optimizer.zero_grad()
        backward(model, number)
        assert torch.autograd.grad(model(torch.ones(2, 6)).sum(), model.last.bias)[0] == 2.0
        optimizer.step()

    as_whole(act, stage, 2)


BY_HAND: dict[str, Callable[[Model], Any]] = {
    "replaced": lambda model: setattr(model.last.weight, "grad", torch.zeros(1, 6)),
    "replaced on one rank": lambda model: (
        setattr(model.last.weight, "grad", torch.zeros(1, 6)) if hc.rank() == 0 else None
    ),
    "dropped on one rank": lambda model: setattr(model.last.weight, "grad", None) if hc.rank() == 0 else None,
    "dropped on one rank and accumulated again": lambda model: (
        setattr(model.last.weight, "grad", None) if hc.rank() == 0 else None,
        backward(model, 5),
    ),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("case", BY_HAND)
def test_gradients_set_or_dropped_in_flight_are_errors_on_every_rank(stage: int, case: str) -> None:
    if hc.size() == 1 and "one rank" in case:
        pytest.skip("one rank is all")
    model, optimizer = build(stage)
    for number in range(2):
        optimizer.zero_grad()
        backward(model, number)
        if number:
            BY_HAND[case](model)
            with pytest.raises(
                RuntimeError, match=r"parameter '\w+\.[\w.]+' (was replaced|had its gradient dropped)"
            ):
                optimizer.step()
        else:
            optimizer.step()
    optimizer.zero_grad()
    backward(model, 7)
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
    assert all(parameter.grad is None for parameter in model.parameters())


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
def test_gradients_in_shards_that_are_swapped_are_an_error(stage: int) -> None:
    """Of two parameters, after their gradients were reduced."""
    model, optimizer = build(stage)
    for number in range(2):
        optimizer.zero_grad()
        backward(model, number)
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            if number == 0:
                optimizer.step()
    first, second = model.blocks[0][0].bias, model.blocks[1][0].bias
    first.grad, second.grad = second.grad, first.grad
    with pytest.raises(RuntimeError, match="0.bias' was given the gradient of"), optimizer.skip_synchronize():
        optimizer.step()
