"""``hvd-ckpt bench scale``: settings, tables and picture.

Exit status 0 if every way to train was recorded, 1 if not, 2 for a bad argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from hvd_ckpt.app.cli.command_line import BadArgument
from hvd_ckpt.bench.harness.cases import Column, in_mib, results_of, table_of
from hvd_ckpt.bench.harness.options import BenchRun, bench_command
from hvd_ckpt.bench.harness.report import save_figure
from hvd_ckpt.bench.harness.settings import (
    BenchSettings,
    names_of,
    quick_setting,
    ranks_setting,
    setting,
    timeout_setting,
)
from hvd_ckpt.bench.scale.network import Network
from hvd_ckpt.bench.scale.record import MODES, Recorded, RecordJob
from hvd_ckpt.bench.scale.replay import Saved, SnapshotCost, Start, Timeline, replay, snapshot, start
from hvd_ckpt.bench.scale.trace import Trace

MODELS: dict[str, dict[str, Any]] = {  # arguments of gpt()
    "gpt-mini": {"vocabulary": 4096, "length": 64, "width": 256, "heads": 8, "layers": 4},
    "gpt-small": {"vocabulary": 50257, "length": 1024, "width": 768, "heads": 12, "layers": 12},
    "gpt-1.3b": {"vocabulary": 50257, "length": 2048, "width": 2048, "heads": 16, "layers": 24},
}
RECORDED = "gpt-mini"
WAYS = (*MODES, "ddp", "fsdp2", "ring")
STATE = 2  # of Adam, as many times the bytes of the weights
NOTES = (
    "Every replica has a batch of its own, so the work grows with them. efficiency: the part of a step that is computation. "
    "communication: seconds in which collectives or messages run, hidden or not; of FSDP2: as a ratio to FSDP2's.",
    "sent MiB, messages: of a rank in a step. buffers MiB: the most bytes of messages in flight, sent and received, on a rank.",
    "start s: imports, connections, agreement on options and the broadcast of weights. agreement ms: what all ranks tell each "
    "other in each of Horovod's cycles. flags ms: the message with control flags; 0 where they ride in a bucket.",
    "write s, load s, read GiB: of a snapshot, and the bytes that all hosts read to load it.",
    "PyTorch's engines and the ring reduce-scatter are replayed with ring collectives that wait for no cycle. Nothing of them is "
    "measured.",
)  # fmt: skip


def _rate(help: str, default: float, **more: Any) -> Any:
    return setting(help, default, type=click.FloatRange(0, min_open=True), **more)


@dataclass(frozen=True)
class Settings(BenchSettings):
    """The model, the ways to train it, and the network."""

    sizes: tuple[int, ...] = ranks_setting(
        "Numbers of ranks to predict.", "8,64,512,1024,4096,16384", "8,1024"
    )
    model: str = setting(
        f"{RECORDED} is recorded here; the others follow from their sizes.",
        RECORDED,
        type=click.Choice(list(MODELS)),
    )
    modes: tuple[str, ...] = setting("Ways to train.", ",".join(WAYS), type=names_of(WAYS))
    recorded: int = setting("Ranks of a recorded job.", 4, type=click.IntRange(2))
    batch: int = setting("Sequences of a rank in a step.", 4)
    tflops: float = _rate("Operations of a rank, where a step is not recorded, in TFLOP/s.", 50.0)
    every: int = setting("Steps between two averages of local SGD.", 50, quick=3)
    stages: int = setting("Pipeline stages, where not recorded (then 2).", 8, type=click.IntRange(2))
    parts: int = setting("Parts of a layer, where not recorded (then 2).", 8, type=click.IntRange(2))
    micro_batches: int = setting("Of a step in stages, where not recorded.", 32)
    local: int = setting("Ranks on a host.", 8)
    link: float = _rate("Of a host, shared by its ranks, in Gbit/s.", 25.0)
    local_link: float = _rate("Of a rank to others on its host, in Gbit/s.", 100.0)
    latency: float = _rate("Microseconds of an empty message to another host.", 25.0)
    local_latency: float = _rate("Microseconds of an empty message on a host.", 2.0)
    message: float = _rate("Microseconds of a rank's processor for each message.", 2.0)
    cycle: float = _rate("Milliseconds of Horovod's cycle over MPI.", 1.0)
    storage: float = _rate("Of the file system of all hosts, in GB/s.", 10.0)
    controller: str = setting(
        "Whose algorithms carry collectives.", "mpi", type=click.Choice(["mpi", "gloo"])
    )
    one_level: bool = setting("Scatter gradients to all ranks at once, not within hosts first.", False)
    quick: bool = quick_setting("Few numbers of ranks and short recordings.")
    timeout: float = timeout_setting(600)

    def check(self) -> None:
        for size in self.sizes:
            if size > self.local and size % self.local:
                raise BadArgument(f"--np {size}: give numbers up to --local {self.local}, or multiples of it")
        if self.recorded % 2:
            raise BadArgument(f"--recorded {self.recorded}: two stages and two parts need an even number")

    @property
    def network(self) -> Network:
        """The network in bytes and seconds."""
        gigabit, micro = 1e9 / 8, 1e-6
        return Network(
            local=self.local,
            bandwidth=self.link * gigabit,
            local_bandwidth=self.local_link * gigabit,
            latency=self.latency * micro,
            local_latency=self.local_latency * micro,
            message=self.message * micro,
            cycle=self.cycle / 1e3,
            controller=self.controller,
            one_level=self.one_level,
        )


@dataclass
class Prediction:
    """A way to train on so many ranks.

    Attributes:
        of_fsdp2: seconds of communication, as a ratio to FSDP2's; None where that was not asked for.
        flags: seconds of the message with control flags.
    """

    mode: str
    trace: Trace
    step: Timeline
    start: Start | None
    snapshot: SnapshotCost
    agreement: float
    flags: float
    of_fsdp2: float | None = None


WHO = [
    Column("ranks", lambda row: row.step.ranks, key="ranks", left=True),
    Column("mode", lambda row: row.trace.title, key="mode", left=True),
]
STEP = [
    *WHO,
    Column("step s", lambda row: row.step.seconds, ".3f", key="seconds"),
    Column("efficiency", lambda row: row.step.efficiency, ".1%", key="efficiency"),
    Column("communication s", lambda row: row.step.communicating, ".3f", key="communicating"),
    Column("of FSDP2", lambda row: row.of_fsdp2, ".2f", key="of_fsdp2"),
    Column("sent MiB", lambda row: row.step.sent, in_mib(",.0f"), key="sent"),
    Column("messages", lambda row: row.step.messages, ",.0f", key="messages"),
    Column("buffers MiB", lambda row: row.step.buffers, in_mib(",.0f"), key="buffers"),
]
JOB = [
    *WHO,
    Column("start s", lambda row: row.start and row.start.seconds, ".1f", key="start"),
    Column("agreement ms", lambda row: row.agreement * 1e3, ".2f", key="agreement_ms"),
    Column("flags ms", lambda row: row.flags * 1e3, ".2f", key="flags_ms"),
    Column("write s", lambda row: row.snapshot.write, ".1f", key="write"),
    Column("load s", lambda row: row.snapshot.load, ".1f", key="load"),
    Column("read GiB", lambda row: row.snapshot.read / 2**30, ",.0f", key="read_gib"),
]


@bench_command(Settings)
def scale(run: BenchRun, settings: Settings) -> None:
    """Predict what communication costs on up to 16,384 ranks.

    A step is recorded on a few ranks here, or follows from the sizes of a model that does not fit, and is replayed on a network
    that the options describe. Nothing but the recording is measured.
    """
    own = [mode for mode in settings.modes if mode in MODES]
    with run.progress(len(own) + 1) as progress:
        recorded: dict[str, Recorded] = {}
        for mode in own if settings.model == RECORDED else ():
            job = RecordJob(
                run.jobs / mode, settings.recorded, mode, MODELS[RECORDED], settings.batch, settings.every
            )
            ranks = progress.job(f"record {mode}", job, Recorded, threads=1, controller="gloo")
            if ranks:
                recorded[mode] = ranks[0]
        progress.start("replay")
        predictions = predict(settings, recorded)
    own_jobs = [prediction for prediction in predictions if prediction.start is not None]
    tables = [table_of(STEP, predictions, "Steps", folded=1), table_of(JOB, own_jobs, "Jobs", folded=1)]
    run.finish(
        run.report(
            "Communication on many ranks, predicted",
            tables,
            results_of([*STEP, *JOB[len(WHO) :]], predictions),
            notes=NOTES,
            draw=lambda folder: draw(predictions, folder),
        )
    )


def predict(settings: Settings, recorded: dict[str, Recorded]) -> list[Prediction]:
    """Every way to train on every number of ranks that it can have, from recorded traces or from sizes."""
    from hvd_ckpt.bench.scale.sizes import BASELINES, Sizes, Split

    network = settings.network
    sizes = Sizes(MODELS[settings.model], settings.batch, settings.tflops * 1e12)
    if recorded:  # baselines compute for as long as what was recorded
        first = next(iter(recorded.values())).trace
        sizes.take(first.computing / first.steps)
    predictions: list[Prediction] = []
    for ranks in settings.sizes:
        split = Split(ranks, settings.stages, settings.parts, settings.micro_batches, settings.every)
        by_mode: dict[str, Prediction] = {}
        for mode in settings.modes:
            if settings.model == RECORDED and mode in MODES:
                if mode not in recorded:
                    continue
                trace, before = recorded[mode].trace, recorded[mode].start
            else:
                trace, before = sizes.trace(mode, split), sizes.start(mode)
            if ranks % (trace.stages * trace.tensor):
                continue
            in_shards = (mode in ("optimizer", "gradients", "parameters"), mode == "parameters")
            saved = Saved(sizes.nbytes, STATE * sizes.nbytes, *in_shards)
            flags = [operation for operation in trace.operations if "flags" in operation.name]
            by_mode[mode] = Prediction(
                mode,
                trace,
                replay(trace, network, ranks),
                None if mode in BASELINES else start(before, network, ranks),
                snapshot(saved, network, ranks, settings.storage * 1e9),
                network.agreement(ranks).seconds if trace.queue else 0.0,
                sum(network.cost(operation, trace, ranks).seconds for operation in flags),
            )
        if "fsdp2" in by_mode:
            for prediction in by_mode.values():
                prediction.of_fsdp2 = prediction.step.communicating / by_mode["fsdp2"].step.communicating
        predictions += by_mode.values()
    return predictions


def draw(predictions: Sequence[Prediction], folder: Path) -> list[str]:
    """Efficiency, and seconds of communication, by the number of ranks."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.5))
    axes: Any = figure.subplots(1, 2)
    for number, mode in enumerate(dict.fromkeys(prediction.mode for prediction in predictions)):
        own = [prediction for prediction in predictions if prediction.mode == mode]
        ranks = [prediction.step.ranks for prediction in own]
        style = {"label": own[0].trace.title, "color": f"C{number % 10}", "marker": "o"}
        style["linestyle"] = "-" if mode in MODES else "--"
        axes[0].plot(ranks, [prediction.step.efficiency for prediction in own], **style)
        axes[1].plot(ranks, [prediction.step.communicating for prediction in own], **style)
    for panel, title in zip(axes, ("efficiency", "seconds of communication in a step")):
        panel.set_xscale("log", base=2)
        panel.set_xlabel("ranks")
        panel.set_title(title)
    axes[1].set_yscale("log")
    axes[0].legend(fontsize=8)
    return [save_figure(figure, folder / "scale.png")]
