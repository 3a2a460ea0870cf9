"""Model states per rank, by the layout that the ranks would have."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvd_ckpt.sharding.estimate.optimizers import OptimizerBytes, OptimizerFacts
from hvd_ckpt.sharding.flights import IN_FLIGHT
from hvd_ckpt.sharding.formats import FP32, WireFormat
from hvd_ckpt.sharding.layout import Group, Layout
from hvd_ckpt.sharding.offload import CHUNK_ELEMENTS
from hvd_ckpt.sharding.parameters import HALF

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
        offload: the optimizer's state is kept elsewhere.

    Attributes:
        parameters, optimizer_state, master_weights, offloaded: bytes.
        compared: bytes allocated for a while before it, when masters are compared with weights.
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
        offload: bool,
    ) -> None:
        self._layout, self._stage, self._facts = layout, stage, facts
        self._device, self._offload = device, offload
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
        self.compared = max((3 * group.shard_numel for group in halves), default=0)
        self.temporaries = max(temporaries for _, temporaries in found)
        trained = [group for group in groups if group.requires_grad]
        self.gradient_copies = sum(
            4 * group.shard_numel for group in trained if group in halves and stage == 1
        )
        self.sent = self.received = 0
        if stage in (1, 2) and layout.ranks > 1:
            rows = [(weights.changes(group.dtype), _row(group, weights)) for group in trained]
            self.sent = _together([row if changes else 0 for changes, row in rows])
            self.received = _together([layout.ranks * row for _, row in rows])
        self.offloaded = 0
        if offload:
            self.offloaded, self.optimizer_state = self.optimizer_state, 0
            if device.type != "cuda":  # where they are beside the device's own weights
                self.offloaded += self.master_weights
                self.master_weights = 0

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
                if self._offload:
                    temporaries = max(temporaries, self._chunked(taken, sizes))
                else:
                    temporaries = max(temporaries, taken.temporaries(sizes))
        return state, temporaries

    def _chunked(self, taken: OptimizerBytes, sizes: Sequence[int]) -> int:
        """Temporaries of a step that takes so many elements at a time; on a CUDA device with the state of two chunks."""
        chunk = min(sum(sizes), CHUNK_ELEMENTS)
        here = 2 * taken.state * chunk if self._device.type == "cuda" else 0
        return here + taken.temporaries([min(size, chunk) for size in sizes] if not taken.all else [chunk])

    def _stepped(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if self._stage and dtype in HALF else dtype


def _row(group: Group, weights: WireFormat) -> int:
    return weights.row_bytes(group.shard_numel, group.dtype)


def _together(sizes: Sequence[int]) -> int:
    """The largest sum of what is in flight at a time, of sizes that follow one another."""
    return max((sum(sizes[start : start + IN_FLIGHT]) for start in range(len(sizes))), default=0)
