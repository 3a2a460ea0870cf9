"""Tests of reduce-scatter and gather: right values, equal bits in each run, equal values on all ranks."""

from __future__ import annotations

import pytest
import torch
from same import assert_same

import hvd_ckpt as hc
from hvd_ckpt.collectives import asynchronous, rows
from hvd_ckpt.collectives.exchange import Exchange
from hvd_ckpt.collectives.formats import BF16, FP16, FP32, INT8, WireFormat, sum_dtype
from hvd_ckpt.collectives.process_sets import levels
from hvd_ckpt.distributed.tree import add_rows

pytestmark = pytest.mark.ranks(gloo=(1, 2, 3), mpi=(4,))

SHARD = 321  # no whole number of blocks
FORMATS = [(FP32, 1e-6), (FP16, 2e-3), (BF16, 2e-2), (INT8, 5e-2)]
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64)
needs_others = pytest.mark.ranks(gloo=(2, 3), mpi=(4,))


@pytest.fixture
def exchange() -> Exchange:
    return Exchange(hc.global_process_set, "test.exchange")


def flats(dtype: torch.dtype = torch.float32, numel: int | None = None) -> list[torch.Tensor]:
    """What each rank contributes, the same on every rank."""
    torch.manual_seed(5)
    numel = numel or SHARD * hc.size()
    return [torch.randn(numel, dtype=torch.float64).to(dtype) for _ in range(hc.size())]


def own(flat: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    return flat.view(exchange.ranks, -1)[exchange.rank]


def rounded(format: WireFormat, chunk: torch.Tensor) -> torch.Tensor:
    if chunk.is_complex():
        return torch.view_as_complex(format.rounded(torch.view_as_real(chunk).view(-1)).view(-1, 2))
    return format.rounded(chunk)


@pytest.mark.parametrize(("format", "bound"), FORMATS, ids=lambda value: str(value))
def test_every_format_adds_and_gathers_every_type(
    exchange: Exchange, format: WireFormat, bound: float
) -> None:
    for dtype in DTYPES:
        contributions = flats(dtype)
        exact = own(sum(each.to(torch.complex128) for each in contributions), exchange) / exchange.ranks
        mine = contributions[exchange.rank]
        total = exchange.reduce_scatter(mine, "sum", 1 / exchange.ranks, format).wait()
        assert total.dtype is (torch.float32 if dtype is torch.bfloat16 else dtype)
        assert float((total - exact).abs().max()) <= bound

        chunks = [each.view(exchange.ranks, -1)[rank] for rank, each in enumerate(contributions)]
        travelled = torch.cat([rounded(format, one) if exchange.ranks > 1 else one for one in chunks])
        for is_in_its_place in (False, True):
            whole = torch.zeros_like(mine)
            shard = own(mine, exchange)
            if is_in_its_place:
                shard = own(whole, exchange).copy_(shard)
            version = whole._version
            assert exchange.all_gather(shard, whole, "whole", format).wait() is whole
            assert whole._version == version
            assert torch.equal(whole, travelled)


def test_transfers_overlap_across_a_rename(exchange: Exchange) -> None:
    flat = torch.ones(exchange.ranks * 4)
    early = exchange.reduce_scatter(flat, "sum")
    exchange.rename("test.exchange.again")
    late = exchange.reduce_scatter(2 * flat, "sum")
    assert late.wait().tolist() == [2.0 * exchange.ranks] * 4
    assert early.wait().tolist() == [1.0 * exchange.ranks] * 4
    assert early.done() and early.wait() is early.wait()


@needs_others
@pytest.mark.parametrize("format", [FP32, BF16, INT8], ids=lambda value: str(value))
def test_large_objects_are_sent_in_several_messages(
    exchange: Exchange, format: WireFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same bits."""

    def moved() -> list[torch.Tensor]:
        found = []
        for dtype in DTYPES:
            mine = flats(dtype)[exchange.rank]
            found.append(exchange.reduce_scatter(mine, "sum", 0.5, format).wait())
            whole = torch.empty_like(mine)
            found.append(exchange.all_gather(own(mine, exchange), whole, "whole", format).wait())
        weights = torch.full((SHARD, 3), float(hc.rank()))
        hc.broadcast_parameters({"weight": weights.t()}, root_rank=1)
        return [*found, weights]

    expected = moved()
    monkeypatch.setattr(asynchronous, "LARGEST", 500)
    assert_same(moved(), expected)
    assert bool((expected[-1] == 1).all())


def test_levels_are_hosts_with_equally_many_ranks_in_order() -> None:
    assert levels([[3, 2], [0, 1]]) == [[0, 1], [2, 3]]
    for hosts in ([[0, 1, 2]], [[0], [1]], [[0, 1], [2]], [[0, 2], [1, 3]]):
        assert levels(hosts) is None


def test_a_tree_of_ranks_is_a_tree_of_trees_on_hosts() -> None:
    rows = torch.randn(8, 5)
    on_hosts = torch.stack([add_rows(host.clone()) for host in rows.split(2)])
    assert torch.equal(add_rows(on_hosts), add_rows(rows.clone()))


@pytest.mark.ranks(mpi=(4,))
@pytest.mark.parametrize(("format", "bound"), FORMATS, ids=lambda value: str(value))
def test_ranks_of_a_host_are_added_first(
    exchange: Exchange, format: WireFormat, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same bits each time, and in those of sums of sums where nothing is rounded on the way."""
    for name in ("TWO_LEVEL_BYTES", "TWO_LEVEL_ROW_BYTES"):
        monkeypatch.setattr(rows, name, 0)
    hosts = exchange.hosts = [[0, 1], [2, 3]]
    sent = 0
    for dtype in DTYPES:
        contributions = flats(dtype)
        mine, scale = contributions[exchange.rank], 1 / exchange.ranks
        first, second = (exchange.reduce_scatter(mine, f"sum.{number}", scale, format) for number in range(2))
        total = first.wait()
        assert torch.equal(total, second.wait())
        exact = own(sum(each.to(torch.complex128) for each in contributions), exchange) * scale
        assert float((total - exact).abs().max()) <= 2 * bound
        if format is FP32:
            parts = [own(each, exchange).to(total.dtype) for each in contributions]
            assert torch.equal(total, sum(parts[host[0]] + parts[host[1]] for host in hosts) * scale)
        numel, dtype = (2 * SHARD, torch.float32) if dtype.is_complex else (SHARD, dtype)
        sent += 2 * (format.row_bytes(2 * numel, dtype) + format.row_bytes(numel, sum_dtype(dtype)))
    assert exchange.traffic.sent["reduce_scatter"] == sent
