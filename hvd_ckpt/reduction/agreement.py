"""Agreement of ranks before a collective.

An error that is raised on one rank alone leaves the others waiting. Everything here is symmetric: each rank brings what it
has (a value, or an error), all ranks see all of it, and all of them continue or raise together.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch
from horovod.torch import mpi_ops

from hvd_ckpt.grid import current


class FailedElsewhere(ValueError):
    """Another rank has raised an error, and this one raises with it; the message begins with that rank."""

    raised_elsewhere = True  # for hvd_ckpt.uncaught: that rank shows the traceback


@dataclass(frozen=True)
class ParameterFacts:
    """Properties of a parameter that must be equal on every rank; :func:`check_parameters` compares them."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device_type: str
    requires_grad: bool

    @classmethod
    def of(cls, name: str, parameter: torch.Tensor) -> ParameterFacts:
        return cls(
            name,
            tuple(parameter.shape),
            tuple(parameter.stride()),
            parameter.dtype,
            parameter.device.type,
            parameter.requires_grad,
        )


def allgather_objects(value: Any, process_set: Any, name: str) -> list[Any]:
    """Gathers one picklable value of each rank of ``process_set``, in rank order.

    (Horovod's ``allgather_object`` takes no process set.)

    Raises:
        Exception: the value of a rank cannot be pickled; on every rank.
    """
    payload, error = _pickled(value)
    sizes = mpi_ops.allgather(
        torch.tensor([payload.numel()], dtype=torch.int64), name=f"{name}.sizes", process_set=process_set
    ).tolist()
    gathered = mpi_ops.allgather(payload, name=f"{name}.values", process_set=process_set)
    values = [pickle.loads(part.numpy().tobytes()) for part in gathered.split(sizes)]
    raise_first_failure(error, [one.reason if isinstance(one, _Unsendable) else None for one in values])
    return values


def broadcast_from(value: Any, root: int, process_set: Any, name: str) -> Any:
    """Broadcasts a picklable value from the rank ``root`` (a global rank, as in Horovod) of ``process_set``.

    Raises:
        Exception: the value of that rank cannot be pickled; on every rank.
    """
    is_root = mpi_ops.rank() == root
    payload, error = _pickled(value if is_root else None)
    size = torch.tensor([payload.numel() if is_root else 0], dtype=torch.int64)
    size = mpi_ops.broadcast(size, root, name=f"{name}.size", process_set=process_set)
    if not is_root:
        payload = torch.empty(int(size), dtype=torch.uint8)
    payload = mpi_ops.broadcast(payload, root, name=f"{name}.value", process_set=process_set)
    received = value if is_root else pickle.loads(payload.numpy().tobytes())
    if isinstance(received, _Unsendable):
        raise FailedElsewhere(f"rank {root}: {received.reason}")
    if error is not None:
        raise error
    return received


@dataclass(frozen=True)
class _Unsendable:
    """Sent in place of a value that cannot be pickled."""

    reason: str


def _pickled(value: Any) -> tuple[torch.Tensor, Exception | None]:
    """The bytes of a value; for one that cannot be pickled those of an :class:`_Unsendable`, and the error."""
    error = None
    try:
        content = cloudpickle.dumps(value)
    except Exception as exception:  # whatever it is, the other ranks must hear of it
        error, content = exception, pickle.dumps(_Unsendable(str(exception)))
    return torch.frombuffer(bytearray(content), dtype=torch.uint8), error


def digest(value: Any) -> str:
    """A short fingerprint of a picklable value, equal on ranks where the value is."""
    return hashlib.sha256(repr(value).encode()).hexdigest()


def raise_together(error: Exception | None, process_set: Any, name: str) -> None:
    """Raises on every rank of ``process_set`` if any rank brings an error: its own there, a FailedElsewhere on the others."""
    failures = allgather_objects(None if error is None else str(error), process_set, name)
    raise_first_failure(error, failures)


def raise_first_failure(error: Exception | None, failures: Sequence[str | None]) -> None:
    if error is not None:
        raise error
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise FailedElsewhere(f"rank {rank}: {failure}")


def of_all_processes(value: Any, name: str) -> list[Any]:
    """A picklable value of each process of the job, of all pipeline stages, in the order of their numbers. Collective."""
    replicas = allgather_objects(value, mpi_ops.global_process_set, name)
    if current().stages == 1:
        return replicas
    return [one for stage in current().gather_objects(replicas) for one in stage]


def of_first_process(value: Any, name: str) -> Any:
    """The first process's value, on all processes of all pipeline stages. Collective."""
    first = broadcast_from(value, 0, mpi_ops.global_process_set, name)
    return first if current().stages == 1 else current().gather_objects(first)[0]


@contextmanager
def errors_on_all(name: str, process_set: Any = None) -> Iterator[None]:
    """An error that one process raises inside is raised on all of them, where it did not happen as a FailedElsewhere. The body must
    not communicate, since a process may leave it early.

    Args:
        process_set: the ranks to raise it on; by default all processes, of all pipeline stages.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    if process_set is None:
        raise_first_failure(error, of_all_processes(None if error is None else str(error), name))
    else:
        raise_together(error, process_set, name)


def check_parameters(tables: Sequence[Sequence[ParameterFacts]]) -> None:
    """Raises ValueError for the first parameter that is not the same on every rank.

    Args:
        tables: one sequence of facts per rank, in rank order, each in that rank's order of parameters.
    """
    reference = tables[0]
    for rank, table in enumerate(tables[1:], start=1):
        for position, (ours, theirs) in enumerate(zip(reference, table)):
            if ours == theirs:
                continue
            for field in ("name", "shape", "dtype", "device_type", "requires_grad", "stride"):
                first, other = getattr(ours, field), getattr(theirs, field)
                if first != other:
                    raise ValueError(
                        f"parameter {position} ('{ours.name}') differs between ranks: {field} is {first} on rank 0 and "
                        f"{other} on rank {rank}; build the same model and the same optimizer on every rank"
                    )
        if len(table) != len(reference):
            longer, at = (reference, 0) if len(reference) > len(table) else (table, rank)
            extra = longer[min(len(table), len(reference))]
            raise ValueError(
                f"rank 0 has {len(reference)} parameters and rank {rank} has {len(table)}: '{extra.name}' is on rank {at} "
                f"only; build the same model and the same optimizer on every rank"
            )
