"""What a user holds of a sharded optimizer: groups of the model's parameters, and the state of the pieces that are stepped.

The wrapped class works on pieces: its ``step``, ``state_dict`` and ``load_state_dict`` find them in ``param_groups``. Around these
calls everybody else finds the model's own parameters there, on every rank the same. ``state`` is that of the pieces for everybody.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvd_ckpt.sharding.layout import Layout
from hvd_ckpt.utils.elementwise import HOOKS
from hvd_ckpt.utils.torch_private import global_step_hooks


class StateOfPieces(defaultdict[Any, Any]):
    """``optimizer.state``: what the wrapped class keeps of each piece; that of a parameter of the model is an error."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(dict)
        self._layout = layout

    def __reduce__(self) -> Any:
        return dict, (dict(self),)

    def copy(self) -> Any:
        return dict(self)

    __copy__ = copy

    def update(self, *given: Any, **more: Any) -> None:
        for key, entries in dict(*given, **more).items():
            self[key] = entries


def _of_pieces_alone(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def used(self: StateOfPieces, key: Any, *args: Any) -> Any:
        index = self._layout.index(key)
        if index is not None:
            raise RuntimeError(
                f"optimizer.state of parameter '{self._layout.names[index]}' is split over the ranks; use "
                "optimizer.state[piece.parameter] for each of optimizer.pieces, or optimizer.full_state_dict()"
            )
        return method(self, key, *args)

    return used


for _name in ("__contains__", "__delitem__", "__getitem__", "__setitem__", "get", "pop", "setdefault"):
    setattr(StateOfPieces, _name, _of_pieces_alone(getattr(defaultdict, _name)))


class StateElsewhere:
    """Stands in ``state`` of the wrapped optimizer, whose groups are not of the pieces: using it is an error."""

    def _refuse(self, *_: Any) -> Any:
        raise RuntimeError(
            "the state of this optimizer is split over the ranks, by the DistributedOptimizer that was made of it; use that one"
        )

    __getattr__ = __getitem__ = __setitem__ = __iter__ = __len__ = _refuse


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
        with self.sharding.pieces_in(self):
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
