"""Races between CUDA streams, found on a machine without a GPU, and the memory that streams take.

Inside :func:`simulated` CPU tensors stand for tensors on a device: they say so (``device``, ``is_cuda``), and streams and events of
``torch.cuda`` are vector clocks. Operations run at once, on the CPU; recorded is what the device would be free to do:

* An operation on a device tensor runs on the current stream, after what the host has launched there before, and after what that
  stream has waited for. It may be over at any time later, until the host or another stream waits for it.
* Two accesses of one storage race if one of them writes and neither comes after the other.
* Memory that is freed goes back to the stream that it was allocated on, which may use it at once: an access on another stream
  races with that, unless the stream has waited for it, or ``record_stream`` names the stream of the access. So new memory may be in
  use on its stream until now, and another stream must wait for that.
* A copy between the device and pinned memory with ``non_blocking=True`` does not make the host wait; every other one does.

The host may be several threads (:meth:`Simulation.thread`). PyTorch's hooks run on the thread that calls ``backward()``, since the
tensors are really on the CPU; that autograd has a thread for each device is not simulated.

Every synchronization in ``hvd_ckpt`` is a *site*, a line of source. :func:`check` runs scenarios as they are, where there must be
no race, and without each site, where there must be one: a site that is not missed is redundant, or no scenario covers it.
"""

from __future__ import annotations

import contextlib
import itertools
import linecache
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import device_modes
import torch
from device_memory import HOST, Access, Allocator, Clock, Memory
from device_modes import DEVICE as DEVICE, Functions, Operations, identity_of, operands_of, tensors_in
from torch.utils import _pytree as pytree

import hvd_ckpt

DEFAULT = "default stream"
_PACKAGE, _TORCH = (str(Path(module.__file__).parent) for module in (hvd_ckpt, torch))
_THROUGH = (__file__, str(device_modes.__file__), _TORCH)  # what lies between hvd_ckpt and a simulated call

Scenario = Callable[["Simulation"], object]


class Site(NamedTuple):
    """A line of ``hvd_ckpt``."""

    file: str
    line: int

    def __str__(self) -> str:
        source = linecache.getline(self.file, self.line).strip()
        return f"{Path(self.file).relative_to(_PACKAGE)}:{self.line}: {source}"


