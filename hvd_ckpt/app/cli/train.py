"""``hvd-ckpt train``: makes a configuration from flags and files, and runs it; an invalid setting is one line.

The exit status is 0 after a run, or after the file ``stop`` in its folder has stopped it, and 128 + signal after a signal. It is 2
for an invalid setting, and 1 for any other error. Errors are shown in one line, or with the traceback of the rank that raised
them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hvd_ckpt.app.cli.command_line import BadArgument, OneLineErrors
from hvd_ckpt.app.cli.options import options_of, values_of
from hvd_ckpt.app.models.catalog import overview
from hvd_ckpt.app.training.config import GROUPS, Config, ConfigError, instead_of, read_yaml
from hvd_ckpt.app.training.field_types import Options
from hvd_ckpt.processes.launchers import is_elastic, launched_rank
from hvd_ckpt.utils.text import SECONDS, talking

if TYPE_CHECKING:
    from hvd_ckpt.app.training.trainer import Trainer


# One setting of these replaces the others.
ALTERNATIVES = ({"steps", "epochs"}, {"budget", "plan", "segments"})


def _train(file: str | None, **flags: Any) -> None:
    try:
        run(_config(file, flags))
    except ConfigError as error:
        raise BadArgument(str(error)) from None


def _config(file: str | None, flags: dict[str, Any]) -> Config:
    """The settings of the file, replaced by those of the flags."""
    values = read_yaml(file) if file is not None else {}
    resume = flags["resume"] or values.get("resume")
    if resume is not None:
        given = {*values, *(name for name, value in flags.items() if value is not None)}
        # Settings of the file win over those of the resumed run, and flags, below, over both.
        values = {**_settings_of_run(str(resume), given), **values}
    try:
        for name, value in values_of(Config, flags).items():
            # Options of a flag are added to those of the file one by one; other settings replace.
            adds = Config.model_fields[name].annotation == Options
            values[name] = {**(values.get(name) or {}), **value} if adds else value
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return Config.make(values)


def _settings_of_run(resume: str, given: set[str]) -> dict[str, Any]:
    """The settings of a run, or of the run of a snapshot, without those that the settings given now replace."""
    values = read_yaml(_folder_of_run(resume) / "config.yaml")
    replaced = {"output", "resume"}
    # A setting of the resumed run must not stand beside the one that replaces it: the two together are refused.
    for alternatives in ALTERNATIVES:
        if given & alternatives:
            replaced |= alternatives
    if "pipeline" in given:
        replaced.add("checkpoint")
    return {name: value for name, value in values.items() if name not in replaced}


def _folder_of_run(resume: str) -> Path:
    folder = Path(resume)
    return folder.resolve().parent.parent if os.path.isfile(folder / "manifest.json") else folder


def run(config: Config) -> None:
    """Trains as configured, on all ranks; ends the process with the status of a run that was stopped or failed.

    Raises:
        ConfigError: raised on every rank.
    """
    import horovod.torch as hvd

    from hvd_ckpt.app.training import elastic
    from hvd_ckpt.app.training.ending import exit_handler, exit_now
    from hvd_ckpt.app.training.summary import DryRun
    from hvd_ckpt.processes import runtime, watchdog
    from hvd_ckpt.processes.grid import current
    from hvd_ckpt.snapshots.stopping import in_words, status_of

    with exit_handler():
        # A launcher that is killed leaves its ranks behind, which would train on and hold the devices.
        watchdog.end_with_parent()
        # Each group of ranks is a process set, which Horovod must be told before it starts.
        if config.shard.within is not None or (config.local is not None and config.local.within is not None):
            os.environ.setdefault("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
        try:
            runtime.init(
                stall_timeout=config.stall_timeout, stages=config.pipeline.stages, tensor=config.tensor
            )
        except ValueError as error:  # of the environment, or Horovod's own
            raise ConfigError(str(error)) from None
        try:
            outcome = elastic.train(config) if is_elastic() else _prepared(config).run()
        except DryRun:
            return
    if current().number == 0:
        end = "ended early" if outcome.ended_early else "done"
        if outcome.stopped:
            end = f"stopped by {in_words(outcome.stopped)}, with a snapshot,"
        click.echo(f"{end} after {outcome.steps} steps: {outcome.folder}")
    if outcome.stopped:
        # Everything is written, and a launcher may give no time for the interpreter's own end.
        hvd.shutdown()
        exit_now(status_of(outcome.stopped))


def _prepared(config: Config) -> Trainer:
    """The trainer of this rank; large texts and snapshots, and plans, take their time."""
    from hvd_ckpt.app.training.build import assemble_in_turn
    from hvd_ckpt.app.training.trainer import Trainer

    # Under a launcher several ranks would write over each other.
    if launched_rank():
        return Trainer(config, *assemble_in_turn(config))
    with talking("train", after=SECONDS) as say:
        say("reading the data and building the model")
        assembly = assemble_in_turn(config)
        say("preparing the first step")
        return Trainer(config, *assembly)


class _Train(OneLineErrors):
    """The command, whose help has the groups of settings, and which tells the new name of an option that had another one."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        for flag in (word.partition("=")[0] for word in args if word.startswith("--")):
            if (new := instead_of(flag.removeprefix("--"))) is not None:
                raise BadArgument(f"no option {flag}: {new}")
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        title, rows = "", dict[str, list[tuple[str, str]]]()
        for parameter in self.get_params(ctx):
            title = GROUPS.get(str(parameter.name), title)
            if (row := parameter.get_help_record(ctx)) is not None:
                rows.setdefault(title, []).append(row)
        for name, records in rows.items():
            with formatter.section(name):
                formatter.write_dl(records)


train = _Train(
    "train",
    callback=_train,
    params=[
        click.Argument(["file"], required=False, metavar="[FILE]"),
        *options_of(Config),
    ],
    help=f"""Train a model over all ranks: horovodrun -np 2 hvd-ckpt train --model bert-small ...

    Settings come from flags and from a YAML FILE, whose keys are the names of the flags. Flags override the file.

    Models: {overview()}, a folder of a Hugging Face model, or module:function.
    """,
    context_settings={"help_option_names": ["-h", "--help"]},
)
