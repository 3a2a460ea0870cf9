"""A job with tensor parallelism that saves, or one of another shape that resumes. Arguments: folder, save or resume, stages,
tensor, shard, and "same" where the next step has the bits of the job that saved."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from tensor_models import LENGTH, SIZES, assert_close, batch_of
from torch import Tensor, nn
from torch.nn import functional

import hvd_ckpt as hc
from hvd_ckpt.app.models.gpt import gpt
from hvd_ckpt.processes.grid import current
from hvd_ckpt.utils.cuts import cut_of

folder, mode, stages, tensor, shard = Path(sys.argv[1]), *sys.argv[2:3], *map(int, sys.argv[3:5]), sys.argv[5]
hc.init(stages=stages, tensor=tensor, stall_timeout=100)


def loss_of(scores: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


def step_of(model: Any, optimizer: Any, number: int) -> None:
    tokens, _, targets = batch_of("gpt", number)
    tokens, targets = (
        hc.broadcast(one, 0, name="batch") for one in (tokens, targets)
    )  # the same on all replicas
    optimizer.zero_grad()
    if stages > 1:
        model.accumulate((tokens, targets), loss_of)
    else:
        loss_of(model(tokens), targets).backward()
    optimizer.step()


def whole_weights(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    grid, weights = current(), dict[str, Tensor]()
    with optimizer.gathered_parameters():
        own = {name: (cut_of(one), one.detach().clone()) for name, one in model.named_parameters()}
    rows = grid.gather_objects(own)
    for stage in range(grid.stages):
        parts = rows[stage * grid.tensor : (stage + 1) * grid.tensor]
        for name, (cut, one) in parts[0].items():
            weights[name] = one if cut is None else cut.whole([part[name][1] for part in parts])
    return weights


torch.manual_seed(3 if mode == "save" else 4)
model: Any = gpt(**SIZES, length=LENGTH, dropout=0.0, tied=stages == 1 and "tied" in sys.argv)
if tensor > 1:
    model = hc.tensor_parallel(model)
if stages > 1:
    model = hc.Pipeline(model, chunks=1)
optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
optimizer = hc.DistributedOptimizer(optimizer, model.named_parameters(), model=model, shard=shard)
with hc.Snapshots(folder / "run", model=model, optimizer=optimizer) as snapshots:
    assert snapshots.resume() == (0 if mode == "save" else 2)
    if mode == "save":
        for number in range(2):
            step_of(model, optimizer, number)
        snapshots.save(2)
        snapshots.wait()
    now = whole_weights(model, optimizer)
    step_of(model, optimizer, 2)
    then = whole_weights(model, optimizer)
    if mode == "save" and current().number == 0:
        torch.save((now, then), folder / "expected.pt")
    if mode == "resume":
        expected, expected_then = torch.load(folder / "expected.pt")
        assert expected.keys() == now.keys()
        for name in now:
            assert torch.equal(now[name], expected[name]), f"{name} is not what was saved"
            if "same" in sys.argv:
                assert torch.equal(then[name], expected_then[name]), f"{name} differs after a step"
            moved = then[name] - now[name]  # by the moments of AdamW, too
            big = (expected_then[name] - now[name]).abs() > 1e-4
            assert_close(moved[big], (expected_then[name] - now[name])[big], f"the step of {name}") if (
                "key" not in name and "project.bias" not in name
            ) else None
print("equal", flush=True)
