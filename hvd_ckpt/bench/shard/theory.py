"""Bytes that there should be, after Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion
parameter models" (2020).

Of Adam in float32: 4 bytes for each parameter, 4 for its gradient and 8 for the optimizer's state, of which each stage splits one
more over the ranks.
"""

from __future__ import annotations

__all__ = ["shared_bytes", "state_bytes"]

PARAMETER, GRADIENT, STATE = 4.0, 4.0, 8.0


def state_bytes(stage: int, ranks: int, offload: bool = False) -> float:
    """Bytes of memory per parameter and rank for parameters, gradients and optimizer state.

    At 4 ranks 16, 10, 7 and 4 at the stages 0 to 3. With ``offload`` the optimizer's state is elsewhere.
    """
    parameter = PARAMETER / (ranks if stage > 2 else 1)
    gradient = GRADIENT / (ranks if stage > 1 else 1)
    state = 0.0 if offload else STATE / (ranks if stage > 0 else 1)
    return parameter + gradient + state


def shared_bytes(model_bytes: int, ranks: int) -> float:
    """What each rank sends when the whole model is gathered, or its gradients reduce-scattered, once: (n - 1) / n of it."""
    return model_bytes * (ranks - 1) / ranks
