"""Times of spans on a device: events are read once the device has reached them."""

from __future__ import annotations

from streams import DEVICE, Simulation, check

from hvd_ckpt.utils.spans import SpanTimes, recording, span


def spans(simulation: Simulation) -> None:
    times = SpanTimes(DEVICE)
    with recording(times):
        for _ in range(3):
            with span("forward"):
                pass
    assert times.read()["forward"] > 0


def test_every_synchronization_is_needed() -> None:
    assert len(check(spans)) == 1
