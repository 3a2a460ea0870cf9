"""Tensor parallelism: whatever runs between split layers is as in the whole model, or is refused. Arguments: tensor, cases."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from tensor_models import assert_like_whole, optimizer_of, run
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5Model,
)
from ways import plainly, reentrant

import hvd_ckpt as hc

WIDTH, HEADS, BATCH, LENGTH, STEPS = 12, 4, 3, 8, 2


class Squared(torch.autograd.Function):
    """A norm with a weight, as an autograd function, which no torch function mode sees."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return 2 * gradient * x * weight, (gradient * x * x).flatten(0, -2).sum(0)


class Fused(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width))

    def forward(self, x: Tensor) -> Tensor:
        return Squared.apply(x, self.weight)


class Adapted(nn.Module):
    """A layer with a low-rank adapter (Hu et al., "LoRA", 2021)."""

    def __init__(self, inputs: int, outputs: int, dropout: float = 0.2) -> None:
        super().__init__()
        self.base, self.dropout = nn.Linear(inputs, outputs), nn.Dropout(dropout)
        self.A, self.B = nn.Linear(inputs, 3, bias=False), nn.Linear(3, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.B(self.A(self.dropout(x)))


class Attention(nn.Module):
    """Attention with what models have in it: norms of queries and keys, and numbers and gates of each head."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = HEADS
        self.q, self.k, self.v = (Adapted(WIDTH, 2 * HEADS) for _ in range(3))
        self.o = Adapted(2 * HEADS, WIDTH)
        self.q_norm, self.k_norm = nn.LayerNorm(2), Fused(2)
        self.scale, self.bias = nn.Parameter(torch.rand(HEADS, 1, 1)), nn.Parameter(torch.rand(HEADS))
        self.temperature = nn.Parameter(torch.tensor(1.3))
        self.gate, self.distances = nn.Linear(WIDTH, HEADS), nn.Embedding(LENGTH, HEADS)
        self.register_buffer("slopes", torch.rand(HEADS, 1, 1), persistent=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        other = x if memory is None else memory
        q, k, v = (
            f(y).unflatten(-1, (self.heads, 2)).transpose(1, 2)
            for f, y in ((self.q, x), (self.k, other), (self.v, other))
        )
        scores = self.q_norm(q) @ self.k_norm(k).transpose(-2, -1) * self.temperature * self.scale
        distance = (torch.arange(x.shape[1])[:, None] - torch.arange(other.shape[1])[None]).abs()
        scores = scores + self.distances(distance % LENGTH).permute(2, 0, 1) - self.slopes * distance
        values = (self.dropout(scores.softmax(-1)) @ v).transpose(1, 2)
        values = values * (self.bias[:, None] + self.gate(x).sigmoid()[..., None])
        return self.o(values.flatten(2))


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = Adapted(WIDTH, 16), nn.PReLU(), Adapted(16, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(self.act(self.up(x))))


class Block(nn.Module):
    def __init__(self, norm: nn.Module | None = None, cross: bool = False, **options: Any) -> None:
        super().__init__()
        self.norm, self.norm2 = norm or nn.LayerNorm(WIDTH), Fused(WIDTH)
        self.attention, self.mlp = Attention(**options), Perceptron()
        self.cross = Attention(**options) if cross else None
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        x = x + self.drop(self.attention(self.norm(x)))
        if self.cross is not None:
            x = x + self.cross(x, memory=memory)
        return x + self.mlp(self.norm2(x))


HOW = {"none": plainly, "non-reentrant": hc.checkpoint, "reentrant": reentrant}


class Model(nn.Module):
    """Blocks between a layer and a norm, which may also be that of a block."""

    def __init__(self, how: str = "none", shared: bool = False, cross: bool = False, **options: Any) -> None:
        super().__init__()
        self.first, self.norm, self.how = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), how
        self.layers = nn.ModuleList(Block(self.norm if shared else None, cross, **options) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = memory = self.first(x)
        for layer in self.layers:
            given = (x, memory) if layer.cross is not None else (x,)
            x = HOW[self.how](layer, *given)
        return self.norm(x)


def adapted(*names: str, kind: str) -> dict[str, str]:
    layers = ("base", "B") if kind == "column" else ("base", "A")
    return {f"*.{name}.{layer}": kind for name in names for layer in layers}


RECIPE = {
    "layers.*": "block", "*.attention": "heads:heads", "*.gate": "column", "*.distances": "column", "*.scale": "slice:0",
    "*.slopes": "slice:0", "*.attention.bias": "slice:0",
    **adapted("q", "k", "v", "up", kind="column"), **adapted("o", "down", kind="row"),
}  # fmt: skip
# Sequence parallelism, and how blocks are recomputed.
WAYS = ((False, "none"), (True, "none"), (False, "non-reentrant"), (True, "reentrant"))
CROSS = {**RECIPE, "*.cross": "heads:heads", "*.cross.bias": "slice:0"}


def train(model: nn.Module, *inputs: Tensor, shard: str = "none", clip: bool = False) -> Any:
    optimizer = optimizer_of(model, shard=shard)
    torch.manual_seed(1 + hc.rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        result = model(*inputs)
        getattr(result, "last_hidden_state", getattr(result, "logits", result)).square().mean().backward()
        if clip:
            hc.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return optimizer


def assert_equal(
    model: nn.Module, recipe: dict[str, str], *inputs: Tensor, sequence: bool = False, **options: Any
) -> nn.Module:
    model = model.double().train()
    whole, part = copy.deepcopy(model), hc.tensor_parallel(model, recipe, sequence=sequence)
    for name in ("eval", "train"):
        getattr(whole, name)(), getattr(part, name)()
        with torch.no_grad():
            torch.manual_seed(4)
            expected = whole(*inputs)
            torch.manual_seed(4)
            found = part(*inputs)
        if isinstance(expected, Tensor):
            assert torch.allclose(found, expected, 1e-9, 1e-11), f"{name}, without gradients"
    for other in [module for module in whole.modules() if isinstance(module, Model)]:
        other.how = "none"
    train(whole, *inputs, clip=options.get("clip", False))
    optimizer = train(part, *inputs, **options)
    with optimizer.gathered_parameters():
        assert_like_whole(part, whole, "trained", 1e-9)
    return part


def x() -> Tensor:
    return torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(7)).double()


def made(frozen: bool = False, **options: Any) -> nn.Module:
    torch.manual_seed(3)
    model = Model(**options)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or name.endswith(("A.weight", "B.weight", "q_norm.weight")))
    return model


# Options of the model, its recipe, and how it is split and trained.
KINDS: dict[str, list[tuple[dict[str, Any], dict[str, str], dict[str, Any]]]] = {
    "inside": [  # parameters inside attention and perceptrons, whichever module holds them
        *(({"how": how}, RECIPE, {"sequence": sequence}) for sequence, how in WAYS),
        *(({"dropout": 0.3}, RECIPE, {"sequence": sequence, "clip": True}) for sequence in (False, True)),
    ],
    "sharded": [
        ({}, RECIPE, {"shard": "gradients"}),
        ({}, RECIPE, {"shard": "parameters", "sequence": True}),
    ],
    "shared": [  # a norm of the blocks is also behind the last one
        ({"shared": True}, RECIPE, {"sequence": sequence}) for sequence in (False, True)
    ],
    "memory": [  # all positions attend to a second input of the blocks
        ({"cross": True, "how": how}, CROSS, {"sequence": sequence}) for sequence, how in WAYS
    ],
    "frozen": [  # adapters alone are trained, as is usual
        ({"frozen": True}, RECIPE, {"sequence": sequence}) for sequence in (False, True)
    ],
}


def check(kind: str) -> None:
    for options, recipe, how in KINDS[kind]:
        assert_equal(made(**options), recipe, x(), **how)


def planned() -> None:
    model, whole = (hc.tensor_parallel(made().double(), RECIPE, sequence=True) for _ in range(2))
    hc.plan(model, x(), loss=lambda y: y.square().mean(), budget="60%").apply(model)
    train(model, x()), train(whole, x())
    assert all(map(torch.equal, model.parameters(), whole.parameters())), "planned"


class Calls(nn.Module):
    def __init__(self, order: tuple[int, ...], count: int) -> None:
        super().__init__()
        self.order = order
        for number in range(count):
            setattr(self, f"layer{number}", Block())

    def forward(self, x: Tensor) -> Tensor:
        for number in self.order:
            x = getattr(self, f"layer{number}")(x)
        return x.sin()


def order() -> None:
    """Blocks are called in the order of the model's modules, or refused."""
    recipe = {**RECIPE, "layer*": "block"}
    del recipe["layers.*"]
    assert_equal(Calls((0, 1, 2), 3), {"layer2": "block", "layer1": "block", **recipe}, x(), sequence=True)
    assert_equal(Calls((0, 0), 1), recipe, x(), sequence=True)
    for wrong, count in (((0, 1, 0), 2), ((1, 0), 2), ((0, 0, 1), 2), ((0,), 2), ((0, 1, 1), 2)):
        model = hc.tensor_parallel(Calls(wrong, count).double(), recipe, sequence=True)
        with pytest.raises(ValueError, match="must be called once, from 'layer0' to 'layer1'"):
            model(x())
    inner = hc.tensor_parallel(Calls((0, 1), 2).double(), recipe, sequence=True)
    inner(x()).sum().backward()
    for model in (copy.deepcopy(inner), inner):
        assert model(x()).shape == x().shape


TOKENS = torch.randint(0, 64, (BATCH, LENGTH), generator=torch.Generator().manual_seed(3))
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 8, "max_position_embeddings": 32, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA = {
    "model.embed_tokens": "vocabulary", "lm_head": "vocabulary", "*.self_attn": "heads", "*.q_proj": "column",
    "*.k_proj": "column", "*.v_proj": "column", "*.o_proj": "row", "*.gate_proj": "column", "*.up_proj": "column",
    "*.down_proj": "row", "model.layers.*": "block",
}  # fmt: skip
T5 = {
    "shared": "vocabulary", "*.embed_tokens": "vocabulary", "*.SelfAttention": "heads:n_heads,inner_dim",
    "*.EncDecAttention": "heads:n_heads,inner_dim",
    **{f"*.{name}": "column" for name in "qkv"}, "*.o": "row", "*.wi": "column", "*.wo": "row",
    "*.relative_attention_bias": "column",
}  # fmt: skip


def transformers() -> None:
    """Norms of queries and keys, and biases of distances that layers hand on."""
    for sequence in (False, True):
        torch.manual_seed(3)
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES))
        if sequence:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        assert_equal(model, LLAMA, TOKENS, sequence=sequence)
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
        for layer in model.model.layers:
            layer.self_attn.q_proj = Adapted(32, 32)
            layer.self_attn.q_proj.base.bias = None
        recipe = {**LLAMA, **adapted("q_proj", kind="column")}
        del recipe["*.q_proj"]
        assert_equal(model, recipe, TOKENS, sequence=sequence)
        split = hc.tensor_parallel(LlamaForCausalLM(LlamaConfig(**SIZES)).eval(), LLAMA, sequence=sequence)
        split(TOKENS, past_key_values=(cache := DynamicCache(config=split.config)))
        assert cache.get_seq_length() == LENGTH, "the verification has filled a cache"
    config = T5Config(vocab_size=64, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4, dropout_rate=0.1)
    assert_equal(T5Model(config), T5, TOKENS, torch.ones_like(TOKENS), TOKENS)


