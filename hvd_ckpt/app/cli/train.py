"""``hvd-ckpt train``: makes a configuration from flags and files, and runs it; an invalid setting is one line.

The exit status is 0 after a run, or after the file ``stop`` in its folder has stopped it, and 128 + signal after a signal. It is 2
for an invalid setting, and 1 for any other error. Errors are shown in one line, or with the traceback of the rank that raised
them.
"""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hvd_ckpt.app.cli.command_line import BadArgument, OneLineErrors
from hvd_ckpt.app.cli.options import options_of, values_of
from hvd_ckpt.app.models.catalog import overview
from hvd_ckpt.app.training.config import GROUPS, RENAMED, Config, ConfigError, read_yaml
from hvd_ckpt.app.training.field_types import Options
from hvd_ckpt.app.training.supervise import Commands, asked_by, supervise
from hvd_ckpt.processes.launchers import RANK_VARIABLES, is_elastic, launched_rank
from hvd_ckpt.processes.probe import find_launcher, launcher_environment
from hvd_ckpt.utils import rules
from hvd_ckpt.utils.folders import new_folder
from hvd_ckpt.utils.text import SECONDS, talking

if TYPE_CHECKING:
    from hvd_ckpt.app.training.trainer import Trainer


# One setting of these replaces the others.
ALTERNATIVES = ({"steps", "epochs"}, {"budget", "plan", "segments"})


def _train(
    file: str | None,
    max_restarts: int | None,
    np: int | None,
    launcher: str | None,
    grace: float,
    **flags: Any,
) -> None:
    try:
        config = _config(file, flags)
        if max_restarts is None and np is None and launcher is None:
            run(config)
            return
        stages = config.pipeline.stages
        if np is not None and np % (stages * config.tensor) and config.tensor > 1:
            raise ConfigError(
                f"--np {np}: stages x tensor, {stages} x {config.tensor}, does not divide it, give a multiple"
            )
        if np is not None and np % stages:
            raise ConfigError(f"--np {np}: stages {stages} do not divide it, give a multiple")
        words = _launcher(np, launcher)
        commands = _commands(config, words, file, flags)
    except ConfigError as error:
        raise BadArgument(str(error)) from None
    click.get_current_context().exit(supervise(commands, max_restarts or 0, grace))


def _launcher(np: int | None, launcher: str | None) -> list[str]:
    """The words of the launcher; none for one process.

    Raises:
        ConfigError: it cannot be, or is not here.
    """
    # A launcher started by a rank would start a job in each rank.
    inside = next((name for name in RANK_VARIABLES if name in os.environ), None)
    if inside is not None:
        raise ConfigError(
            f"--max-restarts, --np, --launcher: {inside} is set, so a launcher has started this process already; start the "
            "launcher from here instead: hvd-ckpt train --max-restarts 3 --launcher 'horovodrun -np 2' ..."
        )
    if reason := rules.refusal({"np": np, "launcher": launcher}, rules.setting):
        raise ConfigError(reason)
    if np is not None:
        horovodrun = find_launcher()
        if horovodrun is None:
            raise ConfigError(f"--np {np}: horovodrun was found neither next to this Python nor on PATH")
        return [*horovodrun, "-np", str(np)]
    try:
        words = shlex.split(launcher or "")
    except ValueError as error:
        raise ConfigError(f"--launcher '{launcher}': {str(error).lower()}") from None
    if words and shutil.which(words[0], path=launcher_environment()["PATH"]) is None:
        raise ConfigError(f"--launcher '{launcher}': there is no command '{words[0]}' here")
    return words


def _commands(config: Config, launcher: list[str], file: str | None, flags: dict[str, Any]) -> Commands:
    """The commands of a run, whose folder is decided here.

    Raises:
        ConfigError: the folder is in use or cannot be written to.
    """
    files = [] if file is None else [file]
    if config.resume is not None:
        run = _folder_of_run(config.resume).resolve()
        # The first launch resumes from what was named, which may be one snapshot; later ones from the newest of the run.
        first = [*files, *_arguments({**flags, "resume": config.resume})]
        again = [*files, *_arguments({**flags, "resume": str(run)})]
        return Commands(launcher, first, again, run, resumed=True)
    try:
        run = new_folder(config.output, "train", make=not config.dry_run)
    except ValueError as error:
        raise ConfigError(f"output: {error}") from None
    # The folder is chosen here and not by the ranks, so that a second launch finds the snapshots of the first.
    first = [*files, *_arguments({**flags, "output": str(run)})]
    return Commands(launcher, first, [f"--resume={run}"], run, resumed=False)


def _arguments(flags: dict[str, Any]) -> list[str]:
    """The flags as they are written on a command line."""
    written = []
    for setting in Config.model_fields:
        name, value = setting.replace("_", "-"), flags[setting]
        # A flag that is given as no must be handed on as no: a file may say yes.
        if isinstance(value, bool):
            written.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, tuple):
            written += [f"--{name.removesuffix('s')}={option}" for option in value]
        elif value is not None:
            written.append(f"--{name}={value}")
    return written


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
    from hvd_ckpt.snapshots.stopping import status_of

    folder = config.output or (config.resume and _folder_of_run(config.resume))
    with exit_handler(Path(folder) if folder else None):
        # A launcher that is killed leaves its ranks behind, which would train on and hold the devices.
        watchdog.end_with_parent()
        # Each group of ranks is a process set, which Horovod must be told before it starts.
        if config.within is not None:
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
            end = f"stopped by {asked_by(outcome.stopped)}, with a snapshot,"
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
            if new := RENAMED.get(flag.removeprefix("--").replace("-", "_")):
                raise BadArgument(f"no option {flag}: give --{new}")
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
        click.Option(
            ["--max-restarts"],
            type=click.IntRange(0),
            metavar="N",
            help="Start the ranks from this process. If they die, start them again from the newest snapshot, at most N times.",
        ),
        click.Option(
            ["--np"],
            type=click.IntRange(1),
            metavar="P",
            help="Start P ranks from this process, with horovodrun.",
        ),
        click.Option(
            ["--launcher"],
            metavar="COMMAND",
            help="Start the ranks with this command, such as 'horovodrun -np 8 -H node1:4,node2:4'.",
        ),
        click.Option(
            ["--grace"],
            type=click.FloatRange(0),
            default=20,
            show_default=True,
            metavar="SECONDS",
            help="After a signal to this process, time that the ranks it started have to save and end.",
        ),
    ],
    help=f"""Train a model over all ranks: horovodrun -np 2 hvd-ckpt train --model bert-small ...

    With restarts when a rank dies: hvd-ckpt train --max-restarts 3 --np 2 --model bert-small ...

    Settings come from flags and from a YAML FILE, whose keys are the names of the flags. Flags override the file.

    Models: {overview()}, a folder of a Hugging Face model, or module:function.
    """,
    context_settings={"help_option_names": ["-h", "--help"]},
)
