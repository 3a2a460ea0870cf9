"""Hands Ethernet frames from one network device to another, both ways, each some milliseconds late.

As netem does, which not every kernel has. Started by :meth:`hosts.Hosts.slow`; ends with its standard input.
"""

from __future__ import annotations

import collections
import contextlib
import os
import select
import socket
import sys
import time

ALL_FRAMES = 0x0003  # ETH_P_ALL
PACKET = 263  # SOL_PACKET
SEGMENTS, NOT_OWN = 15, 23  # PACKET_VNET_HDR: segments of TCP may travel as one frame; PACKET_IGNORE_OUTGOING
RECEIVED, SENT = 33, 32  # SO_RCVBUFFORCE, SO_SNDBUFFORCE
MEMORY = 1 << 26  # bytes
LARGEST = 1 << 17  # bytes of a frame


def wire(device: str) -> socket.socket:
    """The frames that arrive at a device."""
    frames = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_NONBLOCK, 0)
    frames.setsockopt(PACKET, SEGMENTS, 1)
    frames.setsockopt(PACKET, NOT_OWN, 1)
    frames.setsockopt(socket.SOL_SOCKET, RECEIVED, MEMORY)
    frames.setsockopt(socket.SOL_SOCKET, SENT, MEMORY)
    frames.bind((device, ALL_FRAMES))
    return frames


def main(milliseconds: str, *devices: str) -> None:
    """Hands on what arrives at either of two devices."""
    # Frames must not wait for the jobs that sent them. Some containers do not let a process go first.
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    first, second = map(wire, devices)
    other = {first: second, second: first}
    waiting: collections.deque[tuple[float, socket.socket, bytes]] = collections.deque()
    print("up", flush=True)
    while True:
        patience = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select([sys.stdin, *other], [], [], patience)
        if sys.stdin in ready:
            return
        for source in ready:
            with contextlib.suppress(OSError):  # there is no further one, or the cable was pulled
                while True:
                    frame = source.recv(LARGEST)
                    waiting.append((time.monotonic() + float(milliseconds) / 1e3, other[source], frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, target, frame = waiting.popleft()
            with contextlib.suppress(OSError):
                target.send(frame)


if __name__ == "__main__":
    main(*sys.argv[1:])
