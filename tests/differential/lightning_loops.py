"""Loops of :mod:`loops` through Lightning's Trainer."""

from __future__ import annotations

import functools
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import loops
import torch
from lightning.pytorch.plugins import MixedPrecision
from loops import LIMITS, Loop, Net, draw_loop, loader_of, optimizers_of, owned, samples_of, schedule_of
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import hvd_ckpt as hc
from hvd_ckpt.app.integrations.lightning import HorovodStrategy

SKIPS = ("hook", "callback", "optimizer_step")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def draw(seed: int, ranks: int, tensor: int = 1) -> Loop:
    """The loop of a seed, as Lightning's users may have it."""
    loop = draw_loop(seed, ranks)
    if is_manual(loop) and loop.precision == "fp16":
        loop = replace(loop, clip="")  # Lightning clips before it unscales
    at_epoch_end = loop.schedule == "plateau" or (loop.schedule == "epoch" and is_manual(loop))
    if at_epoch_end and loop.save % loop.steps == 0:
        # Lightning calls no hook of an epoch's end when it resumes behind the last batch.
        loop = replace(loop, save=0)
    if loop.sampler == "trainer":
        loop = replace(loop, shuffle=True)  # as Lightning's own sampler does in training
    return loop


def is_manual(loop: Loop) -> bool:
    """Whether the user takes the steps of a loop."""
    return loop.optimizers > 1 or loop.seed % 4 == 0


class Module(pl.LightningModule):
    """The model of a loop, its optimizers, and what its user does in hooks."""

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self.loop, self.net = loop, Net(loop)
        self.data = samples_of(replace(loop, bad=()))
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.steps = False  # whether a step follows this pass
        self.automatic_optimization = not is_manual(loop)
        bad = loop.bad and loop.precision != "fp16"  # whose scaler skips steps
        self.skips = SKIPS[loop.seed % len(SKIPS)] if bad else ""

    def is_last(self, batch_idx: int) -> bool:
        """Whether this is the last pass before a step."""
        return (batch_idx + 1) % self.loop.accumulate == 0 or batch_idx + 1 == self.loop.passes

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        self.steps = self.is_last(batch_idx)
        if self.steps:
            self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        if self.automatic_optimization:
            loss = self.net.loss(*batch)
            self.losses.append(loss.item())
            return loss
        for number, optimizer in enumerate(listed(self.optimizers())):
            self.manual_step(number, optimizer, batch, batch_idx)
        if self.steps:
            self.advance("step")
        return None

    def manual_step(self, number: int, optimizer: Any, batch: Any, batch_idx: int) -> None:
        loop = self.loop
        if loop.toggles:
            self.toggle_optimizer(optimizer)
        loss = self.net.loss(*batch, number)
        self.losses.append(loss.item())
        if batch_idx % loop.accumulate == 0:
            optimizer.zero_grad()
        self.manual_backward(loss / loop.accumulate)
        if self.steps and (not self.skips or self.is_finite(optimizer)):
            if loop.clip:
                self.clip_gradients(optimizer, LIMITS[loop.clip], loop.clip)
            optimizer.step()
        if loop.toggles:
            self.untoggle_optimizer(optimizer)

    def advance(self, schedule: str, *metric: Any) -> None:
        for one in listed(self.lr_schedulers()) if self.loop.schedule == schedule else ():
            one.step(*metric)

    def is_finite(self, optimizer: Any) -> bool:
        """Whether all gradients of an optimizer are."""
        optimizer = getattr(optimizer, "optimizer", optimizer)
        if self.loop.stage > 1:
            return math.isfinite(hc.clip_grad_norm_(optimizer, math.inf))
        gradients = [parameter.grad for parameter in owned(optimizer) if parameter.grad is not None]
        return all(bool(gradient.isfinite().all()) for gradient in gradients)

    def skip(self) -> None:
        """Skips this step, if its gradients are not finite."""
        if self.steps and not self.is_finite(self.trainer.optimizers[0]):
            self.zero_grad()

    def on_after_backward(self) -> None:
        if self.skips == "hook" and self.automatic_optimization:
            self.skip()

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        if self.skips != "optimizer_step":
            optimizer.step(closure=optimizer_closure)
            return
        optimizer_closure()
        if self.is_finite(optimizer):
            optimizer.step()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.net.loss(*self.data), sync_dist=True)

    def on_train_epoch_end(self) -> None:
        if not self.automatic_optimization:
            self.advance("epoch")
            self.advance("plateau", self.trainer.callback_metrics["val"])

    def configure_optimizers(self) -> Any:
        loop = self.loop
        optimizers = optimizers_of(loop, self.net)
        if not loop.schedule:
            return optimizers
        how = {"interval": "step" if loop.schedule == "step" else "epoch", "monitor": "val"}
        return optimizers, [{"scheduler": schedule_of(loop, one), **how} for one in optimizers]


def listed(found: Any) -> list[Any]:
    """What Lightning gives as it is, if there is one."""
    return found if isinstance(found, list) else [found]


class Acts(pl.Callback):
    """Saves, stops and skips."""

    def __init__(self, loop: Loop, path: Path) -> None:
        self.loop, self.path = loop, path

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        if module.skips == "callback" and module.automatic_optimization:
            module.skip()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, number: int) -> None:
        if not module.is_last(number):
            return
        done = trainer.current_epoch * self.loop.steps + number // self.loop.accumulate + 1
        if done == self.loop.save:
            trainer.save_checkpoint(self.path)
        if done == self.loop.stop:
            trainer.should_stop = True


def fitted(loop: Loop, folder: Path, resume: bool = False) -> tuple[Module, list[float]]:
    path = folder / "checkpoint.ckpt"
    given: dict[str, Any] = {}
    if loop.precision == "fp16":
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        given["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler)]
    else:
        given["precision"] = {"32": "32-true", "bf16": "bf16-mixed"}[loop.precision]
    if loop.clip and not is_manual(loop):
        given |= {"gradient_clip_val": LIMITS[loop.clip], "gradient_clip_algorithm": loop.clip}
    module, data = Module(loop), TensorDataset(*samples_of(loop))
    trainer = pl.Trainer(
        strategy=HorovodStrategy(shard=loop.stage),
        accelerator="cpu",
        max_epochs=loop.epochs,
        accumulate_grad_batches=1 if is_manual(loop) else loop.accumulate,
        use_distributed_sampler=loop.sampler == "trainer",
        callbacks=[Acts(loop, path)],
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **given,
    )
    validation = DataLoader(range(hc.size()), 1, sampler=[0] if loop.sampler != "trainer" else None)
    trainer.fit(
        module, loader_of(loop, data), validation, ckpt_path=path if resume else None, weights_only=False
    )
    return module, module.rates


check = functools.partial(loops.check, run=fitted)
