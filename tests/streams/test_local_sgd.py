"""Tests of averages of local SGD on a device, whose state is on the device or offloaded."""

from __future__ import annotations

import functools
from typing import Any

import torch
from alike_ranks import AlikeRanks
from streams import DEVICE, Simulation, check, own_stream
from torch import nn

import hvd_ckpt as hc
from hvd_ckpt.collectives.exchange import Traffic
from hvd_ckpt.collectives.formats import WIRE_FORMATS
from hvd_ckpt.collectives.rows import RowCollectives
from hvd_ckpt.parallel.local_sgd.exchange import PeerExchange
from hvd_ckpt.parallel.local_sgd.runs import Segment
from hvd_ckpt.parallel.local_sgd.weights import WeightRun


def average(simulation: Simulation, wire: str) -> None:
    """Periods of steps, each with an average that the host reads, as a snapshot does."""
    with AlikeRanks(simulation).running() as ranks:
        parameter = nn.Parameter(torch.ones(500, device=DEVICE))
        segment = Segment("weight", parameter, parameter)
        peers = PeerExchange(RowCollectives(ranks.process_set, "local"), [0, 1], Traffic())
        outer: Any = hc.Nesterov(lr=0.7)
        averaged = WeightRun("weights", [segment], peers, outer, WIRE_FORMATS[wire])
        with own_stream(), torch.no_grad():
            averaged.begin()
            for _ in range(3):
                parameter.add_(1)
                averaged.send()
                parameter.mul_(1.5)
                averaged.combine([0.5, 0.5])
                averaged.apply(delayed=True)
                state = averaged.state_dict()
                for name in ("anchor", "exact", "rest"):
                    if state[name] is not None:
                        float(state[name].sum())


SCENARIOS = [functools.partial(average, wire=wire) for wire in ("fp32", "int8")]


def test_every_synchronization_is_needed() -> None:
    assert check(*SCENARIOS)
