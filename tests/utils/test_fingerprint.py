"""Tests of fingerprints: they differ if any bit differs, and depend on nothing else."""

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
def test_a_flipped_bit_anywhere_is_seen(dtype, numel):
    tensor = random_tensor(numel, dtype)
    expected = fingerprint(tensor)
    assert expected.shape == () and expected.dtype is torch.int64
    assert fingerprint(tensor.clone()) == expected
    bits = numel * dtype.itemsize * 8
    for bit in {0, bits // 2, bits - 8, *torch.randint(0, bits, (20,)).tolist()}:
        at = bit // 8 * 8 if dtype is torch.bool else bit
        assert fingerprint(flipped(tensor, at)) != expected, bit


def test_equal_changes_and_exchanged_elements_are_seen():
    tensor = torch.randn(2 * ROW + 100)
    places = [0, 1, 2, 3, ROW - 1, ROW, 2 * ROW + 98, 2 * ROW + 99]
    pairs = [[place * 32 + 31 for place in pair] for pair in itertools.combinations(places, 2)]
    signs = {int(fingerprint(flipped(tensor, *pair))) for pair in pairs}
    assert len(signs | {int(fingerprint(tensor))}) == len(pairs) + 1
    seen = set()
    for places in ((3, 5), (7, 11)), ((5, 3), (7, 11)), ((3, 5),), ((3, 11), (7, 5)):
        matrix = torch.zeros(2000, 2000)
        matrix[tuple(zip(*places))] = 1.5
        seen.add(int(fingerprint(matrix)))
    assert len(seen) == 4
    assert fingerprint(matrix.t().contiguous()) != fingerprint(matrix)


def test_values_count_as_their_bits():
    nan = torch.tensor([float("nan"), 0.0])
    assert fingerprint(nan) == fingerprint(nan.clone())
    assert fingerprint(-nan) != fingerprint(nan)
    assert fingerprint(torch.tensor([-0.0])) != fingerprint(torch.tensor([0.0]))
    tensor = torch.randn(9, dtype=torch.complex64)
    assert fingerprint(tensor.conj()) == fingerprint(tensor.conj().resolve_conj()) != fingerprint(tensor)
    assert fingerprint(tensor.conj().imag) == fingerprint(tensor.conj().imag.clone())
    parameter = torch.nn.Parameter(torch.tensor(2.5))
    assert fingerprint(parameter) == fingerprint(torch.tensor([2.5]))
    assert not fingerprint(parameter).requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.complex64], ids=str)
def test_strides_and_offset_do_not_count(dtype):
    tensor = random_tensor(2 * 3 * 50 * 60, dtype).view(2, 3, 50, 60)
    expected = fingerprint(tensor)
    assert fingerprint(tensor.contiguous(memory_format=torch.channels_last)) == expected
    assert fingerprint(tensor.transpose(0, 3).contiguous().transpose(0, 3)) == expected
    for offset in (1, 2, 3, 4):
        storage = torch.empty(tensor.numel() + offset, dtype=dtype)
        assert fingerprint(storage[offset:].copy_(tensor.view(-1))) == expected
    assert fingerprint(storage[::2]) == fingerprint(storage[::2].clone())


def test_expanded_and_empty_tensors_are_not_materialized():
    base = torch.randn(4, 1, 5)
    assert fingerprint(base.expand(4, 1 << 40, 5)) == fingerprint(base)
    assert fingerprint(base.expand(4, 0, 5)) == fingerprint(torch.empty(0, 3)) == 0


def test_those_of_several_tensors_are_those_of_each():
    whole = [random_tensor(numel, dtype) for dtype in DTYPES for numel in (0, 7, 8, 200_000)]
    tensors = [*whole, *(tensor[1:] for tensor in whole if tensor.numel()), torch.eye(3).to_sparse()]
    assert list(map(int, fingerprints(tensors))) == [int(fingerprint(tensor)) for tensor in tensors]
    negated = torch.complex(torch.randn(1), torch.randn(1)).conj().imag
    assert negated.is_neg() and negated.is_contiguous()
    assert fingerprints([negated])[0] == fingerprints([negated.clone()])[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "stored",
    [
        torch.Tensor.to_sparse,
        torch.Tensor.to_sparse_csr,
        torch.Tensor.to_sparse_csc,
        lambda dense: torch.quantize_per_tensor(dense, 0.5, 3, torch.qint8),
    ],
)
def test_places_and_values_of_sparse_and_quantized_tensors_count(stored):
    dense, moved = torch.tensor([[0.0, 2.0], [3.0, 0.0]]), torch.tensor([[2.0, 0.0], [0.0, 3.0]])
    assert fingerprint(stored(dense)) == fingerprint(stored(dense)) != fingerprint(stored(moved))


def test_the_value_is_the_same_in_every_build():
    assert int(fingerprint(torch.arange(5 * ROW + 3, dtype=torch.int32))) == -7320289238771572349


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_computes_the_same_without_a_synchronization():
    tensor = torch.randn(40_000_007).to(torch.bfloat16)
    on_gpu = tensor.cuda()
    fingerprint(on_gpu)
    torch.cuda.set_sync_debug_mode("error")
    try:
        value = fingerprint(on_gpu)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert value.cpu() == fingerprint(tensor)


def test_importing_starts_no_threads():
    """A process that is forked later would lack them, and wait for them."""
    code = (
        "import os, torch, horovod.torch\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        "import hvd_ckpt.app.cli, hvd_ckpt.utils.fingerprint, hvd_ckpt.distributed.optimizer\n"
        "import hvd_ckpt.planning.planner, hvd_ckpt.parallel.pipeline\n"
        "assert len(os.listdir('/proc/self/task')) == before\n"
    )
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "OMP_NUM_THREADS": "2"}, check=True)
