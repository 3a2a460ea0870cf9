"""What is checked, on one rank or several: one on each GPU, or several that share one."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch
from gpu.training import (
    MEDIUM,
    STEPS,
    CheckJob,
    Outcome,
    State,
    Training,
    begin,
    copied,
    digest,
    distributed,
    expect_close,
    gpt2_small,
    make_optimizer,
    same_bits,
)
from torch import Tensor, nn
from torch.nn import functional

import hvd_ckpt as hc
from hvd_ckpt.app.compare.runner.jobs import join_torch
from hvd_ckpt.app.compare.runner.report import in_mib
from hvd_ckpt.utils.measure import now

REPLICAS = 8
CHUNKS = 2
ROUNDS = 10
mebibytes = in_mib()


def operations(job: CheckJob) -> Outcome:
    """The five operations of Horovod in three dtypes and sizes, against expected values."""
    device = begin(job)
    rank, size = hc.rank(), hc.size()
    dtypes = (torch.float32, torch.float16, torch.int64)
    lengths = (1, 1000, 1000 if job.tiny else 1 << 22)
    total = size * (size + 1) // 2  # 1 + 2 + ... + size, since each rank brings its number plus one
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
            kind = f"{name} of {length} elements of {dtype}"
            assert result.shape == expected.shape, f"{kind}: shape {tuple(result.shape)}"
            wrong = int((result != expected).sum())
            assert wrong == 0, f"{kind}: {wrong} of {expected.numel()} values are wrong"
    return Outcome(f"5 operations, {len(dtypes)} dtypes, up to {lengths[-1]} elements: right values")


def snapshot(job: CheckJob) -> Outcome:
    """A snapshot that is copied during a backward pass, and a run that resumes from it, bit for bit."""
    training = Training(job, None if job.tiny else {**MEDIUM, "width": 1024, "layers": 12})
    folder = job.folder / "run"
    model = training.model()
    optimizer = distributed(model)
    with hc.Snapshots(folder, model=model, optimizer=optimizer) as snapshots:
        assert snapshots.resume() == 0, "a new folder has a snapshot"
        training.take_steps(model, optimizer, range(2))
        saved = copied(model)
        snapshots.save(2)
        training.take_steps(model, optimizer, range(2, 4))
        snapshots.wait()
    ended = copied(model)
    model = training.model(seed=2)
    optimizer = distributed(model)
    with hc.Snapshots(folder, model=model, optimizer=optimizer) as snapshots:
        assert snapshots.resume() == 2, "the snapshot of step 2 is not found"
        assert same_bits(saved, copied(model)), (
            "the snapshot has other bits than the weights when it was saved"
        )
        training.take_steps(model, optimizer, range(2, 4))
    assert same_bits(ended, copied(model)), "the resumed run ends in other bits"
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
        place = job.folder if where and device.type == "cpu" else None
        optimizer = distributed(model, shard=hc.Shard("optimizer", offload=where, offload_folder=place))
        for step in range(3):
            inputs = torch.randn(4, width, generator=torch.Generator().manual_seed(step)).to(device)
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
        ended.append(copied(model))

    kept, offloaded = (
        hc.measure_peak(functools.partial(run, where), device).peak_bytes for where in (None, "optimizer")
    )
    assert same_bits(*ended), "a run with offload ends in other bits"
    saved = (kept - offloaded) / state_bytes
    text = f"state {mebibytes(state_bytes)} MiB; peak {mebibytes(kept)} MiB, with offload {mebibytes(offloaded)} MiB"
    # On the CPU the state is in memory-mapped files, which count as allocated.
    assert device.type == "cpu" or saved >= 0.5, f"{text}: offload saves {saved:.0%} of the state"
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
        named = model.named_parameters()
        return {name: one.grad.cpu().clone() for name, one in named if one.grad is not None}

    kept = gradients()
    peak = hc.measure_peak(backward, training.device).peak_bytes
    budget = "0.8x" if job.tiny else "0.5x"
    plan = functools.partial(hc.plan, model, inputs, loss=lambda output: training.loss(output, targets))
    # A head that is computed in chunks adds its losses up in another order, so gradients would be equal to rounding only.
    exact, half = plan(budget="min", chunk_head=False), plan(budget=budget)
    exact.apply(model)
    assert same_bits(kept, gradients()), "gradients with a plan have other bits than without"
    half.apply(model)
    gradients()
    measured = hc.measure_peak(backward, training.device).peak_bytes
    assert half.predicted is not None and half.budget is not None
    predicted = half.predicted.peak_bytes
    text = f"without a plan {mebibytes(peak)} MiB; at {budget} predicted {mebibytes(predicted)}, measured {mebibytes(measured)} MiB"
    assert measured <= 1.02 * half.budget, f"{text}; the budget is {mebibytes(half.budget)} MiB"
    values = {"peak": peak, "predicted": predicted, "measured": measured, "budget": half.budget}
    return Outcome(f"{text}; same bits without a chunked head", values)


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
    assert moved == [True, False, True], (
        f"the steps that changed weights are {moved}, not the first and the last"
    )
    assert scales[2] == scales[0] / 2, f"the loss scale went {scales}, so the overflow did not halve it"
    told = ", ".join(f"{scale:g}" for scale in scales)
    return Outcome(f"the overflow skips its step; scales {told}", {"scales": scales})


def sanitized(job: CheckJob) -> Outcome:
    """Operations, training, a snapshot and offload under ``TORCH_CUDA_SANITIZER``, which raises for a race of streams."""
    training = functools.partial(divided, stages=1, tensor=1, shards=1)
    for number, check in enumerate((operations, training, snapshot, offload)):
        folder = job.folder / str(number)
        folder.mkdir(exist_ok=True)
        check(dataclasses.replace(job, folder=folder, tiny=True))
    return Outcome("no race of streams in operations, training, a snapshot and offload")


def milliseconds(device: torch.device, works: Mapping[str, Callable[[int], object]]) -> dict[str, float]:
    """The median of each work's steps, in alternating rounds; of several ranks that of the slowest, with which a step ends."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for step in range(ROUNDS):
        for name, work in works.items():
            hc.barrier()
            begun = now(device)
            work(step)
            times[name].append(1000 * (now(device) - begun))
    # The first steps learn the order of gradients, make the buckets and fill caches.
    medians = torch.tensor([statistics.median(each[2:]) for each in times.values()])
    return dict(zip(works, hc.allreduce(medians, op=hc.Max, name="milliseconds").tolist()))


