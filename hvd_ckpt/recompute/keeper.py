"""Tensors that the tape keeps until the backward pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hvd_ckpt.recompute.saved import Compressed, compress
from hvd_ckpt.utils.frames import aside
from hvd_ckpt.utils.torch_private import DisableTorchFunction, top_saved_tensors_default_hooks
from hvd_ckpt.utils.unmaterialized import present


class Keeper:
    """Keeper of tensors between the forward and the backward pass.

    Usually it holds nothing: autograd and the recorded calls hold the tensors. If other saved-tensor hooks are active (of an outer
    region that is recomputed as a whole, or ``save_on_cpu``), kept tensors pass through those hooks, each once.

    Args:
        compress: as in :class:`.tape.Policy`.

    Attributes:
        collecting: whether other hooks are active.
    """

    def __init__(self, compress: bool = False) -> None:
        self._hooks = top_saved_tensors_default_hooks(False)
        self.collecting = self._hooks is not None
        self._compresses = compress
        self._slots: dict[tuple[Any, ...], _Slot] = {}

    def keep(self, tensor: Tensor, user: str) -> Plain | Kept:
        """The object to hold in place of ``tensor``: the tensor without its graph, or a promise of it.

        Args:
            user: the function that needs the tensor, for the error if it is changed in place before the backward pass.
        """
        if self._hooks is None:
            return plain(tensor, user)
        version = version_of(tensor)
        # Without an address, no two tensors are known to be the same: each gets a slot of its own.
        key: tuple[Any, ...] = (len(self._slots),)
        if memory_of(tensor) is not None:
            key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, version)
            key += tensor.is_conj(), tensor.is_neg(), type(tensor)
        # Tensors that are the same view of the same memory at the same version share a slot, and are saved once.
        slot = self._slots.get(key)
        if slot is None or slot.elsewhere(tensor):
            pack, unpack = self._hooks
            with DisableTorchFunction(), torch.no_grad():  # as autograd calls hooks, and aside from the tape
                alone = tensor.detach()
                packed = pack(alone)
            stride = tensor.stride() if key[1:] else None
            slot = self._slots[key] = _Slot(alone, packed, unpack, stride, version, changed=version)
        return Kept(slot, user)

    def keep_new(self, tensor: Tensor, user: str, then: Callable[[Callable[[], object]], None]) -> Any:
        """The object to hold in place of a tensor that the running call makes: as bits, or as it is.

        Args:
            user: the function that saves the tensor.
            then: takes a callback for the time when the running call has returned, which is when the form is chosen.
        """
        # Other hooks may copy what they are given, and the call may still fill it.
        if not (self._compresses or self.collecting):
            return self.keep(tensor, user)
        later = Later(Plain(tensor.detach(), version_of(tensor), user))

        def choose() -> None:
            with aside():
                packed = compress(tensor) if self._compresses else None
            later.packed = self.keep(tensor, user) if packed is None else self.keep_bits(packed, user)

        then(choose)
        return later

    def keep_bits(self, packed: Compressed, user: str) -> Compressed:
        """The object to hold in place of a tensor in bits."""
        if not self.collecting:
            return packed
        return dataclasses.replace(packed, payload=self.keep(packed.payload, user))

    def close(self) -> None:
        """Called when the forward pass has ended: the other hooks alone hold the tensors from here on."""
        for slot in self._slots.values():
            if slot.tensor is not None:
                slot.changed = version_of(slot.tensor)
                slot.tensor = None
        self._slots.clear()


@dataclasses.dataclass(eq=False)
class _Slot:
    """A tensor that other hooks have packed, shared by all promises of it."""

    tensor: Tensor | None  # until the end of the forward pass, and once it has been unpacked
    packed: Any
    unpack: Callable[[Any], Tensor]
    stride: tuple[int, ...] | None
    version: int
    changed: int  # the version at the end of the forward pass

    def elsewhere(self, tensor: Tensor) -> bool:
        """Whether the memory belongs to another tensor now, because a split parameter has been freed and its memory reused."""
        return self.tensor is not None and memory_of(self.tensor) != memory_of(tensor)

    def get(self) -> Tensor:
        if self.tensor is None:
            # Once: PyTorch's checkpoint unpacks each tensor a single time in a backward pass.
            self.tensor = in_layout(self.unpack(self.packed), self.stride)
        return self.tensor


def in_layout(tensor: Tensor, stride: tuple[int, ...] | None) -> Tensor:
    """The tensor with these strides. Hooks may return others, and the strides decide which tensors a call saves."""
    if stride is None or tensor.stride() == stride:
        return tensor
    # An expanded dimension has the stride 0 and one element in memory: lay out one of its elements, and expand again.
    once = tensor[tuple(slice(None) if step else slice(1) for step in stride)]
    laid_out = torch.empty_strided(once.shape, stride, dtype=tensor.dtype, device=tensor.device)
    return laid_out.copy_(once).expand(tensor.shape)


@dataclasses.dataclass(eq=False)
class Later:
    """A tensor that is kept in another form once the call that saves it has returned.

    Until then, the call may still fill it: a kernel can save a tensor before it writes the values.
    """

    packed: Plain | Kept | Compressed

    def get(self) -> Tensor:
        """The tensor as it was."""
        return self.packed.get()


class Kept(NamedTuple):
    """A promise of a tensor that other hooks have packed."""

    slot: _Slot
    user: str

    def peek(self) -> Tensor:
        """The tensor as it is now, during the forward pass."""
        return self.slot.get()

    def get(self) -> Tensor:
        """The tensor; raises RuntimeError if it was changed in place before the end of the forward pass."""
        if self.slot.changed != self.slot.version:
            raise changed_in_place(self.slot.version, self.slot.changed, self.user)
        return present(self.slot.get())


class Plain(NamedTuple):
    """A tensor that is kept as it is. Autograd does not check the versions of tensors that hooks have packed, so this does."""

    tensor: Tensor
    version: int
    user: str

    def peek(self) -> Tensor:
        """The tensor as it is now."""
        return self.tensor

    def get(self) -> Tensor:
        """The tensor; raises RuntimeError if it was changed in place since it was kept."""
        if version_of(self.tensor) != self.version:
            raise changed_in_place(self.version, version_of(self.tensor), self.user)
        return present(self.tensor)


def plain(tensor: Tensor, user: str) -> Plain:
    """The tensor, kept without its graph. The graph holds what this function returns, and would close a cycle."""
    return Plain(tensor.detach() if tensor.grad_fn is not None else tensor, version_of(tensor), user)


def saving_nothing(note: Callable[[Tensor], None] = lambda tensor: None) -> AbstractContextManager[Any]:
    """A context in which autograd saves nothing, so no backward pass can follow. ``note`` gets each tensor that it would save."""
    return torch.autograd.graph.saved_tensors_hooks(note, _never)


def _never(packed: None) -> Tensor:
    raise AssertionError("this graph has no backward pass")


def changed_in_place(expected: int, version: int, user: str) -> RuntimeError:
    return RuntimeError(
        f"A tensor that '{user}' needs for the backward pass has been modified by an inplace operation: it is at "
        f"version {version}, expected {expected}. Change a copy of it instead."
    )


def memory_of(tensor: Tensor) -> int | None:
    """The address of a tensor's memory; None for tensors without memory of their own (sparse tensors, wrapper subclasses)."""
    if tensor.layout is not torch.strided:
        return None
    try:
        return tensor.untyped_storage().data_ptr() or None
    except RuntimeError:  # a wrapper subclass has no storage that can be asked for
        return None


def bytes_of(tensor: Tensor) -> int:
    """Bytes of the elements of a dense tensor; 0 for other layouts."""
    return tensor.nbytes if tensor.layout is torch.strided else 0


def version_of(tensor: Tensor) -> int:
    """Number of changes in place of a tensor; 0 for inference tensors, which do not count them."""
    try:
        return tensor._version
    except RuntimeError:
        return 0
