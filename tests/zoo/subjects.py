"""The architectures of transformers by model type: ``gpt2``, ``gpt2:causal_lm``."""

from __future__ import annotations

import copy
import functools
import time
from typing import Any

import torch
from inputs import samples
from modes import Subject, loss_of, seed
from small import RECIPES, model_class, small_config
from torch import nn

MOST_PARAMETERS = 32_000_000
MOST_SECONDS = 12.0  # for guesses of a sample


class Untrainable(Exception):
    """Plain PyTorch does not build or train the architecture, with the reason."""


def subject_of(name: str) -> Subject:
    """A small model of an architecture with a sample that it trains with.

    Raises:
        Untrainable: there is none.
    """
    reasons = []
    try:
        config_class, kind = model_class(name)
    except Exception as error:
        raise Untrainable(_shown(error)) from error
    until = time.monotonic() + MOST_SECONDS
    for recipe in RECIPES:
        try:
            return _subject(name, config_class, kind, recipe, until)
        except Exception as error:
            reasons.append(f"{recipe}: {_shown(error)}")
    raise Untrainable("; ".join(dict.fromkeys(reasons)))


def _subject(name: str, config_class: Any, kind: Any, recipe: str, until: float) -> Subject:
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in kind(small_config(config_class, recipe)).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size / 1e6:.0f} million parameters")

    def make() -> nn.Module:
        seed(1)
        model: nn.Module = kind(small_config(config_class, recipe))
        return model.float()

    model = make().train()
    seed(3)
    reasons: list[str] = []
    for sample in samples(model, model.config):
        if time.monotonic() > until:
            break
        try:
            check_trains(model, sample)
            return Subject(name, make, functools.partial(copy.deepcopy, sample))
        except Exception as error:
            reasons.append(f"{', '.join(sample)}: {_shown(error)}")
    raise ValueError(reasons[0] if reasons else "no sample")


def check_trains(model: nn.Module, sample: dict[str, Any]) -> None:
    """A step of plain PyTorch.

    Raises:
        ValueError: it has no gradients, or ones that are not finite.
    """
    seed(2)
    loss = loss_of(model(**copy.deepcopy(sample)))
    loss.backward()
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    gradients = [gradient.to_dense() if gradient.is_sparse else gradient for gradient in found]
    if not all(torch.isfinite(value).all() for value in (loss, *gradients)):
        raise ValueError("loss or gradients are not finite")
    if not any(gradient.any() for gradient in gradients):
        raise ValueError("all gradients are zero")


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()[-200:]}".replace("\n", " ")
