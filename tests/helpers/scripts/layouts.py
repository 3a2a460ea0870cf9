"""Layouts of a job on its own ranks: ``hc.layouts`` after links were measured, which starts Horovod; with arguments, ``hvd-ckpt``.

Little is timed, since rows and results are what is looked at.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.nn import functional

import hvd_ckpt as hc
from hvd_ckpt.app.cli.main import main as command
from hvd_ckpt.app.models.gpt import gpt
from hvd_ckpt.collectives.agreement import of_all_processes
from hvd_ckpt.planning import candidates, kinds, planner
from hvd_ckpt.prediction import links

SIZES: dict[str, Any] = {"vocabulary": 64, "length": 16, "width": 32, "heads": 2, "layers": 2}


def main() -> None:
    network = links.measure()  # starts Horovod, before with a stage for each process
    assert network.ranks == hc.size() and network.local == hc.local_size()
    torch.manual_seed(0)
    model = gpt(**SIZES)
    before = [parameter.detach().clone() for parameter in model.parameters()]

    def make_sample(count: int) -> torch.Tensor:
        return torch.zeros(count, SIZES["length"], dtype=torch.long)

    def loss(output: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(
            output.flatten(0, 1), torch.zeros(output.shape[:2].numel(), dtype=torch.long)
        )

    rows = hc.layouts(model, make_sample, batch=2 * hc.size(), memory="64MiB", loss=loss)
    assert rows[0].fits and len({row.layout for row in rows}) == len(rows)
    assert {row.layout.stages for row in rows} >= {1, hc.size()}
    assert all(each == rows for each in of_all_processes(rows, "rows"))
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters()))
    changing = hc.layouts(model, make_sample, batch=hc.size(), memory=1000, loss=loss, inexact=True)
    assert not any(row.fits for row in changing)
    lossy = [
        each.chunk_head or each.wire == "int8" or each.every > 0 for each in (row.layout for row in changing)
    ]
    assert lossy and all(lossy)
    # A larger allreduce takes longer, in proportion where it is large.
    small, large, twice = (network.allreduce(size, hc.size()) for size in (1 << 10, 1 << 26, 1 << 27))
    assert 0 < small < large < twice < 2.1 * large
    print("right", file=sys.stderr)


if __name__ == "__main__":
    kinds._SECONDS_PER_KIND, candidates._LOOKS, planner._TIMED = 0.0, 2_000, 1
    links.ROUNDS, links.SIZES = 3, (1 << 14, 1 << 18, 1 << 22)
    if sys.argv[1:]:
        command()
    else:
        main()
