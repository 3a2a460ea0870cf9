"""Tests of transformers as chains of blocks: equal results with and without recomputation, shared masks, and files."""

from __future__ import annotations

import copy
import json
import shutil

import pytest
import torch
from torch import nn
from torch.nn import functional

import hvd_ckpt as hc
from hvd_ckpt.app.models.gpt import gpt
from hvd_ckpt.parallel.pipeline.chain import Chain
from hvd_ckpt.planning.blocks import find_blocks

pytest.importorskip("transformers")

from hvd_ckpt.app.models.hugging_face import from_folder, kind_of_folder
from hvd_ckpt.app.models.transformer import bert, gpt2, roberta
from hvd_ckpt.app.models.xlnet import XLNetChain, xlnet

VOCABULARY, BATCH, LENGTH = 50, 3, 12
SIZES = {"vocabulary": VOCABULARY, "width": 16, "heads": 2, "layers": 3}
BUILDERS = {"bert": bert, "roberta": roberta, "gpt2": gpt2, "gpt": gpt, "xlnet": xlnet}


def build(name, **options):
    torch.manual_seed(0)
    if name != "xlnet":
        options = {"length": LENGTH, **options}
    return BUILDERS[name](**{**SIZES, "dropout": 0.1, **options})


def random_tokens(seed=0):
    return torch.randint(2, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))


def shared_arguments(name, seed=0):
    """All that a model takes beside tokens."""
    generator = torch.Generator().manual_seed(seed)
    if name == "gpt":
        return {}
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[0, 7:] = 0
    mask[2, 3 + seed :] = 0
    types = (torch.arange(LENGTH) > 5).long().expand(BATCH, LENGTH)
    if name == "roberta":
        return {"attention_mask": mask}
    if name != "xlnet":
        return {"attention_mask": mask, "token_type_ids": types}
    order = torch.rand(BATCH, LENGTH, generator=generator)
    predicted = order.argsort()[:, -4:]
    return {
        "attention_mask": mask,
        "token_type_ids": types,
        "perm_mask": (order[:, :, None] <= order[:, None, :]).float(),
        "target_mapping": functional.one_hot(predicted, LENGTH).float(),
    }


def step(model, tokens, shared, seed=1):
    """Loss and gradients."""
    model.zero_grad()
    torch.manual_seed(seed)
    loss = functional.cross_entropy(model(tokens, **shared).flatten(0, 1), targets_of(tokens, shared))
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


def targets_of(tokens, shared):
    return tokens[:, : shared["target_mapping"].shape[1] if "target_mapping" in shared else None].flatten()


def equal(first, second):
    return len(first) == len(second) and all(map(torch.equal, first, second))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["bert", "roberta", "gpt2"])
def test_scores_are_those_of_transformers(name, attention):
    chain = build(name, attention=attention)
    everything = shared_arguments(name)
    for shared in ({}, {"attention_mask": everything["attention_mask"]}, everything):
        torch.manual_seed(1)
        expected = chain.transformers_model(random_tokens(), **shared).logits
        torch.manual_seed(1)
        assert torch.equal(chain(random_tokens(), **shared), expected)


class Halving(nn.Module):
    def forward(self, x):
        return x / 2


