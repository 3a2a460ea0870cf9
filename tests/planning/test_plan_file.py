"""Plans as files: what is written comes back, and no damaged or hostile file gives anything but one clear error."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hvd_ckpt import json_file
from hvd_ckpt.planning.plan import BlockPlan, Cost, Plan, PlanError, kind_of, parameter_shapes
from hvd_ckpt.planning.treatment import KEEP, Treatment
from hvd_ckpt.recompute.tape import Policy

CALLS = ("layer_norm", "linear", "gelu", "linear", "__add__")
DROP = Treatment("drop layer_norm, gelu", Policy(CALLS, frozenset({0, 2})))
RECOMPUTE = Treatment("recompute", recompute=True)


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
        keep_everything=Cost(40_000, 0.1),
        smallest=Cost(9_000, 0.19),
        frontier=(Cost(9_000, 0.19), Cost(18_000, 0.11), Cost(40_000, 0.1)),
        timelines={"before": ((0.0, 0), (0.05, 40_000)), "after": ((0.0, 0), (0.1, -16))},
    )


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
    assert sorted(path.name for path in folder.iterdir() if path.suffix != ".json") == []


def test_the_file_is_for_people(written: bytes) -> None:
    content = json.loads(written)
    assert (content["format"], content["version"]) == ("hvd_ckpt plan", 1)
    assert [treatment["title"] for treatment in content["treatments"]] == ["keep", DROP.title, "recompute"]
    assert content["items"] == ["embedding", ["layers.0", ["layers.1", "layers.2..3"]], "layers.4", "head"]
    lines = written.decode().splitlines()
    assert len(lines) < 90
    assert max(map(len, lines)) <= 120


def test_a_plan_that_could_not_be_read_back_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    make_plan().save(path)
    before = path.read_bytes()
    for wrong in (
        dataclasses.replace(make_plan(), predicted=Cost(5, math.nan)),
        dataclasses.replace(make_plan(), items=(0, 1, 2, 3, 4)),
    ):
        with pytest.raises(PlanError, match="The plan cannot be written to .*: (predicted.seconds|items) "):
            wrong.save(path)
    with pytest.raises(OSError):  # noqa: PT011  # whichever it is
        make_plan().save(tmp_path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["plan.json"]


def change(content: object, place: str, value: object) -> bytes:
    """The file with the value at ``place`` (Python's subscripts) replaced; a missing one is added."""
    changed = copy.deepcopy(content)
    exec(f"changed{place} = value", {"changed": changed, "value": value})
    return json.dumps(changed).encode()


NESTED = [["embedding"]]
for _ in range(150):
    NESTED = [NESTED]


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        ("['format']", "something", '"format": "hvd_ckpt plan"'),
        ("['version']", 2, "of version 2, and this library reads version 1"),
        ("['version']", True, "of version true"),
        ("['new']", 1, "new is nothing this version of hvd_ckpt knows"),
        ("['treatments'][1]['lossy']", "bf16", r"treatments\[1\].lossy is nothing this version"),
        ("['treatments'][1]['policy']['dropped'][1]", 5, r"treatments\[1\].policy.dropped has the number 5, and there are 5 calls"),
        ("['treatments'][1]['policy']['dropped'][1]", -1, r"dropped\[1\] is -1, and must be a whole number from 0"),
        ("['treatments'][1]['policy']['dropped'][1]", 0, "dropped has an entry twice"),
        ("['treatments'][1]['policy']['calls'][1]", 7, r"calls\[1\] is 7, and must be a text"),
        ("['treatments'][1]['policy']['lossy']", "load", r"treatments\[1\].policy cannot be: lossy must be 'float16' or"),
        ("['treatments'][2]['recompute']", 1, "recompute is 1, and must be true or false"),
        ("['treatments']", [], r"blocks\[0\].treatment is 0, and there are 0 treatments"),
        ("['blocks'][3]['treatment']", 3, r"blocks\[3\].treatment is 3, and there are 3 treatments"),
        ("['blocks'][3]['members']", ["layers.2", "other.3"], r"blocks\[3\].members are not different modules of one container"),
        ("['blocks'][3]['members']", [], r"blocks\[3\].members is empty"),
        ("['blocks'][1]['kind']", "La\x1b[31myer", r"blocks\[1\].kind is .*u001b.*, and must be printable"),
        ("['blocks'][1]['kind']", "L" * 2000, "of at most 1000 characters"),
        ("['blocks'][1]['parameters'][2][0]", 32.0, r"blocks\[1\].parameters\[2\]\[0\] is 32.0, and must be a whole number"),
        ("['blocks'][1]['kept_bytes']", -5, "kept_bytes is -5"),
        ("['blocks'][1]['kept_bytes']", 2**80, "kept_bytes is a very large number"),
        ("['blocks'][1]", 5, r"blocks\[1\] is 5, and must be an object"),
        ("['items'][0]", "head", r'items\[0\] is "head" where the block "embedding" stands'),
        ("['items'][4:]", ["embedding"], r'items\[4\] is "embedding" where the blocks end'),
        ("['items'][3:]", [], 'items ends before the block "head"'),
        ("['items'][2]", [], r"items\[2\] is an empty segment"),
        ("['items'][1][1][0]", "layers.0", r'items\[1\]\[1\]\[0\] is "layers.0" where the block "layers.1" stands'),
        ("['items'][0:1]", NESTED, "nested more than 100 deep"),
        ("['items']", [["embedding", "layers.0"]], r"items\[0\] is a segment of blocks that are not in one container"),
        ("['predicted']", None, "predicted is null, and must be an object"),
        ("['measured']['peak_bytes']", "much", 'measured.peak_bytes is "much"'),
        ("['smallest']['seconds']", -0.5, "smallest.seconds is -0.5"),
        ("['sample'][0]", ["torch.int64"], r"sample\[0\] has 1 entries, and must have 2"),
        ("['timelines']['soon']", [], "timelines.soon is none of before, after"),
        ("['timelines']['after'][0][0]", "0", r"timelines.after\[0\]\[0\] is \"0\""),
        ("['budget']", {}, "budget is an object, and must be a whole number"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named_with_its_place(
    written: bytes, folder: Path, place: str, value: object, says: str
) -> None:
    with pytest.raises(PlanError, match=says):
        raise PlanError(error_of(folder, change(json.loads(written), place, value)))


def test_a_missing_key_is_named(written: bytes, folder: Path) -> None:
    for *places, last in (
        ["budget"],
        ["blocks", 3, "members"],
        ["measured", "seconds"],
        ["treatments", 1, "policy", "calls"],
    ):
        content = json.loads(written)
        inner = content
        for place in places:
            inner = inner[place]
        del inner[last]
        assert f"{last} is missing" in error_of(folder, json.dumps(content).encode())


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is no JSON, line 1 column 1: expecting value"),
        (b"\xff\xfe{}", "byte 0 is no UTF-8"),
        (b"[1, 2]", '"format": "hvd_ckpt plan"'),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"format": NaN}', "the value NaN"),
        (b'{"format": -Infinity}', "the value -Infinity"),
        (b'{"version": ' + b"9" * 10_000 + b"}", "too many digits"),
        (b'{"format": 1, "version": 1, "format": 2}', 'the key "format" is given twice'),
        (b" " * (json_file.MAX_BYTES + 1), "larger than 64 MiB"),
    ],
    ids=["empty", "utf-16", "list", "deep", "nan", "infinity", "digits", "twice", "large"],
)
def test_what_is_no_plan_at_all(folder: Path, content: bytes, says: str) -> None:
    assert says in error_of(folder, content)


