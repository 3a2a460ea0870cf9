"""``hvd-ckpt layout``: the layouts of a run that fit the memory of its ranks, the fastest first.

The exit status is 0 if a layout fits. It is 2 for an invalid argument, and if none fits.
"""

from __future__ import annotations

import dataclasses
import functools
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
from pydantic import BeforeValidator, Field, model_validator

from hvd_ckpt.app.cli.command_line import BadArgument, console_for_tables, saying
from hvd_ckpt.app.cli.run_command import RunCommand
from hvd_ckpt.app.cli.tables import Table
from hvd_ckpt.app.models.catalog import overview
from hvd_ckpt.app.training.config import Config, ConfigError, config_errors
from hvd_ckpt.app.training.field_types import Count, Positive, Text
from hvd_ckpt.planning.budget import parse_budget
from hvd_ckpt.processes.launchers import launched_size
from hvd_ckpt.utils.extras import say_no_pictures
from hvd_ckpt.utils.named import is_named
from hvd_ckpt.utils.plain_data import write_text
from hvd_ckpt.utils.schema import Strict
from hvd_ckpt.utils.text import show_bytes

if TYPE_CHECKING:
    from hvd_ckpt.app.training.trial import Trial
    from hvd_ckpt.prediction.layouts import Job
    from hvd_ckpt.prediction.network import Network
    from hvd_ckpt.prediction.training_layout import LayoutRow

SHOWN = 10  # layouts that fit, and as many that do not
TRIED = 8  # layouts with which some steps are trained, by default
AS_FAST = 1.4  # that they take by prediction at most, of the seconds of the fastest
TIMED_SECONDS = 2.0  # of a trial, if its steps are neither very short nor long
COLORS = {"computation": "#1f77b4", "link": "#d62728", "waiting for stages": "#ff7f0e", "memory": "#9467bd"}
CHOSEN = ("shard", "pipeline", "tensor", "accumulate", "budget", "plan", "segments", "global_batch")
"""Settings that are chosen here, whatever a file says."""


def _bytes(given: Any) -> Any:
    limit = parse_budget(given)
    if limit.kind != "bytes":
        raise ValueError(f"{given!r}: give bytes, such as 3GiB")
    return int(limit.value)


class Settings(Strict):
    """Options of the command. Those from ``ranks`` on are of a cluster that is not there."""

    batch: Count | None = Field(None, description="Samples of a step of all ranks.  [default: those of FILE]")
    memory: Annotated[int, BeforeValidator(_bytes)] = Field(description="Of each rank, such as 3GiB.")
    trials: Annotated[int, Field(ge=0)] | None = Field(
        None,
        description="Train some steps with each of so many of the best, and take the fastest.  "
        f"[default: in a job up to {TRIED}, those that are hardly slower by prediction]",
        json_schema_extra={"flag": "try"},
    )
    inexact: bool = Field(
        False,
        description="Also show, apart, layouts that change results: int8 messages, local SGD, a head in chunks.",
    )
    output: Text | None = Field(
        None, description="Write the layout as settings of `hvd-ckpt train`, and a picture beside it."
    )
    ranks: Annotated[int, Field(ge=1, le=1 << 20)] | None = Field(
        None, description="Of a cluster that is not there."
    )
    local: Count = Field(8, description="Its ranks on each host.")
    link: Positive = Field(25.0, description="Gbit/s between its hosts.")
    local_link: Positive = Field(100.0, description="Gbit/s of a rank to others on its host.")
    latency: Positive = Field(25.0, description="Microseconds of an empty message to another host.")
    tflops: Positive = Field(50.0, description="TFLOP/s of a rank.")

    @model_validator(mode="after")
    def _check(self) -> Settings:
        if self.output is not None and Path(self.output).suffix == ".png":
            raise ValueError(
                f"output {self.output}: the picture has that name; give one for settings, such as best.yaml"
            )
        if self.ranks is None:
            for name in ("local", "link", "local_link", "latency", "tflops"):
                if name in self.model_fields_set:
                    raise ValueError(f"{name} {getattr(self, name)}: give ranks, their number, as well")
        elif self.trials:
            raise ValueError(f"try {self.trials}: it needs the ranks; leave ranks out")
        elif self.ranks % min(self.local, self.ranks):
            raise ValueError(f"ranks {self.ranks}: give a multiple of --local {self.local}")
        return self

    def network(self) -> Network:
        """What connects the ranks of the cluster."""
        from hvd_ckpt.prediction.network import Network

        return Network(
            min(self.local, self.ranks or 1),
            self.link * 1e9 / 8,
            self.local_link * 1e9 / 8,
            self.latency * 1e-6,
        )


