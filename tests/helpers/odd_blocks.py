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
from call_names import names_of_calls
from selective import some
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint
from ways import Run, each, plainly

import hvd_ckpt as hc
from hvd_ckpt.planning.policy import CheckpointPolicy, apply_policy
from hvd_ckpt.recompute.reach import reach

WIDTH = 16
GENERATOR = torch.Generator()
Middle = Callable[[Any, Tensor], Any]  # takes a block and its hidden tensor


class Block(nn.Module):
    """A feed-forward block with a function of the hidden tensor in its middle.

    Args:
        middle: from the block and the hidden tensor to another one.
        parts: modules, buffers and other attributes that the function needs.
    """

    def __init__(self, middle: Middle, **parts: Any) -> None:
        super().__init__()
        self.a, self.b, self.middle = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), middle
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("large", torch.ones((200, 200) if middle is MIDDLES["large buffer"] else ()))
        self.register_buffer("crop", torch.tensor(4))
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.steps, self.order = 0, np.arange(WIDTH)
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

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.a, self.inner = nn.Linear(WIDTH, WIDTH), inner[0] if len(inner) == 1 else nn.Sequential(*inner)

    def forward(self, x: Tensor) -> Tensor:
        result = self.inner(F.gelu(self.a(x)))
        return x + torch.tanh(result[0] if isinstance(result, tuple) else result)


def functions_of(space: type) -> dict[str, Middle]:
    """What a class defines, by names with spaces."""
    return {name.replace("_", " "): one for name, one in vars(space).items() if not name.startswith("__")}


# ---------------------------------------------------------------------------------------- functions in the middle


