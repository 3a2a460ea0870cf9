"""Scenarios in parts of layers, and their engines: a small transformer, and one thing each that splitting it gets wrong.

All ranks are parts of one replica and have the same batches. What they train is put together again, and compared with the whole
model in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

import hvd_ckpt as hc
from hvd_ckpt.app.compare.cells import Chain, Recompute
from hvd_ckpt.app.compare.runner.engine import Engine, OnTorch
from hvd_ckpt.app.compare.runner.engines import HvdCkpt
from hvd_ckpt.app.compare.runner.jobs import launched_rank_and_size
from hvd_ckpt.app.compare.scenarios import Scenario
from hvd_ckpt.data.objectives import Batch
from hvd_ckpt.processes import parts
from hvd_ckpt.utils.cuts import cut_of

WIDTH, HEADS, LENGTH, SAMPLES, LAYERS, VOCABULARY = 16, 8, 6, 4, 2, 24


class Embedding(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.tokens(tokens)
        return embedded + self.positions


class Attention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = HEADS, dropout
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            project(x).view(batch, length, self.heads, -1).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        attended = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        result: Tensor = self.output(attended.transpose(1, 2).reshape(batch, length, -1))
        return result


class Layer(nn.Module):
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


RECIPE = {
    "chain.0.tokens": "vocabulary",
    "chain.*.attention": "heads:heads",
    **{f"chain.*.attention.{name}": "column" for name in ("query", "key", "value")},
    "chain.*.attention.output": "row",
    "chain.*.up": "column",
    "chain.*.down": "row",
    f"chain.{LAYERS + 1}": "vocabulary",
}


class InParts(Scenario):
    """A transformer that learns random tokens; every scenario changes one thing of it."""

    title = "nothing special"
    variants = ("none", "reentrant", "non-reentrant")
    staged = True
    model_line = f"{LAYERS} layers of {WIDTH} units, {SAMPLES} samples"
    dropout, vocabulary = 0.0, VOCABULARY

    def model(self, recompute: Recompute) -> nn.Module:
        layers = [Layer(self.dropout) for _ in range(LAYERS)]
        head = nn.Linear(WIDTH, self.vocabulary, bias=False)
        return Chain([Embedding(self.vocabulary), *layers, head], recompute)

    def batch(self, rank: int, size: int, step: int, part: int = 0) -> Batch:
        generator = torch.Generator().manual_seed(1000 * self._seed + step)
        tokens = torch.randint(self.vocabulary, (2, SAMPLES, LENGTH), generator=generator)
        return Batch((tokens[0],), tokens[1])

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output.flatten(0, 1), target.flatten())


class Tied(InParts):
    title = "the head has the weights of the embedding"

    def model(self, recompute: Recompute) -> nn.Module:
        model = super().model(recompute)
        chain: Any = model.chain
        chain[-1].weight = chain[0].tokens.weight
        return model


class Dropout(InParts):
    title = "dropout, of attention and outside"
    dropout = 0.2


class Odd(InParts):
    title = "a vocabulary that the parts do not divide"
    vocabulary = VOCABULARY - 1


class Frozen(InParts):
    title = "a column layer and a norm are frozen"

    def model(self, recompute: Recompute) -> nn.Module:
        model = super().model(recompute)
        chain: Any = model.chain
        chain[1].up.requires_grad_(False)
        chain[2].norms[0].requires_grad_(False)
        return model


IN_PARTS: dict[str, type[InParts]] = {
    "plain": InParts,
    "tied": Tied,
    "dropout": Dropout,
    "odd-vocabulary": Odd,
    "frozen": Frozen,
}


class HvdCkptParts(HvdCkpt):
    """This library's ``tensor_parallel``."""

    reduces_by = ""  # there is one replica

    def start(self, folder: Path) -> None:
        _, self.stages = launched_rank_and_size()
        hc.init(tensor=self.stages)
        self.rank, self.size = hc.rank(), hc.size()

    def wrap(self, model: nn.Module, optimizer: Optimizer, passes: int = 1) -> tuple[nn.Module, Optimizer]:
        return super().wrap(hc.tensor_parallel(model, RECIPE), optimizer, passes)

    def weights(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
        return {name: whole(parameter) for name, parameter in model.named_parameters()}


def whole(parameter: Tensor) -> Tensor:
    """A parameter from the slices of all parts."""
    cut, own = cut_of(parameter), parameter.detach()
    if cut is None:
        return own
    count = hc.tensor_size()
    shapes = [
        [cut.length(count, part) if dim == cut.dim else length for dim, length in enumerate(own.shape)]
        for part in range(count)
    ]
    return cut.whole(parts.gather(own, shapes))


class TorchParts(OnTorch):
    """PyTorch's ``parallelize_module`` over Gloo."""

    title = "torch"

    def start(self, folder: Path) -> None:
        super().start(folder)
        self.stages, self.rank, self.size = self.size, 0, 1

    def wrap(self, model: Any, optimizer: Optimizer, passes: int = 1) -> tuple[nn.Module, Optimizer]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        plan: dict[str, Any] = {"chain.0.tokens": RowwiseParallel(input_layouts=Replicate())}
        plan[f"chain.{LAYERS + 1}"] = ColwiseParallel(output_layouts=Replicate())
        for name, kind in RECIPE.items():
            makes: dict[str, Callable[[], Any]] = {"column": ColwiseParallel, "row": RowwiseParallel}
            if kind in makes:
                plan |= {name.replace("*", str(layer + 1)): makes[kind]() for layer in range(LAYERS)}
        for layer in model.chain[1:-1]:
            layer.attention.heads //= self.stages
        parallelize_module(model, init_device_mesh("cpu", (self.stages,)), plan)
        return model, type(optimizer)(model.parameters(), **optimizer.defaults)

    def weights(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
        return {
            name: (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach()
            for name, parameter in model.named_parameters()
        }


PART_ENGINES: tuple[type[Engine], ...] = (HvdCkptParts, TorchParts)
LEGEND = (
    "right: the parameters, put together from all parts, equal to rounding those of the whole model in one process, and two runs "
    "end in the same bits. wrong: they do not. error, hang: no result.",
    "torch: parallelize_module with ColwiseParallel and RowwiseParallel over Gloo. It makes two parameters of one that is tied; "
    "PyTorch's reentrant variant loses gradients of a first segment whose inputs are token numbers.",
    "dropout: the masks are those that the whole model draws. Other masks are not wrong for training; the result then depends on "
    "the number of parts.",
)
