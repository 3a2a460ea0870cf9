"""The order of parameters in the state of an optimizer, which numbers them. It may differ between ranks and runs.

So a snapshot has the names of parameters, and a run that resumes reorders the state for its own optimizer.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from hvd_ckpt.processes.grid import current
from hvd_ckpt.snapshots.reader import Snapshot
from hvd_ckpt.utils.schema import Wrong, shown
from hvd_ckpt.utils.states import described, is_single

Names = Sequence[Sequence[str]]


def parameter_names(optimizer: Any) -> list[list[str]]:
    """The names of the parameters of each group of a ``DistributedOptimizer``."""
    return [
        [optimizer.parameter_names[parameter] for parameter in group["params"]]
        for group in optimizer.param_groups
    ]


def reordered(state: Mapping[str, Any], names: Names, optimizer: Any) -> dict[str, Any]:
    """A state of whole parameters with these names in the order of the optimizer.

    Raises:
        Wrong: a group has other parameters.
    """
    own = parameter_names(optimizer)
    groups = state["param_groups"]
    counts = [[len(group["params"]) for group in groups], list(map(len, names))]
    if len(own) != len(names) or counts[0] != counts[1]:
        raise Wrong(f"optimizer has {len(names)} parameter groups, and there are {len(own)} here")
    numbers: dict[str, int] = {}
    for at, (here, there, group) in enumerate(zip(own, names, groups)):
        for name in {*here} ^ {*there}:
            where = "there and not here" if name in there else "here and not there"
            raise Wrong(f"optimizer.param_groups[{at}]: parameter {shown(name)} is {where}")
        numbers.update(zip(there, group["params"]))
    # An example: the names there are [b, a] with the numbers 0 and 1, and here [a, b]. So entry 1 there becomes entry 0.
    counter = itertools.count()
    ordered: dict[str, Any] = {"state": {}, "param_groups": []}
    of_parameters = set(numbers.values())
    others = {key: value for key, value in state["state"].items() if key not in of_parameters}
    if list(map(list, names)) != own:
        # LBFGS keeps vectors of all parameters, one behind the other, with the first.
        _check_order(state["state"], numbers)
    for here, there, group in zip(own, names, groups):
        new = {**group, "params": [next(counter) for _ in here]}
        if "param_names" in group:
            given = dict(zip(there, group["param_names"]))
            new["param_names"] = [given[name] for name in here]
        ordered["param_groups"].append(new)
        for number, name in zip(new["params"], here):
            if numbers[name] in state["state"]:
                ordered["state"][number] = state["state"][numbers[name]]
    ordered["state"].update(others)
    return {**state, **ordered}


def _check_order(state: Mapping[Any, Any], numbers: Mapping[str, int]) -> None:
    """Raises Wrong where the state of a parameter may be about others, too, whose order it then has."""
    for name, number in numbers.items():
        for entry, value in state.get(number, {}).items():
            if not is_single(value):
                raise Wrong(
                    f"optimizer.state[{number}].{entry} of {shown(name)} is {described(value)}, which may be in the order of the "
                    "parameters, and this order is another one here"
                )


def in_order_of(snapshot: Snapshot, optimizer: Any) -> Snapshot:
    """The snapshot with the state of whole parameters in the order of the optimizer.

    Raises:
        Wrong: a group has other parameters.
    """
    names = snapshot.replicated.get("groups")
    if not names or snapshot.sharding is not None or current().stages > 1:  # that is by name
        return snapshot
    state = reordered(snapshot.replicated["optimizer"], names, optimizer)
    ranks = []
    for own in snapshot.per_stage:
        local = own["local"]
        if local is not None and local["optimizer"] is not None and local["pieces"] is None:
            local = {
                **local,
                "optimizer": reordered(local["optimizer"], local.get("groups") or names, optimizer),
            }
        ranks.append({**own, "local": local})
    return dataclasses.replace(
        snapshot, replicated={**snapshot.replicated, "optimizer": state}, per_stage=tuple(ranks)
    )
