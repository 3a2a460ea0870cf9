"""``optimizer.state`` of a sharded optimizer, by parameter of the model: this rank's parts of the state.

A part looks like a tensor of the parameter's elements and is not one, so it allows what is done to each element by itself, and
nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch

from hvd_ckpt.sharding.layout import Piece
from hvd_ckpt.utils.torch_private import DisableTorchFunctionSubclass, pytree

if TYPE_CHECKING:
    from hvd_ckpt.sharding.sharding import Sharding

# State of torch.optim's classes that is not of a parameter's elements.
COUNTERS = ("step", "eta", "mu", "mu_product")
# Of the shape of their argument, and not of each element by itself; values of some elements; or draws, which one process would
# make for all elements at once.
_OTHERS = """cummax cummin cumprod cumprod_ cumsum cumsum_ flip fliplr item log_softmax logcumsumexp numpy renorm renorm_ roll
    softmax sort tolist __array__ __bool__ __contains__ __float__ __int__ __iter__ bernoulli bernoulli_ cauchy_ dropout dropout_
    exponential_ geometric_ log_normal_ normal_ rand_like randint_like randn_like random_ uniform_"""
_NOT_ELEMENTWISE = frozenset(_OTHERS.split())


if TYPE_CHECKING:
    _Base = MutableMapping[Any, Any]
else:

    class _Base(MutableMapping, dict):
        pass


class _View(_Base):
    """A mapping without contents of its own. It is a dict for code that asks."""

    def copy(self) -> dict[Any, Any]:
        return dict(self)

    def __repr__(self) -> str:
        return repr(dict(self))

    def __or__(self, other: Any) -> Any:
        return dict(self) | dict(other)

    def __ior__(self, other: Any) -> Any:
        self.update(other)
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self),)


class StateOfParameters(_View):
    """``optimizer.state``: by parameter of the model what this rank has of its state; by other keys what the wrapped class keeps.

    A piece is a key, too, and gives its plain state.
    """

    def __init__(self, sharding: Sharding) -> None:
        self._sharding = sharding

    @property
    def _own(self) -> Any:
        return self._sharding.state

    def _resolved(self, key: Any) -> tuple[Any, bool]:
        """The key in the wrapped class's state (None where this rank has nothing of a parameter), and whether a parameter's."""
        if not isinstance(key, torch.Tensor):
            return key, False
        if self._sharding.layout.index(key) is not None:
            piece = self._sharding.piece_of(key)
            return None if piece is None else piece.parameter, True
        if not self._sharding.is_piece(key):
            raise KeyError(
                f"optimizer.state has no entry of a tensor of shape {tuple(key.shape)}: it is no parameter of this optimizer"
            )
        return key, False

    def __getitem__(self, key: Any) -> Any:
        own, is_parameter = self._resolved(key)
        return StateOfParameter(self._sharding, key) if is_parameter else self._own[own]

    def __setitem__(self, key: Any, value: Any) -> None:
        own, is_parameter = self._resolved(key)
        if not is_parameter:
            self._own[own] = value
        elif isinstance(value, Mapping):
            fresh = StateOfParameter(self._sharding, key)
            items = {name: fresh.taken(name, entry) for name, entry in value.items()}
            if own is not None:
                self._own[own] = items
        else:
            raise TypeError(f"optimizer.state[parameter] takes a dict, not {type(value).__name__}")

    def __delitem__(self, key: Any) -> None:
        own, is_parameter = self._resolved(key)
        if not is_parameter or own is not None:  # what other ranks have they delete
            del self._own[own]

    def __contains__(self, key: object) -> bool:
        try:
            own, _ = self._resolved(key)
        except KeyError:
            return False
        return own is not None and own in self._own

    def get(self, key: Any, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401

    def pop(self, key: Any, *default: Any) -> Any:
        if default and key not in self:
            return default[0]
        own, is_parameter = self._resolved(key)
        if not is_parameter:
            return self._own.pop(own, *default)
        found = dict(self[key])
        if own is not None:
            del self._own[own]
        return found

    def __iter__(self) -> Iterator[Any]:
        return iter([self._sharding.whole_of(key) for key in self._own])

    def __len__(self) -> int:
        return len(self._own)

    def clear(self) -> None:
        self._own.clear()

    def replace(self, state: Mapping[Any, Any]) -> None:
        """Takes what somebody has put in place of this one."""
        items = list(state.items())
        self._own.clear()
        self.update(items)


class StateOfParameter(_View):
    """``optimizer.state[parameter]``: this rank's parts of the state of one parameter; empty where it has no elements of it.

    Values with an element for each of the parameter's are :class:`StatePart`. A value that is set may be of the whole parameter,
    the same on every rank: each rank keeps its part.
    """

    def __init__(self, sharding: Sharding, parameter: torch.Tensor) -> None:
        self._sharding = sharding
        index = sharding.layout.index(parameter)
        assert index is not None
        self._name, self._spec, self._dtype = (
            sharding.layout.names[index],
            sharding.layout.specs[index],
            parameter.dtype,
        )
        self._piece: Piece | None = sharding.piece_of(parameter)

    @property
    def _own(self) -> dict[str, Any]:
        """The entries in the wrapped class's state."""
        found = None if self._piece is None else self._sharding.state.get(self._piece.parameter)
        return {} if found is None else found

    def __getitem__(self, name: str) -> Any:
        piece = self._piece
        if piece is None:  # so that code which changes a value by name does so on every rank
            return StatePart.of(torch.empty(0, dtype=torch.float32), self._name, 0, 0)
        value = self._own[name]
        if isinstance(value, torch.Tensor) and value.shape == (piece.stop - piece.start,):
            return StatePart.of(value, self._name, piece.start, piece.stop)
        return value

    def __setitem__(self, name: str, value: Any) -> None:
        value, piece = self.taken(name, value), self._piece
        if piece is not None:
            self._sharding.state.setdefault(piece.parameter, {})[name] = value

    def taken(self, name: str, value: Any) -> Any:
        """A value as the wrapped class is to have it.

        Raises:
            ValueError: it is not of this parameter.
        """
        if not isinstance(value, torch.Tensor):
            return value
        start, stop = (0, 0) if self._piece is None else (self._piece.start, self._piece.stop)
        if isinstance(value, StatePart):
            if value.of_parameter != (self._name, start, stop):
                raise value.refused("setting it as the state of another parameter")
            return value.plain
        if value.shape == self._spec.shape and not (value.dim() == 0 and name in COUNTERS):
            part = self._spec.flatten(value)[start:stop].clone()
            before = self._own.get(name)
            if isinstance(before, torch.Tensor):
                return part.to(before.dtype)
            # What belongs to a half-precision weight belongs to its master here.
            return (
                part
                if self._piece is None or part.dtype != self._dtype
                else part.to(self._piece.parameter.dtype)
            )
        if value.numel() != 1 and (self._piece is None or value.shape != (stop - start,)):
            raise ValueError(
                f"optimizer.state: '{name}' of parameter '{self._name}' was given a tensor of shape {tuple(value.shape)}, and the "
                f"parameter has shape {tuple(self._spec.shape)}; give a tensor of that shape, of which each rank keeps its part"
            )
        return value

    def __delitem__(self, name: str) -> None:
        if self._piece is not None:
            del self._own[name]

    def pop(self, name: str, *default: Any) -> Any:
        if name not in self and (default or self._piece is None):
            return default[0] if default else self[name]
        value = self[name]
        del self[name]
        return value

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401

    def __contains__(self, name: object) -> bool:
        return name in self._own

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._own))

    def __len__(self) -> int:
        return len(self._own)


