"""One rank of a job: what each configuration holds and sends, one after the other; then the time of their steps, in turn."""

from __future__ import annotations

import gc
import importlib
import os
import traceback
from collections.abc import Iterable

import psutil
import torch

import hvd_ckpt as hc
from benchmarks.probes import requested_bytes
from benchmarks.shard.engines import Samples, Session, build, loss
from benchmarks.shard.job import Configuration, Findings, ShardJob
from hvd_ckpt.app.compare.runner.jobs import join_torch, own_device, reason
from hvd_ckpt.app.compare.runner.stats import alternating
from hvd_ckpt.utils.measure import now
from hvd_ckpt.utils.memory import measure_peak, recording_marks

SETTLE = 2  # steps, after which every configuration has made the buffers that it keeps


class Bench:
    """One rank's model, samples and findings."""

    def __init__(self, job: ShardJob) -> None:
        self.job, self.device = job, own_device(job.settings.device)
        self.samples = Samples(job.settings, hc.rank(), hc.size())
        self.findings = {configuration.name: Findings() for configuration in job.configurations}
        self._activations: dict[bool, int] = {}

    def session(self, configuration: Configuration) -> Session:
        """The configuration, ready for its first step. Collective."""
        return Session(configuration, self.job.settings, self.job.folder / configuration.name)

    def activations(self, recompute: bool) -> int:
        """Peak bytes of a micro-batch of the bare model, above its parameters and gradients."""
        if recompute not in self._activations:
            model = build(self.job.settings)
            model.checkpoint_interval = int(recompute)
            sample = self.samples.micro_batch(0)
            # The first pass makes the gradients, which then are no part of the peak above what was there.
            loss(model, sample).backward()  # type: ignore[no-untyped-call]
            memory = measure_peak(
                lambda: loss(model, sample).backward(),  # type: ignore[no-untyped-call]
                self.device,
            )
            self._activations[recompute] = memory.peak_bytes
        return self._activations[recompute]

    def examine(self, configuration: Configuration) -> None:
        """Measure what the configuration holds and sends in its third step."""
        if configuration.engine == "deepspeed":
            importlib.import_module("deepspeed")
        findings = self.findings[configuration.name]
        findings.activations = self.activations(configuration.recompute)
        gc.collect()
        with recording_marks(self.device) as memory:
            session = self.session(configuration)
            for number in range(SETTLE):
                findings.losses.append(session.step(self.samples.step(number)))
                gc.collect()
                memory.mark(f"step {number}")
            samples, sent = self.samples.step(SETTLE), session.sent()
            findings.losses.append(session.accumulate(samples))
            self._hold(session, findings)
            session.update()
            gc.collect()
            memory.mark("third step")
        before, last = memory.marks[-2:]
        # A step ends with what it began with. What is more is blocks that communication threads have freed, which nobody counts:
        # each of the three steps has added as much to the peak.
        findings.peak = last.peak_bytes - (SETTLE + 1) * (last.bytes - before.bytes)
        after = session.sent()
        if sent is not None and after is not None:
            findings.counted = after - sent
        else:
            samples = self.samples.step(SETTLE + 1)
            requested, _ = requested_bytes(
                lambda: findings.losses.append(session.step(samples)), self.job.size
            )
            findings.counted = round(requested)

    @staticmethod
    def _hold(session: Session, findings: Findings) -> None:
        held = session.tensors()
        seen: set[int] = set()
        findings.parameters, _ = storage_bytes(held.parameters, seen)
        findings.gradients, _ = storage_bytes(held.gradients, seen)
        findings.state, findings.on_disk = storage_bytes(held.state, seen)

    def time(self, configurations: list[Configuration]) -> None:
        """Time steps of all configurations, in rounds that alternate."""
        sessions = {configuration.name: self.session(configuration) for configuration in configurations}
        for name, session in sessions.items():
            self.findings[name].losses = [session.step(self.samples.step(number)) for number in range(SETTLE)]
        gc.collect()
        # What is collected within a step is then what the step leaves.
        gc.freeze()
        for turn, name in alternating(list(sessions), self.job.rounds):
            samples = self.samples.step(SETTLE + turn)
            hc.barrier()
            start = now(self.device)
            self.findings[name].losses.append(sessions[name].step(samples))
            self.findings[name].seconds.append(now(self.device) - start)


def storage_bytes(tensors: Iterable[torch.Tensor], seen: set[int]) -> tuple[int, int]:
    """Bytes of the tensors' storages in memory, and in mapped files.

    Each storage counts whole, and once: those whose addresses are in ``seen`` do not, and the others' are added to it.
    """
    mapped = [
        tuple(int(address, 16) for address in region.addr.split("-"))
        for region in psutil.Process().memory_maps(grouped=False)
        if region.path.startswith("/")
    ]
    memory = files = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in seen:
            seen.add(address)
            if not tensor.is_cuda and any(start <= address < end for start, end in mapped):
                files += storage.nbytes()
            else:
                memory += storage.nbytes()
    return memory, files


def measure(job: ShardJob) -> dict[str, Findings]:
    """The measurements of one rank, by the name of the configuration."""
    hc.init()
    bench = Bench(job)
    running = list(job.configurations)
    if not all(configuration.ours for configuration in running):
        rank, size = str(hc.rank()), str(hc.size())
        os.environ.update(LOCAL_RANK=rank, RANK=rank, WORLD_SIZE=size, LOCAL_SIZE=size)  # read by DeepSpeed
        os.environ.setdefault("DS_ACCELERATOR", bench.device.type)
        join_torch(job.folder, bench.device)
    for configuration in job.configurations if job.memory else ():
        print(configuration.name, flush=True)
        try:
            bench.examine(configuration)
        except Exception as error:
            traceback.print_exc()
            bench.findings[configuration.name].failure = reason(error)
        # A rank that left one out alone would not take its steps with the others, which would wait.
        if any(hc.allgather_object(bench.findings[configuration.name].failure is not None)):
            running.remove(configuration)
    if job.rounds:
        bench.time(running)
    return bench.findings
