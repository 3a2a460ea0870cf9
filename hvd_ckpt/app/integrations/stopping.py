"""A request to one rank of a trainer to stop, of which all ranks learn after the same step."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import hvd_ckpt as hc
from hvd_ckpt.collectives.agreement import of_all_processes
from hvd_ckpt.processes.stopping import StopRequest, forget_file, in_words, status_of


class Stopped(SystemExit):
    """All ranks have saved, and end."""


class Stopping:
    """What the callbacks of both trainers share. The flag travels with the gradients, as in the training command. A second Ctrl-C
    interrupts at once."""

    def __init__(self, folder: str | Path) -> None:
        super().__init__()
        self._folder = Path(folder)
        self._request: StopRequest | None = None
        self._reason: str | None = None

    def begin(self) -> None:
        """Watches for requests, from now on."""
        self.end()
        self._reason = None
        if hc.rank() == 0:
            forget_file(self._folder)
        self._request = StopRequest(self._folder if hc.rank() == 0 else None)
        self._request.__enter__()

    def end(self) -> None:
        """Gives signals their former handlers again."""
        if self._request is not None:
            self._request.__exit__(None, None, None)
            self._request = None

    def is_asked(self, optimizers: Iterable[Any]) -> bool:
        """Whether some rank was asked to stop; the same on all ranks. Call it after each step."""
        assert self._request is not None
        distributed = list(optimizers)
        if any(optimizer.notified for optimizer in distributed):
            reasons = of_all_processes(self._request.reason, "Trainer: stop")
            self._reason = next((reason for reason in reasons if reason is not None), None)
        elif self._request.reason is not None:
            for optimizer in distributed:
                optimizer.notify()
        return self._reason is not None

    def leave(self, where: str) -> NoReturn:
        """Ends the process after all ranks have saved. Collective."""
        reason, request = self._reason, self._request
        if request is not None:
            request.acknowledge()
        self.end()
        hc.barrier()
        if hc.rank() == 0:
            print(f"Stopped by {in_words(str(reason))}; to resume: {where}", file=sys.stderr, flush=True)
        hc.barrier()  # when one rank has exited, a launcher ends the others
        raise Stopped(status_of(reason))