class StatePart(torch.Tensor):
    """This rank's elements of a value in ``optimizer.state[parameter]``, 1-D, in the same memory.

    What works on each element by itself is allowed, also together with numbers and other parts of the same parameter.

    Raises:
        RuntimeError: anything else, such as a norm, or an operation with a whole parameter.
    """

    of_parameter: tuple[str, int, int]  # name, first element, and last element + 1

    @staticmethod
    def of(values: torch.Tensor, name: str, start: int, stop: int) -> StatePart:
        with DisableTorchFunctionSubclass():
            part = values.detach().as_subclass(StatePart)
        part.of_parameter = (name, start, stop)
        return part

    @property
    def plain(self) -> torch.Tensor:
        """The same memory as a plain tensor."""
        with DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)

    def refused(self, what: str) -> RuntimeError:
        name, start, stop = self.of_parameter
        return RuntimeError(
            f"optimizer.state: this rank has elements {start} to {stop} of the state of parameter '{name}', which is split over "
            f"the ranks, and '{what}' needs other elements, too; use optimizer.full_state_dict(), or work on each of "
            f"optimizer.pieces and optimizer.state[piece.parameter]"
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        each = name.startswith("_foreach_")
        # Functions of lists work on one place of all lists after the other, with what is not in a list.
        lists = (
            [value for value in (*args, *kwargs.values()) if isinstance(value, (list, tuple))] if each else []
        )
        others = (
            [value for value in (*args, *kwargs.values()) if not isinstance(value, (list, tuple))]
            if each
            else [(args, kwargs)]
        )
        rows = [pytree.tree_leaves((row, others)) for row in (zip(*lists) if each else [()])]
        parts = [next((leaf for leaf in row if isinstance(leaf, cls)), None) for row in rows]
        for row, part in zip(rows, parts):
            if part is not None and (name in _NOT_ELEMENTWISE or not all(map(part.goes_with, row))):
                raise part.refused(name)
            if name in ("__getitem__", "__setitem__") and not (
                isinstance(args[1], (StatePart, type(...))) or args[1] == slice(None)
            ):
                raise args[0].refused(name)
        with DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        if each and isinstance(result, (list, tuple)):
            return [
                value if part is None else part.wrapped(value, name) for value, part in zip(result, parts)
            ]
        part = next(part for part in parts if part is not None)
        return pytree.tree_map_only(torch.Tensor, lambda value: part.wrapped(value, name), result)

    def goes_with(self, value: Any) -> bool:
        """Whether this may be an operand of the same operation: a number, or a part of the same elements."""
        with DisableTorchFunctionSubclass():
            if isinstance(value, StatePart):
                return value.of_parameter == self.of_parameter
            return not isinstance(value, torch.Tensor) or value.dim() == 0

    def wrapped(self, value: torch.Tensor, what: str) -> torch.Tensor:
        """A result of ``what``, which is a part again."""
        with DisableTorchFunctionSubclass():
            if isinstance(value, StatePart):
                return value
            if value.shape != self.shape:
                raise self.refused(what)
        return StatePart.of(value, *self.of_parameter)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        name, start, stop = self.of_parameter
        return f"StatePart('{name}', elements {start} to {stop}, {self.plain!r})"

    def __deepcopy__(self, memo: Any) -> StatePart:
        return StatePart.of(self.plain.clone(), *self.of_parameter)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self.refused("pickle")
