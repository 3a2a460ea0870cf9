"""Tests of a pipeline on one rank, whose chunks exchange values: training, random state and skip connections."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from controllers import SCRIPTS
from same import assert_same, gradients
from torch import Tensor, nn
from torch.nn import functional as F

import hvd_ckpt as hc
from hvd_ckpt.processes import links

sys.path.append(str(SCRIPTS))
import stages as jobs

pytestmark = pytest.mark.ranks(gloo=(1,))


class Noted(nn.Module):
    """Drops some of its input, and notes which."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.rand_like(x)
        self.masks.append(mask.detach())
        return x * mask


class Root(nn.Module):
    """Its derivative at zero is infinite."""

    def forward(self, x: Tensor) -> Tensor:
        return x.square().sqrt()


SCHEDULES = [("gpipe", 3), ("1f1b", 1), ("interleaved", 2)]


@pytest.mark.parametrize(
    ("case", "schedule", "virtual", "checkpoint"),
    [
        *(("mixed values", *how, kept) for how in SCHEDULES for kept in jobs.CHECKPOINTS),
        *(
            (case, *how, kept)
            for case in jobs.CASES
            if case != "mixed values"
            for how, kept in zip(SCHEDULES, jobs.CHECKPOINTS)
        ),
    ],
)
def test_training_has_the_bits_of_the_whole_model(
    case: str, schedule: str, virtual: int, checkpoint: str
) -> None:
    jobs.check(case, {"schedule": schedule, "virtual_stages": virtual, "checkpoint": checkpoint})


PLANNED = ("transformer", "batch norm", "mixed values", "frozen blocks")


@pytest.mark.parametrize(
    ("case", "schedule", "virtual", "budget"),
    [
        *((case, "1f1b", 1, "min") for case in PLANNED),
        ("transformer", "gpipe", 2, "min"),
        ("mixed values", "interleaved", 2, None),
    ],
)
def test_training_with_a_plan_has_the_bits_of_the_whole_model(
    case: str, schedule: str, virtual: int, budget: str | None, quick_planner: None, tmp_path: Path
) -> None:
    make_model, make_batch = jobs.CASES[case]

    def apart() -> nn.Sequential:
        model = make_model()
        for name, block in list(model._modules.items()):  # a plan needs a block of its own at each place
            model._modules[name] = copy.deepcopy(block)
        return model

    data = jobs.batches(make_batch)
    how = {"stages": 1, "schedule": schedule, "virtual_stages": virtual}
    jobs.plan_of(apart(), data[0].split(4)[0], budget, **how).save(tmp_path / "plan.json")
    plan = hc.Plan.load(tmp_path / "plan.json")
    assert plan.pipeline is not None
    if budget is not None:
        dropped = [block.policy.title for block in plan.blocks if block.policy.title != "keep"]
        assert dropped or any(part.recompute for part in plan.pipeline.parts)
    assert not jobs.differences(jobs.train(make_model, data), jobs.train(apart, data, {"plan": plan}))


def test_skips_of_a_recomputed_sequential() -> None:
    found, batch = [], jobs.rows(7)
    for segments in (1, 3):
        torch.manual_seed(3)
        model = hc.seed_blocks(jobs.skips())
        torch.manual_seed(9)
        output = hc.checkpoint_sequential(model, segments, *batch.inputs, keep_last=False)
        jobs.loss_of(output, batch.targets).backward()
        found.append(gradients(model))
    assert_same(*found)


@pytest.mark.parametrize(
    ("checkpoint", "runs"), [("always", 24), ("except_last", 18), ("never", 12), ("auto", 12)]
)
@pytest.mark.parametrize("shared", [False, True], ids=["", "shared"])
def test_blocks_and_micro_batches_draw_different_numbers(shared: bool, checkpoint: str, runs: int) -> None:
    blocks = [Noted(), Noted(), Noted()]
    if shared:  # one block at two places
        blocks[2] = blocks[0]
    model = hc.Pipeline(nn.Sequential(*blocks), chunks=2, checkpoint=checkpoint)
    for _ in range(2):
        model.accumulate(
            (torch.ones(4, 50, requires_grad=True), torch.ones(4)), lambda output, _: output.mean()
        )
    masks = [tuple(mask.flatten().tolist()) for block in model.children() for mask in block.masks]
    assert len(set(masks)) == 2 * 3 * 2  # steps, blocks, micro-batches
    assert len(masks) == runs


def test_a_micro_batch_without_terms_adds_nothing_in_earlier_chunks() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), Root(), nn.Linear(3, 3), nn.Linear(3, 3))
    pipeline = hc.Pipeline(model, [2, 2], chunks=2, schedule="interleaved", virtual_stages=2)
    inputs = torch.cat([torch.zeros(2, 3), torch.ones(2, 3)])
    pipeline.accumulate(
        (inputs, torch.tensor([0.0, 0.0, 1.0, 1.0])),
        lambda output, _: output.mean(),
        weight=lambda part: part[1].sum(),
    )
    assert all(one is not None and one.isfinite().all() for one in gradients(pipeline))


