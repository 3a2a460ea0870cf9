"""The worker of ``python -m benchmarks faults``: one run of each case, by its seed.

``kill`` has the kill test, ``save`` the save test, ``soak`` the leak test. ``job`` observes ``hvd-ckpt train`` from outside, and
``checks`` looks into the snapshots that it leaves.
"""

from __future__ import annotations

from pathlib import Path

from faults.kill import KillTest, kill_run
from faults.save import PHASES, SaveTest
from faults.soak import soak

from benchmarks.case import Case
from benchmarks.worker import Found, MeasuredJob


def measure(job: MeasuredJob) -> list[Found]:
    """What comes of each case: how many of how many are right, and lines about the others."""
    found = {"kill": _kill, "save": _save, "soak": _soak}
    return [found[case.engine](case, job.folder, case.sizes["seed"] + job.seed) for case in job.cases]


def _kill(case: Case, folder: Path, seed: int) -> Found:
    settings = {
        name: case.sizes[name] for name in ("stages", "tensor", "replicas", "elastic") if name in case.sizes
    }
    killed = kill_run(KillTest(folder.parent / case.workload, **settings), seed, case.np, case.controller)
    return {
        "count": 1,
        "right_count": int(killed.sound),
        "kills_count": len(killed.kills),
        "writing_count": sum(kill["writing"] for kill in killed.kills),
        "remarks": [f"seed {seed}: {fault}" for fault in killed.faults],
    }


def _save(case: Case, folder: Path, seed: int) -> Found:
    test = SaveTest(folder, seed)
    kills = [test.kill(number) for number in range(case.sizes["saves"])]
    wrong = [kill for kill in kills if kill.fault]
    return {
        "count": len(kills),
        "right_count": len(kills) - len(wrong),
        "kills_count": len(kills),
        "writing_count": sum(kill.phase in PHASES[:-1] for kill in kills),
        "remarks": [f"seed {seed}, kill {kill.number}, {kill.phase}: {kill.fault}" for kill in wrong],
    }


def _soak(case: Case, folder: Path, seed: int) -> Found:
    soaked = soak(case.sizes["minutes"], case.controller, folder)
    return {"count": 1, "right_count": int(soaked.sound), "remarks": soaked.remarks}
