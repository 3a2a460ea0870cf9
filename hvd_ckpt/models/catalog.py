"""The models that the commands know by name.

An entry says which kind of data a model is for and how it is built. What follows from the data (vocabulary, classes, length)
is filled in; every other keyword of the builder is an option of the model. A folder of a Hugging Face model is an entry too.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

__all__ = ["FAMILIES", "KINDS", "Entry", "find", "names"]

KINDS = ("causal", "masked", "permutation", "images", "volumes")
"""What a model takes: tokens to be continued, tokens of which some are hidden, tokens in any order, images, volumes."""

TEXT_FACTS = ("vocabulary", "length")
IMAGE_FACTS = ("channels", "classes")


@dataclass(frozen=True)
class Entry:
    """A model that can be built.

    Attributes:
        kind: one of :data:`KINDS`.
        builder: a function of keyword options that gives the model.
        preset: options that make it the one of its name.
        data: what its batches are by default: ``length`` or ``pixels``.
        folder: of a Hugging Face model, if it is one.
    """

    kind: str
    builder: Callable[..., nn.Module]
    preset: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, int] = field(default_factory=dict)
    folder: Path | None = None

    @property
    def options(self) -> tuple[str, ...]:
        """Names of the options that a user may give."""
        facts = IMAGE_FACTS if self.kind in ("images", "volumes") else TEXT_FACTS
        return tuple(name for name in inspect.signature(self.builder).parameters if name not in facts)

    def build(self, **options: Any) -> nn.Module:
        """The model, with options over the preset ones; what the builder does not take of the facts is left out."""
        taken = inspect.signature(self.builder).parameters
        facts = IMAGE_FACTS + TEXT_FACTS
        given = {name: value for name, value in options.items() if name in taken or name not in facts}
        return self.builder(**{**self.preset, **given})


def find(name: str) -> Entry:
    """The entry of a name, or of a folder of a Hugging Face model.

    Raises:
        ValueError: there is none.
    """
    family, dash, size = name.partition("-")
    if family in FAMILIES and (entry := FAMILIES[family].entries().get(size if dash else "")) is not None:
        return entry
    if Path(name).is_dir():
        return _of_folder(Path(name))
    raise ValueError(f"no model '{name}'")


def names() -> list[str]:
    """All names."""
    return [
        f"{family}-{size}" if size else family
        for family, members in FAMILIES.items()
        for size in members.entries()
    ]


@dataclass(frozen=True)
class Family:
    """Models that differ in size. ``entries`` maps sizes to entries, and imports the family's module when it is called."""

    entries: Callable[[], dict[str, Entry]]


_BERT_SIZES = {
    # Turc et al., "Well-read students learn better" (2019), table 1; base and large of Devlin et al. (2018)
    "tiny": {"width": 128, "layers": 2, "heads": 2},
    "mini": {"width": 256, "layers": 4, "heads": 4},
    "small": {"width": 512, "layers": 4, "heads": 8},
    "medium": {"width": 512, "layers": 8, "heads": 8},
    "base": {"width": 768, "layers": 12, "heads": 12},
    "large": {"width": 1024, "layers": 24, "heads": 16},
}


def _transformer(module: str, kind: str) -> dict[str, Entry]:
    from importlib import import_module

    builder = getattr(import_module(f"hvd_ckpt.models.{module}"), module)
    return {size: Entry(kind, builder, shape, {"length": 128}) for size, shape in _BERT_SIZES.items()}


def _bert() -> dict[str, Entry]:
    return _transformer("bert", "masked")


def _roberta() -> dict[str, Entry]:
    from hvd_ckpt.models.bert import roberta

    return {size: Entry("masked", roberta, shape, {"length": 128}) for size, shape in _BERT_SIZES.items()}


def _xlnet() -> dict[str, Entry]:
    return _transformer("xlnet", "permutation")


def _gpt2() -> dict[str, Entry]:
    from hvd_ckpt.models.gpt2 import gpt2

    sizes = {  # Radford et al., "Language models are unsupervised multitask learners" (2019), table 2
        "tiny": {"width": 128, "layers": 2, "heads": 2},
        "small": {"width": 768, "layers": 12, "heads": 12},
        "medium": {"width": 1024, "layers": 24, "heads": 16},
        "large": {"width": 1280, "layers": 36, "heads": 20},
        "xl": {"width": 1600, "layers": 48, "heads": 25},
    }
    return {size: Entry("causal", gpt2, shape, {"length": 128}) for size, shape in sizes.items()}


def _gpt() -> dict[str, Entry]:
    from hvd_ckpt.models.gpt import gpt

    return {
        "lite": Entry("causal", gpt, {"width": 768, "layers": 12, "heads": 12}, {"length": 2048}),
        "mini": Entry("causal", gpt, {"width": 256, "layers": 12, "heads": 8}, {"length": 256}),
        "tiny": Entry("causal", gpt, {"width": 128, "layers": 4, "heads": 4}, {"length": 128}),
    }


def _lstm() -> dict[str, Entry]:
    from hvd_ckpt.models.lstm import lstm_language_model

    sizes = {  # Zaremba et al., "Recurrent neural network regularization" (2014), section 4.1
        "small": {"width": 200, "layers": 2, "dropout": 0.0},
        "medium": {"width": 650, "layers": 2, "dropout": 0.5},
        "large": {"width": 1500, "layers": 2, "dropout": 0.65},
    }
    return {
        size: Entry("causal", lstm_language_model, shape, {"length": 35}) for size, shape in sizes.items()
    }


def _densenet() -> dict[str, Entry]:
    from hvd_ckpt.models.densenet import DEPTHS, densenet

    return {
        str(depth): Entry(
            "images", functools.partial(densenet, depth), {}, {"pixels": 64 if shape.large_images else 32}
        )
        for depth, shape in DEPTHS.items()
    }


def _resnet() -> dict[str, Entry]:
    from hvd_ckpt.models.resnet import DEPTHS, resnet

    return {
        str(depth): Entry(
            "images", functools.partial(resnet, depth), {}, {"pixels": 64 if shape.large_images else 32}
        )
        for depth, shape in DEPTHS.items()
    }


def _vnet() -> dict[str, Entry]:
    from hvd_ckpt.models.vnet import vnet

    return {"": Entry("volumes", vnet, {}, {"pixels": 32})}


def _of_folder(folder: Path) -> Entry:
    from hvd_ckpt.models.hugging_face import from_folder, kind_of_folder

    return Entry(kind_of_folder(folder), functools.partial(from_folder, folder), {}, {"length": 128}, folder)


FAMILIES: dict[str, Family] = {
    "bert": Family(_bert),
    "roberta": Family(_roberta),
    "xlnet": Family(_xlnet),
    "gpt2": Family(_gpt2),
    "gpt": Family(_gpt),
    "lstm": Family(_lstm),
    "densenet": Family(_densenet),
    "resnet": Family(_resnet),
    "vnet": Family(_vnet),
}
