"""Predicted steps beside measured ones, on hosts with slow links; by hand, as root on Linux::

    python -m benchmarks scale_on_hosts --rates 100,1000 --np 2,4,8,16

Hosts are network namespaces (``tests/helpers/hosts.py``), whose links pass so many Mbit/s, each frame ``--delay`` ms late.
Computation is measured once, on one rank. It takes longer where more ranks share the processors.
"""

from __future__ import annotations

import shutil
import statistics
import string
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from torch.nn import functional

import hvd_ckpt as hc
from hvd_ckpt.app.compare.runner.jobs import RANK, RankJob, launch_command, load_json
from hvd_ckpt.app.models.gpt import gpt
from hvd_ckpt.prediction.network import Network
from hvd_ckpt.prediction.step_time import WAYS, ModelSizes, Split
from hvd_ckpt.processes.runtime import allowed_cpus

MODEL: dict[str, Any] = {"vocabulary": 1024, "length": 16, "width": 256, "heads": 8, "layers": 4}
WARM_UP, STEPS = 3, 5
PAYLOAD = 1448 / 1514  # of an Ethernet frame, without the headers of TCP, IP and Ethernet
LOCAL = {1: 1, 2: 1, 4: 2, 8: 2, 16: 4}
"""Ranks on each host, by ranks of the job."""


@dataclass(frozen=True)
class StepJob(RankJob):
    """Ranks that train a GPT; ``shard`` as in ``DistributedOptimizer``."""

    worker = "benchmarks.suites.scale_on_hosts:measure"

    shard: str


@dataclass
class Timed:
    """Seconds of each step of a rank, and the medians of each block's forward pass and backward pass with its recomputation."""

    seconds: list[float]
    forward: list[float]
    backward: list[float]


def measure(job: StepJob) -> Timed:
    """The steps of one rank."""
    hc.init()
    torch.manual_seed(0)
    model = gpt(**MODEL, checkpoint_interval=1)
    inputs, targets = (torch.randint(0, MODEL["vocabulary"], (1, MODEL["length"])) for _ in range(2))
    optimizer: Any = hc.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-3), model.named_parameters(), shard=job.shard, model=model
    )
    passes: list[tuple[float, float]] = []
    seconds = []
    for _ in range(WARM_UP + STEPS):
        hc.barrier()
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        between = time.perf_counter()
        loss.backward()  # type: ignore[no-untyped-call]
        end = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
        # The update is in the way of the next step as a forward pass is.
        passes.append((seconds[-1] - (end - between), end - between))
    blocks = len(model)
    forward, backward = (statistics.median(taken) / blocks for taken in zip(*passes[WARM_UP:]))
    return Timed(seconds[WARM_UP:], [forward] * blocks, [backward] * blocks)


def predicted(shard: str, one: Timed, rate: float, delay: float, ranks: int) -> float:
    """Seconds of a step on links of so many Mbit/s and ms."""
    # So many ranks share a processor. Between namespaces of one machine messages, too, cost what processors
    # need for them; across hosts that is what one TCP connection takes beside the time of a link.
    local = LOCAL[ranks]
    share = max(1.0, ranks / allowed_cpus())
    byte = 0.65e-9 * max(1.0, ranks / local / allowed_cpus())
    with torch.device("meta"):
        model = gpt(**MODEL, checkpoint_interval=1)
    forward, backward = ([share * seconds for seconds in blocks] for blocks in (one.forward, one.backward))
    network = Network(
        local,
        bandwidth=1.0 / (8 / (PAYLOAD * rate * 1e6) + byte),
        local_bandwidth=1e9 / share,
        latency=100e-6 * share + delay / 1e3,
        local_latency=50e-6 * share,
        message=20e-6 * share,
        controller="gloo",
    )
    return ModelSizes(model, forward, backward).step(shard, Split(ranks), network).seconds


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


@click.command()
@click.option(
    "--rates", default="100,1000", help="Mbit/s of the links.", callback=lambda *given: _numbers(given[2])
)
@click.option("--delay", default=0.0, help="ms by which each frame is late.")
@click.option("--np", "sizes", default="2,4,8,16", callback=lambda *given: _numbers(given[2]))
@click.option("--shards", default="none,gradients,parameters")
def scale_on_hosts(rates: list[int], delay: float, sizes: list[int], shards: str) -> None:
    """Print measured steps on hosts with slow links beside predicted ones."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "helpers"))
    from hosts import Hosts  # type: ignore[import-not-found,unused-ignore]

    folder = Path(tempfile.mkdtemp(prefix="scale-on-hosts-"))

    def run(name: str, size: int, shard: str) -> list[Timed]:
        job = StepJob(folder / name, size, shard)
        job.save()
        where = ",".join(f"{host}:{LOCAL[size]}" for host in string.ascii_lowercase[: size // LOCAL[size]])
        command = launch_command(size, "gloo", RANK, job.worker, job.file, options=["-H", where])
        done = hosts.run("a", command, timeout=500, environment={"OMP_NUM_THREADS": "1"})
        if done.returncode:
            raise SystemExit(done.stdout[-3000:] + done.stderr[-3000:])
        return [load_json(Timed, job.result_file(rank)) for rank in range(size)]

    titles = ("Mbit/s", "ms", "ranks", "hosts", "way", "measured s", "predicted s", "predicted / measured")
    print("|", " | ".join(titles), "|\n" + "|---" * len(titles) + "|", flush=True)
    try:
        with Hosts(max(size // LOCAL[size] for size in sizes)) as hosts:
            alone = {shard: run(f"alone-{shard}", 1, shard)[0] for shard in shards.split(",")}
            if delay:
                for name in hosts.names:
                    hosts.slow(name, delay / 2)  # from host to host a frame passes two cables
            for rate in rates:
                for name in hosts.names:
                    # A burst that holds the largest frame: smaller ones are cut into packets, which costs the processor more
                    # than all else.
                    shape = f"tc qdisc replace dev eth0 root tbf rate {rate}mbit burst 256kb limit 50mb"
                    hosts.run(name, shape.split(), timeout=10)
                for size in sizes:
                    for shard, one in alone.items():
                        ranks = run(f"{rate}-{size}-{shard}", size, shard)
                        measured = statistics.median(map(max, zip(*(rank.seconds for rank in ranks))))
                        guess = predicted(shard, one, rate, delay, size)
                        place = f"{rate} | {delay:g} | {size} | {size // LOCAL[size]} | {WAYS[shard]}"
                        figures = f"{measured:.3f} | {guess:.3f} | {guess / measured:.2f}"
                        print(f"| {place} | {figures} |", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
