"""Collectives of rows: each rank has a row for each other one; at once, or within hosts first.

A dtype that Horovod does not support is sent as another one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from horovod.torch import mpi_ops

from hvd_ckpt.collectives.asynchronous import Collectives, Work

TWO_LEVEL_BYTES, TWO_LEVEL_ROW_BYTES = 1 << 20, 2 << 10
"""Ranks on several hosts add up within hosts first if the sum has at least the first number of bytes, and at least the second times
the number of ranks. That is two alltoalls in place of one. With less, their messages take longer than the bytes that they save
(``python -m benchmarks scale``)."""

# Dtypes that Horovod carries; all others are carried as one of these, bit for bit.
_CARRIED = {
    torch.float32,
    torch.float64,
    torch.float16,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
}


class RowCollectives(Collectives):
    """The collectives of the ranks of a process set, with those of rows.

    Attributes:
        hosts: positions in the process set of the ranks of each host, as :func:`hvd_ckpt.collectives.process_sets.levels` finds
            them; None for one level. Whoever knows them sets it, on every rank alike.
    """

    hosts: Sequence[Sequence[int]] | None = None

    def exchange_rows(
        self, wire: torch.Tensor, what: str, peers: Sequence[int] | slice = slice(None)
    ) -> Work:
        """Starts to send each peer its row of ``wire`` [peers, any].

        Args:
            peers: positions in the process set of the ranks that exchange with this one, in order; by default all. All ranks of
                the set take part.

        Returns:
            Its result is of the same shape: the row that each peer has for this rank.
        """

        def begin(part: torch.Tensor, name: str) -> Any:
            splits = torch.zeros(self.process_set.size(), dtype=torch.int32)
            # Ranks that are no peers get nothing from this one, and still take part: an alltoall is of all ranks of the set.
            splits[peers] = part.shape[1]
            return mpi_ops.alltoall_async(part.reshape(-1), splits, name=name, process_set=self.process_set)

        def finish(results: list[Any]) -> torch.Tensor:
            rows = _joined([received for received, _ in results], len(wire))
            return rows.view(wire.dtype).view(wire.shape)

        return Work(self._in_parts(carried(wire.view(len(wire), -1)), len(wire), what, begin), finish)

    def levels_of(self, nbytes: int) -> Sequence[Sequence[int]]:
        """The hosts within which a sum of ``nbytes`` of each rank begins; one with all ranks where two levels do not pay."""
        ranks = self.process_set.size()
        return [range(ranks)] if self.hosts is None or not two_levels_pay(nbytes, ranks) else self.hosts

    def exchange_in_levels(
        self,
        hosts: Sequence[Sequence[int]],
        flat: torch.Tensor,
        what: str,
        encode: Callable[[torch.Tensor, int], torch.Tensor],
        add: Callable[[torch.Tensor], torch.Tensor],
    ) -> Work:
        """Starts to add up the ``flat`` [ranks * m] of all ranks within hosts, and to send each rank its part of these sums.

        Args:
            hosts: several, as :attr:`hosts`.
            encode: makes the wire [n, any] of [n * m] elements, given them and n.
            add: makes the sums [k] of the elements [any, k] that a wire stands for.

        Returns:
            Its result is the wire [hosts, any] of the sums of each host for this rank.
        """
        # In one alltoall each rank of a host sends nearly all its rows to other hosts, so that a link carries the gradients as
        # often as the host has ranks. Added up within the host first, they pass the link once:
        #
        #     rank 0, of hosts [0, 1] and [2, 3]    1. to rank 1: rows 1 and 3; from rank 1: its rows 0 and 2, which are added
        #                                           2. to rank 2: that sum of row 2; from rank 2: its sum of row 0
        rank = self.process_set.rank()
        own = next(host for host in hosts if rank in host)
        place, local = own.index(rank), len(own)
        rows = flat.view(self.process_set.size(), -1)
        rows = rows[[host[other] for other in range(local) for host in hosts]]

        def across(arrived: torch.Tensor) -> Work:
            peers = [host[place] for host in hosts]
            return self.exchange_rows(encode(add(arrived), len(hosts)), f"{what}.across", peers)

        return self.exchange_rows(encode(rows.view(-1), local), f"{what}.within", own).then(
            across, sends=True
        )

    def gather_rows(self, row: torch.Tensor, what: str) -> Work:
        """Starts to gather the ``row`` [m] of each rank, as [ranks, m]."""
        ranks = self.process_set.size()

        def begin(part: torch.Tensor, name: str) -> Any:
            return mpi_ops.allgather_async(part.reshape(-1), name, self.process_set)

        def finish(results: list[Any]) -> torch.Tensor:
            return _joined(results, ranks).view(row.dtype).view(ranks, -1)

        return Work(self._in_parts(carried(row).view(1, -1), ranks, what, begin), finish)


def two_levels_pay(nbytes: float, ranks: int) -> bool:
    """Whether a sum of ``nbytes`` of each rank is large enough to be added up within hosts first."""
    return nbytes >= max(TWO_LEVEL_BYTES, ranks * TWO_LEVEL_ROW_BYTES)


def _joined(parts: list[torch.Tensor], rows: int) -> torch.Tensor:
    """The columns of ``rows`` rows that have arrived in these parts."""
    return parts[0] if len(parts) == 1 else torch.cat([part.view(rows, -1) for part in parts], dim=1)


def carried(message: torch.Tensor) -> torch.Tensor:
    """The same storage in a type that Horovod carries."""
    message = message.detach()
    # These messages are moved and never added up, so any type with the same bits will do.
    if message.dtype in _CARRIED:
        return message
    return message.view(torch.int16 if message.itemsize == 2 else torch.uint8)
