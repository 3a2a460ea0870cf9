"""Recomputation in the environment of the first pass: modes, context variables and settings that begin or end between passes are
those of the first pass, in every way of recomputing, and an environment of another kind is verified anew."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import ways
from same import assert_same
from selective import drop_all
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode
from ways import Run, each, in_segments

import hvd_ckpt as hc
from hvd_ckpt.planning.policy import RECOMPUTE, CheckpointPolicy, apply_policy
from hvd_ckpt.recompute.tape import run_selectively

FACTOR: contextvars.ContextVar[float] = contextvars.ContextVar("FACTOR", default=1.0)


class Scaling(TorchFunctionMode):
    """Scales each tanh while it is entered, and counts those that it has seen since then."""

    def __init__(self, factor: float = 0.5) -> None:
        super().__init__()
        self.factor, self.entered, self.seen = factor, False, 0

    def __enter__(self) -> Any:
        self.entered, self.seen = True, 0
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self.entered = False
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is not torch.tanh or not self.entered:
            return out
        self.seen += 1
        return out * self.factor


class ScalingOperations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 0.5 if func is torch.ops.aten.tanh.default else out


@contextlib.contextmanager
def variable(value: float = 0.5) -> Iterator[None]:
    token = FACTOR.set(value)
    try:
        yield
    finally:
        FACTOR.reset(token)


@contextlib.contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def two_modes() -> Iterator[None]:
    with Scaling(), ScalingOperations(), Scaling(0.25), variable():
        yield


ENVIRONMENTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "function mode": Scaling,
    "dispatch mode": ScalingOperations,
    "modes in modes": two_modes,
    "context variable": variable,
    "default dtype": default_dtype,
    "default device": default_device,
    "device": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "library": lambda: torch.backends.mkldnn.flags(enabled=False),
}


class Block(nn.Module):
    """A block whose result depends on all of :data:`ENVIRONMENTS`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = torch.empty(1)
        factor = FACTOR.get() * (0.5 if made.device.type == "meta" else 1.0)
        factor *= (1.5 if made.itemsize == 8 else 1) * (1.0 if torch.backends.mkldnn.enabled else 0.7)
        h: torch.Tensor = self.outer(torch.tanh(self.inner(x)) * factor)
        return x + torch.tanh(h).float()


def selective(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    def contexts() -> Any:
        return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])

    return hc.checkpoint(block, x, context_fn=contexts)


def on_tape(block: nn.Module, x: torch.Tensor, **options: Any) -> torch.Tensor:
    policy = drop_all(block, x, keep=("linear",), **options)
    return run_selectively(block, (x,), {}, policy)


