"""Catalog of the models that the commands know by name, with their published sizes.

An entry has the kind of data of a model and its builder. Keyword arguments of the builder are options of the model. Those that
follow from the data (vocabulary, length, channels, classes) are filled in unless they are given. A folder of a Hugging Face model
is also an entry. The module of a model is imported when its builder is needed, so listing names is fast and does not need
``transformers``.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from hvd_ckpt.utils.named import import_named, is_named
from hvd_ckpt.utils.schema import first_error
from hvd_ckpt.utils.text import nearest, unknown

if TYPE_CHECKING:
    from torch import nn

KINDS = ("causal", "masked", "permutation", "images", "volumes")
"""Kinds of input: tokens to continue, partly masked tokens, permuted tokens, images, volumes."""

FACTS = ("vocabulary", "length", "channels", "classes")
"""Arguments of builders that follow from the data."""


@dataclass(frozen=True)
class Entry:
    """Entry of a model in the catalog.

    Attributes:
        kind: one of :data:`KINDS`.
        function: its builder as ``module.function`` of :mod:`hvd_ckpt.app.models`, or as ``module:function`` of any module. Its
            arguments are facts of the data and options.
        arguments: its first arguments.
        preset: options of this size of the model.
        data: default size of its batches: ``length`` in tokens, or ``pixels`` of a side.
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
        return tuple(self._parameters())

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raises ValueError for an option that this model has not; the message has the most similar one."""
        parameters = self._parameters()
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            return
        for name in options:
            if name not in parameters:
                raise ValueError(unknown(f"option of {self.name}", name, parameters))

    def check_arguments(self, given: Collection[str]) -> None:
        """Raises ValueError for a parameter without a default of which there is no argument among those given."""
        for name, parameter in self._parameters().items():
            variable = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            if parameter.default is parameter.empty and name not in given and not variable:
                raise ValueError(f"{self.name} needs {name}: give it as an option of the model")

    def build(self, facts: Mapping[str, int], options: Mapping[str, Any] | None = None) -> nn.Module:
        """Builds the model in training mode, with weights from torch's global random state or from its folder.

        A function of one's own may return ``(model, sample, loss)``, as for ``hvd-ckpt plan``.

        Args:
            facts: facts of the data, some of :data:`FACTS`. Those that the builder does not take are ignored.
            options: options, which override facts and :attr:`preset`.

        Raises:
            ValueError: an option is unknown or has an invalid value, the folder cannot be used, or a function returns something
                else. The message is one line.
        """
        from torch import nn

        options = options or {}
        self.check_options(options)
        parameters = self._parameters()
        taken = {name: value for name, value in facts.items() if name in parameters}
        self.check_arguments({*taken, *self.preset, *options})
        try:
            made = self._builder()(*self.arguments, **{**taken, **self.preset, **options})
        except ValidationError as error:
            raise ValueError(first_error(error)) from None
        except OSError as error:
            raise ValueError(str(error)) from None
        model = made[0] if isinstance(made, tuple) and made else made
        if not isinstance(model, nn.Module):
            raise ValueError(f"{self.name} returned {type(made).__name__}, and must return an nn.Module")
        return model.train()

    def _builder(self) -> Callable[..., Any]:
        if is_named(self.function):
            return import_named("model", self.function)
        module, _, function = self.function.partition(".")
        return getattr(import_module(f"hvd_ckpt.app.models.{module}"), function)

    def _parameters(self) -> dict[str, inspect.Parameter]:
        """Parameters of the builder, without those that :attr:`arguments` are for."""
        parameters = inspect.signature(self._builder()).parameters
        return dict(list(parameters.items())[len(self.arguments) :])


def find(name: str, kind: str = "") -> Entry:
    """The entry of a name, of a folder of a Hugging Face model, or of a function ``module:function``.

    Args:
        kind: the kind of data of a function's model.

    Raises:
        ValueError: no model has the name (the message has the most similar name), the folder has no such model, or there is no such
            function.
    """
    if is_named(name):
        import_named("model", name)
        return Entry(name, kind, name)
    entry = _entries().get(name)
    if entry is not None:
        return entry
    if os.path.isdir(name):  # unlike Path.is_dir(), it allows names that are too long
        return _of_folder(name)
    if guess := nearest(name, names()):
        raise ValueError(f"no model '{name}': did you mean '{guess}'? Known: {overview()}")
    raise ValueError(
        f"no model '{name}': choose one of {overview()}; or give a folder of a Hugging Face model"
    )


def names() -> list[str]:
    """Names of all models."""
    return list(_entries())


def overview() -> str:
    """Names of all models in a short form: ``bert-tiny, -mini; lstm-small, -large; vnet``."""
    families: dict[str, list[str]] = {}
    for name in names():
        family, dash, size = name.partition("-")
        families.setdefault(family, []).append(dash + size)
    return "; ".join(family + ", ".join(sizes) for family, sizes in families.items())


def limits(model: nn.Module) -> tuple[int, int | None]:
    """Of a model from a folder: the number that tokens must be below, and the longest sequence in tokens, or None."""
    chain: Any = model
    config = chain.transformers_model.config
    if config.model_type == "xlnet":  # positions are relative
        return config.vocab_size, None
    # Positions of RoBERTa start after that of the padding token.
    unused = config.pad_token_id + 1 if config.model_type == "roberta" else 0
    return config.vocab_size, config.max_position_embeddings - unused


# ------------------------------------------------------------------------------------ sizes

_Sizes = dict[str, tuple[int, dict[str, Any]]]  # name: (length in tokens, options)
_LENGTH = 128  # default length

_ENCODERS: _Sizes = {
    # Sizes of BERT: Turc et al., "Well-read students learn better" (2019), table 1; "large": Devlin et al., "BERT" (2018), section
    # 3. RoBERTa and XLNet were published as base and large.
    "tiny": (_LENGTH, {"width": 128, "layers": 2, "heads": 2}),
    "mini": (_LENGTH, {"width": 256, "layers": 4, "heads": 4}),
    "small": (_LENGTH, {"width": 512, "layers": 4, "heads": 8}),
    "medium": (_LENGTH, {"width": 512, "layers": 8, "heads": 8}),
    "base": (_LENGTH, {"width": 768, "layers": 12, "heads": 12}),
    "large": (_LENGTH, {"width": 1024, "layers": 24, "heads": 16}),
}
_GPT2: _Sizes = {
    # Radford et al., "Language models are unsupervised multitask learners" (2019), table 2; heads are those of the published
    # models.
    "tiny": (_LENGTH, {"width": 128, "layers": 2, "heads": 2}),  # not from the paper
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
    # Zaremba et al., "Recurrent neural network regularization" (2014), section 4.1; lengths are those of its unrolled sequences.
    "small": (20, {"width": 200, "layers": 2, "dropout": 0.0}),
    "medium": (35, {"width": 650, "layers": 2, "dropout": 0.5}),
    "large": (35, {"width": 1500, "layers": 2, "dropout": 0.65}),
}


@dataclass(frozen=True)
class DenseNetShape:
    """Shape of a DenseNet.

    Attributes:
        growth: number of feature maps that each dense layer adds (k in the paper).
        blocks: number of dense layers in each dense block. Between two blocks, a transition halves maps and resolution.
        initial: number of feature maps of the stem.
        large_images: whether the stem is that for ImageNet (7x7 convolution and pooling, to a quarter of the resolution) or that
            for CIFAR (3x3 convolution at full resolution).
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
"""The networks of the paper by depth (100 is DenseNet-BC with k=12), and 22, a DenseNet-BC that is small enough for a CPU.

The depth is the number of convolutions and the classifier. The 264 of the paper has 265 of them by the table of the paper."""


