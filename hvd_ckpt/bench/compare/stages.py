"""``hvd-ckpt compare --stages``: does training in pipeline stages give the weights of the model without stages?

Each engine trains each scenario in each schedule, in a job of its own, one rank for each stage. Every rank computes the reference
itself: the whole model, micro-batch by micro-batch. It compares the parameters and buffers of its own stage, after training twice.

Run by the launcher as ``python -m hvd_ckpt.bench.compare.stages JOB``.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

import hvd_ckpt as hc
from hvd_ckpt.bench.compare.reference import largest_difference
from hvd_ckpt.bench.compare.verdict import SEVERITY
from hvd_ckpt.bench.harness.jobs import JobError, RankJob, join_torch, run_job, run_rank
from hvd_ckpt.bench.harness.report import Report, Table, machine_facts
from hvd_ckpt.planning.balance import balance_costs
from hvd_ckpt.processes.launchers import launched_rank

if TYPE_CHECKING:
    from hvd_ckpt.bench.harness.options import BenchRun

WIDTH, SAMPLES, CHUNKS, BLOCKS, LENGTH, VOCABULARY = 8, 8, 4, 8, 6, 12
IGNORED = -100
TOLERANCE = 1e-3  # of what training changes; a lost gradient is off by a tenth or more
SCHEDULES = ("gpipe", "1f1b")
ENGINES = {"hvd_ckpt": SCHEDULES, "torch": SCHEDULES, "deepspeed": ("1f1b",)}
STALL_SECONDS = 20.0  # of a wait within a job, after which it hangs
NOTES = (
    "right: parameters and buffers of every stage equal, to rounding, those of the whole model in one process, which runs the same "
    "micro-batches one after the other, and two runs end in the same bits. wrong: they do not. error, hang: no result.",
    "torch: torch.distributed.pipelining over Gloo, with the model cut by hand; where blocks that are not neighbours are "
    "connected, cut by its tracer.",
    "deepspeed: PipelineModule of DeepSpeed over Gloo, where it is installed; connected blocks hand on tuples.",
    "dropout: the masks are those that the whole model draws with seed_blocks(). Other masks are not wrong for training; the "
    "result then depends on the number of stages.",
)  # fmt: skip

Batch = tuple[Tensor, Tensor]


class Scenario:
    """A chain of small blocks with one difficulty, its batches and its loss."""

    title: ClassVar[str] = "nothing special"

    def blocks(self) -> list[nn.Module]:
        return [self.block() for _ in range(BLOCKS)]

    def block(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def batch(self, step: int) -> Batch:
        """The batch of a step, from torch's random state."""
        return torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, WIDTH)

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of a micro-batch."""
        return functional.mse_loss(output, targets)

    def weight(self, part: Batch) -> int:
        """The number of terms that this is the mean of."""
        return len(part[0])


class BatchNorm(Scenario):
    title = "running statistics of batch norms"

    def block(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())


class Uneven(Scenario):
    title = f"{SAMPLES + 2} samples in {CHUNKS} micro-batches"

    def batch(self, step: int) -> Batch:
        return torch.randn(SAMPLES + 2, WIDTH), torch.randn(SAMPLES + 2, WIDTH)


class Lengths(Scenario):
    title = "sequences of another length in each step"

    def batch(self, step: int) -> Batch:
        shape = (SAMPLES, LENGTH + step, WIDTH)
        return torch.randn(shape), torch.randn(shape)


class Weighted(Scenario):
    title = "a mean over tokens, which micro-batches have unevenly many of"

    def blocks(self) -> list[nn.Module]:
        layers = [self.block() for _ in range(BLOCKS - 2)]
        return [nn.Embedding(VOCABULARY, WIDTH), *layers, nn.Linear(WIDTH, VOCABULARY, bias=False)]

    def batch(self, step: int) -> Batch:
        targets = torch.randint(VOCABULARY, (SAMPLES, LENGTH))
        targets[0, 1:] = IGNORED
        return torch.randint(VOCABULARY, (SAMPLES, LENGTH)), targets

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(output.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)

    def weight(self, part: Batch) -> int:
        return int((part[1] != IGNORED).sum())


class Tied(Weighted):
    title = "the weights of the first block are those of the last"

    def blocks(self) -> list[nn.Module]:
        first, *others, last = super().blocks()
        last.weight = first.weight
        return [first, *others, last]

    def batch(self, step: int) -> Batch:
        return torch.randint(VOCABULARY, (SAMPLES, LENGTH)), torch.randint(VOCABULARY, (SAMPLES, LENGTH))


class Dropout(Scenario):
    title = "dropout"

    def block(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.2))


@hc.skippable(stash=["skip"])
class Stash(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        y = torch.tanh(self.linear(x))
        yield hc.stash("skip", y)
        return y


@hc.skippable(pop=["skip"])
class Pop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        skip = yield hc.pop("skip")
        return torch.tanh(self.linear(x)) + skip


class Skip(Scenario):
    title = "a skip connection from the first block to the last"

    def blocks(self) -> list[nn.Module]:
        return [Stash(), *(self.block() for _ in range(BLOCKS - 2)), Pop()]


class SkipByHand(nn.Sequential):
    """The same computation as torch's tracer can read it."""

    def forward(self, x: Tensor) -> Tensor:
        blocks: list[Any] = list(self)
        first, *others, last = blocks
        y = skip = torch.tanh(first.linear(x))
        for block in others:
            y = block(y)
        result: Tensor = torch.tanh(last.linear(y)) + skip
        return result


