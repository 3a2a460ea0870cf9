"""Tests of cross entropy over a head in chunks: the results of PyTorch, one gradient accumulation, the memory of one chunk."""

import itertools

import pytest
import torch
from same import gradients
from torch import nn
from torch.nn import functional
from ways import EVERY_KIND, plainly

import hvd_ckpt as hc
from hvd_ckpt.utils.memory import measure_peak

ROWS, WIDTH, CLASSES = 96, 16, 300
NOTHING = -100


def inputs(masked=0.0):
    torch.manual_seed(1)
    targets = torch.randint(CLASSES, (4, ROWS // 4))
    targets[torch.rand(targets.shape) < masked] = NOTHING
    return torch.randn(4, ROWS // 4, WIDTH, requires_grad=True), targets


def head(bias=True):
    torch.manual_seed(0)
    return nn.Linear(WIDTH, CLASSES, bias=bias)


def unchunked(layer, hidden, targets, **options):
    scores = functional.linear(hidden, layer.weight, getattr(layer, "bias", None))
    return functional.cross_entropy(scores.flatten(0, 1), targets.flatten(), **options)


def assert_near(expected, actual, share=5e-6):
    for one, other in zip(expected, actual, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.dtype == other.dtype and one.shape == other.shape
            assert (one - other).norm() <= share * one.norm()


@pytest.mark.parametrize(
    ("masked", "bias", "options", "chunks"),
    [
        (masked, bias, {"reduction": reduction, "label_smoothing": smoothing}, chunks)
        for (masked, chunks), (bias, smoothing), reduction in itertools.product(
            ((0.0, 1), (0.0, 5), (0.85, 7), (1.0, 2)), ((True, 0.0), (False, 0.1)), ("mean", "sum", "none")
        )
        if masked < 1 or reduction != "mean"  # of no rows: nan
    ],
)
def test_loss_and_gradients_are_those_of_pytorch(masked, bias, options, chunks):
    results = []
    for compute in (unchunked, lambda *given, **options: hc.chunked_cross_entropy(*given, chunks, **options)):
        layer, (hidden, targets) = head(bias), inputs(masked)
        loss = compute(layer, hidden, targets, **options)
        torch.manual_seed(2)
        (loss.flatten() * torch.rand(loss.numel())).sum().backward()
        results.append([loss.detach().flatten(), hidden.grad, *gradients(layer)])
    if options["reduction"] == "none" and not options["label_smoothing"]:
        assert torch.equal(results[0][0], results[1][0])
    assert_near(*results)


def test_tokens_have_weights():
    layer, (hidden, targets) = head(), inputs(0.5)
    weights = torch.rand(targets.shape)

    def loss(**options):
        return hc.chunked_cross_entropy(layer, hidden, targets, 4, **options)

    total = (loss(reduction="none") * weights).sum()
    torch.testing.assert_close(loss(reduction="sum", token_weights=weights), total)
    torch.testing.assert_close(loss(token_weights=weights), total / weights[targets != NOTHING].sum())


def test_a_tied_or_frozen_weight_accumulates_once():
    embedding, calls = nn.Embedding(CLASSES, WIDTH), []
    embedding.weight.register_post_accumulate_grad_hook(lambda _: calls.append(1))
    _, targets = inputs()
    hidden = embedding(targets)
    hc.chunked_cross_entropy(embedding, hidden, targets, 6).backward()
    tied = embedding.weight.grad.clone()
    assert len(calls) == 1
    embedding.zero_grad()
    unchunked(embedding, embedding(targets), targets).backward()
    assert_near([embedding.weight.grad], [tied])

    layer, (hidden, targets) = head().requires_grad_(False), inputs()
    hc.chunked_cross_entropy(layer.weight, hidden, targets, 6).backward()
    assert hidden.grad is not None and layer.weight.grad is None


@EVERY_KIND
def test_inside_a_checkpointed_region(run):
    def function(layer, hidden, targets):
        return hc.chunked_cross_entropy(layer, hidden.tanh(), targets, 3)

    results = []
    for way in (plainly, run):
        layer, (hidden, targets) = head(), inputs(0.5)
        loss = way(function, layer, hidden, targets)
        loss.backward()
        results.append([loss, hidden.grad, *gradients(layer)])
    assert_near(*results)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_the_scale_of_a_loss(dtype):
    """In float16 a probability of a vocabulary this large, over the rows, is below the smallest number."""
    results, scale = [], 2.0**14
    for chunks in (None, 1, 8):
        torch.manual_seed(0)
        layer, (hidden, targets) = nn.Linear(WIDTH, 30000), inputs()
        with torch.autocast("cpu", dtype):
            whole = unchunked(layer, hidden, targets)
            loss = whole if chunks is None else hc.chunked_cross_entropy(layer, hidden, targets, chunks)
        assert loss.dtype == torch.float32
        (loss * scale).backward()
        results.append([loss.detach(), hidden.grad / scale, *(one / scale for one in gradients(layer))])
    assert_near(results[0], results[1], 1e-2)
    assert_near(results[0], results[2], 1e-2)


def test_backward_passes_of_a_kept_graph_and_of_gradients():
    layer, (hidden, targets) = head(), inputs()
    loss = hc.chunked_cross_entropy(layer, hidden, targets, 3)
    loss.backward(retain_graph=True)
    four_times = [4 * one for one in gradients(layer)]
    (3 * loss).backward(retain_graph=True)
    assert_near(four_times, gradients(layer))
    with pytest.raises(RuntimeError, match="differentiated twice"):
        torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize("masked", [0.0, 0.85])
def test_the_peak_is_that_of_a_chunk(masked):
    """Two tensors of a chunk's logits, and gradients; unchunked three of all."""
    rows, classes, chunks = 512, 4096, 8
    layer, targets = nn.Linear(WIDTH, classes), torch.randint(classes, (1, rows))
    targets[:, : int(masked * rows)] = NOTHING
    hidden = torch.randn(1, rows, WIDTH, requires_grad=True)
    logits, around = rows * classes * 4, 4 * (layer.weight.nbytes + hidden.nbytes)

    def peak(compute):
        compute().backward()
        return measure_peak(lambda: compute().backward()).peak_bytes

    assert peak(lambda: unchunked(layer, hidden, targets)) >= 3 * logits
    chunked = peak(lambda: hc.chunked_cross_entropy(layer, hidden, targets, chunks))
    assert chunked <= 2 * logits // chunks + around
    if masked:  # in one chunk, too
        assert peak(lambda: hc.chunked_cross_entropy(layer, hidden, targets, 1)) <= 0.4 * logits + around


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"chunks": 0}, ValueError, "chunks .* got 0"),
        ({"reduction": "product"}, ValueError, "'product'"),
        ({"label_smoothing": 2.0}, ValueError, r"2\.0"),
        ({"targets": torch.zeros(3, dtype=torch.int64)}, ValueError, r"targets .*\(3,\)"),
        ({"targets": torch.zeros(4, ROWS // 4)}, ValueError, "float32"),
        ({"token_weights": torch.ones(2)}, ValueError, "token_weights"),
        ({"hidden": torch.zeros(4, ROWS // 4, 3)}, ValueError, "hidden"),
        ({"head": nn.Sequential(nn.Linear(WIDTH, 9))}, TypeError, "Sequential"),
    ],
)
def test_wrong_arguments_are_named(change, error, match):
    hidden, targets = inputs()
    arguments = {"head": head(), "hidden": hidden, "targets": targets, "chunks": 2, **change}
    with pytest.raises(error, match=match):
        hc.chunked_cross_entropy(**arguments)
