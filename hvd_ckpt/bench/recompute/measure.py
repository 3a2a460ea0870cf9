"""One workload under measurement: exact peaks, seconds, and whether the result is that of keeping everything.

All contenders of a workload run in one process on the same parameters, inputs and random state, and their timed steps
alternate (A B C, then C B A), because a machine gets slower and faster while it measures: a ratio is taken between
two steps of one round, and what is told is the median over rounds.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from hvd_ckpt.bench.harness.stats import Quartiles, quartiles, ratios
from hvd_ckpt.bench.recompute.chain import Forward, twin
from hvd_ckpt.bench.recompute.workloads import Workload
from hvd_ckpt.install.extras import explain_import_error
from hvd_ckpt.memory import measure_peak

__all__ = ["BITWISE", "Bench", "Entry", "reason", "time_rounds"]

BITWISE = "bitwise"
TOLERANCE = 1e-4  # of the largest gradient: beyond it a result counts as another one
SEED = 0


@dataclass
class Entry:
    """What one contender, or one plan of this library, gave on one workload.

    Attributes:
        name: unique within the workload.
        family: of the contender.
        forward: runs the model, as long as the benchmark lasts.
        peak_bytes: exact peak of one step above its start.
        same: ``bitwise``, or what differs from keeping everything.
        right: whether loss and gradients are those of keeping everything, up to rounding.
        seconds: of its step in each round.
        failure: why it did not run, in one line.
        budget: for a plan, what was asked for.
        predicted_bytes: for a plan, the peak it promised; ``predicted_seconds`` likewise.
    """

    name: str
    family: str
    forward: Forward | None = field(default=None, repr=False)
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
        if not (self.runs and other.runs and self.seconds and other.seconds):
            return None
        return quartiles(ratios(self.seconds, other.seconds))

    def fail(self, error: BaseException) -> None:
        """Notes the failure, and lets the model go."""
        self.failure = reason(error)
        self.forward = None

    def measure(self, bench: Bench, make: Callable[[], Forward]) -> None:
        """Makes the forward function, warms up, measures the peak and compares the result; an error is noted, not raised."""
        try:
            self.forward = make()
            bench.step(self.forward)
            self.peak_bytes, self.same, self.right = bench.examine(self.forward)
        except Exception as error:
            self.fail(error)


def reason(error: BaseException) -> str:
    """An error as one line."""
    if isinstance(error, ModuleNotFoundError) and error.name and "." not in error.name:
        return explain_import_error(error) or f"{error.name} is not installed"
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return line if len(line) <= 160 else line[:157] + "..."


class Bench:
    """A workload's model, batch and loss on a device, and what a step that keeps everything gives.

    Attributes:
        workload: what it is made of.
        device: where it runs.
        model: the original chain; contenders get twins, which share its parameters and buffers.
        inputs: of the model.
    """

    def __init__(self, workload: Workload, device: torch.device) -> None:
        self.workload = workload
        self.device = device
        torch.manual_seed(SEED)
        self.model = workload.model().to(device)
        inputs, target = workload.sample(torch.Generator().manual_seed(SEED))
        self.inputs = inputs.to(device)
        self._target = target.to(device)
        self._parameters = list(self.model.parameters())
        self._buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        self.step(self.model)
        self.refer_to(self.model)

    def refer_to(self, forward: Forward) -> None:
        """Take what this forward function gives as what all others must give."""
        self._loss = self.step(forward)
        self._gradients = [_gradient(parameter).clone() for parameter in self._parameters]
        self._after = [buffer.clone() for buffer, _ in self._buffers]

    def twin(self) -> nn.Sequential:
        """A copy of the model to wrap, on the same parameters."""
        return twin(self.model)

    def loss(self, output: torch.Tensor) -> torch.Tensor:
        """The loss of the batch."""
        return self.workload.loss(output, self._target)

    def step(self, forward: Forward) -> torch.Tensor:
        """One step from the same start: forward pass, loss, backward pass; returns the loss."""
        self._prepare()
        return self._step(forward)

    def examine(self, forward: Forward) -> tuple[int, str, bool]:
        """One step: its exact peak in bytes above its start, what differs from keeping everything, and if that is rounding."""
        self._prepare()
        gc.collect()
        losses: list[torch.Tensor] = []
        memory = measure_peak(lambda: losses.append(self._step(forward)), self.device)
        same, right = self._compare(losses[0])
        return memory.peak_bytes, same, right

    def time(self, forward: Forward) -> float:
        """Seconds of one step."""
        self._prepare()
        gc.collect()
        self._synchronize()
        start = time.perf_counter()
        self._step(forward)
        self._synchronize()
        return time.perf_counter() - start

    def _prepare(self) -> None:
        torch.manual_seed(SEED)
        with torch.no_grad():
            for buffer, start in self._buffers:
                buffer.copy_(start)
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            else:
                parameter.grad.zero_()

    def _step(self, forward: Forward) -> torch.Tensor:
        loss = self.loss(forward(self.inputs))
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _compare(self, loss: torch.Tensor) -> tuple[str, bool]:
        gradients = [_gradient(parameter) for parameter in self._parameters]
        differences = []
        worst = 0.0
        if not torch.equal(loss, self._loss):
            worst = max(worst, _distance([loss], [self._loss]))
            differences.append(f"loss by {_distance([loss], [self._loss]):.0e}")
        if not all(torch.equal(one, other) for one, other in zip(gradients, self._gradients)):
            worst = max(worst, _distance(gradients, self._gradients))
            differences.append(f"gradients by {_distance(gradients, self._gradients):.0e}")
        if not all(torch.equal(buffer, after) for (buffer, _), after in zip(self._buffers, self._after)):
            differences.append("running statistics")
        return ", ".join(differences) or BITWISE, worst <= TOLERANCE

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def time_rounds(
    bench: Bench, entries: list[Entry], rounds: int, listener: Callable[[str], object] = lambda what: None
) -> None:
    """Time all entries that run, in interleaved rounds; ``listener`` hears of each round before it starts."""
    for number in range(rounds):
        listener(f"round {number + 1} of {rounds}")
        for entry in entries if number % 2 == 0 else entries[::-1]:
            if entry.runs and entry.forward is not None:
                try:
                    entry.seconds.append(bench.time(entry.forward))
                except Exception as error:
                    entry.fail(error)


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None, "every parameter takes part in the loss"
    return parameter.grad


def _distance(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """The largest difference, as a part of the largest value."""
    largest = max(float(tensor.abs().max()) for tensor in theirs)
    return max(float((one - other).abs().max()) for one, other in zip(ours, theirs)) / (largest or 1.0)
