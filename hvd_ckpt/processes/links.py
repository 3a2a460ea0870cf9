"""Links between all processes of a job with pipeline stages or parts, and the set-up of its grid before Horovod starts.

- Over MPI, Horovod is initialized with the stage's communicator, and the links are a duplicate of the world communicator.
- Over Gloo, Horovod is initialized with a rendezvous server of the stage, as in Horovod's own Ray and Spark integrations. The links
  are a ``ProcessGroupGloo`` of PyTorch, and shared memory within a host (:mod:`.near`). Addresses are exchanged through a store of
  process 0, whose own address is in the launcher's rendezvous server.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

from horovod.runner.http.http_client import put_data_into_kvstore, read_data_from_kvstore
from horovod.runner.http.http_server import RendezvousServer
from torch import Tensor
from torch.distributed import ProcessGroupGloo, Store, TCPStore  # type: ignore[attr-defined]

from hvd_ckpt.processes import watchdog
from hvd_ckpt.processes.devices import message_backend
from hvd_ckpt.processes.grid import FAILURE_TAG, Grid, set_current
from hvd_ckpt.processes.hosts import LOOPBACK, Peer
from hvd_ckpt.processes.launchers import GLOO_ADDRESS, is_elastic, whole_in
from hvd_ckpt.processes.near import Listener, NearLink, PeerEnded
from hvd_ckpt.processes.rendezvous import PORT, own_address, rank_variables
from hvd_ckpt.utils.rules import ELASTIC, argument, refusal

SCOPE = "hvd_ckpt.processes.links"  # in the launcher's rendezvous server
ASK_SECONDS = 0.02  # between two questions of a process to it
QUESTIONS = 2000  # of all processes to it in a second
FAILURE_BYTES = 1000
FAILURE_SECONDS = 1.0  # in which the message of a process that ends by an error is sent
# In which that process shows its traceback: a launcher of MPI ends all when the first one has gone.
GRACE_SECONDS = 4.0
LARGEST = 2**30  # bytes of one MPI message
EAGER_TESTS = 200  # of an MPI request, before the process sleeps between two of them
SLEEP_SECONDS = 50e-6
NO_LIMIT = timedelta(days=1000)  # of a wait in Gloo or for a store: the watchdog has the limit


class StageFailed(RuntimeError):
    """Another process of the job has raised an error or ended, so this one ends with it."""

    raised_elsewhere = True  # for hvd_ckpt.processes.uncaught: that process shows the traceback


class MpiLink:
    """Messages over mpi4py: requests that are tested, since the process that they wait for may have failed meanwhile.

    Args:
        communicator: communicator of all processes, for messages of this library.
        name: gives a process in words.
    """

    def __init__(self, communicator: Any, name: Callable[[int], str]) -> None:
        self._communicator, self._name = communicator, name

    def send(self, memory: Tensor, to: int, tag: int) -> Any:
        """Starts to send bytes; gives what :meth:`is_sent` and :meth:`wait` take."""
        return [self._communicator.Isend(part.numpy(), dest=to, tag=tag) for part in _parts(memory)]

    def receive(self, memory: Tensor, source: int, tag: int) -> Any:
        """Starts to receive bytes; gives what :meth:`wait` takes."""
        return [self._communicator.Irecv(part.numpy(), source=source, tag=tag) for part in _parts(memory)]

    def is_sent(self, request: Any) -> bool:
        """Whether it is known to be sent, without a wait."""
        return all(part.Test() for part in request)

    def wait(self, request: Any, awaited: str, other: int) -> None:
        """Waits for a message to or from another process; ``awaited`` says for what, if that takes too long.

        Raises:
            StageFailed: that process, or over MPI any other, has ended by an error.
        """
        # Most messages are there already or come at once. Each test lets MPI make progress, since nothing else here does.
        for _ in range(EAGER_TESTS):
            if self.is_sent(request):
                return
        with watchdog.waiting(awaited):
            # A blocking wait would not see that another process has failed, which over MPI closes no connection.
            while not self.is_sent(request):
                self._raise_failure()
                time.sleep(SLEEP_SECONDS)

    def _raise_failure(self) -> None:
        from mpi4py import MPI

        status = MPI.Status()
        if self._communicator.Iprobe(source=MPI.ANY_SOURCE, tag=FAILURE_TAG, status=status):
            text = bytearray(FAILURE_BYTES)
            self._communicator.Recv(text, source=status.Get_source(), tag=FAILURE_TAG, status=status)
            reason = bytes(text[: status.Get_count()]).decode(errors="replace")
            time.sleep(GRACE_SECONDS)
            raise StageFailed(f"{self._name(status.Get_source())} has ended with {reason}")

    def fail(self, reason: str) -> None:
        """Tells the other processes that this one ends by an error."""
        rank = self._communicator.Get_rank()
        text = reason.encode()[:FAILURE_BYTES]
        left = [
            self._communicator.Isend(text, dest=other, tag=FAILURE_TAG)
            for other in range(self._communicator.Get_size())
            if other != rank
        ]
        # The others may never ask for the message. MPI needs tests to send it, so they are made for a moment, without a wait.
        end = time.monotonic() + FAILURE_SECONDS
        while time.monotonic() < end and not all(request.Test() for request in left):
            pass

    leave = fail  # of a process that does not end


class GlooLink:
    """The same over PyTorch's Gloo, and within a host over ``near``, which needs no thread beside the one that computes.

    A process that ends closes its connections, which the others notice.
    """

    def __init__(self, group: Any, near: NearLink, name: Callable[[int], str]) -> None:
        self._group, self._near, self._name = group, near, name

    def send(self, memory: Tensor, to: int, tag: int) -> Any:
        with noticing_ends(self._name(to)):
            if to in self._near:
                return self._near.send(memory, to, tag)  # copies
            # Both ends know the size of a message, so that an empty one is neither sent nor waited for.
            return self._group.send([memory], to, tag) if memory.numel() else None

    def receive(self, memory: Tensor, source: int, tag: int) -> Any:
        with noticing_ends(self._name(source)):
            if source in self._near:
                return self._near.receive(memory, source, tag)
            return self._group.recv([memory], source, tag) if memory.numel() else None

    def is_sent(self, request: Any) -> bool:
        return request is None  # else it is known only to those who wait

    def wait(self, request: Any, awaited: str, other: int) -> None:
        with watchdog.waiting(awaited), noticing_ends(self._name(other)):
            if request is not None:
                request.wait()

    def fail(self, reason: str) -> None:
        """The connections say it when this process ends."""

    def leave(self, reason: str) -> None:
        """Closes the connections, as the others notice an error of a process that does not end."""
        self._near.close()
        self._group = None  # whose end closes them, once no request is left


def _parts(memory: Tensor) -> list[Tensor]:
    # The count of an MPI message is a C int.
    return [memory[start : start + LARGEST] for start in range(0, memory.numel(), LARGEST)]


@contextlib.contextmanager
def noticing_ends(who: str) -> Iterator[None]:
    """Turns an error about a connection that is closed into a :class:`StageFailed`."""
    try:
        yield
    except PeerEnded as error:
        raise StageFailed(f"{who} has ended or gone ({error})") from None
    except RuntimeError as error:
        if isinstance(error, StageFailed):
            raise
        # Of Gloo's text, "[file:line] reason. More words", the reason.
        reason = str(error).splitlines()[0].rpartition("] ")[2].partition(". ")[0] if str(error) else ""
        raise StageFailed(f"{who} has ended or gone ({reason[:200]})") from None


def enter(stages: Any, mpi: Callable[[], Any] | None, tensor: Any = 1) -> tuple[Grid, Any, dict[str, str]]:
    """Finds this process's place, and links all processes; before Horovod starts. Collective.

    Args:
        stages, tensor: how many stages, and parts of a layer.
        mpi: imports mpi4py's ``MPI``; None in a job over Gloo.

    Returns:
        The grid, and what Horovod starts with: a communicator of MPI or None, and environment variables.

    Raises:
        ValueError: ``stages`` or ``tensor`` is not a number from 1, or their product does not divide np; on every process.
        RuntimeError: the job is elastic, or MPI lets only one thread call it.
    """
    for name, number, what in (("stages", stages, "pipeline stages"), ("tensor", tensor, "parts of a layer")):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"init(): {name} must be a number of {what} from 1, got {number!r}")
    given = {"stages": stages if stages > 1 else None, "tensor": tensor if tensor > 1 else None}
    if reason := refusal({**given, ELASTIC: is_elastic()}, argument):
        raise RuntimeError(f"init(): {reason}")
    comm, environment = None, dict[str, str]()
    if mpi is not None:
        grid, comm = _over_mpi(stages, tensor, mpi())
    else:
        grid, environment = _over_gloo(stages, tensor)
    set_current(grid)
    watchdog.introduce(grid.peers)
    return grid, comm, environment


def _place(stages: int, tensor: int, process: int, processes: int) -> Grid:
    each = stages * tensor
    if processes % each:
        asked = {name: number for name, number in (("stages", stages), ("tensor", tensor)) if number > 1}
        raise ValueError(
            f"init(): {', '.join(f'{name}={number}' for name, number in asked.items())} does not divide the number of processes, "
            f"{processes}; start {' times '.join(asked)} times replicas of them, such as -np "
            f"{max(1, round(processes / each)) * each}"
        )
    replicas = processes // each
    row, part = divmod(process, tensor)
    return Grid(stages, replicas, *divmod(row, replicas), tensor=tensor, part=part)


# ------------------------------------------------------------------------------------------------------------ MPI


def _over_mpi(stages: int, tensor: int, mpi: Any) -> tuple[Grid, Any]:
    if not mpi.Is_initialized():
        mpi.Init_thread(mpi.THREAD_MULTIPLE)
        atexit.register(_finalize, mpi)  # before Horovod registers its own end, so that it runs after that
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        raise RuntimeError(
            f"init(): stages={stages}, tensor={tensor} needs an MPI that Horovod's thread and this one may call at the same time, "
            f"with MPI_THREAD_MULTIPLE (level {mpi.THREAD_MULTIPLE}), and this one gives level {mpi.Query_thread()}: initialize "
            f"it with that, use an Open MPI that has it, or run over Gloo (`horovodrun --gloo`)"
        )
    # A communicator of its own: messages here never meet those of the user's code or of Horovod, whatever their tags.
    world = mpi.COMM_WORLD.Dup()
    grid = _place(stages, tensor, world.Get_rank(), world.Get_size())
    near = world.Split_type(mpi.COMM_TYPE_SHARED)
    grid.local_rank, grid.local_size = near.Get_rank(), near.Get_size()
    near.Free()
    facts = world.allgather((Peer.here(world.Get_rank()), message_backend()))
    grid.peers = [peer for peer, _ in facts]
    grid.link = MpiLink(world, grid.name)
    grid.backend = _common(backend for _, backend in facts)
    if grid.backend:
        grid.address = next(iter(grid.peers[grid.number].addresses), LOOPBACK)
        grid.store = _store(grid.number, grid.address, lambda place: world.bcast(place, 0))
    # The replicas of one stage and part, in the order of replicas, which so become Horovod's ranks.
    return grid, mpi.COMM_WORLD.Split(grid.stage * tensor + grid.part, grid.replica)


def _finalize(mpi: Any) -> None:
    """Ends MPI, unless this process ends by an error: MPI would wait for the others, which wait for this one."""
    if getattr(sys, "last_value", None) is None and not mpi.Is_finalized():
        mpi.Finalize()


# ------------------------------------------------------------------------------------------------------------ Gloo


_starts = itertools.count()


def _through_launcher(place: Any) -> Any:
    """The place of the store of rank 0, which alone gives one, through the launcher's rendezvous server."""
    # A second start in this process finds nothing of the first.
    entry = os.environ[GLOO_ADDRESS], int(os.environ[PORT]), f"{SCOPE}.{next(_starts)}", "store"
    if place is not None:
        put_data_into_kvstore(*entry, place)
        return place
    with watchdog.waiting("rank 0 to start"):
        while True:
            try:
                return read_data_from_kvstore(*entry)
            except RuntimeError:  # not there yet
                time.sleep(max(ASK_SECONDS, (whole_in("HOROVOD_SIZE") or 1) / QUESTIONS))


