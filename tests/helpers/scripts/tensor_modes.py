"""Tensor parallelism together with all else, and what is refused; programs: tests/differential. Arguments: tensor, cases;
"sequence" after them for sequence parallelism."""

from __future__ import annotations

import copy
import gc
import itertools
import math
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensor_models import (
    BATCH,
    LENGTH,
    MODELS,
    SEQUENCE,
    SIZES,
    assert_close,
    assert_like_whole,
    batch_of,
    loss_of,
    optimizer_of,
    run,
    train,
)
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import orthogonal, weight_norm

import hvd_ckpt as hc
from hvd_ckpt.app.models.gpt import gpt
from hvd_ckpt.parallel.tensor.copies import check_copies
from hvd_ckpt.parallel.tensor.verification import _watched
from hvd_ckpt.processes.grid import current
from hvd_ckpt.processes.partition import _pack
from hvd_ckpt.utils.cuts import cut_of


def made(**options: Any) -> Any:
    torch.manual_seed(3)
    return gpt(**{**SIZES, "length": LENGTH, "dropout": 0.1, **options}).train()


def split(**options: Any) -> Any:
    return hc.tensor_parallel(made(**options), sequence=SEQUENCE)


def tokens() -> Tensor:
    return batch_of("gpt", 0)[0]


def partitioned() -> None:
    """With partition=True the input of a region takes 1 / t, and comes back as it was."""
    gradients = []
    for partition in (False, True):
        model = split(dropout=0.0)
        leaf = model[0](tokens()).detach().requires_grad_()
        x = leaf * 1
        memory = weakref.ref(x.untyped_storage())
        y = hc.checkpoint(model[1], x, partition=partition)
        del x
        assert (memory() is None) == partition  # the whole input is gone, and a share of it is kept
        gradients.append(torch.autograd.grad(y.square().sum(), [leaf])[0])
    assert torch.equal(*gradients)
    share = _pack(torch.randn(4, 6, requires_grad=True) * 1)
    assert share.values.nbytes == share.values.untyped_storage().nbytes() == 4 * 24 // hc.grid().tensor


def positions() -> None:
    """With sequence=True a part has 1 / t of the positions between layers; it evaluates and pickles as ever."""
    model, shapes = split(), list[tuple[int, ...]]()
    for layer in model[1:-1]:
        layer.attention_norm.register_forward_hook(lambda module, args, result: shapes.append(result.shape))
    with torch.no_grad():
        assert_close(model.eval()(tokens()), made().eval()(tokens()), "evaluated")
    assert shapes == [(BATCH, LENGTH // hc.grid().tensor, SIZES["width"])] * SIZES["layers"]
    copied = pickle.loads(pickle.dumps(split()))
    assert train("gpt", copied) == train("gpt", other := split())
    assert all(map(torch.equal, copied.parameters(), other.parameters()))
    x = torch.randn(1, 4, SIZES["width"])
    no_partition = "partition=True. cannot be used with tensor_parallel.sequence=True"
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: model(tokens()[:, :-1]), "shape .* have no number of positions that tensor=. divides"),
        *(
            (lambda of=of: hc.checkpoint(of, x, partition=True), no_partition)
            for of in (model[1], model[1].perceptron)
        ),
        (lambda: hc.tensor_parallel(MODELS["xlnet"](), sequence=True), "the recipe has no blocks"),
        (
            lambda: hc.tensor_parallel(made(), {"head.1": "vocabulary"}, sequence=True),
            "the recipe has no blocks",
        ),
        (lambda: hc.tensor_parallel(made(), sequence=hc.grid().part == 0), "different recipes"),
    ]
    for call, words in refused:
        with pytest.raises(ValueError, match=words):
            call()


def whole_states() -> None:
    """full_model_state_dict() and full_state_dict() are those of the whole model, on one process or on all."""
    whole: Any = made()
    alone = torch.optim.Adam(whole.parameters())
    for shard in ("none", "optimizer", "gradients", "parameters"):
        optimizer = optimizer_of(model := split(), torch.optim.Adam, shard=shard)
        loss_of(model).backward()
        optimizer.step()
        first = hc.rank() == hc.grid().part == 0
        assert (optimizer.full_model_state_dict(model) is not None) == first
        assert (optimizer.full_state_dict() is not None) == first
        state = optimizer.full_model_state_dict(model, all_ranks=True)
        whole.load_state_dict(state)
        assert state["head.1.weight"] is state["embedding.tokens.weight"]
        alone.load_state_dict(optimizer.full_state_dict(all_ranks=True))
        for parameter in whole.parameters():
            assert alone.state[parameter]["exp_avg"].shape == parameter.shape
        with optimizer.gathered_parameters():
            assert_like_whole(model, whole, f"shard={shard!r}")


