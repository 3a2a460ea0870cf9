"""``hvd-ckpt train`` in a job of Horovod Elastic: ranks come and go, and the run goes on from its last commit.

Going on is resuming, from memory: after each change of ranks all of them, old and new, make the run anew from its configuration and
rank 0's last commit, as a resume from a snapshot by another number of ranks would. Each rank draws new random states, the order of
gradients is learned anew, and a plan is not made again.

The batch of a rank stays, so a step has more or fewer samples than before, and the learning rate changes with it: it is multiplied
by the number of ranks over the number with which the run began (the linear scaling rule of Goyal et al., "Accurate, Large Minibatch
SGD", 2017). The position in the data is one number, so no sample is left out.
"""

from __future__ import annotations

import gc

import horovod.torch as hvd
from horovod.common.elastic import State, run_fn
from horovod.torch.mpi_ops import global_process_set

from hvd_ckpt import runtime
from hvd_ckpt.reduction.agreement import broadcast_from
from hvd_ckpt.snapshots.tensors import Staging
from hvd_ckpt.training.agreement import run_folder
from hvd_ckpt.training.build import assemble_in_turn
from hvd_ckpt.training.config import Config
from hvd_ckpt.training.resume_point import MemoryCheckpoint, ResumePoint, broadcast_resume_point
from hvd_ckpt.training.trainer import Outcome, Trainer

__all__ = ["RunState", "train"]


class RunState(State):  # type: ignore[misc]
    """What outlasts a change of ranks: where the run starts again.

    Attributes:
        origin: the last commit, in the run's folder; None until the folder is decided.
        stop: a request to stop that this rank had heard when ranks changed.
    """

    def __init__(self) -> None:
        super().__init__(
            lambda value: broadcast_from(value, 0, global_process_set, "hvd_ckpt.elastic.hosts"), hvd.rank
        )
        self.origin: ResumePoint | None = None
        self.stop: str | None = None
        self._trainer: Trainer | None = None
        self._memory = Staging()

    def follow(self, trainer: Trainer) -> None:
        """Takes its commits from this trainer from now on, the first one at once if there is none yet."""
        self._trainer = trainer
        trainer.asked_to_stop = self.stop
        if self.origin is None or self.origin.checkpoint is None:
            self.save()

    def save(self) -> None:
        """Takes a commit of the trainer's state."""
        assert self._trainer is not None
        state, step = self._trainer.state(), self._trainer.progress.step
        checkpoint = MemoryCheckpoint.take(step, state["weights"], state["replicated"], self._memory)
        self.origin = ResumePoint(self._trainer.folder, checkpoint=checkpoint)

    def sync(self) -> None:
        """Every rank starts where rank 0 does, which is one of those that were there before. Collective."""
        self.origin = broadcast_resume_point(self.origin)

    def restore(self) -> None:
        """Nothing to take back: a new trainer starts from the commit."""

    def reset(self) -> None:
        """Lets go of the trainer."""
        if self._trainer is not None:
            self.stop = self._trainer.asked_to_stop
        self._trainer = None


def train(config: Config) -> Outcome:
    """Trains as configured on ranks that come and go.

    To be called after ``init()`` on every rank of an elastic job, new ones included.

    Raises:
        ConfigError: on every rank alike.
        RuntimeError: Horovod could not start again.
    """
    outcome: Outcome = run_fn(_train, lambda: _restart(config))(RunState(), config)
    return outcome


def _restart(config: Config) -> None:
    hvd.shutdown()
    runtime.init(stall_timeout=config.stall_timeout)


def _train(state: RunState, config: Config) -> Outcome:
    gc.collect()  # the trainer before, whose hooks and parameters hold each other
    assembly = assemble_in_turn(config)
    if state.origin is None:
        state.origin = ResumePoint(*run_folder(config))
    goes_on = state.origin.checkpoint is not None
    trainer = Trainer(config, *assembly, origin=state.origin)
    state.follow(trainer)
    if goes_on and hvd.rank() == 0:
        rate = f"learning rate x {trainer.rate_scale:.6g}"
        print(f"Goes on after step {trainer.progress.step} on {hvd.size()} ranks, {rate}.", flush=True)

    def commit() -> None:
        if trainer.progress.step % config.commit_every == 0:
            state.commit()

    return trainer.run(commit)
