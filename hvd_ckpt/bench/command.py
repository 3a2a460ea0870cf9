"""``hvd-ckpt bench``: the group of benchmark commands; each is imported when it is asked for."""

from __future__ import annotations

from importlib import import_module

import click

COMMANDS = {
    "faults": "hvd_ckpt.bench.faults",
    "local": "hvd_ckpt.bench.local.command",
    "pipeline": "hvd_ckpt.bench.pipeline.command",
    "recompute": "hvd_ckpt.bench.recompute.command",
    "reduce": "hvd_ckpt.bench.reduce",
    "replicas": "hvd_ckpt.bench.replicas",
    "shard": "hvd_ckpt.bench.shard.command",
    "tensor": "hvd_ckpt.bench.tensor",
    "train": "hvd_ckpt.bench.train.command",
}
"""The module of each command; the command has the same name in it."""


class _Bench(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(import_module(COMMANDS[cmd_name]), cmd_name)
        return command


@click.group("bench", cls=_Bench)
def bench() -> None:
    """Measure speed, memory and fault tolerance, beside other engines."""
