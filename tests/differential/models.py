"""The models of random programs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from call_names import names_of_calls
from programs import IN_PARTS, REENTRANT, Block, Program
from stateful import LAYERS, VOCABULARY, WIDTH
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import checkpoint as torch_checkpoint

import hvd_ckpt as hc
from hvd_ckpt.planning.plan import BlockPlan, Plan, kind_of, parameter_shapes
from hvd_ckpt.planning.policy import KEEP, CheckpointPolicy
from hvd_ckpt.recompute.tape import Policy


class Caught(Exception):
    """Raised in the middle of a pass, and caught by the program."""


class _RaisesBehind(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise Caught


class Heads(nn.Module):
    """Attention of four heads among the two halves of a row."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, width = 4, WIDTH // 2
        self.project, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.project(x.view(len(x), 2, -1)).view(len(x), 2, 3, self.heads, 1)
        dropout = 0.25 if self.training else 0.0
        result = nn.functional.scaled_dot_product_attention(*parts.permute(2, 0, 3, 1, 4), dropout_p=dropout)
        projected: Tensor = self.output(result.transpose(1, 2).reshape(len(x), 2, -1))
        return projected.reshape(len(x), -1)


@dataclass
class Features:
    """An activation, those that skip a block, and a number."""

    x: Tensor
    skip: list[Tensor]
    count: int = 0


