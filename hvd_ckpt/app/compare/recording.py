"""Which gradients were reduced, how often, and in which order: seen where an engine hands them over.

For Horovod and this library that is the function that enqueues an allreduce: a gradient takes part in it if it lies in the
memory that is handed over. What the ranks then do with it is read from Horovod's own timeline. For PyTorch's DDP it is a
communication hook, and for Apex's the method that reduces a bucket.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from hvd_ckpt.app.compare.runner.engine import Engine

OURS = r"^hvd_ckpt\.\d+\.\d+\."  # in the names of this library's tensors, which count the optimizers of a process
BY_ITSELF = re.compile(OURS + r"(?:single|sparse)\.(\d+)(?:\.values)?$")


class Recording:
    """The reductions of one training run on one rank.

    Attributes:
        names: of the parameters, by their identity.
        most: the most reductions that any parameter's gradient took part in, in one step.
        order: what was reduced, in order; two runs that reduce alike have equal lists.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = dict(parameters)
        self.names = {id(parameter): name for name, parameter in parameters.items()}
        self._counts: Counter[str] = Counter()
        self.most = 0
        self.order: list[str] = []

    def note(self, names: Iterable[str]) -> None:
        """The gradients of these parameters leave together."""
        together = list(names)
        self._counts.update(together)
        self.order.append(" ".join(together))

    def note_memory(self, tensors: Sequence[torch.Tensor], name: str | None) -> None:
        """These tensors leave together; ``name`` is theirs in Horovod."""
        # This library sends a gradient by itself as a copy, whose address is no gradient's, but whose name
        # has the parameter's number. Of a sparse one the values count, and not also their indices.
        number = BY_ITSELF.match(name or "")
        if number:
            self.note([list(self._parameters)[int(number[1])]])
            return
        # A bucket is one tensor with many gradients in it as views, so addresses tell which of them leave.
        spans = [
            (_address(tensor), _address(tensor) + max(tensor.numel() * tensor.element_size(), 1))
            for tensor in tensors
        ]
        inside = [
            parameter_name
            for parameter_name, parameter in self._parameters.items()
            if parameter.grad is not None
            and any(first <= _address(parameter.grad) < last for first, last in spans)
        ]
        if inside:
            self.note(inside)

    def close_step(self) -> None:
        """A step has ended: its gradients are reduced."""
        self.most = max([self.most, *self._counts.values()])
        self._counts.clear()

    def digest(self) -> str:
        """A hash of the order."""
        return hashlib.sha256("\n".join(self.order).encode()).hexdigest()[:16]


def recording_of(
    engine: Engine, recording: Recording, model: Any, folder: Path
) -> AbstractContextManager[None]:
    """The context of a training run whose reductions are recorded; ``model`` is the wrapped one."""
    if engine.reduces_by == "horovod":
        return recording_horovod(recording, engine.rank, folder)
    recorders = {"ddp": recording_ddp, "apex": recording_apex}
    return recorders[engine.reduces_by](recording, model) if engine.reduces_by else nullcontext()


@contextmanager
def recording_horovod(recording: Recording, rank: int, folder: Path) -> Iterator[None]:
    """Record what is handed to Horovod; the order is the one in which rank 0's timeline has it executed."""
    import horovod.torch as hvd
    from horovod.torch import mpi_ops

    def recorded(original: Callable[..., Any]) -> Callable[..., Any]:
        def enqueue(given: Any, output: Any, name: str | None, *rest: Any) -> Any:
            recording.note_memory([given] if isinstance(given, torch.Tensor) else given, name)
            return original(given, output, name, *rest)

        return enqueue

    timeline = folder / "timeline.json"
    names = ("_allreduce_async", "_allgather_async", "_grouped_allreduce_async")
    functions: dict[str, Any] = {name: recorded(getattr(mpi_ops, name)) for name in names}
    if rank == 0:
        timeline.unlink(missing_ok=True)
        hvd.start_timeline(str(timeline))
    with mock.patch.multiple(mpi_ops, **functions):
        yield
    if rank == 0:
        hvd.stop_timeline()
        recording.order = executed(timeline)


def executed(timeline: Path) -> list[str]:
    """The tensors that Horovod's timeline says were reduced or gathered, in the order in which that was done."""
    names: dict[int, str] = {}
    order: list[str] = []
    text = timeline.read_text()  # empty where Horovod has sent nothing, as on one rank
    for event in json.loads(text) if text else ():
        if event.get("name") == "process_name" and "name" in event["args"]:
            kind, _, name = event["args"]["name"].partition(".")
            names[event["pid"]] = f"{kind} {re.sub(OURS, '', name)}"
        elif event.get("ph") == "B" and event.get("name") in ("ALLREDUCE", "ALLGATHER"):
            order.append(names[event["pid"]])
    return order


@contextmanager
def recording_ddp(recording: Recording, model: nn.parallel.DistributedDataParallel) -> Iterator[None]:
    """Record the buckets that PyTorch's DDP reduces, with a hook that reduces as it does without one."""
    from torch.distributed import GradBucket  # type: ignore[attr-defined]
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    def hook(state: object, bucket: Any) -> Any:
        recording.note(recording.names.get(id(parameter), "?") for parameter in bucket.parameters())
        return allreduce_hook(None, bucket)  # type: ignore[arg-type]

    # DDP reads the annotations, and wants the types themselves.
    hook.__annotations__.update({"bucket": GradBucket, "return": torch.futures.Future[torch.Tensor]})
    model.register_comm_hook(None, hook)
    yield


@contextmanager
def recording_apex(recording: Recording, model: Any) -> Iterator[None]:
    """Record the buckets that Apex's DDP reduces."""
    original = model.allreduce_bucket

    def allreduce_bucket(bucket: Sequence[torch.Tensor], *rest: Any, **options: Any) -> Any:
        recording.note_memory(bucket, None)
        return original(bucket, *rest, **options)

    with mock.patch.object(model, "allreduce_bucket", allreduce_bucket):
        yield


def _address(tensor: torch.Tensor) -> int:
    """Where a tensor's values begin."""
    return (tensor._values() if tensor.is_sparse else tensor).data_ptr()
