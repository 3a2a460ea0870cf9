"""Models for ``hvd-ckpt plan``: a model of the catalog with a random batch and its objective, or the result of a function.

Weights and batches are random: a plan follows from shapes alone. Default sizes are those of ``hvd-ckpt train`` and its default
data, so that a plan made for a model fits that model in training.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hvd_ckpt.app.cli.command_line import BadArgument
from hvd_ckpt.app.datasets.text import TEXTS
from hvd_ckpt.app.models import catalog
from hvd_ckpt.data.objectives import OBJECTIVES, Batch
from hvd_ckpt.recompute.calls import map_tensors
from hvd_ckpt.utils.extras import explain_import_error
from hvd_ckpt.utils.named import import_named, is_named

SEED = 0
BATCH = 8  # samples; as in training
CPU = torch.device("cpu")


class PlannedModel(NamedTuple):
    """A model to plan for and its batch, on their device.

    Attributes:
        model: in training mode.
        sample: the model's positional arguments.
        kwargs: its keyword arguments.
        loss: loss of the model's output, or None as for :func:`hvd_ckpt.plan`.
    """

    model: nn.Module
    sample: tuple[Any, ...]
    kwargs: dict[str, Tensor]
    loss: Callable[[Any], Tensor] | None


def build_asked(name: str, *args: Any) -> PlannedModel:
    """:func:`build` for a command.

    Raises:
        BadArgument: there is no such model, or it cannot be built so.
    """
    here = str(Path.cwd())
    # A command does not look in its folder by itself, and module:function is mostly there.
    if "" not in sys.path and here not in sys.path:
        sys.path.insert(0, here)
    try:
        return build(name, *args)
    except ValueError as error:
        raise BadArgument(f"--model: {error}") from None
    except ModuleNotFoundError as error:
        raise BadArgument(f"--model {name}: {explain_import_error(error) or error}") from None


def build(
    name: str,
    sizes: Mapping[str, int],
    options: Mapping[str, Any] | None = None,
    device: torch.device = CPU,
    model: nn.Module | None = None,
) -> PlannedModel:
    """The model of that name in :mod:`hvd_ckpt.app.models.catalog`, of that folder, or what ``module:function`` returns.

    Args:
        name: name of the model, of a folder of a Hugging Face model, or of the function. The function gets sizes and options as
            keyword arguments, and returns (model, tuple of sample arguments, loss or None).
        sizes: sizes of the batch and its content: ``batch``, and by kind of model ``length`` and ``vocabulary``, or ``pixels``,
            ``channels`` and ``classes``.
        options: options of the model.
        device: for model and sample; on ``meta``, no memory is taken.
        model: what was built before, for another batch; a function returns its own all the same.

    Raises:
        ValueError: there is no such model or function, it does not take what is given, or returns something else.
    """
    options = options or {}
    # Weights and samples are the same in each call, so that plans of one model can be compared.
    torch.manual_seed(SEED)
    if is_named(name):
        return _returned(name, sizes, options, device)
    return _of_catalogue(name, sizes, options, device, model)


def _of_catalogue(
    name: str,
    sizes: Mapping[str, int],
    options: Mapping[str, Any],
    device: torch.device,
    model: nn.Module | None,
) -> PlannedModel:
    entry = catalog.find(name)
    entry.check_options(options)
    draw, defaults = _SAMPLES[entry.kind]
    known = {"batch": BATCH, **defaults, **entry.data}
    if entry.folder is not None:
        # The model of a folder has its own vocabulary.
        del known["vocabulary"]
    for size, value in sizes.items():
        if size not in known:
            raise ValueError(
                f"--{size} {value}: the model {name} does not take it, but {_flags(known)} and --model-option"
            )
    known.update(sizes)
    try:
        with device if device.type == "meta" else contextlib.nullcontext():
            model = entry.build(known, options) if model is None else model
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if entry.folder is not None:
        limits = catalog.limits(model)
        known["vocabulary"] = limits.vocabulary
        if limits.length is not None and "length" not in sizes:
            known["length"] = min(known["length"], limits.length)
        elif limits.length is not None and known["length"] > limits.length:
            # A length that was asked for is refused, while the default gives way above.
            raise ValueError(
                f"--length {known['length']}: the model {name} takes {limits.length} tokens at most"
            )
    batch = draw(**known).to(device)
    objective = OBJECTIVES[entry.kind]()
    return PlannedModel(
        model.to(device), batch.inputs, batch.shared, lambda output: objective.loss(output, batch)
    )


def _returned(
    name: str, sizes: Mapping[str, int], options: Mapping[str, Any], device: torch.device
) -> PlannedModel:
    function = import_named("model", name)
    known = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    for given, shown in (
        *((size, f"--{size} {value}") for size, value in sizes.items()),
        *((option, f"--model-option {option}={value}") for option, value in options.items()),
    ):
        if given not in known and not takes_all:
            raise ValueError(f"{shown}: {name} does not take it, but {', '.join(known) or 'no arguments'}")
    made = function(**{**sizes, **options})
    if not (
        isinstance(made, tuple)
        and len(made) == 3
        and isinstance(made[0], nn.Module)
        and isinstance(made[1], tuple)
        and (made[2] is None or callable(made[2]))
    ):
        raise ValueError(
            f"{name} returned {type(made).__name__}, and must return (model, tuple of sample arguments, loss or None)"
        )
    model, sample, loss = made
    sample = map_tensors(lambda tensor: tensor.to(device), torch.Tensor, sample)
    return PlannedModel(model.to(device), sample, {}, loss)


def _flags(names: Mapping[str, Any]) -> str:
    return ", ".join(f"--{name}" for name in names)


class _RandomTokens:
    """Random text with the attributes of :class:`~hvd_ckpt.app.datasets.tokens.Tokens` that samples need."""

    def __init__(self, vocabulary: int, count: int) -> None:
        self.array = torch.randint(vocabulary, (count,)).numpy()
        self.ordinary, self.mask, self.boundary = vocabulary, vocabulary - 1, None

    def __len__(self) -> int:
        return len(self.array)


def _text(kind: str, batch: int, length: int, vocabulary: int) -> Batch:
    # One token more than the samples take, since the targets of causal models lie one token ahead.
    samples = TEXTS[kind](_RandomTokens(vocabulary, max(batch, 2) * length + 1), length)
    made: Batch = samples.batch(range(batch), [0] * batch)
    return made


def _images(batch: int, pixels: int, channels: int, classes: int) -> Batch:
    return Batch((torch.randn(batch, channels, pixels, pixels),), torch.randint(classes, (batch,)))


def _volumes(batch: int, pixels: int, channels: int, classes: int) -> Batch:
    shape = (pixels, pixels, pixels)
    return Batch((torch.randn(batch, channels, *shape),), torch.randint(classes, (batch, *shape)))


_BYTES = {"vocabulary": 260}  # with four special tokens
_DIGITS = {"channels": 1, "classes": 10}
_ELLIPSOIDS = {"batch": 2, "channels": 1, "classes": 2}  # a V-Net takes seconds for one

_SAMPLES: dict[str, tuple[Callable[..., Batch], dict[str, int]]] = {
    **{kind: (functools.partial(_text, kind), _BYTES) for kind in TEXTS},
    "images": (_images, _DIGITS),
    "volumes": (_volumes, _ELLIPSOIDS),
}
"""By kind of model: a function that draws a batch, and the sizes that follow from the default data in training."""
