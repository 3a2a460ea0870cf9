"""Tests of models as chains of blocks: the shapes of their papers, the scores of transformers, equal bits with recomputation."""

from __future__ import annotations

import copy
import math
from collections import Counter

import pytest
import torch
from same import assert_same
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import hvd_ckpt as hc
from hvd_ckpt.app.models.catalog import DENSENETS, RESNETS, ResNetShape
from hvd_ckpt.app.models.densenet import densenet
from hvd_ckpt.app.models.gpt import gpt
from hvd_ckpt.app.models.lstm import lstm_language_model
from hvd_ckpt.app.models.resnet import ResNet, resnet
from hvd_ckpt.app.models.transformer import bert, gpt2, roberta
from hvd_ckpt.app.models.vnet import VNet
from hvd_ckpt.app.models.xlnet import XLNetChain, xlnet
from hvd_ckpt.parallel.pipeline.chain import Chain
from hvd_ckpt.planning.blocks import find_blocks
from hvd_ckpt.utils.memory import measure_peak

VOCABULARY, BATCH, LENGTH = 50, 3, 12
TRANSFORMERS = {"bert": bert, "roberta": roberta, "gpt2": gpt2, "gpt": gpt, "xlnet": xlnet}


def transformer(name, **options):
    """A small one, with the same weights each time."""
    torch.manual_seed(0)
    given = {"vocabulary": VOCABULARY, "width": 16, "heads": 2, "layers": 3, "dropout": 0.1}
    if name != "xlnet":
        given["length"] = LENGTH
    return TRANSFORMERS[name](**{**given, **options})


def small_resnet(unit, large_images):
    return ResNet(ResNetShape(unit, (2, 1, 1), 8, large_images), channels=3, classes=10)


def small_lstm(**options):
    return lstm_language_model(vocabulary=VOCABULARY, width=16, layers=3, **options)


def tokens(seed=0):
    return torch.randint(2, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))


def images(pixels):
    return torch.randn(2, 3, pixels, pixels, generator=torch.Generator().manual_seed(0))


def shared_arguments(name):
    """All that a model takes beside tokens."""
    if name not in ("bert", "roberta", "gpt2", "xlnet"):
        return {}
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[0, 7:] = 0
    mask[2, 3:] = 0
    if name == "roberta":
        return {"attention_mask": mask}
    types = (torch.arange(LENGTH) > 5).long().expand(BATCH, LENGTH)
    if name != "xlnet":
        return {"attention_mask": mask, "token_type_ids": types}
    order = torch.rand(BATCH, LENGTH, generator=torch.Generator().manual_seed(0))
    predicted = order.argsort()[:, -4:]
    return {
        "attention_mask": mask,
        "token_type_ids": types,
        "perm_mask": (order[:, :, None] <= order[:, None, :]).float(),
        "target_mapping": functional.one_hot(predicted, LENGTH).float(),
    }


MODELS = {
    "resnet": (lambda: small_resnet("basic", large_images=False), lambda: images(8)),
    "resnet, bottleneck": (lambda: small_resnet("bottleneck", large_images=True), lambda: images(32)),
    "resnet, preactivated": (lambda: small_resnet("preactivated", large_images=False), lambda: images(8)),
    "vnet": (lambda: VNet(width=2), lambda: images(48).reshape(3, 1, 16, 16, 18)[..., :16]),
    "lstm": (small_lstm, tokens),
    "lstm, tied": (lambda: small_lstm(tied=True), tokens),
    "densenet": (lambda: densenet(22, dropout=0.1), lambda: images(16)),
    "efficient densenet": (lambda: densenet(22, dropout=0.1, efficient=True), lambda: images(16)),
    **{name: (lambda name=name: transformer(name), tokens) for name in TRANSFORMERS},
}


def step(model, sample, shared=None):
    """Loss, gradients and buffers of one training step, as {name: tensor}."""
    torch.manual_seed(1)
    scores = model(sample, **(shared or {}))
    if sample.dtype == torch.long:  # as many targets as there are scores
        scores, target = scores.transpose(1, 2), sample[:, : scores.shape[1]]
    else:
        target = torch.zeros(scores.shape[:1] + scores.shape[2:], dtype=torch.long)
    loss = functional.cross_entropy(scores, target)
    loss.backward()
    gradients = {f"{name}.grad": parameter.grad for name, parameter in model.named_parameters()}
    return {"loss": loss.detach(), **gradients, **dict(model.named_buffers())}


