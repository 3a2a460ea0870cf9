"""Tests of resumed runs: after any step, they end in the same bits and reduce each step in the same way."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from one_process import WIDTH, batch
from sharded import distribute
from torch import nn

import hvd_ckpt as hc

pytestmark = pytest.mark.ranks(gloo=(2,), mpi=(4,))

LAYERS = 3
EACH_LAYER = 300 / 2**20  # MiB: the size of a bucket
STEPS = 5


@dataclass(frozen=True)
class Step:
    """What each rank does: the layers that each of its backward passes runs through."""

    passes: Sequence[Sequence[Sequence[int]]]


def alike(*passes: int, layers: int = LAYERS) -> list[Step]:
    """Steps of so many backward passes on each rank, through so many layers."""
    return [Step([[range(layers)] * count] * hc.size()) for count in passes]


def drawn(seed: int, same: bool) -> list[Step]:
    """Ranks differ, unless they are to be the ``same``, in how many passes they run; some layers are idle for a while."""
    random.seed(seed)
    steps = []
    for _ in range(STEPS):
        usual, idle = random.choice([1, 2, 3]), random.choice([None, None, 0, LAYERS - 1])
        layers = [layer for layer in range(LAYERS) if layer != idle]
        passes = []
        for _ in range(hc.size()):
            count = usual if random.random() < 0.7 else random.choice([0, 1, 2, 3])
            passes.append([layers * random.choice([1, 1, 1, 2]) for _ in range(count)])
        steps.append(Step(passes[:1] * hc.size() if same else passes))
    return steps


class Run:
    """A model, its optimizer and how far they have come."""

    def __init__(self, stage: int, options: Any, state: Any = None) -> None:
        torch.manual_seed(7)
        self.model: Any = nn.Sequential(
            *[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
        )
        if state is not None:
            self.model.load_state_dict(state["model"])
        self.optimizer: Any = distribute(
            torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9),
            named_parameters=self.model.named_parameters(),
            bucket_cap_mb=EACH_LAYER,
            model=self.model,
            shard=stage,
            **options,
        )
        if state is not None:
            self.optimizer.load_state_dict(state["optimizer"])
            self.optimizer.load_reduction_state_dict(state["reduction"])
            if stage:
                self.optimizer.load_weight_pieces(state["pieces"])

    def step(self, number: int, step: Step, zeros: bool = False) -> Any:
        """Returns how the gradients were reduced. Before, they are set to zero or dropped."""
        self.optimizer.zero_grad(set_to_none=not zeros)
        for part, layers in enumerate(step.passes[hc.rank()]):
            x = batch(number, hc.rank(), part)
            for layer in layers:
                x = self.model[layer](x)
            (x - 0.3).square().mean().backward()
        self.optimizer.step()
        return self.optimizer.reduction_stats.last

    def state(self) -> Any:
        with self.optimizer.gathered_parameters():
            model = copy.deepcopy(self.model.state_dict())
        state = {
            "optimizer": self.optimizer.state_dict(),
            "reduction": self.optimizer.reduction_state_dict(),
            "pieces": self.optimizer.weight_pieces() if self.optimizer.shard_stage else None,
        }
        return {"model": model, **copy.deepcopy(state)}

    def weights(self) -> list[Any]:
        return [weight.tolist() for weight in self.state()["model"].values()]


PROGRAMS = {
    "shorter": lambda stage: alike(3, 3, 2, 2, 3, 3),
    "idle": lambda stage: alike(1) + alike(1, 1, 1, layers=LAYERS - 1) + alike(1),
    "unused": lambda stage: alike(1, 1, 1, layers=LAYERS - 1),
    "random": lambda stage: drawn(stage, same=stage == 3),
}


@pytest.mark.parametrize(
    ("program", "stage", "options"),
    [
        ("shorter", 0, {}),
        ("idle", 2, {}),
        ("random", 0, {}),
        ("random", 2, {}),
        ("random", 3, {}),
        ("unused", 2, {"wire": "bf16"}),
    ],
)
def test_resumed_after_every_step(program: str, stage: int, options: dict[str, Any]) -> None:
    steps = PROGRAMS[program](stage)
    run = Run(stage, options)
    reductions, states = [], []
    for number, step in enumerate(steps):
        reductions.append(run.step(number, step))
        states.append(run.state())
    for stop, state in enumerate(states, start=1):
        resumed = Run(stage, options, state)
        for number in range(stop, len(steps)):
            assert resumed.step(number, steps[number]) == reductions[number], (
                f"step {number} is reduced in another way after {stop} steps"
            )
        assert resumed.weights() == run.weights(), f"other bits when resumed after {stop} steps"


@pytest.mark.parametrize("zeros", [(True,) * 5, (False, True, True, False, True)], ids=["zeros", "mixed"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_that_a_resumed_run_sets_to_zero(stage: int, zeros: Sequence[bool]) -> None:
    """Momentum moves a parameter that no backward pass of the next step uses, also if nothing was cleared before."""
    steps = alike(1) + alike(1, layers=LAYERS - 1) + alike(1) + alike(1, 1, layers=LAYERS - 1)
    run, states = Run(stage, {}), []
    for number, step in enumerate(steps):
        run.step(number, step, zeros[number])
        states.append(run.state())
    for stop, state in enumerate(states, start=1):
        resumed = Run(stage, {}, state)
        for number in range(stop, len(steps)):
            resumed.step(number, steps[number], zeros[number])
        assert resumed.weights() == run.weights(), f"other bits when resumed after {stop} steps"


@pytest.mark.parametrize("as_dense", [False, True], ids=["sparse", "sparse as dense"])
def test_sparse_gradients_that_a_resumed_run_sets_to_zero(as_dense: bool) -> None:
    """What is added to sparse zeros is added up in another order than what is added to dense ones."""

    def train(first: int, state: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        torch.manual_seed(0)
        model = nn.Embedding(3, 8, sparse=True)
        optimizer = hc.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            named_parameters=model.named_parameters(),
            sparse_as_dense=as_dense,
        )
        if state is not None:
            model.load_state_dict(state["model"])
            optimizer.load_reduction_state_dict(state["reduction"])
        states = []
        for step in range(first, 4):
            optimizer.zero_grad(set_to_none=False)
            for part in range(3):
                seed = torch.Generator().manual_seed(100 * step + 10 * part + hc.rank())
                tokens = torch.randint(3, (16,), generator=seed)
                (model(tokens) * torch.randn(16, 8, generator=seed)).sum().backward()
            optimizer.step()
            states.append(
                copy.deepcopy({"model": model.state_dict(), "reduction": optimizer.reduction_state_dict()})
            )
        return states

    whole = train(0)
    for stop in range(1, 4):
        resumed = train(stop, whole[stop - 1])
        assert torch.equal(resumed[-1]["model"]["weight"], whole[-1]["model"]["weight"]), (
            f"after {stop} steps"
        )
