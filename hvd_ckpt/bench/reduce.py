"""Speed of gradient reduction: step time and gradient memory of this library, stock Horovod and DDP.

``hvd-ckpt bench reduce`` runs whole jobs of the engines in alternating order (A B C, then C B A), and each ratio is taken between
the jobs of one such pair, side by side in time. The time of a step is that of the slowest rank, the time of a job the median over
its steps. Exit status 0 if every engine was measured everywhere, 1 if one failed, 2 for a bad argument.
"""

from __future__ import annotations

import gc
import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from hvd_ckpt.app.cli.command_line import check_controller, split_names
from hvd_ckpt.bench.harness.jobs import JobError, RankJob, own_device, run_job, run_rank
from hvd_ckpt.bench.harness.options import (
    BenchRun,
    bench_command,
    check_devices,
    count_option,
    device_option,
    quick_option,
    timeout_option,
    whole_numbers,
)
from hvd_ckpt.bench.harness.report import Report, Table, device_name, machine_facts, mebibytes, shown
from hvd_ckpt.bench.harness.stats import Quartiles, alternating, quartiles, quartiles_of_ratios, slowest

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hvd_ckpt.bench.harness.engines import Engine
    from hvd_ckpt.bench.harness.workloads import RandomBatch

ENGINES = "hvd_ckpt,horovod,ddp"
BASELINES = ("hvd_ckpt", "horovod", "ddp")  # engines to which ratios are taken
WORKLOADS = {  # workload of the harness, what it is, warm-up steps, timed steps
    "densenet": ("densenet-narrow", "DenseNet, 371 gradients of 4.2 MiB in all", 5, 30),
    "transformer": ("transformer", "transformer, 98 gradients of 96 MiB in all", 3, 6),
}
PAIRS, QUICK_PAIRS = 5, 3
LEARNING_RATE = 1e-3
STEPS_TO_SETTLE = 3  # after which every engine has made the buffers that it keeps
COUNTS = 3
NOTES = (
    "step ms: median over jobs of a job's median step; a step ends when the slowest rank's does.",
    "of NAME: the step time as a ratio to that engine's job of the same pair (jobs alternate: A B C, then C B A); median over "
    "pairs, quartiles in brackets. Below 1 is faster.",
    "gradients MiB: bytes that the allocator holds after a step beyond parameters and buffers: gradients and the engine's buckets, "
    "not the communication threads' own buffers (such as Horovod's fusion buffer).",
    "Every rank of every engine has the same number of threads, and is started by horovodrun in the same way; stock Horovod and "
    "DDP run with their defaults, this library with those of its init(). DDP's collectives are Gloo's under either controller, and "
    "NCCL's on GPUs.",
)


@dataclass(frozen=True)
class Job(RankJob):
    """One engine's ranks, which time one workload after the other.

    Attributes:
        engine: a name in the registry of engines, or ``module:Class``.
        workloads: in this order.
        steps: timed steps; None for each workload's own number.
        memory: also count the bytes held for gradients.
        device: ``cpu`` or ``cuda``.
    """

    worker = "hvd_ckpt.bench.reduce"

    engine: str
    workloads: tuple[str, ...]
    steps: int | None
    memory: bool
    device: str = "cpu"


