"""The ``hvd-ckpt`` command: one group whose commands are imported when they are called.

PyTorch takes seconds to import, and a broken Horovod cannot be imported at all. So the group only has the module and one line of
help of each command. ``hvd-ckpt --help`` imports neither, and ``hvd-ckpt doctor`` runs even if no other command does.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click

from hvd_ckpt.processes.launchers import adopt_launcher
from hvd_ckpt.utils.extras import explain_import_error, installed_version

COMMANDS = {  # the module of hvd_ckpt.app with the command, and its help
    "build-horovod": ("install.build_horovod", "Build Horovod for the PyTorch at hand and install it."),
    "compare": ("compare.command", "Compare engines and recomputation: results, time, memory."),
    "doctor": ("cli.doctor", "Say what is installed, what works and what is missing."),
    "export": ("cli.export", "Write the weights of a run, however split, for transformers and other tools."),
    "layout": ("cli.layout", "Find the fastest layout of a job that fits the memory of its ranks."),
    "plan": ("cli.plan", "Fit a model's training step into a memory budget."),
    "train": ("cli.train", "Train a model over all ranks, on text, images or volumes."),
}


class LazyGroup(click.Group):
    """A click group that imports a command's module when the command is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        try:
            # Here PyTorch is imported, which takes seconds; a list of the commands does not come here.
            module = import_module(f"hvd_ckpt.app.{COMMANDS[cmd_name][0]}")
        except ImportError as error:
            raise click.ClickException(
                explain_import_error(error)
                or f"{cmd_name} cannot be loaded: {error}. Run `hvd-ckpt doctor` to see what is missing."
            ) from error
        return getattr(module, cmd_name.replace("-", "_"))

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command; a package that is missing and a Ctrl-C end it with one line."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            click.echo(f"\n{str(error) or 'interrupted'}", err=True)
            ctx.exit(130)  # as a shell has it for SIGINT
        except ImportError as error:
            text = explain_import_error(error)
            if text is None:
                raise
            from hvd_ckpt.app.cli.command_line import BadArgument

            raise BadArgument(text) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in self.list_commands(ctx)])


def _print_versions(ctx: click.Context, option: click.Parameter, asked: bool) -> None:
    """Prints the versions of this package and of what it runs on, as installed: nothing is imported."""
    if asked:
        packages = {"hvd-ckpt": "hvd_ckpt", "Horovod": "horovod", "PyTorch": "torch"}
        click.echo(
            ", ".join(f"{name} {installed_version(packages[name]) or 'is missing'}" for name in packages)
        )
        ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    help="Show the versions and exit.",
    is_flag=True,
    callback=_print_versions,
    expose_value=False,
    is_eager=True,
)
def main() -> None:
    """Train models that do not fit: Horovod data parallelism with activation checkpointing."""
    # Each launcher tells ranks in variables of its own; all commands read Horovod's.
    adopt_launcher()


if __name__ == "__main__":
    main()
