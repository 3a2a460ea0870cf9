"""Activations of a planned block in host memory, beside training on a device."""

from __future__ import annotations

import pytest
import torch
from call_names import names_of_calls
from streams import DEVICE, Simulation, check, simulated
from torch import nn

import hvd_ckpt as hc
from hvd_ckpt.recompute import host
from hvd_ckpt.recompute.tape import Policy, run_selectively


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "LEAST_BYTES", 1)


def gradients(device: torch.device | str, offload: bool, steps: int = 2) -> list[torch.Tensor]:
    """Of a block whose kept tensors are overwritten as soon as they may be."""
    torch.manual_seed(0)
    weight = torch.randn(8, 8).to(device).requires_grad_()
    inputs = torch.randn(4, 8).to(device)

    def block(x: torch.Tensor) -> torch.Tensor:
        return (x @ weight).sin().exp().sin()

    policy = Policy(names_of_calls(block, inputs.detach().cpu()), frozenset(), offload=offload)
    for _ in range(steps):
        first = run_selectively(block, (inputs,), {}, policy)
        second = run_selectively(block, (first,), {}, policy)
        second.square().sum().backward()
    assert weight.grad is not None
    return [weight.grad.cpu()]


def scenario(simulation: Simulation) -> None:
    host._streams.clear()
    gradients(DEVICE, offload=True)


def test_every_synchronization_is_needed() -> None:
    assert len(check(scenario)) == 5


def test_the_bits_are_those_without_offload() -> None:
    with simulated() as simulation:
        host._streams.clear()
        (ours,) = gradients(DEVICE, offload=True)
        assert not simulation.races
    (theirs,) = gradients("cpu", offload=False)
    assert torch.equal(ours, theirs)


def test_a_model_on_the_cpu_is_refused() -> None:
    with pytest.raises(ValueError, match="offload of activations needs a GPU"):
        hc.plan(nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4), offload=True, verbose=False)
