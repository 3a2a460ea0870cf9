"""What contenders share: how a chain is run with some of its blocks replaced, and how it is copied without its parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import torch
from torch import nn

__all__ = ["Builder", "Forward", "inner_blocks", "twin", "walk"]

Forward = Callable[[torch.Tensor], torch.Tensor]
"""Inputs to output."""

Builder = Callable[[nn.Sequential, torch.Tensor, int], Forward]
"""A chain, the inputs it will get, and the peak bytes of a step that keeps everything, to what runs the chain."""


def inner_blocks(model: nn.Sequential) -> list[int]:
    """The blocks that a loop over layers covers: all but the first (embedding, stem) and the last (head)."""
    return list(range(1, len(model) - 1))


def walk(model: nn.Sequential, replaced: Mapping[int, Forward]) -> Forward:
    """A function that runs the chain with some blocks replaced."""
    calls: list[Forward] = [replaced.get(index, block) for index, block in enumerate(model)]

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        for call in calls:
            hidden = call(hidden)
        return hidden

    return forward


def twin(model: nn.Sequential) -> nn.Sequential:
    """A copy of the modules that shares parameters and buffers with the original: wrapping one leaves the other as it was."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
