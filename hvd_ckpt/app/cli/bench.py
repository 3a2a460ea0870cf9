"""``hvd-ckpt bench``: where the benchmarks are."""

from __future__ import annotations

import click


@click.command()
def bench() -> None:
    """Say where the benchmarks are: in a clone of the repository, outside of the package."""
    click.echo("The benchmarks are in the repository: run `python -m benchmarks` in a clone of it.")
