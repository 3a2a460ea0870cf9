"""``hvd-ckpt export``: the weights of a run or snapshot, of any number of ranks, as a file or for transformers.

Exit status 0 with the file or folder, 2 if the run, the snapshot or the name cannot be used.
"""

from __future__ import annotations

import functools
import os
import shutil
from pathlib import Path

import click

from hvd_ckpt.app.cli.command_line import BadArgument, OneLineErrors, saying
from hvd_ckpt.utils.text import SECONDS, show_bytes

OUTPUTS = {"safetensors": "model.safetensors", "pt": "model.pt", "hf": "model"}


@click.command("export", cls=OneLineErrors)
@click.argument("run", metavar="RUN_OR_SNAPSHOT")
@click.option(
    "--format",
    "kind",
    type=click.Choice(list(OUTPUTS)),
    default="safetensors",
    show_default=True,
    help="safetensors, pt: a file with the `state_dict()`; hf: a folder with tokenizer for transformers' from_pretrained.",
)
@click.option(
    "--output",
    metavar="PATH",
    help="File or folder; must not exist.  [default: model.safetensors, model.pt or model]",
)
@click.option(
    "--ema", is_flag=True, help="Write the moving averages of `hvd-ckpt train --ema` in place of the weights."
)
@click.option(
    "--convert",
    metavar="OLD",
    help="Read the run or snapshot OLD of an earlier version of this library, and write it into the folder of a run.",
)
def export(run: str, kind: str, output: str | None, ema: bool, convert: str | None) -> None:
    """Write the whole weights of a run of `hvd-ckpt train`, or of hc.Snapshots, for other tools.

    RUN_OR_SNAPSHOT is a snapshot, or the folder of a run, of which the newest undamaged snapshot is used. Names and shapes are
    those of the model's `state_dict()`, including buffers, for every sharding of the run. Checksums are verified. The command
    needs memory for one model, and with `--format hf` for two.
    """
    if convert is not None:
        _convert(Path(convert), Path(run))
        return
    place = Path(output or OUTPUTS[kind])
    if os.path.lexists(place):
        raise BadArgument(f"--output: '{place}' is there: give another name")
    # Imported after the arguments are checked, since this imports PyTorch.
    from hvd_ckpt.snapshots.export import Write, export as write_export, write_pt
    from hvd_ckpt.snapshots.folder import SnapshotError
    from hvd_ckpt.snapshots.reader import find_in
    from hvd_ckpt.snapshots.tensors import save_tensors

    try:
        snapshot = find_in(Path(run))
        if snapshot is None:
            raise BadArgument(f"there is no snapshot in '{run}': give the folder of a run or of a snapshot")
        write: Write = write_pt if kind == "pt" else save_tensors
        if kind == "hf":
            from hvd_ckpt.app.training.trained import settings_of, write_hf

            write = functools.partial(write_hf, settings_of(snapshot.path))
        place.parent.mkdir(parents=True, exist_ok=True)
        with saying("export", after=SECONDS) as say:
            say(f"checking and copying '{snapshot.path}'")
            tensors, size = write_export(snapshot, place, ema, write)
    except (SnapshotError, ValueError) as error:
        raise BadArgument(str(error)) from None
    except OSError as error:
        raise BadArgument(f"--output: cannot write '{place}': {error.strerror or error}") from None
    manifest = snapshot.manifest
    ranks = "1 rank" if manifest.ranks == 1 else f"{manifest.ranks} ranks"
    click.echo(
        f"{'Averaged weights' if ema else 'Weights'} of step {manifest.step}, written by {ranks}, {tensors} tensors, "
        f"{show_bytes(size)}: {place}"
    )


def _convert(old: Path, run: Path) -> None:
    """Writes the newest snapshot of a run of an earlier version, or one of its snapshots, into the folder of a run."""
    from hvd_ckpt.snapshots.convert import convert
    from hvd_ckpt.snapshots.folder import SnapshotError, list_snapshots

    try:
        found = [old] if (old / "manifest.json").is_file() else list_snapshots(old / "snapshots")
        if not found:
            raise BadArgument(
                f"--convert: there is no snapshot in '{old}': give the folder of a run or of a snapshot"
            )
        written = convert(found[0], run / "snapshots")
        settings = found[0].parent.parent / "config.yaml"
        if settings.is_file() and not (run / settings.name).exists():
            shutil.copyfile(settings, run / settings.name)
    except SnapshotError as error:
        raise BadArgument(str(error)) from None
    except OSError as error:
        raise BadArgument(f"--convert: cannot use '{error.filename}': {error.strerror or error}") from None
    click.echo(f"Converted '{found[0]}': {written}")
