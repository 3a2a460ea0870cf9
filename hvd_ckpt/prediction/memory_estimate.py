"""The result of :func:`~hvd_ckpt.prediction.memory.estimate_memory`, and the additional memory of local SGD."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hvd_ckpt.collectives.formats import FP32, sum_dtype, wire_format
from hvd_ckpt.parallel.local_sgd.schedule import Schedule
from hvd_ckpt.prediction.measured_memory import OptimizerMemory
from hvd_ckpt.sharding.layout import RUN_BYTES
from hvd_ckpt.utils.text import STAGES, show_bytes, unknown

PARTS = (
    "parameters",
    "buffers",
    "gradients",
    "optimizer_state",
    "master_weights",
    "averages",
    "activations",
    "buckets",
    "temporaries",
)
_WHEN = {
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "step": "in the optimizer's step",
    "gather": "as parameters are gathered after the step",
    "average": "as parameters are averaged",
}


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of a training step on the rank that needs most; see :func:`hvd_ckpt.estimate_memory`.

    Attributes:
        ranks: number of ranks.
        stage: stage of sharding, 0 to 3.
        offload: None, ``"optimizer"`` or ``"parameters"``.
        parameters: weights that are held all the time, with the padding of shards: all of them, or (stage 3) this rank's shard. 0
            if they are offloaded; gradients are then 0 as well.
        buffers: buffers of the model, such as running statistics.
        gradients: gradients after their reduction: whole, or (stages 2 and 3) this rank's shard.
        optimizer_state: optimizer state of this rank's shard; 0 if it is offloaded.
        master_weights: float32 copies of half-precision weights; 0 if they are offloaded.
        activations: peak of forward and backward pass without gradients; None without a sample.
        buckets: peak of communication: gradients that wait for their bucket, buffers in flight, and (stage 3) parameters that are
            gathered for a while.
        temporaries: peak of the temporary memory of the optimizer's step.
        offloaded: bytes in pinned host memory or files.
        peak: peak of all parts together. It is less than the sum of the parts, which do not peak at the same time.
        peak_phase: phase of the peak: ``"forward"``, ``"backward"``, ``"step"``, ``"gather"`` (of updated parameters), or
            ``"average"``.
        at_peak: bytes of each part at the peak; the values add up to the peak.
        recorded_peak: peak without the memory that Horovod's own threads allocate (the results of gathers and
            alltoalls until they are copied). :func:`hvd_ckpt.utils.memory.recording_peak` measures this peak on a CPU.
        averages: state of local SGD between averages: the anchor, the exact values and outer optimizer's state of this rank's
            part, and rounding errors of a lossy wire; or an average of the weights.
    """

    ranks: int
    stage: int
    offload: str | None
    parameters: int
    buffers: int
    gradients: int
    optimizer_state: int
    master_weights: int
    activations: int | None
    buckets: int
    temporaries: int
    offloaded: int
    peak: int
    peak_phase: str
    at_peak: dict[str, int] = field(default_factory=dict)
    recorded_peak: int = 0
    averages: int = 0

    @property
    def unrecorded(self) -> int:
        """Bytes of the peak that Horovod's own threads allocate."""
        return self.peak - self.recorded_peak

    @property
    def model_state(self) -> int:
        """Parameters, gradients, optimizer state and master weights together."""
        return self.parameters + self.gradients + self.optimizer_state + self.master_weights

    def table(self) -> str:
        """The parts and the peak as lines of text."""
        split = STAGES[self.stage] if self.stage else "nothing"
        head = f"shard {self.stage} ({split} split), {self.ranks} rank{'s' if self.ranks > 1 else ''}"
        if self.offload:
            head += f", {self.offload} offloaded"
        rows = [("per rank", "at most", "at the peak")]
        for name in PARTS:
            most = getattr(self, name)
            if name == "averages" and not most:
                continue
            shown = "not known" if most is None else show_bytes(most)
            rows.append((name.replace("_", " "), shown, show_bytes(self.at_peak.get(name, 0))))
        if self.offloaded:
            rows.append(("offloaded", show_bytes(self.offloaded), ""))
        rows.append((f"peak, {_WHEN[self.peak_phase]}", "", show_bytes(self.peak)))
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [
            f"{name:<{widths[0]}}  {most:>{widths[1]}}  {then:>{widths[2]}}".rstrip()
            for name, most, then in rows
        ]
        if self.activations is None:
            lines.append("The peak is without activations: no sample batch was given.")
        return "\n".join([head, *lines])

    def __str__(self) -> str:
        return self.table()


