"""State that a forward pass depends on besides its arguments, and how each recomputation gets it back.

A recomputation must compute what the first pass computed, and leave no trace. What may have changed since, or changes when code
runs twice, is noted around the first pass, and put back for each recomputation:

- the random state of Python, NumPy and of generators within reach (that of PyTorch itself is up to the variant of checkpoint);
- the default dtype and device, the kernels that attention may use, deterministic algorithms;
- the training flags of the modules;
- tensors that the first pass has written: buffers, attributes of modules, parameters.

Of the last, those in place show in their version counters, replaced ones in their identity. The values from before must have been
copied before: small tensors always are, others once it is known that they are written. Known they are made by the passes that
*learn*, the first ones of a region, which copy all buffers. For as long as a recomputation runs, modules then have scratch copies
of the values from before the first pass. The tensors themselves come back whatever the recomputation raises, so nothing is written
twice, and what other graphs have saved stays as it is. Parameters are leaves that gradients are accumulated for, so that theirs are
the values alone that are exchanged.

A batch norm is written without a word to the version counters: its count of batches tells
(:func:`hvd_ckpt.batchnorm.deferred.statistics_version`). Passes that learn compare values, and so find others that do the same.
"""

from __future__ import annotations

import contextlib
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel
from torch.nn.parameter import is_lazy

from hvd_ckpt.batchnorm.deferred import statistics_version
from hvd_ckpt.frames import aside
from hvd_ckpt.recompute.keeper import attention_kernels, default_dtype, version_of
from hvd_ckpt.torch_private import unsafe_preserve_version_counter
from hvd_ckpt.unmaterialized import is_absent

GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
"""Objects that draw random numbers from a state of their own."""

SMALL_BYTES = 1 << 16
"""Buffers and attributes of modules up to this size are copied before each first pass, if they have changed since the last."""

_ABSENT = object()


