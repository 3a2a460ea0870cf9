"""``hvd-ckpt layout``: the layouts of a job that fit the memory of its ranks, the fastest first.

The exit status is 0 if a layout fits. It is 2 for an invalid argument, and if none fits.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from hvd_ckpt.app.cli.command_line import (
    BadArgument,
    OneLineErrors,
    check_device,
    console_for_tables,
    saying,
    take_options,
    takes_model,
)
from hvd_ckpt.app.models import catalog
from hvd_ckpt.planning.budget import parse_budget
from hvd_ckpt.processes.launchers import launched_size
from hvd_ckpt.utils.extras import say_no_pictures
from hvd_ckpt.utils.plain_data import write_text
from hvd_ckpt.utils.text import show_bytes

if TYPE_CHECKING:
    from hvd_ckpt.app.training.trial import Trial
    from hvd_ckpt.prediction.computation import Sample
    from hvd_ckpt.prediction.layouts import Job
    from hvd_ckpt.prediction.network import Network
    from hvd_ckpt.prediction.training_layout import LayoutRow

SHOWN = 10  # layouts that fit, and as many that do not
TRIED = 8  # layouts with which some steps are trained, by default
AS_FAST = 1.4  # that they take by prediction at most, of the seconds of the fastest
TIMED_SECONDS = 2.0  # of a trial, if its steps are neither very short nor long
WIDTH = 120  # of the table where the output is not a terminal
COLORS = {"computation": "#1f77b4", "link": "#d62728", "waiting for stages": "#ff7f0e", "memory": "#9467bd"}
SETTINGS_OF = {"length": "sequence_length"}  # of `hvd-ckpt train`, by the option here
CHOSEN = (
    "shard",
    "pipeline",
    "tensor",
    "accumulate",
    "budget",
    "plan",
    "segments",
)
"""Settings that are chosen here, whatever a file says."""
CLUSTER = ("ranks", "local", "link", "local_link", "latency", "tflops")

HELP = f"""Which layout? The fastest way to train a model on these ranks, within their memory.

\b
    horovodrun -np 8 hvd-ckpt layout --model gpt2-small --batch 64 --memory 3GiB
    horovodrun -np 8 hvd-ckpt layout train.yaml --memory 3GiB --output best.yaml
    hvd-ckpt layout --model gpt2-small --batch 512 --memory 24GiB --ranks 64 --local 8 --tflops 50

In a job, the links and the computation are measured, and some steps are trained with each of the best layouts. For a cluster that
is not there, give its --ranks. Global batch and results are the same with every layout.

