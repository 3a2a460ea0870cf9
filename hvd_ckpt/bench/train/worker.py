"""One rank of a job: both loops in one process, in turn.

Run by the launcher as ``python -m hvd_ckpt.bench.train.worker JOB`` under ``horovodrun``, where JOB is the file that
describes the job.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from pathlib import Path

import horovod.torch as hvd
import torch

from hvd_ckpt.bench.recompute.measure import reason
from hvd_ckpt.bench.train.job import Answer, Job
from hvd_ckpt.bench.train.loops import Measured, differences
from hvd_ckpt.runtime import init
from hvd_ckpt.training.assembly import assemble
from hvd_ckpt.training.config import Config

__all__ = ["measure"]

WARM_UP = 3  # steps: the reducer learns in the first, and its buckets are there after the second
LOG_EVERY = 10  # steps, or each round if it is shorter


def measure(job: Job) -> Answer:
    """Everything that a job asks of one rank; Horovod runs, with the job's number of ranks."""
    config = Config(
        model=job.model,
        accumulate=job.accumulate,
        batch=job.batch,
        steps=WARM_UP + job.rounds * job.steps + 1,
        held_out=0.0,
        clip=1.0,
        log_every=min(LOG_EVERY, job.steps),
        device="cpu",
        output=str(job.folder / "run"),
    )
    trainer = Measured(config, assemble(config), job.rounds, job.steps, WARM_UP)
    gc.collect()
    gc.freeze()  # what is collected within a round is what the loops leave
    trainer.run()
    trainer.by_hand.close()
    return Answer(
        torch.get_num_threads(),
        trainer.seconds,
        trainer.seconds_by_hand,
        differences(trainer.model, trainer.by_hand.model),
    )


def main(job_file: str) -> None:
    """Join the job's other ranks, measure, leave."""
    job = Job.load(Path(job_file))
    init()
    try:
        measure(job).save(job.answer_file(hvd.rank()))
        hvd.shutdown()
    except Exception as error:
        traceback.print_exc()
        sys.stderr.flush()
        Answer(torch.get_num_threads(), failure=reason(error)).save(job.answer_file(hvd.rank()))
        os._exit(1)  # a clean exit would wait for ranks that are not coming


if __name__ == "__main__":
    main(sys.argv[1])
