"""Commands that take the settings of a run, as flags and from a YAML file whose keys are the names of the flags."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from hvd_ckpt.app.cli.command_line import BadArgument, OneLineErrors
from hvd_ckpt.app.cli.options import options_of, settings_of, values_of
from hvd_ckpt.app.training.config import GROUPS, Config, ConfigError, config_errors, instead_of, read_yaml
from hvd_ckpt.app.training.field_types import Options
from hvd_ckpt.utils.schema import Strict

# One setting of these replaces the others.
ALTERNATIVES = ({"steps", "epochs"}, {"batch", "global_batch"}, {"budget", "plan", "segments"})


class RunCommand(OneLineErrors):
    """A command that takes the settings of a run, and calls a function with them.

    Its help has the groups of settings. It tells the new name of an option that had another one.

    Args:
        function: gets the configuration and, if there are further ``options``, their settings.
        options: further options of the command, each in place of a setting of that name.
        without: settings that it does not take as flags.
    """

    def __init__(
        self,
        name: str,
        help: str,
        function: Callable[..., None],
        options: type[Strict] | None = None,
        without: tuple[str, ...] = (),
    ) -> None:
        self._function, self._options = function, options
        further = options_of(options) if options else []
        left_out = {*without, *(option.name for option in further)}
        params = [
            click.Argument(["file"], required=False, metavar="[FILE]"),
            *further,
            *(option for option in options_of(Config) if option.name not in left_out),
        ]
        usual = {"help_option_names": ["-h", "--help"]}
        super().__init__(name, callback=self._call, params=params, help=help, context_settings=usual)

    def _call(self, file: str | None, **flags: Any) -> None:
        given = {name: flags.pop(name) for name in (self._options.model_fields if self._options else ())}
        try:
            config = config_of(file, flags)
            self._function(*([config, settings_of(self._options, given)] if self._options else [config]))
        except ConfigError as error:
            raise BadArgument(str(error)) from None

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        known = {flag for parameter in self.params for flag in parameter.opts}
        for flag in (word.partition("=")[0] for word in args if word.startswith("--")):
            if flag not in known and (new := instead_of(flag.removeprefix("--"))) is not None:
                raise BadArgument(f"no option {flag}: {new}")
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        title, rows = "Options", dict[str, list[tuple[str, str]]]()
        for parameter in self.get_params(ctx):
            title = GROUPS.get(str(parameter.name), title)
            if (row := parameter.get_help_record(ctx)) is not None:
                rows.setdefault(title, []).append(row)
        for name, records in rows.items():
            with formatter.section(name):
                formatter.write_dl(records)


def config_of(file: str | None, flags: Mapping[str, Any]) -> Config:
    """The settings of the file, replaced by those of the flags.

    Raises:
        ConfigError: the file cannot be read, or a setting is unknown or invalid.
    """
    values = read_yaml(file) if file is not None else {}
    resume = flags.get("resume") or values.get("resume")
    if resume is not None:
        given = {*values, *(name for name, value in flags.items() if value is not None)}
        # Settings of the file win over those of the resumed run, and flags, below, over both.
        values = {**_settings_of_run(str(resume), given), **values}
    with config_errors():
        for name, value in values_of(Config, flags).items():
            # Options of a flag are added to those of the file one by one; other settings replace.
            if Config.model_fields[name].annotation == Options and (before := values.get(name)):
                value = {**before, **value} if isinstance(before, dict) else before  # which is refused
            values[name] = value
    return Config.make(values)


def _settings_of_run(resume: str, given: set[str]) -> dict[str, Any]:
    """The settings of a run, or of the run of a snapshot, without those that the settings given now replace."""
    folder = Path(resume)
    if os.path.isfile(folder / "manifest.json"):
        folder = folder.resolve().parent.parent
    values = read_yaml(folder / "config.yaml")
    replaced = {"output", "resume"}
    # A setting of the resumed run must not stand beside the one that replaces it: the two together are refused.
    for alternatives in ALTERNATIVES:
        if given & alternatives:
            replaced |= alternatives
    if "pipeline" in given:
        replaced.add("checkpoint")
    return {name: value for name, value in values.items() if name not in replaced}
