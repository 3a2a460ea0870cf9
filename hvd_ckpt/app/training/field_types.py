"""Types of settings: the values that a field of the training configuration may have.

A type is one of pydantic's with a check, which raises a ValueError in one line. Flags, YAML files and Python use the same types.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue, model_serializer, model_validator

from hvd_ckpt.parallel.pipeline.schedule import NAMES as PIPELINE_SCHEDULES, virtual_stages_of
from hvd_ckpt.planning.budget import parse_budget
from hvd_ckpt.utils.plain_data import parsed
from hvd_ckpt.utils.schema import Strict
from hvd_ckpt.utils.text import STAGES, TOKEN_TYPES, read_when, stage_of, unknown


def one_of(what: str, *names: str) -> AfterValidator:
    """A check that a text is one of these names; the error has the nearest one."""

    def check(value: Any) -> Any:
        if value is not None and value not in names:
            raise ValueError(unknown(what, value, names))
        return value

    return AfterValidator(check)


def _text(value: str) -> str:
    if not value.strip() or "\0" in value or any("\ud800" <= letter <= "\udfff" for letter in value):
        raise ValueError(f"{value!r} is not allowed: give a text, in UTF-8")
    return value


def _budget(value: str | int) -> str | int:
    parse_budget(value)
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def traced_steps(steps: str) -> range:
    """The steps ``FIRST:LAST``, counted from 1.

    Raises:
        ValueError: they are not such steps.
    """
    match = re.fullmatch(r"(\d{1,15}):(\d{1,15})", steps)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ValueError(f"{steps!r} is not allowed: give the first and the last step, such as '10:15'")
    return range(int(match[1]), int(match[2]) + 1)


def _steps(value: Any) -> Any:
    if isinstance(value, int):  # YAML 1.1 takes 10:15 for a number, ten minutes and fifteen seconds
        value = f"{value // 60}:{value % 60}"
    if isinstance(value, str):
        traced_steps(value)
    return value


def _groups(value: Any) -> Any:
    lists = isinstance(value, list) and all(isinstance(group, list) and group for group in value)
    if value in (None, "host") or (lists and all(type(rank) is int for group in value for rank in group)):
        return value
    raise ValueError(f"{value!r} is not allowed: give host, or lists of ranks such as [[0, 1], [2, 3]]")


def is_text(annotation: Any) -> bool:
    """Whether a text of a field of this type is its value as it is, and not to be parsed."""
    whole = isinstance(annotation, type) and issubclass(annotation, str | WithOptions)
    return whole or any(is_text(argument) for argument in get_args(annotation))


class WithOptions(Strict):
    """A setting with options: the first field, then ``name=value`` after commas, as in ``8,fragments=4``; or a mapping."""

    @model_validator(mode="before")
    @classmethod
    def _read(cls, given: Any) -> Any:
        if isinstance(given, cls):
            return given
        if isinstance(given, Mapping):
            return {str(name): value for name, value in given.items()}
        if not isinstance(given, str):
            return {next(iter(cls.model_fields)): given}
        values: dict[str, Any] = {}
        if not given:
            return values
        _text(given)
        # Of KIND:PATH, a path may have any characters.
        names = "|".join(cls.model_fields) if ":" in given.partition("=")[0] else r"\w+"
        for part in re.split(rf",(?=\s*(?:{names})=)", given):  # not within [3,4]
            name, equals, text = part.partition("=")
            if not values and (not equals or ":" in name):
                name, text = next(iter(cls.model_fields)), part
            if name.strip() not in cls.model_fields:
                raise ValueError(unknown("option", name.strip(), [*cls.model_fields]))
            annotation = cls.model_fields[name.strip()].annotation
            values[name.strip()] = text if is_text(annotation) else parsed(text)
        return values

    def given(self) -> dict[str, Any]:
        """The fields that differ from their defaults."""
        return {
            name: getattr(self, name)
            for name, field in type(self).model_fields.items()
            if getattr(self, name) != field.default
        }

    @model_serializer
    def __str__(self) -> str:
        first, *_ = type(self).model_fields
        texts = {
            name: value if isinstance(value, str) else str(value).replace(" ", "")
            for name, value in self.given().items()
        }
        return ",".join(text if name == first else f"{name}={text}" for name, text in texts.items())


DATA = ("text", "lines", "jsonl", "tokens", "images", "volumes")
Text = Annotated[str, AfterValidator(_text)]
Count = Annotated[int, Field(ge=1, lt=2**63)]
Positive = Annotated[float, Field(gt=0)]
Options = dict[str, JsonValue]
Budget = Annotated[str | int, AfterValidator(_budget)]
When = Annotated[str | int, AfterValidator(lambda value: read_when(value, "the setting"))]
ShardStage = Annotated[str, BeforeValidator(lambda value: STAGES[stage_of(value)])]
Steps = Annotated[str, BeforeValidator(_steps)]
Groups = Annotated[Any, AfterValidator(_groups)]
Wire = Annotated[str, one_of("communication format", "fp32", "fp16", "bf16", "int8", "int4")]


class Data(WithOptions):
    """What to train on.

    Attributes:
        source: ``KIND:PATH`` of a file or folder, or a function ``module:function`` of the user.
        vocabulary: number of token ids.
        type: of the ids in .bin files.
    """

    source: Text
    vocabulary: Annotated[int, Field(ge=1, le=1 << 24)] | None = None
    type: Annotated[str, one_of("type of token ids", *TOKEN_TYPES)] | None = None

    @model_validator(mode="after")
    def _check(self) -> Data:
        before, _, path = self.source.partition(":")
        if not path.strip() or (self.is_function and "/" in before):
            raise ValueError(
                f"'{self.source}': give KIND:PATH, where KIND is one of {', '.join(DATA)}, or module:function"
            )
        for name in ("vocabulary", "type"):
            if self.kind != "tokens" and getattr(self, name) is not None:
                raise ValueError(f"{name} {getattr(self, name)}: it is of token ids, give tokens:PATH")
        return self

    @property
    def kind(self) -> str:
        """``text``, ``lines`` (a document on each line of a text), ``jsonl`` (as a JSON object), ``tokens``, ``images``,
        ``volumes``, or ``function``."""
        kind = self.source.partition(":")[0]
        return kind if kind in DATA else "function"

    @property
    def path(self) -> str:
        """The file or folder, or the name of the function."""
        return self.source if self.is_function else self.source.partition(":")[2]

    @property
    def is_text(self) -> bool:
        """Whether language models are trained on it."""
        return self.kind in DATA[:4]

    @property
    def is_function(self) -> bool:
        """Whether a function of the user gives them."""
        return self.kind == "function"


class Local(WithOptions):
    """Local SGD."""

    every: Count
    outer_lr: Positive | None = None
    outer_momentum: Annotated[float, Field(gt=0, lt=1)] | None = None
    fragments: Count = 1
    delay: Annotated[int, Field(ge=0, lt=2**63)] = 0
    wire: Wire = "fp32"
    within: Groups = None

    @model_validator(mode="after")
    def _check(self) -> Local:
        for name in ("fragments", "delay"):
            if getattr(self, name) > self.every:
                raise ValueError(
                    f"{name} {getattr(self, name)}: give at most the {self.every} steps between averages"
                )
        return self


class Stages(WithOptions):
    """Pipeline stages."""

    stages: Count = 1
    schedule: Annotated[str, one_of("pipeline schedule", *PIPELINE_SCHEDULES)] = "1f1b"
    virtual_stages: Count | None = None
    balance: list[Count] | None = None

    @property
    def virtual_stages_of_each(self) -> int:
        """Parts of the model on each stage."""
        return virtual_stages_of(self.schedule, self.virtual_stages)

    @property
    def parts_of_model(self) -> int:
        """Parts that the model is cut into, on all stages together."""
        return self.stages * self.virtual_stages_of_each


class Verify(WithOptions):
    """What is compared during the run."""

    recomputation: When | None = None
    weights: bool = True
    every: Count | None = None


class Sharded(WithOptions):
    """State that is split over the ranks (ZeRO)."""

    states: ShardStage = STAGES[0]
    wire: Wire = "fp32"
    accumulate_locally: bool = False
    offload: Annotated[str, one_of("thing to offload", "optimizer", "parameters")] | None = None
    folder: Text | None = None
    within: Groups = None

    @property
    def stage(self) -> int:
        """The stage, from 0 to 3."""
        return stage_of(self.states)


class Segments(WithOptions):
    """Recomputation in segments."""

    number: Count
    reentrant: bool = False


class Planned(WithOptions):
    """A plan for a memory limit."""

    limit: Budget
    cache: Text | None = None
    chunk_head: bool = True
