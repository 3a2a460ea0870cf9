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
    """The structure of ``optimizer.state_dict()``."""

    state: dict[int, dict[str, Any]]
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
        for number, entries in self.state.items():
            if number not in numbers:
                raise ValueError(f"state[{number}] is not of a parameter of its groups")
            for name, value in entries.items():
                if not (value is None or isinstance(value, (Tensor, bool)) or is_number(value)):
                    raise ValueError(
                        f"state[{number}].{name} is {described(value)}, and must be a tensor or a finite number"
                    )
        return self


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