class Event:
    """Stands for ``torch.cuda.Event``."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self._simulation.stream
        self._simulation.launch(stream.name)
        self.clock = dict(stream.clock())

    def synchronize(self) -> None:
        self._simulation.host_waits(self.clock)

    def query(self) -> bool:
        return False

    def elapsed_time(self, end: Event) -> float:
        host = self._simulation.clock(self._simulation.host)
        if any(host.get(agent, 0) < time for event in (self, end) for agent, time in event.clock.items()):
            self._simulation.races.append("the time of an event is read before the device has reached it")
        return 1.0


class Stream:
    """Stands for ``torch.cuda.Stream``."""

    device = DEVICE

    def __init__(self, simulation: Simulation, name: str) -> None:
        self._simulation, self.name = simulation, name

    def clock(self) -> Clock:
        """Of all that has been launched on the stream."""
        self._simulation.join(self.name, self._simulation.clock(self._simulation.host))
        return self._simulation.clock(self.name)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._simulation)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        if self._simulation.keeps_site():
            self._simulation.join(self.name, event.clock)

    def wait_stream(self, stream: Stream) -> None:
        if self._simulation.keeps_site():
            self._simulation.join(self.name, stream.clock())

    def synchronize(self) -> None:
        self._simulation.host_waits(self.clock())


class Work:
    """Stands for the work of a process group over NCCL: a stream of its own, up to now."""

    def __init__(self, stream: Stream) -> None:
        self._stream, self._clock = stream, dict(stream.clock())

    def wait(self) -> None:
        """Has the current stream wait."""
        simulation = self._stream._simulation
        if simulation.keeps_site():
            simulation.join(simulation.stream.name, self._clock)


# Operations that neither read nor write elements, and those after which the host has an answer.
_WITHOUT_ACCESS = {"set_", "resize_", "_unsafe_view", "lift", "lift_fresh"}
_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_ANSWERS = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "unique"}


class Simulation:
    """What has happened inside :func:`simulated`.

    Args:
        without: the site whose synchronizations do not take place.

    Attributes:
        races: a sentence for each.
        sites: of all synchronizations.
        waits: where the host has waited for the device.
        allocator: of the device.
        stream: the current one.
    """

    def __init__(self, without: Site | None = None) -> None:
        self.races: list[str] = []
        self.sites: dict[Site, None] = {}
        self.waits: list[Site] = []
        self.allocator = Allocator(self.clock)
        self.default = self.stream = Stream(self, DEFAULT)
        self.host = HOST
        self._without = without
        self._clocks: dict[str, Clock] = {}
        self._memory: dict[int, Memory] = {}  # by identity of the storage
        self._page_locked: dict[int, int] = {}  # ends of memory, by address
        self._kind: str | None = None  # of what is allocated now
        self._owner: Stream | None = None  # of what is allocated now, if it is not the current stream
        self._numbers = itertools.count(1)
        self._ended = False

    # ------------------------------------------------------------------------------------ agents and their clocks

    def clock(self, agent: str) -> Clock:
        return self._clocks.setdefault(agent, {})

    def join(self, agent: str, clock: Clock) -> None:
        """The agent comes after all that the clock knows."""
        own = self.clock(agent)
        for other, time in clock.items():
            own[other] = max(own.get(other, 0), time)

    def host_waits(self, clock: Clock) -> None:
        """The thread of the host waits, unless the site of this wait is left out."""
        if self.keeps_site():
            self.note_wait()
            self.join(self.host, clock)

    def note_wait(self) -> None:
        """The host waits for the device here."""
        site = _site()
        if site is not None:
            self.waits.append(site)

    def keeps_site(self) -> bool:
        """Notes the site of a synchronization; False if it is left out."""
        site = _site()
        if site is not None:
            self.sites[site] = None
        return site is None or site != self._without

    @contextlib.contextmanager
    def thread(self, name: str) -> Iterator[None]:
        """Within it another thread of the host runs, which has been started, or told to go on, by the one outside."""
        before, self.host = self.host, name
        self.join(name, self.clock(before))
        try:
            yield
        finally:
            self.host = before

    def wait_for_thread(self, name: str) -> None:
        """The thread waits until the other one has done what it did so far."""
        self.join(self.host, self.clock(name))

    @contextlib.contextmanager
    def on(self, stream: Stream, owner: Stream | None = None) -> Iterator[None]:
        """Within it the stream is the current one, and ``owner`` that which memory is allocated on."""
        before, self.stream, self._owner = (self.stream, self._owner), stream, owner
        try:
            yield
        finally:
            self.stream, self._owner = before

    def make_stream(self, device: Any = None, priority: int = 0) -> Stream:
        return Stream(self, f"stream {next(self._numbers)}")

    # ------------------------------------------------------------------------------------ memory

    def memory(self, tensor: torch.Tensor) -> Memory:
        """Of a tensor; pageable if it was not seen before."""
        with torch._C.DisableTorchFunction():
            storage = tensor.untyped_storage()
        if storage._cdata not in self._memory:
            address = storage.data_ptr()
            locked = any(start <= address < end for start, end in self._page_locked.items())
            self._memory[storage._cdata] = Memory("pinned" if locked else "pageable", registered=locked)
            weakref.finalize(storage, self._gone, storage._cdata)
        return self._memory[storage._cdata]

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        with torch._C.DisableTorchFunction():
            is_elsewhere = tensor.layout is not torch.strided or tensor.is_meta
        return not is_elsewhere and self.memory(tensor).kind == "device"

    def allocate(self, tensor: torch.Tensor, kind: str) -> None:
        """The memory of a new tensor is of this kind."""
        memory = self.memory(tensor)
        if memory.kind == kind:
            return
        memory.kind = kind
        if kind == "device":
            with torch._C.DisableTorchFunction():
                self._taken(memory, tensor.untyped_storage().nbytes())

    def _taken(self, memory: Memory, nbytes: int) -> None:
        memory.stream, memory.nbytes = (self._owner or self.stream).name, nbytes
        time = self.clock(memory.stream).get(memory.stream, 0)
        memory.written = Access(memory.stream, time, "an earlier use of its memory")
        self.allocator.allocate(memory.stream, nbytes)

    def _gone(self, identity: int) -> None:
        memory = self._memory.pop(identity)
        if not self._ended:
            self._given_back(memory)

    def _given_back(self, memory: Memory) -> None:
        if memory.registered:
            self._check_uses(memory, self.host)
        if memory.kind != "device" or not memory.nbytes:
            return
        self.join(memory.stream, self.clock(self.host))
        self._check_uses(memory, memory.stream)
        self.allocator.free(memory)
        memory.written, memory.nbytes = None, 0
        memory.read.clear()
        memory.recorded.clear()

    def _check_uses(self, memory: Memory, owner: str) -> None:
        """Notes a race where memory is given back to an agent while another one uses it."""
        for access in (*memory.read.values(), memory.written):
            if access is None or access.agent in memory.recorded or self._is_over(access, owner):
                continue
            self.races.append(
                f"memory of {owner} is freed while {access.operation} on {access.agent} uses it"
            )

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Gives the memory of a storage back, and takes other memory."""
        memory = self._memory.get(storage._cdata)
        if memory is not None and memory.kind == "device":
            self._given_back(memory)
            if nbytes:
                self._taken(memory, nbytes)

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        memory = self.memory(tensor)
        if (
            stream.name != memory.stream and self.keeps_site()
        ):  # the allocator ignores a block's own stream, too
            memory.recorded.add(stream.name)

    def _is_over(self, access: Access, agent: str) -> bool:
        return self.clock(agent).get(access.agent, 0) >= access.time

    # ------------------------------------------------------------------------------------ operations

    def launch(self, agent: str) -> int:
        """The number of a new operation of a stream or a thread."""
        if agent != self.host:
            self.join(agent, self.clock(self.host))
        own = self.clock(agent)
        own[agent] = own.get(agent, 0) + 1
        return own[agent]

    def access(self, tensor: torch.Tensor, agent: str, time: int, operation: str, write: bool) -> None:
        """An operation of an agent reads or writes a tensor."""
        memory = self.memory(tensor)
        conflicts = [("writing", memory.written)]
        if write:
            conflicts += [("reading", access) for access in memory.read.values()]
        for doing, other in conflicts:
            if other is not None and not self._is_over(other, agent):
                does = "writes" if write else "reads"
                self.races.append(
                    f"{operation} on {agent} {does} what {other.operation} on {other.agent} is {doing}"
                )
        if write:
            memory.written = Access(agent, time, operation)
            memory.read.clear()
        else:
            memory.read[agent] = Access(agent, time, operation)

    def read_by_host(self, tensor: torch.Tensor, operation: str) -> None:
        """The host reads values; of a tensor on the device, it waits for them."""
        agent = self.stream.name if self.is_on_device(tensor) else self.host
        self.access(tensor, agent, self.launch(agent), operation, write=False)
        if agent != self.host:
            self.note_wait()
            self.join(self.host, self.clock(agent))

    def run(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Runs an operation of PyTorch and notes what it reads and writes."""
        result = function(*args, **kwargs)
        name = function._schema.name.split("::")[1]
        if function.is_view or name in _WITHOUT_ACCESS:
            return result
        reads, writes = operands_of(function, args, kwargs)
        if name in ("copy_", "_foreach_copy_"):
            non_blocking = bool(kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
            for target, source in zip(pytree.tree_leaves(args[0]), pytree.tree_leaves(args[1])):
                self._copy(target, source, non_blocking, name)
            return result
        known = {identity_of(tensor) for tensor in (*reads, *writes)}
        fresh = [tensor for tensor in tensors_in(result) if identity_of(tensor) not in known]
        on_device = any(map(self.is_on_device, (*reads, *writes)))
        for tensor in fresh:
            self.allocate(tensor, self._kind or ("device" if on_device else "pageable"))
        if name in _EMPTY:
            return result
        on_device = on_device or any(map(self.is_on_device, fresh))
        agent = self.stream.name if on_device else self.host
        time = self.launch(agent)
        for tensor in reads:
            if on_device and not self.is_on_device(tensor):  # a number, which the host reads as it launches
                self.access(tensor, self.host, self.launch(self.host), name, write=False)
            else:
                self.access(tensor, agent, time, name, write=False)
        for tensor in (*writes, *fresh):
            self.access(tensor, agent, time, name, write=True)
        if on_device and name in _ANSWERS:
            self.note_wait()
            self.join(self.host, self.clock(agent))
        return result

    def _copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool, name: str) -> None:
        """Notes a copy; see the module's text for those between the device and the host."""
        if not target.numel():
            return
        to, of = self.is_on_device(target), self.is_on_device(source)
        agent = self.stream.name if to or of else self.host
        time = self.launch(agent)
        pageable = to != of and "pageable" in (self.memory(target).kind, self.memory(source).kind)
        if pageable and to:  # the host has read it when the call returns
            self.access(source, self.host, self.launch(self.host), name, write=False)
        else:
            self.access(source, agent, time, name, write=False)
        self.access(target, agent, time, name, write=True)
        if pageable:
            self.note_wait()
            if of or not non_blocking:
                self.join(self.host, self.clock(agent))
        elif to != of and not non_blocking:
            self.host_waits(self.clock(agent))

    def copied(
        self, tensor: torch.Tensor, kind: str, dtype: torch.dtype | None = None, non_blocking: bool = False
    ) -> torch.Tensor:
        """A copy of a tensor in memory of this kind."""
        with self.making(kind):
            copy = torch.empty_like(tensor, dtype=dtype or tensor.dtype, requires_grad=False)
        return copy.copy_(tensor, non_blocking=non_blocking)

    @contextlib.contextmanager
    def making(self, kind: str) -> Iterator[None]:
        """Within it new tensors are of this kind."""
        before, self._kind = self._kind, kind
        try:
            yield
        finally:
            self._kind = before

    def synchronize(self, device: Any = None) -> None:
        """The host waits for all streams."""
        for clock in list(self._clocks.values()):
            self.join(self.host, clock)

    # ------------------------------------------------------------------------------------ torch.cuda

    def replaced(self) -> Iterator[tuple[Any, str, Any]]:
        """Objects, names of their attributes, and what stands in their place."""
        cudart = SimpleNamespace(cudaHostRegister=self._lock, cudaHostUnregister=self._page_locked.pop)
        resized = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, nbytes: int) -> Any:
            self.resize(storage, nbytes)
            return resized(storage, nbytes)

        run_backward = torch.autograd._engine_run_backward

        def backward(*args: Any, **kwargs: Any) -> Any:
            with Functions(self):  # PyTorch leaves modes for the time of backward()
                return run_backward(*args, **kwargs)

        yield torch.autograd, "_engine_run_backward", backward
        yield torch.UntypedStorage, "resize_", resize
        yield torch.Tensor, "record_stream", lambda tensor, stream: self.record_stream(tensor, stream)
        allocator = self.allocator
        replacements: dict[str, Any] = {
            "Stream": self.make_stream,
            "Event": lambda **options: Event(self),
            "stream": self.on,
            "current_stream": lambda device=None: self.stream,
            "default_stream": lambda device=None: self.default,
            "synchronize": self.synchronize,
            "cudart": lambda: cudart,
            "memory_allocated": lambda device=None: allocator.allocated,
            "max_memory_allocated": lambda device=None: allocator.peak,
            "reset_peak_memory_stats": lambda device=None: allocator.restart(),
            "get_rng_state": lambda device=None: None,
            "set_rng_state": lambda state, device=None: None,
        }
        for name, value in replacements.items():
            yield torch.cuda, name, value

    def _lock(self, address: int, nbytes: int, flags: int) -> int:
        self._page_locked[address] = address + nbytes
        return 0

    def end(self) -> None:
        self._ended = True


