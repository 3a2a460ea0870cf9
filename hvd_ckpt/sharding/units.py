"""Units of a model: modules whose parameters are gathered together.

A unit should be a part that is recomputed as a whole. Then recomputation and gradient need the same parameters
at the same time, and one gather serves both.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from hvd_ckpt.planning.blocks import proposed_blocks
from hvd_ckpt.planning.policy import is_head, policy_parts
from hvd_ckpt.recompute.sequential import CheckpointSequential, split


@dataclass
class UnitModules:
    """A unit as the model has it.

    Attributes:
        modules: they run in this order; the first gathers the parameters and the last frees them.
        parameters: what is gathered, without what a unit inside one of the modules has.
    """

    modules: list[nn.Module]
    parameters: list[nn.Parameter] = field(default_factory=list)


def find_units(
    model: nn.Module, units: Sequence[nn.Module | Sequence[nn.Module]] | None = None
) -> list[UnitModules]:
    """The units of a model.

    By default, units are the segments of each :class:`hvd_ckpt.CheckpointSequential` and of each chain with a
    ``checkpoint_interval``, and the blocks, spans and segments of an applied plan. In other models they are the children of
    ``nn.ModuleList`` and ``nn.Sequential`` that a planner would take for blocks. What lies in none of them, and what several of
    them share, is the last unit, whose module is the model itself: it is whole for as long as the model runs forward and backward.
    So is a head whose cross entropy a plan computes in chunks, which needs its weight after it has run.

    Args:
        model: all its parameters are in one unit each.
        units: modules, or lists of modules that run one after the other, to be gathered together. One may lie in another, which
            then has the rest. An ``nn.ModuleList`` or ``nn.ModuleDict``, which never runs itself, stands for its modules: each is a
            unit, or all are one where it is in a list.

    Returns:
        The units in the model's order, those without parameters left out, then that of the model, which is always there.

    Raises:
        TypeError: an entry of ``units`` is neither a module nor a list of modules.
        ValueError: one is not part of the model, is named twice, or has no ``forward``, so that nothing would gather it.
    """
    chosen = _by_default(model) if units is None else _checked(model, units)
    place = {id(module): place for place, module in enumerate(model.modules())}
    chosen = _disjoint(chosen)
    chosen.sort(key=lambda modules: place[id(modules[0])])
    own = [UnitModules(modules) for modules in chosen]
    whole = UnitModules([model])
    for parameter, users in _users(model, chosen):
        (own[users[0]] if len(users) == 1 and users[0] is not None else whole).parameters.append(parameter)
    return [*(unit for unit in own if unit.parameters), whole]


def _checked(model: nn.Module, units: Iterable[nn.Module | Sequence[nn.Module]]) -> list[list[nn.Module]]:
    names = {id(module): name for name, module in model.named_modules()}
    taken: set[int] = set()
    chosen: list[list[nn.Module]] = []
    for number, unit in enumerate(units):
        together = isinstance(unit, (list, tuple))
        given = list(unit) if isinstance(unit, (list, tuple)) else [cast(nn.Module, unit)]
        for module in given:
            if not isinstance(module, nn.Module):
                raise TypeError(
                    f"units[{number}] must be a module of the model or a list of them, got {module!r} of type "
                    f"{type(module).__name__}"
                )
            if id(module) not in names:
                raise ValueError(
                    f"units[{number}] has a {type(module).__name__} that is not part of this {type(model).__name__}; "
                    "take modules from model.modules()"
                )
        modules = [inner for module in given for inner in _running(module)]
        for module in modules:
            if not _runs(module):
                raise ValueError(
                    f"units[{number}] has '{names[id(module)]}', a {type(module).__name__} without a forward of its own: it never "
                    "runs, so nothing would gather it; name the modules that are called"
                )
            if id(module) in taken:
                raise ValueError(
                    f"units[{number}] has module '{names[id(module)]}', which is in a unit already; name it once"
                )
            taken.add(id(module))
        modules = [module for module in modules if module is not model]
        if modules:
            chosen += [modules] if together else [[module] for module in modules]
    return chosen


def _runs(module: nn.Module) -> bool:
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def _running(module: nn.Module) -> Iterator[nn.Module]:
    """The module, or those that run in its place."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and not _runs(module):
        for child in module.children():
            yield from _running(child)
    else:
        yield module


def _opened(modules: Sequence[nn.Module]) -> Iterator[list[nn.Module]]:
    """A block as units of modules that run: as it is, unless one of them never runs itself."""
    if all(map(_runs, modules)):
        yield list(modules)
        return
    for module in modules:
        for part in [module] if _runs(module) else module.children():
            yield from _opened([part])


