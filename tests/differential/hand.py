"""Performs what users do by hand: acts on gradients, weights, the optimizer's state, groups and flags, and hooks.

Each is a chain of operations, one for each parameter or one for all. An operation that raises has no effect; the ranks of a job
note it, and one process leaves it out.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import operator
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Container
from typing import Any

import torch
from programs import Act
from stateful import VOCABULARY, WIDTH
from torch import Tensor, nn

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


@dataclasses.dataclass
class On:
    """What an operation is done to.

    Attributes:
        run: a :class:`interpreter.Run`.
        targets: the parameters of the act.
        at: position of the parameter among them.
        kept: values that users keep between acts.
    """

    run: Any
    act: Act
    targets: list[Tensor]
    kept: dict[tuple[Any, ...], Any]
    at: int = 0
    generator: torch.Generator | None = None

    @property
    def parameter(self) -> Tensor:
        return self.targets[self.at]

    @property
    def gradient(self) -> Any:
        return self.parameter.grad

    @property
    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.targets if parameter.grad is not None]

    @property
    def state(self) -> Any:
        return self.run.optimizers[0].state

    def replace(self, gradient: Tensor | None) -> None:
        self.parameter.grad = gradient

    def random(self, like: Tensor) -> Tensor:
        values = torch.randn(like.shape, generator=self.generator, dtype=torch.float32)
        return torch.empty_like(like).copy_(values) if like.device.type == "cpu" else values.to(like)


# ---------------------------------------------------------------------------------- operations of several lines


def _kept(on: On) -> Any:
    key = ("gradient", on.run.rank, id(on.parameter))
    before, on.kept[key] = on.kept.get(key), on.gradient
    return None if before is None else before.norm()


def _collect(on: On) -> None:
    if on.gradient is not None:
        on.gradient.norm()  # a placeholder has none
    on.kept.setdefault(("task", on.run.rank, on.at), []).append(on.gradient)
    on.replace(None)


def _combine(on: On) -> None:
    tasks = on.kept.pop(("task", on.run.rank, on.at), [])
    found = [task / (1e-3 + task.norm()) for task in tasks if task is not None]
    if found:
        on.replace(sum(found[1:], found[0]))


def _zero_grad(on: On) -> None:
    run, kind = on.run, on.act.kind
    if kind != "optimizer_zeros":
        # One that raises must have no effect, also where gradients before it have values.
        for parameter in run.model.parameters() if kind == "model_zeros" else ():
            if parameter.grad is not None and not has_values(parameter.grad):
                parameter.grad.zero_()
        run.model.zero_grad(set_to_none=kind == "model_none")
    elif run.alone:
        run.clear_gradients([p for group in run.groups[0] for p in group], "zero")
    else:
        run.optimizers[0].zero_grad(set_to_none=False)


def _swapped(on: On) -> None:
    first = on.targets[0]
    same = [
        p for p in on.targets[1:] or on.run.parameters if p.shape == first.shape and p.dtype is first.dtype
    ]
    other = next((p for p in same if p is not first), first)
    first.grad, other.grad = other.grad, first.grad


def _vector(on: On) -> Any:
    kind = on.targets[0].dtype
    return nn.utils.parameters_to_vector([p for p in on.targets if p.dtype is kind]).norm()


def _state_dict(on: On) -> Any:
    state = on.run.model.state_dict()
    return sum(value.double().norm().item() for value in state.values() if value.is_floating_point())


def _evaluate(on: On) -> Any:
    run = on.run
    x = torch.linspace(-1, 1, 2 * WIDTH, dtype=torch.float32).view(2, WIDTH)
    if run.program.embedding:
        x = torch.arange(6).view(2, 3) % VOCABULARY
    run.model.eval()
    try:
        return run.model(x, range(len(run.program.segments))).double().norm()
    finally:
        run.model.train()


def _load_model(on: On) -> None:
    state = on.run.model.state_dict()
    values = {name: v / on.act.value if v.is_floating_point() else v for name, v in state.items()}
    on.run.model.load_state_dict(values)


def _average(on: On) -> Any:
    kept = on.parameter.clone()
    on.parameter.copy_(kept / on.act.value)
    norm = on.parameter.norm().item()
    on.parameter.copy_(kept)
    return norm


def _away(on: On) -> None:
    kept = on.parameter.clone()
    on.parameter.mul_(1 / on.act.value)
    on.kept["away", on.at] = kept


def _back(on: On) -> None:
    kept = on.kept.get(("away", on.at))
    if kept is not None and kept.shape == on.parameter.shape:
        on.parameter.copy_(kept)


def _state_norm(on: On) -> Any:
    values = [value for value in on.state[on.parameter].values() if isinstance(value, Tensor)]
    return sum(value.double().norm().item() for value in values)


def _state_zero(on: On) -> None:
    for value in on.state[on.parameter].values():
        if isinstance(value, Tensor):
            value.zero_()


def _state_set(on: On) -> None:
    parameter = on.parameter
    values = torch.linspace(0.0, 0.1, parameter.numel(), dtype=parameter.dtype).view(parameter.shape)
    for name in MOMENTS.get(on.run.program.optimizer, ()):
        if name in on.state[parameter]:
            on.state[parameter][name] = values.clone()


def _state_load(on: On) -> None:
    optimizer = on.run.optimizers[0]
    optimizer.load_state_dict(optimizer.state_dict())


def _state_foreach(on: On) -> None:
    values = [
        value
        for one in on.targets
        for value in on.state[one].values()
        if isinstance(value, Tensor) and value.dim()
    ]
    if values:
        torch._foreach_zero_(values)


def _reduction(on: On) -> None:
    """Drops all gradients, whether they have left or not."""
    run, optimizer = on.run, on.run.optimizers[0]
    if run.alone:
        run.clear_gradients(run.parameters, "none")
    elif on.act.kind == "reset":
        optimizer.reset_reduction()
    else:
        optimizer.load_reduction_state_dict(optimizer.reduction_state_dict())
    assert run.alone or all(parameter.grad is None for parameter in run.parameters)


def _group(on: On) -> None:
    for group in on.run.optimizers[0].param_groups:
        if on.act.kind == "lr":
            group["lr"] /= on.act.value
        elif on.act.kind == "weight_decay" and on.act.kind in group:
            group["weight_decay"] = 0.1
        elif on.act.kind == "momentum" and group.get("momentum"):
            group["momentum"] = 0.5


# ---------------------------------------------------------------------------------- all operations, in an order that seeds rely on

Table = dict[str, Callable[[On], Any]]
READS: Table = {
    "norm": lambda on: on.gradient.norm(),
    "item": lambda on: on.gradient.flatten()[0].item() if on.gradient.numel() else None,
    "clone": lambda on: on.gradient.clone().sum(),
    "isnan": lambda on: on.gradient.isnan().any(),
    "is_none": lambda on: float(on.gradient is None),
    "data": lambda on: on.gradient.data.abs().sum(),
    "numpy": lambda on: on.gradient.float().numpy().sum(),
    "deepcopy": lambda on: copy.deepcopy(on.gradient).norm(),
    "total_norm": lambda on: nn.utils.get_total_norm(on.gradients),
    "dot": lambda on: (on.parameter.detach() * on.gradient).sum(),
    "kept": _kept,
}
IN_PLACE: Table = {
    "mul_": lambda on: on.gradient.mul_(on.act.value),
    "add_": lambda on: on.gradient.add_(on.random(on.gradient) * 0.3),
    "zero_": lambda on: on.gradient.zero_(),
    "copy_": lambda on: on.gradient.copy_(on.random(on.gradient)),
    "clamp_": lambda on: on.gradient.clamp_(-0.01, 0.01),
    "index": lambda on: operator.setitem(on.gradient, slice(1), 0.2) if on.gradient.dim() else None,
    "foreach_mul_": lambda on: torch._foreach_mul_(on.gradients, on.act.value) if on.gradients else None,
    "clip_norm": lambda on: nn.utils.clip_grad_norm_(on.targets, 0.01),
    "clip_value": lambda on: nn.utils.clip_grad_value_(on.targets, 0.01) if on.gradients else None,
    "data_mul_": lambda on: on.gradient.data.mul_(on.act.value),
    "model_zeros": _zero_grad,
    "optimizer_zeros": _zero_grad,
}
REPLACED: Table = {
    "doubled": lambda on: on.replace(on.gradient * on.act.value),
    # Of one that is frozen, nobody reduces it, here and in Horovod.
    "random": lambda on: on.replace(on.random(on.parameter)) if on.parameter.requires_grad else None,
    "zeros": lambda on: on.replace(torch.zeros_like(on.parameter)),
    "cloned": lambda on: on.replace(on.gradient.clone()),
    "swapped": _swapped,
    "data_set": lambda on: setattr(on.gradient, "data", on.gradient.data * on.act.value),
    "dropped": lambda on: on.replace(None),
    "model_none": _zero_grad,
    "collect": _collect,
    "combine": _combine,
}
WEIGHTS_READ: Table = {
    "weight_norm": lambda on: on.parameter.norm(),
    "weight_item": lambda on: on.parameter.flatten()[0].item() if on.parameter.numel() else None,
    "vector": _vector,
    "state_dict": _state_dict,
    "evaluate": _evaluate,
}
WEIGHTS: Table = {
    "weight_mul_": lambda on: on.parameter.mul_(1 / on.act.value),
    "weight_clamp_": lambda on: on.parameter.clamp_(-0.2, 0.2),
    "weight_copy_": lambda on: on.parameter.copy_(on.random(on.parameter) * 0.3),
    "weight_data_mul_": lambda on: on.parameter.data.mul_(1 / on.act.value),
    "weight_foreach": lambda on: torch._foreach_mul_(on.targets, 1 / on.act.value),
    "weight_init": lambda on: nn.init.uniform_(on.parameter, -0.3, 0.3, generator=on.generator),
    "weight_data_set": lambda on: setattr(on.parameter, "data", on.parameter.data * (1 / on.act.value)),
    "load_model": _load_model,
    "average": _average,
    "away": _away,
    "back": _back,
}
STATE_READ: Table = {
    "state_norm": _state_norm,
    "state_keys": lambda on: sum(map(len, on.state[on.parameter])),
}
STATE: Table = {
    "state_zero_": _state_zero,
    "state_set": _state_set,
    "state_pop": lambda on: on.state.pop(on.parameter, None),
    "state_empty": lambda on: on.state.__setitem__(on.parameter, {}),
    "state_clear": lambda on: on.state.clear(),
    "state_load": _state_load,
}
UNDRAWN: Table = {
    "state_new": lambda on: setattr(on.run.optimizers[0], "state", defaultdict(dict)),
    "state_foreach_zero_": _state_foreach,
    "reset": _reduction,
    "order": _reduction,
    "passes": lambda on: None if on.run.alone else on.run.optimizers[0].set_backward_passes_per_step(2),
}
GROUPS: Table = dict.fromkeys(("lr", "weight_decay", "momentum"), _group)
FLAGS: Table = {
    "freeze": lambda on: on.parameter.requires_grad_(False),
    "unfreeze": lambda on: on.parameter.requires_grad_(),
}
ACTS: dict[str, Table] = {
    "read": READS,
    "in_place": IN_PLACE,
    "replaced": REPLACED,
    "weights": {**WEIGHTS, **WEIGHTS_READ},
    "state": {**STATE, **STATE_READ},
    "groups": GROUPS,
    "flags": FLAGS,
}
OPERATIONS = {kind: operation for table in (*ACTS.values(), UNDRAWN) for kind, operation in table.items()}
READING = {*READS, *WEIGHTS_READ, *STATE_READ, "average"}
OF_ALL = {  # of an act's parameters at once
    "total_norm", "foreach_mul_", "clip_norm", "clip_value", "model_zeros", "model_none", "optimizer_zeros", "swapped", "vector",
    "state_dict", "evaluate", "load_model", "weight_foreach", "state_clear", "state_load", *UNDRAWN, *GROUPS,
}  # fmt: skip
# What is done also where there is none.
WITHOUT_GRADIENT = {"is_none", "random", "dropped", "collect", "combine", "kept"}
_OF_RANKS = {*READS, *IN_PLACE, *REPLACED, *FLAGS}


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
        self._kept: dict[tuple[Any, ...], Any] = {}

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
        on = On(self._run, act, self._targets(act), self._kept)
        if act.kind in OF_ALL:
            self._try((*key, 0), on)
            return
        for at in range(len(on.targets)):
            own = 0 if common(act) else key[0]
            generator = torch.Generator().manual_seed(10_000 * own + 1000 * key[1] + 100 * key[2] + at)
            self._try((*key, at), dataclasses.replace(on, at=at, generator=generator))

    def _try(self, key: Key, on: On) -> None:
        kind = on.act.kind
        of_gradient = kind in (*READS, *IN_PLACE, *REPLACED) and kind not in (*OF_ALL, *WITHOUT_GRADIENT)
        if key in self._left_out or (of_gradient and on.gradient is None):
            return
        try:
            with torch.no_grad() if kind in ACTS["weights"] else contextlib.nullcontext():
                value = OPERATIONS[kind](on)
        except Exception as error:
            if self._run.alone:
                raise
            self.refused[key] = error
            return
        if kind in READING and value is not None:
            self.reads[key] = torch.as_tensor(value, dtype=torch.float64).reshape(())

    def _targets(self, act: Act) -> list[Tensor]:
        optimizer = self._run.optimizers[0]
        if act.through == "pieces" and not self._run.alone:
            return [piece.parameter for piece in optimizer.pieces]
        owned = [p for group in optimizer.param_groups for p in group["params"]]
        # State of another one would break state_dict(), and its gradient is each rank's own after synchronize().
        own = act.through != "module" or act.kind.startswith("state") or act.place == "synchronized"
        those = owned if own else self._run.parameters
        return [those[target % len(those)] for target in act.targets] or list(those)

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
