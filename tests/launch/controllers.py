"""Which controllers work on this machine: asked once in a run of the tests, since each question starts a job."""

from __future__ import annotations

import functools

from hvd_ckpt.probe import ProbeResult
from hvd_ckpt.probe import probe as ask

__all__ = ["probe"]


@functools.cache
def probe(controller: str) -> ProbeResult:
    """What a job of two ranks finds, as :func:`hvd_ckpt.probe.probe`."""
    return ask(controller)
