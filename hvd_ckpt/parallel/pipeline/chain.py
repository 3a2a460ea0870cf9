"""Chains of blocks with arguments that all blocks share, such as the mask of a transformer.

The shared arguments are computed once per forward pass, and each block gets them as keyword arguments. Only the hidden state passes
from block to block. Blocks store nothing of a batch, so a recomputation uses the arguments of its own forward pass, even if other
forward passes have run in between.

A model of Hugging Face's ``transformers`` becomes a chain of blocks that hold the model's own modules. Its weights, configuration
and file format stay the same, and only the loop over the layers is replaced. :meth:`Chain.prepare` computes the masks of that
loop.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hvd_ckpt.recompute.sequential import checkpoint_sequential

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Chain(nn.Sequential):
    """A chain whose blocks share keyword arguments, recomputed in segments of ``checkpoint_interval`` blocks.

    A block takes the result of the previous block and the shared keyword arguments that its ``forward`` names. The parts of a
    plain tuple are positional arguments, as in :func:`hvd_ckpt.checkpoint_sequential`. Each block is a module with children, so
    that a planner sees it as one block.

    Args:
        blocks: modules, or one ``OrderedDict`` of names and modules, as in ``nn.Sequential``.
        checkpoint_interval: number of blocks in each recomputed segment, as DeepSpeed's ``activation_checkpoint_interval``. The
            last segment is kept. 0 recomputes nothing. The value may be changed between forward passes.
        use_reentrant: which of PyTorch's two variants recomputes, as in :func:`hvd_ckpt.checkpoint`.

    Raises:
        ValueError: ``checkpoint_interval`` is negative or not an int.
    """

    def __init__(
        self,
        *blocks: nn.Module | OrderedDict[str, nn.Module],
        checkpoint_interval: int = 0,
        use_reentrant: bool = False,
    ) -> None:
        super().__init__(*blocks)  # type: ignore[arg-type]  # torch declares its two forms as overloads
        self.checkpoint_interval = checkpoint_interval
        self.use_reentrant = use_reentrant

    @property
    def checkpoint_interval(self) -> int:
        """Number of blocks in each recomputed segment; 0 recomputes nothing."""
        return self._checkpoint_interval

    @checkpoint_interval.setter
    def checkpoint_interval(self, blocks: int) -> None:
        if isinstance(blocks, bool) or not isinstance(blocks, int) or blocks < 0:
            raise ValueError(
                f"checkpoint_interval must be a number of blocks, or 0 for no recomputation, got {blocks!r}"
            )
        self._checkpoint_interval = blocks

    def to_layers(self) -> list[nn.Module]:
        """The blocks in order, for ``checkpoint_sequential`` or a pipeline. They take the result of :meth:`prepare`."""
        return list(self)

    def prepare(self, *inputs: Any, **shared: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Splits the arguments of a call into those of the first block and those that all blocks share.

        It runs once per forward pass, before the blocks and outside of any recomputation.
        """
        return inputs, shared

    def forward(self, *inputs: Any, **shared: Any) -> Any:
        """Runs :meth:`prepare` and the blocks; returns the result of the last block."""
        inputs, shared = self.prepare(*inputs, **shared)
        return checkpoint_sequential(
            self.to_layers(), self._segments(), *inputs, use_reentrant=self.use_reentrant, **shared
        )

    def _segments(self) -> list[int]:
        interval = self.checkpoint_interval
        if not interval or interval >= len(self) or not torch.is_grad_enabled():
            return [len(self)]
        full, rest = divmod(len(self), interval)
        return [interval] * full + [rest] * bool(rest)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            # A part of a chain takes the arguments that the whole chain has prepared. nn.Sequential would call this class with the
            # blocks alone, and subclasses take other arguments.
            return Chain(
                OrderedDict(list(self._modules.items())[index]),
                checkpoint_interval=self.checkpoint_interval,
                use_reentrant=self.use_reentrant,
            )
        return super().__getitem__(index)

    def extra_repr(self) -> str:
        return f"checkpoint_interval={self.checkpoint_interval}, use_reentrant={self.use_reentrant}"


class WrappedChain(Chain):
    """A model of ``transformers`` as a chain with the same weights.

    Args:
        model: the model.
        blocks: names and blocks, which consist of the model's own modules.
        checkpoint_interval: as in :class:`Chain`.
    """

    def __init__(
        self, model: PreTrainedModel, blocks: OrderedDict[str, nn.Module], checkpoint_interval: int = 0
    ) -> None:
        super().__init__(blocks, checkpoint_interval=checkpoint_interval)
        self.training = model.training
        # Not as a child: the blocks have its modules, which would be in the state_dict twice.
        self.__dict__["_wrapped"] = model

    @property
    def transformers_model(self) -> PreTrainedModel:
        """The model with its current weights; its ``save_pretrained`` writes a folder."""
        model: PreTrainedModel = self.__dict__["_wrapped"]
        return model

    def _like_hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """A tensor with the batch, length, dtype and device of the hidden states, which is all that ``transformers`` uses to make a
        mask."""
        return torch.empty(*tokens.shape, 1, dtype=self.transformers_model.dtype, device=tokens.device)


class LayerBlock(nn.Module):
    """One layer from hidden states to hidden states, both (batch, length, width)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """``attention_mask`` is the mask of the chain: true, or 0, where a position (dimension 2) sees another one (3)."""
        output: torch.Tensor = self.layer(hidden, attention_mask=attention_mask)
        return output


class HeadBlock(nn.Module):
    """The head, from hidden states to scores of each token of the vocabulary, (batch, length, vocabulary)."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(hidden)
        return scores
