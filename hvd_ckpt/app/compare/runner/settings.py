"""Settings of a benchmark, from whose fields its options follow (:mod:`hvd_ckpt.app.cli.options`), and types of these fields."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo, model_validator
from typing_extensions import Self

from hvd_ckpt.app.cli.command_line import BadArgument, check_controller, split_names
from hvd_ckpt.app.cli.options import values_of
from hvd_ckpt.app.training.field_types import one_of
from hvd_ckpt.utils.named import import_named
from hvd_ckpt.utils.schema import Strict, first_error
from hvd_ckpt.utils.text import BUILD_HOROVOD

CONTROLLERS = ("gloo", "mpi")


class BenchSettings(Strict):
    """The base of all settings. With ``--quick`` a field may have another default: ``Field(5, json_schema_extra={"quick": 1})``."""

    model_config = ConfigDict(validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _take_quick(cls, given: dict[str, Any]) -> dict[str, Any]:
        extras: dict[str, Any] = {name: field.json_schema_extra for name, field in cls.model_fields.items()}
        quick = {name: extra["quick"] for name, extra in extras.items() if extra and "quick" in extra}
        return quick | given if given.get("quick") else given

    @classmethod
    def make(cls, options: Mapping[str, Any]) -> Self:
        """The settings with these options of the command line.

        Raises:
            BadArgument: one is invalid.
        """
        try:
            return cls(**values_of(cls, options))
        except ValidationError as error:
            raise BadArgument(f"--{first_error(error)}") from None
        except ValueError as error:
            raise BadArgument(str(error)) from None

    def chosen(self) -> dict[str, Any]:
        """The value of each option that says what is measured, for a report."""
        return {
            name: getattr(self, name) for name in type(self).model_fields if name not in ("quick", "timeout")
        }


def _read(read: Callable[[str, str], Any]) -> BeforeValidator:
    """A validator that reads a text, or a number that was one, given the option."""

    def validate(value: Any, info: ValidationInfo) -> Any:
        return read(f"--{info.field_name}", str(value)) if isinstance(value, str | int) else value

    return BeforeValidator(validate)


def names_of(known: Iterable[str] | None = None, find: str = "") -> BeforeValidator:
    """A validator that reads names, separated by commas, each once.

    Args:
        known: all names.
        find: ``module:function`` of what looks a name up, and raises ValueError if there is nothing of that name; imported when
            there is a name.
    """

    def look_up(name: str) -> object:
        return import_named("function", find)(name) if find else None

    return _read(lambda option, text: split_names(option, text, known, look_up))


def numbers_of(what: str) -> BeforeValidator:
    """A validator that reads whole numbers from 1 of something, separated by commas, each once."""

    def read(option: str, text: str) -> tuple[int, ...]:
        names = split_names(option, text)
        for name in names:
            if not name.isdecimal() or len(name) > 18 or int(name) < 1:
                raise BadArgument(
                    f"{option}: '{name[:40]}' is not a number of {what}: give whole numbers from 1"
                )
        return tuple(map(int, names))

    return _read(read)


def _controller(option: str, text: str) -> str:
    if text not in ("auto", *CONTROLLERS):
        raise BadArgument(f"{option}: '{text}' is not one of auto, {', '.join(CONTROLLERS)}")
    return check_controller(text)


def _text(option: str, text: str) -> str:
    from hvd_ckpt.app.datasets.tokens import find_text_files

    try:
        find_text_files(text)
    except ValueError as error:
        raise BadArgument(f"{option}: {error}") from None
    return str(Path(text).resolve())


Controller = Annotated[str, _read(_controller)]
Controllers = Annotated[
    tuple[str, ...],
    _read(lambda option, text: tuple(map(check_controller, split_names(option, text, CONTROLLERS)))),
]
TextFile = Annotated[str, _read(_text)]  # its whole path, since ranks may run in another folder
Device = Annotated[str, one_of("device", "cpu", "cuda")]
Seconds = Annotated[float, Field(ge=1)]
OF_DEVICE = "Of the ranks, each of which has one: cpu, cuda."


def check_devices(kind: str, ranks: int) -> None:
    """Raises BadArgument if jobs of so many ranks cannot train on such devices of this machine."""
    if kind == "cpu":
        return
    import horovod.torch as hvd
    import torch

    from hvd_ckpt.processes.devices import NO_GPU_OPERATIONS, has_gpu_operations

    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not visible:
        raise BadArgument(f"--device {kind}: PyTorch finds no GPU here: see `hvd-ckpt doctor`")
    if not has_gpu_operations():
        raise BadArgument(f"--device {kind}: {NO_GPU_OPERATIONS}: {BUILD_HOROVOD}")
    if ranks > visible and hvd.nccl_built():
        raise BadArgument(
            f"--device {kind}: {ranks} ranks need a GPU each, and {visible} are visible: give a smaller --np"
        )
