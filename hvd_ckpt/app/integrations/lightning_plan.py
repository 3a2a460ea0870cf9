"""The memory plan of a LightningModule, made for the first batch of its training."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn

import hvd_ckpt as hc


class TrainingStep(nn.Module):
    """The module, or ``function``, as the one forward pass that plans and shards see."""

    function: Callable[..., Any] | None = None

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """A training step."""
        return (self.function or self.module)(*args, **kwargs)


def apply_plan(strategy: Any, budget: int | float | str) -> None:
    """Plans the training step of a strategy's module, and applies the plan."""
    module, plugin, whole = strategy.lightning_module, strategy.precision_plugin, strategy.model
    with isolate_rng():
        batch, number = first_batch(module.trainer.fit_loop._data_source)
        batch = module._on_before_batch_transfer(plugin.convert_input(batch))
        batch = strategy.batch_to_device(batch)
    given = (batch, number)[: len(inspect.signature(module.training_step).parameters)]

    def step(*args: Any) -> Any:
        with plugin.train_step_context():
            return module.training_step(*args)

    # The planner's steps are not steps of the training: nothing of them is logged.
    module.log = lambda *args, **options: None
    whole.function = step
    try:
        mixed = plugin.precision if isinstance(plugin, MixedPrecision) else ""
        autocast = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(mixed)
        plan = hc.plan(
            whole,
            *given,
            loss=lambda output: output["loss"] if isinstance(output, Mapping) else output,
            budget=budget,
            autocast=autocast,
        )
    finally:
        del module.log
        whole.function = None
    plan.apply(whole)


def first_batch(source: Any) -> tuple[Any, int]:
    """The first batch of a loop's source of loaders, and its number. The loop will begin with the same batch."""
    given = source.dataloader()
    loaders = given if isinstance(given, CombinedLoader) else CombinedLoader(given, "max_size_cycle")
    states = loaders._state_dicts()
    generators = [
        (generator, generator.get_state())
        for loader in loaders.flattened
        if (generator := getattr(loader, "generator", None)) is not None
    ]
    # An iterator gives each batch once.
    pairs = [itertools.tee(one) if isinstance(one, Iterator) else (one, one) for one in loaders.flattened]
    loaders.flattened = [one for one, _ in pairs]
    batch, number, _ = next(iter(loaders))
    loaders.reset()
    loaders.flattened = [one for _, one in pairs]
    if given is source.instance and given is not loaders:
        source.instance = loaders.iterables
    loaders._load_state_dicts(states)
    for generator, state in generators:
        generator.set_state(state)
    return batch, number
