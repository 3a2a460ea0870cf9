"""The models and optimizers of random programs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from layers import IN_PARTS, LAYERS, VOCABULARY, WIDTH, tied
from programs import Block, Program
from selective import drop_all
from sharded import distribute
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import checkpoint as torch_checkpoint
from ways import by_function, plainly, reentrant

import hvd_ckpt as hc
from hvd_ckpt.planning.plan import BlockPlan, Plan, kind_of, parameter_shapes
from hvd_ckpt.planning.policy import KEEP, CheckpointPolicy


class Caught(Exception):
    """Raised in the middle of a pass, and caught by the program."""


class _RaisesBehind(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise Caught


# ---------------------------------------------------------------------------------- what blocks hand on


@dataclass
class Features:
    """An activation, those that skip a block, and a number."""

    x: Tensor
    skip: list[Tensor]
    count: int = 0


CARRIERS: dict[str, Callable[[Tensor], Any]] = {
    "dict": lambda x: {"x": x, "skip": [x * 0.5], "count": 0},
    "list": lambda x: [x, [x * 0.5], 0],
    "dataclass": lambda x: Features(x, [x * 0.5]),
    "tensor": lambda x: x,
}


def _opened(features: Any) -> tuple[Any, Any]:
    """What holds the three values, and the keys of these."""
    keys = range(3) if isinstance(features, list) else ("x", "skip", "count")
    return vars(features) if isinstance(features, Features) else features, keys


def unpack(features: Any) -> Tensor:
    """What blocks have made of it."""
    if isinstance(features, Tensor):
        return features
    held, (x, skip, count) = _opened(features)
    return held[x] + 0.1 * held[skip][0] + 0.01 * held[count]


class Carried(nn.Module):
    """A block that takes and returns a container: it adds what skipped it, lets its input skip the next, and counts."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, features: Any) -> Any:
        held, (x, skip, count) = _opened(features)
        result = self.part(held[x]) * (1 + 0.01 * held[count]) + 0.1 * held[skip][-1]
        if held[count] % 2:
            held[skip].append(held[x])
        else:
            held[skip][-1] = held[x]
        held[x], held[count] = result, held[count] + 1
        return features


# ---------------------------------------------------------------------------------- ways of recomputation


def _nested(chain: Any, x: Any) -> Any:
    def outer(x: Any) -> Any:
        first, *others = chain
        x = hc.checkpoint(first, x)
        return functools.reduce(lambda hidden, layer: layer(hidden), others, x)

    return hc.checkpoint(outer, x)


def _sequential(chain: Any, x: Any, **options: Any) -> Any:
    return hc.checkpoint_sequential(list(chain), max(1, len(chain) - 1), x, keep_last=False, **options)


WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "keep": plainly,
    "hc": hc.checkpoint,
    "nested": _nested,
    "function": by_function,
    "torch": functools.partial(torch_checkpoint.checkpoint, use_reentrant=False),
    "sequential": _sequential,
    **dict.fromkeys(("module", "plan", "plan_segment", "planned"), plainly),  # which change the chain itself
    "hc_reentrant": reentrant,
    "torch_reentrant": functools.partial(torch_checkpoint.checkpoint, use_reentrant=True),
    "sequential_reentrant": functools.partial(_sequential, use_reentrant=True),
    "module_reentrant": plainly,
}


# ---------------------------------------------------------------------------------- models


class Part(nn.Module):
    """A block: takes and returns float32 of shape (batch, WIDTH), whatever it computes in."""

    def __init__(self, block: Block, parts: Sequence[Part]) -> None:
        super().__init__()
        self.kind, self.dtype, self.trapped = block.kind, getattr(torch, block.dtype), False
        if block.kind == "tied":
            self.layer = tied(parts[block.of].layer[0].weight)
        else:
            self.layer = LAYERS[block.kind]()
        self.to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        if self.trapped:
            raise Caught
        return self.layer(x.to(self.dtype)).float()


