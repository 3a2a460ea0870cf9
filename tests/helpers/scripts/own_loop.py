"""The loop of examples/own_loop.py. Arguments: those of the example, and the step, from 1, in which rank 1 kills itself."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import hvd_ckpt as hc

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "own_loop.py"


def main() -> None:
    *arguments, last = sys.argv[1:]
    left = int(last)
    stop_requested = hc.Snapshots.stop_requested

    def counted(snapshots: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0 and hc.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return stop_requested(snapshots)

    hc.Snapshots.stop_requested = counted
    runpy.run_path(str(EXAMPLE), run_name="example")["main"].main(arguments, standalone_mode=False)


if __name__ == "__main__":
    main()