SCENARIOS: dict[str, type[Scenario]] = {
    "plain": Scenario,
    "batch-norm": BatchNorm,
    "uneven": Uneven,
    "lengths": Lengths,
    "weighted": Weighted,
    "tied": Tied,
    "dropout": Dropout,
    "skip": Skip,
}


@dataclass(frozen=True)
class Job(RankJob):
    """One engine's ranks, one for each stage, with one scenario in one schedule."""

    worker = "hvd_ckpt.bench.compare.stages"

    engine: str
    scenario: str
    schedule: str
    steps: int
    seed: int


@dataclass
class Result:
    """What one stage found: how far its parameters and buffers are off, relative to what training changed.

    Attributes:
        difference: the largest one; ``worst``: the name of the tensor.
        repeated: whether two runs ended in the same bits.
    """

    difference: float
    worst: str
    repeated: bool


def measure(job: Job) -> Result:
    """Trains the scenario twice with the engine on one rank, and compares with the reference."""
    torch.use_deterministic_algorithms(True)
    scenario = SCENARIOS[job.scenario]()
    train = {"hvd_ckpt": _train_ours, "torch": _train_torch, "deepspeed": _train_deepspeed}[job.engine]
    if job.engine == "hvd_ckpt":
        hc.init(stages=job.size, stall_timeout=STALL_SECONDS)
    else:
        rank = launched_rank() or 0
        os.environ.update(LOCAL_RANK=str(rank), DS_ACCELERATOR="cpu")  # read by DeepSpeed
        join_torch(job.folder, rank, job.size, timedelta(seconds=STALL_SECONDS))
    torch.manual_seed(job.seed)
    whole = nn.Sequential(*scenario.blocks())
    start = copy.deepcopy(whole.state_dict())
    runs = [train(job, scenario, copy.deepcopy(whole)) for _ in range(2)]
    expected = {name: value for name, value in _train_whole(job, scenario, whole).items() if name in runs[0]}
    floats = {name: value for name, value in expected.items() if value.is_floating_point()}
    _, difference, worst = largest_difference(runs[0], floats, start)
    repeated = all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])
    if job.engine != "hvd_ckpt":
        torch.distributed.destroy_process_group()
    return Result(difference, worst, repeated)


