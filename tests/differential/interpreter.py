"""Runs a program on the ranks of a job. :mod:`reference` runs it in one process that does the work of each rank in turn."""

from __future__ import annotations

import contextlib
import copy
import gc
import hashlib
import random
import re
from collections.abc import Container, Iterator
from typing import Any

import numpy
import torch
from hand import Hand
from layers import VOCABULARY, WIDTH, own_of, set_buffers, set_own
from models import Caught, build, distributed, make_optimizer
from programs import Pass, Program
from torch import Tensor

import hvd_ckpt as hc
from hvd_ckpt.processes.grid import current
from hvd_ckpt.reduction.gradients import has_values
from hvd_ckpt.utils.cuts import cut_of

CLIP = 0.3
RETURNED = {  # by closures, of their loss
    "loss": lambda loss: loss,
    "float": Tensor.item,
    "none": lambda loss: None,
    "dict": lambda loss: {"loss": loss},
    "tuple": lambda loss: (loss, 0),
}


class Run:
    """A model in training, on a rank of a job.

    Args:
        recompute: as the program says, or not at all.
        refused: operations by hand that are left out.

    Attributes:
        ranks: whose work this process does.
        rank: the one whose turn it is.
        hand: performs the program's acts.
        seen: the losses of each step.
        late: gradients that came after their bucket had left, or were reduced in more than one round.
        reductions: how the gradients of each step were reduced.
    """

    alone = False  # in one process

    def __init__(
        self, program: Program, recompute: bool = True, refused: Container[tuple[int, ...]] = ()
    ) -> None:
        self.program = program
        self.ranks = list(range(program.ranks)) if self.alone else [hc.rank()]
        self.rank = self.ranks[0]
        self.model = build(program, recompute, self.alone)
        self.parameters = list(self.model.parameters())
        self.seen: list[Any] = []
        self.late = 0
        self.reductions: list[Any] = []
        owned = self._owned()
        self.groups = {number: [own] for number, own in owned.items() if number >= 0}
        self._added = owned.get(-1, [])
        self._old: list[Any] = []
        self._pending: set[int] = set()  # optimizers that have not stepped since their gradients came
        scaler = torch.amp.GradScaler if self.alone else hc.GradScaler
        self._scaler = scaler("cpu", init_scale=64.0, growth_interval=2) if program.scaler else None
        self.hand = Hand(self, refused)
        self.hand.act(0, "unwrapped")
        with self._default_dtype():
            self.optimizers = self._optimizers()
        self.hand.act(0, "wrapped")
        self._saved = self.state()

    @contextlib.contextmanager
    def _default_dtype(self) -> Iterator[None]:
        before = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, self.program.default_dtype))
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    def _owned(self) -> dict[int, list[Tensor]]:
        """The parameters of each optimizer; -1: those that are added later."""
        owners = {self.model.embedding.weight: 0} if self.program.embedding else {}
        for owner, chain in zip(self.program.owners, self.model.segments):
            for parameter in chain.parameters():
                owners.setdefault(parameter, owner)
        owned: dict[int, list[Tensor]] = {}
        for parameter, owner in owners.items():
            owned.setdefault(owner, []).append(parameter)
        return owned

    def _optimizers(self) -> list[Any]:
        return [self._optimizer(self.groups[number]) for number in sorted(self.groups)]

    # ---------------------------------------------------------------------------------- what one process does otherwise

    def _optimizer(self, own: list[list[Tensor]]) -> Any:
        return distributed(make_optimizer(self.program, own), self.program, self.model, own)

    def turns(self) -> Iterator[int]:
        """Each of the ranks in turn."""
        yield self.rank

    def as_rank(self, rank: int) -> contextlib.AbstractContextManager[None]:
        """Within it the process is a rank."""
        return contextlib.nullcontext()

    def _broadcast_model(self, root: int) -> None:
        hc.broadcast_parameters(self.model.state_dict(), root_rank=root)

    def _broadcast_optimizer(self, root: int) -> None:
        for optimizer in self.optimizers:
            hc.broadcast_optimizer_state(optimizer, root_rank=root)

    def _clip(self, optimizer: Any) -> None:
        hc.clip_grad_norm_(optimizer, CLIP)

    # ---------------------------------------------------------------------------------- what happens in a step

    def event(self, name: str, *values: Any, replayed: bool = False) -> None:
        """What happens before a step; ``replayed``: to get to the same structure, without what training did to it."""
        if name == "freeze":
            segment, flag = values
            for _ in self.turns():
                self.model.segments[segment].requires_grad_(flag)
        elif name == "group":
            rate = self.optimizers[0].param_groups[0]["lr"]
            self.groups[0].append(self._added)
            self.clear_gradients(self._added)
            self.optimizers[0].add_param_group({"params": list(self._added), "lr": rate / 2})
        elif name == "rewrap":
            self._rewrap(*values)
        elif name == "contiguous":
            self.model.to(memory_format=torch.contiguous_format)
        elif name == "passes":
            self.optimizers[0].set_backward_passes_per_step(*values)
        elif name == "rewind" and not replayed:
            self.load(self._saved)
        elif name == "reload" and not replayed:
            for optimizer in self.optimizers:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        elif name == "restore" and not replayed:
            self._restore(*values)
        if name in ("group", "rewrap") and not replayed:
            self._saved = self.state()

    def _rewrap(self, keep: bool) -> None:
        for optimizer in self.optimizers if self.program.stage else ():
            optimizer.unshard()
        self._old = self.optimizers if keep else []
        self.optimizers = []
        gc.collect()  # on every rank alike
        self.optimizers = self._optimizers()

    def _restore(self, loaders: tuple[int, ...], root: int, operations: tuple[str, ...]) -> None:
        """Some ranks load what was saved; later each gets what the root has."""
        saved = copy.deepcopy(self._saved)
        loads = self.alone or self.rank in loaders
        for operation in operations:
            if operation == "load_model" and loads:
                for rank in self.turns():
                    self.model.load_state_dict(saved["model"])
                    set_buffers(self.model, saved["own"][rank]["buffers"])
            elif operation == "load_optimizer" and loads:
                for optimizer, state in zip(self.optimizers, saved["optimizers"]):
                    optimizer.load_state_dict(state)
            elif operation == "broadcast_model":
                self._broadcast_model(root)
            elif operation == "broadcast_optimizer":
                self._broadcast_optimizer(root)

    def step(self) -> None:
        """Runs the next step of the program."""
        number = len(self.seen)
        raises = "" if self.alone else self.program.steps[number].raises
        try:
            with self._default_dtype():
                losses = self._step(number)
        except RuntimeError as error:
            if not raises or not re.search(raises, str(error)):
                raise
            losses = []
        else:
            assert not raises, f"step {number} has not raised '{raises}'"
            self._note_reductions()
        self.seen.append(losses)

    def _step(self, number: int) -> list[float]:
        step = self.program.steps[number]
        for event in step.events:
            self.event(*event)
        for rank in self.turns():
            if rank in self.program.present(number):
                seed_all(1000 * number + rank)
        refused = self.alone and bool(step.raises)  # its passes are all that is left of it
        if step.how == "closure" and not refused:
            return self._closure(number)
        self._clear(step.clear)
        self.hand.act(number, "cleared")
        loss = self._backward(number)
        self.hand.act(number, "backward")
        for segment in step.drop:
            self.clear_gradients(self.model.segments[segment].parameters())
        for optimizer in () if refused else step.optimizers:
            self._finish(number, self.optimizers[optimizer], step.how)
        self.hand.act(number, "step")
        self._pending = set(range(len(self.optimizers))) - set(step.optimizers)
        if self._scaler is not None and not refused:
            self._scaler.update()
        return [float(loss)]

    def _closure(self, number: int) -> list[float]:
        step, losses, returned = self.program.steps[number], [], []

        def closure() -> Any:
            self._clear(step.clear)
            losses.append(self._backward(number))
            returned.append(RETURNED[step.returns](losses[-1]))
            return returned[-1]

        result = self.optimizers[0].step(closure)
        if step.returns in ("loss", "float"):
            losses.append(result)
        else:
            assert result is returned[0], f"step() returned {result}, its closure {returned}"
        return list(map(float, losses))

    def _clear(self, how: str) -> None:
        if how.startswith("model"):
            for _ in self.turns():
                self.model.zero_grad(set_to_none=how == "model")
        for number, optimizer in enumerate(self.optimizers):
            if how in ("none", "zero", "plain") and number not in self._pending:
                optimizer.zero_grad(**({} if how == "plain" else {"set_to_none": how == "none"}))
        owned = {p for groups in self.groups.values() for group in groups for p in group}
        self.clear_gradients([p for p in self.parameters if p not in owned])

    def clear_gradients(self, parameters: Any) -> None:
        cleared = list(parameters)
        for _ in self.turns() if cleared else ():
            for parameter in cleared:
                parameter.grad = None

    def _backward(self, number: int) -> Tensor:
        """All backward passes of these ranks; returns the mean loss over them."""
        total = torch.zeros((), dtype=torch.float32)
        passes = self.program.steps[number].passes
        for part in range(max(len(passes[rank]) for rank in self.ranks)):
            for rank in self.turns():
                if part < len(passes[rank]) and rank in self.program.present(number):
                    total += self._pass(number, part, passes[rank][part])
            self.hand.act(number, "pass", part)
        return total / len(self.ranks)

    def _pass(self, number: int, part: int, one: Pass) -> Tensor:
        drawn = torch.Generator().manual_seed(100_000 * part + 100 * number + self.rank)
        model = self.model
        loss = torch.zeros((), dtype=torch.float32)

        def inputs() -> Tensor:
            if self.program.embedding:
                return torch.randint(VOCABULARY, (one.batch, 3), generator=drawn)
            x = torch.randn(one.batch, WIDTH, generator=drawn, dtype=torch.float32)
            return x.requires_grad_()

        def forward(x: Tensor) -> Tensor:
            return (model(x, one.path) - 0.3).square().mean()

        try:
            if one.kind == "eval_first":
                model.eval()
                with torch.no_grad():
                    forward(inputs())
                model.train()
            model.set_trap(one.trap)
            x = inputs()
            loss = forward(x)
            if one.kind == "two_forwards":
                loss = loss + forward(inputs())
            whole = loss if not one.overflow else loss * float("inf")
            if self._scaler is not None:
                whole = self._scaler.scale(whole)
            if not whole.requires_grad:
                return loss.detach()
            if self.program.steps[number].by_hand and any(p.requires_grad for p in self.parameters):
                self._set_gradients(whole)
                return loss.detach()
            if one.kind == "penalty" and one.path:
                (gradient,) = torch.autograd.grad(whole, x, create_graph=True)
                whole = whole + gradient.square().sum()
            whole.backward(retain_graph=one.kind in ("twice", "graph"), create_graph=one.kind == "graph")
            if one.kind == "twice":
                whole.backward()
            elif one.kind == "graph":
                sum(p.grad.square().sum() for p in self.parameters if p.grad is not None).backward()
        except Caught:
            pass
        finally:
            model.set_trap(None)
        return loss.detach()

    def _set_gradients(self, loss: Tensor) -> None:
        parameters = [parameter for parameter in self.parameters if parameter.requires_grad]
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, gradients):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def _finish(self, number: int, optimizer: Any, how: str) -> None:
        """Reduces the gradients of an optimizer, and steps."""
        scaler = self._scaler
        if scaler is not None and how in ("clip", "skip", "synchronize"):
            scaler.unscale_(optimizer)
        elif how in ("synchronize", "twice", "warned", "skip"):
            optimizer.synchronize()
        if how in ("synchronize", "warned", "skip"):
            self.hand.act(number, "synchronized")
        if how == "clip":
            self._clip(optimizer)
        if how == "skip":
            return
        if how == "twice":
            optimizer.synchronize()
        synchronized = scaler is None and how in ("synchronize", "twice")
        with optimizer.skip_synchronize() if synchronized else contextlib.nullcontext():
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
        if how == "repeat":
            optimizer.step()

    def _note_reductions(self) -> None:
        self.reductions.append([optimizer.reduction_stats.last for optimizer in self.optimizers])
        for last in self.reductions[-1]:
            often = max(last.launches.values(), default=0)
            assert self.program.stage > 1 or often <= 1, f"a bucket left {often} times in a step"
            self.late += len(last.late_gradients) + (often > 1)

    # ---------------------------------------------------------------------------------- state

    def state(self) -> dict[str, Any]:
        """Weights, the state of the optimizers, and what each rank has of its own."""
        with self.optimizers[0].gathered_parameters():
            model = copy.deepcopy(self.model.state_dict())
        return {
            "model": model,
            "own": {rank: own_of(self.model) for rank in self.turns()},
            "optimizers": [copy.deepcopy(one.state_dict()) for one in self.optimizers],
            "pieces": [copy.deepcopy(one.weight_pieces()) for one in self.optimizers if self.program.stage],
            "scaler": None if self._scaler is None else dict(self._scaler.state_dict()),
        }

    def load(self, state: dict[str, Any]) -> None:
        state = copy.deepcopy(state)
        with self.optimizers[0].gathered_parameters():
            self.model.load_state_dict(state["model"])
        for rank in self.turns():
            set_own(self.model, state["own"][rank])
        for optimizer, own in zip(self.optimizers, state["optimizers"]):
            optimizer.load_state_dict(own)
        for optimizer, pieces in zip(self.optimizers, state["pieces"]):
            optimizer.load_weight_pieces(pieces)
        if self._scaler is not None:
            self._scaler.load_state_dict(state["scaler"])

    def resumed(self) -> Run:
        """A new run in the state of this one, as after a restart."""
        done = len(self.seen)
        state = self.state()
        gradients = [copy.deepcopy(p.grad) if has_values(p.grad) else None for p in self.parameters]
        reductions = [copy.deepcopy(one.reduction_state_dict()) for one in self.optimizers]
        new = Run(self.program)
        for step in self.program.steps[:done]:
            for event in step.events:
                new.event(*event, replayed=True)
        new.load(state)
        for optimizer, reduction in zip(new.optimizers, reductions):
            optimizer.load_reduction_state_dict(reduction)
        following = self.program.steps[done]
        rewraps = any(event[0] == "rewrap" for event in following.events)
        # Only the optimizer's own zero_grad() knows of gradients that a state does not have.
        if following.clear in ("never", "model_zero") or rewraps:
            for parameter, gradient in zip(new.parameters, gradients):
                if gradient is not None or has_values(parameter.grad):
                    parameter.grad = gradient
        new.seen, new.late, new._saved = list(self.seen), self.late, copy.deepcopy(self._saved)
        return new

    def result(self) -> dict[str, Tensor]:
        """The whole weights, and what belongs to this rank (in one process: to each): names that begin with its number."""
        with self.optimizers[0].gathered_parameters():
            values = {name: whole(parameter) for name, parameter in self.model.named_parameters()}
        for rank in self.turns():
            own = own_of(self.model)
            parts = [*own["buffers"], *(part for state in own["hidden"] for part in state), *own["random"]]
            values |= {f"{rank}.{number}": as_tensor(value) for number, value in enumerate(parts)}
        return values


def seed_all(seed: int) -> None:
    """Seeds PyTorch's generator, Python's and NumPy's."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


def whole(parameter: Tensor) -> Tensor:
    """A copy of a parameter, of which tensor parallelism may have left a slice here."""
    cut = cut_of(parameter)
    own = parameter.detach().clone()
    return own if cut is None else cut.whole(current().gather_objects(own))


def as_tensor(state: Any) -> Tensor:
    """A tensor as it is; of anything else a digest."""
    if isinstance(state, Tensor):
        return state.clone()
    return torch.tensor(list(hashlib.sha256(repr(state).encode()).digest()), dtype=torch.uint8)
