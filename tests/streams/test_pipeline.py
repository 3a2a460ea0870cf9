"""Messages between pipeline stages on a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from loopback import Loopback
from streams import DEVICE, Simulation, check

from hvd_ckpt.parallel.pipeline.transport import Transport

TAG = 1


def messages(simulation: Simulation) -> None:
    """The fourth is expected before it comes, and the last has another shape."""
    grid: Any = SimpleNamespace(link=Loopback(simulation), name=str, stage_link=None, number=1)
    transport = Transport(grid)
    for number in range(5):
        value = torch.ones(64 if number < 4 else 32, device=DEVICE).mul_(number)
        if number > 2:
            transport.expect(0, TAG)
        transport.send(value, 0, TAG)
        (received,) = transport.receive(0, TAG, "the input").tensors
        assert torch.equal(received.add_(1), value + 1)
        transport.flush()


def test_every_synchronization_is_needed() -> None:
    assert len(check(messages)) == 1
