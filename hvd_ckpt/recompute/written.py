"""Tensors that a first pass has written, and their values from before it, for its recomputations.

Writes in place show in version counters, and replaced tensors in their identity. The values from before must have been copied
before: small tensors always are, others once it is known that they are written. Passes that *learn*, the first ones of a region,
copy all buffers to find that out. For as long as a recomputation runs, modules then have scratch copies of the values from before
the first pass. The tensors themselves come back whatever the recomputation raises, so nothing is written twice, and what other
graphs have saved stays as it is. Parameters are leaves that gradients are accumulated for, so only their values are exchanged.

A batch norm is written without a word to the version counters: its count of batches tells
(:func:`hvd_ckpt.batchnorm.deferred.statistics_version`). Passes that learn compare values, and so find others that do the same.
"""

from __future__ import annotations

import random
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hvd_ckpt.batchnorm.deferred import STATISTICS, statistics_version
from hvd_ckpt.recompute.keeper import bytes_of, version_of
from hvd_ckpt.torch_private import unsafe_preserve_version_counter
from hvd_ckpt.utils.frames import aside
from hvd_ckpt.utils.unmaterialized import is_absent

GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
"""Objects that draw random numbers from a state of their own."""

SMALL_BYTES = 1 << 16
"""Buffers and attributes of modules up to this size are copied before each first pass, if they have changed since the last."""

_ABSENT = object()

_known: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()
"""Tensors that some first pass has written, by their module: copied before each pass from then on."""

_unseen: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()
"""Those among them that were written without a word to the version counters."""

_copies: weakref.WeakKeyDictionary[nn.Module, dict[str, tuple[Tensor, Any, Tensor]]] = (
    weakref.WeakKeyDictionary()
)
"""The last copies, each with what it is a copy of and its stamp. A region that is given as a lambda reaches the whole model though
it runs one block: without this, each of n regions would copy the buffers of all n blocks."""


@dataclass
class Written:
    """A tensor that a first pass has written, in place or by putting another one in its place.

    Attributes:
        name: for an error.
        space: the namespace that it is in.
        key: its name there.
        old: what was there before: the tensor, something else, or nothing.
        copy: the values from before; None where they are not known, or if the tensor was replaced and not changed.
        in_place: of a parameter or a tensor without a namespace: its values are exchanged, not the object.
        lost: the values from before are needed, and not known.
        initialized: it had none before; any do.
    """

    name: str
    space: dict[str, Any]
    key: str
    old: Any
    copy: Tensor | None = None
    in_place: bool = False
    lost: bool = False
    initialized: bool = False

    def give(self, scratch: dict[int, Tensor]) -> Callable[[], None]:
        """Puts back what was there before the first pass; returns a function that undoes it.

        Args:
            scratch: the copies that are in use already, by the identity of what they are copies of.
        """
        if self.in_place:
            return self._exchange_values()
        now = self.space.get(self.key, _ABSENT)
        old = self.old
        if self.copy is not None:
            if id(self.old) not in scratch:
                scratch[id(self.old)] = self.copy.clone().requires_grad_(self.old.requires_grad)
            old = scratch[id(self.old)]
        _put(self.space, self.key, old)
        return lambda: _put(self.space, self.key, now)

    def _exchange_values(self) -> Callable[[], None]:
        tensor = self.old
        if is_absent(tensor):  # stage 3: its unit brings the values
            return lambda: None
        now = tensor.detach().clone()
        if self.copy is not None:
            with unsafe_preserve_version_counter(tensor):
                tensor.copy_(self.copy)

        def undo() -> None:
            with aside(), unsafe_preserve_version_counter(tensor):
                tensor.copy_(now)

        return undo


def _put(space: dict[str, Any], key: str, value: Any) -> None:
    if value is _ABSENT:
        space.pop(key, None)
    else:
        space[key] = value


def namespaces_of(modules: Sequence[nn.Module], tensors: Sequence[Tensor], learn: bool) -> list[Namespace]:
    """The namespaces of some modules, and one of the tensors that no module has, before a first pass."""
    namespaces = [Namespace(None, "tensors", dict(enumerate(tensors)), False)] if tensors else []
    for module in modules:
        attributes = vars(module)
        namespaces.append(Namespace(module, "attributes", attributes, learn))
        used = (
            kind for kind in ("_buffers", "_parameters") if attributes[kind]
        )  # most modules have no buffers
        namespaces.extend(Namespace(module, kind, attributes[kind], learn) for kind in used)
    return namespaces


_LAZY = object()  # in place of a stamp: the tensor has no values yet
_NEITHER = {type(None), bool, int, float, str, dict, OrderedDict, set, list, tuple}  # most attributes


