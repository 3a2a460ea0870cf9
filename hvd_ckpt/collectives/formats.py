"""Communication formats: the number formats in which ranks send gradients and parameters.

Horovod only moves bytes here. Each rank encodes a row for each rank. The receiver of rows adds them in rank order, in float32 or
wider, so sums are rounded once per addition and repeat bit for bit. On several hosts the sum of each host is encoded once more.
``int8`` is the blockwise format of ZeRO++ (Wang et al. 2023): that of its parameter gathers (qwZ) and of its gradients through an
alltoall (qgZ). ``int4`` is for gradients, in half the bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch

BLOCK = 256  # elements of an int8 block
# A multiple of every block, so that slices begin where blocks do.
_SLICE = 1 << 17  # elements for each thread; what is worked on at a time stays in its core's cache
_ROW_BYTES = 8  # rows are a whole number of these, so that one begins where any dtype may


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which elements of ``dtype`` are added: float32 for narrower floating point numbers, else their own."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


class WireFormat:
    """Elements wider than ``dtype`` are sent as ``dtype``, and others unchanged; the base class of the blockwise formats.

    A flat run of ``rows * m`` elements becomes ``rows`` equal rows of the wire, which can be sent and decoded one by one.

    Args:
        dtype: a floating point type; None for ``fp32``, which sends all elements unchanged, in any dtype.

    Attributes:
        bytes_per_element: bytes that are sent for a float32 element (for int8: with the scales).
    """

    def __init__(self, name: str = "fp32", dtype: torch.dtype | None = None) -> None:
        self.name, self._dtype = name, dtype
        self.bytes_per_element = float(self.row_bytes(1, torch.float32))

    def __repr__(self) -> str:
        return f"<communication format {self.name}>"

    def changes(self, dtype: torch.dtype) -> bool:
        """True if elements of ``dtype`` are encoded; False if they are sent unchanged."""
        return self._dtype is not None and dtype.is_floating_point and dtype.itemsize > self._dtype.itemsize

    def _sent_as(self, dtype: torch.dtype) -> torch.dtype:
        return self._dtype if self._dtype is not None and self.changes(dtype) else dtype

    def row_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Bytes on the wire of ``numel`` elements in one row."""
        return numel * self._sent_as(dtype).itemsize

    def encode(self, flat: torch.Tensor, rows: int = 1) -> torch.Tensor:
        """The wire [rows, any] of ``flat`` [rows * m]: its own storage if it is sent unchanged."""
        return flat.to(self._sent_as(flat.dtype)).view(rows, -1)

    def decode(self, wire: torch.Tensor, flat: torch.Tensor) -> None:
        """Writes the elements of ``wire`` [rows, any] to ``flat`` [rows * m], in its dtype."""
        for row, part in zip(wire, flat.view(len(wire), -1)):
            for start, stop in _slices(part):
                part[start:stop].copy_(self._decoded(row, len(part), start, stop, part[start:stop]))

    def rounded(self, flat: torch.Tensor) -> torch.Tensor:
        """Encodes elements [m] for the way, in a new tensor."""
        out = torch.empty_like(flat)
        self.decode(self.encode(flat), out)
        return out

    def sum(self, wire: torch.Tensor, out: torch.Tensor, scale: float) -> None:
        """Adds the rows of ``wire`` [rows, any] in their order, times ``scale``, into ``out`` [m]."""
        first, *others = wire
        numel = out.numel()
        scratch = torch.empty_like(out[: min(numel, _slice_numel(out))])
        for start, stop in _slices(out):
            # Where elements travel in the dtype of ``out``, the first piece is the wire
            # itself. It is only read: sums go to ``total``.
            total, space = out[start:stop], scratch[: stop - start]
            piece = self._decoded(first, numel, start, stop, total)
            for row in others:
                piece = torch.add(piece, self._decoded(row, numel, start, stop, space), out=total)
            torch.mul(piece, scale, out=total)

    def _decoded(
        self, row: torch.Tensor, numel: int, start: int, stop: int, space: torch.Tensor
    ) -> torch.Tensor:
        """Elements ``start`` to ``stop`` of a row of ``numel``: in ``space``, or where they lie if they have its dtype."""
        piece = row[start:stop]
        return piece if piece.dtype == space.dtype else space.copy_(piece)


