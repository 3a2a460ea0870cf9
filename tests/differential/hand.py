"""Performs what users do by hand: acts on gradients, weights, the optimizer's state, groups and flags, and hooks.

Each is a chain of operations, one for each parameter or one for all. An operation that raises has no effect; the ranks of a job
note it, and one process leaves it out.
"""

from __future__ import annotations

import contextlib
import copy
import time
import weakref
from collections.abc import Callable, Container, Iterable
from typing import Any

import torch
from acts import FLAGS, IN_PLACE, READS, REPLACED, Act
from stateful import VOCABULARY, WIDTH
from torch import Tensor

from hvd_ckpt.reduction.gradients import has_values

Key = tuple[int, ...]
"""Of an operation: rank, step, position of the act, position of the parameter."""

MOMENTS = {
    "momentum": ("momentum_buffer",),
    "nesterov": ("momentum_buffer",),
    "adam": ("exp_avg", "exp_avg_sq"),
    "adamw": ("exp_avg", "exp_avg_sq"),
    "rmsprop": ("square_avg",),
}
_OF_RANKS = (*READS, *IN_PLACE, *REPLACED, *FLAGS)


def common(act: Act) -> bool:
    """Whether an act is on what all ranks have in common: weights, state, reduced gradients. One process then performs it once."""
    return act.kind not in _OF_RANKS or act.kind == "optimizer_zeros" or act.place == "synchronized"


