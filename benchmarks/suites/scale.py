"""``python -m benchmarks scale``: steps and starts on up to 16,384 ranks, predicted from a model's sizes.

Steps are those of :mod:`hvd_ckpt.prediction.step_time`; this file adds what takes time beside them, and the tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from torch import nn

from hvd_ckpt.app.cli.command_line import BadArgument
from hvd_ckpt.app.compare.runner.options import BenchRun, bench_command
from hvd_ckpt.app.compare.runner.report import Column, in_mib, results_of, save_figure, table_of
from hvd_ckpt.app.compare.runner.settings import BenchSettings, names_of, ranks_setting, setting
from hvd_ckpt.app.models.gpt import GPTBlock, gpt
from hvd_ckpt.prediction.network import Network
from hvd_ckpt.prediction.step_time import BASELINES, WAYS, ModelSizes, Split, StepTime

MODELS: dict[str, dict[str, Any]] = {  # arguments of gpt()
    "gpt-small": {"vocabulary": 50257, "length": 1024, "width": 768, "heads": 12, "layers": 12},
    "gpt-1.3b": {"vocabulary": 50257, "length": 2048, "width": 2048, "heads": 16, "layers": 24},
    "gpt-13b": {"vocabulary": 50257, "length": 2048, "width": 5120, "heads": 40, "layers": 40},
}
# Measured on one core of a virtual machine:
UNPICKLING = 5e-6  # seconds, of a small object
CONNECTING = 350e-6  # seconds that the launcher's server takes for one question of a rank
# Assumed:
IMPORTING = 5.0  # seconds, of Python, PyTorch and Horovod
NOTES = (
    "Every replica has a batch of its own, so the work grows with them. efficiency: the part of a step that is computation. "
    "communication: seconds in which collectives or messages run, hidden or not; of FSDP2: as a ratio to FSDP2's.",
    "sent MiB, messages: of a rank in a step. start s: imports, connections, agreement on options and the broadcast of weights. "
    "agreement ms: what all ranks tell each other in each of Horovod's cycles.",
    "Other engines are predicted with ring collectives that wait for no cycle. Nothing on this page is measured.",
)  # fmt: skip


def _rate(help: str, default: float) -> Any:
    return setting(help, default, type=click.FloatRange(0, min_open=True))


@dataclass(frozen=True)
class Settings(BenchSettings):
    """The model, the ways to train it, and the network."""

    sizes: tuple[int, ...] = ranks_setting("Numbers of ranks.", "8,64,512,1024,4096,16384", "8,1024")
    model: str = setting("Sizes of the model.", "gpt-1.3b", type=click.Choice(list(MODELS)))
    ways: tuple[str, ...] = setting("Ways to train.", ",".join(WAYS), type=names_of(WAYS))
    batch: int = setting("Sequences of a rank in a step.", 1)
    tflops: float = _rate("Operations of a rank, in TFLOP/s.", 50.0)
    every: int = setting("Steps between two averages of local SGD.", 50)
    stages: int = setting("Pipeline stages.", 8, type=click.IntRange(2))
    parts: int = setting("Parts of a layer.", 8, type=click.IntRange(2))
    micro_batches: int = setting("Of a step in stages.", 32)
    local: int = setting("Ranks on a host.", 8)
    link: float = _rate("Of a host, shared by its ranks, in Gbit/s.", 25.0)
    local_link: float = _rate("Of a rank to others on its host, in Gbit/s.", 100.0)
    latency: float = _rate("Microseconds of an empty message to another host.", 25.0)
    local_latency: float = _rate("Microseconds of an empty message on a host.", 2.0)
    message: float = _rate("Microseconds of a rank's processor for each message.", 2.0)
    cycle: float = _rate("Milliseconds of Horovod's cycle over MPI.", 1.0)
    controller: str = setting("Whose algorithms carry collectives.", "mpi", type=click.Choice(["mpi", "gloo"]))  # fmt: skip
    one_level: bool = setting("Scatter gradients to all ranks at once, not within hosts first.", False)

    def check(self) -> None:
        for size in self.sizes:
            if size > self.local and size % self.local:
                raise BadArgument(f"--np {size}: give numbers up to --local {self.local}, or multiples of it")

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

    def split(self, way: str, ranks: int) -> Split:
        """How so many ranks train in this way."""
        stages, parts = self.stages if way == "stages" else 1, self.parts if way == "tensor" else 1
        return Split(ranks, stages, parts, self.micro_batches, self.every)


def sizes_of(settings: Settings) -> ModelSizes:
    """The sizes of the model, each layer of which is recomputed; its blocks take as long as their operations."""
    shape = MODELS[settings.model]
    tokens = settings.batch * shape["length"]
    with torch.device("meta"):
        model = gpt(**shape, checkpoint_interval=1)

    def operations(block: nn.Module) -> float:
        linear = [module for module in block.modules() if isinstance(module, nn.Linear)]
        matrices = sum(module.weight.numel() for module in linear)
        # All pairs count, as in the formulas of Megatron-LM and PaLM by which rates are stated, although half would do if causal.
        attention = 2 * shape["length"] * shape["width"] if isinstance(block, GPTBlock) else 0
        return float(2 * tokens * (matrices + attention))

    forward = [operations(block) / (settings.tflops * 1e12) for block in model]
    # The recomputation takes one forward pass, and the gradients of inputs and of weights another one each.
    return ModelSizes(
        model, forward, [3 * seconds for seconds in forward], activation=tokens * shape["width"] * 4
    )


@dataclass
class Prediction:
    """A way to train on so many ranks; of local SGD a step is the mean up to an average."""

    way: str
    ranks: int
    step: StepTime
    steps: int
    start: float | None
    of_fsdp2: float | None = None


def predict(settings: Settings) -> list[Prediction]:
    """Every way to train on every number of ranks that it can have."""
    network, sizes = settings.network, sizes_of(settings)
    predictions: list[Prediction] = []
    for ranks in settings.sizes:
        here: dict[str, Prediction] = {}
        for way in settings.ways:
            split = settings.split(way, ranks)
            if ranks % (split.stages * split.parts):
                continue
            begun = None if way in BASELINES else start(way, sizes, network, ranks)
            step, steps = sizes.step(way, split, network), settings.every if way == "local" else 1
            here[way] = Prediction(way, ranks, step, steps, begun)
        if "fsdp2" in here:
            for each in here.values():
                each.of_fsdp2 = each.step.communicating / each.steps / here["fsdp2"].step.communicating
        predictions += here.values()
    return predictions


def start(way: str, sizes: ModelSizes, network: Network, ranks: int) -> float:
    """Seconds from the launch to the first step: processes, the comparison of all options and parameters, and rank 0's weights.

    Over Gloo each rank asks the launcher's server for the address of each other rank. Over MPI connections are made when they are
    needed.
    """
    processes = IMPORTING + (ranks**2 * CONNECTING if network.controller == "gloo" else 0.0)
    agreeing = (
        2 * (network.objects(512, ranks).seconds + ranks * UNPICKLING) + network.agreement(ranks).seconds
    )
    # The optimizer broadcasts in some ways, and the user's own call in all.
    copies = 2 if way in ("optimizer", "gradients", "local") else 1
    sent = sum(network.broadcast(parameter.nbytes, ranks).seconds for parameter in sizes.model.parameters())
    return processes + agreeing + copies * sent


WHO = [
    Column("ranks", lambda row: row.ranks, key="ranks", left=True),
    Column("way", lambda row: WAYS[row.way], key="way", left=True),
]
STEP = [
    *WHO,
    Column("step s", lambda row: row.step.seconds / row.steps, ".3f", key="seconds"),
    Column("efficiency", lambda row: row.step.efficiency, ".1%", key="efficiency"),
    Column("communication s", lambda row: row.step.communicating / row.steps, ".3f", key="communicating"),
    Column("of FSDP2", lambda row: row.of_fsdp2, ".2f", key="of_fsdp2"),
    Column("sent MiB", lambda row: row.step.sent / row.steps, in_mib(",.0f"), key="sent"),
    Column("messages", lambda row: row.step.messages / row.steps, ",.0f", key="messages"),
]
JOB = [
    *WHO,
    Column("start s", lambda row: row.start, ".1f", key="start"),
    Column("agreement ms", lambda row: row.step.agreement * 1e3, ".2f", key="agreement_ms"),
]


@bench_command(Settings)
def scale(run: BenchRun, settings: Settings) -> None:
    """Predict what communication costs on up to 16,384 ranks of a network that the options describe."""
    predictions = predict(settings)
    own = [prediction for prediction in predictions if prediction.start is not None]
    run.finish(
        run.report(
            "Communication on many ranks, predicted",
            [table_of(STEP, predictions, "Steps", folded=1), table_of(JOB, own, "Jobs", folded=1)],
            results_of([*STEP, *JOB[len(WHO) :]], predictions),
            notes=NOTES,
            draw=lambda folder: draw(predictions, folder),
        )
    )


def draw(predictions: Sequence[Prediction], folder: Path) -> list[str]:
    """Efficiency, and seconds of communication, by the number of ranks."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.5))
    axes: Any = figure.subplots(1, 2)
    for number, way in enumerate(dict.fromkeys(prediction.way for prediction in predictions)):
        rows = [prediction for prediction in predictions if prediction.way == way]
        ranks = [row.ranks for row in rows]
        style = {"label": WAYS[way], "color": f"C{number % 10}", "marker": "o"}
        style["linestyle"] = "--" if way in BASELINES else "-"
        axes[0].plot(ranks, [row.step.efficiency for row in rows], **style)
        axes[1].plot(ranks, [row.step.communicating / row.steps for row in rows], **style)
    for panel, title in zip(axes, ("efficiency", "seconds of communication in a step")):
        panel.set_xscale("log", base=2)
        panel.set_xlabel("ranks")
        panel.set_title(title)
    axes[1].set_yscale("log")
    axes[0].legend(fontsize=8)
    return [save_figure(figure, folder / "scale.png")]
