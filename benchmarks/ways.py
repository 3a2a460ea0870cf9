"""Predicted steps of engines and ways to train that are no layout of this library."""

from __future__ import annotations

import dataclasses
import math

from hvd_ckpt.distributed.tree import SMALL_BYTES
from hvd_ckpt.prediction.network import SMALL, SPLIT, WORD, Network
from hvd_ckpt.prediction.step_time import Kind, ModelSizes, StepTime
from hvd_ckpt.prediction.training_layout import TrainingLayout
from hvd_ckpt.utils.text import STAGES

SHARDED = {"ddp": "none", "fsdp2": "parameters", "ring": "gradients"}  # by other engines; ring is ZeRO-2


class Sending(StepTime):
    """A step with the bytes that a rank sends in it."""

    sent = 0.0

    def launch(self, kind: Kind, nbytes: int) -> float:
        self.sent += self.sent_by(kind, nbytes)
        return super().launch(kind, nbytes)

    def sent_by(self, kind: Kind, nbytes: int) -> float:
        """Bytes that a rank sends in a collective, or in a message."""
        network, ranks = self.network, self.ranks
        if kind in ("message", "exchange"):
            return nbytes * (1 if kind == "message" else self.layout.tensor - 1)
        share = nbytes / ranks * (ranks - 1)
        if kind == "all_gather":
            return share
        if kind == "allreduce":
            if network.controller == "mpi" and nbytes <= SMALL:
                return math.ceil(math.log2(ranks)) * nbytes
            return 2 * share
        sizes = SPLIT * (ranks - 1)
        if kind == "scatter" and network.in_levels(nbytes, ranks):
            return share + 2 * sizes + self.sent_by("allreduce", WORD)
        return share + sizes


class Rings(Sending):
    """Another engine, whose collectives are rings that wait for no cycle of Horovod's."""

    flags, in_flight = False, 1 << 30

    def begin(self, ready: float) -> float:
        return max(ready, self._free)

    def seconds_of(self, kind: Kind, nbytes: int) -> float:
        return self.network.ring(nbytes, self.ranks, 2 if kind == "allreduce" else 1)

    def sent_by(self, kind: Kind, nbytes: int) -> float:
        return nbytes / self.ranks * (self.ranks - 1) * (2 if kind == "allreduce" else 1)


class Replicas(Sending):
    """Logical replicas, whose sums travel as drawn in :mod:`hvd_ckpt.distributed.tree`."""

    _after = 0.0  # a collective whose result is sent

    def __init__(self, network: Network, layout: TrainingLayout) -> None:
        super().__init__(network, layout)
        self._sums: list[tuple[float, int]] = []  # of which each rank has a part, and which are then gathered

    def begin(self, ready: float) -> float:
        return super().begin(max(ready, self._after))

    def launch(self, kind: Kind, nbytes: int) -> float:
        if kind != "allreduce" or self.ranks == 2:
            return super().launch(kind, nbytes)
        if nbytes * self.ranks <= SMALL_BYTES:
            return super().launch("all_gather", nbytes * self.ranks)
        end = super().launch("scatter", nbytes)
        self._sums.append((end, nbytes))
        return end

    def wait(self, *ends: float) -> None:
        sums, self._sums = self._sums, []
        gathered = []
        for self._after, nbytes in sums:
            gathered.append(self.launch("all_gather", nbytes))
        self._after = 0.0
        super().wait(*ends, *gathered)


class OneLevel(Network):
    """A network whose reduce-scatters do not add up within hosts first."""

    def in_levels(self, nbytes: float, ranks: int) -> bool:
        return False


def step_in(way: str, sizes: ModelSizes, layout: TrainingLayout, network: Network) -> Sending:
    """A step in one of the ways of :data:`benchmarks.suites.scale.WAYS`."""
    shard = SHARDED.get(way, way if way in STAGES else "none")
    layout = dataclasses.replace(layout, shard=shard, every=layout.every if way == "local" else 0)
    kind = Rings if way in SHARDED else Replicas if way == "replicas" else Sending
    return sizes.step(kind(network, layout))


def efficiency(step: StepTime) -> float:
    """The part of a step that is computation: the speed of a rank, to one that is alone."""
    return step.computing / step.seconds if step.seconds else 1.0
