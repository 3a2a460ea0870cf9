"""Fuzz run: python tests/fuzz/run.py --inputs 10000 --seed 1

Prints for each kind of input how many were fed and what came of them; ends with 1 if anything came of one that must not, naming
``KIND:SEED``, with which ``--only`` repeats that input alone.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[2])]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=10_000, help="to feed in all")
    parser.add_argument("--seed", type=int, default=1, help="of all inputs")
    parser.add_argument("--kinds", default="", help="separated by commas; all by default")
    parser.add_argument(
        "--only", metavar="KIND:SEED", help="feed this input alone, with the traceback of what it ends in"
    )
    options = parser.parse_args()
    from catalogue import kinds_of
    from fuzzing import limit_address_space

    limit_address_space()
    if options.only:
        name, _, seed = options.only.partition(":")
        return 1 if fuzz(kinds_of(name), [int(seed)], aloud=True) else 0
    findings = fuzz(kinds_of(options.kinds), None, options.inputs, options.seed)
    return 1 if findings else 0


def fuzz(kinds, seeds, inputs: int = 0, first: int = 1, aloud: bool = False, out=print) -> list[str]:
    """Feeds inputs, says what came of them, and returns the findings."""
    from fuzzing import Finding, Sandbox, seeds_of

    began = time.monotonic()
    outcomes: dict[str, Counter[str]] = {}
    seconds: Counter[str] = Counter()
    findings = []
    sandbox = Sandbox(kinds)
    try:
        pairs = (
            seeds_of(kinds, inputs, first)
            if seeds is None
            else ((kind, seed) for kind in kinds for seed in seeds)
        )
        for kind, seed in pairs:
            start = time.monotonic()
            try:
                outcome = sandbox.run(kind, seed)
            except KeyboardInterrupt:
                out(f"interrupted in {kind.name}:{seed}")
                break
            except BaseException as error:
                what = str(error) if isinstance(error, Finding) else f"{type(error).__name__}: {error}"
                outcome = "FINDING"
                findings.append(f"{kind.name}:{seed}  {what[:300]!r}")
                out(f"finding {findings[-1]}")
                if aloud:
                    traceback.print_exc()
            seconds[kind.name] += time.monotonic() - start
            outcomes.setdefault(kind.name, Counter())[outcome] += 1
    finally:
        sandbox.close()
    total: Counter[str] = Counter()
    for name, counts in outcomes.items():
        total += counts
        figures = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
        out(f"{name:18} {counts.total():6}  {seconds[name]:5.0f} s  {figures}")
    out(f"{'all':18} {total.total():6}  {time.monotonic() - began:5.0f} s  {total['FINDING']} findings")
    return findings


if __name__ == "__main__":
    sys.exit(main())
