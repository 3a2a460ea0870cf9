"""Time steps on hosts with slow links beside predicted ones, as root on Linux.

Hosts are network namespaces, whose links pass so many Mbit/s, each frame some ms late. Computation is measured on one rank. It
takes longer where more ranks share the processors.
"""

from __future__ import annotations

import string
import sys
from collections.abc import Sequence

from benchmarks import TESTS
from benchmarks.case import Case, Row
from benchmarks.suite import Axis, Place, Suite
from hvd_ckpt.app.cli.command_line import BadArgument

LOCAL = {1: 1, 2: 1, 4: 2, 8: 2, 16: 4}
"""Ranks on each host, by ranks of the job."""
WAYS = {"hvd_ckpt": "none", "stage-2": "gradients", "stage-3": "parameters"}


def hosts(case: Case) -> Place:
    """The words of a command that runs the launcher on the first of some hosts, and the launcher's option that names them."""
    if case.at["link"] == "none":
        return (), ()
    if case.np not in LOCAL:
        raise BadArgument(f"--np {case.np}: on hosts there are {', '.join(map(str, LOCAL))} ranks")
    helper, local = str(TESTS / "helpers" / "hosts.py"), LOCAL[case.np]
    names = string.ascii_lowercase[: case.np // local]
    words = [sys.executable, helper, str(len(names)), "--link", case.at["link"], case.at.get("delay", "0")]
    return words, ["-H", ",".join(f"{host}:{local}" for host in names)]


def predicted(row: Row, rows: Sequence[Row]) -> float | None:
    """Seconds of a step."""
    from benchmarks.measures.predictions import step_on_hosts  # which imports PyTorch

    return step_on_hosts(row, rows)


def of_measured(row: Row, rows: Sequence[Row]) -> float | None:
    """The predicted time as a ratio to the measured one."""
    guess = predicted(row, rows)
    return None if guess is None or row.step is None else guess / row.step.median


scale_on_hosts = Suite(
    engines=tuple(WAYS),
    workloads=("gpt-recomputed",),
    columns=("forward", "backward"),
    against={"predicted s": predicted, "of measured": of_measured},
    axes={
        "link": Axis("Mbit/s of a host.", ("100", "1000")),
        "delay": Axis("ms by which a frame is late.", ("0", "5"), "0"),
    },
    sizes={"gpt-recomputed": {"batch": 1, "vocabulary": 1024, "length": 16, "layers": 4}},
    np="1,2,4,8,16",
    rounds=1,
    quick={"np": "1,2", "link": "100"},
    optimizer="AdamW",
    threads=1,
    within=hosts,
    notes=(
        "predicted: by the formulas of hvd_ckpt.prediction, from the passes of one rank and the stated link.",
    ),
)
