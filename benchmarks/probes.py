"""Figures of a training beside the seconds of its steps, and their columns.

The third step of a training is examined, with every allocation recorded (:func:`examine`): memory, and hashes of what came of it.
Other figures take further steps: some after that, with a profiler, others at the end of the steps that were timed.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.case import figure
from hvd_ckpt.app.compare.runner.report import Column, in_mib
from hvd_ckpt.app.compare.training import fingerprint
from hvd_ckpt.utils.measure import now
from hvd_ckpt.utils.memory import MARK, Mark, Marks, mapped_files, recording_marks

if TYPE_CHECKING:
    from benchmarks.worker import Training

Figures = dict[str, Any]

SETTLE = 2
"""Steps before the examined one, after which every engine has made the buffers that it keeps."""

STEPS = 5
"""Further steps that are timed in parts."""

ITEM_BYTES = {"float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2, "int": 4, "long int": 8}


class SeenMarks(Marks):
    """Marks that also see what threads free of which the profiler does not know: an address that is allocated again was free.

    What is mapped from files does not count.
    """

    def read(self, results: Any) -> None:
        found: list[tuple[int, Any]] = []  # when, and what was allocated or freed; None at a mark
        pending = list(results.experimental_event_tree())
        while pending:
            event: Any = pending.pop()
            if event.name != "aten::from_file":  # whose memory is a file's
                pending += event.children
            if event.name.startswith(MARK):
                found.append((event.start_time_ns, None))
            elif event.name == "[memory]" and event.extra_fields.device.type == "cpu":
                found.append((event.start_time_ns, event.extra_fields))
        names, live, allocated, peak = iter(self._names), dict[int, int](), 0, 0
        for _, change in sorted(found, key=lambda entry: entry[0]):
            if change is None:
                self.marks.append(Mark(next(names), allocated, peak))
                peak = allocated
                continue
            allocated -= live.pop(change.ptr, 0)
            if change.alloc_size > 0:
                live[change.ptr] = change.alloc_size
                allocated += change.alloc_size
            peak = max(peak, allocated)


def examine(
    build: Callable[[], Training], device: torch.device, columns: Collection[str | Column]
) -> tuple[Training, Figures]:
    """Builds a training and examines its third step; returns it, and

    - ``parameter_bytes``, ``gradient_bytes`` and ``state_bytes`` of the tensors that are held for training;
    - ``peak_bytes`` of PyTorch's allocator since before the model was built, ``step_bytes`` since before the step,
      ``held_bytes`` after it, and ``beyond_bytes``: those beside parameters, buffers and the batch;
    - where the column is asked for, ``hash`` of the loss and the gradients, and ``buffer_hash`` after them.
    """
    gc.collect()
    # Where the peak of a step is all that counts, before memory is recorded, as plans cannot be made meanwhile.
    training = build() if "step_peak" in columns else None
    figures = Figures()
    with recording_marks(device, SeenMarks) as memory:
        training = training or build()
        for _ in range(SETTLE):
            training.step()
        training.prepare()
        gc.collect()
        memory.mark("before")
        loss = training.accumulate()
        held, seen = training.engine.held(training.model, training.optimizer), set[int]()
        for name, tensors in zip(("parameter", "gradient", "state"), held):
            figures[f"{name}_bytes"] = storage_bytes(tensors, seen)
        if "hash" in columns:
            of_step = enumerate([torch.tensor(loss), *held.gradients])
            figures["hash"] = fingerprint((str(number), value) for number, value in of_step)
            figures["buffer_hash"] = fingerprint(training.model.named_buffers())
            del of_step
        del held, tensors  # what the update frees is free
        training.update()
        gc.collect()
        memory.mark("after")
    before, after = memory.marks
    batch = (tensor for part in training.parts for tensor in part)
    whole = [*training.model.parameters(), *training.model.buffers(), *batch]
    figures["peak_bytes"] = after.peak_bytes
    figures["step_bytes"] = after.peak_bytes - before.bytes
    figures["held_bytes"] = after.bytes
    figures["beyond_bytes"] = after.bytes - sum(tensor.nbytes for tensor in whole)
    return training, figures


def sent(training: Training) -> Figures:
    """Bytes that a rank sends in a step."""
    engine, steps = training.engine, training.engine.options.get("every", 1)

    def work() -> None:
        for _ in range(steps):
            training.step()

    if not engine.uses_horovod:
        return {"sent": requested_bytes(work, engine.size) / steps}
    before = _counted(training)
    work()
    total: float = _counted(training) - before
    # An allreduce of all gradients, which nobody counts.
    if engine.reduces_by or engine.options.get("shard") == 1:
        total += steps * 2 * (engine.size - 1) / engine.size * training.model_bytes
    return {"sent": total / steps}


def passes(training: Training) -> Figures:
    """Seconds of the forward pass and of the rest of a step, medians of some more steps."""
    forward, whole, loss = list[float](), list[float](), training.loss

    def timed(*part: Tensor) -> Tensor:
        start = now(training.engine.device)
        found = loss(*part)
        forward.append(now(training.engine.device) - start)
        return found

    training.loss = timed  # type: ignore[method-assign,assignment]
    for _ in range(STEPS):
        whole.append(training.step())
    first = statistics.median(forward)
    return {"forward": first, "backward": statistics.median(whole) - first}


def final_loss(training: Training) -> Figures:
    """The loss of the last step, or where there are held-out samples that of the mean of the ranks' weights on them."""
    batch = training.workload.held_out()
    if batch is None:
        return {"loss": training.losses[-1]}
    parameters = list(training.model.parameters())
    own = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        for parameter, value in zip(parameters, own):
            parameter.copy_(training.engine.mean(value))
        loss = training.loss(*(tensor.to(training.engine.device) for tensor in batch)).item()
        for parameter, value in zip(parameters, own):
            parameter.copy_(value)
    return {"loss": loss}