# ---- recomputation ----


def recomputed(model, use_reentrant):
    """Copies that are recomputed in segments."""
    if not isinstance(model, Chain):
        yield hc.CheckpointSequential(copy.deepcopy(model), segments=3, use_reentrant=use_reentrant)
        return
    for interval in (1, 2):
        model = copy.deepcopy(model)
        model.checkpoint_interval, model.use_reentrant = interval, use_reentrant
        yield model


@pytest.mark.parametrize("name", MODELS)
def test_recomputed_equals_plain_bit_for_bit(name):
    """But for some, reentrant: PyTorch runs an LSTM by another kernel where no gradients are recorded, as in the first pass, and
    tied weights of a transformer's head get their gradients in two parts."""
    build, sample_of = MODELS[name]
    torch.manual_seed(0)
    plain, sample, shared = build(), sample_of(), shared_arguments(name)
    untouched = copy.deepcopy(plain)
    found = find_blocks(untouched, lambda: untouched(sample, **shared))
    assert [block.members for block in found] == [(child,) for child, _ in plain.named_children()]
    expected = step(copy.deepcopy(plain), sample, shared)
    for again in recomputed(plain, use_reentrant=False):
        assert_same(expected, step(again, sample, shared))
    for again in recomputed(plain, use_reentrant=True):
        actual = step(again, sample, shared)
        if isinstance(plain, Chain) or name.startswith("lstm"):
            torch.testing.assert_close(actual, expected)
        else:
            assert_same(expected, actual)
    if isinstance(plain, Chain):
        torch.manual_seed(1)
        inputs, prepared = plain.prepare(sample, **shared)
        by_hand = hc.checkpoint_sequential(plain.to_layers(), 2, *inputs, **prepared)
        torch.manual_seed(1)
        assert torch.equal(by_hand, plain(sample, **shared))


@pytest.mark.parametrize("interval, recomputed", [(0, 0), (1, 4), (2, 4), (3, 3), (5, 0), (9, 0)])
def test_all_segments_but_the_last_are_recomputed(interval, recomputed):
    calls = []
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(5)]
    for block in blocks:
        block.register_forward_pre_hook(lambda *_: calls.append("forward"))
    chain = Chain(*blocks, checkpoint_interval=interval)
    chain(torch.randn(2, 4)).sum().backward()
    assert len(calls) == 5 + recomputed
    with torch.no_grad():
        chain(torch.randn(2, 4))
    assert len(calls) == 10 + recomputed


