"""Tensors that a first pass has written, and their earlier values, for its recomputations.

A write in place shows in a version counter, and a replaced tensor in its identity. The earlier values must have been copied before
the pass: small tensors are always copied, others once a pass is known to write them. Passes that *learn*, the first ones of a
region, copy all buffers to find out, and the parameters of modules that may write them.

During a recomputation, modules have scratch copies of the values from before the first pass. The tensors themselves come back
afterwards, whatever the recomputation raises. So nothing is written twice, and what other graphs have saved stays as it is.
Parameters are leaves whose gradients are accumulated, so only their values are exchanged.

Batch norms write their statistics past the version counters; their count of batches tells
(:func:`hvd_ckpt.batchnorm.deferred.statistics_version`). Passes that learn compare values, and so find other writes of this kind;
of small buffers of modules that are not PyTorch's, all passes do.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hvd_ckpt.batchnorm.deferred import STATISTICS, statistics_version
from hvd_ckpt.recompute.keeper import bytes_of, version_of
from hvd_ckpt.utils.frames import aside
from hvd_ckpt.utils.random_sources import GENERATORS
from hvd_ckpt.utils.torch_private import unsafe_preserve_version_counter
from hvd_ckpt.utils.unmaterialized import is_absent

SMALL_BYTES = 1 << 16
"""Buffers and attributes of modules up to this size are copied before each first pass, unless the last copy is still valid."""

_ABSENT = object()

_known: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()
"""Names of tensors that some first pass has written, by their module. They are copied before each later pass."""

_unseen: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()
"""Those of them that were written past their version counters."""

_copies: weakref.WeakKeyDictionary[nn.Module, dict[str, tuple[Tensor, Any, Tensor]]] = (
    weakref.WeakKeyDictionary()
)
"""The last copy of each small tensor, with the tensor and its stamp. A region that is a lambda reaches the whole model although it
runs one block, so without this each of n regions would copy the buffers of all n blocks."""


@dataclass
class Written:
    """A tensor that a first pass has written, in place or by putting another one in its place.

    Attributes:
        name: its name, for errors.
        space: the namespace that has it.
        key: its name in the namespace.
        old: the earlier value: the tensor, another object, or none.
        copy: the earlier values of the elements; None if they are unknown, or if the tensor was replaced and not changed.
        in_place: whether recomputation exchanges the values and not the object: for parameters, and tensors that no module has.
        lost: whether the earlier values are needed and unknown.
        initialized: whether the tensor was lazy and had no values before, so that any values will do.
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
        """Restores the value from before the first pass; returns a function that undoes this.

        Args:
            scratch: the copies in use, by the identity of the tensors that they are copies of. A tensor with two names gets one
                copy.
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
        if is_absent(tensor):  # stage 3: the unit gathers the values
            return lambda: None
        if (
            self.copy is not None and self.copy.shape != tensor.shape
        ):  # was resized, which copy_() cannot undo
            resized, tensor.data = tensor.detach(), self.copy.clone()
            return lambda: setattr(tensor, "data", resized)
        # The version counter must not move: graphs that have saved the parameter would refuse to go backward.
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
    """The namespaces of some modules, and one for tensors that no module has, before a first pass."""
    namespaces = [Namespace(None, "tensors", dict(enumerate(tensors)), False)] if tensors else []
    for module in modules:
        if isinstance(module, torch.jit.ScriptModule):
            namespaces.append(Namespace(module, "scripted", dict(module.named_buffers(recurse=False)), learn))
            continue
        attributes = vars(module)
        namespaces.append(Namespace(module, "attributes", attributes, learn))
        # Most modules have no buffers, and a namespace costs time in each pass.
        used = (kind for kind in ("_buffers", "_parameters") if attributes[kind])
        namespaces.extend(Namespace(module, kind, attributes[kind], learn) for kind in used)
    return namespaces


_LAZY = object()  # the stamp of a tensor that has no values yet
# Types of most attributes, which are skipped.
_NEITHER = {type(None), bool, int, float, str, dict, OrderedDict, set, list, tuple}


class Namespace:
    """A namespace before a first pass: the attributes, buffers or parameters of a module, or tensors that no module has.

    Args:
        module: the module, or None.
        kind: "attributes", "_buffers", "_parameters", "tensors", or "scripted" (buffers, which keep their places).
        space: the namespace.
        learn: whether to copy all buffers and attributes, and to compare values.

    Attributes:
        generators: its objects that draw random numbers.
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
            if is_absent(value):
                continue
            stamp = self.stamp(key, value)
            self.tensors.append((key, value, stamp))
            if stamp is not _LAZY and self._is_copied(key, value):
                shared = None if learn or (module is not None and _may_write(module)) else module
                self.copies[key] = _copy(shared, key, value, stamp)

    def stamp(self, key: str, value: Tensor) -> Any:
        """A value that differs before and after a write: usually the version of the tensor."""
        # Three tensors have another stamp: lazy ones; those that were seen to be written past their version counter, which count as
        # written in each pass; and running statistics, by the count of batches.
        if is_lazy(value):
            return _LAZY
        if _unseen and self.module is not None and key in _unseen.get(self.module, ()):
            return object()
        if key in STATISTICS and self.module is not None:
            version = statistics_version(self.module, key)
            if version is not None:
                return version, version_of(value)
        return version_of(value)

    def _is_copied(self, key: str, value: Tensor) -> bool:
        if self.module is None:
            return bytes_of(value) <= SMALL_BYTES and not value.requires_grad
        if _known and key in _known.get(self.module, ()):
            return True
        if self.kind == "_parameters":
            return self.learn and _may_write(self.module)
        return self.learn or bytes_of(value) <= SMALL_BYTES

    def written(self) -> Iterator[Written]:
        """The tensors that have been written since the namespace was noted."""
        for key, tensor, stamp in self.tensors:
            if type(tensor) is nn.Parameter and not (self.learn or _unseen):
                changed = version_of(tensor) != stamp
            else:
                changed = not is_absent(tensor) and self._changed(key, tensor, stamp)
            if changed or self.space.get(key) is not tensor:
                yield self.written_tensor(key, tensor, stamp, changed)
        before = self.before
        if _same_objects(self.space, before):
            return
        for key, new in self.space.items():
            old = before.get(key, _ABSENT)
            if new is not old and isinstance(new, Tensor) and not isinstance(old, Tensor):
                yield Written(self._name(key), self.space, key, old)

    def copied(self) -> list[Copied]:
        """The buffers, and the tensors that no module has, which have copies and were not written since they were noted."""
        if self.kind not in ("_buffers", "scripted", "tensors"):
            return []
        return [
            Copied(self, key, tensor, stamp)
            for key, tensor, stamp in self.tensors
            if key in self.copies and self.space.get(key) is tensor and self.stamp(key, tensor) == stamp
        ]

    def _changed(self, key: str, tensor: Tensor, stamp: Any) -> bool:
        """Whether a tensor was changed in place since it was noted."""
        if stamp != self.stamp(key, tensor):
            return True
        compared = self.learn or self.module is None or _may_write(self.module)
        if compared and key in self.copies and not _same_bits(self.copies[key], tensor):
            if self.module is not None:
                _unseen.setdefault(self.module, set()).add(key)
            return True
        return False

    def written_tensor(self, key: str, tensor: Tensor, stamp: Any, changed: bool) -> Written:
        stays = self.space.get(key) is tensor
        in_place = stays and self.kind in ("_parameters", "tensors", "scripted")
        copy = self.copies.get(key) if changed else None
        if changed and stamp is _LAZY:
            with aside():
                copy = tensor.detach().clone()
        if changed and self.module is not None:
            _known.setdefault(self.module, set()).add(key)
        old = tensor
        if tensor.grad_fn is not None and not stays:
            with aside():
                old = tensor.detach().requires_grad_()  # must not hold the graph of an earlier pass
        lost = changed and copy is None and self.kind != "tensors"
        return Written(
            self._name(key), self.space, key, old, copy, in_place, lost, changed and stamp is _LAZY
        )

    def _name(self, key: str) -> str:
        return key if self.module is None else f"{type(self.module).__name__}.{key}"