def ddp(job: CheckJob) -> Outcome:
    """Time and weights of ``DistributedOptimizer`` and PyTorch's DDP."""
    training = Training(job, gpt2_small(job))
    join_torch(job.folder, training.device)
    ours = training.model()
    theirs: Any = nn.parallel.DistributedDataParallel(training.model())
    engines = {"hvd_ckpt": (ours, distributed(ours)), "DDP": (theirs, make_optimizer(theirs))}
    works = {name: lambda step, one=one: training.take_steps(*one, [step]) for name, one in engines.items()}
    median = milliseconds(training.device, works)
    torch.distributed.destroy_process_group()
    pairs = zip(ours.parameters(), theirs.parameters())
    worst = max(float((own - other).abs().max()) for own, other in pairs)
    assert worst <= 1e-4, f"weights of the two differ by {worst:.1e}"
    same = same_bits(ours.state_dict(), theirs.module.state_dict())
    weights = "same bits" if same else f"weights within {worst:.0e}"
    text = f"step {median['hvd_ckpt']:.1f} ms, DDP {median['DDP']:.1f} ms; {weights}"
    return Outcome(text, {"milliseconds": median, "same_bits": same})


def replicas(job: CheckJob) -> Outcome:
    """Logical replicas against a CPU reference; any number of ranks ends in the same bits."""
    training = Training(job)
    if REPLICAS % hc.size():
        return Outcome(f"{hc.size()} ranks do not divide {REPLICAS} replicas", skipped=True)
    model = training.model()
    optimizer = distributed(model, replicas=REPLICAS)
    for step in range(STEPS):
        optimizer.zero_grad()
        for replica in optimizer.local_replicas():
            with replica:
                # Its number and not the rank's: so it has the same batches on any number of ranks.
                training.backward(model, step, replica.index)
        optimizer.step()
    state = optimizer.full_model_state_dict(model, all_ranks=True)
    error = training.expect_close(state, training.reference(REPLICAS), "the weights")
    return Outcome(f"error {error:.0e} of the CPU reference", {"error": error, "digest": digest(state)})


def batchnorm(job: CheckJob) -> Outcome:
    """``SyncBatchNorm`` over the ranks against plain batch norm of the whole batch on the CPU."""
    device = begin(job)

    def make() -> nn.Module:
        torch.manual_seed(1)
        blocks = [nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.Tanh()) for _ in range(3)]
        return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(8 * 4 * 4, 10))

    def whole_batch(step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step)
        return torch.randn(4 * hc.size(), 8, 10, 10, generator=generator), torch.arange(4 * hc.size()) % 10

    def run(model: nn.Module, optimizer: torch.optim.Optimizer, part: slice, like: Tensor) -> None:
        for step in range(STEPS):
            inputs, targets = whole_batch(step)
            optimizer.zero_grad()
            scores = model(inputs[part].to(like))
            functional.cross_entropy(scores, targets[part].to(like.device)).backward()
            optimizer.step()

    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    expected, model = make().double(), make()
    before = copied(model)
    run(expected, sgd(expected.parameters()), slice(None), torch.zeros((), dtype=torch.float64))
    hc.SyncBatchNorm.convert(model).to(device)
    optimizer = distributed(model, sgd(model.parameters()))
    run(model, optimizer, slice(4 * hc.rank(), 4 * hc.rank() + 4), torch.zeros((), device=device))
    error = expect_close(model.state_dict(), expected.state_dict(), before, "weights and statistics")
    return Outcome(f"error {error:.0e} of the whole batch on the CPU", {"error": error})


