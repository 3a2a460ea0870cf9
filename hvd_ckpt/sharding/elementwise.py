"""Does an optimizer work on each element by itself? Only then may a parameter be cut anywhere.

The classes of torch.optim are known. Any other is tried out: a copy of it steps on a small matrix, two more copies on the two
parts of the same matrix, and all must agree. A copy has the optimizer's class and hyperparameters, and parameters of its own.
"""

from __future__ import annotations

import copy
import functools
import math
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from hvd_ckpt.sharding import STAGES

__all__ = ["StepFacts", "check_elementwise", "probe"]

_ELEMENTWISE = {
    getattr(torch.optim, name)
    for name in (
        "ASGD",
        "Adadelta",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    )
}
_REASONS = {
    "LBFGS": "L-BFGS takes inner products over all parameters",
    "Adafactor": "Adafactor keeps sums of a matrix's rows and columns",
    "Muon": "Muon makes each whole matrix orthogonal",
    "SparseAdam": "SparseAdam takes sparse gradients only, and shards are dense",
}

# More than the blocks of quantized states, and no multiple of their length where it is cut.
_SHAPE, _CUT = (64, 96), 1000
_STEPS = 3
_TOLERANCE = 1e-6
_LEAST_RATE = 1e-3  # a rate of 0, as at the start of a warm-up, would show nothing
_PLAIN = {"capturable": False, "foreach": False, "fused": False, "differentiable": False}
_NOT_COPIED = ("step", "state", "param_groups")
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


@dataclass(frozen=True)
class StepFacts:
    """Properties of a step of an optimizer.

    Attributes:
        elementwise: whether each element is updated from its own value, gradient and state alone.
        state_keys: names of the state tensors that have as many elements as the parameter, and their dtypes.
        scalar_keys: names of all other state.
        mutates_groups: whether a step changes values in ``param_groups`` or attributes of the optimizer.
    """

    elementwise: bool
    state_keys: dict[str, torch.dtype]
    scalar_keys: tuple[str, ...]
    mutates_groups: bool


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Makes sure that an optimizer can step on parts of parameters.

    Raises:
        ValueError: it cannot; the message says why and which stages it supports.
    """
    kind = _class_of(optimizer)
    if kind in _ELEMENTWISE:
        return
    for name, reason in _REASONS.items():
        known = getattr(torch.optim, name, None)
        if known is not None and issubclass(kind, known):
            raise ValueError(_refusal(kind, reason))
    if not probe(optimizer).elementwise:
        raise ValueError(
            _refusal(kind, "it gave other results on the two parts of a matrix than on the whole of it")
        )


def probe(
    optimizer: torch.optim.Optimizer, group: int | None = None, dtype: torch.dtype = torch.float32
) -> StepFacts:
    """Tries an optimizer out on small parameters of its own, on the CPU. Neither its parameters and state nor the random state
    change.

    Args:
        optimizer: any; a learning rate below 0.001 counts as 0.001, and the plain implementation runs (not fused, foreach or
            capturable).
        group: the parameter group whose state is described; by default all of them.
        dtype: of the parameters whose state is described.

    Raises:
        ValueError: the trial raised an exception; it names the class and what it said.
    """
    kind = _class_of(optimizer)
    _check_plain(optimizer, kind)
    try:
        with _own_random_state():
            trial = _Trial(optimizer, kind, dtype, "tail")
            elementwise = kind in _ELEMENTWISE or _parts_agree(optimizer, kind)
    except Exception as error:
        said = " ".join(str(error).split()) or "nothing"
        raise ValueError(
            _refusal(kind, f"a trial step on a small parameter raised {type(error).__name__}: {said}")
        ) from error
    return StepFacts(elementwise, *trial.state_of(group), trial.mutated)


class _Trial:
    """A copy of an optimizer that has taken a few steps on a matrix, or on a part of it, in each of its groups."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, kind: type[Any], dtype: torch.dtype, part: str
    ) -> None:
        self.start = [_values(index, part).to(dtype) for index in range(len(optimizer.param_groups))]
        try:
            self._step(optimizer, kind, part, seeded=False)
        except KeyError:  # classes such as Adagrad make their state in the constructor
            self._step(optimizer, kind, part, seeded=True)

    def _step(self, optimizer: torch.optim.Optimizer, kind: type[Any], part: str, seeded: bool) -> None:
        torch.default_generator.manual_seed(0)
        self.parameters = [torch.nn.Parameter(start.clone()) for start in self.start]
        self.trial = _copy(optimizer, kind, self.parameters)
        if seeded:
            for group, parameter in zip(optimizer.param_groups, self.parameters):
                self.trial.state[parameter] = _seed(optimizer, group, parameter)
        before = _settings(self.trial)
        for step in range(_STEPS):
            for parameter in self.parameters:
                parameter.grad = _gradient(step, part).to(parameter.dtype, copy=True)
            self.trial.step()
        self.mutated = not _same(before, _settings(self.trial))

    def changes(self) -> list[torch.Tensor]:
        return [
            (parameter.detach() - start).flatten() for parameter, start in zip(self.parameters, self.start)
        ]

    def state_of(self, group: int | None) -> tuple[dict[str, torch.dtype], tuple[str, ...]]:
        tensors: dict[str, torch.dtype] = {}
        others: dict[str, None] = {}
        for parameter in self.parameters if group is None else [self.parameters[group]]:
            for name, value in self.trial.state[parameter].items():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    tensors[name] = value.dtype
                else:
                    others[name] = None
        return tensors, tuple(name for name in others if name not in tensors)