def clipped() -> None:
    """Norms of every order, and one step with gradients that are clipped by it."""
    orders = (1.0, 2.0, 3.0, math.inf, -math.inf, 0.0)
    for shard, order in itertools.product(("none", "gradients", "parameters"), orders):
        part, whole, norms = split(), made(), []
        for model in (whole, part):
            optimizer = optimizer_of(model, shard=shard if model is part else "none")
            torch.manual_seed(5 + hc.rank())
            loss_of(model).backward()
            norms.append(float(hc.clip_grad_norm_(model.parameters(), 0.1, order)))
            optimizer.step()
        assert norms[1] == pytest.approx(norms[0], rel=1e-5), (shard, order, norms)
        with optimizer.gathered_parameters():
            assert_like_whole(part, whole, f"clipped by order {order}, {shard}")


def overflow() -> None:
    """An overflow on one part of one replica skips the step on all."""
    for shard in ("none", "optimizer", "gradients"):
        optimizer = optimizer_of(model := split(), shard=shard)
        scaler = hc.GradScaler("cpu", init_scale=8.0)
        before, bias = [one.detach().clone() for one in model.parameters()], model[1].perceptron[0].bias
        for step, scale in enumerate((math.inf if current().number == current().size - 1 else 1.0, 1.0)):
            optimizer.zero_grad()
            hook = bias.register_hook(lambda gradient, scale=scale: gradient * scale)
            scaler.scale(loss_of(model, step)).backward()
            hook.remove()
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == 4.0
            assert all(map(torch.equal, model.parameters(), before)) == (step == 0)
        check_copies(model.named_parameters())


def head() -> None:
    """Cross entropy in chunks over the split vocabulary, which gathers no scores."""
    grid, (_, _, targets) = current(), batch_of("gpt", 0)
    targets[0, :2] = -100
    for smoothing, chunks in ((0.0, 1), (0.1, 3)):
        whole, results = made(dropout=0.0), []
        part = hc.tensor_parallel(copy.deepcopy(whole))
        for model in (part, whole):
            norm, scores = model[-1]
            hidden = norm(model[:-1](tokens()))
            loss = hc.chunked_cross_entropy(scores, hidden, targets, chunks, label_smoothing=smoothing)
            loss.backward()
            results.append(loss.item())
        assert results[0] == pytest.approx(results[1], rel=1e-6)
        for (name, one), other in zip(part.named_parameters(), whole.parameters()):
            assert one.grad is not None and other.grad is not None
            cut = cut_of(one)
            there = other.grad if cut is None else cut.of(other.grad, grid.tensor, grid.part)
            assert_close(one.grad, there, f"gradient of {name}, in {chunks} chunks")


def half() -> None:
    losses = []
    for one in (split(dropout=0.0), made(dropout=0.0)):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(one)
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)


def vocabulary() -> None:
    """Tokens and targets outside of the vocabulary raise on all parts, as with the whole model."""
    table, scores = nn.Embedding(9, 4), nn.Linear(4, 9)
    hc.tensor_parallel(nn.ModuleList([table, scores]), {"0": "vocabulary", "1": "vocabulary"})
    hidden = torch.randn(3, 4)
    for wrong in (9, -1, -5, 10**9):
        with pytest.raises(IndexError, match=f"token {wrong} is outside of the vocabulary of 9 tokens"):
            table(torch.tensor([1, wrong]))
        with pytest.raises(IndexError, match=f"token {wrong} is outside"):
            hc.chunked_cross_entropy(scores, hidden, torch.tensor([1, -100, wrong]), 2)
    assert table(torch.empty(2, 0, dtype=torch.int64)).shape == (2, 0, 4)
    assert hc.chunked_cross_entropy(scores, hidden, torch.tensor([0, 8, -100]), 2).isfinite()


class Between(nn.Module):
    """A column and a row layer, and what is drawn between them."""

    def __init__(self, between: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.BatchNorm1d(4), nn.Linear(4, 8), nn.Linear(8, 4)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(self, self.up(self.norm(x))))


