"""Sharded training on a device: shards and gradients in flight, communication formats, and loops on a stream of their own."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from alike_ranks import AlikeRanks
from horovod.torch.mpi_ops import Average
from streams import DEVICE, Simulation, check, own_stream, run, simulated
from torch import nn

import hvd_ckpt as hc
from hvd_ckpt.collectives.exchange import Exchange
from hvd_ckpt.collectives.formats import FP32, WIRE_FORMATS, WireFormat
from hvd_ckpt.offload.shards import Offload
from hvd_ckpt.sharding.flat import FlatParameters
from hvd_ckpt.sharding.layout import Layout
from hvd_ckpt.sharding.parameters import ShardedParameters
from hvd_ckpt.sharding.reducer import HowReduced, ShardReducer
from hvd_ckpt.sharding.sharding import Masters, Sharding
from hvd_ckpt.sharding.units import find_units
from hvd_ckpt.sharding.unshard import Gathering

_number = itertools.count(1)


def make_model(width: int = 32, layers: int = 4) -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)]).to(
        DEVICE
    )


class Job:
    """A model whose parameters are split, with the parts of ``DistributedOptimizer``.

    Args:
        ranks: all alike.
        offload: as of ``DistributedOptimizer``.
        gradients, weights: communication formats.
        within: the ranks are also a group that keeps a second copy.
    """

    def __init__(
        self,
        ranks: AlikeRanks,
        model: nn.Sequential,
        offload: str | None = None,
        gradients: WireFormat = FP32,
        weights: WireFormat = FP32,
        within: bool = False,
    ) -> None:
        identity = next(_number)
        self.model = model
        layout = Layout(ranks.process_set.size())
        exchange = Exchange(ranks.process_set, f"streams.{identity}")
        if within:
            exchange.divide(ranks.process_set)
        units = [
            (unit.modules, layout.add([("", one) for one in unit.parameters]))
            for unit in find_units(model, list(model))
        ]
        state = Offload(None, DEVICE, offload == "parameters") if offload else None
        shards = state if offload == "parameters" else None
        store = ShardedParameters(model, units, Gathering(layout, exchange, weights, shards))
        masters = Masters(False, None, store.shards)
        self.sharding = Sharding(3, layout, exchange, store, state, masters, float("inf"))
        self.sharding.add_param_group(layout.parameters)
        self.optimizer = torch.optim.AdamW([piece.parameter for piece in self.sharding.pieces], lr=0.01)
        self.reducer = ShardReducer(layout, exchange, HowReduced(gradients, Average), shards, store)
        self.reducer.begin(self.optimizer)
        self.reducer.rename(identity, 0)

    def step(self, batch: torch.Tensor, passes: int = 1) -> None:
        for number in range(passes):
            if number:  # a gradient is dropped by hand after it has left
                self.model[-1][0].weight.grad = None
            self.model(batch).square().mean().backward()
        self.reducer.synchronize()
        self.sharding.take_gradient_shards(self.reducer)
        take = functools.partial(type(self.optimizer).step, self.optimizer)
        offload = self.sharding.offload
        take() if offload is None else offload.step(self.optimizer, take)
        used = list(self.reducer.used)
        self.reducer.consume()
        self.sharding.drop_gradients()
        self.sharding.shards_changed(used)

    def read(self) -> list[float]:
        """The weights as the host reads them: whole ones, and before and after that the shards, as a snapshot does."""
        found = []
        for own in (False, True, False):
            with self.sharding.store.gathered() if own else contextlib.nullcontext():
                read = self.model.parameters() if own else self.sharding.store.shards
                found += [float(tensor.detach().sum()) for tensor in read]
        return found


@contextlib.contextmanager
def alike_ranks(simulation: Simulation, ranks: int = 2, looks: int = 0) -> Iterator[AlikeRanks]:
    """Within it the simulation sees what hooks do, which hide it from modes."""
    with (
        AlikeRanks(simulation, ranks, looks).running() as alike,
        mock.patch("hvd_ckpt.sharding.passes.aside", torch.no_grad),
    ):
        yield alike


def train(
    simulation: Simulation, ranks: int = 2, steps: int = 3, passes: int = 1, **options: Any
) -> list[float]:
    """Steps, before each of which the host reads weights, on a stream of their own."""
    torch.manual_seed(0)
    with alike_ranks(simulation, ranks) as alike:
        job, batch = Job(alike, make_model(), **options), torch.ones(8, 32, device=DEVICE)
        with own_stream():
            for _ in range(steps):
                job.read()
                job.step(batch, passes)
            return job.read()


INT8, INT4, BF16 = (WIRE_FORMATS[name] for name in ("int8", "int4", "bf16"))
SCENARIOS: dict[str, dict[str, Any]] = {
    "stage 3": {},
    "one rank": {"ranks": 1},
    "offload of state": {"offload": "optimizer"},
    "offload of parameters": {"offload": "parameters"},
    "offload of parameters on one rank": {"offload": "parameters", "ranks": 1},
    "two backward passes": {"passes": 2},
    "two backward passes and offload of parameters": {"passes": 2, "offload": "parameters"},
    "second copy": {"within": True},
    "second copy and offload of parameters": {"within": True, "offload": "parameters"},
    "int8": {"gradients": INT8, "weights": INT8},
    "int4 and bf16": {"gradients": INT4, "weights": BF16},
}


def test_every_synchronization_is_needed() -> None:
    assert check(*(functools.partial(train, **options) for options in SCENARIOS.values()))


def test_offload_changes_no_result() -> None:
    with simulated() as simulation:
        expected = train(simulation)
        for offload in ("optimizer", "parameters"):
            assert train(simulation, offload=offload) == pytest.approx(expected, rel=1e-5)


def flat(simulation: Simulation, format: WireFormat) -> None:
    """Weights of stage 1, which are gathered on a stream of its own after each step."""
    with AlikeRanks(simulation).running() as ranks:
        model, exchange, layout = make_model(), Exchange(ranks.process_set, "flat"), Layout(2)
        layout.add(list(model.named_parameters()), 1 << 13)
        store = FlatParameters(layout, exchange, format)
        with own_stream(), torch.no_grad():
            for _ in range(3):
                for shard in store.shards:
                    shard.add_(1)
                store.shards_changed()
                model(torch.ones(2, 32, device=DEVICE)).sum().item()


@pytest.mark.parametrize("format", WIRE_FORMATS.values(), ids=WIRE_FORMATS)
def test_flat_parameters_have_no_race(format: WireFormat) -> None:
    assert not run(functools.partial(flat, format=format)).races


@pytest.mark.parametrize("offload", [None, "optimizer", "parameters"])
def test_the_host_does_not_wait_in_passes(offload: str | None) -> None:
    with simulated() as simulation, alike_ranks(simulation) as ranks:
        job, batch = Job(ranks, make_model(), offload), torch.ones(8, 32, device=DEVICE)
        job.step(batch)
        simulation.waits.clear()
        job.model(batch).square().mean().backward()
        assert not simulation.waits


@pytest.mark.parametrize("offload", [None, "optimizer", "parameters"])
def test_the_device_takes_what_is_estimated(offload: str | None) -> None:
    """Where communication takes long, so that as much is in flight as may be."""
    width = 1024
    with simulated() as simulation, alike_ranks(simulation, looks=50) as ranks:
        model, batch = make_model(width), torch.ones(32, width, device=DEVICE)
        shard = hc.Shard("parameters", offload=offload, units=list(model))
        estimate = hc.estimate_memory(
            model, 2, shard, sample=batch, loss=lambda output: output.square().mean()
        )
        before = simulation.allocator.allocated - sum(one.nbytes for one in model.parameters())
        job = Job(ranks, model, offload)
        for _ in range(3):
            simulation.allocator.restart()
            job.step(batch)
        assert simulation.allocator.reserved - before == pytest.approx(estimate.peak, rel=0.1)
