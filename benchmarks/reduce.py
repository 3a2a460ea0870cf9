"""Speed of gradient reduction: step time and gradient memory of this library, stock Horovod and DDP.

``python -m benchmarks reduce`` runs whole jobs of the engines in alternating order (A B C, then C B A), and each ratio is taken
between the jobs of one such pair, side by side in time. The time of a step is that of the slowest rank, the time of a job the
median over its steps. Exit status 0 if every engine was measured everywhere, 1 if one failed, 2 for a bad argument.
"""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from hvd_ckpt.app.compare.runner.cases import (
    Case,
    Column,
    attributes,
    conditions,
    figure,
    find_case,
    in_mib,
    median_in_ms,
    results_of,
    table_of,
)
from hvd_ckpt.app.compare.runner.jobs import RankJob, own_device
from hvd_ckpt.app.compare.runner.options import BenchRun, bench_command
from hvd_ckpt.app.compare.runner.report import Report, device_name
from hvd_ckpt.app.compare.runner.settings import (
    BenchSettings,
    check_devices,
    controllers_of,
    device_setting,
    names_of,
    quick_setting,
    ranks_setting,
    setting,
    timeout_setting,
)
from hvd_ckpt.app.compare.runner.stats import Quartiles, alternating

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hvd_ckpt.app.compare.runner.engine import Engine
    from hvd_ckpt.app.compare.runner.workloads import RandomBatch

BASELINES = ("hvd_ckpt", "horovod", "ddp")  # engines to which ratios are taken
WORKLOADS = {  # workload of the harness, what it is, warm-up steps, timed steps
    "densenet": ("densenet-narrow", "DenseNet, 371 gradients of 4.2 MiB in all", 5, 30),
    "transformer": ("transformer", "transformer, 98 gradients of 96 MiB in all", 3, 6),
}
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
class Settings(BenchSettings):
    """What is measured, and how often."""

    sizes: tuple[int, ...] = ranks_setting()
    controllers: tuple[str, ...] = setting(
        "What starts the ranks.", "gloo,mpi", flag="controller", type=controllers_of
    )
    workloads: tuple[str, ...] = setting("Workloads to train.", ",".join(WORKLOADS), type=names_of(WORKLOADS))
    engines: tuple[str, ...] = setting(
        "Engines; also unchecked (this one without checks), replicas (with logical replicas), or module:Class of your own.",
        ",".join(BASELINES),
        type=names_of(find="hvd_ckpt.app.compare.runner.engines:find_engine"),
    )
    pairs: int = setting("Jobs per engine, alternating.", 5, quick=3)
    steps: int | None = setting("Timed steps per job.", note="by workload", type=click.IntRange(1))
    device: str = device_setting()
    quick: bool = quick_setting("Two ranks and fewer pairs.")
    timeout: float = timeout_setting(300)

    def check(self) -> None:
        check_devices(self.device, max(self.sizes))


@dataclass(frozen=True)
class Job(RankJob):
    """One engine's ranks, which time one workload after the other; ``memory``: also count the bytes held for gradients."""

    worker = "benchmarks.reduce:measure"

    engine: str
    memory: bool
    settings: Settings


def measure(job: Job) -> dict[str, dict[str, Any]]:
    """For each workload the ``seconds`` of all timed steps on this rank, and its ``gradient_bytes`` if they are counted."""
    from hvd_ckpt.app.compare.runner.engines import start_engine
    from hvd_ckpt.app.compare.runner.workloads import workload

    engine = start_engine(job.engine, job, own_device(job.settings.device))
    # Objects that the imports left behind are not collected again while the clock runs.
    gc.collect()
    gc.freeze()
    result: dict[str, dict[str, Any]] = {}
    for name in job.settings.workloads:
        kind, _, warm_up, steps = WORKLOADS[name]
        trained = workload(kind)
        found: dict[str, Any] = {
            "seconds": _time_steps(trained, engine, warm_up, job.settings.steps or steps)
        }
        gc.collect()
        if job.memory:
            found["gradient_bytes"] = min(_count_gradient_bytes(trained, engine) for _ in range(COUNTS))
            gc.collect()
        result[name] = found
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

    # Garbage of an earlier count must not be given back within this one.
    gc.collect()
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


@bench_command(Settings, width=120)
def reduce(run: BenchRun, settings: Settings) -> None:
    """Time training steps with this library, stock Horovod and DDP, in whole jobs that alternate.

    Gradients are many and small (a DenseNet) or few and large (a transformer). Reports for each engine the time of a step, its
    ratio to stock Horovod's and DDP's in the same pair of jobs, and the bytes held for gradients. Run it on a machine
    that does nothing else.
    """
    from hvd_ckpt.processes.runtime import threads_per_rank

    places = list(itertools.product(settings.sizes, settings.controllers))
    cases = [
        Case(engine, {"workload": name, "np": size, "controller": controller})
        for size, controller in places
        for name in settings.workloads
        for engine in settings.engines
    ]
    run.make_report = functools.partial(make_report, run, settings, cases)
    with run.progress(len(places) * len(settings.engines) * settings.pairs) as progress:
        for size, controller in places:
            for pair, engine in alternating(settings.engines, settings.pairs):
                folder = run.jobs / f"np{size}-{controller}-pair{pair + 1}-{engine}".replace(":", "_")
                ranks = progress.job(
                    f"{size} ranks over {controller}, pair {pair + 1} of {settings.pairs}, {engine}",
                    # Bytes are counted in the first job alone: other jobs have the same.
                    Job(folder, size, engine, pair == 0, settings),
                    dict[str, dict[str, Any]],
                    name=(name := f"{engine}, {size} ranks over {controller}"),
                    controller=controller,
                    threads=threads_per_rank(size),
                )
                for case in cases:
                    if (case.engine, case.at["np"], case.at["controller"]) == (engine, size, controller):
                        case.failure = run.failures.get(name)
                        case.add([rank[case.at["workload"]] for rank in ranks])
    run.finish()


def make_report(run: BenchRun, settings: Settings, cases: Sequence[Case]) -> Report:
    """The report of all cases so far."""
    from hvd_ckpt.processes.runtime import threads_per_rank

    def of(other: str) -> Column:
        def ratio(case: Case) -> Quartiles | None:
            return case.ratio(find_case(cases, other, case.at))

        return Column(f"of {other}", ratio, ".2f", key=f"of_{other}", itself=other)

    columns = [
        *conditions("workload", "np", "controller", left=("workload", "controller")),
        Column("engine", lambda case: case.engine.rpartition(":")[2], left=True),
        *attributes("engine"),
        Column("", lambda case: case.seconds, key="jobs"),
        Column("", lambda case: case.step, key="step_seconds"),
        Column(
            "step ms", lambda case: None if case.failure else case.step, median_in_ms(".1f"), missing="failed"
        ),
        *(of(name) for name in BASELINES if name in settings.engines),
        figure("gradient_bytes", max, "gradients MiB", in_mib()),
        *attributes("failure"),
    ]
    threads = ", ".join(f"{threads_per_rank(size)} at np={size}" for size in sorted(settings.sizes))
    facts = {"threads per rank": threads, "device": device_name(settings.device)}
    facts |= {name: WORKLOADS[name][1] for name in settings.workloads}
    tables, results = [table_of(columns, cases, folded=3)], results_of(columns, cases)
    return run.report("Speed of gradient reduction", tables, results, facts, notes=NOTES)
