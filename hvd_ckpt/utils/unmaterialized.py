"""Parameters without values, which are split over the ranks (stage 3). This module has the operations that they refuse, and the
way in which they get values again; also copies of the state of a whole model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary

from hvd_ckpt.utils.torch_private import DisableTorchFunctionSubclass, identity_of, pytree

absent_storages: dict[int, Callable[[], None]] = {}
"""Storages without contents, by identity, and the functions that bring the contents back."""

# By identity: in an ordinary dictionary, keys that are tensors would be compared element by element.
_split: Any = WeakTensorKeyDictionary()  # names of parameters that are split over the ranks

# Functions that need only shape, dtype, device, gradient and hooks.
_NAMES = """__delete__ __format__ __len__ __set__ _has_compatible_shallow_copy_type
    data_ptr dense_dim dim element_size empty_like full_like get_device
    is_complex is_conj is_contiguous is_floating_point is_inference is_neg is_pinned is_same_size is_shared
    is_signed ndimension nelement new_empty new_full new_ones new_zeros numel ones_like rand_like randint_like randn_like
    register_hook register_post_accumulate_grad_hook requires_grad_ result_type retain_grad size sparse_dim storage_offset stride
    untyped_storage zeros_like"""
_NEEDS_NO_VALUES = frozenset(_NAMES.split())
CONVERSIONS = {"bfloat16", "contiguous", "cpu", "cuda", "double", "float", "half", "to", "type", "xpu"}
"""Names of functions that may return the tensor itself, and need its values otherwise."""


class Absent:
    """Mixin for the class of a tensor without values. As with lazy parameters, using the values is an error.

    Attributes:
        absence: where the values are.
    """

    absence = "split over the ranks"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Allowed are functions that need no values, attributes that share no memory with the tensor, and conversions that change
        # nothing. Everything else would read or write the one expanded nan that stands for the values.
        name = getattr(func, "__name__", str(func))
        with DisableTorchFunctionSubclass():
            if name in _NEEDS_NO_VALUES:
                return func(*args, **(kwargs or {}))
            if name == "__get__":
                value = func(*args)
                if not (isinstance(value, torch.Tensor) and _same_memory(value, args[0])):
                    return value
                name = "data"
            elif name == "equal" and (args[0] is args[1] or args[0].shape != args[1].shape):
                return args[0] is args[1]
            elif name in CONVERSIONS and is_absent(args[0]):
                value = func(*args, **(kwargs or {}))
                if value is args[0] or isinstance(value, str):
                    return value
        raise next(
            argument.missing(name) for argument in pytree.tree_leaves((args, kwargs)) if is_absent(argument)
        )

    @property
    def known_as(self) -> str:
        """The name of the parameter."""
        return str(_split.get(self))

    def missing(self, what: str) -> RuntimeError:
        """The error if ``what`` needs the values."""
        return RuntimeError(
            f"parameter '{self.known_as}' is split over the ranks and has no values outside the forward and backward pass of "
            f"its module, but '{what}' needs them; do this inside 'with optimizer.gathered_parameters():', on all ranks"
        )

    def __repr__(self, **_: Any) -> str:
        tensor: Any = self
        return (
            f"{type(self).__name__}('{self.known_as}', {self.absence}, size={tuple(tensor.shape)}, "
            f"dtype={tensor.dtype})"
        )

    def __deepcopy__(self, memo: Any) -> Any:
        raise self.missing("copy")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self.missing("pickle")


def _same_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.layout is torch.strided and identity_of(first.untyped_storage()) == identity_of(
        second.untyped_storage()
    )


@functools.cache
def absent_class(kind: type[torch.Tensor]) -> type[torch.Tensor]:
    """The class of a parameter of class ``kind`` while it has no values."""
    made: Any = type(kind)
    absent: type[torch.Tensor] = made(kind.__name__, (Absent, kind), {})
    return absent


def note_split(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Notes that these parameters are split: they have values only while they are gathered."""
    for name, parameter in named:
        _split[parameter] = name


def forget_split(parameters: Iterable[torch.Tensor]) -> None:
    """Notes that these parameters have their own values again."""
    for parameter in parameters:
        _split.pop(parameter, None)


def is_split(parameter: torch.Tensor) -> bool:
    """Whether a parameter is split over the ranks (stage 3), even if the optimizer that split it no longer exists."""
    return parameter in _split


def is_absent(parameter: Any) -> bool:
    """Whether a parameter is split and not gathered, so that it has no values now."""
    return isinstance(parameter, Absent)


def check_shapes(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises ValueError if a parameter is lazy and has no shape yet."""
    for name, parameter in named:
        if is_lazy(parameter):
            raise ValueError(f"parameter '{name}' has no shape yet: run the model once before")


def present(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, after the contents of its storage have been brought back if they were absent."""
    if absent_storages and tensor.layout is torch.strided:
        bring = absent_storages.get(identity_of(tensor.untyped_storage()))
        if bring is not None:
            bring()
    return tensor


def copied_state(model: torch.nn.Module, ready: Container[int] = ()) -> dict[str, Any]:
    """A copy of ``model.state_dict()`` on the CPU. Tensors that share memory share it in the copy.

    Args:
        ready: addresses of tensors that are not copied.
    """
    state: dict[str, Any] = model.state_dict()
    copies: dict[Any, torch.Tensor] = {}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            continue
        key: Any = name
        if value.layout is torch.strided and value.numel():
            key = (value.device, value.dtype, value.data_ptr(), value.shape, value.stride())
            if value.data_ptr() in ready:
                continue
        if key not in copies:
            copies[key] = value.detach().to("cpu", copy=True)
        state[name] = copies[key]
    return state
