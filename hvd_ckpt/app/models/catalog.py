"""The models that the commands know by name, and their published sizes.

An entry says which kind of data a model is for and how it is built. What follows from the data (vocabulary, length, channels,
classes) is filled in; every other keyword of the builder is an option of the model. A folder of a Hugging Face model is an entry
too. A model's module is imported when its builder is asked for, and not before: listing names is quick, and needs no
``transformers``.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hvd_ckpt.utils.text import nearest, unknown

if TYPE_CHECKING:
    from torch import nn

KINDS = ("causal", "masked", "permutation", "images", "volumes")
"""Kinds of input: tokens to continue, tokens of which some are masked, tokens in any order, images, volumes."""

FACTS = ("vocabulary", "length", "channels", "classes")
"""Arguments of builders that follow from the data."""


@dataclass(frozen=True)
class Entry:
    """A model that can be built.

    Attributes:
        name: by which :func:`find` finds it.
        kind: one of :data:`KINDS`.
        function: that builds it, as ``module.function`` of :mod:`hvd_ckpt.app.models`; its keyword-only arguments are facts of the
            data and options.
        arguments: the function's positional arguments, if it has any.
        preset: options that make it the model of its name.
        data: what its batches are by default: ``length`` in tokens, or ``pixels`` of a side.
        folder: of a Hugging Face model, if it is one.
    """

    name: str
    kind: str
    function: str
    arguments: tuple[Any, ...] = ()
    preset: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, int] = field(default_factory=dict)
    folder: Path | None = None

    @property
    def options(self) -> tuple[str, ...]:
        """Names of the options that a user may give."""
        return tuple(name for name in self._parameters() if name not in FACTS)

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Refuses options that this model does not have.

        Raises:
            ValueError: there is such an option; says the nearest right name.
        """
        for name in options:
            if name not in self.options:
                raise ValueError(unknown(f"option of {self.name}", name, self.options))

    def build(self, facts: Mapping[str, int], options: Mapping[str, Any] | None = None) -> nn.Module:
        """The model in training mode, its weights drawn from torch's global random state or read from its folder.

        Args:
            facts: of the data, some of :data:`FACTS`; those that this model has no use for are left out.
            options: over those of :attr:`preset`.

        Raises:
            ValueError: an option is unknown or cannot have this value, or the folder cannot be used; one line.
        """
        options = options or {}
        self.check_options(options)
        parameters = self._parameters()
        for name, value in options.items():
            _check_type(name, value, parameters[name].default)
        taken = {name: value for name, value in facts.items() if name in parameters}
        try:
            model = self._builder()(*self.arguments, **taken, **{**self.preset, **options})
        except OSError as error:
            raise ValueError(str(error)) from None
        return model.train()

    def _builder(self) -> Callable[..., nn.Module]:
        module, _, function = self.function.partition(".")
        builder: Callable[..., nn.Module] = getattr(import_module(f"hvd_ckpt.app.models.{module}"), function)
        return builder

    def _parameters(self) -> dict[str, inspect.Parameter]:
        parameters = inspect.signature(self._builder()).parameters
        return {
            name: parameter
            for name, parameter in parameters.items()
            if parameter.kind is parameter.KEYWORD_ONLY
        }


_TYPES: dict[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "a text"),
}


def _check_type(name: str, value: Any, default: Any) -> None:
    """Options have the types of their defaults."""
    types, wanted = _TYPES[type(default)]
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise ValueError(f"{name} must be {wanted}, got {value!r}")


def find(name: str) -> Entry:
    """The entry of a name, or of a folder of a Hugging Face model.

    Raises:
        ValueError: no model has that name (says the nearest one that a model has), or the folder does not hold such a model.
    """
    entry = _entries().get(name)
    if entry is not None:
        return entry
    if os.path.isdir(name):  # which, unlike Path's, knows that a name may be too long
        return _of_folder(name)
    if guess := nearest(name, names()):
        raise ValueError(f"no model '{name}': did you mean '{guess}'? Known: {overview()}")
    raise ValueError(
        f"no model '{name}': choose one of {overview()}; or give a folder of a Hugging Face model"
    )


def names() -> list[str]:
    """All names."""
    return list(_entries())


def overview() -> str:
    """All names in little space: ``bert-tiny, -mini; lstm-small, -large; vnet``."""
    families: dict[str, list[str]] = {}
    for name in names():
        family, dash, size = name.partition("-")
        families.setdefault(family, []).append(dash + size)
    return "; ".join(family + ", ".join(sizes) for family, sizes in families.items())