class Casting(nn.Module):
    """Computes in float32 alone. What its second normalization averages is zero but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.norms = nn.Sequential(*(nn.BatchNorm1d(WIDTH, affine=False) for _ in range(2)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.up.weight.dtype is not torch.float32:
            raise TypeError("weights must be float32")
        x = x + self.down(self.up(functional.dropout(x, 0.2, self.training)).tanh())
        normed: Tensor = self.norms(x.transpose(1, 2)).transpose(1, 2)
        return normed, normed.mean((0, 1))


def rounding() -> None:
    """Results and buffers that are zero but for rounding do not make a split wrong."""
    torch.manual_seed(3)
    whole = Casting()
    part = hc.tensor_parallel(copy.deepcopy(whole), {"up": "column", "down": "row"})
    for model in (whole, part):
        torch.manual_seed(1)
        model(x().float())
    for found, expected in zip(part.buffers(), whole.buffers()):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def refused() -> None:
    model = made()
    model.layers[0].attention.register_buffer("kept", torch.rand(HEADS))
    for recipe, words in (
        ({"layers.0.attention.kept": "slice:0"}, "persistent=False"),
        ({"layers.0.attention.scale": "slice:1"}, "has 1 elements along dimension 1, which"),
        ({"layers.0.attention.bias": "slice:1"}, "has 1 dimensions"),
        ({"layers.0.attention.other": "slice:0"}, "no parameter or buffer"),
    ):
        with pytest.raises(ValueError, match=words):
            hc.tensor_parallel(model, recipe)


if __name__ == "__main__":
    cases = (planned, order, transformers, rounding, refused)
    kinds = {kind: functools.partial(check, kind) for kind in KINDS}
    run(kinds | {case.__name__: case for case in cases})
