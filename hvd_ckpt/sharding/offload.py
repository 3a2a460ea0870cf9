"""Offload of what a rank keeps of its shards: to memory-mapped files, or to pinned memory beside a CUDA device.

Of the optimizer's state, as in ZeRO-Offload (Ren et al., 2021): the wrapped optimizer steps one parameter after the other, so the
state of one is in use at a time, and the numbers are those of a step without offload. At stage 3 also of the shards of weights and
gradients, as in ZeRO-Infinity (Rajbhandari et al., 2021): memory holds the units that run, and what the optimizer steps.
"""

from __future__ import annotations

import copy
import errno
import mmap
import os
import tempfile
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy

from hvd_ckpt.sharding.elementwise import class_of
from hvd_ckpt.sharding.exchange import Exchange
from hvd_ckpt.sharding.layout import TensorSpec
from hvd_ckpt.text import show_bytes

_IN_MEMORY = ("tmpfs", "ramfs")
_SMALL_BYTES = 64 << 10
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")

Wanted = tuple[int, torch.dtype]  # number of elements, dtype


class OffloadError(OSError):
    """Not enough room for the offloaded state. Nothing has changed: with more room the same step can be taken."""


class _MappedFiles:
    """Files of a folder, mapped into memory, one per tensor.

    A mapped page that nobody has touched lately can leave memory at any time, so the files may be larger than it. They have no
    name: when the process ends, however it ends, they are gone.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = Path(tempfile.gettempdir()) if folder is None else folder
        self._maps: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()  # by address
        kind = _filesystem(self._folder)
        if kind in _IN_MEMORY:
            warnings.warn(
                f"the folder for offloaded state, '{self._folder}', is itself in memory ({kind}), so nothing is saved: "
                f"name one on a disk (offload_folder=, hvd-ckpt train --offload-folder)",
                stacklevel=2,
            )

    def allocate(self, wanted: Sequence[Wanted]) -> list[torch.Tensor]:
        """1-D tensors of zeros: all of them or none.

        Raises:
            OffloadError: there is no room for them.
        """
        try:
            return [self._mapped(numel, dtype) for numel, dtype in wanted]
        except OSError as error:
            size = sum(numel * dtype.itemsize for numel, dtype in wanted)
            raise _no_room(self._folder, size, error) from error

    def _mapped(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros, whose room on the disk is taken before any is written: running out later would kill the process."""
        if not numel:
            return torch.empty(0, dtype=dtype)
        with tempfile.TemporaryFile(dir=self._folder) as file:
            os.posix_fallocate(file.fileno(), 0, numel * dtype.itemsize)
            memory = mmap.mmap(file.fileno(), numel * dtype.itemsize)
        tensor = torch.frombuffer(memory, dtype=dtype)
        self._maps[tensor.data_ptr()] = memory
        return tensor

    def advise(self, tensor: torch.Tensor, soon: bool) -> None:
        """The tensor is used soon, or may leave memory with its values kept."""
        memory = self._maps.get(tensor.data_ptr())
        if memory is not None:  # shared pages: they stay in the page cache, or in the file
            memory.madvise(mmap.MADV_WILLNEED if soon else mmap.MADV_DONTNEED)

    @property
    def nbytes(self) -> int:
        return sum(len(memory) for memory in self._maps.values())


class _PinnedMemory:
    """Page-locked memory, which a CUDA device copies from and to beside its other work; used as :class:`_MappedFiles`."""

    def __init__(self) -> None:
        self._held: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()

    def allocate(self, wanted: Sequence[Wanted]) -> list[torch.Tensor]:
        try:
            tensors = [torch.zeros(numel, dtype=dtype, pin_memory=True) for numel, dtype in wanted]
        except RuntimeError as error:
            size = sum(numel * dtype.itemsize for numel, dtype in wanted)
            raise OffloadError(
                f"cannot offload: {show_bytes(size)} of pinned memory are needed ({str(error).splitlines()[0]}): "
                f"free host memory, split over more ranks, or do not offload"
            ) from error
        self._held.update((id(tensor), tensor) for tensor in tensors)
        return tensors

    def advise(self, tensor: torch.Tensor, soon: bool) -> None:
        pass

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._held.values())


