"""``hvd-ckpt plot``: the losses of several training runs in one picture.

Exit status 0 with a picture, 2 for a run or a log that cannot be drawn.
"""

from __future__ import annotations

from pathlib import Path

import click

from hvd_ckpt.app.cli.command_line import BadArgument, OneLineErrors

LOG = "log.jsonl"


@click.command("plot", cls=OneLineErrors)
@click.argument("runs", nargs=-1, required=True, metavar="[NAME=]RUN...")
@click.option(
    "--output", metavar="FILE", default="loss.png", show_default=True, help="File of the picture, a PNG."
)
@click.option("--title", metavar="TEXT", default="Loss", help="Title of the picture.")
def plot(runs: tuple[str, ...], output: str, title: str) -> None:
    """Draw the losses of training runs over their steps: hvd-ckpt plot runs/a short=runs/b --output both.png

    A RUN is the folder of a run of `hvd-ckpt train`, or its log. The name of a line is NAME, or else that of the folder. Training
    is drawn as lines, evaluations as points.
    """
    logs = _logs(runs)
    file = Path(output)
    if file.suffix.lower() != ".png":
        raise BadArgument(f"--output: '{output}' is not a PNG: give a name that ends in .png")
    from hvd_ckpt.app.training.logs import loss_plot

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        loss_plot(logs, file, title)
    except ValueError as error:
        raise BadArgument(str(error)) from None
    except OSError as error:
        raise BadArgument(f"--output: cannot write '{output}': {error.strerror}") from None
    click.echo(f"Picture: {file}")


def _logs(runs: tuple[str, ...]) -> dict[str, Path]:
    """The log of each run, by name.

    Raises:
        BadArgument: there is no such run, it has no log, or two have one name.
    """
    logs: dict[str, Path] = {}
    for run in runs:
        name, log = _named_log(run)
        if name in logs:
            raise BadArgument(f"two runs are named '{name}' ({logs[name]} and {log}): give NAME=RUN")
        logs[name] = log
    return logs


def _named_log(run: str) -> tuple[str, Path]:
    name, path = "", Path(run)
    # A folder whose name has an equals sign is taken as it is.
    if "=" in run and not path.exists():
        name, _, rest = run.partition("=")
        path = Path(rest)
        if not name or not rest:
            raise BadArgument(f"run '{run}': give NAME=RUN, with both")
    if not path.exists():
        raise BadArgument(f"there is no run '{path}': give the folder of a run, or its log")
    log = path / LOG if path.is_dir() else path
    if not log.is_file():
        raise BadArgument(
            f"run '{path}' has no {LOG}: it is not the folder of a run, or the run has not begun"
        )
    return name or log.resolve().parent.name, log
