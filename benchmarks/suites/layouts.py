"""The choice of ``hvd-ckpt layout`` beside all other layouts that fit, each of which is trained for a few steps."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import Any

from benchmarks.case import Case
from benchmarks.suite import Axis, Suite
from benchmarks.suites.scale_on_hosts import hosts, on_hosts
from benchmarks.worker import Found, MeasuredJob
from hvd_ckpt.app.cli.layout import TRIED, choose, job_of, settings_of
from hvd_ckpt.app.compare.runner.report import Column
from hvd_ckpt.app.training.trial import Trial, temporary_folder, trial
from hvd_ckpt.planning import kinds
from hvd_ckpt.prediction.layouts import Job as Layouts
from hvd_ckpt.prediction.training_layout import LayoutRow

STEPS = 20  # of these trials
AGAIN = 4  # layouts that are measured again in turn, the fastest ones
TOO_LARGE = 4  # layouts that are trained although they are called too large, those that need least
SECONDS_PER_KIND = 0.4  # of timing for a plan; each layout needs its own


class Sweep:
    """All layouts of one workload on these ranks.

    Args:
        stack: keeps the folder of its plans.

    Attributes:
        seconds: in which links and computation were measured.
    """

    def __init__(self, job: MeasuredJob, case: Case, stack: contextlib.ExitStack) -> None:
        sizes = dict(case.sizes)
        self._name, batch = sizes.pop("model"), sizes.pop("batch")
        self._sizes, self._job = sizes, job
        start = time.perf_counter()
        self._layouts: Layouts = job_of(self._name, sizes, {}, 1 << 62, {}, job.device, print, batch=batch)
        rows = self._layouts.rows()
        self.seconds = time.perf_counter() - start
        self._plans = stack.enter_context(temporary_folder())
        self._most = max(row.peak for row in rows)
        self._least = dataclasses.replace(self._layouts, memory=1).rows()[0].peak
        self._known: dict[str, list[Trial | str]] = {}

    def run(self, share: float) -> Found:
        """What comes of a memory: a share of the way from what the leanest layout needs to what all layouts have at most."""
        memory = round(self._least + share * (self._most - self._least))
        layouts = dataclasses.replace(self._layouts, memory=memory)
        rows = layouts.rows()
        fit = [row for row in rows if row.fits]
        start = time.perf_counter()
        chosen, _, _ = choose(rows, TRIED, self._settings, memory, print)
        choosing = self.seconds + time.perf_counter() - start
        # Horovod starts anew for other stages and parts.
        for row in sorted(fit, key=lambda row: (row.layout.stages, row.layout.tensor)):
            self._try(row)
        ran = sorted((row for row in fit if self._of(row)), key=lambda row: self._fastest(row))
        again = {id(row): row for row in [*ran[:AGAIN], chosen]}.values()
        for number in range(self._job.steps):
            for row in again if number % 2 else reversed([*again]):
                self._try(row, STEPS)
        # With a little more than the least budget, since plans are measured.
        larger = [
            dataclasses.replace(row, budget=round(1.03 * (row.budget or 0)))
            for row in rows[len(fit) : len(fit) + TOO_LARGE]
        ]
        for row in larger:
            self._try(row)
        needs = [peak for row in larger if (peak := max((each.peak for each in self._of(row)), default=0))]
        best = min(again, key=self._fastest)
        return {
            "memory_bytes": memory,
            "chosen": str(chosen.layout),
            "best": str(best.layout),
            "of_best": self._fastest(chosen) / self._fastest(best),
            "of_memory": max(each.peak for each in self._of(chosen)) / memory,
            "layouts": len(fit),
            "too_large": f"{sum(peak > memory for peak in needs)} of {len(needs)}",
            "predicted": str(fit[0].layout),
            "of_predicted": self._fastest(fit[0]) / self._fastest(best),
            "choosing": choosing,
            "rows": [self._described(row) for row in [*fit, *larger]],
        }

    def _try(self, row: LayoutRow, again: int = 0) -> None:
        settings = self._settings(row)
        runs = self._known.setdefault(str(settings), [])
        if again or not runs:
            print(row, flush=True)
            try:
                found = trial(settings, again or 6, self._plans)
                runs.append(found._replace(peak=found.peak + row.unrecorded))
            except ValueError as error:
                runs.append(str(error))
            print(runs[-1], flush=True)

    def _runs(self, row: LayoutRow) -> list[Trial | str]:
        return self._known[str(self._settings(row))]

    def _settings(self, row: LayoutRow) -> dict[str, Any]:
        return settings_of(self._name, self._sizes, {}, row, self._layouts)

    def _of(self, row: LayoutRow) -> list[Trial]:
        return [each for each in self._runs(row) if isinstance(each, Trial)]

    def _fastest(self, row: LayoutRow) -> float:
        # Other work on a machine makes a step slower, never faster.
        return min((each.seconds for each in self._of(row)), default=float("inf"))

    def _described(self, row: LayoutRow) -> list[Any]:
        runs = self._runs(row)
        return [str(row.layout), row.seconds, row.peak, row.recomputing, row.limit, row.budget, runs]


def measure(job: MeasuredJob) -> list[Found]:
    """What comes of each case."""
    kinds._SECONDS_PER_KIND = SECONDS_PER_KIND
    sweeps: dict[str, Sweep] = {}
    found = []
    with contextlib.ExitStack() as stack:
        for case in job.cases:
            if case.workload not in sweeps:
                sweeps[case.workload] = Sweep(job, case, stack)
            found.append(sweeps[case.workload].run(case.at["memory"]))
    return found


def figure(title: str, name: str, form: Any = "", left: bool = False) -> Column:
    """A figure that all ranks have found."""
    return Column(title, lambda row: row.over(name), form, key=name, left=left)


layouts = Suite(
    name="layouts",
    title="The chosen layout beside all others",
    help="""Train with every layout that fits a memory, and compare the one that `hvd-ckpt layout` chooses with the fastest.

    Memories lie between what the leanest layout needs and what all layouts have at most. With --link, the ranks are on hosts with
    slow links, as root on Linux. Run it on a machine that does nothing else.
    """,
    engines=("layout",),
    workloads={"gpt": "", "bert": "", "densenet": ""},
    columns=(
        figure("MiB", "memory_bytes", lambda value: f"{value / 2**20:.0f}"),
        figure("layouts", "layouts"),
        figure("chosen", "chosen", left=True),
        figure("best", "best", left=True),
        figure("of best", "of_best", ".2f"),
        figure("predicted", "of_predicted", ".2f"),
        figure("of memory", "of_memory", ".2f"),
        figure("too large", "too_large"),
        figure("choosing s", "choosing", ".0f"),
    ),
    axes={
        "memory": Axis("Of each rank.", {"roomy": 1.05, "half": 0.5, "floor": 0.08}),
        "link": Axis("Mbit/s of a host.", {"none": 0, "1000": 1000, "100": 100}, "none"),
    },
    options=lambda case: {},
    sizes={
        "gpt": {"model": "gpt-tiny", "batch": 16, "length": 64},
        "bert": {"model": "bert-tiny", "batch": 16, "length": 64},
        "densenet": {"model": "densenet-22", "batch": 32, "pixels": 16},
    },
    quick_sizes={
        name: {"model": "gpt-tiny", "batch": 2, "length": 8} for name in ("gpt", "bert", "densenet")
    },
    controllers="gloo,mpi",
    rounds=3,
    quick={"np": "2", "controller": "gloo", "workloads": "gpt", "memory": "floor", "rounds": 1},
    together=True,
    timed=False,
    within=lambda case: hosts(case) if case.at["link"] else (),
    launcher=lambda case: on_hosts(case) if case.at["link"] else [],
    worker="benchmarks.suites.layouts:measure",
    notes=(
        "of best: seconds of a step of the chosen layout as a ratio to those of the fastest, each the least of several runs in "
        "turn. predicted: the same of the layout that is fastest by prediction, without trials. of memory: its measured peak as a "
        "ratio to the memory.",
        "too large: of the layouts that need least beyond the memory by the estimate, those whose measured peak is beyond it. "
        "choosing s: of `hvd-ckpt layout`.",
    ),
)
