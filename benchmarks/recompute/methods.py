"""The methods: no recomputation, what PyTorch offers, a DenseNet checkpointed in its layers, and torch_remat.

A method gets a model of its own (a plain chain that shares its parameters with everyone else's) and returns the function that
runs it. A project that is missing or does not run is an error of its own methods alone. This library's plans are made in
:mod:`benchmarks.recompute.case`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from benchmarks.recompute.measure import Forward
from hvd_ckpt.app.compare.runner.workloads import CLASSES, DenseNet, RandomBatch

Builder = Callable[[nn.Sequential, torch.Tensor], Forward]
"""A chain, and the inputs it will get, to what runs the chain."""

KEEP, OURS = "keep", "ours"
FAMILIES = (KEEP, "sequential", "blocks", "layers", "selective", "torch_remat", "compile", OURS)
"""The values of ``--methods``, in the order of the tables."""

COUNTS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
BUDGETS = (1, 0.7, 0.5, 0.3, 0.15, 0)  # of torch.compile, in its own measure

aten = torch.ops.aten
ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
}
MATMULS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
EXPENSIVE = {
    *ATTENTION,
    *MATMULS,
    aten.convolution.default,
    aten.mkldnn_rnn_layer.default,
    aten._cudnn_rnn.default,
}


@dataclass(frozen=True)
class Method:
    """One way to run a model.

    Attributes:
        name: in tables, unique within a workload.
        family: one of :data:`FAMILIES`.
        build: makes a chain run this way; it may change the chain.
    """

    name: str
    family: str
    build: Builder


def methods(workload: RandomBatch, blocks: int, families: tuple[str, ...]) -> list[Method]:
    """All methods of these families but this library's, for a chain of that many blocks."""
    named: dict[str, dict[str, Builder]] = {
        KEEP: {"no recomputation": lambda model, inputs: model},
        "sequential": {
            f"checkpoint_sequential, {count} chunks": _sequential(count) for count in segment_counts(blocks)
        },
        "blocks": {"checkpoint every block": _blocks(1), "checkpoint every second block": _blocks(2)},
        "layers": _in_layers(workload) if isinstance(workload, DenseNet) else {},
        "selective": {
            "selective, matmuls saved": _selective(EXPENSIVE),
            "selective, every second matmul saved": _selective(EXPENSIVE, halve=True),
            **({"selective, attention saved": _selective(ATTENTION)} if workload.attention else {}),
        },
        "torch_remat": {
            "torch_remat, nothing saved": build_torch_remat(()),
            **{
                f"torch_remat, {name}": build_torch_remat(endings)
                for name, endings in workload.saved_regions.items()
            },
        },
        "compile": {f"torch.compile, budget {budget:g}": build_compiled(budget) for budget in BUDGETS},
    }
    return [
        Method(name, family, build)
        for family, builders in named.items()
        if family in families
        for name, build in builders.items()
    ]


def segment_counts(blocks: int) -> list[int]:
    """Chunk counts for checkpoint_sequential on a chain of ``blocks`` blocks: a few, and one chunk per block."""
    return [*(count for count in COUNTS if count < blocks), blocks]


def _sequential(count: int) -> Builder:
    return lambda model, inputs: functools.partial(checkpoint_sequential, model, count, use_reentrant=False)


def _blocks(stride: int) -> Builder:
    def build(model: nn.Sequential, inputs: torch.Tensor) -> Forward:
        chosen = inner_blocks(model)[::stride]
        return walk(
            model,
            {index: functools.partial(checkpoint, model[index], use_reentrant=False) for index in chosen},
        )

    return build


def _selective(saved: set[Any], halve: bool = False) -> Builder:
    """Per block, what ``saved`` calls return is kept; of matrix products only every second, if ``halve``."""

    def contexts() -> Any:
        products = {False: 0, True: 0}  # forward and recomputation count for themselves

        def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            keep = operator in saved
            if keep and halve and operator not in ATTENTION:
                products[context.is_recompute] += 1
                keep = products[context.is_recompute] % 2 == 0
            return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]

    def build(model: nn.Sequential, inputs: torch.Tensor) -> Forward:
        save = functools.partial(checkpoint, use_reentrant=False, context_fn=contexts)
        return walk(model, {index: functools.partial(save, model[index]) for index in inner_blocks(model)})

    return build


