"""Trains small models as logical replicas; writes hashes of the weights, the optimizer's state and the losses of each case.

Arguments: the number of replicas, `save` or `resume`, and a folder for the states halfway. The hashes are the same on any number
of ranks, and those of a case whatever is sharded.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import hvd_ckpt as hc
from hvd_ckpt.app.models.densenet import densenet
from hvd_ckpt.app.models.gpt import gpt

STEPS = 4
WIDTH, TOKENS = 12, 16


class Changing(nn.Module):
    """Uses its layers more or less often, some replicas not at all, so that gradients are late or missing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.step = self.replica = 0

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            for _ in range((self.step + self.replica + number) % 3):
                x = layer(x).tanh()
        return self.layers[0](x) if self.replica % 2 else self.layers[1](x)


class Tied(nn.Module):
    """Shares a layer, with dropout and batch norm between its uses, recomputed."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.reentrant = reentrant

    def segment(self, x: Tensor) -> Tensor:
        return functional.dropout(self.norm(self.shared(x)), 0.3, self.training)

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for _ in range(2):
            x = hc.checkpoint(self.segment, x, use_reentrant=self.reentrant)
        return x


def vectors(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(6, WIDTH, generator=generator)
    return x, x.roll(1, 1)


def tokens(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randint(0, TOKENS, (2, 8), generator=generator)
    return x, x.roll(1, 1)


def images(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(4, 3, 8, 8, generator=generator), torch.arange(4)


def squares(output: Tensor, target: Tensor) -> Tensor:
    return (output.float() - target).square().mean()


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, -2), target.flatten())


def small_gpt() -> nn.Module:
    return gpt(vocabulary=TOKENS, length=8, width=16, heads=2, layers=2, dropout=0.1, tied=True)


def half_precision() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).bfloat16()


@dataclass
class Case:
    model: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple[Tensor, Tensor]] = vectors
    loss: Callable[[Tensor, Tensor], Tensor] = squares
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda parameters: torch.optim.SGD(
        parameters, lr=0.1, momentum=0.9
    )
    passes: int = 1  # from the middle on: those after the first one are late there
    clip: float | None = None
    scaler: bool = False
    autocast: bool = False
    shards: tuple[str, ...] = ("none",)
    resumes: bool = True  # from a whole state, which has no master weights


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


BOTH = ("none", "gradients")

CASES = {
    "gpt": Case(small_gpt, tokens, cross_entropy, adamw, shards=("none", "optimizer", "gradients")),
    "gpt under autocast, clipped": Case(
        small_gpt, tokens, cross_entropy, adamw, passes=2, clip=0.5, autocast=True, shards=BOTH
    ),
    "densenet": Case(lambda: densenet(22, classes=4), images, cross_entropy),
    "tied, reentrant": Case(lambda: Tied(True)),
    "tied, two passes": Case(lambda: Tied(False), passes=2, shards=BOTH),
    "changing": Case(Changing, shards=BOTH),
    "bfloat16": Case(half_precision),
    "bfloat16, master weights": Case(half_precision, shards=("optimizer", "gradients"), resumes=False),
    "overflow": Case(lambda: Tied(False), scaler=True, shards=BOTH),
    "large": Case(lambda: nn.Sequential(nn.Linear(WIDTH, 3000), nn.Linear(3000, WIDTH))),
}


def train(case: Case, shard: str, replicas: int, saved: Path, resume: bool) -> str:
    torch.manual_seed(3)
    model = case.model().train()
    optimizer = hc.DistributedOptimizer(
        case.optimizer(model.parameters()),
        named_parameters=model.named_parameters(),
        replicas=replicas,
        bucket_cap_mb=0.001,
        shard=shard,
        model=model,
    )
    scaler = hc.GradScaler("cpu", enabled=case.scaler, init_scale=2.0**10)
    told: list[float] = []
    start = 0
    if resume:
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        optimizer.replicas.load_state_dict(state["replicas"])
        scaler.load_state_dict(state["scaler"])
        told, start = state["told"], STEPS // 2
    for step in range(start, STEPS):
        if step == STEPS // 2 and not resume:
            whole, shared = optimizer.full_state_dict(), optimizer.replicas.state_dict()
            if hc.rank() == 0:
                state = {"model": model.state_dict(), "optimizer": whole, "replicas": shared}
                torch.save({**state, "scaler": scaler.state_dict(), "told": list(told)}, saved)
        optimizer.zero_grad()
        losses = []
        for replica in optimizer.local_replicas():
            with replica:
                losses.append(compute(case, model, scaler, step, replica.index, replicas))
        if case.clip is not None:
            told.append(hc.clip_grad_norm_(model.parameters(), case.clip).item())
        scaler.step(optimizer)
        scaler.update()
        told += [optimizer.replicas.mean(losses), scaler.get_scale()]
    optimizer.replicas.average_buffers()
    digest = hashlib.sha256(str(told).encode())
    state = optimizer.full_state_dict(all_ranks=True)["state"]
    moments = [state[number][name] for number in sorted(state) for name in sorted(state[number])]
    for value in (*model.state_dict().values(), *moments):
        if isinstance(value, Tensor):
            digest.update(value.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def compute(case: Case, model: nn.Module, scaler: Any, step: int, replica: int, replicas: int) -> float:
    """The forward and backward passes of a replica; returns its loss."""
    total, passes = 0.0, case.passes if step >= STEPS // 2 else 1
    for part in range(passes):
        x, y = case.batch(torch.Generator().manual_seed(1000 * step + 10 * replica + part))
        x = x.to(next(model.parameters()).dtype) if x.is_floating_point() else x
        if isinstance(model, Changing):
            model.step, model.replica = step, replica
        with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
            loss = case.loss(model(x), y) / passes
        if case.scaler and step == STEPS - 2 and replica == replicas - 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        total += loss.item()
    return total


def main() -> None:
    hc.init()
    replicas, mode, folder = sys.argv[1:]
    hashes = {}
    for number, (name, case) in enumerate(CASES.items()):
        saved, resume = Path(folder, f"{number}.pt"), mode == "resume"
        found = {
            shard: train(case, shard, int(replicas), saved, resume and case.resumes) for shard in case.shards
        }
        everywhere = hc.allgather_object(found)
        assert len({one for each in everywhere for one in each.values()}) == 1, (name, everywhere)
        hashes[name] = found[case.shards[0]]
    if hc.rank() == 0:
        Path(folder, "hashes.json").write_text(json.dumps(hashes))


main()
