"""The random state of a process: PyTorch's on the CPU and on its current CUDA device, NumPy's global one, and Python's."""

from __future__ import annotations

import random
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

from hvd_ckpt.snapshots.folder import SnapshotError

_WAY_OUT = "leave it and seed anew, or use another snapshot"


def seed_all(seed: int) -> None:
    """Seeds PyTorch on all devices, NumPy's global generator, and Python's."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def seed_of_rank(seed: int, step: int) -> int:
    """Ranks drop out different units; a run that resumes without its random state draws new ones."""
    rank: int = hvd.rank()
    # Different for all steps below 1 000 003 and ranks below 100 003, as digits of a number are.
    return ((seed * 1_000_003 + step) * 100_003 + rank + 1) % 2**63


def random_state() -> dict[str, Any]:
    """All of this process's random states, as a state dict that a snapshot can hold.

    Of CUDA devices it is the current one's, whatever its number: a rank may have another one when it resumes.
    """
    name, table, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "numpy": (name, torch.from_numpy(table), *rest),
        "python": random.getstate(),
    }


def set_random_state(state: Any) -> None:
    """Restores what :func:`random_state` returned. That of a CUDA device goes to the current one, if there is any.

    Raises:
        SnapshotError: it is invalid.
    """
    try:
        name, table, position, *rest = state["numpy"]
        if not 0 <= position <= len(table):  # NumPy would read beyond its table
            raise ValueError(f"the position {position} is not in a table of {len(table)} numbers")
        random.setstate(state["python"])
        np.random.set_state((name, table.numpy(), position, *rest))
        torch.set_rng_state(state["torch"])
        if state["cuda"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
    except (AttributeError, LookupError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise SnapshotError(
            f"The random state cannot be restored ({type(error).__name__}: {reason}): {_WAY_OUT}."
        ) from None
