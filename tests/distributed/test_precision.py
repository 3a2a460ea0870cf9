"""Tests of mixed precision over ranks: an overflow on one rank is an overflow on all ranks."""

from __future__ import annotations

import sys
import types
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from one_process import batch, chain, check_weights, difference, fingerprint, same_everywhere, wrap
from torch import nn

import hvd_ckpt as hc

pytestmark = pytest.mark.ranks(gloo=(1, 2), mpi=(4,))

PLANTED = 2  # the step in which one rank overflows


def forward(model: Any, step: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    with torch.autocast("cpu", dtype=dtype):
        output = hc.checkpoint_sequential(model, 2, batch(step, rank))
    value = (output.float() - 0.3).square().mean()
    return value * float("inf") if step == PLANTED and rank == hc.size() - 1 else value


def momentum(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def wrapped(model: nn.Module, **options: Any) -> Any:
    return wrap(model, momentum(model), **options)


def equal_everywhere(model: nn.Module, scale: float) -> None:
    everywhere = hc.allgather_object((fingerprint(model), scale))
    assert all(other == everywhere[0] for other in everywhere)


@pytest.mark.parametrize(
    ("dtype", "clip", "enabled", "stock"),
    [
        (torch.float16, None, True, False),
        (torch.float16, 0.05, True, False),
        (torch.bfloat16, 0.05, True, False),
        (torch.bfloat16, 0.01, False, False),  # reduces before it clips, too
        (torch.float16, None, True, True),
    ],
    ids=["plain", "clipped", "bf16", "disabled", "as Horovod documents for torch's scaler"],
)
def test_the_recipe(dtype: torch.dtype, clip: float | None, enabled: bool, stock: bool) -> None:
    """As in one process, which skips the step in which any rank's gradient is not finite."""
    model, expected = chain(), chain()
    optimizer, plain = wrapped(model), momentum(expected)
    options: dict[str, Any] = {"init_scale": 1024.0, "growth_interval": 2, "enabled": enabled}
    of_torch = torch.amp.GradScaler("cpu", **options)
    scaler: Any = torch.amp.GradScaler("cpu", **options) if stock else hc.GradScaler("cpu", **options)
    for step in range(6 if enabled else PLANTED):
        plain.zero_grad()
        sum(of_torch.scale(forward(expected, step, rank, dtype)) for rank in range(hc.size())).backward()
        for parameter in expected.parameters():
            parameter.grad /= hc.size()
        optimizer.zero_grad()
        scaler.scale(forward(model, step, hc.rank(), dtype)).backward()
        if stock:
            optimizer.synchronize()
        if stock or clip is not None:
            scaler.unscale_(optimizer)
        if clip is not None:
            of_torch.unscale_(plain)
            for net in model, expected:
                torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        before = fingerprint(model)
        with optimizer.skip_synchronize() if stock else nullcontext():
            scaler.step(optimizer)
        of_torch.step(plain)
        assert (fingerprint(model) == before) == (step == PLANTED)
        scaler.update()
        of_torch.update()
        assert scaler.get_scale() == of_torch.get_scale()
        assert hc.size() == 1 or optimizer.reduction_stats.steps == step + 1
    check_weights(model, expected, tolerance=2e-4)


@pytest.mark.parametrize("shard", [0, 2])
def test_a_scaler_that_is_off_steps_with_a_closure(shard: int) -> None:
    weights = []
    for scaler in (hc.GradScaler(enabled=False), None):
        model = chain()
        optimizer = wrapped(model, shard=shard)

        def closure(model: nn.Module = model, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            value = forward(model, 0, hc.rank(), torch.bfloat16)
            value.backward()
            return value

        for _ in range(2):
            value = optimizer.step(closure) if scaler is None else scaler.step(optimizer, closure)
            assert float(value) > 0
        weights.append(fingerprint(model))
    assert weights[0] == weights[1]


def test_the_recipe_with_a_bare_optimizer() -> None:
    weight = nn.Parameter(torch.ones(3))
    scaler = hc.GradScaler(init_scale=2.0)
    scaler.scale(weight.sum()).backward()
    scaler.step(torch.optim.SGD([weight], lr=0.1))
    assert torch.allclose(weight, torch.tensor(0.9))


@pytest.mark.skipif("not hc.mpi_enabled()", reason="Adasum needs MPI")
@pytest.mark.ranks(mpi=(4,))
@pytest.mark.parametrize("alone", [False, True], ids=["overflow", "gradients on one rank"])
def test_adasum_agrees_on_overflow_and_needs_no_gradients(alone: bool) -> None:
    model = chain()
    optimizer = wrapped(model, op=hc.Adasum)
    scaler = hc.GradScaler(init_scale=1024.0, growth_interval=2)
    for step in range(2 if alone else 5):
        optimizer.zero_grad()
        value = forward(model, step, hc.rank(), torch.bfloat16) if not alone or hc.rank() == 0 else None
        scaled = scaler.scale(torch.zeros(()) if value is None else value)
        if value is not None:
            scaled.backward()
        before = fingerprint(model)
        scaler.step(optimizer)
        assert (fingerprint(model) == before) == (step == PLANTED)
        scaler.update()
    equal_everywhere(model, scaler.get_scale())


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp32", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16)]
)
def test_precision_recipes(name: str, dtype: torch.dtype) -> None:
    model = chain()
    precision = hc.Precision(name, **({"init_scale": 1024.0} if name == "fp16" else {}))
    prepared, optimizer = precision.prepare(model, wrapped(model))
    assert prepared is model
    for step in range(4):
        optimizer.zero_grad()
        for part in range(2):
            with precision.autocast():
                output = model(batch(step, hc.rank(), part))
            assert output.dtype is dtype
            precision.backward((output.float() - 0.3).square().mean(), optimizer, last=part == 1)
        precision.unscale(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        precision.step(optimizer)
    same_everywhere(model)
    assert difference(model, chain()) > 1e-3


def test_unknown_precision_and_missing_apex() -> None:
    with pytest.raises(ValueError, match="precision 'fp8' is unknown; choose one of fp32, fp16"):
        hc.Precision("fp8")
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="precision 'apex-O1' cannot be used: .*Apex"):
            hc.Precision("apex-O1")


def test_apex_recipe_and_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls that Horovod's Apex recipe asks for, seen by a stand-in: Apex itself needs a GPU."""
    calls: list[Any] = []

    def initialize(model: Any, optimizer: Any, opt_level: str, verbosity: int) -> tuple[Any, Any]:
        calls.append(("initialize", opt_level))
        return model, optimizer

    @contextmanager
    def scale_loss(loss: torch.Tensor, optimizer: Any, delay_unscale: bool) -> Any:
        yield loss * 4
        calls.append(("unscale", delay_unscale, optimizer.reduction_stats.steps))
        for parameter in () if delay_unscale else optimizer.param_groups[0]["params"]:
            parameter.grad /= 4

    names = {"apex": {}, "apex.amp": {"initialize": initialize, "scale_loss": scale_loss}}
    for name, content in names.items():
        module = types.ModuleType(name)
        vars(module).update(content, __spec__=types.SimpleNamespace())
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    precision = hc.Precision("apex-O2", device="cpu")
    model, other = chain(), chain()
    with pytest.raises(RuntimeError, match="wrap the optimizer with DistributedOptimizer before"):
        precision.prepare(model, momentum(model))
    model, optimizer = precision.prepare(model, wrapped(model))
    plain = wrapped(other)
    for step in range(3):
        for net, opt in ((model, optimizer), (other, plain)):
            opt.zero_grad()
            for part in range(2):
                value = net(batch(step, hc.rank(), part)).square().mean()
                precision.backward(value, opt, last=part == 1) if opt is optimizer else value.backward()
            precision.step(opt) if opt is optimizer else opt.step()
    assert difference(model, other) < 1e-6
    reduced = 1 if hc.size() > 1 else 0
    assert calls[:3] == [("initialize", "O2"), ("unscale", True, 0), ("unscale", False, reduced)]


def test_a_rank_without_a_batch_in_the_first_step_takes_part() -> None:
    torch.manual_seed(0)
    model, scaler = nn.Linear(4, 2), hc.GradScaler("cpu", init_scale=8.0)
    start = model.weight.detach().clone()
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.5))
    for unscales in (False, True):
        optimizer.zero_grad()
        if hc.rank() == 0 or unscales:
            scaler.scale(model(torch.ones(3, 4)).sum()).backward()
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    torch.testing.assert_close(start - model.weight, torch.full((2, 4), 1.5 / hc.size() + 1.5))
    hc.verify(model)
