"""Logical replicas: samples, random state and buffers belong to a replica, and not to the rank that computes it."""

from __future__ import annotations

import functools
import hashlib
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn.modules.batchnorm import SyncBatchNorm as TorchSyncBatchNorm

from hvd_ckpt.batchnorm.synchronized import SyncBatchNorm
from hvd_ckpt.collectives.asynchronous import ranks_of
from hvd_ckpt.distributed.replica_reducers import ComputesReplicas
from hvd_ckpt.distributed.tree import TreeCommunicator
from hvd_ckpt.reduction.broadcast import broadcast_tensors
from hvd_ckpt.utils.random_sources import global_sources
from hvd_ckpt.utils.rules import check
from hvd_ckpt.utils.states import Count, Positive, State
from hvd_ckpt.utils.torch_private import foreach_copy_

GENERATOR_SEED_BYTES = 8
_entered: list[Replica] = []  # the one whose context is entered


class ReplicasState(State):
    """The state of logical replicas: for each its buffers."""

    number: Positive
    seed: Annotated[int, Field(ge=0, lt=2**64)]
    step: Count
    buffers: dict[int, dict[str, Tensor]]

    @model_validator(mode="after")
    def _has_all(self) -> ReplicasState:
        if set(self.buffers) != set(range(self.number)):
            raise ValueError(f"buffers must be those of {self.number} replicas")
        return self


class Replica:
    """One logical replica in one step; a context within which this rank computes it.

    In this context the generators of PyTorch, NumPy and Python are seeded by the seed of the job, the step and the replica. The
    model's buffers (batch norm statistics) are the replica's own. Afterwards both are as they were before.

    Attributes:
        index: number from 0 to the number of replicas - 1; ``inputs[replica]`` works, too.
        done: whether the replica has been computed.
    """

    def __init__(self, replicas: Replicas, index: int) -> None:
        self.index = index
        self.done = False
        self._replicas = replicas
        self._context: AbstractContextManager[None]

    def __index__(self) -> int:
        return self.index

    def __enter__(self) -> Replica:
        self._context = self._replicas.computing(self)
        self._context.__enter__()
        return self

    def __exit__(self, *error: Any) -> bool | None:
        return self._context.__exit__(*error)


def computing_replica() -> bool:
    """Whether a logical replica is being computed."""
    return bool(_entered)