def verified() -> None:
    """The first call of a split model refuses what the whole one computes otherwise, on all parts, and changes nothing."""
    recipe, x = {"up": "column", "down": "row"}, torch.randn(3, 4)
    wrong: list[tuple[Callable[[Any, Tensor], Tensor], dict[str, str], str]] = [
        (lambda model, h: h.softmax(-1), recipe, "the result of 'down' differs"),
        (lambda model, h: h / h.norm(dim=-1, keepdim=True), recipe, "the result of 'down' differs"),
        (lambda model, h: h.flip(-1), recipe, "the result of 'down' differs"),
        (lambda model, h: h * (torch.rand_like(h) > 0.5), recipe, "random numbers|differs"),
        (lambda model, h: h if model.training else h.softmax(-1), recipe, "but only in evaluation"),
        (lambda model, h: h.softmax(-1) if model.training else h, recipe, "but only in training"),
        (lambda model, h: h, {"up": "column"}, "raises RuntimeError"),
        (lambda model, h: h @ model.down.weight.t() @ model.down.weight, recipe, "raises|differs"),
        (lambda model, h: h, {"up": "column", "down": "column"}, "raises RuntimeError|instead of"),
        (
            lambda model, h: functional.dropout(h.t(), 0.5, model.training).t(),
            recipe,
            "only in training: random",
        ),
    ]
    for between, cuts, words in wrong:
        model = hc.tensor_parallel(Between(between), cuts)
        for _ in range(2):  # it is still not verified
            with pytest.raises(ValueError, match=words):
                model(x)
    model = hc.tensor_parallel(Between(lambda model, h: h.flip(-1)), recipe).eval()
    for _ in range(2):
        with pytest.raises(ValueError, match="the result of 'down' differs"):
            model(x)
    model = hc.tensor_parallel(Between(lambda model, h: h.softmax(-1)), recipe, verify=False)
    assert model(x).shape == x.shape
    whole = Between(lambda model, h: h.tanh())
    model = hc.tensor_parallel(copy.deepcopy(whole), recipe)
    before = copy.deepcopy(dict(model.named_buffers())), torch.get_rng_state()
    model.eval()(x), whole.eval()(x)
    assert torch.equal(torch.get_rng_state(), before[1])
    assert all(torch.equal(one, before[0][name]) for name, one in model.named_buffers())
    assert_close(model.train()(x).detach(), whole.train()(x).detach(), "values after a verification")
    assert all(torch.equal(one, other) for one, other in zip(model.buffers(), whole.buffers()))
    assert all(one.grad is None for one in model.parameters())
    model = hc.tensor_parallel(Between(lambda model, h: h.tanh()), recipe)
    with pytest.raises(ValueError, match="parts of a replica called the model with different arguments"):
        model(x + hc.grid().part)
    model.up.weight.requires_grad_(hc.grid().part == 0)
    with pytest.raises(ValueError, match="requires_grad of parameter 'up.weight' differs"):
        model(x)


def frozen_later() -> None:
    """A parameter that one part alone freezes."""
    words = r"requires_grad of parameter 'layer0\.perceptron\.0\.weight' .* 0 and 1"
    for model in (split(), hc.tensor_parallel(made(), verify=False)):
        model(tokens()).sum().backward()
        model[1].perceptron[0].weight.requires_grad_(hc.grid().part != 1)
        with pytest.raises(ValueError, match=words):
            model(tokens())


