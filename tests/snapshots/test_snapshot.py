"""Tests of snapshots: values are restored bit for bit, and any damage is found before anything is used."""

import errno
import io
import math
import os
import pickle
import random
import shutil
import warnings
import zipfile
from collections import OrderedDict
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from same import same
from snapshot_files import file_size_limit, found_in, read_snapshot, sign, write
from torch import Tensor

from hvd_ckpt.snapshots import reader
from hvd_ckpt.snapshots.folder import SnapshotError
from hvd_ckpt.snapshots.training_state import random_state, set_random_state


def round_trip(folder, value, blocking=False):
    """The value from the replicated and from the per-rank state, which must agree."""
    found = read_snapshot(write(folder, replicated=value, per_rank=value, blocking=blocking))
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
    lambda shape, dtype, lie: lie(torch.randint(0, 2, shape)).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from([
        torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int64, torch.float32,
        torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.complex128,
    ]),
    st.sampled_from([lambda one: one, lambda one: one.movedim(0, -1) if one.dim() else one]),
)  # fmt: skip
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
@given(tree=trees, blocking=st.booleans())
def test_any_state_dict_round_trips(tmp_path, tree, blocking):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)  # which takes most of the time
        assert same(round_trip(tmp_path, tree, blocking), tree)


def test_views_have_their_values_and_numbers_of_numpy_become_plain_ones(tmp_path):
    rows, images = torch.randn(4, 6), torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    values = [images, torch.tensor(math.inf), 10**500, {1.0: None, False: ()}]
    assert same(round_trip(tmp_path, values), values)
    views = [rows[:, ::2], rows[0].expand(3, 6), rows[1:3], torch.arange(6).to(torch.complex64).conj()]
    assert all(map(torch.equal, round_trip(tmp_path, views), views))
    converted = round_trip(tmp_path, [np.float32(0.1), np.int64(3), np.bool_(True), OrderedDict(a=1)])
    assert same(converted, [float(np.float32(0.1)), 3, True, {"a": 1}])


class Odd:
    def __reduce__(self):
        return print, ("executed",)


def nested_in_itself():
    value = []
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
def test_state_that_files_do_not_hold_is_named(tmp_path, state, says):
    before = write(tmp_path)
    with pytest.raises(SnapshotError, match=f"step 2 was not written to '{tmp_path}': rank 0: .*{says}"):
        write(tmp_path, 2, **state)
    assert list(tmp_path.iterdir()) == [before]


# -------------------------------------------------------------------------------------------- damage

FILES = ["manifest.json", "rank-00000.safetensors", "replicated.pt", "rank-00000.pt"]


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A folder of two snapshots, of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("good")
    weights = {"a": torch.randn(4, 3), "b": torch.arange(5)}
    weights["c"] = weights["a"]
    tree = {"lr": 0.1, "history": [1, 2, 3], "moment": torch.randn(7), 5: (None, "x", math.inf)}
    for step in (1, 2):
        write(folder, step, replicated=tree, per_rank={"state": torch.randn(3)}, weights=weights)
    return folder


@pytest.fixture
def path(good, tmp_path):
    """The newer snapshot of a copy."""
    return Path(shutil.copytree(good, tmp_path / "snapshots")) / "step-00000002"


def assert_found_out(path, says):
    """The newest snapshot is refused, and the one before found with a warning that says why."""
    with pytest.raises(SnapshotError, match=f"cannot be used: .*({says})") as refused:
        read_snapshot(path)
    message = str(refused.value)
    assert message.startswith(f"The snapshot '{path}' cannot be used: ") and message.endswith(".")
    assert "\n" not in message
    with pytest.warns(UserWarning, match=f"cannot be used: .*({says}).*Looking for the one before"):
        assert found_in(path.parent) == path.with_name("step-00000001")


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_damaged_missing_or_something_else_is_found(path, tmp_path, name):
    file, elsewhere = path / name, tmp_path / name
    content, draw = file.read_bytes(), random.Random(name)
    for _ in range(5):
        file.write_bytes(content[: draw.randrange(len(content))])
        assert_found_out(path, name)
    for _ in range(15):
        flipped = bytearray(content)
        flipped[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        file.write_bytes(flipped)
        assert_found_out(path, name)
    file.write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert found_in(path.parent) == path
    file.rename(elsewhere)
    assert_found_out(path, "missing or unknown|No such file")
    for make, clear in (
        (partial(os.symlink, elsewhere), os.unlink),
        (os.mkdir, os.rmdir),
        (os.mkfifo, os.unlink),
    ):
        make(file)
        assert_found_out(path, f"{name}: it is a link, a folder or a device")
        clear(file)


def test_a_folder_that_is_not_a_snapshot_of_its_name_is_found(path, tmp_path):
    (path / "more").touch()
    assert_found_out(path, '"more" is missing or unknown')
    (path / "more").unlink()
    path.rename(tmp_path / "moved")
    path.symlink_to(tmp_path / "moved")
    assert_found_out(path, "it is a link: name the folder itself")
    path.unlink()
    shutil.copytree(path.with_name("step-00000001"), path)
    assert_found_out(path, "it says step 1")
    with pytest.raises(SnapshotError, match="No such file"):
        read_snapshot(path.with_name("step-00000003"))


class Subclass(Tensor):
    """A class that a restricted unpickler does not know."""


def saved(value):
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def compressed(content):
    stream = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(content)) as old,
        zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return stream.getvalue()


