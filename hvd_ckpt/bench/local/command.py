"""``hvd-ckpt bench local``: local SGD and DiLoCo beside synchronous training.

Exit status 0 if every job ran, 1 if not, 2 for a bad argument.
"""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from hvd_ckpt.app.cli.command_line import split_names
from hvd_ckpt.bench.harness.jobs import JobError, RankJob, run_job
from hvd_ckpt.bench.harness.options import (
    BenchRun,
    bench_command,
    count_option,
    quick_option,
    timeout_option,
    whole_numbers,
)
from hvd_ckpt.bench.harness.report import Report, Table, machine_facts, save_figure, shown
from hvd_ckpt.bench.harness.stats import quartiles_of_ratios

FULL, QUICK = {"width": 128, "layers": 2, "length": 32}, {"width": 16, "layers": 1, "length": 16}
BATCH, LR = 4, 1e-3
BASE = "synchronous"
LOSSES = (
    "ranks", "method", "validation loss", "spread", "to synchronous", "sent KiB a step", "of synchronous"
)  # fmt: skip
SPEED = ("ranks", "method", "tokens/s", "speed-up", "on the link", "speed-up on the link")
NOTES = (
    "validation loss: of the mean of the ranks' weights after the last step, mean over seeds; spread: the largest minus the "
    "smallest. All methods see the same tokens in the same order.",
    "sent: bytes that each rank hands to the network for gradients or averages, in the mean over all steps of a run; of an "
    "allreduce the 2 (n - 1) / n of its bytes that a ring sends.",
    "tokens/s: of all ranks, without evaluations. Speed-up: to the synchronous job of the same seed, median.",
)


@dataclass(frozen=True)
class Method:
    """A way to train on several ranks.

    Attributes:
        title: for people.
        every: steps between two averages; 0 reduces the gradients of every step.
        outer: with Nesterov momentum, as DiLoCo.
        fragments, delay, wire: as in :func:`hvd_ckpt.LocalSGD`.
        of: the package whose implementation it is, with ``torch.distributed`` over Gloo; None for this one's.
    """

    title: str
    every: int = 0
    outer: bool = False
    fragments: int = 1
    delay: int = 0
    wire: str = "fp32"
    of: str | None = None


METHODS: dict[str, Method] = {
    "synchronous": Method("synchronous"),
    "local-10": Method("local SGD, every 10", 10),
    "local-50": Method("local SGD, every 50", 50),
    "torch-50": Method("PyTorch's PeriodicModelAverager, 50", 50, of="torch"),
    "diloco-10": Method("DiLoCo, every 10", 10, True),
    "diloco-50": Method("DiLoCo, every 50", 50, True),
    "diloco-100": Method("DiLoCo, every 100", 100, True),
    "torchft-50": Method("DiLoCo of torchft, every 50", 50, True, of="torchft"),
    "fragments-50": Method("DiLoCo, every 50, 4 fragments, delay 5", 50, True, 4, 5),
    "int8-50": Method("DiLoCo, every 50, int8", 50, True, wire="int8"),
}


@dataclass(frozen=True)
class LocalJob(RankJob):
    """Runs of several methods, one after the other.

    Attributes:
        methods: names in :data:`METHODS`, in the order in which they run.
        text: a file, or None for the source text of the Python standard library.
        seed: of weights and order of samples.
        steps: of each rank.
        evaluations: evenly spread over the steps, besides one before the first; 0 for none.
        batch: samples of each rank in a step.
        length: tokens of a sample.
        width, layers: of the GPT.
        lr: of AdamW, after a short warm-up, with a cosine decay.
        outer_lr, outer_momentum: of DiLoCo.
    """

    worker = "hvd_ckpt.bench.local.worker"

    methods: tuple[str, ...]
    text: str | None
    seed: int
    steps: int
    evaluations: int
    batch: int
    length: int
    width: int
    layers: int
    lr: float
    outer_lr: float
    outer_momentum: float


@dataclass
class MethodResult:
    """What one rank has found out about a method.

    Attributes:
        tokens: of all ranks in a step.
        points: steps taken at each evaluation.
        losses: over the validation split, with the mean of the ranks' weights.
        seconds: of all steps but the first ones, from a barrier to a barrier, without evaluations.
        timed: these steps.
        sent: bytes that this rank hands to the network for gradients or averages, in all steps.
    """

    tokens: int
    points: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    timed: int = 0
    sent: int = 0