def _put(store: Store, key: str, value: Any) -> None:
    store.set(key, pickle.dumps(value))  # type: ignore[arg-type]  # PyTorch's stub has only text


def _get(store: Store, key: str) -> Any:
    with watchdog.waiting(f"{key} to start"):
        return pickle.loads(store.get(key))  # of a process of this job


def _over_gloo(stages: int, tensor: int) -> tuple[Grid, dict[str, str]]:
    if GLOO_ADDRESS not in os.environ:
        return _place(stages, tensor, 0, 1), {}
    process, processes = whole_in("HOROVOD_RANK") or 0, whole_in("HOROVOD_SIZE") or 1
    grid = _place(stages, tensor, process, processes)
    grid.local_rank = whole_in("HOROVOD_LOCAL_RANK") or 0
    grid.local_size = whole_in("HOROVOD_LOCAL_SIZE") or 1
    grid.address = own_address(os.environ[GLOO_ADDRESS])
    store = _store(process, grid.address, _through_launcher)
    near = Listener()
    _put(store, f"rank {process}", (Peer.here(process), near.host, near.name, message_backend()))
    # Rank 0 asks for each entry, and the others for its list: n questions, where each for each other would be n squared.
    if process == 0:
        _put(store, "all ranks", [_get(store, f"rank {other}") for other in range(processes)])
    everyone = _get(store, "all ranks")
    grid.peers = [peer for peer, *_ in everyone]
    environment = _world_environment(grid, store)
    with watchdog.waiting("all ranks to connect"):
        group = gloo_group(store, process, processes, grid.address)  # here everyone listens
    grid.backend = _common(backend for *_, backend in everyone)
    grid.store = store if grid.backend else None
    # A process without such sockets has the host None, as others like it have. connect() then connects none of them.
    names = {other: name for other, (_, host, name, _) in enumerate(everyone) if host == near.host}
    with watchdog.waiting("all ranks of this host to connect"):
        grid.link = GlooLink(group, NearLink(near.connect(process, names)), grid.name)
    return grid, environment