def _data(job: Job, scenario: Scenario) -> list[Batch]:
    torch.manual_seed(job.seed + 1)
    return [scenario.batch(step) for step in range(job.steps)]


def _steps(job: Job, scenario: Scenario, model: nn.Module, run: Callable[[Batch], object]) -> None:
    """The training of engines that leave the update to an optimizer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in _data(job, scenario):
        optimizer.zero_grad()
        run(batch)
        optimizer.step()


def _train_whole(job: Job, scenario: Scenario, model: nn.Sequential) -> dict[str, Tensor]:
    hc.seed_blocks(model)

    def run(batch: Batch) -> object:
        return hc.accumulate(
            lambda part: scenario.loss(model(part[0]), part[1]), batch, CHUNKS, weight=scenario.weight
        )

    _steps(job, scenario, model, run)
    return model.state_dict()


def _train_ours(job: Job, scenario: Scenario, model: nn.Sequential) -> dict[str, Tensor]:
    staged = hc.Pipeline(model, _balance(job.size), chunks=CHUNKS, schedule=job.schedule)
    _steps(
        job, scenario, staged, lambda batch: staged.accumulate(batch, scenario.loss, weight=scenario.weight)
    )
    return staged.state_dict()


def _train_torch(job: Job, scenario: Scenario, model: nn.Sequential) -> dict[str, Tensor]:
    from torch.distributed import pipelining

    rank, device = torch.distributed.get_rank(), torch.device("cpu")
    balance = _balance(job.size)
    first = sum(balance[:rank])
    stage: Any
    if isinstance(scenario, Skip):
        ends = [str(sum(balance[:number])) for number in range(1, job.size)]
        cuts = dict.fromkeys(ends, pipelining.SplitPoint.BEGINNING)
        example = scenario.batch(0)[0].tensor_split(CHUNKS)[0]
        traced = pipelining.pipeline(SkipByHand(*model), (example,), split_spec=cuts)
        part: nn.Module = traced.get_stage_module(rank)
        stage = traced.build_stage(rank, device)
        names = {name: name for name in part.state_dict()}
    else:
        part = nn.Sequential(*list(model)[first : first + balance[rank]])
        stage = pipelining.PipelineStage(part, rank, job.size, device)
        names = {name: _whole_name(name, first) for name in part.state_dict()}
    kind = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}[job.schedule]
    schedule = kind(stage, CHUNKS, loss_fn=scenario.loss)

    def run(batch: Batch) -> object:
        given = batch[:1] if rank == 0 else ()
        return schedule.step(*given, target=batch[1] if rank == job.size - 1 else None)

    _steps(job, scenario, part, run)
    return {names[name]: value for name, value in part.state_dict().items()}


class _Handing(nn.Module):
    """A block between those that a skip connection joins, which it is handed on through."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, values: Any) -> Any:
        block: Any = self.block
        if isinstance(block, Stash):
            y = torch.tanh(block.linear(values))
            return y, y
        x, skip = values
        return torch.tanh(block.linear(x)) + skip if isinstance(block, Pop) else (block(x), skip)


def _train_deepspeed(job: Job, scenario: Scenario, model: nn.Sequential) -> dict[str, Tensor]:
    import deepspeed
    from deepspeed.pipe import PipelineModule, TiedLayerSpec

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    layers: list[Any] = list(model)
    if isinstance(scenario, Skip):
        layers = [_Handing(layer) for layer in layers]
    if isinstance(scenario, Tied):
        tied = functools.partial(
            TiedLayerSpec, "0", nn.Embedding, VOCABULARY, WIDTH, _weight=layers[0].weight
        )
        layers[0] = tied()
        layers[-1] = tied(forward_fn=lambda module, x: functional.linear(x, module.weight))
    staged = PipelineModule(
        layers,
        num_stages=job.size,
        loss_fn=scenario.loss,
        partition_method="uniform",
        dynamic_shape=isinstance(scenario, Uneven | Lengths),
    )
    engine, *_ = deepspeed.initialize(
        model=staged,
        optimizer=torch.optim.SGD(staged.parameters(), lr=0.1, momentum=0.9),
        config={
            "train_micro_batch_size_per_gpu": SAMPLES // CHUNKS,
            "gradient_accumulation_steps": CHUNKS,
            "gradient_clipping": 0.0,  # by default it clips
        },
        dist_init_required=False,
    )
    for inputs, targets in _data(job, scenario):
        engine.train_batch(iter(list(zip(inputs.tensor_split(CHUNKS), targets.tensor_split(CHUNKS)))))
    return {
        name.replace("block.", "").removeprefix("tied_modules."): value
        for name, value in staged.state_dict().items()
    }


