"""Layouts of a job: which fit, which is fastest, what limits it, and the settings that a command writes."""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import CliRunner
from torch.nn import functional

import hvd_ckpt as hc
from hvd_ckpt.app.cli.layout import Settings, allowed, choose, job_of, layout as command, settings_for
from hvd_ckpt.app.models.gpt import gpt
from hvd_ckpt.app.training import ending, trial
from hvd_ckpt.app.training.build import first_step
from hvd_ckpt.app.training.config import Config, ConfigError
from hvd_ckpt.app.training.plans import _param_scale
from hvd_ckpt.batchnorm import SyncBatchNorm
from hvd_ckpt.planning.chain import Run, simulate
from hvd_ckpt.planning.step import Sample
from hvd_ckpt.prediction import links
from hvd_ckpt.prediction.computation import counted, measured
from hvd_ckpt.prediction.layouts import Job, nbytes_of
from hvd_ckpt.prediction.network import Network
from hvd_ckpt.prediction.training_layout import LayoutRow, TrainingLayout
from hvd_ckpt.processes import ancestry, runtime, watchdog

pytestmark = pytest.mark.usefixtures("quick_planner")

SIZES = {"vocabulary": 1024, "length": 128, "width": 256, "heads": 8, "layers": 6}
MIB = 1 << 20
DEFAULT = Network()
SLOW = Network(local=4, bandwidth=1e7)


def tokens(samples: int, device: str = "meta") -> torch.Tensor:
    return torch.zeros(samples, SIZES["length"], dtype=torch.long, device=device)


@functools.cache
def counted_job() -> Job:
    """A job whose computation is counted once for all clusters and memories."""
    with torch.device("meta"):
        model = gpt(**SIZES)
    return Job(model, 64, 0, 8, DEFAULT, lambda samples: Sample((tokens(samples),), {}, None), tflops=1.0)


@functools.cache
def rows_for(memory: float, network: Network = DEFAULT, inexact: bool = False) -> list[LayoutRow]:
    job = dataclasses.replace(counted_job(), memory=int(memory * MIB), network=network, inexact=inexact)
    return job.rows()


def fitting(rows: list[LayoutRow]) -> list[LayoutRow]:
    return [row for row in rows if row.fits]


def by_name(rows: list[LayoutRow]) -> dict[str, LayoutRow]:
    return {str(row.layout): row for row in rows}


# ---- layouts of a job ----


def test_rows_that_fit_stay_within_the_memory_and_the_fastest_is_first() -> None:
    rows = rows_for(400)
    fit = fitting(rows)
    assert fit and fit == rows[: len(fit)]
    assert all(row.peak <= 400 * MIB for row in fit) and all(row.peak > 400 * MIB for row in rows[len(fit) :])
    assert [row.seconds for row in fit] == sorted(row.seconds for row in fit)
    assert len({row.layout for row in rows}) == len(rows)
    for row in rows:
        layout = row.layout
        assert layout.replicas * layout.stages * layout.tensor == 8
        assert layout.samples(64) * layout.micro_batches * layout.replicas == 64
    unfit = rows_for(5)
    assert not fitting(unfit)
    assert unfit[0].peak == min(row.peak for row in unfit) > 5 * MIB


def test_less_memory_is_never_faster_and_recomputes_more() -> None:
    found = [rows_for(memory)[0] for memory in (2000, 400, 150)]
    assert [row.seconds for row in found] == sorted(row.seconds for row in found)
    much, little = (by_name(rows_for(memory))["data parallel"] for memory in (2000, 170))
    assert much.fits and little.fits
    assert much.recomputing == 0 < little.recomputing
    assert much.budget is None and little.budget is not None
    in_stages = [
        max(row.recomputing for row in fitting(rows_for(memory)) if row.layout.stages > 1)
        for memory in (4000, 100)
    ]
    assert in_stages[0] < 1e-6 and 0.05 < in_stages[1] < 0.5