def all_losses(training: Training) -> Figures:
    """The loss of each step, as the mean over the ranks."""
    # In float64, in which sums of few such losses are exact in any order.
    means = (training.engine.mean(torch.tensor(loss, dtype=torch.float64)) for loss in training.losses)
    return {"losses": [mean.item() for mean in means]}


MEMORY = {
    "parameters": figure("parameters MiB", "parameter_bytes", in_mib()),
    "gradients": figure("gradients MiB", "gradient_bytes", in_mib()),
    "state": figure("state MiB", "state_bytes", in_mib()),
    "beyond": figure("gradients MiB", "beyond_bytes", in_mib()),
    "held": figure("after a step MiB", "held_bytes", in_mib()),
    "peak": figure("peak MiB", "peak_bytes", in_mib()),
    "step_peak": figure("peak MiB", "step_bytes", in_mib()),
}
PROBES: Mapping[str, Column] = {
    **MEMORY,
    "hash": figure("bits", "hash", over=lambda found: found[0][:8]),
    "sent": figure("sent MiB", "sent", in_mib(".2f")),
    "loss": Column(
        "loss", lambda row: statistics.fmean(row.losses) if row.losses else None, ".4f", key="loss"
    ),
    "losses": figure("last loss", "losses", ".6f", over=lambda ranks: ranks[0][-1]),
    "forward": figure("", "forward"),
    "backward": figure("", "backward"),
}
"""The columns that suites choose by name."""
EXAMINED = {*MEMORY, "hash", "sent"}
AFTER_EXAMINED = {"sent": sent}
AFTER_TIMED = {"loss": final_loss, "losses": all_losses, "forward": passes}
"""What measures a column in further steps."""
NOTES = {
    **dict.fromkeys(
        MEMORY,
        "MiB: exact bytes of PyTorch's allocator, on the rank that has most; communication threads' own buffers do not count.",
    ),
    "hash": "bits: of a hash of a step's loss and gradients on rank 0.",
    "sent": "sent: bytes that a rank must send in a step: by this library's own count, for others by the collectives of "
    "torch.distributed that they call, each done in the best way: an allreduce of n ranks sends 2 (n - 1) / n of its bytes, "
    "all others (n - 1) / n.",
    "loss": "loss: mean over ranks after all timed steps.",
}


def storage_bytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    """Bytes of the tensors' storages in memory, each whole and once: those whose addresses are in ``seen`` do not count, nor
    does what lies in mapped files."""
    mapped = mapped_files()
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in seen:
            seen.add(address)
            on_disk = not tensor.is_cuda and any(address in file for file in mapped)
            total += 0 if on_disk else storage.nbytes()
    return total


def _counted(training: Training) -> int:
    """Bytes since the start by the library's own count."""
    if (pipeline := getattr(training.engine, "pipeline", None)) is not None:
        return int(pipeline.sent_bytes)
    traffic = getattr(training.optimizer, "traffic", None)
    return sum(traffic.sent.values()) if traffic is not None else 0


def requested_bytes(work: Callable[[], object], ranks: int) -> float:
    """Bytes that each rank must send on average for the collectives of ``torch.distributed`` that ``work`` calls.

    Gloo does a reduce-scatter as an allreduce; it is counted as the reduce-scatter that was asked for.
    """
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        work()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    part = (ranks - 1) / ranks
    # An event has the shapes of the inputs: of a gather this rank's part, of all others the whole.
    factors = {
        "all_reduce": 2 * part,
        "all_gather": ranks - 1,
        "_all_gather_base": ranks - 1,
        "send": 1,
        "recv": 0,
    }
    total, events = 0.0, profiler.profiler.kineto_results.events()
    over_gloo = not any(event.name().startswith("nccl:") for event in events)
    for event in events:
        carrier, _, name = event.name().partition(":")
        # Gloo's reduce-scatter is followed by an event of the allreduce that does it: together they count as a reduce-scatter.
        if over_gloo and event.name() == "c10d::_reduce_scatter_base_":
            total -= part * _bytes(event.shapes()[1:2], event.dtypes()[1:2])
        elif carrier in ("gloo", "nccl"):
            total += factors.get(name, part) * _bytes(event.shapes(), event.dtypes())
    return total


def _bytes(shapes: Iterable[Iterable[int]], dtypes: Iterable[str]) -> int:
    pairs = zip(shapes, dtypes)
    return sum(torch.Size(shape).numel() * ITEM_BYTES.get(dtype, 4) for shape, dtype in pairs if dtype)
