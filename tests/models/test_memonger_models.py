"""ResNet, V-Net, the word-level LSTM and the efficient DenseNet: published sizes, and the same bits however they are recomputed."""

from __future__ import annotations

import copy
import functools
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import hvd_ckpt as hc
from hvd_ckpt.memory import measure_peak
from hvd_ckpt.models.densenet import densenet
from hvd_ckpt.models.lstm import lstm_language_model
from hvd_ckpt.models.resnet import ResNet, resnet
from hvd_ckpt.models.sizes import RESNETS, ResNetShape
from hvd_ckpt.models.vnet import vnet
from hvd_ckpt.planning.blocks import find_blocks

TORCHVISION = "torchvision, num_params of the weights of resnet{}"
HE_2015 = "He et al., Deep Residual Learning for Image Recognition, table 6"
HE_2016 = "He et al., Identity Mappings in Deep Residual Networks, table 4"
MERITY = "Merity et al., Pointer Sentinel Mixture Models, 2016, table 2, models of Zaremba et al., 2014"
PRESS_WOLF = "Press and Wolf, 2017, Large + weight tying"


@functools.cache
def outline(depth):
    """The ResNet as published, without storage."""
    with torch.device("meta"):
        return resnet(depth, classes=1000 if RESNETS[depth].large_images else 10)


def word_model(width, tied=False):
    return lstm_language_model(vocabulary=10_000, width=width, tied=tied)  # Penn Treebank's vocabulary


PUBLISHED = [
    ("resnet-18", lambda: outline(18), "11689512", TORCHVISION),
    ("resnet-34", lambda: outline(34), "21797672", TORCHVISION),
    ("resnet-50", lambda: outline(50), "25557032", TORCHVISION),
    ("resnet-101", lambda: outline(101), "44549160", TORCHVISION),
    ("resnet-152", lambda: outline(152), "60192808", TORCHVISION),
    ("resnet-20", lambda: outline(20), "0.27M", HE_2015),
    ("resnet-32", lambda: outline(32), "0.46M", HE_2015),
    ("resnet-44", lambda: outline(44), "0.66M", HE_2015),
    ("resnet-56", lambda: outline(56), "0.85M", HE_2015),
    ("resnet-110", lambda: outline(110), "1.7M", HE_2015),
    ("resnet-1202", lambda: outline(1202), "19.4M", HE_2015),
    ("resnet-164", lambda: outline(164), "1.7M", HE_2016),
    ("lstm medium", lambda: word_model(650), "20M", MERITY),
    ("lstm large", lambda: word_model(1500), "66M", MERITY),
    ("lstm large, tied", lambda: word_model(1500, tied=True), "51M", PRESS_WOLF),
]


def parameters_of(model):
    return sum(parameter.numel() for parameter in model.parameters())


def as_published(count, published):
    """The count with as many decimals as the publication gives."""
    decimals = len(published.rstrip("M").partition(".")[2])
    return f"{count / 1e6:.{decimals}f}M" if published.endswith("M") else str(count)


@pytest.mark.parametrize(
    "build, published, source", [row[1:] for row in PUBLISHED], ids=[row[0] for row in PUBLISHED]
)
def test_parameters_are_as_many_as_published(build, published, source):
    with torch.device("meta"):
        assert as_published(parameters_of(build()), published) == published, source


def test_resnet_1001_has_the_papers_size():
    """The 10.2M of the paper's table 4 are convolutions and classifier; norms add 0.15M."""
    model = outline(1001)
    norms = sum(parameters_of(module) for module in model.modules() if isinstance(module, nn.BatchNorm2d))
    assert as_published(parameters_of(model) - norms, "10.2M") == "10.2M"
    assert parameters_of(model) == 10_327_706


@pytest.mark.parametrize("depth", sorted(RESNETS))
def test_depth_counts_convolutions_and_classifier(depth):
    model = outline(depth)
    beside = ("shortcut", "projection")
    convolutions = sum(
        isinstance(module, nn.Conv2d) and not any(word in name for word in beside)
        for name, module in model.named_modules()
    )
    assert convolutions + 1 == depth
    assert len(model) == 2 + sum(RESNETS[depth].units)  # stem, units, classifier