class Convolutions(TorchDispatchMode):
    """Counts forward convolutions."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten.convolution.default
        return function(*args, **(kwargs or {}))


def test_efficient_densenet_equals_the_plain_one_and_recomputes_no_convolution():
    torch.manual_seed(0)
    plain, efficient = (densenet(22, classes=10, dropout=0.2, efficient=kind) for kind in (False, True))
    assert list(plain.state_dict()) == list(efficient.state_dict())
    efficient.load_state_dict(plain.state_dict())
    for _ in range(2):
        expected = step(plain, images(16))
        with Convolutions() as convolutions:
            found = step(efficient, images(16))
        assert_same(expected, found)
        assert convolutions.count == 21
    counts = {value.item() for name, value in found.items() if name.endswith("num_batches_tracked")}
    assert counts == {2}
    with torch.no_grad():
        assert torch.equal(plain.eval()(images(16)), efficient.eval()(images(16)))


def test_efficient_densenet_100_takes_less_than_half_of_the_memory():
    def peak(efficient):
        model = densenet(100, classes=10, efficient=efficient)
        sample = images(16)
        step(model, sample)  # gradients are there from now on
        return measure_peak(lambda: model(sample).sum().backward()).peak_bytes

    assert peak(efficient=True) < 0.5 * peak(efficient=False)


# ---- the models of papers ----


@pytest.mark.parametrize("depth", [22, 100, 264])
def test_depth_of_densenet_counts_convolutions_and_classifier(depth):
    with torch.device("meta"):
        model = densenet(depth)
    convolutions = sum(isinstance(module, nn.Conv2d) for module in model.modules())
    assert convolutions + 1 == (265 if depth == 264 else depth)  # the paper's own table gives 265 for "264"
    blocks = DENSENETS[depth].blocks
    assert len(model) == 1 + sum(blocks) + len(blocks) - 1 + 1  # stem, layers, transitions, classifier


@pytest.mark.parametrize(
    "depth, pixels, last", [(18, 64, (512, 2, 2)), (20, 32, (64, 8, 8)), (164, 33, (256, 9, 9))]
)
def test_resnet_halves_the_resolution(depth, pixels, last):
    with torch.device("meta"):
        *blocks, classifier = resnet(depth)
        features = nn.Sequential(*blocks)(torch.empty(2, 3, pixels, pixels))
        assert features.shape == (2, *last) and classifier(features).shape == (2, 10)
    assert len(blocks) == 1 + sum(RESNETS[depth].units)


def test_shortcuts_are_untouched():
    """Without its convolutions a unit is its shortcut: a ReLU after the addition in 2015, nothing in 2016."""
    features = torch.randn(2, 16, 5, 5)
    basic = resnet(20).stage2_unit1
    nn.init.zeros_(basic.convolutions[-1].weight)
    made = basic(features)
    assert torch.equal(made[:, :16], features[:, :, ::2, ::2].relu())
    assert made.shape == (2, 32, 3, 3) and not made[:, 16:].any()
    preactivated = small_resnet("preactivated", large_images=False).stage1_unit2
    features = torch.randn(2, 32, 5, 5)
    nn.init.zeros_(preactivated.convolutions[-1].weight)
    assert torch.equal(preactivated(features), features)


def test_vnet_has_the_papers_stages():
    """Figure 2: 16 maps at 128 x 128 x 64 down to 256 at 8 x 8 x 4, and twice the maps of the way down on the way up."""
    made = []  # maps, pixels and skip connections
    with torch.device("meta"):
        model = VNet(norm="none")
        flow = torch.empty(1, 1, 128, 128, 64)
        for stage in model:
            flow = stage(flow)
            newest, *skips = flow if isinstance(flow, tuple) else (flow,)
            made.append((*newest.shape[1:3], len(skips)))
    down = [(16, 128, 0), (32, 64, 1), (64, 32, 2), (128, 16, 3), (256, 8, 4)]
    up = [(256, 16, 3), (128, 32, 2), (64, 64, 1), (32, 128, 0)]
    assert made == [*down, *up, (2, 128, 0)]
    kernels = Counter(module.kernel_size[0] for module in model.modules() if isinstance(module, nn.Conv3d))
    assert kernels == {5: 1 + 2 + 3 + 3 + 3 + 3 + 3 + 2 + 1, 2: 4, 1: 1}


def test_stages_of_vnet_learn_residuals():
    """Figure 2: one channel is added to all maps (several take turns), and a stage without convolutions gives what they take."""
    entry = VNet(channels=2, width=4, norm="none").entry
    nn.init.zeros_(entry.convolution[0].weight)
    volume = torch.rand(1, 2, 16, 16, 16)
    assert torch.equal(entry(volume), torch.cat([volume, volume], dim=1))
    for stage in ("down1", "up4"):
        residual = VNet(width=2, norm="none").get_submodule(stage).residual
        nn.init.zeros_(residual.convolutions[-1].weight)
        features = torch.randn(1, 4, 8, 8, 8)
        assert torch.equal(residual(features), functional.leaky_relu(features, 0.25))


def test_gpt_starts_as_gpt2_does():
    model, untied = (transformer("gpt", width=256, layers=8, tied=tied) for tied in (True, False))
    assert len(list(untied.parameters())) == len(list(model.parameters())) + 1
    block = model.layer3
    for layer, deviation in (
        (block.attention.project, 0.02),
        (block.attention.output, 0.02 / 4),
        (block.perceptron[2], 0.02 / 4),
    ):
        assert layer.weight.std().item() == pytest.approx(deviation, rel=0.02)
    assert model.head[1].weight is model.embedding.tokens.weight
    scores = transformer("gpt", dropout=0.0)(tokens())
    loss = functional.cross_entropy(scores.flatten(0, 1), tokens(1).flatten())
    assert loss.item() == pytest.approx(math.log(VOCABULARY), rel=0.05)
    with pytest.raises(ValueError, match="13 tokens, and this model was built for length=12"):
        model(torch.zeros(1, 13, dtype=torch.long))


@pytest.mark.parametrize("build", [small_lstm, lambda: transformer("gpt")], ids=["lstm", "gpt"])
def test_scores_of_a_word_see_no_later_one(build):
    model, changed = build().eval(), tokens()
    changed[:, 5:] = 1
    scores, others = model(tokens()), model(changed)
    assert scores.shape == (BATCH, LENGTH, VOCABULARY)
    assert torch.equal(scores[:, :5], others[:, :5])
    assert not torch.equal(scores[:, 5], others[:, 5])


# ---- the models of transformers ----


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["bert", "roberta", "gpt2"])
def test_scores_are_those_of_transformers(name, attention):
    chain, everything = transformer(name, attention=attention), shared_arguments(name)
    for shared in ({}, {"attention_mask": everything["attention_mask"]}, everything):
        torch.manual_seed(1)
        expected = chain.transformers_model(tokens(), **shared).logits
        torch.manual_seed(1)
        assert torch.equal(chain(tokens(), **shared), expected)


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
    model = transformer("xlnet").transformers_model
    model.transformer.attn_type = attention
    model.transformer.dropout = nn.Softsign()
    # Of "uni", transformers adds masks in place, into one that has no dimension for the batch.
    rows = slice(1 if attention == "uni" else BATCH)
    shared = {name: value[rows] for name, value in shared_arguments("xlnet").items() if name in given}
    torch.manual_seed(1)
    expected = model(tokens()[rows], **shared).logits
    torch.manual_seed(1)
    assert torch.equal(XLNetChain(model)(tokens()[rows], **shared), expected)


# ---- what is refused ----


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: densenet(123), "depth 123: choose one of 22, 100, 121"),
        (lambda: densenet(22, channels=0), "channels"),
        (lambda: densenet(22, dropout=1.0), "1.0"),
        (lambda: resnet(19), "depth 19: choose one of 18, 20, 32"),
        (lambda: resnet(18, classes=0), "classes"),
        (lambda: VNet(norm="layer"), "'layer': choose one of batch, instance, none"),
        (lambda: VNet(channels=3), "width=16 and channels=3"),
        (lambda: VNet(classes=0), "classes"),
        (lambda: VNet(width=2)(torch.zeros(1, 1, 16, 24, 16)), "multiples of 16, got 16 x 24 x 16"),
        (lambda: VNet(width=2)(torch.zeros(1, 16, 16, 16)), r"got \(1, 16, 16, 16\)"),
        (lambda: lstm_language_model(vocabulary=0), "vocabulary"),
        (lambda: lstm_language_model(vocabulary=9, dropout=1), "dropout"),
        (lambda: transformer("bert", attention="flash"), "'sdpa' or 'eager'"),
        (lambda: transformer("gpt2", attention="flash"), "'sdpa' or 'eager'"),
        *(
            (lambda name=name, options=options: transformer(name, **options), message)
            for name in TRANSFORMERS
            for options, message in (
                ({"width": 30, "heads": 4}, "width=30 and heads=4"),
                ({"layers": 0}, "layers"),
                ({"dropout": 1.0}, "dropout"),
                ({"vocabulary": 0}, "vocabulary"),
                ({"checkpoint_interval": -1}, "checkpoint_interval"),
            )
        ),
    ],
)
def test_impossible_sizes_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    "name, option, value",
    [("bert", "is_decoder", True), ("gpt2", "add_cross_attention", True), ("roberta", "pad_token_id", None)],
)
def test_models_of_another_kind_are_refused(name, option, value):
    chain = transformer(name)
    setattr(chain.transformers_model.config, option, value)
    with pytest.raises(ValueError, match=f"{option}=True" if value else f"no {option}"):
        type(chain)(chain.transformers_model)
