"""Tests of groups of ranks with a second copy of the parameters: fewer bytes between groups, and equal bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from horovod.common import process_sets
from one_process import chain, train, wrap
from same import assert_same
from torch import nn

import hvd_ckpt as hc

pytestmark = pytest.mark.ranks(gloo=(2,))


def fail(*_: Any) -> None:
    raise ArithmeticError


@pytest.mark.ranks(gloo=(4,), mpi=(4,))
@pytest.mark.parametrize(("within", "wire"), [([[0, 1], [2, 3]], "fp32"), ([[0, 2], [1, 3]], "int8")])
def test_groups_with_shards_of_their_own_gather_among_themselves(within: list[list[int]], wire: str) -> None:
    """Recomputed, with micro-batches, evaluation, weights that are written, gradients of one's own, and a step that fails after
    its update; once with a block that runs twice. Process sets are given back."""

    def run(**options: Any) -> tuple[list[torch.Tensor], list[int], int]:
        sets = process_sets._basics._get_process_set_ids_and_ranks()
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.Tanh()) for _ in range(4)]
        model = hc.CheckpointSequential([*blocks, *blocks[1:2] * (wire == "int8")], segments=2)
        optimizer = wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-2), shard=3, wire=wire, **options)
        traffic, sent, losses = optimizer.traffic, [], []
        for step in range(6):
            before = traffic.sent["all_gather"] + traffic.sent["reduce_scatter"]
            for batch in range(1 + step % 2):
                torch.manual_seed(10 * step + batch + 100 * hc.rank())
                loss = model(torch.randn(3, 64)).square().mean()
                loss.backward()
                losses.append(loss.detach())
            if step == 4:
                optimizer.synchronize()
                for piece in optimizer.pieces:
                    piece.parameter.grad = torch.ones_like(piece.parameter)
                with optimizer.skip_synchronize():
                    optimizer.step()
            elif step == 5:
                handle = optimizer.register_step_post_hook(fail)
                with pytest.raises(ArithmeticError):
                    optimizer.step()
                handle.remove()
            else:
                optimizer.step()
            optimizer.zero_grad()
            sent.append(traffic.sent["all_gather"] + traffic.sent["reduce_scatter"] - before)
            with torch.no_grad():
                losses += [model(torch.ones(1, 64)).mean(), model(torch.ones(1, 64)).mean()]
            if step == 1:
                with optimizer.gathered_parameters():
                    blocks[2][0].weight.data.mul_(0.5)
        optimizer.unshard()
        assert process_sets._basics._get_process_set_ids_and_ranks() == sets
        return [*losses, *(one.detach() for one in model.parameters())], sent, traffic.sent["gather_within"]

    (plain, all_sent, none), (grouped, sent, inside) = run(), run(within=within)
    assert_same(grouped, plain)
    assert none == 0 < inside
    if wire == "fp32":
        # Forward gathers and reduce-scatters cross, backward gathers do not.
        assert 3 * sent[0] == 2 * all_sent[0]
        # What evaluation has gathered serves the micro-batches of the next step.
        assert 3 * sent[1] == all_sent[1]


def test_groups_that_serve_nothing() -> None:
    model = chain(2)
    for shard, within, message in (
        (2, "host", "needs shard parameters"),
        (3, "rack", "'rack'"),
        (3, [[0], [1]], "each group is one rank"),
        (3, [[0]], "each of the ranks"),
    ):
        with pytest.raises(ValueError, match=message):
            wrap(model, shard=shard, within=within)
    optimizer = wrap(model, shard=3, within="host")  # all ranks are on one host
    train(model, optimizer, range(1))
    assert optimizer.traffic.sent["gather_within"] == 0 < optimizer.traffic.sent["all_gather"]
