"""A chain of blocks with arguments that all of them share, such as the mask of a transformer.

The shared arguments are derived once per forward pass and handed to each block as keyword arguments; only the hidden state flows
from block to block. Blocks hold nothing of a batch, so a recomputation finds what its own forward pass was given,
however many forward passes came in between.

A model of Hugging Face's ``transformers`` becomes a chain of blocks that hold its own modules, so its weights, configuration and
file format stay what they are; only the loop over the layers is replaced. What that loop derives of masks is derived in
:meth:`Chain.prepare`.
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
    """A chain whose blocks share keyword arguments, recomputed every ``checkpoint_interval`` blocks.

    A block takes what the block before it returns (the parts of a plain tuple as positional arguments, or the tuple itself, see
    :func:`hvd_ckpt.checkpoint_sequential`) and those shared keyword arguments that its ``forward`` names. Every block is a module
    with children of its own, so that a planner sees one block where the chain has one.

    Args:
        blocks: modules, or one ``OrderedDict`` of names and modules, as for ``nn.Sequential``.
        checkpoint_interval: blocks in each recomputed segment, DeepSpeed's ``activation_checkpoint_interval``; the last segment is
            kept. 0 recomputes nothing. It may be changed between forward passes.
        use_reentrant: which of PyTorch's two ways to recompute, as in :func:`hvd_ckpt.checkpoint`.

    Raises:
        ValueError: for a ``checkpoint_interval`` that is negative or no whole number.
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
        """Blocks in each recomputed segment; 0 recomputes nothing."""
        return self._checkpoint_interval

    @checkpoint_interval.setter
    def checkpoint_interval(self, blocks: int) -> None:
        if isinstance(blocks, bool) or not isinstance(blocks, int) or blocks < 0:
            raise ValueError(
                f"checkpoint_interval must be a number of blocks, or 0 for no recomputation, got {blocks!r}"
            )
        self._checkpoint_interval = blocks

    def to_layers(self) -> list[nn.Module]:
        """The blocks in order, for ``checkpoint_sequential`` or a pipeline: they take what :meth:`prepare` returns."""
        return list(self)

    def prepare(self, *inputs: Any, **shared: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Splits the arguments of a call into those of the first block and those that all blocks share.

        Runs once per forward pass, before the blocks and outside of every recomputation.
        """
        return inputs, shared

    def forward(self, *inputs: Any, **shared: Any) -> Any:
        """Runs :meth:`prepare`, then the blocks; returns what the last of them returns."""
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
        if isinstance(index, slice):  # a part of a chain takes what the whole chain has prepared
            return Chain(
                OrderedDict(list(self._modules.items())[index]),
                checkpoint_interval=self.checkpoint_interval,
                use_reentrant=self.use_reentrant,
            )
        return super().__getitem__(index)

    def extra_repr(self) -> str:
        return f"checkpoint_interval={self.checkpoint_interval}, use_reentrant={self.use_reentrant}"


class WrappedChain(Chain):
    """A model of ``transformers`` as a chain; training one trains the other.

    Args:
        model: the model.
        blocks: names and blocks, made of the model's own modules.
        checkpoint_interval: as in :class:`Chain`.
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


class LayerBlock(nn.Module):
    """One layer: hidden states in, hidden states out, (batch, length, width) both."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """``attention_mask`` is what the chain makes of its own: true, or 0, where a position (dimension 2) sees another (3)."""
        output: torch.Tensor = self.layer(hidden, attention_mask=attention_mask)
        return output


class HeadBlock(nn.Module):
    """Hidden states to a score for every token of the vocabulary: (batch, length, vocabulary)."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(hidden)
        return scores
