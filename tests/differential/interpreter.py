"""Runs a program: on the ranks of a job, or in one process that does the work of each rank in turn."""

from __future__ import annotations

import contextlib
import copy
import gc
import re
from collections.abc import Callable, Container, Iterator
from typing import Any

import torch
from hand import Hand
from models import Caught, build
from optimizers import make_optimizer
from programs import Pass, Program
from reference import Ranks, as_tensor, own_of, seed_all, set_own, whole
from stateful import VOCABULARY, WIDTH
from torch import Tensor

import hvd_ckpt as hc
from hvd_ckpt.reduction.gradients import has_values

CLIP = 0.3
RETURNED: dict[str, Callable[[Tensor], Any]] = {  # by closures, of their loss
    "loss": lambda loss: loss,
    "float": Tensor.item,
    "none": lambda loss: None,
    "dict": lambda loss: {"loss": loss},
    "tuple": lambda loss: (loss, 0),
}


class Run:
    """A model in training.

    Args:
        alone: this process does the work of all ranks, with PyTorch's own optimizer and without recomputation.
        recompute: as the program says, or not at all.
        noise: seed of a random change of every reduced gradient, by a unit in the last place of its largest element; 0: none.
        refused: acts that raised an error on some rank, which are left out here.

    Attributes:
        hand: performs the program's acts.
        seen: the losses of each step.
        late: gradients that came after their bucket had left, or were reduced in more than one round.
        reductions: how the gradients of each step were reduced.
    """

    def __init__(
        self,
        program: Program,
        *,
        alone: bool = False,
        recompute: bool = True,
        noise: int = 0,
        refused: Container[tuple[int, ...]] = (),
    ) -> None:
        self.program, self.alone = program, alone
        self.stage = program.stage
        self.ranks = list(range(program.ranks)) if alone else [hc.rank()]
        self.rank = self.ranks[0]
        self.model = build(program, recompute and not alone, alone)
        self.parameters = list(self.model.parameters())
        self.seen: list[Any] = []
        self.late = 0
        self.reductions: list[Any] = []
        owned = self._owned()
        self.groups = {number: [own] for number, own in owned.items() if number >= 0}
        self._added = owned.get(-1, [])
        self._old: list[Any] = []
        self._pending: set[int] = set()  # optimizers that have not stepped since their gradients came
        self._scaler: Any = None
        if program.scaler:
            options: dict[str, Any] = {"init_scale": 64.0, "growth_interval": 2}
            self._scaler = (
                torch.amp.GradScaler("cpu", **options) if alone else hc.GradScaler("cpu", **options)
            )
        self._others = Ranks(self.model, program, noise) if alone else None
        self.hand = Hand(self, refused)
        self.hand.add_hooks(before=True)
        with self._default_dtype():
            self.optimizers = self._make_optimizers()
        self.hand.add_hooks(before=False)
        self._saved = self.state()

    @contextlib.contextmanager
    def _default_dtype(self) -> Iterator[None]:
        before = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, self.program.default_dtype))
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    # ---------------------------------------------------------------------------------- optimizers

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

    def _make_optimizers(self) -> list[Any]:
        return [
            make_optimizer(self.program, self.model, self.groups[number], self.alone)
            for number in sorted(self.groups)
        ]

    def _rewrap(self, keep: bool) -> None:
        if self.stage and not self.alone:
            for optimizer in self.optimizers:
                optimizer.unshard()
        self._old = self.optimizers if keep else []
        self.optimizers = []
        gc.collect()  # on every rank alike
        if self.stage and self._others is not None:  # the model begins as rank 0's
            self._others.broadcast_buffers(0)
            self.clear_gradients(self.parameters, "none")  # as unshard() does
        self.optimizers = self._make_optimizers()

    # ---------------------------------------------------------------------------------- what happens in a step

    def event(self, name: str, *values: Any, replayed: bool = False) -> None:
        """What happens before a step; ``replayed``: to get to the same structure, without what training did to it."""
        if name == "freeze":
            for parameter in self.model.segments[values[0]].parameters():
                parameter.requires_grad_(values[1])
            if self._others is not None:
                self._others.note_flags()
        elif name == "group":
            rate = self.optimizers[0].param_groups[0]["lr"]
            self.groups[0].append(self._added)
            self.clear_gradients(self._added, "none")
            self.optimizers[0].add_param_group({"params": list(self._added), "lr": rate / 2})
        elif name == "rewrap":
            self._rewrap(*values)
        elif name == "contiguous":
            self.model.to(memory_format=torch.contiguous_format)
        elif name == "passes" and not self.alone:
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

    def _restore(self, loaders: tuple[int, ...], root: int, operations: tuple[str, ...]) -> None:
        """Some ranks load what was saved; later each gets what the root has."""
        saved = copy.deepcopy(self._saved)
        loads = self.alone or self.ranks[0] in loaders
        for operation in operations:
            if operation == "load_model" and loads:
                self.model.load_state_dict(saved["model"])
                for rank, own in self._others.own.items() if self._others is not None else ():
                    own["buffers"] = saved["own"][rank]["buffers"]
            elif operation == "load_optimizer" and loads:
                for optimizer, state in zip(self.optimizers, saved["optimizers"]):
                    optimizer.load_state_dict(state)
            elif operation == "broadcast_model" and self._others is not None:
                self._others.broadcast_buffers(root)
            elif operation == "broadcast_model":
                hc.broadcast_parameters(self.model.state_dict(), root_rank=root)
            elif operation == "broadcast_optimizer" and not self.alone:
                for optimizer in self.optimizers:
                    hc.broadcast_optimizer_state(optimizer, root_rank=root)

    def step(self, number: int) -> None:
        """Runs a step of the program."""
        raises = "" if self.alone else self.program.steps[number].raises
        try:
            with self._default_dtype():
                self._step(number)
        except RuntimeError as error:
            if not raises or not re.search(raises, str(error)):
                raise
            self.seen.append([])
            return
        assert not raises, f"step {number} has not raised '{raises}'"
        if not self.alone:
            self._check_launches()

    def _step(self, number: int) -> None:
        step = self.program.steps[number]
        for event in step.events:
            self.event(*event)
        if self._others is not None:
            self._others.seed(number)
        else:
            seed_all(1000 * number + self.ranks[0])
        losses = []
        refused = self.alone and bool(step.raises)  # its passes are all that is left of it
        if step.how == "closure" and not refused:
            returned: list[Any] = []

            def closure() -> Any:
                self._clear(step.clear)
                losses.append(self._backward(number))
                if self._others is not None:
                    self._reduce(0)
                returned.append(RETURNED[step.returns](losses[-1]))
                return returned[-1]

            result = self.optimizers[0].step(closure)
            self._stepped(0)
            if step.returns in ("loss", "float"):
                losses.append(result)
            else:
                assert result is returned[0], f"step() returned {result}, its closure {returned}"
        else:
            self._clear(step.clear)
            self.hand.act(number, "cleared")
            losses.append(self._backward(number))
            self.hand.act(number, "backward")
            self.clear_gradients(
                [p for segment in step.drop for p in self.model.segments[segment].parameters()], "none"
            )
            for optimizer in () if refused else step.optimizers:
                self._finish(number, optimizer, step.how)
            self.hand.act(number, "step")
            self._pending = set(range(len(self.optimizers))) - set(step.optimizers)
            if self._scaler is not None and not refused:
                self._scaler.update()
        self.seen.append([float(loss) for loss in losses])

    def _clear(self, how: str) -> None:
        owned = set()
        for number, optimizer in enumerate(self.optimizers):
            own = self._of(number)
            owned |= own
            if how == "never" or how.startswith("model") or number in self._pending:
                continue
            if self.alone:
                self.clear_gradients(list(own), how)
            elif how == "plain":
                optimizer.zero_grad()
            else:
                optimizer.zero_grad(set_to_none=how == "none")
        if how.startswith("model") and self.alone:
            self.clear_gradients(self.parameters, how)
        elif how.startswith("model"):
            self.model.zero_grad(set_to_none=how == "model")
        self.clear_gradients([p for p in self.parameters if p not in owned], "none")

    def clear_gradients(self, parameters: list[Tensor], how: str) -> None:
        if self._others is not None:
            self._others.clear(parameters, zero=how in ("zero", "model_zero"))
            return
        for parameter in parameters:
            parameter.grad = None

    def _backward(self, number: int) -> Tensor:
        """All backward passes of these ranks; returns the mean loss over them."""
        total = torch.zeros((), dtype=torch.float32)
        passes = self.program.steps[number].passes
        if self._others is None:
            for part, one in enumerate(passes[self.ranks[0]]):
                total += self._pass(number, self.ranks[0], part, one)
                self.hand.act(number, "pass", part)
            return total
        self._others.begin()
        for part in range(max(map(len, passes))):
            self._others.begin_pass()
            for rank in self.program.present(number):
                if part < len(passes[rank]):
                    with self.as_rank(rank):
                        total += self._pass(number, rank, part, passes[rank][part])
            self.hand.act(number, "pass", part)
        return total / len(self.ranks)

    @contextlib.contextmanager
    def as_rank(self, rank: int) -> Iterator[None]:
        """Within it the process is a rank."""
        self.rank = rank
        if self._others is None:
            yield
        else:
            with self._others.as_rank(rank):
                yield

    def _pass(self, number: int, rank: int, part: int, one: Pass) -> Tensor:
        drawn = torch.Generator().manual_seed(100_000 * part + 100 * number + rank)
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

    def _finish(self, number: int, at: int, how: str) -> None:
        """Reduces the gradients of an optimizer, and steps."""
        optimizer, scaler = self.optimizers[at], self._scaler
        if self.alone:
            self._reduce(at)
        if scaler is not None and how in ("clip", "skip", "synchronize"):
            scaler.unscale_(optimizer)
        elif how in ("synchronize", "twice", "warned", "skip") and not self.alone:
            optimizer.synchronize()
        if how in ("synchronize", "warned", "skip"):
            self.hand.act(number, "synchronized")
        if how == "clip":
            if self.alone:
                parameters = [p for group in self.groups[at] for p in group]
                torch.nn.utils.clip_grad_norm_(parameters, CLIP)
            else:
                hc.clip_grad_norm_(optimizer, CLIP)
        if how == "skip":
            pass
        elif scaler is not None:
            scaler.step(optimizer)
        elif how in ("synchronize", "twice") and not self.alone:
            if how == "twice":
                optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
        self._stepped(at)
        if how == "repeat":
            optimizer.step()
            self._stepped(at)

    def _of(self, number: int) -> set[Tensor]:
        """The parameters of an optimizer."""
        return {parameter for group in self.groups[number] for parameter in group}

    def _reduce(self, number: int) -> None:
        assert self._others is not None
        self._others.reduce(self._of(number))

    def _stepped(self, number: int) -> None:
        if self._others is not None:
            self._others.stepped(self._of(number))

    def _check_launches(self) -> None:
        self.reductions.append([optimizer.reduction_stats.last for optimizer in self.optimizers])
        for optimizer in self.optimizers:
            last = optimizer.reduction_stats.last
            often = max(last.launches.values(), default=0)
            assert self.stage > 1 or often <= 1, f"a bucket left {often} times in a step"
            self.late += len(last.late_gradients) + (often > 1)

    # ---------------------------------------------------------------------------------- state

    def _whole(self) -> Any:
        return contextlib.nullcontext() if self.alone else self.optimizers[0].gathered_parameters()

    def _own(self) -> dict[int, dict[str, Any]]:
        return {self.rank: own_of(self.model)} if self._others is None else self._others.own

    def state(self) -> dict[str, Any]:
        """All that a run needs to be resumed, on this rank."""
        with self._whole():
            model = copy.deepcopy(self.model.state_dict())
        state: dict[str, Any] = {"model": model, "own": copy.deepcopy(self._own())}
        state["optimizers"] = [copy.deepcopy(optimizer.state_dict()) for optimizer in self.optimizers]
        state["scaler"] = None if self._scaler is None else dict(self._scaler.state_dict())
        if not self.alone:
            gradients = [parameter.grad for parameter in self.parameters]
            state["gradients"] = [copy.deepcopy(one) if has_values(one) else None for one in gradients]
            state["reduction"] = [copy.deepcopy(one.reduction_state_dict()) for one in self.optimizers]
            if self.stage:
                pieces = [one.weight_pieces() for one in self.optimizers]
                state["pieces"] = copy.deepcopy(pieces)
        return state

    def load(self, state: dict[str, Any]) -> None:
        """Loads the weights and the state of the optimizers."""
        state = copy.deepcopy(state)
        with self._whole():
            self.model.load_state_dict(state["model"])
        if self._others is not None:
            self._others.own = state["own"]
        else:
            set_own(self.model, state["own"][self.rank])
        for number, optimizer in enumerate(self.optimizers):
            optimizer.load_state_dict(state["optimizers"][number])
            if self.stage and not self.alone:
                optimizer.load_weight_pieces(state["pieces"][number])
        if self._scaler is not None:
            self._scaler.load_state_dict(state["scaler"])

    def resumed(self) -> Run:
        """A new run in the state of this one, as after a restart."""
        done = len(self.seen)
        state = self.state()
        new = Run(self.program)
        for step in self.program.steps[:done]:
            for event in step.events:
                new.event(*event, replayed=True)
        new.load(state)
        for number, optimizer in enumerate(new.optimizers):
            optimizer.load_reduction_state_dict(state["reduction"][number])
        following = self.program.steps[done]
        # Only the optimizer's own zero_grad() knows of gradients that a state does not have.
        if following.clear in ("never", "model_zero") or any(
            event[0] == "rewrap" for event in following.events
        ):
            for parameter, gradient in zip(new.parameters, state["gradients"]):
                if gradient is not None or has_values(parameter.grad):
                    parameter.grad = gradient
        new.seen, new.late, new._saved = list(self.seen), self.late, copy.deepcopy(self._saved)
        return new

    def result(self) -> dict[str, Tensor]:
        """The whole weights, and what belongs to this rank (in one process: to each): names that begin with its number."""
        with self._whole():
            values = {name: whole(p) for name, p in self.model.named_parameters()}
        for rank, own in self._own().items():
            parts = [*own["buffers"], *(part for state in own["hidden"] for part in state), *own["random"]]
            values.update({f"{rank}.{number}": as_tensor(value) for number, value in enumerate(parts)})
        return values
