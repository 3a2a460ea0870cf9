"""Probes: what is measured of a case beside the seconds of its steps. Each is a small object in the rank, and columns of the table.

A probe is told of the examined step of a training, the third one: ``start`` comes before the model is built, ``before_step`` before
the step, ``ready`` when its gradients are there, ``stop`` after it or an error, ``note`` then, which may take further steps. Of a
training that was timed it is told when that has ended: ``finish`` returns figures, without a profiler, since others are timed
after it.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from hvd_ckpt.app.compare.runner.report import Column, in_mib
from hvd_ckpt.app.compare.training import fingerprint
from hvd_ckpt.utils.measure import now
from hvd_ckpt.utils.memory import MARK, Mark, Marks, mapped_files

if TYPE_CHECKING:
    from benchmarks.worker import Training

SETTLE = 2
"""Steps before the examined one, after which every engine has made the buffers that it keeps."""

STEPS = 5
"""Further steps that are timed in parts."""

ITEM_BYTES = {"float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2, "int": 4, "long int": 8}


class Probe:
    """The base of all probes: it measures nothing.

    Attributes:
        columns: by name, as suites choose them.
        examines: a step is examined for it.
        figures: by name; what a rank hands back.
    """

    columns: ClassVar[Mapping[str, Column]] = {}
    notes: ClassVar[str] = ""
    examines: ClassVar[bool] = False

    def __init__(self) -> None:
        self.figures: dict[str, Any] = {}

    def start(self, device: torch.device) -> None: ...
    def before_step(self, training: Training) -> None: ...
    def ready(self, training: Training, loss: float) -> None: ...
    def stop(self) -> None: ...
    def note(self, training: Training) -> None: ...
    def finish(self, training: Training) -> dict[str, Any]:
        return {}


class SeenMarks(Marks):
    """Marks that also see what threads free of which the profiler does not know: an address that is allocated again was free."""

    def _read(self, profiler: profile) -> None:
        assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
        found: list[tuple[int, Any]] = []  # when, and what was allocated or freed; None at a mark
        pending = list(profiler.profiler.kineto_results.experimental_event_tree())
        while pending:
            event: Any = pending.pop()
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


class Memory(Probe):
    """Bytes of PyTorch's allocator since before the model was built, and the tensors that are held for training."""

    examines: ClassVar[bool] = True
    columns: ClassVar[Mapping[str, Column]] = {
        "parameters": Column("parameters MiB", lambda row: row.over("parameter_bytes"), in_mib()),
        "gradients": Column("gradients MiB", lambda row: row.over("gradient_bytes"), in_mib()),
        "state": Column("state MiB", lambda row: row.over("state_bytes"), in_mib()),
        "beyond": Column("gradients MiB", lambda row: row.over("beyond_bytes"), in_mib(), key="beyond_bytes"),
        "peak": Column("peak MiB", lambda row: row.over("peak_bytes"), in_mib(), key="peak_bytes"),
        "step_peak": Column("peak MiB", lambda row: row.over("step_bytes"), in_mib(), key="step_bytes"),
    }
    notes = "MiB: exact bytes of PyTorch's allocator, on the rank that has most; communication threads' own buffers do not count."

    def start(self, device: torch.device) -> None:
        gc.collect()
        self._stack, self._memory = ExitStack(), SeenMarks(device)
        self._stack.enter_context(self._memory.recording())

    def before_step(self, training: Training) -> None:
        gc.collect()
        self._memory.mark("before_step")

    def ready(self, training: Training, loss: float) -> None:
        seen: set[int] = set()
        held = training.engine.held(training.model, training.optimizer)
        for name, tensors in zip(("parameter", "gradient", "state"), held):
            self.figures[f"{name}_bytes"] = storage_bytes(tensors, seen)

    def stop(self) -> None:
        gc.collect()
        self._memory.mark("stop")
        self._stack.close()

    def note(self, training: Training) -> None:
        before, after = self._memory.marks[-2:]
        parts = (tensor for part in training.parts for tensor in part)
        whole = [*training.model.parameters(), *training.model.buffers(), *parts]
        self.figures["peak_bytes"] = after.peak_bytes
        self.figures["step_bytes"] = after.peak_bytes - before.bytes
        self.figures["beyond_bytes"] = after.bytes - sum(tensor.nbytes for tensor in whole)


class Sent(Probe):
    """Bytes that a rank sends in a step, and its calls of collectives."""

    examines: ClassVar[bool] = True
    columns: ClassVar[Mapping[str, Column]] = {
        "sent": Column("sent MiB", lambda row: row.over("sent"), in_mib(".2f"), key="sent"),
        "calls": Column("messages", lambda row: row.over("calls"), ".1f", key="calls"),
    }
    notes = (
        "sent: bytes that a rank must send in a step: by this library's own count, for others by the collectives of "
        "torch.distributed that they call, each done in the best way: an allreduce of n ranks sends 2 (n - 1) / n of its bytes, "
        "all others (n - 1) / n. messages: calls of collectives."
    )

    def note(self, training: Training) -> None:
        engine, steps = training.engine, training.engine.options.get("every", 1)

        def work() -> None:
            for _ in range(steps):
                training.step()

        if not engine.uses_horovod:
            sent, calls = requested_bytes(work, engine.size)
        else:
            before = _counted(training)
            work()
            sent, calls = (now - then for now, then in zip(_counted(training), before))
            # An allreduce of all gradients, which nobody counts.
            if engine.reduces_by or engine.options.get("shard") == 1:
                sent += steps * 2 * (engine.size - 1) / engine.size * training.model_bytes
        self.figures = {"sent": sent / steps, "calls": calls / steps or None}


