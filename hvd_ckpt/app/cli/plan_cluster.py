"""Memory of clusters for ``hvd-ckpt plan --np``: the peak of a step with the plan on each rank, over sizes and stages of ZeRO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hvd_ckpt.app.cli.command_line import BadArgument, take_options
from hvd_ckpt.utils.text import show_bytes, stage_of

if TYPE_CHECKING:
    from hvd_ckpt.app.cli.plan_models import Job
    from hvd_ckpt.planning.plan import Plan
    from hvd_ckpt.prediction.memory import Estimator
    from hvd_ckpt.prediction.memory_estimate import MemoryEstimate

FORMS = ((0, None), (1, None), (2, None), (3, None), (3, "optimizer"), (3, "parameters"))  # stage, offload


@dataclass(frozen=True)
class Cluster:
    """A cluster that need not be there, on whose ranks the memory of a step with the plan is estimated.

    Attributes:
        ranks: number of ranks of the largest cluster.
        stage, offload: shown in its parts.
        optimizer: a name of ``torch.optim`` in lower case.
        wire: communication format of shards.
    """

    ranks: int
    stage: int = 0
    offload: str | None = None
    optimizer: str = "adamw"
    wire: str = "fp32"

    def sizes(self) -> list[int]:
        """Powers of two, and the size asked for."""
        powers = [1 << power for power in range(self.ranks.bit_length()) if 1 << power < self.ranks]
        return [*powers, self.ranks]

    def show(self, job: Job, plan: Plan, precision: str, console: Console) -> None:
        """Measures a step with the plan here, and prints the peak over stages and sizes, and the chosen one in its parts.

        Raises:
            BadArgument: the optimizer cannot be estimated.
        """
        from hvd_ckpt.prediction.memory import Estimator, TrainingStep

        try:
            step = TrainingStep(plan, self.optimizer, precision, job.sample, job.kwargs, job.loss)
            estimator = Estimator(job.model, step)
            console.print(self._table(estimator))
            console.print(Text(str(self._estimate(estimator, self.ranks, self.stage, self.offload))))
        except ValueError as error:
            raise BadArgument(f"--np {self.ranks}: {error}") from None

    def _table(self, estimator: Estimator) -> Table:
        table = Table(box=SIMPLE_HEAD, title="peak of a step, per rank", title_justify="left")
        table.add_column("np", justify="right", no_wrap=True)
        for stage, offload in FORMS:
            table.add_column(
                f"shard {stage}" + (f",\n{offload}\noffloaded" if offload else ""),
                justify="right",
                no_wrap=True,
            )
        for ranks in self.sizes():
            cells = []
            for form in FORMS:
                chosen = ranks == self.ranks and form == (self.stage, self.offload)
                peak = show_bytes(self._estimate(estimator, ranks, *form).peak)
                cells.append(Text(f"* {peak}" if chosen else peak, style="bold" if chosen else ""))
            table.add_row(Text(str(ranks)), *cells)
        return table

    def _estimate(self, estimator: Estimator, ranks: int, stage: int, offload: str | None) -> MemoryEstimate:
        """With the wire format where the stage uses one."""
        wire = {
            "gradients": self.wire if stage >= 2 else "fp32",
            "parameters": self.wire if stage >= 1 else "fp32",
        }
        return estimator.estimate(ranks, stage, offload, wire)


def cluster_of(options: dict[str, Any]) -> Cluster | None:
    """Takes the options of a cluster out of the command's; None if none was given.

    Raises:
        BadArgument: one is wrong, or there is no ``--np``.
    """
    names = ("ranks", "shard", "offload", "optimizer", "wire")
    given = take_options(options, names, "--np, the number of ranks")
    if not given:
        return None
    from hvd_ckpt.prediction.measured_memory import check_optimizer
    from hvd_ckpt.sharding.formats import wire_format

    for name, check in (("shard", stage_of), ("wire", wire_format), ("optimizer", check_optimizer)):
        try:
            if name in given:
                check(given[name])
        except ValueError as error:
            raise BadArgument(f"--{name}: {error}") from None
    cluster = Cluster(stage=stage_of(given.pop("shard", "none")), **given)
    if cluster.offload and not cluster.stage:
        raise BadArgument(
            f"--offload {cluster.offload}: give --shard optimizer, gradients or parameters as well"
        )
    if cluster.offload == "parameters" and cluster.stage < 3:
        raise BadArgument("--offload parameters: give --shard parameters as well")
    return cluster
