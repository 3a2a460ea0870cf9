"""The models as chains: the published sizes, and the same numbers with and without recomputation."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint_sequential

from hvd_ckpt.models.densenet import densenet
from hvd_ckpt.models.sizes import DENSENETS


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


@pytest.mark.parametrize("depth", sorted(DENSENETS))
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