def _in_layers(workload: DenseNet) -> dict[str, Builder]:
    """Concatenation, norm, activation and 1x1 convolution of each dense layer checkpointed; and the efficient DenseNet."""

    def efficient(model: nn.Sequential, inputs: torch.Tensor) -> Forward:
        from hvd_ckpt.app.models.densenet import densenet

        twin = densenet(workload.depth, classes=CLASSES, efficient=True).train()
        twin.load_state_dict(model.state_dict(keep_vars=True), assign=True)  # the same parameters and buffers
        return twin

    return {
        "checkpoint in each layer, reentrant": lambda model, inputs: _layer_by_layer(model, True),
        "checkpoint in each layer": lambda model, inputs: _layer_by_layer(model, False),
        "efficient DenseNet of hvd_ckpt": efficient,
    }


def _layer_by_layer(model: nn.Sequential, use_reentrant: bool) -> Forward:
    """As torchvision's DenseNet with ``memory_efficient=True`` and the pytorch-checkpoint project's: dense layers pass on a list of
    features."""
    from hvd_ckpt.app.models.densenet import DenseLayer

    def narrow(modules: Sequence[nn.Module], *features: torch.Tensor) -> torch.Tensor:
        return _through(modules, torch.cat(features, dim=1))

    def forward(images: torch.Tensor) -> torch.Tensor:
        features: tuple[torch.Tensor, ...] = (images,)
        for block in model:
            if isinstance(block, DenseLayer):
                modules = list(block)
                narrowed = checkpoint(narrow, modules[:3], *features, use_reentrant=use_reentrant)
                features = (*features, _through(modules[3:], narrowed))
            else:
                features = (block(features[0] if len(features) == 1 else torch.cat(features, dim=1)),)
        return features[0]

    return forward


def _through(modules: Sequence[nn.Module], features: torch.Tensor) -> torch.Tensor:
    for module in modules:
        features = module(features)
    return features


def inner_blocks(model: nn.Sequential) -> list[int]:
    """The blocks that a loop over layers covers: all but the first (embedding, stem) and the last (head)."""
    return list(range(1, len(model) - 1))


def walk(model: nn.Sequential, replaced: Mapping[int, Forward]) -> Forward:
    """A function that runs the chain with some blocks replaced."""
    calls: list[Forward] = [replaced.get(index, block) for index, block in enumerate(model)]

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        for call in calls:
            hidden = call(hidden)
        return hidden

    return forward


class _RandomState:
    """torch_remat leaves random numbers to its user; this is the hook that its documentation describes."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device if device.type == "cuda" else None

    def snapshot(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        return torch.get_rng_state(), None if self.cuda is None else torch.cuda.get_rng_state(self.cuda)

    def restore(self, state: tuple[torch.Tensor, torch.Tensor | None]) -> None:
        torch.set_rng_state(state[0])
        if self.cuda is not None and state[1] is not None:
            torch.cuda.set_rng_state(state[1], self.cuda)


def build_torch_remat(endings: Sequence[str]) -> Builder:
    """torch_remat (Meta): each layer a checkpoint; submodules whose names end so are regions whose activations are saved."""

    def save(remat: Any, module: nn.Module, name: str) -> None:
        region = remat.region(module.forward, name, recompute=False)

        def forward(*args: Any, **kwargs: Any) -> Any:
            result = region(*args, **kwargs)
            for tensor in (result,) if isinstance(result, torch.Tensor) else result:
                if isinstance(tensor, torch.Tensor):
                    remat.recompute_needs_tensor(tensor)
            return result

        module.forward = forward

    def build(model: nn.Sequential, inputs: torch.Tensor) -> Forward:
        import torch_remat as remat

        # Saving and restoring 5 KB of random state is only for those who draw.
        draws = any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())
        hooks = (_RandomState(inputs.device),) if draws else ()
        replaced: dict[int, Forward] = {}
        for index in inner_blocks(model):
            for name, module in list(model[index].named_modules()):
                if any(f".{name}".endswith(f".{ending}") for ending in endings):
                    save(remat, module, name)
            make = remat.checkpoint(region_name=f"block{index}", recompute_state_hooks=hooks)
            replaced[index] = make(model[index])
        return walk(model, replaced)

    return build


def build_compiled(budget: float) -> Builder:
    """``torch.compile`` with an activation memory budget: 1 for what it keeps by itself, 0 for as little as it can."""

    def compile_graph(
        graph: Any, inputs: Any
    ) -> Any:  # one for each budget: compiled code is kept by backend
        from torch._functorch import config
        from torch._inductor.compile_fx import compile_fx

        with config.patch(activation_memory_budget=budget):
            return compile_fx(graph, inputs)

    def build(model: nn.Sequential, inputs: torch.Tensor) -> Forward:
        compiled: Forward = torch.compile(model, backend=compile_graph)
        return compiled

    return build