@pytest.mark.parametrize(
    "depth, pixels, last",
    [(18, 64, (512, 2, 2)), (34, 224, (512, 7, 7)), (20, 32, (64, 8, 8)), (164, 33, (256, 9, 9))],
)
def test_resnet_halves_the_resolution(depth, pixels, last):
    with torch.device("meta"):
        features = torch.empty(2, 3, pixels, pixels)
        *blocks, classifier = resnet(depth)
        for block in blocks:
            features = block(features)
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
    preactivated = resnet(164).stage1_unit2
    features = torch.randn(2, 64, 5, 5)
    nn.init.zeros_(preactivated.convolutions[-1].weight)
    assert torch.equal(preactivated(features), features)


def test_vnet_has_the_papers_stages():
    """Figure 2: 16 maps at 128 x 128 x 64 down to 256 at 8 x 8 x 4, and twice the maps of the way down on the way up."""
    made = {}
    with torch.device("meta"):
        model = vnet(norm="none")
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


@pytest.mark.parametrize("norm, layers", [("none", 0), ("batch", 29), ("instance", 29)])
def test_vnet_with_several_channels_and_each_norm(norm, layers):
    model = vnet(channels=2, classes=3, width=4, norm=norm)
    norms = [module for module in model.modules() if hasattr(module, "track_running_stats")]
    assert len(norms) == layers
    scores = model(torch.randn(2, 2, 16, 32, 32))
    assert scores.shape == (2, 3, 16, 32, 32) and scores.isfinite().all()


def test_every_skip_connection_of_vnet_counts():
    model = vnet(width=2, norm="none")
    flow = torch.randn(1, 1, 16, 16, 16)
    for stage in list(model)[:5]:
        flow = stage(flow)
    flow = tuple(features.detach().requires_grad_() for features in flow)
    made = flow
    for stage in list(model)[5:]:
        made = stage(made)
    made.square().sum().backward()
    assert [bool(features.grad.any()) for features in flow] == [True] * 5


def test_vnet_adds_each_channel_to_its_maps():
    """Figure 2 shows one channel added to all maps; several channels take turns."""
    entry = vnet(channels=2, width=4, norm="none").entry
    nn.init.zeros_(entry.convolution[0].weight)
    volume = torch.rand(1, 2, 16, 16, 16)
    assert torch.equal(entry(volume), torch.cat([volume, volume], dim=1))


@pytest.mark.parametrize("stage, maps", [("down1", 4), ("up4", 4)])
def test_each_stage_of_vnet_learns_a_residual(stage, maps):
    """Without its convolutions a stage gives what they take: halved, or joined (the paper's figure 2), then activated."""
    residual = vnet(width=2, norm="none").get_submodule(stage).residual
    nn.init.zeros_(residual.convolutions[-1].weight)
    features = torch.randn(1, maps, 8, 8, 8)
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
        (
            lambda: resnet(19),
            "depth 19: choose one of 18, 20, 32, 34, 44, 50, 56, 101, 110, 152, 164, 1001, 1202",
        ),
        (lambda: resnet(18, classes=0), "got 3 and 0"),
        (lambda: vnet(norm="layer"), "no norm 'layer': choose one of batch, instance, none"),
        (lambda: vnet(channels=3), "width=16 and channels=3"),
        (lambda: vnet(classes=0), "got 1, 0 and 16"),
        (
            lambda: vnet(width=2)(torch.zeros(1, 1, 16, 24, 16)),
            "multiples of 16, got 16 x 24 x 16: pad or crop",
        ),
        (
            lambda: vnet(width=2)(torch.zeros(1, 16, 16, 16)),
            r"shape \(batch, 1, depth, height, width\), got \(1, 16",
        ),
        (lambda: lstm_language_model(vocabulary=0), "got 0, 650 and 2"),
        (
            lambda: lstm_language_model(vocabulary=9, dropout=1),
            "dropout must be at least 0 and below 1, got 1",
        ),
    ],
)
def test_what_cannot_be_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def images(pixels):
    return torch.randn(2, 3, pixels, pixels, generator=torch.Generator().manual_seed(0))


