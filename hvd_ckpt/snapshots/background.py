"""Snapshots that are written while training goes on.

A thread copies the state while the next forward and backward pass run, which only read it, and writes the copy to the disk while
training changes the state again. The one place where training waits is before the optimizer's update, if the copy is not complete
by then (CheckFreq, Mohan et al., FAST 2021).

The ranks' threads send no messages, which would mix with those of training: they meet in the file system
(:mod:`hvd_ckpt.snapshots.snapshot_meeting`). When rank 0 has the parts of all ranks, it writes the manifest and gives the folder
its name, or removes it and says why.
"""

from __future__ import annotations

import atexit
import hashlib
import queue
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from hvd_ckpt.json_file import Wrong
from hvd_ckpt.peers import host_name
from hvd_ckpt.snapshots.hashed_file import SnapshotError
from hvd_ckpt.snapshots.shards import OwnShard
from hvd_ckpt.snapshots.snapshot import prune
from hvd_ckpt.snapshots.snapshot_folder import Warn, discard, name_of, temporary_name, under_way
from hvd_ckpt.snapshots.snapshot_meeting import await_folder, parts_of_others, send_part
from hvd_ckpt.snapshots.snapshot_parts import (
    Content,
    Part,
    check_step,
    content_of,
    finish,
    make_temporary,
    reason_of,
    write_content,
)
from hvd_ckpt.snapshots.staging import Copying, Staging

__all__ = ["SnapshotWriter"]

# That the end of the process, or an exception, waits for a snapshot under way; horovodrun gives 5 seconds in all.
EXIT_SECONDS = 3.0
GIVING_UP_SECONDS = 1.0  # and then until what there is of it has been removed
SMALL = 4096  # bytes of a tensor that is not worth leaving to the thread
_TROUBLE = (OSError, Wrong, SnapshotError)
_TOKEN = re.compile(r"[0-9a-f]{8}")


@dataclass
class _Job:
    """A snapshot under way."""

    step: int
    temporary: Path
    before: Path | None  # the temporary folder of the snapshot before
    content: Content | None = None
    copying: Copying | None = None
    fault: str = ""
    bug: Exception | None = None
    held: ExitStack = field(default_factory=ExitStack)
    copied: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    waited_for: bool = False  # a caller waits for its end


