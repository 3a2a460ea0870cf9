"""Agreement of ranks before a collective.

An error that is raised on one rank alone leaves the others waiting. Everything here is symmetric: each rank contributes
a value or an error, all ranks get all of them, and all continue or raise together.

All exchanges of objects have one name and contain their purpose. So ranks that are in different calls raise an error
that names both calls, instead of waiting for each other.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import cloudpickle
import torch
from horovod.torch import mpi_ops
from horovod.torch.mpi_ops import Sum, global_process_set

from hvd_ckpt.processes.grid import current, require_initialized
from hvd_ckpt.processes.watchdog import waiting
from hvd_ckpt.utils.text import ranks_text

MESSAGE = "hvd_ckpt.objects"
# Horovod counts the elements of a message, and the bytes that a rank brings to one, in 32 bits.
LARGEST = 2**31 - 1


class FailedElsewhere(Exception):
    """Mixin of the errors that a rank raises because another one has raised them; the message begins with that rank.

    They are also of the class of the other rank's error.
    """

    raised_elsewhere = True  # for hvd_ckpt.processes.uncaught: that rank shows the traceback

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class Failure:
    """An error in the form in which it is sent to the other ranks.

    Attributes:
        classes: module and name of its class and of the bases, which a rank may have to do without.
        text: text of the error.
    """

    classes: Sequence[tuple[str, str]]
    text: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        # An error that came from another rank travels on as what it was there, without the mixin.
        known = [base for base in type(error).__mro__ if not issubclass(base, FailedElsewhere)]
        return cls([(base.__module__, base.__qualname__) for base in known], str(error))

    def on(self, rank: int) -> Exception:
        """The error to raise where it happened on another rank."""
        text = f"rank {rank}: {self.text}"
        for module, name in self.classes:
            kind = getattr(sys.modules.get(module), name, None)
            if isinstance(kind, type) and issubclass(kind, Exception):  # else this process does not know it
                try:
                    own: Any = type(name, (FailedElsewhere, kind), {"__module__": module})
                    # Without its constructor, which may take other arguments than a text, or act on them.
                    error: Exception = own.__new__(own, text)
                    error.args = (text,)
                    return error
                except TypeError:  # a class that takes other arguments: the next base will do
                    continue
        return FailedElsewhere(text)


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
            name=name,
            shape=tuple(parameter.shape),
            stride=tuple(parameter.stride()),
            dtype=parameter.dtype,
            device_type=parameter.device.type,
            requires_grad=parameter.requires_grad,
        )


def allgather_objects(value: Any, process_set: Any, name: str, message: str = MESSAGE) -> list[Any]:
    """Gathers one picklable value of each rank of ``process_set``, in rank order. Tensors of GPUs arrive on the CPU.

    (Horovod's ``allgather_object`` takes no process set.)

    Args:
        name: what it is for, the same on all ranks.
        message: prefix of the tensors' names; to be given by threads that exchange objects at the same time.

    Raises:
        Exception: the value of a rank cannot be pickled; on every rank.
        ValueError: Horovod is not initialized.
        RuntimeError: the ranks are in different calls; on every rank.
    """
    require_initialized(name)
    payload, error = _pickled((name, value))
    if process_set.size() == 1:  # also where Horovod knows nothing of the set
        raise_first_failure(error, [])
        return [pickle.loads(payload.numpy().tobytes())[1]]
    # By an allreduce, in which a rank that has joined shows as a zero: a payload is never empty.
    sizes = torch.zeros(process_set.size(), dtype=torch.int64)
    sizes[process_set.rank()] = payload.numel()
    with waiting(f"all ranks in '{name}' (each must call it)"):
        sizes = _sum(sizes, f"{message}.sizes", process_set)
    check_present(int((sizes > 0).sum()), process_set, name)
    contents = [bytearray() for _ in sizes]
    messages = -(-int(sizes.sum()) // (LARGEST - len(sizes)))  # each part may be rounded up
    for number, part in enumerate(payload.tensor_split(messages)):
        lengths = sizes // messages + (number < sizes % messages)
        gathered = mpi_ops.allgather(part, name=f"{message}.values", process_set=process_set)
        for content, arrived in zip(contents, gathered.split(lengths.tolist())):
            content += arrived.numpy().tobytes()
    received = [pickle.loads(content) for content in contents]
    raise_first_failure(error, [content if isinstance(content, Failure) else None for content in received])
    # Each call with the first rank that is in it: of equal keys the last one counts, so ranks come in reverse.
    calls = dict(zip((call for call, _ in reversed(received)), reversed(range(len(received)))))
    if len(calls) > 1:
        where = ", ".join(
            f"'{call}' on rank {rank}"
            for call, rank in sorted(calls.items(), key=lambda call_and_rank: call_and_rank[1])
        )
        raise RuntimeError(
            f"ranks are in different collective calls: {where}; make the same calls in the same order on every rank"
        )
    return [value for _, value in received]


def broadcast_from(value: Any, root: int, process_set: Any, name: str) -> Any:
    """Broadcasts a picklable value from the rank ``root`` (a global rank, as in Horovod) of ``process_set``.

    Raises:
        Exception: the value of that rank cannot be pickled; on every rank.
        ValueError: Horovod is not initialized, or ``root`` is no rank of ``process_set``.
    """
    require_initialized(name)
    is_root = mpi_ops.rank() == root
    payload, error = _pickled(value if is_root else None)
    # The sum has the root's size, which alone is not 0, and the number of ranks that are there.
    counts = torch.tensor([payload.numel() if is_root else 0, 1], dtype=torch.int64)
    with waiting(f"all ranks in '{name}' (each must call it)"):
        size, present = _sum(counts, f"{name}.size", process_set).tolist()
    check_present(present, process_set, name)
    if not size:
        raise ValueError(
            f"root_rank {root!r} is not one of the ranks that take part; give one of them on every rank"
        )
    if not is_root:
        payload = torch.empty(size, dtype=torch.uint8)
    for part in torch.split(payload, LARGEST):
        mpi_ops.broadcast_(part, root, name=f"{name}.value", process_set=process_set)
    received = value if is_root else pickle.loads(payload.numpy().tobytes())
    if isinstance(received, Failure):
        raise received.on(root)
    if error is not None:
        raise error
    return received


def _sum(values: torch.Tensor, name: str, process_set: Any) -> torch.Tensor:
    handle = mpi_ops.allreduce_async_(values, name=name, op=Sum, process_set=process_set)
    summed: torch.Tensor = mpi_ops.synchronize(handle)
    return summed


def _pickled(value: Any) -> tuple[torch.Tensor, Exception | None]:
    """The bytes of a value; for one that cannot be pickled those of a :class:`Failure`, and the error."""
    error = None
    try:
        file = io.BytesIO()
        _Pickler(file).dump(value)
        content = file.getvalue()
    except Exception as exception:  # whatever it is, the other ranks must hear of it
        error, content = exception, pickle.dumps(Failure.of(exception))
    return torch.frombuffer(bytearray(content), dtype=torch.uint8), error


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Stores tensors of GPUs as tensors of the CPU: the receiver has another GPU, or none."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_cuda:
            copy = value.detach().cpu().requires_grad_(value.requires_grad)
            is_parameter = isinstance(value, torch.nn.Parameter)
            whole = torch.nn.Parameter(copy, value.requires_grad) if is_parameter else copy
            return whole.__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]
        return super().reducer_override(value)


def digest(value: Any) -> str:
    """A short fingerprint of a picklable value, equal on ranks where the value is."""
    # Not of its pickle. That also tells which parts are one and the same object, so equal values may differ
    # in it.
    return hashlib.sha256(repr(value).encode()).hexdigest()


def raise_together(error: Exception | None, process_set: Any, name: str) -> None:
    """Raises on every rank of ``process_set`` if any rank brings an error, which is of the same class on all of them."""
    failures = allgather_objects(None if error is None else Failure.of(error), process_set, name)
    raise_first_failure(error, failures)


def raise_on_replica(error: Exception | None) -> None:
    """Raises on every pipeline stage and part of this replica if any of them brings an error. Collective over these, where all tell
    each other one number, and what has happened only if something has."""
    grid = current()
    if grid.on_any_stage(error is not None):
        failures: list[Failure | None] = [None] * grid.size  # by process number
        for number, failure in enumerate(grid.gather_objects(None if error is None else Failure.of(error))):
            stage, part = divmod(number, grid.tensor)
            failures[grid.process(stage, part=part)] = failure
        raise_first_failure(error, failures)


def raise_gathered(errors: Sequence[Exception | None]) -> None:
    """Raises the first of the errors of all ranks, in rank order, as the same error on all of them: each shows it itself."""
    for rank, error in enumerate(errors):
        if error is not None:
            raise type(error)(f"rank {rank}: {error}")


def raise_first_failure(error: Exception | None, failures: Sequence[Failure | None]) -> None:
    """Raises this rank's own error, or the first failure of another rank, which shows the traceback."""
    if error is not None:
        raise error
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise failure.on(rank)


# ``join()``: Horovod takes zeros for a rank that has joined, which only an allreduce can do without it. Of anything else, such a
# rank may come to do its part without having one (where Horovod knows the operation from before), and the job dies. So ranks are
# counted first, by an allreduce. Those that find one missing join as well, and all ranks raise one error.


def check_present(
    present: int, process_set: Any, what: str, way_out: str = "give every rank as many batches"
) -> None:
    """Raises ValueError on every rank of the job if a rank has called ``join()``.

    Args:
        present: the sum of a 1 of each rank.
        what: that cannot do without a rank, as the subject of the sentence.
        way_out: what to do.
    """
    if present < process_set.size():
        subject = what.removeprefix("hvd_ckpt.")
        reason = f"{subject} needs all ranks, and one has called join(), which only allreduces can do without"
        meet_after_join(-1, ValueError(f"{reason}: {way_out}"))


def meet_after_join(device: int, error: Exception | None) -> int:
    """Horovod's ``join``; raises on every rank if one brings an error, else returns the rank that joined last."""
    last: int = mpi_ops.join(device)
    raise_together(error, global_process_set, "join()")
    return last


def of_all_processes(value: Any, name: str) -> list[Any]:
    """A picklable value of each process of the job, of all pipeline stages and parts, in the order of their numbers. Collective.

    Where Horovod does not run, this process is the only one.
    """
    if not mpi_ops.is_initialized():
        return [value]
    # Two gathers: over the replicas of this stage and part, then over the stages and parts of this replica.
    return current().of_all(allgather_objects(value, mpi_ops.global_process_set, name))


def of_first_process(value: Any, name: str) -> Any:
    """The first process's value, on all processes of all pipeline stages and parts. Collective."""
    # Each stage and part has a rank 0 of its own. Process 0 is that of the first stage and part.
    return current().gather_objects(broadcast_from(value, 0, mpi_ops.global_process_set, name))[0]


@contextmanager
def errors_on_all(name: str, process_set: Any = None) -> Iterator[None]:
    """An error that one process raises inside is raised on all of them, of the same class. The body must not communicate, since a
    process may leave it early.

    Args:
        process_set: the ranks to raise it on; by default all processes, of all pipeline stages.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    if process_set is None:
        raise_first_failure(error, of_all_processes(None if error is None else Failure.of(error), name))
    else:
        raise_together(error, process_set, name)


def in_order(named: Sequence[tuple[str, torch.Tensor]], known_names: Any) -> list[tuple[str, torch.Tensor]]:
    """Parameters in the order of ``named_parameters``, since that of a parameter group may differ between ranks."""
    places = {parameter: place for place, parameter in enumerate(known_names.keys())}
    return sorted(named, key=lambda pair: places.get(pair[1], len(places)))


def described(**options: Any) -> dict[str, Any]:
    """Options of a collective call as plain data that ranks can compare: names for modules, classes, functions and process sets."""
    return {name: _described(value) for name, value in options.items()}


def _described(value: Any) -> Any:
    if value is None or isinstance(value, (str, int, float, complex)):
        return value
    if isinstance(value, Mapping):
        return {str(name): _described(option) for name, option in value.items()}
    if isinstance(value, (list, tuple, range)):
        return [_described(element) for element in value]
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value)
    return getattr(value, "__qualname__", type(value).__qualname__)


def check_described(
    tables: Mapping[int, Mapping[str, Any]], call: str, failures: Sequence[Failure | None] = ()
) -> None:
    """Raises ValueError for the first option that is not the same on every rank.

    Args:
        tables: result of :func:`described`, by rank.
        call: whose options they are.
        failures: what is wrong with the arguments of each rank, which the difference may explain.
    """
    wrong = next(
        (f" (rank {rank}: {failure.text})" for rank, failure in enumerate(failures) if failure is not None),
        "",
    )
    for name in dict.fromkeys(chain.from_iterable(tables.values())):
        ranks: dict[str, list[int]] = {}
        for rank, options in tables.items():
            ranks.setdefault(repr(options.get(name)), []).append(rank)
        if len(ranks) > 1:
            values = " and ".join(f"{value} on {ranks_text(own)}" for value, own in ranks.items())
            raise ValueError(
                f"{call}: {name} differs between ranks: {values}; pass the same arguments on every rank{wrong}"
            )


def agree_on_options(
    call: str,
    options: Mapping[str, Any],
    error: Exception | None,
    brought: Any = None,
    process_set: Any = None,
) -> list[Any]:
    """Compares the options of a call on all ranks, before anything else happens, and returns what else each brings. Collective.

    Args:
        options: result of :func:`described`.
        process_set: the ranks; by default all processes, of all pipeline stages.

    Raises:
        ValueError: an option differs between ranks; on every rank, naming option and ranks.
        Exception: the arguments are the same, and some rank brings an error; on every rank.
    """
    own = (dict(options), None if error is None else Failure.of(error), brought)
    gathered = (
        of_all_processes(own, call) if process_set is None else allgather_objects(own, process_set, call)
    )
    # Options come before errors: where they differ, that explains the error of a single rank.
    options_of, failures, of_ranks = zip(*gathered)
    check_described(dict(enumerate(options_of)), call, failures)
    raise_first_failure(error, failures)
    return list(of_ranks)


def check_parameters(
    tables: Sequence[Sequence[ParameterFacts]], ranks: Sequence[int] | None = None, in_order: bool = True
) -> None:
    """Raises ValueError for the first parameter that is not the same on every rank.

    Args:
        tables: one sequence of facts per rank, in rank order, each in that rank's order of parameters.
        ranks: which these are; by default all.
        in_order: the parameters must also be in the same order.
    """
    ranks = range(len(tables)) if ranks is None else ranks
    reference = tables[0]
    for rank, table in zip(ranks[1:], tables[1:]):
        here, there = ({facts.name: facts for facts in rows} for rows in (reference, table))
        for name in [*here, *there]:
            if (name in here) != (name in there):
                at, other = (ranks[0], rank) if name in here else (rank, ranks[0])
                raise ValueError(
                    f"parameter '{name}' is on rank {at} and not on rank {other}, which have {len(here)} and {len(there)} "
                    f"parameters on ranks {ranks[0]} and {rank}; build the same model and the same optimizer on every rank"
                )
            for field in ("shape", "dtype", "device_type", "requires_grad", "stride"):
                first, second = getattr(here[name], field), getattr(there[name], field)
                if first != second:
                    raise ValueError(
                        f"parameter '{name}' differs between ranks: {field} is {first} on rank {ranks[0]} and {second} on rank "
                        f"{rank}; build the same model and the same optimizer on every rank"
                    )
        for position, name in enumerate(here if in_order else ()):
            if table[position].name != name:
                raise ValueError(
                    f"parameter {position} is '{name}' on rank {ranks[0]} and '{table[position].name}' on rank {rank}; add "
                    f"parameters in the same order on every rank"
                )
