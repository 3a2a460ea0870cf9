"""The scenarios: a small chain of layers, and one thing each that joining recomputation and data parallelism gets wrong.

Each is a workload like any other, a few lines long: a chain of six layers on random batches, and what makes it hard.
Read them as a list of what real models do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import nn

from hvd_ckpt.app.compare.cells import Chain, Recompute, Region
from hvd_ckpt.app.compare.workloads import Step, Workload
from hvd_ckpt.data.objectives import Batch

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

    def batch(self, rank: int, size: int, step: int, part: int = 0) -> Batch:
        # Different for each step below 1000, rank below 100 and part below 10. The reference asks for the
        # batches of all ranks in one process, and must get the same ones.
        number = ((self._seed * 1000 + step) * 100 + rank) * 10 + part
        x = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(number))
        # PyTorch's reentrant variant loses the first segment's gradients unless an input requires one.
        return Batch((x.requires_grad_(),), torch.full((SAMPLES, WIDTH), 0.3))

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output.float() - target).square().mean()


class Plain(Scenario):
    title = "nothing special"


class Tied(Scenario):
    title = "one layer stands in three places of the chain"

    def model(self, recompute: Recompute) -> nn.Module:
        shared = layer()
        return Chain([layer(), layer(), shared, layer(), shared, layer(), shared], recompute)


class Nested(Scenario):
    title = "each layer of a recomputed segment is recomputed by itself, too"

    def model(self, recompute: Recompute) -> nn.Module:
        return Chain([Region(layer(), recompute) for _ in range(LAYERS)], recompute)


class Unused(Scenario):
    title = "a layer that no rank uses, and weight decay"

    def run(self, step: Step) -> list[torch.Tensor]:
        return run_along(self, step, range(LAYERS - 1))

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=self.learning_rate, momentum=0.9, weight_decay=0.1)


class UnusedOnOneRank(Scenario):
    title = "layers that all ranks but the first use"
    alike = False

    def run(self, step: Step) -> list[torch.Tensor]:
        return run_along(self, step, range(LAYERS - 2 if step.rank == 0 else LAYERS))


class Accumulation(Scenario):
    title = "two backward passes before each update"
    parts = passes = 2


class ShortLastGroup(Scenario):
    title = "three backward passes before each update, but one before every third"
    parts = passes = 3

    def batches(self, rank: int, size: int, step: int) -> list[Batch]:
        return super().batches(rank, size, step)[: 1 if step % 3 == 2 else 3]


class Frozen(Scenario):
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


class ChangingGraph(Scenario):
    title = "other layers in each step and on each rank, one of them several times"
    static = False
    alike = False

    def run(self, step: Step) -> list[torch.Tensor]:
        # The numbers of the layers in their order:
        #     step      0      1          2
        #     rank 0    0 1    1 2 3 1    2 3 4 5 2 2
        #     rank 1    1 2    2 3 4 1    3 4 5 0 2 2
        first, repeats = step.number + step.rank, step.number % 3
        path = [(first + i) % LAYERS for i in range(2 + repeats)] + [step.number % LAYERS] * repeats
        return run_along(self, step, path)


class TwoForwards(Scenario):
    title = "two forward passes, then one backward pass through both"
    parts = 2

    def run(self, step: Step) -> list[torch.Tensor]:
        with step.autocast():
            losses = [self.loss(step.model(*batch.inputs), batch.targets) for batch in step.batches]
            total = losses[0] + losses[1]
        step.backward(total)
        return [loss.detach() for loss in losses]


class ForwardWithoutGrad(Scenario):
    title = "an evaluation under no_grad before and after each forward pass"
    parts = 3

    def run(self, step: Step) -> list[torch.Tensor]:
        before, batch, after = step.batches
        with torch.no_grad(), step.autocast():
            step.model(*before.inputs)
        with step.autocast():
            loss = self.loss(step.model(*batch.inputs), batch.targets)
        with torch.no_grad(), step.autocast():
            step.model(*after.inputs)
        step.backward(loss)
        return [loss.detach()]


class ExplicitParameters(Tied):
    title = "CheckpointFunction, which gets the parameters as arguments, on a layer in three places"
    variants = ("explicit",)
    plannable = False  # it would be the tied one


class CastingLinear(nn.Module):
    """A linear layer that converts its input to its own dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x.to(self.linear.weight.dtype)))


class MixedDtypes(Scenario):
    title = "parameters of four dtypes in one model, bfloat16 among them"
    half = True
    tolerance = 5e-2  # a bfloat16 weight has three digits, and training changes the last of them
    precisions = ("fp32", "bf16")  # a gradient scaler refuses float16 gradients

    def model(self, recompute: Recompute) -> nn.Module:
        dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.float32, torch.float32)
        return Chain([CastingLinear(dtype) for dtype in dtypes], recompute)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.5)


class OverflowOnOneRank(Scenario):
    title = "a scaled loss overflows on one rank: all must skip that step"
    scales_loss = True

    def run(self, step: Step) -> list[torch.Tensor]:
        (batch,) = step.batches
        with step.autocast():
            loss = self.loss(step.model(*batch.inputs), batch.targets)
        # Times the scale that a gradient scaler begins with, 65536, this is beyond the largest float32.
        step.backward(loss * (1e36 if step.number == 1 and step.rank == 0 else 1.0))
        return [loss.detach()]


class UnevenData(Scenario):
    title = "ranks run out of data one after the other"
    uneven = True

    def steps_of(self, rank: int, size: int, steps: int) -> int:
        # The last rank has batches for all steps, and each rank before it for one step less.
        return max(1, steps - (size - 1 - rank))


class Sparse(Scenario):
    title = "an embedding with sparse gradients"
    vocabulary: ClassVar[int] = 32

    def model(self, recompute: Recompute) -> nn.Module:
        return SparseChain(self.vocabulary, recompute)

    def batch(self, rank: int, size: int, step: int, part: int = 0) -> Batch:
        number = (self._seed * 1000 + step) * 100 + rank
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(self.vocabulary, (SAMPLES,), generator=generator)
        return Batch((tokens,), torch.full((SAMPLES, WIDTH), 0.3))

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.5)


class SparseChain(Chain):
    """An embedding, then the chain; the embedding is not recomputed, since its input needs no gradient."""

    def __init__(self, vocabulary: int, recompute: Recompute) -> None:
        super().__init__([layer() for _ in range(LAYERS)], recompute)
        self.embedding = nn.Embedding(vocabulary, WIDTH, sparse=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        output: torch.Tensor = super().forward(self.embedding(tokens))
        return output


def run_along(scenario: Scenario, step: Step, path: Iterable[int]) -> list[torch.Tensor]:
    """A step that uses some of the layers only."""
    (batch,) = step.batches
    with step.autocast():
        loss = scenario.loss(step.model(*batch.inputs, path=list(path)), batch.targets)
    step.backward(loss)
    return [loss.detach()]


SCENARIOS: dict[str, type[Workload]] = {
    "plain": Plain,
    "tied": Tied,
    "nested": Nested,
    "unused": Unused,
    "unused-on-one-rank": UnusedOnOneRank,
    "accumulation": Accumulation,
    "short-last-group": ShortLastGroup,
    "frozen": Frozen,
    "changing-graph": ChangingGraph,
    "two-forwards": TwoForwards,
    "no-grad-forward": ForwardWithoutGrad,
    "explicit-parameters": ExplicitParameters,
    "mixed-dtypes": MixedDtypes,
    "overflow-on-one-rank": OverflowOnOneRank,
    "uneven-data": UnevenData,
    "sparse": Sparse,
}
