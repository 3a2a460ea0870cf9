"""Reduce-scatter that scales its input, as with fusion on; and collectives on empty tensors, which fuse even when it is off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hvd_ckpt as hc

pytestmark = pytest.mark.ranks(gloo=(1, 2, 4), mpi=(2, 4))

PRESCALE, POSTSCALE = 0.375, 4.0
Scatter = Callable[..., torch.Tensor]


def one_by_handle(tensor: torch.Tensor, **options: Any) -> torch.Tensor:
    return hc.synchronize(hc.reducescatter_async(tensor, **options))


def in_a_group(tensor: torch.Tensor, **options: Any) -> torch.Tensor:
    first, second = hc.grouped_reducescatter([tensor, 2 * tensor], **options)
    assert torch.equal(second, 2 * first)
    return first


def group_by_handle(tensor: torch.Tensor, **options: Any) -> torch.Tensor:
    first, second = hc.synchronize(hc.grouped_reducescatter_async([tensor, 2 * tensor], **options))
    assert torch.equal(second, 2 * first)
    return first


FORMS = (hc.reducescatter, one_by_handle, in_a_group, group_by_handle)


def rows_of(rank: int, rows: int, ranks: int) -> slice:
    """Earlier ranks have one row more where the number does not divide."""
    each, more = divmod(rows, ranks)
    start = each * rank + min(rank, more)
    return slice(start, start + each + (rank < more))


def whole(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return 8 * (torch.arange(15).reshape(5, 3) + rank).to(dtype)


@pytest.mark.parametrize("scatter", FORMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.int32, torch.int64])
def test_the_input_is_scaled_with_fusion_off(scatter: Scatter, dtype: torch.dtype) -> None:
    own = whole(hc.rank(), dtype)
    before = own.clone()
    name = f"scaled.{getattr(scatter, '__name__')}.{dtype}"  # noqa: B009
    got = scatter(own, name=name, op=hc.Sum, prescale_factor=PRESCALE, postscale_factor=POSTSCALE)
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


def test_in_a_process_set() -> None:
    if hc.size() == 1:
        pytest.skip("one rank has no smaller set")
    some = hc.add_process_set(range(hc.size() - 1))
    if some.included():
        options = {"name": "in.a.set", "op": hc.Sum, "process_set": some}
        got = hc.reducescatter(torch.ones(4, 2), prescale_factor=3.0, **options)
        assert torch.equal(got, torch.full_like(got, 3.0 * some.size()))
        assert got.shape[0] == len(range(4)[rows_of(some.rank(), 4, some.size())])
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
