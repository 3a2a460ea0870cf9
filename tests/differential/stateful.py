"""Layers whose forward pass depends on state and changes it, or that a recomputation could easily get wrong."""

from __future__ import annotations

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


class Stateful(nn.Module):
    """A layer with state that no ``state_dict`` has."""

    def hidden(self) -> Any:
        """A copy of that state."""
        raise NotImplementedError

    def set_hidden(self, state: Any) -> None:
        raise NotImplementedError


class Average(nn.Module):
    """Divides by a moving average of its activations: a buffer.

    Args:
        how: ``"moving"``: changed in place; ``"replaced"``; ``"custom_mutating"``: changed by a custom operator.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.linear = how, nn.Linear(WIDTH, WIDTH)
        self.register_buffer("average", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.linear(x))
        average, size = self.average.clone(), x.detach().abs().mean(0)
        if self.how == "moving":
            self.average.mul_(0.9).add_(size, alpha=0.1)
        elif self.how == "replaced":
            self.average = self.average * 0.9 + size * 0.1
        else:
            update_average(self.average, size)
        return x / (0.5 + average)


class Attribute(Stateful):
    """The same with an attribute in place of a buffer, which is changed in place (``"attribute"``) or replaced (``"swapped"``)."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.linear = how, nn.Linear(WIDTH, WIDTH)
        self.average = torch.ones(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.linear(x))
        average, size = self.average.clone(), x.detach().abs().mean(0)
        if self.how == "attribute":
            self.average.mul_(0.9).add_(size, alpha=0.1)
        else:
            self.average = self.average * 0.9 + size * 0.1
        return x / (0.5 + average)

    def hidden(self) -> Any:
        return self.average.clone()

    def set_hidden(self, state: Any) -> None:
        self.average = state.clone()


class TorchGenerator(Stateful):
    """Dropout with a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.linear(x))
        return x * (torch.rand(x.shape, generator=self.generator, dtype=torch.float32) > 0.25)

    def hidden(self) -> Any:
        return self.generator.get_state()

    def set_hidden(self, state: Any) -> None:
        self.generator.set_state(state)


class PythonRandom(Stateful):
    """Scales by numbers of Python's generator, and of one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.random = random.Random(1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) * (0.5 + random.random())) * (0.5 + self.random.random())

    def hidden(self) -> Any:
        return self.random.getstate()

    def set_hidden(self, state: Any) -> None:
        self.random.setstate(state)


class NumpyRandom(Stateful):
    """The same with NumPy's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.generator = numpy.random.default_rng(1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.linear(x) * (0.5 + float(numpy.random.rand())))
        return x * (0.5 + float(self.generator.random()))

    def hidden(self) -> Any:
        return self.generator.bit_generator.state

    def set_hidden(self, state: Any) -> None:
        self.generator.bit_generator.state = state


class Running(nn.Module):
    """Batch normalization by the function, with running statistics that are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("variance", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.mean, self.variance, self.weight, self.bias, True, 0.1, 0.1)


class MaxNorm(nn.Module):
    """Adds the mean of an embedding whose weight the forward pass renormalizes, alike on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, max_norm=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) + self.embedding(torch.arange(VOCABULARY)).mean(0)


class Noisy(nn.Module):
    """A random custom operator."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = noisy(torch.tanh(self.linear(x)))
        return result


class InPlace(nn.Module):
    """Changes masks and activations in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        mask = x.detach() > -1
        mask &= x.detach() < 1
        x = x * mask
        x.add_(0.1)
        x[:, 0] = 0.5
        return torch.tanh(x)


class InnerGradient(nn.Module):
    """Adds the gradient of something else, which it computes in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            other = x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(torch.tanh(self.linear(other)).square().sum(), other)
        return torch.tanh(self.linear(x)) + 0.1 * gradient


class Attention(nn.Module):
    """Attention over the samples of a batch, with two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.linear(x).view(1, -1, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(-1, WIDTH)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "moving": lambda: Average("moving"),
    "replaced": lambda: Average("replaced"),
    "custom_mutating": lambda: Average("custom_mutating"),
    "attribute": lambda: Attribute("attribute"),
    "swapped": lambda: Attribute("swapped"),
    "running": Running,
    "spectral": lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "max_norm": MaxNorm,
    "generator": TorchGenerator,
    "python": PythonRandom,
    "numpy": NumpyRandom,
    "custom_random": Noisy,
    "inplace": InPlace,
    "inner": InnerGradient,
    "attention": Attention,
}
