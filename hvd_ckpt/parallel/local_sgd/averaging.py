"""The averages of one optimizer: their content, and the steps after which a fragment leaves, is added up and is applied."""

from __future__ import annotations

import dataclasses
import functools
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hvd_ckpt.collectives.asynchronous import Work
from hvd_ckpt.collectives.exchange import Exchange, Traffic
from hvd_ckpt.collectives.formats import wire_format
from hvd_ckpt.collectives.rows import RowCollectives
from hvd_ckpt.parallel.local_sgd.exchange import PeerExchange
from hvd_ckpt.parallel.local_sgd.runs import (
    AVERAGES,
    Fragment,
    FragmentState,
    Run,
    Segment,
    split_into_runs,
)
from hvd_ckpt.parallel.local_sgd.schedule import Schedule, assign_fragments, block_of
from hvd_ckpt.parallel.local_sgd.weights import WeightRun
from hvd_ckpt.reduction.consistency import WeightsDiffer
from hvd_ckpt.utils.elementwise import COUNTERS
from hvd_ckpt.utils.fingerprint import fingerprints
from hvd_ckpt.utils.states import Count, State, Weight

WEIGHTS, MOMENT = "weights.", "moment."

if TYPE_CHECKING:
    from hvd_ckpt.parallel.local_sgd.construction import LocalOptions
    from hvd_ckpt.parallel.local_sgd.optimizer import LocalOptimizer


class AveragesState(State):
    key: dict[str, Any]
    step: Count
    skipped: Count
    tokens: Weight
    weighed: bool
    worked: Count
    moments: list[str]
    fragments: list[FragmentState]


