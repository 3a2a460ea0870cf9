"""Memory of simulated devices and hosts: facts about storages, and the counts of the caching allocator."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

Clock = dict[str, int]  # of each agent, how many of its operations are known to be over
HOST = "host"


class Access(NamedTuple):
    agent: str
    time: int
    operation: str


@dataclass
class Memory:
    """What is known of a storage.

    Attributes:
        kind: ``"device"``, ``"pinned"`` or ``"pageable"``.
        nbytes: as it was allocated.
        stream: on which it was allocated.
        registered: it is pinned by ``cudaHostRegister``, so PyTorch's allocator does not keep it for copies in flight.
        recorded: streams that ``record_stream`` has named.
        written, read: the last write, and the last read by each agent since.
    """

    kind: str
    nbytes: int = 0
    stream: str = ""
    registered: bool = False
    recorded: set[str] = field(default_factory=set)
    written: Access | None = None
    read: dict[str, Access] = field(default_factory=dict)


class Allocator:
    """Bytes of the device, as the caching allocator counts them.

    Memory that is freed can be allocated again on its own stream only. With ``record_stream`` it can be once the recorded uses are
    over, which the host does not know before it has waited for them: the worst case, since the host may be far ahead.

    Attributes:
        allocated, peak: bytes of tensors now, and at most.
    """

    def __init__(self, clock: Callable[[str], Clock]) -> None:
        self._clock = clock
        self._taken: dict[str, int] = defaultdict(int)  # bytes of each stream that it cannot give out
        self._most: dict[str, int] = defaultdict(int)
        self._waiting: list[tuple[str, int, Clock]] = []
        self.allocated = self.peak = 0

    @property
    def reserved(self) -> int:
        """Bytes that the device must have: the most that each stream has taken at a time, since none gives to another."""
        return sum(self._most.values())

    def allocate(self, stream: str, nbytes: int) -> None:
        self.allocated += nbytes
        self.peak = max(self.peak, self.allocated)
        host, waiting = self._clock(HOST), self._waiting
        self._waiting = []
        for owner, size, uses in waiting:
            if all(host.get(agent, 0) >= time for agent, time in uses.items()):
                self._taken[owner] -= size
            else:
                self._waiting.append((owner, size, uses))
        self._taken[stream] += nbytes
        self._most[stream] = max(self._most[stream], self._taken[stream])

    def free(self, memory: Memory) -> None:
        self.allocated -= memory.nbytes
        others = memory.recorded - {memory.stream}
        if others:
            uses = {agent: self._clock(agent).get(agent, 0) for agent in others}
            self._waiting.append((memory.stream, memory.nbytes, uses))
        else:
            self._taken[memory.stream] -= memory.nbytes

    def restart(self) -> None:
        """Counts the peaks from now on."""
        self.peak = self.allocated
        self._most = defaultdict(int, self._taken)
