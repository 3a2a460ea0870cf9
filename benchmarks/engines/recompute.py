"""Ways to recompute, in one process: what PyTorch offers, a DenseNet checkpointed in its layers, and this library's plans.

All have the parameters of one model, begin each step with the same random state and buffers, and never update.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
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

from hvd_ckpt.app.compare.runner.engine import Engine
from hvd_ckpt.app.compare.runner.engines import OneProcess, variant

Forward = Callable[[Tensor], Tensor]

aten = torch.ops.aten
ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
}
MATMULS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
EXPENSIVE = {*ATTENTION, *MATMULS, aten.convolution.default, aten.mkldnn_rnn_layer.default, aten._cudnn_rnn.default}  # fmt: skip

_starts: dict[int, Tensor] = {}  # of buffers, by address: what they were before the first step
_planners: dict[int, Any] = {}  # by the address of a model's first parameter
_plans: dict[tuple[int, Any], Any] = {}


class Calls(nn.Module):
    """A model that runs by a function."""

    def __init__(self, model: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.model, self.run = model, forward

    def forward(self, inputs: Tensor) -> Tensor:
        return self.run(inputs)


class NoRecomputation(OneProcess):
    """No recomputation, and the base of all ways to recompute."""

    title = "no recomputation"
    shares = True

    def wrap(self, model: nn.Module, optimizer: Optimizer, passes: int = 1) -> tuple[nn.Module, Optimizer]:
        for buffer in model.buffers():
            _starts.setdefault(buffer.data_ptr(), buffer.clone())
        return Calls(model, self.recomputing(model)), optimizer

    def recomputing(self, model: Any) -> Forward:
        """The function that runs a chain of blocks, which it may change."""
        run: Forward = model
        return run

    def prepare(self, model: nn.Module) -> None:
        torch.manual_seed(0)
        with torch.no_grad():
            for buffer in model.buffers():
                buffer.copy_(_starts[buffer.data_ptr()])
        # Gradients stay, so that they belong to what a step begins with and not to its peak.
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()

    def accumulate(self, model: nn.Module, optimizer: Any, losses: Sequence[Callable[[], Tensor]]) -> float:
        loss = losses[0]()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    def update(self, model: nn.Module, optimizer: Any) -> None:
        """Nothing: every step begins with the same weights."""


class Sequential(NoRecomputation):
    """PyTorch's ``checkpoint_sequential``; ``chunks``: of the chain."""

    title = "checkpoint_sequential"

    def recomputing(self, model: Any) -> Forward:
        chunks = min(self.options["chunks"], len(model))
        return functools.partial(checkpoint_sequential, model, chunks, use_reentrant=False)


class Blocks(NoRecomputation):
    """PyTorch's ``checkpoint`` around every inner block, or every second one; with a ``saved`` set of operators, selectively."""

    title = "checkpoint every block"
    defaults: ClassVar[dict[str, Any]] = {"stride": 1, "saved": None, "halve": False}

    def recomputing(self, model: Any) -> Forward:
        options: dict[str, Any] = {"use_reentrant": False}
        if self.options["saved"] is not None:
            options["context_fn"] = self._contexts
        chosen = range(1, len(model) - 1, self.options["stride"])
        return walk(
            model, {number: functools.partial(checkpoint, model[number], **options) for number in chosen}
        )

    def _contexts(self) -> Any:
        # Forward pass and recomputation each count for themselves, and so come to the same choice.
        counts = {False: 0, True: 0}

        def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            if operator not in self.options["saved"]:
                return CheckpointPolicy.PREFER_RECOMPUTE
            halved = self.options["halve"] and operator not in ATTENTION
            counts[context.is_recompute] += halved
            if halved and counts[context.is_recompute] % 2:
                return CheckpointPolicy.PREFER_RECOMPUTE
            return CheckpointPolicy.MUST_SAVE

        return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]


class Layers(NoRecomputation):
    """A DenseNet whose layers' concatenation, norm, activation and 1x1 convolution are checkpointed, as torchvision does it."""

    title = "checkpoint in each layer"

    def recomputing(self, model: Any) -> Forward:
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


class Compiled(NoRecomputation):
    """``torch.compile`` with an activation memory ``budget``: 1 for what it keeps by itself, 0 for as little as it can."""

    title = "torch.compile"

    def recomputing(self, model: Any) -> Forward:
        def compile_graph(
            graph: Any, inputs: Any
        ) -> Any:  # one for each budget: compiled code is kept by backend
            from torch._functorch import config
            from torch._inductor.compile_fx import compile_fx

            with config.patch(activation_memory_budget=self.options["budget"]):
                return compile_fx(graph, inputs)

        compiled: Forward = torch.compile(model, backend=compile_graph)
        return compiled


class Planned(NoRecomputation):
    """This library's plan within a ``budget``, or within the peak of the engine that it is ``like``."""

    title = "plan"
    defaults: ClassVar[dict[str, Any]] = {"budget": None, "like": None}

    def recomputing(self, model: Any) -> Forward:
        from hvd_ckpt.planning.planner import Planner

        like, (inputs, targets) = self.options["like"], self.example
        if like is not None and like not in self.peaks:
            raise RuntimeError(f"{like} has no peak to plan for")
        budget = self.peaks[like] if like is not None else self.options["budget"]
        key = next(model.parameters()).data_ptr()
        if key not in _planners:
            _planners[key] = Planner(model, inputs, loss=lambda output: self.workload.loss(output, targets))
        if (key, budget) not in _plans:
            _plans[key, budget] = _planners[key].plan(budget)
        applied: Forward = _plans[key, budget].apply(model)
        return applied


def _through(calls: Sequence[Forward], features: Tensor) -> Tensor:
    for call in calls:
        features = call(features)
    return features


def walk(model: nn.Sequential, replaced: Mapping[int, Forward]) -> Forward:
    """A function that runs the chain with some blocks replaced."""
    calls: list[Forward] = [replaced.get(number, block) for number, block in enumerate(model)]
    return functools.partial(_through, calls)


METHODS: dict[str, type[Engine]] = {
    "none": NoRecomputation,
    **{
        f"sequential-{count}": variant(Sequential, f"{count} chunks", chunks=count) for count in (2, 4, 8, 16)
    },
    "blocks": Blocks,
    "blocks-2": variant(Blocks, "checkpoint every second block", stride=2),
    "layers": Layers,
    "matmuls-saved": variant(Blocks, "selective, matmuls saved", saved=EXPENSIVE),
    "half-saved": variant(Blocks, "selective, every second matmul saved", saved=EXPENSIVE, halve=True),
    "attention-saved": variant(Blocks, "selective, attention saved", saved=ATTENTION),
    **{
        f"compile-{budget:g}": variant(Compiled, f"budget {budget:g}", budget=budget)
        for budget in (1, 0.5, 0)
    },
}
ENGINES: dict[str, type[Engine]] = {
    **METHODS,
    **{f"plan-{name}": variant(Planned, f"plan at the peak of {name}", like=name) for name in METHODS},
    "plan-min": variant(Planned, "plan of the smallest peak", budget="min"),
}
