"""Copies of a snapshot beside training on a device."""

from __future__ import annotations

import torch
from streams import DEVICE, Simulation, check, simulated

from hvd_ckpt.snapshots.tensors import Staging


def snapshots(simulation: Simulation) -> None:
    """Two snapshots, the second into the memory of the first, each between two steps of training."""
    weights, statistics = torch.ones(1000, device=DEVICE), torch.zeros(10, device=DEVICE)
    staging = Staging()
    for _ in range(2):
        weights.add_(1)  # the optimizer's step
        staging.restart()
        copies = staging.copy_of(statistics, at_once=True), staging.copy_of(weights)
        staging.start()
        statistics.add_(weights[:10])  # the next forward pass
        with simulation.thread("writer"):
            staging.run()
            total = sum(float(copy.sum()) for copy in copies)
        assert total == float(weights.sum()) + float(statistics.sum()) - float(weights[:10].sum())
        simulation.wait_for_thread("writer")


def test_every_synchronization_is_needed() -> None:
    assert len(check(snapshots)) == 2


def test_the_host_waits_in_the_writers_thread_alone() -> None:
    with simulated() as simulation:
        weights, staging = torch.ones(1000, device=DEVICE), Staging()
        staging.copy_of(weights)
        staging.start()
        assert not simulation.waits
        staging.run()
        assert len(simulation.waits) == 1
