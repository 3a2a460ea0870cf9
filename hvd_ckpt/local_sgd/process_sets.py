"""Process sets of the groups within which gradients are reduced: those that exist already, or new ones until they are released."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from horovod.common import process_sets
from horovod.torch.mpi_ops import ProcessSet

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


def acquire(groups: Iterable[Sequence[int]]) -> tuple[dict[tuple[int, ...], Any], list[tuple[int, ...]]]:
    """The process set of each group of ranks, and those that must be released later. Collective over all ranks.

    Raises:
        ValueError: a set is missing and Horovod cannot add any.
    """
    found: dict[tuple[int, ...], Any] = {}
    taken: list[tuple[int, ...]] = []
    for group in groups:
        ranks = tuple(sorted(group))
        present = {tuple(one): number for number, one in _present().items()}
        if ranks in present:
            found[ranks] = ProcessSet(list(ranks))
            found[ranks].process_set_id = present[ranks]
            if ranks not in _users:
                continue
        else:
            found[ranks] = _added(ranks)
        _users[ranks] += 1
        taken.append(ranks)
    return found, taken


def release(groups: Iterable[tuple[int, ...]]) -> None:
    """Removes the process sets that were added for these groups and that nobody else uses. Collective over all ranks."""
    for ranks in groups:
        _users[ranks] -= 1
        if _users[ranks] > 0:
            continue
        del _users[ranks]
        number = next((number for number, one in _present().items() if tuple(one) == ranks), None)
        if number is not None:
            known = ProcessSet(list(ranks))
            known.process_set_id = number
            process_sets.remove_process_set(known)


def _present() -> dict[int, list[int]]:
    assert process_sets._basics is not None
    return dict(process_sets._basics._get_process_set_ids_and_ranks())


def _added(ranks: tuple[int, ...]) -> Any:
    try:
        return process_sets.add_process_set(list(ranks))
    except Exception as error:
        raise ValueError(
            f"LocalSGD(within=...) needs a process set of ranks {list(ranks)}: give it to hc.init(process_sets=[...]), or set "
            f"HOROVOD_DYNAMIC_PROCESS_SETS=1 ({error})"
        ) from error
