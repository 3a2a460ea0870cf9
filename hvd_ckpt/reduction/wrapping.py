"""Construction of a distributed optimizer from the wrapped one, and the list of those in use."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from horovod.torch.optimizer import DistributedOptimizer as HorovodOptimizer

from hvd_ckpt.reduction.optimizer import ReducedOptimizer

_live: weakref.WeakSet[ReducedOptimizer] = weakref.WeakSet()


def wrapping(optimizer: torch.optim.Optimizer, methods_of: type[ReducedOptimizer]) -> Any:
    """An optimizer with everything of the given one, of a class that is its class with the methods of ``methods_of``."""
    wrapped = type(optimizer)
    # Horovod's own functions know its optimizers by their module.
    described = {"__module__": HorovodOptimizer.__module__, "__doc__": wrapped.__doc__}
    # Not constructed: groups, state and hooks of the given optimizer become this one's, as the same objects.
    new: Any = object.__new__(type(wrapped.__name__, (methods_of, wrapped), described))
    # ``step`` is an instance attribute where a learning rate scheduler has patched it.
    attributes = {name: value for name, value in vars(optimizer).items() if name != "step"}
    # A property of the new class, so an entry in the instance's dict would have no effect: it is set as an attribute below.
    supports_scaling = attributes.pop(
        "_step_supports_amp_scaling", getattr(wrapped, "_step_supports_amp_scaling", False)
    )
    vars(new).update(attributes)
    new.wrapped_class = wrapped
    new._step_supports_amp_scaling = supports_scaling
    new.reducer = None
    new.keep_groups = _keep_groups(weakref.ref(optimizer), weakref.ref(new), optimizer.param_groups)
    # A hook of both: they have one table of hooks.
    new.register_load_state_dict_post_hook(new.keep_groups, prepend=True)
    if "step" in vars(optimizer):
        new.register_step_post_hook(_tell_schedulers(weakref.ref(optimizer)))
    return new


def _keep_groups(
    bare: weakref.ref[torch.optim.Optimizer], new: weakref.ref[ReducedOptimizer], groups: list[dict[str, Any]]
) -> Callable[[torch.optim.Optimizer], None]:
    """A function that is called when either optimizer may have other groups: it has loaded a state, or was assigned some.

    Schedules hold the groups that there were, or the other optimizer. So both keep the same list of the same groups, with what the
    new ones have; further groups are added.
    """

    def keep(changed: torch.optim.Optimizer) -> None:
        wrapped, distributed = bare(), new()
        if distributed is None or changed not in (wrapped, distributed):
            return
        fresh, number = changed.param_groups, len(groups)
        if fresh is not groups:
            del groups[len(fresh) :]
            for group, other in zip(groups, fresh):
                if group is not other:
                    group.clear()
                    group.update(other)
            changed.param_groups = groups
            for group in fresh[number:]:
                distributed.add_param_group(group)
        if wrapped is not None:
            distributed.share_state(wrapped, changed is wrapped)

    return keep


def _tell_schedulers(reference: weakref.ref[torch.optim.Optimizer]) -> Callable[..., None]:
    """A hook that tells learning rate schedulers of the bare optimizer, which warn where it has not been stepped, of a step."""

    def stepped(*_: Any) -> None:
        bare = reference()
        if bare is not None:
            bare._opt_called = True  # type: ignore[attr-defined]

    return stepped


def register(optimizer: ReducedOptimizer) -> None:
    """Hooks the parameters' gradients (``Reducer.begin``) and adds the optimizer to :func:`live_optimizers`."""
    _live.add(optimizer)
    if optimizer.reducer is not None:
        optimizer.reducer.begin(optimizer)


def live_optimizers() -> list[ReducedOptimizer]:
    """Those of this process that are in use, in an order that is the same on every rank."""
    return sorted(_live, key=lambda optimizer: optimizer.identity)
