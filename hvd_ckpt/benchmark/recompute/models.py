"""A GPT and a word-level LSTM language model as plain chains, small enough to read in one go.

Every peer takes an ``nn.Sequential`` whose blocks pass one tensor on, and so these models are nothing else. The expensive
call of a GPT block, the attention itself, is a module of its own, because that is where a careful user of a peer would mark
what must not be recomputed.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn
from torch.nn import functional

__all__ = ["gpt", "lstm_language_model"]


class Embedding(nn.Module):
    """Token numbers (batch, length) to hidden states (batch, length, width), with learned positions."""

    def __init__(self, vocabulary: int, length: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        return hidden


class CausalAttention(nn.Module):
    """Attention of each position to itself and those before: (batch, heads, length, width / heads) in and out."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


class SelfAttention(nn.Module):
    """Projections around :class:`CausalAttention`: hidden states in, hidden states out, (batch, length, width) both."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(width, 3 * width)
        self.attend = CausalAttention()
        self.output = nn.Linear(width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, width = hidden.shape
        parts = self.project(hidden).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        attended = self.attend(query, key, value)
        result: torch.Tensor = self.output(attended.transpose(1, 2).reshape(batch, length, width))
        return result


class GPTBlock(nn.Module):
    """Attention and perceptron, each behind a layer norm and beside a residual connection (Radford et al., 2019)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads)
        self.perceptron_norm = nn.LayerNorm(width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden))
        result: torch.Tensor = hidden + self.perceptron(self.perceptron_norm(hidden))
        return result


def gpt(*, vocabulary: int, length: int, width: int, heads: int, layers: int) -> nn.Sequential:
    """A GPT without dropout: embedding, ``layers`` blocks, head; tokens (batch, length) to scores of every token."""
    chain: OrderedDict[str, nn.Module] = OrderedDict(embedding=Embedding(vocabulary, length, width))
    for layer in range(layers):
        chain[f"layer{layer}"] = GPTBlock(width, heads)
    chain["head"] = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False))
    return nn.Sequential(chain)


class Recurrence(nn.Module):
    """One LSTM layer over the whole sequence, without its final state: (batch, length, width) in and out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.lstm(hidden)[0]
        return output


def lstm_language_model(*, vocabulary: int, width: int, layers: int, dropout: float) -> nn.Sequential:
    """Embedding with dropout, LSTM layers with dropout between them (Zaremba et al., 2014), decoder."""
    chain: OrderedDict[str, nn.Module] = OrderedDict(
        embedding=nn.Sequential(nn.Embedding(vocabulary, width), nn.Dropout(dropout))
    )
    for layer in range(layers):
        chain[f"layer{layer}"] = nn.Sequential(
            OrderedDict(recurrence=Recurrence(width), dropout=nn.Dropout(dropout))
        )
    chain["decoder"] = nn.Linear(width, vocabulary)
    return nn.Sequential(chain)