class ForwardState:
    """What one first pass found and left, for its recomputations.

    Args:
        modules: all that the pass can reach.
        generators: objects that draw random numbers, which it can reach.
        tensors: others that it can reach; small ones that it writes get their values from before back.
        preserve_random: put random states back.
        learn: copy and compare all buffers, to learn which ones this pass writes.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        generators: Sequence[Any] = (),
        tensors: Sequence[Tensor] = (),
        preserve_random: bool = True,
        learn: bool = False,
    ) -> None:
        self._modules = modules
        self._modes = [(module, module.training) for module in modules]
        self._settings = _settings()
        self._tensors = tensors
        self._learn = learn
        sources = [_PYTHON, _NUMPY, *map(_source, generators)] if preserve_random else []
        self._random: list[tuple[_Source, Any]] = [(source, source.get()) for source in sources]
        self._written: list[_Written] = []
        self.lost: list[str] = []
        """Names of written tensors whose values from before the pass are not known."""
        self.initialized = False
        """The pass has given lazy tensors their values, so that no later pass will be like it."""

    @contextlib.contextmanager
    def first_pass(self) -> Iterator[None]:
        """Around the first run of the function."""
        with aside():
            spaces = [
                _Space(
                    module, kind, vars(module) if kind == "attributes" else vars(module)[kind], self._learn
                )
                for module in self._modules
                for kind in _KINDS
            ]
            spaces.append(
                _Space(None, "tensors", {str(n): one for n, one in enumerate(self._tensors)}, False)
            )
        try:
            yield
        finally:
            with aside():
                self._written = [one for space in spaces for one in space.written()]
                self.lost = [one.name for one in self._written if one.lost]
                self.initialized = any(one.initialized for one in self._written)
                self._random = [(source, state) for source, state in self._random if source.moved(state)]

    @contextlib.contextmanager
    def recomputation(self) -> Iterator[None]:
        """Around every later run."""
        with contextlib.ExitStack() as restore:
            for module, training in self._modes:
                if module.training != training:
                    restore.callback(setattr, module, "training", module.training)
                    module.training = training
            for source, state in self._random:
                restore.callback(source.set, source.get())
                source.set(state)
            for change, now, then in zip(_CHANGES, _settings(), self._settings):
                if now != then:
                    restore.enter_context(change(then))
            if self._written:
                scratch: dict[int, Tensor] = {}
                with aside():
                    for one in self._written:
                        restore.callback(one.give(scratch))
            yield


# ---------------------------------------------------------------------------------------- random state


@dataclass(frozen=True)
class _Source:
    """Something that draws random numbers."""

    get: Callable[[], Any]
    set: Callable[[Any], Any]

    def moved(self, state: Any) -> bool:
        return not _equal(self.get(), state)


def _equal(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, Tensor):
        return torch.equal(ours, theirs)
    if isinstance(ours, np.ndarray):
        return np.array_equal(ours, theirs)
    if isinstance(ours, dict):
        return all(_equal(value, theirs[name]) for name, value in ours.items())
    if isinstance(ours, tuple) and len(ours) < 100:
        return all(map(_equal, ours, theirs))
    return bool(ours == theirs)


def _source(generator: Any) -> _Source:
    if isinstance(generator, torch.Generator):
        return _Source(generator.get_state, generator.set_state)
    if isinstance(generator, random.Random):
        return _Source(generator.getstate, generator.setstate)
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return _Source(lambda: bits.state, lambda state: setattr(bits, "state", state))
    return _Source(generator.get_state, generator.set_state)


_PYTHON = _Source(random.getstate, random.setstate)
_NUMPY = _Source(np.random.get_state, np.random.set_state)


# ---------------------------------------------------------------------------------------- settings


def _settings() -> tuple[Any, ...]:
    return (
        torch.get_default_dtype(),
        torch.get_default_device(),
        attention_kernels(),
        (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
    )


@contextlib.contextmanager
def _deterministic(mode: tuple[bool, bool]) -> Iterator[None]:
    now = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(mode[0], warn_only=mode[1])
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(now[0], warn_only=now[1])


_CHANGES: tuple[Callable[[Any], contextlib.AbstractContextManager[Any]], ...] = (
    default_dtype,
    torch.device,
    lambda allowed: sdpa_kernel(list(allowed)),
    _deterministic,
)


# ---------------------------------------------------------------------------------------- written tensors

_KINDS = ("attributes", "_buffers", "_parameters")

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
class _Written:
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


_LAZY = object()  # in place of a stamp: the tensor has no values yet


class _Space:
    """One namespace of a module before a first pass: its attributes, buffers or parameters; or tensors that no module has.

    Args:
        module: the module, or None.
        kind: one of :data:`_KINDS`, or "tensors".
        space: the namespace.
        learn: copy all buffers and attributes, and compare values.
    """

    __slots__ = ("before", "copies", "kind", "learn", "module", "space", "tensors")

    def __init__(self, module: nn.Module | None, kind: str, space: dict[str, Any], learn: bool) -> None:
        self.module, self.kind, self.space, self.learn = module, kind, space, learn
        self.before = dict(space)
        self.tensors: list[tuple[str, Tensor, Any]] = []
        self.copies: dict[str, Tensor] = {}
        for key, value in space.items():
            if not isinstance(value, Tensor) or is_absent(value):
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
        if self.module is not None:
            if is_lazy(value):
                return _LAZY
            if key in _unseen.get(self.module, ()):
                return object()
            if self.kind == "_buffers" and (version := statistics_version(self.module, key)) is not None:
                return version, version_of(value)
        return version_of(value)

    def _is_copied(self, key: str, value: Tensor) -> bool:
        if self.module is None:
            return value.nbytes <= SMALL_BYTES and not value.requires_grad
        if key in _known.get(self.module, ()):
            return True
        return self.kind != "_parameters" and (self.learn or value.nbytes <= SMALL_BYTES)

    def written(self) -> Iterator[_Written]:
        """What has been written since."""
        for key, tensor, stamp in self.tensors:
            changed = not is_absent(tensor) and self._changed(key, tensor, stamp)
            if changed or self.space.get(key) is not tensor:
                yield self._written_tensor(key, tensor, stamp, changed)
        for key, new in self.space.items():
            old = self.before.get(key, _ABSENT)
            if new is not old and isinstance(new, Tensor) and not isinstance(old, Tensor):
                yield _Written(self._name(key), self.space, key, old)

    def _changed(self, key: str, tensor: Tensor, stamp: Any) -> bool:
        """Whether a tensor was changed in place."""
        if stamp != self._stamp(key, tensor):
            return True
        if self.learn and key in self.copies and not _same_bits(self.copies[key], tensor):
            assert self.module is not None
            _unseen.setdefault(self.module, set()).add(key)
            return True
        return False

    def _written_tensor(self, key: str, tensor: Tensor, stamp: Any, changed: bool) -> _Written:
        stays = self.space.get(key) is tensor
        in_place = stays and self.kind in ("_parameters", "tensors")
        copy = self.copies.get(key) if changed else None
        if changed and stamp is _LAZY:
            copy = tensor.detach().clone()
        if changed and self.module is not None:
            _known.setdefault(self.module, set()).add(key)
        old = tensor
        if tensor.grad_fn is not None and not stays:
            old = tensor.detach().requires_grad_()  # without the graph of an earlier pass
        lost = changed and copy is None and not in_place
        return _Written(
            self._name(key), self.space, key, old, copy, in_place, lost, changed and stamp is _LAZY
        )

    def _name(self, key: str) -> str:
        return key if self.module is None else f"{type(self.module).__name__}.{key}"


def _copy(module: nn.Module | None, key: str, value: Tensor, stamp: Any) -> Tensor:
    """A copy of a tensor; of a module's small one, made anew only if it has changed since the last time."""
    if module is None or value.nbytes > SMALL_BYTES:
        return value.detach().clone()
    last = _copies.setdefault(module, {}).get(key)
    if last is not None and last[0] is value and last[1] == stamp:
        return last[2]
    copy = value.detach().clone()
    _copies[module][key] = (value, stamp, copy)
    return copy


def _same_bits(ours: Tensor, theirs: Tensor) -> bool:
    if theirs.layout is not torch.strided:
        return True
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    as_bytes = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (ours, theirs))
    return torch.equal(*as_bytes)
