"""The network of the running job, measured in seconds: :func:`measure`.

Two numbers of each collective, the seconds of an empty one and those of each byte, are fitted by least squares to three sizes.
They correct the formulas of :class:`hvd_ckpt.prediction.network.Network`, which then hold for other numbers of ranks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from horovod.torch import mpi_ops

from hvd_ckpt.collectives.asynchronous import wait
from hvd_ckpt.prediction.network import Network
from hvd_ckpt.processes import runtime
from hvd_ckpt.processes.grid import FIRST_TAG, Grid, current
from hvd_ckpt.processes.launchers import adopt_launcher, launched_size

SIZES = (1 << 16, 1 << 20, 1 << 23)  # bytes
ROUNDS = 5
TOGETHER = 3  # collectives under way at a time, as in a step
LEAST = 1e-6  # seconds of a message: clocks tell no less
BUSY = 1 << 20  # elements, with which a rank computes to see whether others slow it down


@dataclass(frozen=True)
class MeasuredNetwork(Network):
    """A network whose formulas are corrected by what was measured on ``ranks`` ranks.

    Attributes:
        measured: seconds of an empty collective and of each byte, by the formula's name.
        barrier: seconds in which all ranks agree on what is ready.
    """

    ranks: int = 1
    measured: dict[str, tuple[float, float]] = field(default_factory=dict)
    barrier: float = 0.0

    def _corrected(
        self, name: str, formula: Callable[[float, int], float], nbytes: float, ranks: int
    ) -> float:
        seconds, empty = formula(nbytes, ranks), formula(0, ranks)
        if ranks == 1 or name not in self.measured:
            return seconds
        base, unit = formula(0, self.ranks), SIZES[-1]
        each = (formula(unit, self.ranks) - base) / unit
        start, rate = self.measured[name]
        return start * empty / base + rate / each * (seconds - empty)

    def ring(self, nbytes: float, ranks: int, rounds: int = 1) -> float:
        name, formula = ("allreduce" if rounds == 2 else "all_gather"), partial(super().ring, rounds=rounds)
        return self._corrected(name, formula, nbytes, ranks)

    def scatter(self, nbytes: float, ranks: int) -> float:
        return self._corrected("scatter", super().scatter, nbytes, ranks)

    def agreement(self, ranks: int) -> float:
        own = super().agreement(self.ranks)
        return self.barrier * super().agreement(ranks) / own if own else 0.0


def measure() -> MeasuredNetwork:
    """The network of this job. Collective.

    Horovod starts twice where it does not run yet: first with a stage for each process, to time messages between processes. Where
    it runs, messages are taken to be as fast as those of an all-gather.
    """
    adopt_launcher()
    size = hvd.size() if hvd.is_initialized() else launched_size()
    messages: list[tuple[float, float]] = []
    if size > 1 and not hvd.is_initialized():
        runtime.init(stages=size)
        grid = current()
        messages = [_message(grid, distance) for distance in (1, grid.local_size % size or 1)]
        hvd.shutdown()
    runtime.init()
    local, barrier = hvd.local_size(), _median(hvd.barrier)
    fits = [_fitted(start, barrier) for start in _STARTS.values()] if size > 1 else []
    if fits and not messages:
        start, unit = fits[-1]
        messages = [(start / (size - 1), unit * size / (size - 1))] * 2
    own = torch.tensor(
        [[(barrier, 0.0)] + (messages + fits or [(Network.local_latency, 1 / Network.local_bandwidth)] * 2)]
    )
    everyone = mpi_ops.allgather(own.double(), name="hvd_ckpt.links")
    (barrier, _), near, far, *rest = everyone.median(0).values.tolist()
    crowding, hidden = _sharing()
    return MeasuredNetwork(
        local=local,
        bandwidth=local / far[1],
        local_bandwidth=1 / near[1],
        latency=far[0],
        local_latency=near[0],
        message=0.0,
        cycle=0.0,
        controller=runtime.controller(),
        crowding=crowding,
        hidden=hidden,
        ranks=size,
        measured=dict(zip(_STARTS, map(tuple, rest))),
        barrier=barrier,
    )


def works_alone() -> bool:
    """Whether this rank is one of those of its host that have a processor for each of their threads."""
    alone: bool = hvd.local_rank() < max(1, runtime.allowed_cpus() // torch.get_num_threads())
    return alone


def _sharing() -> tuple[float, float]:
    """How much the ranks of a host crowd it, and what computation hides: see :class:`.network.Network`. Collective."""
    values, name = torch.ones(BUSY), "hvd_ckpt.links.sharing"

    def computed() -> None:
        for _ in range(20):
            values.mul_(1.0001)
            torch.mm(values[: 1 << 16].view(256, 256), values[: 1 << 16].view(256, 256))

    def sent(beside: Callable[[], None] = lambda: None) -> None:
        handle = _STARTS["allreduce"](SIZES[-1], name)
        beside()
        wait(handle, name)

    kinds: dict[str, Callable[[], None]] = {
        "alone": computed if works_alone() else lambda: None,
        "together": computed,
        "sent": sent,
        "both": lambda: sent(computed),
    }
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(ROUNDS):
        for kind, run in kinds.items():
            hvd.barrier()
            start = time.perf_counter()
            run()
            times[kind].append(time.perf_counter() - start)
    alone, together, collective, both = map(statistics.median, times.values())
    hidden = (together + collective - both) / min(together, collective)
    own = torch.tensor([together / alone, hidden], dtype=torch.float64)
    crowding, hidden = mpi_ops.broadcast(own, 0, name="hvd_ckpt.sharing").tolist()
    return max(1.0, crowding), min(max(hidden, 0.0), 1.0)


def _message(grid: Grid, distance: int) -> tuple[float, float]:
    """Seconds of an empty message and of each byte, where each process sends to the one so far ahead and all do at a time."""
    after, before = ((grid.number + step) % grid.size for step in (distance, -distance))

    def exchange(nbytes: int) -> None:
        memory = torch.zeros(nbytes, dtype=torch.uint8)
        grid.exchange({after: memory}, {before: torch.empty_like(memory)}, FIRST_TAG)

    return _line(exchange)


def _floats(nbytes: int) -> torch.Tensor:
    """As many as can be divided among all ranks."""
    return torch.zeros(nbytes // 4 // hvd.size() * hvd.size())


# How each collective starts, of which each rank sends or gets so many bytes in all.
_STARTS: dict[str, Callable[[int, str], int]] = {
    "allreduce": lambda nbytes, name: mpi_ops.allreduce_async_(_floats(nbytes), op=mpi_ops.Sum, name=name),
    "scatter": lambda nbytes, name: mpi_ops.alltoall_async(_floats(nbytes), name=name),
    "all_gather": lambda nbytes, name: mpi_ops.allgather_async(_floats(nbytes // hvd.size()), name=name),
}


def _fitted(start: Callable[[int, str], int], barrier: float) -> tuple[float, float]:
    def together(nbytes: int) -> None:
        hvd.barrier()
        names = [f"hvd_ckpt.links.{number}" for number in range(TOGETHER)]
        for handle, name in [(start(nbytes, name), name) for name in names]:
            wait(handle, name)

    base, unit = _line(together)
    # One barrier is before them, and they begin with the same agreement of all ranks.
    return max(base - 2 * barrier, LEAST) / TOGETHER, unit / TOGETHER


def _line(run: Callable[[int], None]) -> tuple[float, float]:
    """Seconds of nothing and of each byte, by least squares of what the sizes take."""
    taken = [_median(lambda nbytes=nbytes: run(nbytes)) for nbytes in SIZES]  # type: ignore[misc]
    # By relative errors: small messages count as large ones do.
    unit, base = np.polyfit(SIZES, taken, 1, w=1 / np.array(taken))
    return max(float(base), LEAST), max(float(unit), LEAST / SIZES[-1])


def _median(run: Callable[[], Any]) -> float:
    run()
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
