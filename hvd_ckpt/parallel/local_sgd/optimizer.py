"""The optimizer of local SGD: the wrapped one, or a ``DistributedOptimizer`` of a group of ranks, with averages after its steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch

from hvd_ckpt.collectives.agreement import agree_on_options, errors_on_all, in_order
from hvd_ckpt.collectives.asynchronous import Collectives
from hvd_ckpt.collectives.exchange import Traffic
from hvd_ckpt.collectives.process_sets import release
from hvd_ckpt.parallel.local_sgd.averaging import Averaging
from hvd_ckpt.parallel.local_sgd.runs import Segment
from hvd_ckpt.reduction.optimizer import ReducedOptimizer
from hvd_ckpt.reduction.phases import StepReduces
from hvd_ckpt.sharding.construction import start_alike

STATE = "local_sgd"

if TYPE_CHECKING:
    _Base = ReducedOptimizer
else:
    _Base = object


class LocalOptimizer(_Base):
    """Mixin that :func:`hvd_ckpt.LocalSGD` adds to the class of a ``DistributedOptimizer``; use it for ``isinstance`` only."""

    averaging: Averaging | None = None  # as it stays on ranks that are not in the process set
    members: Any
    added_sets: Sequence[tuple[int, ...]] = ()  # whose process sets close() releases
    worked = _stepped = False  # the last step has used gradients of this rank
    can_join = outlasts_ranks = False
    is_local = True
    has_averaged = False  # in the last step, on all ranks alike
    before_change: Callable[[], None] | None = None  # called before each change by averages

    # -------------------------------------------------------------------------------- what can be asked

    @property
    def divergence(self) -> float:
        """Distance of ranks (groups) to the anchor in the last averages: the root of their mean squared distance.

        It is computed over all parameters, and the same on every rank. In each average, a rank sends 8 bytes for it.
        """
        return self.averaging.divergence if self.averaging is not None else 0.0

    @property
    def skipped_steps(self) -> int:
        """Steps that this rank (or its group) has skipped because of an overflow, since the start."""
        return self.averaging.skipped if self.averaging is not None else 0

    @property
    def traffic(self) -> Traffic:
        """Bytes that this rank has sent for averages, by kind. Reductions and gathers within its group are not counted."""
        return self.averaging.traffic if self.averaging is not None else Traffic()

    def weigh(self, amount: float) -> None:
        """Adds to the weight of this rank in the next average, such as the tokens of a batch. Without a call, the weight counts
        steps; after one, it is what was given since the last average, which may be 0.

        Raises:
            ValueError: the number is negative or not finite.
        """
        if not 0 <= amount < float("inf"):
            raise ValueError(f"weigh() takes a finite number of at least 0, not {amount!r}")
        if self.averaging is not None:
            self.averaging.tokens += float(amount)
            self.averaging.weighed = True

    def begin_group_mean(self, number: float) -> Callable[[], float]:
        """Begins the mean of one number of each rank of this rank's group, and returns a function that waits for it. Call that
        function before the next one begins.
        """
        members = self.process_set
        numbers = torch.tensor([number], dtype=torch.float64)
        work = Collectives(members, "hvd_ckpt.local").allreduce(numbers, "mean")
        return lambda: float(work.wait().item()) / members.size()

    @property
    def in_sync(self) -> bool:
        """Whether all ranks have the same parameters: at the end of a period, with one fragment and no delay."""
        return self.averaging is None or self.averaging.in_sync

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """A context in which parameters and floating-point buffers are the mean over all ranks, to evaluate or save them.
        Collective.

        Each rank (group) has equal weight. The parameters are sent once more, unchanged (``traffic`` counts them); nothing is sent
        if all ranks have the same. Afterwards each rank has its own values again, bit for bit; a copy is kept until then. In this
        context ``step()``, ``load_state_dict()`` and the saving of a snapshot are errors.
        """
        if self.before_change is not None:
            self.before_change()
        if self.shard_stage:
            self.sharding.follow_model()  # type: ignore[attr-defined]
        kept = [] if self.averaging is None else self.averaging.take_means()
        self._share_pieces(bool(kept))
        try:
            with self.with_other_weights("LocalSGD.averaged()"):
                yield
        finally:
            with torch.no_grad():
                for tensor, before in kept:
                    tensor.copy_(before)
            self._share_pieces(bool(kept))

    # -------------------------------------------------------------------------------- steps

    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Takes a step of the wrapped optimizer on this rank's gradients (its group's), then averages that are due.

        Every rank must call it equally often. A rank that has run out of data calls it without gradients. Such a step changes
        nothing and has weight 0 in the average. Collective.
        """
        self.check_own_weights("step()")
        self.worked = False
        found_inf = getattr(self, "found_inf", None)  # a GradScaler's, for an optimizer that skips by itself
        if self.averaging is not None:
            self.averaging.begin()
        result = super().step(closure, *args, **kwargs)
        self._stepped = True
        self._advance(skipped=found_inf is not None and bool(found_inf))
        return result

    @contextmanager
    def without_reduction(self) -> Iterator[None]:
        """A context in which ``step()`` does not reduce. A step that was not taken counts as skipped."""
        self.check_own_weights("step()")
        self._stepped = False
        with super().without_reduction():
            yield
        if not self._stepped:
            self.worked = False
            self._advance(skipped=True)

    def _advance(self, skipped: bool) -> None:
        if self.averaging is not None:
            if self.before_change is not None:
                self.before_change()
            self.averaging.skipped += skipped
            self.has_averaged = self.averaging.advance(self.worked and not skipped)
            self._share_pieces(self.has_averaged)

    def _share_pieces(self, changed: bool) -> None:
        if changed and self.shard_stage:
            self.sharding.shards_changed()  # type: ignore[attr-defined]

    # -------------------------------------------------------------------------------- parameters and state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, whose parameters become rank 0's. They are averaged with the last fragment. Call it on every rank."""
        if self.averaging is None:
            super().add_param_group(param_group)
            return
        self.check_own_weights("add_param_group()")
        given = param_group["params"]
        whole = [given] if isinstance(given, torch.Tensor) else list(given)
        named = [given if isinstance(given, tuple) else ("", given) for given in whole]
        start_alike(in_order(named, self.known_names), None, self.members, "hvd_ckpt.local.added")
        known = {id(segment.owner) for segment in self.segments()}
        super().add_param_group({**param_group, "params": whole})
        self.averaging.add_parameters(
            segment for segment in self.segments() if id(segment.owner) not in known
        )

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: that of the wrapped optimizer, and the state of averages under ``"local_sgd"``.

        The latter has the anchor, the outer state, the place in the period and the averages under way, which are sent again after
        a resume. Each rank has its own state, since it has its own weights between averages.
        """
        state: dict[str, Any] = super().state_dict()
        if self.averaging is not None:
            state[STATE] = self.averaging.state_dict()
        return state

    def full_state_dict(self, all_ranks: bool = False) -> dict[str, Any] | None:
        """The wrapped optimizer's state on rank 0, without that of local SGD. Any number of ranks can start from it."""
        state = super().full_state_dict(all_ranks)
        if state is not None:
            state.pop(STATE, None)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads this rank's state, or one without ``"local_sgd"``, with which a new period begins. Collective.

        Load the model's weights of the same rank and step, too.

        Raises:
            ValueError: the state is of another rank, step, number of ranks or schedule; raised on every rank.
        """
        self.check_own_weights("load_state_dict()")
        local = state_dict.get(STATE)
        if self.averaging is not None:
            call = "load_state_dict() of LocalSGD"
            with errors_on_all(call, self.members):
                if local is not None:
                    self.averaging.check(local)
            step = None if local is None else local["step"]
            agree_on_options(call, {"step of the state": step}, None, process_set=self.members)
        super().load_state_dict({name: value for name, value in state_dict.items() if name != STATE})
        self.load_averages(local)

    def load_averages(self, state: Mapping[str, Any] | None) -> None:
        """Loads this rank's state under ``"local_sgd"``; with None a new period begins. Call it on every rank."""
        if self.averaging is not None:
            self.averaging.load_state_dict(state)

    def close(self) -> None:
        """Removes the process sets that were added for ``within``, unless another optimizer uses them. Collective.

        The optimizer cannot be used afterwards.
        """
        release(self.added_sets)
        self.added_sets = ()

    def segments(self) -> list[Segment]:
        """This rank's part of each parameter, in an order that is the same on all ranks."""
        if not self.shard_stage:
            return [Segment(name, parameter, parameter) for parameter, name in self.parameter_names.items()]
        sharding = self.sharding  # type: ignore[attr-defined]
        pieces = {piece.index: piece.parameter for piece in sharding.pieces}
        segments = []
        stepped = set(itertools.chain.from_iterable(sharding.groups))
        for owner in filter(stepped.__contains__, self.parameter_names):
            index = sharding.layout.index(owner)
            # A rank without elements of a parameter has an empty segment of it, so that all ranks have the
            # same segments and runs.
            piece = pieces.get(index, torch.empty(0, dtype=owner.dtype, device=owner.device))
            segments.append(Segment(sharding.layout.names[index], owner, piece))
        return segments

    def _get_supports_amp_scaling(self) -> bool:
        # torch's own scaler skips a step without a word to the optimizer, and so to the other ranks.
        if self._step_reduces is not StepReduces.NOT_FOR_SCALER:
            raise RuntimeError(
                "torch.amp.GradScaler.step(optimizer) was called with an optimizer of LocalSGD, which must hear of a skipped step; "
                "use hvd_ckpt.GradScaler"
            )
        return self._wrapped_supports_amp_scaling

    _step_supports_amp_scaling = property(
        _get_supports_amp_scaling, ReducedOptimizer._set_supports_amp_scaling
    )

    # The wrapped class's step() runs the step hooks already, as in ReducedOptimizer.
    step.hooked = True  # type: ignore[attr-defined]


def add_averages(distributed: ReducedOptimizer, members: Any) -> LocalOptimizer:
    """The same object, of a class that averages, too, over the ranks of a process set."""
    kind = type(distributed)
    new: Any = distributed
    # By a hook, which sees the gradients: a sharded optimizer has dropped them when its step returns.
    new.register_step_post_hook(_note_work)
    # The same object, since its reducer, its shards and the hooks of its parameters refer to it.
    new.__class__ = type(
        kind.__name__, (LocalOptimizer, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__}
    )
    new.members = members
    return cast(LocalOptimizer, new)


def _note_work(optimizer: Any, args: Any, kwargs: Any) -> None:
    """A hook after the wrapped optimizer's step: whether it had gradients."""
    optimizer.worked = any(
        parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"]
    )
