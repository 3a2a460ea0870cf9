"""Background snapshots hold the state of the moment they were begun at, and whatever goes wrong, training continues.

Where ranks matter, the writers of two ranks share this process; nothing but files is between them.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from same import assert_same
from snapshot_files import divided, file_size_limit, found_in, read_snapshot, state_of, write
from torch import Tensor, nn

from hvd_ckpt.snapshots import content, writer
from hvd_ckpt.snapshots.folder import remove
from hvd_ckpt.snapshots.tensors import Staging
from hvd_ckpt.snapshots.writer import SnapshotWriter

TOKEN = "0123abcd"


class Job:
    """The writers of two ranks, and what rank 0 was told."""

    def __init__(self, folder: Path, ranks: int = 2, **options: Any) -> None:
        self.folder, self.told = folder, list[str]()
        self.writers = [
            SnapshotWriter(folder, 2, rank, ranks, TOKEN, self.told.append, **options)
            for rank in range(ranks)
        ]

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self.writers:
            one.close()

    def begin(self, step: int, own: Any = None, **changes: Any) -> None:
        arguments = {"weights": {"a": torch.full((4000,), step)}, "replicated": {"step": step}, **changes}
        for rank, one in enumerate(self.writers):
            state = state_of(**arguments, per_rank=own if rank == len(self.writers) - 1 else None)
            state.ranges = divided(state.ranges, rank, len(self.writers))
            one.begin(step, state)

    def write(self, step: int, own: Any = None) -> Path | None:
        self.begin(step, own)
        path, *_ = [one.wait() for one in self.writers]
        return path


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


class Gate:
    """Holds up calls of a function until it is opened, or its context ends."""

    def __init__(self, patch: pytest.MonkeyPatch, place: Any, name: str) -> None:
        self._opened = threading.Event()
        self.reached = threading.Event()
        function: Callable[..., Any] = getattr(place, name)

        def held(*arguments: Any) -> Any:
            self.reached.set()
            assert self._opened.wait(60)
            return function(*arguments)

        patch.setattr(place, name, held)

    def open(self) -> None:
        self._opened.set()

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *_: object) -> None:
        self.open()


@pytest.fixture
def model() -> nn.Sequential:
    model = nn.Sequential(nn.Embedding(300, 40), nn.BatchNorm1d(3000), nn.Linear(40, 300, bias=False))
    model.append(nn.Conv2d(8, 64, 3).to(memory_format=torch.channels_last))
    model[2].weight = model[0].weight
    return model


def test_a_snapshot_is_of_the_moment_it_was_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: nn.Sequential
) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1))
    changing = dict(model.named_buffers())

    def train() -> None:
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()

    for blocking, ranks in ((False, 2), (True, 1)):
        folder = tmp_path / str(ranks)
        with Job(folder, ranks, blocking=blocking) as job:
            for step in (1, 2, 3):  # the second and third into the memory of the first
                train()
                own = {"turned": torch.randn(30, 40).t(), "many": torch.randn(3000)}
                weights = {name: value.clone() for name, value in model.state_dict().items()}
                state = torch.utils._pytree.tree_map(
                    lambda value: value.clone() if isinstance(value, Tensor) else value,
                    [optimizer.state_dict(), own],
                )
                with monkeypatch.context() as patch:
                    copying, writing = Gate(patch, Staging, "run"), Gate(patch, writer, "write_content")
                    if blocking:
                        copying.open(), writing.open()
                    changes = {"weights": model.state_dict(), "replicated": optimizer.state_dict()}
                    job.begin(step, own, **changes)
                    with torch.no_grad():
                        for value in (*changing.values(), *own.values(), optimizer.param_groups[0]["lr"]):
                            value.zero_()
                    threading.Timer(0.05, copying.open).start()
                    for one in job.writers:
                        one.before_update()
                    train()
                    writing.open()
                    path, *_ = [one.wait() for one in job.writers]
                assert path is not None and path == job.writers[0].written
                assert path.name == f"step-0000000{step}" and found_in(folder) == path
                found = read_snapshot(path, rank=ranks - 1)
                assert_same([found.weights, [found.replicated, found.per_rank]], [weights, state])
                assert found.weights["2.weight"] is found.weights["0.weight"]
            assert not job.told
            assert names(folder) == ["step-00000002", "step-00000003"]


def test_a_snapshot_whose_weights_change_while_they_are_copied_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = {"a": torch.zeros(4000)}
    with Job(tmp_path, 1) as job:
        with Gate(monkeypatch, Staging, "run"):
            job.begin(1, weights=weights)
            weights["a"][2:].add_(1.0)
        assert job.writers[0].wait() is None
        (told,) = job.told
        assert "step 1 was not written" in told and "call before_update() of the Snapshots before" in told
        job.begin(2, weights=weights)
        assert job.writers[0].wait() == tmp_path / "step-00000002"


def test_copies_have_every_bit_and_use_the_same_memory_again() -> None:
    bits = torch.randint(0, 256, (4096,), dtype=torch.uint8)
    kinds = ("bfloat16", "float8_e5m2", "int16", "uint32", "float64", "complex64", "complex32")
    tensors = [bits.view(getattr(torch, kind)) for kind in kinds]
    tensors += [bits > 100, torch.empty(0, 3), torch.tensor(3.0), torch.randn(2, 3, 4, 5).permute(0, 3, 1, 2)]
    tensors += [torch.randn(6, 8)[:, ::2], torch.randn(3, 1).expand(3, 5)]
    staging = Staging()
    copies = [staging.copy_of(one) for one in tensors]
    for _ in range(2):
        staging.start()
        staging.run()
        for tensor, copy in zip(tensors, copies):
            ours, theirs = (one.contiguous().reshape(-1).view(torch.uint8) for one in (tensor, copy))
            assert copy.dtype == tensor.dtype and copy.shape == tensor.shape and torch.equal(ours, theirs)
        assert copies[-3].stride() == tensors[-3].stride()
        staging.restart()
        again = [staging.copy_of(one) for one in tensors]
        assert [one.data_ptr() for one in again] == [one.data_ptr() for one in copies]
        for copy in copies:
            copy.zero_()


# -------------------------------------------------------------------------------------------- failures


@contextmanager
def full_disk(job: Job) -> Iterator[None]:
    with file_size_limit(5000):
        yield


@contextmanager
def file_in_its_place(job: Job) -> Iterator[None]:
    job.folder.rename(job.folder.with_name("elsewhere"))
    job.folder.touch()
    yield
    job.folder.unlink()
    job.folder.with_name("elsewhere").rename(job.folder)


@contextmanager
def no_part(job: Job) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(content, "RANK_SECONDS", 0.1)
        patch.setattr(writer, "send", lambda *_: None)
        yield


@contextmanager
def no_room_for_a_part(job: Job) -> Iterator[None]:
    """Nor for a word about it."""
    with pytest.MonkeyPatch.context() as patch:

        def full(*_: Any, **__: Any) -> int:
            raise OSError(28, os.strerror(28))

        patch.setattr(Path, "write_text", full)
        yield


@pytest.mark.parametrize(
    ("trouble", "own", "says"),
    [
        (full_disk, None, r"rank 0: File too large.*: make room\. Training continues, and older"),
        (file_in_its_place, None, "rank 0: .*(File exists|Not a directory)"),
        (no_part, None, "rank 1 has not written its files for 0.1 seconds"),
        (no_room_for_a_part, None, "rank 1: it could not report what it has written.*make room"),
        (None, {"odd": object()}, r"rank 1: per_rank\.odd is a builtins\.object"),
    ],
)  # fmt: skip
def test_training_continues_with_one_warning(tmp_path: Path, trouble: Any, own: Any, says: str) -> None:
    folder = tmp_path / "snapshots"
    with Job(folder) as job:
        before = job.write(1)
        with trouble(job) if trouble else nullcontext():
            assert job.write(2, own) is None
        (told,) = job.told
        assert told.startswith(f"The snapshot of step 2 was not written to '{folder}': ") and "\n" not in told
        assert re.search(says, told)
        assert job.writers[0].failed and job.writers[0].failed in told and job.writers[0].written == before
        assert names(folder) == ["step-00000001"] and found_in(folder) == before
        assert job.write(2) == found_in(folder) == folder / "step-00000002"
        assert job.writers[0].failed is None and len(job.told) == 1


def test_weights_that_changed_while_they_were_copied_are_not_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, state: Any) -> Any:
        raise OSError(28, os.strerror(28), str(path))

    changing = torch.zeros(4000)
    with Job(tmp_path) as job:
        first, second = job.writers
        for step in (1, 2):
            job.write(step)
        with monkeypatch.context() as patch:
            patch.setattr(content, "save_state", full)
            with Gate(patch, Staging, "run"):
                first.begin(3, state_of({"a": torch.ones(4000)}))
                second.begin(3, state_of({"b": changing}))
                changing[2000:].add_(1.0)
            assert first.wait() is None and first.made_room
            second.wait()
        for one in job.writers:
            one.again()
        assert first.wait() is None and "rank 1: weights or optimizer state were changed" in job.told[-1]
        second.wait()
        assert names(tmp_path) == ["step-00000002"]


def test_a_late_rank_does_not_bring_back_a_snapshot_that_was_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOROVOD_HOSTNAME", "node7")
    with Job(tmp_path) as job:
        first, second = job.writers
        # An early rank waits to report its fault.
        second.begin(9, state_of({}, None, object()))
        time.sleep(0.03)
        first.begin(9, state_of({}))
        assert first.wait() is None and "rank 1: per_rank is a builtins.object" in job.told.pop()
        second.wait()
        with monkeypatch.context() as patched:
            patched.setattr(content, "RANK_SECONDS", 0.1)
            first.begin(1, state_of({}))
            assert first.wait() is None
            second.begin(1, state_of({}))
            assert second.wait() is None and "is not there on host node7" in str(second.failed)
        assert names(tmp_path) == [] and len(job.told) == 1
        assert job.write(2) is not None


@pytest.mark.parametrize("killed_after", [0, 1, 3])
def test_a_run_killed_while_it_removes_later_snapshots_resumes_from_the_last_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_after: int
) -> None:
    def counted(function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            if next(calls) == killed_after:
                raise KeyboardInterrupt
            return function(*arguments, **options)

        return call

    for step in (20, 30, 40, 50):
        write(tmp_path, step)
    abandoned = [tmp_path / f"step-000000{step}" for step in (50, 40)]
    new = write(tmp_path, 30, replicated="new")
    calls = itertools.count()
    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(Path, "rename", counted(Path.rename))
        patch.setattr(shutil, "rmtree", counted(shutil.rmtree))
        remove(abandoned, pytest.fail)
    newest = found_in(tmp_path)
    assert newest == (tmp_path / "step-00000050" if killed_after < 2 else new)
    assert read_snapshot(new).replicated == "new"
    assert not list(tmp_path.glob("step-*40")) or killed_after == 0


def test_later_snapshots_that_cannot_be_removed_are_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    def denied(path: Path, *_: Any, **__: Any) -> None:
        raise PermissionError(13, os.strerror(13), str(path))

    with Job(tmp_path) as job:
        job.write(5)
    abandoned = [tmp_path / "step-00000005"]
    with Job(tmp_path, on_written=lambda _, warn: remove(abandoned, warn)) as job:
        monkeypatch.setattr(writer, "prune", lambda *_: None)
        monkeypatch.setattr(shutil, "rmtree", denied)
        assert job.write(3) is not None
    assert len(job.told) == 1 and "cannot be removed: Permission denied" in job.told[0] and not recwarn


def test_a_closed_writer_has_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writing = Gate(monkeypatch, writer, "write_content")
    with Job(tmp_path) as job:
        job.begin(1)
        threads = [one for one in threading.enumerate() if one.name == "hvd_ckpt.snapshots"]
        assert len(threads) == 2 and all(one.daemon for one in threads)
        writing.open()
    assert not any(one.is_alive() for one in threads)


def test_a_bug_is_raised_where_training_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Job(tmp_path) as job:
        with monkeypatch.context() as patch:
            patch.setattr(writer, "write_content", lambda *_: 1 / 0)
            job.begin(1)
            for one in job.writers:
                with pytest.raises(ZeroDivisionError):
                    one.wait()
                one.check()
        assert names(tmp_path) == [] and not job.told
        assert job.write(2) is not None


# -------------------------------------------------------------------------------------------- processes


def test_a_process_that_does_not_close_its_writers_ends(tmp_path: Path) -> None:
    script = f"""if True:
        import sys, torch
        from pathlib import Path
        from hvd_ckpt.snapshots import writer as room
        from hvd_ckpt.snapshots.content import SavedState
        state = [torch.ones(1000, 1000) for _ in range(5)]
        for ranks, room.EXIT_SECONDS in ((1, 60), (2, 0.5)):  # the second is one of a pair without the other
            writer = room.SnapshotWriter(Path(sys.argv[1]) / str(ranks), 1, 0, ranks, "{TOKEN}", print)
            writer.begin(1, SavedState(state, None))
    """
    command = [sys.executable, "-c", script, tmp_path]
    done = subprocess.run(command, stderr=subprocess.PIPE, timeout=100, check=False)
    assert done.returncode == 0 and not done.stderr
    assert found_in(tmp_path / "1") == tmp_path / "1" / "step-00000001"
    assert found_in(tmp_path / "2") is None


def test_an_exception_leaves_nothing_of_a_snapshot_that_another_rank_will_not_finish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "EXIT_SECONDS", 0.05)
    alone = SnapshotWriter(tmp_path, 2, 0, 2, TOKEN, print)

    def fail() -> None:
        with alone:
            alone.begin(8, state_of({"a": torch.ones(3)}))
            raise KeyError("planted")

    with pytest.raises(KeyError):
        fail()
    assert names(tmp_path) == []
