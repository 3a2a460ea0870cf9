"""Engines that average weights: this library's, and PyTorch's as its documentation tells its user to write it."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

import hvd_ckpt as hc
from hvd_ckpt.app.compare.runner.engine import Engine, OnTorch
from hvd_ckpt.app.compare.runner.engines import HvdCkpt, variant


class Local(HvdCkpt):
    """This library's local SGD, with an average after ``every`` steps; buffers stay each rank's own, as with the others."""

    reduces_by = ""

    def wrap(self, model: nn.Module, optimizer: Optimizer, passes: int = 1) -> tuple[nn.Module, Optimizer]:
        return model, hc.LocalSGD(optimizer, list(model.named_parameters()), **self.options)


class ModelAverager(OnTorch):
    """PyTorch's PeriodicModelAverager, which averages the weights after each ``every`` steps of the optimizer."""

    def wrap(self, model: nn.Module, optimizer: Optimizer, passes: int = 1) -> tuple[nn.Module, Optimizer]:
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

        every = self.options["every"]
        # It counts steps from 0, and averages when `warmup_steps` and any number of periods have passed: with
        # this warm-up after `every` steps for the first time.
        averager = PeriodicModelAverager(period=every, warmup_steps=every - 1)
        optimizer.register_step_post_hook(lambda *_: averager.average_parameters(model.parameters()))
        return model, optimizer


def _diloco(every: int, **options: Any) -> type[Engine]:
    """DiLoCo of this library; the momentum suits runs of some hundred steps."""
    return variant(Local, every=every, outer=hc.Nesterov(0.7, 0.7), **options)


ENGINES: dict[str, type[Engine]] = {
    **{f"local-{every}": variant(Local, every=every) for every in (10, 50)},
    **{f"diloco-{every}": _diloco(every) for every in (10, 50, 100)},
    "fragments-50": _diloco(50, fragments=4, delay=5),
    "int8-50": _diloco(50, wire="int8"),
    "averager": variant(ModelAverager, every=50),
}
