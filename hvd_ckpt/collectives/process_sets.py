"""Groups of ranks, such as those of each host, and their process sets: those that exist, or new ones until they are released."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from horovod.common import process_sets
from horovod.torch import mpi_ops
from horovod.torch.mpi_ops import ProcessSet, local_size, size

from hvd_ckpt.collectives.agreement import allgather_objects
from hvd_ckpt.collectives.asynchronous import ranks_of
from hvd_ckpt.processes.hosts import Peer

_users: Counter[tuple[int, ...]] = Counter()  # of each process set that this module has added


class Alone:
    """Stands for a process set of this rank alone, which sends nothing and needs none of Horovod's."""

    process_set_id = None

    def __init__(self, rank: int) -> None:
        self.ranks = [rank]

    def included(self) -> bool:
        return True

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def check_within(within: Any) -> str | list[list[int]] | None:
    """The argument ``within`` as None, text or lists; anything else is a ValueError."""
    if within is None or within == "host":
        return within  # type: ignore[no-any-return]
    try:
        groups = [list(group) for group in within]
    except TypeError:
        groups = []
    if (
        isinstance(within, str)
        or not groups
        or any(type(rank) is not int for group in groups for rank in group)
    ):
        raise ValueError(
            f"within must be None, 'host' or a list of lists of ranks, such as [[0, 1], [2, 3]], not {within!r}"
        )
    return groups


def rank_groups(within: str | Sequence[Sequence[int]] | None, process_set: Any, name: str) -> list[list[int]]:
    """Groups of ranks: those of each host, or as given; each rank alone for None. Collective.

    Raises:
        ValueError: they are not all ranks once, or of different sizes; on every rank.
    """
    ranks = ranks_of(process_set)
    if within is None:
        return [[rank] for rank in ranks]
    given = ranks_of_hosts(process_set, name) if isinstance(within, str) else within
    groups = sorted(sorted(group) for group in given)
    if sorted(rank for group in groups for rank in group) != ranks or len(set(map(len, groups))) > 1:
        raise ValueError(
            f"within={within!r}: groups must have each of the ranks {ranks} once and be of equal size, not {groups}"
        )
    return groups


def ranks_of_hosts(process_set: Any, name: str) -> list[list[int]]:
    """The ranks of each host. Collective."""
    here = Peer.here(mpi_ops.rank())
    hosts = allgather_objects((here.host, here.addresses), process_set, name)
    ranks = ranks_of(process_set)
    return [[rank for rank, other in zip(ranks, hosts) if other == host] for host in dict.fromkeys(hosts)]


def hosts_of(process_set: Any, name: str) -> list[list[int]] | None:
    """Positions of the ranks of each host, for sums in two levels; None for one level.

    Collective, if the job runs on several hosts.
    """
    if local_size() == size():  # the same on all ranks
        return None
    place = {rank: number for number, rank in enumerate(ranks_of(process_set))}
    return levels([[place[rank] for rank in host] for host in ranks_of_hosts(process_set, name)])


def levels(hosts: Sequence[Sequence[int]]) -> list[list[int]] | None:
    """The hosts in order, or None if ranks cannot add up within hosts first.

    They can if there are several hosts, each has the same number of ranks (at least two), and ranks are numbered host by host. Then
    a sum in a binary tree over the ranks has the same bits in both levels as in one.
    """
    groups = sorted(sorted(host) for host in hosts)
    ranks = [rank for group in groups for rank in group]
    alike = len({len(group) for group in groups}) == 1 and ranks == sorted(ranks)
    return groups if alike and 1 < len(groups) < len(ranks) else None


def process_sets_of(
    groups: Sequence[Sequence[int]], process_set: Any
) -> tuple[dict[tuple[int, ...], Any], list[tuple[int, ...]]]:
    """The process set of each group of ranks, and those that must be released later. Collective over all ranks.

    Raises:
        ValueError: a set is missing and Horovod cannot add any.
    """
    if len(groups) == 1:
        return {tuple(groups[0]): process_set}, []
    if len(groups[0]) == 1:
        return {tuple(group): Alone(group[0]) for group in groups}, []
    sets: dict[tuple[int, ...], Any] = {}
    taken: list[tuple[int, ...]] = []
    for ranks in (tuple(sorted(group)) for group in groups):
        # Looked up anew for each group, since two of the given groups may be the same ranks.
        known = _known(ranks)
        sets[ranks] = known or _added(ranks)
        # One that the user has added is not this module's to remove.
        if known is None or ranks in _users:
            # Several optimizers may use one set. The last of them to release it removes it.
            _users[ranks] += 1
            taken.append(ranks)
    return sets, taken


def release(groups: Iterable[tuple[int, ...]]) -> None:
    """Removes the process sets that were added for these groups and that nobody else uses. Collective over all ranks."""
    for ranks in groups:
        _users[ranks] -= 1
        if _users[ranks] <= 0:
            del _users[ranks]
            if (known := _known(ranks)) is not None:
                process_sets.remove_process_set(known)


def _known(ranks: tuple[int, ...]) -> Any:
    """The process set that Horovod has of these ranks, or None."""
    assert process_sets._basics is not None
    for number, members in process_sets._basics._get_process_set_ids_and_ranks().items():
        if tuple(members) == ranks:
            known = ProcessSet(list(ranks))
            known.process_set_id = number
            return known
    return None


def _added(ranks: tuple[int, ...]) -> Any:
    try:
        return process_sets.add_process_set(list(ranks))
    except Exception as error:
        raise ValueError(
            f"within=... needs a process set of ranks {list(ranks)}: give it to hc.init(process_sets=[...]), or set "
            f"HOROVOD_DYNAMIC_PROCESS_SETS=1 ({error})"
        ) from error