def test_a_recomputation_with_other_values_names_the_chunk() -> None:
    class Counted(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return (x * self.calls).tanh()

    model = hc.Pipeline(nn.Sequential(nn.Linear(3, 3), Counted()), chunks=1, checkpoint="always")
    with pytest.raises(hc.RecomputationMismatch, match=r"segment 1 of 1 \(layers 0 to 1: Linear, Counted\)"):
        model.accumulate((torch.randn(4, 3), torch.randn(4, 3)), F.mse_loss)


def test_what_does_not_fit_is_refused() -> None:
    batch, linear = jobs.tokens(7), nn.Linear(2, 2)

    def pipeline(*blocks: nn.Module, **arguments: Any) -> hc.Pipeline:
        return hc.Pipeline(
            nn.Sequential(*blocks) if blocks else jobs.transformer(), **{"chunks": 4, **arguments}
        )

    def accumulate(loss_fn: Any = jobs.loss_of, given: Any = batch) -> Any:
        return pipeline().accumulate(given, loss_fn)

    def without_gradients() -> None:
        with torch.no_grad():
            accumulate()

    refused: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        *((ValueError, "balance", lambda wrong=wrong: pipeline(balance=wrong)) for wrong in ([3, 4], [7], 6)),
        (ValueError, "schedule", lambda: pipeline(schedule="2f2b")),
        (ValueError, "virtual_stages", lambda: pipeline(virtual_stages=0)),
        (TypeError, "plan must be a plan of hc.plan", lambda: hc.Pipeline(jobs.transformer(), plan=3)),
        (TypeError, "Linear", lambda: hc.Pipeline(linear, chunks=4)),
        (TypeError, "Linear", lambda: hc.seed_blocks(linear)),
        (ValueError, "at least one block", lambda: hc.Pipeline(nn.Sequential(), chunks=4)),
        (ValueError, "'0.weight' has no shape yet", lambda: pipeline(nn.LazyLinear(2))),
        (TypeError, "'surprise'", lambda: pipeline()(*batch.inputs, surprise=1)),
        (TypeError, "a batch of a pipeline is", lambda: accumulate(given={"x": batch.inputs[0]})),
        (TypeError, "a batch of a pipeline is", lambda: accumulate(given=(*batch.inputs, batch.targets, 3))),
        (TypeError, "a batch of a pipeline is", lambda: accumulate(given=batch.inputs[0])),
        (TypeError, "loss_fn must be a function", lambda: accumulate(None)),
        (RuntimeError, "without a gradient", lambda: accumulate(lambda *both: jobs.loss_of(*both).detach())),
        (RuntimeError, "no_grad", without_gradients),
        (ValueError, "'skip'", lambda: pipeline(jobs.Down())),
        (ValueError, "'skip'", lambda: pipeline(jobs.Up(), jobs.Down())),
        (ValueError, "'skip'", lambda: pipeline(jobs.Down(), jobs.Down(), jobs.Up())),
        (
            ValueError,
            "Block '.*' pops the skip connection",
            lambda: hc.plan(jobs.skips(), *jobs.rows(7).inputs),
        ),
    ]
    for error, said, call in refused:
        with pytest.raises(error, match=said):
            call()
    assert not linear._forward_pre_hooks


@pytest.mark.parametrize("make_norm", [nn.BatchNorm1d, hc.DeferredBatchNorm])
def test_statistics_of_places_in_several_chunks_are_refused(make_norm: type[nn.Module]) -> None:
    batch = torch.randn(8, 3), torch.randn(8, 3)
    norm = make_norm(3)
    model = nn.Sequential(nn.Linear(3, 3), norm, nn.Linear(3, 3), norm)
    in_one = hc.Pipeline(copy.deepcopy(model), [1, 3], chunks=2, schedule="interleaved", virtual_stages=2)
    in_one.accumulate(batch, F.mse_loss)
    in_two = hc.Pipeline(model, [2, 2], chunks=2, schedule="interleaved", virtual_stages=2)
    norm.eval()
    in_two.accumulate(batch, F.mse_loss)
    norm.train()
    with pytest.raises(ValueError, match="'1' updates its buffers in chunks 0, 1"):
        in_two.accumulate(batch, F.mse_loss)


def test_outputs_without_dimensions_become_a_vector_of_micro_batches() -> None:
    class Mean(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x.mean()

    model = hc.Pipeline(nn.Sequential(nn.Linear(2, 3), Mean()), chunks=2).eval()
    inputs = torch.randn(5, 2)
    rows, means = model(inputs)
    assert rows.shape == (5, 3)
    torch.testing.assert_close(means, torch.stack([rows[:3].mean(), rows[3:].mean()]))


def test_an_mpi_for_one_thread_is_refused() -> None:
    mpi = SimpleNamespace(THREAD_MULTIPLE=3, Is_initialized=lambda: True, Query_thread=lambda: 1)
    with pytest.raises(RuntimeError, match="MPI_THREAD_MULTIPLE"):
        links.enter(2, lambda: mpi)