def test_slow_links_between_hosts_are_the_limit_and_stages_send_less_over_them() -> None:
    fast = Network(local=4, bandwidth=1e12, local_bandwidth=1e12, latency=0, message=0, cycle=0)
    assert rows_for(4000, fast)[0].limit == "computation"
    rows = rows_for(4000, SLOW)
    plain = by_name(rows)["data parallel"]
    assert plain.limit == "link"
    assert rows[0].layout.stages > 1 and rows[0].seconds < plain.seconds


def test_processors_that_collectives_share_with_computation_hide_nothing() -> None:
    alone, crowded, busy = (
        by_name(rows_for(4000, Network(local=4, bandwidth=1e9, **shared)))["shard parameters"].seconds
        for shared in ({}, {"crowding": 2.0}, {"hidden": 0.0})
    )
    assert alone < min(crowded, busy)


def test_parts_of_layers_stay_within_a_host_and_need_the_whole_weights_until_they_are_compared() -> None:
    for ranks, local, parts in ((8, 2, {1, 2}), (12, 6, {1, 2, 3, 6}), (6, 8, {1, 2, 3, 6})):
        job = dataclasses.replace(counted_job(), ranks=ranks, batch=ranks, network=Network(local=local))
        assert {layout.tensor for layout in job.layouts()} == parts
    weights = nbytes_of(counted_job().model)
    in_parts = [row for row in rows_for(4000) if row.layout.tensor > 1 and row.layout.stages == 1]
    assert in_parts and all(row.peak > weights * (1 + 1 / row.layout.tensor) for row in in_parts)


def test_layouts_that_change_results_are_asked_for() -> None:
    exact, others = (rows_for(400, SLOW, inexact) for inexact in (False, True))
    assert all(row.layout.wire == "fp32" and not row.layout.every for row in exact)
    assert all(row.layout.wire == "int8" or row.layout.every for row in others)
    of = by_name([*exact, *others])
    assert of["local SGD, every 50"].seconds < of["data parallel"].seconds / 10
    rounded, whole = of["shard gradients, wire int8"], of["shard gradients"]
    assert whole.seconds / 4 < rounded.seconds < whole.seconds / 2


def test_layouts_from_python_for_a_cluster_that_is_not_there() -> None:
    def layouts(device: str, **options: object) -> list[LayoutRow]:
        given = {"batch": 64, "memory": "400MiB", "ranks": 8, "tflops": 1.0, **options}
        model = counted_job().model if device == "meta" else gpt(**SIZES)
        return hc.layouts(model, lambda count: tokens(count, device), **given)

    rows, with_weights = layouts("meta"), layouts("cpu")
    assert [row.layout for row in rows] == [row.layout for row in rows_for(400)]
    assert {row.layout: row.peak for row in with_weights} == {row.layout: row.peak for row in rows}
    norms = torch.nn.Sequential(*(torch.nn.LayerNorm(8) for _ in range(2)))  # no matrix product is counted
    alone = hc.layouts(norms, lambda count: torch.zeros(count, 8), batch=2, memory="1MiB", ranks=1)
    assert alone[0].fits and alone[0].recomputing == 0
    for wrong, says in (
        ({"memory": "80%"}, "memory must be bytes"),
        ({"ranks": 0}, "ranks must be a number from 1, not 0"),
        ({"batch": 2.5}, r"batch must be a number from 1, not 2\.5"),
        ({"tflops": 0}, "tflops must be > 0, not 0"),
        ({"network": 25}, "network must be a .*Network, not 25"),
        ({"network": DEFAULT, "ranks": None}, "give ranks, their number, as well"),
    ):
        with pytest.raises(ValueError, match=says):
            layouts("meta", **wrong)


# ---- counted computation ----


