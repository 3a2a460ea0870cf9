"""One rank of a job: all contenders in one process, in turn.

Run by the launcher as ``python -m hvd_ckpt.bench.densenet.worker JOB`` under ``horovodrun``, where JOB is the file that
describes the job.
"""

from __future__ import annotations

import copy
import gc
import os
import sys
import traceback
from pathlib import Path

import horovod.torch as hvd
import psutil
import torch

from hvd_ckpt.bench.densenet.contenders import (
    CLASSES,
    NAIVE,
    Contender,
    efficient,
    fastest_chunks,
    make_plans,
    official,
    step_peak,
)
from hvd_ckpt.bench.densenet.job import Answer, Entry, Job
from hvd_ckpt.bench.densenet.steps import Training, random_batch
from hvd_ckpt.bench.recompute.measure import reason
from hvd_ckpt.models.densenet import DenseNet, densenet
from hvd_ckpt.planning.budget import parse_budget, show_bytes
from hvd_ckpt.runtime import init

__all__ = ["measure", "too_large"]

SEED = 0
WARM_UP = 2  # steps: the reducer learns in the first, and its buckets are there after the second
PROBE = 8  # images of the small batches that tell what a large one will take
SHARE = 0.8  # of the free memory that steps may take


def measure(job: Job) -> Answer:
    """Everything that a job asks of one rank; Horovod runs, with the job's number of ranks."""
    torch.manual_seed(SEED)
    base = densenet(job.depth, classes=CLASSES)
    answer = Answer(torch.get_num_threads())
    room = int(SHARE * psutil.virtual_memory().available / hvd.local_size())
    answer.note = too_large(base, job, hvd.broadcast_object(room, root_rank=0))
    if answer.note is None:
        trainings, failed = _contenders(base, job)
        _train(trainings, job.rounds)
        entries = {training.entry.name: training.entry for training in trainings}
        answer.entries = [*entries.values(), *failed]
    return answer


def too_large(base: DenseNet, job: Job, room: int) -> str | None:
    """Why a step that keeps everything surely does not fit into that many bytes on each rank; None if it does.

    Peaks grow linearly with the batch, so two small batches tell.
    """
    if job.images <= PROBE:
        return None
    model = copy.deepcopy(base)
    half, whole = (step_peak(model, *random_batch(count, job.pixels, SEED)) for count in (PROBE // 2, PROBE))
    needed = whole + (whole - half) * (job.images - PROBE) // (PROBE - PROBE // 2)
    if needed <= room:
        return None
    return f"left out: keeping everything would take {show_bytes(needed)} on each rank, and there is room for {show_bytes(room)}"


def _contenders(base: DenseNet, job: Job) -> tuple[list[Training], list[Entry]]:
    """Those that run, ready to train, and those that do not."""
    keep = copy.deepcopy(base)
    few = random_batch(min(PROBE, job.images), job.pixels, SEED)
    shares = all(parse_budget(budget).kind == "share" for budget in job.budgets)
    sample = random_batch(min(job.planned, job.images) if shares else job.images, job.pixels, SEED)
    chunks: int = hvd.broadcast_object(fastest_chunks(base, *few), root_rank=0)
    found = [
        Contender("naive", NAIVE, keep, keep),
        *official(base, chunks),
        efficient(base, job.depth),
        *make_plans(base, *sample, job.budgets),
    ]
    failed = [Entry(one.name, one.family, failure=one.failure) for one in found if one.failure]
    return [Training(one, job) for one in found if not one.failure], failed


def _train(trainings: list[Training], rounds: int) -> None:
    """The same steps for all: warm-up and peak one after the other, then rounds against the clock (A B C, then C B A)."""
    for training in trainings:
        for _ in range(WARM_UP):
            training.step()
        training.show_peak()
    for number in range(rounds):
        for training in trainings if number % 2 == 0 else trainings[::-1]:
            training.against_the_clock()
    for training in trainings:
        training.compare(trainings[0])


def main(job_file: str) -> None:
    """Join the job's other ranks, measure, leave."""
    job = Job.load(Path(job_file))
    init()
    try:
        gc.collect()
        gc.freeze()  # what is collected before each step is what the steps leave
        measure(job).save(job.answer_file(hvd.rank()))
        hvd.shutdown()
    except Exception as error:
        traceback.print_exc()
        sys.stderr.flush()
        Answer(torch.get_num_threads(), note=f"failed: {reason(error)}", failed=True).save(
            job.answer_file(hvd.rank())
        )
        os._exit(1)  # a clean exit would wait for ranks that are not coming


if __name__ == "__main__":
    main(sys.argv[1])
