"""The arithmetic of ``hvd-ckpt bench shard``: what there should be, what is counted, what is judged and told."""

from __future__ import annotations

import json
import mmap
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from hvd_ckpt.bench.command import bench
from hvd_ckpt.bench.shard import counting
from hvd_ckpt.bench.shard.contenders import Contender, contenders, rivals
from hvd_ckpt.bench.shard.job import Answer, Findings
from hvd_ckpt.bench.shard.report import Report
from hvd_ckpt.bench.shard.results import Result, Results
from hvd_ckpt.bench.shard.theory import shared_bytes, state_bytes

ELEMENTS = 1000


def findings(state: int, seconds: list[float], counted: int = 9000, loss: float = 2.0) -> Findings:
    return Findings(
        losses=[3.0, loss],
        parameters=4000,
        gradients=2000,
        state=state,
        held=20_000,
        peak=20_000,
        resident=30_000,
        activations=1500,
        counted=counted,
        sent=counted + 100,
        seconds=seconds,
    )


def results(**of: list[Findings]) -> Results:
    """Of two ranks that train four micro-batches a step; names have _ for -."""
    named = {name.replace("_", "-").replace("hvd-ckpt", "hvd_ckpt"): found for name, found in of.items()}
    all_of_them = Results(2, 4, [Result(Contender.of(name)) for name in named])
    answers = [Answer(1, ELEMENTS, {name: found[rank] for name, found in named.items()}) for rank in range(2)]
    all_of_them.take(answers, named, memory=True, time=True)
    return all_of_them


def test_adam_in_float32_needs_16_10_7_and_4_bytes_on_four_ranks() -> None:
    assert [state_bytes(stage, 4) for stage in range(4)] == [16, 10, 7, 4]
    assert [state_bytes(stage, 1) for stage in range(4)] == [16] * 4
    assert state_bytes(3, 4, offload=True) == 2
    assert shared_bytes(4000, 4) == 3000


def test_names_stand_for_contenders_and_rivals_do_the_same() -> None:
    everyone = contenders([2, 3], ["fsdp2", "deepspeed"])
    assert [Contender.of(one.name) for one in everyone] == everyone
    assert len({one.name for one in everyone}) == len(everyone) == 14
    ours = Contender("hvd_ckpt", 3, recompute=True)
    assert [one.name for one in rivals(ours, everyone)] == ["fsdp2-3-recompute", "deepspeed-3-recompute"]
    assert rivals(Contender("hvd_ckpt", 3, offload=True), everyone) == []


def test_time_is_that_of_the_slowest_rank_beside_the_best_peer_of_the_round() -> None:
    found = results(
        hvd_ckpt_2=[findings(4000, [1.0, 3.0, 2.0]), findings(4000, [2.0, 1.0, 1.0])],
        fsdp2_2=[findings(4000, [4.0, 4.0, 4.0]), findings(4000, [1.0, 1.0, 1.0])],
        deepspeed_2=[findings(4000, [9.0, 9.0, 9.0]), findings(4000, [1.0, 1.0, 1.0])],
        deepspeed_2_recompute=[findings(4000, [1.0, 1.0, 1.0]), findings(4000, [1.0, 1.0, 1.0])],
    )
    ours = found.all[0]
    assert ours.seconds == [2.0, 3.0, 2.0]
    ratio = found.of_best_rival(ours)
    assert ratio is not None and ratio.median == 0.5
    assert found.samples_per_second(ours) == 4.0


def test_memory_is_what_is_held_and_the_rest_up_to_the_peak() -> None:
    found = results(hvd_ckpt_2=[findings(4000, [1.0]), findings(4400, [1.0])])
    ours = found.all[0]
    kinds = ours.kinds()
    assert kinds == {
        "parameters": 4000,
        "gradients": 2000,
        "state": 4200,
        "buffers": 8300,
        "activations": 1500,
    }
    assert sum(kinds.values()) == ours.mean("peak")
    assert found.states_of_theory(ours) == pytest.approx(10_400 / (state_bytes(2, 2) * ELEMENTS))
    assert found.model_volumes(ours) == 4.5


def test_what_is_wanted_and_not_met_is_told_and_written(tmp_path: Path) -> None:
    found = results(
        hvd_ckpt_3=[findings(1000, [1.0], counted=9000), findings(1000, [1.0])],
        hvd_ckpt_3_recompute=[findings(2000, [1.0], counted=12_000), findings(2000, [1.0])],
        fsdp2_3=[findings(1000, [1.0], loss=2.5), findings(1000, [1.0])],
    )
    found.all.append(Result(Contender("deepspeed", 3), failure="deepspeed is not installed"))
    told = {verdict.what: verdict.met for verdict in found.verdicts()}
    assert any("sends 12000 bytes" in what and not met for what, met in told.items())
    assert any("the furthest by 5.0e-01 (FSDP2, stage 3)" in what and not met for what, met in told.items())
    assert any(
        what.startswith("hvd_ckpt, stage 3: model states are 0.875") and met for what, met in told.items()
    )
    assert any("1.000 of the step of FSDP2" in what and not met for what, met in told.items())
    assert found.sound  # a peer that is left out is no failure
    report = Report("hvd-ckpt bench shard", {"machine": "a"}, {"ranks": "2"}, found)
    report.save(tmp_path, tmp_path / "copy.png")
    page = (tmp_path / "shard.md").read_text()
    assert "DeepSpeed, stage 3: left out: deepspeed is not installed" in page
    assert "| hvd_ckpt, stage 3 | no | 1000 [1000, 1000] | 8.0 | 1.00 [1.00, 1.00] |" in page
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [line.get("contender") for line in lines[1:]] == [one.contender.name for one in found.all]
    assert (tmp_path / "copy.png").read_bytes() == (tmp_path / "shard.png").read_bytes()
    found.all[0].failure = "RuntimeError: no"
    assert not found.sound


def test_each_storage_counts_once_and_mapped_files_apart(tmp_path: Path) -> None:
    tensor = torch.zeros(1000)
    path = tmp_path / "state"
    path.write_bytes(bytes(mmap.PAGESIZE))
    with open(path, "r+b") as file:
        mapped = torch.frombuffer(mmap.mmap(file.fileno(), mmap.PAGESIZE), dtype=torch.uint8)
    seen: set[int] = set()
    assert counting.storage_bytes([tensor, tensor[:10], mapped], seen) == (4000, mmap.PAGESIZE)
    assert counting.storage_bytes([tensor.view(10, 100)], seen) == (0, 0)


@pytest.mark.skipif(counting.heap_bytes() is None, reason="this C library does not tell")
def test_the_peak_of_the_heap_is_seen() -> None:
    before = counting.heap_bytes()
    with counting.heap_peak() as peak:
        for _ in range(20):
            torch.ones(5_000_000).sum()
    assert before is not None and peak.bytes is not None
    assert 20_000_000 <= peak.bytes - before < 45_000_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stages", "4"], "--stages: '4' is none of 0, 1, 2, 3"),
        (["--peers", "apex"], "--peers: 'apex' is none of ddp, zero, fsdp2, deepspeed"),
        (["--np", "0"], "'--np'"),
        (["--text", "/no/such/text"], "--text: "),
        (["--chart", "/no/such/folder/a.png"], "--chart: there is no folder '/no/such/folder'"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_status_2(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(bench, ["shard", *arguments])
    assert result.exit_code == 2
    assert message in result.output
    assert len(result.output.strip().splitlines()) == 1
