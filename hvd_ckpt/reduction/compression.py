"""Wire formats: what a bucket looks like while it travels.

Horovod's ``Compression.none`` and ``Compression.fp16`` (and any class with their two static methods) apply to whole buckets.
On top of that every dtype that Horovod cannot reduce is given one that it can: bfloat16 travels as float32, complex numbers
as pairs of reals.
"""

from __future__ import annotations

from typing import Any

import torch
from horovod.torch.compression import Compression, Compressor, NoneCompressor

__all__ = ["Compression", "Compressor", "decode", "encode", "travels_as_is"]

_REDUCIBLE = {torch.float16, torch.float32, torch.float64, torch.int32, torch.int64}


def travels_as_is(dtype: torch.dtype, compression: Any) -> bool:
    """True if a bucket of ``dtype`` is reduced in place, without a copy in another format."""
    return compression is NoneCompressor and (dtype in _REDUCIBLE or dtype.is_complex)


def encode(flat: torch.Tensor, compression: Any) -> tuple[torch.Tensor, Any]:
    """The tensor to reduce for ``flat`` (1-D), and the context that :func:`decode` needs."""
    wire, context = compression.compress(flat)
    if wire.dtype.is_complex:
        wire = torch.view_as_real(wire)
    elif wire.dtype not in _REDUCIBLE:
        wire = wire.to(torch.float32)
    return wire, context


def decode(wire: torch.Tensor, context: Any, compression: Any, flat: torch.Tensor) -> None:
    """Writes the reduced ``wire`` back to ``flat``; nothing to do where it travelled in place."""
    if flat.dtype.is_complex and not wire.dtype.is_complex:
        wire = torch.view_as_complex(wire)
    if wire.data_ptr() == flat.data_ptr() and wire.dtype == flat.dtype:
        return
    flat.copy_(compression.decompress(wire, context))
