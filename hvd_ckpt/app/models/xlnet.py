"""Hugging Face's XLNet with its language-model head, as a chain of blocks with two streams.

XLNet (Yang et al., 2019) predicts tokens in a random order. The content stream ``h`` sees a token itself. The query stream ``g``,
which only exists for the predicted tokens, sees the position of a token and not the token. Both streams flow through the chain as
a tuple. All layers share the masks and the relative positions.

Tensors are batch-first at the ends of the chain and (length, batch, ...) inside, as in ``transformers``. There is no memory of
earlier segments (``mems``).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import XLNetConfig, XLNetLMHeadModel

from hvd_ckpt.app.models.options import Interval, Probability, Size, check_heads, validated
from hvd_ckpt.parallel.pipeline.chain import WrappedChain


class EmbeddingsBlock(nn.Module):
    """Embeddings, from token numbers (batch, length) to the content stream (length, batch, width), or, with targets, to both."""

    def __init__(self, tokens: nn.Module, query: nn.Parameter, dropout: nn.Module) -> None:
        super().__init__()
        self.tokens = tokens
        self.query = query
        self.dropout = dropout

    def forward(self, tokens: Tensor, target_mapping: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        content: Tensor = self.dropout(self.tokens(tokens.transpose(0, 1).contiguous()))
        if target_mapping is None:
            return content
        return content, self.dropout(self.query.expand(target_mapping.shape[0], content.shape[1], -1))


class StreamsBlock(nn.Module):
    """One layer of the content stream (length, batch, width) and of the query stream (predicted, batch, width), if there is one."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(
        self,
        content: Tensor,
        query: Tensor | None = None,
        *,
        positions: Tensor,
        content_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        other_sentence: Tensor | None = None,
        target_mapping: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        content, query = self.layer(
            content, query, content_mask, query_mask, positions, other_sentence, target_mapping=target_mapping
        )
        return content if query is None else (content, query)


class HeadBlock(nn.Module):
    """The head, from the query or else the content stream to scores of each token (batch, predicted or length, vocabulary)."""

    def __init__(self, dropout: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.dropout = dropout
        self.head = head

    def forward(self, content: Tensor, query: Tensor | None = None) -> Tensor:
        hidden = self.dropout(content if query is None else query)
        return self.head(hidden.permute(1, 0, 2).contiguous())


class XLNetChain(WrappedChain):
    """A ``transformers.XLNetLMHeadModel`` as a chain: embeddings, layers of two streams, head.

    ``chain(tokens, ...)`` returns the same bits as ``model(tokens, ...).logits`` with the same keyword arguments. With dropout,
    random numbers are drawn in another order (those of the positions first).
    """

    def __init__(self, model: XLNetLMHeadModel, checkpoint_interval: int = 0) -> None:
        body = model.transformer
        blocks: OrderedDict[str, nn.Module] = OrderedDict(
            embeddings=EmbeddingsBlock(body.word_embedding, body.mask_emb, body.dropout)
        )
        for index, layer in enumerate(body.layer):
            blocks[f"layer{index}"] = StreamsBlock(layer)
        blocks["head"] = HeadBlock(body.dropout, model.lm_loss)
        super().__init__(model, blocks, checkpoint_interval)

    def prepare(
        self,
        tokens: Tensor,
        attention_mask: Tensor | None = None,
        perm_mask: Tensor | None = None,
        target_mapping: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Splits the arguments into the tokens and the keyword arguments that all layers share.

        Args:
            tokens: token numbers (batch, length).
            attention_mask: (batch, length); 0 hides a position.
            perm_mask: (batch, length, length); 1 hides the position of dimension 2 from that of dimension 1.
            target_mapping: (batch, predicted, length); 1 where a prediction (dimension 1) is for a position (dimension 2).
            token_type_ids: (batch, length); the number of the sentence.
        """
        body: Any = self.transformers_model.base_model
        batch, length = tokens.shape
        positions = body.relative_positional_encoding(length, length, bsz=batch, device=tokens.device)
        # Drawn once for all layers, as in transformers, and outside of any recomputation.
        shared = {"positions": body.dropout(positions)}
        query_mask = self._query_mask(length, attention_mask, perm_mask)
        if query_mask is not None:
            # A position of the content stream sees its own token; one of the query stream does not.
            itself = torch.eye(length, device=tokens.device, dtype=body.dtype)[:, :, None, None]
            shared["query_mask"] = query_mask
            shared["content_mask"] = ((query_mask - itself) > 0).to(body.dtype)
        if token_type_ids is not None:
            types = token_type_ids.transpose(0, 1)
            other = (types[:, None] != types[None, :]).long()
            shared["other_sentence"] = functional.one_hot(other, num_classes=2).to(body.dtype)
        if target_mapping is not None:
            shared["target_mapping"] = target_mapping.permute(1, 2, 0).contiguous().to(body.dtype)
        return (tokens,), shared

    def _query_mask(
        self, length: int, attention_mask: Tensor | None, perm_mask: Tensor | None
    ) -> Tensor | None:
        """A mask that is 1 where a position (dimension 0) does not see another one (1) in a batch (2); None if each sees all."""
        body: Any = self.transformers_model.base_model
        hidden: list[Tensor] = []
        if body.attn_type == "uni":
            hidden.append(body.create_mask(length, 0)[:, :, None])
        if attention_mask is not None:
            hidden.append(1.0 - attention_mask.transpose(0, 1).to(body.dtype)[None])
        if perm_mask is not None:
            hidden.append(perm_mask.permute(1, 2, 0).to(body.dtype))
        if not hidden:
            return None
        total: Any = sum(hidden)
        return (total > 0).to(body.dtype)[..., None]


@validated
def xlnet(
    *,
    vocabulary: Size = 32000,
    width: Size = 128,
    heads: Size = 4,
    layers: Size = 4,
    dropout: Probability = 0.1,
    checkpoint_interval: Interval = 0,
) -> XLNetChain:
    """A randomly initialized XLNet, small by default. XLNet-base has ``width=768, heads=12, layers=12``. Sequences have any length.

    Options are those of :mod:`hvd_ckpt.app.models.transformer`.

    Raises:
        ValueError: the sizes are invalid for a transformer.
    """
    check_heads(width, heads)
    config = XLNetConfig(
        vocab_size=vocabulary, d_model=width, n_layer=layers, n_head=heads, d_inner=4 * width, dropout=dropout
    )
    return XLNetChain(XLNetLMHeadModel(config).train(), checkpoint_interval)
