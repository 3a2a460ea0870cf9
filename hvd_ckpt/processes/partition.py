"""Partitioned activations: the inputs of a region are kept in shares, one on each part (ZeRO-R, Rajbhandari et al., 2020)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hvd_ckpt.processes.grid import current
from hvd_ckpt.processes.parts import gather, inside


class Share(NamedTuple):
    """This part's share of a tensor; ``lengths`` are those of all parts, in elements."""

    values: Tensor
    lengths: tuple[int, ...]
    shape: torch.Size


@contextlib.contextmanager
def partitioned() -> Iterator[None]:
    """Around a region: its inputs, all that autograd saves outside of its own hooks, are kept in shares.

    Raises:
        ValueError: the region is within a block with sequence parallelism, or runs one.
    """
    with inside("partition"), saved_tensors_hooks(_pack, _unpack):
        yield


def _pack(tensor: Tensor) -> Tensor | Share:
    grid = current()
    # A parameter stays in memory anyway, and what needs no gradient, such as a mask, may be a part's own.
    alike = tensor.requires_grad and not isinstance(tensor, nn.Parameter) and tensor.is_contiguous()
    if grid.tensor == 1 or not alike or tensor.numel() < grid.tensor:
        return tensor
    # 10 elements over 4 parts are shares of 3, 3, 2 and 2, so all lengths are kept.
    shares = tensor.detach().view(-1).tensor_split(grid.tensor)
    # A copy, since a view would keep the whole tensor in memory.
    return Share(shares[grid.part].clone(), tuple(map(len, shares)), tensor.shape)


def _unpack(kept: Tensor | Share) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    rows = gather(kept.values, [(length,) for length in kept.lengths])
    return torch.cat(rows).view(kept.shape)
