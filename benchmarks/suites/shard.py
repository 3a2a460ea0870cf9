"""Measure what splitting a model over the ranks saves and costs, beside PyTorch's and DeepSpeed's.

A GPT is trained at each stage, with and without recomputation: time of a step, memory of each rank by kind, bytes sent. Stage
0 splits nothing, 1 the optimizer's state, 2 gradients too, 3 parameters too. Run it on a machine that does nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.case import Case, Row
from benchmarks.suite import Axis, Suite

STAGES = {
    "0": ("hvd_ckpt", "ddp"),
    "1": ("stage-1", "zero", "deepspeed-1"),
    "2": ("stage-2", "fsdp2-2", "deepspeed-2"),
    "3": ("stage-3", "stage-3-offload", "fsdp2-3", "deepspeed-3"),
}
ENGINES = tuple(engine for engines in STAGES.values() for engine in engines)
FORMATS = ("fp32", "fp16", "bf16", "int8", "int4")
WITH_FORMATS = ("stage-2", "stage-3", "stage-3-offload")


def keeps(case: Case) -> bool:
    """Engines at their stage; an engine that nobody knows at every stage. Other formats than fp32 are this library's."""
    mine = case.engine in STAGES[case.at["stage"]] or case.engine not in ENGINES
    return mine and (case.at["wire"] == "fp32" or case.engine in WITH_FORMATS)


def options(case: Case) -> Mapping[str, Any]:
    """Buckets of the same size for all."""
    given = {
        "passes": int(case.at["passes"]),
        "recompute": case.at["recompute"] == "yes",
        "bucket_cap_mb": 4.0,
    }
    return {**given, "wire": case.at["wire"]} if case.engine in WITH_FORMATS else given


def of_best_peer(row: Row, rows: Sequence[Row]) -> Any:
    """Time as a ratio to the engine of the same stage and recomputation whose median is least."""
    ours = ("hvd_ckpt", "stage-1", "stage-2", "stage-3", "stage-3-offload")
    same = [other for other in rows if other.case.condition == row.case.condition and other.step]
    peers = [other for other in same if other.case.engine not in ours]
    if row.case.engine not in ours or not peers:
        return None
    return row.ratio(min(peers, key=lambda peer: peer.step.median if peer.step else 0.0))


shard = Suite(
    engines=ENGINES,
    workloads=("gpt",),
    columns=("loss", "sent", "parameters", "gradients", "state", "peak"),
    against={"of best peer": of_best_peer},
    axes={
        "stage": Axis("What is split.", tuple(STAGES)),
        "recompute": Axis("Each block in the backward pass.", ("no", "yes")),
        "passes": Axis("Micro-batches of a step.", ("1", "2", "4", "8"), "4"),
        "wire": Axis("Formats of messages at stages 2 and 3.", FORMATS, "fp32"),
    },
    keeps=keeps,
    options=options,
    sizes={"gpt": {"batch": 1, "length": 128, "layers": 6, "vocabulary": 320}},
    quick_sizes={"gpt": {"batch": 1, "length": 32, "width": 64, "heads": 2, "layers": 2, "vocabulary": 320}},
    np="4",
    rounds=5,
    warm_up=2,
    quick={"np": "2", "rounds": 2, "passes": "2"},
    optimizer="Adam",
    together=True,
    notes=(
        "Stages 0 and 1 reduce the sum of all micro-batches once; stages 2 and 3 reduce-scatter after each, so that no rank holds "
        "whole gradients. of best peer: time relative to the engine of the same stage and recomputation whose median is least.",
        "parameters, gradients, state: tensors held in memory when the gradients are ready; peak: the most that the "
        "allocator has given out in a step. What Gloo's threads free for FSDP2 counts until its address is allocated again.",
    ),
)
