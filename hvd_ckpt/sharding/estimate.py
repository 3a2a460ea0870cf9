"""Memory of a training step on each of any number of ranks, before there are ranks: :func:`estimate_memory`.

Parameters, gradients, optimizer state and master weights follow from the layout that the sharded optimizer uses: that is
arithmetic. Activations are measured in one forward and backward pass on this machine, with the gradients that are final at
each peak. What communication holds then is a formula for each stage: gradients that wait for their bucket, the last two
buckets on their way, and the parameters of two units that are gathered (stage 3). Nothing here follows the reducer event by
event, so the peak is an estimate: within 10 % of what was measured.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hvd_ckpt.planning.plan import Plan, applied
from hvd_ckpt.planning.profile import Step
from hvd_ckpt.recompute.calls import map_tensors
from hvd_ckpt.reduction.buckets import MEBIBYTE
from hvd_ckpt.sharding import stage_of
from hvd_ckpt.sharding.elementwise import check_elementwise
from hvd_ckpt.sharding.formats import FP32, WireFormat, sum_dtype, wire_formats
from hvd_ckpt.sharding.in_flight import IN_FLIGHT, SMALL_BYTES
from hvd_ckpt.sharding.layout import Group, Layout
from hvd_ckpt.sharding.measured_memory import OptimizerMemory, Stretch, make_optimizer, measure_step
from hvd_ckpt.sharding.memory_estimate import MemoryEstimate
from hvd_ckpt.sharding.sharding import HALF
from hvd_ckpt.sharding.units import find_units

__all__ = ["PRECISIONS", "Estimator", "MemoryEstimate", "estimate_memory"]

PRECISIONS = ("fp32", "bf16", "fp16", "bf16-params")
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def estimate_memory(
    model: nn.Module,
    np: int,
    shard: str | int = "none",
    offload: str | None = None,
    plan: Plan | None = None,
    optimizer: str | type[torch.optim.Optimizer] | torch.optim.Optimizer = "adamw",
    precision: str = "fp32",
    *,
    sample: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    bucket_cap_mb: float = 25.0,
    wire: str | Mapping[str, str] = "fp32",
    units: Sequence[Any] | None = None,
    device: torch.device | str | None = None,
) -> MemoryEstimate:
    """Bytes that a training step takes on each rank, without the ranks: model states, activations, buckets, and the peak.

    The step is one from the second on, with ``zero_grad()`` between steps. Counted is what PyTorch and Horovod allocate for it on
    the device: not the data, the libraries themselves, or what an allocator keeps in reserve. The model is left as it was.

    Args:
        model: as it is before ``DistributedOptimizer``. Without a sample it may be on the meta device.
        np: ranks. Nothing is allocated for them.
        shard, offload, bucket_cap_mb, wire, units: as for :func:`hvd_ckpt.DistributedOptimizer`.
        plan: applied to the model; None: the model as it is, with its own recomputation.
        optimizer: a class of ``torch.optim`` by its name in lower case, or a class, with its default options; or an optimizer of
            the model's parameters, with its own.
        precision: ``"fp32"`` (the model's own dtypes), ``"bf16"`` or ``"fp16"`` (under autocast), ``"bf16-params"`` (parameters in
            bfloat16; at stages 1 to 3 with float32 master weights).
        sample: one argument of the model or a tuple of them: a rank's (micro-)batch. Without it activations are not known, and
            are left out of the peak.
        kwargs: keyword arguments of the model.
        loss: of the model's output, as for :func:`hvd_ckpt.plan`.
        device: where the sample's step is run and the optimizer is tried out; by default where the model is.

    Raises:
        ValueError: an argument is wrong, or the optimizer cannot be split; one sentence that says which.
    """
    _check(np, shard, offload, wire)
    estimator = Estimator(
        model, plan, optimizer, precision, sample, kwargs, loss, bucket_cap_mb, units, device
    )
    return estimator.estimate(np, shard, offload, wire)


@dataclass
class _Moment:
    """Bytes at one time of a step beyond those held all the time; Horovod's own threads hold ``received``."""

    phase: str
    activations: int = 0
    gradients: int = 0
    buckets: int = 0
    received: int = 0
    temporaries: int = 0

    @property
    def recorded(self) -> int:
        return self.activations + self.gradients + self.buckets + self.temporaries