def test_infinite_by_size_and_truncated(written: bytes, folder: Path) -> None:
    assert "smallest.seconds is Infinity" in error_of(folder, written.replace(b"0.19}", b"1e999}", 1))
    assert "is no JSON" in error_of(folder, written[: len(written) // 2])


def test_folders_and_devices_are_no_plan_files_and_a_missing_file_is_missing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")  # opening it would wait for a writer
    for path in (tmp_path, tmp_path / "fifo", Path("/dev/zero")):
        with pytest.raises(PlanError, match=f"'{path}' cannot be used: it is a folder or a device"):
            Plan.load(path)
    with pytest.raises(FileNotFoundError):
        Plan.load(tmp_path / "nothing.json")


def read_or_refuse(folder: Path, content: bytes) -> None:
    path = folder / "edited.json"
    path.write_bytes(content)
    try:
        plan = Plan.load(path)
    except PlanError:
        return
    if plan != make_plan():
        plan.save(path)
        assert Plan.load(path) == plan


HOSTILE = [
    None,
    True,
    -1,
    0,
    2,
    10**18,
    10**4000,
    0.5,
    -2.5,
    1e308,
    "",
    "\ud800",
    "layers.0",
    "__class__",
    [],
    {},
    [[]],
    {"a": 1},
]


def test_every_truncation_and_flipped_bit_gives_a_plan_or_a_plan_error(written: bytes, folder: Path) -> None:
    for at in range(0, len(written), 3):
        flipped = written[at] ^ (1 << at % 8)
        read_or_refuse(folder, written[:at] + bytes([flipped]) + written[at + 1 :])
    for at in range(0, len(written), 7):
        read_or_refuse(folder, written[:at])


@settings(max_examples=600, deadline=None)
@given(data=st.data())
def test_damaged_bytes_give_a_plan_or_a_plan_error(written: bytes, folder: Path, data: st.DataObject) -> None:
    content = bytearray(written)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        kind = data.draw(st.sampled_from(["flip", "cut", "drop", "insert", "truncate"]))
        if kind == "flip":
            content[at] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "cut":
            del content[at : at + data.draw(st.integers(1, 200))]
        elif kind == "insert":
            content[at:at] = data.draw(
                st.sampled_from([b"[", b"]", b'"', b"0", b"-", b"{}", b",", b"\x00", b"\\u0000", b"1e999"])
            )
        elif kind == "truncate":
            del content[at:]
        else:
            del content[at]
        if not content:
            break
    read_or_refuse(folder, bytes(content))


@settings(max_examples=600, deadline=None)
@given(data=st.data())
def test_edited_values_give_a_plan_or_a_plan_error(written: bytes, folder: Path, data: st.DataObject) -> None:
    root = {"": json.loads(written)}
    inner, key = root, ""
    while isinstance(inner[key], (dict, list)) and inner[key] and data.draw(st.integers(0, 4)):
        inner = inner[key]
        key = data.draw(
            st.sampled_from(sorted(inner)) if isinstance(inner, dict) else st.integers(0, len(inner) - 1)
        )
    kind = data.draw(st.sampled_from(["replace", "delete", "double"]))
    if kind == "replace":
        inner[key] = data.draw(st.sampled_from(HOSTILE))
    elif kind == "delete" and key != "":
        del inner[key]
    elif isinstance(inner, list):
        inner.insert(data.draw(st.integers(0, len(inner))), inner[key])
    elif isinstance(inner, dict):
        inner[data.draw(st.sampled_from(["x", "title", "members"]))] = inner[key]
    read_or_refuse(folder, json.dumps(root[""]).encode())


class Layer(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(hidden))


class Residual(Layer):
    pass


def plan_of(model: nn.Sequential, items: tuple[object, ...] = (0, 1, 2)) -> Plan:
    blocks = [
        BlockPlan((name,), kind_of([child]), parameter_shapes([child]))
        for name, child in model.named_children()
    ]
    return Plan(tuple(blocks), items)


def test_a_plan_that_does_not_fit_says_which_block_and_why(tmp_path: Path) -> None:
    plan_of(nn.Sequential(Layer(), Layer(), Layer())).save(tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    plan.check(nn.Sequential(Layer(), Layer(), Layer()))
    for model, says in (
        (nn.Sequential(Layer(), Layer()), "this Sequential: it has no module '2'"),
        (
            nn.Sequential(Layer(), Residual(), Layer()),
            "block '1' is of class Residual, the plan was made for Layer",
        ),
        (
            nn.Sequential(Layer(), Layer(), Layer(6)),
            r"parameter 0 of block '2' has the shape \[6, 6\], the plan was made for \[4, 4\]",
        ),
    ):
        with pytest.raises(PlanError, match=says):
            plan.apply(model)
        assert all(type(child) in (Layer, Residual) for child in model)  # nothing was applied


def test_a_plan_with_segments_needs_a_plain_sequential(tmp_path: Path) -> None:
    class Chain(nn.Sequential):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            for child in self:
                hidden = hidden + child(hidden)
            return hidden

    plan_of(nn.Sequential(Layer(), Layer(), Layer()), (0, (1, 2))).save(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="'the model' is no plain nn.Sequential"):
        Plan.load(tmp_path / "plan.json").apply(Chain(Layer(), Layer(), Layer()))


def test_a_loaded_plan_does_what_the_plan_did(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = nn.Sequential(Layer(), Layer(), Layer()), torch.randn(3, 4)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(inputs).square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = gradients()
    plan = plan_of(model, (0, (1, 2)))
    treated = dataclasses.replace(
        plan.blocks[0], treatment=Treatment("drop relu", Policy(("linear", "relu"), frozenset({1})))
    )
    plan = dataclasses.replace(plan, blocks=(treated, *plan.blocks[1:]))
    plan.save(tmp_path / "plan.json")
    Plan.load(tmp_path / "plan.json").apply(model)
    assert all(torch.equal(one, other) for one, other in zip(expected, gradients()))
