"""A configuration under training, whichever engine trains it, and the samples of all."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.nn import functional

import hvd_ckpt as hc
from benchmarks.peers import FSDP2, DeepSpeed, Zero
from benchmarks.shard.job import Configuration, Settings
from hvd_ckpt.app.compare.runner.engine import Engine, Held
from hvd_ckpt.app.compare.runner.engines import DDP, HvdCkpt, Sharded
from hvd_ckpt.app.models.gpt import GPTBlock
from hvd_ckpt.pipeline.chain import Chain

LEARNING_RATE = 1e-3
SEED = 0
STRIDE = 7919  # windows from one sample to the next; prime, so that all windows have their turn
Adam = torch.optim.Adam


def build(settings: Settings, seed: int = SEED) -> Chain:
    """The model at the start, the same on every rank and for every configuration."""
    torch.manual_seed(seed)
    return settings.model.chain().to(settings.device)


def loss(model: nn.Module, sample: Tensor) -> Tensor:
    """The cross-entropy of each next token of samples (batch, length + 1)."""
    scores = model(sample[:, :-1])
    return functional.cross_entropy(scores.flatten(0, 1), sample[:, 1:].flatten())


class Samples:
    """Windows of a text, dealt to steps, micro-batches and ranks in turn; each seed begins elsewhere."""

    def __init__(self, settings: Settings, rank: int, ranks: int, seed: int = SEED) -> None:
        self._array, self._seed, self._device = settings.tokens(), seed, settings.device
        self._length, self._passes, self._batch = settings.model.length, settings.passes, settings.model.batch
        self._rank, self._ranks = rank, ranks
        self._windows = (len(self._array) - 1) // self._length

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


class Session:
    """The model and the optimizer of one configuration, as its engine wraps them. Collective.

    Args:
        configuration: how to train.
        settings: sizes of model, steps and buckets.
        folder: free to use, the same on all ranks.
        seed: of the weights.
        wire: wire format of this library.
    """

    def __init__(
        self,
        configuration: Configuration,
        settings: Settings,
        folder: Path,
        seed: int = SEED,
        wire: str = "fp32",
    ) -> None:
        self.configuration = configuration
        model = build(settings, seed)
        self._bytes = sum(parameter.nbytes for parameter in model.parameters())
        self._steps = 0
        self.engine = _engine(configuration, settings.scale.bucket_mb, folder, wire, model)
        # This library's optimizer is told by synchronize(), at the end of a step, that all micro-batches are there.
        passes = 1 if configuration.ours else settings.passes
        optimizer = Adam(model.parameters(), lr=LEARNING_RATE)
        self.model, self.optimizer = self.engine.wrap(model, optimizer, passes)

    def accumulate(self, samples: Sequence[Tensor]) -> float:
        """Forward and backward passes of a step's samples, until the gradients are ready; the mean loss."""
        self._steps += 1
        losses = [functools.partial(loss, self.model, sample) for sample in samples]
        return self.engine.accumulate(self.model, self.optimizer, losses)

    def update(self) -> None:
        """The optimizer's step."""
        self.engine.update(self.model, self.optimizer)

    def step(self, samples: Sequence[Tensor]) -> float:
        """A whole step; the mean loss."""
        mean = self.accumulate(samples)
        self.update()
        return mean

    def tensors(self) -> Held:
        """The tensors that are held between :meth:`accumulate` and :meth:`update`."""
        return self.engine.held(self.model, self.optimizer)

    def sent(self) -> int | None:
        """Bytes sent since the start: this library's own count, with an allreduce of the model in each step up to stage 1."""
        if not self.configuration.ours:
            return None
        ranks = hc.size()
        whole = round(2 * (ranks - 1) / ranks * self._bytes) if self.configuration.stage < 2 else 0
        return self._steps * whole + (self.engine.sent(self.optimizer) or 0)


def _engine(configuration: Configuration, bucket: float, folder: Path, wire: str, model: Chain) -> Engine:
    """The engine of a configuration; ``model`` is made to recompute as it says."""
    name, stage = configuration.engine, configuration.stage
    blocks = [module for module in model.modules() if isinstance(module, GPTBlock)]
    if configuration.ours:
        model.checkpoint_interval = int(configuration.recompute)
    elif configuration.recompute:
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, GPTBlock))
    if name == "ddp":
        return DDP(bucket_cap_mb=bucket, broadcast_buffers=True)
    if name == "zero":
        return Zero(bucket_cap_mb=bucket, broadcast_buffers=True)
    if name == "fsdp2":
        return FSDP2(stage=stage, units=blocks)
    if name == "deepspeed":
        return DeepSpeed(stage=stage, bucket_cap_mb=bucket)
    if not stage:
        return HvdCkpt(bucket_cap_mb=bucket)
    options: dict[str, Any] = {"units": blocks} if stage == 3 else {}
    if configuration.offload:
        folder.mkdir(parents=True, exist_ok=True)
        options.update(offload="optimizer", offload_folder=folder)
    return Sharded(shard=stage, bucket_cap_mb=bucket, wire=wire, **options)