def _no_room(folder: Path, size: int, error: OSError) -> OffloadError:
    reason = error.strerror or str(error)
    if error.errno == errno.EFBIG:
        reason = "the limit on the size of a file, ulimit -f, is lower"
    try:
        free = f", {show_bytes(psutil.disk_usage(str(folder)).free)} are free"
    except OSError:
        free = ""
    found = OffloadError(
        f"cannot offload to the folder '{folder}' ({reason}): {show_bytes(size)} are needed{free}; make room, or name another "
        f"folder (offload_folder=, hvd-ckpt train --offload-folder); nothing has changed, so the step can be taken again"
    )
    found.errno = error.errno
    return found


def _filesystem(folder: Path) -> str:
    """The kind of file system that a folder is on; empty if it is unknown."""
    path = Path(os.path.realpath(folder))
    around = [one for one in psutil.disk_partitions(all=True) if path.is_relative_to(one.mountpoint)]
    return max(around, key=lambda one: len(one.mountpoint)).fstype if around else ""


@contextmanager
def raised_everywhere(exchange: Exchange) -> Iterator[None]:
    """Makes an OffloadError of one rank an error on every rank. Collective.

    Raises:
        OffloadError, ValueError: the rank's own, or an OffloadError that points to the other rank.
    """
    error: Exception | None = None
    try:
        yield
    except (OffloadError, ValueError) as found:
        error = found
    if exchange.maximum(torch.tensor([float(error is not None)]), "room")[0] > 0:
        raise error or OffloadError(
            "another rank cannot offload its part: its message says why; nothing has changed, so the "
            "step can be taken again"
        )


