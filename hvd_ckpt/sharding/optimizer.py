"""The sharded ``DistributedOptimizer``: each rank updates its pieces of the parameters, and the ranks gather the result.

These are stages 1 to 3 of Rajbhandari et al. (2020). The wrapped class finds this rank's pieces (:mod:`.layout`) in
``param_groups``, so its ``step`` works unchanged; everybody else finds the model's parameters (:mod:`.surface`). Gradients come
from the reducer of stage 0 (stage 1: whole, on every rank) or from :class:`.reducer.ShardReducer` (stages 2 and 3). Weights are
in a store (:mod:`.flat`, :mod:`.parameters`).
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch

from hvd_ckpt.collectives.agreement import broadcast_from, in_order
from hvd_ckpt.collectives.asynchronous import ranks_of
from hvd_ckpt.collectives.process_sets import release
from hvd_ckpt.offload.host_memory import OffloadError
from hvd_ckpt.offload.shards import raised_everywhere
from hvd_ckpt.processes import whole_model
from hvd_ckpt.reduction.optimizer import ReducedOptimizer
from hvd_ckpt.reduction.phases import Phase, StepReduces
from hvd_ckpt.sharding import state
from hvd_ckpt.sharding.flat import FlatParameters
from hvd_ckpt.sharding.layout import Piece
from hvd_ckpt.sharding.sharding import Released, Sharding
from hvd_ckpt.sharding.surface import StateElsewhere, run_hooks
from hvd_ckpt.utils.torch_private import pytree
from hvd_ckpt.utils.unmaterialized import copied_state


class ShardedOptimizer(ReducedOptimizer):
    """Methods of ``DistributedOptimizer(..., shard=...)``, as those of :class:`ReducedOptimizer`; for ``isinstance`` only.

    ``param_groups`` hold the model's parameters, the same on every rank. The wrapped class's ``step``, ``state_dict`` and
    ``load_state_dict`` find :attr:`pieces` in their place; step hooks run around that, with updated weights after it. ``state``
    is that of the pieces. Weights may be written between steps, the same values on every rank: at stage 3 within
    :meth:`gathered_parameters`.
    """

    sharding: Sharding
    reducer: Any  # a Reducer at stage 1, else a ShardReducer, or one of these of logical replicas

    # -------------------------------------------------------------------------------- what it is

    @property
    def shard_stage(self) -> int:
        """The stage of sharding. 1: optimizer state is split; 2: also gradients; 3: also parameters."""
        return self.sharding.stage

    @property
    def is_offloaded(self) -> bool:
        return self.sharding.offload is not None

    @property
    def pieces(self) -> list[Piece]:
        """The parts of the parameters that this rank holds and updates, in the order of ``param_groups``.

        ``state[piece.parameter]`` is the state of one, as the wrapped class keeps it.
        """
        return self.sharding.pieces

    @property
    def traffic(self) -> Any:
        """Bytes that this rank has sent for shards, by kind."""
        return self.sharding.exchange.traffic

    @contextlib.contextmanager
    def gathered_parameters(self) -> Iterator[None]:
        """A context in which every parameter is whole on every rank. Values that all ranks write to them are kept. Collective.

        At stages 1 and 2 parameters are always whole. At stage 3, outside of this context and of forward and backward passes, a
        parameter has its shape but no values, and reading it raises RuntimeError.
        """
        passes = self.sharding.passes
        with contextlib.nullcontext() if passes is None else passes.gathered():
            yield
        self.sharding.follow_model()

    def full_model_state_dict(self, model: torch.nn.Module, all_ranks: bool = False) -> dict[str, Any] | None:
        """The whole ``state_dict()`` of the model, as copies in CPU memory. Collective.

        At stage 3 units are gathered one after the other, so a rank that does not get the result holds one unit at a time.

        Args:
            model: the model that is sharded, or a module that contains it.
            all_ranks: whether every rank gets the result, or only rank 0 and the others None. Of a model in parts
                (:func:`hvd_ckpt.tensor_parallel`) it is whole, on rank 0 of part 0.

        Raises:
            RuntimeError: at stage 3, inside a forward or backward pass.
        """
        here, passes = all_ranks or self.process_set.rank() == 0, self.sharding.passes
        with contextlib.nullcontext(()) if passes is None else passes.collected(here) as copies:
            state = copied_state(model, {copy.data_ptr() for copy in copies}) if here else None
            return None if state is None else whole_model.state(state, model, all_ranks)

    def unshard(self) -> None:
        """Gives the model whole parameters on every rank. Afterwards another optimizer can be created for it. Collective.

        This optimizer cannot be used afterwards: call :meth:`full_state_dict` before, if needed. Gradients that no step has used
        are dropped.

        Raises:
            RuntimeError: inside :meth:`gathered_parameters`, or a forward or backward pass.
        """
        sharding, reducer = self.sharding, self.reducer
        if sharding.passes is not None:
            sharding.passes.unshard()  # first: it raises where it cannot be done now, and nothing has changed then
        release(sharding.added_sets)
        if reducer is not None:
            reducer.abandon()
        self.reducer = None
        for parameter in itertools.chain.from_iterable(sharding.groups):
            parameter.grad = None
        self.state = defaultdict(dict)
        self.sharding = cast(Any, Released())
        self.keep_groups(self)

    # -------------------------------------------------------------------------------- gradients

    def synchronize(self) -> None:
        """Reduces this step's gradients: into ``p.grad`` at stage 1, the pieces' ``grad`` at stages 2 and 3. Collective."""
        weights, store = None if self.reducer is None else self.reducer.weights, self.sharding.store
        if weights is not None and isinstance(store, FlatParameters):
            weights.written += store.changed_since()
            weights.sample = store.sample
        if self._reduce() and self.sharding.stage > 1:
            self.sharding.take_gradient_shards(self.reducer)
            if self.sharding.passes is not None:
                self.sharding.passes.reshard()

    def drop_gradients(self) -> None:
        super().drop_gradients()
        self.sharding.drop_gradients()

    def _set_zero(self, parameter: torch.Tensor, sparse_dim: int) -> None:
        if self.sharding.stage > 1:
            self.reducer.set_zero(parameter)
        else:
            super()._set_zero(parameter, sparse_dim)

    def _clear(self, *args: Any, **kwargs: Any) -> None:
        self.sharding.drop_gradients()
        super()._clear(*args, **kwargs)

    def _consume(self) -> None:
        self.sharding.drop_gradients()
        if self.sharding.stage > 1:
            self.reducer.consume()

    @contextlib.contextmanager
    def without_reduction(self) -> Iterator[None]:
        try:
            with super().without_reduction():
                yield
        except OffloadError:
            raise  # the step can be taken again
        except BaseException:
            self._consume()
            raise
        self._consume()

    @contextlib.contextmanager
    def unscaling(self) -> Iterator[None]:
        """A context in which ``param_groups`` hold what has the gradients that a scaler divides: at stages 2 and 3 the pieces."""
        with self.sharding.pieces_in(self) if self.sharding.stage > 1 else contextlib.nullcontext():
            yield
        self.note_changes()

    # -------------------------------------------------------------------------------- the step

    def _local_step(self, closure: Callable[[], Any] | None, *args: Any, **kwargs: Any) -> Any:
        sharding, offload = self.sharding, self.sharding.offload
        if closure is None:
            self._check_cleared()
        if offload is not None:
            try:
                # Before any rank has changed a weight.
                with raised_everywhere(sharding.exchange, offload), sharding.pieces_in(self):
                    offload.reserve(self)
            except OffloadError:
                self._phase = Phase.SYNCHRONIZED  # the gradients are reduced: the step can be taken again
                raise
        if closure is not None:
            closure = self._then_take(closure)
        given: tuple[Any, ...] = (self, closure, *args) if closure is not None or args or kwargs else (self,)
        given, kwargs = run_hooks(self, True, given, kwargs)
        sharding.follow_model()
        sharding.take_gradients()
        try:
            with self.sharding.pieces_in(self):
                result = self._step_pieces(*given[1:], **kwargs)
        except BaseException:
            # At stage 3 this only makes what was gathered stale. At stages 1 and 2 it would
            # gather, which an error of one rank must not.
            if sharding.stage == 3:
                sharding.shards_changed()
            raise
        sharding.shards_changed(self._used())
        run_hooks(self, False, given, kwargs)
        self._consume()
        if offload is not None and offload.parameters:
            for shard in sharding.store.shards:
                offload.release(shard)
        return result

    def _step_pieces(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped class's step, for which the pieces have their gradients."""
        if self.sharding.offload is None:
            return self.wrapped_class.step(self, *args, **kwargs)
        # Every gradient must be there before the first parameter is stepped.
        closure, *others = args or (None,)
        with torch.enable_grad():
            result = None if closure is None else closure()
        self.sharding.offload.step(self, lambda: ReducedOptimizer._local_step(self, None, *others, **kwargs))
        return result

    def _then_take(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def taken() -> Any:
            with self.sharding.whole_in(self):
                loss = closure()
                self._check_cleared()
                self.sharding.follow_model()
            self.sharding.take_gradients()
            return loss

        return taken

    def _check_cleared(self) -> None:
        if self.sharding.stage > 1:
            self.reducer.check_cleared()

    def _used(self) -> list[bool]:
        if self.sharding.stage > 1:
            return list(self.reducer.used)
        return [parameter.grad is not None for parameter in self.sharding.layout.parameters]

    # -------------------------------------------------------------------------------- groups and state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, whose parameters are split, and reduced from the next step on. Call it on every rank.

        Raises:
            ValueError: a parameter is in a group already, or at stage 3 not in the model.
        """
        self.check_own_weights("add_param_group()")
        sharding = self.sharding
        given = param_group["params"]
        # What was given may be a generator.
        given = param_group["params"] = [given] if isinstance(given, torch.Tensor) else list(given)
        pairs = [pair if isinstance(pair, tuple) else ("", pair) for pair in given]
        whole = [parameter for _, parameter in pairs]
        number = len(self.param_groups)
        taken = set(map(id, itertools.chain.from_iterable(sharding.groups)))
        named = []
        for position, (given_name, parameter) in enumerate(pairs):
            name = given_name or self.known_names.get(parameter, f"allreduce.noname.{number}.{position}")
            if id(parameter) in taken:
                raise ValueError(f"add_param_group: parameter '{name}' is in a parameter group already")
            if sharding.stage == 3 and sharding.layout.index(parameter) is None:
                raise ValueError(
                    f"add_param_group: parameter '{name}' is not in the model whose parameters are split; add it to the model "
                    f"before DistributedOptimizer"
                )
            named.append((name, parameter))
        named = in_order(named, self.known_names)
        self.parameter_names.update((parameter, name) for name, parameter in named)
        # The wrapped class may make state of the parameters, of which this rank takes its parts when it has pieces of them.
        state_before, self.state = self.state, defaultdict(dict)
        try:
            self.wrapped_class.add_param_group(self, param_group)
        finally:
            made, self.state = self.state, state_before
        fresh = sharding.layout.add(list(reversed(named)), sharding.bucket_bytes)
        if fresh:
            assert isinstance(sharding.store, FlatParameters)  # at stage 3 the layout has the whole model
            sharding.store.add_groups(fresh)
            sharding.store.shards_changed(fresh)  # of each shard its owner's: the same weights everywhere
            with raised_everywhere(sharding.exchange, sharding.offload):
                sharding.masters.add(fresh)
        sharding.add_param_group(whole)
        made_by_key: dict[Any, Any] = made
        for key, entries in made_by_key.items():
            if not isinstance(key, torch.Tensor):
                self.state[key] = entries
            elif (piece := sharding.piece_of(key)) is not None:
                self.state[piece.parameter] = state.of_piece(piece, entries)
        if sharding.stage > 1:
            self.reducer.add_groups()
        elif self.reducer is not None:
            self.reducer.add_parameters(named)

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the state: that of the wrapped optimizer for its pieces, and a list of these.

        ``"pieces"`` has name, start and stop of each piece, and ``"master_weights"`` the float32 weights, if there are any. The
        part loads into the same rank of a job of the same size and stage; :meth:`full_state_dict` and snapshots load into any job.
        """
        self.sharding.follow_model()  # a forward pass, say, may have written weights since the last step
        with self.sharding.pieces_in(self):
            part: dict[str, Any] = self.wrapped_class.state_dict(self)
        part["pieces"] = _ranges(self.pieces)
        part["stage"] = self.shard_stage
        part["ranks"] = self.sharding.exchange.ranks
        part["rank"] = self.sharding.exchange.rank
        masters = {
            number: piece.parameter.detach() for number, piece in enumerate(self.pieces) if piece.has_master
        }
        if masters:
            part["master_weights"] = masters
        return part

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads this rank's part, or a whole state of the wrapped optimizer or of an optimizer without sharding. Collective.

        Gradients do not change. Those of a step that has begun may be dropped by ``zero_grad()`` afterwards.

        Raises:
            ValueError: the state is the part of another rank or layout, or does not fit; raised on every rank.
        """

        self.check_own_weights("load_state_dict()")

        # Called inside load(), so that all ranks raise what one of them finds wrong.
        def own() -> dict[str, Any]:
            if "pieces" not in state_dict:
                return state.of_pieces(self, state_dict)
            if [list(piece) for piece in state_dict["pieces"]] != _ranges(self.pieces):
                raise ValueError(
                    f"this state is the part of rank {state_dict.get('rank')} of {state_dict.get('ranks')} at stage "
                    f"{state_dict.get('stage')}, and the pieces of this rank are others; load the result of full_state_dict(), "
                    f"or a snapshot"
                )
            return state_dict

        self.keep_groups(self)
        state.load(self, own)
        self.note_state_loaded()

    def share_state(self, wrapped: torch.optim.Optimizer, loaded: bool) -> None:
        """Takes this rank's parts of a state of whole parameters that the wrapped optimizer has loaded."""
        if not self.shard_stage:
            super().share_state(wrapped, loaded)
            return
        if loaded:
            own = state.of_pieces(self, self.wrapped_class.state_dict(wrapped))
            with self.sharding.pieces_in(self):
                self.wrapped_class.load_state_dict(self, own)
        wrapped.state = cast(Any, StateElsewhere())

    def full_state_dict(self, all_ranks: bool = False) -> dict[str, Any] | None:
        """The whole state in CPU memory, in the form of the wrapped optimizer. Collective.

        Args:
            all_ranks: whether every rank gets the result, or only rank 0 and the others None.
        """
        sharding, members = self.sharding, self.process_set
        own = ShardedOptimizer.state_dict(self)
        parts = []
        # One rank's part after the other, so that a rank that keeps none holds one of them at a time.
        for rank, root in enumerate(ranks_of(members)):
            mine = None
            if rank == sharding.exchange.rank:
                mine = {
                    "pieces": own["pieces"],
                    "state": pytree.tree_map_only(
                        torch.Tensor, lambda own: own.detach().to("cpu", copy=True), own["state"]
                    ),
                }
            part = broadcast_from(mine, root, members, f"hvd_ckpt.{self.identity}.state.{rank}")
            if all_ranks or sharding.exchange.rank == 0:
                parts.append(part)
        if not parts:
            return None
        whole = state.Sources(parts, []).states(state.whole_ranges(self))
        result = {"state": whole, "param_groups": state.numbered(own["param_groups"], sharding.groups)}
        return whole_model.optimizer_state(result, itertools.chain.from_iterable(sharding.groups), all_ranks)

    def weight_pieces(self) -> list[tuple[str, int, int, torch.Tensor]]:
        """This rank's exact weights, with what was written to them since the last step. Each item has the name, the first element
        and the last element + 1 in the parameter's memory order, and the values (1-D, not always copied).

        Raises:
            RuntimeError: a parameter has another dtype, device or shape than when it was split.
        """
        return self._pieces_of(self.sharding.store.current_shards())

    def _pieces_of(self, shards: Iterable[torch.Tensor]) -> list[tuple[str, int, int, torch.Tensor]]:
        layout = self.sharding.layout
        return [
            (layout.names[span.parameter], span.start, span.stop, span.of(shard))
            for group, shard in zip(layout.groups, shards)
            for span in group.spans(self.sharding.exchange.rank)
        ]

    def load_weight_pieces(self, parts: Iterable[tuple[str, int, int, torch.Tensor]]) -> None:
        """Loads what :meth:`weight_pieces` returns, with other values, and gathers the weights. Collective."""
        sharding = self.sharding
        with torch.no_grad():
            for (*_, own), (*_, values) in zip(self._pieces_of(sharding.store.shards), parts, strict=True):
                own.copy_(values)
        sharding.masters.follow()
        sharding.store.shards_changed(sharding.layout.groups)

    def _get_supports_amp_scaling(self) -> bool:
        # Gradients are unscaled before the step, where all ranks can be told of an overflow.
        if self._step_reduces is not StepReduces.NOT_FOR_SCALER:
            raise RuntimeError(
                "torch.amp.GradScaler.step(optimizer) was called with a sharded optimizer: each rank would skip or take the step "
                "by the gradients of its own shard; use hvd_ckpt.GradScaler"
            )
        return False

    _step_supports_amp_scaling = property(
        _get_supports_amp_scaling, ReducedOptimizer._set_supports_amp_scaling
    )


def _ranges(pieces: Iterable[Piece]) -> list[list[str | int]]:
    """The parts of parameters that this rank has, as plain data."""
    return [[piece.name, piece.start, piece.stop] for piece in pieces]