class Estimator:
    """Estimates for one model, batch and optimizer; what has to be measured is measured once.

    Arguments as of :func:`estimate_memory`.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan | None = None,
        optimizer: str | type[torch.optim.Optimizer] | torch.optim.Optimizer = "adamw",
        precision: str = "fp32",
        sample: Any = None,
        kwargs: Mapping[str, Any] | None = None,
        loss: Callable[[Any], Tensor] | None = None,
        bucket_cap_mb: float = 25.0,
        units: Sequence[Any] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if precision not in PRECISIONS:
            raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, not {precision!r}")
        if not bucket_cap_mb > 0:
            raise ValueError(f"bucket_cap_mb must be > 0 (MiB), not {bucket_cap_mb}")
        _check_model(model, sample)
        self._optimizer = make_optimizer(optimizer, model)
        self._taken: dict[torch.dtype, OptimizerMemory] = {}
        self._cap_bytes = bucket_cap_mb * MEBIBYTE
        own = next(model.parameters()).device
        place = own if device is None else torch.device(device)
        dtype = torch.bfloat16 if precision == "bf16-params" else None
        with contextlib.nullcontext() if plan is None else applied(model, plan):
            names = {id(parameter): name for name, parameter in model.named_parameters()}
            self._units = [[names[id(one)] for one in unit.parameters] for unit in find_units(model, units)]
            if dtype is not None or place != own:
                model = copy.deepcopy(model).to(device=place, dtype=dtype)
            self._parameters = {name: _shape_of(one) for name, one in model.named_parameters()}
            self._buffers = sum(buffer.nbytes for buffer in model.buffers())
            trained = [name for name, one in self._parameters.items() if one.requires_grad]
            self._order = trained[::-1]  # in which gradients become final
            self._stretches = [Stretch("forward", 0, 0, 0), Stretch("backward", 0, 0, len(trained))]
            if sample is not None:
                arguments = (sample if isinstance(sample, tuple) else (sample,), dict(kwargs or {}))
                args, named_args = map_tensors(lambda one: _moved(one, place, dtype), Tensor, arguments)
                step = Step(model, args, named_args, loss, _AUTOCAST.get(precision))
                self._stretches, self._order = measure_step(step)
        self._has_sample = sample is not None
        self._place = torch.device("cpu") if place.type == "meta" else place

    def estimate(
        self,
        np: int,
        shard: str | int = "none",
        offload: str | None = None,
        wire: str | Mapping[str, str] = "fp32",
    ) -> MemoryEstimate:
        """The estimate for so many ranks and this stage.

        Raises:
            ValueError: an argument is wrong, or the optimizer cannot be split.
        """
        stage, gradients, weights = _check(np, shard, offload, wire)
        if stage:
            check_elementwise(self._optimizer, promised=True)
        layout, unit_groups = Layout(np), []
        if stage == 3:
            units = [[(name, self._parameters[name]) for name in unit] for unit in self._units]
            unit_groups = [layout.add(unit) for unit in units]
        else:
            layout.add(list(reversed(self._parameters.items())), self._cap_bytes)
        trained = [group for group in layout.groups if group.requires_grad]
        base, offloaded = self._held(stage, layout.groups, weights, offload)
        reduced = sum(self._parameters[name].nbytes for name in self._order)
        if stage >= 2:
            reduced = sum(group.shard_numel * sum_dtype(group.dtype).itemsize for group in trained)
        moments = self._moments(stage, layout, unit_groups, gradients, weights)
        moments += self._step(stage, trained, weights, offload, reduced)
        highest = max(moments, key=lambda moment: moment.recorded + moment.received)
        at_peak = {
            **base,
            "gradients": highest.gradients,
            "activations": highest.activations,
            "buckets": highest.buckets + highest.received,
            "temporaries": highest.temporaries,
        }
        return MemoryEstimate(
            ranks=np,
            stage=stage,
            offload=offload,
            **base,
            gradients=reduced,
            activations=max(moment.activations for moment in moments) if self._has_sample else None,
            buckets=max(moment.buckets + moment.received for moment in moments),
            temporaries=max(moment.temporaries for moment in moments),
            offloaded=offloaded,
            peak=sum(at_peak.values()),
            peak_phase=highest.phase,
            at_peak=at_peak,
            recorded_peak=sum(base.values()) + max(moment.recorded for moment in moments),
        )

    def _held(
        self, stage: int, groups: Sequence[Group], weights: WireFormat, offload: str | None
    ) -> tuple[dict[str, int], int]:
        """Bytes that are there all the time, by part, and those that are offloaded."""
        shards = sum(group.shard_numel * group.dtype.itemsize for group in groups)
        whole = sum(group.padded * group.dtype.itemsize for group in groups)
        exact = shards if stage in (1, 2) and weights is not FP32 else 0
        base = {
            "parameters": (
                sum(one.nbytes for one in self._parameters.values())
                if stage == 0
                else shards
                if stage == 3
                else whole + exact
            ),
            "buffers": self._buffers,
            "optimizer_state": sum(
                round(self._memory(group, stage).state * (group.shard_numel if stage else group.numel))
                for group in groups
                if group.requires_grad
            ),
            "master_weights": sum(4 * group.shard_numel for group in groups if stage and group.dtype in HALF),
        }
        offloaded = 0
        if offload:
            parts = ["optimizer_state"]
            if self._place.type != "cuda":  # there, master weights are beside the device's own
                parts.append("master_weights")
            for part in parts:
                offloaded += base[part]
                base[part] = 0
        return base, offloaded

    def _memory(self, group: Group, stage: int) -> OptimizerMemory:
        """Memory of the optimizer for a group; master weights are stepped in float32."""
        dtype = torch.float32 if stage and group.dtype in HALF else group.dtype
        if dtype not in self._taken:
            self._taken[dtype] = OptimizerMemory.measure(self._optimizer, dtype, self._place)
        return self._taken[dtype]

    def _moments(
        self,
        stage: int,
        layout: Layout,
        units: Sequence[Sequence[Group]],
        gradients: WireFormat,
        weights: WireFormat,
    ) -> list[_Moment]:
        """The measured step with what gradients and gathered parameters take at this stage."""
        place = {name: number for number, name in enumerate(self._order)}
        ready = {  # for each group, how many parameters are final once all of its own are
            group.position: 1 + max(place.get(layout.names[index], -1) for index in group.indices)
            for group in layout.groups
            if group.requires_grad
        }
        by_time = sorted((layout.groups[number] for number in ready), key=lambda group: ready[group.position])
        final = [0, *accumulate(self._parameters[name].nbytes for name in self._order)]
        found = []
        for stretch in self._stretches:
            moment = _Moment(stretch.phase, stretch.peak)
            found.append(moment)
            complete = [group for group in by_time if ready[group.position] <= stretch.final]
            waiting = max(final[stretch.final] - sum(group.nbytes for group in complete), 0)
            if layout.ranks == 1 and stage < 2:
                moment.gradients = final[stretch.final]
                continue
            moment.buckets = waiting
            if stage < 2:
                moment.gradients = final[-1]
                # Horovod cannot add bfloat16: complete buckets travel in float32 until all are reduced.
                moment.buckets += sum(2 * group.nbytes for group in complete if group.dtype is torch.bfloat16)
                continue
            _reduce(moment, complete, gradients)
            if stage == 3:
                _gather(moment, units, complete, weights)
            if complete and ready[complete[-1].position] == stretch.final:
                # As the stretch began, its gradients had been copied into a flat buffer and its shard was not there yet.
                last = complete[-1]
                copied = replace(moment, activations=stretch.start, received=0)
                copied.buckets += last.nbytes
                copied.gradients -= last.shard_numel * sum_dtype(last.dtype).itemsize
                found.append(copied)
        return found

    def _step(
        self, stage: int, trained: Sequence[Group], weights: WireFormat, offload: str | None, reduced: int
    ) -> list[_Moment]:
        """The optimizer's step, and the gathers after it."""
        halves = [group for group in trained if stage and group.dtype in HALF]
        converted = sum(4 * group.shard_numel for group in halves) if stage == 1 else 0
        compared = max((3 * group.shard_numel for group in halves), default=0)
        temporaries = 0
        for dtype in {group.dtype for group in trained}:
            of_dtype = [group for group in trained if group.dtype is dtype]
            taken = self._memory(of_dtype[0], stage)
            numel = sum(group.shard_numel if stage else group.numel for group in of_dtype)
            largest = max(
                min(max(group.numels), group.shard_numel) if stage else max(group.numels)
                for group in of_dtype
            )
            here = 0
            if offload:  # one parameter at a time; on CUDA with the state of two
                numel = largest
                here = round(2 * taken.state * numel) if self._place.type == "cuda" else 0
            temporaries = max(temporaries, here + taken.temporaries(numel, largest))
        found = [
            _Moment("step", gradients=reduced, temporaries=compared),
            _Moment("step", gradients=reduced + converted, temporaries=temporaries),
        ]
        if stage in (1, 2) and trained and trained[0].ranks > 1:
            rows = [weights.row_bytes(group.shard_numel, group.dtype) for group in trained]
            sent = [row if weights.changes(group.dtype) else 0 for row, group in zip(rows, trained)]
            received = [trained[0].ranks * row for row in rows]
            found.append(
                _Moment(
                    "gather",
                    gradients=reduced + converted,
                    buckets=_together(sent),
                    received=_together(received),
                )
            )
        return found


