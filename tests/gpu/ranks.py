"""Checks of several ranks, on one GPU each, or on one GPU together where Horovod stages through the host."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable

import torch
from gpu.job import CheckJob, Outcome
from gpu.training import (
    SEGMENTS,
    STEPS,
    Training,
    begin,
    digest,
    distributed,
    expect,
    expect_close,
    gpt2_small,
    make_optimizer,
)
from torch import nn
from torch.nn import functional

import hvd_ckpt as hc
from hvd_ckpt.utils.measure import now

REPLICAS = 8
CHUNKS = 2
ROUNDS = 10


def replicas(job: CheckJob) -> Outcome:
    """Logical replicas against a CPU reference; any number of ranks ends in the same bits."""
    training = Training(job)
    if REPLICAS % hc.size():
        return Outcome(
            f"{REPLICAS} replicas need a number of ranks that is a power of two up to {REPLICAS}",
            skipped=True,
        )
    model = training.model()
    optimizer = distributed(model, replicas=REPLICAS)
    for step in range(STEPS):
        optimizer.zero_grad()
        for replica in optimizer.local_replicas():
            with replica:
                # By the number of the replica, not of the rank: so all replicas have the same batches on any
                # number of ranks.
                training.backward(model, step, replica.index)
        optimizer.step()
    state = optimizer.full_model_state_dict(model, all_ranks=True)
    error = training.expect_close(state, REPLICAS, f"{REPLICAS} replicas: the weights")
    return Outcome(f"error {error:.0e} of the CPU reference", {"error": error, "digest": digest(state)})


def batchnorm(job: CheckJob) -> Outcome:
    """``SyncBatchNorm`` over the ranks against plain batch norm of the whole batch on the CPU."""
    device = begin(job)

    def make() -> nn.Module:
        torch.manual_seed(1)
        blocks = [nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.Tanh()) for _ in range(3)]
        return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(8 * 4 * 4, 10))

    def whole_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(step)
        return torch.randn(4 * hc.size(), 8, 10, 10, generator=generator), torch.arange(4 * hc.size()) % 10

    def run(model: nn.Module, optimizer: torch.optim.Optimizer, part: slice, like: torch.Tensor) -> None:
        for step in range(STEPS):
            inputs, targets = whole_batch(step)
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(inputs[part].to(like)), targets[part].to(like.device))
            loss.backward()
            optimizer.step()

    expected, model = make().double(), make()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    run(
        expected,
        torch.optim.SGD(expected.parameters(), lr=0.1),
        slice(None),
        torch.zeros((), dtype=torch.float64),
    )
    hc.SyncBatchNorm.convert(model).to(device)
    optimizer = distributed(model, torch.optim.SGD(model.parameters(), lr=0.1))
    run(model, optimizer, slice(4 * hc.rank(), 4 * hc.rank() + 4), torch.zeros((), device=device))
    error = expect_close(model.state_dict(), expected.state_dict(), before, "weights and statistics")
    return Outcome(f"error {error:.0e} of the whole batch on the CPU", {"error": error})


def divided(job: CheckJob, stages: int, tensor: int) -> Outcome:
    """Training in so many stages and parts of layers (0: one on each rank), against a CPU reference at each ZeRO stage, and in
    the other schedule, each twice for its bits."""
    stages, tensor = stages or job.size, tensor or job.size
    training = Training(job, stages=stages, tensor=tensor)
    replicas = hc.size()

    def train(shard: int, schedule: str) -> dict[str, torch.Tensor]:
        model: nn.Module = training.start().to(training.device)
        if tensor > 1:
            model = hc.tensor_parallel(model)
        if stages > 1:
            model = hc.Pipeline(model, chunks=CHUNKS, schedule=schedule, checkpoint="always")
        elif tensor == 1:
            model = hc.CheckpointSequential(model, segments=SEGMENTS)
        optimizer = distributed(model, shard=shard)
        for step in range(STEPS):
            optimizer.zero_grad()
            if isinstance(model, hc.Pipeline):
                model.accumulate(training.batch(step), training.loss)
            else:
                training.backward(model, step)
            optimizer.step()
        state: dict[str, torch.Tensor] = optimizer.full_model_state_dict(model, all_ranks=True)
        return {name: tensor for name, tensor in state.items() if tensor.device.type != "meta"}

    errors, digests = [], []
    for shard, schedule in [*((shard, "1f1b") for shard in range(4)), (0, "gpipe")][: 4 + (stages > 1)]:
        state, how = train(shard, schedule), f"shard={shard}, {schedule}"
        errors.append(training.expect_close(state, replicas, f"{how}: the weights"))
        digests.append(digest(state))
        expect(
            digest(train(shard, schedule)) == digests[-1], f"{how}: the same run twice ends in different bits"
        )
    same = digests[1:4].count(digests[0])
    text = f"{stages} stages, {tensor} parts, {replicas} replicas: error up to {max(errors):.0e} of the CPU reference"
    return Outcome(
        f"{text}; same bits twice; {same} of ZeRO stages 1 to 3 in the bits of stage 0",
        {"errors": errors, "digests": digests},
    )


def overlap(job: CheckJob) -> Outcome:
    """The part of the communication that runs beside the backward pass."""
    training = Training(job, gpt2_small(job))
    device = training.device

    def median(step: Callable[[int], object]) -> float:
        times = []
        for number in range(ROUNDS):
            hc.barrier()
            begun = now(device)
            step(number)
            times.append(now(device) - begun)
        # The first steps learn the order of gradients and make the buckets. A step ends when the slowest rank's does.
        slowest = torch.tensor(1000 * statistics.median(times[2:]))
        return float(hc.allreduce(slowest, op=hc.Max, name="overlap.milliseconds"))

    alone = training.model()
    plain = make_optimizer(alone)
    gradients = torch.zeros(sum(parameter.numel() for parameter in alone.parameters()), device=device)
    computation = median(lambda step: training.take_steps(alone, plain, [step]))
    communication = median(lambda step: hc.allreduce_(gradients, name="overlap"))
    model = training.model()  # since the ranks' weights differ by now
    reduced = distributed(model)
    together = median(lambda step: training.take_steps(model, reduced, [step]))
    # What both take together is shorter than their sum by the time in which both ran:
    #     computation    [=================]
    #     communication           [===============]
    #     together       [========================]
    #     both run                [========]
    hidden = (computation + communication - together) / communication
    text = (
        f"computation {computation:.1f} ms, communication {communication:.1f} ms, together {together:.1f} ms"
    )
    expect(hidden > 0, f"{text}: nothing overlaps")
    values = {
        "computation": computation,
        "communication": communication,
        "together": together,
        "hidden": hidden,
    }
    return Outcome(f"{text}: {hidden:.0%} is hidden", values)


def repeated_sums(job: CheckJob) -> Outcome:
    """Whether an allreduce of the same values gives the same bits each time; with NVLS, which is off by default, it need not."""
    device = begin(job)
    generator = torch.Generator().manual_seed(hc.rank())
    varying = set()
    for length in (1 << 10, 1 << 16, 1 << 22):
        values = torch.randn(length, generator=generator).to(device)
        sums = {digest({"sum": hc.allreduce(values, op=hc.Sum, name=f"sum.{length}")}) for _ in range(20)}
        if len(sums) > 1:
            varying.add(length)
    text = "20 sums of the same values have the same bits"
    if varying:
        text = f"sums of the same values differ in bits, of {', '.join(map(str, sorted(varying)))} elements"
    expect(not varying or os.environ.get("NCCL_NVLS_ENABLE") == "1", text)
    return Outcome(text, {"repeatable": not varying})
