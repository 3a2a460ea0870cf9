"""Tests of compressed saved tensors: they are restored bit for bit, and have the documented sizes."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

from hvd_ckpt.recompute.saved import compress

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

shapes = st.lists(st.integers(0, 9), max_size=4)
generators = st.integers(0, 1000).map(torch.Generator().manual_seed)


def same_bits(left, right):
    assert (left.dtype, left.shape, left.device) == (right.dtype, right.shape, right.device)
    bits = BITS[left.element_size()]
    return torch.equal(left.contiguous().view(bits), right.contiguous().view(bits))


def check(tensor, fits=True):
    """Restored bit for bit, twice, from a bit for each element; refused if it does not fit."""
    before, compressed = tensor.clone(), compress(tensor)
    assert same_bits(tensor, before)
    if not fits:
        assert compressed is None
        return
    assert compressed.payload.nbytes == -(-tensor.numel() // 8) < tensor.nbytes
    assert compressed.dtype == tensor.dtype
    for restored in (compressed.get(), compressed.get()):
        assert same_bits(restored, tensor)
        assert not restored.requires_grad
        restored.zero_()  # its own memory: the next is not affected
    assert same_bits(tensor, before)


@settings(max_examples=120, deadline=None)
@given(
    shape=shapes,
    dtype=st.sampled_from((torch.bool, *FLOATS, *INTEGERS)),
    generator=generators,
    keep=st.floats(0, 1),
)
def test_zero_and_one_other_value_become_bits(shape, dtype, generator, keep):
    mask = torch.rand(shape, generator=generator) < keep
    scaled = mask.to(dtype) * torch.tensor(1 / 0.9 if dtype.is_floating_point else 3).to(dtype)
    check(scaled, -(-scaled.numel() // 8) < scaled.nbytes)


@settings(max_examples=60, deadline=None)
@given(
    shape=shapes,
    dtype=st.sampled_from(FLOATS),
    generator=generators,
    odd=st.sampled_from([-0.0, math.nan, math.inf, 1.0]),
)
def test_floats_of_more_values_are_left_alone(shape, dtype, generator, odd):
    noise = F.dropout(torch.ones(shape), 0.5).to(dtype)
    if noise.numel() < 2 or not noise.any():
        return
    noise.view(-1)[torch.randint(noise.numel(), (), generator=generator)] = odd
    values = set(noise.view(BITS[dtype.itemsize]).view(-1).tolist()) - {0}
    check(noise, len(values) < 2)


@pytest.mark.parametrize("size", [100_001, 32_768, 3 * 32_768 + 5])
def test_a_misfit_that_no_sample_meets_is_found(size):
    noise = F.dropout(torch.ones(size), 0.1)
    check(noise)
    for odd in (-0.0, math.nan, 1.0):
        for place in (size - 2, size // 2 + 1):
            changed = noise.clone()
            changed[place] = odd
            check(changed, False)


@pytest.mark.parametrize("value", [-0.0, math.nan, -math.inf, 5e-324])
def test_odd_values_are_kept_bit_for_bit(value):
    check(torch.tensor([0.0, value] * 9, dtype=torch.float64))
    check(
        torch.tensor([0, 0x7FC12345] * 8, dtype=torch.int32).view(torch.float32)
    )  # a nan that says something


def test_what_was_saved_by_dropout_itself_fits():
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(compress(one)), lambda _: None):
        F.dropout(torch.randn(64, 64, requires_grad=True), 0.1)
    assert any(compressed is not None and compressed.payload.nbytes == 512 for compressed in saved)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.t(),
        lambda t: t[3:17, 2:9],
        lambda t: t[::3, 1::2],
        lambda t: t.view(4, 5, 3, 8).to(memory_format=torch.channels_last),
        lambda t: t.view(4, 5, 3, 8).permute(2, 0, 3, 1),
        lambda t: t[5],
        lambda t: t.flatten()[7:],
        lambda t: t[:, :1].expand(20, 24),
    ],
)
def test_views_and_strides(change):
    tensor = change(F.dropout(torch.ones(20, 24), 0.5))
    restored = compress(tensor).get()
    assert same_bits(restored, tensor)
    dense = tensor.clone().stride() == tensor.stride()
    assert restored.stride() == tensor.stride() if dense else restored.is_contiguous()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(1, 1).expand(64, 1),  # four bytes; one bit per element would be eight
        torch.empty(0, 5),
        torch.tensor(True),
        torch.ones(8, 8).to_sparse(),
        torch.ones(8, 8, dtype=torch.complex64),
        torch.ones(8, 8, device="meta"),
        torch.ones(8, 8).as_subclass(type("Special", (torch.Tensor,), {})),
    ],
)
def test_others_are_left_alone(tensor):
    assert compress(tensor) is None
