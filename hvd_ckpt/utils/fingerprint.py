"""Fingerprints of tensors: 64 bits by which two passes over the same computation, or two ranks, compare their tensors.

The bits are read as 32-bit integers and added, modulo 2**64, with odd pseudo-random weights that depend on the position. Rows of
:data:`ROW` integers are added first, and then the sums of the rows in the same way. So a fingerprint takes one pass over the
tensor, without a copy and without a synchronization with a GPU. (A XOR or a plain sum would not see equal changes in two places,
or swapped elements.)

64-bit words would be faster, but a flipped sign in the upper half of a word adds 2**63 times any odd weight, which is 2**63: two
flipped signs would cancel. A change of 32 bits times an odd weight keeps at least 33 bits that depend on the position.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

ROW = 1 << 15
# Weights of three levels of rows, which is enough for 2**45 integers; of the bytes that fill no integer; and of the parts of a
# sparse tensor.
_LEVELS = 5
_WORDS = (torch.float32, torch.float64, torch.int32, torch.int64)
_CPU_ROWS, _DEVICE_ROWS = (
    2,
    512,
)  # rows that are widened at a time: 512 KiB, which fit into the cache, and 128 MiB


def _pseudo_random(count: int) -> torch.Tensor:
    """Odd numbers by splitmix64, which are the same on every device and in every version of PyTorch."""
    # The constants of splitmix64, written as signed numbers. Products of int64 wrap around in PyTorch, on all devices.
    value = torch.arange(1, count + 1, dtype=torch.int64) * -0x61C8864680B583EB
    value = (value ^ (value >> 30)) * -0x40A7B892E31B1A47
    value = (value ^ (value >> 27)) * -0x6B2FB644ECCEEE15
    return (value ^ (value >> 31)) | 1


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    """The weights on a device. Not computed at import, which would start threads that a forked process lacks."""
    return _pseudo_random(_LEVELS * ROW).view(_LEVELS, ROW).to(device)


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """The fingerprint of the elements of a tensor in their logical order, which does not depend on its strides.

    A change of one element always changes the fingerprint. Any other difference is missed with a probability of at most 2**-32. NaN
    and -0.0 count as their bits. Shape and dtype are not included. Of an expanded dimension (of stride 0), one element counts. Only
    tensors that are not contiguous are copied.

    Args:
        tensor: a dense or sparse tensor of any dtype.

    Returns:
        A 0-d int64 tensor on the device of the tensor, without a synchronization.
    """
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        return _of_sparse(tensor)
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    if not tensor.is_contiguous():
        tensor = distinct(tensor).contiguous()
    data = tensor.resolve_conj().resolve_neg().view(-1)
    weights = _weights(data.device)
    # Elements that fill 32-bit integers. Up to 3 bytes behind them are added with weights of their own.
    whole = data.numel() * data.element_size() // 4 * 4 // data.element_size()
    if data.element_size() < 4:
        # A view as 32-bit integers needs an offset of whole integers.
        if data.storage_offset() * data.element_size() % 4:
            data = data.clone()
        result = _weighted(data[:whole].view(torch.int32), weights)
        if whole < data.numel():
            result = result + _dot(data[whole:].view(torch.uint8).long(), weights[-2])
        return result
    return _weighted(data.view(torch.int32), weights)


def fingerprints(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The fingerprint of each tensor. Small tensors are read together, which is faster."""
    by_index: dict[int, torch.Tensor] = {}
    together: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for index, tensor in enumerate(tensors):
        is_dense = tensor.layout is torch.strided and tensor.is_contiguous() and not tensor.is_neg()
        if is_dense and tensor.dtype in _WORDS and 0 < tensor.nbytes <= 4 * ROW:
            words = tensor.detach().view(-1).view(torch.int32)
            together.setdefault(tensor.device, []).append((index, words))
        else:
            by_index[index] = fingerprint(tensor)
    for device, parts in together.items():
        sizes = [len(words) for _, words in parts]
        weights = _weights(device)[0]
        products = torch.cat([words for _, words in parts]).long()
        products.mul_(torch.cat([weights[:size] for size in sizes]))
        for (index, _), part in zip(parts, torch.split(products, sizes)):
            by_index[index] = part.sum()
    return [by_index[index] for index in range(len(tensors))]


def distinct(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a tensor without the repetitions of expanded dimensions."""
    for dimension, (size, stride) in enumerate(zip(tensor.shape, tensor.stride())):
        if size > 1 and not stride:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def _weighted(words: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The weighted sum of integers, level by level."""
    # Level 0 multiplies each row of ROW words by the same weights a, level 1 each row of these sums by weights b, and so on:
    #
    #     words      w00 w01 w02 ...    w10 w11 w12 ...    w20 ...
    #     level 0    s0 = sum of w0j * aj    s1 = sum of w1j * aj    s2 ...
    #     level 1    sum of si * bi
    #
    # So word w_ij has the weight aj * bi, which is odd and depends on both places.
    at_a_time = _CPU_ROWS if words.device.type == "cpu" else _DEVICE_ROWS
    level = 0
    while words.numel() > ROW:
        rows = words.numel() // ROW
        matrix = words[: rows * ROW].view(rows, ROW)
        sums = [_products(part.long(), weights[level]) for part in torch.split(matrix, at_a_time)]
        if rows * ROW < words.numel():
            sums.append(_dot(words[rows * ROW :].long(), weights[level]).view(1))
        words = torch.cat(sums)
        level += 1
    return _dot(words.long(), weights[level])


def _products(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The product of a matrix and a vector of integers, which PyTorch lacks on GPUs."""
    return torch.mv(rows, weights) if rows.device.type == "cpu" else (rows * weights).sum(1)


def _dot(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The dot product of values with the first weights."""
    weights = weights[: values.numel()]
    return torch.dot(values, weights) if values.device.type == "cpu" else (values * weights).sum()


def _of_sparse(tensor: torch.Tensor) -> torch.Tensor:
    """The fingerprint of the indices and values of a sparse tensor as they are stored."""
    if tensor.layout is torch.sparse_coo:
        parts = [tensor._indices(), tensor._values()]
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    else:
        raise ValueError(f"cannot take the fingerprint of a tensor of layout {tensor.layout}")
    return _dot(torch.stack([fingerprint(part) for part in parts]), _weights(tensor.device)[-1])