class Passes(Probe):
    """Seconds of the forward pass and of the rest of a step, medians of some more steps."""

    columns: ClassVar[Mapping[str, Column]] = {
        "forward": Column("", lambda row: row.over("forward"), key="forward"),
        "backward": Column("", lambda row: row.over("backward"), key="backward"),
    }

    def finish(self, training: Training) -> dict[str, Any]:
        forward, whole, loss = list[float](), list[float](), training.loss

        def timed(*part: Tensor) -> Tensor:
            start = now(training.engine.device)
            found = loss(*part)
            forward.append(now(training.engine.device) - start)
            return found

        training.loss = timed  # type: ignore[method-assign,assignment]
        for _ in range(STEPS):
            whole.append(training.timed())
        first = statistics.median(forward)
        return {"forward": first, "backward": statistics.median(whole) - first}


class Loss(Probe):
    """The loss of the last step, and of models with held-out samples the loss of the ranks' mean weights on them."""

    columns: ClassVar[Mapping[str, Column]] = {
        "loss": Column(
            "loss", lambda row: statistics.fmean(row.losses) if row.losses else None, ".4f", key="loss"
        ),
    }
    notes = "loss: mean over ranks after all timed steps."

    def finish(self, training: Training) -> dict[str, Any]:
        return {"loss": training.final_loss()}


class Hash(Probe):
    """Hashes of the loss and the gradients of the examined step, and of the buffers after them."""

    examines: ClassVar[bool] = True
    columns: ClassVar[Mapping[str, Column]] = {
        "hash": Column(
            "bits", lambda row: row.over("hash", lambda found: found[0][:8]), key="hash", left=True
        )
    }
    notes = "bits: of a hash of a step's loss and gradients on rank 0."

    def ready(self, training: Training, loss: float) -> None:
        gradients = training.engine.held(training.model, training.optimizer).gradients
        of_step = {str(number): tensor for number, tensor in enumerate([torch.tensor(loss), *gradients])}
        self.figures["hash"] = fingerprint(of_step.items())
        self.figures["buffer_hash"] = fingerprint(training.model.named_buffers())


PROBES: Mapping[str, type[Probe]] = {
    name: probe for probe in (Hash, Loss, Memory, Passes, Sent) for name in probe.columns
}
"""The probe of each column. What takes further steps comes last."""


def probes_of(columns: Iterable[object]) -> Iterator[type[Probe]]:
    """The probes of these columns, each once."""
    chosen = {PROBES[name] for name in columns if isinstance(name, str)}
    return (probe for probe in dict.fromkeys(PROBES.values()) if probe in chosen)


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


def _counted(training: Training) -> tuple[int, int]:
    """Bytes and calls since the start by the library's own count; of stages it counts bytes alone."""
    if (pipeline := getattr(training.engine, "pipeline", None)) is not None:
        return pipeline.sent_bytes, 0
    traffic = getattr(training.optimizer, "traffic", None)
    return (sum(traffic.sent.values()), sum(traffic.calls.values())) if traffic is not None else (0, 0)


def requested_bytes(work: Callable[[], object], ranks: int) -> tuple[float, int]:
    """Bytes that each rank must send on average for the collectives of ``torch.distributed`` that ``work`` calls; their number.

    Gloo does a reduce-scatter as an allreduce; it is counted as the reduce-scatter that was asked for.
    """
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        work()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    part = (ranks - 1) / ranks
    # An event has the shapes of the inputs: of a gather this rank's part, of all others the whole.
    factors = {"all_reduce": 2 * part, "all_gather": ranks - 1, "_all_gather_base": ranks - 1, "send": 1, "recv": 0}
    total, calls, events = 0.0, 0, profiler.profiler.kineto_results.events()
    over_gloo = not any(event.name().startswith("nccl:") for event in events)
    for event in events:
        carrier, _, name = event.name().partition(":")
        # Gloo's reduce-scatter is followed by an event of the allreduce that does it: together they count as a reduce-scatter.
        if over_gloo and event.name() == "c10d::_reduce_scatter_base_":
            total -= part * _bytes(event.shapes()[1:2], event.dtypes()[1:2])
        elif carrier in ("gloo", "nccl"):
            calls += 1
            total += factors.get(name, part) * _bytes(event.shapes(), event.dtypes())
    return total, calls


def _bytes(shapes: Iterable[Iterable[int]], dtypes: Iterable[str]) -> int:
    pairs = zip(shapes, dtypes)
    return sum(torch.Size(shape).numel() * ITEM_BYTES.get(dtype, 4) for shape, dtype in pairs if dtype)
