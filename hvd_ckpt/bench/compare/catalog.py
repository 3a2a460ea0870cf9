"""The catalogue of everything that can be trained: workloads, scenarios, and scenarios in pipeline stages."""

from __future__ import annotations

from hvd_ckpt.bench.compare.cells import Settings
from hvd_ckpt.bench.compare.scenarios import SCENARIOS
from hvd_ckpt.bench.compare.stages import STAGED
from hvd_ckpt.bench.compare.workloads import WORKLOADS, Workload

IN_STAGES = "stages-"  # begins the names of scenarios in stages, some of which are those of other scenarios
CATALOG: dict[str, type[Workload]] = {
    **WORKLOADS,
    **SCENARIOS,
    **{f"{IN_STAGES}{name}": kind for name, kind in STAGED.items()},
}


def make_workload(name: str, settings: Settings) -> Workload:
    """The workload or scenario of that name."""
    return CATALOG[name](settings.scale, settings.seed, settings.text)
