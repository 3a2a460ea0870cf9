"""DeepSpeed's engine, with buckets as large as everyone's, and without the clipping that is its default."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hvd_ckpt.app.compare.runner.engine import Engine, Held, OnTorch, held_by, local_part
from hvd_ckpt.app.compare.runner.engines import variant
from hvd_ckpt.app.compare.runner.report import MIB


class DeepSpeed(OnTorch):
    """Stages 1 to 3, and buckets of at most ``bucket_cap_mb``.

    Its defaults for stage 3 are for models of billions of parameters: it would hardly split one that is smaller.
    """

    @classmethod
    def unavailable(cls) -> str | None:
        return None if find_spec("deepspeed") else "deepspeed is not installed"

    def start(self, folder: Path) -> None:
        super().start(folder)
        rank, size = str(self.rank), str(self.size)
        os.environ.update(LOCAL_RANK=rank, RANK=rank, WORLD_SIZE=size, LOCAL_SIZE=size)
        os.environ.setdefault("DS_ACCELERATOR", self.device.type)

    def wrap(self, model: nn.Module, optimizer: Optimizer, passes: int = 1) -> tuple[nn.Module, Optimizer]:
        # DeepSpeed counts the elements of its buckets, here of 4 bytes.
        bucket = int(self.options["bucket_cap_mb"] * MIB) // 4
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": passes,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {
                "stage": self.options["stage"],
                "reduce_bucket_size": bucket,
                "allgather_bucket_size": bucket,
                "stage3_prefetch_bucket_size": bucket,
                "stage3_max_live_parameters": bucket,
                "stage3_max_reuse_distance": 0,
                "stage3_param_persistence_threshold": 10_000,
            },
        }
        deepspeed = importlib.import_module("deepspeed")
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config, dist_init_required=False
        )
        return engine, engine.optimizer

    def accumulate(self, model: Any, optimizer: Any, losses: Sequence[Callable[[], Tensor]]) -> float:
        mean = 0.0
        for number, loss in enumerate(losses, start=1):
            part = loss()
            # DeepSpeed divides by the number of micro-batches itself. Its step() only counts, but the one after
            # the last micro-batch changes the weights: update() calls that.
            model.backward(part)
            if number < len(losses):
                model.step()
            mean += part.item() / len(losses)
        return mean

    def update(self, model: Any, optimizer: Any) -> None:
        model.step()

    def held(self, model: Any, optimizer: Any) -> Held:
        """Tensors that its optimizer has under these names; what it holds elsewhere counts in the peak alone."""
        parameters = [local_part(getattr(each, "ds_tensor", each).detach()) for each in model.parameters()]
        gradients = [
            getattr(optimizer, "averaged_gradients", {}),
            getattr(optimizer, "grad_partitions_flat_buffer", []),
            [parameter.grad for parameter in model.parameters() if parameter.grad is not None],
        ]
        masters = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")
        state = [getattr(optimizer, name, []) for name in masters]
        inner = held_by([], optimizer.optimizer).state
        return Held(parameters, _flatten(gradients), [*inner, *_flatten(state)])


def _flatten(value: Any) -> list[Tensor]:
    """All tensors in lists and dicts of such."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return [value] if isinstance(value, Tensor) else []
    return [tensor for entry in value for tensor in _flatten(entry)]


ENGINES: dict[str, type[Engine]] = {
    f"deepspeed-{stage}": variant(DeepSpeed, stage=stage) for stage in (1, 2, 3)
}
