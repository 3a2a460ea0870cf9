"""Weight consistency: a comparison of a hash of every parameter between ranks.

Data parallelism assumes that the weights of all ranks are equal at the start and stay equal. If they differ, nothing fails, but
each rank trains another model, and the average gradient belongs to none of them. Causes are a bit that flips, or a rank that skips
an update or draws a random number that the others do not draw. :func:`check_equal_weights` compares bits, including those of nan
and -0.0.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from horovod.torch import mpi_ops
from horovod.torch.mpi_ops import global_process_set

from hvd_ckpt.processes.grid import host_name
from hvd_ckpt.reduction.agreement import allgather_objects
from hvd_ckpt.utils.fingerprint import distinct
from hvd_ckpt.utils.text import ranks_text
from hvd_ckpt.utils.unmaterialized import is_absent

NAME = "hvd_ckpt.weights"


class WeightsDiffer(RuntimeError):
    """Ranks have different weights.

    Attributes:
        first: whether this rank is the first of the ranks that raise the error, or None if all ranks of the job do.
    """

    first: bool | None = None


@dataclass(frozen=True)
class TableEntry:
    """A parameter: the hash of its values, or what kept it from being read."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    hash: bytes
    fault: str = ""


def check_equal_weights(model: torch.nn.Module, process_set: Any = global_process_set) -> None:
    """Compares the weights of a model, as :func:`hvd_ckpt.verify` has it; raises what that raises.

    Each rank hashes as many parameters at a time as torch has threads. If nothing differs, it sends 32 bytes.
    """
    if not process_set.included():
        raise ValueError(f"rank {mpi_ops.rank()} is not in {process_set}; call verify() on its ranks only")
    parameters = list(model.named_parameters())
    ours: list[TableEntry] = []
    if parameters:
        # Threads are enough: hashing and copying let go of the interpreter's lock.
        with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:
            ours = list(pool.map(_entry, *zip(*parameters)))
    if _all_equal(_digest(ours), process_set):
        return
    # All ranks come here or none: each has compared the same gathered digests.
    tables = allgather_objects((mpi_ops.rank(), host_name(), ours), process_set, f"{NAME}.each")
    raise difference(
        [rank for rank, _, _ in tables], [host for _, host, _ in tables], [table for *_, table in tables]
    )


def _entry(name: str, parameter: torch.Tensor) -> TableEntry:
    dtype = str(parameter.dtype).removeprefix("torch.")
    if is_absent(parameter):
        return TableEntry(name, tuple(parameter.shape), dtype, b"")
    try:
        with torch.no_grad():
            data = distinct(parameter.detach()).cpu().contiguous().view(-1).view(torch.uint8)
        values: Any = data.numpy()
        hashed = hashlib.sha256(values).digest()
        return TableEntry(name, tuple(parameter.shape), dtype, hashed)
    # Without dense values on this rank (sparse, quantized, on the meta device): all ranks raise it, with the parameter's name.
    except (RuntimeError, ValueError, TypeError) as error:
        return TableEntry(name, (), dtype, b"", str(error).partition("\n")[0])


def _digest(table: Sequence[TableEntry]) -> bytes:
    """32 bytes that say all; zeros, which no hash is, if a parameter could not be read."""
    if any(entry.fault for entry in table):
        return bytes(32)
    return hashlib.sha256(repr(table).encode()).digest()


def _all_equal(digest: bytes, process_set: Any) -> bool:
    own = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
    gathered = mpi_ops.allgather(own.view(1, -1), name=NAME, process_set=process_set)
    # Zeros on some ranks differ from the hash of another one. Zeros on all would be equal, and still are no
    # hash.
    return bool(own.any()) and bool((gathered == own).all())


def difference(
    ranks: Sequence[int], hosts: Sequence[str], tables: Sequence[Sequence[TableEntry]], since: str = ""
) -> Exception:
    """The error for the first difference between the ranks' tables.

    Args:
        since: in words, when the parameter was found to differ.
    """
    named = [f"rank {rank} (host {host})" for rank, host in zip(ranks, hosts)]
    for name, table in zip(named, tables):
        for entry in table:
            if entry.fault:
                return ValueError(f"{name}: the weights of '{entry.name}' cannot be compared: {entry.fault}")
    different = [entries for entries in zip(*tables) if len(set(entries)) > 1]
    if not different:
        counts = ", ".join(f"{len(table)} on {name}" for name, table in zip(named, tables))
        return WeightsDiffer(
            f"ranks have different numbers of parameters: {counts}; build the same model on every rank"
        )
    # The ranks that are apart from the greatest number of equal ones (rank 0's, where numbers are equal).
    entries = different[0]
    usual = max(entries, key=entries.count)
    among = ranks_text(rank for rank, entry in zip(ranks, entries) if entry == usual)
    apart = [position for position, entry in enumerate(entries) if entry != usual]
    who = ", ".join(named[position] for position in apart)
    for field in ("name", "shape", "dtype"):
        one, other = getattr(usual, field), getattr(entries[apart[0]], field)
        if one != other:
            return WeightsDiffer(
                f"ranks have different models: the {field} of parameter '{usual.name}' is {one} on {among} and {other} on {who}; "
                f"build the same model on every rank"
            )
    return WeightsDiffer(
        f"parameter '{usual.name}' differs{since}: {who} has other values than {among} ({len(different)} parameters differ); "
        f"resume from a snapshot, or with one rank's weights: hvd_ckpt.broadcast_parameters(model.state_dict(), root_rank=0)"
    )
