"""A head that a plan computes in chunks, under the distributed optimizer: reduced once, and whole until its loss is computed."""

from __future__ import annotations

import copy

import pytest
import torch
from one_process import wrap
from same import whole_weights
from torch import nn
from torch.nn import functional

import hvd_ckpt as hc
from hvd_ckpt.planning.plan import BlockPlan, parameter_shapes
from hvd_ckpt.planning.policy import in_chunks

pytestmark = pytest.mark.ranks(gloo=(2,))

CLASSES, WIDTH = 101, 8


class Model(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.Sequential(
            *[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)],
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)),
        )
        if tied:
            self.layers[2][1].weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.layers(self.embedding(tokens))


def train(model: Model, shard: int) -> tuple[dict[str, torch.Tensor], list[int]]:
    """The weights after some steps, and how often the head's weight was accumulated in each."""
    optimizer = wrap(model, shard=shard, bucket_cap_mb=25.0)
    counts, calls = [], []
    model.layers[2][1].weight.register_post_accumulate_grad_hook(lambda _: calls.append(1))
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + hc.rank())
        tokens = torch.randint(CLASSES, (4, 9), generator=generator)
        optimizer.zero_grad()
        functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        counts.append(len(calls))
        calls.clear()
        with torch.no_grad():
            logits = model.eval()(tokens[:, :-1])
            assert functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) > 0
        model.train()
    if not shard:
        assert optimizer.reduction_stats.late_gradients == 0
        assert set(optimizer.reduction_stats.launches.values()) == {3}
    return whole_weights(model, optimizer), counts


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard", [0, 2, 3])
def test_training_is_that_of_the_whole_head(shard: int, tied: bool) -> None:
    model = Model(tied)
    head = model.layers[2][1]
    plan = hc.Plan((BlockPlan(("layers.2.1",), "Linear", parameter_shapes([head]), in_chunks(4)),), (0,))
    expected, _ = train(copy.deepcopy(model), 0)
    actual, counts = train(plan.apply(model), shard)
    assert counts == [1, 1, 1]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