def _layout(config: Config, asked: Settings) -> None:
    from hvd_ckpt.app.training.ending import exit_handler
    from hvd_ckpt.processes import ancestry, watchdog

    if asked.batch is None and click.get_current_context().params["file"] is None:
        raise BadArgument("--batch is missing: give it, or a FILE with settings of `hvd-ckpt train`")
    ranks = asked.ranks or launched_size()
    replicas, left = divmod(ranks, config.pipeline.stages * config.tensor)
    if asked.batch is None and left:
        raise BadArgument(
            f"--batch is missing: {ranks} ranks cannot be divided into pipeline {config.pipeline.stages} and tensor {config.tensor}"
        )
    if asked.trials != 0 and not asked.ranks and is_named(config.model) and config.data is None:
        raise BadArgument(
            f"model {config.model}: give --data, for the steps that are trained with it, or --try 0 to leave these out"
        )
    batch = asked.batch or config.samples_of_step(replicas)
    changing: list[LayoutRow] = []
    tried: list[tuple[LayoutRow, Trial | str]] = []
    with exit_handler():
        # A launcher that is killed leaves its ranks behind.
        ancestry.end_with_parent()
        watchdog.watch(config.stall_timeout)
        with saying("layout") as say, config_errors():
            job = job_of(config, batch, asked.memory, asked if asked.ranks else None, say)
            say("comparing layouts")
            rows = allowed(config, job, job.rows())
            if asked.inexact:
                changing = dataclasses.replace(job, inexact=True).rows()
            best = rows[0] if rows else None
            if job.rank is not None and asked.trials != 0 and best is not None and best.fits:
                best, tried = choose(
                    rows, asked.trials, lambda row: settings_for(config, row, job), job.memory, say
                )
    if job.rank:
        return
    if not rows:
        raise BadArgument(
            f"--batch {job.batch}: it cannot be divided among {job.ranks} ranks; give a multiple"
        )
    _print(rows, job)
    for tensor, reason in job.refused.items():
        click.echo(f"{tensor} parts: {reason}")
    if asked.inexact:
        _print(changing, job, "; these change results")
    if not rows[0].fits:
        raise BadArgument(
            f"--memory {asked.memory}: no layout fits; the smallest memory that would do is {rows[0].peak} bytes "
            f"({show_bytes(rows[0].peak)}), with {rows[0].layout}"
        )
    if tried:
        _print_trials(tried)
    if best is None:
        measured = [(found.peak, row) for row, found in tried if not isinstance(found, str)]
        least = ""
        if measured:
            peak, row = min(measured, key=lambda each: each[0])
            least = f" (the least took {peak} bytes, {show_bytes(peak)}, with {row.layout})"
        raise BadArgument(
            f"--memory {asked.memory}: no layout that was tried stays within it{least}; give more, or a smaller --batch"
        )
    settings = settings_for(config, best, job)
    flags = " ".join(_flags(settings))
    click.echo(f"Best: {best.layout}\n  horovodrun -np {job.ranks} hvd-ckpt train {flags}")
    if asked.output is not None:
        _write(Path(asked.output), settings, [best, *(row for row in rows if row is not best)], job)


def job_of(
    config: Config, batch: int, memory: int, cluster: Settings | None, say: Callable[[str], None]
) -> Job:
    """The job that is meant: a cluster that is not there, or this one, which is measured.

    Args:
        batch: samples of a step of all ranks.
        memory: bytes of each rank.
    """
    import torch

    from hvd_ckpt.app.training.build import first_step
    from hvd_ckpt.app.training.ending import errors_everywhere
    from hvd_ckpt.app.training.model import device_of
    from hvd_ckpt.app.training.optim import optimizer_of
    from hvd_ckpt.planning.blocks import children_of
    from hvd_ckpt.prediction import links
    from hvd_ckpt.prediction.layouts import TFLOPS, Job

    if cluster:
        network = cluster.network()
    else:
        say("measuring links")
        network = links.measure()  # first of all: it starts Horovod, by which a rank knows its GPU
    say("building the model")
    with errors_everywhere("hvd_ckpt.layout.model"):
        model, sample = first_step(config, torch.device("meta") if cluster else device_of(config))
    if cluster:
        try:
            children_of(model)
        except ValueError as error:
            raise ConfigError(
                f"--ranks {cluster.ranks}: a layout cannot be predicted, since {error}; leave --ranks out, to measure one"
            ) from None
    job = Job(
        model,
        batch,
        memory,
        (cluster and cluster.ranks) or 1,
        network,
        sample,
        functools.partial(optimizer_of, config),
        config.precision,
        config.ema is not None,
        cluster.tflops if cluster else TFLOPS,
        replicas=config.replicas,
        say=say,
    )
    return job if cluster else job.measured()


