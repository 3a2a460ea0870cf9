"""``hvd-ckpt compare``: options, progress, table, exit status.

Exit status 0 if the judged engine (this library) is right in every cell, 1 if it is not, 2 for a bad argument or where
nothing can be compared.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hvd_ckpt.app.cli.command_line import BadArgument, check_controller, split_names
from hvd_ckpt.bench.harness.options import BenchRun, bench_command
from hvd_ckpt.bench.harness.settings import (
    CONTROLLERS,
    BenchSettings,
    check_devices,
    device_setting,
    quick_setting,
    setting,
    whole_numbers,
)
from hvd_ckpt.utils.extras import explain_import_error

if TYPE_CHECKING:
    from hvd_ckpt.bench.compare.comparison import Comparison
    from hvd_ckpt.bench.compare.launch import Event

ENGINES = "hvd_ckpt,horovod,horovod-groups,ddp,ddp-find-unused,ddp-static,apex"
WORKLOADS = "densenet,bert"
SCENARIOS = (
    "plain,tied,nested,unused,unused-on-one-rank,accumulation,short-last-group,frozen,changing-graph,two-forwards,no-grad-forward,"
    "explicit-parameters,mixed-dtypes,overflow-on-one-rank,uneven-data,sparse"
)
VARIANTS = "none,reentrant,non-reentrant,explicit"
PRECISIONS = ("fp32", "fp16", "bf16", "apex-O1")
SUBJECT = "hvd_ckpt"
STAGES_SECONDS = 20.0  # without a step
WIDTH = 150  # of the table where the output is not a terminal
NOTHING = "nothing"  # in place of a list of workloads or scenarios


@dataclass(frozen=True)
class Preset:
    """The options that a scale sets where they are not given."""

    steps: int
    passes: int
    chunks: str
    timeout: float


PRESETS = {
    "quick": Preset(steps=4, passes=1, chunks="2", timeout=60),
    "default": Preset(steps=4, passes=1, chunks="1,2,4", timeout=90),
    "full": Preset(steps=5, passes=2, chunks="1,2,4", timeout=900),
}


@dataclass(frozen=True)
class CompareSettings(BenchSettings):
    """The options, as they are given."""

    size: int = setting("Ranks.", 2, note="NP, else 2", flag="np", envvar="NP")
    controller: str = setting(
        "What the ranks communicate through.", "auto", type=click.Choice(["auto", *CONTROLLERS])
    )
    engines: str = setting("Engines, or module:Class of your own.", ENGINES)
    workloads: str = setting("Models on real data, or 'nothing'.", WORKLOADS)
    scenarios: str = setting("Small hard models, or 'nothing'.", SCENARIOS)
    variants: str = setting("Ways to recompute.", VARIANTS)
    chunks: str | None = setting("Numbers of segments.", note="1,2,4; with --quick 2")
    budget: str | None = setting(
        "Plan what is recomputed, too: 6GiB, 0.5x of keeping everything, 80% of the device, min or fastest."
    )
    steps: int | None = setting(
        "Steps of each training run.", note="4; with --full 5", type=click.IntRange(1)
    )
    passes: int | None = setting(
        "Timed jobs per engine, alternating.", note="1; with --full 2", type=click.IntRange(0)
    )
    precision: str = setting("Of the training.", "fp32", type=click.Choice(PRECISIONS))
    device: str = device_setting()
    stages: int | None = setting(
        "Instead, small hard models in so many pipeline stages, beside torch.distributed.pipelining.",
        type=click.IntRange(2, 8),
    )
    tensor: int | None = setting(
        "Instead, small hard models in so many parts of each layer, beside PyTorch's parallelize_module.",
        type=click.Choice([2, 4, 8]),
    )
    quick: bool = quick_setting("Tiny models, two segments, one timed pass.")
    full: bool = setting("DenseNet-264 and BERT-base instead of small ones.", False)
    text: str | None = setting("Text to learn instead of Python's own source.", metavar="FILE")
    seed: int = setting("Of weights, batches and dropout.", 1, type=click.IntRange(0))
    timeout: float | None = setting("Seconds without a step that count as a hang.", type=click.FloatRange(1))
    subject: str = setting("The engine that must be right for exit status 0.", SUBJECT)

    def check(self) -> None:
        if self.quick and self.full:
            raise BadArgument("--quick and --full exclude each other: give one")
        if self.stages and self.tensor:
            raise BadArgument("--stages and --tensor are comparisons of their own: give one")

    @property
    def scale(self) -> str:
        """The name of the preset."""
        return "quick" if self.quick else "full" if self.full else "default"

    def comparison(self, run: BenchRun) -> Comparison:
        """The comparison of engines that reduce gradients.

        Raises:
            BadArgument: an option is wrong, or options do not go together.
        """
        from hvd_ckpt.bench.compare.cells import Settings, make_cells
        from hvd_ckpt.bench.compare.comparison import Comparison
        from hvd_ckpt.bench.harness.engines import find_engine
        from hvd_ckpt.processes.runtime import threads_per_rank

        scale, preset = self.scale, PRESETS[self.scale]
        engines = split_names("--engines", self.engines, find=find_engine)
        if self.subject not in engines:
            raise BadArgument(
                f"--subject {self.subject} is not among the engines {', '.join(engines)}: add it, or judge another"
            )
        text = self._text()
        check_devices(self.device, self.size)
        _check_precision(self.precision)
        variants = split_names("--variants", self.variants, VARIANTS.split(","))
        if self.budget is not None:
            _check_budget(self.budget, engines)
        chosen = self._trained(variants)
        cells = make_cells(chosen, whole_numbers("--chunks", self.chunks or preset.chunks, "segments"))
        if not cells:
            raise BadArgument(
                f"there is nothing to compare: --workloads {self.workloads} and --scenarios {self.scenarios} have no "
                f"--variants {self.variants} in --precision {self.precision}"
            )
        return Comparison(
            engines=engines,
            cells=tuple(cells),
            subject=self.subject,
            size=self.size,
            controller=check_controller(self.controller),
            threads=threads_per_rank(self.size),
            passes=preset.passes if self.passes is None else self.passes,
            settings=Settings(
                self.steps or preset.steps,
                self.seed,
                scale,
                text,
                precision=self.precision,
                device=self.device,
            ),
            timeout=self.timeout or preset.timeout,
            folder=run.jobs,
        )

    def comparison_of_stages(self, run: BenchRun) -> Comparison:
        """The comparison of engines that train in pipeline stages, or in parts of layers.

        Raises:
            BadArgument: as :meth:`comparison`.
        """
        from hvd_ckpt.bench.compare.catalog import PARTS, STAGES
        from hvd_ckpt.bench.compare.cells import Settings, make_cells
        from hvd_ckpt.bench.compare.comparison import Comparison
        from hvd_ckpt.bench.compare.parts import IN_PARTS, PART_ENGINES, InParts
        from hvd_ckpt.bench.compare.stage_engines import STAGE_ENGINES
        from hvd_ckpt.bench.compare.stages import SCHEDULES, STAGED

        scale, size = self.scale, self.stages or self.tensor
        assert size is not None
        if self.device != "cpu":
            option = "--stages" if self.stages else "--tensor"
            raise BadArgument(f"--device {self.device}: {option} compares on CPUs: leave it out")
        begin, known, kinds, variants = (
            (STAGES, STAGED, STAGE_ENGINES, SCHEDULES)
            if self.stages
            else (PARTS, IN_PARTS, PART_ENGINES, InParts.variants)
        )
        names = known if self.scenarios == SCENARIOS else split_names("--scenarios", self.scenarios, known)
        engines = [engine for engine in kinds if engine.unavailable() is None]
        paths = [f"{engine.__module__}:{engine.__name__}" for engine in engines]
        return Comparison(
            engines=tuple(paths),
            cells=tuple(make_cells({f"{begin}{name}": variants for name in names}, (2,))),
            subject=paths[0],
            size=size,
            controller=check_controller(self.controller),
            threads=1,
            passes=0,
            settings=Settings(self.steps or PRESETS[scale].steps, self.seed),
            timeout=self.timeout or STAGES_SECONDS,
            folder=run.jobs,
        )

    def _text(self) -> str | None:
        from hvd_ckpt.app.datasets.tokens import find_text_files

        if self.text is None:
            return None
        try:
            find_text_files(self.text)
        except ValueError as error:
            raise BadArgument(f"--text: {error}") from None
        return str(Path(self.text).resolve())

    def _trained(self, variants: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
        """What is trained, and for each the variants that mean something for it."""
        from hvd_ckpt.bench.compare.catalog import CATALOG
        from hvd_ckpt.bench.compare.cells import PLAN

        names = [
            *split_names("--workloads", self.workloads, (*WORKLOADS.split(","), NOTHING)),
            *split_names("--scenarios", self.scenarios, (*SCENARIOS.split(","), NOTHING)),
        ]
        planned = () if self.budget is None else (f"{PLAN}{self.budget.strip()}",)
        chosen = {}
        for name in names:
            if name != NOTHING:
                kind = CATALOG[name]
                _check_packages(name, kind.requires)
                if kind.precisions is None or self.precision in kind.precisions:
                    own = tuple(variant for variant in variants if variant in kind.variants)
                    chosen[name] = own + planned * kind.plannable
        return chosen


@bench_command("compare", width=WIDTH, group="", settings=CompareSettings)
def compare(run: BenchRun, settings: CompareSettings) -> None:
    """Train real workloads and small hard ones with each engine and each way to recompute, and compare with one process.

    Reports for each: are all ranks' weights equal, do they equal the reference, do runs repeat bit for bit, how often and in
    which order gradients are reduced, the time of a step, and the peak memory. The exit status is 0 only if this library
    is right everywhere.
    """
    from hvd_ckpt.bench.compare.comparison import ComparisonError

    staged = settings.stages or settings.tensor
    comparison = settings.comparison_of_stages(run) if staged else settings.comparison(run)
    try:
        with run.progress(comparison.trainings) as progress:

            def show(where: str, event: Event) -> None:
                if event["rank"] == 0:
                    cell = f": {event['cell']}" if "cell" in event else ""
                    progress.show(f"{where}{cell}", int(event["event"] in ("trained", "measured", "timed")))

            report = comparison.run(show)
    except ComparisonError as error:
        raise BadArgument(str(error)) from None
    run.finish(report, report.success)


def _check_budget(budget: str, engines: tuple[str, ...]) -> None:
    from hvd_ckpt.bench.harness.engines import find_engine
    from hvd_ckpt.planning.budget import parse_budget

    try:
        parse_budget(budget)
    except ValueError as error:
        raise BadArgument(f"--budget: {error}") from None
    if not any(find_engine(engine).plans for engine in engines):
        raise BadArgument(
            f"--budget {budget}: none of the engines {', '.join(engines)} has plans: add {SUBJECT} to --engines"
        )


def _check_packages(workload: str, packages: tuple[str, ...]) -> None:
    """Bad argument where a package is missing that a workload needs."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            text = explain_import_error(ModuleNotFoundError(name=package))
            raise BadArgument(f"{workload}: {text or f'{package} is not installed'}")


def _check_precision(precision: str) -> None:
    """Refuse what this machine cannot do."""
    from hvd_ckpt.distributed.precision import apex_unavailable

    if precision.startswith("apex"):
        reason = apex_unavailable()
        if reason is not None:
            raise BadArgument(f"--precision {precision}: {reason}; --precision fp16 needs no Apex")
