"""Cuts of parameters, split models and their bytes, and the slices of snapshots of other numbers of parts, in one process."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import hvd_ckpt as hc
from hvd_ckpt.app.models.gpt import gpt
from hvd_ckpt.parallel.tensor.functions import SPLIT
from hvd_ckpt.parallel.tensor.region import Region
from hvd_ckpt.processes import parts
from hvd_ckpt.processes.grid import Grid, pretending
from hvd_ckpt.reduction.buckets import TensorSpec
from hvd_ckpt.snapshots.reader import Snapshot
from hvd_ckpt.snapshots.schema import CutMetadata, Manifest, Range, TensorMetadata
from hvd_ckpt.utils.cuts import Cut, cut_of

SIZES: dict[str, Any] = {"vocabulary": 40, "length": 6, "width": 16, "heads": 4, "layers": 2}


@pytest.mark.parametrize("tensor", [2, 4])
def test_bytes_of_a_part(tensor: int) -> None:
    """All of the vocabulary, attention and perceptron / t; norms, positions and the biases of row layers whole."""
    with parts.alone(tensor):
        model = hc.tensor_parallel(gpt(**SIZES))
    h, t = 16, tensor
    layer = (3 * h * h + 3 * h) // t + h * h // t + h + (4 * h * h + 4 * h) // t + 4 * h * h // t + h + 4 * h
    expected = 40 * h // t + 6 * h + 2 * layer + 2 * h
    parameters = list(model.parameters())
    assert sum(one.numel() for one in parameters) == expected
    tokens = torch.randint(0, 40, (4, 6))
    whole, less, part = (
        hc.estimate_memory(gpt(**SIZES), 2, tensor=t, optimizer="adamw", sample=tokens, loss=Tensor.sum)
        for t in (1, tensor // 2, tensor)
    )
    assert (part.parameters, part.gradients) == (4 * expected, 4 * expected)
    assert 0 <= part.optimizer_state - 8 * expected <= 8 * len(parameters)  # and counts of steps
    assert whole.activations >= less.activations > part.activations


def saved_bytes(layer: nn.Module, x: Tensor) -> int:
    """Bytes of what the backward pass of a layer finds, but for parameters."""
    known = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    storages = dict[int, torch.UntypedStorage]()

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = layer(x)
    assert result.requires_grad
    return sum(storage.nbytes() for pointer, storage in storages.items() if pointer not in known)


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_activations_of_a_layer_are_those_of_megatron(tensor: int) -> None:
    """Of the inputs of column layers, each part has all; of those of norms, too, or 1 / t with sequence parallelism; of queries,
    keys, values, what attention gives and both 4 h wide ones 1 / t."""
    b, s, h, a = 3, 8, 16, 4
    for sequence in (False, True):
        share = tensor if sequence else 1
        with parts.alone(tensor):
            model = hc.tensor_parallel(gpt(**{**SIZES, "length": s}), sequence=sequence)
            # The last layer joins positions, and saves nothing for it.
            found = saved_bytes(model[-2], torch.randn(b, s // share, h, requires_grad=True))
        columns, norms = 2 * b * s * h, 2 * b * s * h + 2 * 2 * b * s  # and mean and deviation of each row
        split = (3 + 1 + 4 + 4) * b * s * h + a * b * s  # and a logarithm of each row of scores
        assert found == 4 * (columns + norms // share + split // tensor)


def test_copies_and_ties_stay_split() -> None:
    with parts.alone(2):
        model = copy.deepcopy(hc.tensor_parallel(gpt(**SIZES)))
        assert model[-1][1].weight is model[0].tokens.weight
        assert cut_of(model[-1][1].weight) == Cut(0, 40)
        assert cut_of(model[1].attention_norm.weight) is None
        assert isinstance(model[1].attention.project, nn.Linear)
        with pytest.raises(ValueError, match="split already"):
            hc.tensor_parallel(model)


@pytest.fixture(params=[(2, 0), (2, 1), (4, 3), (1, 0)])
def here(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    tensor, part = request.param
    with pretending(Grid(1, 1, 0, 0, tensor=tensor, part=part)):
        yield request.param


@pytest.mark.parametrize("p", [0.25, 1.0])
def test_dropout_of_a_part_is_that_of_the_whole(p: float, here: tuple[int, int]) -> None:
    tensor, part = here
    whole, heads = torch.randn(3, 8 * tensor), torch.randn(3, 2 * tensor, 5, 4)
    torch.manual_seed(1)
    expected = functional.dropout(whole, p).chunk(tensor, -1)[part]
    torch.manual_seed(1)
    with Region(SPLIT):
        assert torch.equal(functional.dropout(whole.chunk(tensor, -1)[part], p), expected)
        own = heads.chunk(tensor, 1)[part]
        attended = functional.scaled_dot_product_attention(own, own, own, dropout_p=p)
    assert attended.isfinite().all() and attended.any() == (p < 1)


@pytest.mark.parametrize(
    "module", [nn.AlphaDropout(), nn.FeatureAlphaDropout(), nn.Dropout1d(), nn.Dropout2d()]
)
def test_dropout_that_cannot_be_split_is_refused(module: nn.Module) -> None:
    features = torch.randn(3, 4, 8)
    with pretending(Grid(1, 1, 0, 0, tensor=2)), Region(SPLIT):
        assert torch.equal(module.eval()(features), features)
        with pytest.raises(ValueError, match="dropout of channels or alpha dropout"):
            module.train()(features)


@pytest.mark.parametrize("cut", [Cut(0, 12), Cut(1, 12), Cut(0, 12, 3), Cut(1, 12, 3), Cut(0, 11)])
@pytest.mark.parametrize("tensor", [1, 2, 3, 4])
def test_state_of_any_number_of_parts_is_cut_anew(
    cut: Cut, tensor: int, here: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slices of all parts make the whole, of which others read theirs; there are two replicas, which have half of each slice."""
    whole = torch.randn([cut.size if dim == cut.dim else 5 for dim in range(2)])
    slices = [cut.of(whole, tensor, part) for part in range(tensor)]
    assert torch.equal(cut.whole(slices), whole) and sum(one.numel() for one in slices) == whole.numel()
    assert [one.shape[cut.dim] for one in slices] == [cut.length(tensor, part) for part in range(tensor)]
    there, own = (
        TensorMetadata.of(whole.dtype, TensorSpec.of(cut.of(whole, number, 0)), cut, number)
        for number in (tensor, here[0])
    )
    flat = torch.cat([one.reshape(-1) for one in slices])
    assert torch.equal(there.flatten(whole), flat) and torch.equal(there.unflatten(flat), whole)
    ranges = []
    for rank in range(2 * tensor):
        replica, part = divmod(rank, tensor)
        start, stop = there.place_of(part)
        half = (start + stop) // 2
        ranges.append({"w": (start, half) if replica == 0 else (half, stop)})
    manifest = Manifest.model_construct(tensors={"w": there}, ranges=tuple(ranges))
    monkeypatch.setattr(
        Snapshot, "open_file", lambda snapshot, rank: lambda name, a, b: flat[slice(*ranges[rank][name])][a:b]
    )
    start, stop = own.place_of(here[1])
    (found,) = Snapshot(Path(), manifest).read([Range("w", start, stop, own)])
    assert torch.equal(found, cut.of(whole, *here).reshape(-1))


def test_a_cut_that_misses_a_part_is_refused() -> None:
    cut = CutMetadata(dim=0, parts=(((0, 4),), ((4, 8),)))
    TensorMetadata(dtype="float32", size=(8, 2), cut=cut)
    for wrong in (((0, 4),), ((5, 8),)), (((0, 4),), ((3, 8),)), (((0, 4),),):
        with pytest.raises(ValueError, match="does not fit the size"):
            TensorMetadata(dtype="float32", size=(8, 2), cut=CutMetadata(dim=0, parts=wrong))


def test_what_cannot_be_split_is_refused() -> None:
    lazy = nn.Sequential(nn.LazyLinear(4))
    with parts.alone(2), pytest.raises(ValueError, match="'0.weight' has no shape yet"):
        hc.tensor_parallel(lazy, {"0": "column"})
    for tensor, said in (
        (0, "tensor must be a number of parts from 1, not 0"),
        (3, "heads=4, which tensor=3 does not divide"),
    ):
        with pytest.raises(ValueError, match=said):
            hc.estimate_memory(gpt(**SIZES), 1, tensor=tensor)
