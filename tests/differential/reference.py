"""A program in one process, which does the work of each rank in turn and takes the mean of their gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterable, Iterator
from typing import Any

import torch
from interpreter import CLIP, Run
from layers import own_of, set_buffers, set_own
from models import OPTIMIZERS, make_optimizer
from programs import Program
from torch import Tensor, nn


class InOneProcess(Run):
    """A program with PyTorch's own optimizer and without recomputation.

    Args:
        noise: seed of a random change of every reduced gradient, by a unit in the last place of its largest element; 0: none.
        refused: operations by hand that raised an error on some rank, which are left out here.
    """

    alone = True

    def __init__(self, program: Program, noise: int = 0, refused: Container[tuple[int, ...]] = ()) -> None:
        self._noise = torch.Generator().manual_seed(noise) if noise else None
        self._of_ranks: dict[int, tuple[Any, ...]] = {}
        self._reduced: set[Tensor] = set()  # in this step
        super().__init__(program, recompute=False, refused=refused)

    def turns(self) -> Iterator[int]:
        """All begin with the same weights, and their forward passes write the same."""
        weights = [parameter.detach().clone() for parameter in self.model.written]
        for rank in self.ranks:
            for parameter, value in zip(self.model.written, weights):
                parameter.data.copy_(value)
            with self.as_rank(rank):
                yield rank

    @contextlib.contextmanager
    def as_rank(self, rank: int) -> Iterator[None]:
        self.rank = rank
        # The first turns, before the first step, find all ranks alike.
        own, gradients, flags = self._of_ranks.get(rank) or self._of_this_rank()
        set_own(self.model, own)
        for parameter in self.parameters:
            parameter.grad = gradients[parameter]
            parameter.requires_grad_(flags[parameter])
        yield
        self._of_ranks[rank] = self._of_this_rank()

    def _of_this_rank(self) -> tuple[Any, ...]:
        gradients = {parameter: parameter.grad for parameter in self.parameters}
        flags = {parameter: parameter.requires_grad for parameter in self.parameters}
        return own_of(self.model), gradients, flags

    # ---------------------------------------------------------------------------------- reduction

    def reduce(self, parameters: Iterable[Tensor]) -> None:
        """Gives parameters the sums or means of all ranks' gradients, once in a step."""
        present = self.program.present(len(self.seen))
        for parameter in [one for one in parameters if one not in self._reduced]:
            parts = [self._of_ranks[rank][1][parameter] for rank in present]
            found = [part.coalesce() if part.is_sparse else part for part in parts if part is not None]
            parameter.grad = self._combined(found, parameter.dtype) if found else None
            self._reduced.add(parameter)

    def _combined(self, parts: list[Tensor], dtype: torch.dtype) -> Tensor:
        # bfloat16 travels as float32.
        total = parts[0].float() if dtype is torch.bfloat16 else parts[0].clone()
        for part in parts[1:]:
            total = total + part
        if self.program.options.get("op") != "sum":
            total = total / self.program.ranks
        total = total.to(dtype)
        total = total.coalesce() if total.is_sparse else total
        if self._noise is not None:
            self._disturb(total.values() if total.is_sparse else total)
        return total

    def _disturb(self, gradient: Tensor) -> None:
        largest = gradient.abs().max() if gradient.numel() else torch.zeros(())
        if largest.isfinite():
            random = torch.empty(gradient.shape, dtype=torch.float32).uniform_(-1, 1, generator=self._noise)
            gradient += (random * largest * torch.finfo(gradient.dtype).eps).to(gradient.dtype)

    def give(self, parameters: Iterable[Tensor]) -> None:
        """Every rank has the gradients as they are now."""
        for parameter in parameters:
            for _, gradients, _ in self._of_ranks.values():
                gradients[parameter] = None if parameter.grad is None else parameter.grad.clone()

    # ---------------------------------------------------------------------------------- in the place of what ranks do

    def _optimizer(self, own: list[list[Tensor]]) -> Any:
        kind = OPTIMIZERS[self.program.optimizer][0]
        return make_optimizer(self.program, own, type("OfAll", (OfAllRanks, kind), {"run": self}))

    def _backward(self, number: int) -> Tensor:
        self._reduced.clear()
        return super()._backward(number)

    def _finish(self, number: int, optimizer: Any, how: str) -> None:
        optimizer.synchronize()
        super()._finish(number, optimizer, how)
        self.give(optimizer.parameters())

    def _clip(self, optimizer: Any) -> None:
        nn.utils.clip_grad_norm_(optimizer.parameters(), CLIP)

    def _broadcast_model(self, root: int) -> None:
        with self.as_rank(root):
            buffers = own_of(self.model)["buffers"]
        for _ in self.turns():
            set_buffers(self.model, buffers)

    def _broadcast_optimizer(self, root: int) -> None:
        pass

    def _note_reductions(self) -> None:
        pass


class OfAllRanks:
    """The methods of a distributed optimizer, for one of PyTorch's."""

    run: InOneProcess

    def parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for _ in self.run.turns():
            super().zero_grad(set_to_none)

    def synchronize(self) -> None:
        self.run.reduce(self.parameters())

    def step(self, closure: Any = None) -> Any:
        def reduced() -> Any:
            loss = closure()
            self.synchronize()
            return loss

        result = super().step(closure and reduced)
        self.run.give(self.parameters())
        return result

    def reset_reduction(self, *_: Any) -> None:
        self.run.clear_gradients(self.run.parameters)

    load_reduction_state_dict = reset_reduction

    def unshard(self) -> None:
        self.run._broadcast_model(0)  # it begins as rank 0's
        self.reset_reduction()

    def nothing(self, *_: Any) -> None:
        """What one process needs not do."""

    set_backward_passes_per_step = weight_pieces = load_weight_pieces = reduction_state_dict = nothing
    gathered_parameters = skip_synchronize = staticmethod(contextlib.nullcontext)
