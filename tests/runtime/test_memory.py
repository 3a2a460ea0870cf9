"""Peak memory against sums done by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hvd_ckpt.memory import measure_peak, recording_peak

FLOAT = 4  # bytes of a float32


def test_nothing_allocated():
    memory = measure_peak(lambda: None)
    assert (memory.peak_bytes, memory.held_bytes) == (0, 0)


def test_peak_is_the_most_at_one_time():
    def work():
        first = torch.zeros(1000)
        second = torch.zeros(500)
        del first
        third = torch.zeros(600)  # 500 + 600 is less than 1000 + 500
        del second, third

    memory = measure_peak(work)
    assert memory.peak_bytes == 1500 * FLOAT
    assert memory.held_bytes == 0


def test_what_existed_before_is_not_counted():
    before = torch.zeros(10_000)
    memory = measure_peak(lambda: before.relu())
    assert memory.peak_bytes == 10_000 * FLOAT


def test_views_cost_nothing_and_in_place_neither():
    before = torch.zeros(100, 10)
    assert measure_peak(lambda: before.view(10, 100).t().relu_()).peak_bytes == 0


def test_held_bytes_are_those_left_behind():
    kept = []

    def work():
        kept.append(torch.zeros(300, dtype=torch.float64))
        torch.zeros(100, dtype=torch.int8)

    memory = measure_peak(work)
    assert memory.held_bytes == 300 * 8
    assert memory.peak_bytes == 300 * 8 + 100


def test_with_statement_gives_the_same_figures():
    with recording_peak() as memory:
        block = torch.zeros(250)
        del block
    assert (memory.peak_bytes, memory.held_bytes) == (250 * FLOAT, 0)


def test_forward_of_a_chain_keeps_every_activation_and_recomputation_does_not():
    """A chain of sigmoids saves each output (n floats each): by hand, layers * n against the two kept inputs."""
    n, layers = 1000, 6
    chain = nn.Sequential(*(nn.Sigmoid() for _ in range(layers)))
    x = torch.zeros(n, requires_grad=True)
    results = []

    kept = measure_peak(lambda: results.append(chain(x)))
    assert kept.held_bytes == layers * n * FLOAT

    half = layers // 2

    def recomputed():
        middle = checkpoint(chain[:half], x, use_reentrant=False)
        results.append(checkpoint(chain[half:], middle, use_reentrant=False))

    results.clear()
    random_state = torch.get_rng_state().nbytes  # each region keeps its own: how dropout is repeated
    memory = measure_peak(recomputed)
    assert memory.held_bytes == 2 * n * FLOAT + 2 * random_state


def test_backward_is_counted_on_autograds_side():
    """grad of a linear without bias: the weight's gradient (n x n) is held, the ones and the output are n floats."""
    n = 64
    weight = torch.zeros(n, n, requires_grad=True)
    x = torch.ones(n)

    def work():
        (weight @ x).backward(torch.ones(n))

    memory = measure_peak(work)
    assert memory.held_bytes == n * n * FLOAT
    assert memory.peak_bytes == n * n * FLOAT + 2 * n * FLOAT


def test_the_same_work_gives_the_same_number():
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    x = torch.randn(16, 32)

    def peak():
        model.zero_grad()
        return measure_peak(lambda: model(x).square().sum().backward()).peak_bytes

    assert len({peak() for _ in range(3)}) == 1


def test_an_error_in_the_work_is_passed_on_and_leaves_the_profiler_usable():
    with pytest.raises(ZeroDivisionError):
        measure_peak(lambda: 1 // 0)
    assert measure_peak(lambda: torch.zeros(10)).peak_bytes == 10 * FLOAT


def test_inside_another_profiler_is_a_clear_error():
    other = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with other, pytest.raises(RuntimeError, match="inside a running PyTorch profiler"):
        measure_peak(lambda: None)


def test_other_devices_are_a_clear_error():
    with pytest.raises(ValueError, match="device 'meta'.*cpu and cuda"):
        measure_peak(lambda: None, "meta")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_counts_the_allocators_blocks():
    memory = measure_peak(lambda: torch.zeros(1 << 20, device="cuda"), "cuda")
    assert memory.peak_bytes == (1 << 20) * FLOAT
    assert memory.held_bytes == 0