class Hand:
    """The user of a run.

    Args:
        run: a :class:`interpreter.Run`.
        refused: operations that are left out.

    Attributes:
        done: the acts that were begun, with their steps.
        reads: what each operation has read.
        refused: the error of each operation that raised one.
    """

    def __init__(self, run: Any, refused: Container[Key]) -> None:
        self._run, self._left_out = run, refused
        self.done: list[tuple[int, Act]] = []
        self.reads: dict[Key, Tensor] = {}
        self.refused: dict[Key, Exception] = {}
        self._kept: dict[tuple[Any, ...], Any] = {}  # values that users keep between acts
        self._hooked = 0

    def act(self, number: int, place: str, part: int = 0) -> None:
        """Performs the acts of a step at a place."""
        run = self._run
        for position, act in enumerate(run.program.steps[number].acts):
            if act.place != place or act.part != part:
                continue
            self.done.append((number, act))
            if not run.alone:
                time.sleep(act.pause)
            whole = contextlib.nullcontext()
            if act.within and not run.alone:
                whole = run.optimizers[0].gathered_parameters()
            with whole:
                if not run.alone:
                    if run.rank in act.ranks:
                        self._perform((run.rank, number, position), act)
                elif not common(act):
                    for rank in act.ranks:
                        with run.as_rank(rank):
                            self._perform((rank, number, position), act)
                else:
                    self._perform((act.ranks[0], number, position), act)
                    for key, value in list(self.reads.items()):
                        if key[:3] == (act.ranks[0], number, position):
                            self.reads.update({(rank, *key[1:]): value for rank in act.ranks})

    def _perform(self, key: Key, act: Act) -> None:
        targets = self._targets(act)
        if act.kind in OF_ALL:
            self._try((*key, 0), lambda: OF_ALL[act.kind](self, act, targets))
            return
        for at, parameter in enumerate(targets):
            own = 0 if common(act) else key[0]
            generator = torch.Generator().manual_seed(10_000 * own + 1000 * key[1] + 100 * key[2] + at)
            self._try((*key, at), lambda: self._one(act, parameter, at, generator))  # noqa: B023

    def _try(self, key: Key, operation: Callable[[], Any]) -> None:
        if key in self._left_out:
            return
        try:
            value = operation()
        except Exception as error:
            if self._run.alone:
                raise
            self.refused[key] = error
            return
        if value is not None:
            self.reads[key] = torch.as_tensor(value, dtype=torch.float64).reshape(())

    def _targets(self, act: Act) -> list[Tensor]:
        owned = [p for group in self._run.optimizers[0].param_groups for p in group["params"]]
        # State of another one would break state_dict(), and its gradient is each rank's own after synchronize().
        own = act.through == "groups" or act.kind.startswith("state") or act.place == "synchronized"
        those = owned if own else self._run.parameters
        return [those[target % len(those)] for target in act.targets] or list(those)

    def _one(self, act: Act, parameter: Tensor, at: int, generator: torch.Generator) -> Any:
        kind, value = act.kind, act.value
        if kind in READS or kind in IN_PLACE or kind in REPLACED:
            return self._on_gradient(act, parameter, at, generator)
        if kind in FLAGS:
            parameter.requires_grad_(kind == "unfreeze")
            return None
        if kind.startswith("state"):
            return self._on_state(kind, parameter)
        with torch.no_grad():
            if kind == "weight_norm":
                return parameter.norm()
            if kind == "weight_item":
                return parameter.flatten()[0].item() if parameter.numel() else None
            if kind == "weight_mul_":
                parameter.mul_(1 / value)
            elif kind == "weight_clamp_":
                parameter.clamp_(-0.2, 0.2)
            elif kind == "weight_copy_":
                parameter.copy_(_random(parameter, generator) * 0.3)
            elif kind == "weight_data_mul_":
                parameter.data.mul_(1 / value)
            elif kind == "weight_init":
                torch.nn.init.uniform_(parameter, -0.3, 0.3, generator=generator)
            elif kind == "weight_data_set":
                parameter.data = parameter.data * (1 / value)
            elif kind == "average":
                kept = parameter.clone()
                parameter.copy_(kept / value)
                norm = parameter.norm().item()
                parameter.copy_(kept)
                return norm
            elif kind == "away":
                kept = parameter.clone()
                parameter.mul_(1 / value)
                self._kept["away", at] = kept
            elif kind == "back" and ("away", at) in self._kept:
                kept = self._kept["away", at]
                if kept.shape == parameter.shape:
                    parameter.copy_(kept)
        return None

    def _on_state(self, kind: str, parameter: Tensor) -> Any:
        state = self._run.optimizers[0].state
        if kind == "state_keys":
            return sum(map(len, state[parameter]))
        if kind == "state_norm":
            values = [value for value in state[parameter].values() if isinstance(value, Tensor)]
            return sum(value.double().norm().item() for value in values)
        if kind == "state_pop":
            state.pop(parameter, None)
        elif kind == "state_empty":
            state[parameter] = {}
        elif kind == "state_set":
            values = torch.linspace(0.0, 0.1, parameter.numel(), dtype=parameter.dtype).view(parameter.shape)
            for name in MOMENTS.get(self._run.program.optimizer, ()):
                if name in state[parameter]:
                    state[parameter][name] = values.clone()
        elif kind == "state_zero_":
            for value in state[parameter].values():
                if isinstance(value, Tensor):
                    value.zero_()
        return None

    def _on_gradient(self, act: Act, parameter: Tensor, at: int, generator: torch.Generator) -> Any:
        kind, value, gradient = act.kind, act.value, parameter.grad
        if kind == "is_none":
            return float(gradient is None)
        if kind == "random":
            if parameter.requires_grad:  # else nobody reduces it, here and in Horovod
                parameter.grad = _random(parameter, generator)
        elif kind == "dropped":
            parameter.grad = None
        elif kind == "collect":
            if gradient is not None:
                gradient.norm()  # a placeholder has none
            self._kept.setdefault(("task", self._run.rank, at), []).append(gradient)
            parameter.grad = None
        elif kind == "combine":
            tasks = self._kept.pop(("task", self._run.rank, at), [])
            found = [task / (1e-3 + task.norm()) for task in tasks if task is not None]
            if found:
                parameter.grad = sum(found[1:], found[0])
        elif kind == "kept":
            before = self._kept.get(("gradient", self._run.rank, id(parameter)))
            self._kept["gradient", self._run.rank, id(parameter)] = gradient
            return None if before is None else before.norm()
        elif gradient is None:
            return None
        elif kind in READS:
            return _read(kind, parameter, gradient)
        elif kind in IN_PLACE:
            _change(kind, gradient, value, generator)
        elif kind == "doubled":
            parameter.grad = gradient * value
        elif kind == "zeros":
            parameter.grad = torch.zeros_like(parameter)
        elif kind == "cloned":
            parameter.grad = gradient.clone()
        elif kind == "data_set":
            gradient.data = gradient.data * value
        return None

    # ---------------------------------------------------------------------------------- hooks

    def add_hooks(self, before: bool) -> None:
        """Registers the program's hooks that come before the optimizer, or after it."""
        for number, (kind, target, early) in enumerate(self._run.program.hooks):
            if early == before:
                parameter = self._run.parameters[target % len(self._run.parameters)]
                if not parameter.requires_grad:
                    continue
                if kind == "pre_mul":
                    parameter.register_hook(lambda gradient: gradient * 0.6)
                else:
                    parameter.register_post_accumulate_grad_hook(self._hook(kind, number))

    def _hook(self, kind: str, number: int) -> Callable[[Tensor], None]:
        hand = weakref.proxy(self)  # a cycle through the hooks of a parameter is never collected

        def hook(parameter: Tensor) -> None:
            gradient = parameter.grad
            if gradient is None:
                return
            if kind == "post_mul":
                gradient.mul_(0.6)
            elif kind == "post_replace":
                parameter.grad = gradient * 0.6
            else:
                step = len(hand._run.seen)
                key = (hand._run.rank, step, -1, number)
                value = hand.reads.get(key, torch.zeros((), dtype=torch.float64)) + gradient.double().norm()
                hand.reads[key] = value

        return hook


