"""Tests of alignment: parameters in flat memory are aligned as in memory of their own, so that kernels round equally."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from same import assert_same, whole_weights
from sharded import distribute
from torch import nn

import hvd_ckpt as hc

pytestmark = pytest.mark.ranks(gloo=(2, 3), mpi=(4,))

CACHE_LINE = 64  # bytes; where PyTorch allocates on a CPU


class Attention(nn.MultiheadAttention):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x, x, x, need_weights=False)[0]


class Odd(nn.Module):
    """Odd numbers of elements before attention, a scalar, a parameter without elements, and one that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 6), Attention(6, 2, batch_first=True))
            for _ in range(2)
        )
        self.blocks[1][0].weight = nn.Parameter(torch.randn(6, 7).t())
        self.last = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.last(x) + self.nothing.sum()


def trained(shard: int, dtype: torch.dtype, steps: int = 3, **options: Any) -> tuple[Odd, Any, set[int]]:
    """Model, optimizer, and where parameters begin within a cache line while the model runs."""
    torch.manual_seed(3)
    model = Odd().to(dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer = distribute(optimizer, model.named_parameters(), shard=shard, model=model, **options)
    places: set[int] = set()
    for module in model.modules():
        module.register_forward_pre_hook(
            lambda module, _: places.update(
                one.data_ptr() % CACHE_LINE
                for one in module._parameters.values()
                if one is not None and one.numel()
            )
        )
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * step + hc.rank())
        x = torch.randn(7, 3, 6, generator=generator).to(dtype)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return model, optimizer, places


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("shard", "options"),
    [(1, {}), (2, {}), (3, {}), (3, {"offload": "parameters"}), (1, {"wire": {"parameters": "bf16"}})],
)
def test_parameters_are_aligned_and_bits_are_those_without_shards(
    shard: int, options: dict[str, Any], dtype: torch.dtype
) -> None:
    if dtype is torch.bfloat16:
        options = {**options, "master_weights": False}
    model, optimizer, places = trained(shard, dtype, **options)
    assert places == {0}
    if "wire" in options:
        return
    weights = whole_weights(model, optimizer)
    for name, value in whole_weights(*trained(0, dtype)[:2]).items():
        if hc.size() <= 2 and dtype is not torch.bfloat16:  # whose sums are in float32 there
            assert torch.equal(weights[name], value), name
        else:
            tolerance = 1e-1 if dtype is torch.bfloat16 else 1e-4
            torch.testing.assert_close(weights[name], value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shard", [1, 2, 3])
def test_padding_is_zero_and_counts_nowhere(shard: int) -> None:
    model, optimizer, _ = trained(shard, torch.float32)
    optimizer.zero_grad()
    model(torch.ones(7, 3, 6)).sum().backward()
    norm = hc.clip_grad_norm_(model.parameters(), 1e9)
    plain, unsharded, _ = trained(0, torch.float32)
    unsharded.zero_grad()
    plain(torch.ones(7, 3, 6)).sum().backward()
    torch.testing.assert_close(norm, hc.clip_grad_norm_(plain.parameters(), 1e9))
    optimizer.step()
    sharding = optimizer.sharding
    for group in sharding.layout.groups:
        shard_of = sharding.store.shards[group.position]
        inside = torch.zeros(group.shard_numel, dtype=torch.bool)
        for span in group.spans(hc.rank()):
            span.of(inside).fill_(True)
        assert not shard_of[~inside].any()
    pieces = sum(hc.allgather_object(sum(piece.parameter.numel() for piece in optimizer.pieces)))
    assert pieces == sum(one.numel() for one in model.parameters())
    moments = optimizer.full_state_dict(all_ranks=True)["state"]
    assert all(
        values["exp_avg"].shape == one.shape for values, one in zip(moments.values(), _with_elements(model))
    )


def _with_elements(model: nn.Module) -> list[torch.Tensor]:
    return [one for one in model.parameters() if one.numel()]


@pytest.mark.parametrize("shard", [0, 1, 2, 3])
def test_a_whole_state_and_weights_load(shard: int) -> None:
    model, optimizer, _ = trained(0, torch.float32)
    whole, state = whole_weights(model, optimizer), optimizer.state_dict()
    names = [name for name, _ in model.named_parameters()]
    flat = {name: one.as_strided((one.numel(),), (1,)) for name, one in whole.items()}  # in memory order
    other, resumed, _ = trained(shard, torch.float32, steps=0)
    resumed.load_state_dict(copy.deepcopy(state))
    if shard:
        ranges = [part[:3] for part in resumed.weight_pieces()]
        resumed.load_weight_pieces((*part, flat[part[0]][part[1] : part[2]]) for part in ranges)
        found = whole_weights(other, resumed)
        assert all(torch.equal(found[name], value) for name, value in whole.items())
        del state["state"][names.index("nothing")]  # no element has any state
    assert_same(resumed.full_state_dict(all_ranks=True)["state"], state["state"])
