"""Scenarios in pipeline stages: a small chain of blocks, and one thing each that cutting it into stages gets wrong.

Each is a workload like any other, whose ranks have a stage each instead of batches of their own, and whose variants are
schedules. The reference is the whole model in one process, which runs the same micro-batches one after the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import hvd_ckpt as hc
from hvd_ckpt.app.compare.cells import Recompute
from hvd_ckpt.app.compare.runner.stages import Cut, Unstaged
from hvd_ckpt.app.compare.scenarios import Scenario
from hvd_ckpt.app.compare.workloads import Step
from hvd_ckpt.data.objectives import IGNORED, Batch
from hvd_ckpt.planning.balance import balance_costs

SCHEDULES = ("gpipe", "1f1b")
WIDTH, SAMPLES, CHUNKS, BLOCKS, LENGTH, VOCABULARY = 8, 8, 4, 8, 6, 12


class Blocks(nn.Sequential):
    """The blocks of a scenario, and the schedule of the stages that an engine makes of them."""

    def __init__(self, scenario: Staged, schedule: str | None) -> None:
        super().__init__(*scenario.blocks())
        self.scenario, self.schedule = scenario, schedule

    def cut(self, stages: int) -> Cut:
        """Equal chunks, one for each stage."""
        balance, scenario = balance_costs([1.0] * BLOCKS, stages), self.scenario
        return Cut(balance, CHUNKS, self.schedule, scenario.loss, scenario.weight)

    def accumulate(self, batch: Batch) -> Tensor:
        """The gradients of the whole model, micro-batch by micro-batch; an engine has its own method in place of this one."""
        # A pipeline seeds each block by its position. So does this, in each step, since a second call changes nothing.
        hc.seed_blocks(self)
        return Unstaged().cut(self, self.cut(1)).accumulate(batch)


class Staged(Scenario):
    """A chain of eight blocks; every scenario changes one thing of it."""

    title = "nothing special"
    learning_rate = 0.1
    variants = SCHEDULES
    staged = True
    small = False  # tracing a model takes seconds
    model_line = f"{BLOCKS} blocks of {WIDTH} units, {SAMPLES} samples"

    def model(self, recompute: Recompute) -> nn.Module:
        return Blocks(self, recompute.schedule)

    def blocks(self) -> list[nn.Module]:
        return [self.block() for _ in range(BLOCKS)]

    def block(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def batch(self, rank: int, size: int, step: int, part: int = 0) -> Batch:
        # Dropout draws from the default generator, whose state must not depend on who asks for a batch.
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(1000 * self._seed + step)
            inputs, targets = self.sample(step)
        return Batch((inputs,), targets)

    def sample(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a step, from torch's random state."""
        return torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, WIDTH)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output, target)

    def weight(self, part: Batch) -> int:
        """The number of terms that the loss of a micro-batch is the mean of."""
        return len(part.targets)

    def run(self, step: Step) -> list[Tensor]:
        (batch,) = step.batches
        blocks: Any = step.model
        return [blocks.accumulate(batch)]


class BatchNorm(Staged):
    title = "running statistics of batch norms"

    def block(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())


class Uneven(Staged):
    title = f"{SAMPLES + 2} samples in {CHUNKS} micro-batches"

    def sample(self, step: int) -> tuple[Tensor, Tensor]:
        return torch.randn(SAMPLES + 2, WIDTH), torch.randn(SAMPLES + 2, WIDTH)


class Lengths(Staged):
    title = "sequences of another length in each step"

    def sample(self, step: int) -> tuple[Tensor, Tensor]:
        shape = (SAMPLES, LENGTH + step, WIDTH)
        return torch.randn(shape), torch.randn(shape)


class Weighted(Staged):
    title = "a mean over tokens, which micro-batches have unevenly many of"

    def blocks(self) -> list[nn.Module]:
        layers = [self.block() for _ in range(BLOCKS - 2)]
        return [nn.Embedding(VOCABULARY, WIDTH), *layers, nn.Linear(WIDTH, VOCABULARY, bias=False)]

    def sample(self, step: int) -> tuple[Tensor, Tensor]:
        targets = torch.randint(VOCABULARY, (SAMPLES, LENGTH))
        # The first of four micro-batches has 7 terms and the others 12: a mean of their means would be wrong.
        targets[0, 1:] = IGNORED
        return torch.randint(VOCABULARY, (SAMPLES, LENGTH)), targets

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=IGNORED)

    def weight(self, part: Batch) -> int:
        return int((part.targets != IGNORED).sum())


class Tied(Weighted):
    title = "the weights of the first block are those of the last"

    def blocks(self) -> list[nn.Module]:
        first, *others, last = super().blocks()
        last.weight = first.weight
        return [first, *others, last]

    def sample(self, step: int) -> tuple[Tensor, Tensor]:
        return torch.randint(VOCABULARY, (SAMPLES, LENGTH)), torch.randint(VOCABULARY, (SAMPLES, LENGTH))


class Dropout(Staged):
    title = "dropout"

    def block(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.2))


@hc.skippable(stash=["skip"])
class Stash(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        y = torch.tanh(self.linear(x))
        yield hc.stash("skip", y)
        return y


@hc.skippable(pop=["skip"])
class Pop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        skip = yield hc.pop("skip")
        return torch.tanh(self.linear(x)) + skip


class Skip(Staged):
    title = "a skip connection from the first block to the last"

    def blocks(self) -> list[nn.Module]:
        return [Stash(), *(self.block() for _ in range(BLOCKS - 2)), Pop()]


STAGED: dict[str, type[Staged]] = {
    "plain": Staged,
    "batch-norm": BatchNorm,
    "uneven": Uneven,
    "lengths": Lengths,
    "weighted": Weighted,
    "tied": Tied,
    "dropout": Dropout,
    "skip": Skip,
}
