"""What a snapshot of a run must hold before any of it is used.

Checksums say that a snapshot is what was written, not that a run wrote it. So everything in it is compared with what a run writes:
keys, types and ranges first, then names and shapes with those of the model and the optimizer at hand.
"""

from __future__ import annotations

import contextlib
import copy
import math
import types
import typing
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hvd_ckpt.json_file import MAX_BYTES, Wrong, shown
from hvd_ckpt.snapshots import structure
from hvd_ckpt.snapshots.manifest import MAX_RANKS
from hvd_ckpt.snapshots.structure import Check

__all__ = [
    "FLAT",
    "after_a_step",
    "check_average",
    "check_average_fits",
    "check_buffers",
    "check_common",
    "check_optimizer",
    "check_own",
    "check_state",
    "check_weights",
    "is_like",
]

FLAT = 7  # elements of a piece that stands for any


def check_common(common: Any, check_config: Check, progress: type, sharded: bool = False) -> None:
    """Raises Wrong unless it is what a run has in common with all its ranks; keys beyond those that are known may be there.

    Args:
        check_config: raises Wrong unless what it is given is the configuration of a run.
        progress: the dataclass of its progress.
        sharded: whether the optimizer's state is split over the ranks, and so not here.
    """
    checks: dict[str, Check] = {
        "config": check_config,
        "steps": structure.whole(0),
        "progress": lambda value, place: _fields(value, place, progress, ("step", "position")),
        "optimizer": _nothing if sharded else check_state,
        "scaler": _scaler,
        "plan": _plan,
        "samples": structure.whole(1),
        "threads": structure.whole(1),
    }
    structure.each(common, "common", checks)
    check_average(common.get("ema"), "common.ema", sharded)
    if "ranks" in common:  # with which the run began; earlier versions did not say
        structure.whole(1, MAX_RANKS)(common["ranks"], "common.ranks")


def check_own(own: Any, stage: int = 0) -> None:
    """Raises Wrong unless it is what a rank of a run has of its own.

    Args:
        stage: what was split over the ranks, from 0 to 3; where gradients were, their reducer's state is checked by that itself.
    """
    checks: dict[str, Check] = {
        "random": structure.texts_as_keys,
        "reduction": structure.texts_as_keys if stage >= 2 else _reduction,
        "buffers": structure.tensors,
        "logged": _logged,
    }
    structure.each(own, "own", checks)


def check_weights(weights: Mapping[str, Tensor], model: nn.Module) -> None:
    """Raises Wrong unless the weights are the model's by names, shapes and kinds of numbers."""
    _same_tensors(weights, model.state_dict(), "weights", all_of_them=True)


def check_buffers(buffers: Mapping[str, Tensor], model: nn.Module) -> None:
    """Raises Wrong unless all of the buffers are the model's."""
    _same_tensors(buffers, dict(model.named_buffers()), "own.buffers", all_of_them=False)


