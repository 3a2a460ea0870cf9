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
from layers import VOCABULARY, WIDTH
from programs import Act
from torch import Tensor, nn

from hvd_ckpt.reduction.gradients import has_values

Key = tuple[int, ...]
"""Of an operation: rank, step, position of the act, position of the parameter."""

MOMENTS = ("momentum_buffer", "exp_avg", "exp_avg_sq", "square_avg")  # in the state of optimizers


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
    def optimizer(self) -> Any:
        return self.run.optimizers[0]

    @property
    def groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @property
    def state_tensors(self) -> list[Tensor]:
        return [value for value in self.state[self.parameter].values() if isinstance(value, Tensor)]

    def replace(self, gradient: Tensor | None) -> None:
        self.parameter.grad = gradient

    def add_hook(self, change: Callable[[Tensor], Any]) -> None:
        def hook(parameter: Tensor) -> None:
            if parameter.grad is not None:
                change(parameter)

        if self.parameter.requires_grad:
            self.parameter.register_post_accumulate_grad_hook(hook)

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


def _read_in_hook(on: On) -> None:
    hand = weakref.proxy(on.run.hand)  # a cycle through the hooks of a parameter is never collected
    number = on.at

    def read(parameter: Tensor) -> None:
        key = (hand.run.rank, len(hand.run.seen), -1, number)
        before = hand.reads.get(key, torch.zeros((), dtype=torch.float64))
        hand.reads[key] = before + parameter.grad.double().norm()

    on.add_hook(read)


def _model_zeros(on: On) -> None:
    # One that raises must have no effect, also where gradients before it have values.
    for parameter in on.run.parameters:
        if parameter.grad is not None and not has_values(parameter.grad):
            parameter.grad.zero_()
    on.run.model.zero_grad(set_to_none=False)


def _swapped(on: On) -> None:
    first = on.targets[0]
    others = on.targets[1:] or on.run.parameters
    same = [p for p in others if p.shape == first.shape and p.dtype is first.dtype and p is not first]
    other = same[0] if same else first
    first.grad, other.grad = other.grad, first.grad


def _vector(on: On) -> Any:
    dtype = on.targets[0].dtype
    return nn.utils.parameters_to_vector([p for p in on.targets if p.dtype is dtype]).norm()


def _state_dict(on: On) -> Any:
    state = on.run.model.state_dict()
    return sum(value.double().norm().item() for value in state.values() if value.is_floating_point())


def _evaluate(on: On) -> Any:
    model, program = on.run.model, on.run.program
    x = torch.linspace(-1, 1, 2 * WIDTH, dtype=torch.float32).view(2, WIDTH)
    if program.embedding:
        x = torch.arange(6).view(2, 3) % VOCABULARY
    model.eval()
    try:
        return model(x, range(len(program.segments))).double().norm()
    finally:
        model.train()


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


def _state_set(on: On) -> None:
    parameter = on.parameter
    values = torch.linspace(0.0, 0.1, parameter.numel(), dtype=parameter.dtype).view(parameter.shape)
    for name in MOMENTS:
        if name in on.state[parameter]:
            on.state[parameter][name] = values.clone()


def _state_foreach(on: On) -> None:
    states = [on.state[parameter].values() for parameter in on.targets]
    values = [value for own in states for value in own if isinstance(value, Tensor) and value.dim()]
    if values:
        torch._foreach_zero_(values)


def _reset(on: On) -> None:
    """Drops all gradients, whether they have left or not."""
    on.optimizer.reset_reduction()
    assert all(parameter.grad is None for parameter in on.run.parameters)