class Limits(NamedTuple):
    """The kind of input of a model of a folder, whose sizes do not follow from the data.

    Attributes:
        vocabulary: tokens must be below this number.
        length: the longest sequence, in tokens; None where any will do.
    """

    vocabulary: int
    length: int | None


def limits(model: nn.Module) -> Limits:
    """The limits of a model that an :class:`Entry` with a folder has built."""
    chain: Any = model
    config = chain.transformers_model.config
    if config.model_type == "xlnet":  # positions are relative
        return Limits(config.vocab_size, None)
    length = config.max_position_embeddings
    if config.model_type == "roberta":  # its positions start after that of the padding token
        length -= config.pad_token_id + 1
    return Limits(config.vocab_size, length)


# ------------------------------------------------------------------------------------ sizes

_Sizes = dict[str, tuple[int, dict[str, Any]]]  # name: (length in tokens, options)
_LENGTH = 128  # where nothing says otherwise

_ENCODERS: _Sizes = {
    # BERT's: Turc et al., "Well-read students learn better" (2019), table 1; large of Devlin et al., "BERT" (2018), section 3.
    # Of RoBERTa and XLNet, base and large were published.
    "tiny": (_LENGTH, {"width": 128, "layers": 2, "heads": 2}),
    "mini": (_LENGTH, {"width": 256, "layers": 4, "heads": 4}),
    "small": (_LENGTH, {"width": 512, "layers": 4, "heads": 8}),
    "medium": (_LENGTH, {"width": 512, "layers": 8, "heads": 8}),
    "base": (_LENGTH, {"width": 768, "layers": 12, "heads": 12}),
    "large": (_LENGTH, {"width": 1024, "layers": 24, "heads": 16}),
}
_GPT2: _Sizes = {
    # Radford et al., "Language models are unsupervised multitask learners" (2019), table 2; heads as in their published models.
    "tiny": (_LENGTH, {"width": 128, "layers": 2, "heads": 2}),  # not theirs
    "small": (_LENGTH, {"width": 768, "layers": 12, "heads": 12}),
    "medium": (_LENGTH, {"width": 1024, "layers": 24, "heads": 16}),
    "large": (_LENGTH, {"width": 1280, "layers": 36, "heads": 20}),
    "xl": (_LENGTH, {"width": 1600, "layers": 48, "heads": 25}),
}
_GPT: _Sizes = {
    # lite: GPT-3 Small of Brown et al., "Language models are few-shot learners" (2020), table 2.1, with its context.
    "tiny": (128, {"width": 128, "layers": 4, "heads": 4}),
    "mini": (256, {"width": 256, "layers": 12, "heads": 8}),
    "lite": (2048, {"width": 768, "layers": 12, "heads": 12}),
}
_LSTM: _Sizes = {
    # Zaremba et al., "Recurrent neural network regularization" (2014), section 4.1; lengths are those that it unrolls.
    "small": (20, {"width": 200, "layers": 2, "dropout": 0.0}),
    "medium": (35, {"width": 650, "layers": 2, "dropout": 0.5}),
    "large": (35, {"width": 1500, "layers": 2, "dropout": 0.65}),
}


@dataclass(frozen=True)
class DenseNetShape:
    """The numbers that tell one DenseNet from another.

    Attributes:
        growth: feature maps that each dense layer adds (the paper's k).
        blocks: dense layers in each dense block; a transition halves maps and resolution between two blocks.
        initial: feature maps made by the stem.
        large_images: the ImageNet stem (7x7 convolution and pooling, a quarter of the resolution is left) or
            the CIFAR one (3x3 convolution at full resolution).
    """

    growth: int
    blocks: tuple[int, ...]
    initial: int
    large_images: bool


DENSENETS: dict[int, DenseNetShape] = {
    22: DenseNetShape(12, (3, 3, 3), 24, large_images=False),
    100: DenseNetShape(12, (16, 16, 16), 24, large_images=False),
    121: DenseNetShape(32, (6, 12, 24, 16), 64, large_images=True),
    161: DenseNetShape(48, (6, 12, 36, 24), 96, large_images=True),
    169: DenseNetShape(32, (6, 12, 32, 32), 64, large_images=True),
    201: DenseNetShape(32, (6, 12, 48, 32), 64, large_images=True),
    264: DenseNetShape(32, (6, 12, 64, 48), 64, large_images=True),
}
"""The paper's networks by depth (100 is DenseNet-BC with k=12), and 22: DenseNet-BC small enough for a CPU.

Depth counts convolutions and the classifier; the paper's 264 has 265 of them by its own table."""


