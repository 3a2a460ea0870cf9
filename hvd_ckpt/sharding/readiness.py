"""Which parameters can be split over the ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
from torch.nn.parameter import is_lazy

from hvd_ckpt.unmaterialized import is_split

__all__ = ["check_memory", "check_not_split"]


def check_not_split(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises:
    ValueError: a parameter is split over the ranks already.
    """
    for name, parameter in named:
        if is_split(parameter):
            raise ValueError(
                f"parameter '{name}' is split over the ranks by another DistributedOptimizer already; call optimizer.unshard() on "
                "that one first, on all ranks; if it is gone, build the model again and load its weights"
            )


def check_memory(
    named: Sequence[tuple[str, torch.Tensor]], others: Iterable[tuple[str, torch.Tensor]] = ()
) -> None:
    """Whether each parameter has memory, and has it for itself.

    Args:
        named: those that are to be split.
        others: of the same model; they may share memory among themselves, but not with those.

    Raises:
        ValueError: it has none, or shares it.
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
    for (device, _, stop, name, first), (other_device, start, _, other, second) in itertools.pairwise(places):
        if device == other_device and start < stop and (first or second):
            raise ValueError(
                f"parameters '{name}' and '{other}' are two that share memory; make them one and the same nn.Parameter, or give "
                "one memory of its own: parameter.data = parameter.data.clone()"
            )
