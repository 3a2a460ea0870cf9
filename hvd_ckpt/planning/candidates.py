"""Candidate policies of a block: sets of calls whose results are worth dropping, to be measured.

Each result of a block can be kept or dropped. The bytes that a set of dropped results saves and the seconds that it costs are
estimated from the block's trace. The Pareto frontier of all sets is found by trying them all where they are few, and by descent
from many sides where they are many. The estimates only choose which policies are measured.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from hvd_ckpt.planning.policy import KEEP, CheckpointPolicy
from hvd_ckpt.planning.trace import Trace
from hvd_ckpt.recompute.tape import Policy

_EXHAUSTIVE = 11  # nodes up to which all subsets are tried: 2048
_PRICES = 20
_LOOKS = 200_000  # calls that the estimates of a descent look at: a second, whatever the block
_COMPRESSIBLE = 0.02  # share of the kept bytes below which compression is not tried
_MATMULS = frozenset(
    {
        "linear",
        "matmul",
        "mm",
        "bmm",
        "addmm",
        "baddbmm",
        "conv1d",
        "conv2d",
        "conv3d",
        "__matmul__",
        "einsum",
    }
)


@dataclass(frozen=True)
class PlanOptions:
    """What a plan may choose, as in :func:`hvd_ckpt.plan`."""

    blocks: Sequence[str] | None = None
    autocast: torch.dtype | None = None
    lossy: torch.dtype | None = None
    chunk_head: bool = True
    offload: bool = False

    @property
    def lossy_name(self) -> str | None:
        """The name of the dtype.

        Raises:
            ValueError: it is not one of 16 bits.
        """
        if self.lossy not in (None, torch.float16, torch.bfloat16):
            raise ValueError(f"lossy must be torch.float16 or torch.bfloat16, got {self.lossy!r}")
        return None if self.lossy is None else str(self.lossy).removeprefix("torch.")


@dataclass(frozen=True)
class Estimate:
    """Estimated cost of a set of dropped calls.

    Attributes:
        kept: bytes of the block's own results that are held for the backward pass.
        seconds: time of the recomputation.
        working: most bytes of recomputed results at a time.
    """

    kept: int
    seconds: float
    working: int


def estimate(trace: Trace, dropped: frozenset[int], breaks: frozenset[int] = frozenset()) -> Estimate:
    """Bytes and seconds if the calls in ``dropped`` are dropped; ``breaks`` as in
    :class:`~hvd_ckpt.recompute.tape.Policy`."""
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
    groups = {number: {number} for number in needed}
    for number in reversed(needed):
        for source, _ in calls[number].reads:
            if source in dropped and source not in breaks:
                _join(groups, source, number)
    own = {
        number: 0.0
        if _only_inner(trace, number, read) and calls[number].name in _MATMULS
        else calls[number].seconds
        for number in needed
    }
    seconds = sum(own.values())
    again = {number: _closure(trace, number, dropped) for number in breaks if number in groups}
    distinct = {id(group): group for group in groups.values()}.values()
    for group in distinct:
        entered = {source for number in group for source, _ in calls[number].reads if source in breaks}
        seconds += sum(calls[one].seconds for source in entered - group for one in again.get(source, ()))
    working = max((_retained(trace, group) for group in distinct), default=0)
    return Estimate(sum(trace.memory[place] for place in kept), seconds, working)


def _join(groups: dict[int, set[int]], one: int, other: int) -> None:
    """Makes one group of the groups of two calls."""
    if groups[one] is not groups[other]:
        fewer, more = sorted((groups[one], groups[other]), key=len)
        more |= fewer
        for member in fewer:
            groups[member] = more


def _only_inner(trace: Trace, number: int, read: set[int]) -> bool:
    return number not in read and not trace.calls[number].saved


def _closure(trace: Trace, number: int, dropped: frozenset[int]) -> set[int]:
    found = {number}
    pending = [number]
    while pending:
        for source, _ in trace.calls[pending.pop()].reads:
            if source in dropped and source not in found:
                found.add(source)
                pending.append(source)
    return found


def _retained(trace: Trace, group: Iterable[int]) -> int:
    places: set[int] = set()
    for number in group:
        call = trace.calls[number]
        places.update(call.results[output] for output in call.saved)
        places.update(call.inner)
    return sum(trace.memory[place] for place in places)


def nodes(trace: Trace) -> list[frozenset[int]]:
    """Calls that can only be dropped together, because their results lie in the same memory: a linear and the views of its
    result, a batch norm and the relu that changes it in place."""
    groups: dict[int, set[int]] = {}
    of_place: dict[int, int] = {}  # the first call with a result there
    for number, call in enumerate(trace.calls):
        if call.droppable:
            groups[number] = {number}
            for place in call.results:
                _join(groups, of_place.setdefault(place, number), number)
    found = {id(group): frozenset(group) for group in groups.values()}
    return [node for node in found.values() if _matters(trace, node)]


def _matters(trace: Trace, node: frozenset[int]) -> bool:
    """Whether dropping it can change anything: something reads or saves it, and it is memory made here."""
    calls = trace.calls
    if any(calls[number].saved or calls[number].inner for number in node):
        return True
    return any(source in node for call in calls for source, _ in call.reads)


def candidates(
    trace: Trace, limit: int = 8, lossy: str | None = None, offload: bool = False
) -> list[CheckpointPolicy]:
    """Policies worth measuring, "keep" first: at most ``limit`` sets of dropped calls, and compressed forms of them where
    there is something to compress; each also with floating point numbers kept as ``lossy`` if that is given, and with what is kept
    in host memory if ``offload``."""
    parts = nodes(trace)
    pool = _exhaust(trace, parts) if len(parts) <= _EXHAUSTIVE else _descend(trace, parts)
    chosen = _spread(pool, limit)
    policies = [(dropped, frozenset[int]()) for dropped in chosen]
    smallest = min(pool, key=lambda dropped: (pool[dropped].kept, pool[dropped].seconds))
    policies += [(smallest, breaks) for breaks in _breaks(trace, parts, smallest)]
    found = [KEEP]
    keep = pool[frozenset()].kept
    for dropped, breaks in policies:
        held = {
            place for number, call in enumerate(trace.calls) if number not in dropped for place in call.inner
        }
        saves = sum(trace.compressible.get(place, 0) for place in held)
        for compress in (False, True) if saves > _COMPRESSIBLE * keep else (False,):
            policy = Policy(trace.names, dropped, breaks, compress)
            if dropped or compress:
                found.append(CheckpointPolicy(_title(trace, policy), policy))
        if lossy is not None:
            policy = Policy(trace.names, dropped, breaks, saves > 0, lossy)
            found.append(CheckpointPolicy(_title(trace, policy), policy))
        if offload:
            policy = Policy(trace.names, dropped, breaks, offload=True)
            found.append(CheckpointPolicy(_title(trace, policy), policy))
    return found


def _exhaust(trace: Trace, parts: list[frozenset[int]]) -> dict[frozenset[int], Estimate]:
    pool = {}
    for chosen in itertools.product((False, True), repeat=len(parts)):
        dropped = frozenset[int]().union(*itertools.compress(parts, chosen))
        pool[dropped] = estimate(trace, dropped)
    return pool


def _descend(trace: Trace, parts: list[frozenset[int]]) -> dict[frozenset[int], Estimate]:
    """For many prices of a byte: change one node or two neighbours for as long as that makes the sum smaller. In large blocks the
    descent ends early."""
    pool: dict[frozenset[int], Estimate] = {}

    def look(dropped: frozenset[int]) -> Estimate:
        if dropped not in pool:
            pool[dropped] = estimate(trace, dropped)
        return pool[dropped]

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
                        if cost.seconds + price * cost.kept < now.seconds + price * now.kept - 1e-15:
                            current, better = changed, True
    return pool


def _spread(pool: dict[frozenset[int], Estimate], limit: int) -> list[frozenset[int]]:
    """The sets that none beats in bytes and seconds; of many, those that lie evenly along the curve."""
    order = sorted(pool, key=lambda dropped: (pool[dropped].kept, pool[dropped].seconds, len(dropped)))
    frontier: list[frozenset[int]] = []
    for dropped in order:
        if not frontier or pool[dropped].seconds < pool[frontier[-1]].seconds - 1e-12:
            frontier.append(dropped)
    if len(frontier) > limit:
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
    """How far a point lies below the straight line between the ends of the frontier."""
    first, last, here = pool[frontier[0]], pool[frontier[-1]], pool[dropped]
    share = (here.kept - first.kept) / max(last.kept - first.kept, 1)
    return first.seconds + share * (last.seconds - first.seconds) - here.seconds


def _breaks(trace: Trace, parts: list[frozenset[int]], dropped: frozenset[int]) -> list[frozenset[int]]:
    """Places where a block that keeps least is best replayed in two parts."""
    whole = estimate(trace, dropped)
    found: list[tuple[int, frozenset[int]]] = []
    for part in parts:
        if part <= dropped:
            broken = estimate(trace, dropped, part)
            if broken.working < 0.9 * whole.working:
                found.append((broken.working, part))
    found.sort(key=lambda entry: entry[0])
    return [part for _, part in found[:2]]


def _title(trace: Trace, policy: Policy) -> str:
    """``drop gelu, layer_norm``: the calls that run again, those that take time first named."""
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
    if policy.lossy is not None:
        words.append(f"keep as {policy.lossy}")
    if policy.offload:
        words.append("offload")
    return ", ".join(words)


_VIEWS = frozenset(
    {
        "view", "reshape", "permute", "transpose", "unbind", "chunk", "split", "unsqueeze", "squeeze", "expand", "contiguous",
        "__getitem__", "T.__get__", "flatten", "unflatten", "detach", "to", "type_as",
    }
)  # fmt: skip
