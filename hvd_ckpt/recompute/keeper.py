"""Tensors that the tape keeps until the backward pass, and the global state that the result of a torch function depends on."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states

from hvd_ckpt.recompute.saved import Compressed, compress
from hvd_ckpt.utils.frames import aside
from hvd_ckpt.utils.random_sources import global_sources
from hvd_ckpt.utils.torch_private import infer_device_type, top_saved_tensors_default_hooks
from hvd_ckpt.utils.unmaterialized import present


class Keeper:
    """Keeper of tensors between the forward and the backward pass.

    Usually it holds nothing: autograd and the recorded calls hold the tensors. If other saved-tensor hooks are active (of an outer
    region that is recomputed as a whole, or ``save_on_cpu``), kept tensors must pass through those hooks. The keeper then collects
    them and saves them with autograd at the end of the forward pass.

    Args:
        compress: as in :class:`.tape.Policy`.
    """

    def __init__(self, compress: bool = False) -> None:
        self.collecting = top_saved_tensors_default_hooks(False) is not None
        self._compresses = compress
        self._slots: dict[tuple[Any, ...], _Slot] = {}

    def keep(self, tensor: Tensor, user: str) -> Plain | Kept:
        """The object to hold in place of ``tensor``: the tensor without its graph, or a promise of it.

        Args:
            user: the function that needs the tensor, for the error if it is changed in place before the backward pass.
        """
        if not self.collecting:
            return plain(tensor, user)
        version = version_of(tensor)
        # Without an address, no two tensors are known to be the same: each gets a slot of its own.
        key: tuple[Any, ...] = (len(self._slots),)
        if memory_of(tensor) is not None:
            key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, version)
        # Tensors that are the same view of the same memory at the same version share a slot, and are saved once.
        slot = self._slots.get(key)
        if slot is None or slot.elsewhere(tensor):
            stride = tensor.stride() if key[1:] else None
            slot = self._slots[key] = _Slot(tensor.detach(), version, stride, changed=version)
        return Kept(slot, user)

    def keep_new(self, tensor: Tensor, user: str, after: list[Callable[[], object]]) -> Any:
        """The object to hold in place of a tensor that the running call makes: as bits, or as it is.

        Args:
            user: the function that saves the tensor.
            after: callbacks for the time when the running call has returned, which is when the form is chosen.
        """
        if not self._compresses:
            return self.keep(tensor, user)
        later = Later(Plain(tensor.detach(), version_of(tensor), user))

        def choose() -> None:
            with aside():
                packed = compress(tensor)
            if packed is None:
                later.packed = self.keep(tensor, user)
            elif self.collecting:
                later.packed = dataclasses.replace(packed, payload=self.keep(packed.payload, user))
            else:
                later.packed = packed

        after.append(choose)
        return later

    def close(self) -> None:
        """Saves what was collected; called after the tape's own hooks have been left, so that the outer hooks get it.

        Each tensor is saved by a node of its own: a node frees all its tensors at a time, and each tensor must be freed after its
        last use.
        """
        if self._slots:
            with torch.enable_grad():
                root = torch.empty(0, dtype=torch.float32, requires_grad=True)
                for slot in self._slots.values():
                    slot.save(root)
        self._slots.clear()


@dataclasses.dataclass(eq=False)
class _Slot:
    """A collected tensor, shared by all promises of it and freed with the last of them."""

    tensor: Tensor | None
    version: int
    stride: tuple[int, ...] | None
    changed: int  # the version when it was saved
    saved: Any = None  # output of _Save, whose node holds the tensor

    def elsewhere(self, tensor: Tensor) -> bool:
        """Whether the memory belongs to another tensor now, because a split parameter has been freed and its memory reused."""
        return self.tensor is not None and memory_of(self.tensor) != memory_of(tensor)

    def save(self, root: Tensor) -> None:
        assert self.tensor is not None
        self.changed = version_of(self.tensor)
        # Keep the output and not only its node: PyTorch before 2.13 frees what a node has saved when the output is freed.
        self.saved = _Save.apply(root, self.tensor)  # type: ignore[no-untyped-call]
        self.tensor = None

    def get(self) -> Tensor:
        if self.tensor is None:
            (saved,) = self.saved.grad_fn.saved_tensors
            self.tensor = in_layout(saved, self.stride)
        return self.tensor


def in_layout(tensor: Tensor, stride: tuple[int, ...] | None) -> Tensor:
    """The tensor with these strides. Hooks may return others, and the strides decide which tensors a call saves."""
    if stride is None or tensor.stride() == stride:
        return tensor
    # An expanded dimension has the stride 0 and one element in memory: lay out one of its elements, and expand again.
    once = tensor[tuple(slice(None) if step else slice(1) for step in stride)]
    laid_out = torch.empty_strided(once.shape, stride, dtype=tensor.dtype, device=tensor.device)
    return laid_out.copy_(once).expand(tensor.shape)


class _Save(torch.autograd.Function):
    """Saves a tensor; nothing flows through it."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, tensor: Tensor) -> Tensor:
        ctx.save_for_backward(tensor)
        return torch.empty(0, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        raise AssertionError("no gradient flows here")


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
    """A promise of a tensor that a keeper has collected."""

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
    return 0 if tensor.is_inference() else tensor._version


AutocastState = tuple[tuple[str, bool, torch.dtype], ...]


def autocast_state(device: str) -> AutocastState:
    """Whether autocast is on, and its dtype, on the CPU and the device."""
    cpu = ("cpu", torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))
    if device == "cpu" or not torch.amp.is_autocast_available(device):  # such as "meta"
        return (cpu,)
    return cpu, (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))


