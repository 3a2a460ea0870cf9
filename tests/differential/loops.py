"""Training loops as users of a trainer configure them, drawn at random, and the process that computes the ranks' batches in turn.

:class:`Loop` is the description, :func:`draw_loop` its drawing, and :class:`Reference` what must come out: for each step the
gradients of each rank with that rank's buffers, their mean, and the update. A trainer adds how it is configured from a loop, and
says what its own loop does in another way.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from all_ranks import folder_of_all_ranks
from checking import NOISES, differences, together, tolerance_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

import hvd_ckpt as hc
from hvd_ckpt.utils.own_state import load_own_state, own_state

WIDTH = 4
LIMITS = {"norm": 0.05, "value": 0.01}  # of clipping, which most gradients exceed


@dataclass(frozen=True)
class Loop:
    """A loop over samples of :func:`samples_of`; ``batch`` is that of a rank.

    Attributes:
        precision: ``"32"``, ``"bf16"`` (autocast) or ``"fp16"`` (autocast and a scaler).
        optimizers: the number of parts of the model that are stepped one after the other, each on a loss of its own.
        toggles: whether the parts of the other optimizers are frozen meanwhile.
        clip: ``""``, ``"norm"`` or ``"value"``.
        schedule: ``""``, ``"step"`` (a factor for each step), ``"epoch"`` or ``"plateau"`` (of the validation).
        sampler: the trainer's own (``"trainer"``), the user's DistributedSampler (``"own"``) or batch sampler (``"batches"``).
        running: a layer has state that is neither parameter nor buffer, and that differs between ranks.
        bad: samples whose loss is not finite, so that all ranks skip the step.
        stop: steps after which a callback stops training; 0: none does.
        save: steps after which a checkpoint is saved, from which a second run resumes; 0: none.
    """

    seed: int
    ranks: int
    stage: int = 0
    precision: str = "32"
    optimizer: str = "sgd"
    optimizers: int = 1
    toggles: bool = False
    accumulate: int = 1
    clip: str = ""
    schedule: str = ""
    sampler: str = "trainer"
    shuffle: bool = True
    epochs: int = 2
    samples: int = 24
    batch: int = 2
    batch_norm: bool = False
    running: bool = False
    bad: tuple[int, ...] = ()
    stop: int = 0
    save: int = 0

    @property
    def passes(self) -> int:
        """Batches of a rank in an epoch."""
        return -(-self.samples // self.ranks // self.batch)

    @property
    def steps(self) -> int:
        """Steps of an epoch."""
        return -(-self.passes // self.accumulate)


def draw_loop(seed: int, ranks: int, **fixed: Any) -> Loop:
    """The loop of a seed; ``fixed``: attributes that a trainer does not let users choose."""
    dice = random.Random(f"loop {seed} {ranks}")
    choose = dice.choice
    batch = choose([2, 3, 4])
    rest = choose([0, 0, 2])  # a last batch is smaller, but no batch norm sees one sample
    samples = ranks * (batch * choose([3, 4, 5, 6]) + rest)
    several = dice.random() < 0.25
    loop = Loop(
        seed=seed,
        ranks=ranks,
        stage=choose([0, 0, 0, 1] if several else [0, 0, 1, 2, 3]),
        precision=choose(["32", "32", "32", "bf16", "fp16"]),
        optimizer=choose(["sgd", "momentum", "adamw"]),
        optimizers=choose([2, 3]) if several else 1,
        toggles=several and choose([True, False]),
        accumulate=1 if several else choose([1, 1, 2, 3]),
        clip=choose(["", "", "norm", "value"]),
        schedule=choose(["", "step", "epoch", "plateau"]),
        sampler=choose(["trainer", "trainer", "own", "batches"]),
        shuffle=choose([True, False]),
        epochs=choose([1, 2, 3]),
        samples=samples,
        batch=batch,
        batch_norm=choose([True, False, False]),
        running=choose([True, False, False]),
        bad=tuple(sorted(dice.sample(range(samples), choose([0, 0, 1, 2])))),
    )
    loop = replace(loop, **fixed)
    total = loop.epochs * loop.steps
    return replace(
        loop,
        stop=dice.randrange(1, total + 1) if dice.random() < 0.2 else 0,
        save=dice.randrange(1, total) if total > 1 and dice.random() < 0.5 else 0,
    )


# ------------------------------------------------------------------------------------ data


def samples_of(loop: Loop) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets, and the factor of each sample's loss."""
    generator = torch.Generator().manual_seed(loop.seed)
    inputs = torch.randn(loop.samples, WIDTH, generator=generator)
    factors = torch.ones(loop.samples, 1)
    factors[list(loop.bad)] = float("nan")
    return inputs, inputs.sum(1, keepdim=True), factors


class Batches(BatchSampler):
    """A batch sampler of the user's over a distributed one: it gives the batches of an epoch backwards."""

    def set_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        return reversed(list(super().__iter__()))


