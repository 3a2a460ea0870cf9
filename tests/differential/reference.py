"""The ranks of a job in one process: the state of each rank, and the mean of their gradients."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import random
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from programs import Program
from stateful import Stateful
from torch import Tensor, nn

from hvd_ckpt.processes.grid import current
from hvd_ckpt.utils.cuts import cut_of


class Ranks:
    """In the place of the ranks.

    Args:
        noise: seed of a random change of every reduced gradient, by a unit in the last place of its largest element; 0: none.
    """

    def __init__(self, model: Any, program: Program, noise: int) -> None:
        self._model, self._program = model, program
        self._parameters: list[Tensor] = list(model.parameters())
        self._noise = torch.Generator().manual_seed(noise) if noise else None
        ranks = range(program.ranks)
        self.own = {rank: own_of(model) for rank in ranks}
        self._gradients: dict[int, list[Tensor | None]] = {
            rank: [None] * len(self._parameters) for rank in ranks
        }
        self._reduced: set[Tensor] = set()
        self._present: set[int] = set()  # ranks that have not joined
        self._written: list[Tensor] = []
        self._flags: dict[int, list[bool]] = {}
        self.note_flags()

    def note_flags(self) -> None:
        """Every rank has the flags ``requires_grad`` that the model has now."""
        flags = [parameter.requires_grad for parameter in self._parameters]
        self._flags = {rank: list(flags) for rank in self.own}

    def seed(self, number: int) -> None:
        """Seeds the generators of each rank for a step."""
        self._present = set(self._program.present(number))
        for rank in self._present:
            seed_all(1000 * number + rank)
            self.own[rank]["random"] = random_state()

    def broadcast_buffers(self, root: int) -> None:
        for own in self.own.values():
            own["buffers"] = copy.deepcopy(self.own[root]["buffers"])

    def begin(self) -> None:
        """Begins the backward passes of a step."""
        self._reduced.clear()

    def begin_pass(self) -> None:
        """Begins a backward pass of each rank."""
        self._written = [parameter.detach().clone() for parameter in self._model.written]

    @contextlib.contextmanager
    def as_rank(self, rank: int) -> Iterator[None]:
        """Within it the process is a rank."""
        set_own(self._model, self.own[rank])
        for parameter, value in zip(self._model.written, self._written):
            parameter.data.copy_(value)  # each rank's forward passes write the same
        for parameter, gradient, flag in zip(self._parameters, self._gradients[rank], self._flags[rank]):
            parameter.grad = gradient
            parameter.requires_grad_(flag)
        yield
        self.own[rank] = own_of(self._model)
        self._gradients[rank] = [parameter.grad for parameter in self._parameters]
        self._flags[rank] = [parameter.requires_grad for parameter in self._parameters]

    def clear(self, parameters: list[Tensor], zero: bool) -> None:
        """For each rank: zeros where there is a gradient, or None."""
        cleared = set(parameters)
        for at, parameter in enumerate(self._parameters):
            if parameter not in cleared:
                continue
            for gradients in self._gradients.values():
                there = gradients[at] is not None
                gradients[at] = torch.zeros_like(parameter) if zero and there else None

    def reduce(self, own: set[Tensor]) -> None:
        """Gives each rank, and the parameters, the sums or means of all ranks' gradients."""
        for at, parameter in enumerate(self._parameters):
            if parameter not in own:
                continue
            parts = [gradients[at] for rank, gradients in self._gradients.items() if rank in self._present]
            present = [part for part in parts if part is not None]
            found = [part.coalesce() if part.is_sparse else part for part in present]
            if not found:
                parameter.grad = None
                continue
            if parameter in self._reduced:
                parameter.grad = found[0].clone()
                continue
            # bfloat16 travels as float32.
            total = found[0].float() if parameter.dtype is torch.bfloat16 else found[0]
            for part in found[1:]:
                total = total + part
            if self._program.options.get("op") != "sum":
                total = total / self._program.ranks
            total = total.to(parameter.dtype)
            if total.is_sparse:
                total = total.coalesce()
            if self._noise is not None:
                self._disturb(total.values() if total.is_sparse else total)
            self._reduced.add(parameter)
            for gradients in self._gradients.values():
                gradients[at] = total.clone()
            parameter.grad = total.clone()

    def _disturb(self, gradient: Tensor) -> None:
        largest = gradient.abs().max() if gradient.numel() else torch.zeros(())
        if largest.isfinite():
            random = torch.empty(gradient.shape, dtype=torch.float32).uniform_(-1, 1, generator=self._noise)
            gradient += (random * largest * torch.finfo(gradient.dtype).eps).to(gradient.dtype)

    def stepped(self, own: set[Tensor]) -> None:
        """Every rank has the gradients as they were unscaled or clipped."""
        for at, parameter in enumerate(self._parameters):
            if parameter not in own:
                continue
            gradient = parameter.grad
            for gradients in self._gradients.values():
                gradients[at] = None if gradient is None else gradient.clone()


# ---------------------------------------------------------------------------------- the state of one rank


def whole(parameter: Tensor) -> Tensor:
    """A copy of a parameter, of which tensor parallelism may have left a slice here."""
    cut = cut_of(parameter)
    if cut is None:
        return parameter.detach().clone()
    rows = current().gather_objects(parameter.detach().clone())
    return cut.whole(rows)


def seed_all(seed: int) -> None:
    """Seeds PyTorch's generator, Python's and NumPy's."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


def random_state() -> tuple[Any, ...]:
    return torch.get_rng_state(), random.getstate(), numpy.random.get_state()


def own_of(model: nn.Module) -> dict[str, Any]:
    """Copies of what each rank has of its own: buffers, what layers hide, and the states of the generators."""
    hidden = [module.hidden() for module in model.modules() if isinstance(module, Stateful)]
    return {"buffers": [one.clone() for one in model.buffers()], "hidden": hidden, "random": random_state()}


def set_own(model: nn.Module, own: dict[str, Any]) -> None:
    with torch.no_grad():
        for buffer, value in zip(model.buffers(), own["buffers"]):
            buffer.copy_(value)
    stateful = (module for module in model.modules() if isinstance(module, Stateful))
    for module, value in zip(stateful, own["hidden"]):
        module.set_hidden(value)
    torch.set_rng_state(own["random"][0])
    random.setstate(own["random"][1])
    numpy.random.set_state(own["random"][2])


def as_tensor(state: Any) -> Tensor:
    """A tensor as it is; of anything else a digest."""
    if isinstance(state, Tensor):
        return state.clone()
    text = repr(_plain(state)).encode()
    return torch.tensor(list(hashlib.sha256(text).digest()), dtype=torch.uint8)


def _plain(state: Any) -> Any:
    if isinstance(state, (tuple, list)):
        return [_plain(value) for value in state]
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return state.tolist() if isinstance(state, numpy.ndarray | Tensor) else state
