"""Cases that are drawn from seeds, and checked:

    python tests/seeds.py core --number 1000 --np 3 --controller gloo --seed 0
    python tests/seeds.py zoo --only gpt2

Prints each case that fails, and how to repeat it. A case that ends its job, or hangs, is followed by a job with the others.

kinds of cases:
{kinds}
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import importlib
import json
import os
import pprint
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).resolve().parent / "helpers"))
from notes import Note

HERE = Path(__file__).resolve().parent
SHARED = [str(HERE / "helpers"), str(HERE), str(HERE.parent)]
sys.path += SHARED[1:]

Seed = int | str  # the number of a case, or its name


@dataclass(frozen=True)
class Kind:
    """Where two functions are: ``draw(seed, ranks, of)`` makes a case, and ``check(case)`` returns what is wrong with it.

    Of a kind on ranks, ``of`` is the number of parts, and ``check`` is collective; other kinds start their own ranks, and ``of`` is
    the controller.

    Attributes:
        folder: where their modules lie.
        drawing, checking: modules; ``checking`` is by default the first.
        parts: what divides the ranks.
        seconds: a case that says nothing for so long is ended.
    """

    what: str
    folder: str
    drawing: str
    checking: str = ""
    parts: str = "tensor"
    on_ranks: bool = True
    seconds: float = 60.0

    def enter(self) -> None:
        """Imports the modules."""
        sys.path.insert(0, str(HERE / self.folder))
        for name in (self.drawing, self.checking or self.drawing):
            importlib.import_module(name)

    def draw(self, seed: Seed, ranks: int, parts: int, controller: str) -> Any:
        """The case of a seed."""
        draw = importlib.import_module(self.drawing).draw
        return draw(seed, ranks // parts, parts) if self.on_ranks else draw(seed, ranks, controller)

    def check(self, case: Any) -> Iterable[str]:
        """What is wrong with a case, and notes."""
        return importlib.import_module(self.checking or self.drawing).check(case)


KINDS = {
    "core": Kind(
        "training programs, which end as in one process, resumed, and without recomputation",
        "differential", "drawing", "checking",
    ),
    "named": Kind("training programs with a name", "differential", "named", "checking"),
    "acts": Kind(
        "programs in which users act by hand", "differential", "drawing_acts", "checking_acts"
    ),
    "lightning": Kind("loops of Lightning", "differential", "lightning_loops"),
    "transformers": Kind("loops of the Trainer of transformers", "differential", "transformers_loops"),
    "stages": Kind("chains in schedules of stages, which end as whole", "parallel/pipeline", "random_stages", parts="stages"),
    "recipes": Kind("models and recipes of tensor parallelism", "parallel/tensor", "random_recipes"),
    "fuzz": Kind("hostile inputs, some of one kind", "fuzz", "inputs", on_ranks=False, seconds=300.0),
    "kills": Kind("runs that are killed and started again", "faults", "faults.kill", on_ranks=False, seconds=1500.0),
    "saves": Kind("processes that are killed within a save", "faults", "faults.save", on_ranks=False, seconds=300.0),
    "resumes": Kind("jobs of other layouts that resume", "faults", "faults.resumes", on_ranks=False, seconds=600.0),
    "soak": Kind("a run of half an hour that is measured", "faults", "faults.soak", on_ranks=False, seconds=2400.0),
    "zoo": Kind("an architecture in every way of recomputation", "zoo", "checks", on_ranks=False, seconds=300.0),
    "zoo-ranks": Kind("an architecture with sharded parameters", "zoo", "ranks"),
}  # fmt: skip


def main() -> int:
    if sys.argv[1:2] == ["--worker"]:
        work(*sys.argv[2:])
        return 0
    kinds = "\n".join(f"    {name:14}{kind.what}" for name, kind in KINDS.items())
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").format(kinds=kinds), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=list(KINDS))
    parser.add_argument("--number", type=int, default=100, help="of cases")
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--np", type=int, default=2, help="ranks")
    parser.add_argument("--parts", type=int, default=1, help="of a layer, or stages, which divide the ranks")
    parser.add_argument("--controller", choices=["gloo", "mpi"], default="gloo")
    parser.add_argument("--stall", type=float, help="seconds after which a case is ended")
    parser.add_argument("--minutes", type=float, default=1e9, help="after which no further case begins")
    parser.add_argument("--only", type=seed_of, metavar="SEED", help="this case alone, printed")
    options = parser.parse_args()
    kind, where = KINDS[options.kind], (options.np, options.parts, options.controller)
    job = Job(options.kind, *where, options.stall or kind.seconds)
    began = time.monotonic()
    until = began + 60 * options.minutes
    seeds: list[Seed] = list(range(options.seed, options.seed + options.number))
    if options.only is not None:
        seeds = [options.only]
        kind.enter()
        pprint.pprint(kind.draw(options.only, *where), width=140)
    failed, checked = list[Seed](), 0
    while seeds and time.monotonic() < until:
        found = job.run(seeds, until)
        for seed, failures in found.failures.items():
            print(
                f"seed {seed} failed: python tests/seeds.py {options.kind} --np {options.np} --parts {options.parts} "
                f"--controller {options.controller} --only {seed}"
            )
            for line in [line for failure in failures for line in failure.splitlines()[-200:]]:
                print(f"    {line[:240]}", flush=True)
        failed += found.failures
        ended = {*found.done, *found.failures}
        checked += len(ended)
        seeds = [seed for seed in seeds if seed not in ended]
    print(
        f"{checked} {options.kind} cases from seed {options.seed} on {options.np} ranks with {options.parts} parts over "
        f"{options.controller}: {len(failed)} failed {failed} in {time.monotonic() - began:.0f} s"
    )
    return 1 if failed else 0


def seed_of(text: str) -> Seed:
    return int(text) if text.isdecimal() else text


@dataclass
class Found:
    """What a job has found: the seeds that it has ended with, and what is wrong with some."""

    done: list[Seed] = field(default_factory=list)
    failures: dict[Seed, list[str]] = field(default_factory=dict)


class Job(NamedTuple):
    """How cases are run: of which kind, on how many ranks, in how many parts, over what, for how many seconds each at most."""

    kind: str
    ranks: int
    parts: int
    controller: str
    stall: float

    def run(self, seeds: Sequence[Seed], until: float = float("inf")) -> Found:
        """Runs cases until one of them ends the job, or the time is up. Prints their notes."""
        with tempfile.TemporaryDirectory(prefix="hvd_ckpt_seeds_") as folder:
            log = Path(folder, "log")
            log.touch()
            with tempfile.TemporaryFile("w+") as output:
                why = self._wait(self._start(log, seeds, output), log, until)
                output.seek(0)
                said = output.read()[-3000:]
            found, current = Found(), None
            for word, *texts in map(json.loads, log.read_text().splitlines()):
                if word == "begin":
                    current = texts[0]
                elif word == "fail":
                    found.failures.setdefault(current, []).append(texts[0])
                elif word == "note":
                    print(texts[0], flush=True)
                elif word == "end":
                    found.done.append(current)
            if current not in found.done and why != "time is up":
                errors = [path.read_text() for path in sorted(Path(folder).glob("log.*"))]
                own = [error for error in errors if "HorovodInternalError" not in error.splitlines()[-1]]
                current = seeds[0] if current is None else current
                found.failures.setdefault(current, []).extend([why, *(own or errors or [said])])
            return found

    def _start(self, log: Path, seeds: Sequence[Seed], output: Any) -> subprocess.Popen[str]:
        from controllers import start_ranks

        words = self.kind, str(self.ranks), str(self.parts), self.controller
        environment = {"OMPI_MCA_mpi_yield_when_idle": "1", "PYTHONPATH": os.pathsep.join(SHARED)}
        return start_ranks(
            self.ranks, Path(__file__), "--worker", str(log), *words, *map(str, seeds),
            controller=self.controller, output=output, **({} if KINDS[self.kind].on_ranks else {"launcher": None}),
            **environment,
        )  # fmt: skip

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


def work(log: str, name: str, ranks: str, parts: str, controller: str, *seeds: str) -> None:
    """One process of a job: checks the cases of seeds, and adds lines to the log (rank 0)."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    warnings.simplefilter("ignore")
    os.environ.setdefault("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
    import torch

    torch.set_num_threads(1)
    kind, number = KINDS[name], 0
    if kind.on_ranks:
        import hvd_ckpt as hc
        from hvd_ckpt.processes.grid import current

        hc.init(**{kind.parts: int(parts)})
        number = current().number
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what it has started ends with it

    def tell(*words: Any) -> None:
        if number == 0:
            with open(log, "a") as file:
                file.write(f"{json.dumps(words)}\n")

    kind.enter()
    gc.freeze()  # programs collect garbage often
    for seed in map(seed_of, seeds):
        tell("begin", seed)
        try:
            for text in kind.check(kind.draw(seed, int(ranks), int(parts), controller)):
                tell("note" if isinstance(text, Note) else "fail", text)
        except BaseException:
            Path(f"{log}.{number}").write_text(traceback.format_exc())
            if not kind.on_ranks:
                raise
            os._exit(1)  # the other ranks may wait
        tell("end")


if __name__ == "__main__":
    sys.exit(main())
