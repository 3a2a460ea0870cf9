"""The configurations: this library's stages, and PyTorch's and DeepSpeed's beside them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

__all__ = ["ENGINES", "OURS", "Configuration", "baselines", "configurations"]

OURS = "hvd_ckpt"
ENGINES: dict[str, tuple[str, tuple[int, ...]]] = {
    OURS: ("hvd_ckpt", (0, 1, 2, 3)),
    "ddp": ("DDP", (0,)),
    "zero": ("ZeroRedundancyOptimizer", (1,)),
    "fsdp2": ("FSDP2", (2, 3)),
    "deepspeed": ("DeepSpeed", (1, 2, 3)),
}
"""Their titles and stages."""


@dataclass(frozen=True)
class Configuration:
    """One way to train.

    Attributes:
        engine: a name in :data:`ENGINES`.
        stage: 0 to 3.
        recompute: each block is recomputed in the backward pass.
        offload: the optimizer's state is on disk.
    """

    engine: str
    stage: int
    recompute: bool = False
    offload: bool = False

    @property
    def ours(self) -> bool:
        return self.engine == OURS

    @property
    def name(self) -> str:
        """Unique, of letters that a file's name may have."""
        parts = [self.engine, str(self.stage), *["offload"] * self.offload, *["recompute"] * self.recompute]
        return "-".join(parts)

    @property
    def title(self) -> str:
        """For people, without the recomputation."""
        return f"{ENGINES[self.engine][0]}, stage {self.stage}{' + offload' * self.offload}"


def configurations(stages: Collection[int], peers: Collection[str]) -> list[Configuration]:
    """This library and its ``peers`` at these stages, with and without recomputation; at stage 3 with its offload, too."""
    found = []
    for stage in sorted(stages):
        for offload in (False, True) if stage == 3 else (False,):
            found += [Configuration(OURS, stage, recompute, offload) for recompute in (False, True)]
        for engine, (_, known) in ENGINES.items():
            if stage in known and engine in peers:
                found += [Configuration(engine, stage, recompute) for recompute in (False, True)]
    return found


def baselines(configuration: Configuration, all_of_them: Collection[Configuration]) -> list[Configuration]:
    """Peers that do the same as this library's configuration; its offload has none."""
    if not configuration.ours or configuration.offload:
        return []
    same = (configuration.stage, configuration.recompute)
    return [one for one in all_of_them if not one.ours and (one.stage, one.recompute) == same]
