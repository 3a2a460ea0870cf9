"""The optimizer's state in parts: the part of one rank, from a whole state and to it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hvd_ckpt.collectives.agreement import errors_on_all
from hvd_ckpt.reduction.buckets import TensorSpec
from hvd_ckpt.sharding.layout import Piece
from hvd_ckpt.sharding.sharding import Sharding
from hvd_ckpt.sharding.surface import stepped_parameters
from hvd_ckpt.utils.elementwise import COUNTERS, class_of, twin_of

if TYPE_CHECKING:
    from hvd_ckpt.reduction.optimizer import ReducedOptimizer


def of_pieces(optimizer: ReducedOptimizer, whole: Mapping[str, Any]) -> dict[str, Any]:
    """The state of this rank's pieces, from one of whole parameters.

    Raises:
        ValueError: that is of other parameters or groups.
    """
    groups, own_groups = whole["param_groups"], stepped_parameters(optimizer)
    if len(groups) != len(own_groups):
        raise ValueError(
            f"the state has {len(groups)} parameter groups and this optimizer {len(own_groups)}; build the same optimizer"
        )
    states = Sources([whole], whole_ranges(optimizer)).states(ranges_of(optimizer))
    return {"state": states, "param_groups": numbered(groups, own_groups)}


def of_piece(piece: Piece, whole: Mapping[str, Any]) -> dict[str, Any]:
    """A piece's part of what the wrapped class has made of a whole parameter."""
    part = {}
    for name, value in whole.items():
        if isinstance(value, torch.Tensor) and value.shape == piece.spec.shape and name not in COUNTERS:
            # What belongs to a half-precision weight belongs to its master here.
            dtype = piece.parameter.dtype if value.dtype == piece.weights.dtype else value.dtype
            value = piece.spec.flatten(value)[piece.start : piece.stop].to(dtype, copy=True)
        part[name] = value
    return part


def numbered(
    groups: Sequence[Mapping[str, Any]], parameters: Sequence[Sequence[Any]]
) -> list[dict[str, Any]]:
    """Parameter groups with the numbers of these parameters, as state dicts have them."""
    counter = itertools.count()
    return [{**group, "params": [next(counter) for _ in own]} for group, own in zip(groups, parameters)]


def load(optimizer: Any, make: Callable[[], Mapping[str, Any]]) -> None:
    """Loads the state of this rank's pieces that ``make`` returns, or raises on all ranks, where one cannot."""
    sharding: Sharding = optimizer.sharding
    extra = ("pieces", "stage", "ranks", "rank", "master_weights")
    with errors_on_all("load_state_dict() of a sharded optimizer", optimizer.process_set):
        sharding.follow_model()  # else the gather below would undo what was written to the weights before
        state = make()
        bare = {name: value for name, value in state.items() if name not in extra}
        with sharding.pieces_in(optimizer):
            optimizer.wrapped_class.load_state_dict(optimizer, bare)
            optimizer.keep_groups(optimizer)
    with torch.no_grad():
        for number, master in state.get("master_weights", {}).items():
            piece = sharding.pieces[number]
            if piece.has_master:
                # Weights and masters together: follow() would take a weight that is not what its master
                # rounds to for one that somebody has set.
                piece.parameter.copy_(master)
                piece.weights.copy_(master)
    if sharding.offload is not None:
        with sharding.pieces_in(optimizer):
            sharding.offload.move_state(optimizer)
    if sharding.masters.by_group:  # on every rank alike: one may have no piece of a small group
        sharding.store.shards_changed(sharding.layout.groups)


def state_after_a_step(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The optimizer's state of each parameter that it steps, after a step, as tensors without values."""
    twin, kind = twin_of(optimizer), class_of(optimizer)
    parameters = []
    for group, stepped in zip(optimizer.param_groups, stepped_parameters(optimizer)):
        options = {name: value for name, value in group.items() if name != "params"}
        # Steps of one tensor at a time, which also run on the meta device.
        options.update({name: False for name in ("fused", "foreach", "capturable") if name in options})
        if isinstance(options.get("lr"), torch.Tensor):
            options["lr"] = float(options["lr"])
        alike = [
            torch.empty(parameter.shape, dtype=parameter.dtype, device="meta").requires_grad_()
            for parameter in stepped
        ]
        for parameter in alike:
            parameter.grad = torch.empty_like(parameter)
        parameters += alike
        twin.param_groups = [{**options, "params": alike}]
        # Some read a value, when they have made all that they keep. LBFGS needs a closure.
        with contextlib.suppress(Exception):
            # The step of the wrapped class: that of a DistributedOptimizer would communicate.
            kind.step(twin)
    if kind.__module__.partition(".")[0] == "torch":
        return [twin.state[parameter] for parameter in parameters]
    # Entries of a class of one's own may come, go and grow, but for those that have an element for each of the parameter's.
    return [
        {
            name: value
            for name, value in twin.state[parameter].items()
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape
        }
        for parameter in parameters
    ]


class ShardRange(NamedTuple):
    """Elements of a parameter that an optimizer has state of, 1-D; with ``whole`` all of them, in the parameter's shape."""

    name: str
    start: int
    stop: int
    spec: TensorSpec
    whole: bool


def ranges_of(optimizer: Any) -> list[ShardRange]:
    """The elements that an optimizer, sharded or not, has state of, in the order of its parameters."""
    if not hasattr(optimizer, "sharding"):
        return whole_ranges(optimizer)
    return [ShardRange(piece.name, piece.start, piece.stop, piece.spec, False) for piece in optimizer.pieces]


def whole_ranges(optimizer: Any) -> list[ShardRange]:
    """The whole parameters of an optimizer, sharded or not, in the order of its groups."""
    layout = optimizer.sharding.layout if hasattr(optimizer, "sharding") else None
    ranges = []
    for parameter in itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups):
        spec = TensorSpec.of(parameter) if layout is None else layout.specs[layout.index(parameter)]
        ranges.append(ShardRange(optimizer.parameter_names[parameter], 0, spec.numel, spec, True))
    return ranges