@dataclass
class Case:
    """One method on one number of ranks.

    Attributes:
        curves: validation losses at :attr:`points`, for each seed.
        points: tokens of all ranks at each evaluation.
        rates: tokens a second, for each seed.
        sent: bytes of a rank in a step.
        on_link: tokens a second on the slow link.
    """

    size: int
    method: str
    curves: list[list[float]] = field(default_factory=list)
    points: list[int] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    sent: float = 0.0
    on_link: float | None = None

    def add(self, steps: int, ranks: Sequence[MethodResult]) -> None:
        """Adds the results of a run."""
        tokens = ranks[0].tokens
        self.curves.append(ranks[0].losses)
        self.points = [step * tokens for step in ranks[0].points]
        self.rates.append(_rate(ranks))
        self.sent = max(rank.sent for rank in ranks) / steps

    @property
    def final(self) -> list[float]:
        """The last loss of each seed."""
        return [curve[-1] for curve in self.curves]

    def losses_row(self, base: Case | None) -> tuple[str, ...]:
        """The entries of the first table."""
        first = (str(self.size), METHODS[self.method].title)
        if not self.curves:
            return (*first, *["-"] * (len(LOSSES) - 2))
        mean, spread = statistics.fmean(self.final), max(self.final) - min(self.final)
        known = base if base is not None and base.curves else None
        to_base = "-" if known is None else f"{mean / statistics.fmean(known.final) - 1:+.1%}"
        of_base = "-" if known is None or not self.sent else f"1/{known.sent / self.sent:.0f}"
        return (*first, f"{mean:.4f}", f"{spread:.4f}", to_base, f"{self.sent / 1024:,.1f}", of_base)

    def speed_row(self, base: Case | None) -> tuple[str, ...]:
        """The entries of the second table."""
        first = (str(self.size), METHODS[self.method].title)
        if not self.curves:
            return (*first, *["-"] * (len(SPEED) - 2))
        ratio = None if base is None else quartiles_of_ratios(self.rates, base.rates)
        slow = None if base is None else base.on_link
        return (
            *first,
            f"{statistics.median(self.rates):,.0f}",
            shown(ratio, ".2f"),
            shown(self.on_link, ",.0f"),
            shown(self.on_link / slow if self.on_link and slow else None, ".1f"),
        )


def _rate(ranks: Sequence[MethodResult]) -> float:
    return ranks[0].tokens * ranks[0].timed / max(rank.seconds for rank in ranks)


@bench_command("local")
@click.option("--np", "sizes", help="Numbers of ranks.  [default: 2,4; with --quick 2]")
@click.option(
    "--methods",
    help=f"Ways to train.  [default: {','.join(METHODS)}, without those of packages that are missing]",
)
@count_option("--seeds", help="Runs of each method, alternating.", default=3, quick=1)
@count_option("--steps", help="Of each rank.", default=800, quick=20)
@click.option("--text", metavar="FILE", help="Training text.  [default: the source text of Python's library]")
@click.option(
    "--link",
    type=click.IntRange(0),
    default=100,
    show_default=True,
    help="Also time steps on a link of so many Mbit/s; 0 for none.",
)
@count_option("--link-steps", help="Steps on the slow link.", default=100, quick=20)
@click.option(
    "--outer-lr", type=click.FloatRange(0, min_open=True), default=0.7, show_default=True, help="Of DiLoCo."
)
@click.option(
    "--outer-momentum",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.7,
    show_default=True,
    help="Of DiLoCo.",
)
@quick_option("A tiny model and few steps: whether it works, not how good or fast it is.")
@timeout_option(1800)
def local(
    run: BenchRun,
    sizes: str | None,
    methods: str | None,
    seeds: int,
    steps: int,
    text: str | None,
    link: int,
    link_steps: int,
    outer_lr: float,
    outer_momentum: float,
    quick: bool,
    timeout: float,
) -> None:
    """Train a GPT on text synchronously, with local SGD and with DiLoCo, and compare losses, bytes and speed.

    Every method sees the same tokens. On Linux, as root, steps are also timed with the loopback network throttled, in a network
    namespace of its own, so that each rank sends at the rate of a slow link.
    """
    numbers = whole_numbers("--np", sizes or ("2" if quick else "2,4"), "ranks")
    names = (
        [name for name, one in METHODS.items() if one.of is None or find_spec(one.of) is not None]
        if methods is None
        else split_names("--methods", methods, known=tuple(METHODS))
    )
    settings: dict[str, Any] = {
        "text": None if text is None else str(Path(text).resolve()),
        "steps": steps,
        "evaluations": min(2 if quick else 6, steps),
        "batch": BATCH,
        **(QUICK if quick else FULL),
        "lr": LR,
        "outer_lr": outer_lr,
        "outer_momentum": outer_momentum,
    }
    throttled = link > 0 and can_throttle()
    cases = {(size, name): Case(size, name) for size in numbers for name in names}
    failures: list[str] = []
    report = functools.partial(
        make_report, list(cases.values()), {**settings, "seeds": seeds, "link": link}, throttled, failures
    )
    kinds = [*range(seeds), *([None] if throttled else [])]
    with run.progress(len(numbers) * len(kinds)) as progress:
        for size, seed in itertools.product(numbers, kinds):
            progress.start(f"{size} ranks, {f'{link} Mbit/s' if seed is None else f'seed {seed}'}")
            of_job = {
                **settings,
                **({"steps": link_steps, "evaluations": 0} if seed is None else {}),
            }
            order = tuple(names[::-1] if seed and seed % 2 else names)
            folder = run.jobs / f"np{size}-{'link' if seed is None else seed}"
            job = LocalJob(folder, size, order, seed=seed or 0, **of_job)
            try:
                within = throttle(size * link) if seed is None else ()
                ranks = run_job(job, dict[str, MethodResult], "gloo", timeout, threads=1, within=within)
            except JobError as error:
                failures.append(f"{folder.name}: {error}")
                continue
            for name in names:
                found = [rank[name] for rank in ranks]
                if seed is None:
                    cases[size, name].on_link = _rate(found)
                else:
                    cases[size, name].add(steps, found)
            run.save(report())
    run.finish(report(), success=not failures)


