"""Traces: the collectives and messages of a training step in the order of one rank, with the computation between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal[
    "allreduce",
    "reduce_scatter",
    "alltoall",
    "scatter",
    "all_gather",
    "broadcast",
    "objects",
    "message",
    "exchange",
]
What = Literal["compute", "launch", "wait"]

LINKED = ("message", "exchange")
"""Kinds that travel between stages and between parts, beside the queue of collectives."""


@dataclass(frozen=True)
class Operation:
    """One collective or message.

    Attributes:
        kind: an ``alltoall`` sends each rank its row; ``scatter`` is this library's reduce-scatter;
            ``objects`` gathers a value of each rank; ``message`` goes to another stage, ``exchange`` to each other part.
        nbytes: what is reduced, scattered, broadcast, or gathered in all; of ``objects`` the value of one rank; of a message
            what one receiver gets.
        name: as in Horovod, or what is sent. The name of a message with control flags contains ``flags``.
        after: number of the operation in the trace whose end it needs, or -1.
    """

    kind: Kind
    nbytes: int
    name: str = ""
    after: int = -1


@dataclass(frozen=True)
class Event:
    """Computation for some seconds, or the launch of an operation, or a wait for its end, by its number in the trace."""

    what: What
    seconds: float = 0.0
    number: int = -1


@dataclass
class Trace:
    """A step of one rank.

    Attributes:
        title: the way to train.
        stages, tensor: how many pipeline stages, and parts of each layer; the other ranks are replicas.
        queue: whether collectives wait for Horovod's cycle and the agreement of all ranks.
        steps: how many training steps the events are.
        operations: in the order of launches.
    """

    title: str
    stages: int = 1
    tensor: int = 1
    queue: bool = True
    steps: int = 1
    events: list[Event] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)

    def compute(self, seconds: float) -> None:
        """Adds computation."""
        if seconds > 0:
            self.events.append(Event("compute", seconds))

    def launch(self, kind: Kind, nbytes: int, name: str = "", after: int = -1) -> int:
        """Adds the launch of an operation; returns its number."""
        self.operations.append(Operation(kind, nbytes, name, after))
        self.events.append(Event("launch", number=len(self.operations) - 1))
        return len(self.operations) - 1

    def wait(self, *numbers: int) -> None:
        """Adds waits for operations."""
        self.events += [Event("wait", number=number) for number in numbers]

    @property
    def computing(self) -> float:
        """Seconds of computation."""
        return sum(event.seconds for event in self.events)

    def shapes(self) -> Iterator[tuple[Kind, int]]:
        """Kind and bytes of each operation."""
        return ((operation.kind, operation.nbytes) for operation in self.operations)
