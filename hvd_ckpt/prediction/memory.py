"""Estimates of the memory of a training step on any number of ranks, in one process: :func:`estimate_memory`.

Parameters, gradients, optimizer state and master weights are computed from the layout of the sharded optimizer. Activations are
measured in one forward and backward pass on this machine, with the gradients that are final at each peak. A formula for each stage
gives the memory of communication. This is the memory of gradients that wait for their bucket or are in flight, and of the
parameters of two gathered units (stage 3). The reducer is not simulated event by event, so the peak is an estimate, at most about
10 % from the measured peak (``docs/sharding/memory.md``).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from hvd_ckpt.collectives.formats import FP32, WireFormat, sum_dtype
from hvd_ckpt.distributed.precision import AUTOCAST
from hvd_ckpt.distributed.shard import Shard, takes_shard
from hvd_ckpt.planning.plan import Plan, applied
from hvd_ckpt.planning.step import Sample, Step
from hvd_ckpt.prediction.computation import as_part
from hvd_ckpt.prediction.measured_memory import OptimizerMemory, Stretch, make_optimizer, measure_step
from hvd_ckpt.prediction.memory_estimate import LocalMemory, MemoryEstimate, Moment
from hvd_ckpt.processes.devices import device_named
from hvd_ckpt.recompute.calls import map_tensors
from hvd_ckpt.reduction.buckets import MEBIBYTE
from hvd_ckpt.sharding.construction import check_stage
from hvd_ckpt.sharding.in_flight import IN_FLIGHT, SMALL_BYTES
from hvd_ckpt.sharding.layout import Group, Layout
from hvd_ckpt.sharding.sharding import HALF
from hvd_ckpt.sharding.units import find_units
from hvd_ckpt.utils.elementwise import check_elementwise
from hvd_ckpt.utils.rules import check
from hvd_ckpt.utils.text import check_instance
from hvd_ckpt.utils.unmaterialized import check_shapes, is_absent

PRECISIONS = ("fp32", "bf16", "fp16", "bf16-params")


@takes_shard
def estimate_memory(
    model: nn.Module,
    np: int,
    shard: Shard | str | int = "none",
    *,
    plan: Plan | None = None,
    optimizer: str | type[torch.optim.Optimizer] | torch.optim.Optimizer = "adamw",
    precision: str = "fp32",
    sample: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    bucket_cap_mb: float = 25.0,
    device: torch.device | str | None = None,
    local: Mapping[str, Any] | None = None,
    within: int | None = None,
    tensor: int = 1,
) -> MemoryEstimate:
    """Estimates the bytes of a training step on each rank, in one process: model states, activations, buckets, and the peak.

    The estimate is for the second and later steps, with ``zero_grad()`` between steps. It counts the memory that PyTorch and
    Horovod allocate on the device for the step. It does not count data, the libraries themselves, or the reserve of an allocator.
    The model does not change.

    Args:
        model: the model before ``DistributedOptimizer``. Without a sample it may be on the meta device.
        np: number of ranks. Nothing is allocated for them.
        shard, bucket_cap_mb: as for :func:`hvd_ckpt.DistributedOptimizer`.
        plan: a plan that is applied to the model, or None for the model with its own recomputation.
        optimizer: the name of a class of ``torch.optim`` in lower case, or a class, both with default options; or an optimizer of
            the model's parameters, with its own options.
        precision: ``"fp32"`` (the model's own dtypes), ``"bf16"`` or ``"fp16"`` (under autocast), ``"bf16-params"`` (parameters in
            bfloat16; at stages 1 to 3 with float32 master weights).
        sample: a (micro-)batch of a rank: one argument of the model or a tuple of several. Without it activations are not known,
            and are not part of the peak.
        kwargs: keyword arguments of the model.
        loss: loss of the model's output, as for :func:`hvd_ckpt.plan`.
        device: the device on which the step of the sample and the optimizer run; by default that of the model.
        local: arguments of :func:`hvd_ckpt.LocalSGD` that take memory: ``{"every": 100, "outer": hc.Nesterov(), "fragments": 4,
            "delay": 5, "wire": "int8", "within": 8}``. ``within`` is the number of ranks in a group, by default 1. ``shard``
            then applies within a group.
        within: in place of ``within`` of :class:`hvd_ckpt.Shard`, the number of ranks in a group.
        tensor: number of parts into which :func:`hvd_ckpt.tensor_parallel` splits a copy of the model, by its built-in recipe. The
            estimate is that of the first part. ``np`` is then the number of replicas.

    Raises:
        ValueError: an argument is invalid, or the optimizer cannot be split; the message names the reason in one sentence.
    """
    if not isinstance(np, int) or isinstance(np, bool) or np < 1:
        raise ValueError(f"np must be a number of ranks from 1, not {np!r}")
    averages = None if local is None else LocalMemory(np, local)
    how = Shard.of(shard)
    if how.within is not None:
        raise ValueError(
            f"within={how.within!r}: give estimate_memory(within=) the number of ranks in a group"
        )
    check_instance(model, nn.Module, "model must be a torch.nn.Module")
    splits = how.states, how.offload, how.wire
    check_stage(*splits)
    made = isinstance(optimizer, torch.optim.Optimizer)
    check({
        "shard": how.name,
        "model": True,
        "within": within,
        "local": local is not None,
        "local of estimate_memory": local is not None,
        "tensor": tensor if tensor != 1 else None,
        "an optimizer that is made already": made,
    })  # fmt: skip
    if isinstance(tensor, bool) or not isinstance(tensor, int) or tensor < 1:
        raise ValueError(f"tensor must be a number of parts from 1, not {tensor!r}")
    args = sample if isinstance(sample, tuple) else (sample,)
    batch = None if sample is None else Sample(args, dict(kwargs or {}), loss)
    with as_part(model, tensor) as first_part:
        estimator = Estimator(
            first_part,
            optimizer,
            precision,
            plan=plan,
            sample=batch,
            bucket_cap_mb=bucket_cap_mb,
            units=how.units,
            device=device,
        )
    return estimator.estimate(np, *splits, within, local=averages)


class Estimator:
    """Estimates of a step of one rank for any number of ranks; what has to be measured is measured once.

    Takes arguments of :func:`estimate_memory`.

    Args:
        averaged: there is an average of the weights (:class:`hvd_ckpt.AveragedWeights`).

    Raises:
        ValueError: the precision or the size of a bucket is invalid, or the model or the optimizer is not one to train.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: str | type[torch.optim.Optimizer] | torch.optim.Optimizer = "adamw",
        precision: str = "fp32",
        *,
        plan: Plan | None = None,
        sample: Sample | None = None,
        bucket_cap_mb: float = 25.0,
        units: Sequence[Any] | None = None,
        device: torch.device | str | None = None,
        averaged: bool = False,
    ) -> None:
        if precision not in PRECISIONS:
            raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, not {precision!r}")
        if not bucket_cap_mb > 0:
            raise ValueError(f"bucket_cap_mb must be > 0 (MiB), not {bucket_cap_mb}")
        _check_model(model, sample)
        self._optimizer, self._averaged = make_optimizer(optimizer, model), averaged
        self._measured: dict[torch.dtype, OptimizerMemory] = {}
        self._cap_bytes = bucket_cap_mb * MEBIBYTE
        own = next(model.parameters()).device
        place = own if device is None else device_named(str(device))
        # Of parameters and inputs; else their own.
        dtype = torch.bfloat16 if precision == "bf16-params" else None
        with contextlib.nullcontext() if plan is None else applied(model, plan):
            names = {id(parameter): name for name, parameter in model.named_parameters()}
            self._units = [
                [names[id(parameter)] for parameter in unit.parameters] for unit in find_units(model, units)
            ]
            where = own if sample is None else place
            if dtype is not None or where != own:
                model = copy.deepcopy(model).to(device=where, dtype=dtype)
            self._parameters = {
                name: torch.empty_like(parameter, device="meta", requires_grad=parameter.requires_grad)
                for name, parameter in model.named_parameters()
            }
            self._buffers = sum(buffer.nbytes for buffer in model.buffers())
            self._has_sample = sample is not None
            if sample is not None:
                moved = map_tensors(lambda tensor: _moved(tensor, place, dtype), Tensor, sample[:2])
                step = Step(model, sample._replace(args=moved[0], kwargs=moved[1]), AUTOCAST.get(precision))
                self._stretches = measure_step(step)
            else:
                trained = (one.nbytes for one in self._parameters.values() if one.requires_grad)
                self._stretches = [Stretch("forward", 0, 0), Stretch("backward", 0, sum(trained))]
        self._place = torch.device("cpu") if place.type == "meta" else place

    def estimate(
        self,
        np: int,
        shard: str | int = "none",
        offload: str | None = None,
        wire: str | Mapping[str, str] = "fp32",
        within: int | None = None,
        activations: int = 0,
        micro_batches: int = 1,
        local: LocalMemory | None = None,
    ) -> MemoryEstimate:
        """The estimate for this number of ranks and this stage.

        Args:
            activations: bytes of them at the peak, of a step that was not measured.
            micro_batches: of a step, whose gradients are sent while the next one runs, where they are in shards.
            local: averages of local SGD, within whose groups ``shard`` applies.

        Raises:
            ValueError: an argument is wrong, or the optimizer cannot be split.
        """
        ranks = np
        if local is not None:
            np, within = local.group, None
        stage, gradients, weights = check_stage(shard, offload, wire)
        if within is not None and (
            type(within) is not int or stage < 3 or not 1 < within <= np or np % within
        ):
            raise ValueError(
                f"within must be a number of ranks from 2 that divides np={np}, with shard='parameters', not {within!r}"
            )
        if stage:
            check_elementwise(self._optimizer, promised=True)
        layout, units = Layout(np), []
        if stage == 3:
            units = [layout.add([(name, self._parameters[name]) for name in unit]) for unit in self._units]
        else:
            layout.add(list(reversed(self._parameters.items())), self._cap_bytes)
        trained = [group for group in layout.groups if group.requires_grad]
        held = self._held(stage, layout.groups, weights, within if within != np else None)
        elsewhere = self._offloaded(offload)
        offloaded = sum(held[part] for part in elsewhere)
        held |= dict.fromkeys(elsewhere, 0)
        reduced = held.pop("gradients")
        moments = self._passes(
            stage, np, trained, units, reduced, gradients, weights, activations, micro_batches
        )
        moments += self._step(stage, trained, weights, offload, reduced)
        if local is not None:
            held["averages"] += local.add_to(moments, reduced, self._parameters.values(), self._place)
        highest = max(moments, key=lambda moment: moment.total)
        at_peak = {
            **held,
            "gradients": highest.gradients,
            "activations": highest.activations,
            "buckets": highest.buckets + highest.received,
            "temporaries": highest.temporaries,
        }
        return MemoryEstimate(
            ranks=ranks,
            stage=stage,
            offload=offload,
            **held,
            gradients=reduced,
            activations=max(moment.activations for moment in moments) if self._has_sample else None,
            buckets=max(moment.buckets + moment.received for moment in moments),
            temporaries=max(moment.temporaries for moment in moments),
            offloaded=offloaded,
            peak=sum(at_peak.values()),
            peak_phase=highest.phase,
            at_peak=at_peak,
            recorded_peak=sum(held.values()) + max(moment.recorded for moment in moments),
        )

    def _held(
        self, stage: int, groups: Sequence[Group], weights: WireFormat, within: int | None
    ) -> dict[str, int]:
        """Bytes that are there all the time, by part, where nothing is offloaded."""
        shards = sum(group.shard_numel * group.dtype.itemsize for group in groups)
        whole = sum(group.padded_bytes for group in groups)
        if stage == 0:
            parameters = sum(parameter.nbytes for parameter in self._parameters.values())
        elif stage < 3:  # beside them the exact values, where the wire rounds
            parameters = whole + (0 if weights is FP32 else shards)
        else:
            parameters = shards + (whole // within if within else 0)
        state = averages = 0
        for group in groups:
            if group.requires_grad:
                own = group.shard_numel if stage else group.numel
                state += round(self._memory(group, stage).state * own)
                averages += sum_dtype(group.dtype).itemsize * own if self._averaged else 0
        return {
            "parameters": parameters,
            "buffers": self._buffers,
            "gradients": sum(
                group.shard_numel * sum_dtype(group.dtype).itemsize if stage >= 2 else group.nbytes
                for group in groups
                if group.requires_grad
            ),
            "optimizer_state": state,
            "master_weights": sum(4 * group.shard_numel for group in groups if stage and group.dtype in HALF),
            "averages": averages,
        }

    def _offloaded(self, offload: str | None) -> list[str]:
        """The parts that are elsewhere."""
        if offload == "parameters":
            return ["optimizer_state", "master_weights", "parameters", "gradients"]
        # On CUDA devices master weights stay beside the weights.
        on_cuda = self._place.type == "cuda"
        return ["optimizer_state", *([] if on_cuda else ["master_weights"])] if offload else []

    def _memory(self, group: Group, stage: int) -> OptimizerMemory:
        """Memory of the optimizer for a group; master weights are stepped in float32."""
        dtype = torch.float32 if stage and group.dtype in HALF else group.dtype
        if dtype not in self._measured:
            self._measured[dtype] = OptimizerMemory.measure(self._optimizer, dtype, self._place)
        return self._measured[dtype]

    def _passes(
        self,
        stage: int,
        ranks: int,
        trained: Sequence[Group],
        units: Sequence[Sequence[Group]],
        reduced: int,
        wire: WireFormat,
        weights: WireFormat,
        activations: int,
        micro_batches: int,
    ) -> list[Moment]:
        """Forward and backward pass: measured activations, and what gradients and gathered parameters take beside them."""
        whole = sum(group.nbytes for group in trained)
        travelling = trained if stage < 3 else [group for unit in units[:-1] for group in unit] or trained
        sizes = [group.padded_bytes for group in travelling]
        # Groups leave from the last one to the first, the rest of stage 3 at the end.
        leaving = [
            group for unit in (*units[-2::-1], *units[-1:]) for group in unit if group.requires_grad
        ] or trained
        ends = list(accumulate(group.nbytes for group in leaving))
        moments: list[Moment] = []
        before = 0
        for stretch in self._stretches:
            final = min(stretch.final, whole)
            moment = Moment(stretch.phase, stretch.activations + activations)
            known = len(moments)
            moments.append(moment)
            if stage < 2 and ranks == 1:
                moment.gradients = final
            elif stage < 2:  # gradients lie in buckets, but for those that wait until theirs is complete
                moment.gradients = whole
                waiting = min(final, max(sizes)) if final < whole else 0
                moment.buckets = waiting
                # Horovod cannot add bfloat16: buckets travel in float32 until all are reduced.
                halves = sum(group.nbytes for group in trained if group.dtype is torch.bfloat16)
                moment.buckets += 2 * (final - waiting) * halves // whole
            else:
                # As in InFlight.make_room(): two groups, or more as long as they are small together.
                on_way = min(final, max(_in_flight(sizes), SMALL_BYTES))
                moment.gradients = final * reduced // whole
                if micro_batches > 1:
                    on_way = min(max(_in_flight(sizes * 2), SMALL_BYTES), micro_batches * sum(sizes))
                    moment.gradients = reduced
                    moment.buckets = max(sizes)  # and what is packed beside them
                moment.buckets += on_way
                if ranks > 1:
                    encoded = on_way * sum(_wire_bytes(group, wire) for group in trained) // whole
                    moment.received = encoded
                    moment.buckets += encoded if any(wire.changes(group.dtype) for group in trained) else 0
                for group, end in zip(leaving, ends):
                    if (
                        before < end <= final
                    ):  # it is packed into a buffer, beside its gradients and another group in flight
                        nbytes = group.padded_bytes
                        others = min(end - group.nbytes, max(max(sizes), SMALL_BYTES - nbytes))
                        arrived = reduced if micro_batches > 1 else (end - group.nbytes) * reduced // whole
                        held = stretch.held + activations
                        moments.append(Moment(stretch.phase, held, arrived, group.nbytes + nbytes + others))
            before = final
            if stage == 3:
                for one in moments[known:]:
                    self._gather(one, units, weights, whole - final)
        return moments

    @staticmethod
    def _gather(moment: Moment, units: Sequence[Sequence[Group]], wire: WireFormat, left: int) -> None:
        """Adds the parameters that stage 3 gathers: the last unit all the time, and one of the others with the next ahead of it;
        in the backward pass no more than those whose gradients are ``left``."""
        *others, rest = [sum(group.padded_bytes for group in unit) for unit in units]
        moment.buckets += rest + min(left, max(map(sum, pairwise(others)), default=sum(others)))
        rows = (sum(_wire_bytes(group, wire) for group in unit if group.ranks > 1) for unit in units[:-1])
        moment.received += min(left, max(rows, default=0))

    def _step(
        self, stage: int, trained: Sequence[Group], weights: WireFormat, offload: str | None, reduced: int
    ) -> list[Moment]:
        """The optimizer's step, and the gathers after it."""
        halves = [group for group in trained if stage and group.dtype in HALF]
        # Masters.follow() makes a rounded copy of 2 bytes for each element, and a bool.
        compared = max((3 * group.shard_numel for group in halves), default=0)
        # Masters are stepped with float32 gradients. Shards of stages 2 and 3 are float32 already; at stage 1
        # pieces get copies.
        gradients = reduced + (sum(4 * group.shard_numel for group in halves) if stage == 1 else 0)
        temporaries = 0
        for dtype in {group.dtype for group in trained}:
            of_dtype = [group for group in trained if group.dtype is dtype]
            memory = self._memory(of_dtype[0], stage)
            own = [group.shard_numel if stage else group.numel for group in of_dtype]
            stepped = max(min(max(group.numels), numel) for group, numel in zip(of_dtype, own))
            each = memory.temporaries
            if offload == "parameters" and self._place.type == "cuda":  # the step is on the CPU
                stepped = 0
            elif offload:  # one parameter at a time; on CUDA with the state of three
                each += 3 * memory.state if self._place.type == "cuda" else 0
            elif memory.at_once:
                stepped = sum(own)
            temporaries = max(temporaries, round(each * stepped))
        moments = [Moment("step", gradients=gradients, temporaries=max(temporaries, compared))]
        if stage in (1, 2) and trained and trained[0].ranks > 1:
            received = _in_flight([_wire_bytes(group, weights) for group in trained])
            encoded = 0 if weights is FP32 else received // trained[0].ranks
            moments.append(Moment("gather", gradients=gradients, buckets=encoded, received=received))
        return moments


def _wire_bytes(group: Group, wire: WireFormat) -> int:
    """Bytes of a group from all ranks in the communication format."""
    return group.ranks * wire.row_bytes(group.shard_numel, group.dtype)


def _in_flight(sizes: Sequence[int]) -> int:
    """The most bytes in flight at a time."""
    return sum(sorted(sizes)[-IN_FLIGHT:])


def _check_model(model: nn.Module, sample: object) -> None:
    parameters = dict(model.named_parameters())
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ValueError("the model has no parameter that is trained: unfreeze some")
    check_shapes(parameters.items())
    for name, parameter in parameters.items():
        if is_absent(parameter):
            raise ValueError(
                f"parameter '{name}' is split over ranks already: estimate before DistributedOptimizer, or within its "
                "gathered_parameters()"
            )
    check(
        {"sample": sample is not None, "a model on the meta device": next(iter(parameters.values())).is_meta}
    )


def _moved(tensor: Tensor, device: torch.device, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(device, dtype if tensor.is_floating_point() else None)
