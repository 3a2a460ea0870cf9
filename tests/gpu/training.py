"""The job of one check, and a small model that checks train on a device, beside the same training on the CPU in float64."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

import hvd_ckpt as hc
from benchmarks.workloads import workload
from hvd_ckpt.app.compare.runner.jobs import RankJob, own_device
from hvd_ckpt.app.compare.training import fingerprint
from hvd_ckpt.processes.devices import use_deterministic_kernels

STEPS = 5
SEGMENTS = 2
TOLERANCE = 1e-3
"""The largest error of float32 training, as a part of the distance that the weights have moved."""

Sizes = dict[str, Any]
"""Those of the benchmarks' workload ``gpt``, which learns the next of random tokens, where they are not its defaults."""
GPT2_SMALL: Sizes = {"batch": 8, "length": 1024, "width": 768, "heads": 12, "vocabulary": 50257}
MEDIUM: Sizes = {"batch": 8, "length": 128, "layers": 4}
TINY: Sizes = {**MEDIUM, "batch": 2, "length": 16, "width": 32, "heads": 2}

State = dict[str, Tensor]


@dataclass(frozen=True)
class CheckJob(RankJob):
    """The ranks of one check.

    Attributes:
        check: a function of :mod:`gpu.checks`, such as ``"operations"``, and numbers that it takes: ``"divided:2,1"``.
        device: ``"cuda"`` or ``"cpu"``, with small sizes, for a dry run.
    """

    worker = "gpu.training:run_check"

    check: str
    device: str
    tiny: bool


@dataclass
class Outcome:
    """The outcome of a check that did not fail: one line for the report, and values for programs.

    ``skipped``: the check cannot run here, for the reason in ``text``.
    """

    text: str
    values: dict[str, Any] = field(default_factory=dict)
    skipped: bool = False


def run_check(job: CheckJob) -> Outcome:
    """Calls the function of the check, on each rank."""
    name, _, numbers = job.check.partition(":")
    return getattr(import_module("gpu.checks"), name)(job, *map(int, filter(None, numbers.split(","))))


def begin(job: CheckJob, **options: Any) -> torch.device:
    """Starts Horovod with repeatable kernels, and returns the device of this rank; several ranks may share one GPU."""
    device = own_device(job.device)
    hc.init(**options)
    use_deterministic_kernels()
    # TensorFloat-32 has 10 bits where float32 has 23: the reference could not be met.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    return device


def gpt2_small(job: CheckJob) -> Sizes:
    """Those of GPT-2 small, or of a tiny model in its place."""
    return {**TINY, "length": 32} if job.tiny else GPT2_SMALL


class Training:
    """The training of a GPT on the device of this rank, which has joined the others; ``options`` are those of ``hc.init``."""

    def __init__(self, job: CheckJob, sizes: Sizes | None = None, **options: Any) -> None:
        self.device = begin(job, **options)
        self.workload = workload("gpt", sizes or (TINY if job.tiny else MEDIUM))
        self.loss = self.workload.loss

    def model(self, seed: int = 1) -> nn.Sequential:
        """A model whose blocks are recomputed."""
        torch.manual_seed(seed)
        return hc.CheckpointSequential(self.workload.model(), segments=SEGMENTS).to(self.device)

    def start(self) -> nn.Sequential:
        """The model before training, on the CPU and without recomputation."""
        torch.manual_seed(1)
        return self.workload.model()

    def batch(self, step: int, rank: int | None = None) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a rank in one step, by default of this one."""
        inputs, targets = self.workload.draw(1000 * step + (hc.rank() if rank is None else rank), 0)
        return inputs.to(self.device, non_blocking=True), targets.to(self.device, non_blocking=True)

    def backward(self, model: nn.Module, step: int, rank: int | None = None) -> None:
        """The forward and backward pass of a batch."""
        inputs, targets = self.batch(step, rank)
        self.loss(model(inputs), targets).backward()

    def take_steps(self, model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
        """Trains on this rank's batches of these steps."""
        for step in steps:
            optimizer.zero_grad()
            self.backward(model, step)
            optimizer.step()

    def expect_close(self, found: Mapping[str, Tensor], expected: State, what: str) -> float:
        """Fails unless a state equals to rounding what training should reach; returns the error."""
        return expect_close(found, expected, self.start().state_dict(), what)

    def reference(self, ranks: int) -> State:
        """The weights that training over so many ranks should reach: one process on the CPU, in float64, without this library."""
        model = self.start().double()
        optimizer = make_optimizer(model)
        for step in range(STEPS):
            optimizer.zero_grad()
            for rank in range(ranks):
                inputs, targets = self.workload.draw(1000 * step + rank, 0)
                (self.loss(model(inputs), targets) / ranks).backward()
            optimizer.step()
        return model.state_dict()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Adam, whose eps keeps rounding errors of vanishing gradients from growing."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)


def distributed(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, /, **options: Any) -> Any:
    """An optimizer over all ranks, by default of :func:`make_optimizer`."""
    return hc.DistributedOptimizer(
        optimizer or make_optimizer(model), named_parameters=model.named_parameters(), model=model, **options
    )


def expect_close(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], before: Mapping[str, Tensor], what: str
) -> float:
    """Fails if two states differ by more than rounding; returns their distance as a part of that which ``expected`` has moved."""
    names = [name for name, tensor in found.items() if tensor.is_floating_point()]

    def distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
        squares = [(one[name].cpu().double() - other[name].cpu().double()).square().sum() for name in names]
        return float(torch.stack(squares).sum().sqrt())

    error = distance(found, expected) / distance(expected, before)
    assert error <= TOLERANCE, f"{what} differ from those of the CPU reference by {error:.1e} of their way"
    return error


def digest(state: Mapping[str, Tensor]) -> str:
    """A hash of the bits of a state."""
    return fingerprint(sorted(state.items()))[:12]


def same_bits(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether two states have the same bits."""
    return digest(one) == digest(other)


def copied(model: nn.Module) -> State:
    """Copies of the weights on the CPU."""
    return {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
