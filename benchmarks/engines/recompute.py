"""Ways to recompute, in one process: what PyTorch offers, a DenseNet checkpointed in its layers, and this library's plans.

All begin each step with the same parameters, random state and buffers, and never update.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import hvd_ckpt as hc
from benchmarks.probes import SETTLE
from hvd_ckpt.app.compare.runner.engine import Engine, run_backward
from hvd_ckpt.app.compare.runner.engines import OneProcess, variant

Forward = Callable[[Tensor], Tensor]
Operators = set[Any] | None

aten = torch.ops.aten
ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
}
MATMULS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
EXPENSIVE = {*ATTENTION, *MATMULS, aten.convolution.default, aten.mkldnn_rnn_layer.default, aten._cudnn_rnn.default}  # fmt: skip

_planners: dict[str, Any] = {}  # by the workload
_plans: dict[tuple[str, Any], Any] = {}  # and by the way whose peak they have


class Calls(nn.Module):
    """A model that runs by a function."""

    def __init__(self, model: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.model, self.run = model, forward

    def forward(self, inputs: Tensor) -> Tensor:
        return self.run(inputs)


class Recomputation(OneProcess):
    """A ``way`` to recompute: a function that takes a chain of blocks, which it may change, to what runs it."""

    defaults: ClassVar[dict[str, Any]] = {"way": lambda model: model}

    def wrap(self, model: nn.Module, optimizer: Optimizer, passes: int = 1) -> tuple[nn.Module, Optimizer]:
        self._starts = [buffer.clone() for buffer in model.buffers()]
        return Calls(model, self.recomputing(model)), optimizer

    def recomputing(self, model: Any) -> Forward:
        run: Forward = self.options["way"](model)
        return run

    def prepare(self, model: nn.Module) -> None:
        torch.manual_seed(0)
        with torch.no_grad():
            for buffer, start in zip(model.buffers(), self._starts):
                buffer.copy_(start)
        # Gradients stay, so that they belong to what a step begins with and not to its peak.
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()

    def accumulate(self, model: nn.Module, optimizer: Any, losses: Sequence[Callable[[], Tensor]]) -> float:
        return run_backward(losses[0], 1)

    def update(self, model: nn.Module, optimizer: Any) -> None:
        """Nothing: every step begins with the same weights."""


class Planned(Recomputation):
    """This library's plan within a ``budget``, or within the peak of a step in the ``way``."""

    def recomputing(self, model: Any) -> Forward:
        from hvd_ckpt.planning.planner import Planner

        inputs, targets = self.example
        name, way = repr(self.workload), self.options["way"]
        if name not in _planners:
            _planners[name] = Planner(model, inputs, loss=lambda output: self.workload.loss(output, targets))
        if (name, way) not in _plans:
            _plans[name, way] = _planners[name].plan(self.options.get("budget") or self._peak(model))
        applied: Forward = _plans[name, way].apply(model)
        return applied

    def _peak(self, model: nn.Module) -> int:
        """Bytes that a step in the way takes above its start."""
        inputs, targets = self.example
        run = super().recomputing(model)

        def step() -> None:
            self.prepare(model)
            self.accumulate(model, None, [lambda: self.workload.loss(run(inputs), targets)])

        for _ in range(SETTLE):
            step()
        gc.collect()
        return hc.measure_peak(step, self.device).peak_bytes


def sequential(model: nn.Sequential, chunks: int) -> Forward:
    """PyTorch's ``checkpoint_sequential``."""
    return functools.partial(checkpoint_sequential, model, min(chunks, len(model)), use_reentrant=False)


def blocks(model: nn.Sequential, stride: int = 1, saved: Operators = None, halve: bool = False) -> Forward:
    """PyTorch's ``checkpoint`` around every inner block, or every second one; where operators are ``saved``, selectively."""

    def contexts() -> Any:
        # Forward pass and recomputation each count for themselves, and so come to the same choice.
        counts = {False: 0, True: 0}

        def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            if saved is None or operator not in saved:
                return CheckpointPolicy.PREFER_RECOMPUTE
            halved = halve and operator not in ATTENTION
            counts[context.is_recompute] += halved
            if halved and counts[context.is_recompute] % 2:
                return CheckpointPolicy.PREFER_RECOMPUTE
            return CheckpointPolicy.MUST_SAVE

        return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]

    options: dict[str, Any] = {"use_reentrant": False} | ({} if saved is None else {"context_fn": contexts})
    calls: list[Forward] = list(model)
    for number in range(1, len(model) - 1, stride):
        calls[number] = functools.partial(checkpoint, model[number], **options)
    return functools.partial(_through, calls)


def layers(model: nn.Sequential) -> Forward:
    """A DenseNet whose layers' concatenation, norm, activation and 1x1 convolution are checkpointed, as torchvision does it."""
    from hvd_ckpt.app.models.densenet import DenseLayer

    def narrow(modules: Sequence[nn.Module], *features: Tensor) -> Tensor:
        return _through(modules, torch.cat(features, dim=1))

    def forward(images: Tensor) -> Tensor:
        features: tuple[Tensor, ...] = (images,)
        for block in model:
            if isinstance(block, DenseLayer):
                modules = list(block)
                narrowed = checkpoint(narrow, modules[:3], *features, use_reentrant=False)
                features = (*features, _through(modules[3:], narrowed))
            else:
                features = (block(features[0] if len(features) == 1 else torch.cat(features, dim=1)),)
        return features[0]

    return forward


def _through(calls: Sequence[Forward], features: Tensor) -> Tensor:
    for call in calls:
        features = call(features)
    return features


WAYS: dict[str, Callable[[Any], Forward]] = {
    **{f"sequential-{count}": functools.partial(sequential, chunks=count) for count in (2, 4, 8, 16)},
    "blocks": blocks,
    "blocks-2": functools.partial(blocks, stride=2),
    "layers": layers,
    "matmuls-saved": functools.partial(blocks, saved=EXPENSIVE),
    "half-saved": functools.partial(blocks, saved=EXPENSIVE, halve=True),
    "attention-saved": functools.partial(blocks, saved=ATTENTION),
}
ENGINES: dict[str, type[Engine]] = {
    "none": Recomputation,
    **{name: variant(Recomputation, way=way) for name, way in WAYS.items()},
    **{f"plan-{name}": variant(Planned, way=way) for name, way in WAYS.items()},
    "plan-min": variant(Planned, budget="min"),
}