@pytest.mark.parametrize(
    "given",
    [
        ("perm_mask", "target_mapping"),
        ("attention_mask", "token_type_ids", "perm_mask", "target_mapping"),
        ("attention_mask",),
        (),
    ],
    ids="+".join,
)
@pytest.mark.parametrize("attention", ["bi", "uni"])
def test_xlnets_scores_are_those_of_transformers(given, attention):
    """With dropout in the layers; that of the embeddings, drawn in another order, is replaced by something without chance."""
    model = build("xlnet").transformers_model
    model.transformer.attn_type = attention
    model.transformer.dropout = Halving()
    shared = {name: value for name, value in shared_arguments("xlnet").items() if name in given}
    if attention == "uni":  # transformers adds masks in place, into one that has no dimension for the batch
        shared = {name: value[:1] for name, value in shared.items()}
    tokens = random_tokens()[:1] if attention == "uni" else random_tokens()
    torch.manual_seed(1)
    expected = model(tokens, **shared).logits
    torch.manual_seed(1)
    assert torch.equal(XLNetChain(model)(tokens, **shared), expected)


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_recomputed_equals_kept(name):
    chain = build(name)
    tokens, shared = random_tokens(), shared_arguments(name)
    found = find_blocks(chain, lambda: chain(tokens, **shared))
    assert [block.members for block in found] == [(child,) for child, _ in chain.named_children()]
    kept = step(chain, tokens, shared)
    for interval in (1, 2):
        chain.checkpoint_interval = interval
        chain.use_reentrant = False
        assert equal(step(chain, tokens, shared), kept)
        chain.use_reentrant = True  # the head's weights get their gradients in two parts: equal to rounding
        torch.testing.assert_close(step(chain, tokens, shared), kept)
    torch.manual_seed(1)
    inputs, prepared = chain.prepare(tokens, **shared)
    by_hand = hc.checkpoint_sequential(chain.to_layers(), 2, *inputs, **prepared)
    torch.manual_seed(1)
    assert torch.equal(by_hand, chain(tokens, **shared))


class Scaled(nn.Module):
    calls = 0

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, scale):
        Scaled.calls += 1
        return torch.tanh(self.linear(x)) * scale


class Doubling(Chain):
    prepared = 0

    def prepare(self, x, scale):
        self.prepared += 1
        return (x,), {"scale": 2 * scale}


@pytest.mark.parametrize("interval, recomputed", [(0, 0), (1, 4), (2, 4), (3, 3), (5, 0), (9, 0)])
def test_all_segments_but_the_last_are_recomputed(interval, recomputed):
    chain = Doubling(*(Scaled() for _ in range(5)), checkpoint_interval=interval)
    Scaled.calls = 0
    chain(torch.randn(2, 4), scale=1.0).sum().backward()
    assert Scaled.calls == 5 + recomputed
    assert chain.prepared == 1
    with torch.no_grad():
        chain(torch.randn(2, 4), scale=1.0)
    assert Scaled.calls == 10 + recomputed


def test_gpt_starts_as_gpt2_does():
    model = build("gpt", width=256, layers=8)
    untied = build("gpt", width=256, layers=8, tied=False)
    assert len(list(untied.parameters())) == len(list(model.parameters())) + 1
    block = model.layer3
    assert block.attention.project.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert block.attention.output.weight.std().item() == pytest.approx(0.02 / 4, rel=0.02)
    assert block.perceptron[2].weight.std().item() == pytest.approx(0.02 / 4, rel=0.02)
    assert model.head[1].weight is model.embedding.tokens.weight
    scores = build("gpt", dropout=0.0)(random_tokens())
    assert functional.cross_entropy(scores.flatten(0, 1), random_tokens(1).flatten()).item() == pytest.approx(
        torch.tensor(VOCABULARY).log().item(), rel=0.05
    )


def test_gpt_sees_nothing_of_what_comes_later():
    model = build("gpt", dropout=0.0)
    tokens = random_tokens()
    other = tokens.clone()
    other[:, 6:] = 1
    assert torch.equal(model(tokens)[:, :6], model(other)[:, :6])
    with pytest.raises(ValueError, match="13 tokens, and this model was built for length=12"):
        model(torch.zeros(1, 13, dtype=torch.long))


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_impossible_sizes_are_refused(name):
    for options, message in (
        ({"width": 30, "heads": 4}, "width=30 and heads=4"),
        ({"layers": 0}, "layers"),
        ({"dropout": 1.0}, "dropout"),
        ({"vocabulary": 0}, "vocabulary"),
        ({"checkpoint_interval": -1}, "checkpoint_interval"),
        *([({"attention": "flash"}, "'sdpa' or 'eager'")] if name in ("bert", "gpt2") else []),
    ):
        with pytest.raises(ValueError, match=message):
            build(name, **options)


@pytest.mark.parametrize(
    "name, option, value",
    [("bert", "is_decoder", True), ("gpt2", "add_cross_attention", True), ("roberta", "pad_token_id", None)],
)
def test_models_of_another_kind_are_refused(name, option, value):
    chain = build(name)
    setattr(chain.transformers_model.config, option, value)
    with pytest.raises(ValueError, match=f"{option}=True" if value else f"no {option}"):
        type(chain)(chain.transformers_model)


