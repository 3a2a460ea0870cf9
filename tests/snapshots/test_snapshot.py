"""Tests of snapshots: values are restored bit for bit, and any damage is found before anything is used."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import pickle
import random
import shutil
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from same import same
from snapshot_files import file_size_limit, found_in, read_snapshot, sign, write
from torch import Tensor

from hvd_ckpt.snapshots import reader
from hvd_ckpt.snapshots.folder import SnapshotError
from hvd_ckpt.snapshots.training_state import random_state, set_random_state


def round_trip(folder: Path, value: Any) -> Any:
    """The value from the replicated and from the per-rank state, which must agree."""
    found = read_snapshot(write(folder, replicated=value, per_rank=value))
    assert same(found.replicated, found.per_rank)
    return found.replicated


texts = st.text(st.characters(), max_size=5) | st.sampled_from(["\ud800", "a.b", ""])
scalars = st.none() | st.booleans() | st.integers() | st.integers(-(2**1900), 2**1900) | st.floats() | texts
keys = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=2).map(tuple),
    max_leaves=3,
)
tensors = st.builds(
    lambda shape, dtype: torch.randint(0, 2, shape).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.bool, torch.uint16, torch.complex128]),
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


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree=trees)
def test_any_state_dict_round_trips(tmp_path: Path, tree: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)  # which takes most of the time
        assert same(round_trip(tmp_path, tree), tree)


def test_every_kind_of_tensor_round_trips(tmp_path: Path) -> None:
    dtypes = (torch.uint32, torch.uint64, torch.int8, torch.float64, torch.complex64)
    tree: dict[str, Any] = {str(dtype): torch.arange(6).to(dtype) for dtype in dtypes}
    tree |= {
        "small floats": torch.randn(9).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(math.inf),
        "images": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "transposed": torch.randn(3, 4).t(),
        "numbers": [-0.0, 5e-324, 10**500, -math.inf, math.nan, True, 1, 1.0, {1.0: None, False: ()}],
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


def nested_in_itself() -> Any:
    value: list[Any] = []
    value += [value, value]
    return value


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"per_rank": {"a": [Odd()]}}, r"per_rank\.a\[0\] is a .*Odd"),
        ({"per_rank": 10**1000}, "3322 bits"),
        ({"per_rank": [{1}]}, "set"),
        ({"per_rank": np.zeros(3)}, "numpy.ndarray"),
        ({"per_rank": {"a": torch.eye(2).to_sparse()}}, r"per_rank\.a.*to_dense"),
        ({"per_rank": torch.empty(2, device="meta")}, "device 'meta'"),
        ({"per_rank": {b"key": 1}}, "b'key' of bytes"),
        ({"replicated": nested_in_itself()}, "100 deep"),
        ({"weights": {"a": torch.ones(1, dtype=torch.complex128)}}, "tensors.*complex128"),
        ({"weights": {"a\n": torch.ones(1)}}, r"name 'weights/a.n'"),
    ],
)
def test_state_that_files_do_not_hold_is_named(tmp_path: Path, state: dict[str, Any], says: str) -> None:
    before = write(tmp_path)
    with pytest.raises(SnapshotError, match=f"step 2 was not written to '{tmp_path}': rank 0: .*{says}"):
        write(tmp_path, 2, **state)
    assert list(tmp_path.iterdir()) == [before]


# -------------------------------------------------------------------------------------------- damage


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two snapshots, of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("good")
    weights = {"a": torch.randn(4, 3), "b": torch.arange(5)}
    weights["c"] = weights["a"]
    tree = {"lr": 0.1, "history": [1, 2, 3], "moment": torch.randn(7), 5: (None, "x", math.inf)}
    for step in (1, 2):
        write(folder, step, replicated=tree, per_rank={"state": torch.randn(3)}, weights=weights)
    return folder


FILES = ["manifest.json", "rank-00000.safetensors", "replicated.pt", "rank-00000.pt"]


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
        read_snapshot(path)
    message = str(refused.value)
    assert message.startswith(f"The snapshot '{path}' cannot be used: ") and message.endswith(".")
    assert "\n" not in message
    with pytest.warns(UserWarning, match=f"cannot be used: .*({says}).*Looking for the one before"):
        assert found_in(folder) == folder / "step-00000001"


@pytest.mark.parametrize("name", FILES)
def test_truncation_and_flipped_bits_are_found(folder: Path, name: str) -> None:
    file = folder / "step-00000002" / name
    content = file.read_bytes()
    draw = random.Random(name)
    for _ in range(5):
        file.write_bytes(content[: draw.randrange(len(content))])
        assert_found_out(folder, name)
    for _ in range(15):
        flipped = bytearray(content)
        flipped[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        file.write_bytes(flipped)
        assert_found_out(folder, name)
    file.write_bytes(content)
    with no_warnings():
        assert found_in(folder) == file.parent


def test_invalid_files_are_refused(folder: Path) -> None:
    path = folder / "step-00000002"
    for name in FILES:
        file = path / name
        elsewhere = folder.parent / name
        spoils: list[tuple[Callable[[Path], object], str]] = [
            (Path.exists, "missing or unknown|No such file"),
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
    assert_found_out(folder, '"more" is missing or unknown')
    (path / "more").unlink()
    path.rename(folder.parent / "moved")
    path.symlink_to(folder.parent / "moved")
    assert_found_out(folder, "it is a link: name the folder itself")
    path.unlink()
    shutil.copytree(folder / "step-00000001", path)
    assert_found_out(folder, "it says step 1")
    with pytest.raises(SnapshotError, match="No such file"):
        read_snapshot(folder / "step-00000003")


def test_manifest_values_are_checked(folder: Path) -> None:
    path = folder / "step-00000002"
    manifest = json.loads((path / "manifest.json").read_bytes())
    evil = {name.replace("replicated.pt", "../replicated.pt"): one for name, one in manifest["files"].items()}
    for changes, says in [
        ({"version": 4}, "version is 4"),
        ({"format": "a plan"}, '"format": "hvd_ckpt snapshot"'),
        ({"more": 1}, "more is not a known key"),
        ({"step": 2.0}, "step is 2.0"),
        ({"ranks": 10**9}, "ranks is 1000000000"),
        ({"ranks": 2}, "not those of a snapshot of 2 ranks"),
        ({"files": evil}, r'"\.\./replicated.pt"'),
        ({"aliases": {"c": "d"}}, '"c" of "d"'),
        ({"aliases": {"a": "b"}}, '"a" of "b"'),
        ({"time": None}, "time is null"),
    ]:
        (path / "manifest.json").write_text(json.dumps(manifest))
        sign(path, **changes)
        with pytest.raises(SnapshotError, match=f"manifest.json: .*{says}"):
            read_snapshot(path)


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
                read_snapshot(path)
        (path / name).write_bytes(content)
        (path / "manifest.json").write_bytes(manifest)
    assert "executed" not in capsys.readouterr().out


class Subclass(Tensor):
    """A class that a restricted unpickler does not know."""


def saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def compressed(content: bytes) -> bytes:
    stream = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(content)) as old,
        zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return stream.getvalue()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not a state dict"),
        (b"PK" + bytes(100), "not a state dict"),
        (saved(Odd()), "not a state dict"),
        (saved(torch.ones(2).as_subclass(Subclass)), "not a state dict"),
        (saved({"a": {1, 2}}), "set"),
        (saved({"a": torch.eye(2).to_sparse()}), "it.a is a sparse"),
        (saved({"a": torch.empty(2, device="meta")}), "it.a .*meta"),
        (saved({"a": torch.ones(1).expand(10**12)}), "it.a has more elements"),
        (saved({"a": torch.tensor([1, 2], dtype=torch.uint8).view(torch.bool)}), "neither true nor false"),
        (saved(nested_in_itself()), "100 deep"),
        (compressed(saved(torch.zeros(10**6))), "compressed"),
    ],
)  # fmt: skip
def test_hostile_state_files(
    folder: Path, content: bytes, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "step-00000002"
    (path / "replicated.pt").write_bytes(content)
    sign(path)
    with pytest.raises(SnapshotError, match=f"replicated.pt: .*{says}") as refused:
        read_snapshot(path)
    assert str(refused.value).isprintable() and "executed" not in capsys.readouterr().out


def test_state_that_would_unfold_without_end_stays_folded(folder: Path) -> None:
    path = folder / "step-00000002"
    value: Any = []
    for _ in range(90):  # 2**90 lists
        value = [value, value]
    (path / "replicated.pt").write_bytes(saved(value))
    sign(path)
    found = read_snapshot(path).replicated
    assert found[0] is found[1]


def test_hostile_weights(folder: Path) -> None:
    path = folder / "step-00000002"
    content = (path / "rank-00000.safetensors").read_bytes()
    for hostile in (
        b"",
        (2**63).to_bytes(8, "little") + b"{}",
        content[:-1],
        content.replace(b"F32", b"F99"),
    ):
        (path / "rank-00000.safetensors").write_bytes(hostile)
        sign(path)
        with pytest.raises(SnapshotError, match=r"rank-00000\.safetensors: it is not a safetensors file"):
            read_snapshot(path)


def test_a_file_of_tensors_may_be_larger_than_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As offloaded state is. A sparse file, whatever its size, takes no room on the disk."""
    weights = {"a": torch.randn(10_000)}
    path = write(tmp_path, weights=weights)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=20_000))
    assert same(read_snapshot(path).weights, weights)
    os.truncate(path / "rank-00000.safetensors", 1 << 40)
    sign(path)
    with pytest.raises(SnapshotError, match=r"rank-00000\.safetensors: its 1048576 MiB are more than"):
        read_snapshot(path)


