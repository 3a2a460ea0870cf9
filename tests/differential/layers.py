"""The layers of random programs; some depend on state and change it, or are what a recomputation could easily get wrong."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

WIDTH = 8
VOCABULARY = 11


@torch.library.custom_op("differential::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    """Random, without tags and without a fake kernel."""
    return x * (torch.rand_like(x) > 0.25)


noisy.register_autograd(
    lambda ctx, gradient: gradient * (ctx.saved_tensors[0] != 0),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


@torch.library.custom_op("differential::average", mutates_args={"average"})
def update_average(average: Tensor, value: Tensor) -> None:
    """Changes its argument."""
    average.mul_(0.9).add_(value, alpha=0.1)


class Made(nn.Module):
    """Parts, and what a function makes of them and of the input."""

    def __init__(self, use: Callable[[Any, Tensor], Tensor], **parts: Any) -> None:
        super().__init__()
        self.use = use
        for name, part in parts.items():
            if isinstance(part, (nn.Module, nn.Parameter)):
                setattr(self, name, part)
            else:
                self.register_buffer(name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


class Layer(Made):
    """A linear layer, of whose result and state ``use`` makes what it likes: a buffer, and what no ``state_dict`` has."""

    def __init__(self, use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__(use, linear=wide(), average=torch.ones(WIDTH))
        self.held = torch.ones(WIDTH)
        self.generator = torch.Generator().manual_seed(1)
        self.random, self.numpy = random.Random(1), numpy.random.default_rng(1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.linear(x))

    def hidden(self) -> tuple[Any, ...]:
        numbers = self.random.getstate(), self.numpy.bit_generator.state
        return self.held.clone(), self.generator.get_state(), *numbers

    def set_hidden(self, state: tuple[Any, ...]) -> None:
        held, generator, python, self.numpy.bit_generator.state = state
        self.held = held.clone()
        self.generator.set_state(generator)
        self.random.setstate(python)


def _averaged(layer: Any, x: Tensor, name: str, update: str) -> Tensor:
    """Divides by a moving average of activations, in a buffer or an attribute: changed in place, replaced, or by an operator."""
    x = torch.tanh(x)
    held = getattr(layer, name)
    average, size = held.clone(), x.detach().abs().mean(0)
    if update == "in place":
        held.mul_(0.9).add_(size, alpha=0.1)
    elif update == "replaced":
        setattr(layer, name, held * 0.9 + size * 0.1)
    else:
        update_average(held, size)
    return x / (0.5 + average)


def _dropped(layer: Any, x: Tensor) -> Tensor:
    return torch.tanh(x) * (torch.rand(x.shape, generator=layer.generator, dtype=torch.float32) > 0.25)


def _by_python(layer: Any, x: Tensor) -> Tensor:
    return torch.tanh(x * (0.5 + random.random())) * (0.5 + layer.random.random())


def _by_numpy(layer: Any, x: Tensor) -> Tensor:
    return torch.tanh(x * (0.5 + float(numpy.random.rand()))) * (0.5 + float(layer.numpy.random()))


def _in_place(layer: Any, x: Tensor) -> Tensor:
    mask = x.detach() > -1
    mask &= x.detach() < 1
    x = x * mask
    x.add_(0.1)
    x[:, 0] = 0.5
    return torch.tanh(x)


def _inner_gradient(layer: Any, x: Tensor) -> Tensor:
    """Adds the gradient of something else, which is computed in the forward pass."""
    with torch.enable_grad():
        other = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(torch.tanh(layer.linear(other)).square().sum(), other)
    return torch.tanh(x) + 0.1 * gradient


USES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "moving": functools.partial(_averaged, name="average", update="in place"),
    "replaced": functools.partial(_averaged, name="average", update="replaced"),
    "custom_mutating": functools.partial(_averaged, name="average", update="by an operator"),
    "attribute": functools.partial(_averaged, name="held", update="in place"),
    "swapped": functools.partial(_averaged, name="held", update="replaced"),
    "generator": _dropped,
    "python": _by_python,
    "numpy": _by_numpy,
    "custom_random": lambda layer, x: noisy(torch.tanh(x)),
    "inplace": _in_place,
    "inner": _inner_gradient,
}


class Attention(nn.Module):
    """Attention among the samples of a batch, or among the parts of a sample, which are ``width`` wide."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.width, self.heads, self.dropout = width, heads, dropout
        self.project, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(1, -1, WIDTH) if self.width == WIDTH else x.view(len(x), -1, self.width)
        parts = self.project(rows).view(*rows.shape[:2], 3, self.heads, -1)
        dropout = self.dropout if self.training else 0.0
        result = F.scaled_dot_product_attention(*parts.permute(2, 0, 3, 1, 4), dropout_p=dropout)
        return self.output(result.transpose(1, 2).flatten(2)).reshape(x.shape)


