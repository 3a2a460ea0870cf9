"""Shards and logical replicas of a ``DistributedOptimizer``: checked, compared, and added to the optimizer.

Loaded where an option asks for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from horovod.torch.mpi_ops import rank

from hvd_ckpt.collectives.agreement import broadcast_from
from hvd_ckpt.collectives.exchange import Exchange
from hvd_ckpt.collectives.process_sets import check_within, hosts_of, process_sets_of, rank_groups, release
from hvd_ckpt.distributed.options import Options
from hvd_ckpt.distributed.replica_reducers import ReplicaReducer, ShardReplicaReducer
from hvd_ckpt.distributed.replicas import Replicas, check_replicas
from hvd_ckpt.distributed.tree import TreeCommunicator
from hvd_ckpt.offload.host_memory import OffloadError
from hvd_ckpt.offload.shards import Offload, raised_everywhere
from hvd_ckpt.reduction.buckets import MEBIBYTE, is_packed
from hvd_ckpt.reduction.construction import check_not_split
from hvd_ckpt.reduction.optimizer import ReducedOptimizer
from hvd_ckpt.sharding import state
from hvd_ckpt.sharding.construction import check_stage, start_alike
from hvd_ckpt.sharding.flat import FlatParameters
from hvd_ckpt.sharding.layout import Layout
from hvd_ckpt.sharding.optimizer import ShardedOptimizer
from hvd_ckpt.sharding.parameters import ShardedParameters
from hvd_ckpt.sharding.reducer import HowReduced, ShardReducer
from hvd_ckpt.sharding.sharding import Masters, Sharding
from hvd_ckpt.sharding.surface import on_pieces
from hvd_ckpt.sharding.units import check_memory, find_units
from hvd_ckpt.sharding.unshard import Gathering
from hvd_ckpt.utils.elementwise import check_elementwise
from hvd_ckpt.utils.text import check_instance

Named = Sequence[tuple[str, torch.Tensor]]
STATE = (
    "whether the optimizer has a state, which shard splits (load it on every rank, or into the sharded one),"
)


class Extension:
    """Shards, logical replicas, or both.

    Raises:
        ValueError, TypeError: for the first argument that is wrong on this rank.
    """

    def __init__(self, options: Options) -> None:
        self._options, self._model = options, options.model
        shard = self._shard = options.shard
        self._stage, self._gradients, self._weights = check_stage(
            shard.states, shard.offload, shard.wire, options.features()
        )
        self._has_state = self._stage > 0 and bool(options.optimizer.state)
        if self._stage:
            check_elementwise(options.optimizer, shard.elementwise)
            if self._model is not None:
                check_instance(self._model, torch.nn.Module, "model must be a torch.nn.Module")
        self._units = []
        if self._stage == 3 and self._model is not None:
            self._units = find_units(self._model, shard.units)
        self._within = check_within(shard.within)
        # Here, where an error of one rank is raised on all: ranks may have folders of their own.
        self._folder = None if shard.offload_folder is None else Path(shard.offload_folder)
        if options.replicas is not None:
            check_replicas(options.replicas, options.process_set.size(), self._model)

    @property
    def methods(self) -> type[ReducedOptimizer]:
        """The class whose methods the optimizer gets."""
        return ShardedOptimizer if self._stage else ReducedOptimizer

    def parameters(self, named: Named) -> Named:
        """All parameters that take part, given those of the optimizer: at stage 3 all of the model's, in its order.

        Raises:
            ValueError: one cannot be split.
        """
        if not self._stage:
            return named
        of_model = [] if self._model is None else list(self._model.named_parameters())
        if self._stage == 3:
            names = {id(parameter): name for name, parameter in named}
            named = [(names.pop(id(parameter), name), parameter) for name, parameter in of_model]
            if names:
                raise ValueError(
                    f"parameter '{next(iter(names.values()))}' of the optimizer is not in the model whose parameters are to be "
                    f"split; pass model= the module that has them all"
                )
        check_not_split(named)
        check_memory(named, of_model)
        return named

    def described(self) -> Mapping[str, Any]:
        """Values that follow from the options, and must be equal on all ranks: the names of the units' modules, and whether there
        is a state to split."""
        modules = () if self._model is None else self._model.named_modules()
        names = {id(module): name for name, module in modules}
        units = [[names[id(module)] for module in unit.modules] for unit in self._units]
        return {"units": units, STATE: self._has_state}

    def add(self, optimizer: Any, named: Named) -> None:
        """Splits what the options say, and adds replicas, with the reducers of these. Collective.

        Args:
            named: all parameters that take part; they are equal on all ranks except for their values.
        """
        if self._stage:
            self._split(optimizer, named)
        number, identity, process_set = self._options.replicas, optimizer.identity, optimizer.process_set
        if number is None:
            return
        assert self._model is not None
        if self._stage < 2:
            whole = TreeCommunicator(number, process_set)
            whole.exchange.hosts = hosts_of(process_set, f"hvd_ckpt.{identity}.levels")
            optimizer.reducer = ReplicaReducer(self._options.assignment(named), whole, identity)
        # Under names of its own: a mean of losses may be on its way beside the gradients.
        means = TreeCommunicator(number, process_set)
        means.rename(f"hvd_ckpt.{identity}.replicas")
        seed = broadcast_from(torch.initial_seed(), 0, process_set, f"hvd_ckpt.{identity}.seed")
        optimizer.replicas = Replicas(number, self._model, optimizer.reducer, means, seed)

    def _split(self, optimizer: ShardedOptimizer, named: Named) -> None:
        members, kind = optimizer.process_set, self._shard.offload
        # Taken while param_groups hold whole parameters; in the end each rank loads its pieces of it.
        before: dict[str, Any] = optimizer.wrapped_class.state_dict(optimizer)
        for _, parameter in named:
            # In a group each parameter is one stretch of memory. One with gaps or with repeated elements gets
            # memory of its own before.
            if not is_packed(parameter):
                parameter.data = parameter.data.contiguous()
        start_alike(named, self._model, members, f"hvd_ckpt.{optimizer.identity}.start")
        exchange = Exchange(members, f"hvd_ckpt.{optimizer.identity}.0")
        if self._stage > 1:
            exchange.hosts = hosts_of(members, f"{exchange.prefix}.levels")
        added = self._divide(exchange)
        offload = None
        if kind:
            device = named[0][1].device if named else torch.device("cpu")
            offload = Offload(self._folder, device, kind == "parameters")
        whole_state = optimizer.state
        try:
            with raised_everywhere(exchange, offload):
                layout, store = self._stored(named, exchange, offload)
                masters = Masters(self._shard.master_weights is not False, offload, store.shards)
                masters.add(layout.groups)
                sharding = Sharding(
                    stage=self._stage,
                    layout=layout,
                    exchange=exchange,
                    store=store,
                    offload=offload,
                    masters=masters,
                    bucket_bytes=self._options.bucket_cap_mb * MEBIBYTE,
                    added_sets=added,
                )
                for group in optimizer.param_groups:
                    sharding.add_param_group(group["params"])
                # The keys of the other one are whole parameters. State for the pieces is loaded in its place.
                optimizer.state = cast(Any, sharding.state)
                if offload is not None:
                    with sharding.pieces_in(optimizer):
                        offload.reserve(optimizer)
                if self._stage > 1:
                    optimizer.reducer = self._reducer(sharding)
        except Exception as error:  # the model is as it was
            optimizer.state = whole_state
            if offload is not None and isinstance(error, (OffloadError, ValueError)):  # raised on all ranks
                release(added)
            raise
        optimizer.sharding = sharding
        optimizer.finds_overflow_alone = self._stage > 1  # inf and nan of its own shard
        # Only now: until all ranks had found room, the model was whole, so that an error left it as it was.
        if offload is not None and sharding.passes is not None:
            sharding.passes.split()
        if any(self._weights.changes(group.dtype) for group in layout.groups):
            store.shards_changed(layout.groups)  # what no step changes is what a resumed run will gather, too
        optimizer.keep_groups(optimizer)
        for name in ("train", "eval"):  # of optimizers that change weights between steps (schedule-free ones)
            method = getattr(optimizer.wrapped_class, name, None)
            if callable(method):
                setattr(type(optimizer), name, on_pieces(method))
        if self._has_state:
            state.load(optimizer, lambda: state.of_pieces(optimizer, before))
        if self._stage > 1:
            optimizer.reducer.rename(optimizer.identity, 0)

    def _divide(self, exchange: Exchange) -> list[tuple[int, ...]]:
        """Gives the exchange the groups of ranks of ``within``; returns the process sets that were added. Collective."""
        if self._within is None:
            return []
        groups = rank_groups(self._within, exchange.process_set, f"{exchange.prefix}.hosts")
        if len(groups) == 1:
            return []  # every gather is within the group
        if len(groups[0]) == 1:
            raise ValueError(
                f"within={self._within!r}: each group is one rank, whose copy would be the whole model: start more ranks on each "
                "host, or leave within out"
            )
        sets, added = process_sets_of(groups, exchange.process_set)
        exchange.divide(next(members for ranks, members in sets.items() if rank() in ranks))
        return added

    def _stored(
        self, named: Named, exchange: Exchange, offload: Offload | None
    ) -> tuple[Layout, FlatParameters | ShardedParameters]:
        """Lays parameters out and makes the store of their weights, which splits them only later where there is offload (stage
        3)."""
        layout = Layout(exchange.ranks)
        if self._stage < 3:
            layout.add(list(reversed(named)), self._options.bucket_cap_mb * MEBIBYTE)
            return layout, FlatParameters(layout, exchange, self._weights)
        assert self._model is not None
        names = {id(parameter): name for name, parameter in named}
        *blocks, rest = self._units
        groups = {  # in about the order in which gradients become final, so that they leave during the first backward pass already
            id(unit): layout.add([(names[id(parameter)], parameter) for parameter in unit.parameters])
            for unit in [*reversed(blocks), rest]
        }
        units = [(unit.modules, groups[id(unit)]) for unit in self._units]
        gathering = Gathering(layout, exchange, self._weights, _for_shards(offload))
        return layout, ShardedParameters(self._model, units, gathering, deferred=offload is not None)

    def _reducer(self, sharding: Sharding) -> ShardReducer:
        layout, exchange, given = sharding.layout, sharding.exchange, self._options
        if given.replicas is not None:
            return ShardReplicaReducer(given.replicas, layout, exchange)
        how = HowReduced(self._gradients, given.op, given.prescale, given.backward_passes_per_step)
        return ShardReducer(layout, exchange, how, _for_shards(sharding.offload), sharding.passes)


def _for_shards(offload: Offload | None) -> Offload | None:
    """The offload that holds the shards of parameters and gradients, or None if they are on the device of the parameters."""
    return offload if offload is not None and offload.parameters else None
