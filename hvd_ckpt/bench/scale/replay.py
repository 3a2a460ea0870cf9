"""A trace on a network, for any number of ranks: when each operation runs, and what a rank waits for."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hvd_ckpt.bench.scale.network import Cost, Network
from hvd_ckpt.bench.scale.trace import LINKED, Operation, Trace

# Assumptions about processors and files, where the network is not what takes the time. Measured on one core of a virtual machine:
UNPICKLING = 5e-6  # seconds, of a small object
CONNECTING = 350e-6  # seconds that the launcher's server takes for one question of a rank
HASHING = 1e9  # bytes a second, of SHA-256
# Assumed:
IMPORTING = 5.0  # seconds, of Python, PyTorch and Horovod
OPENING = 1e-3  # seconds, of a file on a shared file system


@dataclass
class Timeline:
    """A step on so many ranks; all ranks do the same at the same time.

    Attributes:
        ranks: of the job.
        seconds: of a step.
        computing: seconds of its computation.
        communicating: seconds in which collectives or messages run, hidden behind computation or not.
        sent, messages: bytes and messages of a rank.
        buffers: the most bytes of messages, sent and received, that a rank holds at a time.
        spans: for each operation of the trace its start and its end, in seconds since the start.
    """

    ranks: int
    seconds: float = 0.0
    computing: float = 0.0
    communicating: float = 0.0
    sent: float = 0.0
    messages: float = 0.0
    buffers: float = 0.0
    spans: list[tuple[float, float]] = field(default_factory=list)

    @property
    def efficiency(self) -> float:
        """The part of a step that is computation: the speed of a rank, to one that is alone."""
        return self.computing / self.seconds if self.seconds else 1.0


class _Queue:
    """Horovod's thread: a cycle runs all that is ready, and does not begin before the one before has ended.

    Over MPI cycles begin at fixed intervals. Over Gloo they begin when something is ready.
    """

    def __init__(self, network: Network, ranks: int, cycles: bool) -> None:
        self._period = 0.0
        self.agreement = Cost(0.0)
        if cycles:
            self.agreement = network.agreement(ranks)
            self._period = max(network.cycle, self.agreement.seconds) if network.controller == "mpi" else 0.0
        self._cycle, self._free = -math.inf, 0.0

    def start(self, ready: float) -> float:
        """When an operation begins that is ready at this time."""
        # What was ready when the present cycle began runs in it, after what is before it. The rest waits for the first
        # cycle that begins after it is ready. A cycle in which nothing is ready has an agreement, too:
        #     ready    A B              C
        #     thread   [agree] A B [agree] -- [agree] C
        if ready > self._cycle:
            begin = max(self._cycle + self._period, self._free)
            if ready > begin:
                begin = (
                    begin + math.ceil((ready - begin) / self._period) * self._period
                    if self._period
                    else ready
                )
            self._cycle, self._free = begin, begin + self.agreement.seconds
        return self._free

    def ends(self, time: float) -> None:
        """An operation has ended."""
        self._free = time


def replay(trace: Trace, network: Network, ranks: int) -> Timeline:
    """The timeline of a step on ``ranks`` ranks, a multiple of the trace's stages times parts."""
    replicas = ranks // (trace.stages * trace.tensor)
    queue, link = _Queue(network.every(trace.tensor), replicas, trace.queue), 0.0
    timeline, now, held = Timeline(ranks, computing=trace.computing), 0.0, 0.0
    for event in trace.events:
        if event.what == "compute":
            now += event.seconds
            continue
        operation = trace.operations[event.number]
        if event.what == "wait":
            now = max(now, timeline.spans[event.number][1])
            held -= _memory(operation, replicas)
            continue
        cost = network.cost(operation, trace, ranks)
        ready = max(now, timeline.spans[operation.after][1] if operation.after >= 0 else 0.0)
        linked = operation.kind in LINKED
        start = max(ready, link) if linked else queue.start(ready)
        end = start + cost.seconds
        if linked:
            link = end
        else:
            queue.ends(end)
        timeline.spans.append((start, end))
        timeline.communicating += cost.seconds
        timeline.sent += cost.sent
        timeline.messages += cost.messages
        held += _memory(operation, replicas)
        timeline.buffers = max(timeline.buffers, held)
    # The step ends with its last operation, even where no event of the trace waits for it.
    timeline.seconds = max(now, *(end for _, end in timeline.spans), 0.0)
    for name in ("seconds", "computing", "communicating", "sent", "messages"):
        setattr(timeline, name, getattr(timeline, name) / trace.steps)
    return timeline


