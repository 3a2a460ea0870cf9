"""Saved masks in one bit per element, whatever their dtype.

The idea is that of Gist (Jain et al., ISCA 2018). :func:`compress` decides by the values of a tensor and not by its origin, and
returns None if this saves nothing. Every bit is restored, including signs of zero and payloads of nan.

On the CPU, packing uses NumPy on the memory of the tensor, one piece that fits into the cache at a time. This is several times
faster than tensor operations, which write each intermediate result to memory. Other devices use tensor operations.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

# Elements that are read before all are: enough to refuse a tensor of ordinary values at once.
_SAMPLE = 256

# Elements of a piece on the CPU: a piece and its intermediate results stay in the second-level cache.
_PIECE = 1 << 15

# Integer dtypes by the number of bytes of an element.
_SAME_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, eq=False)
class Compressed:
    """A tensor in bits, as :func:`compress` returns it.

    A tensor that is dense in some order of its dimensions (channels-last, a transpose) is restored in that order, so that the next
    operation takes the same code path. Other tensors are restored contiguous.

    Attributes:
        payload: a bit for each element, one-dimensional, on the device of the tensor; or an object whose ``get()`` returns them.
        dtype: dtype of the tensor.
        pattern: of the elements other than zero.
        shape, order: sizes and numbers of the dimensions, in the order in which they lie in memory.
    """

    payload: Any
    dtype: torch.dtype
    pattern: int
    shape: torch.Size
    order: tuple[int, ...]

    @torch.no_grad()
    def get(self) -> torch.Tensor:
        """The tensor with its dtype, shape and values, in new memory; with its strides if it was dense, else contiguous."""
        flat = _unpack(self.unpacked().payload, self.shape.numel(), self.pattern, self.dtype)
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        return flat.view(self.shape).permute(inverse)

    def unpacked(self) -> Compressed:
        """The same with the bits themselves, where other hooks have packed them."""
        if isinstance(self.payload, torch.Tensor):
            return self
        return dataclasses.replace(self, payload=self.payload.get())


@torch.no_grad()
def compress(tensor: torch.Tensor) -> Compressed | None:
    """Compresses ``tensor``; returns None if that saves no bytes.

    Elements that are zero or one other bit pattern, in any dtype, become one bit each: bool masks, masks of ones, the scaled masks
    that ``F.dropout`` saves on the CPU.

    A few elements are read first, so a tensor that cannot be compressed costs little. Sparse, quantized, complex and meta tensors
    and subclasses of tensors are not compressed.

    Args:
        tensor: any tensor, including views and empty tensors. It is neither changed nor referenced.
    """
    if not _is_plain(tensor):
        return None
    held = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride()):
        held *= size if stride else 1  # an expanded dimension takes no memory
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))
    by_memory = tensor.detach().permute(order)
    if not by_memory.is_contiguous():
        order, by_memory = tuple(range(tensor.dim())), tensor.detach().contiguous()
    packed = _pack(by_memory.reshape(-1), held)
    return None if packed is None else Compressed(packed[0], tensor.dtype, packed[1], by_memory.shape, order)


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not (tensor.is_quantized or tensor.is_complex() or tensor.is_neg())
        and tensor.element_size() in _SAME_BITS
        and tensor.numel() > 0
    )


def _pack(flat: torch.Tensor, held: int) -> tuple[torch.Tensor, int] | None:
    """One bit per element, and the bit pattern of a set bit as an integer; None for other patterns, or if this saves nothing of
    ``held`` bytes."""
    # Elements are compared as integers of their size, so that signs of zero and payloads of nan count. A sample of the elements
    # refuses most tensors: two patterns other than zero are one too many.
    if -(-flat.numel() // 8) >= held:
        return None
    if flat.dtype is torch.bool:
        bits = flat.view(torch.uint8)
        if bits.device.type == "cpu":  # the copy is in memory that PyTorch counts
            return torch.from_numpy(np.packbits(bits.numpy(), bitorder="little")).clone(), 1
        return _to_bits(bits), 1
    same_bits = flat.view(_SAME_BITS[flat.element_size()])
    step = max(flat.numel() // _SAMPLE, 1)
    patterns = set(same_bits[::step].tolist()) - {0}
    if len(patterns) > 1:
        return None
    if flat.device.type != "cpu":
        return _pack_on_device(same_bits)
    # Where all sampled elements are zero, a pattern of the others is the least or the greatest of all elements.
    pattern = patterns.pop() if patterns else next(filter(None, torch.stack(same_bits.aminmax()).tolist()), 1)
    packed = _pack_exactly(same_bits.numpy(), pattern)
    return None if packed is None else (packed, pattern)


def _pack_exactly(elements: NDArray[Any], pattern: int) -> torch.Tensor | None:
    result = torch.empty(-(-len(elements) // 8), dtype=torch.uint8)  # in memory that PyTorch counts
    packed = result.numpy()
    is_set, fits = np.empty((2, min(_PIECE, len(elements))), dtype=np.bool_)
    for start in range(0, len(elements), _PIECE):
        piece = elements[start : start + _PIECE]
        np.not_equal(piece, 0, out=is_set[: len(piece)])
        np.equal(piece, pattern, out=fits[: len(piece)])
        # The pattern is not zero, so an element that fits is set. If equally many fit and are set, all set elements fit.
        if np.count_nonzero(is_set[: len(piece)]) != np.count_nonzero(fits[: len(piece)]):
            return None
        bits = np.packbits(is_set[: len(piece)], bitorder="little")
        packed[start // 8 : start // 8 + len(bits)] = bits
    return result


def _pack_on_device(same_bits: torch.Tensor) -> tuple[torch.Tensor, int] | None:
    """:func:`_pack` by tensor operations. The host waits once, for the pattern and whether all that is set has it."""
    is_set = same_bits != 0
    least, greatest = same_bits.aminmax()
    pattern = torch.where(least != 0, least, greatest)  # zero only if all elements are
    fits = (is_set == (same_bits == pattern)).all() | (pattern == 0)
    bits, all_fit = torch.stack((pattern.long(), fits.long())).tolist()
    return (_to_bits(is_set.view(torch.uint8)), bits or 1) if all_fit else None


def _to_bits(bits: torch.Tensor) -> torch.Tensor:
    """Packs bytes that are 0 or 1 into bits, the first into the lowest bit."""
    whole = torch.nn.functional.pad(bits, (0, -len(bits) % 8)).view(-1, 8)
    packed = whole[:, 0].clone()
    for place in range(1, 8):
        packed |= whole[:, place] << place
    return packed


def _unpack(packed: torch.Tensor, count: int, pattern: int, dtype: torch.dtype) -> torch.Tensor:
    """``count`` elements, each zero or ``pattern``."""
    same_bits = _SAME_BITS[dtype.itemsize]
    if packed.device.type == "cpu":
        whole = torch.empty(len(packed), 8, dtype=same_bits)
        # A byte selects one of 256 rows of eight elements. mode="clip" avoids a check; no index is out of range.
        np.take(_rows(pattern, dtype.itemsize), packed.numpy(), axis=0, out=whole.numpy(), mode="clip")
    else:
        places = torch.arange(8, dtype=torch.uint8, device=packed.device)
        whole = ((packed[:, None] >> places) & 1).to(same_bits).mul_(pattern)
    return whole.view(-1)[:count].view(dtype)


@functools.lru_cache(maxsize=64)
def _rows(pattern: int, itemsize: int) -> NDArray[Any]:
    """The eight elements that each value of a byte stands for."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    element = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}[itemsize]
    rows: NDArray[Any] = bits.astype(element) * element(pattern)
    return rows
