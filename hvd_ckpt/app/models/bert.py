"""Hugging Face's BERT and RoBERTa with their masked-language-model heads, as chains of blocks.

Both (Devlin et al., 2018; Liu et al., 2019) have what makes recomputation and data parallelism hard to combine: the head's output
weights are the word embeddings of the first block (one parameter used in two segments), there is dropout in every layer, and a mask
that is the same for all of them.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import BertForMaskedLM, PreTrainedModel, RobertaForMaskedLM
from transformers.masking_utils import create_bidirectional_mask

from hvd_ckpt.app.models.catalog import check_sizes
from hvd_ckpt.pipeline.chain import HeadBlock, LayerBlock, WrappedChain


class EmbeddingsBlock(nn.Module):
    """Token numbers (batch, length) to hidden states (batch, length, width)."""

    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings

    def forward(self, tokens: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        hidden: Tensor = self.embeddings(tokens, token_type_ids=token_type_ids)
        return hidden


class EncoderBlock(LayerBlock):
    """One encoder layer; plan files name blocks by their classes."""


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
        self, tokens: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Token numbers, mask (0 hides a position) and token types (which of two sentences), (batch, length) each."""
        mask = create_bidirectional_mask(
            self.transformers_model.config, self._like_hidden(tokens), attention_mask
        )
        return (tokens,), {"attention_mask": mask, "token_type_ids": token_type_ids}


def _masked_model(
    kind: type[PreTrainedModel],
    *,
    vocabulary: int,
    length: int = 128,
    width: int = 128,
    heads: int = 4,
    layers: int = 4,
    dropout: float = 0.1,
    padding: int = 0,
    attention: str = "sdpa",
    checkpoint_interval: int = 0,
) -> BertChain:
    """A randomly initialized model, small by default; the base models are ``length=512, width=768, heads=12, layers=12``.

    Args:
        kind: its class.
        vocabulary: different tokens.
        length: the longest sequence, in tokens.
        width: features of a hidden state.
        heads: attention heads of a layer.
        layers: encoder layers.
        dropout: of hidden states and attention alike.
        padding: the token whose embedding stays zero.
        attention: ``"sdpa"`` (fused) or ``"eager"``.
        checkpoint_interval: blocks in each recomputed segment; 0 recomputes nothing.

    Raises:
        ValueError: for sizes that fit no transformer.
    """
    check_sizes(vocabulary, width, heads, layers, dropout, length, attention)
    special: dict[str, Any] = {"max_position_embeddings": length}
    if kind is RobertaForMaskedLM:
        # Positions are numbered from ``padding + 1`` on, and padding has the position ``padding``.
        special["max_position_embeddings"] += padding + 1
        special |= {"type_vocab_size": 1, "layer_norm_eps": 1e-5}
    make: Any = kind.config_class
    config = make(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        pad_token_id=padding,
        attn_implementation=attention,
        **special,
    )
    return BertChain(kind(config).train(), checkpoint_interval)


bert = partial(_masked_model, BertForMaskedLM, vocabulary=30522)
"""A BERT: :func:`_masked_model` with the published vocabulary."""

roberta = partial(_masked_model, RobertaForMaskedLM, vocabulary=50265, padding=1)
"""A RoBERTa: :func:`_masked_model` with the published vocabulary and padding."""