def _random(like: Tensor, generator: torch.Generator) -> Tensor:
    values = torch.randn(like.shape, generator=generator, dtype=torch.float32)
    return torch.empty_like(like).copy_(values) if like.device.type == "cpu" else values.to(like)


def _read(kind: str, parameter: Tensor, gradient: Tensor) -> Any:
    if kind == "norm":
        return gradient.norm()
    if kind == "item":
        return gradient.flatten()[0].item() if gradient.numel() else None
    if kind == "clone":
        return gradient.clone().sum()
    if kind == "isnan":
        return gradient.isnan().any()
    if kind == "data":
        return gradient.data.abs().sum()
    if kind == "numpy":
        return gradient.float().numpy().sum()
    if kind == "deepcopy":
        return copy.deepcopy(gradient).norm()
    return (parameter.detach() * gradient).sum()  # "dot"


def _change(kind: str, gradient: Tensor, value: float, generator: torch.Generator) -> None:
    if kind == "mul_":
        gradient.mul_(value)
    elif kind == "add_":
        gradient.add_(_random(gradient, generator) * 0.3)
    elif kind == "zero_":
        gradient.zero_()
    elif kind == "copy_":
        gradient.copy_(_random(gradient, generator))
    elif kind == "clamp_":
        gradient.clamp_(-0.01, 0.01)
    elif kind == "data_mul_":
        gradient.data.mul_(value)
    elif kind == "index" and gradient.dim():
        gradient[:1] = 0.2


# ---------------------------------------------------------------------------------- operations on all of an act's parameters


def _gradients(targets: Iterable[Tensor]) -> list[Tensor]:
    return [parameter.grad for parameter in targets if parameter.grad is not None]


def _total_norm(hand: Hand, act: Act, targets: list[Tensor]) -> Any:
    return torch.nn.utils.get_total_norm(_gradients(targets))


def _foreach_mul(hand: Hand, act: Act, targets: list[Tensor]) -> None:
    if gradients := _gradients(targets):
        torch._foreach_mul_(gradients, act.value)


def _clip_norm(hand: Hand, act: Act, targets: list[Tensor]) -> None:
    torch.nn.utils.clip_grad_norm_(targets, 0.01)


