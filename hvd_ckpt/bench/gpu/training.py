"""A small model that checks train on a device, beside the same training on the CPU in float64."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import hvd_ckpt as hc
from hvd_ckpt.bench.gpu.job import CheckJob
from hvd_ckpt.bench.harness.jobs import own_device
from hvd_ckpt.bench.harness.workloads import Gpt, workload
from hvd_ckpt.processes.devices import use_deterministic_kernels
from hvd_ckpt.utils.measure import now

STEPS = 5
SEGMENTS = 2
TOLERANCE = 1e-3
"""The largest error of float32 training, as a part of the distance that the weights have moved."""

MEDIUM = Gpt(batch=8, length=128, width=256, heads=8, layers=4)
TINY = dataclasses.replace(MEDIUM, batch=2, length=16, width=32, heads=2)

State = dict[str, Tensor]


class Failed(Exception):
    """A check has failed; the text says why in one line."""


def expect(condition: bool, why: str) -> None:
    """Raises :class:`Failed` unless the condition holds."""
    if not condition:
        raise Failed(why)


def begin(job: CheckJob, **options: Any) -> torch.device:
    """Starts Horovod with repeatable kernels, and returns the device of this rank; several ranks may share one GPU."""
    device = own_device(job.device)
    hc.init(**options)
    use_deterministic_kernels()
    # TensorFloat-32 has 10 bits where float32 has 23: the reference could not be met.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    return device


def sizes_of(job: CheckJob) -> Gpt:
    """The model of most checks."""
    return TINY if job.tiny else MEDIUM


def gpt2_small(job: CheckJob) -> Gpt:
    """GPT-2 small, or a tiny model in its place."""
    chosen = workload("gpt", "quick" if job.tiny else "cuda")
    assert isinstance(chosen, Gpt)
    return chosen if job.tiny else dataclasses.replace(chosen, length=1024)


def make_model(sizes: Gpt, seed: int = 1) -> nn.Sequential:
    """A model whose blocks are recomputed, on the CPU."""
    torch.manual_seed(seed)
    return hc.CheckpointSequential(sizes.model(), segments=SEGMENTS)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Adam, whose eps keeps rounding errors of vanishing gradients from growing."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)


def batch_of(sizes: Gpt, step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one rank in one step, on the CPU."""
    return sizes.sample(torch.Generator().manual_seed(1000 * step + rank))


def take_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, sizes: Gpt, device: torch.device, steps: Iterable[int]
) -> None:
    """Trains on this rank's batches of these steps."""
    for step in steps:
        inputs, targets = (
            tensor.to(device, non_blocking=True) for tensor in batch_of(sizes, step, hc.rank())
        )
        optimizer.zero_grad()
        sizes.loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def train(
    sizes: Gpt, device: torch.device, steps: int = STEPS, options: Mapping[str, Any] | None = None
) -> State:
    """The weights, on the CPU, after training over all ranks.

    Args:
        options: further arguments of ``hvd_ckpt.DistributedOptimizer``.
    """
    model = make_model(sizes).to(device)
    optimizer: Any = hc.DistributedOptimizer(
        make_optimizer(model), named_parameters=model.named_parameters(), **(options or {})
    )
    take_steps(model, optimizer, sizes, device, range(steps))
    state: State = optimizer.full_model_state_dict(model, all_ranks=True)
    # The caller may go on in another stream than this ran in, and reads the weights there.
    now(device)
    return state


@functools.cache
def reference(sizes: Gpt, ranks: int, steps: int = STEPS) -> State:
    """The weights that :func:`train` should reach over so many ranks: one process on the CPU, in float64, without this library."""
    model = start(sizes).double()
    optimizer = make_optimizer(model)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(ranks):
            inputs, targets = batch_of(sizes, step, rank)
            (sizes.loss(model(inputs), targets) / ranks).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model.state_dict()


def start(sizes: Gpt) -> nn.Sequential:
    """The model before training, without recomputation."""
    torch.manual_seed(1)
    return sizes.model()


def error_of(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], before: Mapping[str, Tensor]
) -> float:
    """The distance of two states as a part of the distance that ``expected`` has moved."""
    names = [name for name, tensor in found.items() if tensor.is_floating_point()]

    def distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
        squares = [(one[name].cpu().double() - other[name].cpu().double()).square().sum() for name in names]
        return float(torch.stack(squares).sum().sqrt())

    return distance(found, expected) / distance(expected, before)


def expect_close(found: State, sizes: Gpt, ranks: int, what: str) -> float:
    """Fails unless a state equals that of the reference to rounding; returns the error."""
    error = error_of(found, reference(sizes, ranks), start(sizes).state_dict())
    expect(
        error <= TOLERANCE,
        f"{what}: the weights differ from those of the CPU reference by {error:.1e} of their way",
    )
    return error


def digest(state: Mapping[str, Tensor]) -> str:
    """A hash of the bits of a state."""
    bits = hashlib.sha256()
    for _, tensor in sorted(state.items()):
        bits.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return bits.hexdigest()[:12]


def same_bits(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether two states have the same bits."""
    return digest(one) == digest(other)
