"""A link of hosts to this process itself, inside of :func:`streams.simulated`."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from typing import Any

import torch
from streams import Simulation

THREAD = "the network"


class Loopback:
    """A link to this process itself. It reads and writes the host's memory at any time until a request has been waited for."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._sent: dict[int, list[torch.Tensor]] = defaultdict(list)

    def send(self, memory: torch.Tensor, to: int, tag: int) -> Any:
        self._use(memory, write=False)
        self._sent[tag].append(memory)

    def receive(self, memory: torch.Tensor, source: int, tag: int) -> Any:
        self._use(memory, write=True)
        return memory, tag

    def wait(self, request: Any, awaited: str, peer: int) -> None:
        if request is not None:
            memory, tag = request
            sent = self._sent[tag].pop(0)
            ctypes.memmove(memory.data_ptr(), sent.data_ptr(), memory.nbytes)
        self._simulation.wait_for_thread(THREAD)

    def is_sent(self, request: Any) -> bool:
        return False

    def _use(self, memory: torch.Tensor, write: bool) -> None:
        with self._simulation.thread(THREAD):
            time = self._simulation.launch(THREAD)
            self._simulation.access(memory, THREAD, time, "a message", write)
