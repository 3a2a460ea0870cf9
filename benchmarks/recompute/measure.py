"""One workload under measurement: exact peaks, seconds, and whether the result is that of no recomputation.

All methods run in one process on the same parameters, inputs and random state, and their timed steps alternate (A B C, then
C B A). On several ranks a step ends with the reduction of the gradients and an optimizer step whose learning rate is 0.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hvd_ckpt.app.compare.runner.jobs import reason
from hvd_ckpt.app.compare.runner.stats import Quartiles, alternating, quartiles, quartiles_of_ratios
from hvd_ckpt.app.compare.runner.workloads import RandomBatch
from hvd_ckpt.utils.measure import now
from hvd_ckpt.utils.memory import measure_peak

Forward = Callable[[torch.Tensor], torch.Tensor]
"""Inputs to output."""

BITWISE = "bitwise"
TOLERANCE = 1e-4  # of the largest gradient; beyond it a result is wrong
SEED = 0
PROBE = 8  # samples of the small batches that tell what a large one will take


@dataclass
class Entry:
    """The result of one method, or of one plan of this library, on one workload.

    Attributes:
        name: unique within the workload.
        family: of the method.
        peak_bytes: exact peak of one step above its start; on several ranks that of the rank that needs most.
        same: ``bitwise``, or what differs from no recomputation.
        right: whether loss and gradients are those of no recomputation, up to rounding.
        seconds: of its step in each round; on several ranks by the clock of rank 0, which waits for all.
        failure: why it did not run, in one line.
        budget: for a plan, its budget.
        predicted_bytes, predicted_seconds: for a plan, its predicted cost.
    """

    name: str
    family: str
    peak_bytes: int | None = None
    same: str = ""
    right: bool = False
    seconds: list[float] = field(default_factory=list)
    failure: str | None = None
    budget: int | str | None = None
    predicted_bytes: int | None = None
    predicted_seconds: float | None = None

    @property
    def runs(self) -> bool:
        """Whether it has been measured, and has not failed since."""
        return self.failure is None and self.peak_bytes is not None

    def step_seconds(self) -> Quartiles | None:
        """The time of a step over the rounds."""
        return quartiles(self.seconds) if self.runs and self.seconds else None

    def ratio(self, other: Entry) -> Quartiles | None:
        """The time of a step as a ratio to another's of the same round, over the rounds."""
        return quartiles_of_ratios(self.seconds, other.seconds) if self.runs and other.runs else None


