"""Tests of ``python -m benchmarks shard`` without ranks: comparisons and counts of bytes."""

from __future__ import annotations

import mmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import hvd_ckpt as hc
from benchmarks.shard import worker
from benchmarks.shard.job import Configuration, Findings, configurations
from benchmarks.shard.results import Result, Results
from benchmarks.shard.worker import storage_bytes

ELEMENTS = 1000


def findings(state: int, seconds: list[float], counted: int = 9000, loss: float = 2.0) -> Findings:
    return Findings([3.0, loss], 4000, 2000, state, 0, 20_000, 1500, counted, seconds)


def results(found: dict[Configuration, list[Findings]]) -> Results:
    """Of two ranks that train four micro-batches a step."""
    all_of_them = Results(2, 4, ELEMENTS, [Result(configuration) for configuration in found])
    answers = [
        {configuration.name: ranks[rank] for configuration, ranks in found.items()} for rank in range(2)
    ]
    all_of_them.take(answers, all_of_them.all, memory=True)
    return all_of_them


def test_every_configuration_has_a_name_and_baselines_do_the_same() -> None:
    everyone = configurations([2, 3], ["fsdp2", "deepspeed"])
    assert len({one.name for one in everyone}) == len(everyone) == 14
    ours = Configuration("hvd_ckpt", 3, recompute=True)
    assert [one.name for one in everyone if one.is_baseline_of(ours)] == [
        "fsdp2-3-recompute",
        "deepspeed-3-recompute",
    ]
    assert not any(one.is_baseline_of(Configuration("hvd_ckpt", 3, offload=True)) for one in everyone)


def test_time_is_that_of_the_slowest_rank_beside_the_best_peer_of_the_round() -> None:
    found = results(
        {
            Configuration("hvd_ckpt", 2): [findings(4000, [1.0, 3.0, 2.0]), findings(4000, [2.0, 1.0, 1.0])],
            Configuration("fsdp2", 2): [findings(4000, [4.0, 4.0, 4.0]), findings(4000, [1.0, 1.0, 1.0])],
            Configuration("deepspeed", 2): [findings(4000, [9.0, 9.0, 9.0]), findings(4000, [1.0, 1.0, 1.0])],
            Configuration("fsdp2", 2, recompute=True): [findings(4000, [1.0] * 3), findings(4000, [1.0] * 3)],
        }
    )
    ours = found.all[0]
    assert ours.seconds == [2.0, 3.0, 2.0]
    ratio = found.of_best_baseline(ours)
    assert ratio is not None and ratio.median == 0.5
    assert found.samples_per_second(ours) == 4.0


def test_memory_table_splits_the_peak_by_kind() -> None:
    found = results({Configuration("hvd_ckpt", 2): [findings(4000, [1.0]), findings(4400, [1.0])]})
    (ours,) = found.all
    assert ours.kinds() == {
        "parameters": 4000,
        "gradients": 2000,
        "state": 4200,
        "buffers": 8300,
        "activations": 1500,
    }
    assert sum(ours.kinds().values()) == ours.mean("peak")
    assert found.memory_table().rows[0][-1] == "10.40"  # bytes per parameter on the rank that holds the most
    assert found.model_volumes(ours) == 4.5


def test_missing_engines_are_remarks_and_only_failures_of_this_library_count() -> None:
    found = results(
        {
            Configuration("hvd_ckpt", 3): [findings(1000, [1.0]), findings(1000, [1.0])],
            Configuration("fsdp2", 3): [findings(1000, [1.0], loss=2.5), findings(1000, [1.0])],
        }
    )
    found.all.append(Result(Configuration("deepspeed", 3), failure="deepspeed is not installed"))
    assert found.sound
    assert found.remarks() == ["DeepSpeed, stage 3: left out: deepspeed is not installed"]
    ours, theirs = found.time_table().rows
    assert ours[:5] == ("hvd_ckpt, stage 3", "no", "1000 [1000, 1000]", "8.0", "1.00 [1.00, 1.00]")
    assert theirs[-1] == "5.0e-01"
    broken = Findings(failure="RuntimeError: no")
    again = [{"hvd_ckpt-3": one} for one in (findings(1, [1.0]), broken)]
    found.take(again, found.all[:1], memory=True)
    assert not found.sound


def test_a_configuration_that_fails_on_another_rank_is_timed_on_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = ("none", "optimizer")
    timed: list[str] = []
    bench = SimpleNamespace(
        findings={name: Findings() for name in names},
        examine=lambda configuration: None,
        time=lambda running: timed.extend(one.name for one in running),
    )
    monkeypatch.setattr(worker, "Bench", lambda job: bench)
    others = {"none": False, "optimizer": True}
    asked = iter(names)
    monkeypatch.setattr(hc, "init", lambda: None)
    monkeypatch.setattr(hc, "allgather_object", lambda failed: [failed, others[next(asked)]])
    some = [SimpleNamespace(name=name, ours=True) for name in names]
    worker.measure(cast(Any, SimpleNamespace(configurations=some, memory=True, rounds=1)))
    assert timed == ["none"]


def test_each_storage_counts_once_and_mapped_files_apart(tmp_path: Path) -> None:
    tensor = torch.zeros(1000)
    path = tmp_path / "state"
    path.write_bytes(bytes(mmap.PAGESIZE))
    with open(path, "r+b") as file:
        mapped = torch.frombuffer(mmap.mmap(file.fileno(), mmap.PAGESIZE), dtype=torch.uint8)
    seen: set[int] = set()
    assert storage_bytes([tensor, tensor[:10], mapped], seen) == (4000, mmap.PAGESIZE)
    assert storage_bytes([tensor.view(10, 100)], seen) == (0, 0)