# -------------------------------------------------------------------------------------------- folders


def test_find_and_prune(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="step is -1"):
        write(tmp_path, step=-1)
    folder = tmp_path / "a" / "snapshots"
    assert found_in(folder) is None
    paths = [write(folder, step, replicated=step) for step in (9, 10, 100_000_000, 20)]
    for name in (".step-00000021.tmp-0123abcd", "step-22", "other"):
        (folder / name).mkdir()
    assert found_in(folder) == paths[2]
    (paths[2] / "replicated.pt").unlink()
    with pytest.warns(UserWarning, match="is missing or unknown"):
        assert found_in(folder) == paths[3]
    reader.prune(folder, 2, pytest.fail)
    left = ["other", "step-00000010", "step-00000020", "step-100000000", "step-22"]
    assert sorted(path.name for path in folder.iterdir()) == left
    for path in paths[1], paths[3]:
        (path / "replicated.pt").write_text("{}")
    with (
        pytest.warns(UserWarning, match="cannot be used"),
        pytest.raises(SnapshotError, match="None of the snapshots in .*step-100000000"),
    ):
        found_in(folder)


def test_a_step_written_again_replaces_the_old_one_when_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, 5, replicated="old")
    with pytest.raises(SnapshotError):
        write(tmp_path, 5, replicated=Odd())
    assert read_snapshot(path).replicated == "old"
    rename = Path.rename

    def fail_for_new(source: Path, target: Path) -> Path:
        if ".tmp-" in source.name:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail_for_new)
        with pytest.raises(SnapshotError, match="rank 0: Input/output error"):
            write(tmp_path, 5, replicated="newer")
    assert [read_snapshot(one).replicated for one in tmp_path.iterdir()] == ["old"]
    assert write(tmp_path, 5, replicated="new") == path
    assert [read_snapshot(one).replicated for one in tmp_path.iterdir()] == ["new"]
    replaced = path.rename(tmp_path / ".step-00000005.old-01234567")  # killed between two renames
    assert found_in(tmp_path) == replaced
    reader.prune(tmp_path, 1, pytest.fail)
    assert read_snapshot(replaced).replicated == "new"
    write(tmp_path, 5, replicated="newer")
    newest = write(tmp_path, 6)
    reader.prune(tmp_path, 1, pytest.fail)
    assert list(tmp_path.iterdir()) == [newest]


