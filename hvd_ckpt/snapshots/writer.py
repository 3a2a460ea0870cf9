"""Snapshots that are written while training continues.

A thread copies the state during the next forward and backward pass, which only read it. It writes the copy to the disk while
training changes the state again. Training waits only before the optimizer's update, if the copy is not complete by then (CheckFreq,
Mohan et al., FAST 2021).

The ranks' threads synchronize through the file system (:mod:`hvd_ckpt.snapshots.barrier`). When rank 0 has the manifests of all
ranks, it writes that of the snapshot and renames the folder. If a rank has failed, it removes the folder and reports the reason.
"""

from __future__ import annotations

import atexit
import queue
import shutil
import threading
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from hvd_ckpt.processes.grid import host_name
from hvd_ckpt.snapshots.barrier import Participant, RankManifest, await_folder, collect, send
from hvd_ckpt.snapshots.content import Content, SavedState, complete, staged_content, write_content
from hvd_ckpt.snapshots.folder import (
    SnapshotError,
    Warn,
    discard,
    is_short,
    list_snapshots,
    make_folder,
    name_of,
    reason_of,
    under_way,
)
from hvd_ckpt.snapshots.reader import prune
from hvd_ckpt.snapshots.schema import MAX_STEP
from hvd_ckpt.snapshots.tensors import Staging
from hvd_ckpt.utils.schema import Wrong

# That the end of the process, or an exception, waits for a snapshot under way; horovodrun gives 5 seconds in all.
EXIT_SECONDS = 3.0
GIVING_UP_SECONDS = 1.0  # and then until its files have been removed
_TROUBLE = (OSError, Wrong, SnapshotError)


@dataclass
class _Job:
    """A snapshot under way.

    Attributes:
        fault: why it was not written, for a warning; empty if it was.
        bug: an exception that the caller raises, in :meth:`SnapshotWriter.check`.
        held: keeps the temporary folder from counting as left over.
        copied, done: set when its tensors may change again, and when the thread has finished with it.
    """

    step: int
    temporary: Path
    content: Content | None = None
    fault: str = ""
    bug: Exception | None = None
    held: ExitStack = field(default_factory=ExitStack)
    copied: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)