class Averaging:
    """Averages an optimizer's parameters and moments, and its model's buffers, over groups of ranks.

    Args:
        optimizer: reduces gradients within this rank's group.
        options: of :func:`hvd_ckpt.LocalSGD`; persistent buffers of the model are averaged, too, where it is known.
        groups: positions of ranks in the process set, whose gradients are reduced together; of equal size.
        prefix: prefix of tensor names, the same on every rank and unique to this optimizer.

    Attributes:
        step: calls of ``optimizer.step()`` so far.
        skipped: those that an overflow has skipped on this rank.
        tokens: what was given to ``optimizer.weigh()`` so far.
        weighed: whether anything was given, so that it is the weight of each average.
        traffic: what this rank has sent for averages.
    """

    def __init__(
        self,
        optimizer: LocalOptimizer,
        options: LocalOptions,
        groups: Sequence[Sequence[int]],
        prefix: str,
    ) -> None:
        members, schedule = options.process_set, Schedule(options.every, options.fragments, options.delay)
        self.schedule, self.traffic = schedule, Traffic()
        self.step, self.skipped, self.tokens, self.weighed = 0, 0, 0.0, False
        self._worked = self._generation = 0
        self._has_begun = False  # a period, from the anchor
        # Weakly: the optimizer holds this object.
        self._optimizer: Any = weakref.proxy(optimizer)
        self._collectives = RowCollectives(members, prefix)
        self._members, self._groups, self._prefix = members, groups, prefix
        self._averages_moments, self._outer = options.moments == "average", options.outer
        self._wire = wire_format(options.wire)
        own_group = next(group for group in groups if members.rank() in group)
        # The ranks with this rank's place in their groups: of [[0, 1], [2, 3]], rank 1 averages with rank 3.
        column = [group[own_group.index(members.rank())] for group in groups]
        everyone = range(members.size())
        shared = len(own_group) > 1 and not optimizer.shard_stage  # the group's ranks have the same values
        self._group = Exchange(optimizer.process_set, "") if shared else None
        self._column = PeerExchange(self._collectives, column, self.traffic, self._group)
        self._everyone = PeerExchange(self._collectives, everyone, self.traffic)
        self._rename()
        self.fragments = [Fragment(number) for number in range(schedule.fragments)]
        self._moment_names: list[str] = []
        names = [segment.name for segment in optimizer.segments()]
        self._fragment_of = assign_fragments(names, schedule.fragments)
        self.add_parameters(optimizer.segments())
        if options.model is not None and len(everyone) > 1:
            self._add_buffers(options.model)
        # A state without that of local SGD begins a new period with this one.
        self._at_start = self.state_dict()

    @property
    def divergence(self) -> float:
        return math.sqrt(sum(fragment.squares for fragment in self.fragments) / len(self._groups))

    @property
    def in_sync(self) -> bool:
        """Whether all ranks have the same parameters: after an average of everything, and before the first step."""
        at_its_end = self.schedule.fragments == 1 and self.step % self.schedule.every == 0
        return at_its_end and self.fragments[0].sent_at is None

    # ------------------------------------------------------------------------------------------ what is averaged

    def add_parameters(self, segments: Iterable[Segment]) -> None:
        """Adds parameters; those that are new in a run that has begun go to the last fragment."""
        placed = [
            (self._fragment_of.setdefault(segment.name, len(self.fragments) - 1), segment)
            for segment in segments
        ]
        # A single group has nothing to average. Its outer optimizer steps all the same, on what the group has
        # learned since the anchor.
        if len(self._groups) > 1 or self._outer is not None:
            make = functools.partial(WeightRun, outer=self._outer, wire=self._wire)
            self._add(WEIGHTS, placed, make, self._column)

    def _add_buffers(self, model: torch.nn.Module) -> None:
        fragment_of_block = {block_of(name): number for name, number in self._fragment_of.items()}
        placed = [
            (
                fragment_of_block.get(block_of(name), len(self.fragments) - 1),
                Segment(name, buffer, buffer, functools.partial(model.get_buffer, name)),
            )
            for name, buffer in model.named_buffers()
            if buffer.numel() and _is_persistent(model, name)
            if buffer.is_floating_point() or buffer.is_complex()
        ]
        self._add("buffers.", placed, Run, self._everyone)

    def _add_moment(self, name: str, fragment: Fragment, run: Run) -> None:
        """Adds a run of the moments of a run of parameters."""
        segments = [
            dataclasses.replace(segment, value=functools.partial(self._moment, name, segment.like))
            for segment in run.segments
        ]
        fragment.runs.append(Run(f"{MOMENT}{name}.{segments[0].name}", segments, self._column))

    def _moment(self, name: str, parameter: torch.Tensor) -> torch.Tensor | None:
        # Looked up each time: the optimizer makes its state in its first step, and has another one after loading.
        value = self._optimizer.state.get(parameter, {}).get(name)
        return value if isinstance(value, torch.Tensor) and value.shape == parameter.shape else None

    def _add(
        self,
        what: str,
        placed: Sequence[tuple[int, Segment]],
        make: Callable[..., Run],
        peers: PeerExchange,
    ) -> None:
        for fragment in self.fragments:
            of_fragment = (segment for number, segment in placed if number == fragment.number)
            for segments in split_into_runs(of_fragment):
                run = make(f"{what}{segments[0].name}", segments, peers)
                fragment.runs.append(run)
                if isinstance(run, WeightRun):
                    if self.step:  # the first one, before which begin() is called for all, is over
                        run.begin()
                    for name in self._moment_names:
                        self._add_moment(name, fragment, run)

    def _weight_runs(self) -> list[tuple[Fragment, WeightRun]]:
        runs = ((fragment, run) for fragment in self.fragments for run in fragment.runs)
        return [(fragment, run) for fragment, run in runs if isinstance(run, WeightRun)]

    def _parameters(self) -> list[Segment]:
        return [segment for _, run in self._weight_runs() for segment in run.segments]

    def _find_moments(self) -> None:
        """Agrees on the names of moments, once some rank has any. Collective."""
        names = {
            name
            for segment in self._parameters()
            for name, value in self._optimizer.state.get(segment.like, {}).items()
            if isinstance(value, torch.Tensor) and value.is_floating_point() and name not in COUNTERS
            if value.shape == segment.like.shape
        }
        everywhere = self._collectives.objects(sorted(names), "moments")
        self._set_moment_names(sorted(set().union(*everywhere)))

    def _set_moment_names(self, names: Sequence[str]) -> None:
        for name in names:
            self._moment_names.append(name)
            for fragment, run in self._weight_runs():
                self._add_moment(name, fragment, run)

    # ------------------------------------------------------------------------------------------ when

    def begin(self) -> None:
        """Before the first step: what the ranks have now is the anchor.

        Raises:
            WeightsDiffer: it differs between groups; on all ranks.
        """
        if self._has_begun or self.step:
            return
        if len(self._groups) > 1:
            self._check_anchor()
        self._has_begun = True
        for _, run in self._weight_runs():
            run.begin()

    def _check_anchor(self) -> None:
        segments = self._parameters()
        prints = torch.stack([one.cpu() for one in fingerprints([segment.like for segment in segments])])
        rows = self._collectives.allgather(prints[None], "anchor").wait(AVERAGES)
        # Ranks at one place in their groups have the same part of each parameter. All ranks compare all, and raise together.
        for first, *others in zip(*self._groups):
            for rank in others:
                if len(different := (rows[rank] != rows[first]).nonzero()):
                    raise WeightsDiffer(
                        f"LocalSGD: parameter '{segments[int(different[0])].name}' differs between ranks {first} and {rank} of its "
                        f"process set at the start of a period: load the same weights on all ranks, or the state of averages with "
                        f"each rank's own"
                    )

    @torch.no_grad()
    def advance(self, worked: bool) -> bool:
        """After a step, taken or skipped: averages are applied, added up and sent as the schedule says.

        Args:
            worked: this rank had gradients, and has used them.

        Returns:
            Whether parameters have changed.
        """
        self.begin()
        self.step += 1
        self._worked += worked
        # With delay=5, what leaves after step s is added up after step s + 3 and applied after s + 5. Applying comes before
        # leaving: with delay=every, a fragment's average ends in the step after which its next one leaves.
        under_way = [fragment for fragment in self.fragments if fragment.sent_at is not None]
        for fragment in under_way:
            if self._age(fragment) == self.schedule.half:
                for run in fragment.under_way():
                    run.combine(self._shares(fragment, run))
        arrived = [fragment for fragment in under_way if self._age(fragment) >= self.schedule.delay]
        for fragment in arrived:
            for run in fragment.under_way():
                run.apply(delayed=True)
            self._end(fragment)
        for number in self.schedule.leaving(self.step):
            fragment = self.fragments[number]
            self._leave(fragment)
            if self.schedule.delay:
                for run in fragment.runs:
                    fragment.moved += run.send()
                self._send_distances(fragment)
            else:
                self._average(fragment)
                arrived.append(fragment)
        return bool(arrived)

    def _age(self, fragment: Fragment) -> int:
        assert fragment.sent_at is not None
        return self.step - fragment.sent_at

    def _average(self, fragment: Fragment) -> None:
        """An average without delay: two runs are under way at a time, one on its way to be added up, one being gathered."""
        # Of three runs, in time from left to right:
        #
        #   send      0  1  2
        #   combine      0  1  2
        #   apply           0  1  2
        #
        # So two are under way at a time, whatever the size of the model.
        runs = fragment.runs
        for place in range(len(runs) + 2):
            if place >= 2:
                runs[place - 2].apply(delayed=False)
            if 1 <= place <= len(runs):
                runs[place - 1].combine(self._shares(fragment, runs[place - 1]))
            if place < len(runs):
                fragment.moved += runs[place].send()
        self._send_distances(fragment)
        self._end(fragment)

    def _leave(self, fragment: Fragment) -> None:
        """Begins an average: what this rank counts for leaves."""
        # The wrapped optimizer makes its moments in its first step, so that their names are not known earlier.
        if self._averages_moments and not self._moment_names and len(self._groups) > 1:
            self._find_moments()
        steps, tokens = fragment.marks
        # What was given to weigh() since the last average; without it, the steps that have used gradients.
        fragment.weight = self.tokens - tokens if self.weighed else float(self._worked - steps)
        fragment.marks = (self._worked, self.tokens)
        fragment.sent_at, fragment.moved = self.step, 0.0
        self._send_weights(fragment)

    def _send_weights(self, fragment: Fragment) -> None:
        fragment.weights = self._numbers(f"{fragment.number}.weights", fragment.weight)

    def _send_distances(self, fragment: Fragment) -> None:
        fragment.distances = self._numbers(f"{fragment.number}.distances", fragment.moved)

    def _numbers(self, what: str, own: float) -> Work:
        """Begins to gather a number [1] of each rank; 8 bytes."""
        value, ranks = torch.tensor([own], dtype=torch.float64), self._members.size()
        if ranks == 1:
            return Work((), lambda _: value)
        self.traffic.count("control", (ranks - 1) * value.nbytes)
        return self._collectives.allgather(value, what)

    def _shares(self, fragment: Fragment, run: Run) -> list[float]:
        assert fragment.weights is not None
        weights: list[float] = fragment.weights.wait(AVERAGES).tolist()
        # A group's ranks have stepped together, so it counts for all of them. Buffers are averaged among ranks, one by one.
        of_groups = [sum(weights[rank] for rank in group) for group in self._groups]
        return _parts_of_one(weights if run.peers is self._everyone else of_groups)

    def _end(self, fragment: Fragment) -> None:
        assert fragment.distances is not None
        fragment.squares = float(fragment.distances.wait(AVERAGES).sum())
        # Also where no run has asked for them: the next average sends under the same name, which must be free.
        if fragment.weights is not None:
            fragment.weights.wait(AVERAGES)
        fragment.sent_at = fragment.weights = fragment.distances = None

    @torch.no_grad()
    def take_means(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Makes parameters and float buffers the mean of all ranks', each counted the same. Collective.

        Returns:
            Each of this rank's tensors that may have changed, and a copy of it from before.
        """
        kept = []
        for run in (run for fragment in self.fragments for run in fragment.runs):
            if run.name.startswith(MOMENT) or self.in_sync or run.peers.ranks == 1:
                continue
            values = [value for segment in run.segments if (value := segment.read()) is not None]
            kept += [(value, value.clone()) for value in values]
            mean = Run(f"means.{run.name}", run.segments, run.peers)
            mean.send()
            mean.combine(_parts_of_one([1.0] * run.peers.ranks))
            mean.apply(False)
        return kept

    # ------------------------------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """This rank's part: plain data and tensors."""
        return {
            "key": self._key(),
            "step": self.step,
            "skipped": self.skipped,
            "tokens": self.tokens,
            "weighed": self.weighed,
            "worked": self._worked,
            "moments": list(self._moment_names),
            "fragments": [fragment.state_dict() for fragment in self.fragments],
        }

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError if a state is not valid, or not one of this rank."""
        AveragesState.check(state, "the state of local SGD")
        found = {**state["key"], "fragments": len(state["fragments"])}
        for what, ours in self._key().items():
            if ours != (theirs := found.get(what)):
                raise ValueError(
                    f"the state of local SGD is one with {what}={theirs}, and this rank has {what}={ours}; at the end of a period, "
                    f"take 'local_sgd' out of the state to begin a new one"
                )
        for fragment, saved in zip(self.fragments, state["fragments"]):
            ours = sorted(run.name for run in fragment.runs if not run.name.startswith(MOMENT))
            theirs = sorted(name for name in saved["runs"] if not name.startswith(MOMENT))
            if ours != theirs:
                raise ValueError(
                    f"the state of local SGD is one of {', '.join(theirs)}, and this optimizer has {', '.join(ours)}; build the "
                    f"same model and parameter groups"
                )
            for name, run in saved["runs"].items():
                begun = state["step"] and name.startswith(WEIGHTS)
                if begun and (run.get("anchor") is None or run.get("exact") is None):
                    raise ValueError(f"the state of local SGD has no anchor of '{name}'")

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Loads a state of this rank's, which :meth:`check` has passed; with None a new period begins. On every rank."""
        for fragment in self.fragments:
            fragment.abandon()
        # What was under way may still arrive, so what is sent again has new names.
        self._generation += 1
        self._rename()
        if state is None:
            state = self._at_start
        self._has_begun = False
        self.step, self.skipped = state["step"], state["skipped"]
        self.tokens, self._worked = state["tokens"], state["worked"]
        self.weighed = state["weighed"]
        self._set_moment_names([name for name in state["moments"] if name not in self._moment_names])
        for fragment, saved in zip(self.fragments, state["fragments"]):
            sent_at = saved["sent_at"]
            combined = sent_at is not None and self.step - sent_at >= self.schedule.half
            fragment.load_state_dict(saved, combined)
            if sent_at is not None:
                if not combined:
                    self._send_weights(fragment)
                self._send_distances(fragment)

    def _key(self) -> dict[str, Any]:
        return {
            "every": self.schedule.every,
            "fragments": self.schedule.fragments,
            "delay": self.schedule.delay,
            "wire": self._wire.name,
            "groups": [list(group) for group in self._groups],
            "rank": self._members.rank(),
        }

    def _rename(self) -> None:
        prefix = f"{self._prefix}.{self._generation}"
        self._collectives.rename(prefix)
        if self._group is not None:
            self._group.rename(f"{prefix}.group")


def _parts_of_one(weights: Sequence[float]) -> list[float]:
    total = sum(weights)
    # Where no rank has worked, the sum is zero, and all count the same.
    return [weight / total if total else 1.0 / len(weights) for weight in weights]


def _is_persistent(model: torch.nn.Module, name: str) -> bool:
    module, _, last = name.rpartition(".")
    return last not in model.get_submodule(module)._non_persistent_buffers_set