def test_counted_computation_is_near_the_measured_one() -> None:
    torch.manual_seed(0)
    sizes = {**SIZES, "layers": 2, "width": 128}
    model = gpt(**sizes)
    with torch.device("meta"):
        meta = gpt(**sizes)
    ids = torch.randint(0, SIZES["vocabulary"], (8, SIZES["length"]))

    def loss(output: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(output.flatten(0, 1), ids.flatten())

    by_hand = counted(meta, Sample((ids.to("meta"),), {}, loss), 1e12)
    real = measured(model, Sample((ids,), {}, loss), lambda text: None, chunk_head=False)
    # Without recomputation, whatever is fastest on this machine just now.
    peaks = [
        simulate(each.chain, [Run(block, 0) for block in range(len(each.chain))])[0]
        for each in (by_hand, real)
    ]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.2)
    assert by_hand.smallest == pytest.approx(real.smallest, rel=0.3)
    assert len(by_hand.names) == len(real.names)


class Attention(torch.nn.Module):
    def __init__(self, by_name: bool) -> None:
        super().__init__()
        self.by_name = by_name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.by_name:
            return functional.scaled_dot_product_attention(query=x, key=x, value=x, is_causal=True)
        return functional.scaled_dot_product_attention(x, x, x, None, 0.0, True)


def test_attention_is_counted_however_its_arguments_are_given() -> None:
    sample = Sample((torch.zeros(2, 4, 16, 8, device="meta", requires_grad=True),), {}, None)
    chains = [
        counted(torch.nn.Sequential(Attention(by_name)), sample, 1e12).chain for by_name in (True, False)
    ]
    assert chains[0] == chains[1] and chains[0][1].forward_seconds > 0


# ---- layouts of a run ----


def found_for(batch: int = 32, **settings: object) -> tuple[Config, Job, list[LayoutRow]]:
    """Layouts of a small model on four ranks of two hosts."""
    config = Config("gpt-tiny", sequence_length=32, **settings)
    job = job_of(config, batch, 1 << 30, Settings(memory="1GiB", ranks=4, local=2), print)
    return config, job, job.rows()


def test_all_that_changes_the_memory_of_a_step_counts() -> None:
    plain, momentum, average, frozen, not_elementwise = (
        by_name(found_for(**settings)[2])
        for settings in (
            {"optimizer": "sgd"},
            {"optimizer": "sgd", "optimizer_options": {"momentum": 0.9}},
            {"optimizer": "sgd", "ema": 0.9},
            {"optimizer": "sgd", "freeze": "*.weight"},
            {"optimizer": "adafactor"},
        )
    )
    weights = nbytes_of(first_step(Config("gpt-tiny", sequence_length=32), torch.device("meta"))[0])
    for more in (momentum, average):
        assert more["data parallel"].peak - plain["data parallel"].peak == pytest.approx(weights, rel=0.1)
        difference = more["2 stages, 2 micro-batches"].peak - plain["2 stages, 2 micro-batches"].peak
        assert weights * 0.4 < difference < weights * 0.7
    assert frozen["data parallel"].peak < plain["data parallel"].peak
    # It is whole on each rank.
    assert not_elementwise["data parallel"].fits and not any("shard" in name for name in not_elementwise)


def test_what_is_offloaded_takes_no_memory_of_a_stage() -> None:
    model = torch.nn.Linear(512, 512)
    optimizer = torch.optim.AdamW(model.parameters())
    scales = [
        _param_scale(model, optimizer, Config("gpt-tiny", shard=shard, ema=0.9))
        for shard in ("parameters", "parameters,offload=optimizer", "parameters,offload=parameters")
    ]
    assert scales == pytest.approx([5.0, 3.0, 1.0], rel=0.01)  # and the padding of shards


@pytest.mark.parametrize(
    ("settings", "gone"),
    [
        ({"replicas": 8}, "stages|parts|parameters"),
        ({"compression": "fp16"}, "gradients|parameters"),
        ({"local": 4}, "stages|parts|shard"),
        ({"checkpoint": "never"}, "stages"),
    ],
)
def test_what_settings_do_not_allow_is_left_out(settings: dict[str, object], gone: str) -> None:
    config, job, everything = found_for(**settings)
    rows = allowed(config, job, everything)
    left = [row for row in everything if row not in rows]
    assert rows and left and all(re.search(gone, str(row.layout)) for row in left)
    assert not any(re.search(gone, str(row.layout)) for row in rows)
    for row in rows:
        made = Config.make(settings_for(config, row, job))
        assert made.samples_of_step(row.layout.replicas) == 32
        assert made.micro_batch == row.layout.samples(32)


