"""The scenarios: a small chain of layers, and one thing each that joining recomputation and data parallelism gets wrong.

Each is a workload like any other, a few lines long: a chain of six layers on random batches, and what makes it hard.
Read them as a list of what real models do; to add one, write such a class.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from hvd_ckpt.app.compare.cells import Chain, Recompute, RecomputedLayer
from hvd_ckpt.app.compare.workloads import CATALOG, Workload
from hvd_ckpt.data.objectives import Batch
from hvd_ckpt.recompute.function import CheckpointFunction
from hvd_ckpt.recompute.sequential import split

if TYPE_CHECKING:
    from hvd_ckpt.app.compare.training import Training

WIDTH = 16
LAYERS = 6
SAMPLES = 8


def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


class Scenario(Workload):
    """A chain of six layers that learns to give 0.3; every scenario changes one thing of it."""

    learning_rate = 0.05
    variants: ClassVar[tuple[str, ...]] = ("reentrant", "non-reentrant")
    small = True
    model_line = f"{LAYERS} layers of {WIDTH} units, {SAMPLES} samples per rank"

    def __init__(self, scale: str, seed: int, text: str | None) -> None:
        self._seed = seed

    def model(self, recompute: Recompute) -> nn.Module:
        return Chain([layer() for _ in range(LAYERS)], recompute)

    def random(self, rank: int, step: int, part: int = 0) -> torch.Generator:
        """Different for each step below 1000, rank below 100 and part below 10. The reference asks for the batches of all ranks
        in one process, and must get the same ones."""
        return torch.Generator().manual_seed(((self._seed * 1000 + step) * 100 + rank) * 10 + part)

    def batch(self, rank: int, size: int, step: int, part: int = 0) -> Batch:
        x = torch.randn(SAMPLES, WIDTH, generator=self.random(rank, step, part))
        # PyTorch's reentrant variant loses the first segment's gradients unless an input requires one.
        return Batch((x.requires_grad_(),), torch.full((SAMPLES, WIDTH), 0.3))

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output.float() - target).square().mean()


class Plain(Scenario, name="plain"):
    title = "nothing special"


class Tied(Scenario, name="tied"):
    title = "one layer stands in three places of the chain"

    def model(self, recompute: Recompute) -> nn.Module:
        shared = layer()
        return Chain([layer(), layer(), shared, layer(), shared, layer(), shared], recompute)


class Nested(Scenario, name="nested"):
    title = "each layer of a recomputed segment is recomputed by itself, too"

    def model(self, recompute: Recompute) -> nn.Module:
        return Chain([RecomputedLayer(layer(), recompute) for _ in range(LAYERS)], recompute)


class Unused(Scenario, name="unused"):
    title = "a layer that no rank uses, and weight decay"

    def run(self, step: Training) -> list[torch.Tensor]:
        return run_along(self, step, range(LAYERS - 1))

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=self.learning_rate, momentum=0.9, weight_decay=0.1)


class UnusedOnOneRank(Scenario, name="unused-on-one-rank"):
    title = "layers that all ranks but the first use"

    def run(self, step: Training) -> list[torch.Tensor]:
        return run_along(self, step, range(LAYERS - 2 if step.rank == 0 else LAYERS))


class Accumulation(Scenario, name="accumulation"):
    title = "two backward passes before each update"
    parts = passes = 2


class ShortLastGroup(Scenario, name="short-last-group"):
    title = "three backward passes before each update, but one before every third"
    parts = passes = 3

    def batches(self, rank: int, size: int, step: int) -> list[Batch]:
        return super().batches(rank, size, step)[: 1 if step % 3 == 2 else 3]


class Frozen(Scenario, name="frozen"):
    title = "a layer is frozen for a while, and another is frozen at first"

    def model(self, recompute: Recompute) -> nn.Module:
        model = Chain([layer() for _ in range(LAYERS)], recompute)
        model.chain[4].requires_grad_(False)
        return model

    def before_step(self, model: nn.Module, number: int) -> None:
        assert isinstance(model, Chain)
        model.chain[1].requires_grad_(number % 4 != 1)
        # An optimizer skips a parameter only where it has no gradient: with one of zeros, momentum would go on moving it.
        if number % 4 == 1:
            for parameter in model.chain[1].parameters():
                parameter.grad = None
        model.chain[4].requires_grad_(number >= 2)


class ChangingGraph(Scenario, name="changing-graph"):
    title = "other layers in each step and on each rank, one of them several times"
    static = False

    def run(self, step: Training) -> list[torch.Tensor]:
        # The numbers of the layers in their order:
        #     step      0      1          2
        #     rank 0    0 1    1 2 3 1    2 3 4 5 2 2
        #     rank 1    1 2    2 3 4 1    3 4 5 0 2 2
        first, repeats = step.number + step.rank, step.number % 3
        path = [(first + i) % LAYERS for i in range(2 + repeats)] + [step.number % LAYERS] * repeats
        return run_along(self, step, path)


class TwoForwards(Scenario, name="two-forwards"):
    title = "two forward passes, then one backward pass through both"
    parts = 2

    def run(self, step: Training) -> list[torch.Tensor]:
        losses = [self.loss_of(step, batch) for batch in step.batches]
        step.backward(losses[0] + losses[1])
        return [loss.detach() for loss in losses]


class ForwardWithoutGrad(Scenario, name="no-grad-forward"):
    title = "an evaluation under no_grad before and after each forward pass"
    parts = 3

    def run(self, step: Training) -> list[torch.Tensor]:
        before, batch, after = step.batches
        with torch.no_grad(), step.autocast():
            step.model(*before.inputs)
        loss = self.loss_of(step, batch)
        with torch.no_grad(), step.autocast():
            step.model(*after.inputs)
        step.backward(loss)
        return [loss.detach()]


class ExplicitParameters(Tied, name="explicit-parameters"):
    title = "CheckpointFunction, which gets the parameters as arguments, on a layer in three places"
    variants = ("explicit",)

    def model(self, recompute: Recompute) -> nn.Module:
        tied: Any = super().model(recompute)
        return ExplicitChain(list(tied.chain), recompute)


class ExplicitChain(Chain):
    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        layers = list(self.chain)
        for length in split(len(layers), self.recompute.chunks or 1):
            part, layers = nn.Sequential(*layers[:length]), layers[length:]
            x = CheckpointFunction.apply(part, 1, x, *part.parameters()) if self.recompute.chunks else part(x)
        return x


class CastingLinear(nn.Module):
    """A linear layer that converts its input to its own dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x.to(self.linear.weight.dtype)))