NO_WEIGHTS = "it is not a safetensors file"
WEIGHTS = safetensors.torch.save({"weights/a": torch.ones(3)})


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        *[(name, pickle.dumps(Odd()), name) for name in FILES],
        ("replicated.pt", b"", "not a state dict"),
        ("replicated.pt", b"PK" + bytes(100), "not a state dict"),
        ("replicated.pt", saved(Odd()), "not a state dict"),
        ("replicated.pt", saved(torch.ones(2).as_subclass(Subclass)), "not a state dict"),
        ("replicated.pt", saved({"a": {1, 2}}), "set"),
        ("replicated.pt", saved({"a": torch.eye(2).to_sparse()}), "it.a is a sparse"),
        ("replicated.pt", saved({"a": torch.empty(2, device="meta")}), "it.a .*meta"),
        ("replicated.pt", saved({"a": torch.ones(1).expand(10**12)}), "it.a has more elements"),
        ("replicated.pt", saved({"a": torch.tensor([1, 2], dtype=torch.uint8).view(torch.bool)}), "neither true nor false"),
        ("replicated.pt", saved(nested_in_itself()), "100 deep"),
        ("replicated.pt", compressed(saved(torch.zeros(10**6))), "compressed"),
        ("rank-00000.safetensors", b"", NO_WEIGHTS),
        ("rank-00000.safetensors", (2**63).to_bytes(8, "little") + b"{}", NO_WEIGHTS),
        ("rank-00000.safetensors", WEIGHTS[:-1], NO_WEIGHTS),
        ("rank-00000.safetensors", WEIGHTS.replace(b"F32", b"F99"), NO_WEIGHTS),
    ],
)  # fmt: skip
def test_hostile_files_are_refused_and_nothing_in_them_is_executed(path, name, content, says, capsys):
    (path / name).write_bytes(content)
    if name != "manifest.json":
        sign(path)
    with pytest.raises(SnapshotError, match=f"{name}: .*{says}" if says != name else name) as refused:
        read_snapshot(path)
    assert str(refused.value).isprintable() and "executed" not in capsys.readouterr().out


def test_state_that_would_unfold_without_end_stays_folded(path):
    value = []
    for _ in range(90):  # 2**90 lists
        value = [value, value]
    (path / "replicated.pt").write_bytes(saved(value))
    sign(path)
    found = read_snapshot(path).replicated
    assert found[0] is found[1]


def test_a_file_of_tensors_may_be_larger_than_memory(tmp_path, monkeypatch):
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


def test_find_and_prune(tmp_path):
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
    says = "None of the snapshots in .*step-100000000"
    with pytest.warns(UserWarning, match="cannot be used"), pytest.raises(SnapshotError, match=says):
        found_in(folder)


def test_a_step_written_again_replaces_the_old_one_when_it_is_whole(tmp_path, monkeypatch):
    def contents():
        return [read_snapshot(one).replicated for one in tmp_path.iterdir()]

    path = write(tmp_path, 5, replicated="old")
    with pytest.raises(SnapshotError):
        write(tmp_path, 5, replicated=Odd())
    assert contents() == ["old"]
    rename = Path.rename

    def fail_for_new(source, target):
        if ".tmp-" in source.name:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail_for_new)
        with pytest.raises(SnapshotError, match="rank 0: Input/output error"):
            write(tmp_path, 5, replicated="newer")
    assert contents() == ["old"]
    assert write(tmp_path, 5, replicated="new") == path
    assert contents() == ["new"]
    replaced = path.rename(tmp_path / ".step-00000005.old-01234567")  # killed between two renames
    assert found_in(tmp_path) == replaced
    reader.prune(tmp_path, 1, pytest.fail)
    assert contents() == ["new"]
    write(tmp_path, 5, replicated="newer")
    newest = write(tmp_path, 6)
    reader.prune(tmp_path, 1, pytest.fail)
    assert list(tmp_path.iterdir()) == [newest]


def test_files_are_synced_before_the_folder_is_renamed(tmp_path, monkeypatch):
    events = []
    fsync, rename = os.fsync, Path.rename

    def synced(descriptor):
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def renamed(path, target):
        events.append("rename")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    write(tmp_path)
    *files, temporary, renaming, folder = events
    assert sorted(files) == sorted(FILES) and files[-1] == "manifest.json"
    assert temporary.startswith(".step-00000001.tmp-") and [renaming, folder] == ["rename", tmp_path.name]


@contextmanager
def without_rights(folder):
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


def test_a_full_disk_and_a_read_only_folder_leave_what_is_there(tmp_path):
    before = write(tmp_path, 1, replicated="before")
    too_large = "File too large.*: make room"
    (tmp_path / "file").touch()
    for trouble, folder, says in (
        (file_size_limit(0), tmp_path, too_large),
        (file_size_limit(3000), tmp_path, too_large),
        (file_size_limit(300_000), tmp_path, too_large),
        (without_rights(tmp_path), tmp_path, "Permission denied"),
        (file_size_limit(1 << 30), tmp_path / "file" / "snapshots", "(Not a directory|File exists)"),
    ):
        with trouble, pytest.raises(SnapshotError, match=f"rank 0: {says}"):
            write(folder, 2, weights={"a": torch.randn(100_000)})
    (tmp_path / "file").unlink()
    assert list(tmp_path.iterdir()) == [before] == [found_in(tmp_path)]


# -------------------------------------------------------------------------------------------- random state


def draws():
    return [torch.rand(3).tolist(), np.random.rand(3).tolist(), np.random.randn(), random.gauss(0, 1)]


def test_random_state_round_trips(tmp_path):
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


def test_the_random_state_of_a_gpu_is_that_of_the_current_one(tmp_path, monkeypatch):
    """Whatever its number: a rank that resumes may have another one."""
    restored = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: torch.arange(16, dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "set_rng_state", restored.append)
    state = read_snapshot(write(tmp_path, per_rank=random_state())).per_rank
    set_random_state(state)
    assert [one.tolist() for one in restored] == [list(range(16))]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    set_random_state(state)
    assert len(restored) == 1 and random_state()["cuda"] is None
