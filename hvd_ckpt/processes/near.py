"""Messages between processes of one host: small ones through a Unix socket, large ones through shared memory.

A message is a packet on the socket of both processes. The bytes of a large message are in a slot: memory that the sender has made
(``memfd_create``) and that both have mapped. The sender copies into a slot and continues. The receiver copies out and returns the
slot. No thread is involved: packets are read while a process waits, so computation is not interrupted.

A process that waits for a packet, for room in a socket or for a slot reads all packets, including those that were not requested
yet. So two processes that have both sent much cannot deadlock.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import struct
import uuid
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hvd_ckpt.utils.machine import machine_name

INLINE_BYTES = 2048  # of a message that travels in its packet
PACKET = struct.Struct("=qqq")  # tag, slot or NO_SLOT, bytes; a message of NO_SLOT follows in the same packet
SLOTS = 32  # of each capacity and connection: each takes a file descriptor of both processes
NO_SLOT, TAKEN = -1, -1  # TAKEN in place of a tag: the receiver gives a slot back
PAGE = mmap.PAGESIZE


class PeerEnded(OSError):
    """The other process has ended."""


@dataclass
class Awaited:
    """A message that is to arrive in ``memory``."""

    memory: Tensor
    link: NearLink
    connection: _Connection
    arrived: bool = False

    def wait(self) -> None:
        """Waits for the message.

        Raises:
            PeerEnded: the other process has ended.
        """
        while not self.arrived:
            if self.connection.ended:
                raise PeerEnded("its connection is closed")
            self.link.read_all()


@dataclass
class _Connection:
    socket: socket.socket
    ended: bool = False
    awaited: dict[int, deque[Awaited]] = field(default_factory=lambda: defaultdict(deque))  # by tag
    early: dict[int, deque[Tensor]] = field(default_factory=lambda: defaultdict(deque))
    own: list[Tensor] = field(default_factory=list)  # slots that this process has made
    made: Counter[int] = field(default_factory=Counter)  # how many of them, by capacity in bytes
    free: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))  # of them, by capacity
    others: dict[int, Tensor] = field(default_factory=dict)


class Listener:
    """Socket at which the others of this host reach this process.

    Attributes:
        host: a value that is equal for processes that can reach each other: of one machine, one network namespace and one user.
            None if the system has no such sockets and memory, or hides the facts that they need.
        name: name of the socket.
    """

    def __init__(self) -> None:
        self.host: str | None = None
        self.name = f"\0hvd_ckpt {uuid.uuid4().hex}"
        try:
            host = f"{machine_name('net')} {os.geteuid()}"
            os.close(os.memfd_create("hvd_ckpt"))
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._socket.bind(self.name)
            self._socket.listen(1024)
        except (OSError, AttributeError):  # not Linux
            return
        self.host = host

    def connect(self, own: int, names: dict[int, str]) -> dict[int, socket.socket]:
        """Connects all processes of the host, which listen already. Collective over them.

        Args:
            own: this process's number.
            names: socket names by process number.

        Returns:
            Connections to the others, by their numbers.
        """
        sockets: dict[int, socket.socket] = {}
        if self.host is None:
            return sockets
        for number in sorted(names):
            # The lower number connects. A connection waits in the other's queue until that accepts it, so no order is needed.
            if number > own:
                sockets[number] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                sockets[number].connect(names[number])
                sockets[number].send(PACKET.pack(own, NO_SLOT, 0))
        while len(sockets) < len(names) - 1:
            connection, _ = self._socket.accept()
            _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if user == os.geteuid():  # any user of the machine may connect
                sockets[PACKET.unpack(connection.recv(PACKET.size))[0]] = connection
            else:
                connection.close()
        self._socket.close()
        return sockets


class NearLink:
    """Messages to and from the processes of this host. Messages with one tag from one process arrive in their order.

    Args:
        sockets: connections to the others, by process number.
    """

    def __init__(self, sockets: dict[int, socket.socket]) -> None:
        self._connections = {number: _Connection(connection) for number, connection in sockets.items()}
        self._by_descriptor = {
            connection.socket.fileno(): connection for connection in self._connections.values()
        }
        self._poll = select.poll()
        for descriptor, connection in self._by_descriptor.items():
            connection.socket.setblocking(False)
            self._poll.register(descriptor, select.POLLIN)
        _open.add(self)

    def __contains__(self, process: int) -> bool:
        return process in self._connections

    def close(self) -> None:
        for connection in self._connections.values():
            connection.socket.close()

    __del__ = close

    def send(self, memory: Tensor, to: int, tag: int) -> None:
        """Sends bytes, which may be changed afterwards.

        Raises:
            PeerEnded: the other process has ended.
        """
        connection, size = self._connections[to], memory.numel()
        if size <= INLINE_BYTES:
            self._put(connection, PACKET.pack(tag, NO_SLOT, size) + memory.numpy().tobytes())
            return
        # Powers of two, so that slots of a few sizes serve messages of any length.
        capacity = max(PAGE, 1 << (size - 1).bit_length())
        # A slot is free again when the packet that says so has been read.
        self.read_all(0)
        while not connection.free[capacity] and connection.made[capacity] == SLOTS:
            if connection.ended:
                raise PeerEnded("its connection is closed")
            self.read_all()
        descriptors = []
        if connection.free[capacity]:
            slot = connection.free[capacity].pop()
        else:
            slot, descriptor = len(connection.own), os.memfd_create("hvd_ckpt")
            os.ftruncate(descriptor, capacity)
            connection.own.append(_mapped(descriptor))
            connection.made[capacity] += 1
            descriptors = [descriptor]
        connection.own[slot][:size].copy_(memory)
        try:
            self._put(connection, PACKET.pack(tag, slot, size), descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def receive(self, memory: Tensor, source: int, tag: int) -> Awaited:
        """Asks for the next message with a tag. ``memory`` is as long as the message."""
        connection = self._connections[source]
        awaited = Awaited(memory, self, connection)
        if connection.early[tag]:
            memory.copy_(connection.early[tag].popleft())
            awaited.arrived = True
        else:
            connection.awaited[tag].append(awaited)
        return awaited

    def _put(self, connection: _Connection, packet: bytes, descriptors: Sequence[int] = ()) -> None:
        while True:
            try:
                if descriptors:
                    socket.send_fds(connection.socket, [packet], descriptors)
                else:
                    connection.socket.send(packet)
                return
            except BlockingIOError:
                # The other process computes and has many packets to read. It may wait here for a packet to this process, too.
                self._poll.modify(connection.socket, select.POLLIN | select.POLLOUT)
                try:
                    self.read_all()
                finally:
                    if not connection.ended:
                        self._poll.modify(connection.socket, select.POLLIN)
            except OSError as error:
                raise PeerEnded(str(error)) from None

    def read_all(self, limit: int | None = None) -> None:
        """Reads the packets that are there, and waits for one (at most ``limit`` milliseconds)."""
        for descriptor, events in self._poll.poll(limit):
            if events & ~select.POLLOUT:
                self._read(self._by_descriptor[descriptor])

    def _read(self, connection: _Connection) -> None:
        while not connection.ended:
            try:
                packet, descriptors, _, _ = socket.recv_fds(connection.socket, PACKET.size + INLINE_BYTES, 1)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                # What it has sent before can still be received.
                connection.ended = True
                self._poll.unregister(connection.socket)
                return
            tag, slot, size = PACKET.unpack_from(packet)
            if tag == TAKEN:
                connection.free[connection.own[slot].numel()].append(slot)
                continue
            if descriptors:
                connection.others[slot] = _mapped(descriptors[0])
                os.close(descriptors[0])
            if slot != NO_SLOT:
                content = connection.others[slot][:size]
            else:
                content = torch.frombuffer(bytearray(packet), dtype=torch.uint8)[PACKET.size :]
            if connection.awaited[tag]:
                awaited = connection.awaited[tag].popleft()
                awaited.memory.copy_(content)
                awaited.arrived = True
            else:
                connection.early[tag].append(content.clone())
            if slot != NO_SLOT:
                with contextlib.suppress(PeerEnded):  # it needs no slots any more
                    self._put(connection, PACKET.pack(TAKEN, slot, 0))


_open: weakref.WeakSet[NearLink] = weakref.WeakSet()


def _close_open() -> None:
    for link in list(_open):
        link.close()


# A forked process, such as a worker of a data loader, would hold the sockets open after this one has ended.
os.register_at_fork(after_in_child=_close_open)


def _mapped(descriptor: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, 0), dtype=torch.uint8)
