"""The list of checks of ``hvd-ckpt doctor --gpu``, the runner and the report."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from hvd_ckpt.app.cli.command_line import BadArgument, split_names
from hvd_ckpt.app.install.recipe import HOROVOD_VERSION
from hvd_ckpt.bench.gpu import machine
from hvd_ckpt.bench.gpu.job import CheckJob, Outcome
from hvd_ckpt.bench.gpu.machine import Builds
from hvd_ckpt.bench.harness.cases import Column, attributes, results_of, table_of
from hvd_ckpt.bench.harness.jobs import JobError, rank_environment, run_command, run_job
from hvd_ckpt.bench.harness.options import BenchRun
from hvd_ckpt.bench.harness.report import Report

PASSED, FAILED, SKIPPED = "passed", "FAILED", "skipped"
STYLES = {PASSED: "green", FAILED: "red", SKIPPED: "dim"}
LEAST_SECONDS = 5.0  # a check is not started with less
COMPARE = "--quick --engines hvd_ckpt,horovod,ddp --workloads nothing --scenarios plain,tied --variants none,non-reentrant"

Environment = Mapping[str, str]


@dataclass
class Row:
    """The verdict of a check.

    Attributes:
        text: one line: what was found, why it failed, or why it was skipped.
        values: for programs.
    """

    name: str
    verdict: str
    text: str
    ranks: int = 0
    seconds: float = 0.0
    values: dict[str, Any] = field(default_factory=dict)


@dataclass
class Session:
    """A run of the list.

    Attributes:
        device: ``"cuda"`` or ``"cpu"``.
        offline: the folder that has what the build would fetch.
        facts: of the machine, for the report.
    """

    run: BenchRun
    device: str
    offline: Path | None
    facts: dict[str, str] = field(default_factory=dict)
    builds: Builds = field(default_factory=Builds)

    @property
    def gpus(self) -> int:
        """Number of GPUs that PyTorch sees."""
        return len(self.builds.torch.get("devices", ())) if self.device == "cuda" else 0

    def ranks(self) -> int:
        """The number of ranks of a check of several: one for each GPU, else 2."""
        return max(2, self.gpus)

    def log(self, name: str) -> Path:
        """The file for the output of a command."""
        return self.run.jobs / name / "log.txt"

    def note_build(self) -> None:
        """Adds Horovod's build to the facts."""
        horovod = self.builds.horovod
        self.facts["Horovod"] = ", ".join(f"{name} {value}" for name, value in horovod.items() if value)


@dataclass(frozen=True)
class Check:
    """One row of the list.

    Attributes:
        function: the module and function that the ranks run, or a function of this module that runs without ranks.
        seconds: its time limit.
        needs: names in :data:`NEEDS`.
        several: whether it runs on several ranks.
        environment: further variables of its ranks.
        bits_of: the check whose digest must be the same.
    """

    name: str
    function: str | Callable[[Session, float], Outcome]
    seconds: float
    needs: tuple[str, ...] = ("horovod",)
    several: bool = False
    environment: Environment = field(default_factory=dict)
    bits_of: str = ""


def look_at_machine(session: Session, seconds: float) -> Outcome:
    """The facts of the machine and of PyTorch."""
    session.builds = machine.builds(session.run.jobs / "staged")
    torch = session.builds.torch
    session.facts |= machine.system_facts(session.device, torch.get("cuda_built"))
    if "error" in torch:
        raise JobError(f"PyTorch: {torch['error']}")
    session.facts["PyTorch"] = (
        f"{torch['version']}, CUDA {torch['cuda_built']}, NCCL {torch['nccl']}, {len(torch['devices'])} GPUs"
    )
    if session.device == "cuda" and not torch["devices"]:
        why = (
            "is built for the CPU"
            if torch["cuda_built"] is None
            else "finds no GPU, as with a driver that is too old for it"
        )
        raise JobError(
            f"PyTorch {torch['version']} {why}: install one for this machine's driver, as pytorch.org says"
        )
    found = session.facts["GPUs"] if session.device == "cuda" else session.facts["system"]
    missing = [name for name, text in session.facts.items() if not text and name != "topology"]
    return Outcome(f"{found}; not found: {', '.join(missing)}" if missing else found)


