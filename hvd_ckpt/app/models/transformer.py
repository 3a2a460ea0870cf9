"""Hugging Face's BERT, RoBERTa and GPT-2 with their language-model heads, as chains of blocks.

The models (Devlin et al., 2018; Liu et al., 2019; Radford et al., 2019) have properties that make recomputation and data
parallelism hard to combine. The output weights of the head are the word embeddings of the first block (one parameter in two
segments). Each layer has dropout, and all layers share a mask.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertForMaskedLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel, RobertaForMaskedLM
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask

from hvd_ckpt.app.models.options import Attention, Interval, Probability, Size, check_heads, validated
from hvd_ckpt.parallel.pipeline.chain import HeadBlock, LayerBlock, WrappedChain


class EncoderEmbeddingsBlock(nn.Module):
    """Embeddings, from token numbers (batch, length) to hidden states (batch, length, width)."""

    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings

    def forward(self, tokens: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        return self.embeddings(tokens, token_type_ids=token_type_ids)


class EmbeddingsBlock(nn.Module):
    """Embeddings of GPT-2, whose model has no module of them; shapes as in :class:`EncoderEmbeddingsBlock`."""

    def __init__(self, tokens: nn.Module, positions: nn.Module, dropout: nn.Module) -> None:
        super().__init__()
        self.tokens = tokens
        self.positions = positions
        self.dropout = dropout

    def forward(self, tokens: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        numbers = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.tokens(tokens) + self.positions(numbers[None])
        if token_type_ids is not None:  # types have the embeddings of tokens
            hidden = hidden + self.tokens(token_type_ids)
        return self.dropout(hidden)


class TransformerChain(WrappedChain):
    """A ``BertForMaskedLM``, ``RobertaForMaskedLM`` or ``GPT2LMHeadModel`` as a chain: embeddings, layers, head.

    ``chain(tokens, attention_mask)`` returns the same bits as ``model(tokens, attention_mask=attention_mask).logits``.

    Raises:
        ValueError: the model is a decoder with the layers of an encoder, or has cross-attention, or is a RoBERTa without a token
            for padding.
    """

    def __init__(self, model: PreTrainedModel, checkpoint_interval: int = 0) -> None:
        body: Any = model.base_model
        if isinstance(model, GPT2LMHeadModel):
            self._check(model, "add_cross_attention", "language models")
            embeddings: nn.Module = EmbeddingsBlock(body.wte, body.wpe, body.drop)
            layers, name = body.h, "decoder"
            head: Any = nn.Sequential(OrderedDict(norm=body.ln_f, scores=model.lm_head))
        else:
            self._check(model, "is_decoder", "encoders")
            embeddings = EncoderEmbeddingsBlock(body.embeddings)
            if isinstance(model, RobertaForMaskedLM) and model.config.pad_token_id is None:
                raise ValueError(
                    "The configuration has no pad_token_id, behind which RoBERTa's positions begin."
                )
            layers, name = body.encoder.layer, "encoder"
            head = model.cls if isinstance(model, BertForMaskedLM) else model.lm_head
        blocks: OrderedDict[str, nn.Module] = OrderedDict(embeddings=embeddings)
        for index, layer in enumerate(layers):
            blocks[f"{name}{index}"] = LayerBlock(layer)
        blocks["head"] = HeadBlock(head)
        super().__init__(model, blocks, checkpoint_interval)

    @staticmethod
    def _check(model: PreTrainedModel, name: str, supported: str) -> None:
        if getattr(model.config, name):
            raise ValueError(
                f"The configuration says {name}=True, and only {supported} are supported: set it to False."
            )

    def prepare(
        self, tokens: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Takes token numbers, a mask (0 hides a position) and token types (which of two sentences), each (batch, length)."""
        config, hidden = self.transformers_model.config, self._like_hidden(tokens)
        if isinstance(self.transformers_model, GPT2LMHeadModel):
            mask = create_causal_mask(config, hidden, attention_mask, past_key_values=None)
        else:
            mask = create_bidirectional_mask(config, hidden, attention_mask)
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
) -> TransformerChain:
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
    return TransformerChain(kind(config).train(), checkpoint_interval)


bert = partial(_masked_model, BertForMaskedLM, vocabulary=30522)
"""A BERT: :func:`_masked_model` with the published vocabulary."""

roberta = partial(_masked_model, RobertaForMaskedLM, vocabulary=50265, padding=1)
"""A RoBERTa: :func:`_masked_model` with the published vocabulary and padding."""


@validated
def gpt2(
    *,
    vocabulary: Size = 50257,
    length: Size = 128,
    width: Size = 128,
    heads: Size = 4,
    layers: Size = 4,
    dropout: Probability = 0.1,
    attention: Attention = "sdpa",
    checkpoint_interval: Interval = 0,
) -> TransformerChain:
    """A randomly initialized GPT-2, small by default. GPT-2 small has ``length=1024, width=768, heads=12, layers=12``.

    Options are those of :func:`_masked_model`. ``dropout`` applies to embeddings, attention and the outputs of a layer.

    Raises:
        ValueError: the sizes are invalid for a transformer.
    """
    check_heads(width, heads)
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=length,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        resid_pdrop=dropout,
        bos_token_id=None,  # the tokens of the published vocabulary may not be in this one
        eos_token_id=None,
        use_cache=False,
        attn_implementation=attention,  # type: ignore[call-arg]  # the base class takes it
    )
    return TransformerChain(GPT2LMHeadModel(config).train(), checkpoint_interval)
