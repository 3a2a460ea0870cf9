"""What ``self.optimizers()`` gives to a LightningModule.

Lightning wraps each optimizer in an object of a subclass of its class, without its attributes. Methods that are called on the
wrapper would so work on a state of their own.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.core.optimizer import LightningOptimizer

# What a wrapper does itself; all else is the optimizer's.
_OWN = frozenset(
    {"_optimizer", "_strategy", "_on_before_step", "_on_after_step", "optimizer", "step", "toggle_model", "zero_grad",
     "_step_supports_amp_scaling"}
)  # fmt: skip


class _HandsOn(LightningOptimizer):
    """Methods and attributes are those of the optimizer, apart from those by which Lightning takes a step."""

    # What isinstance() asks for. As its own class has none of the optimizer's methods, Lightning's ``__getattr__`` gives them.
    __class__ = property(lambda self: type(self._optimizer))

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._optimizer, name, value)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # The optimizer's own is also an error where PyTorch's scaler asks; Lightning's is of this library.
        return bool(getattr(self._optimizer, "_wrapped_supports_amp_scaling", False))

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clears gradients, also those that another loss's backward pass has left, as in a GAN whose optimizers are not toggled."""
        try:
            self._optimizer.zero_grad(*args, **kwargs)
        except AssertionError:
            if self._optimizer.shard_stage > 1:
                raise
            for group in self._optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None


def unwrapped(optimizer: Any) -> Any:
    """The optimizer in Lightning's wrapper; one without a wrapper as it is."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def hand_on(wrapper: LightningOptimizer) -> None:
    """Has a wrapper hand everything on but steps."""
    if type(wrapper) is not _HandsOn:
        wrapper.__class__ = _HandsOn
