"""Steps as ``hvd-ckpt bench scale`` predicts them, beside steps on hosts with slow links; by hand, as root on Linux::

    python tests/bench/scale_on_hosts.py --rates 100,1000 --np 2,4,8,16

Hosts are network namespaces (``tests/helpers/hosts.py``), whose links pass so many Mbit/s, each frame ``--delay`` ms late. A trace
is recorded once, on two ranks of one host with a fast link. Its computation takes longer where more ranks share the processors.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import statistics
import string
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from hosts import Hosts

from hvd_ckpt.bench.harness.jobs import RANK, launch_command, load_json
from hvd_ckpt.bench.scale.network import Network
from hvd_ckpt.bench.scale.record import MODES, Recorded, RecordJob
from hvd_ckpt.bench.scale.replay import replay
from hvd_ckpt.bench.scale.trace import Trace
from hvd_ckpt.processes.runtime import allowed_cpus

MODEL = {"vocabulary": 1024, "length": 16, "width": 256, "heads": 8, "layers": 4}
PAYLOAD = 1448 / 1514  # of an Ethernet frame, without the headers of TCP, IP and Ethernet
LOCAL = {2: 1, 4: 2, 8: 2, 16: 4}
"""Ranks on each host, by ranks of the job."""


def run(hosts: Hosts, job: RecordJob, local: int) -> list[Recorded]:
    """The result of each rank of a job on as many hosts as it needs."""
    job.save()
    where = ",".join(f"{name}:{local}" for name in string.ascii_lowercase[: job.size // local])
    command = launch_command(job.size, "gloo", RANK, job.worker, job.file, options=["-H", where])
    done = hosts.run("a", command, timeout=500, environment={"OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise SystemExit(done.stdout[-3000:] + done.stderr[-3000:])
    return [load_json(Recorded, job.result_file(rank)) for rank in range(job.size)]


def predicted(trace: Trace, rate: float, delay: float, ranks: int, local: int) -> float:
    """Seconds of a step on links of so many Mbit/s and ms."""
    # So many ranks share a processor, those of the recording had one each. Between namespaces of one machine messages, too, cost
    # what processors need for them; across hosts that is what one TCP connection takes beside the time of a link.
    share = max(1.0, ranks / allowed_cpus())
    byte = 0.65e-9 * max(1.0, ranks / local / allowed_cpus())
    events = [dataclasses.replace(event, seconds=share * event.seconds) for event in trace.events]
    network = Network(
        local,
        bandwidth=1.0 / (8 / (PAYLOAD * rate * 1e6) + byte),
        local_bandwidth=1e9 / share,
        latency=100e-6 * share + delay / 1e3,
        local_latency=50e-6 * share,
        message=20e-6 * share,
        controller="gloo",
    )
    return replay(dataclasses.replace(trace, events=events), network, ranks).seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rates", default="100,1000")
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--np", default="2,4,8,16")
    parser.add_argument("--modes", default="none,gradients,parameters")
    options = parser.parse_args()
    sizes = [int(size) for size in options.np.split(",")]
    folder = Path(tempfile.mkdtemp(prefix="scale-on-hosts-"))
    traces: dict[str, Trace] = {}
    print(
        "| Mbit/s | ms | ranks | hosts | mode | measured s | predicted s | predicted / measured |\n"
        + "|---" * 8
        + "|"
    )
    try:
        with Hosts(max(size // LOCAL[size] for size in sizes)) as hosts:
            for mode in options.modes.split(","):
                job = RecordJob(folder / mode, 2, mode, MODEL, 1, 10)
                traces[mode] = run(hosts, job, 2)[0].trace
            if options.delay:
                for name in hosts.names:
                    hosts.slow(name, options.delay / 2)  # from host to host a frame passes two cables
            for rate in map(float, options.rates.split(",")):
                for name in hosts.names:
                    # A burst that holds the largest frame: smaller ones are cut into packets, which costs the processor more
                    # than all else.
                    shape = f"tc qdisc replace dev eth0 root tbf rate {rate}mbit burst 256kb limit 50mb"
                    hosts.run(name, shape.split(), timeout=10)
                for size in sizes:
                    for mode, trace in traces.items():
                        job = RecordJob(folder / f"{rate}-{size}-{mode}", size, mode, MODEL, 1, 10)
                        ranks = run(hosts, job, LOCAL[size])
                        measured = statistics.median(map(max, zip(*(rank.seconds for rank in ranks))))
                        guess = predicted(trace, rate, options.delay, size, LOCAL[size])
                        place = f"{rate:g} | {options.delay:g} | {size} | {size // LOCAL[size]} | {MODES[mode][0]}"
                        print(
                            f"| {place} | {measured:.3f} | {guess:.3f} | {guess / measured:.2f} |", flush=True
                        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