def _reduce(moment: _Moment, complete: Sequence[Group], wire: WireFormat) -> None:
    """Adds shards of complete groups, and the groups that are on their way: two, or more while they are small."""
    moment.gradients = sum(group.shard_numel * sum_dtype(group.dtype).itemsize for group in complete)
    flying = 0
    for number, group in enumerate(reversed(complete)):
        flat = group.padded * group.dtype.itemsize
        if number >= IN_FLIGHT and flying + flat > SMALL_BYTES:
            break
        flying += flat
        received = group.ranks * wire.row_bytes(group.shard_numel, group.dtype) if group.ranks > 1 else 0
        moment.buckets += flat + (received if wire.changes(group.dtype) else 0)
        moment.received += received


def _gather(
    moment: _Moment, units: Sequence[Sequence[Group]], complete: Sequence[Group], wire: WireFormat
) -> None:
    """Adds the parameters that stage 3 gathers: the last unit all the time, and of the others one with the next ahead of it;
    in the backward pass the last two whose gradients are not complete."""
    *others, rest = units
    if moment.phase == "backward":
        gone = {group.position for group in complete}
        others = [unit for unit in others if any(group.position not in gone for group in unit)][-2:]
    whole = [sum(group.padded * group.dtype.itemsize for group in unit) for unit in others]
    moment.buckets += sum(group.padded * group.dtype.itemsize for group in rest)
    moment.buckets += max(map(sum, pairwise(whole)), default=sum(whole))
    rows = [
        sum(group.ranks * wire.row_bytes(group.shard_numel, group.dtype) for group in unit if group.ranks > 1)
        for unit in others
    ]
    moment.received += max(rows, default=0)


