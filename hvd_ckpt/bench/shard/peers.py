"""PyTorch's and DeepSpeed's sharding, used as their documentation says."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from hvd_ckpt.bench.shard.configurations import OURS, Configuration
from hvd_ckpt.bench.shard.engines import Ours, Session, Tensors, local, state_tensors, tensors_of
from hvd_ckpt.bench.shard.training import LEARNING_RATE, blocks, loss
from hvd_ckpt.models.chain import Chain
from hvd_ckpt.models.gpt import GPTBlock
from hvd_ckpt.reduction.buckets import MEBIBYTE

__all__ = ["SESSIONS", "join"]

Adam = torch.optim.Adam


def join(folder: Path, rank: int, size: int) -> None:
    """Initialize ``torch.distributed`` over Gloo, beside Horovod; DeepSpeed uses it, too."""
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(size), LOCAL_SIZE=str(size))
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=size
    )


def _recomputed(model: Chain, configuration: Configuration) -> Chain:
    """The model with each block recomputed, if the configuration does so: PyTorch's own, not reentrant."""
    if configuration.recompute:
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, GPTBlock))
    return model


class DDP(Session):
    """DistributedDataParallel: nothing is split."""

    model: nn.parallel.DistributedDataParallel

    def wrap(self, model: Chain) -> None:
        self.model = nn.parallel.DistributedDataParallel(
            _recomputed(model, self.configuration), bucket_cap_mb=self.training.bucket_mb
        )
        self.optimizer = Adam(self.model.parameters(), lr=LEARNING_RATE)

    def accumulate(self, samples: Sequence[Tensor]) -> float:
        self.optimizer.zero_grad()
        with self.model.no_sync():
            mean = sum(self.backward(sample) for sample in samples[:-1])
        return mean + self.backward(samples[-1])


class Zero(DDP):
    """ZeroRedundancyOptimizer with DistributedDataParallel: the optimizer's state is split, a parameter as a whole."""

    def wrap(self, model: Chain) -> None:
        super().wrap(model)
        self.optimizer = ZeroRedundancyOptimizer(
            self.model.parameters(), optimizer_class=Adam, lr=LEARNING_RATE
        )

    def tensors(self) -> Tensors:
        return tensors_of(self.model.parameters(), self.optimizer.optim)


class FSDP2(Session):
    """``fully_shard``: at stage 3 parameters are split again after forward, at stage 2 not before the end of backward."""

    def wrap(self, model: Chain) -> None:
        split = self.configuration.stage == 3
        self.model = _recomputed(model, self.configuration)
        for block in blocks(model):
            fully_shard(block, reshard_after_forward=split)
        fully_shard(model, reshard_after_forward=None if split else False)
        self.optimizer = Adam(model.parameters(), lr=LEARNING_RATE)


class DeepSpeed(Session):
    """DeepSpeed's engine, with buckets as large as everyone's, and without the clipping that is its default.

    Its defaults for stage 3 are for models of billions of parameters: it would hardly split one that is smaller.
    """

    def wrap(self, model: Chain) -> None:
        import deepspeed

        bucket = int(self.training.bucket_mb * MEBIBYTE) // 4
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": self.training.passes,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {
                "stage": self.configuration.stage,
                "reduce_bucket_size": bucket,
                "allgather_bucket_size": bucket,
                "stage3_prefetch_bucket_size": bucket,
                "stage3_max_live_parameters": bucket,
                "stage3_max_reuse_distance": 0,
                "stage3_param_persistence_threshold": 10_000,
            },
        }
        _recomputed(model, self.configuration)
        self.engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=Adam(model.parameters(), lr=LEARNING_RATE),
            config=config,
            dist_init_required=False,
        )
        self.model = self.engine

    def accumulate(self, samples: Sequence[Tensor]) -> float:
        mean = 0.0
        for number, sample in enumerate(samples, start=1):
            part = loss(self.engine, sample)
            self.engine.backward(part)
            if number < len(samples):
                self.engine.step()
            mean += part.item() / self.training.passes
        return mean

    def update(self) -> None:
        self.engine.step()

    def tensors(self) -> Tensors:
        """Tensors that its optimizer has under these names; what it holds elsewhere counts among the buffers."""
        optimizer: Any = self.engine.optimizer
        parameters = [local(getattr(one, "ds_tensor", one).detach()) for one in self.engine.parameters()]
        masters = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")
        gradients = [
            getattr(optimizer, "averaged_gradients", {}),
            getattr(optimizer, "grad_partitions_flat_buffer", []),
        ]
        gradients += [[one.grad for one in self.engine.parameters() if one.grad is not None]]
        state = [
            *state_tensors(optimizer.optimizer),
            *_flatten([getattr(optimizer, name, []) for name in masters]),
        ]
        return Tensors(parameters, _flatten(gradients), state)


def _flatten(value: Any) -> list[Tensor]:
    """All tensors in lists and dicts of such."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [tensor for one in value for tensor in _flatten(one)]


SESSIONS: dict[str, type[Session]] = {
    OURS: Ours,
    "ddp": DDP,
    "zero": Zero,
    "fsdp2": FSDP2,
    "deepspeed": DeepSpeed,
}
