"""Sums and gathers among the parts of a layer, over the links of the grid and never in Horovod's queue.

Every part exchanges tensors with each other part, and adds in the order of the parts, so all have the same bits in every run. Two
parts exchange whole tensors, which sends as many bytes as a ring and waits once. More parts reduce-scatter, then gather.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hvd_ckpt.processes.grid import FIRST_TAG, Grid, current, pretending
from hvd_ckpt.utils.rules import check

_here = threading.local()  # autograd recomputes in threads of its own

HALVES = (torch.float16, torch.bfloat16)  # more than two of which are added up in float32


@contextlib.contextmanager
def alone(tensor: int | None = None) -> Iterator[None]:
    """Inside, nothing is exchanged: every other part counts as having zeros. For measurements by one process.

    Args:
        tensor: of how many parts this process is the first; by default those that the job has.
    """
    grid = current() if tensor is None else Grid(1, 1, 0, 0, tensor=tensor)
    with pretending(dataclasses.replace(grid, alone=True)):
        yield


@contextlib.contextmanager
def inside(kind: str) -> Iterator[None]:
    """Inside, what flows between layers is equal on all parts and kept in shares (``"partition"``), or has this part's positions
    alone (``"sequence"``).

    Raises:
        ValueError: it is both.
    """
    before = getattr(_here, "kind", None)
    if before not in (None, kind):
        check({"checkpoint(partition=True)": True, "tensor_parallel(sequence=True)": True})
    _here.kind = kind
    try:
        yield
    finally:
        _here.kind = before


def gather(tensor: Tensor, shapes: Sequence[Sequence[int]] | None = None) -> list[Tensor]:
    """The tensors of all parts, in their order. Collective over the parts.

    Args:
        tensor: tensor of this part; on a GPU it is sent over NCCL, or through host memory (:mod:`.device_link`).
        shapes: shape of each part's tensor; by default that of this part.

    Raises:
        StageFailed: another part has ended by an error.
    """
    grid = current()
    sent = tensor.detach().contiguous()
    rows = [
        sent if part == grid.part else sent.new_empty(sent.shape if shapes is None else shapes[part])
        for part in range(grid.tensor)
    ]
    exchange([sent] * grid.tensor, rows)
    return rows


def add(tensor: Tensor) -> Tensor:
    """The sum of the tensors of all parts, with the same bits on each. Collective over the parts."""
    parts = current().tensor
    if parts == 2:
        first, second = gather(tensor)
        own, other = (first, second) if current().part == 0 else (second, first)
        return torch.add(own, other, out=other)  # a + b has the bits of b + a
    if not tensor.numel():  # such as of a batch without tokens
        return tensor.detach().clone()
    flat = tensor.detach().reshape(-1)
    each = -(-flat.numel() // parts)
    # Part r adds up the r-th of as many equal slices, and all parts
    # gather the sums: every element is added on one part, in one order.
    padded = torch.nn.functional.pad(flat, (0, parts * each - flat.numel()))
    return torch.cat(gather(_sum_own(torch.split(padded, each))))[: flat.numel()].view(tensor.shape)


def reduce_scatter(tensor: Tensor, dim: int) -> Tensor:
    """This part's slice along a dimension, which the parts divide, of the sum of the tensors of all. Collective over the parts."""
    return _sum_own([chunk.contiguous() for chunk in tensor.detach().chunk(current().tensor, dim)])


def _sum_own(chunks: Sequence[Tensor]) -> Tensor:
    """The sum of what all parts have as this part's chunk; the chunks are of one shape."""
    part, dtype = current().part, chunks[0].dtype
    rows = [chunk if other == part else torch.empty_like(chunk) for other, chunk in enumerate(chunks)]
    exchange(chunks, rows)
    total = rows[0].to(torch.float32 if dtype in HALVES else dtype, copy=True)
    for row in rows[1:]:
        total += row
    return total.to(dtype)


def maximum(tensor: Tensor) -> Tensor:
    """The greatest of each element over all parts. Collective over the parts."""
    return torch.stack(gather(tensor)).amax(0)


def exchange(sent: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
    """Sends ``sent[part]`` to each other part, and fills ``rows[part]`` with what it sends here."""
    grid = current()
    if grid.tensor == 1:
        return
    # One process measures, and the other parts are elsewhere, such as in a collective that waits for its result.
    if grid.alone:
        for part, row in enumerate(rows):
            if part != grid.part:
                row.zero_()
        return
    device_link = grid.part_link
    if device_link is not None and rows[0].device.type == device_link.device:
        if device_link.may_connect is None:
            # The hosts meet first, since they notice a part that has ended.
            _over_hosts(grid, [torch.zeros(1)] * grid.tensor, [torch.zeros(1) for _ in rows])
            device_link.connect(())
        if device_link.connects():
            device_link.exchange([*map(_bytes, sent)], [*map(_bytes, rows)])
            return
    _over_hosts(grid, sent, rows)


def _over_hosts(grid: Grid, sent: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
    others = {grid.process(grid.stage, part=part): part for part in range(grid.tensor) if part != grid.part}
    hosts = {process: rows[part].cpu() for process, part in others.items()}  # itself, on a CPU
    grid.exchange(
        {process: _bytes(sent[part].cpu()) for process, part in others.items()},
        {process: _bytes(host) for process, host in hosts.items()},
        FIRST_TAG,
    )
    for process, part in others.items():
        if hosts[process] is not rows[part]:
            rows[part].copy_(hosts[process])


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
