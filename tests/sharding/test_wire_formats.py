"""Tests of communication formats: their effect on values, and values that they cannot represent, which are never hidden."""

from __future__ import annotations

import math

import pytest
import torch

from hvd_ckpt.collectives import formats
from hvd_ckpt.collectives.formats import BF16, FP16, FP32, INT4, INT8, WireFormat, wire_format

LOSSY = [FP16, BF16, INT8, INT4]


def relative_error(rounded: torch.Tensor, exact: torch.Tensor) -> float:
    return float((rounded.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.parametrize(
    ("format", "bound"),
    [(FP32, 0.0), (FP16, 3e-4), (BF16, 2e-3), (INT8, 8e-3), (INT4, 0.12)],
    ids=lambda value: str(value),
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_format_has_its_error_and_its_bytes(
    format: WireFormat, bound: float, dtype: torch.dtype
) -> None:
    values = torch.randn(2**14, dtype=dtype)
    rounded = format.rounded(values)
    assert rounded.dtype is dtype
    assert relative_error(rounded, values) <= bound
    wire = format.encode(values, 4)
    assert wire.nbytes == 4 * format.row_bytes(2**12, dtype)
    if dtype is torch.float32 or format is not FP32:
        assert wire.nbytes == 2**14 * format.bytes_per_element


@pytest.mark.parametrize("numel", [1, 64, 65, 255, 257, 2**18 + 321])
def test_rows_of_any_length_are_decoded_independently(numel: int) -> None:
    formats_rows = torch.randn(3 * numel)
    formats_rows[numel : 2 * numel] *= 1e4
    for format in LOSSY:
        decoded = torch.empty(numel)
        for wire, values in zip(format.encode(formats_rows, 3), formats_rows.view(3, -1)):
            format.decode(wire[None], decoded)
            assert torch.equal(decoded, format.rounded(values))
            levels = 7 if format is INT4 else 127
            assert float((decoded - values).abs().max() / values.abs().max()) <= 0.5 / levels * (1 + 1e-5)


def test_8_bit_blocks_do_not_share_a_scale() -> None:
    values = torch.randn(2 * formats.BLOCK)
    values[formats.BLOCK :] *= 1e-6
    assert relative_error(INT8.rounded(values)[formats.BLOCK :], values[formats.BLOCK :]) < 0.01
    assert torch.equal(INT8.rounded(torch.zeros(300)), torch.zeros(300))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("format", LOSSY, ids=str)
def test_an_inf_or_a_nan_is_never_hidden(format: WireFormat, bad: float) -> None:
    values = torch.ones(1000)
    values[700], values[999] = bad, bad
    rounded = format.rounded(values)
    assert not rounded[[700, 999]].isfinite().any()
    assert torch.equal(rounded[:512], values[:512])
    total = torch.empty(1000)
    format.sum(torch.cat([format.encode(torch.ones(1000)), format.encode(values)]), total, 0.5)
    assert not total[[700, 999]].isfinite().any()
    assert torch.equal(total[:512], values[:512])


def test_halves_travel_as_they_are_unless_a_format_is_narrower() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        values = torch.randn(512).to(dtype)
        for format in (FP32, FP16, BF16):
            assert not format.changes(dtype)
            assert format.encode(values).data_ptr() == values.data_ptr()
        assert INT8.rounded(values).dtype is dtype
        assert relative_error(INT8.rounded(values), values) < 0.01


def test_rows_are_added_in_float32_and_in_their_order() -> None:
    rows = torch.tensor([[1.0], [2.0**24], [-(2.0**24)]]).expand(3, 100).contiguous()
    halves = torch.full((2, 100), 40000.0).half()
    for added, scale, expected in ((rows, 0.5, 0.0), (rows.flip(0), 0.5, 0.5), (halves, 1.0, 80000.0)):
        total = torch.empty(100)
        FP32.sum(added, total, scale)
        assert torch.equal(total, torch.full((100,), expected))


def test_a_format_is_found_by_name() -> None:
    names = ("fp32", "fp16", "bf16", "int8", "int4")
    assert [wire_format(name) for name in names] == [FP32, *LOSSY]
    message = f"wire must be one of {', '.join(map(repr, names))}, not"
    for unknown in ("int2", None, ["fp32"]):
        with pytest.raises(ValueError, match=message):
            wire_format(unknown)