@contextlib.contextmanager
def autocast_context(state: AutocastState, cache: bool = False) -> Iterator[None]:
    """A context that restores a state of autocast, with or without its cache of casts."""
    with contextlib.ExitStack() as stack:
        for kind, enabled, dtype in state:
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cache))
        yield


class Global(NamedTuple):
    """A setting of the whole process: how it is read, and how it is set."""

    get: Callable[[], Any]
    set: Callable[[Any], Any]

    @contextlib.contextmanager
    def changed(self, value: Any) -> Iterator[None]:
        """A context in which it has another value."""
        before = self.get()
        if before == value:
            yield
            return
        self.set(value)
        try:
            yield
        finally:
            self.set(before)


def _attention_kernels() -> tuple[bool, ...]:
    switches: Any = torch.backends.cuda  # they are valid on every device
    return (
        switches.flash_sdp_enabled(),
        switches.mem_efficient_sdp_enabled(),
        switches.math_sdp_enabled(),
        switches.cudnn_sdp_enabled(),
    )


def _allow_kernels(allowed: tuple[bool, ...]) -> None:
    switches: Any = torch.backends.cuda
    kernels = ("flash", "mem_efficient", "math", "cudnn")
    for kernel, on in zip(kernels, allowed):
        getattr(switches, f"enable_{kernel}_sdp")(on)


DEFAULT_DTYPE = Global(torch.get_default_dtype, torch.set_default_dtype)
ATTENTION = Global(_attention_kernels, _allow_kernels)
"""The kernels that attention may use. Each kernel saves different tensors."""


class RandomState:
    """The current random state of the CPU and of the devices of the inputs.

    Args:
        python: whether to include the states of Python's and NumPy's generators.
    """

    def __init__(self, *inputs: Any, python: bool = False) -> None:
        self._cpu = torch.get_rng_state()
        self._kind: str = infer_device_type(*inputs)  # type: ignore[no-untyped-call]
        self._devices: list[int] = []
        self._states: list[Tensor] = []
        if getattr(getattr(torch, self._kind, None), "_initialized", False):
            self._devices, self._states = get_device_states(*inputs)
        self._python = global_sources() if python else []

    def moved(self) -> bool:
        """Whether random numbers have been drawn since this state was taken."""
        if not torch.equal(self._cpu, torch.get_rng_state()):
            return True
        module: Any = getattr(torch, self._kind, None)
        if any(
            not torch.equal(state, module.get_rng_state(index))
            for index, state in zip(self._devices, self._states)
        ):
            return True
        return any(source.moved() for source in self._python)

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """A context in which random numbers are drawn from this state."""
        with contextlib.ExitStack() as restore:
            restore.enter_context(torch.random.fork_rng(self._devices, device_type=self._kind))
            torch.set_rng_state(self._cpu)
            if self._devices:
                set_device_states(self._devices, self._states, device_type=self._kind)
            for source in self._python:
                restore.callback(source.set, source.get())
                source.restore()
            yield
