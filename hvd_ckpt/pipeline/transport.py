"""Messages between processes of a grid: nested values with tensors, sent and received while others compute.

A message has a tag, so that a value finds the one that waits for it whatever was sent before. Its first part says how long its
header is: 0 if the structure, shapes and types are those of the last message with this tag, which is the rule. Then come the
header, if there is one, and the memory of each tensor, as it lies: nothing is copied on a CPU. Tensors on a GPU go through pinned
memory.

Where the last message with a tag had the header of the one before, the receiver may have memory for the next one ready before it
comes (:meth:`Transport.expect`), so that it arrives while the receiver computes. If that one has another header, the sender, which
knows as much of the tag, fills this memory with anything before it sends the header and the tensors.

Every wait is one that the watchdog watches (``hvd_ckpt.init(stall_timeout=...)``), with the stage, rank and host that it is for.
"""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hvd_ckpt.processes.grid import Grid


class Meta(NamedTuple):
    """What a header says of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    device: str

    @classmethod
    def of(cls, tensor: Tensor) -> Meta:
        return cls(
            tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad, tensor.device.type
        )

    def empty(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


class _Pickler(pickle.Pickler):
    """Pickles a value without its tensors, which it lists, each once."""

    def __init__(self, file: Any) -> None:
        super().__init__(file, protocol=5)
        self.numbers: dict[int, int] = {}
        self.tensors: list[Tensor] = []

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, Tensor):
            return None
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.tensors)
            self.tensors.append(value)
        return self.numbers[id(value)]


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, tensors: Sequence[Tensor]) -> None:
        super().__init__(file)
        self.tensors = tensors

    def persistent_load(self, number: int) -> Any:
        return self.tensors[number]


def take_apart(value: Any) -> tuple[bytes, list[Tensor]]:
    """A value's structure with everything in it but tensors, and its tensors, each once."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    return file.getvalue(), pickler.tensors


def put_together(structure: bytes, tensors: Sequence[Tensor]) -> Any:
    """The value that :func:`take_apart` took apart, with other tensors."""
    return _Unpickler(io.BytesIO(structure), tensors).load()


class Received(NamedTuple):
    """A value and its tensors, in the order that the sender knows them in."""

    value: Any
    tensors: list[Tensor]


@dataclass
class _Layout:
    """The last header with a tag, and whether the last message was one without."""

    header: bytes
    repeated: bool = False


class _Arriving(NamedTuple):
    tensors: list[Tensor]
    hosts: list[Tensor]
    requests: list[Any]


@dataclass
class _Expected:
    """A message that is to come: its first part, and its tensors where their memory is ready."""

    length: Tensor
    requests: list[Any]
    arriving: _Arriving | None


@dataclass
class _Sending:
    request: Any
    to: int
    tag: int
    keep: Tensor  # until it is sent


