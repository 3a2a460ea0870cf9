"""Mixed precision over ranks: an overflow anywhere is an overflow everywhere."""

from __future__ import annotations

import sys
import types
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from one_process import WIDTH, batch, difference, fingerprint
from torch import nn

import hvd_ckpt as hc

pytestmark = pytest.mark.ranks(gloo=(1, 2), mpi=(4,))

DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
PLANTED = 2  # the step in which one rank overflows


def chain() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(*[module for _ in range(4) for module in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])


def forward(model: Any, step: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    with torch.autocast("cpu", dtype=dtype):
        output = hc.checkpoint_sequential(model, 2, batch(step, rank))
    loss = (output.float() - 0.3).square().mean()
    return loss * float("inf") if step == PLANTED and rank == hc.size() - 1 else loss


def wrapped(model: nn.Module, **options: Any) -> Any:
    return hc.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        named_parameters=model.named_parameters(),
        bucket_cap_mb=0.0003,
        **options,
    )


def reference(dtype: torch.dtype, clip: float | None = None) -> tuple[nn.Module, float]:
    """One process that skips the step in which any rank's gradient is not finite."""
    model = chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(6):
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


@DTYPES
@pytest.mark.parametrize("clip", [None, 0.05], ids=["plain", "clipped"])
def test_the_plain_recipe(dtype: torch.dtype, clip: float | None) -> None:
    model = chain()
    optimizer = wrapped(model)
    scaler = hc.GradScaler(init_scale=1024.0, growth_interval=2)
    for step in range(6):
        optimizer.zero_grad()
        scaler.scale(forward(model, step, hc.rank(), dtype)).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        before = fingerprint(model)
        scaler.step(optimizer)
        assert (fingerprint(model) == before) == (step == PLANTED)
        scaler.update()
        if hc.size() > 1:
            assert optimizer.reduction_stats.steps == step + 1
    equal_everywhere(model, scaler.get_scale())
    expected, scale = reference(dtype, clip)
    assert scaler.get_scale() == scale
    assert difference(model, expected) < 2e-4


def test_the_recipe_without_amp_and_with_a_bare_optimizer() -> None:
    model = chain()
    optimizer = wrapped(model)
    scaler = hc.GradScaler(enabled=False)
    for step in range(2):
        optimizer.zero_grad()
        scaler.scale(forward(model, step, hc.rank(), torch.bfloat16)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    equal_everywhere(model, 1.0)
    bare = torch.optim.SGD(chain().parameters(), lr=0.1)
    other = bare.param_groups[0]["params"][0]
    before = other.detach().clone()
    scaler = hc.GradScaler(init_scale=2.0)
    scaler.scale(other.sum()).backward()
    scaler.step(bare)
    assert torch.allclose(other, before - 0.1)


@DTYPES
def test_stock_scaler_with_horovods_documented_recipe(dtype: torch.dtype) -> None:
    model = chain()
    optimizer = wrapped(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(6):
        optimizer.zero_grad()
        scaler.scale(forward(model, step, hc.rank(), dtype)).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
    equal_everywhere(model, scaler.get_scale())
    expected, scale = reference(dtype)
    assert scaler.get_scale() == scale
    assert difference(model, expected) < 2e-4


@pytest.mark.skipif("hc.size() == 1", reason="one rank has nobody to differ from")
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


@pytest.mark.skipif("hc.size() == 1 or not hc.mpi_enabled()", reason="Adasum needs MPI")
@pytest.mark.ranks(gloo=(1, 2, 4), mpi=(2, 4))
def test_adasum_agrees_on_overflow() -> None:
    model = chain()
    optimizer = wrapped(model, op=hc.Adasum)
    scaler = hc.GradScaler(init_scale=1024.0, growth_interval=2)
    for step in range(5):
        optimizer.zero_grad()
        scaler.scale(forward(model, step, hc.rank(), torch.bfloat16)).backward()
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
                or part > 1
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

    amp.initialize, amp.scale_loss = initialize, scale_loss  # type: ignore[attr-defined]
    apex = types.ModuleType("apex")
    apex.__spec__, amp.__spec__ = types.SimpleNamespace(), types.SimpleNamespace()  # type: ignore[assignment]
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
                loss = net(batch(step, hc.rank(), part)).square().mean()
                precision.backward(loss, opt, last=part == 1) if opt is optimizer else loss.backward()
            precision.step(opt) if opt is optimizer else opt.step()
    assert difference(model, other) < 1e-6
    reduced = 1 if hc.size() > 1 else 0
    assert calls[:3] == [("initialize", "O2"), ("unscale", True, 0), ("unscale", False, reduced)]
