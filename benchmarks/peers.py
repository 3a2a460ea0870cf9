"""Engines that split states or average weights: those of PyTorch, DeepSpeed and torchft.

Each is what that project's documentation tells its user to write, and imports the project only when it wraps a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import hvd_ckpt as hc
from hvd_ckpt.app.compare.runner.engine import Engine, Held, OnTorch, held_by, local_part
from hvd_ckpt.app.compare.runner.engines import DDP
from hvd_ckpt.app.compare.runner.report import MIB

TORCHFT_TIMEOUT = timedelta(seconds=120)
_kept: list[Any] = []  # of torchft, whose servers must outlive a run


class Zero(DDP):
    """ZeroRedundancyOptimizer with DistributedDataParallel: the optimizer's state is split, a parameter as a whole."""

    title = "ZeroRedundancyOptimizer"

    def wrap(self, model: nn.Module, optimizer: Optimizer, passes: int = 1) -> tuple[nn.Module, Optimizer]:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        wrapped, _ = super().wrap(model, optimizer, passes)
        parameters = list(wrapped.parameters())
        return wrapped, ZeroRedundancyOptimizer(parameters, type(optimizer), **optimizer.defaults)

    def held(self, model: nn.Module, optimizer: Any) -> Held:
        return held_by(model.parameters(), optimizer.optim)


class FSDP2(OnTorch):
    """``fully_shard``: at stage 3 parameters are split again after forward, at stage 2 not before the end of backward.

    Args:
        stage: 2 or 3.
        units: the blocks of the model that are gathered as a whole.
    """

    title = "FSDP2"

    def wrap(self, model: nn.Module, optimizer: Optimizer, passes: int = 1) -> tuple[nn.Module, Optimizer]:
        from torch.distributed.fsdp import fully_shard

        split = self.options["stage"] == 3
        for block in self.options["units"]:
            fully_shard(block, reshard_after_forward=split)
        # The backward pass begins with what belongs to no block: split after the forward pass, it would be
        # gathered again at once.
        fully_shard(model, reshard_after_forward=False)
        return model, type(optimizer)(model.parameters(), **optimizer.defaults)


class DeepSpeed(OnTorch):
    """DeepSpeed's engine, with buckets as large as everyone's, and without the clipping that is its default.

    Its defaults for stage 3 are for models of billions of parameters: it would hardly split one that is smaller.

    Args:
        stage: 1 to 3.
        bucket_cap_mb: largest bucket, in MiB.
    """

    title = "DeepSpeed"

    def wrap(self, model: nn.Module, optimizer: Optimizer, passes: int = 1) -> tuple[nn.Module, Optimizer]:
        import deepspeed

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
        """Tensors that its optimizer has under these names; what it holds elsewhere counts among the buffers."""
        parameters = [
            local_part(getattr(parameter, "ds_tensor", parameter).detach())
            for parameter in model.parameters()
        ]
        gradients = [
            getattr(optimizer, "averaged_gradients", {}),
            getattr(optimizer, "grad_partitions_flat_buffer", []),
            [parameter.grad for parameter in model.parameters() if parameter.grad is not None],
        ]
        masters = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")
        state = [getattr(optimizer, name, []) for name in masters]
        return Held(
            parameters, _flatten(gradients), [*held_by([], optimizer.optimizer).state, *_flatten(state)]
        )


class ModelAverager(OnTorch):
    """PyTorch's PeriodicModelAverager, which averages the weights after each ``every`` steps of the optimizer."""

    title = "PeriodicModelAverager"

    def wrap(self, model: nn.Module, optimizer: Optimizer, passes: int = 1) -> tuple[nn.Module, Optimizer]:
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

        every = self.options["every"]
        # It counts steps from 0, and averages when `warmup_steps` and any number of periods have passed: with
        # this warm-up after `every` steps for the first time.
        averager = PeriodicModelAverager(period=every, warmup_steps=every - 1)
        optimizer.register_step_post_hook(lambda *_: averager.average_parameters(model.parameters()))
        return model, optimizer


class TorchftDiLoCo(Engine):
    """torchft's DiLoCo, whose hooks average after each ``every`` steps of the optimizer; each rank is a replica group.

    Args:
        every: steps between two averages.
        lr, momentum: of the outer optimizer.
    """

    title = "DiLoCo of torchft"

    def wrap(self, model: nn.Module, optimizer: Optimizer, passes: int = 1) -> tuple[nn.Module, Optimizer]:
        from torchft import Manager, ProcessGroupGloo
        from torchft._torchft import LighthouseServer
        from torchft.local_sgd import DiLoCo

        # Rank 0 has the server at which all replica groups meet. Each rank is a group of its own, and so has
        # a store of its own.
        port = None
        if self.rank == 0:
            server = LighthouseServer(bind="127.0.0.1:0", min_replicas=self.size)
            _kept.append(server)
            port = server.address().rpartition(":")[2]
        port = hc.broadcast_object(port, root_rank=0)
        distributed: Any = torch.distributed  # whose stores have no types
        store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        manager = Manager(
            pg=ProcessGroupGloo(timeout=TORCHFT_TIMEOUT),
            load_state_dict=model.load_state_dict,
            state_dict=model.state_dict,
            min_replica_size=self.size,
            use_async_quorum=False,
            timeout=TORCHFT_TIMEOUT,
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=store.port,
            lighthouse_addr=f"http://127.0.0.1:{port}",
            replica_id=f"rank{self.rank}",
            hostname="127.0.0.1",
            # All ranks have begun with the weights of rank 0.
            init_sync=False,
        )
        lr, momentum = self.options["lr"], self.options["momentum"]
        outer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, nesterov=True)
        diloco = DiLoCo(manager, [model], optimizer, outer, self.options["every"], pin_memory=False)
        diloco.__enter__()
        _kept.extend([store, manager, diloco])
        return model, optimizer


def _flatten(value: Any) -> list[Tensor]:
    """All tensors in lists and dicts of such."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return [value] if isinstance(value, Tensor) else []
    return [tensor for entry in value for tensor in _flatten(entry)]
