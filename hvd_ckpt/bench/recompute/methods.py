"""The methods: no recomputation, what PyTorch offers, a DenseNet checkpointed in its layers, and other projects.

A method gets a model of its own (a plain chain that shares its parameters with everyone else's) and returns the function that
runs it. This library's plans are made in :mod:`hvd_ckpt.bench.recompute.case`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
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

from hvd_ckpt.bench.harness.workloads import CLASSES, DenseNet, RandomBatch
from hvd_ckpt.bench.recompute.measure import Forward
from hvd_ckpt.bench.recompute.peers import (
    Builder,
    Ckptplan,
    build_compiled,
    build_rockmate,
    build_torch_remat,
    inner_blocks,
    walk,
)

KEEP, OURS = "keep", "ours"
FAMILIES = (
    KEEP,
    "sequential",
    "blocks",
    "layers",
    "selective",
    "torch_remat",
    "ckptplan",
    "rockmate",
    "compile",
    OURS,
)
"""The values of ``--methods``, in the order of the tables."""

COUNTS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
FRACTIONS = (0.7, 0.5, 0.3, 0.15)  # budgets of the other planners, in their own measure

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
    ckptplan = Ckptplan()
    named: dict[str, dict[str, Builder]] = {
        KEEP: {"no recomputation": lambda model, inputs, needed: model},
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
        "ckptplan": {
            **{f"ckptplan, {fraction:g}x": ckptplan.build(fraction) for fraction in FRACTIONS},
            "ckptplan, least memory": ckptplan.build(None),
        },
        "rockmate": {f"rockmate, {fraction:g}x": build_rockmate(fraction) for fraction in FRACTIONS},
        "compile": {
            f"torch.compile, budget {budget:g}": build_compiled(budget) for budget in (1, *FRACTIONS, 0)
        },
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
    return lambda model, inputs, needed: functools.partial(
        checkpoint_sequential, model, count, use_reentrant=False
    )


def _blocks(stride: int) -> Builder:
    def build(model: nn.Sequential, inputs: torch.Tensor, needed: int) -> Forward:
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

    def build(model: nn.Sequential, inputs: torch.Tensor, needed: int) -> Forward:
        save = functools.partial(checkpoint, use_reentrant=False, context_fn=contexts)
        return walk(model, {index: functools.partial(save, model[index]) for index in inner_blocks(model)})

    return build


# ------------------------------------------------------------------------------------ a DenseNet in its layers


def _in_layers(workload: DenseNet) -> dict[str, Builder]:
    """Concatenation, norm, activation and 1x1 convolution of each dense layer checkpointed; and the efficient DenseNet."""

    def efficient(model: nn.Sequential, inputs: torch.Tensor, needed: int) -> Forward:
        from hvd_ckpt.app.models.densenet import densenet

        found = densenet(workload.depth, classes=CLASSES, efficient=True).train()
        found.load_state_dict(
            model.state_dict(keep_vars=True), assign=True
        )  # the same parameters and buffers
        return found

    return {
        "checkpoint in each layer, reentrant": lambda model, inputs, needed: _layer_by_layer(model, True),
        "checkpoint in each layer": lambda model, inputs, needed: _layer_by_layer(model, False),
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