@dataclass
class Moment:
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

    @property
    def total(self) -> int:
        return self.recorded + self.received


DEFAULTS = {"every": 100, "fragments": 1, "delay": 0, "within": 1, "outer": None, "wire": "fp32"}


class LocalMemory:
    """Memory of averages of local SGD, by formulas: see :func:`hvd_ckpt.estimate_memory`.

    Args:
        ranks: number of ranks of the job.
        options: arguments of ``LocalSGD``.

    Attributes:
        group: ranks that have the same weights, and share the anchor.

    Raises:
        ValueError: an argument is unknown or out of range.
    """

    def __init__(self, ranks: int, options: Mapping[str, Any]) -> None:
        if not isinstance(options, Mapping):
            raise ValueError(f"local must be a dict of arguments of LocalSGD, not {options!r}")
        for name in options:
            if name not in DEFAULTS:
                raise ValueError(unknown("argument of local", name, sorted(DEFAULTS)))
        given = {**DEFAULTS, **options}
        every, fragments, delay, group = (given[name] for name in ("every", "fragments", "delay", "within"))
        try:
            Schedule(every, fragments, delay)
        except ValueError as error:
            raise ValueError(f"local: {error}") from None
        if type(group) is not int or group < 1 or ranks % group:
            raise ValueError(f"local: within={group!r} does not divide np={ranks}")
        outer, parameter = given["outer"], nn.Parameter(torch.zeros(1, dtype=torch.float32))
        made = outer([parameter]) if callable(outer) else None
        if outer is not None and not isinstance(made, torch.optim.Optimizer):
            raise ValueError(f"local: outer must make an optimizer of parameters, not {outer!r}")
        self.group: int = group
        self._ranks, self._fragments = ranks, fragments
        self._outer, self._wire = outer, wire_format(given["wire"])
        # the part of the model whose averages are under way at a time, while the next steps compute:
        # with every=100, one of 4 fragments leaves every 25 steps. With delay=30 two of them are under way at times.
        self._at_once = min(fragments, -(-delay * fragments // every)) / fragments

    def add_to(
        self,
        moments: list[Moment],
        gradients: int,
        parameters: Collection[torch.Tensor],
        device: torch.device,
    ) -> int:
        """Adds what averages take to the moments of a step within a group, which holds ``gradients`` bytes of them at its end, and
        the moment of an average; returns the bytes held between averages. The outer optimizer is tried out on the device."""
        trained: Counter[torch.dtype] = Counter()
        for parameter in parameters:
            if parameter.requires_grad:
                trained[parameter.dtype] += parameter.numel()
        held = under_way = 0.0
        for dtype, numel in trained.items():
            own, kind = numel / self.group, sum_dtype(dtype)
            lossy = self._ranks > self.group and self._wire.changes(kind)
            wire = self._wire if lossy else FP32
            if self._ranks > self.group or self._outer is not None:
                held += own * kind.itemsize * (2 if lossy else 1)  # the anchor, and what was rounded away
                held += numel / self._ranks * (kind.itemsize + self._state(kind, device))
            if self._ranks > self.group:  # as it left, what is sent, and what has arrived
                under_way += own * kind.itemsize + 2 * wire.row_bytes(round(own), kind)
        part = 1 / self._fragments
        if not self._at_once:  # run after run, two at a time
            whole = sum(dtype.itemsize * numel for dtype, numel in trained.items())
            largest_run = max(RUN_BYTES, max(parameter.nbytes for parameter in parameters))
            part = min(part, 2 * largest_run / whole)
        for moment in moments:
            moment.buckets += round(under_way * self._at_once)
        moments.append(Moment("average", gradients=gradients, buckets=round(under_way * part)))
        return round(held)

    def _state(self, dtype: torch.dtype, device: torch.device) -> float:
        if self._outer is None:
            return 0.0
        made = self._outer([nn.Parameter(torch.zeros(1, dtype=dtype, device=device))])
        return OptimizerMemory.measure(made, dtype, device).state
