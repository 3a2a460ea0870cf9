"""Messages between processes of a grid: nested values with tensors, sent and received during computation.

Every message has a tag, by which a receiver finds it among all messages of its sender. It consists of the length of its header,
the header, and the memory of each tensor. On a CPU, tensors are sent without a copy; tensors of a GPU go over NCCL in a lane, or
through pinned memory. A header is only sent if it differs from that of the last message with the same tag.

The watchdog watches every wait (``hvd_ckpt.init(stall_timeout=...)``) and names the stage, rank and host that it is for.
"""

from __future__ import annotations

import contextlib
import io
import pickle
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hvd_ckpt.processes.grid import FIRST_TAG, Grid
from hvd_ckpt.reduction.buckets import is_packed

if TYPE_CHECKING:
    from hvd_ckpt.processes.device_link import DeviceLink

# Messages with one tag. A length of 0 means "the header of the last message":
#
#     first message      length   header   tensors
#     next, equal        0                 tensors
#     next, equal        0                 tensors     from here on, the receiver may post memory for the tensors before they come
#     then, different    length   filler   header   tensors
#
# A receiver posts memory ahead (Transport.expect) if the last message repeated its header. Both sides know that. So if the header
# changes then, the sender first fills the memory that the receiver has posted, with tensors of the old header that nobody reads.
# Without this filler, the new header would arrive in the memory of the first tensor.
#
# In a lane, tensors arrive on the device in the order in which they were sent, whatever their tags. So announcements, each with the
# tag of its message, and headers have one tag for all messages of the lane. The receiver reads them in order, and launches the
# receives of each message, until it finds the one that it wants. It posts nothing ahead: the device's receives wait for nothing.

# Tags: the beginning of a step, its loss, gradients of tied parameters, what lanes announce, and from VALUE_TAG on the values and
# gradients of each edge and micro-batch.
STEP_TAG, LOSS_TAG, TIED_TAG, LANE_TAG, VALUE_TAG = range(FIRST_TAG, FIRST_TAG + 5)
AHEAD = 2  # passes that the host may be ahead of the device