class Transport:
    """Messages of this process to and from the others.

    Args:
        grid: of :func:`hvd_ckpt.processes.grid.current`.

    Attributes:
        sent_bytes: since the start.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        assert grid.link is not None
        self._link = grid.link
        self.sent_bytes = 0
        self._sent: dict[tuple[int, int], _Layout] = {}
        self._received: dict[tuple[int, int], _Layout] = {}
        self._expected: dict[tuple[int, int], _Expected] = {}
        self._sending: list[_Sending] = []

    def send(self, value: Any, to: int, tag: int) -> list[Tensor]:
        """Starts to send a value; its memory must not change until :meth:`flush`.

        Returns:
            Its tensors, in the order in which the receiver lists them.
        """
        structure, tensors = take_apart(value)
        whole = [_lying_dense(tensor) for tensor in tensors]
        metas = [
            Meta.of(dense)._replace(requires_grad=tensor.requires_grad)
            for dense, tensor in zip(whole, tensors)
        ]
        header = pickle.dumps((structure, metas), protocol=5)
        before = self._sent.get((to, tag))
        known = before is not None and before.header == header
        self._start(torch.tensor([0 if known else len(header)], dtype=torch.int64), to, tag)
        if before is not None and not known and before.repeated:
            for meta in pickle.loads(before.header)[1]:
                self._start(_host_copy(meta.empty()), to, tag)
        if not known:
            self._start(torch.frombuffer(bytearray(header), dtype=torch.uint8), to, tag)
        self._sent[to, tag] = _Layout(header, known)
        for tensor in whole:
            self._start(_on_host(tensor), to, tag)
        return tensors

    def expect(self, source: int, tag: int) -> None:
        """Gets ready for a value that :meth:`receive` is to wait for."""
        if (source, tag) not in self._expected:
            length = torch.empty(1, dtype=torch.int64)
            requests = self._link.receive(_bytes(length), source, tag)
            layout = self._received.get((source, tag))
            arriving = (
                self._receive_tensors(layout, source, tag) if layout is not None and layout.repeated else None
            )
            self._expected[source, tag] = _Expected(length, requests, arriving)

    def receive(self, source: int, tag: int, what: str) -> Received:
        """Waits for a value.

        Args:
            what: it is, for the message about a wait that lasts too long: ``the input of micro-batch 3``.

        Raises:
            StageFailed: the sender, or over MPI any other process, has ended by an error.
        """
        awaited = f"{what} from {self.grid.name(source)}"
        self.expect(source, tag)
        expected = self._expected.pop((source, tag))
        self._wait(expected.requests, awaited, source)
        size, arriving = int(expected.length.item()), expected.arriving
        if size:
            if arriving is not None:
                self._wait(arriving.requests, awaited, source)
            header = torch.empty(size, dtype=torch.uint8)
            self._wait(self._link.receive(header, source, tag), awaited, source)
            self._received[source, tag] = _Layout(header.numpy().tobytes())
            arriving = None
        layout = self._received[source, tag]
        layout.repeated = not size
        if arriving is None:
            arriving = self._receive_tensors(layout, source, tag)
        self._wait(arriving.requests, awaited, source)
        structure, metas = pickle.loads(layout.header)
        for tensor, host, meta in zip(arriving.tensors, arriving.hosts, metas):
            if host is not tensor:
                tensor.copy_(host, non_blocking=True)
            if meta.requires_grad:
                tensor.requires_grad_()
        return Received(put_together(structure, arriving.tensors), arriving.tensors)

    def _receive_tensors(self, layout: _Layout, source: int, tag: int) -> _Arriving:
        tensors = [meta.empty() for meta in pickle.loads(layout.header)[1]]
        hosts = [_host_copy(tensor) for tensor in tensors]
        requests = [request for host in hosts for request in self._link.receive(_bytes(host), source, tag)]
        return _Arriving(tensors, hosts, requests)

    def _wait(self, requests: Sequence[Any], awaited: str, source: int) -> None:
        for request in requests:
            self._link.wait(request, awaited, source)

    def flush(self) -> None:
        """Waits until everything is sent."""
        self._flush(self._sending)
        self._sending.clear()

    def _flush(self, messages: Sequence[_Sending]) -> None:
        for sending in messages:
            self._link.wait(
                sending.request, f"{self.grid.name(sending.to)} to take what was sent", sending.to
            )

    def advance(self) -> None:
        """Lets go of what is sent, as far as that is known."""
        self._sending = [sending for sending in self._sending if not self._link.is_sent(sending.request)]

    def taken(self, to: int, tag: int) -> None:
        """Lets go of what was sent with this tag, since the receiver has answered it."""
        self._flush([sending for sending in self._sending if (sending.to, sending.tag) == (to, tag)])
        self._sending = [sending for sending in self._sending if (sending.to, sending.tag) != (to, tag)]

    def fail(self, error: BaseException) -> None:
        """Tells all processes, as far as the transport can, that this one ends by an error."""
        with contextlib.suppress(Exception):
            self._link.fail(f"{type(error).__name__}: {error}")

    def _start(self, tensor: Tensor, to: int, tag: int) -> None:
        self.sent_bytes += tensor.nbytes
        for request in self._link.send(_bytes(tensor), to, tag):
            self._sending.append(_Sending(request, to, tag, tensor))


def _lying_dense(tensor: Tensor) -> Tensor:
    """The tensor itself where its elements fill a part of memory, in whatever order of dimensions; else a copy."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size == 1:
            continue
        if stride != expected:
            return tensor.contiguous()
        expected *= size
    return tensor


def _bytes(dense: Tensor) -> Tensor:
    """The memory of a dense tensor on the host, as bytes."""
    flat = dense.detach().as_strided((dense.numel(),), (1,))
    return flat.view(torch.uint8)


def _on_host(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu":
        return tensor
    return _host_copy(tensor).copy_(tensor)  # waits for the copy: the host reads it next


def _host_copy(tensor: Tensor) -> Tensor:
    """Memory on the host for a tensor: its own, or pinned memory of the same layout."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu", pin_memory=True
    )