def build(session: Session, seconds: float) -> Outcome:
    """Horovod's build, for the architectures of these GPUs; nothing is built where that is done."""
    command = [sys.executable, "-m", "hvd_ckpt.app.install.build_horovod"]
    if session.offline is not None:
        command += ["--sdist", str(session.offline / f"horovod-{HOROVOD_VERSION}.tar.gz")]
    if session.device == "cuda":
        run_command(command, session.log("build"), rank_environment(), seconds)
        session.builds = machine.builds(session.run.jobs / "staged")
    horovod = session.builds.horovod
    if "error" in horovod:
        raise JobError(str(horovod["error"]))
    session.note_build()
    if session.device == "cuda" and not horovod["cuda"]:
        raise JobError("Horovod is built without CUDA; the build's log says why (is nvcc missing?)")
    return Outcome(session.facts["Horovod"], horovod)


def compare(session: Session, seconds: float) -> Outcome:
    """A small ``hvd-ckpt compare``."""
    ranks = max(1, session.gpus) if session.device == "cuda" else 2
    folder = session.run.folder / "compare"
    words = ["compare", *COMPARE.split(), "--np", str(ranks), "--device", session.device]
    command = [sys.executable, "-m", "hvd_ckpt.app.cli.main", *words, "--output", str(folder)]
    run_command(command, session.log("compare"), rank_environment(), seconds)
    return Outcome(f"this library is right in every cell: {folder / 'report.md'}")


CHECKS = (
    Check("machine", look_at_machine, 300, ()),
    Check("build", build, 900, ("torch",)),
    Check("operations", "checks.operations", 120),
    Check("optimizer", "checks.optimizer", 120),
    Check("stages", "checks.stages", 180),
    Check("replicas", "ranks.replicas", 120),
    Check(
        "sanitizer", "checks.sanitized", 240, ("horovod", "GPU"), environment={"TORCH_CUDA_SANITIZER": "1"}
    ),
    Check("offload", "checks.offload", 180),
    Check("snapshot", "checks.snapshot", 180),
    Check("planner", "checks.planner", 300),
    Check("overflow", "checks.overflow", 120),
    Check("ddp", "checks.ddp", 180),
    Check("operations of ranks", "checks.operations", 120, ("horovod", "ranks"), several=True),
    Check("optimizer of ranks", "checks.optimizer", 180, ("horovod", "ranks"), several=True),
    Check("stages of ranks", "checks.stages", 240, ("horovod", "ranks"), several=True),
    Check("replicas of ranks", "ranks.replicas", 120, ("horovod", "ranks"), several=True, bits_of="replicas"),
    Check("batchnorm of ranks", "ranks.batchnorm", 120, ("horovod", "ranks"), several=True),
    Check("pipeline of ranks", "ranks.pipeline", 180, ("horovod", "ranks"), several=True),
    Check("ddp of ranks", "checks.ddp", 180, ("horovod", "NCCL"), several=True),
    Check("overlap", "ranks.overlap", 180, ("horovod", "GPUs"), several=True),
    Check("sums", "ranks.repeated_sums", 120, ("horovod", "NCCL"), several=True),
    Check(
        "sums with NVLS",
        "ranks.repeated_sums",
        120,
        ("horovod", "GPUs"),
        several=True,
        environment={"NCCL_NVLS_ENABLE": "1"},
    ),
    Check("compare", compare, 300),
)

STAGED = f"several ranks on one GPU need a Horovod that stages through the host: {machine.BUILD_STAGED}"
NEEDS: dict[str, Callable[[Session], str]] = {
    "torch": lambda session: "PyTorch does not load" if "error" in session.builds.torch else "",
    "horovod": lambda session: (
        "Horovod does not load" if "error" in session.builds.horovod else _of_device(session)
    ),
    "GPU": lambda session: "" if session.device == "cuda" else "it needs a GPU",
    "GPUs": lambda session: (
        "" if session.gpus > 1 and session.builds.horovod["nccl"] else "it needs several GPUs and NCCL"
    ),
    "NCCL": lambda session: "" if session.device == "cpu" else NEEDS["GPUs"](session),
    "ranks": lambda session: "" if session.gpus != 1 or session.builds.staged is not None else STAGED,
}
"""Why a check cannot run, or an empty text."""


def _of_device(session: Session) -> str:
    if session.device == "cuda" and not session.builds.horovod["cuda"]:
        return "Horovod is built without CUDA"
    return "" if session.device == "cpu" or session.gpus else "PyTorch finds no GPU"


