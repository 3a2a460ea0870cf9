"""Drawn modules and recipes that a split may break: each trains like the whole model, or all parts refuse it before its first step.

Every program draws a model of a few blocks, their recipe, and acts that go against it: sums, norms and sorts over split features,
parameters and buffers between split layers, hooks, shared and frozen layers, wrong or missing entries. Programs of harmless acts
alone must not be refused.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import hvd_ckpt as hc
from hvd_ckpt.processes.grid import current
from hvd_ckpt.utils.cuts import cut_of

WIDTH, HIDDEN, HEADS, LENGTH, BATCH = 8, 12, 4, 4, 3
ERRORS = (RuntimeError, ValueError, IndexError, TypeError)

# What a block does to the features between its column and row layers. The harmless ones treat each feature alike.
INSIDE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "tanh": lambda block, h: h.tanh(),
    "relu in place": lambda block, h: functional.relu(h * 1, inplace=True),
    "gelu": lambda block, h: functional.gelu(h),
    "added in place": lambda block, h: h.mul(2).add_(1),
    "softmax": lambda block, h: h.softmax(-1),
    "normed": lambda block, h: h / (h.norm(dim=-1, keepdim=True) + 1),
    "layer norm": lambda block, h: functional.layer_norm(h, h.shape[-1:]),
    "mean": lambda block, h: h - h.mean(-1, keepdim=True),
    "sum of batch": lambda block, h: h - h.mean(0, keepdim=True),
    "sum of all": lambda block, h: h - 0.1 * h.sum(),
    "flipped": lambda block, h: h.flip(-1),
    "rolled": lambda block, h: h.roll(1, -1),
    "running sum": lambda block, h: h.cumsum(-1),
    "sorted": lambda block, h: h.sort(-1).values,
    "largest": lambda block, h: h * (h == h.amax(-1, keepdim=True)),
    "top": lambda block, h: h * (h >= h.topk(2, -1).values[..., -1:]),
    "halves": lambda block, h: torch.cat([h.chunk(2, -1)[0] * 2, h.chunk(2, -1)[1]], -1),
    "hard-coded size": lambda block, h: h.reshape(BATCH, LENGTH, HIDDEN).tanh(),
    "whole shape": lambda block, h: h.reshape(*h.shape[:2], -1).tanh(),
    "scale": lambda block, h: h * block.scale,
    "zero scale": lambda block, h: h * (1 + block.zero),
    "scale of each": lambda block, h: h * block.each,
    "buffer of each": lambda block, h: h + block.shift,
    "scalar buffer": lambda block, h: h * block.factor,
    "noise": lambda block, h: h + 0.1 * torch.randn_like(h),
    "dropout": lambda block, h: functional.dropout(h, 0.3),
    "weight used": lambda block, h: h * block.up.weight.norm(),
    "bias used": lambda block, h: h + block.up.bias,
    "whole input": lambda block, h: h * block.seen.mean(),
    "penalty": lambda block, h: h + (block.down.weight**2).mean(),
    "detached": lambda block, h: h + h.detach().tanh(),
    "rows": lambda block, h: h.cumsum(1),
}  # fmt: skip
HARMLESS_INSIDE = {
    "tanh", "relu in place", "gelu", "added in place", "sum of batch", "whole shape", "scalar buffer", "detached", "rows",
}  # fmt: skip
# Acts on a block after it is made; those of the second group are harmless.
Act = Callable[[Any], Any]
ACTS: dict[str, Act] = {
    "hook scales the columns": lambda block: block.up.register_forward_hook(lambda *all: all[2] * 2),
    "hook norms the columns": lambda block: block.up.register_forward_hook(
        lambda *all: all[2] / (1 + all[2].norm(dim=-1, keepdim=True))
    ),
    "hook sees the input": lambda block: block.up.register_forward_pre_hook(lambda *all: (all[1][0] * 2,)),
    "functional column": lambda block: setattr(block, "functional", True),
    "residual inside": lambda block: setattr(block, "inside_residual", True),
    "no bias": lambda block: setattr(block.down, "bias", None),
    "shared column": lambda block: setattr(block, "other", block.up),
    "zero row": lambda block: nn.init.zeros_(block.down.weight),
    "forward of its own": lambda block: setattr(
        block.up, "forward", lambda x: x.repeat(1, 1, 2)[..., :HIDDEN]
    ),
}
HARMLESS_ACTS: dict[str, Act] = {
    "hook scales the result": lambda block: block.down.register_forward_hook(lambda *all: all[2] * 2),
    "hook reads": lambda block: block.register_forward_hook(lambda *all: None),
    "frozen column": lambda block: block.up.requires_grad_(False),
    "frozen bias": lambda block: block.down.bias.requires_grad_(False),
    "frozen norm": lambda block: block.norm.requires_grad_(False),
    "used twice": lambda block: setattr(block, "passes", 2),
    "double": lambda block: block.double(),
    "buffer counts": lambda block: block.register_buffer("count", torch.zeros(1)),
}
# What becomes of the kinds of a right recipe; an entry without a kind is left out.
RECIPES: dict[str, Callable[[str], str]] = {
    "columns and rows exchanged": lambda kind: {"column": "row", "row": "column"}.get(kind, kind),
    "no rows": lambda kind: "" if kind == "row" else kind,
    "no columns": lambda kind: "" if kind == "column" else kind,
    "no heads": lambda kind: "" if kind.startswith("heads") else kind,
    "heads of nothing": lambda kind: kind.partition(":")[0],
    "fused columns": lambda kind: "fused:3" if kind == "column" else kind,
}
ADDED = {"head by columns": "head", "norm by columns": "blocks.0.norm"}


class Block(nn.Module):
    """norm, column, what is drawn, row, and a residual connection; as attention, heads between them."""

    def __init__(self, inside: list[str], heads: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.scale, self.zero = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(1))
        self.each = nn.Parameter(torch.ones(HIDDEN))
        self.register_buffer("shift", torch.ones(HIDDEN))
        self.register_buffer("factor", torch.tensor(0.5))
        self.inside, self.heads, self.passes = inside, HEADS if heads else 0, 1
        self.functional = self.inside_residual = False
        self.seen = torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        kind = x.dtype
        for _ in range(self.passes):
            self.seen = normed = self.norm(x.to(self.norm.weight.dtype))
            weights = self.up.weight, self.up.bias
            h = functional.linear(normed, *weights) if self.functional else self.up(normed)
            if self.heads:
                rows = h.view(*h.shape[:2], self.heads, -1).transpose(1, 2)
                h = functional.scaled_dot_product_attention(rows, rows, rows).transpose(1, 2).flatten(2)
            for name in self.inside:
                h = INSIDE[name](self, h)
            if self.inside_residual:
                h = h + normed.mean(-1, keepdim=True)
            if hasattr(self, "count"):
                self.count += 1
            x = x + self.down(h).to(kind)
        self.seen = torch.zeros(1)
        return x


class Model(nn.Module):
    def __init__(self, blocks: list[Block]) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(WIDTH, 6)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Program(NamedTuple):
    """A model, its recipe, whether it must not be refused, and what was drawn, in words."""

    model: Model
    recipe: dict[str, str]
    harmless: bool
    words: str


def draw(seed: int, ranks: int, tensor: int) -> Program:
    """The program of a seed."""
    draw, words, harmless = random.Random(seed), list[str](), True
    torch.manual_seed(seed)
    blocks, recipe = list[Block](), dict[str, str]()
    for number in range(draw.choice((1, 2, 2, 3))):
        inside = [draw.choice(sorted(HARMLESS_INSIDE))]
        if draw.random() < 0.35:
            inside.append(draw.choice(sorted(INSIDE)))
        heads = draw.random() < 0.3
        block, name = Block(inside, heads), f"blocks.{number}"
        recipe |= {name: "heads:heads"} if heads else {}
        recipe |= {f"{name}.up": "column", f"{name}.down": "row"}
        acts = []
        if draw.random() < 0.35:
            acts.append(draw.choice(sorted(ACTS | HARMLESS_ACTS)))
            (ACTS | HARMLESS_ACTS)[acts[0]](block)
        # The norm is within the module of the heads, which is to pass its inputs to column layers alone.
        harmless &= HARMLESS_INSIDE.issuperset(inside) and not set(acts) & set(ACTS) and not heads
        words.append(f"{name}{' with heads' * heads}: {', '.join(inside + acts)}")
        blocks.append(block)
    if draw.random() < 0.15:
        change, harmless = draw.choice(["one entry less", *sorted(RECIPES), *ADDED]), False
        if change in RECIPES:
            recipe = {name: new for name, kind in recipe.items() if (new := RECIPES[change](kind))}
        elif change in ADDED:
            recipe[ADDED[change]] = "column"
        else:
            recipe.popitem()
        words.append(change)
    if draw.random() < 0.15 and len(blocks) > 1:
        blocks[-1].down.weight = blocks[0].down.weight
        words.append("tied rows")
    return Program(Model(blocks), recipe, harmless, "; ".join(words))


def train(model: nn.Module, wrap: Callable[..., Any] = lambda optimizer, named: optimizer) -> Iterator[None]:
    """Stops after each backward pass."""
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    generator = torch.Generator().manual_seed(7)
    torch.manual_seed(3)
    for _ in range(2):
        x = torch.randn(BATCH, LENGTH, WIDTH, generator=generator)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        yield
        optimizer.step()


def distance(model: nn.Module, whole: nn.Module) -> float:
    expected, far = dict(whole.state_dict(keep_vars=True)), 0.0
    for name, tensor in model.state_dict(keep_vars=True).items():
        there, cut = expected[name].detach().double(), cut_of(tensor)
        there = there if cut is None else cut.of(there, current().tensor, current().part)
        far = max(far, float((tensor.detach().double() - there).norm() / there.norm().clamp(min=1e-2)))
    return far


def check(program: Program) -> list[str]:
    """What is wrong, the same on all parts."""
    whole, steps, outcome, said = copy.deepcopy(program.model), 0, "right", ""
    try:
        for _ in train(whole):
            pass
    except ERRORS:
        return []  # no program in one process either
    try:
        model = hc.tensor_parallel(program.model, program.recipe)
        for _ in train(model, hc.DistributedOptimizer):
            steps += 1
    except ERRORS as error:
        outcome, said = "refused late" if steps else "refused", f"{type(error).__name__}: {error}"
    else:
        outcome = "right" if distance(model, whole) < 1e-4 else "wrong"
    outcomes = sorted(set(current().gather_objects(outcome)))
    bad = len(outcomes) > 1 or outcome in ("wrong", "refused late")
    bad |= program.harmless and outcome != "right"
    return [f"{', '.join(outcomes)}: {program.words} {said}"] if bad else []
