"""Schemas of state dicts. The class that loads a state from a file checks it before use.

A state consists of tensors and plain data. Its owner declares a :class:`State` beside ``state_dict``, and ``load_state_dict`` calls
:meth:`State.check`. A snapshot has the states of many owners and uses the same schemas.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor

from hvd_ckpt.utils.schema import Strict, first_error, shown


def _no_tensor(value: Any) -> Any:
    if isinstance(value, Tensor):  # pydantic takes a tensor of one element for a number
        raise ValueError("must be a number, not a tensor")
    return value


NUMBER = BeforeValidator(_no_tensor)
MAX_DEPTH = 100
NOT_SPLIT = "keep it in param_groups, or let each rank have the whole state (shard='none', without pipeline stages or parts)"
Count = Annotated[int, Field(ge=0, le=2**62)]
Positive = Annotated[int, Field(ge=1, le=2**62)]
Weight = Annotated[float, Field(ge=0), NUMBER]


class State(Strict):
    """Base class of the schemas of state dicts."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    @classmethod
    def check(cls, state: Any, what: str) -> None:
        """Raises ValueError unless ``state`` has this schema. The message begins with ``what``, the name of the state."""
        try:
            cls.model_validate(state)
        except ValidationError as error:
            raise ValueError(f"{what} cannot be loaded: {first_error(error)}") from None


class OptimizerState(State):
    """What the ``state_dict()`` of an optimizer may be, for those who save it and those who load it.

    ``state`` has what the optimizer keeps of each parameter, under its number, and of others, under keys of its own. An optimizer
    may add entries. Each is plain data with tensors. In what is kept of a parameter there are no texts, since PyTorch's
    ``load_state_dict`` iterates over them.
    """

    model_config = ConfigDict(extra="allow")

    state: dict[Any, Any]
    param_groups: list[dict[str, Any]]

    @model_validator(mode="after")
    def _is_of_its_groups(self) -> OptimizerState:
        numbers: list[Any] = []
        for at, group in enumerate(self.param_groups):
            params = group.get("params")
            if not isinstance(params, list) or not all(type(number) is int for number in params):
                raise ValueError(
                    f"param_groups[{at}].params is {described(params)}, and must be a list of integers"
                )
            numbers += params
        if not self.param_groups or len(set(numbers)) < len(numbers):
            raise ValueError("param_groups do not have each parameter once")
        known = set(numbers)
        for key, entries in self.state.items():
            place = f"state[{key if isinstance(key, (int, float)) else ascii(key)[:60]}]"
            if type(key) is not int:
                if isinstance(key, (bool, float)):  # 1.0 and True are 1 for a dict
                    raise ValueError(f"{place} has a number as key that is not of a parameter: use a text")
            elif key not in known:
                raise ValueError(
                    f"{place} is not of a parameter of its groups: use a text as key for what is not"
                )
            elif not isinstance(entries, dict):
                raise ValueError(f"{place} is {described(entries)}, and must be a dict")
            else:
                for name, value in entries.items():
                    if not isinstance(name, str):
                        raise ValueError(
                            f"{place} has the key {ascii(name)[:60]}, and must have texts as keys"
                        )
                    if not is_single(value):
                        self._check_of_parameter(f"{place}.{name}", value)
        return self

    def _check_of_parameter(self, place: str, value: Any, depth: int = 0) -> None:
        """Checks an entry of what is kept of a parameter."""
        if is_single(value):
            return
        if depth > MAX_DEPTH:
            raise ValueError(f"{place[:100]}... is nested too deep: store it flat")
        if isinstance(value, dict):
            for key, item in value.items():
                self._check_of_parameter(f"{place}[{ascii(key)[:60]}]", item, depth + 1)
        elif isinstance(value, (list, tuple)):
            for at, item in enumerate(value):
                self._check_of_parameter(f"{place}[{at}]", item, depth + 1)
        else:
            raise ValueError(
                f"{place} is {described(value)}, and must be a tensor, a number, or a list or dict of these: keep a text in "
                "param_groups, or in state under a key that is a text"
            )


def is_single(value: Any) -> bool:
    """Whether an entry of a state is one tensor or number, or none."""
    return value is None or isinstance(value, (Tensor, bool, int, float))


def is_number(value: Any) -> bool:
    """Whether a value is a finite number that does not overflow."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) <= 2**62 if isinstance(value, int) else math.isfinite(value)


def described(value: Any) -> str:
    """A value of a state in words: its kind, and the value where that is short."""
    if isinstance(value, Tensor):
        return f"a tensor of {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return (
        shown(value) if value is None or isinstance(value, (bool, int, str)) else f"a {type(value).__name__}"
    )