def run_checks(
    output: str | None, device: str, only: str | None, minutes: float, offline: Path | None
) -> None:
    """Runs the list, prints a line for each row, writes the report after each, and ends with status 0, or 1 for a failed row.

    Raises:
        BadArgument: an argument is wrong, or this machine has no GPU.
    """
    run = BenchRun("doctor", output, width=130)
    names = [check.name for check in CHECKS]
    # Every other check needs to know the builds that "machine" finds.
    chosen = names if only is None else ["machine", *split_names("--only", only, names)]
    if offline is not None and not offline.is_dir():
        raise BadArgument(
            f"--offline: there is no folder {offline}; `hvd-ckpt doctor --fill FOLDER` fills one"
        )
    if device == "cuda" and not machine.gpus():
        raise BadArgument(machine.NEEDED)
    session = Session(run, device, offline)
    end = time.monotonic() + 60 * minutes
    rows: list[Row] = []
    checks = [check for check in CHECKS if check.name in chosen]
    with run.progress(len(checks)) as progress:
        for number, check in enumerate(checks, 1):
            progress.start(check.name)
            rows.append(_row(check, session, end, rows))
            # Where "build" is chosen, it notes the build itself, since it may make another one.
            if check.name == "machine" and "build" not in chosen:
                session.note_build()
            row = rows[-1]
            click.echo(
                f"[{number:2}/{len(checks)}] {row.verdict:7} {row.name:19} {row.seconds:4.0f} s  {row.text}"
            )
            run.save(_report(session, rows))
    run.finish(_report(session, rows), success=not any(row.verdict == FAILED for row in rows))


def _row(check: Check, session: Session, end: float, rows: Sequence[Row]) -> Row:
    """Runs one check in what is left of the time."""
    ranks = 0 if callable(check.function) else session.ranks() if check.several else 1
    row = Row(check.name, SKIPPED, "", ranks)
    begun = time.monotonic()
    seconds = min(check.seconds, end - begun)
    # In the order of the names, up to the first reason: a later question may read what is only known where
    # the earlier ones are answered.
    row.text = next(filter(None, (NEEDS[name](session) for name in check.needs)), "")
    if not row.text and end - begun < LEAST_SECONDS:
        row.text = "the time is over: give more --minutes, or name checks with --only"
    if row.text:
        return row
    try:
        outcome = _outcome(check, session, ranks, seconds)
        digests = {before.name: before.values.get("digest") for before in rows if before.verdict == PASSED}
        differs = digests.get(check.bits_of, outcome.values.get("digest")) != outcome.values.get("digest")
        if differs and not outcome.skipped:
            raise JobError(f"the bits differ from those of '{check.bits_of}'")
        row.verdict = SKIPPED if outcome.skipped else PASSED
        row.text, row.values = outcome.text, outcome.values
    except (JobError, OSError) as error:
        # A rank writes the type of its error in front; for a failed check that word repeats the verdict.
        row.verdict, row.text = FAILED, str(error).removeprefix("Failed: ")
    row.seconds = time.monotonic() - begun
    return row


def _outcome(check: Check, session: Session, ranks: int, seconds: float) -> Outcome:
    if callable(check.function):
        return check.function(session, seconds)
    folder = session.run.jobs / check.name.replace(" ", "-")
    job = CheckJob(folder, ranks, check.function, session.device, tiny=session.device == "cpu")
    staged = session.builds.staged if check.several and session.gpus == 1 else None
    # A rank chooses its GPU before it calls use_deterministic_kernels(), which would set the first variable only then.
    environment = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", **(staged or {}), **check.environment}
    controller = "gloo" if session.builds.horovod["gloo"] else "mpi"
    threads = max(
        1, len(os.sched_getaffinity(0)) // session.ranks()
    )  # the same for all checks, as bits depend on it
    return run_job(job, Outcome, controller, seconds, threads=threads, environment=environment)[0]


COLUMNS = (
    Column("check", lambda row: row.name, key="name", left=True),
    Column("ranks", lambda row: row.ranks, lambda ranks: str(ranks or "-"), key="ranks"),
    Column("verdict", lambda row: row.verdict, key="verdict", left=True),
    Column("s", lambda row: row.seconds, ".0f", key="seconds"),
    Column("found", lambda row: row.text, key="text", left=True),
    *attributes("values"),
)


def _report(session: Session, rows: Sequence[Row]) -> Report:
    counts = Counter(row.verdict for row in rows)
    table = table_of(COLUMNS, rows)
    table.style = lambda entry: STYLES.get(entry, "")
    table.mark = lambda entry: entry.replace("|", r"\|")
    table.printed = False  # each row has been
    facts = {name: found.replace("\n", " / ") for name, found in session.facts.items()}
    return Report(
        f"Checks on {'a GPU' if session.device == 'cuda' else 'the CPU: a dry run'}",
        facts,
        [table],
        results=results_of(COLUMNS, rows),
        settings={"device": session.device, "topology": session.facts.get("topology", "")},
        conclusion=", ".join(f"{counts[verdict]} {verdict}" for verdict in (PASSED, FAILED, SKIPPED)),
        success=not counts[FAILED],
    )