def twin(model: nn.Sequential) -> nn.Sequential:
    """A copy of the modules that shares parameters and buffers with the original: wrapping one leaves the other as it was."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


class Bench:
    """A workload's model, batch and loss on a device, and the result of a step without recomputation.

    Args:
        workload: what is trained.
        device: where.
        distributed: whether Horovod's ranks train together, each on a batch of its own.
        autocast: dtype of the autocast that forward pass and loss run under, if any.

    Attributes:
        model: the original chain; methods get twins, which share its parameters and buffers.
        inputs: of the model.
        forwards: for each entry that runs, by name, the function that runs the model.
    """

    def __init__(
        self,
        workload: RandomBatch,
        device: torch.device,
        distributed: bool = False,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.workload, self.device, self.autocast = workload, device, autocast
        self._optimizer: Any = None
        rank = 0
        torch.manual_seed(SEED)
        self.model = workload.model().to(device)
        if distributed:
            import hvd_ckpt as hc

            rank = hc.rank()
            self._optimizer = hc.DistributedOptimizer(
                torch.optim.SGD(self.model.parameters(), lr=0.0),
                named_parameters=self.model.named_parameters(),
            )
        inputs, target = workload.sample(torch.Generator().manual_seed(SEED + rank))
        self.inputs = inputs.to(device)
        self.forwards: dict[str, Forward] = {}
        self._target = target.to(device)
        self._parameters = list(self.model.parameters())
        # Each buffer and its value before the first step: every step of every method begins with these.
        self._buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        # The first step warms up: on several ranks the optimizer learns in it how to reduce. All methods are
        # compared with the second.
        self.step(self.model)
        self._loss = self.step(self.model)
        self._gradients = [_gradient(parameter).clone() for parameter in self._parameters]
        self._after = [buffer.clone() for buffer, _ in self._buffers]

    def loss(self, output: torch.Tensor) -> torch.Tensor:
        """The loss of the batch."""
        return self.workload.loss(output, self._target)

    def step(self, forward: Forward) -> torch.Tensor:
        """One step from the same start: forward pass, loss, backward pass; returns the loss."""
        self._prepare()
        return self._step(forward)

    def measure(self, entry: Entry, make: Callable[[], Forward]) -> None:
        """Make an entry's forward function, warm up, measure the peak and compare the result; an error is noted, not raised."""
        try:
            forward = make()
            self.step(forward)
            entry.peak_bytes, entry.same, entry.right = self.examine(forward)
            self.forwards[entry.name] = forward
        except Exception as error:
            entry.failure = reason(error)

    def examine(self, forward: Forward) -> tuple[int, str, bool]:
        """One step: its exact peak in bytes above its start, what differs from no recomputation, and whether that is rounding."""
        self._prepare()
        gc.collect()
        losses: list[torch.Tensor] = []
        memory = measure_peak(lambda: losses.append(self._step(forward)), self.device)
        same, right = self._compare(losses[0])
        return memory.peak_bytes, same, right

    def time_rounds(
        self, entries: list[Entry], rounds: int, listener: Callable[[str], object] = lambda what: None
    ) -> None:
        """Time all entries that run, in rounds that alternate; ``listener`` hears of each round."""
        for number, entry in alternating(entries, rounds):
            if entry.runs and entry.name in self.forwards:
                listener(f"round {number + 1} of {rounds}")
                try:
                    entry.seconds.append(self._time(self.forwards[entry.name]))
                except Exception as error:
                    entry.failure = reason(error)

    def _time(self, forward: Forward) -> float:
        self._prepare()
        gc.collect()
        if self._optimizer is not None:
            import hvd_ckpt as hc

            hc.barrier()
        start = now(self.device)
        self._step(forward)
        return now(self.device) - start

    def _prepare(self) -> None:
        torch.manual_seed(SEED)
        with torch.no_grad():
            for buffer, start in self._buffers:
                buffer.copy_(start)
        for parameter in self._parameters:
            # Gradients stay and are set to zeros, so that they belong to what a step begins with and not to its peak.
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.zero_()

    def _step(self, forward: Forward) -> torch.Tensor:
        with torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
            loss = self.loss(forward(self.inputs))
        loss.backward()  # type: ignore[no-untyped-call]
        if self._optimizer is not None:
            self._optimizer.step()
        return loss.detach()

    def _compare(self, loss: torch.Tensor) -> tuple[str, bool]:
        gradients = [_gradient(parameter) for parameter in self._parameters]
        differences, worst = [], 0.0
        for what, ours, theirs in (("loss", [loss], [self._loss]), ("gradients", gradients, self._gradients)):
            if not all(torch.equal(our, their) for our, their in zip(ours, theirs)):
                distance = _distance(ours, theirs)
                worst = max(worst, distance) if distance <= TOLERANCE else math.inf
                differences.append(f"{what} by {distance:.0e}")
        if not all(torch.equal(buffer, after) for (buffer, _), after in zip(self._buffers, self._after)):
            differences.append("running statistics")
        return ", ".join(differences) or BITWISE, worst <= TOLERANCE


def predicted_peak(workload: RandomBatch) -> int:
    """The peak of a step without recomputation on the CPU, from two small batches: peaks grow linearly with the batch."""
    peaks = []
    for count in (PROBE // 2, PROBE):
        bench = Bench(dataclasses.replace(workload, batch=count), torch.device("cpu"))
        peaks.append(bench.examine(bench.model)[0])
    return peaks[1] + (peaks[1] - peaks[0]) * (workload.batch - PROBE) // (PROBE - PROBE // 2)


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None, "every parameter takes part in the loss"
    return parameter.grad


def _distance(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """The largest difference, as a part of the largest value."""
    # By torch, whose maximum of nan is nan; that of Python would lose one.
    largest = float(torch.stack([tensor.abs().max() for tensor in theirs]).max())
    farthest = torch.stack([(our - their).abs().max() for our, their in zip(ours, theirs)]).max()
    return float(farthest) / (largest or 1.0)
