"""``python -m benchmarks``: a command for each suite, which is imported when it is asked for."""

from __future__ import annotations

from importlib import import_module

import click

SUITES = {
    "faults": "benchmarks.faults",
    "local": "benchmarks.local.command",
    "pipeline": "benchmarks.pipeline.command",
    "recompute": "benchmarks.recompute.command",
    "reduce": "benchmarks.reduce",
    "replicas": "benchmarks.replicas",
    "scale": "benchmarks.scale",
    "scale_on_hosts": "benchmarks.scale_on_hosts",
    "shard": "benchmarks.shard.command",
    "tensor": "benchmarks.tensor",
    "train": "benchmarks.train.command",
}
"""The module of each suite; the command has the same name in it."""


class _Suites(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(SUITES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in SUITES:
            return None
        command: click.Command = getattr(import_module(SUITES[cmd_name]), cmd_name)
        return command


@click.group("benchmarks", cls=_Suites)
def benchmarks() -> None:
    """Measure speed and memory, beside other engines."""


if __name__ == "__main__":
    benchmarks(prog_name="python -m benchmarks")
