"""Tests of fingerprints: they differ if any bit differs, and depend on nothing else."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest
import torch

from hvd_ckpt.utils.fingerprint import ROW, fingerprint, fingerprints

SIZES = [1, 2, 3, 7, ROW - 1, ROW, ROW + 1, 3 * ROW + 5, 40 * ROW + 3]
DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.int64, torch.bool,
    torch.complex64, torch.complex128, torch.float8_e4m3fn,
]  # fmt: skip


def random_tensor(numel: int, dtype: torch.dtype) -> torch.Tensor:
    data = torch.randint(0, 2 if dtype is torch.bool else 256, (numel * dtype.itemsize,), dtype=torch.uint8)
    return data.view(dtype)


def flipped(tensor: torch.Tensor, *bits: int) -> torch.Tensor:
    """A copy with some of its bits flipped."""
    copy = tensor.clone()
    data = copy.view(torch.uint8)
    for bit in bits:
        data[bit // 8] ^= 1 << bit % 8
    return copy


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", SIZES)
def test_a_flipped_bit_anywhere_is_seen(dtype: torch.dtype, numel: int) -> None:
    tensor = random_tensor(numel, dtype)
    expected = fingerprint(tensor)
    assert expected.shape == () and expected.dtype is torch.int64
    assert fingerprint(tensor.clone()) == expected
    bits = numel * dtype.itemsize * 8
    for bit in {0, bits // 2, bits - 8, *torch.randint(0, bits, (20,)).tolist()}:
        at = bit // 8 * 8 if dtype is torch.bool else bit
        assert fingerprint(flipped(tensor, at)) != expected, bit


def test_two_flipped_signs_are_seen() -> None:
    tensor = torch.randn(2 * ROW + 100)
    seen = {int(fingerprint(tensor))}
    places = [0, 1, 2, 3, ROW - 1, ROW, 2 * ROW + 98, 2 * ROW + 99]
    pairs = list(itertools.combinations(places, 2))
    for pair in pairs:
        seen.add(int(fingerprint(flipped(tensor, *(place * 32 + 31 for place in pair)))))
    assert len(seen) == len(pairs) + 1


def test_equal_changes_and_exchanged_elements_are_seen() -> None:
    tensor = torch.zeros(2000, 2000)
    swapped, both, corner = tensor.clone(), tensor.clone(), tensor.clone()
    tensor[3, 5] = tensor[7, 11] = swapped[5, 3] = swapped[7, 11] = 1.5
    both[3, 5] = 1.5
    corner[3, 11] = corner[7, 5] = 1.5
    assert len({int(fingerprint(one)) for one in (tensor, swapped, both, corner)}) == 4
    assert fingerprint(tensor.t().contiguous()) != fingerprint(tensor)


def test_nan_and_negative_zero_count_as_their_bits() -> None:
    nan = torch.tensor([float("nan"), 0.0])
    assert fingerprint(nan) == fingerprint(nan.clone())
    assert fingerprint(-nan) != fingerprint(nan)
    assert fingerprint(torch.tensor([-0.0])) != fingerprint(torch.tensor([0.0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.complex64], ids=str)
def test_strides_and_offset_do_not_count(dtype: torch.dtype) -> None:
    tensor = random_tensor(2 * 3 * 50 * 60, dtype).view(2, 3, 50, 60)
    expected = fingerprint(tensor)
    assert fingerprint(tensor.contiguous(memory_format=torch.channels_last)) == expected
    assert fingerprint(tensor.transpose(0, 3).contiguous().transpose(0, 3)) == expected
    for offset in (1, 2, 3, 4):
        storage = torch.empty(tensor.numel() + offset, dtype=dtype)
        assert fingerprint(storage[offset:].copy_(tensor.view(-1))) == expected
    assert fingerprint(storage[::2]) == fingerprint(storage[::2].clone())


def test_expanded_tensors_are_not_materialized() -> None:
    base = torch.randn(4, 1, 5)
    assert fingerprint(base.expand(4, 1 << 40, 5)) == fingerprint(base)
    assert fingerprint(base.expand(4, 0, 5)) == fingerprint(torch.empty(0))


def test_fingerprints_of_conjugated_and_negated_views_use_their_values() -> None:
    tensor = torch.randn(9, dtype=torch.complex64)
    assert fingerprint(tensor.conj()) == fingerprint(tensor.conj().resolve_conj()) != fingerprint(tensor)
    imaginary = tensor.conj().imag
    assert fingerprint(imaginary) == fingerprint(imaginary.clone())


def test_those_of_several_tensors_are_those_of_each() -> None:
    whole = [random_tensor(numel, dtype) for dtype in DTYPES for numel in (0, 7, 8, 200_000)]
    tensors = [*whole, *(tensor[1:] for tensor in whole if tensor.numel()), torch.eye(3).to_sparse()]
    assert list(map(int, fingerprints(tensors))) == [int(fingerprint(tensor)) for tensor in tensors]


def test_empty_scalar_parameter_and_sparse() -> None:
    assert fingerprint(torch.empty(0, 3)) == 0
    assert fingerprint(torch.tensor(2.5)) == fingerprint(torch.tensor([2.5]))
    parameter = torch.nn.Parameter(torch.randn(3))
    assert (
        fingerprint(parameter) == fingerprint(parameter.detach()) and not fingerprint(parameter).requires_grad
    )
    dense = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    moved = torch.tensor([[2.0, 0.0], [0.0, 3.0]])
    for sparse in (torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr, torch.Tensor.to_sparse_csc):
        assert fingerprint(sparse(dense)) == fingerprint(sparse(dense)) != fingerprint(sparse(moved))
    quantized = torch.quantize_per_tensor(dense, 0.5, 3, torch.qint8)
    assert fingerprint(quantized) != fingerprint(torch.quantize_per_tensor(moved, 0.5, 3, torch.qint8))


def test_the_value_is_the_same_in_every_build() -> None:
    assert int(fingerprint(torch.arange(5 * ROW + 3, dtype=torch.int32))) == -7320289238771572349


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_computes_the_same_without_a_synchronization() -> None:
    tensor = torch.randn(40_000_007).to(torch.bfloat16)
    on_gpu = tensor.cuda()
    fingerprint(on_gpu)
    torch.cuda.set_sync_debug_mode("error")
    try:
        value = fingerprint(on_gpu)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert value.cpu() == fingerprint(tensor)


def test_importing_starts_no_threads() -> None:
    """A process that is forked later would lack them, and wait for them."""
    code = (
        "import os, torch, horovod.torch\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        "import hvd_ckpt.app.cli, hvd_ckpt.utils.fingerprint, hvd_ckpt.distributed.optimizer\n"
        "import hvd_ckpt.planning.planner, hvd_ckpt.parallel.pipeline\n"
        "assert len(os.listdir('/proc/self/task')) == before\n"
    )
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "OMP_NUM_THREADS": "2"}, check=True)


def test_a_contiguous_tensor_with_the_negative_bit() -> None:
    negated = torch.complex(torch.randn(1), torch.randn(1)).conj().imag
    assert negated.is_neg() and negated.is_contiguous()
    assert fingerprints([negated])[0] == fingerprints([negated.clone()])[0]
