"""Tests of DenseNet, ResNet, V-Net and the word-level LSTM: the shapes of their papers, and equal bits with recomputation."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import hvd_ckpt as hc
from hvd_ckpt.app.models.catalog import DENSENETS, RESNETS, ResNetShape
from hvd_ckpt.app.models.densenet import densenet
from hvd_ckpt.app.models.lstm import lstm_language_model
from hvd_ckpt.app.models.resnet import ResNet, resnet
from hvd_ckpt.app.models.vnet import VNet
from hvd_ckpt.planning.blocks import find_blocks
from hvd_ckpt.utils.memory import measure_peak


@pytest.mark.parametrize("depth", sorted({*DENSENETS, *RESNETS} - {1001, 1202}))
def test_depth_counts_convolutions_and_classifier(depth):
    with torch.device("meta"):
        model = resnet(depth) if depth in RESNETS else densenet(depth)
    convolutions = sum(
        isinstance(module, nn.Conv2d) and "shortcut" not in name and "projection" not in name
        for name, module in model.named_modules()
    )
    assert convolutions + 1 == (265 if depth == 264 else depth)  # the paper's own table gives 265 for "264"
    if depth in RESNETS:
        assert len(model) == 2 + sum(RESNETS[depth].units)  # stem, units, classifier
    else:
        blocks = DENSENETS[depth].blocks
        assert len(model) == 1 + sum(blocks) + len(blocks) - 1 + 1  # stem, layers, transitions, classifier


@pytest.mark.parametrize(
    "depth, pixels, last", [(18, 64, (512, 2, 2)), (20, 32, (64, 8, 8)), (164, 33, (256, 9, 9))]
)
def test_resnet_halves_the_resolution(depth, pixels, last):
    with torch.device("meta"):
        *blocks, classifier = resnet(depth)
        features = nn.Sequential(*blocks)(torch.empty(2, 3, pixels, pixels))
        assert features.shape == (2, *last)
        assert classifier(features).shape == (2, 10)


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
    made = {}
    with torch.device("meta"):
        model = VNet(norm="none")
        flow = torch.empty(1, 1, 128, 128, 64)
        for name, stage in model.named_children():
            flow = stage(flow)
            newest = flow[0] if isinstance(flow, tuple) else flow
            made[name] = (*newest.shape[1:3], len(flow) if isinstance(flow, tuple) else 1)
    assert made == {
        "entry": (16, 128, 1),
        "down1": (32, 64, 2),
        "down2": (64, 32, 3),
        "down3": (128, 16, 4),
        "down4": (256, 8, 5),
        "up1": (256, 16, 4),
        "up2": (128, 32, 3),
        "up3": (64, 64, 2),
        "up4": (32, 128, 1),
        "classifier": (2, 128, 1),
    }
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


def test_lstm_sees_no_later_word():
    model = lstm_language_model(vocabulary=50, width=16).eval()
    tokens = torch.randint(50, (2, 8))
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 50
    scores, others = model(tokens), model(changed)
    assert scores.shape == (2, 8, 50)
    assert torch.equal(scores[:, :5], others[:, :5])
    assert not torch.equal(scores[:, 5], others[:, 5])


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
    ],
)
def test_impossible_sizes_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def images(pixels):
    return torch.randn(2, 3, pixels, pixels, generator=torch.Generator().manual_seed(0))


def tokens():
    return torch.randint(50, (3, 7), generator=torch.Generator().manual_seed(0))


def small_resnet(unit, large_images):
    return ResNet(ResNetShape(unit, (2, 1, 1), 8, large_images), channels=3, classes=10)


MODELS = {
    "resnet": (lambda: small_resnet("basic", large_images=False), lambda: images(8)),
    "resnet, bottleneck": (lambda: small_resnet("bottleneck", large_images=True), lambda: images(32)),
    "resnet, preactivated": (lambda: small_resnet("preactivated", large_images=False), lambda: images(8)),
    "vnet": (lambda: VNet(width=2), lambda: images(48).reshape(3, 1, 16, 16, 18)[..., :16]),
    "lstm": (lambda: lstm_language_model(vocabulary=50, width=16, layers=3), tokens),
    "lstm, tied": (lambda: lstm_language_model(vocabulary=50, width=16, layers=3, tied=True), tokens),
    "densenet": (lambda: densenet(22, dropout=0.1), lambda: images(16)),
    "efficient densenet": (lambda: densenet(22, dropout=0.1, efficient=True), lambda: images(16)),
}


def step(model, sample):
    """Loss, gradients and buffers of one training step, as {name: tensor}."""
    torch.manual_seed(1)
    scores = model(sample)
    target = torch.zeros(scores.shape[:1] + scores.shape[2:], dtype=torch.long)
    if sample.dtype == torch.long:
        scores, target = scores.transpose(1, 2), sample
    loss = functional.cross_entropy(scores, target)
    loss.backward()
    gradients = {f"{name}.grad": parameter.grad for name, parameter in model.named_parameters()}
    return {"loss": loss.detach(), **gradients, **dict(model.named_buffers())}


def assert_equal(left, right):
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


@pytest.mark.parametrize("name", MODELS)
def test_recomputed_equals_plain_bit_for_bit(name):
    """But for the LSTM, reentrant: PyTorch runs it by another kernel where no gradients are recorded, as in the first pass."""
    build, sample = MODELS[name]
    torch.manual_seed(0)
    plain = build()
    found = find_blocks(untouched := copy.deepcopy(plain), lambda: untouched(sample()))
    assert [block.members for block in found] == [(child,) for child, _ in plain.named_children()]
    reentrant, again = (
        step(hc.CheckpointSequential(copy.deepcopy(plain), segments=3, use_reentrant=kind), sample())
        for kind in (True, False)
    )
    expected = step(plain, sample())
    assert_equal(again, expected)
    if name.startswith("lstm"):
        torch.testing.assert_close(reentrant, expected)
    else:
        assert_equal(reentrant, expected)


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
        assert_equal(found, expected)
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