@dataclass(frozen=True)
class ResNetShape:
    """Shape of a ResNet.

    Attributes:
        unit: "basic" (two 3x3 convolutions), "bottleneck" (1x1, 3x3, 1x1) or "preactivated" (a bottleneck whose norms and
            activations come before the convolutions).
        units: number of residual units in each stage. From stage to stage, maps double and the resolution halves.
        maps: number of maps of the 3x3 convolutions in the first stage.
        large_images: whether the network is for ImageNet or for CIFAR. For ImageNet it has a stem with a 7x7 convolution and
            pooling, to a quarter of the resolution, and projecting shortcuts. For CIFAR it has a stem with a 3x3 convolution at
            full resolution, and shortcuts of basic units pad with zeros.
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
"""The networks of the papers by depth: the number of convolutions and the classifier, without those in shortcuts."""


# ------------------------------------------------------------------------------------ entries


@cache
def _entries() -> dict[str, Entry]:
    entries = [
        Entry(f"{family}-{size}", kind, function, preset=options, data={"length": length})
        for family, kind, function, sizes in (
            ("bert", "masked", "transformer.bert", _ENCODERS),
            ("roberta", "masked", "transformer.roberta", _ENCODERS),
            ("xlnet", "permutation", "xlnet.xlnet", _ENCODERS),
            ("gpt2", "causal", "transformer.gpt2", _GPT2),
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
    entries.append(Entry("vnet", "volumes", "vnet.VNet", data={"pixels": 32}))
    return {entry.name: entry for entry in entries}


def _of_folder(name: str) -> Entry:
    from hvd_ckpt.app.models.hugging_face import kind_of_folder

    folder = Path(name)
    try:
        kind = kind_of_folder(folder)
    except OSError as error:
        raise ValueError(str(error)) from None
    return Entry(name, kind, "hugging_face.from_folder", (folder,), data={"length": _LENGTH}, folder=folder)
