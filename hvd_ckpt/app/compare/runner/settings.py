"""Settings of a benchmark, from whose fields its options follow (:mod:`hvd_ckpt.app.cli.options`), and types of these fields."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from hvd_ckpt.app.cli.command_line import BadArgument, split_names
from hvd_ckpt.app.training.field_types import one_of
from hvd_ckpt.utils.named import import_named
from hvd_ckpt.utils.schema import Strict
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


def _read(read: Callable[[str], Any]) -> BeforeValidator:
    """A validator that reads a text, or a number that was one."""
    return BeforeValidator(lambda value: read(str(value)) if isinstance(value, str | int) else value)


def names_of(known: Iterable[str] | None = None, find: str = "") -> BeforeValidator:
    """A validator that reads names, separated by commas, each once.

    Args:
        find: ``module:function`` of what looks a name up, and raises ValueError if there is nothing of that name; imported when
            there is a name.
    """
    return _read(
        lambda text: split_names(
            text, known, lambda name: import_named("function", find)(name) if find else None
        )
    )


def numbers_of(what: str) -> BeforeValidator:
    """A validator that reads whole numbers from 1 of something, separated by commas, each once."""

    def read(text: str) -> tuple[int, ...]:
        names = split_names(text)
        for name in names:
            if not name.isdecimal() or len(name) > 18 or int(name) < 1:
                raise ValueError(f"'{name[:40]}' is not a number of {what}: give whole numbers from 1")
        return tuple(map(int, names))

    return _read(read)


def _controller(name: str) -> str:
    """The controller of that name, if Horovod was built with it; ``auto`` is Gloo where there is Gloo, else MPI."""
    from hvd_ckpt.processes.probe import horovod_build

    if name not in ("auto", *CONTROLLERS):
        raise ValueError(f"'{name}' is not one of auto, {', '.join(CONTROLLERS)}")
    build = horovod_build()
    if name == "auto":
        name = "gloo" if build["gloo"] else "mpi"
    if not build[name]:
        raise ValueError(f"this Horovod was built without {name}; see `hvd-ckpt doctor`")
    return name


def _text(text: str) -> str:
    from hvd_ckpt.app.datasets.tokens import find_text_files

    find_text_files(text)
    return str(Path(text).resolve())


Controller = Annotated[str, _read(_controller)]
Controllers = Annotated[
    tuple[str, ...], _read(lambda text: tuple(map(_controller, split_names(text, CONTROLLERS))))
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
