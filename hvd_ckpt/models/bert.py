"""Hugging Face's BERT and RoBERTa with their masked-language-model heads, as chains of blocks.

Both (Devlin et al., 2018; Liu et al., 2019) have what makes recomputation and data parallelism hard to combine: the head's output
weights are the word embeddings of the first block (one parameter used in two segments), there is dropout in every layer, and a mask
that is the same for all of them.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM, RobertaConfig, RobertaForMaskedLM
from transformers.masking_utils import create_bidirectional_mask

from hvd_ckpt.models.sizes import check_sizes
from hvd_ckpt.models.wrapped import HeadBlock, WrappedChain

__all__ = ["BertChain", "bert", "roberta"]


class EmbeddingsBlock(nn.Module):
    """Token numbers (batch, length) to hidden states (batch, length, width)."""

    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings

    def forward(self, tokens: torch.Tensor, token_type_ids: torch.Tensor | None = None) -> torch.Tensor:
        hidden: torch.Tensor = self.embeddings(tokens, token_type_ids=token_type_ids)
        return hidden


class EncoderBlock(nn.Module):
    """One encoder layer: hidden states in, hidden states out, (batch, length, width) both."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """``attention_mask`` is true, or 0, where a position (dimension 2) sees another (3): what the chain makes of its own."""
        output: torch.Tensor = self.layer(hidden, attention_mask)
        return output


class BertChain(WrappedChain):
    """A ``transformers.BertForMaskedLM`` or ``RobertaForMaskedLM`` as a chain: embeddings, encoder layers, head.

    ``chain(tokens, attention_mask)`` gives what ``model(tokens, attention_mask).logits`` gives, bit for bit.

    Raises:
        ValueError: for a model that is a decoder.
    """

    def __init__(self, model: BertForMaskedLM | RobertaForMaskedLM, checkpoint_interval: int = 0) -> None:
        if model.config.is_decoder:
            raise ValueError(
                "The configuration says is_decoder=True, and only encoders are supported: set it to False."
            )
        body: Any = model.base_model
        blocks: OrderedDict[str, nn.Module] = OrderedDict(embeddings=EmbeddingsBlock(body.embeddings))
        for index, layer in enumerate(body.encoder.layer):
            blocks[f"encoder{index}"] = EncoderBlock(layer)
        blocks["head"] = HeadBlock(model.cls if isinstance(model, BertForMaskedLM) else model.lm_head)
        super().__init__(model, blocks, checkpoint_interval)

    def prepare(
        self,
        tokens: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Token numbers, mask (0 hides a position) and token types (which of two sentences), (batch, length) each."""
        mask = create_bidirectional_mask(
            self.transformers_model.config, self._like_hidden(tokens), attention_mask
        )
        return (tokens,), {"attention_mask": mask, "token_type_ids": token_type_ids}


def bert(
    *,
    vocabulary: int = 30522,
    length: int = 128,
    width: int = 128,
    heads: int = 4,
    layers: int = 4,
    dropout: float = 0.1,
    padding: int = 0,
    attention: str = "sdpa",
    checkpoint_interval: int = 0,
) -> BertChain:
    """A BERT, small by default; BERT-base is ``length=512, width=768, heads=12, layers=12``.

    Args:
        vocabulary: different tokens.
        length: the longest sequence, in tokens.
        width: features of a hidden state.
        heads: attention heads of a layer.
        layers: encoder layers.
        dropout: of hidden states and attention alike.
        padding: the token whose embedding stays zero.
        attention: ``"sdpa"`` (fused) or ``"eager"``.
        checkpoint_interval: blocks in each recomputed segment; 0 keeps everything.

    Raises:
        ValueError: for sizes that fit no transformer.
    """
    config = BertConfig(
        **_sizes(vocabulary, length, width, heads, layers, dropout, padding, attention),
        max_position_embeddings=length,
    )
    return BertChain(BertForMaskedLM(config).train(), checkpoint_interval)


def roberta(
    *,
    vocabulary: int = 50265,
    length: int = 128,
    width: int = 128,
    heads: int = 4,
    layers: int = 4,
    dropout: float = 0.1,
    padding: int = 1,
    attention: str = "sdpa",
    checkpoint_interval: int = 0,
) -> BertChain:
    """A RoBERTa, small by default; RoBERTa-base is ``length=512, width=768, heads=12, layers=12``.

    Options are those of :func:`bert`. RoBERTa numbers positions from ``padding + 1`` on and gives padding the position ``padding``,
    so its table of positions is that much longer than a sequence.

    Raises:
        ValueError: for sizes that fit no transformer.
    """
    config = RobertaConfig(
        **_sizes(vocabulary, length, width, heads, layers, dropout, padding, attention),
        max_position_embeddings=length + padding + 1,
        type_vocab_size=1,
        layer_norm_eps=1e-5,
    )
    return BertChain(RobertaForMaskedLM(config).train(), checkpoint_interval)


def _sizes(
    vocabulary: int,
    length: int,
    width: int,
    heads: int,
    layers: int,
    dropout: float,
    padding: int,
    attention: str,
) -> dict[str, Any]:
    """The checked settings that the configurations of both share."""
    check_sizes(
        vocabulary=vocabulary,
        length=length,
        width=width,
        heads=heads,
        layers=layers,
        dropout=dropout,
        attention=attention,
    )
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
        "pad_token_id": padding,
        "attn_implementation": attention,
    }
