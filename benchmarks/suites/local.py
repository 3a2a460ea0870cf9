"""``python -m benchmarks local``: local SGD and DiLoCo beside synchronous training.

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

from hvd_ckpt.app.compare.runner.cases import Column, table_of
from hvd_ckpt.app.compare.runner.jobs import RankJob
from hvd_ckpt.app.compare.runner.options import ONE_THREAD, BenchRun, bench_command
from hvd_ckpt.app.compare.runner.report import Report, save_figure
from hvd_ckpt.app.compare.runner.settings import (
    BenchSettings,
    names_of,
    quick_setting,
    ranks_setting,
    setting,
    text_setting,
    timeout_setting,
)
from hvd_ckpt.app.compare.runner.stats import quartiles_of_ratios

FULL, QUICK = {"width": 128, "layers": 2, "length": 32}, {"width": 16, "layers": 1, "length": 16}
BATCH, LR = 4, 1e-3
BASE = "synchronous"
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
        engine: one of :data:`benchmarks.local_runs.ENGINES`.
        options: of the engine, such as ``every``: steps between two averages.
        outer: with Nesterov momentum, as DiLoCo.
    """

    title: str
    engine: str = "local"
    options: dict[str, Any] = field(default_factory=dict)
    outer: bool = False


def _diloco(title: str, every: int, engine: str = "local", **options: Any) -> Method:
    return Method(title, engine, {"every": every, **options}, outer=True)


METHODS: dict[str, Method] = {
    "synchronous": Method("synchronous", "hvd_ckpt"),
    "local-10": Method("local SGD, every 10", options={"every": 10}),
    "local-50": Method("local SGD, every 50", options={"every": 50}),
    "torch-50": Method("PyTorch's PeriodicModelAverager, 50", "torch", {"every": 50}),
    "diloco-10": _diloco("DiLoCo, every 10", 10),
    "diloco-50": _diloco("DiLoCo, every 50", 50),
    "diloco-100": _diloco("DiLoCo, every 100", 100),
    "torchft-50": _diloco("DiLoCo of torchft, every 50", 50, "torchft"),
    "fragments-50": _diloco("DiLoCo, every 50, 4 fragments, delay 5", 50, fragments=4, delay=5),
    "int8-50": _diloco("DiLoCo, every 50, int8", 50, wire="int8"),
}


def installed_methods() -> list[str]:
    """The methods whose packages are here."""
    missing = {"torchft"} if find_spec("torchft") is None else set()
    return [name for name, method in METHODS.items() if method.engine not in missing]


@dataclass(frozen=True)
class Settings(BenchSettings):
    """What is measured, and how often."""

    sizes: tuple[int, ...] = ranks_setting()
    methods: tuple[str, ...] | None = setting(
        "Ways to train.",
        note=f"{','.join(METHODS)}, without those of packages that are missing",
        type=names_of(METHODS),
    )
    seeds: int = setting("Runs of each method, alternating.", 3, quick=1)
    steps: int = setting("Of each rank.", 800, quick=20)
    text: str | None = text_setting()
    link: int = setting(
        "Also time steps on a link of so many Mbit/s; 0 for none.", 100, type=click.IntRange(0)
    )
    link_steps: int = setting("Steps on the slow link.", 100, quick=20)
    outer_lr: float = setting("Of DiLoCo.", 0.7, type=click.FloatRange(0, min_open=True))
    outer_momentum: float = setting(
        "Of DiLoCo.", 0.7, type=click.FloatRange(0, 1, min_open=True, max_open=True)
    )
    quick: bool = quick_setting("A tiny model and few steps: whether it works, not how good or fast it is.")
    timeout: float = timeout_setting(1800)

    @property
    def evaluations(self) -> int:
        """Evaluations of a run, besides one before the first step."""
        return min(2 if self.quick else 6, self.steps)


@dataclass(frozen=True)
class LocalJob(RankJob):
    """Runs of several methods, one after the other.

    Attributes:
        methods: names in :data:`METHODS`, in the order in which they run.
        seed: of weights and order of samples.
        steps: of each rank.
        evaluations: evenly spread over the steps, besides one before the first; 0 for none.
    """

    worker = "benchmarks.local_runs:measure"

    methods: tuple[str, ...]
    seed: int
    steps: int
    evaluations: int
    settings: Settings


Figures = dict[str, Any]
"""The measurements of a method on one rank: ``losses`` over the validation split, with the mean of the ranks' weights, at
``points``; the ``rate`` in tokens of all ranks a second, without the first steps and evaluations; bytes ``sent`` in a step, which
this rank hands to the network for gradients or averages."""


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

    def add(self, ranks: Sequence[Figures]) -> None:
        """Adds the results of a run."""
        self.curves.append(ranks[0]["losses"])
        self.points = ranks[0]["points"]
        self.rates.append(rate_of(ranks))
        self.sent = max(rank["sent"] for rank in ranks)

    @property
    def final(self) -> list[float]:
        """The last loss of each seed."""
        return [curve[-1] for curve in self.curves]

    @property
    def loss(self) -> float | None:
        """The mean of the last losses."""
        return statistics.fmean(self.final) if self.curves else None