class Net(nn.Module):
    """An embedding, perhaps, and segments of blocks.

    Args:
        recompute: whether segments are recomputed as the program says, or not at all.
        split: whether this process has its part of layers.
    """

    def __init__(self, program: Program, recompute: bool, split: bool) -> None:
        super().__init__()
        parts: list[Part] = []
        if program.embedding:
            self.embedding = nn.Embedding(VOCABULARY, WIDTH, sparse=program.embedding == "sparse")
        self.math_kernel = program.math_kernel
        self.segments = nn.ModuleList()
        for segment in program.segments:
            kind, first = segment.recompute if recompute else "keep", len(parts)
            for block in segment.blocks:
                parts.append(parts[block.of] if block.kind == "again" else Part(block, parts))
            own = [part if segment.carrier == "tensor" else Carried(part) for part in parts[first:]]
            chain: Any = nn.Sequential(*own)
            if kind.startswith("module"):
                chain = hc.CheckpointSequential(
                    own, max(1, len(own) - 1), "reentrant" in kind, keep_last=False
                )
            chain.kind, chain.pack = kind, CARRIERS[segment.carrier]
            self.segments.append(chain)
        self._parts = (parts,)  # no child: the segments have them
        self.trap: tuple[str, int] | None = None
        if split and (recipe := self._recipe()):
            hc.tensor_parallel(self, recipe)
        if recompute and program.recomputed_as("plan", "plan_segment"):
            self._apply_plan()
        for chain in self.segments:
            # A module that is used again is no chain.
            if chain.kind == "planned" and (len(set(chain)) > 1 or len(chain) == 1):
                sample = chain.pack(torch.randn(4, WIDTH, requires_grad=True))
                hc.plan(chain, sample, loss=_loss, budget="min", verbose=False).apply(chain)

    @property
    def parts(self) -> list[Part]:
        return self._parts[0]

    @property
    def written(self) -> list[Tensor]:
        """The parameters that a forward pass writes."""
        return [part.layer.embedding.weight for part in dict.fromkeys(self.parts) if part.kind == "max_norm"]

    def forward(self, x: Tensor, path: Sequence[int]) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH) if self.math_kernel else contextlib.nullcontext():
            if hasattr(self, "embedding"):
                x = self.embedding(x).mean(1)
            for number in path:
                chain = self.segments[number]
                x = unpack(WAYS[chain.kind](chain, chain.pack(x)))
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
                recipe |= {f"{name}.layer.{inner}": kind for inner, kind in IN_PARTS[module.kind][1].items()}
        return recipe

    def _apply_plan(self) -> None:
        """Drops every call of a block, or recomputes a whole segment."""
        names = {module: name for name, module in self.named_modules()}
        blocks: dict[str, BlockPlan] = {}
        items: list[Any] = []
        for chain in self.segments:
            if chain.kind not in ("plan", "plan_segment"):
                continue
            first = len(blocks)
            for part in [part for part in chain.children() if names[part] not in blocks]:
                policy = KEEP
                if chain.kind == "plan":
                    with torch.no_grad():
                        policy = CheckpointPolicy(
                            "drop all", drop_all(part, chain.pack(torch.randn(4, WIDTH)))
                        )
                name = names[part]
                blocks[name] = BlockPlan((name,), kind_of([part]), parameter_shapes([part]), policy)
            inside = range(first, len(blocks))
            whole = [names[part] for part in chain] == list(blocks)[first:]
            in_order = all(names[part].startswith(f"{names[chain]}.") for part in chain)
            items += [tuple(inside)] if chain.kind == "plan_segment" and whole and in_order else inside
        Plan(tuple(blocks.values()), tuple(items)).apply(self)


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


# ---------------------------------------------------------------------------------- optimizers

OPTIMIZERS: dict[str, tuple[type, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    # With a large eps noise stays noise: it would be divided by its own size.
    "adam": (torch.optim.Adam, {"eps": 1e-2}),
    "adamw": (torch.optim.AdamW, {"eps": 1e-2}),
    "adagrad": (torch.optim.Adagrad, {"eps": 1e-2}),
    "rmsprop": (torch.optim.RMSprop, {"eps": 1e-2}),
    "lbfgs": (torch.optim.LBFGS, {"max_iter": 2, "tolerance_grad": 0, "tolerance_change": 0}),
}


def make_optimizer(program: Program, own: Sequence[Sequence[Tensor]], kind: type | None = None) -> Any:
    """PyTorch's optimizer of these groups of parameters, or a subclass of it."""
    usual, options = OPTIMIZERS[program.optimizer]
    rate = 0.05 / (program.ranks if program.options.get("op") == "sum" else 1)
    groups: list[Any] = [{"params": list(group), "lr": rate / (1 + at)} for at, group in enumerate(own)]
    if program.optimizer == "lbfgs":
        groups = [parameter for group in own for parameter in group]
    return (kind or usual)(groups, rate, **options)


def distributed(optimizer: Any, program: Program, model: Net, own: Sequence[Sequence[Tensor]]) -> Any:
    """The optimizer, distributed as the program says."""
    options = dict(program.options)
    if "op" in options:
        options["op"] = hc.Sum
    if "compression" in options:
        options["compression"] = hc.Compression.fp16
    if options.get("groups") == "segments":
        left = {parameter for group in own for parameter in group}
        options["groups"] = []
        for chain in model.segments:
            taken = [parameter for parameter in chain.parameters() if parameter in left]
            options["groups"] += [taken] if taken else []
            left -= set(taken)
    if program.stage:
        options["model"] = model
    if program.stage == 3 and program.recomputed_as("nested", "sequential", "sequential_reentrant"):
        options["units"] = list(dict.fromkeys(model.parts))  # which are called apart from their segment
    return distribute(optimizer, named_parameters=model.named_parameters(), shard=program.stage, **options)
