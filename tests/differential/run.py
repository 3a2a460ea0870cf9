"""Random training programs, checked: python tests/differential/run.py --programs 1000 --np 3 --controller gloo --seed 0

Each is drawn from its seed, runs on the ranks of a job, and must end in what one process computes, and in the same bits on every
rank, in a second run that is resumed after a random step, and without recomputation. Prints what does not, and how to repeat it.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import importlib
import os
import pprint
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# By kind, the modules with draw(seed, ranks, tensor) and check(program).
KINDS = {
    "core": ("drawing", "checking"),
    "acts": ("drawing_acts", "checking_acts"),
    "lightning": ("lightning_loops", "lightning_loops"),
    "transformers": ("transformers_loops", "transformers_loops"),
}
HERE = Path(__file__).resolve().parent
SHARED = [str(HERE.parent / "helpers"), str(HERE.parents[1])]
sys.path[:0] = [str(HERE), *SHARED]


def main() -> int:
    if sys.argv[1:2] == ["--worker"]:
        log, kind, how, tensor, *seeds = sys.argv[2:]
        work(Path(log), kind, how == "shrink", int(tensor), list(map(int, seeds)))
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", choices=list(KINDS), default="core", help="what programs use")
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--np", type=int, default=2, help="ranks")
    parser.add_argument("--tensor", type=int, default=1, help="parts of a layer, which divide the ranks")
    parser.add_argument("--controller", choices=["gloo", "mpi"], default="gloo")
    parser.add_argument("--stall", type=float, default=60.0, help="seconds after which a program is ended")
    parser.add_argument("--minutes", type=float, default=1e9, help="after which no further program begins")
    parser.add_argument("--only", type=int, metavar="SEED", help="this program alone, printed")
    parser.add_argument("--shrink", action="store_true", help="print the smallest program that fails like it")
    options = parser.parse_args()
    job = Job(options.kind, options.np, options.tensor, options.controller, options.stall, options.shrink)
    if options.only is not None:
        draw, _ = functions_of(options.kind)
        pprint.pprint(draw(options.only, options.np // options.tensor, options.tensor), width=140)
        _, found = job.run(seeds=[options.only])
        report(found, options)
        return 1 if found else 0
    began = time.monotonic()
    seeds = list(range(options.seed, options.seed + options.programs))
    failed: dict[int, list[str]] = {}
    checked = 0
    while seeds and time.monotonic() - began < 60 * options.minutes:
        done, found = job.run(seeds, began + 60 * options.minutes)
        report(found, options)
        failed.update(found)
        checked += len({*done, *found})
        seeds = [seed for seed in seeds if seed not in done and seed not in found]
    print(
        f"{checked} {options.kind} programs from seed {options.seed} on {options.np} ranks with {options.tensor} parts over "
        f"{options.controller}: {len(failed)} failed {sorted(failed)} in {time.monotonic() - began:.0f} s"
    )
    return 1 if failed else 0


def report(found: dict[int, list[str]], options: argparse.Namespace) -> None:
    for seed, failures in found.items():
        print(
            f"seed {seed} failed: python {sys.argv[0]} --kind {options.kind} --np {options.np} --tensor {options.tensor} "
            f"--controller {options.controller} --only {seed}"
        )
        for failure in failures:
            for line in failure.splitlines()[-24:]:
                print(f"    {line[:240]}", flush=True)


class Job:
    """How programs are run: of which kind, on how many ranks, in how many parts of a layer, over what, for how many seconds each at
    most, and whether they are made smaller."""

    def __init__(
        self, kind: str, ranks: int, tensor: int, controller: str, stall: float, shrink: bool
    ) -> None:
        self.kind = kind
        self.ranks, self.tensor, self.controller = ranks, tensor, controller
        self.stall, self.shrink = stall, shrink

    def run(
        self, seeds: Sequence[int], until: float = float("inf")
    ) -> tuple[list[int], dict[int, list[str]]]:
        """Runs programs until one of them ends the job; returns the seeds of those that ended, and the failures of seeds."""
        from controllers import start_ranks

        with tempfile.TemporaryDirectory(prefix="hvd_ckpt_differential_") as folder:
            log = Path(folder, "log")
            log.touch()
            how = "shrink" if self.shrink else "check"
            arguments = ("--worker", str(log), self.kind, how, str(self.tensor), *map(str, seeds))
            environment = {"OMPI_MCA_mpi_yield_when_idle": "1", "PYTHONPATH": os.pathsep.join(SHARED)}
            with open(Path(folder, "output"), "w+") as output:
                process = start_ranks(
                    self.ranks, Path(__file__), *arguments,
                    controller=self.controller, output=output, **environment,
                )  # fmt: skip
                why = self._wait(process, log, until)
                output.seek(0)
                said = output.read()[-3000:]
            lines = log.read_text().splitlines()
            done = [int(line.split()[1]) for line in lines if line.startswith("end ")]
            failures: dict[int, list[str]] = {}
            current = -1
            for line in lines:
                word, _, rest = line.partition(" ")
                current = int(rest) if word == "begin" else current
                if word == "fail":
                    failures.setdefault(current, []).append(rest)
            if current not in done and why != "time is up":
                errors = [path.read_text() for path in sorted(Path(folder).glob("log.*"))]
                own = [error for error in errors if "HorovodInternalError" not in error.splitlines()[-1]]
                failures.setdefault(current, []).extend([why, *(own or errors or [said])])
            return done, failures

    def _wait(self, process: subprocess.Popen[str], log: Path, until: float) -> str:
        size, since = -1, time.monotonic()
        try:
            while process.poll() is None:
                if log.stat().st_size != size:
                    size, since = log.stat().st_size, time.monotonic()
                if time.monotonic() > until:
                    return "time is up"
                if time.monotonic() - since > self.stall + (30 if size == 0 else 0):
                    return f"did not end within {self.stall:g} seconds"
                time.sleep(0.1)
            return f"the job ended with {process.returncode}"
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def functions_of(kind: str) -> tuple[Callable[..., Any], Callable[[Any], list[str]]]:
    """How programs of a kind are drawn and checked."""
    drawing, checking = (importlib.import_module(name) for name in KINDS[kind])
    return drawing.draw, checking.check


def work(log: Path, kind: str, shrinks: bool, tensor: int, seeds: list[int]) -> None:
    """One rank of a job: checks the programs of seeds, and adds lines to the log (rank 0)."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    warnings.simplefilter("ignore")
    os.environ.setdefault("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
    import torch

    import hvd_ckpt as hc
    from hvd_ckpt.processes.grid import current

    def tell(line: str) -> None:
        if current().number == 0:
            with open(log, "a") as file:
                file.write(f"{line}\n")

    draw, check = functions_of(kind)
    hc.init(tensor=tensor)
    torch.set_num_threads(1)
    gc.freeze()  # programs collect garbage often
    for program in (draw(seed, hc.size(), tensor) for seed in seeds):
        tell(f"begin {program.seed}")
        try:
            failures = check(program)
        except BaseException:
            with open(f"{log}.{current().number}", "w") as file:
                traceback.print_exc(file=file)
            os._exit(1)
        for failure in failures:
            tell(f"fail {failure}")
        if failures and shrinks:
            for line in pprint.pformat(shrunk(program, failures, tell), width=140).splitlines():
                tell(f"fail {line}")
        tell(f"end {program.seed}")


def shrunk(program: Any, failures: Sequence[str], tell: Callable[[str], None]) -> Any:
    """The smallest program with one of the same failures; those that raise are left out."""
    from checking import check
    from shrinking import shrink

    kinds = {failure.split(":")[1] for failure in failures}

    def fails(candidate: Any) -> bool:
        tell("try")
        try:
            return any(failure.split(":")[1] in kinds for failure in check(candidate))
        except Exception:
            return False

    return shrink(program, fails)


if __name__ == "__main__":
    sys.exit(main())