class _Blockwise(WireFormat):
    """8 or 4 bits an element, and one float32 scale for each block: its largest magnitude, over the largest level (127 or 7).

    A row is the scales, then the elements, those of 4 bits two in a byte. Elements are rounded to the nearest level. A block with
    an inf or a nan is all nan when decoded, so that whoever looks for one finds it. Magnitudes below 1e-38 may become zero.
    """

    def __init__(self, name: str, bits: int, block: int) -> None:
        self._packs, self._block = 8 // bits, block
        super().__init__(name)
        self.bytes_per_element = bits / 8 + 4.0 / block
        self._largest = float(2 ** (bits - 1) - 1)

    def changes(self, dtype: torch.dtype) -> bool:
        return dtype.is_floating_point

    def row_bytes(self, numel: int, dtype: torch.dtype) -> int:
        if not self.changes(dtype):
            return numel * dtype.itemsize
        # 300 elements in int8 are 2 blocks: 2 * 4 bytes of scales and 300 of levels, 308, so 312. In int4 (blocks
        # of 64) they are 5 * 4 + 150 = 170, so 176.
        return -(-(4 * -(-numel // self._block) - (-numel // self._packs)) // _ROW_BYTES) * _ROW_BYTES

    def encode(self, flat: torch.Tensor, rows: int = 1) -> torch.Tensor:
        if not self.changes(flat.dtype):
            return flat.view(rows, -1)
        parts = flat.view(rows, -1)
        numel = parts.shape[1]
        wire = torch.zeros(rows, self.row_bytes(numel, flat.dtype), dtype=torch.uint8, device=flat.device)
        scratch = torch.empty(min(numel, _slice_numel(flat)), dtype=torch.float32, device=flat.device)
        for part, row in zip(parts, wire):
            scales, levels = self._fields(row, numel)
            for start, stop in _slices(part):
                own = scales[start // self._block : -(-stop // self._block)]
                if self._packs == 1:
                    self._quantize(part[start:stop], own, levels[start:stop], scratch[: stop - start])
                    continue
                unpacked = torch.zeros(-((start - stop) // 2) * 2, dtype=torch.int8, device=flat.device)
                self._quantize(part[start:stop], own, unpacked[: stop - start], scratch[: stop - start])
                # Levels -7 to 7 as 1 to 15, two in a byte. Slices begin at even elements, so
                # that a byte never belongs to two of them.
                above, below = unpacked.add_(8).view(torch.uint8).view(-1, 2).unbind(1)
                torch.bitwise_or(above << 4, below, out=levels[start // 2 : -(-stop // 2)].view(torch.uint8))
        return wire

    def _decoded(
        self, row: torch.Tensor, numel: int, start: int, stop: int, space: torch.Tensor
    ) -> torch.Tensor:
        if row.dtype is not torch.uint8:
            return super()._decoded(row, numel, start, stop, space)
        scales, levels = self._fields(row, numel)
        block = self._block
        scales = scales[start // block : -(-stop // block)]
        if self._packs == 1:
            space.copy_(levels[start:stop])
        else:
            pairs = levels[start // 2 : -(-stop // 2)].view(torch.uint8)
            space.copy_(torch.stack((pairs >> 4, pairs & 15), 1).view(-1)[: stop - start]).sub_(8)
        # Slices begin where blocks do; only the last block of a row may be short.
        whole = space.numel() // block * block
        space[:whole].view(-1, block).mul_(scales[: whole // block, None])
        space[whole:].mul_(scales[whole // block :])
        return space

    def _fields(self, row: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The scales and the levels of a row, as views."""
        edge = 4 * -(-numel // self._block)
        return row[:edge].view(torch.float32), row[edge : edge - (-numel // self._packs)].view(torch.int8)

    def _quantize(
        self, values: torch.Tensor, scales: torch.Tensor, levels: torch.Tensor, scratch: torch.Tensor
    ) -> None:
        """Writes the ``levels`` of some ``values`` and the ``scales`` of their blocks, the last of which may be short."""
        values, block = values.float(), self._block
        whole = values.numel() // block * block
        for elements, width in ((slice(0, whole), block), (slice(whole, None), values.numel() - whole)):
            if width:
                blocks, magnitudes = values[elements].view(-1, width), scratch[elements].view(-1, width)
                own = scales[elements.start // block :][: len(blocks)]
                torch.amax(torch.abs(blocks, out=magnitudes), dim=1, out=own)
                # A block of zeros gets a scale, too, whose reciprocal is finite: 0 times infinity would be nan.
                own.div_(self._largest).clamp_(min=torch.finfo(torch.float32).tiny)
                nearest = torch.mul(blocks, own.reciprocal()[:, None], out=magnitudes).round_()
                levels[elements].view(-1, width).copy_(nearest)
                own.masked_fill_(own.isinf(), math.nan)


def _slice_numel(tensor: torch.Tensor) -> int:
    if tensor.device.type == "cpu":
        return _SLICE * torch.get_num_threads()
    return max(1, tensor.numel())


def _slices(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    """The bounds of runs of a tensor that are worked on one after the other; they begin where blocks do."""
    step = _slice_numel(tensor)
    for start in range(0, tensor.numel(), step):
        yield start, min(start + step, tensor.numel())


FP32 = WireFormat()
FP16 = WireFormat("fp16", torch.float16)
BF16 = WireFormat("bf16", torch.bfloat16)
INT8 = _Blockwise("int8", 8, BLOCK)
INT4 = _Blockwise("int4", 4, 64)

WIRE_FORMATS = {format.name: format for format in (FP32, FP16, BF16, INT8, INT4)}


def wire_formats(wire: str | Mapping[str, str]) -> tuple[WireFormat, WireFormat]:
    """The formats of gradients and of parameters, as ``hc.Shard(wire=)`` has them: one name, or one for each.

    ``"int4"`` is for gradients; given alone, it means ``"int8"`` for parameters, as in ZeRO++.

    Raises:
        ValueError: a name is unknown, or parameters would be sent in 4 bits.
    """
    if not isinstance(wire, Mapping):
        gradients = wire_format(wire)
        return gradients, INT8 if gradients is INT4 else gradients
    unknown = set(wire) - {"gradients", "parameters"}
    if unknown:
        raise ValueError(
            f"wire has formats for 'gradients' and 'parameters', not for {sorted(map(str, unknown))}"
        )
    parameters = wire_format(wire.get("parameters", "fp32"))
    if parameters is INT4:
        raise ValueError("wire={'parameters': 'int4'}: 4 bits are for gradients; give 'int8' for parameters")
    return wire_format(wire.get("gradients", "fp32")), parameters


def wire_format(name: str) -> WireFormat:
    """The communication format of that name; an unknown one is a ValueError."""
    try:
        return WIRE_FORMATS[name]
    except (KeyError, TypeError):
        known = ", ".join(map(repr, WIRE_FORMATS))
        raise ValueError(f"wire must be one of {known}, not {name!r}") from None
