"""Snapshots of a training loop: saved in the background, resumed with the same bits, and written when a stop is requested."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from typing_extensions import Self

from hvd_ckpt.collectives.agreement import (
    agree_on_options,
    described,
    errors_on_all,
    of_all_processes,
    of_first_process,
)
from hvd_ckpt.distributed.averaging import AveragedWeights
from hvd_ckpt.distributed.precision import GradScaler
from hvd_ckpt.processes.grid import current
from hvd_ckpt.processes.stopping import StopRequest, forget_file, status_of
from hvd_ckpt.reduction.optimizer import ReducedOptimizer
from hvd_ckpt.reduction.stepping import SteppingOptions
from hvd_ckpt.snapshots.content import SavedState
from hvd_ckpt.snapshots.fits import PerRankState, ReplicatedState, validated
from hvd_ckpt.snapshots.folder import SnapshotError, Warn, list_snapshots, remove, step_of
from hvd_ckpt.snapshots.lock import FolderLock
from hvd_ckpt.snapshots.reader import Snapshot, find
from hvd_ckpt.snapshots.training_state import TrainingState, check_arguments, seed_all, seed_of_rank
from hvd_ckpt.snapshots.writer import SnapshotWriter
from hvd_ckpt.utils import run_warnings
from hvd_ckpt.utils.schema import Wrong
from hvd_ckpt.utils.states import State


class Snapshots:
    """Saves a training loop in the background, resumes it with the same bits, and detects requests to stop.

    ::

        with hc.Snapshots("run", model=model, optimizer=optimizer, scheduler=scheduler, loader=loader) as snapshots:
            step = snapshots.resume()
            for inputs, targets in loader:
                ...  # a step
                step += 1
                stop = snapshots.stop_requested()
                if stop or step % 100 == 0:
                    snapshots.save(step)
                if stop:
                    break

    A snapshot holds weights, buffers, optimizer state, the ``state_dict()`` of the other arguments, each rank's random
    state, and the order in which gradients are reduced. A thread copies the state during the next forward and backward pass, which
    only read it, and writes it. ``optimizer.step()`` waits for the copy (CheckFreq, Mohan et al., FAST 2021). With sharded
    optimizers and in pipeline stages each rank writes its part. A snapshot resumes with any number of ranks and any sharding.

    All methods are collective: call them on every rank, in the same order. From the first :meth:`save` or :meth:`stop_requested` to
    :meth:`close`, or to the end of the process, rank 0 holds the lock of the folder (``.lock`` there). Another run that saves there
    is an error in these methods.

    Args:
        folder: folder of the run, the same on all ranks and hosts. Snapshots are in ``folder/snapshots``.
        model: the module that is trained, or the :class:`hvd_ckpt.Pipeline` of it.
        optimizer: its ``DistributedOptimizer``, or that of :func:`hvd_ckpt.LocalSGD`. In local SGD each rank writes its own
            weights.
        scheduler: a learning rate scheduler, or any object with ``state_dict`` and ``load_state_dict`` that is the same on every
            rank.
        scaler: an :class:`hvd_ckpt.GradScaler`.
        loader: an :class:`hvd_ckpt.data.DistributedSampler` or :class:`hvd_ckpt.data.DataLoader`, whose position is valid for any
            number of ranks. Or any object with ``state_dict`` and ``load_state_dict``, such as a streaming data set. Its state is
            saved for each rank, so the run must resume on as many ranks.
        average: :class:`hvd_ckpt.AveragedWeights` of the optimizer.
        keep: number of snapshots to keep, the newest ones.
        blocking: whether :meth:`save` returns only when the snapshot is on the disk. Nothing is copied then. It is always so if
            the optimizer's state is offloaded.
        warn: takes one sentence for each snapshot that could not be written, on rank 0; by default a Python warning.

    Attributes:
        folder: the folder of the run.
        loop: further state that was given to :meth:`save`, after :meth:`resume`.
        stop: records requests to stop.
        written: the newest snapshots that are complete, on the first process; may be emptied.
        lock: the lock of the folder, on the first process; may be set to one that is held already.

    Raises:
        TypeError: an argument has no state that can be saved; raised on every rank.
        ValueError: ``keep`` is less than 1, or arguments differ between ranks. Or the optimizer is one without some of the ranks,
            or one of :func:`hvd_ckpt.LocalSGD` that is used with an average. Raised on every rank.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any = None,
        scaler: GradScaler | None = None,
        loader: Any = None,
        average: AveragedWeights | None = None,
        keep: int = 3,
        blocking: bool = False,
        warn: Warn | None = None,
    ) -> None:
        training: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        training |= {"scaler": scaler, "loader": loader, "average": average}
        error: Exception | None = None
        try:
            check_arguments(**training, keep=keep)
        except (TypeError, ValueError) as wrong:
            error = wrong
        options = described(folder=str(folder), **training, keep=keep, blocking=blocking)
        # Collective: an argument that is wrong on one rank alone is raised
        # on all, so that none waits in the first collective of a save.
        agree_on_options("Snapshots", options, error)
        assert isinstance(optimizer, ReducedOptimizer)
        self.folder = Path(folder)
        self.stop = StopRequest(self.folder if current().number == 0 else None)
        self.written: deque[Path] = deque(maxlen=16)
        self._training = TrainingState(**training)
        self._optimizer, self._keep = optimizer, keep
        self._blocking = blocking or optimizer.is_offloaded
        self._warn = warn or run_warnings.warn
        self.loop: dict[str, Any] = {}
        self._step, self._resumed = 0, False
        self._abandoned_from: int | None = None  # later snapshots are of a course that the run has left
        self._stopped: str | None = None
        self._writer: SnapshotWriter | None = None
        self._opened = ExitStack()
        self.lock: FolderLock | None = None
        self._locked = False
        self._found: set[Path] | None = None  # snapshots that were there on resume(), on the first process

    # -------------------------------------------------------------------------------- of loops

    def resume(self) -> int:
        """Loads the newest snapshot that is not damaged. Returns the number of steps taken, 0 without a snapshot.

        The learning rate and other options of the optimizer's groups are those of the snapshot. On another number of ranks, each
        rank draws new random numbers, and results are equal up to rounding.

        Raises:
            SnapshotError: all snapshots are damaged, or the newest is of another model, optimizer or run of
                ``hvd-ckpt train``; raised on every rank.
        """
        self._optimizer.check_own_weights("Snapshots.resume()")
        writer = self._open()
        self._resumed = True
        self._settle(writer)
        with errors_on_all("Snapshots: find"):
            writer.wait()  # the newest may be under way
            newest = find(self.folder / "snapshots") if current().number == 0 else None
            if current().number == 0:
                forget_file(self.folder)
                self._found = set(list_snapshots(self.folder / "snapshots"))
        # One process chooses for all. Each rank by itself could find another
        # newest one while files come and go on a network file system. Its manifest comes along: it says how the files are that the
        # first has verified, and n ranks do not ask the file system for n files each.
        snapshot: Snapshot | None = of_first_process(newest, "Snapshots: resume()")
        if snapshot is None:
            return 0
        with errors_on_all("Snapshots: read"):
            self._training.check(snapshot)
        self._step = snapshot.manifest.step
        self._training.load_weights(snapshot)
        if not self.load(snapshot, options=True):
            # There were other ranks. A seed by step and rank gives no rank
            # the numbers of another one, nor those of an earlier resume.
            seed_all(seed_of_rank(0, self._step))
        with errors_on_all("Snapshots: loop"):
            self._training.load_loop(snapshot)
        self.loop = snapshot.replicated["loop"]
        return self._step

    def save(self, step: int, **loop: Any) -> None:
        """Begins to write a snapshot. Returns at once, unless the previous snapshot is not on the disk yet; then it waits for that
        one.

        If the snapshot cannot be written, for example to a full disk, rank 0 warns and training continues.

        Args:
            step: number of training steps taken.
            loop: further state, the same on every rank, such as the best loss so far: numbers, strings, tensors, lists and dicts.
                After :meth:`resume` it is in the attribute ``loop``.

        Raises:
            SnapshotError: another run uses the folder. Or the step is not a number of steps, or is before that of the last
                snapshot. Or the folder has snapshots, and :meth:`resume` was not called. Or the state is one that no run could
                resume from. Raised on every rank.
        """
        if self._optimizer.has_unreduced:
            run_warnings.warn(
                f"Snapshots: the snapshot of step {step} lacks the gradients of backward passes since the last optimizer.step(), "
                "so a run that resumes from it has other results: save after step()"
            )
        self.begin(step, lambda: self._training.of_loop(loop))

    def stop_requested(self) -> str | None:
        """Returns the request to stop: the name of a signal, or ``"stop"`` for the file of that name in the run's folder; else
        None.

        Call it once after each ``optimizer.step()``. SIGTERM, SIGINT, SIGUSR1 or SIGHUP to any rank count, unless the program
        handles them itself. The request is sent with the gradients of the next step, so it costs nothing. All
        ranks get the same answer after the same step. With :func:`hvd_ckpt.LocalSGD` ranks exchange it after each average, so
        it takes up to a period. A second Ctrl-C interrupts at once.
        """
        writer = self._open()
        if not self._locked:
            with errors_on_all("Snapshots: lock"):
                self._lock_folder()
            self._locked = True
        writer.check()
        optimizer: Any = self._optimizer
        # A signal that one rank gets during step k:
        #
        #     after step k               this rank calls notify() below; all ranks return None
        #     gradients of step k + 1    carry the flag to all ranks
        #     after step k + 1           all ranks are notified, enter this collective together, and return the same reason
        if optimizer.has_averaged if optimizer.is_local else optimizer.notified:
            reports = of_all_processes(self.stop.reason, "Snapshots: stop")
            self._stopped = self._stopped or next((reason for reason in reports if reason is not None), None)
        # Each stage has a world of its own, in which the flag travels.
        asked = current().on_any_stage(self.stop.reason is not None)
        if asked and self._stopped is None and not optimizer.is_local:
            optimizer.notify()
        return self._stopped

    @property
    def exit_status(self) -> int:
        """Returns the status with which the process should exit: 128 + the number of the signal that has stopped it, else 0."""
        return status_of(self._stopped)

    def wait(self) -> None:
        """Waits until the snapshot that was saved last is on the disk.

        Raises:
            SnapshotError: it could not be written; on every rank.
        """
        if self._writer is None:
            return
        fault = self._fault(self._writer)
        if fault is not None:
            raise SnapshotError(f"The last snapshot, of step {self._step}, could not be written: {fault}")

    def _fault(self, writer: SnapshotWriter) -> str | None:
        """Why the last snapshot was not written, also when it was tried again after room was made for it. Collective."""
        fault, has_room = self._settle(writer)
        writer.wait()
        if fault is not None and has_room:
            writer.again()
            fault, _ = self._settle(writer)
            writer.wait()
        return fault

    def _settle(self, writer: SnapshotWriter) -> tuple[str | None, bool]:
        """Waits until rank 0 has written the snapshot under way or failed; then no other rank looks for its folder any longer.
        Returns why it failed, and whether it has made room to try again. Collective."""
        if not writer.begun:
            return None, False
        ended = (writer.ended(), writer.made_room) if current().number == 0 else None
        fault: str | None
        fault, has_room = of_first_process(ended, "Snapshots: end of the last one")
        if fault is not None:
            writer.give_up()
        return fault, has_room

    def close(self) -> None:
        """Waits for the last snapshot, and restores the former signal handlers.

        Raises:
            SnapshotError: it could not be written; on every rank.
        """
        try:
            self.wait()
            if self._stopped is not None:
                self.stop.acknowledge()
        finally:
            self._opened.close()

    def __enter__(self) -> Self:
        self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """After an exception a snapshot under way gets 3 seconds."""
        if error is None:
            self.close()
        else:
            self._opened.__exit__(kind, error, trace)

    # -------------------------------------------------------------------------------- of the training command

    def before_update(self) -> None:
        """Waits until state may change. Each ``optimizer.step()`` calls it; call it before you change state in other ways."""
        if self._writer is not None:
            self._writer.before_update()

    def load(self, snapshot: Snapshot, options: bool = False) -> bool:
        """Loads everything except weights and further state. Returns whether this includes this rank's own state.

        Args:
            options: as of :meth:`.TrainingState.load`.
        """
        self._resumed, self._abandoned_from = True, snapshot.manifest.step
        return self._training.load(snapshot, options)

    def begin(
        self,
        step: int,
        further: Callable[[], tuple[Mapping[str, Any], Mapping[str, Any]]],
        schemas: tuple[type[State], type[State]] = (ReplicatedState, PerRankState),
    ) -> None:
        """As :meth:`save`. ``further`` returns further state, replicated and of this rank, or state that replaces that of this
        object; the schemas are those of both."""
        self._optimizer.check_own_weights("Snapshots.save()")
        is_first, writer = self._writer is None, self._open()
        try:
            options: list[Any] = []
            if self._optimizer.is_local:  # elsewhere each step compares them
                options = of_all_processes(SteppingOptions(self._optimizer).values(), "Snapshots: options")
            replicas = self._training.replicas()
            self._settle(writer)
            # The name has the step: ranks that save others would wait for each other's files.
            with errors_on_all(f"Snapshots: save({step})"):
                self._lock_folder()
                if current().number == 0 and not self._resumed and list_snapshots(self.folder / "snapshots"):
                    raise SnapshotError(
                        f"Snapshots: '{self.folder}' has snapshots already: call resume() first, or give another folder"
                    )
                if type(step) is int and step < self._step:
                    raise SnapshotError(
                        f"Snapshots: step {step} is before step {self._step} of the last snapshot, which a later resume() would "
                        "load: count the steps on from the number that resume() returned, or give another folder"
                    )
                if any(other != options[0] for other in options):
                    raise SnapshotError(
                        f"Snapshots: learning rates or other options of the optimizer differ between ranks in step {step}, and a "
                        "snapshot holds those of rank 0: set them alike on every rank"
                    )
                writer.wait()
                try:
                    replicated, per_rank = further()
                    state = self._training.saved({**replicas, **replicated}, per_rank)
                    for schema, values in zip(schemas, (state.replicated, state.per_rank)):
                        validated(schema, values, "state")
                except Wrong as error:
                    raise SnapshotError(
                        f"The snapshot of step {step} was not written, since it could not be resumed from: {error}."
                    ) from None
        except BaseException:
            if is_first:  # it leaves nothing behind
                self._opened.close()
            raise
        self._locked = self._resumed = True
        writer.begin(step, state)
        self._step = step
        if self._blocking:
            self._fault(writer)  # later, the tensors would be other ones

    def commit(self, replicated: Mapping[str, Any], per_rank: Mapping[str, Any]) -> SavedState:
        """All that this rank has, as if there were no others, not copied; arguments are what ``further`` of :meth:`begin`
        returns. Collective with logical replicas, of which ranks gather the buffers.
        """
        return self._training.saved({**self._training.replicas(), **replicated}, per_rank, alone=True)

    def _open(self) -> SnapshotWriter:
        if self._writer is not None:
            return self._writer
        token, grid = of_first_process(secrets.token_hex(4), "Snapshots: start"), current()
        with ExitStack() as opened:
            opened.callback(self._release_lock)
            # Left in reverse: first the hooks, so that no step waits for a
            # writer that is gone; then the writer; the signal handlers last.
            opened.enter_context(self.stop)
            writer = SnapshotWriter(
                self.folder / "snapshots",
                keep=self._keep,
                rank=grid.number,
                ranks=grid.size,
                token=token,
                warn=self._warn,
                blocking=self._blocking,
                on_written=self._on_written,
            )
            opened.callback(setattr, self, "_writer", None)
            self._writer = opened.enter_context(writer)
            opened.callback(self._optimizer.register_step_pre_hook(lambda *_: writer.before_update()).remove)
            changing: list[Any] = [self._optimizer] if self._optimizer.is_local else []
            for owner in (*changing, *filter(None, [self._training.average])):
                owner.before_change = self.before_update
            self._opened = opened.pop_all()
        return writer

    def _on_written(self, path: Path, warn: Warn) -> None:
        # Later ones than that from which the run has resumed. Whenever the process is killed, the newest snapshot is the last of
        # the run before, or the new one, which may have the place of one of them. It is never one between.
        begun, self._abandoned_from = self._abandoned_from, None
        if begun is not None:
            there = list_snapshots(path.parent)
            remove((other for other in there if step_of(other) > begun and other != path), warn)
        self.written.append(path)

    def _lock_folder(self) -> None:
        """Acquires the lock of the folder, the first time, on the first process. A program that only reads has none."""
        if current().number > 0:
            return
        if not self._locked:
            self.lock = self.lock or FolderLock(self.folder)
            if self._found is not None and set(list_snapshots(self.folder / "snapshots")) - self._found:
                self.lock.release()
                self.lock = None
                raise SnapshotError(
                    f"Another run has written snapshots into '{self.folder}' since resume(): resume again, or give another one."
                )
        assert self.lock is not None
        self.lock.check()

    def _release_lock(self) -> None:
        if self.lock is not None:
            self.lock.release()
        self.lock, self._locked, self._found = None, False, None
