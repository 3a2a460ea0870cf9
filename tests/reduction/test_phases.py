"""Tests of the phases of a step: with any order of calls, a step uses reduced gradients. Passes and acts: tests/differential."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_process import chain, difference, loss, loss_of_all, same_everywhere, sgd, wrap

import hvd_ckpt as hc

pytestmark = pytest.mark.ranks(gloo=(1, 2))

several = pytest.mark.ranks(gloo=(2,), mpi=(4,))
OPERATIONS = {"average": hc.Average, "sum": hc.Sum}


def pair(op: Any = hc.Average, make: Any = sgd) -> list[tuple[Any, Any, Callable[..., torch.Tensor]]]:
    """Model, optimizer and loss of a distributed optimizer, and of one process that does for all ranks what each of them does."""
    model, reference = chain(3), chain(3)
    distributed = model, wrap(model, make(model), op=op), loss
    return [distributed, (reference, make(reference), functools.partial(loss_of_all, op=op))]


def check(both: list[Any]) -> None:
    (model, *_), (reference, *_) = both
    assert difference(model, reference) < 1e-5
    same_everywhere(model)


# ---------------------------------------------------------------------------------------------------- skipped steps


@several
@pytest.mark.parametrize("way", ["replaced", "in place", "dropped"])
def test_a_reduced_gradient_changed_on_one_rank_only_leaves_ranks_equal(way: str) -> None:
    model = chain(3)
    optimizer = wrap(model)
    for step in range(4):
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.synchronize()
        if hc.rank() == 0:
            weight = model[1][0].weight
            if way == "replaced":
                weight.grad = torch.ones_like(weight)
            elif way == "in place":
                weight.grad.mul_(2.0)
            else:
                weight.grad = None
        optimizer.step()
    same_everywhere(model)


@several
def test_an_unreduced_gradient_within_skip_synchronize_is_an_error() -> None:
    model = chain(3)
    optimizer = wrap(model)
    for step in range(3):
        loss(model, step).backward()
        if step:
            optimizer.synchronize()
            loss(model, step).backward()
        with pytest.raises(RuntimeError, match="not reduced"), optimizer.skip_synchronize():
            optimizer.step()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()
    same_everywhere(model)


# ---------------------------------------------------------------------------------------------------- scalers


@pytest.mark.parametrize("name", ["fp32", "bf16"])
@pytest.mark.parametrize("unscale", ["always", "where it skips"])
def test_precision_after_a_step_that_is_left_out(name: str, unscale: str) -> None:
    precision, both = hc.Precision(name, "cpu"), pair()
    for model, optimizer, loss_of in both:
        ours = loss_of is loss
        for step in range(5):
            model.zero_grad()
            value = loss_of(model, step)
            precision.backward(value, optimizer) if ours else value.backward()
            if ours and (step % 2 or unscale == "always"):
                precision.unscale(optimizer)
            if step % 2 == 0:
                precision.step(optimizer) if ours else optimizer.step()
    check(both)


@several
def test_a_backward_pass_between_unscale_and_step_is_an_error() -> None:
    model = chain(3)
    optimizer, scaler = wrap(model), hc.GradScaler("cpu", init_scale=8.0)
    for step in range(2):
        scaler.scale(loss(model, step)).backward()
        scaler.unscale_(optimizer)
        scaler.scale(loss(model, step)).backward()
        with pytest.raises(RuntimeError, match="not reduced"):
            scaler.step(optimizer)
        optimizer.synchronize()
        optimizer.zero_grad()
        scaler.update()


@several
def test_torchs_scaler_does_not_decide_on_gradients_that_have_come_since() -> None:
    model = chain(3)
    optimizer, scaler = wrap(model), torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(loss(model, 0)).backward()
    optimizer.synchronize()
    model.zero_grad()
    scaler.scale(loss(model, 1)).backward()
    with pytest.raises(RuntimeError, match="before optimizer.synchronize"):
        scaler.step(optimizer)


def test_unscaling_twice_is_torchs_error() -> None:
    model = chain(2)
    optimizer, scaler = wrap(model), hc.GradScaler("cpu", init_scale=8.0)
    scaler.scale(loss(model, 0)).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    same_everywhere(model)


def test_a_scaler_steps_one_optimizer_while_another_accumulates() -> None:
    pairs, scaler = [pair(), pair()], hc.GradScaler("cpu", init_scale=8.0)
    for step in range(6):
        for place, both in enumerate(pairs):
            for model, _, loss_of in both:
                value = loss_of(model, step + place)
                (scaler.scale(value) if loss_of is loss else value).backward()
        for _, optimizer, loss_of in pairs[step % 2]:
            scaler.step(optimizer) if loss_of is loss else optimizer.step()
            optimizer.zero_grad()
        scaler.update()
    for both in pairs:
        check(both)


@several
def test_a_model_converted_while_another_optimizers_gradients_accumulate() -> None:
    pairs = [pair(), pair()]
    for step in range(7):
        for place, both in enumerate(pairs):
            for model, _, loss_of in both:
                if step == 4:
                    model.double()
                loss_of(model, step + place).backward()
        for _, optimizer, _ in pairs[step % 2]:
            optimizer.step()
            optimizer.zero_grad()
    for both in pairs:
        check(both)


# ---------------------------------------------------------------------------------------------------- clearing and loading


class OwnSignatures(torch.optim.SGD):
    """Methods with other arguments and defaults than those of PyTorch."""

    def zero_grad(self, names: Any = (), *, set_to_none: bool = False) -> None:
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> str:
        super().load_state_dict(state_dict)
        return "strict" if strict else "not strict"

    def step(self, closure: Any = None, *, factor: float = 1.0) -> Any:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.data.sub_(0.1 * factor * parameter.grad)
        return factor


@pytest.mark.parametrize("stage", [0, 1])
def test_arguments_and_values_of_the_wrapped_optimizers_methods(stage: int) -> None:
    model = chain(2)
    optimizer = wrap(model, OwnSignatures(model.parameters(), lr=0.1), shard=stage, elementwise=True)
    loss(model, 0).backward()
    assert optimizer.step(factor=2.0) == 2.0
    optimizer.zero_grad(["any"])
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())
    optimizer.zero_grad(set_to_none=True)
    assert all(parameter.grad is None for parameter in model.parameters())
    if stage == 0:
        assert optimizer.load_state_dict(optimizer.state_dict(), strict=False) == "not strict"


@pytest.mark.parametrize("gradients", [False, True])
def test_clearing_after_a_group_of_parameters_that_have_gradients(gradients: bool) -> None:
    both = pair(make=lambda model: torch.optim.SGD(model[1:].parameters(), lr=0.1))
    for model, optimizer, loss_of in both:
        for step in range(5):
            loss_of(model, step).backward()
            optimizer.step()
            if step == 2:
                assert model[0][0].weight.grad is not None
                optimizer.add_param_group({"params": list(model[0].parameters())})
            optimizer.zero_grad()
            if step < 2 and not gradients:
                model[0].zero_grad()
    check(both)


# ---------------------------------------------------------------------------------------------------- closures


class SAM(torch.optim.SGD):
    """Sharpness-aware minimization (Foret et al., 2021): earlier gradients move the weights, the closure's step them."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        before = [parameter.clone() for group in self.param_groups for parameter in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=0.5)
        self.zero_grad()
        with torch.enable_grad():
            value = closure()
        for parameter, kept in zip(parameters, before):
            parameter.copy_(kept)
        super().step()
        return value


