"""One rank of a job of :mod:`run`: checks programs one after the other.

Arguments: a file that a line is added to for each program (rank 0), a pickled program or ``-``, seeds.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import sys
import traceback
import warnings
from pathlib import Path


def main() -> None:
    log, given, seeds = Path(sys.argv[1]), sys.argv[2], [int(seed) for seed in sys.argv[3:]]
    faulthandler.register(10, all_threads=True)  # SIGUSR1
    warnings.simplefilter("ignore")
    os.environ.setdefault("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
    import torch
    from checking import check
    from programs import draw

    import hvd_ckpt as hc

    hc.init()
    torch.set_num_threads(1)
    gc.freeze()  # programs collect garbage often
    programs = (
        [draw(seed, hc.size()) for seed in seeds]
        if given == "-"
        else [pickle.loads(Path(given).read_bytes())]
    )
    for program in programs:
        tell(log, f"begin {program.seed}")
        try:
            failures = check(program)
        except BaseException:
            with open(f"{log}.{hc.rank()}", "w") as file:
                traceback.print_exc(file=file)
            os._exit(1)
        for failure in failures:
            tell(log, f"fail {failure}")
        tell(log, f"end {program.seed}")


def tell(log: Path, line: str) -> None:
    import hvd_ckpt as hc

    if hc.rank() == 0:
        with open(log, "a") as file:
            file.write(f"{line}\n")


if __name__ == "__main__":
    main()
