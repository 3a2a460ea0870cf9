"""The start of a run, from its configuration to its first step. A resume has the same steps, with the state of a snapshot.

:func:`prepare` calls all steps. Their order follows from their requirements:

- The snapshot is compared with a whole model and the optimizer of one rank, so it is read before these are distributed.
- Planning runs the whole model with the weights of the snapshot, so it comes after reading and before distribution.
- Gradient hooks need the modules that the plan has changed and the blocks of this rank's stage, so the optimizer comes after both.
- The shards, moments and random states of a rank are known last, and loaded last.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

from hvd_ckpt.app.training.build import Assembly
from hvd_ckpt.app.training.callbacks import callbacks_of
from hvd_ckpt.app.training.config import Config, ConfigError
from hvd_ckpt.app.training.ending import Reports, config_errors, errors_everywhere
from hvd_ckpt.app.training.field_types import first_and_last
from hvd_ckpt.app.training.model import device_of, precision_of, prepare_model
from hvd_ckpt.app.training.modes import Plain, mode_of
from hvd_ckpt.app.training.optim import Schedule, build_optimizer, freeze
from hvd_ckpt.app.training.own import Stream, check_functions
from hvd_ckpt.app.training.plans import choose_plan
from hvd_ckpt.app.training.profiling import StepTrace, utilization_of_a_unit
from hvd_ckpt.app.training.report import ProgressLine, Report
from hvd_ckpt.app.training.resume import (
    Progress,
    ResumePoint,
    average_weights,
    find_resume_point,
    plan_text,
    read_snapshot,
)
from hvd_ckpt.app.training.summary import print_summary
from hvd_ckpt.app.training.trained import Start, trained_on_text
from hvd_ckpt.data.dataset import Dataset
from hvd_ckpt.data.objectives import Objective
from hvd_ckpt.data.sampler import DistributedSampler
from hvd_ckpt.distributed.precision import Precision
from hvd_ckpt.parallel.tensor.recipes import tensor_parallel
from hvd_ckpt.planning.plan import Plan
from hvd_ckpt.processes.devices import use_deterministic_kernels
from hvd_ckpt.processes.grid import current
from hvd_ckpt.processes.launchers import is_elastic
from hvd_ckpt.reduction import broadcast_optimizer_state, broadcast_parameters
from hvd_ckpt.reduction.weights import verify_weights
from hvd_ckpt.sharding.averaging import AveragedWeights
from hvd_ckpt.snapshots.content import tensors_of
from hvd_ckpt.snapshots.lock import FolderLock
from hvd_ckpt.snapshots.random_state import seed_all, seed_of_rank
from hvd_ckpt.snapshots.resume import state_of_shards
from hvd_ckpt.snapshots.snapshots import Snapshots
from hvd_ckpt.utils.text import show_bytes

DEFAULT_STEPS = 100


@dataclass(eq=False, repr=False)
class Run:
    """A run that is ready for its next step, on one rank.

    Attributes:
        config: the settings.
        folder: folder of logs, plan, pictures and snapshots.
        objective, train, test: the loss, and the samples; ``test`` is None without a validation split.
        sampler: the order of the samples to train on.
        device, precision: device and precision of the passes.
        model: on the device, with its plan; in pipeline stages this rank's part.
        optimizer: the ``DistributedOptimizer``, or that of ``LocalSGD``.
        mode: how the ranks share the work of a step.
        average: average of the weights, if configured.
        plan, plan_text: the plan that recomputation follows, and its file, or None.
        prompt: a text that the model continues at each evaluation, or None.
        steps: number of steps of the whole run.
        first_ranks: with which the run began.
        rate_scale: factor of the configured learning rate: 1, but in an elastic job the number of ranks over that at the start.
        schedule: schedule of the learning rate.
        progress: how far the run has come.
        report: what it counts, shows and logs.
        trace: trace of the configured steps.
        snapshots: snapshots of the run, and requests to stop it.
        reports: requests to stop and losses that are not finite, which single ranks report to all.
    """

    config: Config
    folder: Path
    objective: Objective
    train: Dataset
    test: Dataset | None
    sampler: DistributedSampler
    device: torch.device
    precision: Precision
    model: Any
    optimizer: Any
    mode: Plain
    average: AveragedWeights | None
    plan: Plan | None
    plan_text: str | None
    prompt: Start | None
    steps: int
    first_ranks: int
    rate_scale: float
    schedule: Schedule
    progress: Progress
    report: Report
    trace: StepTrace
    snapshots: Snapshots
    reports: Reports


def prepare(config: Config, assembly: Assembly, point: ResumePoint | None = None) -> Run:
    """Prepares a run. Collective.

    Args:
        assembly: a model in training mode, on the CPU, with its loss and samples.
        point: where the run starts, and its folder; by default as configured.

    Raises:
        ConfigError: a setting does not fit the model, a folder or snapshot cannot be used, or another run uses the folder; raised
            on every rank.
        DryRun: the configuration asks for the summary of the run alone.
    """
    with ExitStack() as locked:
        run = _prepare(config, assembly, point, locked)
        locked.pop_all()  # from here on it is with the snapshots
        return run


def _prepare(config: Config, assembly: Assembly, point: ResumePoint | None, locked: ExitStack) -> Run:
    Mode = mode_of(config)

    # Model and optimizer of one rank. Nothing here communicates, so that a rank that fails can tell the others.
    with errors_everywhere("hvd_ckpt.train.settings"):
        if config.deterministic:
            use_deterministic_kernels()
        if not config.verify.weights:
            verify_weights(False)
        device = device_of(config)
        sampler = _sampler(config, assembly.train)
        precision = precision_of(config, device)
        callbacks = callbacks_of(config)
        prompt = None if config.prompt is None else Start(trained_on_text(config), config.prompt)
        if config.freeze is not None:
            freeze(assembly.model, config.freeze)
        assembly = assembly._replace(model=prepare_model(assembly.model, config, device))
        optimizer = _optimizer(config, assembly)
        check_functions(config, assembly.model, assembly.objective, assembly.train, device)

    # Parts compare their models, so that this communicates.
    if config.tensor > 1:
        with config_errors():
            tensor_parallel(assembly.model)

    # Snapshot: read, validated, and its weights loaded on rank 0.
    point = point or find_resume_point(config)
    folder = point.folder
    lock: FolderLock | None = None
    with errors_everywhere("hvd_ckpt.train.snapshot"):
        if current().number == 0 and not config.dry_run:
            lock = FolderLock(folder)
            locked.callback(lock.release)
        snapshot = read_snapshot(point, config, len(assembly.train), assembly.model, optimizer)
        progress = Progress() if snapshot is None else Progress(**snapshot.replicated["progress"])
        first_ranks: int = hvd.size() if snapshot is None else snapshot.replicated["ranks"]
        steps = _last_step(config, sampler, progress)
        rate_scale = hvd.size() / first_ranks if is_elastic() and Mode.scales_rate else 1.0
        schedule = Schedule(config.schedule, config.lr * rate_scale, steps, config.warmup)
        if current().number == 0 and not config.dry_run:
            config.write_yaml(folder / "config.yaml")
    taken = progress.step
    # Taken from the optimizer of one rank, which knows whole parameters, for the load below.
    expected = {} if snapshot is None else state_of_shards(optimizer, assembly.model)
    print_summary(config, assembly, device, folder, taken, steps, snapshot)

    # Plan, and count of operations, of the whole model. Then stages, and the weights of rank 0.
    utilization = utilization_of_a_unit(config, assembly, device)
    # The names of tied parameters, before the model is cut into stages.
    _, aliases = tensors_of(assembly.model, buffers=False)
    try:
        plan, text = choose_plan(config, assembly, optimizer, device, folder, plan_text(config, snapshot))
    except ConfigError:
        if current().number == 0 and not config.resume:
            # A folder must be empty to be given for a run, so that of a run without a plan is emptied again.
            (folder / "config.yaml").unlink()
        raise
    model = Mode.place(config, assembly.model, optimizer, device, plan)
    broadcast_parameters(model.state_dict(), root_rank=0)

    # Optimizer of all ranks.
    optimizer = Mode.distribute(config, model, optimizer, aliases)
    model, optimizer = precision.prepare(model, optimizer)
    # The state of shards is different on each rank.
    if Mode.same_state and config.shard == "none":
        broadcast_optimizer_state(optimizer, root_rank=0)
    average = average_weights(optimizer, config.ema)
    mode = Mode(config, model, optimizer, assembly.objective, precision=precision, device=device)

    # State of the snapshot, which includes random states: nothing draws random numbers after it.
    seed_all(seed_of_rank(config.seed, taken))
    line = ProgressLine(steps, taken, peak=_planned_peak(plan)) if current().number == 0 else None
    report = Report(
        folder,
        mode,
        line,
        start=taken,
        unit=assembly.objective.unit,
        utilization=utilization,
        callbacks=callbacks,
    )
    snapshots = Snapshots(
        folder,
        model=model,
        optimizer=optimizer,
        scaler=precision.scaler,
        average=average,
        keep=config.keep_snapshots,
        blocking=config.blocking_snapshots,
        warn=lambda text: report.say(f"Warning: {text}"),
    )
    snapshots.hold(lock)
    if snapshot is not None:
        with config_errors():
            of_rank = snapshots.load(snapshot, expected)
            report.meter.load_pending(mode.logged_in(snapshot, of_rank))

    return Run(
        config=config,
        folder=folder,
        objective=assembly.objective,
        train=assembly.train,
        test=assembly.test,
        sampler=sampler,
        device=device,
        precision=precision,
        model=model,
        optimizer=optimizer,
        mode=mode,
        average=average,
        plan=plan,
        plan_text=text,
        prompt=prompt,
        steps=steps,
        first_ranks=first_ranks,
        rate_scale=rate_scale,
        schedule=schedule,
        progress=progress,
        report=report,
        trace=StepTrace(config.profile, folder, report),
        snapshots=snapshots,
        reports=Mode.reports(config, snapshots.stop, report.say),
    )


def _sampler(config: Config, train: Dataset) -> DistributedSampler:
    shuffle = not isinstance(train, Stream)
    return DistributedSampler(train, config.batch, seed=config.seed, epochs=config.epochs, shuffle=shuffle)


def _optimizer(config: Config, parts: Assembly) -> torch.optim.Optimizer:
    return build_optimizer(
        config.optimizer,
        parts.model,
        config.lr,
        config.weight_decay,
        options=config.optimizer_options,
        layer_decay=config.layer_decay,
    )


def _last_step(config: Config, sampler: DistributedSampler, progress: Progress) -> int:
    """The number of the last step.

    Raises:
        ValueError: steps to be traced come after it.
    """
    left = sampler.batches_left(progress.position, config.global_batch(hvd.size()))
    steps = (config.steps or DEFAULT_STEPS) if left is None else progress.step + left
    if config.profile is not None and first_and_last(config.profile)[0] > steps:
        raise ValueError(f"profile {config.profile}: the run ends after step {steps}")
    return steps


def _planned_peak(plan: Plan | None) -> str | None:
    """The measured peak that a plan's budget limits, in words; None without a plan."""
    if plan is None or plan.measured is None:
        return None
    budget = "" if plan.budget is None else f" of {show_bytes(plan.budget)} budgeted"
    return f"step's peak {show_bytes(plan.measured.peak_bytes)}{budget}"
