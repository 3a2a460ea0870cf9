"""The layout that `hvd-ckpt layout` chooses, beside all others."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.case import Case, Found, MeasuredJob
from benchmarks.suites.layouts import MEMORIES
from hvd_ckpt.app.cli.layout import choose, job_of, settings_for
from hvd_ckpt.app.training.config import Config
from hvd_ckpt.app.training.trial import Trial, compared
from hvd_ckpt.planning import kinds
from hvd_ckpt.prediction.layouts import Job as Layouts
from hvd_ckpt.prediction.training_layout import LayoutRow

STEPS = 20  # of trials in the end
AGAIN = 4  # layouts that are measured again in turn, the fastest ones
TOO_LARGE = 4  # layouts that are trained although they are called too large, those that need least
SECONDS_PER_KIND = 0.4  # of timing for a plan; each layout needs its own


def measure(job: MeasuredJob) -> list[Found]:
    """What comes of each case; links and computation are measured once for each workload."""
    kinds._SECONDS_PER_KIND = SECONDS_PER_KIND
    known: dict[str, tuple[Layouts, float]] = {}
    found = []
    for case in job.cases:
        if case.workload not in known:
            start = time.perf_counter()
            config = config_of(case, job.device)
            layouts = job_of(config, config.batch, 1 << 62, None, print)
            known[case.workload] = layouts, time.perf_counter() - start
        found.append(sweep(case, config_of(case, job.device), *known[case.workload]))
    return found


def config_of(case: Case, device: str) -> Config:
    """The settings of a run with the sizes of a case, whose batch is that of all ranks."""
    return Config.make({**case.sizes, "device": device})


def sweep(case: Case, config: Config, layouts: Layouts, measuring: float) -> Found:
    """What comes of a memory: a share of the way from what the leanest layout needs to what all layouts have at most."""

    def settings(row: LayoutRow) -> dict[str, Any]:
        return settings_for(config, row, layouts)

    def tried(rows: Sequence[LayoutRow], steps: int) -> dict[LayoutRow, Trial]:
        # Horovod starts anew for other stages and parts.
        rows = sorted(rows, key=lambda row: (row.layout.stages, row.layout.tensor))
        unrecorded = [row.unrecorded for row in rows]
        trials = compared([settings(row) for row in rows], unrecorded, memory, print, steps)
        return {row: trial for row, trial in zip(rows, trials) if isinstance(trial, Trial)}

    least = dataclasses.replace(layouts, memory=1).rows()[0].peak
    most = max(row.peak for row in layouts.rows())
    memory = round(least + MEMORIES[case.at["memory"]] * (most - least))
    rows = dataclasses.replace(layouts, memory=memory).rows()
    fit = [row for row in rows if row.fits]
    start = time.perf_counter()
    chosen = choose(rows, None, settings, memory, print)[0] or fit[0]
    choosing = measuring + time.perf_counter() - start
    # With a little more than the least budget, since plans are measured.
    larger = [
        dataclasses.replace(row, budget=round(1.03 * (row.budget or 0)))
        for row in rows[len(fit) : len(fit) + TOO_LARGE]
    ]
    found = tried([*fit, *larger], 6)
    ran = sorted((row for row in fit if row in found), key=lambda row: found[row].seconds)
    again = tried(list(dict.fromkeys([*ran[:AGAIN], chosen])), STEPS)
    if chosen not in again:
        return {"failure": f"{chosen.layout} was chosen, and does not run"}
    best = min(again, key=lambda row: again[row].seconds)
    predicted = again.get(fit[0]) or found.get(fit[0])
    needs = [found[row].peak for row in larger if row in found]
    return {
        "memory_bytes": memory,
        "chosen": str(chosen.layout),
        "best": str(best.layout),
        "of_best": again[chosen].seconds / again[best].seconds,
        "of_memory": max(trials[chosen].peak for trials in (found, again)) / memory,
        "layouts": len(fit),
        "too_large": f"{sum(peak > memory for peak in needs)} of {len(needs)}",
        "of_predicted": predicted and predicted.seconds / again[best].seconds,
        "choosing": choosing,
        "rows": [[str(row.layout), row.seconds, row.peak, found.get(row)] for row in [*fit, *larger]],
    }
