"""Tests of the recipes in the sharding guide, which run one after the other on every rank."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from one_process import wrap
from same import assert_same

import hvd_ckpt as hc

pytestmark = pytest.mark.ranks(gloo=(2,))

transformers = pytest.importorskip("transformers")
GUIDE = Path(__file__).parents[2] / "docs" / "sharding.md"


def recipes() -> list[str]:
    text = GUIDE.read_text(encoding="utf-8")
    section = re.search(r"^## Recipes\n(.*?)^## ", text, re.DOTALL | re.MULTILINE)
    assert section is not None
    return re.findall(r"```python\n(.*?)```", section[1], re.DOTALL)


def build() -> Any:
    torch.manual_seed(2)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    return transformers.BertForMaskedLM(
        transformers.BertConfig(**sizes, vocab_size=20, max_position_embeddings=8)
    )


def loss_function(output: Any, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("shard", [0, 3])
def test_recipes_run_as_they_stand(shard: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    tokens = torch.arange(12).view(2, 6) + hc.rank()
    model = build()
    optimizer = wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-3), shard=shard)
    names: dict[str, Any] = {
        "batches": [(tokens, tokens), (tokens + 1, tokens)],
        "evaluate": lambda model: loss_function(model(tokens), tokens),
    }
    names.update(Path=Path, build=build, hc=hc, loss_function=loss_function, torch=torch)
    names.update(model=model, optimizer=optimizer, shard=shard)
    loss_function(model(tokens), tokens).backward()
    optimizer.step()
    for recipe in recipes():
        exec(recipe, names)
    if hc.rank() == 0:
        names["model"].save_pretrained("again", state_dict=torch.load("model.pt"))
    hc.barrier()
    saved, averaged = torch.load("model.pt"), torch.load("average.pt")
    for name in ("export", "again"):
        assert_same(dict(transformers.BertForMaskedLM.from_pretrained(name).state_dict()), dict(saved))
    names["model"].eval()
    with torch.no_grad():
        assert names["evaluate"](names["model"]).isfinite()
    assert averaged.keys() == saved.keys() and names["average"].n_averaged == 2
    bias = "cls.predictions.bias"
    assert not torch.equal(averaged[bias], saved[bias])