class SnapshotWriter:
    """Writes the snapshots of a run beside training; one for each rank, all of which call the same methods in the same order.

    It is a context manager. An exception that leaves the context waits at most 3 seconds for a snapshot under way, and gives it up.

    Args:
        folder: folder of the run's snapshots, such as RUN/snapshots; made if missing; all ranks must see the same one.
        keep: number of snapshots that stay, the newest ones; at least 1.
        own: this process among the ranks that write.
        warn: called on rank 0 with one sentence for each snapshot that failed, by the thread that calls the methods.
        blocking: :meth:`begin` returns when the snapshot is on the disk, and nothing is copied.
        on_written: called on rank 0 for each snapshot that is in its place, before older ones are removed, by the writer's own
            thread; its second argument takes warnings.

    Attributes:
        written: on rank 0, the newest snapshot that this writer has put in place.
        failed: the reason why the last snapshot was not written, until one is.
        made_room: whether older snapshots were removed then, since the disk was short, so that :meth:`again` may write it.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        own: Participant,
        warn: Warn,
        blocking: bool = False,
        on_written: Callable[[Path, Warn], None] | None = None,
    ) -> None:
        self.written: Path | None = None
        self.failed: str | None = None
        self._folder, self._keep = Path(folder), keep
        self._own, self._blocking = own, blocking
        self._warn = warn
        # Filled by the writer's thread and emptied by the caller's. Both ends of a deque are safe without a lock.
        self._warnings: deque[str] = deque()
        self._on_written = on_written
        self.made_room = False
        self._begun = 0
        self._job: _Job | None = None
        self._last: _Job | None = None  # with its content, which may be written again
        self._bug: Exception | None = None
        self._staging = Staging()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._given_up = threading.Event()

    def begin(self, step: int, state: SavedState) -> None:
        """Begins to write a snapshot. Returns at once, unless the one before is not on the disk yet: then it waits for that.

        Tensors of ranges and of ``state.replicated`` must stay as they are until :meth:`before_update` returns. Values that are not
        tensors, tensors of at most 4 KiB, ranges that are marked as changing, and ``state.per_rank`` may change at once. Plain
        state is any nesting of dict, list, tuple, str, int, float, bool, None and dense tensors.

        Args:
            step: training steps taken.

        Raises:
            SnapshotError: the step is not a number of steps.
            RuntimeError: the writer is closed.
            Exception: a bug in what the thread did before.
        """
        if self._closed:
            raise RuntimeError("SnapshotWriter.begin: the writer is closed: make a new one")
        if type(step) is not int or not 0 <= step <= MAX_STEP:
            raise SnapshotError(
                f"The snapshot was not written to '{self._folder}': step is {step!r}: give an integer from 0."
            )
        # The steps of a snapshot, and what a kill leaves behind each of them:
        #
        #     1  rank 0 makes the folder .step-N.tmp-T                 an empty folder
        #     2  each thread copies and writes its files               some files; nothing reads a folder of this name
        #     3  each thread hands its manifest to rank 0              all files, no manifest.json
        #     4  rank 0 writes manifest.json, renames the folder       the snapshot
        #     5  rank 0 removes later ones of an abandoned course, then old ones
        #
        # Leftovers of 1 to 3 are removed after the next snapshot (prune).
        job = self._new_job(step)
        try:
            self._settle()
            if job.fault:  # the snapshot before is done, and old ones are pruned: perhaps there is room now
                self._make_folder(job)
            self._last = None
            if not job.fault:
                staging = None if self._blocking else self._staging
                try:
                    job.content = staged_content(self._own.rank, staging, state)
                except _TROUBLE as error:
                    job.fault = reason_of(error)
            self._launch(job)
        except BaseException:
            job.held.close()
            if self._own.leads:
                discard(job.temporary)
            raise
        if self._blocking:
            self.check()

    def again(self) -> None:
        """Writes the last snapshot once more, as it was. To be called on all ranks, after :meth:`wait`."""
        assert self._last is not None
        self._launch(self._new_job(self._last.step, self._last.content))

    def before_update(self) -> None:
        """Waits until the optimizer may change the weights and its state. Call it before each of its steps."""
        if self._job is not None:
            self._job.copied.wait()

    def check(self) -> None:
        """Hands over warnings, and raises what went wrong in the thread if it is a bug and not trouble with the file system."""
        while self._warnings:
            self._warn(self._warnings.popleft())
        bug, self._bug = self._bug, None
        if bug is not None:
            raise bug

    def wait(self) -> Path | None:
        """Returns when the snapshot that was begun is on the disk, or has failed.

        Returns:
            On rank 0 the newest snapshot's folder, None if it failed; on the other ranks None.

        Raises:
            Exception: as :meth:`check`.
        """
        self._settle()
        return self.written if self.failed is None else None

    def close(self) -> None:
        """Waits for the snapshot that was begun, ends the thread, and frees the memory of the copies.

        Raises:
            Exception: as :meth:`check`.
        """
        self._end(None)
        self.check()

    def __enter__(self) -> SnapshotWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._end(EXIT_SECONDS)

    # -------------------------------------------------------------------------------- the caller's thread

    def _new_job(self, step: int, content: Content | None = None) -> _Job:
        self._begun += 1
        job = _Job(step, self._folder / self._own.temporary_name(step, self._begun), content)
        # Until the thread has finished: prune() of this process, behind the snapshot before, must not remove the folder.
        job.held.enter_context(under_way(job.temporary))
        if self._own.leads:  # first of all: the other ranks' threads may be waiting for it
            self._make_folder(job)
        return job

    def _launch(self, job: _Job) -> None:
        self._job = job
        if self._blocking:
            self._run(job)
        else:
            self._start()
            self._jobs.put(job)

    def _settle(self) -> None:
        """Waits for the snapshot under way, and hands over its warnings."""
        if self._job is not None:
            self._job.done.wait()
            self._job = None
        self.check()

    @staticmethod
    def _make_folder(job: _Job) -> None:
        try:
            make_folder(job.temporary.parent)
            job.temporary.mkdir()
            job.fault = ""
        except OSError as error:
            job.fault = reason_of(error)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="hvd_ckpt.snapshots", daemon=True)
            self._thread.start()
            # Python ends daemon threads anywhere when it exits. This gives the
            # snapshot under way a few seconds, and removes it otherwise.
            atexit.register(self._end, EXIT_SECONDS)

    def _end(self, seconds: float | None) -> None:
        """Ends the thread when it has finished, waiting at most so long."""
        self._closed = True
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(seconds)
            self._given_up.set()  # the others may have died; the snapshot under way is removed
            self._thread.join(None if seconds is None else GIVING_UP_SECONDS)
            atexit.unregister(self._end)
            # It still reads the copies, so that their memory stays.
            if self._thread.is_alive():
                return
        self._thread = self._job = None
        self._staging.free()

    # -------------------------------------------------------------------------------- the writer's thread

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._run(job)
            del job

    def _run(self, job: _Job) -> None:
        try:
            mine = self._write(job)
            fault = self._finish(job, mine) if self._own.leads else send(job.temporary, self._own.rank, mine)
        except Exception as error:  # for the caller to raise
            job.bug, fault = error, reason_of(error)
            if self._own.leads:
                discard(job.temporary)
        self._last = job
        job.held.close()
        self.failed, self._bug = fault, job.bug
        if fault is not None and self._own.leads and job.bug is None:
            self._warnings.append(
                f"The snapshot of step {job.step} was not written to '{self._folder}': {fault}. "
                f"Training continues, and {'the newest snapshot stays' if self.made_room else 'older snapshots stay'}."
            )
        # Last: the caller's thread reads `failed`, the bug and the warnings once this is set.
        job.done.set()

    def _write(self, job: _Job) -> RankManifest:
        """Copies and writes this rank's files. A fault is reported in the folder, too, so that has to exist first."""
        # Copied even if the folder could not be made: the optimizer's step waits for `copied`, whatever becomes of the files.
        self._copy(job)
        try:
            if not self._own.leads:
                await_folder(job.temporary)
            if job.fault:
                raise Wrong(job.fault)
            assert job.content is not None
            return write_content(job.temporary, self._own.rank, job.content)
        except Exception as error:
            if not isinstance(error, _TROUBLE):
                job.bug = error
            needed = job.content.nbytes if job.content is not None and is_short(error) else None
            return RankManifest(host=host_name(), fault=reason_of(error), needed=needed)

    def _copy(self, job: _Job) -> None:
        try:
            if job.content is not None and job.content.copying is not None:
                job.content.copying.run()
        except Exception as error:
            job.fault = reason_of(error)
            if not isinstance(error, _TROUBLE):
                job.bug = error  # for the caller to raise
        finally:
            if job.content is not None:
                job.content.copying = None
            job.copied.set()

    def _finish(self, job: _Job, mine: RankManifest) -> str | None:
        """Completes the snapshot when all ranks have written, or removes it; returns why it failed.

        After a failure of its own it waits for the others as well, or a rank that comes late would look for a folder that is gone.
        """
        try:
            ranks = [mine, *collect(job.temporary, self._own.ranks, self._given_up.is_set)]
        except _TROUBLE as error:
            discard(job.temporary)
            return f"rank 0: {mine.fault}" if mine.fault else reason_of(error)
        fault = complete(job.temporary, job.step, ranks, self._warnings.append)
        self.made_room = False
        if fault is None:
            self.written = self._folder / name_of(job.step)
            self._tidy(self.written)
        elif any(manifest.needed is not None for manifest in ranks):
            assert job.content is not None
            fault += self._make_room([manifest.needed or job.content.nbytes for manifest in ranks])
        return fault

    def _make_room(self, needed: list[int]) -> str:
        """Removes all snapshots but the newest good one; returns how much room was missing, to follow on "make room"."""
        free = shutil.disk_usage(self._folder).free
        before = list_snapshots(self._folder)
        try:
            prune(self._folder, 1, self._warnings.append)
        except _TROUBLE as error:
            self._warnings.append(f"Old snapshots in '{self._folder}' were not removed: {reason_of(error)}.")
        self.made_room = len(list_snapshots(self._folder)) < len(before)
        missing = sum(needed) - free
        return f" for {missing:,} bytes more" if missing > 0 else ""

    def _tidy(self, written: Path) -> None:
        try:
            if self._on_written is not None:
                self._on_written(written, self._warnings.append)
            prune(self._folder, self._keep, self._warnings.append)
        except _TROUBLE as error:
            self._warnings.append(f"Old snapshots in '{self._folder}' were not removed: {reason_of(error)}.")
