"""The ways to train that are compared, a run of one, and what a rank finds out about it."""

from __future__ import annotations

from dataclasses import dataclass, field

from hvd_ckpt.bench.harness.jobs import RankJob


@dataclass(frozen=True)
class Method:
    """A way to train on several ranks.

    Attributes:
        title: for people.
        every: steps between two averages; 0 reduces the gradients of every step.
        outer: with Nesterov momentum, as DiLoCo.
        fragments, delay, wire: as in :func:`hvd_ckpt.LocalSGD`.
        of: the package whose implementation it is, with ``torch.distributed`` over Gloo; None for this one's.
    """

    title: str
    every: int = 0
    outer: bool = False
    fragments: int = 1
    delay: int = 0
    wire: str = "fp32"
    of: str | None = None


METHODS: dict[str, Method] = {
    "synchronous": Method("synchronous"),
    "local-10": Method("local SGD, every 10", 10),
    "local-50": Method("local SGD, every 50", 50),
    "torch-50": Method("PyTorch's PeriodicModelAverager, 50", 50, of="torch"),
    "diloco-10": Method("DiLoCo, every 10", 10, True),
    "diloco-50": Method("DiLoCo, every 50", 50, True),
    "diloco-100": Method("DiLoCo, every 100", 100, True),
    "torchft-50": Method("DiLoCo of torchft, every 50", 50, True, of="torchft"),
    "fragments-50": Method("DiLoCo, every 50, 4 fragments, delay 5", 50, True, 4, 5),
    "int8-50": Method("DiLoCo, every 50, int8", 50, True, wire="int8"),
}


@dataclass(frozen=True)
class LocalJob(RankJob):
    """Runs of several methods, one after the other.

    Attributes:
        methods: names in :data:`METHODS`, in the order in which they run.
        text: a file, or None for the source text of the Python standard library.
        seed: of weights and order of samples.
        steps: of each rank.
        evaluations: evenly spread over the steps, besides one before the first; 0 for none.
        batch: samples of each rank in a step.
        length: tokens of a sample.
        width, layers: of the GPT.
        lr: of AdamW, after a short warm-up, with a cosine decay.
        outer_lr, outer_momentum: of DiLoCo.
    """

    worker = "hvd_ckpt.bench.local.worker"

    methods: tuple[str, ...]
    text: str | None
    seed: int
    steps: int
    evaluations: int
    batch: int
    length: int
    width: int
    layers: int
    lr: float
    outer_lr: float
    outer_momentum: float


@dataclass
class MethodResult:
    """What one rank has found out about a method.

    Attributes:
        tokens: of all ranks in a step.
        points: steps taken at each evaluation.
        losses: over the validation split, with the mean of the ranks' weights.
        seconds: of all steps but the first ones, from a barrier to a barrier, without evaluations.
        timed: these steps.
        sent: bytes that this rank hands to the network for gradients or averages, in all steps.
    """

    tokens: int
    points: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    timed: int = 0
    sent: int = 0
