"""The parts of a sharded optimizer, and what remains of them after ``unshard()``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from hvd_ckpt.collectives.exchange import Exchange
from hvd_ckpt.offload.shards import Offload
from hvd_ckpt.reduction.gradients import has_values
from hvd_ckpt.reduction.phases import put_in
from hvd_ckpt.sharding.flat import FlatParameters
from hvd_ckpt.sharding.gradients import IN_PIECES, IN_SHARDS, ShardedGradient
from hvd_ckpt.sharding.layout import Group, Layout, Piece
from hvd_ckpt.sharding.parameters import ShardedParameters
from hvd_ckpt.sharding.reducer import ShardReducer
from hvd_ckpt.sharding.surface import StateOfPieces
from hvd_ckpt.utils.elementwise import HOOKS
from hvd_ckpt.utils.torch_private import global_step_hooks

HALF = (torch.float16, torch.bfloat16)


class Masters:
    """Master weights: float32 copies of half-precision weights, in this rank's shards only.

    So small updates are not lost to rounding (Micikevicius et al., "Mixed Precision Training", 2018).
    """

    def __init__(self, wanted: bool, offload: Offload | None, shards: Sequence[torch.Tensor]) -> None:
        self._wanted, self._offload, self._shards = wanted, offload, shards
        self.by_group: dict[int, torch.Tensor] = {}

    def add(self, groups: Iterable[Group]) -> None:
        """Makes those of groups that are new."""
        for group in groups:
            if self._wanted and group.dtype in HALF:
                empty = torch.empty if self._offload is None else self._offload.empty
                master = empty(group.shard_numel, dtype=torch.float32, device=group.device)
                self.by_group[group.position] = master.copy_(self._shards[group.position])
                self._release(master)

    def _release(self, master: torch.Tensor) -> None:
        if self._offload is not None:
            self._offload.release(master)

    def follow(self) -> None:
        """Sets a master weight to its weight where the weight differs from the rounded master, since it was then set by hand."""
        for position, master in self.by_group.items():
            shard = self._shards[position]
            # A nan equals nothing, itself included, so it is copied, which changes nothing.
            same = master.to(shard.dtype) == shard
            if not bool(same.all()):
                master.copy_(torch.where(same, master, shard.to(torch.float32)))
            self._release(master)

    def round_into(self) -> None:
        """Makes the weights what their masters round to."""
        for position, master in self.by_group.items():
            self._shards[position].copy_(master)
            self._release(master)


@dataclass
class Sharding:
    """The parts of a sharded optimizer.

    Attributes:
        stage: 1 to 3.
        layout: where everything lies.
        exchange: collectives.
        store: the weights.
        offload: where the optimizer's state is, if not beside the weights.
        masters: float32 copies of half-precision weights.
        bucket_bytes: largest group of parameters that are added later.
        groups: the parameters of each of the optimizer's parameter groups.
        pieces: the parts of the parameters that this rank holds and updates, in their order.
        stepped: the same by group: what the wrapped class finds in the groups.
        added_sets: ranks of the process sets that were added for ``within``.
        state: the optimizer's, of the pieces.
        inside: whether the wrapped class finds pieces in the groups, see :mod:`.surface`.
    """

    stage: int
    layout: Layout
    exchange: Exchange
    store: FlatParameters | ShardedParameters
    offload: Offload | None
    masters: Masters
    bucket_bytes: float
    groups: list[list[torch.Tensor]] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    stepped: list[list[torch.nn.Parameter]] = field(default_factory=list)
    added_sets: list[tuple[int, ...]] = field(default_factory=list)
    # By index of the parameter; None where this rank has nothing of one that is in a group.
    _pieces: dict[int, Piece | None] = field(default_factory=dict)
    # By index: the gradient that this class has given a piece. Another one is the user's.
    _given: dict[int, torch.Tensor | None] = field(default_factory=dict)
    inside: bool = False
    _whole: list[tuple[dict[str, Any], list[Any]]] = field(default_factory=list)  # of each group, meanwhile
    _hooks: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.state = StateOfPieces(self.layout)

    @property
    def passes(self) -> ShardedParameters | None:
        """The store of stage 3, where parameters are whole only while their unit runs."""
        return self.store if isinstance(self.store, ShardedParameters) else None

    def piece_of(self, parameter: torch.Tensor) -> Piece | None:
        """This rank's piece of a parameter of the model; None if it has no elements of it."""
        index = self.layout.index(parameter)
        return None if index is None else self._pieces.get(index)

    def regroup(self, groups: Sequence[Sequence[torch.Tensor]]) -> None:
        """Follows what somebody has done to the lists of parameters in the groups, the same on every rank.

        Raises:
            RuntimeError: a parameter is there that was not given to the optimizer.
        """
        # By identity, group by group: tensors compare element by element.
        if [list(map(id, group)) for group in groups] == [list(map(id, group)) for group in self.groups]:
            return
        if (error := put_in(groups, lambda one: self.layout.index(one) in self._pieces)) is not None:
            raise error
        self.groups = [list(group) for group in groups]
        own = [[piece for parameter in group if (piece := self.piece_of(parameter))] for group in groups]
        self.pieces = [piece for group in own for piece in group]
        self.stepped = [[piece.parameter for piece in group] for group in own]

    def add_param_group(self, parameters: Sequence[torch.Tensor]) -> None:
        """Another parameter group of the optimizer, of which this rank steps its pieces."""
        spans = {
            span.parameter: (group.position, span)
            for group in self.layout.groups
            for span in group.spans(self.exchange.rank)
        }
        added = []
        for parameter in parameters:
            index = self.layout.index(parameter)
            assert index is not None
            self._pieces.setdefault(index, None)
            # Nothing of this parameter lies in this rank's shard: other ranks step it.
            if index not in spans:
                continue
            position, span = spans[index]
            weights = span.of(self.store.shards[position])
            master = self.masters.by_group.get(position)
            stepped = torch.nn.Parameter(
                weights if master is None else span.of(master), parameter.requires_grad
            )
            name, spec = self.layout.names[index], self.layout.specs[index]
            piece = Piece(
                name=name,
                start=span.start,
                stop=span.stop,
                spec=spec,
                index=index,
                parameter=stepped,
                weights=weights,
                span=span,
            )
            added.append(piece)
            self._pieces[index] = piece
        self.regroup([*self.groups, parameters])
        self.drop_gradients(added)

    def follow_model(self) -> None:
        """What was done to the model's parameters since the last step reaches what is stepped: values, and whether they are frozen.

        Raises:
            RuntimeError: a parameter has another dtype, device or shape than when it was split.
        """
        # In this order: weights that were written from outside, then masters that follow them.
        self.store.sync_from_model()
        self.masters.follow()
        for piece in self.pieces:
            trained = self.layout.parameters[piece.index].requires_grad
            if piece.parameter.requires_grad != trained:
                piece.parameter.requires_grad_(trained)

    def take_gradients(self) -> None:
        """The pieces' gradients are parts of the parameters' own, where those are whole or None. One that somebody has given to a
        piece stays, if the parameter has none.

        Raises:
            RuntimeError: a parameter has the placeholder of another one's gradient.
        """
        for parameter, name in zip(self.layout.parameters, self.layout.names):
            placed = parameter.grad
            if isinstance(placed, ShardedGradient) and placed.known_as != name:
                raise RuntimeError(
                    f"parameter '{name}' was given the gradient of parameter '{placed.known_as}', which {IN_SHARDS}"
                )
        for piece in self.pieces:
            gradient, own = self.layout.parameters[piece.index].grad, piece.parameter.grad
            # Three may stand in a piece's ``grad``: a placeholder, what was given here in an earlier step, or the user's own.
            by_hand = has_values(own) and own is not self._given.get(piece.index)
            if isinstance(gradient, ShardedGradient) or (gradient is None and by_hand):
                continue
            if gradient is not None:
                gradient = piece.spec.flatten(gradient)[piece.start : piece.stop].to(piece.parameter.dtype)
            piece.parameter.grad = self._given[piece.index] = gradient

    def take_gradient_shards(self, reducer: ShardReducer) -> None:
        """Stages 2 and 3: the pieces' gradients are parts of what the reducer holds."""
        for piece in self.pieces:
            shard = reducer.shard(self.layout.group_of[piece.index]) if reducer.used[piece.index] else None
            gradient = None if shard is None else piece.span.of(shard).to(piece.parameter.dtype)
            piece.parameter.grad = self._given[piece.index] = gradient

    def drop_gradients(self, pieces: Sequence[Piece] | None = None) -> None:
        """These pieces, or all, have no gradients; using them is an error that says where gradients are."""
        self._given.clear()
        for piece in self.pieces if pieces is None else pieces:
            stepped = piece.parameter
            # The gradient of a frozen piece is None, as in PyTorch.
            trained = self.layout.parameters[piece.index].requires_grad
            stepped.grad = ShardedGradient(stepped, piece.name, IN_PIECES) if trained else None

    def shards_changed(self, used: Sequence[bool] | None = None) -> None:
        """The shards have been changed, by a step say: gathers them (stages 1 and 2), or drops what was gathered. Collective.

        Args:
            used: for each parameter, whether it may have changed on some rank; by default all.
        """
        self.masters.round_into()
        groups = self.layout.groups
        if used is not None:
            # ``used`` is what all ranks have found together, so that they gather the same groups.
            groups = [group for group in groups if any(used[index] for index in group.indices)]
        self.store.shards_changed(groups)

    @contextmanager
    def pieces_in(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """A context in which groups are those of pieces, and step hooks do not run: :func:`run_hooks` does that."""
        if self.inside:
            yield
            return
        self._enter(optimizer)
        try:
            yield
        finally:
            self._leave(optimizer)

    @contextmanager
    def whole_in(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """A context within :meth:`pieces_in` for code of the user, such as a closure."""
        if not self.inside:
            yield
            return
        self._leave(optimizer)
        try:
            yield
        finally:
            self._enter(optimizer)

    def _enter(self, optimizer: Any) -> None:
        self._whole = [(group, group["params"]) for group in optimizer.param_groups]
        self.regroup([parameters for _, parameters in self._whole])
        self._keep_state(optimizer)
        for (group, _), stepped in zip(self._whole, self.stepped):
            group["params"] = stepped
        self._hooks = [
            (getattr(optimizer, name), dict(everywhere)) for name, everywhere in zip(HOOKS, global_step_hooks)
        ]
        for name, everywhere in zip(HOOKS, global_step_hooks):
            setattr(optimizer, name, OrderedDict())
            everywhere.clear()
        self.inside = True

    def _leave(self, optimizer: Any) -> None:
        if not self.inside:  # an error in the middle of a change
            return
        self.inside = False
        for name, everywhere, (own, before) in zip(HOOKS, global_step_hooks, self._hooks):
            setattr(optimizer, name, own)
            everywhere.update(before)
        # The groups may be others by now, if the wrapped class has loaded a state.
        for (group, parameters), now in zip(self._whole, optimizer.param_groups):
            group["params"] = now["params"] = parameters
        self._keep_state(optimizer)

    def _keep_state(self, optimizer: Any) -> None:
        """Takes what a load, or the user, has put in place of the state."""
        given = optimizer.state
        if given is not self.state:
            self.state.clear()
            for key, entries in given.items():
                self.state[key] = entries
            optimizer.state = self.state


class Released:
    """Has no groups and is of stage 0; anything else that is asked for is an error."""

    stage = 0

    def __init__(self) -> None:
        self.groups: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(
            "this optimizer has given the model its parameters back in unshard(), and cannot be used any more; wrap a new torch "
            "optimizer with DistributedOptimizer"
        )