def check_optimizer(state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Raises Wrong unless the state, whose structure is right, fits the optimizer: its groups, and the names and shapes of what it
    keeps of each parameter.

    PyTorch loads what has other names or shapes, and fails in the step that follows.

    Args:
        optimizer: as it was made, not yet the one that reduces.
    """
    here, there = optimizer.param_groups, state["param_groups"]
    if [len(group["params"]) for group in here] != [len(group["params"]) for group in there]:
        counts = " and ".join(str(len(group["params"])) for group in there)
        raise Wrong(f"common.optimizer has {counts} parameters in its groups: it is of another model")
    usual = after_a_step(optimizer)
    numbers = [number for group in there for number in group["params"]]
    for expected, number in zip(usual, numbers):
        kept, place = state["state"].get(number), f"common.optimizer.state[{number}]"
        if not kept:
            continue  # not yet updated
        for name, value in expected.items():
            if name not in kept:
                raise Wrong(f"{place} has no {name}, which this optimizer with its options needs")
            if isinstance(value, Tensor) and not is_like(kept[name], value):
                raise Wrong(
                    f"{place}.{name} is {structure.described(kept[name])}, and must be {structure.described(value)}"
                )


def check_average(value: Any, place: str, sharded: bool) -> None:
    """Raises Wrong unless it is what :func:`hvd_ckpt.training.averaging.common_state` gives."""
    if value is None:
        return
    structure.each(value, place, {"n_averaged": structure.whole(0)})
    if sharded != (value.get("averages") is None):
        raise Wrong(f"{place}.averages must be None where ranks have parts of them, and only there")
    if not sharded:
        structure.tensors(value["averages"], f"{place}.averages")


def check_average_fits(value: Any, place: str, model: nn.Module) -> None:
    """Raises Wrong unless the averages, where nothing was split, are of the model's parameters by names and shapes."""
    if value is None or value["averages"] is None:
        return
    parameters = dict(model.named_parameters())
    for name, average in value["averages"].items():
        if name not in parameters:
            raise Wrong(f"{place}.averages has {shown(name)}: the snapshot is of another model")
        if average.shape != parameters[name].shape or not average.is_floating_point():
            wanted = structure.described(parameters[name])
            raise Wrong(
                f"{place}.averages[{shown(name)}] is {structure.described(average)}, and must be {wanted}"
            )
    for name, parameter in parameters.items():
        if parameter.requires_grad and name not in value["averages"]:
            raise Wrong(f"{place}.averages has no {shown(name)}: the snapshot is of another model")


def is_like(value: Any, expected: Tensor) -> bool:
    """Whether a part of an optimizer's state has the shape of another, and is of its kind."""
    if not isinstance(value, Tensor):  # a count of steps may be a number
        return expected.dim() == 0 and structure.is_number(value)
    return value.shape == expected.shape and (value.is_complex() == expected.is_complex())


def after_a_step(optimizer: torch.optim.Optimizer, flat: bool = False) -> list[dict[str, Any]]:
    """What the optimizer keeps of each parameter once it has taken a step, as tensors without values.

    Args:
        flat: as if each parameter had one dimension with ``FLAT`` elements.
    """
    twin = copy.copy(optimizer)
    twin.state = defaultdict(dict)
    parameters = []
    for group in optimizer.param_groups:
        options = {name: value for name, value in group.items() if name != "params"}
        options.update({name: False for name in ("fused", "foreach", "capturable") if name in options})
        if isinstance(options.get("lr"), Tensor):
            options["lr"] = float(options["lr"])
        alike = [
            torch.empty(FLAT if flat else one.shape, dtype=one.dtype, device="meta").requires_grad_()
            for one in group["params"]
        ]
        for one in alike:
            one.grad = torch.empty_like(one)
        parameters += alike
        twin.param_groups = [{**options, "params": alike}]
        with contextlib.suppress(
            RuntimeError
        ):  # some ask for a value, when they have made all that they keep
            type(optimizer).step(twin)
    return [twin.state[one] for one in parameters]


def _same_tensors(
    given: Mapping[str, Tensor], known: Mapping[str, Tensor], place: str, all_of_them: bool
) -> None:
    odd = sorted(set(given) - set(known)) or sorted(set(known) - set(given)) * all_of_them
    if odd:
        there = "has not" if odd[0] in known else "has"
        raise Wrong(f"{place} {there} {shown(odd[0])}: the snapshot is of another model")
    for name, value in given.items():
        expected = known[name]
        floats = value.is_floating_point() and expected.is_floating_point()
        if value.shape != expected.shape or not (floats or value.dtype == expected.dtype):
            wanted = f"{structure.described(value)}, and must be {structure.described(expected)}"
            raise Wrong(f"{place}[{shown(name)}] is {wanted}: the snapshot is of another model")


# ------------------------------------------------------------------------------------ structure


def _fields(value: Any, place: str, kind: type, needed: tuple[str, ...]) -> None:
    """The keyword arguments of a dataclass whose fields are whole numbers from 0, other numbers, texts or truth values; those that
    are not needed may be missing, since an earlier version may not have had them."""
    structure.texts_as_keys(value, place)
    hints = typing.get_type_hints(kind)
    for name in value:
        if name not in hints:
            raise Wrong(f"{place} has {shown(name)}, which is no part of it")
    for name in needed:
        if name not in value:
            raise Wrong(f"{place} has no {name}")
    for name, hint in hints.items():
        if name not in value:
            continue
        inner = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        if value[name] is None and types.NoneType in inner:
            continue
        kinds = [one for one in inner if one is not types.NoneType]
        if int in kinds and float not in kinds:
            structure.whole(0)(value[name], f"{place}.{name}")
        elif float in kinds:
            structure.number(-math.inf)(value[name], f"{place}.{name}")
        elif type(value[name]) not in kinds:
            raise Wrong(
                f"{place}.{name} is {structure.in_words(value[name])}, and must be a {kinds[0].__name__}"
            )


def check_state(value: Any, place: str) -> None:
    """Raises Wrong unless it has the structure of an optimizer's state."""
    structure.each(value, place, {"state": structure.dictionary, "param_groups": _groups})
    numbers = [number for group in value["param_groups"] for number in group["params"]]
    if len(set(numbers)) < len(numbers):
        raise Wrong(f"{place}.param_groups have a parameter twice")
    for number, kept in value["state"].items():
        here = f"{place}.state[{structure.in_words(number)}]"
        if type(number) is not int or number not in numbers:
            raise Wrong(f"{here} is of no parameter of its groups")
        structure.texts_as_keys(kept, here)
        for name, one in kept.items():
            if not (one is None or isinstance(one, (Tensor, bool)) or structure.is_number(one)):
                raise Wrong(f"{here}.{name} is {structure.in_words(one)}, and must be a tensor or a number")


def _nothing(value: Any, place: str) -> None:
    if value is not None:
        raise Wrong(f"{place} is {structure.in_words(value)}, and must be None where ranks have parts of it")


def _groups(value: Any, place: str) -> None:
    if not isinstance(value, list) or not value:
        raise Wrong(f"{place} is {structure.in_words(value)}, and must be a list of groups")
    for at, group in enumerate(value):
        here = f"{place}[{at}]"
        structure.texts_as_keys(group, here)
        numbers = group.get("params")
        if not isinstance(numbers, list) or not all(type(one) is int for one in numbers):
            raise Wrong(
                f"{here}.params is {structure.in_words(numbers)}, and must be a list of whole numbers"
            )


def _scaler(value: Any, place: str) -> None:
    if value is not None:
        checks: dict[str, Check] = {
            "scale": structure.number(0, above=True),
            "growth_factor": structure.number(1, above=True),
            "backoff_factor": structure.number(0, 1, above=True),
            "growth_interval": structure.whole(1, 2**31 - 1),
            "_growth_tracker": structure.whole(0, 2**31 - 1),
        }
        structure.each(value, place, checks)


def _plan(value: Any, place: str) -> None:
    if value is None:
        return
    if not isinstance(value, str) or len(value) > MAX_BYTES:
        raise Wrong(f"{place} is {structure.in_words(value)}, and must be the text of a plan")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise Wrong(f"{place} has characters that no text has") from None


def _reduction(value: Any, place: str) -> None:
    structure.texts_as_keys(value, place)
    if value:
        checks: dict[str, Check] = {
            "version": structure.whole(0),
            "order": structure.names,
            "sparse": structure.counts,
            "densified": structure.counts,
            "bucket_cap_bytes": structure.number(0, above=True),
            "counts": lambda counts, here: None if counts is None else structure.counts(counts, here),
            "lower_counts": structure.counts,
        }
        structure.each(value, place, checks)
        twice = set(value["order"]) & set(value["sparse"])
        if twice:
            raise Wrong(f"{place} has {shown(min(twice))} both in a bucket and in none")


def _logged(value: Any, place: str) -> None:
    """The loss may be nan or infinite, and what it is the sum of is a count."""
    if not isinstance(value, (tuple, list)) or len(value) != 2 or not isinstance(value[0], float):
        raise Wrong(f"{place} is {structure.in_words(value)}, and must be a loss and a number of terms")
    structure.number(0)(value[1], f"{place}[1]")
