"""The distributed optimizer: Horovod's methods and way of use, with this library's :mod:`.reducer` in place of its hooks."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from horovod.torch import mpi_ops
from horovod.torch.mpi_ops import Adasum, Average, Sum
from horovod.torch.optimizer import DistributedOptimizer as HorovodOptimizer

from hvd_ckpt.reduction.accumulation import forget_sums
from hvd_ckpt.reduction.agreement import allgather_objects
from hvd_ckpt.reduction.communicator import adasum_step
from hvd_ckpt.reduction.reducer import Reducer
from hvd_ckpt.reduction.stats import ReductionStats
from hvd_ckpt.unmaterialized import copied_state

DEFAULT_BUCKET_CAP_MB = 25.0


class _IsMarked(type):
    """``isinstance`` by what a class has: as a base class it would catch the ``super()`` calls of the wrapped one."""

    _mark: str

    def __instancecheck__(cls, instance: Any) -> bool:
        return hasattr(type(instance), cls._mark)


class ReducedOptimizer(torch.optim.Optimizer, metaclass=_IsMarked):
    """Methods that :func:`wrapping` copies into a subclass of the wrapped optimizer's class.

    It is no base of that class, so that nothing here may call ``super()``; ``isinstance`` works through the mark.
    """

    _mark = "_reduced_by_hvd_ckpt"
    _reduced_by_hvd_ckpt = True

    _wrapped_class: type[torch.optim.Optimizer]
    _reducer: Reducer | None
    _parameter_names: dict[torch.Tensor, str]
    _known_names: Any
    _identity: int
    _op: int
    _compression: Any
    _process_set: Any
    _synchronized: bool  # reduced since the last step()
    _should_synchronize: bool  # False within skip_synchronize() and without_reduction()
    _scaling_agreed: bool  # this library's GradScaler is stepping
    _wrapped_supports_amp_scaling: bool
    _notice = _noticed = False  # where there is no reducer
    _reduced_for_caller = False  # since the last step(), which then reduces only if a gradient has come since
    backward_passes_per_step: int
    replicas: Any = None
    can_join = True  # allreduces alone, in which ranks without data may be absent
    outlasts_ranks = True  # of an elastic job

    # -------------------------------------------------------------------------------- Horovod's public methods

    def synchronize(self) -> None:
        """Reduces this step's gradients over all ranks; afterwards ``p.grad`` holds the result everywhere.

        ``step()`` does it too. Call it yourself to change the reduced gradients (clipping, say) before
        ``step()`` within :meth:`skip_synchronize`. Collective.
        """
        self._reduce()

    def _reduce(self) -> bool:
        """Reduces, and returns whether there was anything to reduce on any rank."""
        reducer = self._reducer if self._op != Adasum else None
        others_turn = reducer is not None and reducer.take_turn()
        reduces = reducer is not None and (others_turn or not self._synchronized or self._gradients_since())
        if reducer is not None and reduces:
            reducer.synchronize()
        else:
            self._take_note()
        self._synchronized = True
        return reduces

    def _take_note(self) -> None:
        """Passes the notice on where there is no reducer."""
        if self._reducer is None and not self._synchronized:
            self._noticed, self._notice = self._notice, False

    def _gradients_since(self) -> bool:
        """Whether any rank has had new gradients since the last synchronization: a second one need not reduce again."""
        assert self._reducer is not None
        flag = torch.tensor([float(self._reducer.active)])
        name = f"hvd_ckpt.{self._identity}.again"
        handle = mpi_ops.allreduce_async_(flag, name=name, op=Sum, process_set=self._process_set)
        return bool(mpi_ops.synchronize(handle).item() > 0)

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within it ``step()`` does not reduce, because ``synchronize()`` already has."""
        if self._op == Adasum and self._reducer is not None:
            raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Accepted for compatibility: the number of passes is learned, so nothing depends on this."""
        if passes <= 0:
            raise ValueError(f"backward_passes_per_step must be > 0, not {passes}")
        self.backward_passes_per_step = passes

    # -------------------------------------------------------------------------------- torch.optim.Optimizer

    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Reduces the gradients, unless that is done, and takes a step of the wrapped optimizer.

        Args:
            closure: computes the loss and its gradients. Each call of it is followed by a reduction and its loss is averaged
                over the ranks, so an optimizer that calls it often (LBFGS) does so equally often everywhere.
        """
        reducer = self._reducer
        if reducer is None:
            self._take_note()
            self._synchronized = False
            return self._local_step(closure, *args, **kwargs)
        if self._op == Adasum:
            return self._adasum_step(reducer, closure)
        if closure is not None:
            closure = self._reduced_closure(closure)
        elif self._should_synchronize:
            if self._synchronized and not self._reduced_for_caller:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(). This can cause training slowdown. You may want to consider using "
                    "optimizer.skip_synchronize() context if you use optimizer.synchronize() in your code.",
                    stacklevel=2,
                )
            self.synchronize()
        self._synchronized = self._reduced_for_caller = False
        return self._local_step(closure, *args, **kwargs)

    def _local_step(self, closure: Callable[[], Any] | None, *args: Any, **kwargs: Any) -> Any:
        if closure is None and not args and not kwargs:
            return self._wrapped_class.step(self)
        return self._wrapped_class.step(self, closure, *args, **kwargs)

    def _reduced_closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def reduced() -> Any:
            self._synchronized = False
            loss = closure()
            if self._should_synchronize and not self._synchronized:
                self.synchronize()
            self._synchronized = False
            if loss is None:
                return None
            mean = torch.as_tensor(loss).detach().to(torch.float64, copy=True).reshape(1)
            mean = mpi_ops.synchronize(
                mpi_ops.allreduce_async_(
                    mean, name=f"hvd_ckpt.{self._identity}.loss", op=Average, process_set=self._process_set
                )
            )
            return mean.reshape(()).to(loss.dtype) if isinstance(loss, torch.Tensor) else mean.item()

        return reduced

    def _adasum_step(self, reducer: Reducer, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        reducer.take_turn()
        reducer.hook_parameters()
        adasum_step(
            list(zip(reducer.assignment.names, reducer.assignment.parameters)),
            lambda: self._local_step(None),
            self._identity,
            self._compression,
        )
        reducer.forget_step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of all parameters.

        Raises:
            AssertionError: gradients have arrived since the last ``step()`` or ``synchronize()`` (as in Horovod).
        """
        if self._reducer is not None:
            if self._reducer.active and self._op != Adasum:
                raise AssertionError(
                    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                    "optimizer.synchronize(). This is prohibited as it can cause a race condition."
                )
            self._reducer.hook_parameters()
        self._synchronized = False
        self._wrapped_class.zero_grad(self, set_to_none)
        if self._op == Sum and not set_to_none:
            forget_sums(self.param_groups)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state of this optimizer, of the bare wrapped one, or of stock Horovod's around it. To be called on every rank.

        Begins a step anew: all gradients are dropped, as some of them may be on their way already.
        """
        self._wrapped_class.load_state_dict(self, state_dict)
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Drops all gradients, with a step that has begun. To be called on every rank."""
        if self._reducer is not None:
            self._reducer.abandon()
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        self._synchronized, self._should_synchronize, self._reduced_for_caller = False, True, False
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; its parameters are reduced from the next step on. To be called on every rank."""
        self._wrapped_class.add_param_group(self, param_group)
        group = len(self.param_groups) - 1
        named = []
        for position, parameter in enumerate(self.param_groups[-1]["params"]):
            name = self._known_names.get(parameter, f"allreduce.noname.{group}.{position}")
            self._parameter_names[parameter] = name
            named.append((name, parameter))
        if self._reducer is not None:
            self._reducer.add_parameters(named)

    # -------------------------------------------------------------------------------- beyond Horovod

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
        """0: nothing is split over the ranks."""
        return 0

    @property
    def is_offloaded(self) -> bool:
        """Whether some state is kept in files or host memory."""
        return False

    @contextmanager
    def gathered_parameters(self) -> Iterator[None]:
        """Within it every parameter is whole, as it always is where nothing is split."""
        yield

    def full_state_dict(self, all_ranks: bool = False) -> dict[str, Any] | None:
        """``state_dict()`` on rank 0, or on all ranks, and None elsewhere: what a sharded optimizer gives."""
        state: dict[str, Any] = self.state_dict()
        return state if all_ranks or self._process_set.rank() == 0 else None

    def full_model_state_dict(self, model: torch.nn.Module, all_ranks: bool = False) -> dict[str, Any] | None:
        """A copy of ``model.state_dict()`` on the CPU, on rank 0, or on all ranks, and None elsewhere."""
        return copied_state(model) if all_ranks or self._process_set.rank() == 0 else None

    @property
    def reduction_stats(self) -> ReductionStats:
        """Launches per bucket, launches during the backward pass, late gradients: since the start and in the last step."""
        return self._reducer.stats if self._reducer is not None else ReductionStats()

    def notify(self) -> None:
        """Has the next :meth:`synchronize` tell every rank, at no cost, that a rank has something to say: see :attr:`notified`.

        So that ranks need a collective of their own only where something has happened on one of them: a signal, a loss that is nan.
        """
        if self._reducer is not None:
            self._reducer.notice = True
        else:
            self._notice = True

    @property
    def notified(self) -> bool:
        """Whether any rank called :meth:`notify` before the last :meth:`synchronize`; the same on every rank."""
        return self._reducer.noticed if self._reducer is not None else self._noticed

    def reduction_state_dict(self) -> dict[str, Any]:
        """Order, layout and learned counts of the reducer: plain data. Each rank has its own counts.

        Kept apart from :meth:`state_dict`, which is the wrapped optimizer's own and so loads everywhere.
        """
        return self._reducer.state_dict() if self._reducer is not None else {}

    def load_reduction_state_dict(self, state: dict[str, Any]) -> None:
        """Loads a state saved by this rank, so that training resumes bit for bit; drops all gradients. On every rank.

        Raises:
            ValueError: the state does not belong to this model.
        """
        if self._reducer is not None and state:
            self._reducer.load_state_dict(state)
            self._drop_gradients()

    @property
    def reduces_updates(self) -> bool:
        """True with ``op=Adasum``, which combines the ranks' updates: ``p.grad`` stays each rank's own."""
        return self._op == Adasum and self._reducer is not None

    @property
    def finds_overflow_alone(self) -> bool:
        """True if each rank steps on gradients of its own, so that only it sees an inf or nan in them."""
        return self.reduces_updates

    @contextmanager
    def unscaling(self) -> Iterator[None]:
        """Within it ``param_groups`` hold what carries the gradients that a scaler divides: the parameters, as ever."""
        yield

    def reduce_once(self) -> None:
        """Like :meth:`synchronize`, but does nothing if this step's gradients are reduced already."""
        if not self._synchronized:
            self.synchronize()

    def reduce_for_caller(self) -> None:
        """Reduces this step's gradients for a caller that changes them before a plain ``step()``.

        Where they are reduced already, one small allreduce asks whether any rank has had new gradients since.
        """
        if not self.reduces_updates:
            self.synchronize()
            self._reduced_for_caller = True

    @contextmanager
    def without_reduction(self) -> Iterator[None]:
        """Within it ``step()`` does not reduce; afterwards the step is over, whether it was taken or skipped."""
        should_synchronize = self._should_synchronize
        self._should_synchronize, self._scaling_agreed = False, True
        try:
            yield
        finally:
            self._should_synchronize, self._scaling_agreed = should_synchronize, False
            self._synchronized = False
            if self.reduces_updates and self._reducer is not None:
                self._reducer.forget_step()

    def give_way(self) -> None:
        """Another optimizer of the same parameters is to have this step's gradients: none stays on its way. Collective."""
        if self._reducer is not None:
            self._reducer.settle()
        self._synchronized = False

    def agree_on_naming(self) -> None:
        """Gives this optimizer's tensors names that are the same on every rank and new. Collective."""
        if self._reducer is not None:
            namings = allgather_objects(self._reducer.naming, self._process_set, "hvd_ckpt.naming")
            self._identity = max(identity for identity, _ in namings)
            self._reducer.rename(self._identity, 1 + max(generation for _, generation in namings))

    def reset_reduction(self) -> None:
        """Forgets order, layout and counts; the next step learns them from rank 0. To be called on every rank.

        Needed when the set of ranks has changed; ``elastic.TorchState`` does it. All gradients are dropped.

        Raises:
            RuntimeError: the optimizer has logical replicas, and computes those of its number of ranks.
        """
        if self.replicas is not None:
            raise RuntimeError(
                f"an optimizer with replicas={self.replicas.number} computes those of the ranks that it was made for; when ranks "
                f"change, make model and optimizer anew and load optimizer.replicas.state_dict(), as hvd-ckpt train does"
            )
        if self._reducer is not None:
            self._reducer.reset()
        self._drop_gradients()

    def _get_supports_amp_scaling(self) -> bool:
        # torch.amp.GradScaler.step() asks for this before it looks at the gradients, on every rank: the one place to
        # stop a scaler that would decide on gradients which are not reduced yet, and so differently on each rank.
        if self._reducer is not None and not self._synchronized and not self._scaling_agreed:
            raise RuntimeError(
                "torch.amp.GradScaler.step(optimizer) was called before optimizer.synchronize(): each rank would skip or take "
                "the step by its own gradients; use hvd_ckpt.GradScaler, or call optimizer.synchronize() and "
                "scaler.unscale_(optimizer) first, then scaler.step(optimizer) within optimizer.skip_synchronize()"
            )
        return self._wrapped_supports_amp_scaling

    def _set_supports_amp_scaling(self, value: bool) -> None:
        self._wrapped_supports_amp_scaling = value

    _step_supports_amp_scaling = property(_get_supports_amp_scaling, _set_supports_amp_scaling)

    # The wrapped class's step() runs the step hooks already; torch must not add them here.
    step.hooked = True  # type: ignore[attr-defined]


_live: list[weakref.ref[ReducedOptimizer]] = []


def wrapping(optimizer: torch.optim.Optimizer, methods_of: type[ReducedOptimizer]) -> Any:
    """An optimizer with everything of the given one, of a class that is its class with the methods of ``methods_of``."""
    wrapped = type(optimizer)
    methods: dict[str, Any] = {}
    for base in reversed(methods_of.__mro__[: methods_of.__mro__.index(torch.optim.Optimizer)]):
        methods.update(vars(base))
    for name in ("__dict__", "__weakref__", "__annotations__"):
        methods.pop(name, None)
    # Horovod's own functions know its optimizers by their module.
    methods.update(__module__=HorovodOptimizer.__module__, __doc__=wrapped.__doc__)
    new: Any = object.__new__(type(wrapped.__name__, (wrapped,), methods))
    # ``step`` is an instance attribute where a learning rate scheduler has patched it.
    attributes = {name: value for name, value in vars(optimizer).items() if name != "step"}
    supports_scaling = attributes.pop(
        "_step_supports_amp_scaling", getattr(wrapped, "_step_supports_amp_scaling", False)
    )
    vars(new).update(attributes)
    new._wrapped_class = wrapped
    new._wrapped_supports_amp_scaling = supports_scaling
    new._synchronized, new._should_synchronize, new._scaling_agreed = False, True, False
    new._reducer = None
    return new


def register(optimizer: ReducedOptimizer) -> None:
    """Hooks the parameters' gradients (``Reducer.begin``) and adds the optimizer to :func:`live_optimizers`."""
    _live.append(weakref.ref(optimizer))
    if optimizer._reducer is not None:
        optimizer._reducer.begin(optimizer)


def live_optimizers() -> list[ReducedOptimizer]:
    """Those of this process that are in use, the oldest first."""
    _live[:] = [reference for reference in _live if reference() is not None]
    return [optimizer for reference in _live if (optimizer := reference()) is not None]