class MixedDtypes(Scenario, name="mixed-dtypes"):
    title = "parameters of four dtypes in one model, bfloat16 among them"
    tolerance = 5e-2  # a bfloat16 weight has three digits, and training changes the last of them
    precisions = ("fp32", "bf16")  # a gradient scaler refuses float16 gradients

    def model(self, recompute: Recompute) -> nn.Module:
        dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.float32, torch.float32)
        return Chain([CastingLinear(dtype) for dtype in dtypes], recompute)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.5)


class OverflowOnOneRank(Scenario, name="overflow-on-one-rank"):
    title = "a scaled loss overflows on one rank: all must skip that step"
    scales_loss = True

    def run(self, step: Training) -> list[torch.Tensor]:
        loss = self.loss_of(step, *step.batches)
        # Times the scale that a gradient scaler begins with, 65536, this is beyond the largest float32.
        step.backward(loss * (1e36 if step.number == 1 and step.rank == 0 else 1.0))
        return [loss.detach()]


class UnevenData(Scenario, name="uneven-data"):
    title = "ranks run out of data one after the other"
    uneven = True

    def steps_of(self, rank: int, size: int, steps: int) -> int:
        # The last rank has batches for all steps, and each rank before it for one step less.
        return max(1, steps - (size - 1 - rank))


class Sparse(Scenario, name="sparse"):
    title = "an embedding with sparse gradients"
    vocabulary = 32

    def model(self, recompute: Recompute) -> nn.Module:
        return SparseChain(self.vocabulary, recompute)

    def batch(self, rank: int, size: int, step: int, part: int = 0) -> Batch:
        tokens = torch.randint(self.vocabulary, (SAMPLES,), generator=self.random(rank, step))
        return Batch((tokens,), torch.full((SAMPLES, WIDTH), 0.3))

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.5)


class SparseChain(Chain):
    """An embedding, then the chain; the embedding is not recomputed, since its input needs no gradient."""

    def __init__(self, vocabulary: int, recompute: Recompute) -> None:
        super().__init__([layer() for _ in range(LAYERS)], recompute)
        self.embedding = nn.Embedding(vocabulary, WIDTH, sparse=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(self.embedding(tokens))


def run_along(scenario: Scenario, step: Training, path: Iterable[int]) -> list[torch.Tensor]:
    """A step that uses some of the layers only."""
    loss = scenario.loss_of(step, *step.batches, path=list(path))
    step.backward(loss)
    return [loss.detach()]


SCENARIOS = {name: kind for name, kind in CATALOG.items() if issubclass(kind, Scenario)}