def _parts_agree(optimizer: torch.optim.Optimizer, kind: type[Any]) -> bool:
    """Whether two parts of a matrix change as the whole does. Each part is alone in its optimizer, so that norms over all
    parameters show as well."""
    whole, *parts = (_Trial(optimizer, kind, torch.float64, part) for part in ("whole", "head", "tail"))
    for change, *pieces in zip(whole.changes(), *(part.changes() for part in parts)):
        difference = (torch.cat(pieces) - change).abs()
        if not bool((difference <= _TOLERANCE * change.abs() + 1e-12 * change.abs().max()).all()):
            return False
    return True


def _values(group: int, part: str) -> torch.Tensor:
    """Values of either sign and of several magnitudes: of the matrix, or of a part of its elements."""
    index = torch.arange(math.prod(_SHAPE), dtype=torch.float64)
    return _part(torch.sin(index * 0.7 + group) * (1 + index / 500), part)


def _gradient(step: int, part: str) -> torch.Tensor:
    return _part(_whole_gradient(step), part)


@functools.cache
def _whole_gradient(step: int) -> torch.Tensor:
    index = torch.arange(math.prod(_SHAPE), dtype=torch.float64)
    return torch.cos(index * 1.3 + step) * (0.01 + index / 2000)


def _part(flat: torch.Tensor, part: str) -> torch.Tensor:
    if part == "whole":
        return flat.reshape(_SHAPE)
    return flat[:_CUT] if part == "head" else flat[_CUT:]


def _copy(
    optimizer: torch.optim.Optimizer, kind: type[Any], parameters: list[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """An optimizer of the same class, hyperparameters and attributes, for these parameters, one for each group."""
    memo: dict[int, Any] = {}
    for group, stand_in in zip(optimizer.param_groups, parameters):
        memo.update((id(parameter), stand_in) for parameter in group["params"])
    new: torch.optim.Optimizer = object.__new__(kind)
    for name, value in vars(optimizer).items():
        if name not in _NOT_COPIED:
            vars(new)[name] = OrderedDict() if name in _HOOKS else _copied(value, memo)
    new.state = defaultdict(dict)
    new.param_groups = [
        _group(group, stand_in, memo) for group, stand_in in zip(optimizer.param_groups, parameters)
    ]
    return new


def _group(group: Mapping[str, Any], parameter: torch.nn.Parameter, memo: dict[int, Any]) -> dict[str, Any]:
    new: dict[str, Any] = {name: _copied(value, memo) for name, value in group.items() if name != "params"}
    new.update((name, value) for name, value in _PLAIN.items() if new.get(name))
    rate = new.get("lr")
    if isinstance(rate, (int, float, torch.Tensor)) and float(rate) < _LEAST_RATE:
        new["lr"] = torch.full_like(rate, _LEAST_RATE) if isinstance(rate, torch.Tensor) else _LEAST_RATE
    return {"params": [parameter], **new}


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Containers and tensors are copied, so that a trial cannot reach what is the optimizer's; tensors come to the CPU."""
    if isinstance(value, torch.Tensor):
        return memo[id(value)] if id(value) in memo else value.detach().to("cpu", copy=True)
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_copied(item, memo) for item in value)
    if type(value) is dict:
        return {key: _copied(item, memo) for key, item in value.items()}
    if isinstance(value, (dict, list, set, deque)):
        return copy.deepcopy(value, dict(memo))
    return value


def _seed(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], like: torch.Tensor) -> dict[str, Any]:
    """State for a trial's parameter, as some parameter has it, if possible of the group: its tensors filled with their first
    element."""
    for parameter in (*group["params"], *optimizer.state):
        state = optimizer.state.get(parameter)
        if state:
            return {
                name: torch.full(like.shape, value.flatten()[0].item(), dtype=value.dtype)
                if isinstance(value, torch.Tensor) and value.numel() and value.shape == parameter.shape
                else _copied(value, {})
                for name, value in state.items()
            }
    return {}


def _check_plain(optimizer: torch.optim.Optimizer, kind: type[Any]) -> None:
    """A copy of an optimizer that holds another one, or a model, would step on the real parameters."""
    for name, value in vars(optimizer).items():
        for held in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(held, (torch.optim.Optimizer, torch.nn.Module)):
                raise ValueError(
                    _refusal(
                        kind, f"its attribute '{name}' is a {type(held).__name__}, so it cannot be tried out"
                    )
                )


def _settings(optimizer: torch.optim.Optimizer) -> Any:
    """All values that are not state: copies."""
    groups = [
        {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    attributes = {
        name: _copied(value, {})
        for name, value in vars(optimizer).items()
        if name not in (*_NOT_COPIED, *_HOOKS) and not callable(value)
    }
    return groups, attributes


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return (
            isinstance(one, torch.Tensor)
            and isinstance(other, torch.Tensor)
            and one.shape == other.shape
            and bool(((one == other) | (one != one)).all())
        )
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(_same(a, b) for a, b in zip(one, other))
    if type(one) is not type(other):
        return False
    if isinstance(one, (bool, int, float, str)):
        return one == other or one != one
    return True


@contextmanager
def _own_random_state() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        yield


def _class_of(optimizer: torch.optim.Optimizer) -> type[Any]:
    """The class that steps: of a distributed optimizer the wrapped one."""
    kind: type[Any] = getattr(optimizer, "_wrapped_class", type(optimizer))
    return kind


def _refusal(kind: type[Any], reason: str) -> str:
    return (
        f"optimizer {kind.__name__} does not work on each element by itself ({reason}), so its state cannot be split over the "
        f"ranks: it supports shard='{STAGES[0]}' (0) only; for the other stages take an element-wise one such as torch.optim.AdamW"
    )