def _together(sizes: Sequence[int]) -> int:
    """The largest sum of sizes in a row that are in flight at a time."""
    return max((sum(sizes[start : start + IN_FLIGHT]) for start in range(len(sizes))), default=0)


def _check(np: object, shard: object, offload: object, wire: Any) -> tuple[int, WireFormat, WireFormat]:
    """Stage, and formats of gradients and of parameters."""
    if not isinstance(np, int) or isinstance(np, bool) or np < 1:
        raise ValueError(f"np must be a number of ranks from 1, not {np!r}")
    stage = stage_of(shard)
    if offload not in (None, "optimizer"):
        raise ValueError(f"offload must be None or 'optimizer', not {offload!r}")
    if offload and not stage:
        raise ValueError(f"offload={offload!r} needs shard='optimizer' or more")
    gradients, parameters = wire_formats(wire)
    if (stage == 0 and parameters is not FP32) or (stage < 2 and gradients is not FP32):
        raise ValueError(
            f"wire={wire!r}: gradients travel in another format from shard='gradients' on, parameters from 'optimizer' on"
        )
    return stage, gradients, parameters


def _check_model(model: nn.Module, sample: object) -> None:
    parameters = list(model.parameters())
    if not any(parameter.requires_grad for parameter in parameters):
        raise ValueError("the model has no parameter that is trained: unfreeze some")
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ValueError(f"parameter '{name}' has no shape yet: run the model once before")
        if parameter.numel() > 1 and not any(parameter.stride()):
            raise ValueError(
                f"parameter '{name}' is split over ranks already: estimate before DistributedOptimizer, or within its "
                "gathered_parameters()"
            )
    if sample is not None and parameters[0].is_meta:
        raise ValueError(
            "a sample cannot be run on a model on the meta device: leave sample out, or build the model"
        )


def _shape_of(parameter: Tensor) -> Tensor:
    return torch.empty_like(parameter, device="meta", requires_grad=parameter.requires_grad)


def _moved(tensor: Tensor, device: torch.device, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(device, dtype if tensor.is_floating_point() else None)