Models: {catalog.overview()}; a folder of a Hugging Face model; or module:function, as for `hvd-ckpt plan`.
"""


def _rate(flag: str, help: str, default: float) -> Callable[[Any], Any]:
    return click.option(flag, type=click.FloatRange(0, min_open=True), help=f"{help}  [default: {default:g}]")


@click.command("layout", cls=OneLineErrors, help=HELP)
@click.argument("file", required=False, metavar="[FILE]")
@takes_model
@click.option("--batch", type=click.IntRange(1), help="Samples of a step of all ranks.")
@click.option("--memory", required=True, metavar="BYTES", help="Of each rank, such as 3GiB.")
@click.option("--optimizer", help="A class of torch.optim, lower case.  [default: adamw]")
@click.option("--ranks", type=click.IntRange(1, 1 << 20), help="Of a cluster that is not there.")
@click.option("--local", type=click.IntRange(1), help="Its ranks on each host.  [default: 8]")
@_rate("--link", "Gbit/s between its hosts.", 25)
@_rate("--local-link", "Gbit/s of a rank to others on its host.", 100)
@_rate("--latency", "Microseconds of an empty message to another host.", 25)
@_rate("--tflops", "TFLOP/s of a rank.", 50)
@click.option(
    "--try",
    "trials",
    type=click.IntRange(0),
    metavar="K",
    help=f"Train some steps with each of the K best, and take the fastest.  [default: {TRIED} in a job]",
)
@click.option(
    "--inexact",
    is_flag=True,
    help="Also show, apart, layouts that change results: int8 messages, local SGD, a head in chunks.",
)
@click.option(
    "--output",
    metavar="FILE",
    help="Write the layout as settings of `hvd-ckpt train`, and a picture beside it.",
)
def layout(
    file: str | None,
    name: str | None,
    options: tuple[str, ...],
    memory: str,
    device: str,
    output: str | None,
    trials: int | None,
    inexact: bool,
    **others: Any,
) -> None:
    """The command; :data:`HELP` says what it does."""
    from hvd_ckpt.utils.plain_data import named

    cluster = take_options(others, CLUSTER, "--ranks, their number")
    if cluster and trials:
        raise BadArgument(f"--try {trials}: it needs the ranks; leave --ranks out")
    try:
        limit = parse_budget(memory)
        model_options = named("--model-option", options)
    except ValueError as error:
        raise BadArgument(f"--memory: {error}" if "budget" in str(error) else str(error)) from None
    values = {} if file is None else _values_of(file, cluster)
    given: dict[str, Any] = {
        option: others.pop(option) or values.get(option) or default
        for option, default in (("batch", None), ("optimizer", "adamw"), ("precision", "fp32"))
    }
    name = name or values.get("model")
    model_options = {**values.get("model_options", {}), **model_options}
    others = {size: value or values.get(SETTINGS_OF.get(size, size)) for size, value in others.items()}
    for option, value in (("--model", name), ("--batch", given["batch"])):
        if value is None:
            raise BadArgument(f"{option} is missing: give it, or a FILE with settings of `hvd-ckpt train`")
    assert name is not None
    if limit.kind != "bytes":
        raise BadArgument(f"--memory {memory}: give bytes, such as 3GiB")
    sizes = {key: value for key, value in others.items() if value is not None}
    fixed = {key: value for key, value in values.items() if key not in CHOSEN}

    def settings_for(row: LayoutRow) -> dict[str, Any]:
        return {**fixed, **settings_of(name, sizes, model_options, row, job)}

    with saying("layouts") as say:
        job = job_of(name, sizes, model_options, int(limit.value), cluster, device, say, **given)
        say("comparing layouts")
        rows = job.rows()
        changing = dataclasses.replace(job, inexact=True).rows() if inexact else []
        best = rows[0] if rows else None
        tried: list[LayoutRow] = []
        found: list[Trial | str] = []
        if job.rank is not None and trials != 0 and best is not None and best.fits:
            best, tried, found = choose(rows, trials or TRIED, settings_for, job.memory, say)
    if job.rank:
        return
    if best is None:
        raise BadArgument(
            f"--batch {job.batch}: it cannot be divided among {job.ranks} ranks; give a multiple"
        )
    _print(rows, job)
    for tensor, reason in job.refused.items():
        click.echo(f"{tensor} parts: {reason}")
    if inexact:
        _print(changing, job, "; these change results")
    if not best.fits:
        raise BadArgument(
            f"--memory {memory}: no layout fits; the smallest memory that would do is {best.peak} bytes "
            f"({show_bytes(best.peak)}), with {best.layout}"
        )
    if tried:
        _print_trials(tried, found)
    settings = settings_for(best)
    flags = " ".join(_flags(settings))
    click.echo(f"Best: {best.layout}\n  horovodrun -np {job.ranks} hvd-ckpt train {flags}")
    if output is not None:
        _write(Path(output), settings, [best, *(row for row in rows if row is not best)], job)


def _values_of(file: str, cluster: dict[str, Any]) -> dict[str, Any]:
    """Settings of ``hvd-ckpt train`` in a file, with the batch of all ranks."""
    from hvd_ckpt.app.training.config import Config, ConfigError, read_yaml

    try:
        values = read_yaml(file)
        config = Config.make(values)
    except ConfigError as error:
        raise BadArgument(str(error)) from None
    ranks = cluster.get("ranks") or launched_size()
    replicas = ranks // config.pipeline.stages // config.tensor
    return {**values, "batch": config.global_batch(replicas)}


def job_of(
    name: str,
    sizes: dict[str, int],
    options: dict[str, Any],
    memory: int,
    cluster: dict[str, Any],
    device: str,
    say: Callable[[str], None],
    batch: int,
    **others: Any,
) -> Job:
    """The job that is meant: a cluster that is not there, or this one, which is measured."""
    import torch

    from hvd_ckpt.app.cli.plan_models import build_asked
    from hvd_ckpt.prediction.computation import Sample
    from hvd_ckpt.prediction.layouts import TFLOPS, Job

    tflops, network = cluster.pop("tflops", TFLOPS), _network(cluster)
    place = torch.device("meta") if cluster else check_device(device)
    model = build_asked(name, {**sizes, "batch": 1}, options, place).model

    def sample(samples: int) -> Sample:
        made = build_asked(name, {**sizes, "batch": samples}, options, place, model)
        return Sample(made.sample, made.kwargs, made.loss)

    job = Job(model, batch, memory, cluster.get("ranks", 1), network, sample, **others)
    return job.counted(tflops) if cluster else job.measured(say)


def _network(cluster: dict[str, Any]) -> Network:
    from hvd_ckpt.prediction.network import Network

    units = {
        "link": ("bandwidth", 1e9 / 8),
        "local_link": ("local_bandwidth", 1e9 / 8),
        "latency": ("latency", 1e-6),
    }
    given = {field: cluster[flag] * unit for flag, (field, unit) in units.items() if flag in cluster}
    ranks = cluster.get("ranks", 1)
    network = Network(local=min(cluster.get("local", Network.local), ranks), **given)
    if ranks % network.local:
        raise BadArgument(f"--ranks {ranks}: give a multiple of --local {network.local}")
    return network


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left")
    for column in columns:
        words = column in ("layout", "limit")
        table.add_column(column, justify="left" if words else "right", no_wrap=column != "layout")
    return table


def _print(rows: Sequence[LayoutRow], job: Job, remark: str = "") -> None:
    columns = ("layout", "MiB of a rank", "s of a step", "samples/s", "recomputing", "limit")
    table = _table(f"{job.ranks} ranks, {job.batch} samples{remark}", columns)
    fit = [row for row in rows if row.fits]
    for row in fit[:SHOWN]:
        table.add_row(
            Text(str(row.layout)),
            f"{row.peak / 2**20:.0f}",
            f"{row.seconds:.4g}",
            f"{job.batch / row.seconds:.4g}",
            f"{row.recomputing:.0%}",
            row.limit,
        )
    console_for_tables(WIDTH).print(table)
    others = rows[len(fit) :]
    if len(fit) > SHOWN:
        click.echo(f"{len(fit) - SHOWN} others fit.")
    for row in others[:SHOWN] if not fit else others[:3]:
        click.echo(f"{row.layout}: {show_bytes(row.peak - job.memory)} too large")


def settings_of(
    name: str, sizes: dict[str, int], options: dict[str, Any], best: LayoutRow, job: Job
) -> dict[str, Any]:
    """The layout as settings of ``hvd-ckpt train``."""
    layout = best.layout
    usual = {"accumulate": 1, "shard": "none", "pipeline": 1, "tensor": 1, "precision": "fp32"}
    chosen = {
        "model": name,
        "batch": job.batch // layout.replicas,
        "accumulate": layout.micro_batches,
        "shard": layout.shard if layout.offload is None else f"{layout.shard},offload={layout.offload}",
        "pipeline": layout.stages,
        "tensor": layout.tensor,
        "precision": job.precision,
        "optimizer": job.optimizer,
        # Results stay the same only with a whole head.
        "budget": None if best.budget is None else f"{best.budget},chunk_head=false",
        **{SETTINGS_OF.get(size, size): value for size, value in sizes.items()},
    }
    kept = {key: value for key, value in chosen.items() if value is not None and usual.get(key) != value}
    return {**kept, **({"model_options": options} if options else {})}


def _flags(settings: Mapping[str, Any]) -> Iterator[str]:
    for key, value in settings.items():
        flag = f"--{key.replace('_', '-')}"
        if key == "model_options":
            yield from (f"--model-option {shlex.quote(f'{name}={option}')}" for name, option in value.items())
        else:
            yield f"{flag} {shlex.quote(str(value))}"


def _print_trials(rows: Sequence[LayoutRow], found: Sequence[Trial | str]) -> None:
    """Prints what was measured beside what was predicted."""
    table = _table("tried", ("layout", "s of a step", "predicted", "MiB of a rank", "estimated"))
    for row, each in zip(rows, found):
        if isinstance(each, str):
            table.add_row(Text(f"{row.layout}: {each}"))
            continue
        mib = (f"{value / 2**20:.0f}" for value in (each.peak, row.peak))
        table.add_row(Text(str(row.layout)), f"{each.seconds:.4g}", f"{row.seconds:.4g}", *mib)
    console_for_tables(WIDTH).print(table)


def choose(
    rows: Sequence[LayoutRow],
    most: int,
    settings_for: Callable[[LayoutRow], dict[str, Any]],
    memory: int,
    say: Callable[[str], None],
) -> tuple[LayoutRow, list[LayoutRow], list[Trial | str]]:
    """The best layout, those that were tried, and what was found: some that are hardly slower than the fastest by prediction.

    Args:
        rows: all layouts, of which the first one fits.
        most: layouts to try at most.
        settings_for: gives their settings.
    """
    from hvd_ckpt.app.training.trial import compared

    worth = [row for row in rows if row.fits and row.seconds <= AS_FAST * rows[0].seconds][:most]
    found = compared(
        [settings_for(row) for row in worth],
        [row.unrecorded for row in worth],
        memory,
        lambda settings: say("trying " + " ".join(_flags(settings))),
        steps=round(min(max(TIMED_SECONDS / rows[0].seconds, 6), 24)),
    )
    within = [
        (each.seconds, number)
        for number, each in enumerate(found)
        if not isinstance(each, str) and each.peak <= memory
    ]
    return worth[min(within, default=(0.0, 0))[1]], worth, found


def _write(file: Path, settings: dict[str, Any], rows: Sequence[LayoutRow], job: Job) -> None:
    import yaml

    try:
        write_text(yaml.safe_dump(settings, sort_keys=False), file)
    except OSError as error:
        raise BadArgument(f"--output {file}: {error.strerror}") from None
    click.echo(f"Settings: {file}")
    try:
        _draw(file.with_suffix(".png"), rows, job)
    except ImportError as error:
        say_no_pictures(error)
    else:
        click.echo(f"Picture: {file.with_suffix('.png')}")


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