@dataclass
class RankResult:
    """The measurements of one rank.

    Attributes:
        seconds: for each workload, the time of every timed step.
        gradient_bytes: for each workload, the bytes held for gradients after a step; empty if not counted.
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)
    gradient_bytes: dict[str, int] = field(default_factory=dict)


def measure(job: Job) -> RankResult:
    """Times every workload of a job on one rank."""
    from hvd_ckpt.bench.harness.engines import find_engine
    from hvd_ckpt.bench.harness.workloads import workload

    engine = find_engine(job.engine)()
    engine.device = own_device(job.device)
    engine.start(job.folder)
    if engine.size != job.size:
        raise RuntimeError(f"the job has {engine.size} ranks instead of {job.size}")
    gc.collect()
    gc.freeze()  # objects that the imports left behind are not collected again while the clock runs
    result = RankResult()
    for name in job.workloads:
        kind, _, warm_up, steps = WORKLOADS[name]
        trained = workload(kind)
        result.seconds[name] = _time_steps(trained, engine, warm_up, job.steps or steps)
        gc.collect()
        if job.memory:
            result.gradient_bytes[name] = min(_count_gradient_bytes(trained, engine) for _ in range(COUNTS))
            gc.collect()
    engine.stop()
    return result


def _time_steps(workload: RandomBatch, engine: Engine, warm_up: int, steps: int) -> list[float]:
    """Seconds of each of ``steps`` training steps, from ``zero_grad`` to ``step``, after the warm-up."""
    from hvd_ckpt.utils.measure import now

    _, step = _prepare(workload, engine, _batch(workload, engine))
    seconds = []
    for _ in range(warm_up + steps):
        start = now(engine.device)
        step()
        seconds.append(now(engine.device) - start)
    return seconds[warm_up:]


def _count_gradient_bytes(workload: RandomBatch, engine: Engine) -> int:
    """Bytes that PyTorch's allocator has handed out after a step, for anything but parameters, buffers and inputs.

    Communication threads' own buffers do not count. A block that a communication thread gives back (as happens to the buckets that
    DDP replaces after its first step) is missed, so a count can be too high: callers take the least of several.
    """
    from hvd_ckpt.utils.memory import recording_peak

    gc.collect()  # garbage of an earlier count must not be given back within this one
    batch = _batch(workload, engine)
    with recording_peak(engine.device) as memory:
        model, step = _prepare(workload, engine, batch)
        for _ in range(STEPS_TO_SETTLE):
            step()
        gc.collect()
    return memory.held_bytes - sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def _batch(workload: RandomBatch, engine: Engine) -> tuple[Tensor, Tensor]:
    import torch

    inputs, targets = workload.sample(torch.Generator().manual_seed(engine.rank))
    return inputs.to(engine.device), targets.to(engine.device)


def _prepare(
    workload: RandomBatch, engine: Engine, batch: tuple[Tensor, Tensor]
) -> tuple[nn.Module, Callable[[], None]]:
    """The model as the engine wraps it, and a training step on the rank's batch."""
    import torch

    torch.manual_seed(1)
    bare = workload.model().to(engine.device)
    # Plain SGD is the optimizer whose own work hides least of the reduction.
    model, optimizer = engine.wrap(bare, torch.optim.SGD(bare.parameters(), lr=LEARNING_RATE))
    inputs, targets = batch

    def step() -> None:
        optimizer.zero_grad()
        for backward_pass in engine.backward_passes(optimizer):
            with backward_pass:
                workload.loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return model, step


@dataclass
class Case:
    """One workload on one number of ranks over one controller, and the results of each engine's jobs.

    Attributes:
        seconds: for each engine, the step time of its job in each pair, in order.
        gradient_bytes: for each engine, the most bytes that a rank held for gradients.
        failures: for each engine that failed, why.
    """

    workload: str
    size: int
    controller: str
    seconds: dict[str, list[float]] = field(default_factory=dict)
    gradient_bytes: dict[str, int] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def add(self, engine: str, ranks: Sequence[RankResult]) -> None:
        """Adds the results of one job of an engine."""
        times = slowest(rank.seconds[self.workload] for rank in ranks)
        self.seconds.setdefault(engine, []).append(statistics.median(times))
        if self.workload in ranks[0].gradient_bytes:
            self.gradient_bytes[engine] = max(rank.gradient_bytes[self.workload] for rank in ranks)

    def step_seconds(self, engine: str) -> Quartiles | None:
        """The engine's step time over its jobs."""
        return quartiles(self.seconds[engine]) if self.seconds.get(engine) else None

    def ratio(self, engine: str, other: str) -> Quartiles | None:
        """The engine's step time as a ratio to another's, over the pairs."""
        return quartiles_of_ratios(self.seconds.get(engine, []), self.seconds.get(other, []))


