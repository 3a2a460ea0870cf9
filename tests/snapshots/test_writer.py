"""Background snapshots hold the state of the moment they were begun at, and whatever goes wrong, training continues.

Where ranks matter, the writers of two ranks share this process; nothing but files is between them.
"""

import copy
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import pytest
import torch
from same import assert_same
from snapshot_files import divided, file_size_limit, found_in, read_snapshot, state_of, write
from torch import nn

from hvd_ckpt.snapshots import content, writer
from hvd_ckpt.snapshots.folder import remove
from hvd_ckpt.snapshots.tensors import Staging
from hvd_ckpt.snapshots.writer import SnapshotWriter

TOKEN = "0123abcd"


class Job:
    """The writers of two ranks, and what rank 0 was told."""

    def __init__(self, folder, ranks=2, **options):
        self.folder, self.told = folder, []
        self.writers = [
            SnapshotWriter(folder, 2, rank, ranks, TOKEN, self.told.append, **options)
            for rank in range(ranks)
        ]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for one in self.writers:
            one.close()

    def begin(self, step, own=None, **changes):
        arguments = {"weights": {"a": torch.full((4000,), step)}, "replicated": {"step": step}, **changes}
        for rank, one in enumerate(self.writers):
            state = state_of(**arguments, per_rank=own if rank == len(self.writers) - 1 else None)
            state.ranges = divided(state.ranges, rank, len(self.writers))
            one.begin(step, state)

    def wait(self):
        """The path of the snapshot, if it was written."""
        path, *_ = [one.wait() for one in self.writers]
        return path

    def write(self, step, own=None):
        self.begin(step, own)
        return self.wait()


class Gate:
    """Holds up calls of a function until it is opened, or its context ends."""

    def __init__(self, patch, place, name):
        opened, function = threading.Event(), getattr(place, name)
        self.open = opened.set

        def held(*arguments):
            assert opened.wait(60)
            return function(*arguments)

        patch.setattr(place, name, held)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.open()


def names(folder):
    return sorted(os.listdir(folder))


def no_room(path="", *_, **__):
    raise OSError(28, os.strerror(28), str(path))


@pytest.mark.parametrize(("blocking", "ranks"), [(False, 2), (True, 1)])
def test_a_snapshot_is_of_the_moment_it_was_begun(tmp_path, monkeypatch, blocking, ranks):
    model = nn.Sequential(nn.Embedding(300, 40), nn.BatchNorm1d(3000), nn.Linear(40, 300, bias=False))
    model.append(nn.Conv2d(8, 64, 3).to(memory_format=torch.channels_last))
    model[2].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1))

    def train():
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()

    with Job(tmp_path, ranks, blocking=blocking) as job:
        for step in (1, 2, 3):  # the second and third into the memory of the first
            train()
            own = {"turned": torch.randn(30, 40).t(), "many": torch.randn(3000)}
            expected = copy.deepcopy([dict(model.state_dict()), optimizer.state_dict(), own])
            with monkeypatch.context() as patch:
                copying, writing = Gate(patch, Staging, "run"), Gate(patch, writer, "write_content")
                if blocking:
                    copying.open(), writing.open()
                job.begin(step, own, weights=model.state_dict(), replicated=optimizer.state_dict())
                threads = [one for one in threading.enumerate() if one.name == "hvd_ckpt.snapshots"]
                assert len(threads) == (0 if blocking else ranks) and all(one.daemon for one in threads)
                with torch.no_grad():
                    for value in (*model.buffers(), *own.values(), optimizer.param_groups[0]["lr"]):
                        value.zero_()
                threading.Timer(0.05, copying.open).start()
                for one in job.writers:
                    one.before_update()
                train()
                writing.open()
                path = job.wait()
            assert path == job.writers[0].written == found_in(tmp_path) == tmp_path / f"step-0000000{step}"
            found = read_snapshot(path, rank=ranks - 1)
            assert_same([found.weights, found.replicated, found.per_rank], expected)
            assert found.weights["2.weight"] is found.weights["0.weight"]
    assert not job.told and not any(one.is_alive() for one in threads)
    assert names(tmp_path) == ["step-00000002", "step-00000003"]


def test_a_snapshot_whose_weights_change_while_they_are_copied_is_not_written(tmp_path, monkeypatch):
    weights = {"a": torch.zeros(4000)}
    with Job(tmp_path, 1) as job:
        with Gate(monkeypatch, Staging, "run"):
            job.begin(1, weights=weights)
            weights["a"][2:].add_(1.0)
        for _ in range(2):
            assert job.wait() is None
            told = job.told.pop()
            assert "step 1 was not written" in told and "call before_update() of the Snapshots before" in told
            job.writers[0].again()  # not what has changed, either
        assert job.wait() is None
        job.begin(2, weights=weights)
        assert job.wait() == tmp_path / "step-00000002"


def test_copies_use_the_same_memory_again():
    tensors = [torch.randn(2, 3, 4, 5).permute(0, 3, 1, 2), torch.randn(3, 1).expand(3, 5), torch.randn(7)]
    staging, places = Staging(), []
    for _ in range(2):
        places.append([staging.copy_of(one).data_ptr() for one in tensors])
        staging.start()
        staging.run()
        staging.restart()
    assert places[0] == places[1]


