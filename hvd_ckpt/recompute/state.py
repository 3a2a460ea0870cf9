"""State around a torch function that its result depends on: random generators, autocast, kernels of attention."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

__all__ = ["AutocastState", "attention_context", "autocast_context", "autocast_state", "random_context"]

AutocastState = tuple[tuple[str, bool, torch.dtype], ...]


def autocast_state(device: str) -> AutocastState:
    """Whether autocast is on, and its dtype, on the CPU and the device."""
    return tuple(
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in (("cpu",) if device == "cpu" else ("cpu", device))
    )


def autocast_context(state: AutocastState) -> Callable[[], AbstractContextManager[Any]]:
    """A context in which autocast is as it was; it remembers no casts."""

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for kind, enabled, dtype in state:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
            yield

    return context


def attention_context() -> Callable[[], AbstractContextManager[Any]]:
    """A context in which attention may use the kernels that it may use now: each saves other tensors."""
    kernels = torch.backends.cuda  # the switches count on every device
    switches = (
        kernels.enable_flash_sdp,
        kernels.enable_mem_efficient_sdp,
        kernels.enable_math_sdp,
        kernels.enable_cudnn_sdp,
    )

    states: tuple[Callable[[], bool], ...] = (
        kernels.flash_sdp_enabled,
        kernels.mem_efficient_sdp_enabled,
        kernels.math_sdp_enabled,
        kernels.cudnn_sdp_enabled,
    )

    def enabled() -> tuple[bool, ...]:
        return tuple(bool(switch()) for switch in states)

    then = enabled()

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        now = enabled()
        for switch, on in zip(switches, then):
            switch(on)
        try:
            yield
        finally:
            for switch, on in zip(switches, now):
                switch(on)

    return context


def random_context(device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """A context in which the random numbers of the CPU and the device are drawn from the present state on."""
    cpu = torch.get_rng_state()
    accelerator = getattr(torch, device.type) if device.type != "cpu" else None
    other = None if accelerator is None else accelerator.get_rng_state(device)

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        now = torch.get_rng_state()
        other_now = None if accelerator is None else accelerator.get_rng_state(device)
        torch.set_rng_state(cpu)
        if accelerator is not None:
            accelerator.set_rng_state(other, device)
        try:
            yield
        finally:
            torch.set_rng_state(now)
            if accelerator is not None:
                accelerator.set_rng_state(other_now, device)

    return context
