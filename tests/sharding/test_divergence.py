"""Tests of ranks that run different units of a split model: an error on all ranks that names the units, and no hang."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from one_process import wrap
from same import whole_weights
from torch import Tensor, nn
from ways import plainly

import hvd_ckpt as hc
from hvd_ckpt.collectives import asynchronous

pytestmark = pytest.mark.ranks(gloo=(2, 3))


class Experts(nn.Module):
    """Runs the blocks that it is told, by ``around``."""

    def __init__(self, around: Any = plainly) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(6, 6)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))
        self.around = around

    def forward(self, x: Tensor, chosen: Any = range(4)) -> Tensor:
        x = self.first(x)
        for number in chosen:
            x = self.around(self.experts[number], x)
        return x


CHOSEN: dict[str, Any] = {
    "experts": lambda: [hc.rank()],
    "a dropped layer": lambda: [0, 1, 3] if hc.rank() else range(4),
    "an early exit": lambda: range(2 if hc.rank() else 4),
}


def steps(model: nn.Module, optimizer: Any, count: int, chosen: Any) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.ones(2, 6), chosen).sum().backward()
        optimizer.step()


@torch.no_grad()
def evaluate(model: nn.Module, optimizer: Any, count: int, chosen: Any) -> None:
    for _ in range(count):
        model(torch.ones(2, 6), chosen)
    optimizer.synchronize()


@pytest.mark.parametrize("case", CHOSEN)
@pytest.mark.parametrize("kind", ["trained", "recomputed", "evaluated", "frozen"])
def test_the_error_names_ranks_and_units(kind: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asynchronous, "LONG_SECONDS", 1.0)
    model = Experts(hc.checkpoint if kind == "recomputed" else plainly)
    if kind == "frozen":
        model.experts[1].requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = wrap(model, torch.optim.SGD(trained, lr=0.1), shard=3)
    steps(model, optimizer, 2, range(4))
    run = evaluate if kind == "evaluated" else steps
    with pytest.raises(RuntimeError, match=r"rank 0 waits .*rank 1 waits .*units=\[\]") as error:
        run(model, optimizer, 2, CHOSEN[case]())
    assert "'experts." in str(error.value) or "the model, a Experts" in str(error.value)


def test_ranks_that_run_the_whole_model_as_one_unit_may_run_what_they_like() -> None:
    model = Experts()
    optimizer = wrap(model, shard=3, units=[])
    for case in CHOSEN.values():
        steps(model, optimizer, 2, case())


class Apart(nn.ModuleDict):
    """Its modules are called from outside; it has no forward pass."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__({"first": nn.Linear(6, 6), "block": nn.Linear(6, 6), "last": nn.Linear(6, 1)})


@pytest.mark.parametrize("reentrant", [False, True])
def test_modules_outside_of_a_forward_pass_may_be_recomputed_any_number_of_times(reentrant: bool) -> None:
    models = []
    for options in ({}, {"shard": 3, "units": []}):
        model = Apart()
        optimizer = wrap(model, **options)
        for step in range(4):
            optimizer.zero_grad()
            x = model["first"](torch.ones(2, 6) + step)
            for _ in range(1 + step * (1 + hc.rank()) % 4):
                x = hc.checkpoint(model["block"], x, use_reentrant=reentrant)
            model["last"](x).square().mean().backward()
            optimizer.step()
        models.append(whole_weights(model, optimizer))
    torch.testing.assert_close(models[1], models[0])
