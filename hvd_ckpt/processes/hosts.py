"""The other ranks of a job: their hosts, and whether these still answer.

Each rank sends its location once (:meth:`Peer.here`). When a wait has lasted too long, this distinguishes a machine that is down
or cut off from a rank that is stuck. A running machine answers an attempt to connect, even if it refuses it. Ranks on this machine
are looked up in its process table.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import psutil

from hvd_ckpt.processes.grid import host_name
from hvd_ckpt.utils.machine import machine_name, process_status
from hvd_ckpt.utils.text import ranks_text

LOOPBACK = "127.0.0.1"
PROBE_SECONDS = 1.5  # long enough for the second attempt that TCP makes after one second
SSH_PORT = 22
ADDRESSES_PER_HOST = 4
_ANSWERS = (0, errno.ECONNREFUSED, errno.ECONNRESET)


@dataclass(frozen=True)
class Peer:
    """One rank: its machine's name and IPv4 addresses (loopback left out), its process and the process table that is in."""

    rank: int
    host: str
    addresses: tuple[str, ...]
    pid: int
    started: float
    table: str

    @classmethod
    def here(cls, rank: int) -> Peer:
        table = ""
        with contextlib.suppress(OSError):
            # Containers on one machine have process tables of their own, in which the same id is another process.
            table = machine_name("pid")
        process = psutil.Process()
        return cls(rank, host_name(), own_addresses(), process.pid, process.create_time(), table=table)

    def shares_table(self, other: Peer) -> bool:
        """Whether two processes are known to be in one process table."""
        return bool(self.table) and self.table == other.table

    def has_ended(self) -> bool:
        """Whether its process, which is in this machine's process table, has ended."""
        return process_status(self.pid, self.started) is None

    def trouble(self) -> str:
        """The trouble of its process, which is in this machine's process table; an empty string without any."""
        if self.has_ended():
            return f"rank {self.rank} (process {self.pid} on host {self.host}) has ended"
        if process_status(self.pid, self.started) in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
            return f"rank {self.rank} (process {self.pid} on host {self.host}) is stopped by a signal"
        return ""


def own_addresses() -> tuple[str, ...]:
    """This machine's IPv4 addresses but for loopback, those of interfaces that are up first."""
    up = {name for name, status in psutil.net_if_stats().items() if status.isup}
    addresses = [
        (name not in up, entry.address)
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET and not entry.address.startswith("127.")
    ]
    return tuple(address for _, address in sorted(addresses))


def diagnose(peers: Sequence[Peer], own: Peer) -> str:
    """Describes the other ranks' hosts and processes, and the way out, as the end of a sentence. Takes up to ``PROBE_SECONDS``."""
    others = [peer for peer in peers if peer.rank != own.rank]
    if not others:
        return "not all ranks have come: look at their output, or give a longer stall_timeout"
    near = [peer for peer in others if peer.shares_table(own)]
    troubles = [trouble for trouble in (peer.trouble() for peer in near) if trouble]
    if troubles:
        return f"{'; '.join(troubles)}: look at its output, then start again from the newest snapshot"
    if silent := lost(peers, own):
        return silent
    answer = "all ranks are on this host" if len(near) == len(others) else "all hosts answer"
    return (
        f"{answer}, so a rank is stuck in other work or has gone: look at the other ranks' output, "
        f"or give a longer stall_timeout"
    )


def lost(peers: Iterable[Peer], own: Peer) -> str:
    """Says which hosts do not answer, and what to do, as the end of a sentence; empty if all do. Takes up to ``PROBE_SECONDS``.

    A host does not answer if it has addresses of its own, none of which does.
    """
    others = [peer for peer in peers if peer.rank != own.rank]
    hosts: dict[tuple[str, tuple[str, ...]], list[Peer]] = {}
    for peer in others:
        if not peer.shares_table(own):
            hosts.setdefault((peer.host, peer.addresses), []).append(peer)
    # An address that several hosts have (a container bridge's) leads to none of them.
    times = Counter(address for _, addresses in hosts for address in addresses)
    to_probe = {
        key: [address for address in key[1] if times[address] == 1 and address not in own.addresses]
        for key in hosts
    }
    to_probe = {key: addresses[:ADDRESSES_PER_HOST] for key, addresses in to_probe.items() if addresses}
    answering = answering_addresses(set[str]().union(*to_probe.values()))
    silent = {key: hosts[key] for key, addresses in to_probe.items() if not answering & set(addresses)}
    if not silent:
        return ""
    names = [
        f"host {host} ({', '.join(addresses)}; {ranks_text(peer.rank for peer in ranks)})"
        for (host, addresses), ranks in silent.items()
    ]
    alone = len(silent) > 1 and sum(map(len, silent.values())) == len(others)
    verb, they = ("does", "it is") if len(silent) == 1 else ("do", "they are")
    cause = "no other host does, so this one may be cut off" if alone else f"{they} down or cut off"
    return (
        f"{' and '.join(names)} {verb} not answer: {cause}; see to it, then start again from the newest snapshot, "
        f"on other hosts if need be"
    )


def answering_addresses(addresses: Iterable[str], seconds: float = PROBE_SECONDS) -> set[str]:
    """Those of the addresses where a machine answers an attempt to connect within the time, also by refusing it.

    The ports are that of ssh and those of connections that this process has, which no firewall between the two keeps shut.
    """
    # All attempts run at the same time, so the limit holds for all hosts together and not for each of them.
    ports = _connected_ports()
    answered: set[str] = set()
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as open_sockets:
        for address in addresses:
            for port in (SSH_PORT, *sorted(ports.get(address, ()))[:2]):
                try:
                    probe = open_sockets.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
                except OSError:
                    answered.add(address)  # no descriptor left to ask with: nothing is known against it
                    continue
                probe.setblocking(False)
                status = probe.connect_ex((address, port))
                if status in _ANSWERS:
                    answered.add(address)
                elif status == errno.EINPROGRESS:
                    selector.register(probe, selectors.EVENT_WRITE, address)
        deadline = time.monotonic() + seconds
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                probe = key.fileobj  # type: ignore[assignment]
                if probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in _ANSWERS:
                    answered.add(key.data)
                selector.unregister(probe)
    return answered


def _connected_ports() -> dict[str, set[int]]:
    """The other end's ports of this process's TCP connections, by address."""
    process = psutil.Process()
    connections = getattr(process, "net_connections", None) or process.connections  # psutil < 6
    ports: dict[str, set[int]] = {}
    with contextlib.suppress(OSError, psutil.Error):
        for connection in connections("tcp4"):
            if connection.raddr:
                ports.setdefault(connection.raddr.ip, set()).add(connection.raddr.port)
    return ports
