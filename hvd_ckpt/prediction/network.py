"""The seconds of each collective on a stated network: formulas, and nothing that is measured.

Ranks are numbered host by host. A rank sends to the others on its host at its own rate; the ranks of a host share its link to the
other hosts. So a ring, in which only one rank of a host sends to another host, loads a link as little as can be, and an alltoall
as many times more as a host has ranks.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from hvd_ckpt.collectives.rows import two_levels_pay

SMALL = 10 << 10  # bytes, up to which MPI's allreduce doubles distances
SPLIT = 4  # bytes that each two ranks tell each other before an alltoall of Horovod's
WORD = 8  # bytes of the ranks' agreement on what is ready


@dataclass(frozen=True)
class Network:
    """A network and what carries collectives over it.

    Attributes:
        local: ranks on each host.
        bandwidth: bytes a second of a host's link, each way, shared by its ranks.
        local_bandwidth: bytes a second of a rank to others on its host.
        latency, local_latency: seconds of an empty message to another host, and on a host.
        message: seconds of a rank's processor for each message.
        cycle: seconds of Horovod's cycle over MPI.
        controller: ``mpi`` or ``gloo``, whose algorithms are taken: those of Open MPI 4, or of Gloo.
        crowding: how much longer a rank computes while all ranks do, than while those do that work alone.
        hidden: the part of a collective that computation hides beside it, where both take as long; the rest is work of the same
            processors.
    """

    local: int = 8
    bandwidth: float = 25e9 / 8
    local_bandwidth: float = 100e9 / 8
    latency: float = 25e-6
    local_latency: float = 2e-6
    message: float = 2e-6
    cycle: float = 1e-3
    controller: str = "mpi"
    crowding: float = 1.0
    hidden: float = 1.0

    def every(self, stride: int) -> Network:
        """The network of each of ``stride`` groups that talk at the same time, each with every so many-th rank."""
        local = max(1, self.local // stride)
        return dataclasses.replace(self, local=local, bandwidth=self.bandwidth / min(stride, self.local))

    def _hop(self, nbytes: float, across: bool) -> float:
        near = self.local_latency + nbytes / self.local_bandwidth
        return self.message + (max(near, self.latency + nbytes / self.bandwidth) if across else near)

    def ring(self, nbytes: float, ranks: int, rounds: int = 1) -> float:
        """An all-gather or a reduce-scatter; with two rounds an allreduce: each rank hands parts to its neighbour."""
        if ranks == 1:
            return 0.0
        # Groups of neighbours lie within hosts only if they divide them.
        across = ranks > self.local or self.local % ranks > 0
        return rounds * (ranks - 1) * self._hop(nbytes / ranks, across)

    def doubling(self, nbytes: float, ranks: int) -> float:
        """An allreduce of all bytes with the ranks at distance 1, 2, 4, ..., beyond a host with all its ranks at a time."""
        rounds = math.ceil(math.log2(ranks))
        near = min(rounds, int(math.log2(self.local)))
        far = self._hop(nbytes * min(self.local, ranks), True)
        return near * self._hop(nbytes, False) + (rounds - near) * far

    def allreduce(self, nbytes: float, ranks: int) -> float:
        """The controller's own choice."""
        if self.controller == "mpi" and nbytes <= SMALL:
            return self.doubling(nbytes, ranks)
        return self.ring(nbytes, ranks, 2)

    def rows(self, nbytes: float, ranks: int, peers: int, near: int) -> float:
        """Each rank sends a row of ``nbytes`` to each peer, of which ``near`` are on its host, and an empty one to others."""
        if ranks == 1:
            return 0.0
        row, far = nbytes / (peers + 1), peers - near
        local = min(self.local, ranks)
        # Rows to ranks of the same host and to other hosts travel at the same time: the slower ones count.
        sending = max(near * row / self.local_bandwidth, far * row * local / self.bandwidth)
        latency = self.latency if ranks > self.local else self.local_latency
        return latency + (ranks - 1) * self.message + sending

    def alltoall(self, nbytes: float, ranks: int) -> float:
        """Horovod's: the ranks tell each other the sizes of their rows, then send them."""
        near = min(self.local, ranks) - 1
        return self.rows(SPLIT * ranks, ranks, ranks - 1, near) + self.rows(nbytes, ranks, ranks - 1, near)

    def in_levels(self, nbytes: float, ranks: int) -> bool:
        """Whether ranks add up within their hosts first, which have equal numbers of them."""
        return 1 < self.local < ranks and ranks % self.local == 0 and two_levels_pay(nbytes, ranks)

    def scatter(self, nbytes: float, ranks: int) -> float:
        """This library's reduce-scatter: an alltoall, or one on each host and then one of those at the same place on each host."""
        if not self.in_levels(nbytes, ranks):
            return self.alltoall(nbytes, ranks)
        local = self.local
        sizes = self.rows(SPLIT * ranks, ranks, ranks - 1, local - 1)
        within = self.rows(nbytes, ranks, local - 1, local - 1)
        across = self.rows(nbytes / local, ranks, ranks // local - 1, 0)
        return sizes + within + self.agreement(ranks) + sizes + across

    def agreement(self, ranks: int) -> float:
        """What all ranks tell each other in each of Horovod's cycles: which collectives are ready."""
        return self.allreduce(WORD, ranks) if ranks > 1 else 0.0

    def exchange(self, nbytes: float, parts: int) -> float:
        """Each of the parts of a layer, which are neighbours, sends ``nbytes`` to each other part."""
        sent, across = (parts - 1) * nbytes, parts > self.local
        return (parts - 1) * self.message + self._hop(sent * (self.local if across else 1), across)

    def stage_message(self, nbytes: float, ranks: int, stages: int) -> float:
        """A message to the next stage, as far away as there are replicas; all replicas of a host send at a time."""
        across = ranks > self.local
        return self._hop(nbytes * (min(self.local, ranks // stages) if across else 1), across)
