"""Tests of the layout: parameters in flat memory are aligned as in memory of their own, so that kernels round equally."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from one_process import wrap
from same import assert_same, whole_weights
from torch import nn

import hvd_ckpt as hc

pytestmark = pytest.mark.ranks(gloo=(2, 3), mpi=(4,))

CACHE_LINE = 64  # bytes; where PyTorch allocates on a CPU


class Attention(nn.MultiheadAttention):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x, x, x, need_weights=False)[0]


class Odd(nn.Module):
    """Odd numbers of elements before attention, a scalar, a parameter without elements, and one that is transposed.

    With ``gaps`` one has gaps, and the elements of another share memory.
    """

    def __init__(self, gaps: bool) -> None:
        super().__init__()
        keep: Any = nn.Identity() if gaps else torch.Tensor.contiguous
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.first = nn.Linear(6, 6)
        self.first.weight = nn.Parameter(keep(torch.randn(6, 20)[:, 4:10]))
        self.first.bias = nn.Parameter(keep(torch.ones(1).expand(6)))
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


def trained(
    shard: int, dtype: torch.dtype = torch.float32, steps: int = 3, **options: Any
) -> tuple[Odd, Any, set[int]]:
    """Model, optimizer, and where parameters begin within a cache line while the model runs."""
    torch.manual_seed(3)
    model = Odd(gaps=shard > 0).to(dtype)
    # With this eps what is zero but for rounding, such as the gradient of a key's bias, stays small.
    optimizer = wrap(
        model,
        torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3),
        shard=shard,
        bucket_cap_mb=25.0,
        **options,
    )
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
        optimizer.zero_grad()
        model(torch.randn(7, 3, 6, generator=generator).to(dtype)).square().mean().backward()
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
    if "wire" not in options:
        exact = hc.size() <= 2 and dtype is not torch.bfloat16  # whose sums are in float32 there
        tolerance = 0.0 if exact else 1e-1 if dtype is torch.bfloat16 else 1e-4
        wanted = whole_weights(*trained(0, dtype)[:2])
        torch.testing.assert_close(whole_weights(model, optimizer), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shard", [1, 2, 3])
def test_padding_is_zero_and_counts_nowhere(shard: int) -> None:
    norms = []
    for stage in (0, shard):
        model, optimizer, _ = trained(stage)
        optimizer.zero_grad()
        model(torch.ones(7, 3, 6)).sum().backward()
        norms.append(hc.clip_grad_norm_(model.parameters(), 1e9))
    torch.testing.assert_close(*norms)
    optimizer.step()
    for group, values in zip(optimizer.sharding.layout.groups, optimizer.sharding.store.shards):
        inside = torch.zeros(group.shard_numel, dtype=torch.bool)
        for span in group.spans(hc.rank()):
            span.of(inside).fill_(True)
        assert not values[~inside].any()
    pieces = sum(hc.allgather_object(sum(piece.parameter.numel() for piece in optimizer.pieces)))
    assert pieces == sum(one.numel() for one in model.parameters())
    moments = optimizer.full_state_dict(all_ranks=True)["state"].values()
    shapes = [one.shape for one in model.parameters() if one.numel()]
    assert [values["exp_avg"].shape for values in moments] == shapes


@pytest.mark.parametrize("shard", [0, 1, 2, 3])
def test_a_whole_state_and_weights_load(shard: int) -> None:
    model, optimizer, _ = trained(0)
    whole, state = whole_weights(model, optimizer), optimizer.state_dict()
    names = [name for name, _ in model.named_parameters()]
    other, resumed, _ = trained(shard, steps=0)
    resumed.load_state_dict(copy.deepcopy(state))
    if shard:
        flat = {name: one.as_strided((one.numel(),), (1,)) for name, one in whole.items()}  # in memory order
        ranges = [part[:3] for part in resumed.weight_pieces()]
        resumed.load_weight_pieces((*part, flat[part[0]][part[1] : part[2]]) for part in ranges)
        assert_same(whole_weights(other, resumed), whole)
        del state["state"][names.index("nothing")]  # no element has any state
    everywhere = resumed.full_state_dict(all_ranks=True)
    assert_same(everywhere["state"], state["state"])
    assert_same(resumed.full_state_dict(), everywhere if hc.rank() == 0 else None)


@pytest.mark.parametrize("shard", [1, 2])
def test_a_parameter_with_gaps_that_is_added_later_gets_memory_of_its_own(shard: int) -> None:
    _, optimizer, _ = trained(shard, steps=0)
    values = torch.arange(480.0).view(24, 20)[:, 4:12]
    late = nn.Parameter(values)
    optimizer.add_param_group({"params": [late]})
    assert late.data_ptr() != values.data_ptr() and torch.equal(late, values)