def under_policies(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    for number, block in enumerate(model):
        apply_policy(block, CheckpointPolicy("drop", drop_all(block, x)) if number % 2 else RECOMPUTE)
    return model(x)


WAYS: dict[str, Run] = {
    **{name: each(ways.WAYS[name]) for name in ("non-reentrant", "reentrant", "nested")},
    "segments": in_segments(False),
    "reentrant segments": in_segments(True),
    "selective": each(selective),
    "tape": each(on_tape),
    "compressing tape": each(lambda block, x: on_tape(block, x, compress=True)),
    "policies": under_policies,
}


Around = Callable[[int], AbstractContextManager[Any]]


def never(step: int) -> AbstractContextManager[Any]:
    return nullcontext()


def in_steps(name: str, *steps: int) -> Around:
    """An environment in some of the steps."""
    return lambda step: ENVIRONMENTS[name]() if step in steps else nullcontext()


def trained(run: Run, forward: Around = never, backward: Around = never) -> list[torch.Tensor]:
    """Gradients of three steps."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)))
    gradients = []
    for step in range(3):
        x = torch.randn(3, 6).requires_grad_()
        with forward(step):
            out = run(model, x)
        loss = out.square().mean()
        with backward(step):
            loss.backward()
        gradients += [p.grad.clone() for p in (x, *model.parameters()) if p.grad is not None]
    return gradients


@functools.cache
def plain(name: str, *steps: int) -> list[torch.Tensor]:
    return trained(ways.plainly, in_steps(name, *steps))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_an_environment_of_some_forward_passes(name: str, way: str) -> None:
    for steps in ((0, 1, 2), (1, 2), (0, 2)):
        assert_same(trained(WAYS[way], in_steps(name, *steps)), plain(name, *steps), 1e-5)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "name", ["function mode", "dispatch mode", "context variable", "default device", "device"]
)
def test_an_environment_of_backward_passes_alone(name: str, way: str) -> None:
    assert_same(trained(WAYS[way], backward=in_steps(name, 1, 2)), plain(name), 1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_an_environment_of_one_of_two_calls(way: str) -> None:
    def run(run_once: Run) -> Run:
        def twice(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
            x = run_once(model, x)
            with two_modes():
                return run_once(model, x)

        return twice

    assert_same(trained(run(WAYS[way])), trained(run(ways.plainly)), 1e-5)


@pytest.mark.parametrize("way", ["non-reentrant", "reentrant", "segments", "tape"])
def test_a_mode_that_is_still_entered_is_not_entered_again(way: str) -> None:
    modes: list[Scaling] = []

    def step(run: Run) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, x = nn.Sequential(*(Block() for _ in range(4))), torch.randn(3, 6)
        with Scaling() as mode:
            out = run(model, x)
            with Scaling(0.1):  # of the backward pass alone
                out.square().mean().backward()
            assert mode.entered
        modes.append(mode)
        return [p.grad for p in model.parameters() if p.grad is not None]

    assert_same(step(WAYS[way]), step(ways.plainly), 1e-5)
    # Those of the recomputation come on top, as under the mode of a whole step.
    assert modes[0].seen > modes[1].seen == 8


@pytest.mark.parametrize("way", ["non-reentrant", "reentrant", "tape"])
def test_a_backward_pass_on_another_thread_in_a_context_of_its_own(way: str) -> None:
    def step(run: Run) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(Block() for _ in range(4)))
        with two_modes():  # both in one context, which is recomputed on two threads
            losses = [run(model, torch.randn(3, 6)).square().mean() for _ in range(2)]
        threads = [threading.Thread(target=loss.backward) for loss in losses]
        for thread in threads:
            thread.start()
            thread.join()
        return [p.grad for p in model.parameters() if p.grad is not None]

    assert_same(step(WAYS[way]), step(ways.plainly), 1e-5)


def test_contexts_of_a_recomputation_alone() -> None:
    """What ``context_fn`` gives for the recomputation is added to the environment of the first pass."""
    seen: list[tuple[float, int]] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        seen.append((FACTOR.get(), len(torch.overrides._get_current_function_mode_stack())))
        return torch.tanh(x).tanh()

    class Nothing(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def again() -> Iterator[None]:
        with variable(3.0), Nothing():
            yield

    x = torch.randn(3).requires_grad_()
    with Scaling(), variable(2.0):
        out = hc.checkpoint(block, x, context_fn=lambda: (variable(1.0), again()))
    with Scaling():
        out.sum().backward()
    assert seen == [(1.0, 1), (3.0, 2)]
    expected = x.detach().requires_grad_()
    with Scaling():
        torch.tanh(expected).tanh().sum().backward()
    assert torch.equal(x.grad, expected.grad)


def test_a_counter_counts_what_runs_while_it_is_entered() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4).requires_grad_()
    with FlopCounterMode(display=False) as forward:
        out = hc.checkpoint(lambda y: torch.tanh(layer(y)), x)
    once = forward.get_total_flops()
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    assert forward.get_total_flops() == once > 0
    assert backward.get_total_flops() == 3 * once  # the recomputation and two gradients


def test_stacks_are_as_before_after_an_error() -> None:
    class Broken(Exception):
        pass

    broken: list[bool] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        if broken:
            raise Broken
        return torch.tanh(x).tanh()

    x = torch.randn(3).requires_grad_()
    with two_modes():
        out = hc.checkpoint(block, x)
    broken.append(True)
    with Scaling() as outer, ScalingOperations():
        with pytest.raises(Broken):
            out.sum().backward()
        assert torch.overrides._get_current_function_mode_stack() == [outer]
        assert torch._C._len_torch_dispatch_stack() == 1
        assert FACTOR.get() == 1.0


class ReadsOutside(nn.Module):
    """A block that is right in one environment alone: in the other one, it reads what changes after the first pass."""

    changing = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.tanh(x) * (self.changing if FACTOR.get() != 1.0 else 1.0))


@pytest.mark.parametrize("way", ["non-reentrant", "reentrant", "segments"])
def test_an_environment_of_another_kind_is_verified_anew(way: str) -> None:
    model = nn.Sequential(ReadsOutside(), nn.Tanh())

    def step() -> None:
        out = WAYS[way](model, torch.randn(3, 6).requires_grad_())
        model[0].changing += 1.0
        out.sum().backward()

    step()
    with variable(), pytest.raises(hc.RecomputationMismatch):
        step()


@pytest.mark.parametrize("mode", [Scaling, ScalingOperations])
def test_a_head_in_chunks_is_computed_by_its_layer_under_modes(
    mode: Callable[[], AbstractContextManager[Any]],
) -> None:
    def losses(chunks: int | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        head, hidden = nn.Linear(8, 32), torch.randn(6, 8)
        if chunks is not None:
            apply_policy(head, CheckpointPolicy("chunks", chunks=chunks))
        targets = torch.arange(6)
        with mode():
            logits = head(hidden)
        loss = functional.cross_entropy(logits, targets)
        loss.backward()
        return [loss.detach(), head.weight.grad]

    assert_same(losses(3), losses(None), 1e-5)