def batch_sampler(loop: Loop, rank: int, seed: int = 0) -> Batches:
    """Of the batches of a rank."""
    own = DistributedSampler(range(loop.samples), loop.ranks, rank, loop.shuffle, seed)
    return Batches(own, loop.batch, drop_last=False)


def loader_of(loop: Loop, data: Any, **options: Any) -> DataLoader[Any]:
    """The data loader of this rank, whose sampler is that of the user, or for the trainer to replace."""
    backwards = batch_sampler(loop, hc.rank())
    if loop.sampler == "batches":
        return DataLoader(data, batch_sampler=backwards, **options)
    own = {"sampler": backwards.sampler} if loop.sampler == "own" else {"shuffle": loop.shuffle}
    return DataLoader(data, loop.batch, **own, **options)


# ------------------------------------------------------------------------------------ model


class Running(nn.Module):
    """Divides by a running peak, a number that only ``get_extra_state()`` has."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 1.0

    def get_extra_state(self) -> dict[str, float]:
        return {"peak": self.peak}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.peak = state["peak"]

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.peak = 0.9 * self.peak + 0.1 * float(x.detach().abs().max())
        return x / self.peak


class Net(nn.Module):
    """Some layers, in as many parts as there are optimizers, the same for each seed."""

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        widths = [WIDTH] * (loop.optimizers + 1) + [1]
        self.parts = nn.ModuleList()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(loop.seed)
            for number, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
                normed = loop.batch_norm and number == 0
                # A bias before a batch norm has no gradient but rounding, which Adam would make a step of full size of.
                layers: list[nn.Module] = [nn.Linear(inputs, outputs, bias=not normed)]
                layers += [nn.BatchNorm1d(outputs)] * normed
                layers += [Running()] * (loop.running and number == 0)
                layers += [nn.Tanh()] * (outputs > 1)
                self.parts.append(nn.Sequential(*layers))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x

    def loss(self, x: Tensor, y: Tensor, factor: Tensor, optimizer: int = 0) -> Tensor:
        """The loss of an optimizer."""
        output = self(x)
        return (F.mse_loss(output, y, reduction="none") * factor + 0.1 * optimizer * output).mean()


def optimizers_of(loop: Loop, net: Net) -> list[torch.optim.Optimizer]:
    """The optimizers of the parts; the last one has the last two parts."""
    parts = [*net.parts[: loop.optimizers - 1], net.parts[loop.optimizers - 1 :]]
    if loop.optimizer == "adamw":
        return [torch.optim.AdamW(part.parameters(), 0.02) for part in parts]
    momentum = 0.9 if loop.optimizer == "momentum" else 0.0
    return [torch.optim.SGD(part.parameters(), 0.1, momentum=momentum) for part in parts]


def owned(optimizer: Any) -> list[nn.Parameter]:
    """The parameters of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def schedule_of(loop: Loop, optimizer: torch.optim.Optimizer) -> Any:
    """Its schedule, or None."""
    if loop.schedule == "plateau":
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.2)
    if loop.schedule:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 1 / (1 + 0.3 * count))
    return None


# ------------------------------------------------------------------------------------ one process


