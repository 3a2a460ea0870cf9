"""Runs a program: on the ranks of a job, or in one process that does the work of each rank in turn."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from models import VOCABULARY, WIDTH, Caught, build
from programs import Pass, Program
from torch import Tensor

import hvd_ckpt as hc

OPTIMIZERS: dict[str, Callable[[Any, float], torch.optim.Optimizer]] = {
    "sgd": lambda groups, lr: torch.optim.SGD(groups, lr),
    "momentum": lambda groups, lr: torch.optim.SGD(groups, lr, momentum=0.9),
    "nesterov": lambda groups, lr: torch.optim.SGD(
        groups, lr, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    # With a large eps noise stays noise: it would be divided by its own size.
    "adam": lambda groups, lr: torch.optim.Adam(groups, lr, eps=1e-2),
    "adamw": lambda groups, lr: torch.optim.AdamW(groups, lr, eps=1e-2),
    "adagrad": lambda groups, lr: torch.optim.Adagrad(groups, lr, eps=1e-2),
    "rmsprop": lambda groups, lr: torch.optim.RMSprop(groups, lr, eps=1e-2),
    "lbfgs": lambda groups, lr: torch.optim.LBFGS(
        groups, lr, max_iter=2, tolerance_grad=0, tolerance_change=0
    ),
}
CLIP = 0.3


class Run:
    """A model in training.

    Args:
        alone: this process does the work of all ranks, with PyTorch's own optimizer and without recomputation.
        recompute: as the program says, or not at all.
        noise: seed of a random change of every reduced gradient, by a unit in the last place of its largest element; 0: none.

    Attributes:
        seen: the losses of each step.
        late: gradients that came after their bucket had left, or were reduced in more than one round.
    """

    def __init__(
        self,
        program: Program,
        *,
        alone: bool = False,
        recompute: bool = True,
        noise: int = 0,
    ) -> None:
        self.program, self.alone = program, alone
        self._noise = torch.Generator().manual_seed(noise) if noise else None
        self.stage = program.stage
        self.ranks = list(range(program.ranks)) if alone else [hc.rank()]
        self.model = build(program, recompute and not alone)
        self.parameters = list(self.model.parameters())
        self.seen: list[Any] = []
        self.late = 0
        owned = self._owned()
        if program.shared:
            owned[1] = list(owned[0])
        self._groups = {number: [own] for number, own in owned.items() if number >= 0}
        self._added = owned.get(-1, [])
        self._old: list[Any] = []
        self._pending: set[int] = set()  # optimizers that have not stepped since their gradients came
        self._reduced: set[Tensor] = set()
        self._scaler: Any = None
        if program.scaler:
            options: dict[str, Any] = {"init_scale": 64.0, "growth_interval": 2}
            self._scaler = (
                torch.amp.GradScaler("cpu", **options) if alone else hc.GradScaler("cpu", **options)
            )
        self.optimizers = self._make_optimizers()
        self._gradients: dict[int, list[Tensor | None]] = {
            rank: [None] * len(self.parameters) for rank in self.ranks
        }
        self._summed: dict[int, Tensor] = {}  # gradients as an earlier step has summed them
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        self._buffers = {rank: copy.deepcopy(buffers) for rank in self.ranks}
        self._random = {rank: torch.get_rng_state() for rank in self.ranks}
        self._saved = self.state()

    # ---------------------------------------------------------------------------------- optimizers

    def _owned(self) -> dict[int, list[Tensor]]:
        """The parameters of each optimizer; -1: those that are added later."""
        owners: dict[Tensor, int] = {}
        if self.program.embedding:
            owners[self.model.embedding.weight] = 0
        for owner, chain in zip(self.program.owners, self.model.segments):
            for parameter in chain.parameters():
                owners.setdefault(parameter, owner)
        owned: dict[int, list[Tensor]] = {}
        for parameter, owner in owners.items():
            owned.setdefault(owner, []).append(parameter)
        return owned

    def _make_optimizers(self) -> list[Any]:
        return [self._make_optimizer(number) for number in sorted(self._groups)]

    def _make_optimizer(self, number: int) -> Any:
        options = dict(self.program.options)
        rate = 0.05 / (self.program.ranks if options.get("op") == "sum" else 1)
        groups = [
            {"params": list(group), "lr": rate / (1 + at)} for at, group in enumerate(self._groups[number])
        ]
        if self.program.optimizer == "lbfgs":
            groups = [parameter for group in self._groups[number] for parameter in group]  # type: ignore[misc]
        optimizer = OPTIMIZERS[self.program.optimizer](groups, rate)
        if self.alone:
            return optimizer
        if "op" in options:
            options["op"] = hc.Sum
        if "compression" in options:
            options["compression"] = hc.Compression.fp16
        if options.get("groups") == "segments":
            own = {id(parameter) for group in self._groups[number] for parameter in group}
            taken: set[int] = set()
            options["groups"] = []
            for chain in self.model.segments:
                group = [p for p in chain.parameters() if id(p) in own and id(p) not in taken]
                taken.update(map(id, group))
                if group:
                    options["groups"].append(group)
        if not self.stage:
            for name in ("wire", "master_weights", "offload"):
                options.pop(name, None)
        if self.stage < 2:
            options.pop("wire", None)
        if self.stage:
            options["model"] = self.model
        if self.stage == 3 and self.program.recomputed_as("nested", "sequential", "sequential_reentrant"):
            options["units"] = list(
                dict.fromkeys(self.model.parts)
            )  # which are called apart from their segment
        return hc.DistributedOptimizer(
            optimizer, named_parameters=self.model.named_parameters(), shard=self.stage, **options
        )

    def _rewrap(self, keep: bool) -> None:
        if self.stage and not self.alone:
            for optimizer in self.optimizers:
                optimizer.unshard()
        self._old = self.optimizers if keep else []
        self.optimizers = []
        gc.collect()  # on every rank alike
        if self.stage:  # the model begins as rank 0's
            self._buffers = {rank: copy.deepcopy(self._buffers[self.ranks[0]]) for rank in self.ranks}
        self.optimizers = self._make_optimizers()

    # ---------------------------------------------------------------------------------- what happens in a step

    def event(self, name: str, *values: Any, replayed: bool = False) -> None:
        """What happens before a step; ``replayed``: to get to the same structure, without what training did to it."""
        if name == "freeze":
            for parameter in self.model.segments[values[0]].parameters():
                parameter.requires_grad_(values[1])
        elif name == "group":
            rate = self.optimizers[0].param_groups[0]["lr"]
            self._groups[0].append(self._added)
            for parameter in self._added:
                self._set_gradient(parameter, None)
            self.optimizers[0].add_param_group({"params": list(self._added), "lr": rate / 2})
        elif name == "rewrap":
            self._rewrap(*values)
        elif name == "passes" and not self.alone:
            self.optimizers[0].set_backward_passes_per_step(*values)
        elif name == "rewind" and not replayed:
            self.load(self._saved)
        if name in ("group", "rewrap") and not replayed:
            self._saved = self.state()

    def step(self, number: int) -> None:
        """Runs a step of the program."""
        step = self.program.steps[number]
        for event in step.events:
            self.event(*event)
        for rank in self.ranks:
            torch.manual_seed(1000 * number + rank)
            self._random[rank] = torch.get_rng_state()
        losses = []
        if step.how == "closure":

            def closure() -> Tensor:
                self._clear(step.clear)
                found = self._backward(number)
                if self.alone:
                    self._reduce(0)
                losses.append(found)
                return found

            result = self.optimizers[0].step(closure)
            self._stepped(0)
            losses.append(result)
        else:
            self._clear(step.clear)
            losses.append(self._backward(number))
            for optimizer in step.optimizers:
                self._finish(optimizer, step.how)
            self._pending = set(range(len(self.optimizers))) - set(step.optimizers)
            if self._scaler is not None:
                self._scaler.update()
        self.seen.append([float(loss) for loss in losses])
        if not self.alone:
            self._check_launches()

    def _clear(self, how: str) -> None:
        owned = set()
        for number, optimizer in enumerate(self.optimizers):
            own = {p for group in self._groups[number] for p in group}
            owned |= own
            if how == "never" or number in self._pending:
                continue
            if not self.alone:
                optimizer.zero_grad(set_to_none=how == "none")
                continue
            for parameter in own:
                self._set_gradient(parameter, None if how == "none" or self.stage > 1 else 0.0)
        for parameter in set(self.parameters) - owned:
            self._set_gradient(parameter, None)

    def _set_gradient(self, parameter: Tensor, value: float | None) -> None:
        """For each rank: None, or zeros where there is a gradient."""
        if not self.alone:
            parameter.grad = None
            return
        at = next(at for at, one in enumerate(self.parameters) if one is parameter)
        for gradients in self._gradients.values():
            gradient = gradients[at]
            gradients[at] = None if value is None or gradient is None else torch.zeros_like(gradient)
        self._summed.pop(at, None)

    def _backward(self, number: int) -> Tensor:
        """All backward passes of these ranks; returns the mean loss over them."""
        self._reduced.clear()
        total = torch.zeros(())
        for rank in self.ranks:
            with self._as_rank(rank):
                for part, one in enumerate(self.program.steps[number].passes[rank]):
                    total += self._pass(number, rank, part, one)
        return total / len(self.ranks)

    def _pass(self, number: int, rank: int, part: int, one: Pass) -> Tensor:
        drawn = torch.Generator().manual_seed(100_000 * part + 100 * number + rank)
        model = self.model
        loss = torch.zeros(())

        def inputs() -> Tensor:
            if self.program.embedding:
                return torch.randint(VOCABULARY, (one.batch, 3), generator=drawn)
            return torch.randn(one.batch, WIDTH, generator=drawn).requires_grad_()

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
            if one.kind == "penalty" and one.path:
                (gradient,) = torch.autograd.grad(whole, x, create_graph=True)
                whole = whole + gradient.square().sum()
            whole.backward(retain_graph=one.kind == "twice")
            if one.kind == "twice":
                whole.backward()
        except Caught:
            pass
        finally:
            model.set_trap(None)
        return loss.detach()

    def _finish(self, number: int, how: str) -> None:
        """Reduces the gradients, and steps."""
        optimizer, scaler = self.optimizers[number], self._scaler
        if self.alone:
            self._reduce(number)
        if scaler is not None and how == "clip":
            scaler.unscale_(optimizer)
        if how == "clip":
            if self.alone:
                parameters = [p for group in self._groups[number] for p in group]
                torch.nn.utils.clip_grad_norm_(parameters, CLIP)
            else:
                hc.clip_grad_norm_(optimizer, CLIP)
        if scaler is not None:
            scaler.step(optimizer)
        elif how == "synchronize" and not self.alone:
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
        self._stepped(number)

    def _stepped(self, number: int) -> None:
        """Every rank has the gradients as they were unscaled or clipped; at stages 2 and 3 a step uses them up."""
        if not self.alone:
            return
        own = {p for group in self._groups[number] for p in group}
        for at, parameter in enumerate(self.parameters):
            if parameter in own:
                gradient = None if self.stage > 1 else parameter.grad
                for gradients in self._gradients.values():
                    gradients[at] = None if gradient is None else gradient.clone()
                self._summed.pop(at, None)
                if gradient is not None and self.program.options.get("op") == "sum":
                    self._summed[at] = gradient.clone()

    def _check_launches(self) -> None:
        for optimizer in self.optimizers:
            last = optimizer.reduction_stats.last
            often = max(last.launches.values(), default=0)
            assert self.stage > 1 or often <= 1, f"a bucket left {often} times in a step"
            self.late += len(last.late_gradients) + (often > 1)

    # ---------------------------------------------------------------------------------- in the place of the ranks

    @contextlib.contextmanager
    def _as_rank(self, rank: int) -> Iterator[None]:
        if not self.alone:
            yield
            return
        torch.set_rng_state(self._random[rank])
        for buffer, own in zip(self.model.buffers(), self._buffers[rank]):
            buffer.copy_(own)
        for parameter, gradient in zip(self.parameters, self._gradients[rank]):
            parameter.grad = gradient
        yield
        self._random[rank] = torch.get_rng_state()
        self._buffers[rank] = [buffer.clone() for buffer in self.model.buffers()]
        self._gradients[rank] = [parameter.grad for parameter in self.parameters]

    def _reduce(self, number: int) -> None:
        """Gives each rank, and the parameters, the sums or means of all ranks' gradients."""
        own = {p for group in self._groups[number] for p in group}
        for at, parameter in enumerate(self.parameters):
            if parameter not in own:
                continue
            parts = [self._gradients[rank][at] for rank in self.ranks]
            found = [part.coalesce() if part.is_sparse else part for part in parts if part is not None]
            if not found:
                parameter.grad = None
                continue
            if parameter in self._reduced:
                parameter.grad = found[0].clone()
                continue
            # bfloat16 travels as float32.
            total = found[0].float() if parameter.dtype is torch.bfloat16 else found[0]
            for part in found[1:]:  # what is summed already counts once
                total = total + (part - self._summed[at] if at in self._summed else part)
            if self.program.options.get("op") != "sum":
                total = total / self.program.ranks
            total = total.to(parameter.dtype)
            if total.is_sparse:
                total = total.coalesce()
            if self._noise is not None:
                self._disturb(total.values() if total.is_sparse else total)
            self._reduced.add(parameter)
            for rank in self.ranks:
                self._gradients[rank][at] = total.clone()
            parameter.grad = total.clone()

    def _disturb(self, gradient: Tensor) -> None:
        largest = gradient.abs().max() if gradient.numel() else torch.zeros(())
        if largest.isfinite():
            random = torch.empty(gradient.shape).uniform_(-1, 1, generator=self._noise)
            gradient += (random * largest * torch.finfo(gradient.dtype).eps).to(gradient.dtype)

    # ---------------------------------------------------------------------------------- state

    def _whole(self) -> Any:
        return contextlib.nullcontext() if self.alone else self.optimizers[0].gathered_parameters()

    def state(self) -> dict[str, Any]:
        """All that a run needs to be resumed, on this rank."""
        with self._whole():
            model = copy.deepcopy(self.model.state_dict())
        state: dict[str, Any] = {"model": model, "buffers": copy.deepcopy(self._buffers)}
        state["optimizers"] = [copy.deepcopy(optimizer.state_dict()) for optimizer in self.optimizers]
        state["scaler"] = None if self._scaler is None else dict(self._scaler.state_dict())
        if not self.alone:
            state["gradients"] = [copy.deepcopy(p.grad) for p in self.parameters]
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
        self._buffers = state["buffers"]
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
        for parameter, gradient in zip(new.parameters, state["gradients"]):
            parameter.grad = gradient
        new.seen, new.late, new._saved = list(self.seen), self.late, copy.deepcopy(self._saved)
        return new

    def result(self) -> dict[str, Tensor]:
        """The weights, and the buffers of this rank (``rank.number`` where one process has those of all)."""
        with self._whole():
            weights = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        buffers = self._buffers if self.alone else {self.ranks[0]: list(self.model.buffers())}
        for rank, own in buffers.items():
            weights.update({f"{rank}.{number}": buffer.clone() for number, buffer in enumerate(own)})
        return weights
