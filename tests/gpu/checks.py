"""Checks of one rank; the functions for several ranks are in ``ranks``, and some here serve both."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import statistics
from collections.abc import Callable
from typing import Any

import torch
from gpu.job import CheckJob, Outcome
from gpu.training import (
    MEDIUM,
    State,
    Training,
    begin,
    copied,
    digest,
    distributed,
    expect,
    gpt2_small,
    make_optimizer,
    same_bits,
)
from torch import Tensor, nn

import hvd_ckpt as hc
from hvd_ckpt.app.compare.runner.jobs import join_torch
from hvd_ckpt.app.compare.runner.report import in_mib
from hvd_ckpt.utils.measure import now

ROUNDS = 10
mebibytes = in_mib()


def operations(job: CheckJob) -> Outcome:
    """The five operations of Horovod in three dtypes and sizes, against expected values."""
    device = begin(job)
    rank, size = hc.rank(), hc.size()
    dtypes = (torch.float32, torch.float16, torch.int64)
    lengths = (1, 1000, 1000 if job.tiny else 1 << 22)
    # The sum of 1, 2, ..., size, since each rank brings its number plus one.
    total = size * (size + 1) // 2
    for dtype, length in itertools.product(dtypes, lengths):
        full = functools.partial(torch.full, dtype=dtype, device=device)
        mine, each = full((size * length,), rank + 1), [full((length,), other + 1) for other in range(size)]
        table: dict[str, tuple[Callable[..., Tensor], tuple[Any, ...], Tensor]] = {
            "allreduce": (hc.allreduce, (mine,), full((size * length,), total)),
            "allgather": (hc.allgather, (mine[:length],), torch.cat(each)),
            "broadcast": (hc.broadcast, (mine, size - 1), full((size * length,), size)),
            "reducescatter": (hc.reducescatter, (mine,), full((length,), total)),
            "alltoall": (hc.alltoall, (mine,), torch.cat(each)),
        }
        for name, (operation, arguments, expected) in table.items():
            how = {"op": hc.Sum} if "reduce" in name else {}
            result = operation(*arguments, name=f"{name}.{dtype}.{length}", **how)
            shapes = f"the result has shape {tuple(result.shape)}, not {tuple(expected.shape)}"
            kind = f"{name} of {length} elements of {dtype}"
            expect(result.shape == expected.shape, f"{kind}: {shapes}")
            wrong = int((result != expected).sum())
            expect(wrong == 0, f"{kind}: {wrong} of {expected.numel()} values are wrong")
    return Outcome(f"5 operations, {len(dtypes)} dtypes, up to {lengths[-1]} elements: right values")


def optimizer(job: CheckJob) -> Outcome:
    """``DistributedOptimizer`` against a CPU reference, the same run twice, and within a side stream."""
    training = Training(job)
    device, first = training.device, training.train()
    error = training.expect_close(first, hc.size(), "DistributedOptimizer: the weights")
    expect(same_bits(first, training.train()), "the same run twice ends in different bits")
    if device.type == "cuda":
        stream: Any = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        # All kernels of this run are on the side stream, where a communication that waits for the default one is a race.
        with torch.cuda.stream(stream):
            beside = training.train()
        expect(same_bits(first, beside), "the run within a side stream ends in other bits")
    streams = "twice and in a side stream" if device.type == "cuda" else "twice"
    return Outcome(
        f"error {error:.0e} of the CPU reference; same bits {streams}",
        {"error": error, "digest": digest(first)},
    )


def snapshot(job: CheckJob) -> Outcome:
    """A snapshot that is copied during a backward pass, and a run that resumes from it, bit for bit."""
    training = Training(job, None if job.tiny else {**MEDIUM, "width": 1024, "layers": 12})
    folder = job.folder / "run"
    model = training.model()
    optimizer = distributed(model)
    with hc.Snapshots(folder, model=model, optimizer=optimizer) as snapshots:
        expect(snapshots.resume() == 0, "a new folder has a snapshot")
        training.take_steps(model, optimizer, range(2))
        saved = copied(model)
        snapshots.save(2)
        training.take_steps(model, optimizer, range(2, 4))
        snapshots.wait()
    ended = copied(model)
    model = training.model(seed=2)
    optimizer = distributed(model)
    with hc.Snapshots(folder, model=model, optimizer=optimizer) as snapshots:
        expect(snapshots.resume() == 2, "the snapshot of step 2 is not found")
        expect(
            same_bits(saved, copied(model)), "the snapshot has other bits than the weights when it was saved"
        )
        training.take_steps(model, optimizer, range(2, 4))
    expect(same_bits(ended, copied(model)), "the resumed run ends in other bits")
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return Outcome(f"{mebibytes(size)} MiB; resumed in the same bits", {"bytes": size})


def offload(job: CheckJob) -> Outcome:
    """Adam's state of 1 GB in host memory: the bits of a run without offload, and the memory that it saves."""
    device = begin(job)
    width, layers = (64, 8) if job.tiny else (2048, 32)
    # Adam keeps two values for each weight.
    state_bytes = 2 * layers * width * width * torch.float32.itemsize
    ended: list[State] = []

    def run(where: str | None) -> None:
        torch.manual_seed(1)
        model = nn.Sequential(*(nn.Linear(width, width, bias=False, device=device) for _ in range(layers)))
        optimizer = distributed(
            model,
            shard=hc.Shard(
                "optimizer",
                offload=where,
                offload_folder=job.folder if where and device.type == "cpu" else None,
            ),
        )
        for step in range(3):
            inputs = torch.randn(4, width, generator=torch.Generator().manual_seed(step)).to(device)
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
        ended.append(copied(model))

    kept, offloaded = (
        hc.measure_peak(functools.partial(run, where), device).peak_bytes for where in (None, "optimizer")
    )
    expect(same_bits(*ended), "a run with offload ends in other bits")
    saved = (kept - offloaded) / state_bytes
    text = f"state {mebibytes(state_bytes)} MiB; peak {mebibytes(kept)} MiB, with offload {mebibytes(offloaded)} MiB"
    # On the CPU the state is in memory-mapped files, which count as allocated.
    expect(device.type == "cpu" or saved >= 0.5, f"{text}: offload saves {saved:.0%} of the state")
    return Outcome(f"{text}; same bits", {"state": state_bytes, "peak": kept, "offloaded_peak": offloaded})


