"""Optimizers of torch.optim by name, and the learning rate as a function of the step.

Weight decay applies to matrices, and not to biases and the scales of norms. BERT (Devlin et al., 2018) and
GPT (Radford et al., 2018; Brown et al., 2020) were trained in this way.

PyTorch's schedulers count their own calls, so snapshots would have to save their state. Each value is computed from
the previous one, including its rounding. A pure function of the step has no state: a run that resumes at step k gets the
same learning rate from k alone.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from hvd_ckpt.app.training.config import Config, config_errors
from hvd_ckpt.utils.elementwise import optimizer_classes
from hvd_ckpt.utils.text import SCHEDULES, unknown

UNSUITABLE = {
    "lbfgs": "it evaluates the loss several times in each step",
    "sparseadam": "it takes sparse gradients only",
    "muon": "it takes matrices only, so biases and norms would need another optimizer",
}


def optimizer_names() -> tuple[str, ...]:
    """The names of suitable optimizers, sorted."""
    return tuple(sorted(name for name in optimizer_classes() if name not in UNSUITABLE))


def optimizer_of(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    """The configured optimizer of the model's trained parameters.

    It has two groups, each in the order of ``model.named_parameters()``: tensors of two or more dimensions, which decay, and the
    others, which do not. There are two groups for any weight decay, so a state can be loaded after the weight decay was changed.
    There is one group if all parameters are of one kind, or the optimizer has no weight decay. A tied parameter is included once,
    a frozen one not at all.

    The weight decay of the first group replaces the class's own default. Lists among the other options stand for tuples. With
    ``layer_decay``, the factor of the learning rate from each block of a chain to the block before it ("ELECTRA", Clark et al.,
    2020), each block has its own groups, with the option ``lr_scale``; the last block has ``lr``.

    Raises:
        ValueError: the optimizer is unknown (the message names the nearest) or unsuitable, refuses an option or has no weight
            decay, or the model has nothing to train.
    """
    name, weight_decay = config.optimizer, config.weight_decay
    key = name.strip().lower()
    if key in UNSUITABLE:
        raise ValueError(f"optimizer '{name}' cannot be used here: {UNSUITABLE[key]}")
    if key not in optimizer_names():
        raise ValueError(unknown("optimizer", name, optimizer_names()))
    optimizer_class = optimizer_classes()[key]
    decays = "weight_decay" in inspect.signature(optimizer_class).parameters
    if weight_decay and not decays:
        raise ValueError(f"optimizer '{name}' has no weight decay: set weight_decay to 0, not {weight_decay}")
    given = {
        option: tuple(value) if isinstance(value, list) else value
        for option, value in config.optimizer_options.items()
    }
    decay = config.layer_decay
    blocks = [model]
    if decay is not None:
        if not isinstance(model, nn.Sequential):
            raise ValueError(f"layer_decay {decay}: this {type(model).__name__} is not a chain of blocks")
        blocks = list(model)
    groups, seen = list[dict[str, Any]](), set[nn.Parameter]()
    for number, block in enumerate(blocks):
        untied = [parameter for parameter in block.parameters() if parameter not in seen]
        # A tied parameter has the learning rate of the first block that has it.
        seen.update(untied)
        scale = {} if decay is None else {"lr_scale": decay ** (len(blocks) - 1 - number)}
        groups += [{**group, **scale} for group in _groups(untied, weight_decay, decays)]
    if not groups:
        raise ValueError("the model has no parameter that is trained: unfreeze some")
    with config_errors(TypeError, RuntimeError, IndexError, about=f"optimizer '{name}'"):
        optimizer: torch.optim.Optimizer = optimizer_class(groups, lr=config.lr, **given)
    return optimizer


def freeze(model: nn.Module, patterns: str) -> None:
    """Freezes the parameters whose names fit one of the patterns, which commas separate: ``embeddings*,*.bias``.

    A tied parameter is frozen where one of its names fits. Dropout and running statistics stay as they are in training.

    Raises:
        ValueError: no name fits a pattern.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    for pattern in (text.strip() for text in patterns.split(",")):
        frozen = [parameter for name, parameter in named if fnmatchcase(name, pattern)]
        if not frozen:
            raise ValueError(
                f"freeze: no parameter fits '{pattern}'; there are '{named[0][0]}' to '{named[-1][0]}'"
            )
        for parameter in frozen:
            parameter.requires_grad_(False)


def _groups(parameters: list[nn.Parameter], weight_decay: float, decays: bool) -> list[dict[str, Any]]:
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not decays:
        return [{"params": trained}] if trained else []
    # Biases and the scales of norms are vectors; matrices and filters have two dimensions or more.
    split = (
        ([parameter for parameter in trained if parameter.ndim >= 2], weight_decay),
        ([parameter for parameter in trained if parameter.ndim < 2], 0.0),
    )
    return [{"params": parameters, "weight_decay": decay} for parameters, decay in split if parameters]


@dataclass(frozen=True)
class Schedule:
    """A linear warm-up to ``lr``, then a decay.

    The decays: ``constant`` does not change; ``linear`` and ``cosine`` (Loshchilov and Hutter, "SGDR", 2017, without restarts)
    fall to 0, reached where training ends; ``inverse-sqrt`` falls with one over the square root of the step (Vaswani et al.,
    "Attention Is All You Need", 2017, scaled so that its top is lr); ``step`` is divided by 10 at 50 % and at 75 % of all steps
    (as DenseNet, Huang et al., 2017, and nearly as ResNet, He et al., 2016).

    Attributes:
        name: one of :data:`~hvd_ckpt.utils.text.SCHEDULES`.
        steps: number of steps of the whole training.
        warmup: steps of the warm-up; the first has lr / warmup, the last lr.

    Raises:
        ValueError: the name is unknown, or the warm-up longer than the training.
    """

    name: str
    lr: float
    steps: int
    warmup: int = 0

    def __post_init__(self) -> None:
        if self.name not in SCHEDULES:
            raise ValueError(unknown("schedule", self.name, SCHEDULES))
        if not 0 <= self.warmup <= self.steps:
            raise ValueError(f"warmup {self.warmup}: give a number of steps from 0 to all {self.steps}")

    def rate(self, step: int) -> float:
        """The rate of the step that follows ``step`` finished ones: ``rate(0)`` is that of the first."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        if self.name == "constant":
            return self.lr
        if self.name == "inverse-sqrt":
            return self.lr * math.sqrt(max(self.warmup, 1) / (step + 1))
        if self.name == "step":
            return self.lr * float(0.1 ** ((2 * step >= self.steps) + (4 * step >= 3 * self.steps)))
        done = min((step - self.warmup) / max(self.steps - self.warmup, 1), 1.0)
        return self.lr * (1 - done if self.name == "linear" else (1 + math.cos(math.pi * done)) / 2)

    def apply(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Sets :meth:`rate`, times the group's ``lr_scale``, in every group; a rate held in a tensor (as CUDA graphs need) is
        changed in place."""
        for group in optimizer.param_groups:
            rate = self.rate(step) * group.get("lr_scale", 1.0)
            if isinstance(group["lr"], (int, float)):
                group["lr"] = rate
            else:
                group["lr"].fill_(rate)
