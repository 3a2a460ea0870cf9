"""Tests of what code does between the calls of a step: it is right, or an error on every rank; acts: tests/differential."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_process import SMALL, chain, check_weights, loss, loss_of_all, same_everywhere, sgd, wrap
from torch import nn

import hvd_ckpt as hc

pytestmark = pytest.mark.ranks(gloo=(1, 2))

several = pytest.mark.ranks(gloo=(2,), mpi=(4,))
ONE_BUCKET = 25.0


def pair(op: Any = hc.Average, make: Any = sgd) -> list[tuple[Any, Any, Callable[..., torch.Tensor]]]:
    """Model, optimizer and loss of a distributed optimizer, and of one process that does for all ranks what each of them does."""
    model, reference = chain(3), chain(3)
    distributed = model, wrap(model, make(model), op=op), loss
    return [distributed, (reference, make(reference), functools.partial(loss_of_all, op=op))]


def check(both: list[Any]) -> None:
    (model, *_), (reference, *_) = both
    check_weights(model, reference, tolerance=1e-5)


@several
@pytest.mark.parametrize("way", ["replaced", "in place", "dropped"])
def test_a_reduced_gradient_changed_on_one_rank_only_leaves_ranks_equal(way: str) -> None:
    model = chain(3)
    optimizer = wrap(model)
    for step in range(4):
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.synchronize()
        weight = model[1][0].weight
        if hc.rank() == 0 and way == "in place":
            weight.grad.mul_(2.0)
        elif hc.rank() == 0:
            weight.grad = torch.ones_like(weight) if way == "replaced" else None
        optimizer.step()
    same_everywhere(model)


@contextlib.contextmanager
def raises_on_every_rank(message: str) -> Any:
    with pytest.raises(RuntimeError, match=message):
        yield
    assert hc.allreduce(torch.ones(1), op=hc.Sum, name="all have raised") == hc.size()


@several
def test_a_change_in_place_of_a_group_that_waits_is_an_error() -> None:
    """At stage 2, in a group that holds back for a parameter without a gradient."""
    model = nn.ModuleDict({"used": nn.Linear(8, 8), "unused": nn.Linear(8, 8)})
    optimizer = wrap(model, bucket_cap_mb=ONE_BUCKET, shard=2)
    model["used"](torch.ones(2, 8)).sum().backward()
    with raises_on_every_rank(r"'used\.\w+' was changed in place"):
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()


@pytest.mark.parametrize("of", ["the first", "the last", "all"])
@pytest.mark.parametrize("before", [0, 2])
def test_a_change_in_place_with_replicas_is_an_error(of: str, before: int) -> None:
    """Within the first replica of a rank, within the last one, or after all."""
    changed = r"gradient of parameter '[\d.]+(weight|bias)' (was changed in place|is being added up).*synchronize\(\)"
    model = chain()
    optimizer = wrap(model, bucket_cap_mb=ONE_BUCKET, replicas=8)
    place = {"the first": 0, "the last": 8 // hc.size() - 1}.get(of)
    for step in range(before + 1):
        optimizer.zero_grad()
        with raises_on_every_rank(changed) if step == before else contextlib.nullcontext():
            for number, replica in enumerate(optimizer.local_replicas()):
                with replica:
                    loss(model, step).backward()
                    if step == before and number == place:
                        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            if step == before and of == "all":
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()


KEEPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "itself": lambda gradient: gradient,
    "detached": lambda gradient: gradient.detach(),
    "its data": lambda gradient: gradient.data,
    "a view": lambda gradient: gradient.view(-1)[1:],
}


@pytest.mark.parametrize("bucket_cap_mb", [SMALL, ONE_BUCKET])
@pytest.mark.parametrize("shard", [0, 1])
@pytest.mark.parametrize("way", KEEPS)
def test_gradients_that_code_keeps_stay_as_they_are(way: str, bucket_cap_mb: float, shard: int) -> None:
    model = chain()
    optimizer = wrap(model, bucket_cap_mb=bucket_cap_mb, shard=shard)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep() -> None:
        for parameter in model.parameters():
            own = KEEPS[way](parameter.grad)
            kept.append((own, own.clone()))

    for step in range(3):
        optimizer.zero_grad()
        loss(model, 2 * step).backward()  # one pass per task, as for gradient surgery
        keep()
        model.zero_grad()
        loss(model, 2 * step + 1).backward()
        optimizer.step()
        keep()
    assert all(torch.equal(own, copy) for own, copy in kept)


@pytest.mark.parametrize("gradients", [False, True])
def test_clearing_after_a_group_of_parameters_that_have_gradients(gradients: bool) -> None:
    both = pair(make=lambda model: sgd(model[1:]))
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
@pytest.mark.parametrize("converted", [False, True])
def test_an_optimizer_steps_while_another_accumulates(converted: bool) -> None:
    """With a scaler, or where the models are converted on the way."""
    pairs, scaler = [pair(), pair()], hc.GradScaler("cpu", init_scale=8.0, enabled=not converted)
    for step in range(7):
        for place, both in enumerate(pairs):
            for model, _, loss_of in both:
                if converted and step == 4:
                    model.double()
                value = loss_of(model, step + place)
                (scaler.scale(value) if loss_of is loss else value).backward()
        for _, optimizer, loss_of in pairs[step % 2]:
            scaler.step(optimizer) if loss_of is loss else optimizer.step()
            optimizer.zero_grad()
        scaler.update()
    for both in pairs:
        check(both)


class OwnSignatures(torch.optim.SGD):
    """Methods that extend those of PyTorch, with other arguments, defaults and values."""

    def zero_grad(self, names: Any = (), *, set_to_none: bool = False) -> None:
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> str:
        super().load_state_dict(state_dict)
        return "strict" if strict else "not strict"

    def add_param_group(self, param_group: Any) -> None:
        super().add_param_group(param_group)

    def step(self, closure: Any = None, *, factor: float = 1.0) -> Any:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.grad *= factor
        super().step(closure)
        return factor


@pytest.mark.parametrize("stage", [0, 1])
def test_methods_that_an_optimizer_extends(stage: int) -> None:
    model = chain(2)
    bare = OwnSignatures(model[1].parameters(), lr=0.1)
    optimizer = wrap(model, bare, shard=stage, elementwise=True)
    assert isinstance(optimizer, OwnSignatures)
    loss(model, 0).backward()
    assert optimizer.step(factor=2.0) == 2.0
    optimizer.zero_grad(["any"])
    own = list(model[1].parameters())
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in own)
    optimizer.zero_grad(set_to_none=True)
    assert all(parameter.grad is None for parameter in own)
    assert stage or optimizer.load_state_dict(optimizer.state_dict(), strict=False) == "not strict"
    optimizer.add_param_group({"params": list(model[0].parameters())})
    loss(model, 1).backward()
    assert optimizer.step() == 1.0
    same_everywhere(model)


class SAM(torch.optim.SGD):
    """Sharpness-aware minimization (Foret et al., 2021): earlier gradients move the weights, the closure's step them."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        before = [parameter.clone() for parameter in parameters]
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


@pytest.mark.parametrize("op", [hc.Average, hc.Sum])
def test_a_step_with_a_closure_after_a_backward_pass(op: Any) -> None:
    both = pair(op, lambda model: SAM(model.parameters(), lr=0.1))
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
