"""``python -m benchmarks``: a command for each suite, which is imported when it is asked for."""

from __future__ import annotations

import pkgutil
from importlib import import_module

import click

from benchmarks import suites
from benchmarks.suite import Suite


class _Suites(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(module.name for module in pkgutil.iter_modules(suites.__path__))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        module = import_module(f"{suites.__name__}.{cmd_name}")
        suite: Suite = getattr(module, cmd_name)
        return suite.command


@click.group("benchmarks", cls=_Suites)
def benchmarks() -> None:
    """Measure speed and memory, beside other engines."""


if __name__ == "__main__":
    benchmarks(prog_name="python -m benchmarks")