class Namespace:
    """One namespace of a module before a first pass: its attributes, buffers or parameters; or tensors that no module has.

    Args:
        module: the module, or None.
        kind: "attributes", "_buffers", "_parameters", or "tensors".
        space: the namespace.
        learn: copy all buffers and attributes, and compare values.

    Attributes:
        generators: objects in it that draw random numbers.
    """

    __slots__ = ("before", "copies", "generators", "kind", "learn", "module", "space", "tensors")

    def __init__(self, module: nn.Module | None, kind: str, space: dict[Any, Any], learn: bool) -> None:
        self.module, self.kind, self.space, self.learn = module, kind, space, learn
        self.before = space.copy()
        self.tensors: list[tuple[Any, Tensor, Any]] = []
        self.generators: list[Any] = []
        self.copies: dict[Any, Tensor] = {}
        for key, value in space.items():
            if type(value) in _NEITHER:
                continue
            if not isinstance(value, Tensor):
                if isinstance(value, GENERATORS):
                    self.generators.append(value)
                continue
            if type(value) is not Tensor and type(value) is not nn.Parameter:
                if is_absent(value):
                    continue
                if is_lazy(value):
                    self.tensors.append((key, value, _LAZY))
                    continue
            stamp = self._stamp(key, value)
            self.tensors.append((key, value, stamp))
            if self._is_copied(key, value):
                self.copies[key] = _copy(module, key, value, stamp)

    def _stamp(self, key: str, value: Tensor) -> Any:
        """What differs before and after a write."""
        if self.kind == "_buffers" or self.kind == "attributes":
            if type(value) is not Tensor and is_lazy(value):
                return _LAZY
            assert self.module is not None
            if _unseen and key in _unseen.get(self.module, ()):
                return object()
            if key in STATISTICS and (version := statistics_version(self.module, key)) is not None:
                return version, version_of(value)
        elif type(value) is not nn.Parameter and is_lazy(value):
            return _LAZY
        return version_of(value)

    def _is_copied(self, key: str, value: Tensor) -> bool:
        if self.module is None:
            return bytes_of(value) <= SMALL_BYTES and not value.requires_grad
        if _known and key in _known.get(self.module, ()):
            return True
        return self.kind != "_parameters" and (self.learn or bytes_of(value) <= SMALL_BYTES)

    def written(self) -> Iterator[Written]:
        """What has been written since."""
        for key, tensor, stamp in self.tensors:
            if type(tensor) is nn.Parameter:
                changed = version_of(tensor) != stamp
            else:
                changed = not is_absent(tensor) and self._changed(key, tensor, stamp)
            if changed or self.space.get(key) is not tensor:
                yield self._written_tensor(key, tensor, stamp, changed)
        before = self.before
        if _same_objects(self.space, before):
            return
        for key, new in self.space.items():
            old = before.get(key, _ABSENT)
            if new is not old and isinstance(new, Tensor) and not isinstance(old, Tensor):
                yield Written(self._name(key), self.space, key, old)

    def _changed(self, key: str, tensor: Tensor, stamp: Any) -> bool:
        """Whether a tensor was changed in place."""
        if stamp != self._stamp(key, tensor):
            return True
        if self.learn and key in self.copies and not _same_bits(self.copies[key], tensor):
            assert self.module is not None
            _unseen.setdefault(self.module, set()).add(key)
            return True
        return False

    def _written_tensor(self, key: str, tensor: Tensor, stamp: Any, changed: bool) -> Written:
        stays = self.space.get(key) is tensor
        in_place = stays and self.kind in ("_parameters", "tensors")
        copy = self.copies.get(key) if changed else None
        if changed and stamp is _LAZY:
            with aside():
                copy = tensor.detach().clone()
        if changed and self.module is not None:
            _known.setdefault(self.module, set()).add(key)
        old = tensor
        if tensor.grad_fn is not None and not stays:
            with aside():
                old = tensor.detach().requires_grad_()  # without the graph of an earlier pass
        lost = changed and copy is None and not in_place
        return Written(
            self._name(key), self.space, key, old, copy, in_place, lost, changed and stamp is _LAZY
        )

    def _name(self, key: str) -> str:
        return key if self.module is None else f"{type(self.module).__name__}.{key}"


def _same_objects(ours: dict[Any, Any], theirs: dict[Any, Any]) -> bool:
    """Whether two namespaces have the same values: quick where they do, as the comparison of dicts begins with identity."""
    try:
        return bool(ours == theirs)
    except Exception:  # of other values, tensors among them
        return False


def _copy(module: nn.Module | None, key: str, value: Tensor, stamp: Any) -> Tensor:
    """A copy of a tensor; of a module's small one, made anew only if it has changed since the last time."""
    if module is None or bytes_of(value) > SMALL_BYTES:
        with aside():
            return value.detach().clone()
    last = _copies.setdefault(module, {}).get(key)
    if last is not None and last[0] is value and last[1] == stamp:
        return last[2]
    with aside():
        copy = value.detach().clone()
    _copies[module][key] = (value, stamp, copy)
    return copy


def _same_bits(ours: Tensor, theirs: Tensor) -> bool:
    if theirs.layout is not torch.strided:
        return True
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    with aside():
        as_bytes = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (ours, theirs))
        return torch.equal(*as_bytes)
