"""One rank of a job: what each contender holds and sends, one after the other; then how long their steps take, in turn.

Run by the launcher as ``python -m hvd_ckpt.bench.shard.worker JOB`` under ``horovodrun``, where JOB is the file that
describes the job.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import time
import traceback
from pathlib import Path

import horovod.torch as hvd
import torch

from hvd_ckpt.bench.harness.jobs import reason
from hvd_ckpt.bench.shard import counting
from hvd_ckpt.bench.shard.contenders import Contender
from hvd_ckpt.bench.shard.job import Answer, Findings, Job
from hvd_ckpt.bench.shard.model import Samples, build, loss
from hvd_ckpt.bench.shard.peers import SESSIONS, join
from hvd_ckpt.bench.shard.sessions import Session
from hvd_ckpt.memory import measure_peak
from hvd_ckpt.runtime import init

__all__ = ["measure"]

SETTLE = 2  # steps, after which every contender has made the buffers that it keeps
DELIVERY = 0.05  # seconds in which the last message of a step is acknowledged


class Bench:
    """What a rank needs for all contenders."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.samples = Samples(job.text, job.length, job.passes, hvd.rank(), hvd.size())
        self.findings = {name: Findings() for name in job.contenders}
        self._activations: dict[bool, int] = {}
        self._warm: set[str] = set()

    def session(self, contender: Contender) -> Session:
        """The contender, ready for its first step. Collective."""
        job = self.job
        folder = job.folder / contender.name
        return SESSIONS[contender.engine](build(job.model_size), contender, job.passes, job.bucket_mb, folder)

    def activations(self, recompute: bool) -> int:
        """Peak bytes of a micro-batch of the bare model, above its parameters and gradients."""
        if recompute not in self._activations:
            model = build(self.job.model_size)
            model.checkpoint_interval = int(recompute)
            sample = self.samples.sample(0)
            loss(model, sample).backward()  # type: ignore[no-untyped-call]
            memory = measure_peak(lambda: loss(model, sample).backward())  # type: ignore[no-untyped-call]
            self._activations[recompute] = memory.peak_bytes
        return self._activations[recompute]

    def examine(self, contender: Contender) -> None:
        """What the contender holds and sends in its third step."""
        found = self.findings[contender.name]
        found.activations = self.activations(contender.recompute)
        self._warm_up(contender)
        gc.collect()
        counting.return_memory()
        heap, resident = counting.heap_bytes(), counting.resident_bytes()
        counting.start_resident_peak()
        session = self.session(contender)
        found.losses = [session.step(self.samples.step(number)) for number in range(SETTLE)]
        self._third_step(session, found, heap)
        most = counting.peak_resident_bytes()
        found.resident = None if most is None or resident is None else most - resident
        if found.counted is None:
            found.counted = counting.asked(
                lambda: found.losses.append(session.step(self.samples.step(SETTLE + 1))), self.job.size
            )

    def _warm_up(self, contender: Contender) -> None:
        """Lets an engine make once what it keeps for all models."""
        if contender.engine not in self._warm:
            self.session(contender).step(self.samples.step(0))
            self._warm.add(contender.engine)

    def _third_step(self, session: Session, found: Findings, heap: int | None) -> None:
        samples = self.samples.step(SETTLE)
        gc.collect()
        counted, sent = session.sent(), _delivered()
        with counting.heap_peak() as peak:
            found.losses.append(session.accumulate(samples))
            now = counting.heap_bytes()
            _hold(session, found)
            session.update()
        after, delivered = session.sent(), _delivered()
        found.counted = None if counted is None or after is None else after - counted
        found.sent = None if sent is None or delivered is None else delivered - sent
        if heap is not None and now is not None and peak.bytes is not None:
            found.held, found.peak = now - heap, max(peak.bytes, now) - heap

    def time(self, contenders: list[Contender]) -> None:
        """Steps of all contenders, in rounds: A B C, then C B A."""
        sessions = {contender.name: self.session(contender) for contender in contenders}
        losses: dict[str, list[float]] = {name: [] for name in sessions}
        for name, session in sessions.items():
            losses[name] += [session.step(self.samples.step(number)) for number in range(SETTLE)]
        gc.collect()
        gc.freeze()  # what is collected within a step is what the step leaves
        for turn in range(self.job.rounds):
            samples = self.samples.step(SETTLE + turn)
            for name in list(sessions)[:: 1 if turn % 2 == 0 else -1]:
                hvd.barrier()
                start = time.perf_counter()
                losses[name].append(sessions[name].step(samples))
                self.findings[name].seconds.append(time.perf_counter() - start)
        for name, values in losses.items():
            self.findings[name].losses = values


def _hold(session: Session, found: Findings) -> None:
    held = session.tensors()
    seen: set[int] = set()
    found.parameters, _ = counting.storage_bytes(held.parameters, seen)
    found.gradients, _ = counting.storage_bytes(held.gradients, seen)
    found.state, found.on_disk = counting.storage_bytes(held.state, seen)


def _delivered() -> int | None:
    """What has been sent so far, once all ranks are here and the network has told of all of it; over MPI nobody can tell."""
    if not hvd.gloo_enabled():
        return None
    hvd.barrier()
    time.sleep(DELIVERY)
    sent = counting.sent_bytes()
    hvd.barrier()
    return sent


def measure(job: Job) -> Answer:
    """Everything that a job asks of one rank; Horovod runs, with the job's number of ranks."""
    bench = Bench(job)
    taking_part = [Contender.of(name) for name in job.contenders]
    if not all(contender.ours for contender in taking_part):
        join(job.folder, hvd.rank(), hvd.size())
    if job.memory:
        for contender in list(taking_part):
            print(contender.name, flush=True)
            try:
                if contender.engine == "deepspeed":
                    importlib.import_module("deepspeed")
                bench.examine(contender)
            except ModuleNotFoundError as error:
                bench.findings[
                    contender.name
                ].failure = f"{error.name} is not installed (pip install {error.name})"
                taking_part.remove(contender)
            except Exception as error:
                traceback.print_exc()
                bench.findings[contender.name].failure = reason(error)
                taking_part.remove(contender)
    if job.rounds:
        bench.time(taking_part)
    elements = sum(parameter.numel() for parameter in build(job.model_size).parameters())
    return Answer(torch.get_num_threads(), elements, bench.findings)


def main(job_file: str) -> None:
    """Join the job's other ranks, measure, leave."""
    job = Job.load(Path(job_file))
    init()
    try:
        measure(job).save(job.answer_file(hvd.rank()))
        hvd.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # the orderly end of several engines in one process takes long
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # a clean exit would wait for ranks that are not coming


if __name__ == "__main__":
    main(sys.argv[1])
