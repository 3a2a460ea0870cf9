"""The catalogue of everything that can be trained: workloads, scenarios, and scenarios in pipeline stages and parts of layers."""

from __future__ import annotations

from hvd_ckpt.app.compare.cells import Settings
from hvd_ckpt.app.compare.parts import IN_PARTS
from hvd_ckpt.app.compare.scenarios import SCENARIOS
from hvd_ckpt.app.compare.stages import STAGED
from hvd_ckpt.app.compare.workloads import WORKLOADS, Workload

# The beginnings of names of scenarios in stages and parts, some of which are those of other scenarios.
STAGES, PARTS = "stages-", "parts-"
CATALOG: dict[str, type[Workload]] = {
    **WORKLOADS,
    **SCENARIOS,
    **{f"{STAGES}{name}": kind for name, kind in STAGED.items()},
    **{f"{PARTS}{name}": kind for name, kind in IN_PARTS.items()},
}


def make_workload(name: str, settings: Settings) -> Workload:
    """The workload or scenario of that name."""
    return CATALOG[name](settings.scale, settings.seed, settings.text)
