"""Tests of plan files: plans are read back and reused unchanged, and a damaged or hostile file gives one clear error."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import math
import operator
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from residual import Residual
from torch import nn

import hvd_ckpt as hc
from hvd_ckpt.planning.plan import BlockPlan, Cost, Plan, PlanError
from hvd_ckpt.planning.policy import KEEP, CheckpointPolicy, in_chunks
from hvd_ckpt.recompute.tape import Policy
from hvd_ckpt.utils import plain_data

CALLS = ("layer_norm", "linear", "gelu", "linear", "__add__")
DROP = CheckpointPolicy("drop layer_norm, gelu", Policy(CALLS, frozenset({0, 2})))
RECOMPUTE = CheckpointPolicy("recompute", recompute=True)
LAYER = ((8,), (8,), (32, 8), (32,), (8, 32), (8,))
PLAN = Plan(
    blocks=(
        BlockPlan(("embedding",), "Embedding", ((100, 8),), KEEP, 4096, 0.0),
        BlockPlan(("layers.0",), "Layer", LAYER, DROP, 2048, 0.0021),
        BlockPlan(("layers.1",), "Layer", LAYER, DROP, 2048, 0.0021),
        BlockPlan(("layers.2", "layers.3"), "Layer+Layer", LAYER * 2, RECOMPUTE, 1024, -0.0004),
        BlockPlan(("layers.4",), "Layer", LAYER, KEEP, 8192),
        BlockPlan(("head",), "Linear", ((100, 8), (100,)), in_chunks(4), 512),
    ),
    items=(0, (1, (2, 3)), 4, 5),
    sample=(("torch.int64", (4, 16)), ("torch.float32", ())),
    budget=20_000,
    predicted=Cost(18_000, 0.11),
    measured=Cost(18_004, 0.1),
    baseline=Cost(40_000, 0.1),
    smallest=Cost(9_000, 0.19),
    frontier=(Cost(9_000, 0.19), Cost(18_000, 0.11), Cost(40_000, 0.1)),
    timelines={"before": ((0.0, 0), (0.05, 40_000)), "after": ((0.0, 0), (0.1, -16))},
)
MISSING = object()
NESTED: list[object] = [0]
for _ in range(150):
    NESTED = [NESTED]


def error_of(path: Path) -> str:
    """The message of the error that a file ends in."""
    with pytest.raises(PlanError) as caught:
        Plan.load(path)
    message = str(caught.value)
    assert message.startswith(f"The plan file '{path}' cannot be used: ")
    assert "\n" not in message and message.endswith(".") and len(message) < len(str(path)) + 400
    return message


def test_a_plan_is_written_for_people_and_comes_back_as_it_was(tmp_path: Path) -> None:
    first, second = str(PLAN).splitlines()
    assert first == "Plan of 6 blocks: keep 2, drop 2, recompute 1, cross 1 (budget 19.53 KiB)"
    assert second == "  a step: 17.58 KiB, 100.0 ms (measured); without recomputation 39.06 KiB, 100.0 ms"
    for plan in (Plan((), ()), PLAN):
        plan.save(tmp_path / "plan.json")
        assert Plan.load(str(tmp_path / "plan.json")) == plan
    content = json.loads((tmp_path / "plan.json").read_text())
    assert (content["format"], content["version"]) == ("hvd_ckpt plan", 2)
    titles = [block["policy"]["title"] for block in content["plan"]["blocks"]]
    assert titles == [block.policy.title for block in PLAN.blocks]
    assert content["plan"]["items"] == [0, [1, [2, 3]], 4, 5]
    lines = [line.strip() for line in (tmp_path / "plan.json").read_text().splitlines()]
    assert '"calls": ["layer_norm", "linear", "gelu", "linear", "__add__"],' in lines
    assert all(len(line) <= 120 for line in lines)


def test_a_plan_that_could_not_be_read_back_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    PLAN.save(path)
    with pytest.raises(PlanError, match="cannot be written"):
        dataclasses.replace(PLAN, predicted=Cost(5, math.nan)).save(path)
    with pytest.raises(OSError):  # noqa: PT011  # whichever it is
        PLAN.save(tmp_path)
    assert os.listdir(tmp_path) == ["plan.json"] and Plan.load(path) == PLAN


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        ("format", "something", r"format .*hvd_ckpt plan"),
        ("version", True, "version is true"),
        ("plan", MISSING, "plan is missing"),
        ("plan.new", 1, "plan.new"),
        ("plan.blocks.1.policy.selective.dropped", MISSING, "dropped is missing"),
        ("plan.blocks.1.policy.selective.dropped.1", 5, r"blocks\[1\].policy.* 5 .*5 calls"),
        ("plan.blocks.1.policy.selective.lossy", "bfloat16", r"selective.*lossy"),
        ("plan.blocks.3.policy", MISSING, "policy is missing"),
        ("plan.blocks.3.policy.recompute", 1, r"blocks\[3\].policy.recompute is 1"),
        ("plan.blocks.5.policy.chunks", 0, "chunks"),
        ("plan.blocks.3.members", MISSING, "members is missing"),
        ("plan.blocks.3.members", ["layers.2", "other.3"], r"blocks\[3\].*members.*other.3"),
        ("plan.blocks.3.members", [], r"blocks\[3\].*members"),
        ("plan.blocks.1.kind", "La\x1b[31myer", r"blocks\[1\].kind.*printable"),
        ("plan.blocks.1.kind", "L" * 2000, r"blocks\[1\].kind.*1000 characters"),
        ("plan.blocks.1.parameters.2.0", 32.0, r"blocks\[1\].parameters\[2\]\[0\] is 32.0"),
        ("plan.blocks.1.kept_bytes", 2**80, "kept_bytes"),
        ("plan.items", MISSING, "items is missing"),
        ("plan.items", [0, [1, [2, 3]], 4, 4], "plan: items .*0 to 5"),
        ("plan.items.2", [], "plan.items"),
        ("plan.items.0", "head", 'plan.items.*"head"'),
        ("plan.items.0", NESTED, "nested more than 64 deep"),
        ("plan.items", [[0, 1], 2, 3, 4, 5], "not in one container"),
        ("plan.smallest.1", -0.5, r"plan.smallest\[1\] is -0.5"),
        ("plan.smallest.1", 1e400, r"plan.smallest\[1\] is inf"),
        ("plan.timelines.soon", [], '"soon"'),
        ("plan.budget", {}, "plan.budget is an object"),
    ],
)  # fmt: skip
def test_a_wrong_or_missing_value_is_named_with_its_place(tmp_path, place: str, value, says: str) -> None:
    PLAN.save(tmp_path / "plan.json")
    content = json.loads((tmp_path / "plan.json").read_text())
    *outer, last = [int(key) if key.isdigit() else key for key in place.split(".")]
    inner: Any = functools.reduce(operator.getitem, outer, content)
    if value is MISSING:
        del inner[last]
    else:
        inner[last] = value
    (tmp_path / "plan.json").write_text(json.dumps(content).replace("Infinity", "1e999"))
    assert re.search(says, error_of(tmp_path / "plan.json"))


def test_what_is_no_plan_file_at_all(tmp_path: Path) -> None:
    for content in (b"[1, 2]", b" " * (plain_data.MAX_BYTES + 1)):
        (tmp_path / "wrong.json").write_bytes(content)
        error_of(tmp_path / "wrong.json")
    os.mkfifo(tmp_path / "fifo")  # opening it would wait for a writer
    for path in (tmp_path, tmp_path / "fifo", Path("/dev/zero")):
        assert "it is a folder or a device" in error_of(path)
    with pytest.raises(FileNotFoundError):
        Plan.load(tmp_path / "nothing.json")


class Layer(nn.Sequential):
    """A layer of its own kind."""


class Chain(nn.Sequential):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden)


def linear(kind: type[nn.Sequential] = nn.Sequential, width: int = 4) -> nn.Sequential:
    return kind(nn.Linear(width, width), nn.ReLU())


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (nn.Sequential(linear(), linear()), "this Sequential: it has no module '2'"),
        (nn.Sequential(linear(), linear(Layer), linear()), "block '1' is of class Layer, the plan was made for Sequential"),
        (
            nn.Sequential(linear(), linear(), linear(width=6)),
            r"parameter 0 of block '2' has the shape \[6, 6\], the plan was made for \[4, 4\]",
        ),
        (Chain(linear(), linear(), linear()), "'the model' is not a plain nn.Sequential"),
    ],
)  # fmt: skip
def test_a_plan_that_does_not_fit_says_which_block_and_why(model: nn.Sequential, says: str) -> None:
    whole = nn.Sequential(linear(), linear(), linear())
    blocks = tuple(BlockPlan.of({name: child}, KEEP) for name, child in whole.named_children())
    plan = Plan(blocks, (0, (1, 2)) if type(model) is Chain else (0, 1, 2))
    plan.check(whole)
    with pytest.raises(PlanError, match=says):
        plan.apply(model)
    assert all(type(child) in (Layer, nn.Sequential) for child in model)  # nothing was applied
    in_a_chunk = dataclasses.replace(blocks[0], policy=in_chunks(4))
    with pytest.raises(PlanError, match=r"'0' is of class Sequential, and only an nn\.Linear"):
        Plan((in_a_chunk,), (0,)).apply(whole)


# ---- reuse ----


class Counted:
    """A loss that counts how often it is computed."""

    def __init__(self, factor: float = 1.0) -> None:
        self.calls, self.factor = 0, factor

    def loss(self, output: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.factor * output.square().mean()


def test_a_plan_is_reused_while_nothing_changes_that_it_depends_on(tmp_path, monkeypatch, quick_planner):
    def chain() -> nn.Sequential:
        return nn.Sequential(*(Residual() for _ in range(3)))

    made = []

    def planned(model=None, sample=32, loss=1.0, **options):
        """Whether a plan was made anew."""
        counted = Counted(loss)
        options = {"budget": None, "cache": tmp_path / "plans", **options}
        made.append(hc.plan(model or chain(), torch.randn(sample, 16), loss=counted.loss, **options))
        return bool(counted.calls)

    assert planned() and not planned() and made[0] == made[1]
    (file,) = (tmp_path / "plans").iterdir()
    assert planned(sample=33) and not planned(sample=33)
    assert planned(loss=2.0)
    assert planned(budget="2x") and planned(autocast=torch.bfloat16) and planned(budget="80%")
    other = chain()
    other[1].drop.p = 0.3
    assert planned(other)
    other[1].drop.p = 0.2
    assert not planned(other)
    other[1].sizes = [1, (2, 3)]
    assert planned(other) and not planned(copy.deepcopy(other))
    other[2].up.weight = other[1].up.weight
    assert planned(other)
    for place, value in (
        ("residual.Residual.forward", lambda self, x: self.up(self.norm(x))[:, :16]),
        ("torch.get_num_threads", lambda: 64),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, value)
            assert planned()
        assert not planned()
    file.write_text(file.read_text()[:-40])
    assert planned() and not planned()