@dataclass(frozen=True)
class ResNetShape:
    """The numbers that tell one ResNet from another.

    Attributes:
        unit: "basic" (two 3x3 convolutions), "bottleneck" (1x1, 3x3, 1x1) or "preactivated" (a bottleneck whose norms and
            activations come before the convolutions).
        units: residual units in each stage; from one stage to the next maps double and resolution halves.
        maps: of the 3x3 convolutions in the first stage.
        large_images: the ImageNet stem (7x7 convolution and pooling, a quarter of the resolution is left) and shortcuts that
            project, or the CIFAR stem (3x3 convolution at full resolution) and, for basic units, shortcuts that pad with zeros.
    """

    unit: str
    units: tuple[int, ...]
    maps: int
    large_images: bool


RESNETS: dict[int, ResNetShape] = {
    18: ResNetShape("basic", (2, 2, 2, 2), 64, large_images=True),
    34: ResNetShape("basic", (3, 4, 6, 3), 64, large_images=True),
    50: ResNetShape("bottleneck", (3, 4, 6, 3), 64, large_images=True),
    101: ResNetShape("bottleneck", (3, 4, 23, 3), 64, large_images=True),
    152: ResNetShape("bottleneck", (3, 8, 36, 3), 64, large_images=True),
    **{
        depth: ResNetShape("basic", ((depth - 2) // 6,) * 3, 16, large_images=False)
        for depth in (20, 32, 44, 56, 110, 1202)
    },
    **{
        depth: ResNetShape("preactivated", ((depth - 2) // 9,) * 3, 16, large_images=False)
        for depth in (164, 1001)
    },
}
"""The papers' networks by depth: convolutions and the classifier, without those in shortcuts."""


ATTENTION = ("sdpa", "eager")
"""Implementations of attention: fused, or one operation after the other."""


def check_sizes(
    vocabulary: int,
    width: int,
    heads: int,
    layers: int,
    dropout: float,
    length: int = 1,
    attention: str = "sdpa",
) -> None:
    """Validates the sizes of a transformer.

    Raises:
        ValueError: heads do not divide the width, another size is below 1, the dropout is outside [0, 1), or the attention is not
            one of :data:`ATTENTION`.
    """
    at_least_1(vocabulary=vocabulary, length=length, layers=layers, heads=heads, width=width)
    if width % heads:
        raise ValueError(f"width must be a multiple of heads, got width={width} and heads={heads}")
    check_dropout(dropout)
    if attention not in ATTENTION:
        raise ValueError(f"attention must be one of {', '.join(map(repr, ATTENTION))}, got {attention!r}")


def at_least_1(**sizes: int) -> None:
    """Raises ValueError, with its name, for a size below 1."""
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


def check_dropout(dropout: float) -> None:
    """Raises ValueError for a probability outside [0, 1)."""
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be at least 0 and below 1, got {dropout}")


# ------------------------------------------------------------------------------------ entries


@cache
def _entries() -> dict[str, Entry]:
    entries = [
        Entry(f"{family}-{size}", kind, function, preset=options, data={"length": length})
        for family, kind, function, sizes in (
            ("bert", "masked", "bert.bert", _ENCODERS),
            ("roberta", "masked", "bert.roberta", _ENCODERS),
            ("xlnet", "permutation", "xlnet.xlnet", _ENCODERS),
            ("gpt2", "causal", "gpt2.gpt2", _GPT2),
            ("gpt", "causal", "gpt.gpt", _GPT),
            ("lstm", "causal", "lstm.lstm_language_model", _LSTM),
        )
        for size, (length, options) in sizes.items()
    ]
    large = {("densenet", depth): shape.large_images for depth, shape in DENSENETS.items()}
    large |= {("resnet", depth): shape.large_images for depth, shape in sorted(RESNETS.items())}
    for (family, depth), large_images in large.items():
        data = {"pixels": 64 if large_images else 32}
        entries.append(Entry(f"{family}-{depth}", "images", f"{family}.{family}", (depth,), data=data))
    entries.append(Entry("vnet", "volumes", "vnet.vnet", data={"pixels": 32}))
    return {entry.name: entry for entry in entries}


def _of_folder(name: str) -> Entry:
    from hvd_ckpt.app.models.hugging_face import kind_of_folder

    folder = Path(name)
    try:
        kind = kind_of_folder(folder)
    except OSError as error:
        raise ValueError(str(error)) from None
    return Entry(name, kind, "hugging_face.from_folder", (folder,), data={"length": _LENGTH}, folder=folder)