def _clip_value(hand: Hand, act: Act, targets: list[Tensor]) -> None:
    if _gradients(targets):
        torch.nn.utils.clip_grad_value_(targets, 0.01)


def _zero_grad(hand: Hand, act: Act, targets: list[Tensor]) -> None:
    run = hand._run
    if act.kind != "optimizer_zeros":
        # One that raises must have no effect, also where gradients before it have values.
        for parameter in run.model.parameters() if act.kind == "model_zeros" else ():
            if parameter.grad is not None and not has_values(parameter.grad):
                parameter.grad.zero_()
        run.model.zero_grad(set_to_none=act.kind == "model_none")
    elif run.alone:
        run.clear_gradients([p for group in run.groups[0] for p in group], "zero")
    else:
        run.optimizers[0].zero_grad(set_to_none=False)


def _swapped(hand: Hand, act: Act, targets: list[Tensor]) -> None:
    first = targets[0]
    same = [
        p for p in targets[1:] or hand._run.parameters if p.shape == first.shape and p.dtype is first.dtype
    ]
    other = next((p for p in same if p is not first), first)
    first.grad, other.grad = other.grad, first.grad


def _vector(hand: Hand, act: Act, targets: list[Tensor]) -> Any:
    with torch.no_grad():
        kind = targets[0].dtype
        return torch.nn.utils.parameters_to_vector([p for p in targets if p.dtype is kind]).norm()


def _state_dict(hand: Hand, act: Act, targets: list[Tensor]) -> Any:
    state = hand._run.model.state_dict()
    return sum(value.double().norm().item() for value in state.values() if value.is_floating_point())


def _evaluate(hand: Hand, act: Act, targets: list[Tensor]) -> Any:
    run = hand._run
    if run.program.embedding:
        x = torch.arange(6).view(2, 3) % VOCABULARY
    else:
        x = torch.linspace(-1, 1, 2 * WIDTH, dtype=torch.float32).view(2, WIDTH)
    run.model.eval()
    try:
        with torch.no_grad():
            return run.model(x, range(len(run.program.segments))).double().norm()
    finally:
        run.model.train()


def _load_model(hand: Hand, act: Act, targets: list[Tensor]) -> None:
    state = hand._run.model.state_dict()
    values = {name: v / act.value if v.is_floating_point() else v for name, v in state.items()}
    hand._run.model.load_state_dict(values)


def _weight_foreach(hand: Hand, act: Act, targets: list[Tensor]) -> None:
    with torch.no_grad():
        torch._foreach_mul_(targets, 1 / act.value)


def _state_clear(hand: Hand, act: Act, targets: list[Tensor]) -> None:
    hand._run.optimizers[0].state.clear()


def _state_load(hand: Hand, act: Act, targets: list[Tensor]) -> None:
    optimizer = hand._run.optimizers[0]
    optimizer.load_state_dict(optimizer.state_dict())


def _group(hand: Hand, act: Act, targets: list[Tensor]) -> None:
    for group in hand._run.optimizers[0].param_groups:
        if act.kind == "lr":
            group["lr"] /= act.value
        elif act.kind == "weight_decay" and act.kind in group:
            group["weight_decay"] = 0.1
        elif act.kind == "momentum" and group.get("momentum"):
            group["momentum"] = 0.5


OF_ALL: dict[str, Callable[[Hand, Act, list[Tensor]], Any]] = {
    "total_norm": _total_norm,
    "foreach_mul_": _foreach_mul,
    "clip_norm": _clip_norm,
    "clip_value": _clip_value,
    "model_zeros": _zero_grad,
    "model_none": _zero_grad,
    "optimizer_zeros": _zero_grad,
    "swapped": _swapped,
    "vector": _vector,
    "state_dict": _state_dict,
    "evaluate": _evaluate,
    "load_model": _load_model,
    "weight_foreach": _weight_foreach,
    "state_clear": _state_clear,
    "state_load": _state_load,
    "lr": _group,
    "weight_decay": _group,
    "momentum": _group,
}