class SnapshotWriter:
    """Writes the snapshots of a run beside training; one for each rank, all of which call the same methods in the same order.

    It is a context manager. An exception that leaves the context waits at most 3 seconds for a snapshot under way, and gives it up.

    Args:
        folder: where snapshots are, such as RUN/snapshots; made if missing; all ranks must see the same one.
        keep: the newest so many stay.
        token: 8 hexadecimal digits, the same on every rank, and new for each writer.
        rank, ranks: this process's rank and the number of ranks.
        warn: is told, on rank 0, what went wrong, in one sentence for each snapshot; by the thread that calls the methods.
        blocking: :meth:`begin` returns when the snapshot is on the disk, and nothing is copied.
        written: is told, on rank 0, of each snapshot that is in its place, before older ones go; by the writer's own thread. What
            is to be warned of it hands to its second argument.

    Attributes:
        written: on rank 0, the newest snapshot that this writer has put in place.
        failed: why the last one was not written, until one is.
        stalled: seconds that callers of :meth:`begin` and :meth:`before_update` were kept.

    Raises:
        ValueError: ``keep`` or ``token`` is none.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        token: str,
        rank: int,
        ranks: int,
        warn: Warn,
        blocking: bool = False,
        written: Callable[[Path, Warn], None] | None = None,
    ) -> None:
        if keep < 1:
            raise ValueError(f"SnapshotWriter: keep is {keep}: keep 1 snapshot or more")
        if not _TOKEN.fullmatch(token):
            raise ValueError(f"SnapshotWriter: token is {token!r}: give 8 hexadecimal digits")
        self.written: Path | None = None
        self.failed: str | None = None
        self.stalled = 0.0
        self._folder, self._keep, self._token = Path(folder), keep, token
        self._rank, self._ranks, self._blocking = rank, ranks, blocking
        self._warn = warn
        self._warnings: deque[str] = deque()
        self._tell_written = written
        self._begun = 0
        self._job: _Job | None = None
        self._before: Path | None = None
        self._bug: Exception | None = None
        self._at_once, self._meanwhile = Staging(), Staging()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._given_up = threading.Event()

    def begin(
        self,
        step: int,
        *,
        weights: Mapping[str, Tensor],
        common: Any,
        own: Any,
        changing: Collection[str] = (),
        shard: OwnShard | None = None,
    ) -> None:
        """Begins to write a snapshot. Returns at once, unless the one before is not on the disk yet: then it waits for that.

        Weights and the tensors of ``common`` and ``shard`` must stay as they are until :meth:`before_update` returns. All values
        that are no tensors, tensors of at most 4 KiB, and ``own`` may change at once. For trees see
        :func:`hvd_ckpt.snapshots.snapshot.write`.

        Args:
            step: training steps taken.
            weights: ``model.state_dict()``; rank 0's are written.
            common: what is the same on every rank; rank 0's is written.
            own: what is this rank's own.
            changing: names of weights that may change at once, such as the buffers of a batch norm.
            shard: this rank's part of what is split over the ranks; None where nothing is.

        Raises:
            SnapshotError: the step is none.
            RuntimeError: the writer is closed.
            Exception: a bug in what the thread did before.
        """
        if self._closed:
            raise RuntimeError("SnapshotWriter.begin: the writer is closed: make a new one")
        start = time.perf_counter()
        try:
            self._begin(step, partial(content_of, self._rank, weights, common, own, shard), changing)
        finally:
            self.stalled += time.perf_counter() - start
        if self._blocking:
            self.check()

    def before_update(self) -> None:
        """Returns when the optimizer may change the weights and its state; to be called before each of its steps."""
        job = self._job
        if job is not None and not job.copied.is_set():
            start = time.perf_counter()
            job.copied.wait()
            self.stalled += time.perf_counter() - start

    def check(self) -> None:
        """Hands over warnings, and raises what went wrong in the thread if it is no trouble of the file system, but a bug."""
        while self._warnings:
            self._warn(self._warnings.popleft())
        bug, self._bug = self._bug, None
        if bug is not None:
            raise bug

    def wait(self) -> Path | None:
        """Returns when what was begun is on the disk, or has failed.

        Returns:
            On rank 0 the newest snapshot's folder, None if it failed; on the other ranks None.

        Raises:
            Exception: as :meth:`check`.
        """
        self._settle()
        return self.written if self.failed is None else None

    def close(self) -> None:
        """Waits for what was begun, ends the thread, and frees the memory of the copies.

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

    def _settle(self) -> None:
        """Waits for the snapshot under way, and says how it went."""
        job = self._job
        if job is not None:
            job.waited_for = True
            job.done.wait()
            self._job = None
        self.check()

    def _begin(self, step: int, encode: Callable[[], Content], changing: Collection[str]) -> None:
        try:
            check_step(step)
        except Wrong as error:
            raise SnapshotError(f"The snapshot was not written to '{self._folder}': {error}.") from None
        self._begun += 1
        token = hashlib.sha256(f"{self._token} {self._begun}".encode()).hexdigest()[:8]
        job = _Job(step, self._folder / temporary_name(name_of(step), token), self._before)
        self._before = job.temporary
        try:
            job.held.enter_context(under_way(job.temporary))
            made = self._rank == 0 and self._makes_folder(job)  # the other ranks may have waited for it
            self._settle()
            if self._rank == 0 and not made:  # perhaps there is room now
                self._makes_folder(job)
            self._prepare(job, encode, changing)
            if self._blocking:
                self._run(job)
            else:
                self._start()
                self._jobs.put(job)
        except BaseException:
            job.held.close()
            if self._rank == 0:
                discard(job.temporary)
            raise
        self._job = job

    def _makes_folder(self, job: _Job) -> bool:
        try:
            make_temporary(job.temporary)
        except OSError as error:
            job.fault = reason_of(error)
            return False
        job.fault = ""
        return True

    def _prepare(self, job: _Job, encode: Callable[[], Content], changing: Collection[str]) -> None:
        if job.fault:
            return
        try:
            job.content = encode()
            if not self._blocking:
                job.copying = self._staged(job.content, changing)
        except _TROUBLE as error:
            job.content, job.fault = None, reason_of(error)

    def _staged(self, content: Content, changing: Collection[str]) -> Copying:
        """Puts copies into the content, and copies what may change at once."""
        now = [(content.own.tensors, name) for name in content.own.tensors]
        later: list[tuple[dict[str, Tensor], str]] = []
        hasty = {content.aliases.get(name, name) for name in changing}
        for tensors in content.lasting:
            for name, tensor in tensors.items():
                at_once = tensor.numel() * tensor.itemsize <= SMALL
                at_once = at_once or (tensors is content.weights and name in hasty)
                (now if at_once else later).append((tensors, name))
        pairs = []
        for places, staging in ((now, self._at_once), (later, self._meanwhile)):
            sources = [tensors[name] for tensors, name in places]
            copies = staging.copies_of(sources)
            for (tensors, name), copy in zip(places, copies):
                tensors[name] = copy
            pairs.append(list(zip(sources, copies)))
        return Copying(*pairs)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="hvd_ckpt.snapshots", daemon=True)
            self._thread.start()
            atexit.register(self._end, EXIT_SECONDS)

    def _end(self, seconds: float | None) -> None:
        """Ends the thread when it has finished, waiting at most so long."""
        self._closed = True
        if self._job is not None:
            self._job.waited_for = True
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(seconds)
            self._given_up.set()  # the others may have died; what is left of the snapshot goes
            self._thread.join(None if seconds is None else GIVING_UP_SECONDS)
            atexit.unregister(self._end)
            if self._thread.is_alive():
                return
        self._thread = self._job = None
        self._at_once.free()
        self._meanwhile.free()

    # -------------------------------------------------------------------------------- the writer's thread

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._run(job)
            del job  # or its files would stay known until the next one comes

    def _run(self, job: _Job) -> None:
        try:
            part = self._part(job)
            fault = self._whole(job, part) if self._rank == 0 else send_part(job.temporary, self._rank, part)
        except Exception as error:  # for the caller to raise
            job.bug, fault = error, reason_of(error)
            if self._rank == 0:
                discard(job.temporary)
        job.content = None
        job.held.close()
        self.failed, self._bug = fault, job.bug
        if fault is not None and self._rank == 0 and job.bug is None:
            self._warnings.append(
                f"The snapshot of step {job.step} was not written to '{self._folder}': {fault}. "
                f"Training goes on, and older snapshots stay."
            )
        job.done.set()

    def _part(self, job: _Job) -> Part:
        """Copies and writes this rank's files. A fault, too, is told in the folder, so it has to be there first."""
        self._copy(job)
        try:
            if self._rank != 0:
                await_folder(job.temporary, job.before, lambda: job.waited_for)
            if job.fault:
                raise Wrong(job.fault)
            assert job.content is not None
            return write_content(job.temporary, job.content)
        except Exception as error:
            if not isinstance(error, _TROUBLE):
                job.bug = error
            return Part(host_name(), fault=reason_of(error))

    def _copy(self, job: _Job) -> None:
        try:
            if job.copying is not None:
                job.copying.run()
        except Exception as error:  # for the caller to raise
            job.bug, job.fault = error, reason_of(error)
        finally:
            job.copying = None
            job.copied.set()

    def _whole(self, job: _Job, part: Part) -> str | None:
        """Makes all parts a snapshot; or says why it cannot, and leaves nothing of it.

        After a failure of its own it waits for the others as well, or a rank that comes late would look for a folder that is gone.
        """
        try:
            parts = [part, *parts_of_others(job.temporary, self._ranks, self._given_up.is_set)]
        except _TROUBLE as error:
            discard(job.temporary)
            return f"rank 0: {part.fault}" if part.fault else reason_of(error)
        fault = finish(job.temporary, job.step, parts, self._warnings.append)
        if fault is None:
            self.written = self._folder / name_of(job.step)
            self._tidy(self.written)
        return fault

    def _tidy(self, written: Path) -> None:
        try:
            if self._tell_written is not None:
                self._tell_written(written, self._warnings.append)
            prune(self._folder, self._keep, self._warnings.append)
        except _TROUBLE as error:
            self._warnings.append(f"Old snapshots in '{self._folder}' were not removed: {reason_of(error)}.")
