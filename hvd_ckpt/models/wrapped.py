"""Models of Hugging Face's ``transformers`` as chains of blocks.

The blocks hold the modules of the model themselves, so its weights, configuration and file format stay what they are; only the
loop over the layers is replaced. What that loop derives of masks is derived in :meth:`~hvd_ckpt.models.chain.Chain.prepare`.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn
from transformers import PreTrainedModel

from hvd_ckpt.models.chain import Chain

__all__ = ["HeadBlock", "WrappedChain"]


class WrappedChain(Chain):
    """A model of ``transformers`` as a chain; training one trains the other.

    Args:
        model: the model.
        blocks: names and blocks, made of the model's own modules.
        checkpoint_interval: as in :class:`~hvd_ckpt.models.chain.Chain`.
    """

    def __init__(
        self, model: PreTrainedModel, blocks: OrderedDict[str, nn.Module], checkpoint_interval: int = 0
    ) -> None:
        super().__init__(blocks, checkpoint_interval=checkpoint_interval)
        self.training = model.training
        # Not as a child: its modules are in the blocks, and would be in the state_dict twice.
        self.__dict__["_wrapped"] = model

    @property
    def transformers_model(self) -> PreTrainedModel:
        """The model itself, with the weights as they are now; its ``save_pretrained`` writes a folder of it."""
        model: PreTrainedModel = self.__dict__["_wrapped"]
        return model

    def _like_hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """A tensor with the batch, length, precision and device of the hidden states, all that ``transformers`` reads of them
        when it makes a mask."""
        return torch.empty(*tokens.shape, 1, dtype=self.transformers_model.dtype, device=tokens.device)


class HeadBlock(nn.Module):
    """Hidden states to a score for every token of the vocabulary: (batch, length, vocabulary)."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(hidden)
        return scores
