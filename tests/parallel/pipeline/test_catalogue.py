"""Tests of a model of each family of the catalogue in chunks: they give the gradients of the whole model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hvd_ckpt as hc
from hvd_ckpt.app.training.build import assemble
from hvd_ckpt.app.training.config import Config
from hvd_ckpt.data.objectives import Batch

TOKENS = {
    "sequence_length": 8,
    "model_options": {"width": 16, "heads": 2, "layers": 3, "dropout": 0.1},
}
MODELS: dict[str, dict[str, Any]] = {
    "bert-tiny": TOKENS,
    "roberta-tiny": TOKENS,
    "xlnet-tiny": TOKENS,
    "gpt2-tiny": TOKENS,
    "gpt-tiny": TOKENS,
    "lstm-small": {"sequence_length": 8, "model_options": {"width": 16, "layers": 2, "dropout": 0.1}},
    "densenet-22": {"pixels": 8, "model_options": {"dropout": 0.1}},
    "resnet-20": {"pixels": 8},
    "vnet": {"pixels": 32, "model_options": {"width": 2}},
}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_the_whole_model(name: str) -> None:
    config = Config.make({"model": name, "steps": 1, "batch": 7, "seed": 3, **MODELS[name]})
    assembly = assemble(config)
    objective = assembly.objective
    batch = assembly.train.batch(list(range(7)), list(range(7)))
    whole: Any = hc.seed_blocks(assembly.model)  # type: ignore[type-var]
    torch.manual_seed(2)
    expected = hc.accumulate(
        lambda part: objective.loss(whole(*part.inputs, **part.shared), part),
        batch,
        3,
        weight=objective.weight,
    )
    model: Any = hc.Pipeline(assemble(config).model, chunks=3, schedule="interleaved", checkpoint="always")  # type: ignore[arg-type]
    torch.manual_seed(2)
    found = model.accumulate(
        batch, lambda output, targets: objective.loss(output, Batch((), targets)), weight=objective.weight
    )
    assert torch.equal(found.loss, expected.loss)
    gradients = {key: one.grad for key, one in whole.named_parameters(remove_duplicate=False)}
    uses = [one for _, one in whole.named_parameters(remove_duplicate=False)]
    shared = {id(one) for one in uses if sum(other is one for other in uses) > 1}
    shared_names = {key for key, one in whole.named_parameters() if id(one) in shared}
    for key, parameter in model.named_parameters():
        assert (parameter.grad is None) == (gradients[key] is None), key
        if key in shared_names:  # used in two chunks, whose micro-batches take turns
            torch.testing.assert_close(parameter.grad, gradients[key])
        else:
            assert parameter.grad is None or torch.equal(parameter.grad, gradients[key]), key
    for key, buffer in model.named_buffers():
        assert torch.equal(buffer, dict(whole.named_buffers())[key]), key
