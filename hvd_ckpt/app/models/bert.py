"""Hugging Face's BERT and RoBERTa with their masked-language-model heads, as chains of blocks.

Both models (Devlin et al., 2018; Liu et al., 2019) have properties that make recomputation and data parallelism hard to combine.
The output weights of the head are the word embeddings of the first block (one parameter in two segments). Each layer has dropout,
and all layers share a mask.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import BertForMaskedLM, PreTrainedModel, RobertaForMaskedLM
from transformers.masking_utils import create_bidirectional_mask

from hvd_ckpt.app.models.options import Attention, Interval, Probability, Size, check_heads, validated
from hvd_ckpt.parallel.pipeline.chain import HeadBlock, LayerBlock, WrappedChain


class EmbeddingsBlock(nn.Module):
    """Embeddings, from token numbers (batch, length) to hidden states (batch, length, width)."""

    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings

    def forward(self, tokens: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        return self.embeddings(tokens, token_type_ids=token_type_ids)


class EncoderBlock(LayerBlock):
    """One encoder layer. Plan files contain the class name of a block."""


class BertChain(WrappedChain):
    """A ``transformers.BertForMaskedLM`` or ``RobertaForMaskedLM`` as a chain: embeddings, encoder layers, head.

    ``chain(tokens, attention_mask)`` returns the same bits as ``model(tokens, attention_mask).logits``.

    Raises:
        ValueError: the model is a decoder.
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
        """Takes token numbers, a mask (0 hides a position) and token types (which of two sentences), each (batch, length)."""
        mask = create_bidirectional_mask(
            self.transformers_model.config, self._like_hidden(tokens), attention_mask
        )
        return (tokens,), {"attention_mask": mask, "token_type_ids": token_type_ids}


@validated
def _masked_model(
    kind: type[PreTrainedModel],
    *,
    vocabulary: Size,
    length: Size = 128,
    width: Size = 128,
    heads: Size = 4,
    layers: Size = 4,
    dropout: Probability = 0.1,
    padding: int = 0,
    attention: Attention = "sdpa",
    checkpoint_interval: Interval = 0,
) -> BertChain:
    """A randomly initialized model, small by default. The base models have ``length=512, width=768, heads=12, layers=12``.

    Args:
        kind: class of the model.
        vocabulary: number of different tokens.
        length: the longest sequence, in tokens.
        width: number of features of a hidden state.
        heads: number of attention heads of a layer.
        layers: number of encoder layers.
        dropout: dropout probability of hidden states and attention.
        padding: the token whose embedding stays zero.
        attention: ``"sdpa"`` (fused) or ``"eager"``.
        checkpoint_interval: number of blocks in each recomputed segment; 0 recomputes nothing.

    Raises:
        ValueError: the sizes are invalid for a transformer.
    """
    check_heads(width, heads)
    special: dict[str, Any] = {"max_position_embeddings": length}
    if kind is RobertaForMaskedLM:
        # Positions start at ``padding + 1``, and padding tokens have the position ``padding``.
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
