"""Construction of a sharded optimizer: validation of arguments and parameters, then layout, reducer and store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
from horovod.torch.mpi_ops import rank

from hvd_ckpt.processes.grid import features_of_job
from hvd_ckpt.reduction.broadcast import broadcast_tensors
from hvd_ckpt.reduction.collectives import ranks_of
from hvd_ckpt.reduction.process_sets import (
    hosts_of,
    process_sets_of,
    rank_groups,
    release,
)
from hvd_ckpt.sharding import state
from hvd_ckpt.sharding.exchange import Exchange
from hvd_ckpt.sharding.flat import FlatParameters
from hvd_ckpt.sharding.formats import FP32, WireFormat, wire_formats
from hvd_ckpt.sharding.host_memory import OffloadError
from hvd_ckpt.sharding.layout import Layout, is_packed
from hvd_ckpt.sharding.offload import Offload, raised_everywhere
from hvd_ckpt.sharding.optimizer import ShardedOptimizer
from hvd_ckpt.sharding.parameters import ShardedParameters
from hvd_ckpt.sharding.reducer import HowReduced, ShardReducer
from hvd_ckpt.sharding.sharding import Masters, Sharding
from hvd_ckpt.sharding.surface import Surface, on_pieces
from hvd_ckpt.sharding.units import UnitModules
from hvd_ckpt.sharding.unshard import Gathering
from hvd_ckpt.utils.rules import check
from hvd_ckpt.utils.text import stage_name, stage_of

OFFLOADS = ("optimizer", "parameters")


@dataclass(frozen=True)
class ShardOptions:
    """Options of a sharded optimizer.

    Attributes:
        stage: 1 to 3.
        model: the module that is trained, if it is known; at stage 3 it is.
        units: at stage 3, what is gathered together; else none.
        offload: what is kept elsewhere, ``"optimizer"`` or ``"parameters"``; ``offload_folder``: where.
        gradients, parameters: their communication formats.
        master_weights: whether half-precision parameters have float32 copies in the shards.
        within: groups of ranks that have shards of their own: None, ``"host"``, or lists of ranks.
        bucket_bytes: largest group of parameters at stages 1 and 2.
        op, prescale: Horovod's operation, and the factor of gradients before it.
    """

    stage: int
    model: torch.nn.Module | None
    units: Sequence[UnitModules]
    offload: str | None
    offload_folder: Path | None
    gradients: WireFormat
    parameters: WireFormat
    master_weights: bool
    within: Any
    bucket_bytes: float
    op: int
    prescale: float

    def all_parameters(self, named: Sequence[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
        """Those that are split: the optimizer's, at stage 3 all of the model's, in its order."""
        if self.stage < 3:
            return list(named)
        assert self.model is not None
        names = {id(parameter): name for name, parameter in named}
        split: list[tuple[str, torch.Tensor]] = [
            (names.pop(id(parameter), name), parameter) for name, parameter in self.model.named_parameters()
        ]
        if names:
            raise ValueError(
                f"parameter '{next(iter(names.values()))}' of the optimizer is not in the model whose parameters are to be split; "
                f"pass model= the module that has them all"
            )
        return split

    def described(self) -> dict[str, Any]:
        """What follows from the options and must be equal on all ranks: the names of the units' modules."""
        modules = () if self.model is None else self.model.named_modules()
        names = {id(module): name for name, module in modules}
        return {"units": [[names[id(module)] for module in unit.modules] for unit in self.units]}


def check_stage(
    shard: object,
    offload: str | None,
    wire: str | Mapping[str, str],
    further: Mapping[str, Any] = MappingProxyType({"model": True}),
) -> tuple[int, WireFormat, WireFormat]:
    """The stage, and the communication formats of gradients and parameters.

    Args:
        further: what else the caller gives to the rules.

    Raises:
        ValueError: an argument is unknown, or does not go with another one.
    """
    stage = stage_of(shard)
    gradients, parameters = wire_formats(wire)
    if offload not in (None, *OFFLOADS):
        raise ValueError(f"offload must be None, 'optimizer' or 'parameters', not {offload!r}")
    check({
        **features_of_job(),
        **further,
        "shard": stage_name(stage),
        "offload": offload,
        "wire": None if gradients is parameters is FP32 else wire,
        "wire of gradients": None if gradients is FP32 else wire,
    })  # fmt: skip
    return stage, gradients, parameters


