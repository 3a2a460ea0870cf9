"""Candidate policies of a block: sets of calls whose results are worth dropping. The profile measures them.

Each result of a block can be kept or dropped. The trace of the block gives an estimate of the bytes that a set of dropped results
saves and of the seconds that it costs. The Pareto frontier of all sets is found by trying all of them if they are few, and by
several descents if they are many. The estimates only choose the policies that are measured.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from hvd_ckpt.planning.policy import KEEP, CheckpointPolicy
from hvd_ckpt.planning.trace import Trace
from hvd_ckpt.recompute.tape import Policy

_EXHAUSTIVE = 11  # most nodes for which all subsets are tried: 2048
_PRICES = 20
_LOOKS = 200_000  # calls that the estimates of a descent may visit, which takes about a second for any block
_COMPRESSIBLE = 0.02  # share of the kept bytes below which compression is not tried
_MATMULS = {
    "linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "conv1d", "conv2d", "conv3d", "__matmul__", "einsum",
}  # fmt: skip


@dataclass(frozen=True)
class Estimate:
    """Estimated cost of a set of dropped calls.

    Attributes:
        kept: bytes of the block's results that are held for the backward pass.
        seconds: time of the recomputation.
        working: most bytes of recomputed results at a time.
    """

    kept: int
    seconds: float
    working: int


def estimate(trace: Trace, dropped: frozenset[int], breaks: frozenset[int] = frozenset()) -> Estimate:
    """Estimates bytes and seconds if the calls in ``dropped`` are dropped; ``breaks`` as in
    :class:`~hvd_ckpt.recompute.tape.Policy`."""
    # Backward through the calls, as a replay finds what it needs: a kept call keeps what autograd saves of it; a dropped call runs
    # again if something of it is saved or a later call that runs again reads its result. Then its arguments are kept, or are
    # results of dropped calls that run again themselves.
    #
    # An example: 0 is a linear layer, 1 its gelu, 2 a linear layer. Autograd
    # saves result 0 (the gelu's input) and result 1 (the input of 2).
    #
    #     dropped     kept        runs again
    #     nothing     0 and 1     nothing
    #     1           0           1, from 0
    #     0 and 1     nothing     0 and 1, from the block's input, which is no memory of the block
    calls = trace.calls
    kept: set[int] = set()
    read: set[int] = set()  # dropped calls whose results are read by calls that run again
    needed: list[int] = []
    for number in range(len(calls) - 1, -1, -1):
        call = calls[number]
        if number not in dropped:
            kept.update(call.results[output] for output in call.saved)
            kept.update(call.inner)
            continue
        if not (call.saved or call.inner or number in read):
            continue
        needed.append(number)
        for source, output in call.reads:
            if source in dropped:
                read.add(source)
            else:
                kept.add(calls[source].results[output])
    # Connected calls form a group, which is replayed at once. So all that
    # autograd wants of a group is held at the same time (``working``).
    groups = {number: {number} for number in needed}
    for number in reversed(needed):
        for source, _ in calls[number].reads:
            if source in dropped and source not in breaks:
                _join(groups, source, number)
    # A replay ends a call once its wanted inner tensors have been saved, so a
    # product that is wanted for these alone is not multiplied again.
    seconds = sum(
        calls[number].seconds
        for number in needed
        if calls[number].name not in _MATMULS or number in read or calls[number].saved
    )
    # Groups that begin at a break compute its result, and all that it depends on, once more and for themselves.
    again = {number: _closure(trace, number, dropped) for number in breaks if number in groups}
    distinct = {id(group): group for group in groups.values()}.values()
    working = 0
    for group in distinct:
        members = [calls[number] for number in group]
        entered = {source for call in members for source, _ in call.reads if source in breaks}
        seconds += sum(
            calls[repeated].seconds for source in entered - group for repeated in again.get(source, ())
        )
        places = {call.results[output] for call in members for output in call.saved}
        places.update(place for call in members for place in call.inner)
        working = max(working, sum(trace.memory[place] for place in places))
    return Estimate(sum(trace.memory[place] for place in kept), seconds, working)


def _join(groups: dict[int, set[int]], first: int, second: int) -> None:
    """Merges the groups of two calls."""
    if groups[first] is not groups[second]:
        fewer, more = sorted((groups[first], groups[second]), key=len)
        more |= fewer
        for member in fewer:
            groups[member] = more


def _closure(trace: Trace, number: int, dropped: frozenset[int]) -> set[int]:
    """The dropped calls that a call depends on, and itself."""
    reached = {number}
    pending = [number]
    while pending:
        for source, _ in trace.calls[pending.pop()].reads:
            if source in dropped and source not in reached:
                reached.add(source)
                pending.append(source)
    return reached


def nodes(trace: Trace) -> list[frozenset[int]]:
    """Sets of calls that can only be dropped together, because their results are in the same memory. Examples are a linear layer
    and the views of its result, or a batch norm and the relu that changes its result in place.
    """
    groups: dict[int, set[int]] = {}
    of_place: dict[int, int] = {}  # the first call with a result there
    for number, call in enumerate(trace.calls):
        if call.droppable:
            groups[number] = {number}
            for place in call.results:
                _join(groups, of_place.setdefault(place, number), number)
    distinct = {id(group): frozenset(group) for group in groups.values()}
    # Dropping others changes nothing: their results are neither saved nor read.
    useful = {source for call in trace.calls for source, _ in call.reads}
    useful.update(number for number, call in enumerate(trace.calls) if call.saved or call.inner)
    return [node for node in distinct.values() if node & useful]


def candidates(trace: Trace, limit: int = 8) -> list[CheckpointPolicy]:
    """Policies that are worth measuring, "keep" first.

    They are at most ``limit`` sets of dropped calls, and their compressed forms if there is something to compress. The set that
    keeps least is also there with its replay broken in two, and with random masks that are drawn again.
    """
    parts = nodes(trace)
    pool = _exhaust(trace, parts) if len(parts) <= _EXHAUSTIVE else _descend(trace, parts)
    chosen = _spread(pool, limit)
    sets = [(dropped, frozenset[int](), False) for dropped in chosen]
    smallest = min(pool, key=lambda dropped: (pool[dropped].kept, pool[dropped].seconds))
    least = [frozenset[int](), *_breaks(trace, parts, smallest)]
    sets += [(smallest, breaks, False) for breaks in least[1:]]
    if any(trace.calls[number].masks for number in smallest):
        sets += [(smallest, breaks, True) for breaks in least]
    policies = [KEEP]
    keep = pool[frozenset()].kept
    for dropped, breaks, redraw in sets:
        held = {
            place for number, call in enumerate(trace.calls) if number not in dropped for place in call.inner
        }
        saves = sum(trace.compressible.get(place, 0) for place in held)
        for compress in (False, True) if saves > _COMPRESSIBLE * keep else (False,):
            policy = Policy(trace.names, dropped, breaks, compress, redraw)
            if dropped or compress:
                policies.append(CheckpointPolicy(_title(trace, policy), policy))
    return policies


def _exhaust(trace: Trace, parts: list[frozenset[int]]) -> dict[frozenset[int], Estimate]:
    sets = itertools.product((False, True), repeat=len(parts))
    unions = (frozenset[int]().union(*itertools.compress(parts, chosen)) for chosen in sets)
    return {dropped: estimate(trace, dropped) for dropped in unions}


def _descend(trace: Trace, parts: list[frozenset[int]]) -> dict[frozenset[int], Estimate]:
    """Sets found by descent: for each of several prices of a byte, changes one node or two neighbours while that lowers the sum of
    seconds and price. In large blocks, the descent ends early."""
    pool: dict[frozenset[int], Estimate] = {}

    def look(dropped: frozenset[int]) -> Estimate:
        if dropped not in pool:
            pool[dropped] = estimate(trace, dropped)
        return pool[dropped]

    # Kept bytes have a price in seconds. At a low price, keeping everything is best, and at a high one, dropping everything. From
    # both ends, the price moves towards the other end in steps of a factor of sqrt(2), and each descent starts where the last one
    # ended. So the optimum changes by a few nodes at a time. All sets that were estimated on the way are candidates.
    everything = frozenset[int]().union(*parts)
    moves = [*parts, *(first | second for first, second in itertools.pairwise(parts))]
    keep, drop = look(frozenset()), look(everything)
    rate = max(drop.seconds, 1e-9) / max(keep.kept - drop.kept, 1)
    for start in (frozenset[int](), everything):
        current = start
        most = len(pool) + _LOOKS // len(trace.calls)
        for step in range(_PRICES):
            power = step - _PRICES / 2 if start == frozenset() else _PRICES / 2 - step
            price = rate * 2.0 ** (power / 2)
            better = True
            while better and len(pool) < most:
                better = False
                for move in moves:
                    for changed in (current | move, current - move):
                        if changed == current:
                            continue
                        cost, now = look(changed), look(current)
                        # Without the margin, sums that differ by rounding alone could make two sets take turns forever.
                        if cost.seconds + price * cost.kept < now.seconds + price * now.kept - 1e-15:
                            current, better = changed, True
    return pool


def _spread(pool: dict[frozenset[int], Estimate], limit: int) -> list[frozenset[int]]:
    """The sets on the Pareto frontier of bytes and seconds; of many, those that are spread evenly along the curve."""
    # From few bytes to many: a set is on the frontier if it is faster than each set before it, all of which keep no more.
    order = sorted(pool, key=lambda dropped: (pool[dropped].kept, pool[dropped].seconds, len(dropped)))
    frontier: list[frozenset[int]] = []
    for dropped in order:
        if not frontier or pool[dropped].seconds < pool[frontier[-1]].seconds - 1e-12:
            frontier.append(dropped)
    if len(frontier) > limit:
        # The range of bytes is divided into ``limit`` cells of equal size. In each, the set farthest below the chord stays.
        low, high = pool[frontier[0]].kept, pool[frontier[-1]].kept
        slots: dict[int, frozenset[int]] = {}
        for dropped in frontier:
            slot = round((limit - 1) * (pool[dropped].kept - low) / max(high - low, 1))
            best = slots.get(slot)
            if best is None or _merit(pool, dropped, frontier) > _merit(pool, best, frontier):
                slots[slot] = dropped
        slots[0], slots[limit - 1] = frontier[0], frontier[-1]
        frontier = list(dict.fromkeys(slots[slot] for slot in sorted(slots)))
    return frontier


def _merit(
    pool: dict[frozenset[int], Estimate], dropped: frozenset[int], frontier: list[frozenset[int]]
) -> float:
    """The distance of a point below the straight line between the ends of the frontier, in seconds."""
    first, last, here = pool[frontier[0]], pool[frontier[-1]], pool[dropped]
    share = (here.kept - first.kept) / max(last.kept - first.kept, 1)
    return first.seconds + share * (last.seconds - first.seconds) - here.seconds


def _breaks(trace: Trace, parts: list[frozenset[int]], dropped: frozenset[int]) -> list[frozenset[int]]:
    """Up to two nodes at which to break the replay of a block that keeps least, because that lowers its peak most."""
    whole = estimate(trace, dropped)
    broken = {part: estimate(trace, dropped, part).working for part in parts if part <= dropped}
    useful = [part for part, working in broken.items() if working < 0.9 * whole.working]
    return sorted(useful, key=broken.__getitem__)[:2]


def _title(trace: Trace, policy: Policy) -> str:
    """Title of a policy, such as ``drop gelu, layer_norm``. Views are named only if it drops nothing else."""
    words = []
    if policy.dropped:
        again = [number for number in sorted(policy.dropped) if trace.calls[number].seconds > 0]
        names = list(dict.fromkeys(trace.calls[number].name for number in again))
        makes = [name for name in names if name not in _VIEWS] or names
        words.append(f"drop {', '.join(makes[:5])}{', ...' if len(makes) > 5 else ''}")
    if policy.breaks:
        words.append("in two parts")
    if policy.compress:
        words.append("compress")
    if policy.redraw:
        words.append("draw again")
    return ", ".join(words)


_VIEWS = {
    "view", "reshape", "permute", "transpose", "unbind", "chunk", "split", "unsqueeze", "squeeze", "expand", "contiguous",
    "__getitem__", "T.__get__", "flatten", "unflatten", "detach", "to", "type_as",
}  # fmt: skip
