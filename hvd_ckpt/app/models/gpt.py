"""GPT-lite: a GPT with only the code that its training needs, which is short enough to read at once.

It is a decoder with a norm in front of each half of a block, and with learned positions (Radford et al., "Language models are
unsupervised multitask learners", 2019). Its default size is GPT-3 Small (Brown et al., "Language models are few-shot learners",
2020, table 2.1). The attention, the expensive call of a block, is a module of its own, so that it can be excluded from
recomputation.
"""

from __future__ import annotations

import math
from collections import OrderedDict

import torch
from torch import nn
from torch.nn import functional

from hvd_ckpt.app.models.options import Interval, Probability, Size, check_heads, validated
from hvd_ckpt.parallel.pipeline.chain import Chain

STANDARD_DEVIATION = 0.02  # of initial weights, as in the published code of GPT-2


class Embedding(nn.Module):
    """Embedding of tokens and positions, from token numbers (batch, length) to hidden states (batch, length, width)."""

    def __init__(self, vocabulary: int, length: int, width: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(STANDARD_DEVIATION * torch.randn(length, width))
        self.dropout = _dropout(dropout)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length, longest = tokens.shape[1], len(self.positions)
        if length > longest:
            raise ValueError(
                f"A sequence has {length} tokens, and this model was built for length={longest}."
            )
        return self.dropout(self.tokens(tokens) + self.positions[:length])


class CausalAttention(nn.Module):
    """Attention of each position to itself and earlier ones, from and to (batch, heads, length, width / heads)."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        dropout = self.dropout if self.training else 0.0
        return functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)


class SelfAttention(nn.Module):
    """Projections around :class:`CausalAttention`, from hidden states to hidden states, both (batch, length, width)."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.head_width = heads, width // heads
        self.project = nn.Linear(width, 3 * width)
        self.attend = CausalAttention(dropout)
        self.output = nn.Linear(width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, _ = hidden.shape
        # The rows of the projection: all heads of the query, then of the key, then of the value. Parts of a
        # tensor-parallel layer cut each of the three.
        parts = self.project(hidden).view(batch, length, 3, self.heads, self.head_width)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        attended = self.attend(query, key, value)
        return self.output(attended.transpose(1, 2).reshape(batch, length, -1))


class GPTBlock(nn.Module):
    """Attention and perceptron, each with a layer norm in front and with a residual connection."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads, dropout)
        self.perceptron_norm = nn.LayerNorm(width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = _dropout(dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden)))
        return hidden + self.dropout(self.perceptron(self.perceptron_norm(hidden)))


@validated
def gpt(
    *,
    vocabulary: Size = 50257,
    length: Size = 2048,
    width: Size = 768,
    heads: Size = 12,
    layers: Size = 12,
    dropout: Probability = 0.0,
    tied: bool = True,
    checkpoint_interval: Interval = 0,
) -> Chain:
    """GPT-lite as a chain, from token numbers (batch, length) to scores of each token (batch, length, vocabulary).

    Args:
        vocabulary: number of different tokens.
        length: the longest sequence, in tokens.
        width: number of features of a hidden state.
        heads: number of attention heads of a layer.
        layers: number of decoder layers.
        dropout: dropout probability of embeddings, attention and the outputs of a layer.
        tied: whether the weights of the head are the token embeddings, as in GPT-2 and GPT-3.
        checkpoint_interval: number of blocks in each recomputed segment; 0 recomputes nothing.

    Weights are initialized as in GPT-2: normal with a standard deviation of 0.02. For projections whose output is added to the
    hidden states, it is divided by the square root of the number of residual connections. Biases are zero.

    Raises:
        ValueError: the width is not a multiple of heads, another size is below 1, or the dropout is outside [0, 1).
    """
    check_heads(width, heads)
    embedding = Embedding(vocabulary, length, width, dropout)
    head = nn.Linear(width, vocabulary, bias=False)
    chain: OrderedDict[str, nn.Module] = OrderedDict(embedding=embedding)
    for layer in range(layers):
        chain[f"layer{layer}"] = GPTBlock(width, heads, dropout)
    chain["head"] = nn.Sequential(nn.LayerNorm(width), head)
    if tied:
        head.weight = embedding.tokens.weight
    model = Chain(chain, checkpoint_interval=checkpoint_interval)
    _initialize(model, layers)
    return model


def _initialize(model: nn.Module, layers: int) -> None:
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=STANDARD_DEVIATION)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    for module in model.modules():
        if isinstance(module, GPTBlock):
            for weight in (module.attention.output.weight, module.perceptron.get_parameter("2.weight")):
                nn.init.normal_(weight, std=STANDARD_DEVIATION / math.sqrt(2 * layers))


def _dropout(probability: float) -> nn.Module:
    # A dropout that drops nothing would be one more call in each plan.
    return nn.Dropout(probability) if probability else nn.Identity()