class Reference:
    """The loop in one process.

    Args:
        noise: seed of a change of each gradient by up to one unit in the last place of its largest element; 0: none.

    Attributes:
        losses: for each rank, those of its batches.
        rates: the learning rates of the first optimizer, after each step.
    """

    # What a trainer's loop does in another way.
    sampler_seed = 0  # of the trainer's sampler
    mean_of_passes = False  # also in an epoch's last step, which may have fewer passes
    buffers_of_rank_0 = False  # are evaluated, and kept

    def __init__(self, loop: Loop, noise: int = 0) -> None:
        self.loop, self.net = loop, Net(loop)
        self.data = samples_of(loop)
        self.own = [copy.deepcopy(own_state(self.net)) for _ in range(loop.ranks)]
        self.optimizers = optimizers_of(loop, self.net)
        self.schedules = [schedule_of(loop, optimizer) for optimizer in self.optimizers]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=loop.precision == "fp16")
        self.noise = torch.Generator().manual_seed(noise) if noise else None
        self.losses: list[list[float]] = [[] for _ in range(loop.ranks)]
        self.rates: list[float] = []

    def run(self) -> Reference:
        """Runs it to its end."""
        loop = self.loop
        seed = self.sampler_seed if loop.sampler == "trainer" else 0
        samplers = [batch_sampler(loop, rank, seed) for rank in range(loop.ranks)]
        for epoch in range(loop.epochs):
            for sampler in samplers:
                sampler.set_epoch(epoch)
            batches = [list(one)[:: 1 if loop.sampler == "batches" else -1] for one in samplers]
            for at in range(0, len(batches[0]), loop.accumulate):
                for number in range(loop.optimizers):
                    self.step(number, [own[at : at + loop.accumulate] for own in batches])
                self.rates.append(self.optimizers[0].param_groups[0]["lr"])
                self.advance("step")
                if loop.stop == len(self.rates):
                    return self
            self.advance("epoch")
            if loop.schedule == "plateau":
                self.advance("plateau", self.validated())
        return self

    def advance(self, schedule: str, *metric: float) -> None:
        """A step of each schedule, if they are of this kind."""
        for one in self.schedules if self.loop.schedule == schedule else ():
            one.step(*metric)

    def validated(self) -> float:
        """The metric of a schedule on a plateau: the mean of the ranks' losses over all samples, each with its own buffers."""
        x, y, factor = self.data
        losses = []
        self.net.eval()
        for own in self.own[:1] if self.buffers_of_rank_0 else self.own:
            load_own_state(self.net, own)
            with torch.no_grad(), self.autocast():
                losses.append(self.net.loss(x, y, factor.nan_to_num(1.0)).item())
        self.net.train()
        return sum(losses) / len(losses)

    def autocast(self) -> torch.autocast:
        dtype = torch.float16 if self.loop.precision == "fp16" else torch.bfloat16
        return torch.autocast("cpu", dtype, enabled=self.loop.precision != "32", cache_enabled=False)

    def step(self, number: int, batches: list[list[list[int]]]) -> None:
        """A step of an optimizer: ``batches`` of each rank. It is left out if a gradient is not finite."""
        optimizer, loop = self.optimizers[number], self.loop
        parameters = owned(optimizer)
        sums: list[list[Tensor]] = []
        for rank, own in enumerate(batches):
            self.net.zero_grad()
            load_own_state(self.net, self.own[rank])
            for batch in own:
                with self.autocast():
                    loss = self.net.loss(*(values[batch] for values in self.data), number)
                self.losses[rank].append(loss.item())
                divisor = len(own) if self.mean_of_passes else loop.accumulate
                self.scaler.scale(loss / divisor).backward()
            self.own[rank] = copy.deepcopy(own_state(self.net))
            sums.append([parameter.grad.clone() for parameter in parameters])
        for parameter, *gradients in zip(parameters, *sums):
            parameter.grad = sum(gradients[1:], gradients[0]) / len(gradients)
            if self.noise is not None:
                size = parameter.grad.abs().max() * torch.finfo(parameter.dtype).eps
                parameter.grad += size * (2 * torch.rand(parameter.shape, generator=self.noise) - 1)
        if loop.precision == "fp16":
            self.scaler.unscale_(optimizer)
        elif not all(parameter.grad.isfinite().all() for parameter in parameters):
            return
        if loop.clip == "norm":
            nn.utils.clip_grad_norm_(parameters, LIMITS["norm"])
        elif loop.clip == "value":
            nn.utils.clip_grad_value_(parameters, LIMITS["value"])
        self.scaler.step(optimizer)
        self.scaler.update()

    def outcome(self, rank: int) -> dict[str, Tensor]:
        load_own_state(self.net, self.own[0 if self.buffers_of_rank_0 else rank])
        return outcome_of(self.net, self.losses[rank])


def outcome_of(net: nn.Module, losses: list[float]) -> dict[str, Tensor]:
    """Weights, buffers, extra state and losses as tensors."""
    state = {name: value.detach().clone() for name, value in [*net.named_parameters(), *net.named_buffers()]}
    peaks = {name: one.peak for name, one in net.named_modules() if isinstance(one, Running)}
    state |= {name: torch.tensor(peak, dtype=torch.float64) for name, peak in peaks.items()}
    return {**state, "losses": torch.tensor(losses).nan_to_num()}


Run = Callable[..., tuple[Any, list[float]]]
"""Runs a loop, or what is left of it after its checkpoint, which is in a folder; returns the model, with its ``net`` and the
``losses`` of this rank's batches, and the learning rates after each step."""


def check(loop: Loop, run: Run, reference: type[Reference] = Reference) -> list[str]:
    """Runs a loop, and what is left of it after its checkpoint; returns what is wrong, the same on every rank. Collective.

    Tolerates what roundings of gradients do to this loop in one process.
    """
    with folder_of_all_ranks() as folder:
        model, rates = run(loop, folder)
        found, losses = outcome_of(model.net, model.losses), model.losses
        alone, *noisy = (reference(loop, noise).run() for noise in (0, *NOISES))
        expected, *others = (one.outcome(hc.rank()) for one in (alone, *noisy))
        failures = differences("one process", found, expected, tolerance_of(expected, others))
        if rates != alone.rates:
            failures.append(f"one process: rates {rates} in place of {alone.rates}")
        hc.verify(model)
        if loop.save and (not loop.stop or loop.save < loop.stop):
            model, left = run(loop, folder, resume=True)
            if left != rates[loop.save :]:
                failures.append(f"resumed: rates {left} in place of {rates[loop.save :]}")
            found["losses"] = found["losses"][len(losses) - len(model.losses) :]
            failures += differences("resumed", outcome_of(model.net, model.losses), found)
    return together(failures)
