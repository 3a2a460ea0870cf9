"""Reduce-scatter that scales its input, as with fusion on, and its gradient; empty tensors, which fuse even when fusion is off."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import hvd_ckpt as hc

pytestmark = pytest.mark.ranks(gloo=(1, 2), mpi=(4,))

PRESCALE, POSTSCALE = 0.375, 4.0
Scatter = Callable[..., torch.Tensor]


def first_of(results: list[torch.Tensor]) -> torch.Tensor:
    """The first result of a group, of which the second is the double."""
    first, second = results
    assert torch.equal(second, 2 * first)
    return first


SCATTERS: dict[str, Scatter] = {
    "one": hc.reducescatter,
    "one by handle": lambda tensor, **options: hc.synchronize(hc.reducescatter_async(tensor, **options)),
    "a group": lambda tensor, **options: first_of(hc.grouped_reducescatter([tensor, 2 * tensor], **options)),
    "a group by handle": lambda tensor, **options: first_of(
        hc.synchronize(hc.grouped_reducescatter_async([tensor, 2 * tensor], **options))
    ),
}


def rows_of(rank: int, rows: int, ranks: int) -> slice:
    """Earlier ranks have one row more where the number does not divide."""
    each, more = divmod(rows, ranks)
    start = each * rank + min(rank, more)
    return slice(start, start + each + (rank < more))


def whole(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return 8 * (torch.arange(15).reshape(5, 3) + rank).to(dtype)


@pytest.mark.parametrize("scatter", SCATTERS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int64])
def test_the_input_is_scaled_with_fusion_off(scatter: str, dtype: torch.dtype) -> None:
    own = whole(hc.rank(), dtype)
    before = own.clone()
    options = {"name": f"scaled.{scatter}.{dtype}", "op": hc.Sum}
    got = SCATTERS[scatter](own, prescale_factor=PRESCALE, postscale_factor=POSTSCALE, **options)
    expected = sum(whole(rank, torch.float64) for rank in range(hc.size())) * PRESCALE * POSTSCALE
    assert got.dtype == dtype
    assert torch.equal(got.double(), expected[rows_of(hc.rank(), 5, hc.size())])
    assert torch.equal(own, before)


def test_integers_are_rounded_towards_zero_before_the_sum() -> None:
    own = torch.tensor([[7], [-7]] * hc.size())
    got = hc.reducescatter(own, name="integers", op=hc.Sum, prescale_factor=0.3)
    assert got.tolist() == [[2 * hc.size()], [-2 * hc.size()]]


def test_the_mean_compressed_with_gradients() -> None:
    own = whole(hc.rank(), torch.float32).requires_grad_()
    got = hc.reducescatter(own, name="mean", compression=hc.Compression.fp16, prescale_factor=0.5)
    mean = sum(whole(rank, torch.float32) for rank in range(hc.size())) / hc.size()
    assert torch.allclose(got, 0.5 * mean[rows_of(hc.rank(), 5, hc.size())], rtol=1e-3)
    got.sum().backward()
    assert torch.equal(own.grad, torch.full((5, 3), 0.5))


@pytest.mark.ranks(gloo=(2,), mpi=(4,))
@pytest.mark.parametrize("name", [None, "gradients"])
@pytest.mark.parametrize("scatter", ["one", "a group"])
def test_gradients_where_ranks_have_counted_different_operations(scatter: str, name: str | None) -> None:
    """Horovod numbers unnamed operations; one rank has one of its own between the forward and the backward pass."""
    sets = [hc.add_process_set([rank]) for rank in range(hc.size())]
    alone = sets[hc.rank()]

    def count(operations: int) -> None:
        for _ in range(operations):
            hc.allreduce(torch.ones(1), process_set=alone)

    handle = hc.allreduce_async(torch.ones(1), name="handle")
    hc.synchronize(handle)
    count(max(hc.allgather_object(handle)) - handle)
    own = torch.ones(2 * hc.size(), 3, requires_grad=True)
    got = SCATTERS[scatter](own, name=name, op=hc.Sum, postscale_factor=2.0)
    count(hc.rank())
    (got * (hc.rank() + 1)).sum().backward()
    expected = torch.arange(1, hc.size() + 1).repeat_interleave(2)[:, None] * 2.0 * hc.size()
    assert torch.equal(own.grad, expected.expand(-1, 3))
    hc.barrier()
    for one in sets:
        hc.remove_process_set(one)


@pytest.mark.ranks(gloo=(2,), mpi=(4,))
def test_in_a_process_set() -> None:
    some = hc.add_process_set(range(hc.size() - 1))
    if some.included():
        rows = torch.ones(4, 2)
        got = hc.reducescatter(rows, name="set", op=hc.Sum, prescale_factor=3.0, process_set=some)
        assert torch.equal(got, 3.0 * some.size() * rows[rows_of(some.rank(), 4, some.size())])
    hc.barrier()
    hc.remove_process_set(some)


def test_empty_tensors_resynchronize() -> None:
    nothing = [torch.empty(0), torch.empty(0, 2), torch.empty(0)]
    results = [
        *hc.grouped_allreduce(nothing, name="empty.reduced", op=hc.Sum),
        *hc.grouped_allgather(nothing, name="empty.gathered"),
        *hc.grouped_reducescatter(nothing, name="empty.scattered", prescale_factor=2.0),
    ]
    assert [result.numel() for result in results] == [0] * 9