def tokens():
    return torch.randint(50, (3, 7), generator=torch.Generator().manual_seed(0))


def small_resnet(unit, large_images):
    return ResNet(ResNetShape(unit, (2, 1, 1), 8, large_images), channels=3, classes=10)


MODELS = {
    "resnet-20": (lambda: resnet(20), lambda: images(16)),
    "resnet, bottleneck": (lambda: small_resnet("bottleneck", large_images=True), lambda: images(32)),
    "resnet, preactivated": (lambda: small_resnet("preactivated", large_images=False), lambda: images(8)),
    "vnet": (lambda: vnet(width=2), lambda: images(48).reshape(3, 1, 16, 16, 18)[..., :16]),
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


def plain_and_recomputed(name, reentrant):
    build, sample = MODELS[name]
    torch.manual_seed(0)
    plain = build()
    recomputed = hc.CheckpointSequential(copy.deepcopy(plain), segments=3, use_reentrant=reentrant)
    return step(plain, sample()), step(recomputed, sample())


@pytest.mark.parametrize("name", MODELS)
def test_recomputed_equals_plain_bit_for_bit(name):
    assert_equal(*plain_and_recomputed(name, reentrant=False))


@pytest.mark.parametrize("name", MODELS)
def test_recomputed_reentrantly_equals_plain(name):
    """Bit for bit, but for the LSTM: PyTorch runs it by another kernel where no gradients are recorded, as in the first pass."""
    plain, recomputed = plain_and_recomputed(name, reentrant=True)
    if name.startswith("lstm"):
        torch.testing.assert_close(recomputed, plain)
    else:
        assert_equal(plain, recomputed)


@pytest.mark.parametrize("name", MODELS)
def test_planner_finds_the_blocks(name):
    build, sample = MODELS[name]
    model = build()
    found, _ = find_blocks(model, lambda: model(sample()))
    assert [block.members for block in found] == [(child,) for child, _ in model.named_children()]


class Convolutions(TorchDispatchMode):
    """Counts forward convolutions."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten.convolution.default
        return function(*args, **(kwargs or {}))


@pytest.fixture
def plain_and_efficient():
    torch.manual_seed(0)
    plain = densenet(22, classes=10, dropout=0.2)
    efficient = densenet(22, classes=10, dropout=0.2, efficient=True)
    efficient.load_state_dict(plain.state_dict())
    return plain, efficient


def test_efficient_densenet_equals_the_plain_one_bit_for_bit(plain_and_efficient):
    plain, efficient = plain_and_efficient
    assert list(plain.state_dict()) == list(efficient.state_dict())
    for _ in range(2):
        expected = step(plain, images(16))
        found = step(efficient, images(16))
        assert_equal(found, expected)
    counts = {value.item() for name, value in found.items() if name.endswith("num_batches_tracked")}
    assert counts == {2}
    with torch.no_grad():
        assert torch.equal(plain.eval()(images(16)), efficient.eval()(images(16)))


def test_efficient_densenet_recomputes_no_convolution(plain_and_efficient):
    counts = []
    for model in plain_and_efficient:
        with Convolutions() as convolutions:
            step(model, images(8))
        counts.append(convolutions.count)
    assert counts[0] == counts[1] == 21


def test_efficient_densenet_100_takes_less_than_half_of_the_memory():
    def peak(efficient):
        model = densenet(100, classes=10, efficient=efficient)
        sample = images(32)
        step(model, sample)  # gradients are there from now on
        return measure_peak(lambda: model(sample).sum().backward()).peak_bytes

    assert peak(efficient=True) < 0.4 * peak(efficient=False)