class Replicas:
    """The replicas of a job, and those that this rank computes.

    Attributes:
        step: number of steps whose replicas have all been computed.
        seed: the seed of the job.
    """

    def __init__(
        self,
        number: int,
        model: nn.Module,
        reducer: ComputesReplicas,
        communicator: TreeCommunicator,
        seed: int,
    ) -> None:
        self.number, self.seed, self.step = number, seed, 0
        self._model, self._reducer, self._communicator = model, reducer, communicator
        first = communicator.process_set.rank() * reducer.local
        self._buffers: dict[int, dict[str, torch.Tensor]] = {
            first + each: {} for each in range(reducer.local)
        }
        # Values of the model's buffers outside the replicas' contexts.
        self._outside: dict[str, torch.Tensor] = {}

    def local(self) -> Iterator[Replica]:
        """This rank's replicas of one step, in order. Enter each of them once.

        Raises:
            RuntimeError: a replica was not entered.
        """
        for index in self._buffers:
            replica = Replica(self, index)
            yield replica
            if not replica.done:
                raise RuntimeError(f"replica {index} was not computed; compute it within `with replica:`")

    @property
    def indices(self) -> list[int]:
        """This rank's replicas."""
        return list(self._buffers)

    def seed_of(self, index: int) -> int:
        """The seed of the generators of a replica in this step."""
        text = f"{self.seed}.{self.step}.{index}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=GENERATOR_SEED_BYTES).digest(), "little")

    @contextmanager
    def computing(self, replica: Replica) -> Iterator[None]:
        """A context in which this rank computes a replica, whose values the model's buffers have."""
        kept, replica.done = self._buffers[replica.index], False
        with _seeded(self.seed_of(replica.index)):
            self._reducer.begin_replica()
            buffers = self._named_buffers()
            with torch.no_grad():
                _keep(buffers, self._outside)
                _copy(kept, buffers, kept)
            _entered.append(replica)
            try:
                yield
                replica.done = True
            finally:
                _entered.remove(replica)
                self._restore(kept, replica.done)
            self._reducer.end_replica()
        # Only here: a step that the loop leaves by an error or a break can be computed again with the same seeds. And not where the
        # iteration over the replicas ends, which `zip(batches, optimizer.local_replicas())` never asks for.
        if replica.index == self.indices[-1]:
            self.step += 1

    def _restore(self, kept: dict[str, torch.Tensor], done: bool) -> None:
        """Restores the model's buffers. What a replica that failed has changed is not kept, since it may be computed again."""
        buffers = self._named_buffers()
        with torch.no_grad():
            # Buffers that no pass changes, such as tables of positions, are not kept for each replica.
            changed = {
                name: buffer
                for name, buffer in buffers.items()
                if name in kept or not torch.equal(buffer, self._outside[name])
            }
            if done:
                _keep(changed, kept)
            _copy(changed, buffers, self._outside)

    def average_buffers(self) -> None:
        """Gives the model's floating-point buffers the mean over replicas, and other buffers the values of the first. Collective.

        Call it before an evaluation, or before you save the model. Training continues with the buffers of each replica.
        """
        buffers = self._named_buffers()
        values_of = list(self._buffers.values())
        changed = self._communicator.objects([list(values) for values in values_of], "buffers")
        names = sorted({name for rank in changed for values in rank for name in values})
        with torch.no_grad():
            for name in names:
                target = buffers[name]
                for values_of_one in values_of:  # one that has not changed it yet keeps what all began with
                    if name not in values_of_one:
                        values_of_one[name] = target.detach().clone()
                if target.is_floating_point():
                    values = [each[name].double().view(-1) for each in values_of]
                    target.copy_(self._communicator.mean(values, f"buffer.{name}").view(target.shape))
                else:
                    target.copy_(values_of[0][name])
        others = [buffers[name] for name in names if not buffers[name].is_floating_point()]
        members = self._communicator.process_set
        broadcast_tensors(others, ranks_of(members)[0], f"{self._communicator.prefix}.buffers", members)

    def mean(self, values: Sequence[torch.Tensor | float]) -> float:
        """The mean over all replicas of one number of each, such as a loss, in float64. Collective.

        Args:
            values: the numbers of this rank's replicas, in order.
        """
        return self.begin_mean(values)()

    def begin_mean(self, values: Sequence[torch.Tensor | float]) -> Callable[[], float]:
        """Begins a :meth:`mean`, and returns a function that waits for it. Call that function before the next one begins."""
        if len(values) != len(self._buffers):
            raise ValueError(f"{len(values)} values are given for this rank's {len(self._buffers)} replicas")
        numbers = [torch.as_tensor(value, dtype=torch.float64).detach().cpu().reshape(1) for value in values]
        work = self._communicator.begin_mean(numbers, "mean")
        return lambda: float(work.wait("mean").item())

    def buffers(self) -> dict[int, dict[str, torch.Tensor]]:
        """Copies of the buffers of this rank's replicas that their passes have changed, by replica; for :meth:`restore_buffers`."""
        return {index: _clones(values) for index, values in self._buffers.items()}

    def restore_buffers(self, buffers: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
        """Restores buffers that :meth:`buffers` returned, after a step that is skipped."""
        self._buffers = {index: _clones(values) for index, values in buffers.items()}

    def state_dict(self) -> dict[str, Any]:
        """Seed, step, and the buffers of all replicas, as plain data that is the same on every rank. Collective."""
        of_ranks = self._communicator.objects(self._buffers, "state")
        buffers = {index: values for each in of_ranks for index, values in each.items()}
        return {"number": self.number, "seed": self.seed, "step": self.step, "buffers": buffers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a state, saved on any number of ranks.

        Raises:
            ValueError: the state is invalid, or of another number of replicas or another model.
        """
        ReplicasState.check(state, "the state of the replicas")
        if state["number"] != self.number:
            raise ValueError(
                f"the state is that of {state['number']} replicas, and this job has {self.number}"
            )
        buffers = self._named_buffers()
        for name, value in itertools.chain.from_iterable(each.items() for each in state["buffers"].values()):
            if name not in buffers or buffers[name].shape != value.shape:
                raise ValueError(
                    f"the state of the replicas has a buffer '{name}' of shape {tuple(value.shape)}, which the model has not; load "
                    "one that was saved with the same model"
                )
        self.seed, self.step = state["seed"], state["step"]
        self._buffers = {
            index: {
                name: value.to(buffers[name].device, copy=True)
                for name, value in state["buffers"][index].items()
            }
            for index in self._buffers
        }

    def _named_buffers(self) -> dict[str, torch.Tensor]:
        return {
            name: buffer for name, module, key in self._places if (buffer := module._buffers[key]) is not None
        }

    @functools.cached_property
    def _places(self) -> list[tuple[str, nn.Module, str]]:
        """The buffers that belong to the state of the model: names, modules, and the names there."""
        persistent = self._model.state_dict(keep_vars=True)
        return [
            (name, module, key)
            for prefix, module in self._model.named_modules()
            for key in module._buffers
            if (name := f"{prefix}.{key}" if prefix else key) in persistent
        ]


def _copy(
    names: Iterable[str], targets: Mapping[str, torch.Tensor], sources: Mapping[str, torch.Tensor]
) -> None:
    """Copies tensors by name, in one call: each one by itself costs a pass through many batch norms a percent of its time."""
    if names := list(names):
        foreach_copy_([targets[name] for name in names], [sources[name] for name in names])


def _keep(values: Mapping[str, torch.Tensor], kept: dict[str, torch.Tensor]) -> None:
    """Copies ``values`` into tensors of ``kept``; those that are missing or do not fit are made."""
    for name, value in values.items():
        place = kept.get(name)
        facts = (value.shape, value.dtype, value.device)
        if place is None or (place.shape, place.dtype, place.device) != facts:
            kept[name] = torch.empty_like(value)
    _copy(values, kept, values)


def _clones(values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in values.items()}


def check_replicas(number: object, ranks: int, model: nn.Module | None) -> None:
    """Raises ValueError where ``number`` replicas of a model cannot be computed on ``ranks`` ranks."""
    if isinstance(number, bool) or not isinstance(number, int) or number < 1 or number & (number - 1):
        raise ValueError(f"replicas must be a power of two, not {number!r}")
    if ranks > number or ranks & (ranks - 1):
        raise ValueError(
            f"replicas={number} can be computed on 1, 2, 4, ... up to {number} ranks, not on {ranks}"
        )
    assert model is not None
    for name, module in model.named_modules():
        if isinstance(module, (SyncBatchNorm, TorchSyncBatchNorm)):
            where = f"the {type(module).__name__} '{name}'"
            check({"replicas": number, "batch_norm": "synchronized", "model": True}, {"batch_norm": where})


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """A context in which the generators of PyTorch, NumPy and Python are seeded; they are as before after it."""
    uses_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    with ExitStack() as restored, torch.random.fork_rng(range(torch.cuda.device_count() if uses_cuda else 0)):
        for source in global_sources():
            restored.callback(source.restore)
        # What torch.manual_seed does, without its search for other kinds of devices, which takes a third of a millisecond.
        torch.default_generator.manual_seed(seed)
        if uses_cuda:
            torch.cuda.manual_seed_all(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        yield
