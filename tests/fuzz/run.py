"""Fuzz run: python tests/fuzz/run.py --inputs 10000 --seed 1

Prints for each kind of input how many were fed and their outcomes, and a finding in the simplest form that Hypothesis reaches.
Exit status 1 if there was one. The same seed feeds the same inputs.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "helpers"), str(HERE.parents[1])]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=10_000, help="number of inputs in all")
    parser.add_argument("--seed", type=int, default=1, help="of all inputs")
    parser.add_argument("--kinds", default="", help="names, separated by commas; all by default")
    options = parser.parse_args()
    import data
    import settings
    import snapshots
    from watch import Watch, limit_address_space

    kinds = {kind.name: kind for module in (snapshots, settings, data) for kind in module.KINDS}
    chosen = [name for name in options.kinds.split(",") if name] or list(kinds)
    if unknown := set(chosen) - set(kinds):
        parser.error(f"no kind '{min(unknown)}': there are {', '.join(kinds)}")
    limit_address_space()
    began, total, findings, watch = time.monotonic(), 0, 0, Watch()
    shares = sum(kinds[name].share for name in chosen)
    try:
        for kind in map(kinds.__getitem__, chosen):
            start = time.monotonic()
            (watch.root / kind.name).mkdir()
            feed = kind.prepare(watch.root / kind.name)
            inputs = max(round(options.inputs * kind.share / shares), 1)
            outcomes, error = fuzz(functools.partial(watch.feed, feed, kind.errors), inputs, options.seed)
            figures = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())
            print(
                f"{kind.name:18} {outcomes.total():6}  {time.monotonic() - start:5.0f} s  {figures}",
                flush=True,
            )
            total += outcomes.total()
            if error is not None:
                findings += 1
                print(f"finding in {kind.name}, --seed {options.seed}: {error}", flush=True)
    finally:
        shutil.rmtree(watch.root, ignore_errors=True)
    print(f"{'all':18} {total:6}  {time.monotonic() - began:5.0f} s  {findings} findings")
    return 1 if findings else 0


def fuzz(feed: Any, inputs: int, seed: int) -> tuple[Counter[str], str | None]:
    """Feeds inputs of a kind until one is a finding; returns how many had which outcome, and the finding."""
    import hypothesis
    from hostile import Draw
    from hypothesis import strategies as st
    from watch import Finding

    outcomes: Counter[str] = Counter()

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=inputs,
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
        return outcomes, f"{type(error).__name__}: {error!s:.500}"
    return outcomes, None


if __name__ == "__main__":
    sys.exit(main())
