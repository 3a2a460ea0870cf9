"""The model and the first batch of a run, for commands that look at its step without training: ``plan`` and ``layout``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from hvd_ckpt.app.models import catalog
from hvd_ckpt.app.training.build import assemble
from hvd_ckpt.app.training.config import Config, ConfigError, config_errors
from hvd_ckpt.app.training.model import convert_batch_norms
from hvd_ckpt.app.training.optim import freeze
from hvd_ckpt.planning.step import Sample
from hvd_ckpt.recompute.calls import map_tensors
from hvd_ckpt.utils.named import import_named, is_named


def first_step(config: Config, device: torch.device) -> tuple[nn.Module, Callable[[int], Sample]]:
    """The model of a run, in training mode, and a function that makes a batch of so many samples, both on a device.

    The samples are those of the run. Without ``data``, a model ``module:function`` has its own: the function returns (model, tuple
    of its arguments, loss or None), for a number of samples if it takes ``batch``.

    Args:
        device: on ``meta``, no memory is taken.

    Raises:
        ConfigError: as of :func:`assemble`, or the function returns something else, or ``freeze`` or
            ``batch_norm`` do not fit the model.
    """
    named = is_named(config.model) and config.data is None
    model, sample = (_returned if named else _assembled)(config, device)
    with config_errors():
        if config.freeze is not None:
            freeze(model, config.freeze)
        return convert_batch_norms(model, config), sample


def _assembled(config: Config, device: torch.device) -> tuple[nn.Module, Callable[[int], Sample]]:
    parts = assemble(config, device)

    def sample(count: int) -> Sample:
        numbers = [number % len(parts.train) for number in range(count)]
        batch = parts.train.batch(numbers, [0] * count).to(device)
        return Sample(batch.inputs, batch.shared, lambda output: parts.objective.loss(output, batch))

    return parts.model.to(device), sample


def _returned(config: Config, device: torch.device) -> tuple[nn.Module, Callable[[int], Sample]]:
    with config_errors():
        entry = catalog.find(config.model)
        entry.check_options(config.model_options)

    def call(count: int) -> tuple[nn.Module, Sample]:
        torch.manual_seed(config.seed)
        sizes = {"batch": count} if "batch" in entry.options else {}
        match import_named("model", config.model)(**{**sizes, **config.model_options}):
            case (nn.Module() as model, tuple() as args, loss) if loss is None or callable(loss):
                args = map_tensors(lambda tensor: tensor.to(device), torch.Tensor, args)
                return model.to(device), Sample(args, {}, loss)
            case other:
                raise ConfigError(
                    f"model {config.model}: it returned {type(other).__name__}, and must return (model, tuple of sample arguments, "
                    "loss or None), or give data"
                )

    return call(1)[0], lambda count: call(count)[1]