def _by_default(model: nn.Module) -> list[list[nn.Module]]:
    recomputed = list(_recomputed(model))
    inside = {id(inner) for modules in recomputed for module in modules for inner in module.modules()}
    blocks = [
        modules
        for block in proposed_blocks(model)
        for modules in _opened(block.modules)
        if not any(id(module) in inside or any(map(is_head, module.modules())) for module in modules)
    ]
    return recomputed + blocks


def _disjoint(chosen: Iterable[list[nn.Module]]) -> list[list[nn.Module]]:
    """Units without the modules that stand in several of them."""
    units = [list(modules) for modules in chosen]
    # A module that runs in two units would be freed at the end of one while the other still needs it. It
    # stays with what is around it, at last with the model.
    counts = Counter(number for modules in units for number in {id(module) for module in modules})
    kept = [[module for module in modules if counts[id(module)] == 1] for modules in units]
    return [modules for modules in kept if modules]


def _recomputed(module: nn.Module) -> Iterator[list[nn.Module]]:
    """Modules that are recomputed, or given a policy by a plan, as one piece."""
    parts = [] if is_head(module) else policy_parts(module)
    if not parts and isinstance(module, nn.Sequential):
        parts = list(_segments(module))
    yield from parts
    inside = {id(part) for modules in parts for part in modules}
    if id(module) not in inside:
        for child in module.children():
            if id(child) not in inside:
                yield from _recomputed(child)


def _segments(chain: nn.Sequential) -> Iterator[list[nn.Module]]:
    interval = getattr(chain, "checkpoint_interval", 0)
    if isinstance(chain, CheckpointSequential):
        lengths = split(len(chain), chain.segments)
    elif isinstance(interval, int) and interval > 0:
        lengths = [min(interval, len(chain) - start) for start in range(0, len(chain), interval)]
    else:
        return
    layers = list(chain)
    for length, end in zip(lengths, accumulate(lengths)):
        yield layers[end - length : end]


def _users(
    model: nn.Module, chosen: Sequence[Sequence[nn.Module]]
) -> Iterator[tuple[nn.Parameter, list[int | None]]]:
    """Each parameter, and the units whose modules have it; None for the model beside them."""
    unit_of = {id(module): number for number, modules in enumerate(chosen) for module in modules}
    units: dict[str, int | None] = {}  # by the names of modules
    users: dict[int, dict[int | None, None]] = defaultdict(dict)
    # Also a module in two units, by all of its names, so that its parameters are found to be shared.
    for name, module in model.named_modules(remove_duplicate=False):
        unit = units[name] = unit_of.get(id(module), units.get(name.rpartition(".")[0]))
        for parameter in module.parameters(recurse=False):
            users[id(parameter)][unit] = None
    for parameter in model.parameters():
        yield parameter, list(users[id(parameter)])


def check_memory(
    named: Sequence[tuple[str, torch.Tensor]], others: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Checks that each parameter has memory, and has it for itself.

    Args:
        named: parameters that will be split.
        others: other parameters of the same model; they may share memory among themselves, but not with ``named``.

    Raises:
        ValueError: one has none, or shares it.
    """
    wanted = {id(parameter) for _, parameter in named}
    known = {id(parameter): (name, parameter) for name, parameter in (*named, *others)}
    places = []
    for name, parameter in known.values():
        if id(parameter) in wanted and (is_lazy(parameter) or parameter.device.type == "meta"):
            where = "is lazy" if is_lazy(parameter) else "is on the meta device"
            raise ValueError(
                f"parameter '{name}' has no values yet: it {where}; initialize the model before its parameters are split"
            )
        if is_lazy(parameter) or parameter.layout is not torch.strided or not parameter.numel():
            continue
        start = parameter.data_ptr()
        last = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride()))
        stop = start + (last + 1) * parameter.element_size()
        places.append((str(parameter.device), start, stop, name, id(parameter) in wanted))
    places.sort()
    # By device and by whether a parameter is to be split: of those that start before this one, the one that ends last, which need
    # not be its neighbor.
    last_of: dict[tuple[str, bool], tuple[int, str]] = {}
    for device, start, stop, name, is_split in places:
        for before in (True, False) if is_split else (True,):
            end, other = last_of.get((device, before), (start, ""))
            if start < end:
                raise ValueError(
                    f"parameters '{other}' and '{name}' are two that share memory; make them one and the same nn.Parameter, or "
                    "give one memory of its own: parameter.data = parameter.data.clone()"
                )
        last_of[device, is_split] = max(last_of.get((device, is_split), (stop, name)), (stop, name))
