"""Random chains in random schedules: the bits of the whole model on each rank."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
from controllers import SCRIPTS
from torch import Tensor, nn
from torch.nn import functional

import hvd_ckpt as hc
from hvd_ckpt.data.objectives import Batch
from hvd_ckpt.processes.grid import current

sys.path.append(str(SCRIPTS))
import stages

WIDTH = 4
SCHEDULES = ("gpipe", "1f1b", "interleaved")


def block(stashed: list[str], popped: list[str], dropout: float) -> nn.Module:
    @hc.skip.skippable(stash=stashed, pop=popped)
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Any:
            for name in popped:
                skip = yield hc.skip.pop(name)
                x = x + 0.5 * skip * x
            y = functional.dropout(torch.tanh(self.linear(x)), dropout, self.training)
            for name in stashed:
                yield hc.skip.stash(name, y)
            return x + y

    return Block()


class Program:
    """A chain, its cuts and schedule, and the sizes of its batches; the same on every rank for one seed.

    Args:
        seed: of all choices.
        count: of the stages.
    """

    def __init__(self, seed: int, count: int) -> None:
        draw = random.Random(seed)
        schedule = draw.choice(SCHEDULES)
        virtual = 1 if schedule == "1f1b" else draw.randint(1, 3)
        parts = count * virtual
        blocks = parts + draw.randint(0, 6)
        cuts = sorted(draw.sample(range(1, blocks), parts - 1))
        self.seed, self.dropout = seed, draw.choice([0.0, 0.2])
        self.skips = [sorted(draw.sample(range(blocks), 2)) for _ in range(draw.randint(0, 4))]
        self.blocks = blocks
        first, second = draw.randint(1, 12), draw.randint(1, 12)
        self.samples = [first, first, first, second]  # a layout that has been repeated changes
        self.chunks = draw.randint(1, 8)
        self.arguments: dict[str, Any] = {
            "balance": [end - start for start, end in zip([0, *cuts], [*cuts, blocks])],
            "schedule": schedule,
            "virtual_stages": virtual,
            "checkpoint": draw.choice(["always", "except_last", "never"]),
        }

    def __repr__(self) -> str:
        return f"program {self.seed}: {self.chunks} chunks, {self.arguments}, skips {self.skips}, samples {self.samples}"

    def model(self) -> nn.Sequential:
        names = [(f"skip {number}", *ends) for number, ends in enumerate(self.skips)]
        return nn.Sequential(
            *(
                block(
                    [name for name, source, _ in names if source == number],
                    [name for name, _, target in names if target == number],
                    self.dropout,
                )
                for number in range(self.blocks)
            )
        )

    def data(self) -> list[Batch]:
        torch.manual_seed(1000 + hc.rank())
        return [Batch((torch.randn(count, WIDTH),), torch.randn(count, WIDTH)) for count in self.samples]


def draw(seed: int, ranks: int, count: int) -> Program:
    """The program of a seed."""
    return Program(seed, count)


def check(program: Program) -> list[str]:
    """Trains in stages and whole; what differs, the same on every rank."""
    whole, staged = (
        stages.train(program.model, program.data(), arguments, functional.mse_loss, None, program.chunks)
        for arguments in (None, program.arguments)
    )
    everyone = current().gather_objects(stages.differences(whole, staged))
    return [f"differs: {name}" for each in everyone for name in each]
