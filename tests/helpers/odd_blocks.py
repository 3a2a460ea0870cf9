"""Blocks that train with plain PyTorch and do what most blocks do not: state, containers, custom operators, transforms, hooks."""

from __future__ import annotations

import copy
import functools
import random
import warnings
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.ao.quantization
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

import hvd_ckpt as hc
from hvd_ckpt.recompute.reach import reach

WIDTH = 16


class Block(nn.Module):
    """A feed-forward block with a function of the hidden tensor in its middle.

    Args:
        middle: from the block and the hidden tensor to another one.
        parts: modules, buffers and other attributes that the function needs.
    """

    def __init__(self, middle: Callable[[Any, Tensor], Tensor], **parts: Any) -> None:
        super().__init__()
        self.a, self.b, self.middle = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), middle
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("large", torch.ones((200, 200) if middle is _large_buffer else ()))
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.steps = 0
        self.cached: Tensor | None = None
        for name, part in parts.items():
            if isinstance(part, Tensor):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def extra_repr(self) -> str:
        """By which blocks differ that have another function."""
        return str(id(self.middle))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.middle(self, F.gelu(self.a(x)))
        y = x + self.b(F.gelu(hidden))
        assert y.shape == x.shape
        return y


class Wrapped(nn.Module):
    """A feed-forward block around a module from (rows, width) to the same."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.a, self.inner = nn.Linear(WIDTH, WIDTH), inner

    def forward(self, x: Tensor) -> Tensor:
        result = self.inner(F.gelu(self.a(x)))
        return x + torch.tanh(result[0] if isinstance(result, tuple) else result)


# ---------------------------------------------------------------------------------------- functions in the middle


GENERATOR = torch.Generator()


@torch.library.custom_op("hvd_ckpt_odd::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    return x * (torch.rand_like(x) > 0.5)


@torch.library.custom_op("hvd_ckpt_odd::python_noise", mutates_args=())
def python_noise(x: Tensor) -> Tensor:
    return x * random.random() + float(np.random.rand())


@torch.library.custom_op("hvd_ckpt_odd::own_noise", mutates_args=())
def own_noise(x: Tensor) -> Tensor:
    return x * torch.rand(x.shape, generator=GENERATOR)


for operator in (noisy, python_noise, own_noise):
    operator.register_autograd(
        lambda ctx, gradient: gradient * ctx.saved_tensors[0],
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
    )


@torch.library.custom_op("hvd_ckpt_odd::halve", mutates_args=("x",))
def halve(x: Tensor) -> None:
    x.mul_(0.5)


@torch.library.custom_op("hvd_ckpt_odd::scale_keyword", mutates_args=("out_scaled",))
def scale_keyword(x: Tensor, out_scaled: Tensor) -> None:
    out_scaled.mul_(x)


@torch.library.custom_op("hvd_ckpt_odd::plain", mutates_args=())
def without_formula(x: Tensor) -> Tensor:
    return x * 2


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x * 2
        ctx.save_for_backward(x, y.sin())
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, y = ctx.saved_tensors
        return gradient * x * 2 + y * 0


def _counter(block: Any, x: Tensor) -> Tensor:
    block.steps += 1
    return x * (1 + block.steps)


def _moving_average(block: Any, x: Tensor) -> Tensor:
    x = x / block.scale.clone()
    block.scale.mul_(0.9).add_(0.1 * x.detach().abs().mean())
    return x


def _replaced_buffer(block: Any, x: Tensor) -> Tensor:
    x = x * block.scale
    block.scale = block.scale * 0.5 + 0.1
    return x


def _buffer_written_first(block: Any, x: Tensor) -> Tensor:
    block.scale.mul_(0.9)
    return x * block.scale


def _large_buffer(block: Any, x: Tensor) -> Tensor:
    x = x * block.large[0, 0].clone()
    block.large.mul_(0.9)
    return x


def _weight_written_first(block: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        block.gain.mul_(0.9)
    return x * block.gain.detach().clone()


def _gradient_inside(block: Any, x: Tensor) -> Tensor:
    energy = (x.tanh() ** 2).sum()
    (force,) = torch.autograd.grad(energy, x, create_graph=True)
    return x + force


def _backward_of_detached(block: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        leaf.exp().sum().backward()
    return x + leaf.grad


def _mask(block: Any, x: Tensor) -> Tensor:
    mask = x > 0
    x = x + mask.float()
    mask &= x < 1
    mask |= x > 3
    return x * mask


def _writes(block: Any, x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[:, ::2] = x[:, ::2]
    y[:, 1::2] += x[:, 1::2] * 2
    y.index_put_((torch.tensor([0, 1]),), x[2:4].sin())
    y = y.scatter(1, torch.zeros(len(x), 1, dtype=torch.long), x[:, :1])
    y[:, 3].mul_(2)
    return y


def _out(block: Any, x: Tensor) -> Tensor:
    constant = torch.empty(WIDTH)
    torch.add(torch.ones(WIDTH), 1, out=constant)
    y = x.sin() + constant
    torch.mul(constant, 3, out=constant)
    return y.exp() * constant.clone()


def _kernel(block: Any, x: Tensor) -> Tensor:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.1)[0]


def _hooks(block: Any, x: Tensor) -> Tensor:
    x = x * 2
    x.register_hook(lambda gradient: gradient * 0.5)
    return x.clone()


def _random_state(block: Any, x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return x * torch.rand_like(x)


def _default_dtype(block: Any, x: Tensor) -> Tensor:
    torch.set_default_dtype(torch.float64)
    try:
        return (x.double() * torch.rand(WIDTH)).float()
    finally:
        torch.set_default_dtype(torch.float32)


def _autocast(block: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = block.b(x)
        with torch.autocast("cpu", enabled=False):
            y = block.a(y.float())
    return y.float()


def _renormalized(block: Any, x: Tensor) -> Tensor:
    table = block.a.weight.detach().clone()
    return x + F.embedding(torch.arange(len(x)) % WIDTH, table, max_norm=0.5)


def _saved_hooks(block: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return (x.sin() * x).cos()


def _complex(block: Any, x: Tensor) -> Tensor:
    spectrum = torch.fft.rfft(x)
    return torch.fft.irfft(spectrum * torch.view_as_complex(torch.ones(9, 2)) * spectrum.conj(), n=WIDTH)


def _lists(block: Any, x: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    parts = [one * other for one, other in zip((left + 1).unbind(), right.exp().split(1))]
    best, where = torch.cat(parts).sort(-1)
    values = torch.where(best > 0, best, left.gather(1, where)).index_select(1, where[0, :2])
    return x * values.repeat(1, WIDTH // 2)


def _generator(block: Any, x: Tensor) -> Tensor:
    return x * torch.rand(x.shape, generator=torch.Generator().manual_seed(block.steps))


def _cache(block: Any, x: Tensor) -> Tensor:
    if not hasattr(block, "table"):
        block.table = torch.arange(float(WIDTH))
    return x * block.table


def _cached_weight(block: Any, x: Tensor) -> Tensor:
    if block.cached is None:
        block.cached = torch.tanh(block.b.weight)
    return x @ block.cached


def _in_place_by_position(block: Any, x: Tensor) -> Tensor:
    mask = x.detach().clone()
    y = x.sin() + mask
    F.relu(mask, True)
    z = y.exp() + mask
    F.hardtanh(mask, -1.0, 1.0, True)
    return y.cos() * mask + z.sin()


def _scaled_by_keyword(block: Any, x: Tensor) -> Tensor:
    mask = (x.detach() * 2).sigmoid()
    y = x.cos() + mask
    scale_keyword(torch.ones(WIDTH) * 3, mask)
    return y.sin() * mask


def _conditional(block: Any, x: Tensor) -> Tensor:
    if x.sum().item() > 0:
        return x.sin() * x
    return x.cos()


def _noisy_layer(block: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: F.dropout(F.gelu(block.b(x)), 0.4).sin()


def _weight_past_its_counter(block: Any, x: Tensor) -> Tensor:
    block.gain.data.mul_(0.9).add_(0.1 * x.detach().mean(0))
    return x - block.gain.data


def _value_changed_past_the_counter(block: Any, x: Tensor) -> Tensor:
    y = x.sin()
    y.data.mul_(0.5)
    return y * x


MIDDLES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "plain": lambda block, x: x,
    "item": lambda block, x: x * min(1.0, x.detach().abs().max().item()),
    "tolist": lambda block, x: x * len(x[0].tolist()),
    "numpy": lambda block, x: x + torch.from_numpy(np.sin(x.detach().numpy())),
    "data-dependent": _conditional,
    "nonzero": lambda block, x: x.index_put((torch.nonzero(x[:, 0] > 0).flatten(),), x.new_zeros(())),
    "boolean index": lambda block, x: torch.where(x > 0, x, 0.0) + x[x > 0].mean(),
    "counter": _counter,
    "moving average": _moving_average,
    "replaced buffer": _replaced_buffer,
    "buffer written first": _buffer_written_first,
    "large buffer": _large_buffer,
    "weight written first": _weight_written_first,
    "weight past its counter": _weight_past_its_counter,
    "weight behind an unused result": lambda block, x: ((x * block.gain).sin(), x)[1],
    "gradient inside": _gradient_inside,
    "backward inside": _backward_of_detached,
    "func.grad": lambda block, x: x + torch.func.grad(lambda y: (y.tanh() ** 2).sum())(x),
    "func.vmap": lambda block, x: torch.func.vmap(lambda row: row.sin() * row.sum())(x),
    "func.jvp": lambda block, x: torch.func.jvp(lambda y: y.sin() * y, (x,), (torch.ones_like(x),))[1],
    "func.jacrev": lambda block, x: x + torch.func.vmap(torch.func.jacrev(lambda y: y.sin().sum()))(x),
    "func.functional_call": lambda block, x: torch.func.functional_call(
        block.a, {"weight": block.a.weight * 2, "bias": block.a.bias}, (x,)
    ),
    "checkpoint inside": lambda block, x: checkpoint(lambda y: y.sin() * y.cos(), x, use_reentrant=False),
    "reentrant checkpoint inside": lambda block, x: checkpoint(lambda y: y.sin() * y, x, use_reentrant=True),
    "region inside": lambda block, x: hc.checkpoint(_noisy_layer(block), x),
    "reentrant region inside": lambda block, x: hc.checkpoint(_noisy_layer(block), x, use_reentrant=True),
    "CheckpointFunction inside": lambda block, x: hc.CheckpointFunction.apply(_noisy_layer(block), 1, x, *block.b.parameters()),
    "compiled part": lambda block, x: torch.compile(lambda y: y.sin() * y, backend="eager")(x),
    "custom function": lambda block, x: Square.apply(x),
    "random operator": lambda block, x: noisy(x),
    "random operator by packet": lambda block, x: torch.ops.hvd_ckpt_odd.noisy(x),
    "operator with Python's noise": lambda block, x: python_noise(x),
    "operator with its own noise": lambda block, x: own_noise(x),
    "operator without formula": lambda block, x: x + without_formula(x.detach()),
    "mutating operator": lambda block, x: x * (lambda y: halve(y) or y)(x.detach().sin()),
    "mutating operator with a keyword": _scaled_by_keyword,
    "needs no gradient before": lambda block, x: torch.ones(x.shape).mul(2).div_(x.exp()).pow_(x.sigmoid()) * x,
    "in place by position": _in_place_by_position,
    "mask": _mask,
    "writes": _writes,
    "out": _out,
    "kernel": _kernel,
    "hooks": _hooks,
    "forked random state": _random_state,
    "python random": lambda block, x: x * random.random(),
    "numpy random": lambda block, x: x * float(np.random.rand()),
    "numpy normal": lambda block, x: x * float(np.random.randn()),
    "default dtype": _default_dtype,
    "autocast": _autocast,
    "renormalized": _renormalized,
    "saved-tensor hooks": _saved_hooks,
    "complex": _complex,
    "generator": _generator,
    "cache": _cache,
    "cached weight": _cached_weight,
    "past the counter": _value_changed_past_the_counter,
    "dropouts": lambda block, x: F.alpha_dropout(F.dropout(F.rrelu(x, training=True), 0.3), 0.2, True),
    "fractional pooling": lambda block, x: x + F.fractional_max_pool2d(x[None], 2, output_size=2).sum(),
    "gumbel": lambda block, x: x * F.gumbel_softmax(x, hard=True),
    "multinomial": lambda block, x: x[torch.multinomial(torch.ones(len(x)), len(x))],
    "einsum": lambda block, x: torch.einsum("ij,kj,kl->il", x, x.sin(), x),
    "lists": _lists,
    "sorting": lambda block, x: torch.cat([x.sort(1).values[:, :8], x.topk(8).values], 1),
    "empty": lambda block, x: torch.cat([x[:0], x, x[:0].exp()]) + x[:0].sum(),
    "int8": lambda block, x: x * (x.detach() * 10).to(torch.int8).bitwise_and(3).float(),
    "quantized": lambda block, x: x + torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.qint8).dequantize(),
    "float64": lambda block, x: (x.double().exp() / 3).float(),
    "no_grad part": lambda block, x: x + torch.no_grad()(lambda: block.b(x).sin())(),
    "enable_grad part": lambda block, x: torch.enable_grad()(lambda: block.b(x).sin())(),
    "inference part": lambda block, x: x + torch.inference_mode()(lambda: x.sin())().clone(),
    "set_": lambda block, x: x * torch.empty(0).set_(torch.ones(WIDTH)),
    "as_strided": lambda block, x: x.contiguous().as_strided((len(x), WIDTH), (WIDTH, 1)).sin() * x,
    "sparse": lambda block, x: torch.sparse.mm(torch.eye(len(x)).to_sparse(), x.sin()),
    "linalg": lambda block, x: x @ torch.linalg.qr(block.a.weight)[0],
    "unfold": lambda block, x: F.fold(F.unfold(x[None, None], 3, padding=1).sin(), x.shape, 3, padding=1)[0, 0],
    "in place on views": lambda block, x: (lambda y: y[:, 2:].mul_(2) is y or y.add_(1))(x.sin().clone()),
    "meta device": lambda block, x: x.sin() * len(torch.ones(len(x), device="meta").exp().cumsum(0)),
    "detached in place": lambda block, x: x * x.detach().clone().clamp_(0).sqrt_(),
}  # fmt: skip


# ---------------------------------------------------------------------------------------- modules


def _frozen(*names: str) -> nn.Module:
    block = Block(lambda block, x: x)
    for name, parameter in block.named_parameters():
        parameter.requires_grad_(bool(names) and name not in names)
    return block


def _packed(block: Any, x: Tensor) -> Tensor:
    packed = nn.utils.rnn.pack_padded_sequence(x.view(3, -1, WIDTH), [3, 2], enforce_sorted=False)
    out, _ = nn.utils.rnn.pad_packed_sequence(block.inner(packed)[0])
    return x + out.reshape(-1, WIDTH)


def _recur(block: Any, x: Tensor) -> Tensor:
    # One step: longer sequences round apart in passes without gradients.
    return x + block.inner(x[None])[0][0]


def _attend(block: Any, x: Tensor) -> Tensor:
    out, weights = block.inner(x[None], x[None], x[None])
    return x + out[0] + weights.sum()


def _embedded(**options: Any) -> nn.Module:
    """A block with a small table, in which ``max_norm`` makes changes."""
    table = nn.Embedding(8, WIDTH, **options)
    return Block(lambda block, x: x + block.b(block.table(torch.arange(len(x)) % 8)), table=table)


def _normalize(block: Any, x: Tensor) -> Tensor:
    """With running statistics, which PyTorch writes past their version counters."""
    return x + F.batch_norm(block.b(x), block.mean, block.var, training=True)


def _quantize(block: Any, x: Tensor) -> Tensor:
    nearest = torch.cdist(x.detach(), block.codes).argmin(1)
    chosen = block.codes[nearest].clone()
    with torch.no_grad():
        block.codes.index_add_(0, nearest, 0.1 * (x - chosen))
    return x * chosen


def _holding(middle: Callable[[Any, Tensor], Tensor], **tensors: Tensor) -> nn.Module:
    """A block with tensors that are attributes, and no buffers."""
    block = Block(middle)
    vars(block).update(tensors)
    return block


def _codes() -> dict[str, Tensor]:
    return {"codes": torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)}


def _fill(block: Any, x: Tensor) -> Tensor:
    if not block.held.numel():
        block.held.resize_(WIDTH).fill_(1.0)
    x = x * block.held.clone()
    block.held.mul_(0.9)
    return x


def _with_two_names() -> nn.Module:
    block = Block(lambda block, x: (block.scale.add_(1), x * block.same.clone())[1])
    block.register_buffer("same", block.scale)
    return block


def _operator(norm: Callable[..., Any]) -> nn.Module:
    """With running statistics, which an operator writes."""
    middle = lambda block, x: x + norm(block.b(x), None, None, block.mean, block.var, True, 0.1, 1e-5)[0]  # noqa: E731
    return Block(middle, mean=torch.zeros(WIDTH), var=torch.ones(WIDTH))


def _numpy_memory(block: Any, x: Tensor) -> Tensor:
    return x * torch.as_tensor(block.array).mul_(0.5).exp()


def _held_generator(block: Any, x: Tensor) -> Tensor:
    if isinstance(block.generator, torch.Generator):
        return x * torch.rand(x.shape, generator=block.generator)
    return x * block.generator.random()


def _remember(block: Any, x: Tensor) -> Tensor:
    """Keeps its last result as an attribute, and adds to a list."""
    y = x * (1 + len(block.seen))
    block.seen.append(1)
    block.last = y.detach()
    return y


def _hooked() -> nn.Module:
    block = Block(lambda block, x: x)
    block.a.register_forward_hook(lambda module, args, output: output * 2)
    block.b.register_forward_pre_hook(lambda module, args: (args[0].sin(),))
    block.b.register_full_backward_hook(lambda module, given, taken: None)
    return block


def _with_parameters(change: Callable[[nn.Linear], Any]) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        linear = nn.Linear(WIDTH, WIDTH)
        changed = change(linear)
        return Wrapped(changed if isinstance(changed, nn.Module) else linear)


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin() * 2


def _changing(change: Callable[[Any, Tensor], None]) -> nn.Module:
    """A block that changes its buffers in each forward pass by more than the values of their elements.

    Args:
        change: takes the block and the greatest absolute values of each column.
    """

    def middle(block: Any, x: Tensor) -> Tensor:
        change(block, x.detach().abs().amax(0))
        return x * sum(buffer.float().mean() for buffer in block.buffers() if buffer.numel())

    block = Block(middle, seen=torch.empty(0))
    block.register_buffer("last", torch.ones(1), persistent=False)
    return block


def _resize(block: Any, most: Tensor) -> None:
    if block.seen.numel() < WIDTH:
        block.seen.resize_(WIDTH).copy_(most)
    torch.maximum(block.seen, most, out=block.seen)


def _replace(block: Any, most: Tensor) -> None:
    block.seen = most if block.seen.numel() < WIDTH else torch.maximum(block.seen, most)


def _convert(block: Any, most: Tensor) -> None:
    block.seen, block.last.data = most.double(), block.last.data.half()


def _register(block: Any, most: Tensor) -> None:
    if not hasattr(block, "late"):
        block.register_buffer("late", most, persistent=False)
        block.register_module("inner", nn.Identity())
    block.late = 0.9 * block.late + 0.1 * most
    block.last.mul_(0.9)


def _remove(block: Any, most: Tensor) -> None:
    block.seen, block.last = None if block.last.mean() > 0.5 else most, block.last * 0.9


def _fake_quantize(**options: Any) -> nn.Module:
    quantization = torch.ao.quantization
    per_channel = quantization.default_per_channel_weight_fake_quant(**options)
    return Wrapped(nn.Sequential(nn.Linear(WIDTH, WIDTH), quantization.default_fake_quant(), per_channel))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "resized buffer": lambda: _changing(_resize),
    "replaced buffer": lambda: _changing(_replace),
    "buffer of another dtype": lambda: _changing(_convert),
    "late buffer": lambda: _changing(_register),
    "removed buffer": lambda: _changing(_remove),
    "fake quantization": _fake_quantize,
    "parametrized": lambda: _with_parameters(lambda one: parametrize.register_parametrization(one, "weight", Doubled())),
    "weight norm": lambda: _with_parameters(parametrizations.weight_norm),
    "orthogonal": lambda: _with_parameters(parametrizations.orthogonal),
    "spectral norm": lambda: _with_parameters(parametrizations.spectral_norm),
    "old weight norm": lambda: _with_parameters(weight_norm),
    "old spectral norm": lambda: _with_parameters(spectral_norm),
    "pruned": lambda: _with_parameters(lambda one: prune.random_unstructured(one, "weight", amount=0.3)),
    "LSTM": lambda: Block(_recur, inner=nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.3)),
    "GRU": lambda: Block(_recur, inner=nn.GRU(WIDTH, WIDTH, num_layers=2, dropout=0.3)),
    "RNN": lambda: Wrapped(nn.RNN(WIDTH, WIDTH, num_layers=2, dropout=0.3)),
    "packed sequence": lambda: Block(_packed, inner=nn.GRU(WIDTH, WIDTH)),
    "attention": lambda: Block(_attend, inner=nn.MultiheadAttention(WIDTH, 2, dropout=0.2)),
    "encoder layer": lambda: Wrapped(nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.1)),
    "max_norm": lambda: _embedded(max_norm=0.5),
    "sparse embedding": lambda: _embedded(sparse=True),
    "frequency embedding": lambda: _embedded(scale_grad_by_freq=True),
    "codebook": lambda: Block(_quantize, **_codes()),
    "codebook that is an attribute": lambda: _holding(_quantize, **_codes()),
    "resized attribute": lambda: _holding(_fill, held=torch.empty(0)),
    "buffer with two names": _with_two_names,
    "memory of NumPy": lambda: Block(_numpy_memory, array=np.ones(WIDTH, np.float32)),
    "operator of batch norm": lambda: _operator(torch.native_batch_norm),
    "overload of batch norm": lambda: _operator(torch.ops.aten.native_batch_norm.default),
    "hooks on modules": _hooked,
    "all frozen": lambda: _frozen(),
    "weight frozen": lambda: _frozen("a.weight"),
    "bias frozen": lambda: _frozen("b.bias"),
    "generator that it holds": lambda: Block(_held_generator, generator=torch.Generator().manual_seed(1)),
    "Python's generator": lambda: Block(_held_generator, generator=random.Random(1)),
    "NumPy's generator": lambda: Block(_held_generator, generator=np.random.default_rng(1)),
    "NumPy's old generator": lambda: Block(_held_generator, generator=np.random.RandomState(1)),
    "remembering": lambda: Block(_remember, seen=[], last=None),
    "running statistics": lambda: Block(_normalize, mean=torch.zeros(WIDTH), var=torch.ones(WIDTH)),
    "batch norm": lambda: Wrapped(nn.BatchNorm1d(WIDTH)),
    "instance norm": lambda: Wrapped(
        nn.Sequential(nn.Unflatten(1, (4, 4)), nn.InstanceNorm1d(4, track_running_stats=True), nn.Flatten())
    ),
    "RReLU": lambda: Wrapped(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.RReLU())),
    "in-place activations": lambda: Wrapped(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2, True), nn.ReLU(True))),
    "bilinear": lambda: Wrapped(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GLU(), nn.Linear(WIDTH // 2, WIDTH))),
    "checkpointed by its author": lambda: Block(
        lambda block, x: x + checkpoint(block.inner, x, use_reentrant=False),
        inner=nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)),
    ),
    "compiled": lambda: torch.compile(Wrapped(nn.Linear(WIDTH, WIDTH)), backend="eager"),
}  # fmt: skip


# ---------------------------------------------------------------------------------------- inputs and outputs


@dataclass
class State:
    x: Tensor
    steps: int = 0


Pair = namedtuple("Pair", ["x", "y"])


class Slots(dict[str, Tensor]):
    __slots__ = ()


class Ordered(OrderedDict[str, Tensor]):
    pass


class Named(list[Tensor]):
    name = "none"

    def called(self, name: str) -> Named:
        self.name = name
        return self


class Passing(nn.Module):
    """Takes and gives something that holds a tensor.

    Args:
        get, put: from it to the tensor, and from it and another tensor to the next one.
    """

    def __init__(self, get: Callable[[Any], Tensor], put: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.get, self.put = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), get, put

    def forward(self, state: Any) -> Any:
        x = self.get(state)
        return self.put(state, x + self.b(F.gelu(self.a(x))))


def _set_item(state: Any, x: Tensor) -> Any:
    state["x"] = x
    return state


def _of(kind: type, name: str = "given") -> Callable[[Any], Tensor]:
    """The tensor of a container, which is still of its own class."""

    def get(state: Any) -> Tensor:
        assert type(state) is kind and getattr(state, "name", name) == name
        return state[0] if kind is Named else state["x"]

    return get


def _set_attribute(state: Any, x: Tensor) -> Any:
    state.x = x
    state.steps = state.steps + 1
    return state


def _append(state: Any, x: Tensor) -> Any:
    state.append(x)
    return state


PASSED: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor], Callable[[Any, Tensor], Any]]] = {
    "dict changed in place": (lambda x: {"x": x}, lambda s: s["x"], _set_item),
    "slots changed in place": (lambda x: Slots(x=x), _of(Slots), _set_item),
    "ordered dict changed in place": (lambda x: Ordered(x=x), _of(Ordered), _set_item),
    "list with a name": (lambda x: Named([x]).called("given"), _of(Named), lambda s, x: Named([x]).called("given")),
    "new dict": (lambda x: {"x": x}, lambda s: s["x"], lambda s, x: {**s, "x": x}),
    "list changed in place": (lambda x: [x], lambda s: s[-1], _append),
    "tuple": (lambda x: (x, None), lambda s: s[0], lambda s, x: (x, None)),
    "named tuple": (lambda x: Pair(x, None), lambda s: s.x, lambda s, x: s._replace(x=x)),
    "data class": (State, lambda s: s.x, lambda s, x: State(x, s.steps + 1)),
    "data class changed in place": (State, lambda s: s.x, _set_attribute),
    "object changed in place": (lambda x: SimpleNamespace(x=x, steps=0), lambda s: s.x, _set_attribute),
    "nested": (lambda x: {"a": [State(x)]}, lambda s: s["a"][0].x, lambda s, x: {"a": [State(x)]}),
    "tensor changed in place": (lambda x: x, lambda s: s * 1, lambda s, x: s.add_(x)),
}  # fmt: skip


# ---------------------------------------------------------------------------------------- training


def seed() -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    GENERATOR.manual_seed(3)


def loss_of(output: Any) -> Tensor:
    return sum(tensor.float().square().sum() for tensor in reach(output).tensors if tensor.requires_grad)


def tensors_of(model: nn.Module) -> list[Tensor]:
    attributes = [value for module in model.modules() for value in vars(module).values()]
    generators = [one.get_state() for one in attributes if isinstance(one, torch.Generator)]
    own = [one.detach() for one in attributes if isinstance(one, Tensor)]
    return [*(one.detach() for one in model.parameters()), *model.buffers(), *own, *generators]


def step(
    model: nn.Module, sample: Any, run: Callable[[Any, Any], Any] = lambda model, sample: model(sample)
) -> list[Tensor | None]:
    """Losses, gradients and tensors of the model after two steps, and random numbers of all generators."""
    seed()
    losses = []
    for _ in range(2):
        loss = loss_of(run(model, copy.deepcopy(sample)))
        loss.backward()
        losses.append(loss.detach())
        for parameter in model.parameters():
            parameter.data.mul_(0.9)  # past its version counter, as some optimizers do
        for module in model.modules():
            if isinstance(module, Block):
                module.cached = None
    gradients = [one.grad for one in model.parameters()]
    numbers = [torch.rand(1), torch.tensor([random.random(), np.random.rand()])]
    return [*losses, *gradients, *tensors_of(model), *numbers]


def same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    if one.is_sparse:
        return same(one.coalesce().indices(), other.coalesce().indices()) and same(
            one.coalesce().values(), other.coalesce().values()
        )
    return torch.equal(one, other)


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    **{name: functools.partial(Block, middle) for name, middle in MIDDLES.items()},
    **{f"module: {name}": make for name, make in MODULES.items()},
}


def models() -> dict[str, tuple[Callable[[], nn.Sequential], Callable[[Tensor], Any]]]:
    """By name, what makes a chain of four odd blocks, modules after a plain one, and what makes its input of a tensor."""

    def chain(name: str, make: Callable[[], nn.Module]) -> nn.Sequential:
        first = [nn.Linear(WIDTH, WIDTH)] if name.startswith("module") else []
        return nn.Sequential(*first, *(make() for _ in range(4)))

    found: dict[str, Any] = {
        name: (functools.partial(chain, name, make), lambda x: x) for name, make in BLOCKS.items()
    }
    for name, (wrap, get, put) in PASSED.items():
        make = functools.partial(Passing, get, put)
        found[f"passed: {name}"] = functools.partial(chain, name, make), wrap
    return found
