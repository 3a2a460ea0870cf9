"""Predicted steps beside measured ones, on hosts with slow links; as root on Linux.

Hosts are network namespaces (``tests/helpers/hosts.py``), whose links pass so many Mbit/s, each frame some ms late. Computation is
measured on one rank. It takes longer where more ranks share the processors.
"""

from __future__ import annotations

import functools
import string
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from benchmarks import TESTS
from benchmarks.case import Case, Row
from benchmarks.suite import Axis, Suite
from benchmarks.workloads import workload
from hvd_ckpt.prediction.network import Network
from hvd_ckpt.prediction.step_time import ModelSizes, Split
from hvd_ckpt.processes.runtime import allowed_cpus

PAYLOAD = 1448 / 1514  # of an Ethernet frame, without the headers of TCP, IP and Ethernet
LOCAL = {1: 1, 2: 1, 4: 2, 8: 2, 16: 4}
"""Ranks on each host, by ranks of the job."""
WAYS = {"hvd_ckpt": "none", "shard-2": "gradients", "shard-3": "parameters"}


def hosts(case: Case) -> list[str]:
    """The words of a command that runs the launcher on the first of the hosts."""
    helper = TESTS / "helpers" / "hosts.py"
    number, at = case.np // LOCAL[case.np], case.at
    return [sys.executable, str(helper), str(number), "--link", str(at["link"]), str(at.get("delay", 0))]


def on_hosts(case: Case) -> list[str]:
    """The option of horovodrun that names the hosts."""
    local = LOCAL[case.np]
    return ["-H", ",".join(f"{host}:{local}" for host in string.ascii_lowercase[: case.np // local])]


@functools.cache
def model_of(sizes: tuple[tuple[str, Any], ...]) -> nn.Sequential:
    with torch.device("meta"):
        return workload("gpt-recomputed", dict(sizes)).model()


def alone(row: Row, rows: Sequence[Row]) -> Row | None:
    """The same on one rank."""
    at, engine = row.case.at, row.case.engine
    return next(
        (one for one in rows if one.case.np == 1 and (one.case.at, one.case.engine) == (at, engine)), None
    )


def predicted(row: Row, rows: Sequence[Row]) -> float | None:
    """Seconds of a step."""
    one, ranks, local, at = alone(row, rows), row.case.np, LOCAL[row.case.np], row.case.at
    if one is None or one is row or one.over("forward") is None:
        return None
    # So many ranks share a processor. Between namespaces of one machine messages, too, cost what processors
    # need for them; across hosts that is what one TCP connection takes beside the time of a link.
    share = max(1.0, ranks / allowed_cpus())
    byte = 0.65e-9 * max(1.0, ranks / local / allowed_cpus())
    network = Network(
        local,
        bandwidth=1.0 / (8 / (PAYLOAD * at["link"] * 1e6) + byte),
        local_bandwidth=1e9 / share,
        latency=100e-6 * share + at["delay"] / 1e3,
        local_latency=50e-6 * share,
        message=20e-6 * share,
        controller="gloo",
    )
    model = model_of(tuple(row.case.sizes.items()))
    forward, backward = (
        [share * one.over(name) / len(model)] * len(model) for name in ("forward", "backward")
    )
    return ModelSizes(model, forward, backward).step(WAYS[row.case.engine], Split(ranks), network).seconds


def of_measured(row: Row, rows: Sequence[Row]) -> float | None:
    """The predicted time as a ratio to the measured one."""
    guess = predicted(row, rows)
    return None if guess is None or row.step is None else guess / row.step.median


scale_on_hosts = Suite(
    name="scale_on_hosts",
    title="Steps on hosts with slow links, measured and predicted",
    help="Time steps on hosts with slow links beside predicted ones, as root on Linux.",
    engines=tuple(WAYS),
    workloads={"gpt-recomputed": ""},
    columns=("forward", "backward"),
    against={"predicted s": predicted, "of measured": of_measured},
    axes={
        "link": Axis("Mbit/s of a host.", {"100": 100, "1000": 1000}),
        "delay": Axis("ms by which a frame is late.", {"0": 0.0, "5": 5.0}, "0"),
    },
    keeps=lambda case: case.np in LOCAL,
    options=lambda case: {},
    sizes={"gpt-recomputed": {"batch": 1, "vocabulary": 1024, "length": 16, "layers": 4}},
    np="1,2,4,8,16",
    rounds=1,
    quick={"np": "1,2", "link": "100"},
    optimizer="AdamW",
    threads=1,
    within=hosts,
    launcher=on_hosts,
    notes=(
        "predicted: by the formulas of hvd_ckpt.prediction, from the passes of one rank and the stated link.",
    ),
)
