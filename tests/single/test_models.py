"""The models as chains: the published sizes, and the same numbers with and without recomputation."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint_sequential

from hvd_ckpt.models.densenet import DEPTHS, densenet

bert_module = pytest.importorskip("hvd_ckpt.models.bert", reason="needs transformers")


def parameters_of(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    "depth, published", [(121, 7_978_856), (161, 28_681_000), (169, 14_149_480), (201, 20_013_928)]
)
def test_densenet_has_the_published_number_of_parameters(depth, published):
    with torch.device("meta"):
        assert parameters_of(densenet(depth)) == published


def test_densenet_bc_100_has_the_papers_size():
    """The paper's table 2: 0.8M parameters for DenseNet-BC with L=100 and k=12 on CIFAR-10."""
    with torch.device("meta"):
        assert parameters_of(densenet(100, classes=10)) == 769_162


@pytest.mark.parametrize("depth", sorted(DEPTHS))
def test_depth_is_counted_as_in_the_paper(depth):
    with torch.device("meta"):
        model = densenet(depth)
    convolutions = sum(isinstance(module, torch.nn.Conv2d) for module in model.modules())
    assert convolutions + 1 == (265 if depth == 264 else depth)  # the paper's own table gives 265 for "264"


def test_every_dense_layer_can_end_a_segment():
    with torch.device("meta"):
        assert len(densenet(264)) == 1 + (6 + 12 + 64 + 48) + 3 + 1  # stem, layers, transitions, classifier


def test_densenet_of_unknown_depth_names_the_known():
    with pytest.raises(ValueError, match="depth 123: choose one of 22, 100, 121"):
        densenet(123)


@pytest.mark.parametrize("arguments", [{"channels": 0}, {"classes": 0}, {"dropout": 1.0}, {"dropout": -0.1}])
def test_densenet_refuses(arguments):
    with pytest.raises(ValueError, match=str(next(iter(arguments.values())))):
        densenet(22, **arguments)


@pytest.mark.parametrize("segments", [2, 4, 7])
def test_densenet_recomputed_equals_kept(segments):
    torch.manual_seed(0)
    kept = densenet(22, channels=1, classes=10, dropout=0.2).double()
    recomputed = copy.deepcopy(kept)
    images = torch.randn(4, 1, 16, 16, dtype=torch.float64)

    torch.manual_seed(1)
    kept(images).square().sum().backward()
    torch.manual_seed(1)
    checkpoint_sequential(recomputed, segments, images, use_reentrant=False).square().sum().backward()

    for name, parameter in kept.named_parameters():
        assert torch.equal(parameter.grad, recomputed.get_parameter(name).grad), name


def tokens_and_mask(vocabulary=50, batch=3, length=12):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (batch, length), generator=generator)
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, 7:] = 0
    mask[2, 3:] = 0
    return tokens, mask


def small_bert(**changes):
    config = bert_module.bert_config(vocabulary=50, hidden=32, layers=3, heads=4, length=16, **changes)
    torch.manual_seed(0)
    return bert_module.BertForMaskedLM(config)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("masked", [True, False])
def test_bert_chain_equals_hugging_faces_loop(attention, masked):
    model = small_bert(attention=attention).train()
    chain = bert_module.BertChain(model)
    tokens, mask = tokens_and_mask()
    mask = mask if masked else None
    torch.manual_seed(1)
    expected = model(tokens, attention_mask=mask).logits
    torch.manual_seed(1)
    assert torch.equal(chain(tokens, attention_mask=mask), expected)


def test_bert_hides_what_the_mask_hides():
    chain = bert_module.BertChain(small_bert(dropout=0.0))
    tokens, mask = tokens_and_mask()
    other = tokens.clone()
    other[0, 7:] = 1
    shown = mask.bool()
    assert torch.equal(chain(tokens, mask)[shown], chain(other, mask)[shown])
    assert not torch.equal(chain(tokens)[shown], chain(other)[shown])


def test_bert_recomputed_equals_kept_dropout_and_tied_weights_included():
    kept = bert_module.BertChain(small_bert()).train()
    recomputed = copy.deepcopy(kept)
    tokens, mask = tokens_and_mask()

    def loss(scores):
        return functional.cross_entropy(scores.transpose(1, 2), tokens)

    torch.manual_seed(1)
    loss(kept(tokens, mask)).backward()
    torch.manual_seed(1)
    functions = [lambda hidden, block=block: block(hidden, attention_mask=mask) for block in recomputed]
    loss(checkpoint_sequential(functions, 3, tokens, use_reentrant=False)).backward()

    for name, parameter in kept.named_parameters():
        assert torch.equal(parameter.grad, recomputed.get_parameter(name).grad), name


def test_bert_ties_the_head_to_the_embeddings():
    chain = bert_module.bert(bert_module.bert_config(vocabulary=50, hidden=32, layers=1, length=16))
    assert chain.training
    embeddings, _, head = chain
    assert head.head.predictions.decoder.weight is embeddings.embeddings.word_embeddings.weight


@pytest.mark.parametrize(
    "arguments, message",
    [({"attention": "flash"}, "'flash'"), ({"hidden": 30, "heads": 4}, "hidden=30 and heads=4")],
)
def test_bert_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        bert_module.bert_config(**arguments)
