"""Nested containers, taken apart into their values and made again from other values.

A checkpointed function may change the containers among its arguments (a dict of features, a cache in a list), and its recomputation
must see them as they were. So a container is described when the first pass begins, and made again for each recomputation.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType
from typing import Any

import torch

from hvd_ckpt.utils.torch_private import pytree


def flatten(value: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """The values in nested containers, in order, and a function that makes the containers again, with other values in their places.

    Containers are lists, tuples, dicts, data classes, the types that PyTorch's pytree knows, and plain objects that hold tensors or
    an empty container (a cache). Everything else is a value. A container that occurs twice is one container again.
    """
    leaves: list[Any] = []
    root = _describe(value, leaves, {})
    return leaves, lambda values: root(values, {})


def _describe(value: Any, leaves: list[Any], known: dict[int, _Node | None]) -> _Node:
    # ``known`` has None for a container whose description has begun and not ended: a reference to it is a cycle, and it stays as
    # it is.
    node = known.get(id(value))
    if node is not None:
        return node
    parts = None if id(value) in known else _take_apart(value)
    if parts is None:
        leaves.append(value)
        return _Node([], None, len(leaves) - 1)
    known[id(value)] = None
    children, make = parts
    node = known[id(value)] = _Node([_describe(child, leaves, known) for child in children], make)
    return node


@dataclasses.dataclass(eq=False)
class _Node:
    """A container, or the place of a leaf."""

    children: list[_Node]
    make: Callable[[list[Any]], Any] | None
    leaf: int = -1

    def __call__(self, leaves: Sequence[Any], made: dict[int, Any]) -> Any:
        if self.make is None:
            return leaves[self.leaf]
        if id(self) not in made:
            made[id(self)] = self.make([child(leaves, made) for child in self.children])
        return made[id(self)]


def _take_apart(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """The values of a container, and a function that makes such a container from values; None for other objects."""
    kind = type(value)
    if kind in _SCALARS or isinstance(value, (torch.Tensor, torch.nn.Module)):
        return None
    node = pytree.SUPPORTED_NODES.get(pytree._get_node_type(value))
    if node is not None:
        children, context = node.flatten_fn(value)
        return list(children), lambda new: node.unflatten_fn(new, context)
    attributes = dict(getattr(value, "__dict__", {}))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        slots = [field.name for field in dataclasses.fields(value)] if not hasattr(value, "__dict__") else []
        attributes |= {name: getattr(value, name) for name in slots if hasattr(value, name)}
    elif isinstance(value, (dict, list)):
        if kind.__init__ not in _INITS:  # of a subclass that adds more than methods
            return None
        if isinstance(value, list):
            return list(value), lambda new: _set(kind(new), attributes)
        keys = list(value)
        return list(value.values()), lambda new: _set(kind(zip(keys, new)), attributes)
    elif not (_is_plain_object(kind) and _holds_tensors(value, _OBJECTS)):
        return None
    return list(attributes.values()), lambda new: _set(object.__new__(kind), dict(zip(attributes, new)))


_OBJECTS = 3  # levels of plain objects that are searched for tensors
_INITS: tuple[Any, ...] = (dict.__init__, OrderedDict.__init__, list.__init__)


def _is_plain_object(kind: type) -> bool:
    """Whether objects of the class consist of their attributes alone."""
    methods: tuple[Any, ...] = (kind.__new__, kind.__setattr__)
    if methods != (object.__new__, object.__setattr__) or kind.__dictoffset__ == 0:
        return False
    return not issubclass(kind, (type, ModuleType, FunctionType))


def _holds_tensors(value: Any, depth: int) -> bool:
    """Whether a value holds tensors, or an empty list or dict, which may hold tensors later."""
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, (list, tuple)):
        return value == [] or any(_holds_tensors(item, depth) for item in value)
    if isinstance(value, dict):
        return not value or any(_holds_tensors(item, depth) for item in value.values())
    if depth == 0 or isinstance(value, torch.nn.Module) or not _is_plain_object(type(value)):
        return False
    return any(_holds_tensors(item, depth - 1) for item in vars(value).values())


_SCALARS = {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device}


def _set(new: Any, attributes: dict[str, Any]) -> Any:
    for name, value in attributes.items():
        object.__setattr__(new, name, value)  # also works for a frozen data class
    return new


class Arguments:
    """Nested containers taken apart into their tensors and the rest.

    Attributes:
        tensors: each tensor once, in order. The caller clears the list once the tensors are held elsewhere.
    """

    def __init__(self, value: Any) -> None:
        leaves, self._rebuild = flatten(value)
        self.tensors: list[torch.Tensor] = []
        self._others: list[Any] = []
        self._places: list[int | None] = []  # for each leaf, the index of its tensor
        known: dict[int, int] = {}
        for leaf in leaves:
            is_tensor = isinstance(leaf, torch.Tensor)
            self._others.append(None if is_tensor else leaf)
            self._places.append(known.setdefault(id(leaf), len(known)) if is_tensor else None)
            # Met for the first time: setdefault() has just given it the next number.
            if len(known) > len(self.tensors):
                self.tensors.append(leaf)

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The containers, which hold ``tensors`` in the places of :attr:`tensors`."""
        pairs = zip(self._others, self._places)
        return self._rebuild([other if place is None else tensors[place] for other, place in pairs])