def divided(job: CheckJob, stages: int, tensor: int, shards: int = 4) -> Outcome:
    """Training in so many stages and parts of layers (0: one on each rank), against a CPU reference at each ZeRO stage, and in
    the other schedule; each twice for its bits. Without them, and at stage 0, also within a side stream."""
    stages, tensor = stages or job.size, tensor or job.size
    training = Training(job, stages=stages, tensor=tensor)
    alone, replicas, expected = stages == tensor == 1, hc.size(), training.reference(hc.size())

    def train(shard: int, schedule: str) -> State:
        model: nn.Module = training.model() if alone else training.start().to(training.device)
        if tensor > 1:
            model = hc.tensor_parallel(model)
        if stages > 1:
            model = hc.Pipeline(model, chunks=CHUNKS, schedule=schedule, checkpoint="always")
        optimizer = distributed(model, shard=shard)
        for step in range(STEPS):
            optimizer.zero_grad()
            if isinstance(model, hc.Pipeline):
                model.accumulate(training.batch(step), training.loss)
            else:
                training.backward(model, step)
            optimizer.step()
        state: State = optimizer.full_model_state_dict(model, all_ranks=True)
        now(training.device)
        return {name: tensor for name, tensor in state.items() if tensor.device.type != "meta"}

    errors, digests = [], []
    ways = [(shard, "1f1b") for shard in range(shards)] + [(0, "gpipe")] * (stages > 1)
    for shard, schedule in ways:
        state, how = train(shard, schedule), f"shard={shard}, {schedule}"
        errors.append(training.expect_close(state, expected, f"{how}: the weights"))
        digests.append(digest(state))
        assert digest(train(shard, schedule)) == digests[-1], (
            f"{how}: the same run twice ends in different bits"
        )
        if alone and shard == 0 and training.device.type == "cuda":
            stream: Any = torch.cuda.Stream(training.device)
            stream.wait_stream(torch.cuda.current_stream(training.device))
            # All kernels of this run are on the side stream, where a communication that waits for the default one is a race.
            with torch.cuda.stream(stream):
                beside = train(shard, schedule)
            assert digest(beside) == digests[-1], f"{how}: the run within a side stream ends in other bits"
    same = digests[1:4].count(digests[0])
    text = f"{stages} stages, {tensor} parts, {replicas} replicas: error up to {max(errors):.0e} of the CPU reference"
    text += f"; same bits twice; {same} of ZeRO stages 1 to 3 in the bits of stage 0"
    return Outcome(text, {"errors": errors, "digests": digests})


def overlap(job: CheckJob) -> Outcome:
    """The part of the communication that runs beside the backward pass."""
    training = Training(job, gpt2_small(job))
    alone, model = training.model(), training.model()
    plain, reduced = make_optimizer(alone), distributed(model)
    gradients = torch.zeros(sum(one.numel() for one in alone.parameters()), device=training.device)
    works: dict[str, Callable[[int], object]] = {
        "computation": lambda step: training.take_steps(alone, plain, [step]),
        "communication": lambda step: hc.allreduce_(gradients, name="overlap"),
        "together": lambda step: training.take_steps(model, reduced, [step]),
    }
    median = milliseconds(training.device, works)
    # What both take together is shorter than their sum by the time in which both ran:
    #     computation    [=================]
    #     communication           [===============]
    #     together       [========================]
    #     both run                [========]
    computation, communication, together = median.values()
    hidden = (computation + communication - together) / communication
    text = ", ".join(f"{name} {time:.1f} ms" for name, time in median.items())
    assert hidden > 0, f"{text}: nothing overlaps"
    return Outcome(f"{text}: {hidden:.0%} is hidden", {**median, "hidden": hidden})


def repeated_sums(job: CheckJob) -> Outcome:
    """Whether an allreduce of the same values gives the same bits each time; with NVLS, which is off by default, it need not."""
    device = begin(job)
    generator = torch.Generator().manual_seed(hc.rank())
    varying = []
    for length in (1 << 10, 1 << 16, 1 << 22):
        values = torch.randn(length, generator=generator).to(device)
        sums = {digest({"sum": hc.allreduce(values, op=hc.Sum, name=f"sum.{length}")}) for _ in range(20)}
        varying += [length] * (len(sums) > 1)
    text = "20 sums of the same values have the same bits"
    if varying:
        text = f"sums of the same values differ in bits, of {', '.join(map(str, varying))} elements"
    assert not varying or os.environ.get("NCCL_NVLS_ENABLE") == "1", text
    return Outcome(text, {"repeatable": not varying})
