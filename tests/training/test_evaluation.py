"""Evaluations of samples without targets that count."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import hvd_ckpt as hc
from hvd_ckpt.app.training.evaluation import evaluate
from hvd_ckpt.data.objectives import IGNORED, Batch, NextOrHiddenToken

pytestmark = pytest.mark.ranks(gloo=(1, 2))


class Tokens:
    """Samples of 3 tokens, whose targets are ignored up to sample ``first``."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __len__(self) -> int:
        return 9  # one rank of two has one more than the other

    def batch(self, indices: Sequence[int], epoch: Sequence[int]) -> Batch:
        numbers = torch.tensor(list(indices))[:, None].expand(-1, 3)
        return Batch((numbers,), torch.where(numbers < self.first, IGNORED, numbers % 5))


class MeanOfTerms(NextOrHiddenToken):
    """A loss that is nan where there are no terms, as PyTorch's own is."""

    def loss(self, output: torch.Tensor, batch: Batch) -> torch.Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), batch.targets.flatten())


@pytest.mark.parametrize("objective", [NextOrHiddenToken(), MeanOfTerms()])
@pytest.mark.parametrize("first", [0, 4, 9])
def test_samples_without_targets_do_not_count(objective: NextOrHiddenToken, first: int) -> None:
    torch.manual_seed(0)
    model, data = nn.Embedding(9, 5).train(first > 0), Tokens(first)
    run: Any = SimpleNamespace(
        model=model,
        test=data,
        objective=objective,
        average=None,
        config=SimpleNamespace(
            micro_batch=2, eval_batches=None, shard=SimpleNamespace(stage=3 * (first == 0))
        ),
        mode=SimpleNamespace(parts=1),
        device=torch.device("cpu"),
        precision=SimpleNamespace(autocast=contextlib.nullcontext),
    )
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        found = evaluate(run)
    assert [hc.rank() == 0 for one in heard if "no target that counts" in str(one.message)] == (
        [True] if first == len(data) and hc.rank() == 0 else []
    )
    if first == len(data):
        assert all(math.isnan(value) for name, value in found.items() if name != "samples")
    else:
        rest = data.batch(range(first, len(data)), [])
        expected = nn.functional.cross_entropy(model(*rest.inputs).flatten(0, 1), rest.targets.flatten())
        assert found["loss"] == pytest.approx(expected.item(), rel=1e-6)
    assert found["samples"] == len(data) and model.training == (first > 0)
    hc.barrier()