def operator(name: str, function: Callable[..., Tensor], schema: str = "(Tensor x) -> Tensor") -> Any:
    """A custom operator that saves its result for its backward pass."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(output)
        ctx.others = [None] * (len(inputs) - 1)

    made = torch.library.custom_op(f"hvd_ckpt_odd::{name}", function, mutates_args=(), schema=schema)
    made.register_autograd(
        lambda ctx, gradient: (gradient * ctx.saved_tensors[0], *ctx.others), setup_context=setup_context
    )
    return made


noisy = operator("noisy", lambda x: x * (torch.rand_like(x) > 0.5))
python_noise = operator("python_noise", lambda x: x * random.random() + float(np.random.rand()))
own_noise = operator("own_noise", lambda x: x * torch.rand(x.shape, generator=GENERATOR))
without_formula = torch.library.custom_op(
    "hvd_ckpt_odd::plain", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor"
)


@torch.library.custom_op("hvd_ckpt_odd::halve", mutates_args=("x",))
def halve(x: Tensor) -> None:
    x.mul_(0.5)


@torch.library.custom_op("hvd_ckpt_odd::scale_keyword", mutates_args=("out_scaled",))
def scale_keyword(x: Tensor, out_scaled: Tensor) -> None:
    out_scaled.mul_(x)


library = torch.library.Library("hvd_ckpt_odd_decomposed", "FRAGMENT")
library.define("draws(Tensor x) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
library.impl("draws", lambda x: x.sin() * random.random(), "CompositeImplicitAutograd")


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x, (x * 2).sin())
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, y = ctx.saved_tensors
        return gradient * x * 2 + y * 0


def _noisy_layer(block: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: F.dropout(F.gelu(block.b(x)), 0.4).sin()


class Middles:
    """Each function is the middle of a block; their names are those of the blocks."""

    def counter(block: Any, x: Tensor) -> Tensor:
        block.seen = [*getattr(block, "seen", ()), x.detach()]
        return x * (1 + len(block.seen))

    def writes(block: Any, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        y[:, ::2] = x[:, ::2]
        y[:, 1::2] += x[:, 1::2] * 2
        y.index_put_((torch.tensor([0, 1]),), x[2:4].sin())
        y = y.scatter(1, torch.zeros(len(x), 1, dtype=torch.long), x[:, :1])
        y[:, 3].mul_(2)
        return y

    def out(block: Any, x: Tensor) -> Tensor:
        constant = torch.empty(WIDTH)
        torch.add(torch.ones(WIDTH), 1, out=constant)
        y = x.sin() + constant
        torch.mul(constant, 3, out=constant)
        return y.exp() * constant.clone()

    def in_place_by_position(block: Any, x: Tensor) -> Tensor:
        mask = x.detach().clone()
        y = x.sin() + mask
        F.relu(mask, True)
        z = y.exp() + mask
        F.hardtanh(mask, -1.0, 1.0, True)
        return y.cos() * mask + z.sin()

    def mutating_operator_with_a_keyword(block: Any, x: Tensor) -> Tensor:
        mask = (x.detach() * 2).sigmoid()
        y = x.cos() + mask
        scale_keyword(torch.ones(WIDTH) * 3, mask)
        return y.sin() * mask

    def autocast(block: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = block.b(x)
            with torch.autocast("cpu", enabled=False):
                y = block.a(y.float())
        return y.float()

    def saved_tensor_hooks(block: Any, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return (x.sin() * x).cos()

    def complex(block: Any, x: Tensor) -> Tensor:
        """A conjugate, and a negated view."""
        f = torch.fft.rfft(x.sin())
        powers = (f * f.conj()).real.sqrt() * (f.imag * f.conj().imag).exp()
        return torch.fft.irfft(powers * torch.view_as_complex(torch.ones(9, 2)), n=WIDTH)

    def lists(block: Any, x: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        parts = [one * other for one, other in zip((left + 1).unbind(), right.exp().split(1))]
        best, where = torch.cat(parts).sort(-1)
        values = torch.where(best > 0, best, left.gather(1, where)).index_select(1, where[0, :2])
        return x * values.repeat(1, WIDTH // 2)

    def cached_weight(block: Any, x: Tensor) -> Tensor:
        if block.cached is None:
            block.cached = torch.tanh(block.b.weight)
        return x @ block.cached

    def function_that_counts(block: Any, x: Tensor) -> Tensor:
        def distance(one: Tensor, other: Tensor) -> Tensor:
            block.crop += 1
            return (one - other).square().sum(-1)

        loss = F.triplet_margin_with_distance_loss(x, x.sin(), x.cos(), distance_function=distance)
        return x.exp() * loss


MIDDLES: dict[str, Middle] = {
    **functions_of(Middles),
    # Of two values in a tuple, the second one is computed, or written, after the first.
    "moving average": lambda block, x: (
        x / block.scale.clone(), block.scale.mul_(0.9).add_(0.1 * x.detach().abs().mean())
    )[0],
    "replaced buffer": lambda block, x: (x * block.scale, setattr(block, "scale", block.scale / 2 + 0.1))[0],
    "buffer written first": lambda block, x: x * block.scale.mul_(0.9),
    "large buffer": lambda block, x: (x * block.large[0, 0].clone(), block.large.mul_(0.9))[0],
    "weight written first": lambda block, x: x * torch.no_grad()(block.gain.mul_)(0.9).detach().clone(),
    "weight past its counter": lambda block, x: (
        block.gain.data.mul_(0.9).add_(0.1 * x.detach().mean(0)), x - block.gain.data
    )[1],
    "past the counter": lambda block, x: (lambda y: (y.data.mul_(0.5), y * x)[1])(x.sin()),
    "cache": lambda block, x: x * vars(block).setdefault("table", torch.arange(float(WIDTH))),
    "array that changes": lambda block, x: (
        x[:, block.order].exp(), np.random.default_rng(1).shuffle(block.order)
    )[0],
    "slice of tensors": lambda block, x: (
        x[:, : block.crop].sum(1, keepdim=True).exp() * x, block.crop.add_(4).remainder_(WIDTH - 1)
    )[0],
    "hooks": lambda block, x: (lambda y: (y.register_hook(lambda slope: slope * 0.5), y.clone())[1])(x * 2),
    "forked random state": lambda block, x: torch.random.fork_rng()(
        lambda: (torch.manual_seed(7), x * torch.rand_like(x))[1]
    )(),
    "kernel": lambda block, x: sdpa_kernel(SDPBackend.MATH)(
        lambda: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.1)[0]
    )(),
    "gradient inside": lambda block, x: x
    + torch.autograd.grad((x.tanh() ** 2).sum(), x, create_graph=True)[0],
    "plain": lambda block, x: x,
    "item": lambda block, x: x * min(1.0, x.detach().abs().max().item()),
    "tolist": lambda block, x: x * len(x[0].tolist()),
    "numpy": lambda block, x: x + torch.from_numpy(np.sin(x.detach().numpy())),
    "data-dependent": lambda block, x: x.sin() * x if x.sum().item() > 0 else x.cos(),
    "nonzero": lambda block, x: x.index_put((torch.nonzero(x[:, 0] > 0).flatten(),), x.new_zeros(())),
    "boolean index": lambda block, x: torch.where(x > 0, x, 0.0) + x[x > 0].mean(),
    "weight behind an unused result": lambda block, x: ((x * block.gain).sin(), x)[1],
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
    "CheckpointFunction inside": lambda block, x: hc.CheckpointFunction.apply(
        _noisy_layer(block), 1, x, *block.b.parameters()
    ),
    "compiled part": lambda block, x: torch.compile(lambda y: y.sin() * y, backend="eager")(x),
    "custom function": lambda block, x: Square.apply(x),
    "random operator": lambda block, x: noisy(x),
    "random operator by packet": lambda block, x: torch.ops.hvd_ckpt_odd.noisy(x),
    "operator with Python's noise": lambda block, x: python_noise(x),
    "operator with its own noise": lambda block, x: own_noise(x),
    "operator that decomposes": lambda block, x: torch.ops.hvd_ckpt_odd_decomposed.draws(x).exp() * 2,
    "operator without formula": lambda block, x: x + without_formula(x.detach()),
    "mutating operator": lambda block, x: x * (lambda y: halve(y) or y)(x.detach().sin()),
    "needs no gradient before": lambda block, x: torch.ones(x.shape).mul(2).div_(x.exp()).pow_(x.sigmoid()) * x,
    "python random": lambda block, x: x * random.random(),
    "numpy random": lambda block, x: x * float(np.random.rand()),
    "numpy normal": lambda block, x: x * float(np.random.randn()),
    "renormalized": lambda block, x: x
    + F.embedding(torch.arange(len(x)) % WIDTH, block.a.weight.detach().clone(), max_norm=0.5),
    "generator": lambda block, x: x * torch.rand(x.shape, generator=torch.Generator().manual_seed(block.steps)),
    "dropouts": lambda block, x: F.alpha_dropout(F.dropout(F.rrelu(x, training=True), 0.3), 0.2, True),
    "fractional pooling": lambda block, x: x + F.fractional_max_pool2d(x[None], 2, output_size=2).sum(),
    "bernoulli": lambda block, x: torch.bernoulli(x.sigmoid()) * x,
    "normal": lambda block, x: torch.normal(x.sigmoid(), x.sigmoid()) * x,
    "gumbel": lambda block, x: x * F.gumbel_softmax(x, hard=True),
    "multinomial": lambda block, x: x[torch.multinomial(torch.ones(len(x)), len(x))],
    "einsum": lambda block, x: torch.einsum("ij,kj,kl->il", x, x.sin(), x),
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


class Changes:
    """What blocks do to their buffers in each forward pass, beyond the values of elements, given the largest of each column."""

    def buffer_of_another_dtype(block: Any, most: Tensor) -> None:
        block.seen, block.last.data = most.double(), block.last.data.half()

    def late_buffer(block: Any, most: Tensor) -> None:
        if not hasattr(block, "late"):
            block.register_buffer("late", most, persistent=False)
            block.register_module("inner", nn.Identity())
        block.late = 0.9 * block.late + 0.1 * most
        block.last.mul_(0.9)

    def removed_buffer(block: Any, most: Tensor) -> None:
        block.seen, block.last = None if block.last.mean() > 0.5 else most, block.last * 0.9


def _changing(change: Middle) -> nn.Module:
    def middle(block: Any, x: Tensor) -> Tensor:
        change(block, x.detach().abs().amax(0))
        return x * sum(buffer.float().mean() for buffer in block.buffers() if buffer.numel())

    block = Block(middle, seen=torch.empty(0))
    block.register_buffer("last", torch.ones(1), persistent=False)
    return block


class Using:
    """Middles of blocks that use further parts of them."""

    def packed(block: Any, x: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x.view(3, -1, WIDTH), [3, 2], enforce_sorted=False)
        out, _ = nn.utils.rnn.pad_packed_sequence(block.inner(packed)[0])
        return x + out.reshape(-1, WIDTH)

    def recurrent(block: Any, x: Tensor) -> Tensor:
        # One step: longer sequences round apart in passes without gradients.
        return x + block.inner(x[None])[0][0]

    def codes(block: Any, x: Tensor) -> Tensor:
        nearest = torch.cdist(x.detach(), block.codes).argmin(1)
        chosen = block.codes[nearest].clone()
        with torch.no_grad():
            block.codes.index_add_(0, nearest, 0.1 * (x - chosen))
        return x * chosen

    def filled(block: Any, x: Tensor) -> Tensor:
        if not block.held.numel():
            block.held.resize_(WIDTH).fill_(1.0)
        x = x * block.held.clone()
        block.held.mul_(0.9)
        return x

    def edges(block: Any, x: Tensor) -> Tensor:
        return torch.sparse.mm(block.edges, x.sin())

    def generator(block: Any, x: Tensor) -> Tensor:
        if isinstance(block.generator, torch.Generator):
            return x * torch.rand(x.shape, generator=block.generator)
        return x * block.generator.random()


def _holding(middle: Middle, **tensors: Tensor) -> nn.Module:
    """A block with tensors that are attributes, and no buffers."""
    block = Block(middle)
    vars(block).update(tensors)
    return block


def _embedded(**options: Any) -> nn.Module:
    """A block with a small table, in which ``max_norm`` makes changes."""
    table = nn.Embedding(8, WIDTH, **options)
    return Block(lambda block, x: x + block.b(block.table(torch.arange(len(x)) % 8)), table=table)


def _with_two_names() -> nn.Module:
    block = Block(lambda block, x: (block.scale.add_(1), x * block.same.clone())[1])
    block.register_buffer("same", block.scale)
    return block


def _statistics(norm: Callable[[Tensor, Tensor, Tensor], Tensor]) -> nn.Module:
    """With running statistics, which PyTorch writes past their version counters."""
    middle = lambda block, x: x + norm(block.b(x), block.mean, block.var)  # noqa: E731
    return Block(middle, mean=torch.zeros(WIDTH), var=torch.ones(WIDTH))


def _operator(norm: Callable[..., Any]) -> nn.Module:
    """Which an operator writes."""
    return _statistics(lambda x, mean, var: norm(x, None, None, mean, var, True, 0.1, 1e-5)[0])


def _with_parameters(change: Callable[[nn.Linear], Any]) -> nn.Module:
    linear = nn.Linear(WIDTH, WIDTH)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        changed = change(linear)
    return Wrapped(changed if isinstance(changed, nn.Module) else linear)


def _linear(width: int = WIDTH) -> nn.Linear:
    return nn.Linear(width, WIDTH)


quantization = torch.ao.quantization
MODULES: dict[str, Callable[[], nn.Module]] = {
    **{name: functools.partial(_changing, change) for name, change in functions_of(Changes).items()},
    "resized buffer": lambda: Block(Using.filled, held=torch.empty(0)),
    "resized attribute": lambda: _holding(Using.filled, held=torch.empty(0)),
    "codebook": lambda: Block(Using.codes, codes=torch.linspace(-1, 1, 64).view(4, WIDTH)),
    "codebook that is an attribute": lambda: _holding(Using.codes, codes=torch.linspace(-1, 1, 64).view(4, WIDTH)),
    "sparse buffer": lambda: Block(Using.edges, edges=torch.eye(6).to_sparse()),
    "sparse buffer in rows": lambda: Block(Using.edges, edges=torch.eye(6).to_sparse_csr()),
    "fake quantization": lambda: Wrapped(
        _linear(), quantization.default_fake_quant(), quantization.default_per_channel_weight_fake_quant()
    ),
    "weight norm": lambda: _with_parameters(parametrizations.weight_norm),
    "orthogonal": lambda: _with_parameters(parametrizations.orthogonal),
    "spectral norm": lambda: _with_parameters(parametrizations.spectral_norm),
    "old weight norm": lambda: _with_parameters(weight_norm),
    "old spectral norm": lambda: _with_parameters(spectral_norm),
    "pruned": lambda: _with_parameters(lambda one: prune.random_unstructured(one, "weight", amount=0.3)),
    "LSTM": lambda: Block(Using.recurrent, inner=nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.3)),
    "GRU": lambda: Block(Using.recurrent, inner=nn.GRU(WIDTH, WIDTH, num_layers=2, dropout=0.3)),
    "RNN": lambda: Wrapped(nn.RNN(WIDTH, WIDTH, num_layers=2, dropout=0.3)),
    "packed sequence": lambda: Block(Using.packed, inner=nn.GRU(WIDTH, WIDTH)),
    "encoder layer": lambda: Wrapped(nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.1)),
    "max_norm": lambda: _embedded(max_norm=0.5),
    "sparse embedding": lambda: _embedded(sparse=True),
    "frequency embedding": lambda: _embedded(scale_grad_by_freq=True),
    "buffer with two names": _with_two_names,
    "memory of NumPy": lambda: Block(
        lambda block, x: x * torch.as_tensor(block.array).mul_(0.5).exp(), array=np.ones(WIDTH, np.float32)
    ),
    "running statistics": lambda: _statistics(functools.partial(F.batch_norm, training=True)),
    "operator of batch norm": lambda: _operator(torch.native_batch_norm),
    "overload of batch norm": lambda: _operator(torch.ops.aten.native_batch_norm.default),
    "generator that it holds": lambda: Block(Using.generator, generator=torch.Generator().manual_seed(1)),
    "Python's generator": lambda: Block(Using.generator, generator=random.Random(1)),
    "NumPy's generator": lambda: Block(Using.generator, generator=np.random.default_rng(1)),
    "NumPy's old generator": lambda: Block(Using.generator, generator=np.random.RandomState(1)),
    "batch norm": lambda: Wrapped(nn.BatchNorm1d(WIDTH)),
    "instance norm": lambda: Wrapped(
        nn.Unflatten(1, (4, 4)), nn.InstanceNorm1d(4, track_running_stats=True), nn.Flatten()
    ),
    "RReLU": lambda: Wrapped(_linear(), nn.RReLU()),
    "in-place activations": lambda: Wrapped(_linear(), nn.Dropout(0.2, True), nn.ReLU(True)),
    "bilinear": lambda: Wrapped(_linear(), nn.GLU(), _linear(WIDTH // 2)),
    "checkpointed by its author": lambda: Block(
        lambda block, x: x + checkpoint(block.inner, x, use_reentrant=False),
        inner=nn.Sequential(_linear(), nn.BatchNorm1d(WIDTH)),
    ),
    "compiled": lambda: torch.compile(Wrapped(_linear()), backend="eager"),
}  # fmt: skip


# ---------------------------------------------------------------------------------------- inputs and outputs


@dataclass
class State:
    x: Tensor
    steps: int = 0


Pair = namedtuple("Pair", ["x", "y"])
Slots = type("Slots", (dict,), {"__slots__": ()})
Ordered = type("Ordered", (OrderedDict,), {})
Named = type("Named", (list,), {"name": "none"})


def _named(x: Tensor) -> Any:
    made = Named([x])
    made.name = "given"
    return made


class Passing(nn.Module):
    """Takes and gives something that holds a tensor, and that is still of the class that ``wrap`` gives.

    Args:
        wrap, get, put: from a tensor to it, back, and from it and another tensor to the next one.
    """

    def __init__(self, wrap: Callable[[Tensor], Any], get: Callable[[Any], Tensor], put: Middle) -> None:
        super().__init__()
        self.a, self.b, self.get, self.put = _linear(), _linear(), get, put
        self.kind, self.name = type(wrap(torch.empty(0))), getattr(wrap(torch.empty(0)), "name", None)

    def forward(self, state: Any) -> Any:
        assert type(state) is self.kind and getattr(state, "name", None) == self.name
        x = self.get(state)
        return self.put(state, x + self.b(F.gelu(self.a(x))))


_UPDATED: Middle = lambda s, x: s.update(x=x) or s  # noqa: E731
_CHANGED: Middle = lambda s, x: vars(s).update(x=x, steps=s.steps + 1) or s  # noqa: E731
PASSED: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor], Middle]] = {
    "dict changed in place": (lambda x: {"x": x}, lambda s: s["x"], _UPDATED),
    "slots changed in place": (lambda x: Slots(x=x), lambda s: s["x"], _UPDATED),
    "ordered dict changed in place": (lambda x: Ordered(x=x), lambda s: s["x"], _UPDATED),
    "list with a name": (_named, lambda s: s[0], lambda s, x: _named(x)),
    "new dict": (lambda x: {"x": x}, lambda s: s["x"], lambda s, x: {**s, "x": x}),
    "list changed in place": (lambda x: [x], lambda s: s[-1], lambda s, x: s.append(x) or s),
    "tuple": (lambda x: (x, None), lambda s: s[0], lambda s, x: (x, None)),
    "named tuple": (lambda x: Pair(x, None), lambda s: s.x, lambda s, x: s._replace(x=x)),
    "data class": (State, lambda s: s.x, lambda s, x: State(x, s.steps + 1)),
    "data class changed in place": (State, lambda s: s.x, _CHANGED),
    "object changed in place": (lambda x: SimpleNamespace(x=x, steps=0), lambda s: s.x, _CHANGED),
    "nested": (lambda x: {"a": [State(x)]}, lambda s: s["a"][0].x, lambda s, x: {"a": [State(x)]}),
    "tensor changed in place": (lambda x: x, lambda s: s * 1, lambda s, x: s.add_(x)),
}


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
    buffers = map(_dense, model.buffers())
    return [*(one.detach() for one in model.parameters()), *buffers, *own, *generators]


def _dense(one: Tensor | None) -> Tensor | None:
    return one if one is None or one.layout is torch.strided else one.to_dense()


def step(
    model: nn.Module,
    sample: Any,
    run: Run = plainly,
    backward: Callable[[Tensor], Any] = Tensor.backward,
    steps: int = 2,
) -> list[Tensor | None]:
    """Losses, gradients and tensors of the model after some steps, and random numbers of all generators."""
    seed()
    losses = []
    for _ in range(steps):
        loss = loss_of(run(model, copy.deepcopy(sample)))
        backward(loss)
        losses.append(loss.detach())
        for parameter in model.parameters():
            parameter.data.mul_(0.9)  # past its version counter, as some optimizers do
        for module in model.modules():
            if isinstance(module, Block):
                module.cached = None
    gradients = [one.grad for one in model.parameters()]
    numbers = [torch.rand(1), torch.tensor([random.random(), np.random.rand()])]
    return [*losses, *map(_dense, gradients), *tensors_of(model), *numbers]


def under_policies(seed: int, around: Run = plainly) -> Run:
    """A chain whose blocks drop some results, within ``around``."""

    def run(model: nn.Sequential, x: Tensor) -> Any:
        state = GENERATOR.get_state()
        for block in model:
            apply_policy(block, CheckpointPolicy("some", some(names_of_calls(block, x.detach()), seed)))
        GENERATOR.set_state(state)
        return each(around)(model, x)

    return run


POLICIES = {f"policy {seed}": under_policies(seed) for seed in range(4)}


def same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    **{name: functools.partial(Block, middle) for name, middle in MIDDLES.items()},
    **{f"module: {name}": make for name, make in MODULES.items()},
}


def models() -> dict[str, tuple[Callable[[], nn.Sequential], Callable[[Tensor], Any]]]:
    """By name, what makes a chain of four odd blocks, modules after a plain one, and what makes its input of a tensor."""

    def chain(name: str, make: Callable[[], nn.Module]) -> nn.Sequential:
        first = [_linear()] if name.startswith("module") else []
        return nn.Sequential(*first, *(make() for _ in range(4)))

    makers = {name: (make, lambda x: x) for name, make in BLOCKS.items()}
    makers |= {
        f"passed: {name}": (functools.partial(Passing, *made), made[0]) for name, made in PASSED.items()
    }
    return {name: (functools.partial(chain, name, make), wrap) for name, (make, wrap) in makers.items()}
