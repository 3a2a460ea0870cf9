"""A loop of one's own in a job of Horovod Elastic: ``hc.elastic.TorchState`` around ``hc.DistributedOptimizer``.

Rank 0 writes a line of JSON for the end and for each start and each commit to the file that is given: steps taken, ranks, and
whether all ranks have the same weights. The loop ends at the commit that finds the second file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn

import hvd_ckpt as hc

COMMIT_EVERY, BATCH = 5, 4
TOLD, STOP = Path(sys.argv[1]), Path(sys.argv[2])


def main() -> None:
    hc.init(stall_timeout=60)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1))
    model = hc.CheckpointSequential(model, segments=2)
    optimizer = hc.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-2), model.named_parameters(), bucket_cap_mb=0.001
    )
    state = hc.elastic.TorchState(model=model, optimizer=optimizer, step=0, ranks=hc.size())
    train(state)


@hc.elastic.run
def train(state) -> None:
    for group in state.optimizer.param_groups:
        group["lr"] = 1e-2 * hc.size() / state.ranks
    tell("start", state)
    while True:
        generator = torch.Generator().manual_seed(1000 * state.step + hc.rank())
        batch = torch.randn(BATCH, 8, generator=generator)
        state.optimizer.zero_grad()
        loss = (state.model(batch) - batch.sum(1, keepdim=True)).square().mean()
        loss.backward()
        state.optimizer.step()
        state.step += 1
        if state.step % COMMIT_EVERY == 0:
            tell("commit", state)
            if hc.broadcast_object(STOP.exists(), name="stop"):
                break
            state.commit()
    tell("end", state)


def tell(what: str, state) -> None:
    own = torch.cat([parameter.detach().flatten() for parameter in state.model.parameters()])
    everyone = hc.allgather(own[None], name=f"weights.{what}")
    equal = bool((everyone == everyone[0]).all())
    if hc.rank() == 0:
        with TOLD.open("a", encoding="utf-8") as file:
            record = {"what": what, "step": state.step, "ranks": hc.size(), "equal": equal}
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
