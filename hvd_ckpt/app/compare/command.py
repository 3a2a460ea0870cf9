"""``hvd-ckpt compare``: options, progress, table, exit status.

Exit status 0 if the judged engine (this library) is right in every cell, 1 if it is not, 2 for a bad argument or where
nothing can be compared.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from hvd_ckpt.app.cli.command_line import BadArgument, split_names
from hvd_ckpt.app.compare.runner.options import BenchRun, bench_command
from hvd_ckpt.app.compare.runner.settings import (
    BenchSettings,
    check_devices,
    controller_setting,
    device_setting,
    in_words,
    names_of,
    numbers_of,
    quick_setting,
    setting,
    text_setting,
)
from hvd_ckpt.utils.extras import explain_import_error

if TYPE_CHECKING:
    from hvd_ckpt.app.compare.comparison import Comparison
    from hvd_ckpt.app.compare.launch import Event

ENGINES = "hvd_ckpt,horovod,horovod-groups,ddp,ddp-find-unused,ddp-static,apex"
WORKLOADS = "densenet,bert"
SCENARIOS = (
    "plain,tied,nested,unused,unused-on-one-rank,accumulation,short-last-group,frozen,changing-graph,two-forwards,no-grad-forward,"
    "explicit-parameters,mixed-dtypes,overflow-on-one-rank,uneven-data,sparse"
)
VARIANTS = "none,reentrant,non-reentrant,explicit"
PRECISIONS = ("fp32", "fp16", "bf16", "apex-O1")
SUBJECT = "hvd_ckpt"
DIVIDED_SECONDS = 20.0  # without a step
NOTHING = "nothing"  # in place of a list of workloads or scenarios


@dataclass(frozen=True)
class Preset:
    """The options that a scale sets where they are not given."""

    steps: int
    passes: int
    chunks: tuple[int, ...]
    timeout: float


PRESETS = {
    "quick": Preset(steps=4, passes=1, chunks=(2,), timeout=60),
    "default": Preset(steps=4, passes=1, chunks=(1, 2, 4), timeout=90),
    "full": Preset(steps=5, passes=2, chunks=(1, 2, 4), timeout=900),
}


@dataclass(frozen=True)
class CompareSettings(BenchSettings):
    """The options, as they are given."""

    size: int = setting("Ranks.", 2, note="NP, else 2", flag="np", envvar="NP")
    controller: str = controller_setting()
    engines: tuple[str, ...] = setting(
        "Engines, or module:Class of your own.",
        ENGINES,
        type=names_of(find="hvd_ckpt.app.compare.runner.engines:find_engine"),
    )
    workloads: tuple[str, ...] = setting(
        "Models on real data, or 'nothing'.", WORKLOADS, type=names_of((*WORKLOADS.split(","), NOTHING))
    )
    scenarios: str = setting("Small hard models, or 'nothing'.", SCENARIOS)
    variants: tuple[str, ...] = setting("Ways to recompute.", VARIANTS, type=names_of(VARIANTS.split(",")))
    chunks: tuple[int, ...] | None = setting(
        "Numbers of segments.", note="1,2,4; with --quick 2", type=numbers_of("segments")
    )
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
    text: str | None = text_setting()
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

    @property
    def parts(self) -> int | None:
        """Ranks that a model is divided among, in stages or in parts of layers; None where each has a whole one."""
        return self.stages or self.tensor

    def comparison(self, run: BenchRun) -> Comparison:
        """What is compared.

        Raises:
            BadArgument: an option is wrong, or options do not go together.
        """
        from hvd_ckpt.app.compare.cells import Settings, make_cells
        from hvd_ckpt.app.compare.comparison import Comparison
        from hvd_ckpt.processes.runtime import threads_per_rank

        preset, divided = PRESETS[self.scale], self.parts is not None
        engines, variants = self._divided() if divided else self._whole()
        cells = make_cells(variants, (2,) if divided else self.chunks or preset.chunks)
        if not cells:
            raise BadArgument(
                f"there is nothing to compare: --workloads {in_words(self.workloads)} and --scenarios {self.scenarios} have no "
                f"--variants {in_words(self.variants)} in --precision {self.precision}"
            )
        training = Settings(self.steps or preset.steps, self.seed)
        if not divided:
            more = {name: getattr(self, name) for name in ("scale", "text", "precision", "device")}
            training = dataclasses.replace(training, **more)
        return Comparison(
            engines=engines,
            cells=tuple(cells),
            subject=engines[0] if divided else self.subject,
            size=self.parts or self.size,
            controller=self.controller,
            threads=1 if divided else threads_per_rank(self.size),
            passes=0 if divided else preset.passes if self.passes is None else self.passes,
            settings=training,
            timeout=self.timeout or (DIVIDED_SECONDS if divided else preset.timeout),
            folder=run.jobs,
        )

    def _divided(self) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
        """The engines that divide a model as the options say, and for each scenario its variants."""
        from hvd_ckpt.app.compare.catalog import PARTS, STAGES
        from hvd_ckpt.app.compare.parts import IN_PARTS, PART_ENGINES, InParts
        from hvd_ckpt.app.compare.stage_engines import STAGE_ENGINES
        from hvd_ckpt.app.compare.stages import SCHEDULES, STAGED

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
        paths = tuple(f"{engine.__module__}:{engine.__name__}" for engine in engines)
        return paths, {f"{begin}{name}": variants for name in names}

    def _whole(self) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
        """The engines that reduce gradients, what they train, and for each the variants that mean something for it."""
        from hvd_ckpt.app.compare.catalog import CATALOG
        from hvd_ckpt.app.compare.cells import PLAN

        if self.subject not in self.engines:
            raise BadArgument(
                f"--subject {self.subject} is not among the engines {in_words(self.engines)}: add it, or judge another"
            )
        check_devices(self.device, self.size)
        _check_precision(self.precision)
        if self.budget is not None:
            _check_budget(self.budget, self.engines)
        names = [
            *self.workloads,
            *split_names("--scenarios", self.scenarios, (*SCENARIOS.split(","), NOTHING)),
        ]
        planned = () if self.budget is None else (f"{PLAN}{self.budget.strip()}",)
        chosen = {}
        for name in names:
            if name != NOTHING:
                kind = CATALOG[name]
                _check_packages(name, kind.requires)
                if kind.precisions is None or self.precision in kind.precisions:
                    own = tuple(variant for variant in self.variants if variant in kind.variants)
                    chosen[name] = own + planned * kind.plannable
        return self.engines, chosen


@bench_command(CompareSettings, width=150, program="hvd-ckpt")
def compare(run: BenchRun, settings: CompareSettings) -> None:
    """Train real workloads and small hard ones with each engine and each way to recompute, and compare with one process.

    Reports for each: are all ranks' weights equal, do they equal the reference, do runs repeat bit for bit, how often and in
    which order gradients are reduced, the time of a step, and the peak memory. The exit status is 0 only if this library
    is right everywhere.
    """
    comparison = settings.comparison(run)
    with run.progress(comparison.trainings) as progress:

        def show(where: str, event: Event) -> None:
            if event["rank"] == 0:
                cell = f": {event['cell']}" if "cell" in event else ""
                progress.show(f"{where}{cell}", int(event["event"] in ("trained", "measured", "timed")))

        report = comparison.run(show)
    run.finish(report, report.success)


def _check_budget(budget: str, engines: tuple[str, ...]) -> None:
    from hvd_ckpt.app.compare.runner.engines import find_engine
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
