"""Configurations under training: this library's, and PyTorch's and DeepSpeed's as their documentation says; and their samples."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import hvd_ckpt as hc
from hvd_ckpt.app.datasets.tokens import Tokens
from hvd_ckpt.app.models.gpt import GPTBlock
from hvd_ckpt.bench.harness.jobs import join_torch
from hvd_ckpt.bench.harness.report import MIB
from hvd_ckpt.bench.shard.job import OURS, Configuration, Training
from hvd_ckpt.pipeline.chain import Chain

LEARNING_RATE = 1e-3
SEED = 0
STRIDE = 7919  # windows from one sample to the next; prime, so that all windows have their turn
Adam = torch.optim.Adam


def build(training: Training, seed: int = SEED) -> Chain:
    """The model at the start, the same on every rank and for every configuration."""
    torch.manual_seed(seed)
    return training.model.chain().to(training.device)


def loss(model: nn.Module, sample: Tensor) -> Tensor:
    """The cross-entropy of each next token of samples (batch, length + 1)."""
    scores = model(sample[:, :-1])
    return functional.cross_entropy(scores.flatten(0, 1), sample[:, 1:].flatten())


class Samples:
    """Windows of a text, dealt to steps, micro-batches and ranks in turn; each seed begins elsewhere.

    Raises:
        ValueError: the text cannot be read, or is shorter than a sample.
    """

    def __init__(self, training: Training, rank: int, ranks: int, seed: int = SEED) -> None:
        self._array, self._seed = Tokens(training.text).array, seed
        self._length, self._passes, self._batch = training.model.length, training.passes, training.model.batch
        self._device = training.device
        self._rank, self._ranks = rank, ranks
        self._windows = (len(self._array) - 1) // self._length
        if self._windows < 1:
            raise ValueError(
                f"the text has {len(self._array)} bytes, fewer than one sample of {self._length}: give more"
            )

    def step(self, number: int) -> list[Tensor]:
        """This rank's micro-batches of a step."""
        first = number * self._passes
        return [self.micro_batch((first + each) * self._ranks + self._rank) for each in range(self._passes)]

    def micro_batch(self, number: int) -> Tensor:
        """Tokens (batch, length + 1); neighbours in number are far apart in the text."""
        numbers = range(number * self._batch, (number + 1) * self._batch)
        starts = [(self._seed + each * STRIDE) % self._windows * self._length for each in numbers]
        windows = [self._array[start : start + self._length + 1].astype("int64") for start in starts]
        return torch.stack([torch.from_numpy(window) for window in windows]).to(self._device)


class Tensors(NamedTuple):
    """The tensors that are held for training, by kind."""

    parameters: list[Tensor]
    gradients: list[Tensor]
    state: list[Tensor]


class Session(ABC):
    """One configuration's model and optimizer, wrapped.

    Args:
        model: at its start; the session changes it.
        configuration: how to wrap it.
        training: sizes of steps and buckets.
        folder: free to use, the same on all ranks.
    """

    model: nn.Module
    optimizer: Any

    def __init__(self, model: Chain, configuration: Configuration, training: Training, folder: Path) -> None:
        self.model, self.configuration, self.training, self.folder = model, configuration, training, folder
        self.wrap(model)

    @abstractmethod
    def wrap(self, model: Chain) -> None:
        """Make the optimizer, and wrap the model as the engine's documentation says."""

    def accumulate(self, samples: Sequence[Tensor]) -> float:
        """Forward and backward passes of a step's samples, until the gradients are ready; the mean loss."""
        self.optimizer.zero_grad()
        return sum(self.backward(sample) for sample in samples)

    def update(self) -> None:
        """The optimizer's step."""
        self.optimizer.step()

    def step(self, samples: Sequence[Tensor]) -> float:
        """A whole step; the mean loss."""
        mean = self.accumulate(samples)
        self.update()
        return mean

    def tensors(self) -> Tensors:
        """The tensors that are held between :meth:`accumulate` and :meth:`update`."""
        return tensors_of(self.model.parameters(), self.optimizer)

    def sent(self) -> int | None:
        """Bytes sent since the start by the engine's own count; None if it has no count."""
        return None

    def backward(self, sample: Tensor) -> float:
        """Forward and backward pass of one sample; its part of the mean loss."""
        part = loss(self.model, sample) / self.training.passes
        part.backward()  # type: ignore[no-untyped-call]
        return part.item()


