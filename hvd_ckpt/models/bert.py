"""Hugging Face's BERT with its masked-language-model head, as a chain of blocks.

The layers are those of ``transformers`` itself, so weights, configurations and pretrained models of that library work
unchanged; only the loop over them is replaced. The attention mask is the same for every block and so is a keyword
argument shared by all of them rather than a second tensor that flows through the chain.

BERT also has what makes recomputation and data parallelism hard to combine: the head's output weights are the word
embeddings of the first block (one parameter used in two segments), and dropout in every layer.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM
from transformers.masking_utils import create_bidirectional_mask

__all__ = ["BertChain", "bert", "bert_config"]


class EmbeddingsBlock(nn.Module):
    """Token numbers (batch, length) to hidden states (batch, length, hidden)."""

    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings

    def forward(self, tokens: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        hidden: torch.Tensor = self.embeddings(tokens)
        return hidden


class EncoderBlock(nn.Module):
    """One encoder layer: hidden states in, hidden states out, (batch, length, hidden) both."""

    def __init__(self, layer: nn.Module, config: BertConfig) -> None:
        super().__init__()
        self.layer = layer
        self.config = config

    def forward(self, hidden: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        mask = create_bidirectional_mask(self.config, hidden, attention_mask)
        output: torch.Tensor = self.layer(hidden, mask)
        return output


class HeadBlock(nn.Module):
    """Hidden states to a score for every token of the vocabulary: (batch, length, vocabulary)."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        scores: torch.Tensor = self.head(hidden)
        return scores


class BertChain(nn.Sequential):
    """A ``transformers.BertForMaskedLM`` as a chain: embeddings, encoder layers, head.

    The blocks hold the modules of ``model`` themselves: training one trains the other. ``chain(tokens, attention_mask)``
    gives what ``model(tokens, attention_mask).logits`` gives, bit for bit.
    """

    def __init__(self, model: BertForMaskedLM) -> None:
        blocks: OrderedDict[str, nn.Module] = OrderedDict(embeddings=EmbeddingsBlock(model.bert.embeddings))
        for index, layer in enumerate(model.bert.encoder.layer):
            blocks[f"encoder{index}"] = EncoderBlock(layer, model.config)
        blocks["head"] = HeadBlock(model.cls)
        super().__init__(blocks)

    def forward(self, tokens: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Token numbers (batch, length) and mask (batch, length; 0 hides a position) to scores of every token."""
        hidden = tokens
        for block in self:
            hidden = block(hidden, attention_mask=attention_mask)
        return hidden


def bert_config(
    *,
    vocabulary: int = 30522,
    hidden: int = 128,
    layers: int = 4,
    heads: int = 4,
    length: int = 128,
    padding: int = 0,
    dropout: float = 0.1,
    attention: str = "sdpa",
) -> BertConfig:
    """A BERT configuration, small by default; BERT-base is ``hidden=768, layers=12, heads=12, length=512``.

    ``length`` is the longest sequence in tokens, ``padding`` the token whose embedding stays zero, ``dropout`` that of
    hidden states and attention alike, ``attention`` the implementation: ``"sdpa"`` (fused) or ``"eager"``.

    Raises:
        ValueError: for an attention implementation other than those, or heads that do not divide ``hidden``.
    """
    if attention not in ("sdpa", "eager"):
        raise ValueError(f"attention must be 'sdpa' or 'eager', got {attention!r}")
    if hidden % heads:
        raise ValueError(f"hidden must be a multiple of heads, got hidden={hidden} and heads={heads}")
    return BertConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * hidden,
        max_position_embeddings=length,
        pad_token_id=padding,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        attn_implementation=attention,  # type: ignore[call-arg]  # taken by the base class
    )


def bert(config: BertConfig | None = None) -> BertChain:
    """A randomly initialized BERT in training mode (no files are read, nothing is downloaded)."""
    return BertChain(BertForMaskedLM(config or bert_config())).train()
