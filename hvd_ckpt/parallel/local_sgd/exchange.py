"""The collectives of an average among some ranks of a process set: alltoalls with no data for the others, so no set is added."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvd_ckpt.collectives.asynchronous import Work
from hvd_ckpt.collectives.exchange import Exchange, Kind, Traffic
from hvd_ckpt.collectives.formats import WireFormat
from hvd_ckpt.collectives.rows import RowCollectives


class PeerExchange:
    """Exchanges flat runs of equal rows, a row for each peer. All ranks of the process set launch the same ones.

    Args:
        collectives: collectives of the process set, which carry the messages.
        peers: positions in the set of the ranks that exchange with this one, in rank order, with its own.
        traffic: counts what this rank sends.
        group: the ranks that have equal values, each of which averages one part with its peers, and gets the others'.

    Attributes:
        ranks, rank: number of peers, and this rank's place among them.
        parts, part: number of parts that a group has, and the one of this rank.
    """

    def __init__(
        self,
        collectives: RowCollectives,
        peers: Sequence[int],
        traffic: Traffic,
        group: Exchange | None = None,
    ) -> None:
        self.ranks, self.rank = len(peers), list(peers).index(collectives.process_set.rank())
        self._collectives, self._peers, self._traffic = collectives, list(peers), traffic
        self.group = group
        self.parts, self.part = (1, 0) if group is None else (group.ranks, group.rank)

    def scatter(self, flat: torch.Tensor, what: str, format: WireFormat) -> Work:
        """Sends each peer its row of ``flat`` [ranks * m], encoded.

        Returns:
            Its result is the wire [ranks, any]: the row that each peer has for this rank, in their order.
        """
        if self.ranks == 1:
            return Work((), lambda _: flat.view(1, -1))
        wire = format.encode(flat, self.ranks)
        self._count("reduce_scatter", flat, format)
        return self._collectives.exchange_rows(wire, f"{what}.scatter", self._peers)

    def gather(self, row: torch.Tensor, what: str, format: WireFormat) -> Work:
        """Sends ``row`` [m] to all peers.

        Returns:
            Its result is [ranks * m], a new tensor: every peer's row as it was sent, the same on all of them.
        """
        if self.ranks == 1:
            return Work((), lambda _: row.clone())
        flat = torch.empty(self.ranks * row.numel(), dtype=row.dtype, device=row.device)
        self._count("all_gather", flat, format)

        def decoded(rows: torch.Tensor) -> torch.Tensor:
            format.decode(rows, flat)
            return flat

        wire, what = format.encode(row), f"{what}.gather"
        if self.ranks == self._collectives.process_set.size():
            return self._collectives.gather_rows(wire.view(-1), what).then(decoded)
        # An allgather is of all ranks of the set, and needs one of its own for some of them. An alltoall does not.
        wire = wire.expand(self.ranks, -1).contiguous()
        return self._collectives.exchange_rows(wire, what, self._peers).then(decoded)

    def _count(self, kind: Kind, flat: torch.Tensor, format: WireFormat) -> None:
        row = format.row_bytes(flat.numel() // self.ranks, flat.dtype)
        self._traffic.count(kind, (self.ranks - 1) * row)


def weighted_mean(
    rows: torch.Tensor, shares: Sequence[float], format: WireFormat, dtype: torch.dtype, numel: int
) -> torch.Tensor:
    """The sum [numel] of the rows of a wire [n, any], each times its share, in their order.

    Where all rows have the same elements these are the result, exactly.
    """

    def decoded(row: torch.Tensor) -> torch.Tensor:
        values = torch.empty(numel, dtype=dtype, device=row.device)
        format.decode(row[None], values)
        return values

    first = decoded(rows[0])
    total = first * shares[0]
    # Shares add up to 1 only up to rounding. Without this, weights that are equal on all ranks would change in their last bits.
    same = torch.ones(numel, dtype=torch.bool, device=rows.device)
    for row, share in zip(rows[1:], shares[1:]):
        values = decoded(row)
        same &= values == first
        total.add_(values, alpha=share)
    return torch.where(same, first, total)
