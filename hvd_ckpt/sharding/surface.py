"""What a user holds of a sharded optimizer: groups and state of the model's parameters, over the pieces that are stepped.

The wrapped class works on pieces: its ``step``, ``state_dict`` and ``load_state_dict`` find them in ``param_groups``, with their
state. Around these calls everybody else finds the model's own parameters there, on every rank the same, and ``state[parameter]``
has the parts of the state that are on this rank (:mod:`.state_view`).
"""

from __future__ import annotations

import functools
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from hvd_ckpt.sharding.state_view import StateOfParameters
from hvd_ckpt.utils.torch_private import global_step_hooks

if TYPE_CHECKING:
    from hvd_ckpt.sharding.sharding import Sharding

HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class Surface:
    """What stands in the attributes of a sharded optimizer: the user's view, or pieces for the wrapped class.

    Attributes:
        state: the view of the state.
        inside: whether pieces stand there.
    """

    def __init__(self, sharding: Sharding) -> None:
        self._sharding = sharding
        self.state = StateOfParameters(sharding)
        self.inside = False
        self._whole: list[tuple[dict[str, Any], list[Any]]] = []
        self._hooks: list[Any] = []

    @contextmanager
    def pieces_in(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """A context in which groups and state are those of pieces, and step hooks do not run: :func:`run_hooks` does that."""
        if self.inside:
            yield
            return
        self._enter(optimizer)
        try:
            yield
        finally:
            self._leave(optimizer)

    @contextmanager
    def whole_in(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """A context within :meth:`pieces_in` for code of the user, such as a closure."""
        if not self.inside:
            yield
            return
        self._leave(optimizer)
        try:
            yield
        finally:
            self._enter(optimizer)

    def _enter(self, optimizer: Any) -> None:
        sharding = self._sharding
        self._whole = [(group, group["params"]) for group in optimizer.param_groups]
        sharding.regroup([parameters for _, parameters in self._whole])
        if optimizer.state is not self.state:  # as by ``optimizer.state = defaultdict(dict)``
            self.state.replace(optimizer.state)
        optimizer.state = sharding.state
        for (group, _), stepped in zip(self._whole, sharding.stepped):
            group["params"] = stepped
        self._hooks = [
            (getattr(optimizer, name), dict(everywhere)) for name, everywhere in zip(HOOKS, global_step_hooks)
        ]
        for name, everywhere in zip(HOOKS, global_step_hooks):
            setattr(optimizer, name, OrderedDict())
            everywhere.clear()
        self.inside = True

    def _leave(self, optimizer: Any) -> None:
        if not self.inside:  # an error in the middle of a change
            return
        self.inside = False
        for name, everywhere, (own, before) in zip(HOOKS, global_step_hooks, self._hooks):
            setattr(optimizer, name, own)
            everywhere.update(before)
        # The groups may be others by now, if the wrapped class has loaded a state.
        for (group, parameters), now in zip(self._whole, optimizer.param_groups):
            group["params"] = now["params"] = parameters
        self._sharding.state = optimizer.state
        optimizer.state = self.state


def run_hooks(optimizer: Any, before: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Runs the hooks before or after a step, in PyTorch's order; returns the arguments of the step, which they may have changed."""
    tables = [global_step_hooks[not before], getattr(optimizer, HOOKS[not before])]
    for hook in [hook for table in (tables if before else reversed(tables)) for hook in table.values()]:
        result = hook(optimizer, args, kwargs)
        if before and result is not None:
            args, kwargs = result
    return args, kwargs


def on_pieces(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of the wrapped class that may write weights, as one that all ranks call together. Afterwards they gather."""

    @functools.wraps(method)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.sharding.follow_model()
        with self.surface.pieces_in(self):
            result = method(self, *args, **kwargs)
        self.sharding.shards_changed()
        return result

    return called


def stepped_parameters(optimizer: Any) -> list[list[torch.Tensor]]:
    """What the wrapped class steps, by group: the pieces of a sharded optimizer, else the parameters."""
    sharding = getattr(optimizer, "sharding", None)
    if sharding is None or not sharding.stage:
        return [group["params"] for group in optimizer.param_groups]
    groups: Sequence[Sequence[torch.Tensor]] = sharding.stepped
    return [list(group) for group in groups]


def same_lists(one: Sequence[Sequence[Any]], other: Sequence[Sequence[Any]]) -> bool:
    """Whether two lists of lists have the same objects."""
    return len(one) == len(other) and all(
        len(own) == len(theirs) and all(map(operator.is_, own, theirs)) for own, theirs in zip(one, other)
    )
