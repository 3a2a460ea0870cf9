"""The distributed optimizer: Horovod's interface, with this library's :mod:`.reducer` in place of its hooks.

A step is a cycle of :class:`Phase`::

    ACCUMULATING -- synchronize() --> SYNCHRONIZED -- step() --> STEPPED -- synchronize(), step() ...
                 -- clip_grad_norm_, GradScaler --> REDUCED -- step(), or a step that is skipped --> STEPPED

Only collective calls change between reduced and not reduced, so all ranks are in the same phase. A backward pass or the user's
code may change gradients on one rank. If gradients are reduced already, the ranks exchange whether any of them has new ones
(:meth:`.Machine.any_new`), so a gradient that was not reduced never reaches a step. If the caller declares that
everything is reduced, there is no exchange, and such a gradient is an error.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt

from hvd_ckpt.collectives.agreement import in_order
from hvd_ckpt.reduction import phases
from hvd_ckpt.reduction.communicator import mean_over_ranks
from hvd_ckpt.reduction.phases import Phase, StepReduces
from hvd_ckpt.reduction.stats import ReductionStats
from hvd_ckpt.utils.unmaterialized import copied_state

if TYPE_CHECKING:
    from hvd_ckpt.reduction.reducer import Reducer

DEFAULT_BUCKET_CAP_MB = 25.0


class ReducedOptimizer(torch.optim.Optimizer):
    """Methods that :func:`wrapping` puts before those of the wrapped optimizer's class, so that ``super()`` is that class."""

    wrapped_class: type[torch.optim.Optimizer]
    reducer: Reducer | None
    parameter_names: dict[torch.Tensor, str]
    known_names: Any
    identity: int  # of tensor names; the same on every rank
    process_set: Any
    _phase = Phase.ACCUMULATING
    _step_reduces = StepReduces.YES
    _keeps_zeros = False  # the last zero_grad() has set gradients to zero
    # In a resumed run until its first zero_grad(), or step: parameters with a gradient when the run was saved, and its sparse
    # dimensions, or 0. A step without it was cleared otherwise: ``model.zero_grad()`` leaves nothing that the next one would find.
    _had_gradients: Mapping[torch.Tensor, int] = MappingProxyType({})
    _wrapped_supports_amp_scaling: bool
    notice = noticed = False  # in place of a reducer's
    backward_passes_per_step: int
    replicas: Any = None
    _context = ""  # in which the model has other weights for a while
    keep_groups: Callable[[torch.optim.Optimizer], None]
    can_join = True  # allreduces alone, in which ranks without data may be absent
    outlasts_ranks = True  # of an elastic job
    reduces_updates = (
        False  # with op=Adasum, which combines the ranks' updates and does not change ``p.grad``
    )
    # Gradients differ between ranks: only this one finds an inf or nan in its own.
    finds_overflow_alone = False
    is_local = False  # ranks have weights of their own, between which there are averages

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        """The names under the name that Horovod's optimizer has them by, which scripts read."""
        return self.parameter_names

    # -------------------------------------------------------------------------------- Horovod's public methods

    def synchronize(self) -> None:
        """Reduces this step's gradients over all ranks; afterwards ``p.grad`` holds the result everywhere.

        ``step()`` calls it as well. Call it yourself to change the reduced gradients, for example to clip them, before ``step()``
        within :meth:`skip_synchronize`. A second call reduces again only if a rank has new gradients, or gradients that differ
        from those of the others. Collective.
        """
        self._reduce()

    def _reduce(self) -> bool:
        """Reduces, unless no rank has anything new since the last time; returns whether it did."""
        reducer, reduces = self.reducer, False
        if reducer is None:
            self._take_note()
        else:
            reducer.check_owner()
            self._look_for_replaced(reducer)
            if reduces := not self._phase.is_reduced or reducer.any_new():
                reducer.synchronize()
        self._phase, self._had_gradients = Phase.SYNCHRONIZED, {}
        return reduces

    def _look_for_replaced(self, reducer: Reducer) -> None:
        """Raises an error, on every rank, if a parameter was put into a group by hand: nobody would reduce its gradient."""
        groups = [group["params"] for group in self.param_groups]
        if reducer.has_all(chain.from_iterable(groups)):
            return
        error = phases.put_in(groups, lambda one: reducer.has_all([one]) or not one.requires_grad)
        # Other ranks may have no such parameter, and would wait.
        if error is not None and not reducer.take_over(error):
            raise error

    def _take_note(self) -> None:
        """Passes the notice on where there is no reducer."""
        if self.notice or not self._phase.is_reduced:
            self.noticed, self.notice = self.notice, False

    @property
    def has_unreduced(self) -> bool:
        return self.reducer is not None and self.reducer.active

    def check_reduced(self) -> None:
        """Raises RuntimeError if a step that does not reduce would use a gradient that was not reduced."""
        if self.has_unreduced:
            raise RuntimeError(phases.UNREDUCED)

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """A context in which ``step()`` does not reduce, because ``synchronize()`` already has."""
        with self._stepping(StepReduces.NOT_IN_SKIP):
            yield

    @contextmanager
    def _stepping(self, reduces: StepReduces) -> Iterator[None]:
        before, self._step_reduces = self._step_reduces, reduces
        try:
            yield
        finally:
            self._step_reduces = before

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Sets the number of backward passes that each rank adds up before a reduction (stages 2 and 3), from the next step on.

        At stages 0 and 1 the number is learned.
        """
        if passes <= 0:
            raise ValueError(f"backward_passes_per_step must be > 0, not {passes}")
        self.backward_passes_per_step = passes
        if self.reducer is not None:
            self.reducer.set_passes(passes)

    # -------------------------------------------------------------------------------- torch.optim.Optimizer

    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Reduces the gradients, unless that is done, and takes a step of the wrapped optimizer.

        Args:
            closure: computes the loss and its gradients. Each call is followed by a reduction. Gradients that exist before it (SAM
                takes its first step on them) are reduced, too. If the closure returns a real number or a tensor with one, on every
                rank, it is averaged over the ranks. So an optimizer that calls it often (LBFGS) does so equally often on every
                rank. Any other value is returned unchanged.

        Raises:
            RuntimeError: within :meth:`skip_synchronize`, a backward pass has added to gradients since ``synchronize()``.
        """
        self.check_own_weights("step()")
        self.keep_groups(self)  # somebody may have assigned others
        reducer = self.reducer
        if reducer is None:
            self._take_note()
            self._phase = Phase.STEPPED
            result = self._local_step(closure, *args, **kwargs)
            self._had_gradients = {}
            return result
        reducer.check_owner()
        if closure is not None:
            # The first is the same on every rank. So either all ranks ask each other, which the second does by a message, or none.
            if self._step_reduces is StepReduces.YES and (self._phase.is_reduced or reducer.any_new()):
                self.synchronize()
            closure = self._reduced_closure(reducer, closure)
        elif self._step_reduces is StepReduces.YES:
            # Horovod warns of each step() that follows the user's synchronize(). Here only those are warned
            # of that have had nothing left to reduce.
            by_user, reduced_before = self._phase is Phase.SYNCHRONIZED, reducer.stats.steps
            self.synchronize()
            if by_user and reducer.stats.steps == reduced_before:
                warnings.warn(phases.REDUCED_BEFORE, stacklevel=2)
        else:
            self.check_reduced()
            # A step in skip_synchronize() on gradients that were never reduced is the rank's own:
            # its weights differ on purpose from then on.
            reducer.weights.alone |= (
                self._step_reduces is StepReduces.NOT_IN_SKIP and not self._phase.is_reduced
            )
        # Before the wrapped step: one that raises may have changed weights already, so these gradients are used.
        self._phase = Phase.STEPPED
        result = self._local_step(closure, *args, **kwargs)
        if reducer.sums:  # which remain sums, whatever the wrapped class has made of them in place
            reducer.note_changes()
        return result

    def _local_step(self, closure: Callable[[], Any] | None, *args: Any, **kwargs: Any) -> Any:
        if closure is None and not args and not kwargs:
            return super().step()
        return super().step(closure, *args, **kwargs)

    def _reduced_closure(self, reducer: Reducer, closure: Callable[[], Any]) -> Callable[[], Any]:
        def reduced() -> Any:
            try:
                result = closure()
            except (HorovodInternalError, HostsUpdatedInterrupt):
                raise
            except Exception as error:
                if self._step_reduces is StepReduces.YES:  # the other ranks wait for its gradients
                    reducer.tell_all(error)
                raise
            if self._step_reduces is StepReduces.YES:
                self.synchronize()
            else:
                self.check_reduced()
            # Used from here on: the wrapped optimizer steps on them before it calls this again, if it does.
            self._phase = Phase.STEPPED
            return mean_over_ranks(result, f"hvd_ckpt.{self.identity}.loss", self.process_set)

        return reduced

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clears the gradients of all parameters, as the wrapped optimizer's ``zero_grad`` does with these arguments.

        Raises:
            AssertionError: gradients have arrived since the last ``step()`` or ``synchronize()`` (as in Horovod).
        """
        if self.reducer is not None:
            if self._phase is Phase.LOADED:
                self.reducer.drop_gradients()
                self._phase = Phase.ACCUMULATING
            elif self.has_unreduced:
                raise AssertionError(phases.CLEARED_UNREDUCED)
            # Parameters that were unfrozen since the last step get their hooks before the next backward pass begins.
            self.reducer.hook_parameters()
            self.reducer.begin_clearing()
        self._clear(*args, **kwargs)

    def _clear(self, *args: Any, **kwargs: Any) -> None:
        # Of a resumed run: clearing sets what it finds to zero or drops it, as in a run that was not interrupted.
        for parameter, sparse_dim in self._had_gradients.items():
            if parameter.grad is None:
                self._set_zero(parameter, sparse_dim)
        self._had_gradients = {}
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        used = next((parameter for parameter in parameters if parameter.grad is not None), None)
        super().zero_grad(*args, **kwargs)
        # Whether zeros were set or gradients dropped shows in one that was there.
        if used is not None:
            self._keeps_zeros = used.grad is not None

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Loads a state of this optimizer, of the wrapped optimizer, or of stock Horovod's optimizer around it.

        Gradients do not change. Those of a step that has begun may be dropped by ``zero_grad()`` afterwards. ``param_groups``
        stay the list of the wrapped optimizer, with the same dicts, so that schedules made for either reach this one.
        """
        self.check_own_weights("load_state_dict()")
        self.keep_groups(self)
        result: Any = super().load_state_dict(*args, **kwargs)
        self.keep_groups(self)  # some classes load without the hooks of torch.optim.Optimizer
        self.note_state_loaded()
        return result

    def share_state(self, wrapped: torch.optim.Optimizer, loaded: bool) -> None:
        """Gives this optimizer and the wrapped one the same ``state``: that of the wrapped one, if it has ``loaded`` it."""
        if loaded:
            self.state = wrapped.state
        else:
            wrapped.state = self.state

    def note_state_loaded(self) -> None:
        if not self._phase.is_reduced:
            self._phase = Phase.LOADED  # where it is on some ranks only, they all still take the same way

    def drop_gradients(self) -> None:
        self._phase, self._step_reduces = Phase.ACCUMULATING, StepReduces.YES
        self._had_gradients = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, whose parameters are reduced from the next step on. Call it on every rank."""
        self.check_own_weights("add_param_group()")
        super().add_param_group(param_group)
        group, named = len(self.param_groups) - 1, []
        for position, parameter in enumerate(self.param_groups[-1]["params"]):
            name = self.known_names.get(parameter, f"allreduce.noname.{group}.{position}")
            named.append((name, parameter))
        named = in_order(named, self.known_names)
        self.parameter_names.update((parameter, name) for name, parameter in named)
        if self.reducer is not None:
            self.reducer.add_parameters(named)

    # -------------------------------------------------------------------------------- beyond Horovod

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Raises TypeError: a copy would share this optimizer's collectives, and reduce nothing by itself."""
        raise TypeError(
            "a DistributedOptimizer cannot be copied; copy the model and optimizer.state_dict(), and make another "
            "DistributedOptimizer of the copy on every rank"
        )

    def local_replicas(self) -> Iterator[Any]:
        """The logical replicas of one step that this rank computes, each within ``with replica:`` (see ``replicas``).

        Raises:
            RuntimeError: the optimizer was made without ``replicas``, or a replica was not computed.
        """
        if self.replicas is None:
            raise RuntimeError("this optimizer has no replicas; pass replicas=... to DistributedOptimizer")
        return iter(self.replicas.local())

    @property
    def shard_stage(self) -> int:
        """The stage of sharding: 0, since nothing is split over the ranks."""
        return 0

    @property
    def is_offloaded(self) -> bool:
        """Whether some state is kept in files or host memory."""
        return False

    @contextmanager
    def gathered_parameters(self) -> Iterator[None]:
        """A context in which every parameter is whole; without sharding this is always so."""
        yield

    def unshard(self) -> None:
        """Does nothing: the model's parameters are whole already."""

    def full_state_dict(self, all_ranks: bool = False) -> dict[str, Any] | None:
        """``state_dict()`` on rank 0 or on all ranks, and None on the others, as for a sharded optimizer.

        That of a model in parts (:func:`hvd_ckpt.tensor_parallel`) is whole, on part 0 or on all, and the call is collective.
        """
        if not (all_ranks or self.process_set.rank() == 0):
            return None
        from hvd_ckpt.processes import whole_model

        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        return whole_model.optimizer_state(self.state_dict(), parameters, all_ranks)

    def full_model_state_dict(self, model: torch.nn.Module, all_ranks: bool = False) -> dict[str, Any] | None:
        """A copy of ``model.state_dict()`` in CPU memory, on rank 0 or on all ranks, and None on the others.

        That of a model in parts (:func:`hvd_ckpt.tensor_parallel`) is whole, on part 0 or on all, and the call is collective.
        """
        if not (all_ranks or self.process_set.rank() == 0):
            return None
        from hvd_ckpt.processes import whole_model

        return whole_model.state(copied_state(model), model, all_ranks)

    @contextmanager
    def with_other_weights(self, context: str) -> Iterator[None]:
        """A context (of that name in messages) after which the model has the weights from before, so that what would change them is
        refused.
        """
        before, self._context = self._context, context
        try:
            yield
        finally:
            self._context = before

    def check_own_weights(self, call: str) -> None:
        """Raises RuntimeError within :meth:`with_other_weights`, after which nothing would be left of what ``call`` does."""
        if self._context:
            raise RuntimeError(
                f"{call} was called within {self._context}, where the model has other weights for a while, and what it does "
                "would be lost or mixed with these; call it after that context"
            )

    @property
    def reduction_stats(self) -> ReductionStats:
        """Launches per bucket, launches during the backward pass, late gradients: since the start and in the last step."""
        return self.reducer.stats if self.reducer is not None else ReductionStats()

    def notify(self) -> None:
        """Sets a flag that the next :meth:`synchronize` sends to every rank at no cost: see :attr:`notified`.

        With it, ranks need a collective only after an event on one of them, such as a signal or a loss that is nan.
        """
        told = self if self.reducer is None else self.reducer
        told.notice = True

    @property
    def notified(self) -> bool:
        """Whether any rank called :meth:`notify` before the last :meth:`synchronize`; the same on every rank."""
        return self.noticed if self.reducer is None else self.reducer.noticed

    def reduction_state_dict(self) -> dict[str, Any]:
        """Order, layout and learned counts of the reducer, as plain data. Each rank has its own counts.

        It is separate from :meth:`state_dict`, which is that of the wrapped optimizer and thus loads everywhere.
        """
        state = self.reducer.state_dict() if self.reducer is not None else {}
        gradients = {}
        for parameter, name in self.parameter_names.items():
            if (own := parameter.grad) is not None:
                gradients[name] = own.sparse_dim() if own.is_sparse else 0
            elif parameter in self._had_gradients:
                gradients[name] = self._had_gradients[parameter]
        state["gradients"], state["zeros"] = list(gradients), self._keeps_zeros
        state["sparse_gradients"] = {name: sparse_dim for name, sparse_dim in gradients.items() if sparse_dim}
        return state

    def load_reduction_state_dict(self, state: dict[str, Any]) -> None:
        """Loads a state that this rank has saved, so that training resumes bit for bit. Drops all gradients. Call it on every
        rank.

        Gradients are then zeros if the last ``zero_grad()`` has set some to zero, else None. The next ``zero_grad()`` finds those
        that there were.

        Raises:
            ValueError: the state does not belong to this model.
        """
        from hvd_ckpt.reduction.state import GradientsState, parts_of

        own, learned = parts_of(state)
        GradientsState.check(own, "reduction state")
        had, self._keeps_zeros = set(own.get("gradients", ())), own.get("zeros", False)
        sparse_dims = own.get("sparse_gradients", {})
        if self.reducer is not None and learned:
            self.reducer.load_state_dict(learned)
            self.drop_gradients()
        self._had_gradients = {
            parameter: sparse_dims.get(name, 0)
            for parameter, name in self.parameter_names.items()
            if name in had
        }
        if self._keeps_zeros:
            for parameter, sparse_dim in self._had_gradients.items():
                self._set_zero(parameter, sparse_dim)

    def _set_zero(self, parameter: torch.Tensor, sparse_dim: int) -> None:
        """Gives a parameter a gradient of zeros, sparse where it was: a backward pass adds to either in another order."""
        zeros = torch.zeros_like(parameter)
        parameter.grad = zeros.to_sparse(sparse_dim) if sparse_dim else zeros

    @contextmanager
    def unscaling(self) -> Iterator[None]:
        """A context in which ``param_groups`` hold the parameters whose gradients a scaler divides; here these are all parameters.

        All ranks divide them in the same way.
        """
        yield
        self.note_changes()

    def reduce_for_caller(self) -> None:
        """Reduces this step's gradients for a caller that changes them before a plain ``step()``, or within this library.

        If they are reduced already, one small allreduce finds whether any rank has had new gradients since. Within
        :meth:`skip_synchronize` there is no such allreduce, and a gradient of a later backward pass is an error.
        """
        if self._phase.is_reduced and self._step_reduces is not StepReduces.YES:
            self.check_reduced()
        else:
            self.synchronize()
            self._phase = Phase.REDUCED

    def note_changes(self) -> None:
        """Declares that all ranks have changed their reduced gradients in the same way, so that they are not reduced again."""
        if self.reducer is not None:
            self.reducer.note_changes()

    @contextmanager
    def without_reduction(self) -> Iterator[None]:
        """A context in which ``step()`` does not reduce; afterwards the step is over, whether it was taken or skipped."""
        try:
            with self._stepping(StepReduces.NOT_FOR_SCALER):
                yield
        finally:
            self._phase, self._had_gradients = Phase.STEPPED, {}

    def reset_reduction(self) -> None:
        """Drops order, layout and counts; the next step learns them from rank 0. Call it on every rank.

        It is needed when the set of ranks has changed; ``elastic.TorchState`` calls it. All gradients are dropped.

        Raises:
            RuntimeError: the optimizer has logical replicas, which were assigned for its number of ranks.
        """
        if self.replicas is not None:
            raise RuntimeError(
                f"an optimizer with replicas={self.replicas.number} computes those of the ranks that it was made for; when ranks "
                f"change, make model and optimizer anew and load optimizer.replicas.state_dict(), as hvd-ckpt train does"
            )
        if self.reducer is not None:
            self.reducer.reset()
        self.drop_gradients()

    def _get_supports_amp_scaling(self) -> bool:
        # torch.amp.GradScaler.step() asks for this before it looks at the gradients, on every rank: the one place to
        # stop a scaler that would decide on gradients which are not reduced yet, and so differently on each rank.
        reduced = self.reducer is None or (self._phase.is_reduced and not self.has_unreduced)
        if not reduced and self._step_reduces is not StepReduces.NOT_FOR_SCALER:
            raise RuntimeError(phases.SCALED_UNREDUCED)
        return self._wrapped_supports_amp_scaling

    def _set_supports_amp_scaling(self, value: bool) -> None:
        self._wrapped_supports_amp_scaling = value

    _step_supports_amp_scaling = property(_get_supports_amp_scaling, _set_supports_amp_scaling)

    # The wrapped class's step() runs the step hooks already; torch must not add them here.
    step.hooked = True  # type: ignore[attr-defined]
