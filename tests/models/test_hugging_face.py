"""transformers' own recomputation under this optimizer: ``model.gradient_checkpointing_enable(...)``, reentrant or not.

transformers' XLNet has no recomputation of its own and says so; its chain recomputes in its place, two streams and all.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from one_process import check
from torch.nn import functional

pytest.importorskip("transformers")

from hvd_ckpt.app.compare.cells import Recompute
from hvd_ckpt.app.compare.scenarios import Scenario
from hvd_ckpt.app.compare.workloads import RankStep
from hvd_ckpt.app.models import bert, gpt2, xlnet

pytestmark = [
    pytest.mark.filterwarnings("ignore:`.*gradient_checkpointing.*` is deprecated"),
    pytest.mark.ranks(gloo=(2,)),  # they show what one and four would
]

VOCABULARY, BATCH, LENGTH = 30, 2, 8
SIZES = {"vocabulary": VOCABULARY, "width": 16, "heads": 2, "layers": 2, "dropout": 0.1}
BUILDERS = {
    "bert": functools.partial(bert.bert, **SIZES, length=LENGTH),
    "roberta": functools.partial(bert.roberta, **SIZES, length=LENGTH),
    "gpt2": functools.partial(gpt2.gpt2, **SIZES, length=LENGTH),
    "xlnet": functools.partial(xlnet.xlnet, **SIZES),
}


def build(name: str, reentrant: bool | None) -> torch.nn.Module:
    chain = BUILDERS[name]()
    if name == "xlnet":
        if reentrant is not None:
            chain.checkpoint_interval, chain.use_reentrant = 1, reentrant
        return chain
    model = chain.transformers_model
    if reentrant is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        assert model.is_gradient_checkpointing
        if reentrant:  # as users of transformers do, and must where the embeddings are frozen
            model.enable_input_require_grads()
    return model


def backward(name: str, model: Any, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank + 1)
    tokens = torch.randint(2, VOCABULARY, (BATCH, LENGTH), generator=generator)
    mask = torch.ones_like(tokens)
    mask[0, 5 + rank :] = 0
    if name == "xlnet":
        order = torch.rand(BATCH, LENGTH, generator=generator)
        predicted = order.argsort()[:, -3:]
        scores = model(
            tokens,
            attention_mask=mask,
            perm_mask=(order[:, :, None] <= order[:, None, :]).float(),
            target_mapping=functional.one_hot(predicted, LENGTH).float(),
        )
        loss = functional.cross_entropy(scores.flatten(0, 1), tokens.gather(1, predicted).flatten())
    else:
        loss = model(tokens, attention_mask=mask, labels=tokens.where(mask.bool(), -100)).loss
    loss.backward()
    return loss.detach()


class Trained(Scenario):
    """A model that recomputes by itself: reentrant, not reentrant, or not at all."""

    def __init__(self, name: str, reentrant: bool | None) -> None:
        super().__init__("default", 7, None)
        self.name, self.reentrant = name, reentrant

    def model(self, recompute: Recompute) -> torch.nn.Module:
        return torch.nn.ModuleList([build(self.name, self.reentrant)])

    def run(self, step: RankStep) -> list[torch.Tensor]:
        return [backward(self.name, step.model[0], step.number, step.rank)]


@pytest.mark.parametrize(
    "name, reentrant",
    [("bert", False), ("roberta", True), ("gpt2", True), ("xlnet", False), ("xlnet", True)],
)
def test_recomputed_models_of_transformers(name: str, reentrant: bool) -> None:
    """Ranks agree, each bucket left once in each step, and after the first no gradient was late: see ``check``."""
    kept = Trained(name, None)
    engine = check(Trained(name, reentrant), "none", steps=3, expected=kept, bucket_cap_mb=0.004)
    assert len(engine.optimizer.reduction_stats.last.launches) > 3


def test_xlnet_of_transformers_has_no_recomputation_of_its_own() -> None:
    with pytest.raises(ValueError, match="does not support (activation|gradient) checkpointing"):
        BUILDERS["xlnet"]().transformers_model.gradient_checkpointing_enable()
