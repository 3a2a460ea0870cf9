"""Offload of a rank's shards: to memory-mapped files, or to pinned host memory for a CUDA device.

The optimizer's state is offloaded as in ZeRO-Offload (Ren et al., 2021). The wrapped optimizer updates one parameter after the
other, so the state of one parameter is in use at a time, and results are those of a step without offload. At stage 3 the shards of
weights and gradients can be offloaded as well, as in ZeRO-Infinity (Rajbhandari et al., 2021). Memory then holds the units in use,
and the shards that the optimizer updates.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from hvd_ckpt.collectives.exchange import Exchange
from hvd_ckpt.offload.host_memory import MappedFiles, OffloadError, PinnedMemory
from hvd_ckpt.recompute.calls import map_tensors
from hvd_ckpt.utils.elementwise import class_of, twin_of


@contextmanager
def raised_everywhere(exchange: Exchange, offload: Offload | None) -> Iterator[None]:
    """Makes an OffloadError of one rank an error on every rank, where anything is offloaded. Collective.

    Raises:
        OffloadError, ValueError: the rank's own, or an OffloadError that points to the other rank.
    """
    if offload is None:
        yield
        return
    error: Exception | None = None
    try:
        yield
    except (OffloadError, ValueError) as raised:
        error = raised
    if exchange.maximum(torch.tensor([error is not None], dtype=torch.float32), "room")[0] > 0:
        raise error or OffloadError(
            "another rank cannot offload its part: its message says why; nothing has changed, so you can try again"
        )


class Offload:
    """Keeps the state of an optimizer in host memory, and steps the parameters one by one.

    Args:
        folder: on a CPU: where the files are; by default the temporary folder.
        device: device of the parameters. On CUDA devices state is in pinned memory.
        parameters: shards of weights and gradients, too, are in memory of :meth:`empty`; the step is then on the CPU.
    """

    def __init__(self, folder: Path | None, device: torch.device, parameters: bool = False) -> None:
        self.parameters = parameters
        self._device = torch.device("cpu") if parameters else device
        self._memory = PinnedMemory() if device.type == "cuda" else MappedFiles(folder)
        self._buffers: dict[torch.Tensor, dict[str, torch.Tensor]] = {}  # by parameter and name of state
        self._trials: dict[Any, dict[str, torch.dtype]] = {}

    @property
    def bytes(self) -> int:
        """Bytes of the offloaded state."""
        return sum(buffer.nbytes for own in self._buffers.values() for buffer in own.values())

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
        """Zeros, as memory for weights that are used in the step alone; on CUDA devices that is the device's own.

        Raises:
            OffloadError: there is no room for it.
        """
        if self._device.type == "cuda":
            return torch.zeros(numel, dtype=dtype, device=device or self._device)
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
        allocated = self._memory.allocate([wanted for *_, wanted in missing])
        for (own, name, _), buffer in zip(missing, allocated):
            own[name] = buffer
        # Replaced at once, after everything was allocated: an OffloadError leaves what there was.
        self._buffers = buffers

    def move_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Moves state that exists, after loading say, to its buffers.

        Raises:
            OffloadError, ValueError: as :meth:`reserve`.
        """
        self.reserve(optimizer)
        for parameter in self._buffers:
            self._store(optimizer, parameter, non_blocking=False)

    def step(self, optimizer: torch.optim.Optimizer, local_step: Callable[[], Any]) -> None:
        """One step, parameter by parameter.

        Args:
            optimizer: its parameters are 1-D, with their gradients.
            local_step: steps the optimizer over what is in its ``param_groups``; no closure, and no step hooks.

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
        if self._device.type == "cuda":
            self._step_on_device(optimizer, local_step, stepped)
            return
        for (group, parameter), following in zip(stepped, [*stepped[1:], None]):
            for buffer in () if following is None else self._buffers[following[1]].values():
                self._memory.advise(buffer, soon=True)
            with _alone(optimizer, group, parameter):
                local_step()
            self._store(optimizer, parameter, non_blocking=False)

    def _store(
        self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor, non_blocking: bool
    ) -> list[torch.Tensor]:
        """Copies state that is not there yet to its buffers, which may leave memory then; returns where it was."""
        state = optimizer.state.get(parameter, {})
        copied = []
        for name, buffer in self._buffers[parameter].items():
            value = state.get(name)
            if value is not None and value is not buffer:
                state[name] = buffer.copy_(value, non_blocking=non_blocking)
                copied.append(value)
            self._memory.advise(buffer, soon=False)
        return copied

    def _state_dtypes(
        self, optimizer: torch.optim.Optimizer, number: int, parameter: torch.Tensor
    ) -> dict[str, torch.dtype]:
        """Names and dtypes of the state of a parameter that has an element for each of its own."""
        if parameter.dim() != 1:
            raise ValueError(
                f"only state of 1-D parameters can be offloaded, not of one of shape {tuple(parameter.shape)}"
            )
        dtypes = {}
        if parameter.requires_grad or parameter.grad is not None:
            # A structure depends on options, and on which numbers are 0.
            options = {
                name: bool(value) if isinstance(value, (int, float)) or value is None else None
                for name, value in optimizer.param_groups[number].items()
            }
            key = (number, parameter.dtype, tuple(options.items()))
            if key not in self._trials:
                self._trials[key] = self._try_out(optimizer, number, parameter.dtype)
            dtypes.update(self._trials[key])
        for name, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                dtypes[name] = value.dtype
        return dtypes

    def _try_out(
        self, optimizer: torch.optim.Optimizer, number: int, dtype: torch.dtype
    ) -> dict[str, torch.dtype]:
        """The state that a step makes for a small parameter."""
        small = torch.nn.Parameter(torch.zeros(2, dtype=dtype, device=self._device))
        small.grad = torch.zeros_like(small)
        options = {
            name: value.clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
            for name, value in optimizer.param_groups[number].items()
            if name != "params"
        }
        twin, group = twin_of(optimizer), {"params": [small], **options}
        twin.param_groups = [group]
        before = _described(options, _numbers(twin))
        # A class such as Adagrad makes its state in the constructor.
        with suppress(KeyError), torch.random.fork_rng(devices=[]):
            class_of(optimizer).step(twin)
        after = {name: value for name, value in group.items() if name != "params"}
        if _described(after, _numbers(twin)) != before:
            raise ValueError(
                f"the state of optimizer {class_of(optimizer).__name__} cannot be offloaded: its step changes values in "
                f"param_groups or attributes, so it cannot be taken for one parameter after the other; leave offload at None"
            )
        return {
            name: value.dtype
            for name, value in twin.state[small].items()
            if isinstance(value, torch.Tensor) and value.shape == small.shape
        }

    # -------------------------------------------------------------------------------- CUDA

    def _step_on_device(
        self,
        optimizer: torch.optim.Optimizer,
        local_step: Callable[[], Any],
        stepped: Sequence[tuple[dict[str, Any], torch.Tensor]],
    ) -> None:
        """State is copied to the device before a parameter is stepped, and back after it, on a stream for each direction:

            arriving   load 1, load 2, load 3 .....
            current            step 1, step 2 .....
            leaving                    store 1 ....

        The device has the state of three parameters at most. All of it is memory of the current stream, since the allocator keeps
        that of each stream apart. It is given back once the current stream has waited for the copy that leaves, so it can be used
        again at once, however far ahead of the device the host is."""
        current = torch.cuda.current_stream(self._device)
        arriving, leaving = torch.cuda.Stream(self._device), torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        # Ends of copies, and the memory that they read.
        stored: deque[tuple[Any, list[torch.Tensor]]] = deque()
        arrived = None
        for (group, parameter), following in zip(stepped, [*stepped[1:], None]):
            if arrived is None:
                arrived = self._load(optimizer, parameter, arriving)
            current.wait_event(arrived)
            if len(stored) == 2:
                # The state of the parameter before last has left. What held it is given back,
                # and may hold the state that is loaded next.
                current.wait_event(stored[0][0])
                stored.popleft()
            if following is not None:
                arrived = self._load(optimizer, following[1], arriving)
            with _alone(optimizer, group, parameter):
                local_step()
            leaving.wait_stream(current)
            with torch.cuda.stream(leaving):
                copied = self._store(optimizer, parameter, non_blocking=True)
            stored.append((leaving.record_event(), copied))
            del copied
        leaving.synchronize()

    def _load(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor, stream: Any) -> Any:
        """Begins to copy the state of a parameter to the device; returns the event that tells the end."""
        state = optimizer.state.get(parameter, {})
        loaded = {name: buffer for name, buffer in self._buffers[parameter].items() if name in state}
        # The state has the device's copies until _store() puts the buffers back.
        state.update((name, torch.empty_like(buffer, device=self._device)) for name, buffer in loaded.items())
        stream.wait_stream(torch.cuda.current_stream(self._device))  # which may still use this memory
        with torch.cuda.stream(stream):
            for name, buffer in loaded.items():
                state[name].copy_(buffer, non_blocking=True)
            return stream.record_event()


def _numbers(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Attributes of an optimizer that a step could count in."""
    return {name: value for name, value in vars(optimizer).items() if type(value) in (int, float)}


def _described(*values: Any) -> str:
    """Values as text, since options may be tensors, whose comparison is no single bool; tensors with all their digits."""
    return repr(map_tensors(lambda tensor: tensor.tolist(), torch.Tensor, values))


@contextmanager
def _alone(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor
) -> Iterator[None]:
    """A context in which the optimizer has one parameter to step, in its group."""
    groups, params = optimizer.param_groups, group["params"]
    try:
        optimizer.param_groups, group["params"] = [group], [parameter]
        yield
    finally:
        optimizer.param_groups, group["params"] = groups, params
