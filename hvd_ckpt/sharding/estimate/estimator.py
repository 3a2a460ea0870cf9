"""What a training step will take on each of any number of ranks, before there is one: :func:`estimate_memory`.

Model states follow from the layout, which is arithmetic. Activations are measured in one forward and backward pass on this machine;
what a stage adds, and when, is then worked out event by event (:mod:`.footprint`). The measured part does not depend on ranks or
stage, so an :class:`Estimator` makes it once.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hvd_ckpt.planning.plan import Plan, applied
from hvd_ckpt.planning.profile import Step
from hvd_ckpt.recompute.calls import map_tensors
from hvd_ckpt.reduction.buckets import MEBIBYTE
from hvd_ckpt.sharding import stage_of
from hvd_ckpt.sharding.estimate.flows import Flow, Reduced, Scattered, walk
from hvd_ckpt.sharding.estimate.gathering import Gathered
from hvd_ckpt.sharding.estimate.optimizers import OptimizerFacts
from hvd_ckpt.sharding.estimate.result import MemoryEstimate
from hvd_ckpt.sharding.estimate.states import ModelStates
from hvd_ckpt.sharding.estimate.trace import bare_trace, trace_step
from hvd_ckpt.sharding.formats import FP32, WireFormat, wire_format
from hvd_ckpt.sharding.layout import Group, Layout, lay_out
from hvd_ckpt.sharding.units import find_units

__all__ = ["PRECISIONS", "Estimator", "estimate_memory"]

PRECISIONS = ("fp32", "bf16", "fp16", "bf16-params")
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_TRAVELLERS = ("gradients", "parameters")

Named = list[tuple[str, Tensor]]


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
        plan: what is recomputed; None: what the model recomputes by itself.
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
        model,
        plan,
        optimizer,
        precision,
        sample=sample,
        kwargs=kwargs,
        loss=loss,
        bucket_cap_mb=bucket_cap_mb,
        units=units,
        device=device,
    )
    return estimator.estimate(np, shard, offload, wire)


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
        *,
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
        self._facts = OptimizerFacts(optimizer, model)
        self._cap_bytes = bucket_cap_mb * MEBIBYTE
        own = next(model.parameters()).device
        place = own if device is None else torch.device(device)
        dtype = torch.bfloat16 if precision == "bf16-params" else None
        with _converted(model, place, dtype, plan) as measured:
            self._named: Named = [(name, _shape_of(one)) for name, one in measured.named_parameters()]
            self._buffers = sum(buffer.nbytes for buffer in measured.buffers())
            self._units, modules = _named_units(measured, _names_of(model, units))
            if sample is None:
                numbers = {name: number for number, (name, _) in enumerate(self._named)}
                members = [[numbers[name] for name in names] for names in self._units]
                self._trace = bare_trace([parameter for _, parameter in self._named], members)
            else:
                arguments = (sample if isinstance(sample, tuple) else (sample,), dict(kwargs or {}))
                args, named_args = map_tensors(lambda one: _moved(one, place, dtype), Tensor, arguments)
                step = Step(measured, args, named_args, loss, _AUTOCAST.get(precision))
                self._trace = trace_step(step, modules)
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
            self._facts.check_elementwise()
        layout, units = self._lay_out(np, stage)
        flow = walk(self._trace, self._flow(np, stage, layout, units, gradients, weights))
        states = ModelStates(
            self._named, layout, stage, self._facts, self._place, weights, offload is not None
        )
        flow.step(states.compared, states.temporaries, states.gradient_copies, states.sent, states.received)
        highest = flow.highest
        base = {
            "parameters": states.parameters,
            "buffers": self._buffers,
            "optimizer_state": states.optimizer_state,
            "master_weights": states.master_weights,
        }
        at_peak = {**base, **highest.parts()}
        return MemoryEstimate(
            ranks=np,
            stage=stage,
            offload=offload,
            **base,
            gradients=flow.reduced_gradients,
            activations=flow.most_activations if self._has_sample else None,
            buckets=flow.most_buckets,
            temporaries=flow.most_temporaries,
            offloaded=states.offloaded,
            peak=sum(at_peak.values()),
            peak_phase=highest.phase,
            at_peak=at_peak,
            recorded_peak=sum(base.values()) + flow.recorded,
        )

    def _lay_out(self, ranks: int, stage: int) -> tuple[Layout, list[list[Group]]]:
        if stage < 3:
            return lay_out(self._named, ranks, self._cap_bytes)
        of_name = dict(self._named)
        units = [[(name, of_name[name]) for name in names] for names in self._units]
        return lay_out(self._named, ranks, self._cap_bytes, units)

    def _flow(
        self,
        ranks: int,
        stage: int,
        layout: Layout,
        units: list[list[Group]],
        gradients: WireFormat,
        weights: WireFormat,
    ) -> Flow:
        parameters = [parameter for _, parameter in self._named]
        if stage < 2:
            return Flow(parameters) if ranks == 1 else Reduced(parameters, self._cap_bytes)
        if stage == 2:
            return Scattered(parameters, layout, gradients)
        return Gathered(parameters, layout, gradients, units, weights)


def _check(np: object, shard: object, offload: object, wire: object) -> tuple[int, WireFormat, WireFormat]:
    """Stage, and formats of gradients and of parameters."""
    if not isinstance(np, int) or isinstance(np, bool) or np < 1:
        raise ValueError(f"np must be a number of ranks from 1, not {np!r}")
    stage = stage_of(shard)
    if offload not in (None, "optimizer"):
        raise ValueError(f"offload must be None or 'optimizer', not {offload!r}")
    if offload and not stage:
        raise ValueError(f"offload={offload!r} needs shard='optimizer' or more")
    named: Mapping[Any, Any] = wire if isinstance(wire, Mapping) else dict.fromkeys(_TRAVELLERS, wire)
    for name in named:
        if name not in _TRAVELLERS:
            raise ValueError(f"wire has formats for 'gradients' and 'parameters', not for {name!r}")
    gradients, parameters = (wire_format(named.get(name, "fp32")) for name in _TRAVELLERS)
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


@contextlib.contextmanager
def _converted(
    model: nn.Module, device: torch.device, dtype: torch.dtype | None, plan: Plan | None
) -> Iterator[nn.Module]:
    """The model with the plan applied; a copy if it has to be converted."""
    if dtype is not None or any(parameter.device != device for parameter in model.parameters()):
        model = copy.deepcopy(model).to(device=device, dtype=dtype)
    with contextlib.nullcontext() if plan is None else applied(model, plan):
        yield model


def _shape_of(parameter: Tensor) -> Tensor:
    return torch.empty_like(parameter, device="meta", requires_grad=parameter.requires_grad)


def _moved(tensor: Tensor, device: torch.device, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(device, dtype if tensor.is_floating_point() else None)


def _names_of(model: nn.Module, units: Sequence[Any] | None) -> list[list[str]] | None:
    """Names of the modules of units that were given."""
    if units is None:
        return None
    names = {module: name for name, module in model.named_modules()}
    lists = [list(unit) if isinstance(unit, (list, tuple)) else [unit] for unit in units]
    for module in (module for unit in lists for module in unit):
        if module not in names:
            raise ValueError(f"units: a {type(module).__name__} in it is not a module of the model")
    return [[names[module] for module in unit] for unit in lists]


def _named_units(model: nn.Module, given: list[list[str]] | None) -> tuple[list[list[str]], list[list[str]]]:
    """Names of each unit's parameters, and of its modules."""
    wanted = None if given is None else [[model.get_submodule(name) for name in unit] for unit in given]
    parameters = {id(parameter): name for name, parameter in model.named_parameters()}
    modules = {module: name for name, module in model.named_modules()}
    found = find_units(model, wanted)
    return (
        [[parameters[id(one)] for one in unit.parameters] for unit in found],
        [[modules[module] for module in unit.modules] for unit in found],
    )