def wide() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def linear(*more: nn.Module) -> nn.Module:
    return nn.Sequential(wide(), nn.Tanh(), *more)


def residual(layer: nn.Module) -> nn.Module:
    return Made(lambda own, x: x + own.layer(x), layer=layer)


def deep(middle: nn.Module) -> nn.Module:
    return residual(nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), middle, nn.Linear(12, WIDTH)))


def tied(weight: nn.Parameter) -> nn.Module:
    """A linear layer with the weight of another one."""
    bias = nn.Parameter(torch.zeros(WIDTH))
    return Made(lambda own, x: torch.tanh(F.linear(x, own.weight, own.bias)), weight=weight, bias=bias)


def running() -> nn.Module:
    """Batch normalization by the function, with running statistics that are buffers."""
    return Made(
        lambda own, x: F.batch_norm(x, own.mean, own.variance, own.weight, own.bias, True, 0.1, 0.1),
        weight=nn.Parameter(torch.ones(WIDTH)),
        bias=nn.Parameter(torch.zeros(WIDTH)),
        mean=torch.zeros(WIDTH),
        variance=torch.ones(WIDTH),
    )


def max_norm() -> nn.Module:
    """Adds the mean of an embedding whose weight the forward pass renormalizes, alike on every rank."""
    return Made(
        lambda own, x: torch.tanh(own.linear(x)) + own.embedding(torch.arange(VOCABULARY)).mean(0),
        linear=wide(),
        embedding=nn.Embedding(VOCABULARY, WIDTH, max_norm=0.5),
    )


KINDS: dict[str, Callable[[], nn.Module]] = {
    "linear": linear,
    "deep": lambda: deep(nn.LayerNorm(12)),
    "norm": lambda: nn.LayerNorm(WIDTH),
    "batchnorm": lambda: nn.BatchNorm1d(WIDTH, eps=0.1),
    "dropout": lambda: linear(nn.Dropout(0.25)),
    "conv": lambda: Made(
        lambda own, x: torch.tanh(own.layer(x.view(-1, 2, 2, 2)).reshape(x.shape)),
        layer=nn.Conv2d(2, 2, 3, padding=1).to(memory_format=torch.channels_last),
    ),
    "scale": lambda: Made(  # one of its parameters has no elements
        lambda own, x: x * own.factor + own.nothing.sum(),
        factor=nn.Parameter(torch.tensor(0.5)),
        nothing=nn.Parameter(torch.empty(0, 3)),
    ),
    "branch": lambda: Made(
        lambda own, x: own.layer(x) + torch.sigmoid(own.other(x)), layer=wide(), other=wide()
    ),
    "unused": lambda: Made(lambda own, x: own.layer(x), layer=linear(), other=wide()),
    "frozen": lambda: linear().requires_grad_(False),
}
STATEFUL: dict[str, Callable[[], nn.Module]] = {
    **{name: functools.partial(Layer, use) for name, use in USES.items()},
    "running": running,
    "spectral": lambda: parametrizations.spectral_norm(wide()),
    "weight_norm": lambda: parametrizations.weight_norm(wide()),
    "max_norm": max_norm,
    "attention": lambda: Attention(WIDTH, 2, 0.0),
}
# That tensor parallelism splits, and how.
IN_PARTS: dict[str, tuple[Callable[[], nn.Module], dict[str, str]]] = {
    "perceptron": (
        lambda: deep(nn.Dropout(0.25)),
        {"layer": "features", "layer.0": "column", "layer.3": "row"},
    ),
    "heads": (
        lambda: residual(Attention(WIDTH // 2, 4, 0.25)),
        {"layer": "heads:heads", "layer.project": "fused:3", "layer.output": "row"},
    ),
    "gathered": (linear, {"0": "vocabulary"}),
}
LAYERS = {**KINDS, **STATEFUL, **{kind: layer for kind, (layer, _) in IN_PARTS.items()}}


# ---------------------------------------------------------------------------------- what each rank has of its own


def own_of(model: nn.Module) -> dict[str, Any]:
    """Copies of buffers, of what layers hide, and of the states of the generators."""
    hidden = [module.hidden() for module in model.modules() if isinstance(module, Layer)]
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    return {"buffers": [one.clone() for one in model.buffers()], "hidden": hidden, "random": states}


def set_own(model: nn.Module, own: dict[str, Any]) -> None:
    set_buffers(model, own["buffers"])
    layers = [module for module in model.modules() if isinstance(module, Layer)]
    for layer, hidden in zip(layers, own["hidden"]):
        layer.set_hidden(hidden)
    torch.set_rng_state(own["random"][0])
    random.setstate(own["random"][1])
    numpy.random.set_state(own["random"][2])


def set_buffers(model: nn.Module, values: list[Tensor]) -> None:
    with torch.no_grad():
        for buffer, value in zip(model.buffers(), values):
            buffer.copy_(value)