@contextlib.contextmanager
def simulated(without: Site | None = None) -> Iterator[Simulation]:
    """Within it tensors may be on a device.

    Args:
        without: a site whose synchronizations do not take place.
    """
    simulation = Simulation(without)
    with contextlib.ExitStack() as stack:
        stack.callback(simulation.end)
        for owner, name, value in simulation.replaced():
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(Functions(simulation))
        stack.enter_context(Operations(simulation))
        yield simulation


@contextlib.contextmanager
def own_stream() -> Iterator[None]:
    """Within it another stream is the current one, which is ordered with the one outside at the begin and at the end."""
    outside, stream = torch.cuda.current_stream(), torch.cuda.Stream()
    stream.wait_stream(outside)
    with torch.cuda.stream(stream):
        yield
    outside.wait_stream(stream)


def run(scenario: Scenario, without: Site | None = None) -> Simulation:
    """Runs a scenario, which frees all that it has made."""
    with simulated(without) as simulation:
        scenario(simulation)
    return simulation


def check(*scenarios: Scenario) -> list[Site]:
    """Asserts that no scenario has a race, and that some scenario has one without any one of the synchronizations.

    Returns:
        The sites of the synchronizations.
    """
    found: dict[Site, list[Scenario]] = {}
    for scenario in scenarios:
        simulation = run(scenario)
        assert not simulation.races, simulation.races[0]
        for site in simulation.sites:
            found.setdefault(site, []).append(scenario)
    for site, reached in found.items():
        assert any(run(scenario, site).races for scenario in reached), f"redundant or not covered: {site}"
    return list(found)


def _site() -> Site | None:
    """The line of ``hvd_ckpt`` that has called this file, by way of PyTorch or not."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_THROUGH):
        frame = frame.f_back
    if frame is None or not frame.f_code.co_filename.startswith(_PACKAGE):
        return None
    return Site(frame.f_code.co_filename, frame.f_lineno)
