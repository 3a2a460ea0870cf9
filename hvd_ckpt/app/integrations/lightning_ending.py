"""The end of Lightning's Trainer by an error of one rank.

Lightning gives an error to callbacks before anybody sees it. What they do with other ranks, such as gathering the state of a
checkpoint, would wait for ranks that are in another collective, which wait for this one. So nothing is collective any more once an
error has left the loops: it raises, and the error passes on. It ends the process, and Horovod then ends the waits of the other
ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.utilities.exceptions import SIGTERMException, _TunerExitException

import hvd_ckpt as hc
from hvd_ckpt.app.integrations.stopping import Stopped
from hvd_ckpt.processes.grid import host_name

TERMINATED = 143  # status of a process that SIGTERM has ended, as a shell has it


class Ending(_Launcher):
    """Runs the Trainer's functions in this process, and sees their errors first.

    Attributes:
        error: what has ended the last function on this rank alone.
    """

    is_interactive_compatible = True

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls the function."""
        kwargs.pop("trainer", None)
        self.error = None
        try:
            return function(*args, **kwargs)
        except _TunerExitException:
            raise
        except BaseException as error:
            if isinstance(error, SIGTERMException):
                error.code = TERMINATED  # else Python's would be 0
            # All ranks have stopped at the same place, where a checkpoint is still possible.
            if hc.size() > 1 and not isinstance(error, Stopped):
                self.error = error
                if not isinstance(error, Exception):  # Lightning ends the process without a word
                    text = f"rank {hc.rank()} on host {host_name()}: ended by {type(error).__name__}"
                    print(text, file=sys.stderr, flush=True)
            raise

    def kill(self, signum: Any) -> None:
        """Does nothing: the processes are the launcher's, such as ``horovodrun``'s."""

    def check(self, what: str) -> None:
        """Raises RuntimeError for a collective operation after an error."""
        if self.error is not None:
            raise RuntimeError(
                f"{what} needs all ranks, and this one's training has ended with {type(self.error).__name__}: do it before, or on "
                "each rank by itself"
            )