@pytest.mark.parametrize("op", OPERATIONS)
def test_a_step_with_a_closure_after_a_backward_pass(op: str) -> None:
    both = pair(OPERATIONS[op], lambda model: SAM(model.parameters(), lr=0.1))
    for model, optimizer, loss_of in both:
        for step in range(4):
            loss_of(model, step).backward()
            if step == 2 and loss_of is loss:
                optimizer.synchronize()

            def closure(model: Any = model, loss_of: Any = loss_of, step: int = step) -> torch.Tensor:
                value = loss_of(model, step)
                value.backward()
                return value

            optimizer.step(closure)
            optimizer.zero_grad()
    check(both)


RETURNED: dict[str, Callable[[float], Any]] = {  # of a rank; others: tests/differential/interpreter.py
    "text": lambda rank: "done",
    "tensor": torch.tensor,
    "float": float,
    "one element": lambda rank: torch.tensor([rank]),
    "none on one rank": lambda rank: torch.tensor(rank) if rank else None,
}


@several
@pytest.mark.parametrize("returned", RETURNED)
def test_what_a_closure_returns(returned: str) -> None:
    model = chain(2)
    optimizer = wrap(model)

    def closure() -> Any:
        optimizer.zero_grad()
        loss(model, 0).backward()
        return RETURNED[returned](float(hc.rank()))

    of_mean = returned in ("tensor", "float", "one element")
    expected = RETURNED[returned]((hc.size() - 1) / 2 if of_mean else float(hc.rank()))
    result = optimizer.step(closure)
    assert type(result) is type(expected) and result == expected
    assert not of_mean or torch.as_tensor(result).shape == torch.as_tensor(expected).shape
    same_everywhere(model)


def test_gradients_without_any_backward_pass_in_a_closure() -> None:
    both = pair()
    for model, optimizer, loss_of in both:
        for step in range(4):
            loss_of(model, step).backward()
            optimizer.step(lambda: torch.ones(()))
            optimizer.zero_grad()
    check(both)


# ---------------------------------------------------------------------------------------------------- schedules


@pytest.mark.parametrize("stepped", [True, False])
def test_a_schedule_made_before_wrapping_knows_of_steps(stepped: bool) -> None:
    model = chain(1)
    bare = sgd(model)
    schedule = torch.optim.lr_scheduler.StepLR(bare, 1, gamma=0.5)
    optimizer = wrap(model, bare)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(2):
            loss(model, step).backward()
            if stepped:
                optimizer.step()
            schedule.step()
    assert any("lr_scheduler.step()" in str(warning.message) for warning in caught) == (not stepped)
    assert optimizer.param_groups[0]["lr"] == 0.025