class Ours(Session):
    """This library.

    Args:
        wire: the wire format, besides the arguments of :class:`Session`.
    """

    def __init__(
        self, model: Chain, configuration: Configuration, training: Training, folder: Path, wire: str = "fp32"
    ) -> None:
        self.wire, self._steps = wire, 0
        super().__init__(model, configuration, training, folder)

    def wrap(self, model: Chain) -> None:
        model.checkpoint_interval = int(self.configuration.recompute)
        self.stage = self.configuration.stage
        self._reduced = sum(parameter.nbytes for parameter in model.parameters())
        sharded: dict[str, Any] = {"shard": self.stage, "wire": self.wire} if self.stage else {}
        if self.stage == 3:
            sharded.update(model=model, units=_blocks(model))
        if self.configuration.offload:
            self.folder.mkdir(parents=True, exist_ok=True)
            sharded.update(offload="optimizer", offload_folder=self.folder)
        self.optimizer = hc.DistributedOptimizer(
            Adam(model.parameters(), lr=LEARNING_RATE),
            named_parameters=model.named_parameters(),
            bucket_cap_mb=self.training.bucket_mb,
            **sharded,
        )
        if not self.stage:
            hc.broadcast_parameters(model.state_dict(), root_rank=0)

    def accumulate(self, samples: Sequence[Tensor]) -> float:
        mean = super().accumulate(samples)
        self.optimizer.synchronize()
        self._steps += 1
        return mean

    def update(self) -> None:
        with self.optimizer.skip_synchronize():
            self.optimizer.step()

    def tensors(self) -> Tensors:
        pieces = [piece.parameter for piece in self.optimizer.pieces] if self.stage else []
        held = tensors_of([*self.model.parameters(), *pieces], self.optimizer)
        if self.stage > 1:  # a parameter's gradient has left; what an optimizer steps has it
            return held
        return held._replace(gradients=_gradients(self.model.parameters()))

    def sent(self) -> int:
        ranks = hc.size()
        whole = self._steps * round(2 * (ranks - 1) / ranks * self._reduced) if self.stage < 2 else 0
        return whole + (sum(self.optimizer.traffic.sent.values()) if self.stage else 0)


# ------------------------------------------------------------------------------------ PyTorch's and DeepSpeed's


def join(folder: Path, rank: int, size: int, device: torch.device) -> None:
    """Initialize ``torch.distributed`` over Gloo, or NCCL on GPUs, beside Horovod; DeepSpeed uses it, too."""
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(size), LOCAL_SIZE=str(size))
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    join_torch(folder, rank, size, device=device)


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
        from torch.distributed.optim import ZeroRedundancyOptimizer

        super().wrap(model)
        self.optimizer = ZeroRedundancyOptimizer(
            self.model.parameters(), optimizer_class=Adam, lr=LEARNING_RATE
        )

    def tensors(self) -> Tensors:
        return tensors_of(self.model.parameters(), self.optimizer.optim)


class FSDP2(Session):
    """``fully_shard``: at stage 3 parameters are split again after forward, at stage 2 not before the end of backward."""

    def wrap(self, model: Chain) -> None:
        from torch.distributed.fsdp import fully_shard

        split = self.configuration.stage == 3
        self.model = _recomputed(model, self.configuration)
        for block in _blocks(model):
            fully_shard(block, reshard_after_forward=split)
        fully_shard(model, reshard_after_forward=None if split else False)
        self.optimizer = Adam(model.parameters(), lr=LEARNING_RATE)


class DeepSpeed(Session):
    """DeepSpeed's engine, with buckets as large as everyone's, and without the clipping that is its default.

    Its defaults for stage 3 are for models of billions of parameters: it would hardly split one that is smaller.
    """

    def wrap(self, model: Chain) -> None:
        import deepspeed

        bucket = int(self.training.bucket_mb * MIB) // 4
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
        parameters = [_local(getattr(one, "ds_tensor", one).detach()) for one in self.engine.parameters()]
        gradients = [
            getattr(optimizer, "averaged_gradients", {}),
            getattr(optimizer, "grad_partitions_flat_buffer", []),
            [one.grad for one in self.engine.parameters() if one.grad is not None],
        ]
        masters = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")
        state = [getattr(optimizer, name, []) for name in masters]
        return Tensors(
            parameters, _flatten(gradients), [*_state(optimizer.optimizer), *_flatten(state)]
        )  # fmt: skip


SESSIONS: dict[str, type[Session]] = {
    OURS: Ours, "ddp": DDP, "zero": Zero, "fsdp2": FSDP2, "deepspeed": DeepSpeed
}  # fmt: skip


def _blocks(model: nn.Module) -> list[nn.Module]:
    """Its decoder layers, which are recomputed and gathered as units."""
    return [module for module in model.modules() if isinstance(module, GPTBlock)]


def _recomputed(model: Chain, configuration: Configuration) -> Chain:
    """The model with each block recomputed, if the configuration does so: PyTorch's own, not reentrant."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    if configuration.recompute:
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, GPTBlock))
    return model


def tensors_of(parameters: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer) -> Tensors:
    """The parameters, their gradients and the optimizer's state; of what is distributed, this rank's part."""
    parameters = list(parameters)
    return Tensors([_local(parameter) for parameter in parameters], _gradients(parameters), _state(optimizer))


def _state(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All tensors of an optimizer's state but step counts."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return [_local(value) for value in values if isinstance(value, Tensor) and value.dim()]


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [_local(parameter.grad) for parameter in parameters if parameter.grad is not None]


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, or the tensor itself."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def _flatten(value: Any) -> list[Tensor]:
    """All tensors in lists and dicts of such."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return [value] if isinstance(value, Tensor) else []
    return [tensor for one in value for tensor in _flatten(one)]