# -------------------------------------------------------------------------------------------- failures


@contextmanager
def patched(*changes):
    with pytest.MonkeyPatch.context() as patch:
        for change in changes:
            patch.setattr(*change)
        yield


@pytest.mark.parametrize(
    ("trouble", "own", "says"),
    [
        (lambda: file_size_limit(5000), None, r"rank 0: File too large.*: make room\. Training continues, and older"),
        (lambda: patched((content, "RANK_SECONDS", 0.1), (writer, "send", lambda *_: None)), None,
         "rank 1 has not written its files for 0.1 seconds"),
        # Nor is there room for a word about it.
        (lambda: patched((Path, "write_text", no_room)), None, "rank 1: it could not report what it has written.*make room"),
        (nullcontext, {"odd": object()}, r"rank 1: per_rank\.odd is a builtins\.object"),
    ],
)  # fmt: skip
def test_training_continues_with_one_warning(tmp_path, trouble, own, says):
    folder = tmp_path / "snapshots"
    with Job(folder) as job:
        before = job.write(1)
        with trouble():
            assert job.write(2, own) is None
        (told,) = job.told
        assert told.startswith(f"The snapshot of step 2 was not written to '{folder}': ") and "\n" not in told
        assert re.search(says, told)
        assert job.writers[0].failed and job.writers[0].failed in told and job.writers[0].written == before
        assert names(folder) == ["step-00000001"] and found_in(folder) == before
        assert job.write(2) == found_in(folder) == folder / "step-00000002"
        assert job.writers[0].failed is None and len(job.told) == 1


def test_a_late_rank_does_not_bring_back_a_snapshot_that_was_given_up(tmp_path, monkeypatch):
    monkeypatch.setenv("HOROVOD_HOSTNAME", "node7")
    with Job(tmp_path) as job:
        first, second = job.writers
        # An early rank waits to report its fault.
        second.begin(9, state_of({}, None, object()))
        time.sleep(0.03)
        first.begin(9, state_of({}))
        assert job.wait() is None and "rank 1: per_rank is a builtins.object" in job.told.pop()
        with patched((content, "RANK_SECONDS", 0.1)):
            first.begin(1, state_of({}))
            assert first.wait() is None
            second.begin(1, state_of({}))
            assert second.wait() is None and "is not there on host node7" in str(second.failed)
        assert names(tmp_path) == [] and len(job.told) == 1
        assert job.write(2) is not None


@pytest.mark.parametrize("killed_after", [0, 1, 3])
def test_a_run_killed_while_it_removes_later_snapshots_resumes_from_the_last_or_the_new_one(
    tmp_path, killed_after
):
    def until_killed(function):
        return lambda *given, **options: (calls.pop(), function(*given, **options))[1]

    for step in (20, 30, 40, 50):
        write(tmp_path, step)
    new = write(tmp_path, 30, replicated="new")
    calls = [None] * killed_after  # and the next one is an error
    changes = (Path, "rename", until_killed(Path.rename)), (shutil, "rmtree", until_killed(shutil.rmtree))
    with patched(*changes), suppress(IndexError):
        remove([tmp_path / f"step-000000{step}" for step in (50, 40)], pytest.fail)
    assert found_in(tmp_path) == (tmp_path / "step-00000050" if killed_after < 2 else new)
    assert read_snapshot(new).replicated == "new"
    assert not list(tmp_path.glob("step-*40")) or killed_after == 0


def test_later_snapshots_that_cannot_be_removed_are_one_warning(tmp_path, recwarn):
    def denied(path, *_, **__):
        raise PermissionError(13, os.strerror(13), str(path))

    abandoned = write(tmp_path, 5)
    changes = (writer, "prune", lambda *_: None), (shutil, "rmtree", denied)
    with Job(tmp_path, on_written=lambda _, warn: remove([abandoned], warn)) as job, patched(*changes):
        assert job.write(3) is not None
    assert len(job.told) == 1 and "cannot be removed: Permission denied" in job.told[0] and not recwarn


def test_a_bug_is_raised_where_training_is(tmp_path):
    with Job(tmp_path) as job:
        with patched((writer, "write_content", lambda *_: 1 / 0)):
            job.begin(1)
            for one in job.writers:
                with pytest.raises(ZeroDivisionError):
                    one.wait()
                one.check()
        assert names(tmp_path) == [] and not job.told
        assert job.write(2) is not None


# -------------------------------------------------------------------------------------------- processes


def test_a_process_that_does_not_close_its_writers_ends(tmp_path):
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


def test_an_exception_leaves_nothing_of_a_snapshot_that_another_rank_will_not_finish(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "EXIT_SECONDS", 0.05)
    with pytest.raises(KeyError), SnapshotWriter(tmp_path, 2, 0, 2, TOKEN, print) as alone:  # noqa: PT012
        alone.begin(8, state_of({"a": torch.ones(3)}))
        raise KeyError("planted")
    assert names(tmp_path) == []