def _load_order(on: On) -> None:
    on.optimizer.load_reduction_state_dict(on.optimizer.reduction_state_dict())
    assert all(parameter.grad is None for parameter in on.run.parameters)


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
    "model_zeros": _model_zeros,
    "optimizer_zeros": lambda on: on.optimizer.zero_grad(set_to_none=False),
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
    "model_none": lambda on: on.run.model.zero_grad(),
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
    "state_norm": lambda on: sum(value.double().norm().item() for value in on.state_tensors),
    "state_keys": lambda on: sum(map(len, on.state[on.parameter])),
}
STATE: Table = {
    "state_zero_": lambda on: [value.zero_() for value in on.state_tensors],
    "state_set": _state_set,
    "state_pop": lambda on: on.state.pop(on.parameter, None),
    "state_empty": lambda on: on.state.__setitem__(on.parameter, {}),
    "state_clear": lambda on: on.state.clear(),
    "state_load": lambda on: on.optimizer.load_state_dict(on.optimizer.state_dict()),
}
UNDRAWN: Table = {
    "state_new": lambda on: setattr(on.optimizer, "state", defaultdict(dict)),
    "state_foreach_zero_": _state_foreach,
    "reset": _reset,
    "order": _load_order,
    "passes": lambda on: on.optimizer.set_backward_passes_per_step(2),
}
GROUPS: Table = {
    "lr": lambda on: [group.update(lr=group["lr"] / on.act.value) for group in on.groups],
    "weight_decay": lambda on: [one.update(weight_decay=0.1) for one in on.groups if "weight_decay" in one],
    "momentum": lambda on: [group.update(momentum=0.5) for group in on.groups if group.get("momentum")],
}
HOOKS: Table = {
    "pre_mul": lambda on: on.parameter.requires_grad and on.parameter.register_hook(lambda g: g * 0.6),
    "post_mul": lambda on: on.add_hook(lambda parameter: parameter.grad.mul_(0.6)),
    "post_replace": lambda on: on.add_hook(lambda one: setattr(one, "grad", one.grad * 0.6)),
    "post_read": _read_in_hook,
}
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
OPERATIONS = dict(item for table in (*ACTS.values(), HOOKS, UNDRAWN) for item in table.items())
READING = {*READS, *WEIGHTS_READ, *STATE_READ, "average"}
OF_ALL = {  # of an act's parameters at once
    "total_norm", "foreach_mul_", "clip_norm", "clip_value", "model_zeros", "model_none", "optimizer_zeros", "swapped", "vector",
    "state_dict", "evaluate", "load_model", "weight_foreach", "state_clear", "state_load", *UNDRAWN, *GROUPS,
}  # fmt: skip
OF_GRADIENTS = (*READS, *IN_PLACE, *REPLACED)
# Done also where there is no gradient.
WITHOUT_ONE = ("is_none", "random", "dropped", "collect", "combine", "kept")


def common(act: Act) -> bool:
    """Whether an act is on what all ranks have in common: weights, state, reduced gradients. One process then performs it once."""
    of_ranks = act.kind in (*OF_GRADIENTS, *FLAGS) and act.kind != "optimizer_zeros"
    return not of_ranks or act.place == "synchronized"


class Hand:
    """The user of a run.

    Args:
        run: a :class:`interpreter.Run`.
        left_out: operations that are left out.

    Attributes:
        done: the acts that were begun, with their steps.
        reads: what each operation has read.
        refused: the error of each operation that raised one.
    """

    def __init__(self, run: Any, left_out: Container[Key]) -> None:
        self.run, self._left_out = run, left_out
        self.done: list[tuple[int, Act]] = []
        self.reads: dict[Key, Tensor] = {}
        self.refused: dict[Key, Exception] = {}
        self._kept: dict[tuple[Any, ...], Any] = {}

    def act(self, number: int, place: str, part: int = 0) -> None:
        """Performs the acts of a step at a place."""
        run = self.run
        for position, act in enumerate(run.program.steps[number].acts):
            if (act.place, act.part) != (place, part):
                continue
            self.done.append((number, act))
            time.sleep(0.0 if run.alone else act.pause)
            with run.optimizers[0].gathered_parameters() if act.within else contextlib.nullcontext():
                if run.alone and common(act):
                    self._perform(act, act.ranks, number, position)
                    continue
                for rank in act.ranks:
                    if rank in run.ranks:
                        with run.as_rank(rank):
                            self._perform(act, (rank,), number, position)

    def _perform(self, act: Act, ranks: tuple[int, ...], number: int, position: int) -> None:
        """Performs an act, at once for some ranks."""
        targets = self._targets(act)
        for at in range(1 if act.kind in OF_ALL else len(targets)):
            seed = 10_000 * (0 if common(act) else ranks[0]) + 1000 * number + 100 * position + at
            on = On(self.run, act, targets, self._kept, at, torch.Generator().manual_seed(seed))
            keys = [(rank, number, position, at) for rank in ranks]
            needed = act.kind in OF_GRADIENTS and act.kind not in (*OF_ALL, *WITHOUT_ONE)
            if (needed and on.gradient is None) or keys[0] in self._left_out:
                continue
            try:
                with torch.no_grad() if act.kind in ACTS["weights"] else contextlib.nullcontext():
                    value = OPERATIONS[act.kind](on)
            except Exception as error:
                if self.run.alone:
                    raise
                self.refused[keys[0]] = error
                continue
            if act.kind in READING and value is not None:
                self.reads |= dict.fromkeys(keys, torch.as_tensor(value, dtype=torch.float64).reshape(()))

    def _targets(self, act: Act) -> list[Tensor]:
        if act.kind in HOOKS:
            return [self.run.parameters[target % len(self.run.parameters)] for target in act.targets]
        optimizer = self.run.optimizers[0]
        if act.through == "pieces" and not self.run.alone:
            return [piece.parameter for piece in optimizer.pieces]
        # State of another one would break state_dict(), and its gradient is each rank's own after synchronize().
        own = act.through != "module" or act.kind.startswith("state") or act.place == "synchronized"
        owned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        those = owned if own else self.run.parameters
        return [those[target % len(those)] for target in act.targets] or list(those)
