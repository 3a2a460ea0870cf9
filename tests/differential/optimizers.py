"""The optimizers of random programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from models import Net
from programs import Program
from sharded import distribute
from torch import Tensor

import hvd_ckpt as hc

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