def _memory(operation: Operation, ranks: int) -> float:
    """Bytes of what is sent and what arrives: an allreduce is in place, a gather has its own part in its place."""
    if operation.kind in ("alltoall", "scatter"):
        return 2 * operation.nbytes
    if operation.kind == "reduce_scatter":
        return operation.nbytes * (1 + 1 / ranks)
    return operation.nbytes * (ranks if operation.kind == "objects" else 1)


@dataclass(frozen=True)
class Start:
    """Seconds from the launch to the first step, by what takes them.

    Attributes:
        processes: of imports, and of the connections of Horovod's controller.
        agreeing: of comparing objects of all ranks.
        sending: of the weights of rank 0.
    """

    processes: float
    agreeing: float
    sending: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.processes + self.agreeing + self.sending


def start(trace: Trace, network: Network, ranks: int) -> Start:
    """The start of a job, from the collectives before its first step.

    Over Gloo each rank asks the launcher's server for the address of each other rank. Over MPI connections are made when they are
    needed.
    """
    processes = IMPORTING + (ranks**2 * CONNECTING if network.controller == "gloo" else 0.0)
    agreeing = sending = 0.0
    for operation in trace.operations:
        seconds = network.cost(operation, trace, ranks).seconds
        if operation.kind == "objects":
            agreeing += seconds + ranks * UNPICKLING
        else:
            sending += seconds
    return Start(processes, agreeing + network.agreement(ranks).seconds, sending)


@dataclass(frozen=True)
class Saved:
    """What a snapshot holds.

    Attributes:
        weights, state: bytes of the whole model and of the optimizer's state.
        state_in_shards, weights_in_shards: whether each rank writes its part of it, in a file of its own.
    """

    weights: int
    state: int
    state_in_shards: bool = False
    weights_in_shards: bool = False

    def of_rank(self, ranks: int) -> float:
        """Bytes that the first rank writes, and that each rank reads."""
        state = self.state / ranks if self.state_in_shards else self.state
        return state + (self.weights / ranks if self.weights_in_shards else self.weights)


@dataclass(frozen=True)
class SnapshotCost:
    """Seconds to write and to load a snapshot, and bytes that all hosts read to load it."""

    write: float
    load: float
    read: float


def snapshot(saved: Saved, network: Network, ranks: int, storage: float) -> SnapshotCost:
    """The cost of a snapshot on a file system that gives all hosts together ``storage`` bytes a second."""
    total, hosts = saved.weights + saved.state, math.ceil(ranks / network.local)
    files = ranks * (1 + saved.state_in_shards + saved.weights_in_shards)
    # Rank 0 writes what is not in shards, and then collects a file of each rank.
    write = max(saved.of_rank(ranks) / HASHING, total / storage) + ranks * OPENING
    # Rank 0 verifies all files. Then every rank reads its own part of what is in shards, and all of the rest. What one rank of a
    # host has read is in the memory of that host for the others, but each of them hashes it.
    verify = max(total / HASHING, total / storage) + files * OPENING
    read = saved.weights * (1 if saved.weights_in_shards else hosts)
    read += saved.state * (1 if saved.state_in_shards else hosts)
    load = max(saved.of_rank(ranks) / HASHING, read / storage) + OPENING
    return SnapshotCost(write, verify + load, total + read)
