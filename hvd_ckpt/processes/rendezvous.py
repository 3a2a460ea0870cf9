"""Start under launchers that do not support Horovod: ranks connect through a PyTorch store, and Horovod starts over Gloo.

``horovodrun`` gives each rank its place on its host and among the hosts, and the address of its rendezvous server.
Under ``torchrun`` and ``srun`` the first rank runs that server, as in Horovod's own Ray and Spark integrations.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections import Counter
from collections.abc import Hashable, Sequence
from datetime import timedelta

from horovod.runner.http.http_server import RendezvousServer
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from hvd_ckpt.processes.launchers import GLOO_ADDRESS, whole_in

PORT = "HOROVOD_GLOO_RENDEZVOUS_PORT"
MASTER_ADDRESS, MASTER_PORT = "MASTER_ADDR", "MASTER_PORT"
FIRST_PORT, PORTS = 20000, 10000  # for a job of Slurm, by its number
SECONDS, LONGEST = 300.0, 1e6  # in which all ranks of a job must have started


def rank_variables(hosts: Sequence[Hashable], address: str, port: int) -> list[dict[str, str]]:
    """The environment variables that ``horovodrun --gloo`` would set for each rank.

    Args:
        hosts: hosts of all ranks, in their order.
        address, port: address and port of the rendezvous server.
    """
    # Local rank: the number among the ranks of this host. Cross rank: the number of this host among those with such a local rank.
    #
    #     rank           0   1   2        on hosts a, a, b
    #     local rank     0   1   0
    #     cross rank     0   0   1
    #     cross size     2   1   2        host b has no rank with local number 1
    sizes, earlier = Counter(hosts), Counter[Hashable]()
    variables = []
    for rank, host in enumerate(hosts):
        local = earlier[host]
        earlier[host] += 1
        across = [other for other, size in sizes.items() if size > local]  # in the order of their first ranks
        variables.append(
            {
                "HOROVOD_RANK": str(rank),
                "HOROVOD_SIZE": str(len(hosts)),
                "HOROVOD_LOCAL_RANK": str(local),
                "HOROVOD_LOCAL_SIZE": str(sizes[host]),
                "HOROVOD_CROSS_RANK": str(across.index(host)),
                "HOROVOD_CROSS_SIZE": str(len(across)),
                GLOO_ADDRESS: address,
                PORT: str(port),
            }
        )
    return variables


def join_job(launcher: str, seconds: float | None = None) -> None:
    """Sets the variables that Horovod starts with, after all ranks of the job have met.

    Args:
        launcher: of :func:`hvd_ckpt.processes.launchers.adopt_launcher`, which has set rank and size.
        seconds: in which all of them must come; 300 by default.

    Raises:
        ValueError: the ranks do not meet in time.
    """
    rank, size = whole_in("HOROVOD_RANK") or 0, whole_in("HOROVOD_SIZE") or 1
    address, port = _meeting_point(launcher)
    here = socket.gethostname()
    # With TORCHELASTIC_USE_AGENT_STORE, torchrun's own process holds a store at this address already.
    holds = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    limit = timedelta(seconds=min(seconds or SECONDS, LONGEST))
    try:
        store = TCPStore(address, port, size, holds, limit, wait_for_workers=False)
        # Another job may have a store at this place, and torchrun's outlives a restart.
        told = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_STEP_ID")
        name = ".".join(("hvd_ckpt", *(os.environ.get(variable, "") for variable in told)))
        # get() waits until a key is there. Rank 0 answers when all ranks have come, so that each asks one question.
        store.set(f"{name}.host.{rank}", here)
        if rank == 0:
            hosts = [store.get(f"{name}.host.{other}").decode() for other in range(size)]
            server = RendezvousServer()  # a daemon thread, which ends with the process
            host = own_address(address, port)
            # A loopback address means that the meeting point is on this host, at an address that all ranks know.
            host = address if host.startswith("127.") or host == "::1" else host
            for other, variables in enumerate(rank_variables(hosts, host, server.start())):
                store.set(f"{name}.variables.{other}", json.dumps(variables))
        own_variables = json.loads(store.get(f"{name}.variables.{rank}"))
    except (RuntimeError, OSError) as error:  # of PyTorch's store, in several lines
        reason = str(error).split("\n", 1)[0]
        raise ValueError(
            f"init(): the {size} ranks that {launcher} has started do not meet at {address}:{port} ({reason}): set "
            f"{MASTER_ADDRESS} to the host of rank 0 and {MASTER_PORT} to a free port of it, the same on all ranks"
        ) from None
    _keep.append(store)  # which rank 0 may hold for the others
    os.environ.update(own_variables)


_keep: list[TCPStore] = []


def _meeting_point(launcher: str) -> tuple[str, int]:
    address, port = os.environ.get(MASTER_ADDRESS), whole_in(MASTER_PORT)
    if launcher == "srun":
        address = address or first_host(os.environ.get("SLURM_STEP_NODELIST", "localhost"))
        job, step = whole_in("SLURM_JOB_ID") or 0, whole_in("SLURM_STEP_ID") or 0
        # All ranks derive the same port, and other jobs and steps on the host mostly another one.
        port = port or FIRST_PORT + (64 * job + step) % PORTS
    return address or "localhost", port or FIRST_PORT


def first_host(nodes: str) -> str:
    """The first host of a list such as ``gpu[03-05,9],login``."""
    first = re.split(r",(?![^\[]*\])", nodes)[0]
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)


def own_address(address: str, port: int = 9) -> str:
    """The address of this host on the way to another one."""
    family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)  # sends nothing
        return str(probe.getsockname()[0])
