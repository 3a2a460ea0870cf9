"""Trains small models as logical replicas; writes hashes of the weights, the optimizer's state and the losses of each case.

Arguments: the number of replicas, `save` or `resume`, and a folder for the states halfway. The hashes are the same on any number
of ranks, and those of a case whatever is sharded. Whole models: tests/training/test_layouts_launch.py.
"""

from __future__ import annotations

import functools
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
from hvd_ckpt.app.compare.training import fingerprint

STEPS = 4
WIDTH = 12


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

    def __init__(self, reentrant: bool = False) -> None:
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


def layers(width: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)).to(dtype)


sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
adamw = functools.partial(torch.optim.AdamW, lr=1e-2)


@dataclass
class Case:
    model: Callable[[], nn.Module]
    optimizer: Callable[[Any], Any] = sgd
    passes: int = 1  # from the middle on: those after the first one are late there
    clip: float | None = None
    scaler: bool = False
    autocast: bool = False
    shards: tuple[str, ...] = ("none", "gradients")
    resumes: bool = True  # from a whole state, which has no master weights


half = functools.partial(layers, WIDTH, torch.bfloat16)
CASES = {
    "tied, reentrant": Case(lambda: Tied(True), adamw, shards=("none", "optimizer", "gradients")),
    "tied, two passes": Case(Tied, passes=2),
    "under autocast, clipped": Case(Tied, adamw, passes=2, clip=0.5, autocast=True),
    "changing": Case(Changing),
    "bfloat16": Case(half, shards=("none",)),
    "bfloat16, master weights": Case(half, shards=("optimizer", "gradients"), resumes=False),
    "overflow": Case(Tied, scaler=True),
    "large": Case(lambda: layers(3000), shards=("none",)),
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
        for name, part in (("model", model), ("optimizer", optimizer), ("replicas", optimizer.replicas)):
            part.load_state_dict(state[name])
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
    state = optimizer.full_state_dict(all_ranks=True)["state"]
    moments = {f"{number}.{name}": value for number, one in state.items() for name, value in one.items()}
    found = {**model.state_dict(), **moments, "told": torch.tensor(told, dtype=torch.float64)}
    return fingerprint(sorted((name, one) for name, one in found.items() if isinstance(one, Tensor)))[:16]


def compute(case: Case, model: nn.Module, scaler: Any, step: int, replica: int, replicas: int) -> float:
    """The forward and backward passes of a replica; returns its loss."""
    total, passes = 0.0, case.passes if step >= STEPS // 2 else 1
    for part in range(passes):
        generator = torch.Generator().manual_seed(1000 * step + 10 * replica + part)
        x = torch.randn(6, WIDTH, generator=generator).to(next(model.parameters()).dtype)
        y = x.float().roll(1, 1)
        if isinstance(model, Changing):
            model.step, model.replica = step, replica
        with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
            loss = (model(x).float() - y).square().mean() / passes
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
        saved, resume = Path(folder, f"{number}.pt"), mode == "resume" and case.resumes
        found = {shard: train(case, shard, int(replicas), saved, resume) for shard in case.shards}
        everywhere = hc.allgather_object(found)
        assert len({one for each in everywhere for one in each.values()}) == 1, (name, everywhere)
        hashes[name] = found[case.shards[0]]
    if hc.rank() == 0:
        Path(folder, "hashes.json").write_text(json.dumps(hashes))


main()
