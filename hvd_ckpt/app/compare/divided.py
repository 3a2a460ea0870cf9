"""Scenarios of a model that ranks have together, in pipeline stages or in parts of layers: what dividing it gets wrong.

Each is a workload like any other, and an entry of a table here. Its ranks have the same batches. What each rank trains is compared
with the whole model in one process, which runs the same micro-batches one after the other.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import hvd_ckpt as hc
from hvd_ckpt.app.compare.cells import Chain, Recompute
from hvd_ckpt.app.compare.runner.stages import Cut, Unstaged
from hvd_ckpt.app.compare.scenarios import Scenario
from hvd_ckpt.app.compare.workloads import Step
from hvd_ckpt.data.objectives import IGNORED, Batch
from hvd_ckpt.parallel.pipeline.balance import balance_costs

WIDTH, HEADS, LENGTH, CHUNKS = 16, 8, 6, 4

STAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("nothing special", {}),
    "batch-norm": ("running statistics of batch norms", {"norm": partial(nn.BatchNorm1d, LENGTH)}),
    "uneven": ("10 samples in 4 micro-batches", {"samples": 10}),
    "lengths": ("sequences of another length in each step", {"growth": 1}),
    # One micro-batch has 7 terms and the others 12: a mean of their means would be wrong.
    "weighted": ("a mean over tokens, which micro-batches have unevenly many of", {"ignored": 5}),
    "tied": ("the weights of the first block are those of the last", {"tied": True}),
    "dropout": ("dropout", {"dropout": 0.2}),
}
PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("nothing special", {}),
    "tied": ("the head has the weights of the embedding", {"tied": True}),
    "dropout": ("dropout, of attention and outside", {"dropout": 0.2}),
    "odd-vocabulary": ("a vocabulary that the parts do not divide", {"vocabulary": 23}),
    "frozen": ("a column layer and a norm are frozen", {"frozen": ("1.up", "2.norms.0")}),
}
ENGINES = {
    "stages": tuple(
        f"hvd_ckpt.app.compare.runner.stages:{name}" for name in ("HvdCkptStages", "TorchStages")
    ),
    "parts": tuple(f"hvd_ckpt.app.compare.runner.parts:{name}" for name in ("HvdCkptParts", "TorchParts")),
}
"""This library's first."""


class Divided(Scenario):
    """Embedding, layers and head on random tokens; the entries of the tables change one attribute of it each."""

    learning_rate = 0.1
    precisions = ("fp32",)
    model_line = f"layers of {WIDTH} units on {LENGTH} tokens"
    depth = 2
    samples, growth, ignored, vocabulary, dropout, tied = 8, 0, 0, 24, 0.0, False
    frozen: tuple[str, ...] = ()

    def layers(self) -> nn.Sequential:
        first = nn.Embedding(self.vocabulary, WIDTH)
        last = nn.Linear(WIDTH, self.vocabulary, bias=False)
        if self.tied:
            last.weight = first.weight
        layers = nn.Sequential(first, *(self.layer() for _ in range(self.depth)), last)
        for name in self.frozen:
            layers.get_submodule(name).requires_grad_(False)
        return layers

    @abstractmethod
    def layer(self) -> nn.Module:
        """A new layer."""

    def batch(self, rank: int, size: int, step: int, part: int = 0) -> Batch:
        shape = (2, self.samples, LENGTH + self.growth * step)
        inputs, targets = torch.randint(self.vocabulary, shape, generator=self.random(0, step))
        targets[0, 1 : 1 + self.ignored] = IGNORED
        return Batch((inputs,), targets)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=IGNORED)


class Staged(Divided):
    divided = "stages"
    variants = ("gpipe", "1f1b")
    depth, norm = 6, nn.Identity

    def layer(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), self.norm(), nn.Tanh(), nn.Dropout(self.dropout))

    def model(self, recompute: Recompute) -> nn.Module:
        return Blocks(self, recompute.way.schedule)

    def run(self, step: Step) -> list[Tensor]:
        blocks: Any = step.model
        return [blocks.accumulate(*step.batches)]


class Blocks(nn.Sequential):
    """The blocks of a scenario, and how an engine cuts them into stages."""

    def __init__(self, scenario: Staged, schedule: str | None) -> None:
        super().__init__(*scenario.layers())
        self._loss, self._schedule = scenario.loss, schedule

    def cut(self, stages: int) -> Cut:
        """Equal chunks, one for each stage."""
        terms = lambda part: int((part.targets != IGNORED).sum())  # noqa: E731
        return Cut(balance_costs([1.0] * len(self), stages), CHUNKS, self._schedule, self._loss, terms)

    def accumulate(self, batch: Batch) -> Tensor:
        """The gradients of the whole model, micro-batch by micro-batch; an engine has its own method in place of this one."""
        # A pipeline seeds each block by its position. So does this, in each step, since a second call changes nothing.
        hc.seed_blocks(self)
        return Unstaged().cut(self, self.cut(1)).accumulate(batch)


class InParts(Divided):
    divided = "parts"
    variants = ("none", "reentrant", "non-reentrant")

    def layer(self) -> nn.Module:
        return Layer(self.dropout)

    def model(self, recompute: Recompute) -> nn.Module:
        return Split(list(self.layers()), recompute)


class Split(Chain):
    """The chain and how its layers are split, as :func:`hvd_ckpt.tensor_parallel` takes it."""

    recipe = {  # noqa: RUF012
        "chain.0": "vocabulary",
        "chain.*.attention": "heads:heads",
        **{f"chain.*.attention.{name}": "column" for name in ("query", "key", "value")},
        "chain.*.attention.output": "row",
        "chain.*.up": "column",
        "chain.*.down": "row",
        f"chain.{InParts.depth + 1}": "vocabulary",
    }


for _kind, _table in ((Staged, STAGES), (InParts, PARTS)):
    for _name, (_title, _options) in _table.items():
        _own = {"title": _title, **_options}
        type(_kind.__name__, (_kind,), _own, name=f"{_kind.divided}-{_name}")


class Layer(nn.Module):
    """A layer of a transformer. (PyTorch's own and :mod:`hvd_ckpt.app.models.gpt`'s are fused, which its parts do not split.)"""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = Attention(dropout)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norms[0](x)))
        result: Tensor = x + self.dropout(self.down(functional.gelu(self.up(self.norms[1](x)))))
        return result


class Attention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = HEADS, dropout
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        projected = (project(x) for project in (self.query, self.key, self.value))
        query, key, value = (x.unflatten(2, (self.heads, -1)).transpose(1, 2) for x in projected)
        dropout = self.dropout if self.training else 0.0
        attended = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True
        )
        result: Tensor = self.output(attended.transpose(1, 2).flatten(2))
        return result