def blocks_alone() -> None:
    """The blocks of a model that is gone, as of a pipeline, keep no whole weights after two steps."""
    model = split()
    whole = weakref.ref(_watched[model][0].whole)
    assert whole() is not None
    optimizer, blocks = optimizer_of(model), [*model]
    del model
    for _ in range(2):
        nn.Sequential(*blocks)(tokens()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    gc.collect()
    assert whole() is None


def without_positions() -> None:
    """A model that is split with sequence=True leaves others their partitioned activations."""
    hc.tensor_parallel(made(), sequence=True)
    other = hc.tensor_parallel(made(dropout=0.0))
    x = torch.randn(2, LENGTH, SIZES["width"], requires_grad=True)
    hc.checkpoint(other[1], x, partition=True).sum().backward()


def copies() -> None:
    model = split()
    check_copies(model.named_parameters())
    if hc.grid().part == 1:
        with torch.no_grad():
            model[2].attention_norm.weight[3] += 1e-3
    optimizer = optimizer_of(model)

    def steps() -> None:
        for _ in range(8):
            optimizer.step()

    with pytest.raises(hc.WeightsDiffer, match=r"layer1\.attention_norm\.weight.*parts 0 and 1"):
        steps()


def own_forward(kind: Any) -> Any:
    return type(f"Own{kind.__name__}", (kind,), {"forward": lambda self, x: 2 * kind.forward(self, x)})


def patched(layer: nn.Module) -> nn.Module:
    layer.forward = lambda x: x
    return layer


def refused() -> None:
    for layer, kind, words in (
        (nn.Linear(3, 5), "column", "has 5 outputs, which \\d does not divide"),
        (nn.Linear(3, 5), "row", "has 3 inputs, which \\d does not divide"),
        (nn.Embedding(9, 4, max_norm=1.0), "vocabulary", "max_norm"),
        (own_forward(nn.Linear)(4, 4), "row", "'0', a OwnLinear, has a forward method of its own"),
        (
            own_forward(nn.Embedding)(4, 4),
            "vocabulary",
            "'0', a OwnEmbedding, has a forward method of its own",
        ),
        (patched(nn.Linear(4, 4)), "column", "'0', a Linear, has a forward method"),
        (weight_norm(nn.Linear(4, 4)), "column", "'0', a Parametrized.* its weight from"),
        (orthogonal(nn.Embedding(4, 4)), "vocabulary", "its weight from"),
        (prune.random_unstructured(nn.Linear(4, 4), "bias", 1), "row", "its bias from"),
    ):
        with pytest.raises(ValueError, match=words):
            hc.tensor_parallel(nn.Sequential(layer), {"0": kind})
    part = hc.grid().part
    uneven = made()
    with torch.no_grad():
        uneven[1].attention_norm.weight[0] += part
    recipes: list[tuple[Any, dict[str, str] | None, str]] = [
        (made(heads=1), None, "'layer0.attention'.* has heads=1, which tensor=\\d does not divide"),
        (made(), {"layer*.attentoin": "column"}, "no module 'layer\\*.attentoin'; the nearest are '"),
        (made(), {"layer0.attention": "columns"}, "'columns'; give column, row"),
        (made(), {"layer0.attention_norm": "row"}, "a LayerNorm, cannot be split by row"),
        (
            made(),
            {"embedding.tokens": "vocabulary"},
            "weight of 'head.1' is tied to one that is cut in another",
        ),
        (nn.Sequential(nn.Linear(4, 4)), None, "no recipe for a Sequential"),
        (made(), {f"layer{part}.perceptron.0": "column"}, "different recipes"),
        (made(), {"x" if part else "layer1.perceptron.0": "column"}, "no module 'x'"),
        (uneven, None, r"'layer0\.attention_norm\.weight' differs between parts 0 and 1"),
        (split(), None, "split already"),
    ]
    for model, recipe, words in recipes:
        with pytest.raises(ValueError, match=words):
            hc.tensor_parallel(model, recipe)
    model = made()
    model[2].perceptron[0].bias.requires_grad_(part == 0)
    hc.tensor_parallel(model)
    with pytest.raises(ValueError, match=r"requires_grad of parameter 'layer1\.perceptron\.0\.bias' differs"):
        model(tokens())


def own_recipe() -> None:
    """It does as the built-in one."""
    recipe = {
        "embedding.tokens": "vocabulary", "layer*.attention": "heads:heads", "layer*.attention.project": "fused:3",
        "layer*.attention.output": "row", "layer?.perceptron.0": "column", "layer?.perceptron.2": "row", "head.1": "vocabulary",
    }  # fmt: skip
    scores = []
    for model in (hc.tensor_parallel(made(), recipe), split()):
        torch.manual_seed(1)
        scores.append(model(tokens()))
    assert torch.equal(*scores)


if __name__ == "__main__":
    cases = (
        partitioned, clipped, overflow, head, half, copies, refused, vocabulary, verified, frozen_later, without_positions,
        whole_states, blocks_alone, own_recipe,
    )  # fmt: skip
    in_sequence = (positions, clipped, overflow, half)
    run({case.__name__: case for case in (in_sequence if SEQUENCE else cases)})
