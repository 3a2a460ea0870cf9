"""Who trains: a DenseNet that keeps everything, PyTorch's checkpoint as others use it, and this library.

A contender is a model of its own, with everyone's weights, and the function that runs it.
"""

from __future__ import annotations

import copy
import functools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from hvd_ckpt.bench.recompute.chain import Forward
from hvd_ckpt.measure import no_collection, now
from hvd_ckpt.memory import measure_peak
from hvd_ckpt.models.densenet import DenseLayer, DenseNet, densenet
from hvd_ckpt.planning.budget import BudgetError
from hvd_ckpt.planning.planner import Planner
from hvd_ckpt.planning.ranks import on_rank_0

__all__ = [
    "CLASSES", "NAIVE", "OFFICIAL", "OURS", "WANTED_MEMORY", "Contender", "chunk_counts", "efficient", "fastest_chunks", "loss_of",
    "make_plans", "official", "step_peak",
]  # fmt: skip

NAIVE, OFFICIAL, OURS = "naive", "official", "ours"
WANTED_MEMORY = 0.57  # of keeping everything: 2.97 GB of 5.25, the pytorch-checkpoint project's own figure
CLASSES = 10
CHUNKS = (2, 4, 8, 16, 32)
TRIALS = 3
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Contender:
    """One way to train.

    Attributes:
        name: unique among contenders.
        family: one of :data:`NAIVE`, :data:`OFFICIAL`, :data:`OURS`.
        model: its own.
        forward: runs it; None where there is no way, and ``failure`` says why.
    """

    name: str
    family: str
    model: nn.Module
    forward: Forward | None
    failure: str | None = None


def loss_of(forward: Forward, images: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of the scores."""
    return functional.cross_entropy(forward(images), labels)


def official(base: DenseNet, chunks: int) -> list[Contender]:
    """PyTorch's checkpoint on the first half of each dense layer, reentrant and not, and on chunks of the whole chain."""
    reentrant, modern, sequential = (copy.deepcopy(base) for _ in range(3))
    return [
        Contender(
            "checkpoint in each layer, reentrant",
            OFFICIAL,
            reentrant,
            functools.partial(_layer_by_layer, reentrant, True),
        ),
        Contender(
            "checkpoint in each layer", OFFICIAL, modern, functools.partial(_layer_by_layer, modern, False)
        ),
        Contender(
            f"checkpoint_sequential, {chunks} chunks", OFFICIAL, sequential, _in_chunks(sequential, chunks)
        ),
    ]


def _layer_by_layer(model: DenseNet, use_reentrant: bool, images: Tensor) -> Tensor:
    """As torchvision's DenseNet with ``memory_efficient=True``, and as the pytorch-checkpoint project's: dense layers pass on a
    list of features, and their concatenation, norm, activation and 1x1 convolution are what is checkpointed."""
    features: tuple[Tensor, ...] = (images,)
    for block in model:
        if isinstance(block, DenseLayer):
            modules = list(block)
            narrowed = checkpoint(_narrow, modules[:3], *features, use_reentrant=use_reentrant)
            features = (*features, _through(modules[3:], narrowed))
        else:
            features = (block(features[0] if len(features) == 1 else torch.cat(features, dim=1)),)
    return features[0]


def _narrow(modules: Sequence[nn.Module], *features: Tensor) -> Tensor:
    return _through(modules, torch.cat(features, dim=1))


def _through(modules: Sequence[nn.Module], features: Tensor) -> Tensor:
    for module in modules:
        features = module(features)
    return features


def _in_chunks(model: DenseNet, count: int) -> Forward:
    def forward(images: Tensor) -> Tensor:
        scores: Tensor = checkpoint_sequential(model, count, images, use_reentrant=False)  # type: ignore[no-untyped-call]
        return scores

    return forward


def chunk_counts(blocks: int) -> list[int]:
    """Chunk counts that are tried on a chain of so many blocks."""
    return [count for count in CHUNKS if count < blocks]


def fastest_chunks(base: DenseNet, images: Tensor, labels: Tensor) -> int:
    """The chunk count whose forward and backward pass is fastest of those within :data:`WANTED_MEMORY`; if none is, that with the
    smallest peak."""
    model = copy.deepcopy(base)
    ways = {count: _in_chunks(model, count) for count in chunk_counts(len(model))}
    limit = WANTED_MEMORY * step_peak(model, images, labels)
    peaks = {count: step_peak(forward, images, labels) for count, forward in ways.items()}
    within = [count for count in ways if peaks[count] <= limit] or [min(peaks, key=peaks.__getitem__)]
    times: dict[int, list[float]] = {count: [] for count in within}
    for number in range(TRIALS):
        for count in within if number % 2 == 0 else within[::-1]:
            with no_collection():
                start = now(CPU)
                loss_of(ways[count], images, labels).backward()  # type: ignore[no-untyped-call]
                times[count].append(now(CPU) - start)
    return min(times, key=lambda count: statistics.median(times[count]))


def step_peak(forward: Forward, images: Tensor, labels: Tensor) -> int:
    """Peak bytes of a forward and a backward pass with the gradients there, which a first one has made."""

    def step() -> None:
        loss_of(forward, images, labels).backward()  # type: ignore[no-untyped-call]

    step()
    return measure_peak(step).peak_bytes


def efficient(base: DenseNet, depth: int) -> Contender:
    """This library's DenseNet that recomputes inside its layers."""
    model = densenet(depth, classes=CLASSES, efficient=True)
    model.load_state_dict(base.state_dict())
    return Contender("efficient DenseNet", OURS, model, model)


def make_plans(
    base: DenseNet,
    images: Tensor,
    labels: Tensor,
    budgets: Sequence[str],
) -> list[Contender]:
    """A plan of this library for each budget, from one profile that rank 0 takes; every rank must call it.

    Raises:
        ValueError: a budget cannot be read.
    """

    @functools.cache
    def planner() -> Planner:
        return Planner(
            copy.deepcopy(base), images, loss=lambda scores: functional.cross_entropy(scores, labels)
        )

    contenders = []
    for budget in budgets:
        model = copy.deepcopy(base)
        try:
            plan = on_rank_0(lambda limit: planner().plan(limit), budget, CPU)
        except BudgetError as error:
            contenders.append(Contender(f"plan {budget}", OURS, model, None, str(error)))
        else:
            contenders.append(Contender(f"plan {budget}", OURS, plan.apply(model), model))
    return contenders