def test_settings_that_no_layout_allows_are_an_error() -> None:
    with pytest.raises(ConfigError, match="local 4 cannot be used with pipeline 2"):
        allowed(*found_for(batch=2, local=4))


def test_a_layout_that_is_too_large_when_it_is_tried_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, fast, none = (
        LayoutRow(TrainingLayout(2, micro_batches=count), fits, 1, seconds=seconds)
        for count, fits, seconds in ((1, True, 3.0), (2, True, 1.0), (4, False, 0.0))
    )
    peaks = {"2": 20, "1": 5}
    asked: list[str] = []

    def compared(candidates, unrecorded, memory, say, steps):
        asked.extend(each["accumulate"] for each in candidates)
        return [trial.Trial(1.0, peaks[each["accumulate"]]) for each in candidates]

    def chosen(memory: int, number: int | None = None) -> tuple[LayoutRow | None, list[str]]:
        asked.clear()
        settings = {row: {"accumulate": str(row.layout.micro_batches)} for row in (slow, fast)}
        return choose([fast, slow, none], number, settings.__getitem__, memory, print)[0], asked

    monkeypatch.setattr(trial, "compared", compared)
    assert chosen(20) == (fast, ["2"])
    assert chosen(10) == (slow, ["2", "1"])
    assert chosen(4) == (None, ["2", "1"])
    assert chosen(20, 2) == (fast, ["2", "1"]), "as many as are asked for, however slow"
    monkeypatch.setattr(trial, "compared", lambda *given, **more: ["no such data"])
    with pytest.raises(ConfigError, match="2 micro-batches: no such data"):
        chosen(20)


# ---- the command ----


def run(*words: object, file: Path | None = None, status: int = 0) -> str:
    """What the command prints for these options and values, by default of a small model, on four ranks."""
    given: dict[object, object] = {"--memory": "1GiB", "--ranks": 4}
    given |= {} if file else {"--model": "gpt-tiny", "--batch": 32}
    given |= dict(zip(words[::2], words[1::2]))
    flags = [str(word) for pair in given.items() if pair[1] != "" for word in pair if word is not None]
    result = CliRunner().invoke(command, [*([str(file)] if file else []), *flags])
    assert result.exit_code == status, result.output
    if status == 2:
        assert result.output.strip().splitlines()[-1].startswith("Error: ")
    return result.output


def test_the_command_writes_settings_of_the_best(tmp_path: Path) -> None:
    file = tmp_path / "best.yaml"
    output = run("--local", 2, "--tflops", 1, "--output", file)
    assert "Best:" in output and "horovodrun -np 4 hvd-ckpt train --model gpt-tiny" in output
    settings = yaml.safe_load(file.read_text())
    assert settings["model"] == "gpt-tiny"
    replicas = 4 // settings.get("pipeline", 1) // settings.get("tensor", 1)
    assert settings["batch"] * replicas == 32
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "these change results" not in output
    assert "these change results" in run("--local", 2, "--inexact", None)
    run("--memory", "40MiB", "--ranks", 2, "--output", file)
    budget = Config.make(yaml.safe_load(file.read_text())).budget
    assert budget is not None and not budget.chunk_head


