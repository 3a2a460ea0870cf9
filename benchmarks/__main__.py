"""``python -m benchmarks``: a command for each suite, which is imported when it is asked for."""

from __future__ import annotations

from importlib import import_module

import click

SUITES = ("scale", "scale_on_hosts")


class _Suites(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(SUITES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in SUITES:
            return None
        command: click.Command = getattr(import_module(f"benchmarks.{cmd_name}"), cmd_name)
        return command


@click.group("benchmarks", cls=_Suites)
def benchmarks() -> None:
    """Measure speed and memory, beside other engines."""


if __name__ == "__main__":
    benchmarks(prog_name="python -m benchmarks")
