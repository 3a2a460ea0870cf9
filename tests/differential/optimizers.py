"""The optimizers of random programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from models import Net
from programs import Program
from sharded import distribute
from torch import Tensor

import hvd_ckpt as hc

OPTIMIZERS: dict[str, Callable[[Any, float], torch.optim.Optimizer]] = {
    "sgd": lambda groups, lr: torch.optim.SGD(groups, lr),
    "momentum": lambda groups, lr: torch.optim.SGD(groups, lr, momentum=0.9),
    "nesterov": lambda groups, lr: torch.optim.SGD(
        groups, lr, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    # With a large eps noise stays noise: it would be divided by its own size.
    "adam": lambda groups, lr: torch.optim.Adam(groups, lr, eps=1e-2),
    "adamw": lambda groups, lr: torch.optim.AdamW(groups, lr, eps=1e-2),
    "adagrad": lambda groups, lr: torch.optim.Adagrad(groups, lr, eps=1e-2),
    "rmsprop": lambda groups, lr: torch.optim.RMSprop(groups, lr, eps=1e-2),
    "lbfgs": lambda groups, lr: torch.optim.LBFGS(
        groups, lr, max_iter=2, tolerance_grad=0, tolerance_change=0
    ),
}


def make_optimizer(program: Program, model: Net, own: Sequence[Sequence[Tensor]], alone: bool) -> Any:
    """PyTorch's optimizer of these groups of parameters, alone or distributed as the program says."""
    options = dict(program.options)
    rate = 0.05 / (program.ranks if options.get("op") == "sum" else 1)
    groups: list[Any] = [{"params": list(group), "lr": rate / (1 + at)} for at, group in enumerate(own)]
    if program.optimizer == "lbfgs":
        groups = [parameter for group in own for parameter in group]
    optimizer = OPTIMIZERS[program.optimizer](groups, rate)
    if alone:
        return optimizer
    if "op" in options:
        options["op"] = hc.Sum
    if "compression" in options:
        options["compression"] = hc.Compression.fp16
    if options.get("groups") == "segments":
        options["groups"] = _by_segment(model, {parameter for group in own for parameter in group})
    if program.stage:
        options["model"] = model
    if program.stage == 3 and program.recomputed_as("nested", "sequential", "sequential_reentrant"):
        options["units"] = list(dict.fromkeys(model.parts))  # which are called apart from their segment
    return distribute(optimizer, named_parameters=model.named_parameters(), shard=program.stage, **options)


def _by_segment(model: Net, own: set[Tensor]) -> list[list[Tensor]]:
    taken: set[Tensor] = set()
    groups = []
    for chain in model.segments:
        groups.append([parameter for parameter in chain.parameters() if parameter in own - taken])
        taken.update(groups[-1])
    return [group for group in groups if group]