def planner(job: CheckJob) -> Outcome:
    """A plan for half the memory: predicted against measured peak, and gradients with and without it."""
    training = Training(job, gpt2_small(job))
    model = training.start().to(training.device)
    inputs, targets = training.batch(0)

    def backward() -> None:
        training.backward(model, 0)

    def gradients() -> State:
        model.zero_grad()
        backward()
        return {
            name: parameter.grad.cpu().clone()
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }

    kept = gradients()
    peak = hc.measure_peak(backward, training.device).peak_bytes
    budget = "0.8x" if job.tiny else "0.5x"
    plan = functools.partial(hc.plan, model, inputs, loss=lambda output: training.loss(output, targets))
    # A head that is computed in chunks adds its losses up in another order, so gradients would be equal to rounding only.
    exact, half = plan(budget="min", chunk_head=False), plan(budget=budget)
    exact.apply(model)
    expect(same_bits(kept, gradients()), "gradients with a plan have other bits than without")
    half.apply(model)
    gradients()
    measured = hc.measure_peak(backward, training.device).peak_bytes
    predicted = half.predicted.peak_bytes if half.predicted is not None else 0
    text = (
        f"without a plan {mebibytes(peak)} MiB; at {budget} predicted {mebibytes(predicted)}, measured {mebibytes(measured)} MiB; "
        "same bits without a chunked head"
    )
    expect(
        half.budget is None or measured <= 1.02 * half.budget,
        f"{text}; the budget is {mebibytes(half.budget)} MiB",
    )
    return Outcome(text, {"peak": peak, "predicted": predicted, "measured": measured, "budget": half.budget})


def overflow(job: CheckJob) -> Outcome:
    """Training in fp16 with an overflow in the second of three steps: that step alone is skipped, and the scale halves."""
    training = Training(job)
    model = training.model()
    optimizer = distributed(model)
    precision = hc.Precision("fp16", training.device.type, init_scale=2.0**10)
    assert precision.scaler is not None
    scales, states = [precision.scaler.get_scale()], [copied(model)]
    for step in range(3):
        inputs, targets = training.batch(step)
        optimizer.zero_grad()
        with precision.autocast():
            loss = training.loss(model(inputs), targets)
        # On one rank alone: all must skip the step, and halve the scale.
        precision.backward(loss * float("inf") if step == 1 and hc.rank() == 0 else loss, optimizer)
        precision.step(optimizer)
        scales.append(precision.scaler.get_scale())
        states.append(copied(model))
    moved = [not same_bits(state, other) for state, other in itertools.pairwise(states)]
    expect(
        moved == [True, False, True],
        f"the steps that changed weights are {moved}, not the first and the last",
    )
    expect(scales[2] == scales[0] / 2, f"the loss scale went {scales}, so the overflow did not halve it")
    return Outcome(
        f"the overflow skips its step; scales {', '.join(f'{scale:g}' for scale in scales)}",
        {"scales": scales},
    )


def sanitized(job: CheckJob) -> Outcome:
    """Operations, optimizer, a snapshot and offload under ``TORCH_CUDA_SANITIZER``, which raises for a race of streams."""
    for check in (operations, optimizer, snapshot, offload):
        folder = job.folder / check.__name__
        folder.mkdir(exist_ok=True)
        check(dataclasses.replace(job, folder=folder, tiny=True))
    return Outcome("no race of streams in operations, optimizer, snapshot and offload")


def ddp(job: CheckJob) -> Outcome:
    """Time and weights of ``DistributedOptimizer`` and PyTorch's DDP, in alternating rounds."""
    training = Training(job, gpt2_small(job))
    join_torch(job.folder, training.device)
    ours = training.model()
    theirs: Any = nn.parallel.DistributedDataParallel(training.model())
    engines = {"hvd_ckpt": (ours, distributed(ours)), "DDP": (theirs, make_optimizer(theirs))}
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for step in range(ROUNDS):
        for name, (model, optimizer) in engines.items():
            begun = now(training.device)
            training.take_steps(model, optimizer, [step])
            seconds[name].append(now(training.device) - begun)
    torch.distributed.destroy_process_group()
    # The first steps learn the order of gradients and fill caches.
    median = {name: 1000 * statistics.median(times[2:]) for name, times in seconds.items()}
    same = same_bits(ours.state_dict(), theirs.module.state_dict())
    worst = max(
        float((own - other).abs().max()) for own, other in zip(ours.parameters(), theirs.parameters())
    )
    expect(worst <= 1e-4, f"weights of the two differ by {worst:.1e}")
    text = f"step {median['hvd_ckpt']:.1f} ms, DDP {median['DDP']:.1f} ms; {'same bits' if same else f'weights within {worst:.0e}'}"
    return Outcome(text, {"milliseconds": median, "same_bits": same})