class Copied(NamedTuple):
    """A tensor that a first pass has not written, and that has a copy in its namespace, in case something else writes it."""

    namespace: Namespace
    key: str
    tensor: Tensor
    stamp: Any

    def is_changed(self) -> bool:
        """Whether it was written since the first pass."""
        return bool(self.namespace.stamp(self.key, self.tensor) != self.stamp)

    def written(self) -> Written:
        """The description of it as of a tensor that the pass has written."""
        return self.namespace.written_tensor(self.key, self.tensor, self.stamp, True)


def _may_write(module: nn.Module) -> bool:
    """Whether a forward pass may write parameters of its module, or buffers past their version counters. Those of PyTorch do not,
    but for ``max_norm`` and running statistics, whose versions are known."""
    return getattr(module, "max_norm", None) is not None or not type(module).__module__.startswith("torch.")


def _same_objects(ours: dict[Any, Any], theirs: dict[Any, Any]) -> bool:
    """Whether two namespaces hold the same objects. Fast if they do, as dicts compare values by identity first."""
    try:
        return bool(ours == theirs)
    except Exception:  # of other values, tensors among them
        return False


def _copy(module: nn.Module | None, key: str, value: Tensor, stamp: Any) -> Tensor:
    """A copy of a tensor; of a small one the last copy in its module, if one is given and it is still valid."""
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
