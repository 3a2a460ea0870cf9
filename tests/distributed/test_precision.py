"""Tests of mixed precision over ranks: an overflow on one rank is an overflow on all ranks."""

from __future__ import annotations

import sys
import types
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from one_process import batch, chain, difference, fingerprint, wrap
from torch import nn

import hvd_ckpt as hc

pytestmark = pytest.mark.ranks(gloo=(1, 2), mpi=(4,))

PLANTED = 2  # the step in which one rank overflows


def forward(model: Any, step: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    with torch.autocast("cpu", dtype=dtype):
        output = hc.checkpoint_sequential(model, 2, batch(step, rank))
    value = (output.float() - 0.3).square().mean()
    return value * float("inf") if step == PLANTED and rank == hc.size() - 1 else value


def wrapped(model: nn.Module, **options: Any) -> Any:
    return wrap(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), **options)


def reference(dtype: torch.dtype, clip: float | None = None, enabled: bool = True) -> tuple[nn.Module, float]:
    """One process that skips the step in which any rank's gradient is not finite."""
    model = chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2, enabled=enabled)
    for step in range(6 if enabled else PLANTED):
        optimizer.zero_grad()
        sum(scaler.scale(forward(model, step, rank, dtype)) for rank in range(hc.size())).backward()
        for parameter in model.parameters():
            parameter.grad /= hc.size()
        if clip is not None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
    return model, scaler.get_scale()


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
    model = chain()
    optimizer = wrapped(model)
    scaler: Any = (torch.amp.GradScaler if stock else hc.GradScaler)(
        "cpu", init_scale=1024.0, growth_interval=2, enabled=enabled
    )
    for step in range(6 if enabled else PLANTED):
        optimizer.zero_grad()
        scaler.scale(forward(model, step, hc.rank(), dtype)).backward()
        if stock:
            optimizer.synchronize()
        if stock or clip is not None:
            scaler.unscale_(optimizer)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        before = fingerprint(model)
        with optimizer.skip_synchronize() if stock else nullcontext():
            scaler.step(optimizer)
        assert (fingerprint(model) == before) == (step == PLANTED)
        scaler.update()
        if hc.size() > 1:
            assert optimizer.reduction_stats.steps == step + 1
    equal_everywhere(model, scaler.get_scale())
    expected, scale = reference(dtype, clip, enabled)
    assert scaler.get_scale() == scale
    assert difference(model, expected) < 2e-4


@pytest.mark.parametrize("shard", [0, 2])
def test_a_scaler_that_is_off_steps_with_a_closure(shard: int) -> None:
    def run(scaler: hc.GradScaler | None) -> list[bytes]:
        model = chain()
        optimizer = wrapped(model, shard=shard)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            value = forward(model, 0, hc.rank(), torch.bfloat16)
            value.backward()
            return value

        for _ in range(2):
            value = optimizer.step(closure) if scaler is None else scaler.step(optimizer, closure)
            assert float(value) > 0
        return fingerprint(model)

    assert run(hc.GradScaler(enabled=False)) == run(None)


def test_the_recipe_with_a_bare_optimizer() -> None:
    bare = torch.optim.SGD(chain().parameters(), lr=0.1)
    other = bare.param_groups[0]["params"][0]
    before = other.detach().clone()
    scaler = hc.GradScaler(init_scale=2.0)
    scaler.scale(other.sum()).backward()
    scaler.step(bare)
    assert torch.allclose(other, before - 0.1)


@pytest.mark.ranks(gloo=(2,), mpi=(4,))
@pytest.mark.parametrize("unscale", [False, True], ids=["step", "unscale"])
def test_stock_scaler_without_synchronize_is_an_error_everywhere(unscale: bool) -> None:
    model = chain()
    optimizer = wrapped(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(forward(model, PLANTED, hc.rank(), torch.bfloat16)).backward()
    if unscale:
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="use hvd_ckpt.GradScaler"):
        scaler.step(optimizer)
    hc.barrier()


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


@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16"])
def test_precision_recipes(name: str) -> None:
    model = chain()
    precision = hc.Precision(name, **({"init_scale": 1024.0} if name == "fp16" else {}))
    prepared, optimizer = precision.prepare(model, wrapped(model))
    assert prepared is model
    for step in range(4):
        optimizer.zero_grad()
        for part in range(2):
            with precision.autocast():
                output = model(batch(step, hc.rank(), part))
            assert (
                output.dtype is {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[name]
            )
            precision.backward((output.float() - 0.3).square().mean(), optimizer, last=part == 1)
        precision.unscale(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        precision.step(optimizer)
    equal_everywhere(model, 0.0)
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
    amp = types.ModuleType("apex.amp")

    def initialize(model: Any, optimizer: Any, opt_level: str, verbosity: int) -> tuple[Any, Any]:
        calls.append(("initialize", opt_level))
        return model, optimizer

    @contextmanager
    def scale_loss(loss: torch.Tensor, optimizer: Any, delay_unscale: bool) -> Any:
        yield loss * 4
        calls.append(("unscale", delay_unscale, optimizer.reduction_stats.steps))
        if not delay_unscale:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad /= 4

    amp.initialize, amp.scale_loss = initialize, scale_loss
    apex = types.ModuleType("apex")
    apex.__spec__, amp.__spec__ = types.SimpleNamespace(), types.SimpleNamespace()
    monkeypatch.setitem(sys.modules, "apex", apex)
    monkeypatch.setitem(sys.modules, "apex.amp", amp)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    precision = hc.Precision("apex-O2", device="cpu")
    model, other = chain(), chain()
    with pytest.raises(RuntimeError, match="wrap the optimizer with DistributedOptimizer before"):
        precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
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
    optimizer = hc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), model.named_parameters())
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
