"""Weight consistency: a comparison of a fingerprint of every parameter between ranks.

Data parallelism assumes that the weights of all ranks are equal at the start and stay equal. If they differ, nothing fails, but
each rank trains another model, and the average gradient belongs to none of them. Causes are a bit that flips, or a rank that skips
an update or draws a random number that the others do not draw. :func:`check_equal_weights` compares bits, including those of nan
and -0.0.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from horovod.torch import mpi_ops
from horovod.torch.mpi_ops import global_process_set

from hvd_ckpt.collectives.agreement import allgather_objects, digest
from hvd_ckpt.processes.grid import host_name
from hvd_ckpt.utils.fingerprint import fingerprint
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
    """A parameter: the fingerprint of its values, or what kept it from being read."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    value: int | None
    fault: str = ""

    @classmethod
    def of(cls, name: str, parameter: torch.Tensor) -> TableEntry:
        dtype = str(parameter.dtype).removeprefix("torch.")
        try:
            value = None if is_absent(parameter) else int(fingerprint(parameter))
            return cls(name, tuple(parameter.shape), dtype, value)
        # Without values on this rank (lazy, on the meta device): all ranks raise it, with the parameter's name.
        except (RuntimeError, ValueError, TypeError) as error:
            return cls(name, (), dtype, None, str(error).partition("\n")[0])


def check_equal_weights(model: torch.nn.Module, process_set: Any = global_process_set) -> None:
    """Compares the weights of a model, as :func:`hvd_ckpt.verify` has it; raises what that raises.

    Ranks send their table of parameters only if something differs.
    """
    if not process_set.included():
        raise ValueError(f"rank {mpi_ops.rank()} is not in {process_set}; call verify() on its ranks only")
    ours = list(itertools.starmap(TableEntry.of, model.named_parameters()))
    fault = any(entry.fault for entry in ours)
    found = allgather_objects((fault, digest(ours)), process_set, NAME)
    if not fault and len(set(found)) == 1:
        return
    tables = allgather_objects((mpi_ops.rank(), host_name(), ours), process_set, f"{NAME}.each")
    raise difference(
        [rank for rank, _, _ in tables], [host for _, host, _ in tables], [table for *_, table in tables]
    )


def difference(
    ranks: Sequence[int], hosts: Sequence[str], tables: Sequence[Sequence[TableEntry]], since: str = ""
) -> Exception:
    """The error for the first difference between the ranks' tables, which was found ``since`` some step."""
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
