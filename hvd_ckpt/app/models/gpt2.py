"""Hugging Face's GPT-2 with its language-model head, as a chain of blocks (Radford et al., 2019)."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.masking_utils import create_causal_mask

from hvd_ckpt.app.models.options import Attention, Interval, Probability, Size, check_heads, validated
from hvd_ckpt.parallel.pipeline.chain import HeadBlock, LayerBlock, WrappedChain


class EmbeddingsBlock(nn.Module):
    """Embedding of tokens and positions, from token numbers (batch, length) to hidden states (batch, length, width)."""

    def __init__(self, tokens: nn.Module, positions: nn.Module, dropout: nn.Module) -> None:
        super().__init__()
        self.tokens = tokens
        self.positions = positions
        self.dropout = dropout

    def forward(self, tokens: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        hidden = self.tokens(tokens) + self.positions(
            torch.arange(tokens.shape[1], device=tokens.device)[None]
        )
        if token_type_ids is not None:  # types have the embeddings of tokens
            hidden = hidden + self.tokens(token_type_ids)
        return self.dropout(hidden)


class DecoderBlock(LayerBlock):
    """One decoder layer. Plan files contain the class name of a block."""


class GPT2Chain(WrappedChain):
    """A ``transformers.GPT2LMHeadModel`` as a chain: embeddings, decoder layers, norm and head.

    ``chain(tokens, attention_mask)`` returns the same bits as ``model(tokens, attention_mask=attention_mask).logits``.

    Raises:
        ValueError: the model has cross-attention.
    """

    def __init__(self, model: GPT2LMHeadModel, checkpoint_interval: int = 0) -> None:
        if model.config.add_cross_attention:
            raise ValueError(
                "The configuration says add_cross_attention=True, and only language models are supported: set it to False."
            )
        body = model.transformer
        blocks: OrderedDict[str, nn.Module] = OrderedDict(
            embeddings=EmbeddingsBlock(body.wte, body.wpe, body.drop)
        )
        for index, layer in enumerate(body.h):
            blocks[f"decoder{index}"] = DecoderBlock(layer)
        blocks["head"] = HeadBlock(nn.Sequential(OrderedDict(norm=body.ln_f, scores=model.lm_head)))
        super().__init__(model, blocks, checkpoint_interval)

    def prepare(
        self, tokens: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Takes token numbers, a mask (0 hides a position) and token types, each (batch, length)."""
        mask = create_causal_mask(
            self.transformers_model.config, self._like_hidden(tokens), attention_mask, past_key_values=None
        )
        return (tokens,), {"attention_mask": mask, "token_type_ids": token_type_ids}


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
) -> GPT2Chain:
    """A randomly initialized GPT-2, small by default. GPT-2 small has ``length=1024, width=768, heads=12, layers=12``.

    Options are those of :mod:`hvd_ckpt.app.models.bert`. ``dropout`` applies to embeddings, attention and the outputs of a layer.

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
    return GPT2Chain(GPT2LMHeadModel(config).train(), checkpoint_interval)
