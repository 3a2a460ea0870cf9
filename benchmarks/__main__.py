"""``python -m benchmarks``: a command for each suite, which is imported when it is asked for."""

from __future__ import annotations

import sys

import click

from benchmarks import suites


class _Suites(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return suites.names()

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in suites.names():
            return None
        suite = suites.find_suite(cmd_name)
        return suite.command(cmd_name, sys.modules[f"{suites.__name__}.{cmd_name}"].__doc__ or "")


@click.group("benchmarks", cls=_Suites)
def benchmarks() -> None:
    """Measure speed and memory, beside other engines."""


if __name__ == "__main__":
    benchmarks(prog_name="python -m benchmarks")
