"""The trace of a step that runs here: what each room hands to Horovod and to the links between processes, and when.

The messages of all rooms pass two places: where
``horovod.torch`` enqueues an operation, and where a link sends and receives.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

from hvd_ckpt.bench.harness.jobs import RankJob
from hvd_ckpt.bench.scale.trace import Kind, Trace

if TYPE_CHECKING:
    import torch
    from torch import nn

MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ('shard="none"', {"shard": "none"}),
    "optimizer": ('shard="optimizer"', {"shard": "optimizer"}),
    "gradients": ('shard="gradients"', {"shard": "gradients"}),
    "parameters": ('shard="parameters"', {"shard": "parameters"}),
    "replicas": ("replicas=", {}),
    "local": ("local SGD", {}),
    "stages": ("stages=", {"stages": 2}),
    "tensor": ("tensor=", {"tensor": 2}),
}
"""Ways of this library to train: the title, and arguments."""
WARM_UP = 3  # steps, in which orders are learned and the first averages made
LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class RecordJob(RankJob):
    """Ranks that train in one way.

    Attributes:
        mode: a name in :data:`MODES`.
        model: arguments of :func:`hvd_ckpt.app.models.gpt.gpt`.
        batch: samples of a rank, of the model's length.
        every: steps between two averages of local SGD.
        steps: that are recorded, and then as many that are timed without a recorder; of local SGD, periods.
    """

    worker = "hvd_ckpt.bench.scale.record:measure"

    mode: str
    model: dict[str, Any]
    batch: int
    every: int
    steps: int = 3


@dataclass
class Recorded:
    """What one rank saw.

    Attributes:
        trace: of the step with the median computation; with local SGD of all steps up to an average.
        start: collectives from the making of the optimizer to the first step.
        seconds: of each timed step.
    """

    trace: Trace
    start: Trace
    seconds: list[float]


class Recorder:
    """Writes a trace while :meth:`recording` is entered."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._numbers: dict[int, int] = {}  # of operations, by Horovod's handle
        self._mark = 0.0

    def _gap(self, until: float) -> None:
        self.trace.compute(until - self._mark)
        self._mark = until

    def launched(self, kind: Kind, nbytes: int, name: str) -> int:
        """An operation is about to be handed over."""
        self._gap(time.perf_counter())
        return self.trace.launch(kind, nbytes, name)

    def waited(self, number: int | None, start: float) -> None:
        """An operation has ended, for which this rank began to wait at ``start``."""
        self._gap(start)
        if number is not None:
            self.trace.wait(number)
        self._mark = time.perf_counter()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Within it everything is recorded that this process sends."""
        from horovod.torch import mpi_ops

        from hvd_ckpt.utils.spans import SpanTimes, recording

        recorder = self

        class Waits(SpanTimes):
            """Takes the beginning of each wait, of which the call below sees the end."""

            start: float | None = None

            def now(self) -> Any:
                Waits.start = super().now()
                return Waits.start

        def enqueued(name: str, kind: Kind) -> Callable[..., Any]:
            original = getattr(mpi_ops, name)

            def enqueue(*arguments: Any) -> Any:
                sent, text = arguments[0], next(given for given in arguments if isinstance(given, str))
                own, nbytes = kind, sent.nbytes
                # Horovod's operation does not say what it is part of; the names that the rooms give it do. A
                # reduce-scatter is an alltoall, and a gather of Python objects is an all-gather of bytes.
                if kind == "alltoall" and ".reduce_scatter." in text:
                    own = "scatter"
                elif kind == "all_gather" and text.endswith(".values") and sent.itemsize == 1:
                    own = "objects"
                elif kind == "all_gather":
                    # This rank hands over its part, and the trace counts what is gathered in all.
                    nbytes *= arguments[3].size()
                number = recorder.launched(own, nbytes, text)
                handle = original(*arguments)
                recorder._numbers[handle] = number
                # The call itself is no computation of the model, so that the next gap begins after it.
                recorder._mark = time.perf_counter()
                return handle

            return enqueue

        synchronize = mpi_ops.synchronize

        def synchronized(handle: int) -> Any:
            # collectives.wait() sleeps within such a span, and comes here when the operation has ended. The
            # wait began with the span.
            waiting = times.innermost == "wait" and Waits.start is not None
            begun: Any = Waits.start if waiting else time.perf_counter()
            result = synchronize(handle)
            recorder.waited(recorder._numbers.pop(handle, None), begun)
            return result

        functions: dict[str, Any] = {
            "_allreduce_async": enqueued("_allreduce_async", "allreduce"),
            "_allgather_async": enqueued("_allgather_async", "all_gather"),
            "_broadcast_async": enqueued("_broadcast_async", "broadcast"),
            "_alltoall_async": enqueued("_alltoall_async", "alltoall"),
            "synchronize": synchronized,
        }
        times = Waits()
        with mock.patch.multiple(mpi_ops, **functions), recording(times), self._on_links():
            self._mark = time.perf_counter()
            yield
            self._gap(time.perf_counter())

    @contextlib.contextmanager
    def _on_links(self) -> Iterator[None]:
        from hvd_ckpt.processes import parts
        from hvd_ckpt.processes.grid import current

        grid, exchange = current(), parts.exchange
        if grid.model_parallel_size == 1:
            yield
            return
        assert grid.link is not None
        receive, wait = grid.link.receive, grid.link.wait
        incoming: dict[int, int] = {}

        def exchanged(sent: Any, rows: Any) -> None:
            number = self.launched("exchange", sent[0].nbytes, "parts")
            # Within it the link has its own functions again: an exchange is one operation of the trace, and
            # not also its messages.
            with mock.patch.multiple(grid.link, receive=receive, wait=wait):
                start = time.perf_counter()
                exchange(sent, rows)
            self.waited(number, start)

        def received(memory: torch.Tensor, source: int, tag: int) -> list[Any]:
            requests: list[Any] = receive(memory, source, tag)
            incoming.update((id(request), memory.nbytes) for request in requests)
            return requests

        def waited(request: Any, awaited: str, other: int) -> None:
            wait(request, awaited, other)
            # A stage waits for the computation of another one: that time stays in the trace, and the message comes after it.
            nbytes = incoming.pop(id(request), 0)
            if nbytes:
                self.waited(self.launched("message", nbytes, "stages"), time.perf_counter())

        links = mock.patch.multiple(grid.link, receive=received, wait=waited)
        with links, mock.patch.object(parts, "exchange", exchanged):
            yield


def measure(job: RecordJob) -> Recorded:
    """The trace of one rank."""
    import torch
    from torch.nn import functional

    import hvd_ckpt as hc
    from hvd_ckpt.app.models.gpt import gpt

    title, arguments = MODES[job.mode]
    grid = {name: arguments[name] for name in ("stages", "tensor") if name in arguments}
    hc.init(**grid)
    torch.manual_seed(0)
    # Stages choose what they recompute, and a weight cannot be split and tied.
    model: Any = gpt(**job.model, tied=not grid, checkpoint_interval=int(job.mode != "stages"))
    shape = (job.batch, job.model["length"])
    inputs, targets = (torch.randint(0, job.model["vocabulary"], shape) for _ in range(2))

    def loss(part: Any) -> torch.Tensor:
        return functional.cross_entropy(model(part[0]).flatten(0, 1), part[1].flatten())

    if job.mode == "stages":
        count = len(model)
        model = hc.Pipeline(model, [count - count // 2, count // 2], chunks=min(4, job.batch))
    elif job.mode == "tensor":
        model = hc.tensor_parallel(model)
    start = Recorder(Trace(title, queue=True))
    with start.recording():
        optimizer = _optimizer(job, model)

    def step() -> None:
        optimizer.zero_grad()
        if job.mode == "stages":
            model.accumulate(
                (inputs, targets),
                lambda output, target: functional.cross_entropy(output.flatten(0, 1), target.flatten()),
            )
        elif job.mode == "replicas":
            for replica in optimizer.local_replicas():
                with replica:
                    loss((inputs, targets)).backward()  # type: ignore[no-untyped-call]
        else:
            loss((inputs, targets)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    count = job.every if job.mode == "local" else 1
    # Local SGD warms up for a whole period, so that the recorded steps begin right after an average and end with one.
    for _ in range(WARM_UP if count == 1 else count):
        step()
    gc.collect()
    # What is there now is not looked through again: a collection during a step would count as computation.
    gc.freeze()
    traces = []
    for _ in range(job.steps):
        recorder = Recorder(Trace(title, **grid, steps=count))
        hc.barrier()
        with recorder.recording():
            for _ in range(count):
                step()
        traces.append(recorder.trace)
    seconds = []
    for _ in range(job.steps):
        hc.barrier()
        begun = time.perf_counter()
        for _ in range(count):
            step()
        seconds.append((time.perf_counter() - begun) / count)
    usual = sorted(traces, key=lambda trace: trace.computing)[len(traces) // 2]
    return Recorded(usual, start.trace, seconds)


def _optimizer(job: RecordJob, model: nn.Module) -> Any:
    """The distributed optimizer of a mode; afterwards all ranks have the same weights."""
    import torch

    import hvd_ckpt as hc

    bare = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    named = list(model.named_parameters())
    if job.mode == "local":
        optimizer: Any = hc.LocalSGD(bare, named_parameters=named, every=job.every)
    else:
        options: dict[str, Any] = {"shard": MODES[job.mode][1].get("shard", "none")}
        if job.mode == "parameters":
            options["model"] = model
        if job.mode == "replicas":
            options |= {"replicas": hc.size(), "model": model}
        optimizer = hc.DistributedOptimizer(bare, named_parameters=named, **options)
    if job.mode != "parameters":
        hc.broadcast_parameters(model.state_dict(), root_rank=0)
    return optimizer