@contextmanager
def init_on_disk(folder: str | Path | None = None) -> Iterator[None]:
    """Within it parameters of modules that are made on the CPU are in memory-mapped files, which may be larger than memory.

    For a model that is then split with ``shard="parameters", offload="parameters"``: it is initialized by its own code, to the same
    values. The files, which have no name, are gone when it has been split. Parameters below 64 KiB stay in memory.

    Args:
        folder: on a disk; by default the temporary folder.

    Raises:
        OSError: there is no room for a parameter.
    """
    memory = _MappedFiles(None if folder is None else Path(folder))

    def move(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is None or is_lazy(parameter) or parameter.device.type != "cpu":
            return
        if parameter.layout is torch.strided and parameter.nbytes >= _SMALL_BYTES:
            spec = TensorSpec.of(parameter)
            flat = memory.allocate([(spec.numel, parameter.dtype)])[0]
            parameter.data = spec.unflatten(flat.copy_(spec.flatten(parameter)))
            memory.advise(flat, soon=False)

    handle = register_module_parameter_registration_hook(move)
    try:
        yield
    finally:
        handle.remove()


class Offload:
    """Keeps the state of an optimizer in host memory, and steps the parameters one by one.

    Args:
        folder: on a CPU: where the files are; by default the temporary folder.
        device: of the parameters. On CUDA devices state is in pinned memory.
        parameters: shards of weights and gradients, too, are in memory of :meth:`empty`; the step is then on the CPU.
    """

    def __init__(self, folder: Path | None, device: torch.device, parameters: bool = False) -> None:
        self.parameters = parameters
        self._device = torch.device("cpu") if parameters else device
        self._memory = _PinnedMemory() if device.type == "cuda" else _MappedFiles(folder)
        self._buffers: dict[torch.Tensor, dict[str, torch.Tensor]] = {}  # by parameter and name of state
        self._trials: dict[Any, dict[str, torch.dtype]] = {}

    @property
    def bytes(self) -> int:
        """Bytes of the offloaded state."""
        return self._memory.nbytes

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
        """Memory for weights that are used in the step alone. On CUDA devices they stay there unless shards are offloaded, too.

        Raises:
            OffloadError: there is no room for it.
        """
        if self._device.type == "cuda":
            return torch.empty(numel, dtype=dtype, device=device or self._device)
        return self._memory.allocate([(numel, dtype)])[0]

    def prefetch(self, tensor: torch.Tensor) -> None:
        """A tensor of :meth:`empty` is used soon."""
        self._memory.advise(tensor, soon=True)

    def release(self, tensor: torch.Tensor) -> None:
        """A tensor of :meth:`empty` has been used and may leave memory; its values stay."""
        self._memory.advise(tensor, soon=False)

    def reserve(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes the room that the state of all trained parameters will need, and changes nothing else.

        Args:
            optimizer: its parameters are 1-D.

        Raises:
            OffloadError: there is too little.
            ValueError: a step changes values outside its state, so parameters cannot be stepped one by one.
        """
        buffers: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        missing = []
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                known = self._buffers.get(parameter, {})
                own = buffers[parameter] = {}
                for name, dtype in self._state_dtypes(optimizer, number, parameter).items():
                    if name in known and known[name].dtype is dtype:
                        own[name] = known[name]
                    else:
                        missing.append((own, name, (parameter.numel(), dtype)))
        found = self._memory.allocate([wanted for *_, wanted in missing])
        for (own, name, _), buffer in zip(missing, found):
            own[name] = buffer
        self._buffers = buffers

    def move_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Moves state that exists, after loading say, to its buffers.

        Raises:
            OffloadError, ValueError: as :meth:`reserve`.
        """
        self.reserve(optimizer)
        for parameter in self._buffers:
            self._store(optimizer, parameter)

    def step(self, optimizer: torch.optim.Optimizer, local_step: Callable[[], Any]) -> None:
        """One step, parameter by parameter.

        Args:
            optimizer: its parameters are 1-D, with their gradients.
            local_step: steps the optimizer over what is in its ``param_groups``; no closure. The optimizer's own step hooks
                run once, around all of it.

        Raises:
            OffloadError, ValueError: as :meth:`reserve`; nothing has changed, and the step can be taken again.
        """
        self.move_state(optimizer)
        stepped = [
            (group, parameter)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        with _hooks_once(optimizer):
            if self._device.type == "cuda":
                self._step_on_device(optimizer, local_step, stepped)
                return
            for (group, parameter), following in zip(stepped, [*stepped[1:], None]):
                for buffer in () if following is None else self._buffers[following[1]].values():
                    self._memory.advise(buffer, soon=True)
                with _alone(optimizer, group, parameter):
                    local_step()
                self._store(optimizer, parameter)

    def _store(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
        """Copies state that is not there yet to its buffers, which may leave memory then."""
        state = optimizer.state.get(parameter, {})
        for name, buffer in self._buffers[parameter].items():
            value = state.get(name)
            if value is not None and value is not buffer:
                state[name] = buffer.copy_(value, non_blocking=True)
            self._memory.advise(buffer, soon=False)

    def _state_dtypes(
        self, optimizer: torch.optim.Optimizer, number: int, parameter: torch.Tensor
    ) -> dict[str, torch.dtype]:
        """Names and dtypes of the state of a parameter that has an element for each of its own."""
        if parameter.dim() != 1:
            raise ValueError(
                f"only state of 1-D parameters can be offloaded, not of one of shape {tuple(parameter.shape)}"
            )
        found = {}
        if parameter.requires_grad or parameter.grad is not None:
            # A structure depends on options, and on which numbers are 0.
            options = {
                name: bool(value) if isinstance(value, (int, float)) or value is None else None
                for name, value in optimizer.param_groups[number].items()
            }
            key = (number, parameter.dtype, tuple(options.items()))
            if key not in self._trials:
                self._trials[key] = self._try_out(optimizer, number, parameter.dtype)
            found.update(self._trials[key])
        for name, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                found[name] = value.dtype
        return found

    def _try_out(
        self, optimizer: torch.optim.Optimizer, number: int, dtype: torch.dtype
    ) -> dict[str, torch.dtype]:
        """The state that a step makes for a small parameter, which the optimizer has in place of its own meanwhile."""
        small = torch.nn.Parameter(torch.zeros(2, dtype=dtype, device=self._device))
        small.grad = torch.zeros_like(small)
        options = {
            name: value.clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
            for name, value in optimizer.param_groups[number].items()
            if name != "params"
        }
        before = repr((options, _numbers(optimizer)))
        group = {"params": [small], **options}
        state: dict[str, Any] = {}
        try:
            with (
                _hooks_once(optimizer, run=False),
                _alone(optimizer, group, small),
                torch.random.fork_rng(devices=[]),
            ):
                class_of(optimizer).step(optimizer)
        except KeyError:  # a class such as Adagrad makes its state in the constructor
            pass
        finally:
            state = optimizer.state.pop(small, {})
        after = {name: value for name, value in group.items() if name != "params"}
        if repr((after, _numbers(optimizer))) != before:
            raise ValueError(
                f"the state of optimizer {class_of(optimizer).__name__} cannot be offloaded: its step changes values in "
                f"param_groups or attributes, so it cannot be taken for one parameter after the other; leave offload at None"
            )
        return {
            name: value.dtype
            for name, value in state.items()
            if isinstance(value, torch.Tensor) and value.shape == small.shape
        }

    # -------------------------------------------------------------------------------- CUDA

    def _step_on_device(
        self,
        optimizer: torch.optim.Optimizer,
        local_step: Callable[[], Any],
        stepped: Sequence[tuple[dict[str, Any], torch.Tensor]],
    ) -> None:
        """State is copied to the device before a parameter is stepped and back after it, on a second stream: while one is stepped,
        the state of the next arrives and that of the last leaves."""
        current = torch.cuda.current_stream(self._device)
        beside: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        beside.wait_stream(current)
        arrived = None
        for (group, parameter), following in zip(stepped, [*stepped[1:], None]):
            if arrived is None:
                arrived = self._load(optimizer, parameter, beside)
            current.wait_event(arrived)
            if following is not None:
                arrived = self._load(optimizer, following[1], beside)
            _used_on(current, optimizer.state.get(parameter, {}))
            with _alone(optimizer, group, parameter):
                local_step()
            done = current.record_event()
            with torch.cuda.stream(beside):
                beside.wait_event(done)
                _used_on(beside, optimizer.state.get(parameter, {}))
                self._store(optimizer, parameter)
        beside.synchronize()

    def _load(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor, stream: Any) -> Any:
        """Begins to copy the state of a parameter to the device; returns the event that tells the end."""
        state = optimizer.state.get(parameter, {})
        with torch.cuda.stream(stream):
            for name, buffer in self._buffers[parameter].items():
                if name in state:
                    state[name] = buffer.to(self._device, non_blocking=True)
            return stream.record_event()


def _numbers(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Attributes of an optimizer that a step could count in."""
    return {name: value for name, value in vars(optimizer).items() if type(value) in (int, float)}


@contextmanager
def _alone(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor
) -> Iterator[None]:
    """Within it the optimizer has one parameter to step, in its group."""
    groups, params = optimizer.param_groups, group["params"]
    try:
        optimizer.param_groups, group["params"] = [group], [parameter]
        yield
    finally:
        optimizer.param_groups, group["params"] = groups, params


@contextmanager
def _hooks_once(optimizer: torch.optim.Optimizer, run: bool = True) -> Iterator[None]:
    """Runs the optimizer's own step hooks around it (or not at all), and not within."""
    before, after = (getattr(optimizer, name) for name in _HOOKS)
    for hook in list(before.values()) if run else ():
        hook(optimizer, (optimizer,), {})
    try:
        for name in _HOOKS:
            setattr(optimizer, name, OrderedDict())
        yield
    finally:
        for name, hooks in zip(_HOOKS, (before, after)):
            setattr(optimizer, name, hooks)
    for hook in list(after.values()) if run else ():
        hook(optimizer, (optimizer,), {})


def _used_on(stream: Any, state: dict[str, Any]) -> None:
    """The memory of these tensors is not given to others before the stream has done with it."""
    for value in state.values():
        if isinstance(value, torch.Tensor) and value.is_cuda:
            value.record_stream(stream)
