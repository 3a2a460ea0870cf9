"""``hvd-ckpt train``: makes a configuration from flags and files, and runs it; an invalid setting is one line.

The exit status is 0 after a run, or after the file ``stop`` in its folder has stopped it, and 128 + signal after a signal. It is 2
for an invalid setting, and 1 for any other error. Errors are shown in one line, or with the traceback of the rank that raised
them.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from typing import TYPE_CHECKING

import click

from hvd_ckpt.app.cli.command_line import saying
from hvd_ckpt.app.cli.run_command import RunCommand
from hvd_ckpt.app.models.catalog import overview
from hvd_ckpt.app.training.config import Config, config_errors
from hvd_ckpt.processes.launchers import is_elastic
from hvd_ckpt.utils.text import SECONDS

if TYPE_CHECKING:
    from hvd_ckpt.app.training.trainer import Trainer


def run(config: Config) -> None:
    """Trains as configured, on all ranks; ends the process with the status of a run that was stopped or failed.

    Raises:
        ConfigError: raised on every rank.
    """
    import horovod.torch as hvd

    from hvd_ckpt.app.training import elastic
    from hvd_ckpt.app.training.ending import exit_handler, exit_now
    from hvd_ckpt.app.training.summary import DryRun
    from hvd_ckpt.collectives.agreement import of_first_process
    from hvd_ckpt.processes import ancestry, runtime
    from hvd_ckpt.processes.grid import current
    from hvd_ckpt.processes.stopping import in_words, status_of
    from hvd_ckpt.snapshots.folder import name_of

    with exit_handler():
        # A launcher that is killed leaves its ranks behind, which would train on and hold the devices.
        ancestry.end_with_parent()
        # Each group of ranks is a process set, which Horovod must be told before it starts.
        if config.shard.within is not None or (config.local is not None and config.local.within is not None):
            os.environ.setdefault("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
        with config_errors():  # of the environment, or Horovod's own
            runtime.init(
                stall_timeout=config.stall_timeout, stages=config.pipeline.stages, tensor=config.tensor
            )
        try:
            outcome = elastic.train(config) if is_elastic() else _prepared(config).run()
        except DryRun:
            return
    if current().number == 0:
        end = "ended early" if outcome.ended_early else "done"
        if outcome.stopped:
            end = f"stopped by {in_words(outcome.stopped)}, with a snapshot,"
        with contextlib.suppress(OSError):  # a launcher may be gone
            click.echo(f"{end} after {outcome.steps} steps: {outcome.folder}")
            if outcome.stopped:
                snapshot = outcome.folder / "snapshots" / name_of(outcome.steps)
                click.echo(
                    f"snapshot: {snapshot}; to resume: hvd-ckpt train --resume {shlex.quote(str(outcome.folder))}"
                )
    if outcome.stopped:
        # When one rank has exited, a launcher ends the others, so all wait until the first one has said it.
        of_first_process(None, "hvd_ckpt.train.stopped")
        # Everything is written, and a launcher may give no time for the interpreter's own end.
        hvd.shutdown()
        exit_now(status_of(outcome.stopped))


def _prepared(config: Config) -> Trainer:
    """The trainer of this rank; large texts and snapshots, and plans, take their time."""
    from hvd_ckpt.app.training.build import assemble_in_turn
    from hvd_ckpt.app.training.trainer import Trainer

    with saying("train", after=SECONDS) as say:
        say("reading the data and building the model")
        assembly = assemble_in_turn(config)
        say("preparing the first step")
        return Trainer(config, *assembly)


train = RunCommand(
    "train",
    f"""Train a model over all ranks: horovodrun -np 2 hvd-ckpt train --model bert-small ...

    Settings come from flags and from a YAML FILE, whose keys are the names of the flags. Flags override the file.

    Models: {overview()}, a folder of a Hugging Face model, or module:function.
    """,
    # Looked up when it is called, for those who put another function in its place.
    lambda config: run(config),
)