@bench_command("reduce", width=120)
@click.option("--np", "sizes", help="Numbers of ranks.  [default: 2,4; with --quick 2]")
@click.option(
    "--controller", "controllers", default="gloo,mpi", show_default=True, help="What starts the ranks."
)
@click.option("--workloads", default=",".join(WORKLOADS), show_default=True, help="Workloads to train.")
@click.option(
    "--engines",
    default=ENGINES,
    show_default=True,
    help="Engines; also unchecked (this one without checks), replicas (with logical replicas), or module:Class of your own.",
)
@count_option("--pairs", help="Jobs per engine, alternating.", default=PAIRS, quick=QUICK_PAIRS)
@click.option("--steps", type=click.IntRange(1), help="Timed steps per job.  [default: by workload]")
@device_option
@quick_option("Two ranks and fewer pairs.")
@timeout_option(300)
def reduce(
    run: BenchRun,
    sizes: str | None,
    controllers: str,
    workloads: str,
    engines: str,
    pairs: int,
    steps: int | None,
    device: str,
    quick: bool,
    timeout: float,
) -> None:
    """Time training steps with this library, stock Horovod and DDP, in whole jobs that alternate.

    Gradients are many and small (a DenseNet) or few and large (a transformer). Reports for each engine the time of a step, its
    ratio to stock Horovod's and DDP's in the same pair of jobs, and the bytes held for gradients. Run it on a machine
    that does nothing else.
    """
    from hvd_ckpt.bench.harness.engines import find_engine
    from hvd_ckpt.processes.runtime import threads_per_rank

    chosen = split_names("--engines", engines, find=find_engine)
    counts = whole_numbers("--np", sizes or ("2" if quick else "2,4"), "ranks")
    check_devices(device, max(counts))
    carriers = [check_controller(name) for name in split_names("--controller", controllers, ("gloo", "mpi"))]
    names = split_names("--workloads", workloads, WORKLOADS)
    settings: dict[str, Any] = {"engines": chosen, "sizes": counts, "controllers": carriers}
    settings |= {"workloads": names, "pairs": pairs, "steps": steps, "device": device}
    cases: list[Case] = []
    with run.progress(len(chosen) * len(counts) * len(carriers) * pairs) as progress:
        for size, controller in itertools.product(counts, carriers):
            group = [Case(name, size, controller) for name in names]
            cases += group
            for pair, engine in alternating(chosen, pairs):
                progress.start(f"{size} ranks over {controller}, pair {pair + 1} of {pairs}, {engine}")
                if engine in group[0].failures:  # left out from its first failure on
                    continue
                name = f"np{size}-{controller}-pair{pair + 1}-{engine}".replace(":", "_")
                job = Job(run.jobs / name, size, engine, names, steps, pair == 0, device)
                try:
                    ranks = run_job(job, RankResult, controller, timeout, threads=threads_per_rank(size))
                    for case in group:
                        case.add(engine, ranks)
                except JobError as error:
                    for case in group:
                        case.failures[engine] = str(error)
    run.finish(make_report(cases, settings), success=not any(case.failures for case in cases))


def make_report(cases: Sequence[Case], settings: dict[str, Any]) -> Report:
    """The report of all cases."""
    from hvd_ckpt.processes.runtime import threads_per_rank

    engines: Sequence[str] = settings["engines"]
    baselines = [name for name in BASELINES if name in engines]
    table = Table(
        ("workload", "np", "controller", "engine", "step ms", *(f"of {name}" for name in baselines), "gradients MiB"),
        [_row(case, engine, baselines) for case in cases for engine in engines],
        left=("workload", "controller", "engine"),
        folded=3,
    )  # fmt: skip
    facts = {
        **machine_facts(),
        "threads per rank": ", ".join(
            f"{threads_per_rank(size)} at np={size}" for size in sorted(settings["sizes"])
        ),
        "device": device_name(settings["device"]),
        "pairs": str(settings["pairs"]),
        **{name: WORKLOADS[name][1] for name in settings["workloads"]},
    }
    results = [_result(case, engine, baselines) for case in cases for engine in engines]
    # One line for each engine that failed somewhere, each once: the cases of one job fail together.
    failures = {
        f"{engine}, {case.size} ranks over {case.controller}: {why}": None
        for case in cases
        for engine, why in case.failures.items()
    }
    return Report(
        "Speed of gradient reduction",
        facts,
        [table],
        results,
        remarks=list(failures),
        notes=NOTES,
        settings=settings,
    )


def _row(case: Case, engine: str, baselines: Iterable[str]) -> tuple[str, ...]:
    seconds = case.step_seconds(engine)
    return (
        case.workload,
        str(case.size),
        case.controller,
        engine.rpartition(":")[2],
        "failed" if engine in case.failures else shown(seconds and 1000 * seconds.median, ".1f"),
        *("1" if engine == other else shown(case.ratio(engine, other), ".2f") for other in baselines),
        mebibytes(case.gradient_bytes.get(engine)),
    )


def _result(case: Case, engine: str, baselines: Iterable[str]) -> dict[str, Any]:
    return {
        "workload": case.workload,
        "np": case.size,
        "controller": case.controller,
        "engine": engine,
        "jobs": case.seconds.get(engine, []),
        "step_seconds": case.step_seconds(engine),
        **{f"of_{other}": case.ratio(engine, other) for other in baselines},
        "gradient_bytes": case.gradient_bytes.get(engine),
        "failure": case.failures.get(engine),
    }


if __name__ == "__main__":
    run_rank(Job, measure)
