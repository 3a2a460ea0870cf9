"""Leveling: makes the common state of reducers equal again, after ranks have loaded or reset an optimizer separately.

The common state is the order and layout in which gradients are reduced, and the names of the messages. A rank that loads a state
or resets an optimizer separately starts with a new state. The next call that broadcasts the state of one rank also broadcasts its
order and new names. If ranks differ, a step that has begun is dropped on all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hvd_ckpt.collectives.agreement import allgather_objects, broadcast_from, digest
from hvd_ckpt.collectives.asynchronous import ranks_of
from hvd_ckpt.reduction.optimizer import ReducedOptimizer
from hvd_ckpt.reduction.wrapping import live_optimizers

PER_RANK = ("counts", "lower_counts", "may_wait")  # parts of a reducer's state that each rank has of its own


class CommonState(NamedTuple):
    """The state of a reducer that must be equal on all ranks.

    Attributes:
        names: fingerprint of the names of the parameters.
        naming: identity and generation in the names of the messages.
        order: and layout; a fingerprint.
    """

    names: str
    naming: tuple[int, int]
    order: str


def common_state(optimizer: Any) -> CommonState | None:
    """The common state of an optimizer; None if it is not distributed or reduces nothing."""
    if not isinstance(optimizer, ReducedOptimizer) or optimizer.reducer is None:
        return None
    state = optimizer.reducer.state_dict()
    shared = {name: value for name, value in state.items() if name not in PER_RANK}
    names = list(optimizer.parameter_names.values())
    return CommonState(digest(names), optimizer.reducer.naming, digest(shared))


def level(optimizer: Any, states: Mapping[int, CommonState | None], root_rank: int) -> None:
    """Gives all ranks of an optimizer's process set the order of one of them, and new names, if they differ. Collective.

    Args:
        states: result of :func:`common_state`, by rank.
        root_rank: the rank whose order counts, or the first of the process set where it is not in that.
    """
    if common_state(optimizer) is None:
        return
    process_set, reducer = optimizer.process_set, optimizer.reducer
    members = sorted(ranks_of(process_set))
    known = [state for rank in members if (state := states[rank]) is not None]
    alike = len({state.names for state in known}) == 1
    # Decided by what all ranks know alike, since the rest is collective.
    if len(known) < len(members) or not alike or len(set(known)) == 1:
        return
    leader = root_rank if root_rank in members else members[0]
    own = reducer.state_dict()
    theirs = broadcast_from(own, leader, process_set, "hvd_ckpt.level")
    # Counts stay each rank's own: how often a gradient arrives there depends on what that rank computes.
    reducer.load_state_dict({**theirs, **{name: own[name] for name in PER_RANK if name in own}})
    optimizer.drop_gradients()
    # Later than any name that one of the ranks has used, so that no message under way has one of the new ones.
    optimizer.identity = max(state.naming[0] for state in known)
    reducer.rename(optimizer.identity, 1 + max(state.naming[1] for state in known))


class Live:
    """All optimizers of this process, to be leveled.

    They are kept alive. Python may collect an optimizer at any time, on one rank before another. If a rank had announced an
    optimizer and then lost it, the others would wait.

    Attributes:
        states: state of each optimizer, by the identity that ranks have agreed on; to be gathered.
    """

    def __init__(self) -> None:
        self._optimizers = live_optimizers()
        self.states = {optimizer.identity: common_state(optimizer) for optimizer in self._optimizers}

    def level(self, states: Sequence[Mapping[int, CommonState | None]], root_rank: int) -> None:
        """:func:`level` for each of them. Collective.

        Args:
            states: those of all ranks, by rank. A rank may have collected an optimizer that others still have.
        """
        for optimizer in self._optimizers:
            by_rank = {rank: own.get(optimizer.identity) for rank, own in enumerate(states)}
            level(optimizer, by_rank, root_rank)


def agree_on_naming(optimizer: Any) -> None:
    """Gives an optimizer's messages names that are the same on every rank and new. Collective."""
    reducer = optimizer.reducer
    if reducer is not None:
        namings = allgather_objects(reducer.naming, optimizer.process_set, "agree_on_naming()")
        optimizer.identity = max(identity for identity, _ in namings)
        reducer.rename(optimizer.identity, 1 + max(generation for _, generation in namings))
