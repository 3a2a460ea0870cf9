"""Tests of peak memory against sums by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hvd_ckpt.utils.memory import measure_peak, memory_of_tensors, recording_peak

FLOAT = 4  # bytes of a float32
BEFORE = torch.zeros(100, 10)
KEPT: list[torch.Tensor] = []


def overlapping() -> None:
    first = torch.zeros(1000)
    second = torch.zeros(500)
    del first
    third = torch.zeros(600)  # 500 + 600 is less than 1000 + 500
    del second, third


def keeping() -> None:
    KEPT.append(torch.zeros(300, dtype=torch.float64))
    torch.zeros(100, dtype=torch.int8)


@pytest.mark.parametrize(
    ("work", "peak", "held"),
    [
        (lambda: None, 0, 0),
        (overlapping, 1500 * FLOAT, 0),
        (keeping, 300 * 8 + 100, 300 * 8),
        (lambda: BEFORE.relu(), 1000 * FLOAT, 0),  # what existed before is not counted
        (lambda: BEFORE.view(10, 100).t().relu_(), 0, 0),  # nor are views and work in place
    ],
    ids=["nothing", "overlapping", "keeping", "new", "in place"],
)
def test_the_peak_and_what_is_held(work, peak: int, held: int) -> None:
    memory = measure_peak(work)
    assert (memory.peak_bytes, memory.held_bytes) == (peak, held)
    KEPT.clear()
    with recording_peak() as memory:
        work()
    assert (memory.peak_bytes, memory.held_bytes) == (peak, held)


@pytest.mark.filterwarnings("error")
def test_a_measurement_is_quiet_and_prints_units() -> None:
    assert str(measure_peak(overlapping)) == "peak 5.86 KiB, held at the end 0 B"


def test_forward_of_a_chain_keeps_every_activation_and_recomputation_does_not() -> None:
    """A chain of sigmoids saves each output (n floats each): by hand, layers * n against the two kept inputs."""
    n, layers = 1000, 6
    chain = nn.Sequential(*(nn.Sigmoid() for _ in range(layers)))
    x = torch.zeros(n, requires_grad=True)
    results = []
    kept = measure_peak(lambda: results.append(chain(x)))
    assert kept.held_bytes == layers * n * FLOAT

    def recomputed() -> None:
        middle = checkpoint(chain[: layers // 2], x, use_reentrant=False)
        results.append(checkpoint(chain[layers // 2 :], middle, use_reentrant=False))

    results.clear()
    random_state = torch.get_rng_state().nbytes  # each region keeps its own: how dropout is repeated
    assert measure_peak(recomputed).held_bytes == 2 * n * FLOAT + 2 * random_state


def test_backward_is_counted_on_autograds_side() -> None:
    """grad of a linear without bias: the weight's gradient (n x n) is held, the ones and the output are n floats."""
    n = 64
    weight, x = torch.zeros(n, n, requires_grad=True), torch.ones(n)
    memory = measure_peak(lambda: (weight @ x).backward(torch.ones(n)))
    assert memory.held_bytes == n * n * FLOAT
    assert memory.peak_bytes == n * n * FLOAT + 2 * n * FLOAT


def test_errors_leave_the_profiler_usable() -> None:
    with pytest.raises(ZeroDivisionError):
        measure_peak(lambda: 1 // 0)
    other = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with other, pytest.raises(RuntimeError, match="inside a running PyTorch profiler"):
        measure_peak(lambda: None)
    with pytest.raises(ValueError, match=r"device 'meta'.*cpu and cuda"):
        measure_peak(lambda: None, "meta")
    assert measure_peak(lambda: torch.zeros(10)).peak_bytes == 10 * FLOAT


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_counts_the_allocators_blocks() -> None:
    memory = measure_peak(lambda: torch.zeros(1 << 20, device="cuda"), "cuda")
    assert (memory.peak_bytes, memory.held_bytes) == ((1 << 20) * FLOAT, 0)


def test_tensors_without_an_address_are_left_out() -> None:
    tensor = torch.ones(5)
    traced = torch._to_functional_tensor(torch.ones(3))  # as torch.compile leaves some behind
    lazy = torch.nn.LazyLinear(2)
    assert tensor.untyped_storage().data_ptr() in memory_of_tensors()
    del traced, lazy
