"""Tests of plan files: plans are read back unchanged, and a damaged or hostile file gives one clear error."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from hvd_ckpt.planning.plan import BlockPlan, Cost, Plan, PlanError
from hvd_ckpt.planning.policy import KEEP, CheckpointPolicy
from hvd_ckpt.recompute.tape import Policy
from hvd_ckpt.utils import plain_data

CALLS = ("layer_norm", "linear", "gelu", "linear", "__add__")
DROP = CheckpointPolicy("drop layer_norm, gelu", Policy(CALLS, frozenset({0, 2})))
RECOMPUTE = CheckpointPolicy("recompute", recompute=True)


def make_plan() -> Plan:
    layer = ((8,), (8,), (32, 8), (32,), (8, 32), (8,))
    blocks = (
        BlockPlan(("embedding",), "Embedding", ((100, 8),), KEEP, 4096, 0.0),
        BlockPlan(("layers.0",), "Layer", layer, DROP, 2048, 0.0021),
        BlockPlan(("layers.1",), "Layer", layer, DROP, 2048, 0.0021),
        BlockPlan(("layers.2", "layers.3"), "Layer+Layer", layer + layer, RECOMPUTE, 1024, -0.0004),
        BlockPlan(("layers.4",), "Layer", layer, KEEP, 8192),
        BlockPlan(("head",), "Linear", ((100, 8), (100,)), KEEP, 512),
    )
    return Plan(
        blocks=blocks,
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


def test_a_plan_is_printed_in_two_lines() -> None:
    first, second = str(make_plan()).splitlines()
    assert first == "Plan of 6 blocks: keep 3, drop 2, recompute 1 (budget 19.53 KiB)"
    assert second == "  a step: 17.58 KiB, 100.0 ms (measured); without recomputation 39.06 KiB, 100.0 ms"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plans")


@pytest.fixture(scope="module")
def written(folder: Path) -> bytes:
    make_plan().save(folder / "plan.json")
    return (folder / "plan.json").read_bytes()


def error_of(folder: Path, content: bytes) -> str:
    """The message of the error that a file with this content ends in."""
    path = folder / "wrong.json"
    path.write_bytes(content)
    with pytest.raises(PlanError) as caught:
        Plan.load(path)
    message = str(caught.value)
    assert message.startswith(f"The plan file '{path}' cannot be used: ")
    assert "\n" not in message and message.endswith(".") and len(message) < len(str(path)) + 400
    return message


def test_a_plan_comes_back_as_it_was(written: bytes, folder: Path) -> None:
    assert Plan.load(folder / "plan.json") == make_plan()
    Plan((), (), measured=None, budget=None).save(folder / "empty.json")
    assert Plan.load(str(folder / "empty.json")) == Plan((), ())


def test_the_file_is_for_people(written: bytes) -> None:
    content = json.loads(written)
    assert (content["format"], content["version"]) == ("hvd_ckpt plan", 2)
    titles = [block["policy"]["title"] for block in content["plan"]["blocks"]]
    assert titles == ["keep", DROP.title, DROP.title, "recompute", "keep", "keep"]
    assert content["plan"]["items"] == [0, [1, [2, 3]], 4, 5]
    lines = [line.strip() for line in written.decode().splitlines()]
    assert '"calls": ["layer_norm", "linear", "gelu", "linear", "__add__"],' in lines
    assert all(len(line) <= 120 for line in lines)


def test_a_plan_that_could_not_be_read_back_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    make_plan().save(path)
    before = path.read_bytes()
    with pytest.raises(PlanError, match="cannot be written"):
        dataclasses.replace(make_plan(), predicted=Cost(5, math.nan)).save(path)
    with pytest.raises(OSError):  # noqa: PT011  # whichever it is
        make_plan().save(tmp_path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["plan.json"]


NESTED: list[object] = [0]
for _ in range(150):
    NESTED = [NESTED]


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        ("['format']", "something", r"format .*hvd_ckpt plan"),
        ("['version']", True, "version is true"),
        ("['plan']['new']", 1, "plan.new"),
        ("['plan']['blocks'][1]['policy']['selective']['dropped'][1]", 5, r"blocks\[1\].policy.* 5 .*5 calls"),
        ("['plan']['blocks'][1]['policy']['selective']['lossy']", "bfloat16", r"selective.*lossy"),
        ("['plan']['blocks'][3]['policy']['recompute']", 1, r"blocks\[3\].policy.recompute is 1"),
        ("['plan']['blocks'][3]['members']", ["layers.2", "other.3"], r"blocks\[3\].*members.*other.3"),
        ("['plan']['blocks'][3]['members']", [], r"blocks\[3\].*members"),
        ("['plan']['blocks'][1]['kind']", "La\x1b[31myer", r"blocks\[1\].kind.*printable"),
        ("['plan']['blocks'][1]['kind']", "L" * 2000, r"blocks\[1\].kind.*1000 characters"),
        ("['plan']['blocks'][1]['parameters'][2][0]", 32.0, r"blocks\[1\].parameters\[2\]\[0\] is 32.0"),
        ("['plan']['blocks'][1]['kept_bytes']", 2**80, "kept_bytes"),
        ("['plan']['items'][4:]", [4], "plan: items .*0 to 5"),
        ("['plan']['items'][2]", [], "plan.items"),
        ("['plan']['items'][0]", "head", 'plan.items.*"head"'),
        ("['plan']['items'][0:1]", NESTED, "nested more than 64 deep"),
        ("['plan']['items']", [[0, 1], 2, 3, 4, 5], "not in one container"),
        ("['plan']['smallest'][1]", -0.5, r"plan.smallest\[1\] is -0.5"),
        ("['plan']['smallest'][1]", 1e400, r"plan.smallest\[1\] is inf"),
        ("['plan']['timelines']['soon']", [], '"soon"'),
        ("['plan']['budget']", {}, "plan.budget is an object"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named_with_its_place(
    written: bytes, folder: Path, place: str, value: object, says: str
) -> None:
    changed = json.loads(written)
    exec(f"changed{place} = value", {"changed": changed, "value": value})
    with pytest.raises(PlanError, match=says):
        raise PlanError(error_of(folder, json.dumps(changed).replace("Infinity", "1e999").encode()))


def test_a_missing_key_that_decides_what_a_plan_does_is_named(written: bytes, folder: Path) -> None:
    for *places, last in (
        ["plan"],
        ["plan", "items"],
        ["plan", "blocks", 3, "members"],
        ["plan", "blocks", 3, "policy"],
        ["plan", "blocks", 1, "policy", "selective", "dropped"],
    ):
        content = json.loads(written)
        inner = content
        for place in places:
            inner = inner[place]
        del inner[last]
        assert f"{last} is missing" in error_of(folder, json.dumps(content).encode())


@pytest.mark.parametrize("content", [b"[1, 2]", b" " * (plain_data.MAX_BYTES + 1)], ids=["list", "large"])
def test_a_file_that_is_not_a_plan_at_all(folder: Path, content: bytes) -> None:
    error_of(folder, content)


def test_folders_and_devices_are_no_plan_files_and_a_missing_file_is_missing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")  # opening it would wait for a writer
    for path in (tmp_path, tmp_path / "fifo", Path("/dev/zero")):
        with pytest.raises(PlanError, match=f"'{path}' cannot be used: it is a folder or a device"):
            Plan.load(path)
    with pytest.raises(FileNotFoundError):
        Plan.load(tmp_path / "nothing.json")


class Layer(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(hidden))


class Residual(Layer):
    pass


def plan_of(model: nn.Sequential, items: tuple[object, ...] = (0, 1, 2)) -> Plan:
    return Plan(tuple(BlockPlan.of({name: child}, KEEP) for name, child in model.named_children()), items)


class Chain(nn.Sequential):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for child in self:
            hidden = hidden + child(hidden)
        return hidden


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (nn.Sequential(Layer(), Layer()), "this Sequential: it has no module '2'"),
        (nn.Sequential(Layer(), Residual(), Layer()), "block '1' is of class Residual, the plan was made for Layer"),
        (
            nn.Sequential(Layer(), Layer(), Layer(6)),
            r"parameter 0 of block '2' has the shape \[6, 6\], the plan was made for \[4, 4\]",
        ),
        (Chain(Layer(), Layer(), Layer()), "'the model' is not a plain nn.Sequential"),
    ],
)  # fmt: skip
def test_a_plan_that_does_not_fit_says_which_block_and_why(
    tmp_path: Path, model: nn.Sequential, says: str
) -> None:
    whole = nn.Sequential(Layer(), Layer(), Layer())
    plan_of(whole, (0, (1, 2)) if type(model) is Chain else (0, 1, 2)).save(tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    plan.check(whole)
    with pytest.raises(PlanError, match=says):
        plan.apply(model)
    assert all(type(child) in (Layer, Residual) for child in model)  # nothing was applied
