"""Snapshots that are written while training continues, by a thread of each rank: :meth:`SnapshotWriter.begin` has the steps.

Training waits only before the optimizer's update, if the copy is not complete by then. If a rank has failed, rank 0 removes the
folder and reports the reason.
"""

from __future__ import annotations

import atexit
import shutil
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from hvd_ckpt.snapshots.content import (
    RankManifest,
    SavedState,
    await_folder,
    collect,
    complete,
    send,
    staged,
    write_content,
)
from hvd_ckpt.snapshots.folder import (
    SnapshotError,
    Warn,
    discard,
    is_short,
    list_snapshots,
    make_folder,
    name_of,
    reason_of,
    temporary_name,
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
    """A snapshot under way, or the last one, which may be written again.

    Attributes:
        state: what is written.
        fault: the reason if it could not be copied.
        copied: set when its tensors may change again.
    """

    step: int
    state: SavedState
    fault: Wrong | None = None
    temporary: Path = Path()
    copied: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None


class SnapshotWriter(AbstractContextManager["SnapshotWriter"]):
    """Writes the snapshots of a run beside training; one for each rank, all of which call the same methods in the same order.

    It is a context manager. An exception that leaves the context waits at most 3 seconds for a snapshot under way, and gives it up.

    Args:
        folder: folder of the run's snapshots, such as RUN/snapshots; made if missing; all ranks must see the same one.
        keep: number of snapshots that stay, the newest ones; at least 1.
        rank, ranks: number of this process among those that write, and their number. Rank 0 makes the folder, completes the
            snapshot, and removes it if that fails.
        token: 8 hexadecimal digits, the same on every rank, and new for each writer.
        warn: called on rank 0 with one sentence for each snapshot that failed, by the thread that calls the methods.
        blocking: :meth:`begin` returns when the snapshot is on the disk, and nothing is copied.
        on_written: called on rank 0 for each snapshot that is in its place, before older ones are removed, by the writer's own
            thread; its second argument takes warnings.

    Attributes:
        written: on rank 0, the newest snapshot that this writer has put in place.
        failed: the reason why the last snapshot was not written, until one is.
        made_room: whether older snapshots were removed then, since the disk was short, so that :meth:`again` may write it.
        begun: number of snapshots that were begun, as often as each was.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        rank: int,
        ranks: int,
        token: str,
        warn: Warn,
        blocking: bool = False,
        on_written: Callable[[Path, Warn], None] | None = None,
    ) -> None:
        self.written: Path | None = None
        self.failed: str | None = None
        self.made_room = False
        self._folder, self._keep = Path(folder), keep
        self._rank, self._ranks, self._token = rank, ranks, token
        self._warn, self._blocking, self._on_written = warn, blocking, on_written
        # Filled by the writer's thread and emptied by the caller's. Both ends of a deque are safe without a lock.
        self._warnings: deque[str] = deque()
        self.begun = 0
        self._job: _Job | None = None
        self._bug: Exception | None = None
        self._staging = None if blocking else Staging()
        self._given_up = threading.Event()

    def begin(self, step: int, state: SavedState) -> None:
        """Begins to write a snapshot, after so many training steps. Returns at once, unless the one before is not on the disk yet:
        then it waits for that, so that no snapshot is being written while older ones are removed.

        Ranges must stay as they are until :meth:`before_update` returns. Those of at most 4 KiB or marked as changing, and plain
        values, may change at once.

        Raises:
            SnapshotError: the step is not a number of steps.
            Exception: as :meth:`check`.
        """
        if type(step) is not int or not 0 <= step <= MAX_STEP:
            raise SnapshotError(
                f"The snapshot was not written to '{self._folder}': step is {step!r}: give an integer from 0."
            )
        # The steps of a snapshot, and what a kill leaves behind each of them:
        #
        #     1  each thread copies its tensors                        nothing
        #     2  rank 0 makes the folder .step-N.tmp-T                 an empty folder; nothing reads a folder of this name
        #     3  each thread writes its files                          some files
        #     4  each thread hands its manifest to rank 0              all files, no manifest.json
        #     5  rank 0 writes manifest.json, renames the folder       the snapshot
        #     6  rank 0 removes later ones of an abandoned course, then old ones
        #
        # Leftovers of 2 to 4 are removed after the next snapshot (prune).
        self.wait()
        job = _Job(step, state)
        try:
            job.state = staged(self._rank, self._staging, state)
        except _TROUBLE as error:
            job.fault = Wrong(reason_of(error))
        self._launch(job)
        if self._blocking:
            self.check()

    def again(self) -> None:
        """Writes the last snapshot once more, as it was. To be called on all ranks, after :meth:`wait`."""
        assert self._job is not None
        self._launch(self._job)

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
        """Waits until the snapshot that was begun is on the disk, or has failed, and calls :meth:`check`. Returns on rank 0 the
        newest snapshot's folder, None if it failed; on the other ranks None."""
        self.ended()
        self.check()
        return self.written if self.failed is None else None

    def ended(self) -> str | None:
        """Waits as :meth:`wait`; returns the reason why the snapshot was not written, or None."""
        if self._job is not None and self._job.thread is not None:
            self._job.thread.join()
        return self.failed

    def give_up(self) -> None:
        """Waits no longer for files of the snapshot that was begun, which rank 0 has given up."""
        self._given_up.set()
        self.ended()
        self._given_up.clear()

    def close(self) -> None:
        """Waits for the snapshot that was begun, frees the memory of the copies, and calls :meth:`check`."""
        self._end(None)
        self.check()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._end(EXIT_SECONDS)

    # -------------------------------------------------------------------------------- the caller's thread

    def _launch(self, job: _Job) -> None:
        # All ranks derive the same name without a message. Each snapshot has a new one, so files of a failed one cannot get into
        # the next.
        self.begun += 1
        token = f"{(int(self._token, 16) + self.begun) % 2**32:08x}"
        job.temporary = self._folder / temporary_name(job.step, token)
        self._job = job
        if self._blocking:
            self._run(job)
            return
        # Python ends daemon threads anywhere when it exits. This gives the
        # snapshot under way a few seconds, and removes it otherwise.
        atexit.unregister(self._end)
        atexit.register(self._end, EXIT_SECONDS)
        job.thread = threading.Thread(target=self._run, args=(job,), name="hvd_ckpt.snapshots", daemon=True)
        job.thread.start()

    def _end(self, seconds: float | None) -> None:
        """Ends the thread when it has finished, waiting at most so long."""
        thread = None if self._job is None else self._job.thread
        atexit.unregister(self._end)
        if thread is not None:
            thread.join(seconds)
            self._given_up.set()  # the others may have died; the snapshot under way is removed
            thread.join(None if seconds is None else GIVING_UP_SECONDS)
            if thread.is_alive():  # it still reads the copies, so that their memory stays
                return
        self._job = self._staging = None

    # -------------------------------------------------------------------------------- the writer's thread

    def _run(self, job: _Job) -> None:
        fault: str | None
        bug: Exception | None = None  # for the caller to raise
        try:
            try:
                mine = self._write(job)
            except Exception as error:
                # Reported in the folder, too, so that has to exist first.
                bug = None if isinstance(error, _TROUBLE) else error
                needed = job.state.nbytes if is_short(error) else None
                mine = RankManifest(fault=reason_of(error), needed=needed)
            if self._rank == 0:
                self._finish(job, mine)
            else:
                send(job.temporary, self._rank, mine)
            fault = mine.fault or None
        except Exception as error:
            bug = bug or (None if isinstance(error, _TROUBLE) else error)
            fault = reason_of(error)
            if self._rank == 0:
                discard(job.temporary)
        self.failed, self._bug = fault, bug
        if fault is not None and self._rank == 0 and bug is None:
            self._warnings.append(
                f"The snapshot of step {job.step} was not written to '{self._folder}': {fault}. "
                f"Training continues, and {'the newest snapshot stays' if self.made_room else 'older snapshots stay'}."
            )

    def _write(self, job: _Job) -> RankManifest:
        """Copies and writes this rank's files."""
        # The optimizer's step waits for the copies, so they come first. After a failure there is a folder as well, to report it.
        try:
            self._copy(job)
        finally:
            if self._rank == 0:
                make_folder(self._folder)
                job.temporary.mkdir()
            else:
                await_folder(job.temporary, self._given_up.is_set)
        if job.fault is not None:
            raise job.fault
        return write_content(job.temporary, self._rank, job.state)

    def _copy(self, job: _Job) -> None:
        try:
            if self._staging is not None and job.fault is None:
                self._staging.run()
        except Wrong as error:  # nor are such copies written again
            job.fault = error
        finally:
            job.copied.set()

    def _finish(self, job: _Job, mine: RankManifest) -> None:
        """Completes the snapshot when all ranks have written. Raises Wrong or OSError if it fails.

        After a failure of its own it waits for the others as well, or a rank that comes late would look for a folder that is gone.
        """
        self.made_room = False
        try:
            ranks = [mine, *collect(job.temporary, self._ranks, self._given_up.is_set)]
        except _TROUBLE:
            if mine.fault:
                raise Wrong(f"rank 0: {mine.fault}") from None
            raise
        try:
            complete(job.temporary, job.step, job.state, ranks, self._warnings.append)
        except Wrong as error:
            if all(manifest.needed is None for manifest in ranks):
                raise
            # Removes all snapshots but the newest good one, and says how much room was missing, to follow on "make room".
            discard(job.temporary)
            free, before = shutil.disk_usage(self._folder).free, list_snapshots(self._folder)
            self._tidy(1)
            self.made_room = len(list_snapshots(self._folder)) < len(before)
            missing = sum(manifest.needed or job.state.nbytes for manifest in ranks) - free
            raise Wrong(f"{error} for {missing:,} bytes more" if missing > 0 else str(error)) from None
        self.written = self._folder / name_of(job.step)
        self._tidy(self._keep, self.written)

    def _tidy(self, keep: int, written: Path | None = None) -> None:
        """Removes old snapshots."""
        try:
            if self._on_written is not None and written is not None:
                self._on_written(written, self._warnings.append)
            prune(self._folder, keep, self._warnings.append)
        except _TROUBLE as error:
            self._warnings.append(f"Old snapshots in '{self._folder}' were not removed: {reason_of(error)}.")