def allowed(config: Config, job: Job, rows: Sequence[LayoutRow]) -> list[LayoutRow]:
    """The rows whose settings can be used together.

    Raises:
        ConfigError: none can.
    """
    found: list[LayoutRow] = []
    refused: list[ConfigError] = []
    for row in rows:
        try:
            Config.make(settings_for(config, row, job))
            found.append(row)
        except ConfigError as error:
            refused.append(error)
    if refused and not found:
        raise refused[0]
    return found


def _print(rows: Sequence[LayoutRow], job: Job, remark: str = "") -> None:
    columns = ("layout", "MiB of a rank", "s of a step", "samples/s", "recomputing", "limit")
    fit = [row for row in rows if row.fits]
    shown = [
        (
            str(row.layout),
            f"{row.peak / 2**20:.0f}",
            f"{row.seconds:.4g}",
            f"{job.batch / row.seconds:.4g}",
            f"{row.recomputing:.0%}",
            row.limit,
        )
        for row in fit[:SHOWN]
    ]
    title = f"{job.ranks} ranks, {job.batch} samples{remark}"
    console_for_tables().print(Table(columns, shown, title, ("layout", "limit")).for_terminal())
    others = rows[len(fit) :]
    if len(fit) > SHOWN:
        click.echo(f"{len(fit) - SHOWN} others fit.")
    for row in others[:SHOWN] if not fit else others[:3]:
        click.echo(f"{row.layout}: {show_bytes(row.peak - job.memory)} too large")


def settings_for(config: Config, row: LayoutRow, job: Job) -> dict[str, Any]:
    """A layout of a run as settings of ``hvd-ckpt train``."""
    layout = row.layout
    parts = config.parts_of_batch(layout.replicas)
    given = config.model_dump(exclude_defaults=True)
    usual = {"accumulate": 1, "shard": "none", "pipeline": 1, "tensor": 1, "budget": None}
    chosen = {
        "accumulate": layout.micro_batches * layout.replicas // parts,
        "shard": layout.shard if layout.offload is None else f"{layout.shard},offload={layout.offload}",
        "pipeline": layout.stages,
        "tensor": layout.tensor,
        # Results stay the same only with a whole head.
        "budget": None if row.budget is None else f"{row.budget},chunk_head=false",
    }
    return {
        **{name: value for name, value in given.items() if name not in CHOSEN},
        "batch": job.batch // parts,
        **{name: value for name, value in chosen.items() if value != usual[name]},
    }


def _flags(settings: Mapping[str, Any]) -> Iterator[str]:
    for key, value in settings.items():
        flag = f"--{key.replace('_', '-')}"
        if isinstance(value, dict):
            single = flag.removesuffix("s")
            yield from (f"{single} {shlex.quote(f'{name}={option}')}" for name, option in value.items())
        elif isinstance(value, bool):
            yield flag if value else f"--no-{flag.removeprefix('--')}"
        else:
            yield f"{flag} {shlex.quote(str(value))}"


def _print_trials(tried: Sequence[tuple[LayoutRow, Trial | str]]) -> None:
    """Prints what was measured beside what was predicted."""
    shown: list[tuple[str, ...]] = []
    for row, each in tried:
        if isinstance(each, str):
            shown.append((f"{row.layout}: {each}",))
            continue
        mib = (f"{value / 2**20:.0f}" for value in (each.peak, row.peak))
        shown.append((str(row.layout), f"{each.seconds:.4g}", f"{row.seconds:.4g}", *mib))
    columns = ("layout", "s of a step", "predicted", "MiB of a rank", "estimated")
    console_for_tables().print(Table(columns, shown, "tried", ("layout",)).for_terminal())