def _whole_name(name: str, first: int) -> str:
    number, _, rest = name.partition(".")
    return f"{first + int(number)}.{rest}"


def _balance(stages: int) -> list[int]:
    return balance_costs([1.0] * BLOCKS, stages)


def verdict(ranks: Sequence[Result]) -> tuple[str, str]:
    """The verdict on a job that ended, and why."""
    worst = max(ranks, key=lambda one: one.difference)
    reasons = []
    if worst.difference > TOLERANCE:
        reasons.append(f"{worst.worst} is off by {100 * worst.difference:.3g} % of what training changes")
    if not all(one.repeated for one in ranks):
        reasons.append("runs differ")
    return ("wrong", "; ".join(reasons)) if reasons else ("right", "")


def compare_stages(
    run: BenchRun,
    stages: int,
    controller: str,
    scenarios: Sequence[str],
    steps: int,
    seed: int,
    timeout: float,
) -> None:
    """Compares the engines in every scenario and schedule, and ends the command."""
    installed = [engine for engine in ENGINES if engine != "deepspeed" or find_spec(engine)]
    columns = [
        f"{engine}, {schedule}"
        for engine in installed
        for schedule in SCHEDULES
        if schedule in ENGINES[engine]
    ]
    found: dict[tuple[str, str], tuple[str, str]] = {}
    with run.progress(len(scenarios) * len(columns)) as progress:
        for name in scenarios:
            for column in columns:
                engine, _, schedule = column.partition(", ")
                progress.start(f"{name}, {column}")
                job = Job(
                    run.jobs / f"{name}-{engine}-{schedule}", stages, engine, name, schedule, steps, seed
                )
                try:
                    ranks = run_job(
                        job, Result, controller if engine == "hvd_ckpt" else "gloo", timeout, threads=1
                    )
                    found[name, column] = verdict(ranks)
                except JobError as error:
                    hangs = any(words in str(error).lower() for words in ("no end", "timed out", "waited"))
                    found[name, column] = "hang" if hangs else "error", str(error)
    rows = [
        (name, SCENARIOS[name].title, *(found[name, column][0] for column in columns)) for name in scenarios
    ]
    success = all(
        status == "right" for (_, column), (status, _) in found.items() if column.startswith("hvd_ckpt")
    )
    table = Table(
        ("scenario", "what is hard", *columns), rows, left=("scenario", "what is hard", *columns),
        title=f"Verdicts: {stages} stages over {controller}",
        style=lambda entry: {"right": "green"}.get(entry, "red" if entry in SEVERITY else ""),
        mark=lambda entry: f"**{entry}**" if entry in SEVERITY[2:] else entry,
    )  # fmt: skip
    reasons = [f"{name}, {column}: {status}, {why}" for (name, column), (status, why) in found.items() if why]
    settings = {"stages": stages, "controller": controller, "steps": steps, "seed": seed, "chunks": CHUNKS}
    results = [
        {"scenario": name, "engine": column, "status": status, "reason": why}
        for (name, column), (status, why) in found.items()
    ]
    facts = machine_facts(1, settings)
    report = Report("Pipeline stages compared", facts, [table], results, reasons, NOTES, settings=settings)
    run.finish(report, success)


if __name__ == "__main__":
    run_rank(Job, measure)