def _world_environment(grid: Grid, store: Store) -> dict[str, str]:
    """The environment that a launcher would set if the replicas of this process's stage and part were the whole job."""
    key = f"the rendezvous server of stage {grid.stage}, part {grid.part}"
    if grid.replica == 0:
        server = RendezvousServer()  # a daemon thread, which ends with the process
        _put(store, key, (grid.address, server.start()))
    peers = [grid.peers[grid.process(grid.stage, replica)] for replica in range(grid.replicas)]
    hosts = [(peer.host, peer.addresses) for peer in peers]
    return rank_variables(hosts, *_get(store, key))[grid.replica]


# ------------------------------------------------------------------------------------------------------------ groups


def _common(backends: Iterable[str]) -> str:
    """What all processes have."""
    found = set(backends)
    return found.pop() if len(found) == 1 else ""


def _store(process: int, address: str, share: Callable[[tuple[str, int] | None], tuple[str, int]]) -> Store:
    """The store of process 0, whose place ``share`` gives to all."""
    if process == 0:
        # Port 0 lets the system choose a free one.
        store = TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=NO_LIMIT)
        share((address, store.port))
        return store
    return TCPStore(*share(None), is_master=False, wait_for_workers=False, timeout=NO_LIMIT)


def gloo_group(store: Store, rank: int, size: int, address: str) -> Any:
    """A process group over Gloo, of processes that listen at their addresses. Collective over these."""
    group: Any = ProcessGroupGloo
    options = group._Options()
    options._devices = [group.create_device(hostname=address)]
    options._timeout = NO_LIMIT
    return group(store, rank, size, options)
