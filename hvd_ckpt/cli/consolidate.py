"""``hvd-ckpt consolidate``: the weights of a run or snapshot, of any number of ranks, as one safetensors file.

Exit status 0 with a file, 2 if the run, the snapshot or the file's name cannot be used.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import click

from hvd_ckpt.command_line import BadArgument, OneLineErrors
from hvd_ckpt.text import SECONDS, talking


@click.command("consolidate", cls=OneLineErrors)
@click.argument("run", metavar="RUN_OR_SNAPSHOT")
@click.option(
    "--output",
    metavar="FILE",
    default="model.safetensors",
    show_default=True,
    help="For the weights; must not exist.",
)
@click.option(
    "--ema", is_flag=True, help="Write the moving averages of `hvd-ckpt train --ema` in place of the weights."
)
def consolidate(run: str, output: str, ema: bool) -> None:
    """Write the whole weights of a run of `hvd-ckpt train` as one safetensors file.

    RUN_OR_SNAPSHOT is the folder of a run, whose newest undamaged snapshot is used, or of a snapshot. The file has the names and
    shapes of the model's `state_dict()`, buffers included, however the run was sharded. Checksums are verified. It takes memory
    for one model.
    """
    from hvd_ckpt.snapshots.consolidate import consolidate as write_consolidated
    from hvd_ckpt.snapshots.reader import SnapshotError

    file = Path(output)
    if os.path.lexists(file):
        raise BadArgument(f"--output: '{output}' is there: give another name")
    try:
        snapshot = _snapshot_of(Path(run))
        file.parent.mkdir(parents=True, exist_ok=True)
        with talking("consolidate", after=SECONDS) as say:
            say(f"checking and copying '{snapshot}'")
            written = write_consolidated(snapshot, file, ema)
    except SnapshotError as error:
        raise BadArgument(str(error)) from None
    except OSError as error:
        raise BadArgument(f"--output: cannot write '{output}': {error.strerror or error}") from None
    ranks = "1 rank" if written.ranks == 1 else f"{written.ranks} ranks"
    size = f"{written.tensors} tensors, {written.bytes / 2**20:.1f} MiB"
    click.echo(
        f"{'Averaged weights' if ema else 'Weights'} of step {written.step}, written by {ranks}, {size}: {file}"
    )


def _snapshot_of(path: Path) -> Path:
    """The snapshot itself, or the newest one of a run that is not damaged.

    Raises:
        BadArgument: there is no snapshot.
    """
    from hvd_ckpt.snapshots.reader import find

    if (path / "manifest.json").is_file():
        return path
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: click.echo(f"Warning: {message}", err=True)
        found = find(path / "snapshots")
    if found is None:
        raise BadArgument(f"there is no snapshot in '{path}': give the folder of a run or of a snapshot")
    return found