class Meta(NamedTuple):
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    device: str

    def empty(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


def take_apart(value: Any) -> tuple[bytes, list[Tensor]]:
    """The structure of a value with everything in it except tensors, and its tensors, each once."""
    file, tensors = io.BytesIO(), dict[int, tuple[int, Tensor]]()

    def number_of(value: Any) -> int | None:
        return tensors.setdefault(id(value), (len(tensors), value))[0] if isinstance(value, Tensor) else None

    pickler = pickle.Pickler(file, protocol=5)
    pickler.persistent_id = number_of  # type: ignore[method-assign]
    pickler.dump(value)
    return file.getvalue(), [tensor for _, tensor in tensors.values()]


def put_together(structure: bytes, tensors: Sequence[Tensor]) -> Any:
    """The value that :func:`take_apart` took apart, with other tensors."""
    unpickler = pickle.Unpickler(io.BytesIO(structure))
    unpickler.persistent_load = tensors.__getitem__  # type: ignore[method-assign]
    return unpickler.load()


class Received(NamedTuple):
    """A value and its tensors, in the order of the sender."""

    value: Any
    tensors: list[Tensor]


class _Request(NamedTuple):
    """A message of a link, and its memory, which must not be freed before it is sent."""

    link: Any
    request: Any
    other: int
    tag: int
    memory: Tensor

    def wait(self, awaited: str) -> None:
        self.link.wait(self.request, awaited, self.other)


class _Arriving(NamedTuple):
    header: bytes
    tensors: list[Tensor]
    requests: list[_Request]  # whose memory is on the host, or that of the tensor

    def wait(self, awaited: str) -> Received:
        for request in self.requests:
            request.wait(awaited)
        # Unpickling executes what it is told to. These bytes come from a process of this job alone, over its own link.
        structure, metas = pickle.loads(self.header)
        for tensor, request, meta in zip(self.tensors, self.requests, metas):
            if request.memory is not tensor:
                # The pinned memory may be dropped meanwhile: PyTorch's allocator gives it out again only after the copy.
                tensor.copy_(request.memory, non_blocking=True)
            if meta.requires_grad:
                tensor.requires_grad_()
        return Received(put_together(structure, self.tensors), self.tensors)


class Transport:
    """Messages of this process to and from the others, and between parts of a model that are on this one.

    Args:
        grid: the grid of :func:`hvd_ckpt.processes.grid.current`.

    Attributes:
        sent_bytes: bytes sent since the start.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self._link: Any = grid.link
        self.sent_bytes = 0
        self._here: dict[int, Received] = {}  # by tag, for this process itself
        self._device_link = self._to_open = grid.stage_link
        self._early: dict[tuple[int, int], deque[_Arriving]] = defaultdict(deque)
        self._passes: deque[Any] = deque()
        # By process and tag, the last header, and whether the last message repeated it.
        self._sent: dict[tuple[int, int], tuple[bytes, bool]] = {}
        self._received: dict[tuple[int, int], tuple[bytes, bool]] = {}
        # Messages that have not arrived yet: the length, and the tensors if their memory was posted ahead.
        self._expected: dict[tuple[int, int], tuple[_Request, _Arriving | None]] = {}
        self._sending: list[_Request] = []

    def open_lanes(self, between: Iterable[tuple[int, int]], tensors: Iterable[Tensor]) -> None:
        """Connects the devices of stages that send to each other, if any of the tensors is on one.

        The first call is collective over the stages and parts of a replica. Later ones do nothing.

        Args:
            between: pairs of stages.
            tensors: state of the model on this rank.
        """
        link, self._to_open = self._to_open, None
        if link is not None and self.grid.on_any_stage(
            any(one.device.type == link.device for one in tensors)
        ):
            pairs = {
                (self.grid.process(one), self.grid.process(other)) for one, other in between if one != other
            }
            link.connect(*sorted(pairs | {(other, one) for one, other in pairs}))

    def _lane(self, source: int, to: int) -> DeviceLink | None:
        link = self._device_link
        return link if link is not None and link.connects(source, to) else None

    def send(self, value: Any, to: int, tag: int) -> list[Tensor]:
        """Starts to send a value. Its memory must not be changed until :meth:`flush`.

        Returns:
            Its tensors, in the order of the receiver.
        """
        structure, tensors = take_apart(value)
        if to == self.grid.number:
            # The graph is cut all the same, so that each part of the model has a backward pass of its own.
            copies = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
            self._here[tag] = Received(put_together(structure, copies), copies)
            return tensors
        values = [tensor.detach().resolve_conj().resolve_neg() for tensor in tensors]
        whole = [value if is_packed(value) else value.contiguous() for value in values]
        metas = [
            Meta(tuple(dense.shape), dense.stride(), dense.dtype, tensor.requires_grad, dense.device.type)
            for dense, tensor in zip(whole, tensors)
        ]
        header = pickle.dumps((structure, metas), protocol=5)
        before, repeated = self._sent.get((to, tag), (b"", False))
        known = before == header
        lane = self._lane(self.grid.number, to)
        told = LANE_TAG if lane is not None else tag
        announced = [0 if known else len(header)] + [tag] * (lane is not None)
        self._start(torch.tensor(announced, dtype=torch.int64), to, told)
        if repeated and not known and lane is None:
            for meta in pickle.loads(before)[1]:  # filler
                self._start(_host_copy(meta.empty()), to, tag)
        if not known:
            self._start(torch.frombuffer(bytearray(header), dtype=torch.uint8), to, told)
        self._sent[to, tag] = header, known
        for tensor in whole:
            if lane is not None and tensor.device.type == lane.device:
                self._start(tensor, to, tag, lane)
            else:
                host = _host_copy(tensor)  # copy_() waits: the host reads it next
                self._start(tensor if host is tensor else host.copy_(tensor), to, tag)
        return tensors

    def expect(self, source: int, tag: int) -> None:
        """Posts the receives of a value for which :meth:`receive` will wait."""
        own = self.grid.number
        if source != own and (source, tag) not in self._expected and self._lane(source, own) is None:
            length = torch.empty(1, dtype=torch.int64)
            request = self._begin(self._link, length, source, tag)
            header, repeated = self._received.get((source, tag), (b"", False))
            arriving = self._receive_tensors(header, source, tag) if repeated else None
            self._expected[source, tag] = request, arriving

    def receive(self, source: int, tag: int, what: str) -> Received:
        """Waits for a value.

        Args:
            what: name of the value for the watchdog, such as ``the input of micro-batch 3``.

        Raises:
            StageFailed: the sender, or over MPI any other process, has failed.
        """
        if source == self.grid.number:
            return self._here.pop(tag)
        awaited = f"{what} from {self.grid.name(source)}"
        if self._lane(source, self.grid.number) is not None:
            while not self._early[source, tag]:
                self._receive_announced(source, awaited)
            return self._early[source, tag].popleft().wait(awaited)
        self.expect(source, tag)
        length, arriving = self._expected.pop((source, tag))
        length.wait(awaited)
        if size := int(length.memory.item()):
            if arriving is not None:  # filler
                arriving.wait(awaited)
            header, arriving = self._header(size, source, tag, awaited), None
        else:
            header, _ = self._received[source, tag]
        # Set on both sides from the same message: whether the sender fills posted memory must agree with whether this side posts it
        self._received[source, tag] = header, not size
        if arriving is None:
            arriving = self._receive_tensors(header, source, tag)
        return arriving.wait(awaited)

    def _receive_announced(self, source: int, awaited: str) -> None:
        """Starts to receive the next message of a lane."""
        announced = torch.empty(2, dtype=torch.int64)
        self._begin(self._link, announced, source, LANE_TAG).wait(awaited)
        size, tag = announced.tolist()
        if size:
            self._received[source, tag] = self._header(size, source, LANE_TAG, awaited), False
        header, _ = self._received[source, tag]
        self._early[source, tag].append(self._receive_tensors(header, source, tag))

    def _header(self, size: int, source: int, tag: int, awaited: str) -> bytes:
        header = torch.empty(size, dtype=torch.uint8)
        self._begin(self._link, header, source, tag).wait(awaited)
        return header.numpy().tobytes()

    def _receive_tensors(self, header: bytes, source: int, tag: int) -> _Arriving:
        arriving = _Arriving(header, [], [])
        lane = self._lane(source, self.grid.number)
        for meta in pickle.loads(header)[1]:
            if lane is not None and meta.device == lane.device:
                with lane.memory_from(source):
                    tensor = host = meta.empty()
                link: Any = lane
            else:
                tensor = meta.empty()
                host, link = _host_copy(tensor), self._link
            arriving.tensors.append(tensor)
            arriving.requests.append(self._begin(link, host, source, tag))
        return arriving

    def _begin(self, link: Any, memory: Tensor, source: int, tag: int) -> _Request:
        return _Request(link, link.receive(_bytes(memory), source, tag), source, tag, memory)

    def flush(self, *of: int) -> None:
        """Waits until everything is sent, or everything to a process with a tag. On a device, the current stream waits, and not the
        host."""
        for message in self._sending:
            if not of or (message.other, message.tag) == of:
                message.wait(f"{self.grid.name(message.other)} to take what was sent")
        self._sending = [message for message in self._sending if of and (message.other, message.tag) != of]

    def advance(self) -> None:
        """Ends a pass: releases the memory of sends that are known to be complete, and keeps the host from going far ahead of a
        device, where it would allocate memory for messages of many passes."""
        if self._device_link is not None and self._device_link.device == "cuda":
            self._passes.append(torch.cuda.current_stream().record_event())
            if len(self._passes) > AHEAD:
                self._passes.popleft().synchronize()
        self._sending = [message for message in self._sending if not message.link.is_sent(message.request)]

    def fail(self, error: BaseException) -> None:
        """Tells all processes that the link reaches that this one has failed."""
        if self._link is not None:
            with contextlib.suppress(Exception):
                self._link.fail(f"{type(error).__name__}: {error}")

    def _start(self, tensor: Tensor, to: int, tag: int, link: Any = None) -> None:
        self.sent_bytes += tensor.nbytes
        link = link or self._link
        request = link.send(_bytes(tensor), to, tag)
        if not link.is_sent(request):
            self._sending.append(_Request(link, request, to, tag, tensor))


def _bytes(dense: Tensor) -> Tensor:
    return dense.detach().as_strided((dense.numel(),), (1,)).view(torch.uint8)


def _host_copy(tensor: Tensor) -> Tensor:
    """Host memory for a tensor: its own memory, or new pinned memory with the same strides."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu", pin_memory=True
    )
