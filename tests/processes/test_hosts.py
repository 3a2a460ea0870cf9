"""Jobs over several hosts: the launch commands, equal weights, a host that is cut off, and a slow link.

The hosts are network namespaces (see hosts.py). Every job trains the same tiny model with the same seed on two ranks.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from controllers import probe
from hosts import Hosts, unavailable
from snapshot_files import digest_of

pytestmark = [
    pytest.mark.launch,
    pytest.mark.hosts,
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
]

STEPS = 40
SETTINGS = (
    f"--model gpt-tiny --sequence-length 16 --batch 4 --steps {STEPS} --snapshot-every 8 --seed 3".split()
)
SETTINGS += [f"--model-option={option}" for option in ("width=32", "layers=1", "heads=2")]
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",  # several ranks share a core here
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "300",  # so that the limit of each job ends its waits
}
MPIRUN = "mpirun -np 2 -bind-to none -map-by slot -x PATH -x PYTHONPATH -x OMP_NUM_THREADS -mca pml ob1 -mca btl ^openib"
LAUNCHERS = {"gloo": "horovodrun -np 2 --gloo", "mpi": "horovodrun -np 2 --mpi", "mpirun": MPIRUN}
# mpirun has to notice before the ranks give up: once one has, it waits for its daemon on the host that has vanished.
LIMITS = {"gloo": "40", "mpirun": "240"}  # seconds of a wait, which the start of a busy machine may take, too
ALIVE = {"oob_tcp_keepalive_time": "2", "oob_tcp_keepalive_intvl": "1", "oob_tcp_keepalive_probes": "2"}
NAMED = {
    "gloo": r"rank 0 on host a: waited .*host b \(10\.77\.0\.2; rank 1\) does not answer",
    "mpirun": r"lost communication with a remote daemon(.|\n)* on node b",
}


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(3) as hosts:
        yield hosts


@pytest.fixture(autouse=True)
def quiet_again(hosts: Hosts) -> Iterator[None]:
    yield
    hosts.clear()
    for name in hosts.names:
        hosts.mend(name)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(bytes(range(32, 127)) * 40)
    return path


@pytest.fixture(scope="module")
def weights_of_one_host(hosts: Hosts, text: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The sum of two ranks has the same bits over either controller."""
    run = tmp_path_factory.mktemp("whole") / "run"
    end(hosts, command("gloo", "a:2", text, run))
    return final_weights(run)


def command(launcher: str, where: str, text: Path, run: Path, *more: str) -> list[str]:
    train = ["hvd-ckpt", "train", *SETTINGS, "--data", f"text:{text}", "--output", str(run), *more]
    return [*LAUNCHERS[launcher].split(), "-H", where, *train]


def end(hosts: Hosts, command: list[str]) -> None:
    done = hosts.run("a", command, timeout=240, environment=ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr


def final_weights(run: Path) -> str:
    """The digest of the last snapshot's weights."""
    return digest_of(run / "snapshots" / f"step-{STEPS:08}")


@pytest.mark.parametrize("flags", ["--local 8,outer_lr=0.7", "--shard 3"])
def test_groups_of_hosts_are_those_of_ranks(flags, hosts, text, tmp_path) -> None:
    """Gradients are reduced, or parameters gathered again, within each host, here over MPI: as within groups of ranks over Gloo."""
    if not (answer := probe("mpi")).works:
        pytest.skip(f"MPI does not work here: {answer.reason}")
    found = []
    for launcher, where, within in (("mpi", "a:2,b:2", "host"), ("gloo", "a:4", "[[0,1],[2,3]]")):
        words = command(launcher, where, text, tmp_path / launcher, *f"{flags},within={within}".split())
        words[words.index("-np") + 1] = "4"
        end(hosts, words)
        found.append(final_weights(tmp_path / launcher))
    assert found[0] == found[1]


@pytest.mark.parametrize(("launcher", "relauncher"), [("gloo", "gloo"), ("mpirun", "mpi")])
def test_a_host_that_is_cut_off_ends_the_job_which_resumes_to_the_weights_of_one_host(
    launcher, relauncher, hosts, text, weights_of_one_host, tmp_path
) -> None:
    """Over a slow link, before and after."""
    if launcher != "gloo" and not (answer := probe("mpi")).works:
        pytest.skip(f"MPI does not work here: {answer.reason}")
    run = tmp_path / "run"
    program, *options = command(launcher, "a:1,b:1", text, run, "--stall-timeout", LIMITS[launcher])
    alive = [word for pair in ALIVE.items() for word in ("-mca", *pair)] if program == "mpirun" else []
    hosts.slow("b", milliseconds=1)
    job = hosts.start("a", [program, *alive, *options], environment=ENVIRONMENT)
    first = run / "snapshots" / "step-00000008"
    wait_for(lambda: first.exists() or job.poll() is not None, "the first snapshot", 240)
    hosts.cut("b")
    wait_for(lambda: job.poll() is not None, "the end of the launcher", 240)
    output, errors = job.communicate()
    last = run / "snapshots" / f"step-{STEPS:08}"
    assert not last.exists(), "trained to the end before the host was cut off"
    wait_for(lambda: not ranks(hosts), "the end of the ranks on b", 240, pause=0.3)
    assert job.returncode != 0
    assert re.search(NAMED[launcher], errors), output + errors

    hosts.mend("b")
    hosts.slow("b", milliseconds=1)
    again = ["-H", "a:1,b:1", "hvd-ckpt", "train", "--resume", str(run)]
    end(hosts, [*LAUNCHERS[relauncher].split(), *again])
    assert final_weights(run) == weights_of_one_host


def ranks(hosts: Hosts) -> list[str]:
    """The interpreters on all hosts that run ``hvd-ckpt train``; not the launchers and shells around them."""
    lines = [line.split() for name in hosts.names for line in hosts.processes(name).values()]
    return [" ".join(words[:4]) for words in lines if Path(" ".join(words[1:2])).name == "hvd-ckpt"]


def wait_for(condition: Callable[[], object], what: str, seconds: float, pause: float = 0.02) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {seconds:g} seconds"
        time.sleep(pause)