def rate_of(ranks: Sequence[Figures]) -> float:
    """Tokens a second, as the slowest rank has seen it."""
    return float(min(rank["rate"] for rank in ranks))


@bench_command(Settings)
def local(run: BenchRun, settings: Settings) -> None:
    """Train a GPT on text synchronously, with local SGD and with DiLoCo, and compare losses, bytes and speed.

    Every method sees the same tokens. On Linux, as root, steps are also timed with the loopback network throttled, in a network
    namespace of its own, so that each rank sends at the rate of a slow link.
    """
    names = settings.methods or tuple(installed_methods())
    throttled = settings.link > 0 and can_throttle()
    cases = {(size, name): Case(size, name) for size in settings.sizes for name in names}
    run.make_report = functools.partial(make_report, run, settings, list(cases.values()), throttled)
    # None stands for the job on the slow link, which has no evaluations and trains from seed 0.
    seeds = [*range(settings.seeds), *([None] if throttled else [])]
    with run.progress(len(settings.sizes) * len(seeds)) as progress:
        for size, seed in itertools.product(settings.sizes, seeds):
            slow = seed is None
            evaluations = 0 if slow else settings.evaluations
            # Every other seed trains the methods in reverse, so that none is always first on a machine that grows slower.
            order = names[::-1] if seed and seed % 2 else names
            steps = settings.link_steps if slow else settings.steps
            folder = run.jobs / f"np{size}-{'link' if slow else seed}"
            ranks = progress.job(
                f"{size} ranks, {f'{settings.link} Mbit/s' if slow else f'seed {seed}'}",
                LocalJob(folder, size, order, seed or 0, steps, evaluations, settings),
                dict[str, Figures],
                name=folder.name,
                threads=1,
                within=throttle(size * settings.link) if slow else (),
            )
            for name in names if ranks else ():
                results = [rank[name] for rank in ranks]
                if slow:
                    cases[size, name].on_link = rate_of(results)
                else:
                    cases[size, name].add(results)
    run.finish()


def throttle(megabits: int) -> list[str]:
    """The words of a command within which the loopback network passes so many Mbit/s in all, whichever ranks send."""
    script = (
        f"ip link set lo mtu 9000 up && tc qdisc add dev lo root tbf rate {megabits}mbit burst 128kb limit 8mb && "
        'exec "$@"'
    )
    # The last word is the script's $0. The command that follows becomes its "$@".
    return ["unshare", "--net", "sh", "-c", script, "sh"]


def can_throttle() -> bool:
    """Whether this machine and this user can."""
    if os.geteuid() != 0 or any(shutil.which(tool) is None for tool in ("unshare", "ip", "tc")):
        return False
    return subprocess.run([*throttle(100), "true"], capture_output=True, check=False).returncode == 0


def make_report(run: BenchRun, settings: Settings, cases: Sequence[Case], throttled: bool) -> Report:
    """The report of the cases so far."""
    bases = {case.size: case for case in cases if case.method == BASE}

    def base(case: Case) -> Case:
        return bases.get(case.size, Case(case.size, BASE))

    def to_base(case: Case) -> float | None:
        loss, other = case.loss, base(case).loss
        return loss / other - 1 if loss and other else None

    def of_base(case: Case) -> float | None:
        return base(case).sent / case.sent if case.curves and base(case).curves and case.sent else None

    def on_link(case: Case) -> float | None:
        slow = base(case).on_link
        return case.on_link / slow if case.on_link and slow else None

    who = [
        Column("ranks", lambda case: case.size, left=True),
        Column("method", lambda case: METHODS[case.method].title, left=True),
    ]
    losses = [
        *who,
        Column("validation loss", lambda case: case.loss, ".4f"),
        Column("spread", lambda case: max(case.final) - min(case.final) if case.curves else None, ".4f"),
        Column("to synchronous", to_base, "+.1%"),
        Column("sent KiB a step", lambda case: case.sent / 1024 if case.curves else None, ",.1f"),
        Column("of synchronous", of_base, lambda ratio: f"1/{ratio:.0f}"),
    ]
    speed = [
        *who,
        Column("tokens/s", lambda case: statistics.median(case.rates) if case.rates else None, ",.0f"),
        Column("speed-up", lambda case: quartiles_of_ratios(case.rates, base(case).rates), ".2f"),
        Column("on the link", lambda case: case.on_link, ",.0f"),
        Column("speed-up on the link", on_link, ".1f"),
    ]
    tables = [
        table_of(losses, cases, "Losses and bytes", folded=1),
        table_of(speed, cases, "Speed", folded=1),
    ]
    sizes = QUICK if settings.quick else FULL
    fixed = {"evaluations": settings.evaluations, "batch": BATCH, "lr": LR, **sizes}
    facts: dict[str, Any] = {**ONE_THREAD, **fixed}
    facts["link"] = (
        f"each rank sends at most {settings.link} Mbit/s: the loopback network of a network namespace passes as many times "
        "that as there are ranks"
        if throttled
        else "none: throttling needs Linux, root and the commands unshare, ip and tc"
    )
    title, pictures = "Local SGD beside synchronous training", lambda folder: draw(cases, folder)
    report = run.report(title, tables, cases, facts, notes=NOTES, draw=pictures)
    report.settings |= fixed
    return report


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
