"""Compression of saved tensors on a device: how often the host waits for it."""

from __future__ import annotations

import pytest
import torch
from streams import DEVICE, simulated

from hvd_ckpt.recompute.saved import compress

MASK = torch.arange(5000) % 3 == 0


@pytest.mark.parametrize(
    "tensor, waits",
    [
        (MASK, 0),
        (MASK.float() * 1.25, 2),
        (torch.zeros(3000, dtype=torch.int64), 2),
        (torch.linspace(0, 1, 5000), 1),
    ],
)
def test_the_host_waits_a_few_times_and_not_to_restore(tensor: torch.Tensor, waits: int) -> None:
    compressed_here = compress(tensor)
    with simulated() as simulation:
        given = tensor.to(DEVICE)
        simulation.waits.clear()
        compressed = compress(given)
        assert len(simulation.waits) == waits
        assert (compressed is None) == (compressed_here is None)
        if compressed is not None and compressed_here is not None:
            simulation.waits.clear()
            restored = compressed.get()
            assert restored.device == DEVICE and not simulation.waits
            assert torch.equal(compressed.payload.cpu(), compressed_here.payload)
            assert torch.equal(restored.cpu(), compressed_here.get())
        assert not simulation.races
