"""Loops of :mod:`loops` through the Trainer of transformers."""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import loops
import transformers
from loops import LIMITS, Loop, Net, Reference, draw_loop, loader_of, optimizers_of, samples_of, schedule_of
from torch import Tensor, nn
from transformers.trainer_callback import PrinterCallback

import hvd_ckpt as hc
from hvd_ckpt.app.integrations.transformers import Trainer

transformers.logging.set_verbosity_error()
SEED = 5


def draw(seed: int, ranks: int, tensor: int = 1) -> Loop:
    """The loop of a seed, as users of the Trainer may have it."""
    loop = draw_loop(seed, ranks, optimizers=1, toggles=False, running=False)
    changes: dict[str, Any] = {}
    if loop.precision == "fp16":  # refused
        changes["precision"] = "bf16"
    if loop.clip == "value":
        changes["clip"] = "norm"
    if loop.schedule == "epoch":  # the Trainer steps schedules in each step
        changes["schedule"] = "step"
    if loop.sampler == "trainer":
        changes["shuffle"] = True
    if loop.schedule == "plateau" and loop.save % loop.steps == 0:
        changes["save"] = 0  # the Trainer evaluates after it has saved, and not in a run that resumes
    return dataclasses.replace(loop, **changes)


class InOneProcess(Reference):
    sampler_seed = SEED
    mean_of_passes = buffers_of_rank_0 = True


class Model(nn.Module):
    """Takes the columns of a batch, and returns the loss."""

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self.net = Net(loop)
        self.losses: list[float] = []

    def forward(self, x: Tensor, y: Tensor, factor: Tensor) -> dict[str, Tensor]:
        loss = self.net.loss(x, y, factor)
        if self.training:
            self.losses.append(loss.item())
        return {"loss": loss}


class Acts(transformers.TrainerCallback):
    """Saves, stops and skips, and notes the learning rates. In every other loop rank 0 decides alone."""

    def __init__(self, loop: Loop) -> None:
        self.loop, self.rates = loop, []
        self.decides = hc.rank() == 0 or loop.seed % 2 == 0

    def on_pre_optimizer_step(self, *_: Any, optimizer: Any, **others: Any) -> None:
        if self.loop.bad and not math.isfinite(hc.clip_grad_norm_(optimizer.optimizer, math.inf)):
            optimizer.zero_grad()

    def on_optimizer_step(self, *_: Any, optimizer: Any, **others: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self.decides:
            control.should_save = state.global_step == self.loop.save
            control.should_training_stop |= state.global_step == self.loop.stop


class Own(Trainer):
    """A Trainer with the data and, in every third loop, the schedule of a user's subclass."""

    loop: Loop

    def get_train_dataloader(self) -> Any:
        loop = self.loop
        if loop.sampler == "trainer":
            return super().get_train_dataloader()
        loader = loader_of(loop, self.train_dataset, collate_fn=self.data_collator)
        return self.accelerator.prepare(loader)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.lr_scheduler is None and self.loop.schedule == "step":
            self.lr_scheduler = schedule_of(self.loop, self.optimizer)
        return super().create_scheduler(num_training_steps, optimizer)


def rows_of(loop: Loop) -> list[dict[str, Tensor]]:
    return [{"x": x, "y": y, "factor": factor} for x, y, factor in zip(*samples_of(loop))]


def trained(loop: Loop, folder: Path, resume: bool = False) -> tuple[Model, list[float]]:
    given: dict[str, Any] = {"lr_scheduler_type": "constant"}
    if loop.schedule == "plateau":
        kwargs = {"factor": 0.5, "patience": 0, "threshold": 0.2}
        given = {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": kwargs}
        given |= {"eval_strategy": "epoch", "metric_for_best_model": "loss", "greater_is_better": False}
    arguments = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=loop.batch,
        per_device_eval_batch_size=loop.samples,
        gradient_accumulation_steps=loop.accumulate,
        num_train_epochs=loop.epochs,
        max_grad_norm=LIMITS.get(loop.clip, 0.0),
        bf16=loop.precision == "bf16",
        seed=SEED,
        label_names=["y"],
        save_strategy="no",
        logging_strategy="no",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **given,
    )
    model, acts = Model(loop), Acts(loop)
    (optimizer,) = optimizers_of(loop, model.net)
    by_user = loop.schedule == "step" and loop.seed % 3
    trainer = Own(
        model,
        arguments,
        train_dataset=rows_of(loop),
        eval_dataset=rows_of(dataclasses.replace(loop, bad=())),
        callbacks=[acts],
        optimizers=(optimizer, schedule_of(loop, optimizer) if by_user else None),
        shard=loop.stage,
    )
    trainer.loop = loop
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{loop.save}") if resume else None)
    return model, acts.rates


check = functools.partial(loops.check, run=trained, reference=InOneProcess)