def test_a_file_of_settings_goes_in_and_one_that_fits_comes_out(tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text(
        "model: gpt-tiny\nbatch: 8\nsequence_length: 32\noptimizer: sgd\nlr: 0.1\nshard: parameters\n"
    )
    out = tmp_path / "best.yaml"
    assert "4 ranks, 32 samples" in run("--output", out, file=tmp_path / "train.yaml")
    settings = yaml.safe_load(out.read_text())
    assert (settings["lr"], settings["optimizer"], settings["sequence_length"]) == (0.1, "sgd", 32)
    assert Config.make(settings).model == "gpt-tiny"


@pytest.mark.parametrize(
    ("file", "arguments", "message"),
    [
        ("", ["--memory", "12"], "no layout fits; the smallest memory that would do is"),
        ("", ["--memory", "0.5x"], "give bytes, such as 3GiB"),
        ("", ["--memory", "a lot"], "--memory"),
        ("", ["--batch", "3", "--local", "1"], "--batch 3: it cannot be divided among 4 ranks"),
        ("", ["--ranks", "6", "--local", "4"], "--ranks 6: give a multiple of --local 4"),
        ("", ["--batch", ""], "--batch is missing"),
        ("", ["--model", "gpt-tinny"], "did you mean 'gpt-tiny'"),
        ("", ["--optimizer", "adamv"], "adamv"),
        ("", ["--optimizer-option", "momentum=1"], "optimizer 'adamw': "),
        ("", ["--precision", "apex-O1"], "precision must be one of fp32, bf16, fp16, bf16-params, not 'apex-O1'"),
        ("", ["--freeze", "none*"], "freeze: no parameter fits"),
        ("", ["--output", "best.png"], "give one for settings"),
        ("model_options: layers=2", ["--model-option", "width=32"], "model_options"),
        ("pipeline: 4", ["--ranks", "2"], "--batch is missing: 2 ranks cannot be divided into pipeline 4 and tensor 1"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line_with_status_2(tmp_path, monkeypatch, file, arguments, message) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.yaml").write_text(f"model: gpt-tiny\n{file}\n")
    assert message in run(*arguments, file=Path("train.yaml") if file else None, status=2)
    assert [path.name for path in tmp_path.iterdir()] == ["train.yaml"]


OWN = """
import torch

def example(*layers, batch):
    return torch.nn.Sequential(*layers), (torch.randn(batch, 8),), lambda output: output.square().mean()

def norms(batch=8):
    return example(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1), batch=batch)

def no_chain(batch=8):
    return torch.nn.Linear(8, 8), *example(batch=batch)[1:]
"""


def test_a_model_of_ones_own(tmp_path, monkeypatch) -> None:
    (tmp_path / "own_layouts.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in sys.path if path])
    given = ["--batch", 16, "--memory", "64MiB", "--ranks", 2]
    run(*given, "--model", "own_layouts:norms", "--freeze", "0.*", "--batch-norm", "synchronized")
    config = Config("own_layouts:norms", freeze="0.*", batch_norm="synchronized")
    model, _ = first_step(config, torch.device("cpu"))
    assert isinstance(model[1], SyncBatchNorm)
    assert [parameter.requires_grad for parameter in model.parameters()] == [False] * 2 + [True] * 4
    output = run(*given, "--model", "own_layouts:no_chain", status=2)
    assert "Error: --ranks 2: a layout cannot be predicted, since" in output


def test_a_layout_ends_as_a_training_does(monkeypatch: pytest.MonkeyPatch) -> None:
    watched: list[float | None] = []

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    def ended(status: int, text: str = "") -> None:
        print(text)
        sys.exit(status)

    monkeypatch.setattr(ending, "exit_now", ended)
    monkeypatch.setattr(watchdog, "watch", watched.append)
    monkeypatch.setattr(ancestry, "end_with_parent", lambda: watched.append(None))
    monkeypatch.setattr("hvd_ckpt.app.cli.layout.job_of", interrupted)
    assert run("--stall-timeout", 77, status=130) == "interrupted\n"
    assert watched == [None, 77.0]


def test_links_are_measured_before_anything_starts_horovod(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    def build(*arguments: object) -> None:
        called.append("model")
        raise ConfigError("no such model")

    monkeypatch.setattr(links, "measure", lambda: called.append("links"))
    monkeypatch.setattr(runtime, "init", lambda: called.append("init"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("hvd_ckpt.app.training.build.first_step", build)
    assert run("--ranks", "", status=2).splitlines()[-1] == "Error: no such model"
    assert called == ["links", "model"]