@pytest.mark.parametrize(
    "name, kind", [("bert", "masked"), ("roberta", "masked"), ("xlnet", "permutation"), ("gpt2", "causal")]
)
def test_there_and_back_through_a_folder(tmp_path, name, kind):
    chain = build(name, dropout=0.0)
    batch = random_tokens(), shared_arguments(name)
    step(chain, *batch)
    torch.optim.SGD(chain.parameters(), lr=0.1).step()  # the trained weights are those that are saved
    chain.transformers_model.save_pretrained(tmp_path)
    back = from_folder(tmp_path, checkpoint_interval=2)
    assert type(back) is type(chain) and back.training and back.checkpoint_interval == 2
    assert len(list(back.parameters())) == len(list(chain.parameters()))  # weights are tied alike
    assert kind_of_folder(tmp_path) == kind
    assert list(back.state_dict()) == list(chain.state_dict())
    assert equal(list(back.state_dict().values()), list(chain.state_dict().values()))
    assert equal(step(back, *batch), step(chain, *batch))
    chain.transformers_model.save_pretrained(tmp_path / "parts", max_shard_size="20KB")
    assert not (tmp_path / "parts" / "model.safetensors").exists()
    assert equal(
        list(from_folder(tmp_path / "parts").state_dict().values()), list(chain.state_dict().values())
    )
    copied = copy.deepcopy(chain)
    assert copied.transformers_model is not chain.transformers_model
    assert {id(one) for one in copied.transformers_model.parameters()} == {
        id(one) for one in copied.parameters()
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    build("bert").transformers_model.save_pretrained(folder)
    return folder


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def truncate_weights(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def point_to(folder, name):
    (folder / "weights.bin").touch()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))


@pytest.mark.parametrize(
    "change, error, message",
    [
        (shutil.rmtree, FileNotFoundError, "changed"),
        (lambda folder: (folder / "config.json").unlink(), FileNotFoundError, "config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), ValueError, "config.json"),
        (lambda folder: (folder / "config.json").write_text("[]"), ValueError, "config.json"),
        (lambda folder: change_config(folder, model_type="llama"), ValueError, '"llama": .* bert, roberta'),
        (lambda folder: change_config(folder, model_type=None), ValueError, "null"),
        (lambda folder: change_config(folder, hidden_size="wide"), ValueError, "BertForMaskedLM"),
        (lambda folder: change_config(folder, num_hidden_layers=1 << 20), ValueError, "num_hidden_layers"),
        (lambda folder: change_config(folder, hidden_size=32), ValueError, "BertForMaskedLM"),
        (lambda folder: change_config(folder, num_hidden_layers=4), ValueError, "encoder.layer.3.*"),
        (truncate_weights, ValueError, "BertForMaskedLM"),
        (lambda folder: point_to(folder, "weights.bin"), ValueError, "'weights.bin'"),
        (lambda folder: point_to(folder, "../x.safetensors"), ValueError, "x.safetensors'"),
        (lambda folder: (folder / "adapter_config.json").touch(), ValueError, "adapter"),
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
            FileNotFoundError,
            "no model.safetensors, only pytorch_model.bin",
        ),
    ],
)
def test_folder_that_cannot_be_loaded(saved, tmp_path, change, error, message):
    folder = shutil.copytree(saved, tmp_path / "changed")
    change(folder)
    with pytest.raises(error, match=message) as caught:
        from_folder(folder)
    assert "\n" not in str(caught.value)


def test_folder_with_a_configuration_alone_starts_at_random(saved, tmp_path):
    shutil.copy(saved / "config.json", tmp_path)
    change_config(tmp_path, auto_map={"AutoModel": "evil.Evil"}, attn_implementation="someone/kernel")
    torch.manual_seed(0)
    chain = from_folder(tmp_path)
    assert equal(list(chain.state_dict().values()), list(build("bert").state_dict().values()))
    assert chain.transformers_model.config._attn_implementation == "sdpa" and chain.training
