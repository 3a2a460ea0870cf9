"""Hostile inputs: some of one kind, which Hypothesis draws; a finding is told in the simplest form that it reaches."""

from __future__ import annotations

import atexit
import functools
import importlib
import shutil
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import hypothesis
from hostile import Draw
from hypothesis import strategies as st
from notes import Note
from watch import Finding, Kind, Watch, limit_address_space

NUMBER = 12  # of the inputs of a case


class Inputs(NamedTuple):
    """A case."""

    kind: str
    seed: int


@functools.cache
def kinds() -> dict[str, Kind]:
    """All kinds by name."""
    modules = map(importlib.import_module, ("snapshots", "settings", "data"))
    return {kind.name: kind for module in modules for kind in module.KINDS}


@functools.cache
def watch() -> Watch:
    """Of this process."""
    limit_address_space()
    made = Watch()
    atexit.register(shutil.rmtree, made.root, ignore_errors=True)
    return made


@functools.cache
def feed_of(name: str) -> Any:
    """Feeds an input of a kind, with the watch over it."""
    kind, folder = kinds()[name], watch().root / name
    folder.mkdir()
    return functools.partial(watch().feed, kind.prepare(folder), kind.errors)


def draw(seed: int, ranks: int, controller: str) -> Inputs:
    """As many seeds in a row as there are kinds have every kind."""
    return Inputs(list(kinds())[seed % len(kinds())], seed)


def check(case: Inputs) -> Iterator[str]:
    """Feeds inputs until one is a finding."""
    feed, outcomes = feed_of(case.kind), Counter[str]()

    @hypothesis.seed(case.seed)
    @hypothesis.settings(
        max_examples=NUMBER,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
        verbosity=hypothesis.Verbosity.quiet,
    )
    @hypothesis.given(st.data())
    def run(data: st.DataObject) -> None:
        try:
            outcomes[feed(Draw(data))] += 1
        except Finding as finding:
            raise AssertionError(str(finding)) from None

    try:
        run()
    except Exception as error:
        yield f"{case.kind}: {type(error).__name__}: {error!s:.500}"
    figures = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())
    yield Note(f"{case.kind}: {outcomes.total()} inputs, {figures}")