def choose(
    rows: Sequence[LayoutRow],
    number: int | None,
    settings_for: Callable[[LayoutRow], dict[str, Any]],
    memory: int,
    say: Callable[[str], None],
) -> tuple[LayoutRow | None, list[tuple[LayoutRow, Trial | str]]]:
    """The fastest layout that stays within the memory when it is tried, or None, and what was found of those that were tried.

    The fastest by prediction are tried first, and others only if none of these stays within it.

    Args:
        rows: all layouts, of which the first one fits.
        number: that are tried first; None for up to :data:`TRIED` that are hardly slower than the fastest by prediction.

    Raises:
        ConfigError: none could be tried; raised on every rank.
    """
    from hvd_ckpt.app.training.trial import NOT_TRIED, Trial, compared

    left = [row for row in rows if row.fits]
    tried: list[tuple[LayoutRow, Trial | str]] = []
    while left:
        near = left[:number]
        if number is None:
            near = [row for row in left if row.seconds <= AS_FAST * left[0].seconds][:TRIED]
        left = [row for row in left if row not in near]
        found = compared(
            [settings_for(row) for row in near],
            [row.unrecorded for row in near],
            memory,
            lambda settings: say("trying " + " ".join(_flags(settings))),
            steps=round(min(max(TIMED_SECONDS / rows[0].seconds, 6), 24)),
        )
        tried += zip(near, found)
        within = {
            number: each.seconds
            for number, each in enumerate(found)
            if isinstance(each, Trial) and each.peak <= memory
        }
        if within:
            return near[min(within, key=within.__getitem__)], tried
        if NOT_TRIED in found:  # Ctrl-C has ended the trials
            return near[found.index(NOT_TRIED)], tried
    if not any(isinstance(each, Trial) for _, each in tried):
        row, reason = tried[0]
        raise ConfigError(f"{row.layout}: {reason}")
    return None, tried


def _write(file: Path, settings: dict[str, Any], rows: Sequence[LayoutRow], job: Job) -> None:
    import yaml

    try:
        write_text(yaml.safe_dump(settings, sort_keys=False), file)
        click.echo(f"Settings: {file}")
        _draw(file.with_suffix(".png"), rows, job)
        click.echo(f"Picture: {file.with_suffix('.png')}")
    except ImportError as error:
        say_no_pictures(error)
    except OSError as error:
        raise BadArgument(f"--output {file}: {error.strerror or error}") from None


def _draw(file: Path, rows: Sequence[LayoutRow], job: Job) -> None:
    """Memory against seconds: a point for each layout that fits, a ring around the best, a line at the limit."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    fit = [row for row in rows if row.fits]
    for limit, color in COLORS.items():
        chosen = [row for row in fit if row.limit == limit]
        axes.scatter(
            [row.peak / 2**20 for row in chosen], [row.seconds for row in chosen], 14, color, label=limit
        )
    best = fit[0]
    axes.scatter([best.peak / 2**20], [best.seconds], 90, facecolors="none", edgecolors="black")
    axes.annotate(
        str(best.layout), (best.peak / 2**20, best.seconds), (0, -14), textcoords="offset points", ha="right"
    )
    axes.axvline(job.memory / 2**20, color="gray", linestyle=":")
    axes.set(xlabel="MiB of a rank", ylabel="seconds of a step", yscale="log")
    axes.legend(title="limit", frameon=False)
    figure.savefig(file, dpi=150)


layout = RunCommand(
    "layout",
    f"""Which layout? The fastest way to train a model on these ranks, within their memory.

    \b
    horovodrun -np 8 hvd-ckpt layout --model gpt2-small --batch 64 --memory 3GiB
    horovodrun -np 8 hvd-ckpt layout train.yaml --memory 3GiB --output best.yaml
    hvd-ckpt layout --model gpt2-small --batch 512 --memory 24GiB --ranks 64 --local 8 --tflops 50

    The settings of `hvd-ckpt train`, as flags or in a YAML FILE, say what is trained. In a job, the links and the computation are
    measured, and some steps are trained with each of the best layouts. For a cluster that is not there, give its --ranks. Global
    batch and results are the same with every layout.

    Models: {overview()}; a folder of a Hugging Face model; or module:function, as for `hvd-ckpt plan`.
    """,
    _layout,
    Settings,
    without=(*CHOSEN, "resume"),
)
