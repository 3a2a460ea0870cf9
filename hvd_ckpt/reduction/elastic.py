"""Horovod Elastic around this library's optimizer.

``horovod.torch.elastic.TorchState`` keeps a registry of what it knows how to save and send. This module adds the
optimizer, so that a sync sends its state untouched and makes all ranks, old and new, learn order and counts anew.
"""

from __future__ import annotations

from horovod.torch.elastic.state import OptimizerStateHandler, get_handler_registry, set_handler_registry

from hvd_ckpt.reduction.broadcast import broadcast_optimizer_state
from hvd_ckpt.reduction.optimizer import ReducedOptimizer


class ReducedOptimizerStateHandler(OptimizerStateHandler):  # type: ignore[misc]
    """Saves, restores and synchronizes a ``DistributedOptimizer`` for ``TorchState``."""

    value: ReducedOptimizer

    def restore(self) -> None:
        self.value.reset_reduction()
        super().restore()

    def sync(self) -> None:
        self.value.reset_reduction()
        self.value.agree_on_naming()
        broadcast_optimizer_state(self.value, root_rank=0)


def register() -> None:
    """Makes ``TorchState`` use the handler above for this library's optimizers. Calling it again changes nothing."""
    registry = get_handler_registry()
    if not any(handled is ReducedOptimizer for handled, _ in registry):
        set_handler_registry([(ReducedOptimizer, ReducedOptimizerStateHandler), *registry])
