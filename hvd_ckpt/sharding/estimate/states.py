"""Model states per rank, by the layout that the ranks would have."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..formats import FP32, WireFormat
from ..layout import Group, Layout
from ..masters import HALF
from .optimizers import OptimizerFacts

__all__ = ["ModelStates"]

_RANKS_LOOKED_AT = 16  # the first ones: what lies on later ones is cut alike


class ModelStates:
    """What a rank holds between steps, and what its optimizer's step allocates; of the rank that needs most.

    Args:
        named: the model's parameters.
        layout: of the same, for the ranks.
        stage: 0 to 3.
        facts: of the optimizer.
        device: where it steps.
        weights: format of parameters on the wire.

    Attributes:
        parameters, optimizer_state, master_weights: bytes.
        temporaries: bytes that the step allocates for a while.
        gradient_copies: bytes of half-precision gradients that are converted for it.
        sent, received: bytes of encoded shards, and of what arrives, when stepped weights are gathered.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, torch.Tensor]],
        layout: Layout,
        stage: int,
        facts: OptimizerFacts,
        device: torch.device,
        weights: WireFormat,
    ) -> None:
        self._layout, self._stage, self._facts, self._device = layout, stage, facts, device
        groups = layout.groups
        shards = sum(group.shard_numel * group.dtype.itemsize for group in groups)
        whole = sum(group.padded * group.dtype.itemsize for group in groups)
        exact = shards if stage in (1, 2) and weights is not FP32 else 0
        self.parameters = (
            sum(one.nbytes for _, one in named) if stage == 0 else shards if stage == 3 else whole + exact
        )
        halves = [group for group in groups if stage and group.dtype in HALF]
        self.master_weights = sum(4 * group.shard_numel for group in halves)
        ranks = range(min(layout.ranks, _RANKS_LOOKED_AT) if stage else 1)
        found = [self._of_rank(rank, dict(named)) for rank in ranks]
        self.optimizer_state = max(state for state, _ in found)
        compared = max((3 * group.shard_numel for group in halves), default=0)  # masters with weights
        self.temporaries = max(compared, *(temporaries for _, temporaries in found))
        trained = [group for group in groups if group.requires_grad]
        self.gradient_copies = sum(
            4 * group.shard_numel for group in trained if group in halves and stage == 1
        )
        self.sent = self.received = 0
        if stage in (1, 2) and layout.ranks > 1:
            self.sent = sum(_row(group, weights) for group in trained if weights.changes(group.dtype))
            self.received = sum(layout.ranks * _row(group, weights) for group in trained)

    def _of_rank(self, rank: int, parameters: dict[str, torch.Tensor]) -> tuple[int, int]:
        """Bytes of state and of temporaries."""
        state = temporaries = 0
        spans = {
            self._layout.names[span.parameter]: span.numel
            for group in self._layout.groups
            for span in group.spans(rank)
        }
        for number, names in enumerate(self._facts.groups):
            numels: dict[torch.dtype, list[int]] = {}
            for name in names:
                numel = spans.get(name, 0) if self._stage else parameters[name].numel()
                if numel:
                    numels.setdefault(self._stepped(parameters[name].dtype), []).append(numel)
            for dtype, sizes in numels.items():
                taken = self._facts.bytes(number, dtype, self._device)
                state += taken.state * sum(sizes) + taken.state_each * len(sizes)
                temporaries = max(temporaries, taken.temporaries(sizes))
        return state, temporaries

    def _stepped(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if self._stage and dtype in HALF else dtype


def _row(group: Group, weights: WireFormat) -> int:
    return weights.row_bytes(group.shard_numel, group.dtype)
