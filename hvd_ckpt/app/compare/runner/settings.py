"""Settings of a benchmark: a frozen dataclass from whose fields the options of its command follow.

A field says everything about its option::

    @dataclass(frozen=True)
    class Settings(BenchSettings):
        steps: int = setting("Timed steps per job.", 5, quick=1)
        quick: bool = setting("A tiny model.", False)

The default of an option may depend on ``--quick``. Values have been checked when a command sees them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from hvd_ckpt.app.cli.command_line import BadArgument, check_controller, split_names
from hvd_ckpt.utils.named import import_named
from hvd_ckpt.utils.text import BUILD_HOROVOD

CONTROLLERS = ("gloo", "mpi")


@dataclass(frozen=True)
class BenchSettings:
    """The base of all settings."""

    def check(self) -> None:
        """Checks what concerns several settings, before anything is written.

        Raises:
            BadArgument: they do not go together.
        """


Parse = Callable[[str, str], Any]
"""From the option and the text that was given to the value; raises BadArgument."""


def setting(
    help: str,
    default: Any = None,
    *,
    quick: Any = None,
    flag: str = "",
    type: click.ParamType[Any] | Parse | None = None,
    note: str = "",
    **more: Any,
) -> Any:
    """A field of a settings class.

    Args:
        help: of the option.
        default: as on the command line; None for none.
        quick: the default with ``--quick``, where it differs.
        flag: the option's name without dashes, where it is not the field's.
        type: click's type of the value, or what reads the text; without one a whole number as default makes it a number from 1.
        note: the default in words, where it is not a value.
        **more: further arguments of click's option, such as ``metavar``, the word for the value in the help, and ``envvar``.
    """
    words = {"help": help, "default": default, "quick": quick, "flag": flag, "type": type}
    words |= {"note": note, "more": more}
    return dataclasses.field(metadata={"option": words})


def options_of(settings: type[BenchSettings]) -> list[click.Parameter]:
    """The options of a command with these settings."""
    return [_option(field.name, field.metadata["option"]) for field in dataclasses.fields(settings)]


def _option(name: str, words: Mapping[str, Any]) -> click.Option:
    names, help = [f"--{words['flag'] or name.replace('_', '-')}", name], words["help"]
    default, quick, kind = words["default"], words["quick"], words["type"]
    if default is False:
        return click.Option(names, is_flag=True, is_eager=name == "quick", help=help)
    told = words["note"] or default
    if quick is not None:
        told = f"{told}; with --quick {quick}"
    if told is not None:
        help += f"  [default: {told}]"
    if kind is None and isinstance(default, int):
        kind = click.IntRange(1)

    # --quick is eager: click has read it before it asks for a default.
    def by_size() -> Any:
        return quick if click.get_current_context().params["quick"] else default

    def read(context: click.Context, option: click.Parameter, value: Any) -> Any:
        # A value from the command line and a default given as text are read alike. Other defaults, such as
        # numbers, are the value.
        is_text = isinstance(value, str) and not isinstance(kind, click.ParamType | None)
        return kind(option.opts[0], value) if is_text else value

    return click.Option(
        names,
        type=kind if isinstance(kind, click.ParamType) else None,
        callback=read,
        default=default if quick is None else by_size,
        help=help,
        **words["more"],
    )


def chosen_values(settings: BenchSettings) -> dict[str, Any]:
    """The value of each option that says what is measured, for a report."""
    named = {
        (field.metadata["option"]["flag"] or field.name).replace("-", "_"): field.name
        for field in dataclasses.fields(settings)
    }
    return {flag: getattr(settings, name) for flag, name in named.items() if name not in ("quick", "timeout")}


def in_words(value: Any) -> str:
    """A value as on the command line."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def names_of(known: Iterable[str] | None = None, find: str = "") -> Parse:
    """Reads names, separated by commas, each once.

    Args:
        known: all names.
        find: ``module:function`` of what looks a name up, and raises ValueError if there is nothing of that name; imported when
            there is a name.
    """

    def look_up(name: str) -> object:
        return import_named("function", find)(name) if find else None

    return lambda option, text: split_names(option, text, known, look_up)


def controllers_of(option: str, text: str) -> tuple[str, ...]:
    """Reads controllers of Horovod, separated by commas, with which it was built."""
    return tuple(map(check_controller, split_names(option, text, CONTROLLERS)))


def numbers_of(what: str) -> Parse:
    """Reads whole numbers from 1 of something, separated by commas, each once."""

    def read(option: str, text: str) -> tuple[int, ...]:
        names = split_names(option, text)
        for name in names:
            if not name.isdecimal() or len(name) > 18 or int(name) < 1:
                raise BadArgument(
                    f"{option}: '{name[:40]}' is not a number of {what}: give whole numbers from 1"
                )
        return tuple(map(int, names))

    return read


def controller_setting() -> Any:
    """The controller of a command's jobs."""

    def read(option: str, text: str) -> str:
        if text not in ("auto", *CONTROLLERS):
            raise BadArgument(f"{option}: '{text}' is not one of auto, {', '.join(CONTROLLERS)}")
        return check_controller(text)

    return setting("Controller that starts the ranks.", "auto", type=read, metavar="[auto|gloo|mpi]")


def device_setting() -> Any:
    """The kind of device of the ranks."""
    return setting("Of the ranks, each of which has one.", "cpu", type=click.Choice(["cpu", "cuda"]))


def text_setting() -> Any:
    """Text to train on; its whole path, since ranks may run in another folder."""

    def read(option: str, text: str) -> str:
        from hvd_ckpt.app.datasets.tokens import find_text_files

        try:
            find_text_files(text)
        except ValueError as error:
            raise BadArgument(f"{option}: {error}") from None
        return str(Path(text).resolve())

    return setting("Training text.", note="the source text of Python's library", type=read, metavar="FILE")


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