def throttle(megabits: int) -> list[str]:
    """The words of a command within which the loopback network passes so many Mbit/s in all, whichever ranks send."""
    script = (
        f"ip link set lo mtu 9000 up && tc qdisc add dev lo root tbf rate {megabits}mbit burst 128kb limit 8mb && "
        'exec "$@"'
    )
    return ["unshare", "--net", "sh", "-c", script, "sh"]


def can_throttle() -> bool:
    """Whether this machine and this user can."""
    if os.geteuid() != 0 or any(shutil.which(tool) is None for tool in ("unshare", "ip", "tc")):
        return False
    return subprocess.run([*throttle(100), "true"], capture_output=True, check=False).returncode == 0


def make_report(
    cases: Sequence[Case], settings: dict[str, Any], throttled: bool, failures: Sequence[str]
) -> Report:
    """The report of the cases so far."""
    base = {case.size: case for case in cases if case.method == BASE}
    link = (
        f"each rank sends at most {settings['link']} Mbit/s: the loopback network of a network namespace passes as many times "
        "that as there are ranks"
    )
    facts = machine_facts(1, settings)
    facts["link"] = (
        link if throttled else "none: throttling needs Linux, root and the commands unshare, ip and tc"
    )
    return Report(
        "Local SGD beside synchronous training",
        facts,
        [
            Table(
                LOSSES,
                [case.losses_row(base.get(case.size)) for case in cases],
                "Losses and bytes",
                LOSSES[:2],
                folded=1,
            ),
            Table(
                SPEED, [case.speed_row(base.get(case.size)) for case in cases], "Speed", SPEED[:2], folded=1
            ),
        ],
        cases,
        remarks=list(failures),
        notes=NOTES,
        settings=settings,
        draw=lambda folder: draw(cases, folder),
    )


def draw(cases: Sequence[Case], folder: Path) -> list[str]:
    """Validation loss by tokens, and by seconds on the slow link where that was timed: a picture for each number of ranks."""
    from matplotlib.figure import Figure

    files = []
    for size in sorted({case.size for case in cases}):
        shown = [case for case in cases if case.size == size and case.curves]
        timed = [case for case in shown if case.on_link]
        panels = 2 if timed else 1
        figure = Figure(figsize=(6.5 * panels, 4.5))
        axes: Any = figure.subplots(1, panels, squeeze=False, sharey=True)[0]
        for number, case in enumerate(shown):
            means = [statistics.fmean(losses) for losses in zip(*case.curves)][1:]
            points = case.points[1:]  # without the untrained model, beside which all others are alike
            style = {"label": METHODS[case.method].title, "color": f"C{number}"}
            axes[0].plot([point / 1e6 for point in points], means, **style)
            if case.on_link:
                axes[1].plot([point / case.on_link for point in points], means, **style)
        axes[0].set_xlabel("million tokens")
        axes[0].set_ylabel("validation loss")
        axes[0].legend(fontsize=8)
        if timed:
            axes[1].set_xscale("log")
            axes[1].set_xlabel("seconds on the slow link (logarithmic)")
        figure.suptitle(f"{size} ranks, mean over seeds")
        files.append(save_figure(figure, folder / f"losses-np{size}.png"))
    return files
