"""What the ranks of a test share, and what one of them does alone."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import hvd_ckpt as hc


@contextlib.contextmanager
def folder_of_all_ranks() -> Iterator[Path]:
    """A temporary folder, the same on all ranks."""
    made = tempfile.mkdtemp(prefix="hvd_ckpt_tests_") if hc.rank() == 0 else ""
    path = Path(hc.broadcast_object(made, 0, name="folder"))
    yield path
    hc.barrier()
    if hc.rank() == 0:
        shutil.rmtree(path)


class Poisoned:
    """An objective whose loss is nan on the last rank in one step."""

    def __init__(self, objective: Any, at: int) -> None:
        self._objective, self._at, self._calls = objective, at, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objective, name)

    def loss(self, output: Any, batch: Any) -> Any:
        self._calls += torch.is_grad_enabled()
        loss = self._objective.loss(output, batch)
        return loss * float("nan") if self._calls == self._at and hc.rank() == hc.size() - 1 else loss