def shard_optimizer(
    optimizer: ShardedOptimizer,
    named: Sequence[tuple[str, torch.Tensor]],
    options: ShardOptions,
) -> None:
    """Splits what ``options`` say over the ranks. Collective.

    Args:
        named: all parameters that are split; they are equal on all ranks except for their values.
    """
    members = optimizer.process_set
    # Taken while param_groups hold whole parameters; in the end each rank loads its pieces of it.
    before: dict[str, Any] = optimizer.wrapped_class.state_dict(optimizer)
    for _, parameter in named:
        # In a group each parameter is one stretch of memory. One with gaps or with repeated elements gets
        # memory of its own before.
        if not is_packed(parameter):
            parameter.data = parameter.data.contiguous()
    start_alike(named, options.model, members, f"hvd_ckpt.{optimizer.identity}.start")
    exchange = Exchange(members, f"hvd_ckpt.{optimizer.identity}.0")
    if options.stage > 1:
        exchange.hosts = hosts_of(members, f"{exchange.prefix}.levels")
    added = [] if options.within is None else _divide(exchange, options.within)
    offload = None
    if options.offload:
        device = named[0][1].device if named else torch.device("cpu")
        offload = Offload(options.offload_folder, device, options.offload == "parameters")
    masters = Masters(options.master_weights, offload)
    whole_state = optimizer.state
    try:
        with raised_everywhere(exchange, offload):
            layout, store = _stored(named, options, exchange, offload)
            masters.add(layout.groups, store.shards)
            sharding = Sharding(
                stage=options.stage,
                layout=layout,
                exchange=exchange,
                store=store,
                offload=offload,
                masters=masters,
                bucket_bytes=options.bucket_bytes,
                added_sets=added,
            )
            surface = Surface(sharding)
            for group in optimizer.param_groups:
                sharding.add_param_group(group["params"])
            # The keys of the other one are whole parameters. State for the pieces is loaded in its place.
            optimizer.state = cast(Any, surface.state)
            if offload is not None:
                with surface.pieces_in(optimizer):
                    offload.reserve(optimizer)
            if options.stage > 1:
                how = HowReduced(
                    options.gradients, options.op, options.prescale, optimizer.backward_passes_per_step
                )
                split = store if isinstance(store, ShardedParameters) else None
                optimizer.reducer = ShardReducer(layout, exchange, how, _memory_of_shards(offload), split)
    except Exception as error:  # the model is as it was
        optimizer.state = whole_state
        if offload is not None and isinstance(error, (OffloadError, ValueError)):  # raised on all ranks
            release(added)
        raise
    optimizer.sharding, optimizer.surface = sharding, surface
    # Only now: until all ranks had found room, the model was whole, so that an error left it as it was.
    if offload is not None and isinstance(store, ShardedParameters):
        store.split()
    if any(options.parameters.changes(group.dtype) for group in layout.groups):
        store.shards_changed(layout.groups)  # what no step changes is what a resumed run will gather, too
    optimizer.keep_groups(optimizer)
    for name in (
        "train",
        "eval",
    ):  # of optimizers that change weights between steps, as schedule-free ones do
        method = getattr(optimizer.wrapped_class, name, None)
        if callable(method):
            setattr(type(optimizer), name, on_pieces(method))
    if before["state"]:
        state.load(optimizer, lambda: state.of_pieces(optimizer, before))
    if options.stage > 1:
        optimizer.reducer.rename(optimizer.identity, 0)


def start_alike(
    named: Sequence[tuple[str, torch.Tensor]], model: torch.nn.Module | None, members: Any, name: str
) -> None:
    """Gives parameters, and those and the buffers of the model where it is known, the values of the first rank. Collective."""
    tensors = {id(parameter): parameter for _, parameter in named}
    if model is not None:
        tensors.update((id(tensor), tensor) for tensor in (*model.parameters(), *model.buffers()))
    broadcast_tensors(tensors.values(), ranks_of(members)[0], name, members)


def _divide(exchange: Exchange, within: Any) -> list[tuple[int, ...]]:
    """Gives the exchange the groups of ranks; returns the process sets that were added. Collective."""
    groups = rank_groups(within, exchange.process_set, f"{exchange.prefix}.hosts")
    if len(groups) == 1:
        return []  # every gather is within the group
    if len(groups[0]) == 1:
        raise ValueError(
            f"within={within!r}: each group is one rank, whose copy would be the whole model: start more ranks on each host, "
            "or leave within out"
        )
    sets, added = process_sets_of(groups, exchange.process_set)
    exchange.divide(next(members for ranks, members in sets.items() if rank() in ranks))
    return added


def _stored(
    named: Sequence[tuple[str, torch.Tensor]],
    options: ShardOptions,
    exchange: Exchange,
    offload: Offload | None,
) -> tuple[Layout, FlatParameters | ShardedParameters]:
    """Lays parameters out and makes the store of their weights, which splits them only later where there is offload (stage 3)."""
    layout = Layout(exchange.ranks)
    if options.stage < 3:
        layout.add(list(reversed(named)), options.bucket_bytes)
        return layout, FlatParameters(layout, exchange, options.parameters)
    assert options.model is not None
    names = {id(parameter): name for name, parameter in named}
    *blocks, rest = options.units
    groups = {  # in about the order in which gradients become final, so that they leave during the first backward pass already
        id(unit): layout.add([(names[id(parameter)], parameter) for parameter in unit.parameters])
        for unit in [*reversed(blocks), rest]
    }
    units = [(unit.modules, groups[id(unit)]) for unit in options.units]
    gathering = Gathering(layout, exchange, options.parameters, _memory_of_shards(offload))
    return layout, ShardedParameters(options.model, units, gathering, deferred=offload is not None)


def _memory_of_shards(offload: Offload | None) -> Offload | None:
    """The offload that holds the shards of parameters and gradients, or None if they are on the device of the parameters."""
    return offload if offload is not None and offload.parameters else None
