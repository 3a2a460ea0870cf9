"""Snapshots: what goes in comes out bit for bit, and damage of any kind is found before anything is used."""

from __future__ import annotations

import copy
import errno
import hashlib
import json
import math
import os
import pickle
import random
import resource
import shutil
import struct
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

from hvd_ckpt.snapshots import snapshot
from hvd_ckpt.snapshots.snapshot import SnapshotError


def write(
    folder: Path, step: int = 1, common: Any = None, own: Any = None, weights: dict[str, Any] | None = None
) -> Path:
    return snapshot.write(folder, step, weights=weights or {}, common=common, own=own)


def round_trip(folder: Path, value: Any) -> Any:
    """The value from common and from own, which must agree."""
    path = write(folder, common=value, own=value)
    found = snapshot.read(path)
    assert same(found.common, found.own)
    return found.common


def same(one: Any, other: Any) -> bool:
    """Equal in type, order and every bit (but nan's)."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        if one.dtype != other.dtype or one.shape != other.shape or one.stride() != other.stride():
            return False
        ours, theirs = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
        return torch.equal(ours, theirs)
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return (math.isnan(one) and math.isnan(other)) or struct.pack("d", one) == struct.pack("d", other)
    return bool(one == other)


texts = st.text(st.characters(), max_size=5) | st.sampled_from(
    ["$tuple", "$", "$tensor", "\ud800", "a.b", ""]
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | texts
    | st.binary(max_size=5)
)
keys = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=2).map(tuple),
    max_leaves=3,
)
dtypes = st.sampled_from(
    [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint16, torch.complex128]
)
tensors = st.builds(
    lambda shape, dtype: torch.randint(0, 2, shape).to(dtype), st.lists(st.integers(0, 3), max_size=3), dtypes
)
trees = st.recursive(
    scalars | tensors,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(texts, inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree=trees)
def test_any_tree_comes_back(tmp_path: Path, tree: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)  # which takes most of the time
        assert same(round_trip(tmp_path, tree), tree)


def test_every_kind_of_tensor_comes_back(tmp_path: Path) -> None:
    images = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    tree: dict[str, Any] = {
        str(dtype): torch.arange(6).to(dtype)
        for dtype in (torch.uint32, torch.uint64, torch.int8, torch.float64, torch.complex64)
    }
    tree |= {
        "small floats": torch.randn(9).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(math.inf),
        "images": images,
        "transposed": torch.randn(3, 4).t(),
        "10": 10**5000,
        "numbers": [-0.0, 5e-324, 0.1, -math.inf, math.nan, True, 1, 1.0, {1.0: None, False: ()}],
    }
    assert same(round_trip(tmp_path, tree), tree)
    rows = torch.randn(4, 6)
    views = {
        "every other": rows[:, ::2],
        "expanded": rows[0].expand(3, 6),
        "part": rows[1:3],
        "conjugate": tree["torch.complex64"].conj(),
    }
    found = round_trip(tmp_path, views)
    assert all(torch.equal(found[name], view) for name, view in views.items())
    converted = round_trip(tmp_path, [np.float32(0.1), np.int64(3), np.bool_(True), OrderedDict(a=1)])
    assert same(converted, [float(np.float32(0.1)), 3, True, {"a": 1}])


class Odd:
    def __reduce__(self) -> Any:
        return print, ("executed",)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (Odd(), r"own\.a\[0\] is a .*Odd, which snapshots do not hold: store numbers"),
        ({1}, "is a builtins.set"),
        (np.zeros(3), "is a numpy.ndarray.*store it as a tensor"),
        (np.datetime64(1, "s"), "is a datetime.datetime"),
        (torch.eye(2).to_sparse(), r"own\.a\[0\] is a sparse.*to_dense"),
        (torch.empty(2, device="meta"), "device 'meta'"),
        ({b"key": 1}, "has the key b'key' of bytes"),
    ],
)
def test_what_cannot_be_stored_is_named(tmp_path: Path, value: Any, says: str) -> None:
    before = write(tmp_path)
    with pytest.raises(SnapshotError, match=f"step 2 was not written to '{tmp_path}': rank 0: .*{says}"):
        write(tmp_path, 2, own={"a": [value]})
    assert list(tmp_path.iterdir()) == [before]


def test_wrong_arguments(tmp_path: Path) -> None:
    loop: list[Any] = []
    loop.append(loop)
    for arguments, says in [
        ({"common": loop}, "nested more than 100 deep, or within itself"),
        ({"step": -1}, "step is -1: give a whole number"),
        ({"weights": {"a": 1}}, "weights.*'a'.* is no tensor"),
        ({"weights": {"__metadata__": torch.ones(1)}}, "has the name '__metadata__'"),
    ]:
        with pytest.raises(SnapshotError, match=says):
            write(tmp_path, **arguments)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="keep is 0"):
        snapshot.prune(tmp_path, 0)


def test_weights_load_in_other_tools_and_tied_ones_stay_tied(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(7, 4), nn.BatchNorm1d(4), nn.Linear(4, 7, bias=False), nn.Linear(4, 7))
    model[2].weight = model[0].weight
    model.register_buffer("rows", model[3].weight.detach()[:3])
    path = write(tmp_path, 120, weights=model.state_dict())
    assert path.name == "step-00000120"
    stored = load_file(path / "model.safetensors")
    assert set(model.state_dict()) - set(stored) == {"2.weight"}
    assert all(torch.equal(stored[name], model.state_dict()[name]) for name in stored)
    found = snapshot.read(path)
    assert found.manifest.aliases == {"2.weight": "0.weight"}
    assert found.weights["2.weight"] is found.weights["0.weight"]
    assert same(dict(sorted(found.weights.items())), dict(sorted(model.state_dict().items())))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.01), amsgrad=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters),
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, max_iter=3, history_size=2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_goes_on_bit_for_bit(tmp_path: Path, name: str) -> None:
    # LBFGS takes contiguous gradients only.
    memory_format = torch.contiguous_format if name == "LBFGS" else torch.channels_last
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2)).to(memory_format=memory_format)
    inputs = torch.randn(5, 3, 4, 4).to(memory_format=memory_format)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(inputs).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)

    optimizer = OPTIMIZERS[name](model.parameters())
    for _ in range(3):
        step(model, optimizer)
    path = write(tmp_path, weights=model.state_dict(), common=optimizer.state_dict())
    found = snapshot.read(path)
    assert same(found.common, optimizer.state_dict())
    resumed = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in resumed.parameters():
            parameter.zero_()
    resumed.load_state_dict(found.weights)
    fresh = OPTIMIZERS[name](resumed.parameters())
    fresh.load_state_dict(found.common)
    for each in ((model, optimizer), (resumed, fresh)):
        step(*each)
        step(*each)
    assert all(map(torch.equal, model.parameters(), resumed.parameters()))


# -------------------------------------------------------------------------------------------- damage


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two snapshots, of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("good")
    weights = {"a": torch.randn(4, 3), "b": torch.arange(5)}
    weights["c"] = weights["a"]
    tree = {"lr": 0.1, "history": [1, 2, 3], "moment": torch.randn(7), 5: (None, b"x", math.inf)}
    for step in (1, 2):
        write(folder, step, common=tree, own={"state": torch.randn(3)}, weights=weights)
    return folder


FILES = [
    "manifest.json",
    "model.safetensors",
    "common.json",
    "common.safetensors",
    "rank-00000.json",
    "rank-00000.safetensors",
]


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "snapshots"))


@contextmanager
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def assert_found_out(folder: Path, says: str) -> None:
    """The newest snapshot is refused, and the one before found with a warning that says why."""
    path = folder / "step-00000002"
    with pytest.raises(SnapshotError, match=f"cannot be used: .*({says})") as refused:
        snapshot.read(path)
    message = str(refused.value)
    assert message.startswith(f"The snapshot '{path}' cannot be used: ") and message.endswith(".")
    assert "\n" not in message
    with pytest.warns(UserWarning, match=f"cannot be used: .*({says}).*Looking for the one before"):
        assert snapshot.find(folder) == folder / "step-00000001"


@pytest.mark.parametrize("name", FILES)
def test_truncation_and_flipped_bits_are_found(folder: Path, name: str) -> None:
    file = folder / "step-00000002" / name
    content = file.read_bytes()
    draw = random.Random(name)
    for _ in range(10):
        file.write_bytes(content[: draw.randrange(len(content))])
        assert_found_out(folder, name)
    for _ in range(30):
        flipped = bytearray(content)
        flipped[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        file.write_bytes(flipped)
        assert_found_out(folder, name)
    file.write_bytes(content)
    with no_warnings():
        assert snapshot.find(folder) == file.parent


def test_files_that_are_not_what_they_should_be(folder: Path) -> None:
    path = folder / "step-00000002"
    for name in FILES:
        file = path / name
        elsewhere = folder.parent / name
        spoils: list[tuple[Callable[[Path], object], str]] = [
            (Path.exists, "missing or too many|No such file"),
            (partial(os.symlink, elsewhere), f"{name}: it is a link, a folder or a device"),
            (Path.mkdir, f"{name}: it is a link, a folder or a device"),
            (os.mkfifo, f"{name}: it is a link, a folder or a device"),
        ]
        for spoil, says in spoils:
            file.rename(elsewhere)
            spoil(file)
            assert_found_out(folder, says)
            if file.is_dir():
                file.rmdir()
            else:
                file.unlink(missing_ok=True)
            elsewhere.rename(file)
    (path / "more").touch()
    assert_found_out(folder, '"more" is missing or too many')
    (path / "more").unlink()
    path.rename(folder.parent / "moved")
    path.symlink_to(folder.parent / "moved")
    assert_found_out(folder, "it is a link: name the folder itself")
    path.unlink()
    shutil.copytree(folder / "step-00000001", path)
    assert_found_out(folder, "it says step 1")
    with pytest.raises(SnapshotError, match="No such file"):
        snapshot.read(folder / "step-00000003")


def sign(path: Path, **changes: Any) -> None:
    """Makes the manifest fit the files and the changes, as somebody who means harm would."""
    document = json.loads((path / "manifest.json").read_bytes()) | changes
    document.pop("sha256")
    for name, facts in document["files"].items():
        if (path / name).is_file():
            content = (path / name).read_bytes()
            facts.update(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    document["sha256"] = hashlib.sha256(canonical.encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(document))


def test_a_manifest_is_checked_for_what_it_says(folder: Path) -> None:
    path = folder / "step-00000002"
    manifest = json.loads((path / "manifest.json").read_bytes())
    evil = {name.replace("common.json", "../common.json"): facts for name, facts in manifest["files"].items()}
    for changes, says in [
        ({"version": 3}, "is of version 3, and this library reads version 1 and 2"),
        ({"format": "a plan"}, '"format": "hvd_ckpt snapshot"'),
        ({"more": 1}, 'the key "more"'),
        ({"step": 2.0}, "step is 2.0"),
        ({"ranks": 10**9}, "ranks is 1000000000"),
        ({"ranks": 2}, "files are not the 7"),
        ({"files": evil}, r'files has "\.\./common.json"'),
        ({"aliases": {"c": "d"}}, 'alias "c" of "d"'),
        ({"aliases": {"a": "b"}}, 'alias "a" of "b"'),
        ({"time": None}, "time is null"),
    ]:
        (path / "manifest.json").write_text(json.dumps(manifest))
        sign(path, **changes)
        with pytest.raises(SnapshotError, match=f"manifest.json: .*{says}"):
            snapshot.read(path)


def test_nothing_is_executed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "step-00000002"
    manifest = (path / "manifest.json").read_bytes()
    for name in FILES:
        content = (path / name).read_bytes()
        (path / name).write_bytes(pickle.dumps(Odd()))
        assert_found_out(folder, name)
        if name != "manifest.json":
            sign(path)
            with pytest.raises(SnapshotError, match=name):
                snapshot.read(path)
        (path / name).write_bytes(content)
        (path / "manifest.json").write_bytes(manifest)
    assert "executed" not in capsys.readouterr().out


def header(entries: Any, data: bytes = b"") -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: Any, shape: Any, begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "cut off"),
        ((2**63).to_bytes(8, "little") + b"{}", "header is longer"),
        (header([]), "header is no object"),
        (header({}), "no metadata"),
        (header({"__metadata__": {}}, b"x"), "belong to no tensor"),
        (header({"__metadata__": {}, "a": entry("F32", [2], 0, 4)}, bytes(4)), "another size"),
        (header({"__metadata__": {}, "a": entry("F32", [1], 0, 2**40)}, bytes(4)), "not its place"),
        (header({"__metadata__": {}, "a": entry("F32", [1], 4, 8)}, bytes(8)), "not its place"),
        (header({"__metadata__": {}, "a": entry("F32", [-1], 0, 4)}, bytes(4)), "shape or an offset"),
        (header({"__metadata__": {}, "a": entry("F32", [True], 0, 4)}, bytes(4)), "shape or an offset"),
        (header({"__metadata__": {}, "a": entry("F3", [1], 0, 4)}, bytes(4)), 'the dtype "F3"'),
        (header({"__metadata__": {}, "a": entry("F32", [2**62, 2**62, 0], 0, 0)}), "no room"),
        (header({"__metadata__": {}, "a": entry("BOOL", [2], 0, 2)}, b"\1\2"), "truth values"),
        (header({"__metadata__": {"dtype of a": "float32"}, "a": entry("F32", [1], 0, 4)}, bytes(4)), "does not fit"),
        (header({"__metadata__": {}, "a": entry("F32", [1], 0, 4)}, bytes(4)), "belongs nowhere"),
    ],
)  # fmt: skip
def test_hostile_tensor_files(folder: Path, content: bytes, says: str) -> None:
    path = folder / "step-00000002"
    (path / "common.safetensors").write_bytes(content)
    (path / "common.json").write_text("{}")
    sign(path)
    with pytest.raises(SnapshotError, match=f"common.(safetensors|json): .*{says}"):
        snapshot.read(path)


@pytest.mark.parametrize(
    "tree",
    [
        {"$tensor": "none"}, {"$tensor": "common.a", "$order": [0, 0]}, {"$tensor": ["common.a"]}, {"$order": [0]},
        {"$tuple": 1}, {"$tuple": [], "more": 1}, {"$int": "12"}, {"$int": "0x"}, {"$float": "1"}, {"$bytes": "?"},
        {"$bytes": [1]}, {"$text": "/w=="}, {"$dict": [[1]]}, {"$dict": [[1, 1], [1, 2]]}, {"$dict": [[[], 1]]},
        {"$eval": "1"}, {"$": []}, [{"$tensor": "common.a"}, {"$tensor": "common.a"}],
    ],
)  # fmt: skip
def test_hostile_trees(tmp_path: Path, tree: Any) -> None:
    path = write(tmp_path, common={"a": torch.ones(2)})
    (path / "common.json").write_text(json.dumps(tree))
    sign(path)
    with pytest.raises(SnapshotError, match=r"common.json: "):
        snapshot.read(path)


def test_deep_and_huge_json(tmp_path: Path) -> None:
    path = write(tmp_path)
    for content in (b"[" * 10**5, b"[" * 300 + b"]" * 300, b"1e999", b"9" * 10**4, b"NaN", b'{"a":1,"a":2}'):
        (path / "common.json").write_bytes(content)
        sign(path)
        with pytest.raises(SnapshotError, match=r"common.json: "):
            snapshot.read(path)


# -------------------------------------------------------------------------------------------- folders


def test_newest_find_and_prune(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "snapshots"
    assert snapshot.newest(folder) is None and snapshot.find(folder) is None
    paths = [write(folder, step, common=step) for step in (9, 10, 100_000_000, 20)]
    for name in (".step-00000021.tmp-0123abcd", "step-22", "other"):
        (folder / name).mkdir()
    assert snapshot.newest(folder) == snapshot.find(folder) == paths[2]
    (paths[2] / "common.json").unlink()
    assert snapshot.newest(folder) == paths[3]
    snapshot.prune(folder, keep=2)
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        ["step-00000010", "step-00000020", "step-100000000", "step-22", "other"]
    )
    for path in paths[1], paths[3]:
        (path / "common.json").write_text("{}")
    with (
        pytest.warns(UserWarning, match="cannot be used"),
        pytest.raises(SnapshotError, match="None of the snapshots in .*step-100000000"),
    ):
        snapshot.find(folder)


def test_a_step_written_again_replaces_the_old_one_when_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, 5, common="old")
    with pytest.raises(SnapshotError):
        write(tmp_path, 5, common=Odd())
    assert snapshot.read(path).common == "old"
    rename = os.rename

    def fail_for_new(source: Any, target: Any) -> None:
        if ".tmp-" in str(source):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail_for_new)
        with pytest.raises(SnapshotError, match="rank 0: Input/output error"):
            write(tmp_path, 5, common="newer")
    assert [snapshot.read(one).common for one in tmp_path.iterdir()] == ["old"]
    assert write(tmp_path, 5, common="new") == path
    assert [snapshot.read(one).common for one in tmp_path.iterdir()] == ["new"]
    replaced = path.rename(tmp_path / ".step-00000005.old-01234567")  # killed between two renames
    assert snapshot.find(tmp_path) == snapshot.newest(tmp_path) == replaced
    snapshot.prune(tmp_path, 1)
    assert snapshot.read(replaced).common == "new"
    write(tmp_path, 5, common="newer")
    snapshot.prune(tmp_path, 1)
    assert [snapshot.read(one).common for one in tmp_path.iterdir()] == ["newer"]


def test_all_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, os.rename

    def synced(descriptor: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def renamed(path: Any, target: Any) -> None:
        events.append("rename")
        rename(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    write(tmp_path)
    temporary = events[-3]
    assert temporary.startswith(".step-00000001.tmp-")
    assert events[-4:] == ["manifest.json", temporary, "rename", tmp_path.name]
    assert sorted(events[:-3]) == sorted(FILES)


@contextmanager
def file_size_limit(limit: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def without_rights(folder: Path) -> Iterator[None]:
    folder.chmod(0o555)
    root = os.geteuid() == 0
    if root:  # for whom nothing is read-only
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        folder.chmod(0o755)


def test_a_full_disk_and_a_read_only_folder_leave_what_is_there(tmp_path: Path) -> None:
    before = write(tmp_path, 1, common="before")
    weights = {"a": torch.randn(100_000)}
    for limit in (0, 100, 3000, 300_000):
        with (
            file_size_limit(limit),
            pytest.raises(SnapshotError, match="rank 0: File too large.*: make room"),
        ):
            write(tmp_path, 2, weights=weights)
    with without_rights(tmp_path), pytest.raises(SnapshotError, match="rank 0: Permission denied"):
        write(tmp_path, 2, weights=weights)
    assert list(tmp_path.iterdir()) == [before] == [snapshot.find(tmp_path)]
    (tmp_path / "file").touch()
    with pytest.raises(SnapshotError, match="Not a directory|File exists"):
        write(tmp_path / "file" / "snapshots", 2)


# -------------------------------------------------------------------------------------------- random state


def draws() -> list[Any]:
    return [
        torch.rand(3).tolist(),
        np.random.rand(3).tolist(),
        np.random.randn(),
        random.random(),
        random.gauss(0, 1),
    ]


def test_random_state_comes_back(tmp_path: Path) -> None:
    np.random.randn()  # NumPy and Python keep every second normal number
    random.gauss(0, 1)
    path = write(tmp_path, own=snapshot.random_state())
    expected = draws()
    draws()
    state = snapshot.read(path).own
    snapshot.set_random_state(state)
    assert draws() == expected

    snapshot.set_random_state(state)
    numbers = copy.deepcopy(state["numpy"])
    numbers["state"]["pos"] = 10**9
    for broken in (
        None,
        {},
        state | {"torch": torch.zeros(3)},
        state | {"numpy": numbers},
        state | {"python": (3, (1,), None)},
    ):
        with pytest.raises(SnapshotError, match="random state cannot be restored"):
            snapshot.set_random_state(broken)
    assert draws() == expected