class Carried(nn.Module):
    """A block that takes and returns a container: it adds what skipped it, lets its input skip the next, and counts."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, features: Any) -> Any:
        x, skip, count = _parts_of(features)
        result = self.part(x) * (1 + 0.01 * count) + 0.1 * skip[-1]
        if count % 2:
            skip.append(x)
        else:
            skip[-1] = x
        if isinstance(features, dict):
            features.update(x=result, count=count + 1)
        elif isinstance(features, list):
            features[0], features[2] = result, count + 1
        else:
            features.x, features.count = result, count + 1
        return features


def pack(carrier: str, x: Tensor) -> Any:
    """A container of a kind with ``x``, or ``x`` itself."""
    if carrier == "dict":
        return {"x": x, "skip": [x * 0.5], "count": 0}
    if carrier == "list":
        return [x, [x * 0.5], 0]
    return Features(x, [x * 0.5]) if carrier == "dataclass" else x


def unpack(features: Any) -> Tensor:
    """What blocks have made of it."""
    if isinstance(features, Tensor):
        return features
    x, skip, count = _parts_of(features)
    return x + 0.1 * skip[0] + 0.01 * count


def _parts_of(features: Any) -> tuple[Tensor, list[Tensor], int]:
    if isinstance(features, dict):
        return features["x"], features["skip"], features["count"]
    if isinstance(features, list):
        return features[0], features[1], features[2]
    return features.x, features.skip, features.count


RECIPES = {
    "perceptron": {"layer": "features", "layer.0": "column", "layer.3": "row"},
    "heads": {"layer": "heads:heads", "layer.project": "fused:3", "layer.output": "row"},
    "gathered": {"layer": "vocabulary"},
}


def _deep(middle: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), middle(), nn.Linear(12, WIDTH))


MODULES: dict[str, Callable[[], nn.Module]] = {
    **LAYERS,
    "norm": lambda: nn.LayerNorm(WIDTH),
    "batchnorm": lambda: nn.BatchNorm1d(WIDTH, eps=0.1),
    "conv": lambda: nn.Conv2d(2, 2, 3, padding=1).to(memory_format=torch.channels_last),
    "deep": _deep(lambda: nn.LayerNorm(12)),
    "perceptron": _deep(lambda: nn.Dropout(0.25)),
    "heads": Heads,
}


class Part(nn.Module):
    """A block: takes and returns float32 of shape (batch, WIDTH), whatever it computes in."""

    def __init__(self, number: int, block: Block, parts: Sequence[Part]) -> None:
        super().__init__()
        self.number, self.kind, self.dtype = number, block.kind, getattr(torch, block.dtype)
        self.trapped = False
        if block.kind == "tied":
            self.weight = parts[block.of].layer.weight
            self.bias = nn.Parameter(torch.zeros(WIDTH))
        elif block.kind == "scale":
            self.factor = nn.Parameter(torch.tensor(0.5))
            self.nothing = nn.Parameter(torch.empty(0, 3))
        else:
            self.layer = MODULES.get(block.kind, lambda: nn.Linear(WIDTH, WIDTH))()
        if block.kind in ("branch", "unused"):
            self.other = nn.Linear(WIDTH, WIDTH)
        self.to(self.dtype)
        if block.kind == "frozen":
            self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.trapped:
            raise Caught
        x = x.to(self.dtype)
        if self.kind == "tied":
            x = torch.tanh(nn.functional.linear(x, self.weight, self.bias))
        elif self.kind == "scale":
            x = x * self.factor + self.nothing.sum()
        elif self.kind == "conv":
            x = torch.tanh(self.layer(x.view(-1, 2, 2, WIDTH // 4)).reshape(-1, WIDTH))
        elif self.kind in ("deep", "perceptron", "heads"):
            x = x + self.layer(x)
        elif self.kind == "branch":
            x = self.layer(x) + torch.sigmoid(self.other(x))
        elif self.kind == "dropout":
            x = nn.functional.dropout(torch.tanh(self.layer(x)), 0.25, self.training)
        elif self.kind in ("norm", "batchnorm") or self.kind in LAYERS:
            x = self.layer(x)
        else:
            x = torch.tanh(self.layer(x))
        return x.float()


class Net(nn.Module):
    """An embedding, perhaps, and segments of blocks.

    Args:
        recompute: whether segments are recomputed as the program says, or not at all.
        split: whether this process has its part of layers.
    """

    def __init__(self, program: Program, recompute: bool, split: bool) -> None:
        super().__init__()
        parts: list[Part] = []
        chains: list[nn.Module] = []
        if program.embedding:
            self.embedding = nn.Embedding(VOCABULARY, WIDTH, sparse=program.embedding == "sparse")
        self.math_kernel = program.math_kernel
        self.carriers = [segment.carrier for segment in program.segments]
        self.kinds = [segment.recompute if recompute else "keep" for segment in program.segments]
        for segment, kind in zip(program.segments, self.kinds):
            first = len(parts)
            for block in segment.blocks:
                parts.append(parts[block.of] if block.kind == "again" else Part(len(parts), block, parts))
            own: list[nn.Module] = list(parts[first:])
            if segment.carrier != "tensor":
                own = [Carried(part) for part in own]
            if kind.startswith("module"):
                count = max(1, len(own) - 1)
                chains.append(hc.CheckpointSequential(own, count, kind in REENTRANT, keep_last=False))
            else:
                chains.append(nn.Sequential(*own))
        self.parts = parts
        self.segments = nn.ModuleList(chains)
        self.trap: tuple[str, int] | None = None
        if split and (recipe := self._recipe()):
            hc.tensor_parallel(self, recipe)
        if recompute and program.recomputed_as("plan", "plan_segment"):
            self._apply_plan()
        for chain, kind, carrier in zip(self.segments, self.kinds, self.carriers):
            if kind == "planned":
                sample = pack(carrier, torch.randn(4, WIDTH, requires_grad=True))
                if len(set(chain)) > 1 or len(chain) == 1:  # a module that is used again is no chain
                    hc.plan(chain, sample, loss=_loss, budget="min", verbose=False).apply(chain)

    @property
    def parts(self) -> list[Part]:
        return self._parts[0]

    @parts.setter
    def parts(self, parts: list[Part]) -> None:
        self._parts = (parts,)  # no child: the segments have them

    @property
    def written(self) -> list[Tensor]:
        """The parameters that a forward pass writes."""
        return [part.layer.embedding.weight for part in dict.fromkeys(self.parts) if part.kind == "max_norm"]

    def forward(self, x: Tensor, path: Sequence[int]) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH) if self.math_kernel else contextlib.nullcontext():
            return self._forward(x, path)

    def _forward(self, x: Tensor, path: Sequence[int]) -> Tensor:
        if hasattr(self, "embedding"):
            x = self.embedding(x).mean(1)
        for number in path:
            x = unpack(_run(self.kinds[number], self.segments[number], pack(self.carriers[number], x)))
            if self.trap == ("backward", number) and x.requires_grad:
                x = _RaisesBehind.apply(x)
        return x

    def set_trap(self, trap: tuple[str, int] | None) -> None:
        self.trap = trap
        for part in self.parts:
            part.trapped = False
        if trap is not None and trap[0] == "forward":
            self.parts[trap[1]].trapped = True

    def _recipe(self) -> dict[str, str]:
        recipe = {"embedding": "vocabulary"} if hasattr(self, "embedding") else {}
        for name, module in self.named_modules():
            if isinstance(module, Part) and module.kind in IN_PARTS:
                recipe |= {f"{name}.{inner}": kind for inner, kind in RECIPES[module.kind].items()}
        return recipe

    def _apply_plan(self) -> None:
        """Drops every call of a block, or recomputes a whole segment."""
        names = {module: name for name, module in self.named_modules()}
        blocks: list[BlockPlan] = []
        items: list[Any] = []
        for chain, kind, carrier in zip(self.segments, self.kinds, self.carriers):
            if kind not in ("plan", "plan_segment"):
                continue
            inside = []
            for part in chain.children():
                if any(block.members == (names[part],) for block in blocks):
                    continue
                treatment = _drop_all(part, carrier) if kind == "plan" else KEEP
                own = BlockPlan((names[part],), kind_of([part]), parameter_shapes([part]), treatment)
                inside.append(len(blocks))
                blocks.append(own)
            whole = [names[part] for part in chain] == [blocks[at].members[0] for at in inside]
            in_order = all(
                name.startswith(f"{names[chain]}.") for at in inside for name in blocks[at].members
            )
            items += [tuple(inside)] if kind == "plan_segment" and whole and in_order else inside
        Plan(tuple(blocks), tuple(items)).apply(self)


def _drop_all(block: nn.Module, carrier: str) -> CheckpointPolicy:
    with torch.no_grad():
        names = names_of_calls(block, pack(carrier, torch.randn(4, WIDTH)))
    return CheckpointPolicy("drop all", Policy(names, frozenset(range(len(names)))))


def _run(kind: str, chain: Any, x: Any) -> Any:
    layers = list(chain) if kind.startswith(("nested", "sequential")) else []
    if kind == "hc" or kind == "hc_reentrant":
        result = hc.checkpoint(chain, x, use_reentrant=kind in REENTRANT)
    elif kind == "torch" or kind == "torch_reentrant":
        result = torch_checkpoint.checkpoint(chain, x, use_reentrant=kind in REENTRANT)
    elif kind == "function":
        result = hc.CheckpointFunction.apply(chain, 1, x, *chain.parameters())
    elif kind.startswith("sequential"):
        result = hc.checkpoint_sequential(
            layers, max(1, len(layers) - 1), x, use_reentrant=kind in REENTRANT, keep_last=False
        )
    elif kind == "nested":

        def outer(x: Any) -> Any:
            x = hc.checkpoint(layers[0], x, use_reentrant=False)
            for layer in layers[1:]:
                x = layer(x)
            return x

        result = hc.checkpoint(outer, x, use_reentrant=False)
    else:
        result = chain(x)
    return result


def _loss(features: Any) -> Tensor:
    return unpack(features).square().sum()


def build(program: Program, recompute: bool, alone: bool) -> Net:
    """The same weights on every rank and in every run."""
    torch.manual_seed(program.seed)
    split = program.tensor > 1 and not alone
    model = Net(program, False, split)
    if not recompute:
        return model
    weights = model.state_dict()
    model = Net(program, True, split)
    model.load_state_dict(weights)
    return model
