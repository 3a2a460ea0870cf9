"""Tests of peak memory against sums by hand."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hvd_ckpt.utils.memory import measure_peak, memory_of_tensors

FLOAT = 4  # bytes of a float32
BEFORE = torch.zeros(100, 10)
KEPT: list[torch.Tensor] = []
CHAIN = nn.Sequential(*(nn.Sigmoid() for _ in range(6)))  # each of which saves its output
INPUT = torch.zeros(1000, requires_grad=True)
WEIGHT = torch.zeros(64, 64, requires_grad=True)
RANDOM_STATE = torch.get_rng_state().nbytes


def overlapping():
    first = torch.zeros(1000)
    second = torch.zeros(500)
    del first
    third = torch.zeros(600)  # 500 + 600 is less than 1000 + 500
    del second, third


def keeping():
    KEPT.append(torch.zeros(300, dtype=torch.float64))
    torch.zeros(100, dtype=torch.int8)


def recomputed():
    middle = checkpoint(CHAIN[:3], INPUT, use_reentrant=False)
    KEPT.append(checkpoint(CHAIN[3:], middle, use_reentrant=False))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("work", "peak", "held"),
    [
        (lambda: None, 0, 0),
        (overlapping, 1500 * FLOAT, 0),
        (keeping, 300 * 8 + 100, 300 * 8),
        (lambda: BEFORE.relu(), 1000 * FLOAT, 0),  # what existed before is not counted
        (lambda: BEFORE.view(10, 100).t().relu_(), 0, 0),  # nor are views and work in place
        (lambda: KEPT.append(CHAIN(INPUT)), 6000 * FLOAT, 6000 * FLOAT),
        # Two outputs, and the random state of each region, by which dropout is repeated.
        (recomputed, None, 2000 * FLOAT + 2 * RANDOM_STATE),
        # Of autograd's thread: the gradient of the weight is held, the ones and the output are not.
        (
            lambda: (WEIGHT @ BEFORE.view(-1)[:64]).backward(torch.ones(64)),
            (4096 + 128) * FLOAT,
            4096 * FLOAT,
        ),
    ],
    ids=["nothing", "overlapping", "keeping", "new", "in place", "activations", "recomputed", "backward"],
)
def test_the_peak_and_what_is_held(work, peak, held):
    memory = measure_peak(work)
    assert memory.held_bytes == held
    assert peak is None or memory.peak_bytes == peak
    KEPT.clear()
    WEIGHT.grad = None


def test_units_are_printed():
    assert str(measure_peak(overlapping)) == "peak 5.86 KiB, held at the end 0 B"


def test_errors_leave_the_profiler_usable():
    with pytest.raises(ZeroDivisionError):
        measure_peak(lambda: 1 // 0)
    other = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with other, pytest.raises(RuntimeError, match="inside a running PyTorch profiler"):
        measure_peak(lambda: None)
    with pytest.raises(ValueError, match=r"device 'meta'.*cpu and cuda"):
        measure_peak(lambda: None, "meta")
    assert measure_peak(lambda: torch.zeros(10)).peak_bytes == 10 * FLOAT


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_counts_the_allocators_blocks():
    memory = measure_peak(lambda: torch.zeros(1 << 20, device="cuda"), "cuda")
    assert (memory.peak_bytes, memory.held_bytes) == ((1 << 20) * FLOAT, 0)


def test_tensors_without_an_address_are_left_out():
    tensor = torch.ones(5)
    traced = torch._to_functional_tensor(torch.ones(3))  # as torch.compile leaves some behind
    lazy = torch.nn.LazyLinear(2)
    assert tensor.untyped_storage().data_ptr() in memory_of_tensors()
    del traced, lazy