def test_files_are_synced_before_the_folder_is_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def synced(descriptor: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def renamed(path: Path, target: Path) -> Path:
        events.append("rename")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    write(tmp_path)
    temporary = events[-3]
    assert temporary.startswith(".step-00000001.tmp-")
    assert events[-4:] == ["manifest.json", temporary, "rename", tmp_path.name]
    assert sorted(events[:-3]) == sorted(FILES)


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
    before = write(tmp_path, 1, replicated="before")
    weights = {"a": torch.randn(100_000)}
    for limit in (0, 3000, 300_000):
        with (
            file_size_limit(limit),
            pytest.raises(SnapshotError, match="rank 0: File too large.*: make room"),
        ):
            write(tmp_path, 2, weights=weights)
    with without_rights(tmp_path), pytest.raises(SnapshotError, match="rank 0: Permission denied"):
        write(tmp_path, 2, weights=weights)
    assert list(tmp_path.iterdir()) == [before] == [found_in(tmp_path)]
    (tmp_path / "file").touch()
    with pytest.raises(SnapshotError, match="Not a directory|File exists"):
        write(tmp_path / "file" / "snapshots", 2)


# -------------------------------------------------------------------------------------------- random state


def draws() -> list[Any]:
    return [torch.rand(3).tolist(), np.random.rand(3).tolist(), np.random.randn(), random.gauss(0, 1)]


def test_random_state_round_trips(tmp_path: Path) -> None:
    np.random.randn()  # NumPy and Python keep every second normal number
    random.gauss(0, 1)
    path = write(tmp_path, per_rank=random_state())
    expected = draws()
    draws()
    state = read_snapshot(path).per_rank
    set_random_state(state)
    assert draws() == expected

    set_random_state(state)
    numbers = (*state["numpy"][:2], 10**9, *state["numpy"][3:])
    for broken in (None, state | {"torch": torch.zeros(3)}, state | {"numpy": numbers}):
        with pytest.raises(SnapshotError, match="random state cannot be restored"):
            set_random_state(broken)


def test_the_random_state_of_a_gpu_is_that_of_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its number: a rank that resumes may have another one."""
    restored: list[torch.Tensor] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: torch.arange(16, dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "set_rng_state", restored.append)
    state = read_snapshot(write(tmp_path, per_rank=random_state())).per_rank
    set_random_state(state)
    assert [one.tolist() for one in restored] == [list(range(16))]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    set_random_state(state)
    assert len(restored) == 1 and random_state()["cuda"] is None