class Sources:
    """States of pieces or of whole parameters, found by name; and what is kept under other keys, as the first has it.

    Args:
        parts: for each rank, its state; one without ``"pieces"`` is of whole parameters.
    """

    def __init__(self, parts: Sequence[Mapping[str, Any]], whole: Sequence[ShardRange]) -> None:
        self._found: dict[str, list[tuple[int, int, dict[str, Any]]]] = {}
        self._others: dict[Any, Any] = {}
        self._in_pieces = all("pieces" in part for part in parts)
        for part in parts:
            pieces = part.get("pieces")
            if pieces is None:
                count = sum(len(group["params"]) for group in part["param_groups"])
                if count != len(whole):
                    raise ValueError(
                        f"the state is of {count} parameters and this optimizer has {len(whole)}; build the same optimizer"
                    )
                pieces = [parameter[:3] for parameter in whole]
            for number, values in part["state"].items():
                if not isinstance(number, int):
                    self._others.setdefault(number, values)
                    continue
                name, start, stop = pieces[number]
                self._found.setdefault(name, []).append((start, stop, values))

    def states(self, targets: Sequence[ShardRange]) -> dict[Any, dict[str, Any]]:
        """The state of each target that has one, by its number, and what is kept under other keys."""
        states = dict(self._others)
        for number, target in enumerate(targets):
            sources = self._found.get(target.name)
            if sources is not None and target.start < target.stop:
                states[number] = {name: self._value(target, name, sources) for name in sources[0][2]}
        return states

    def _value(
        self, target: ShardRange, name: str, sources: Sequence[tuple[int, int, dict[str, Any]]]
    ) -> Any:
        start, stop, values = sources[0]
        first = values[name]
        if not isinstance(first, torch.Tensor):
            return first
        # A value without dimensions, or of one element where the piece has more, is of the parameter as a whole: a count of
        # steps. Only the state of a whole parameter without dimensions looks alike, and is told by its name.
        element = not self._in_pieces and target.spec.shape == () and name not in COUNTERS
        if (first.dim() == 0 and not element) or (first.numel() == 1 and stop - start != 1):
            return first.clone()
        if first.numel() != stop - start:
            raise ValueError(
                f"{name} of '{target.name}' in the state has {first.numel()} elements and not {stop - start}; it is of another "
                "model"
            )
        parts = [
            (start, stop, target.spec.flatten(part) if part.shape == target.spec.shape else part)
            for start, stop, part in ((start, stop, values[name]) for start, stop, values in sources)
        ]
        like = torch.empty(0, dtype=first.dtype, device=first.device)
        flat = assembled(parts, target.start, target.stop, f"{name} of '{target.name}'", like)
        return target.spec.unflatten(flat) if target.whole else flat


def assembled(
    parts: Sequence[tuple[int, int, torch.Tensor]], start: int, stop: int, what: str, like: torch.Tensor
) -> torch.Tensor:
    """Elements ``start`` to ``stop``, from parts that overlap them."""
    result = torch.empty(stop - start, dtype=like.dtype, device=like.device)
    reached = start
    for first, last, values in sorted(parts, key=lambda part: part[0]):
        low, high = max(first, reached), min(last, stop)
        # Sorted by their start, so a part that begins behind what is reached leaves a hole; a later one cannot fill it.
        if low > reached or low >= high:
            continue
        result[low - start : high - start].copy_(values.reshape(-1)[low - first : high - first])
        reached = high
    if reached < stop:
        raise ValueError(
            f"{what}: elements {reached} to {stop} are in none of the parts; give those of all ranks"
        )
    return result
