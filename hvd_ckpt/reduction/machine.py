"""The reduction of a step's gradients, at all stages: when they leave, what ranks tell each other, and what stands in ``p.grad``.

Gradients leave in *units* of several parameters: in buckets, whose allreduce gives each rank the result (:mod:`.reducer`, stages 0
and 1), or in groups, whose reduce-scatter gives each rank its shard (:mod:`hvd_ckpt.sharding.reducer`, stages 2 and 3). A parameter
belongs to the optimizer that was made over it last. An earlier one drops the step that it has begun, and its next ``step()`` is an
error on every rank.

**In the backward pass.** A unit is complete once each of its parameters has accumulated as often as is expected, which each rank
learns from its last steps (:mod:`.accumulation`). For a bucket this is the number in a whole step, for a group the number in a
*round* of ``backward_passes_per_step`` passes. A unit leaves when it is complete and all units before it have left, in an order
learned from rank 0. So all ranks launch the same units in the same order, with zeros for what is missing. From then on a
placeholder stands in ``p.grad`` (:mod:`.gradients` has the states). What comes after its unit has left goes to a tensor of its own.

**Rounds.** A bucket leaves once in a step. The last one leaves in ``synchronize()``; so do all in the first step, on a single rank,
and with an operation that cannot add late parts (Min, Max, Product). A group leaves once in each round, so that no rank holds whole
gradients of several rounds. In the first step the groups have the order of the parameters, and each parameter that requires a
gradient is expected once in each pass: an unused one holds back its group, and those behind it, until ``synchronize()``. A group
that no rank has had gradients of for two steps is left out until it is used again.

What comes to a group later leaves with its next round. *Late* is what comes after its bucket. A further round in
``synchronize()`` has what is left on some rank: late parts, whose results are added; what has come in place of a gradient that all
ranks have dropped in flight; and groups that were left out (:mod:`.further` makes it for buckets). Parameters without a bucket
follow at the end.

**In** :meth:`Machine.synchronize` the ranks go through these methods together:

1. ``_look_at`` finds what code has done to gradients by hand, ``_settle`` what else this rank alone knows.
2. ``_exchange_flags`` launches what all ranks launch without being told: all buckets, or as many rounds as in the last step (one in
   the first). It sums their :class:`.ControlFlags`, in the last bucket if that is float32, uncompressed and summed: for each
   parameter, whether it is used and whether a gradient came late, and some flags of the rank. The fingerprint of a part of the
   weights goes with them (:mod:`.weights`). Now all ranks know the same, and take the same way.
3. If a flag asks for it, the ranks gather reports. All raise one error, or continue together after ``_agree``.
4. ``_land`` leaves nothing in flight, puts the results in their places, and makes the further round. A rank may have launched more
   rounds than all do without being told: then a second message, a maximum, tells how many each group needs.
5. ``_check_weights`` compares the fingerprints; all raise one error if they differ.
6. ``_learn`` prepares the next step. Parameters that are used for the first time, in the first step all, get their places in the
   order of rank 0 (a sum, to which the other ranks add zeros). Of buckets, they are reduced here.

An error that all ranks raise drops the step and all gradients. What one rank alone raises in its backward pass, all raise in the
next synchronization.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from hvd_ckpt.collectives.asynchronous import Collectives
from hvd_ckpt.reduction.flags import ControlFlags, Report, check_reports
from hvd_ckpt.reduction.gradients import DROPPED, TrackedGradient
from hvd_ckpt.reduction.stats import ReductionStats, StepStats
from hvd_ckpt.reduction.stepping import SteppingOptions
from hvd_ckpt.reduction.weights import Sums, WeightVerification
from hvd_ckpt.utils import backward_errors
from hvd_ckpt.utils.fingerprint import fingerprint
from hvd_ckpt.utils.torch_private import run_first

# A parameter belongs to the optimizer that was made over it last: two that counted its gradients would both reduce them. Ranks make
# optimizers together, so they agree on the owner, whatever Python has collected where. A step that the owner before has begun is
# dropped, and its next one is an error.
_owners: Any = WeakTensorKeyDictionary()  # by parameter, a weak reference to the reducer


def owner_of(parameter: torch.Tensor) -> Any | None:
    """The distributed optimizer that a parameter belongs to, or None."""
    reducer = _reducer_of(parameter)
    return None if reducer is None else reducer.optimizer()


def _reducer_of(parameter: torch.Tensor) -> Machine | None:
    reference = _owners.get(parameter)
    return None if reference is None else reference()


@dataclass
class Facts:
    """What all ranks know of a step since they have exchanged their flags.

    Attributes:
        flags: the sums.
        used, late: the parameters that some rank has a gradient of, and those of which one came late.
        dropped: parameters whose gradients were dropped in flight, and others whose true ones were not sent.
        reports: of all ranks, if one has asked for them.
    """

    flags: ControlFlags
    used: list[int]
    late: list[int]
    dropped: set[int] = field(default_factory=set)
    reports: Sequence[Report] = ()


class Machine(ABC):
    """Base of reducers: it owns parameters, hears of their gradients, and takes the ranks through a step together.

    Each parameter has two hooks: one before a gradient is accumulated (it also runs for ``torch.autograd.grad``, which accumulates
    nothing), one after.

    Args:
        names, parameters: by index; kept, and may grow.
        watched: the indices for which :meth:`before_accumulation` is called; kept, and may change.
        ranks: the collectives of the ranks that reduce together.

    Attributes:
        active: a gradient has arrived since the last synchronization.
        last_forward: see :class:`~hvd_ckpt.utils.backward_errors.RaisesOnAll`.
        stats: what has left when.
        weights: their verification.
        notice: the next synchronization tells all ranks that one of them has something to say.
        noticed: whether any rank had a notice in the last synchronization.
        optimizer: weak reference to the optimizer, once :meth:`begin` has been called.
    """

    _identity: int
    _generation: int
    _tracked: type[TrackedGradient] = TrackedGradient  # what knows the state of each ``grad``
    _gradients: Sequence[TrackedGradient] = ()
    sums = False  # gradients become sums over the ranks, which must not be added up again

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[torch.Tensor],
        watched: Container[int],
        ranks: Collectives,
    ) -> None:
        self._ranks = ranks
        self._lock = threading.RLock()
        self._step, self._report = StepStats(), Report()
        self.weights = WeightVerification(names, parameters, ranks.process_set)
        self.active = False
        self.stats = ReductionStats()
        self.notice = self.noticed = False
        self.optimizer: Callable[[], Any] = lambda: None
        self._names, self._parameters, self._watched_indices = names, parameters, watched
        self._track()
        self._number_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._handles: dict[int, list[Any]] = {}
        self._unhooked: list[int] = []  # parameters owned here that have no hooks yet
        self._lost: str | None = None  # the first parameter that another optimizer owns now
        self._mismatch: Exception | None = None
        self.last_forward = 0
        backward_errors.register(self)

    @property
    def process_set(self) -> Any:
        """The ranks that reduce together."""
        return self._ranks.process_set

    def has_all(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether all of these are among the parameters."""
        return self._number_of.keys() >= set(map(id, parameters))

    def take_over(self, error: Exception) -> bool:
        """Raises an error of this rank's backward pass on every rank, in the next synchronization.

        Returns:
            False where no synchronization is to come, or this rank is the only one.
        """
        if not self.active or self.process_set.size() == 1:
            return False
        self._mismatch = self._mismatch or error
        return True

    def tell_all(self, error: Exception) -> None:
        """Raises an error of this rank, of any class, on the other ranks, all of which are about to synchronize. Collective."""
        if self.process_set.size() > 1:
            self._mismatch = self._mismatch or RuntimeError(f"{type(error).__name__}: {error}")
            with suppress(RuntimeError):
                self.synchronize()

    def _track(self) -> None:
        known = len(self._gradients)
        fresh = map(self._tracked, self._parameters[known:], self._names[known:])
        self._gradients = [*self._gradients, *fresh]

    def begin(self, optimizer: Any) -> None:
        """Acquires all parameters. Call it on every rank."""
        self.optimizer = weakref.ref(optimizer)
        self.weights.stepping = SteppingOptions(optimizer)
        self.acquire(range(len(self._parameters)))

    def acquire(self, indices: Iterable[int]) -> None:
        """Makes this reducer the owner of parameters that are new here; a step that their owners have begun is dropped."""
        self._track()
        before: dict[Machine, list[torch.Tensor]] = {}
        for index in indices:
            parameter = self._parameters[index]
            self._number_of[id(parameter)] = index
            owner = _reducer_of(parameter)
            if owner is not None and owner is not self:
                before.setdefault(owner, []).append(parameter)
                if owner.sums and self.sums and owner._gradients[owner._number_of[id(parameter)]].is_result:
                    self._gradients[index].begin_step(reduced=True)
            _owners[parameter] = weakref.ref(self)
            self._unhooked.append(index)
        for owner, parameters in before.items():
            owner.lose(parameters)
        self.hook_parameters()

    def lose(self, parameters: Sequence[torch.Tensor]) -> None:
        """Another optimizer owns these parameters now; a step that has begun is dropped."""
        if self.active:
            self.abandon()
        else:
            # On another rank the step may have begun; it is dropped and renamed by
            # abandon() there. Names must stay equal on all.
            self.renew_names()
        indices = sorted(self._number_of[id(parameter)] for parameter in parameters)
        for index in indices:
            for handle in self._handles.pop(index, ()):
                handle.remove()
        self._unhooked = [index for index in self._unhooked if index not in indices]
        self._lost = self._names[indices[0]]

    def check_owner(self) -> None:
        """Raises RuntimeError, the same on every rank, if another optimizer owns some of the parameters now."""
        if self._lost is not None:
            raise RuntimeError(
                f"parameter '{self._lost}' belongs to the DistributedOptimizer that was made over it last, and this is an earlier "
                f"one, which cannot reduce or step it any more; use the last one, or make another, on every rank"
            )

    def hook_parameters(self) -> None:
        """Hooks parameters owned here that have no hooks yet; PyTorch refuses frozen ones, so these wait to be unfrozen.

        Before a step, and before each unit leaves: the next gradients of its parameters must find room."""
        frozen = []
        for index in self._unhooked:
            parameter = self._parameters[index]
            if parameter.requires_grad:
                before, first, after = _hooks(weakref.ref(self), index, self._watched_indices)
                hidden = run_first(parameter, first)
                self._handles[index] = [
                    parameter.register_hook(before),  # type: ignore[no-untyped-call]
                    *(() if hidden is None else (hidden,)),
                    parameter.register_post_accumulate_grad_hook(after),  # type: ignore[no-untyped-call]
                ]
            else:
                frozen.append(index)
        self._unhooked = frozen

    @property
    def naming(self) -> tuple[int, int]:
        """Identity and generation, as :meth:`rename` has set them."""
        return self._identity, self._generation

    def rename(self, identity: int, generation: int) -> None:
        """Names this optimizer's tensors; the same on every rank."""
        self._identity, self._generation = identity, generation
        self._ranks.rename(f"hvd_ckpt.{identity}.{generation}")

    def renew_names(self) -> None:
        """Gives tensors names that were not used before, since those with the last ones may still be on their way."""
        self.rename(self._identity, self._generation + 1)

    def synchronize(self) -> None:
        """Reduces what is left of this step's gradients. Collective.

        Raises:
            ValueError, RuntimeError: what ranks have does not fit; the same on every rank.
            horovod.common.exceptions.HorovodInternalError: a rank has gone.
        """
        try:
            self._synchronize()
        except BaseException:
            self.abandon()
            raise

    def _synchronize(self) -> None:
        # Parameters that were unfrozen before this backward pass have no hooks yet. Their gradients were not
        # counted in it, and are reduced below all the same.
        self.hook_parameters()
        # Everything that this rank alone knows must be in the flags: after them the ranks take the same way, and nothing more can
        # be asked.
        self._look_at(range(len(self._gradients)))
        report = self._report
        report.wanted |= bool(report.dropped)
        self._settle()
        report.error = self._mismatch or report.error
        report.wanted |= report.error is not None
        values, scale = self._exchange_flags()
        flags = ControlFlags.of(values[: -Sums.SIZE])
        self.noticed, self.notice = flags.notice > 0, False
        used, late = ([at for at, ranks in enumerate(each) if ranks > 0] for each in (flags.used, flags.late))
        facts = Facts(flags, used, late)
        if flags.resynchronize > 0:
            facts.reports = self._ranks.objects(self._full_report(), "resynchronization")
            check_reports(facts.reports, self._names)
            facts.dropped = set(chain.from_iterable(each.dropped for each in facts.reports))
            self._agree(facts)
        self._land(facts)
        self._check_weights(facts, values, scale)
        self._learn(facts)
        self._step.late_gradients = [self._names[index] for index in late]
        self.end_step(facts)

    def _look_at(self, indices: Iterable[int]) -> None:
        """Finds out what was done by hand to gradients of this step."""
        gradients, report, is_alone = self._gradients, self._report, self.is_alone
        for index in indices:
            gradient = gradients[index]
            if not gradient.may_be_changed:
                continue
            if gradient.is_away or not is_alone:
                report.error = gradient.look() or report.error
            if gradient.state is DROPPED:
                report.dropped.add(index)

    @property
    def is_alone(self) -> bool:
        """Whether this is the only rank, where a gradient that has not left may be read and changed at any time."""
        return bool(self.process_set.size() == 1)

    def _full_report(self) -> Report:
        """The report with what is only looked up where some rank asks for it."""
        self._report.sent = [index for index, gradient in enumerate(self._gradients) if gradient.is_away]
        return self._report

    @abstractmethod
    def _settle(self) -> None:
        """Finds what else this rank alone knows, for its flags and its report."""

    @abstractmethod
    def _exchange_flags(self) -> tuple[Sequence[float], float]:
        """Launches what all ranks launch without being told; returns the sum of the ranks' flags, and what it is multiplied by."""

    @abstractmethod
    def _agree(self, facts: Facts) -> None:
        """Completes the facts from the ranks' reports, or raises the same error on every rank."""

    @abstractmethod
    def _land(self, facts: Facts) -> None:
        """Leaves nothing in flight; results are in their places."""

    def _check_weights(self, facts: Facts, values: Sequence[float], scale: float) -> None:
        self.weights.check(values, scale, self._sum)

    @abstractmethod
    def _learn(self, facts: Facts) -> None:
        """Prepares the next step."""

    def _sum(self, values: torch.Tensor, what: str) -> Any:
        self._step.control_messages += 1
        return self._ranks.sum(values, what)

    def end_step(self, facts: Facts | None = None) -> None:
        """The next step begins; with the facts of this one it expects what this one has had."""
        if facts is not None:
            self.stats.close_step(self._step)
        else:
            self.hook_parameters()  # the counts of a state that was loaded need the hooks of its first backward pass
        self._step, self._report, self._mismatch = StepStats(), Report(), None
        self.active = False

    def before_accumulation(self, index: int) -> None:
        """A gradient is about to be accumulated that must find room: a late one goes to a fresh tensor."""
        with self._lock:
            self._gradients[index].make_room()

    def hide_late(self, index: int) -> None:
        """A gradient has been accumulated, and hooks of the user follow: a late part of it must not pass for the whole."""
        with self._lock:
            self._gradients[index].arrived()

    @abstractmethod
    def after_accumulation(self, index: int) -> None:
        """A gradient of the parameter has been accumulated."""

    def any_new(self) -> bool:
        """Whether some rank has a new gradient since the last synchronization, or the ranks have changed theirs in different ways.

        Gradients that were changed in place are compared by their fingerprints. Collective: one small allreduce, from which ranks
        that have called ``join()`` may be absent.
        """
        changes = self.changes()
        facts = [
            (index, None if gradient is None else int(fingerprint(gradient)))
            for index, gradient in changes or ()
        ]
        digits = hashlib.blake2b(repr(facts).encode(), digest_size=8).digest() if facts else bytes(8)
        value = torch.tensor(int.from_bytes(digits, "little", signed=True))
        asked = torch.tensor([changes is None, self.notice], dtype=torch.float32)
        *sums, new, notices = self._ranks.sum(torch.cat([Sums.encode(value), asked]), "changes")
        if new > 0 or not Sums.equal(sums, 1.0):
            return True
        if notices > 0:  # else it travels in the control flags
            self.noticed, self.notice = True, False
        return False

    @abstractmethod
    def changes(self) -> list[tuple[int, torch.Tensor | None]] | None:
        """The gradients that were dropped (None) or changed in place since the last synchronization, by the parameters' indices.

        Returns:
            None if there is a new one, of a backward pass or set by hand
        """

    def note_changes(self) -> None:  # noqa: B027
        """All ranks have changed their reduced gradients in the same way; whole ones now count as the last synchronization's."""

    def note_limit(self, limit: float) -> None:
        """Gradients are about to be clipped; the next flags say by which norm."""
        if self.weights.stepping is not None:
            self.weights.stepping.limits.append(limit)

    def set_passes(self, passes: int) -> None:  # noqa: B027
        """Another number of backward passes in a round, from the next step on, where it is not learned. Call it on every rank."""

    def begin_clearing(self) -> None:  # noqa: B027
        """Gradients are about to be set to zero or to None."""

    @abstractmethod
    def drop_gradients(self) -> None:
        """Makes gradients, in flight or not, ones that can be cleared, such as zeros. Call it on every rank."""

    @abstractmethod
    def abandon(self) -> None:
        """Drops the step that has begun, and all gradients. Call it on every rank."""


def _hooks(
    reference: weakref.ref[Machine], index: int, watched: Container[int]
) -> tuple[Callable[[torch.Tensor], None], ...]:
    """The three hooks of a parameter: before an accumulation, and first and last after it. They hold the reducer weakly, since they
    live as long as the parameter."""

    def before(gradient: torch.Tensor) -> None:
        if index in watched:  # the usual gradient ends here
            reducer = reference()
            if reducer is not None:
                reducer.before_accumulation(index)

    def first(parameter: torch.Tensor) -> None:
        if index in watched:
            reducer = reference()
            if reducer is not None:
                reducer.hide_late(index)

    def after(parameter: torch.Tensor) -> None:
        reducer = reference()
        if reducer is not None:
            reducer.last_forward = backward_errors.last_forward()
            reducer.after_accumulation(index)

    return before, first, after
