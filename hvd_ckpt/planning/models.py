"""Models that ``hvd-ckpt plan`` knows by name, each with a batch and a loss.

To add one, write a function and enter it in :data:`MODELS`. All start from random weights and random batches: what a plan
decides follows from shapes. GPT, LSTM and DenseNet are the chains of the recomputation benchmark; those of
``transformers`` are planned for as that library has them.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from hvd_ckpt.benchmark.recompute.workloads import CLASSES, IGNORED, DenseNet, Gpt, Lstm, Workload
from hvd_ckpt.models.densenet import DEPTHS

__all__ = ["MODELS", "Job", "build"]

SEED = 0


class Job(NamedTuple):
    """What is planned for.

    Attributes:
        model: in training mode.
        sample: the model's positional arguments.
        loss: of the model's output, or None as for :func:`hvd_ckpt.plan`.
    """

    model: nn.Module
    sample: tuple[Any, ...]
    loss: Callable[[Any], Tensor] | None


def build(name: str, given: Mapping[str, Any]) -> Job:
    """The model of that name in :data:`MODELS`, or what ``module:function`` returns.

    Args:
        name: of the model or the function; the function returns (model, tuple of sample arguments, loss or None).
        given: keyword arguments, such as ``batch``.

    Raises:
        ValueError: there is no such model or function, it does not take what is given, or returns something else.
    """
    function = MODELS.get(name) or _own(name)
    known = inspect.signature(function).parameters
    for option, value in given.items():
        if option not in known and not any(one.kind is one.VAR_KEYWORD for one in known.values()):
            takes = ", ".join(f"--{one}" for one in known) or "no options"
            raise ValueError(f"--{option} {value}: the model {name} has none, it takes {takes}")
    torch.manual_seed(SEED)
    made = function(**given)
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
    return Job(*made)


def _own(name: str) -> Callable[..., Any]:
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(
            f"no model '{name}': choose one of {', '.join(MODELS)}, or give module:function of your own"
        )
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"no model '{name}': {error}") from None
    if not callable(function):
        raise ValueError(f"'{name}' is a {type(function).__name__} and no function")
    found: Callable[..., Any] = function
    return found


def _of_workload(workload: Workload) -> Job:
    model = workload.model()
    inputs, target = workload.sample(torch.Generator().manual_seed(SEED))
    return Job(model, (inputs,), functools.partial(_loss, workload, target))


def _loss(workload: Workload, target: Tensor, output: Tensor) -> Tensor:
    return workload.loss(output, target.to(output.device))


def _gpt(batch: int = 12, length: int = 256, width: int = 256, layers: int = 12) -> Job:
    return _of_workload(Gpt(batch=batch, length=length, width=width, heads=_heads(width, 32), layers=layers))


def _lstm(batch: int = 32, length: int = 64, width: int = 512, layers: int = 6) -> Job:
    return _of_workload(Lstm(batch=batch, length=length, width=width, layers=layers))


def _densenet(depth: int, batch: int = 16, pixels: int | None = None) -> Job:
    pixels = pixels or (64 if DEPTHS[depth].large_images else 32)
    return _of_workload(DenseNet(batch=batch, depth=depth, pixels=pixels))


def _resnet(stages: tuple[int, ...], batch: int = 16, pixels: int = 64) -> Job:
    model = ResNet(stages, CLASSES).train()
    images = torch.randn(batch, 3, pixels, pixels)
    return Job(model, (images,), functools.partial(_classification, torch.arange(batch) % CLASSES))


def _classification(target: Tensor, output: Tensor) -> Tensor:
    return functional.cross_entropy(output, target.to(output.device))


def _hugging_face(
    name: str,
    batch: int = 8,
    length: int = 128,
    size: str = "small",
    width: int | None = None,
    layers: int | None = None,
) -> Job:
    import transformers

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # a command's output is its own
    presets = {"small": (256, 6, {"vocab_size": 8192}), "base": (768, 12, {})}  # base as published
    if size not in presets:
        raise ValueError(f"--size {size}: the model {name} has the sizes {', '.join(presets)}")
    width, layers = width or presets[size][0], layers or presets[size][1]
    heads, vocabulary = _heads(width, 64), presets[size][2]
    bert = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
        "max_position_embeddings": length + 2,  # RoBERTa's start after that of the padding token, 1
    }
    xlnet = {"d_model": width, "n_layer": layers, "n_head": heads, "d_inner": 4 * width}
    gpt2 = {"n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": length, "use_cache": False}
    kinds: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "bert": (transformers.BertForMaskedLM, transformers.BertConfig, bert),
        "roberta": (transformers.RobertaForMaskedLM, transformers.RobertaConfig, bert),
        "xlnet": (transformers.XLNetLMHeadModel, transformers.XLNetConfig, xlnet),
        "gpt2": (transformers.GPT2LMHeadModel, transformers.GPT2Config, gpt2),
    }
    kind, config, shape = kinds[name]
    model: Any = kind(config(**shape, **vocabulary))
    tokens = torch.randint(3, model.config.vocab_size, (batch, length))
    labels = tokens
    if name in ("bert", "roberta"):  # as Devlin et al. (2018) mask words
        labels = tokens.where(torch.rand(tokens.shape) < 0.15, torch.tensor(IGNORED))
    # Positional, so that the model itself is planned for and no wrapper that would change the names of its blocks.
    arguments = inspect.signature(model.forward).bind(tokens, labels=labels)
    arguments.apply_defaults()
    names = list(arguments.signature.parameters)
    return Job(model.train(), arguments.args[: names.index("labels") + 1], None)


def _heads(width: int, each: int) -> int:
    """Attention heads of about ``each`` features, whose number divides ``width``."""
    return next(heads for heads in range(max(width // each, 1), 0, -1) if width % heads == 0)


class Residual(nn.Module):
    """Two convolutions beside a shortcut (He et al., 2016, "Deep Residual Learning for Image Recognition", figure 2)."""

    def __init__(self, maps: int, made: int, stride: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(maps, made, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(made),
            nn.ReLU(inplace=True),
            nn.Conv2d(made, made, 3, padding=1, bias=False),
            nn.BatchNorm2d(made),
        )
        self.shortcut = nn.Sequential()
        if stride > 1 or maps != made:
            self.shortcut = nn.Sequential(nn.Conv2d(maps, made, 1, stride, bias=False), nn.BatchNorm2d(made))

    def forward(self, features: Tensor) -> Tensor:
        return functional.relu(self.convolutions(features) + self.shortcut(features), inplace=True)


class ResNet(nn.Sequential):
    """A ResNet for images of 64 pixels or so: no pooling in the stem; ``stages`` are numbers of residual blocks."""

    def __init__(self, stages: tuple[int, ...], classes: int) -> None:
        maps = 64
        blocks: list[nn.Module] = [
            nn.Sequential(nn.Conv2d(3, maps, 3, padding=1, bias=False), nn.BatchNorm2d(maps), nn.ReLU())
        ]
        for stage, count in enumerate(stages):
            for block in range(count):
                blocks.append(Residual(maps, 64 << stage, 2 if stage and not block else 1))
                maps = 64 << stage
        blocks.append(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(maps, classes)))
        super().__init__(*blocks)


MODELS: dict[str, Callable[..., Job]] = {
    "gpt": _gpt,
    "lstm": _lstm,
    **{name: functools.partial(_hugging_face, name) for name in ("bert", "roberta", "xlnet", "gpt2")},
    **{f"densenet-{depth}": functools.partial(_densenet, depth) for depth in DEPTHS},
    "resnet-18": functools.partial(_resnet, (2, 2, 2, 2)),
    "resnet-34": functools.partial(_resnet, (3, 4, 6, 3)),
}
"""Functions that build a :class:`Job`; their parameters are options of the command."""
