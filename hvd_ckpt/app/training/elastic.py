"""``hvd-ckpt train`` in a job of Horovod Elastic: ranks join and leave, and the run resumes from its last commit.

A commit is a snapshot in memory, without per-rank state. Horovod's ``TorchState`` keeps it, and sends it to all ranks after a
change. Old and new ranks then build the run again from its configuration and that snapshot, like a resume on another number of
ranks. Each rank has new random states, the order of gradients is learned again, and a plan is kept.

The batch of a rank does not change, so a step has more or fewer samples than before. The learning rate is multiplied
by the number of ranks over the number with which the run began (the linear scaling rule of Goyal et al., "Accurate, Large Minibatch
SGD", 2017). The position in the data is one number, so no sample is left out.

With local SGD, commits are taken after averages, when all ranks have the same weights. A step is one step of each rank, so the
learning rate does not change.
"""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import horovod.torch as hvd
from horovod.common.elastic import run_fn
from horovod.torch.elastic import TorchState

from hvd_ckpt.app.training.build import assemble_in_turn
from hvd_ckpt.app.training.config import Config
from hvd_ckpt.app.training.resume import ResumePoint, find_resume_point
from hvd_ckpt.app.training.trainer import Outcome, Trainer
from hvd_ckpt.processes import runtime
from hvd_ckpt.snapshots.reader import HeldSnapshot


def committed(trainer: Trainer) -> ResumePoint:
    """A commit: where the run resumes, with a copy of its state on the CPU. Collective."""
    state = trainer.state()
    state = dataclasses.replace(state, per_rank={"optimizer": state.per_rank["optimizer"]})
    return ResumePoint(trainer.folder, HeldSnapshot.of(trainer.progress.step, state))


def train(config: Config) -> Outcome:
    """Trains as configured on ranks that join and leave.

    To be called after ``init()`` on every rank of an elastic job, new ones included.

    Raises:
        ConfigError: raised on every rank.
        RuntimeError: Horovod could not start again.
    """

    def restart() -> None:
        hvd.shutdown()
        runtime.init(stall_timeout=config.stall_timeout)

    # What Horovod does around _train(), on old and new ranks:
    #
    #     before each call                              state.sync(): all ranks get the state of rank 0, unless ranks only left
    #     a collective fails, since a rank has died     state.restore(): back to the last commit; then the next line
    #     hosts were added or removed, at a commit      restart(); then the first line again
    state = TorchState(point=None)  # of the last commit
    state.stop = None  # a request to stop that this rank had received when ranks changed
    return run_fn(_train, restart)(state, config)


def _train(state: Any, config: Config) -> Outcome:
    # The hooks and parameters of the trainer before refer to each other, so only the collector frees them.
    gc.collect()
    assembly = assemble_in_turn(config)
    if state.point is None:
        state.point = find_resume_point(config)
        state.save()
    trainer = Trainer(config, *assembly, point=state.point)
    trainer.snapshots.stop.reason = state.stop
    if isinstance(state.point.snapshot, HeldSnapshot):
        if hvd.rank() == 0:
            rate = f"learning rate x {trainer.schedule.lr / config.lr:.6g}"
            print(f"Resumes after step {trainer.progress.step} on {hvd.size()} ranks, {rate}.", flush=True)
    else:  # a change of the ranks before the first commit would find no state to go back to
        state.point = committed(trainer)
        state.save()

    def commit() -> None:
        is_due = trainer.progress.step % config.commit_every == 0
        if trainer.optimizer.in_sync if config.local is not None else is_due:
            state.point = committed(trainer)
            state.commit()

    try:
        return trainer.run(commit)
    finally:
        state.stop = trainer.snapshots.stop.reason
