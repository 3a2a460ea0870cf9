"""Tests of a pipeline in one process, whose chunks exchange values: gradients, random state and skip connections."""

from __future__ import annotations

import copy
import sys
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
from hvd_ckpt.data.objectives import Batch
from hvd_ckpt.parallel.pipeline.microbatch import Accumulated
from hvd_ckpt.processes import links

sys.path.append(str(SCRIPTS))
import stages as jobs


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


def make(case: str) -> tuple[Any, Batch]:
    make_model, make_batch = jobs.CASES[case]
    torch.manual_seed(3)
    model = make_model()
    return model, make_batch(7)


def accumulated(case: str, micro_batches: int, weight: Any = jobs.weight) -> tuple[Any, Accumulated]:
    """The whole model after a step, and its loss."""
    whole, batch = make(case)
    hc.seed_blocks(whole)
    torch.manual_seed(9)
    found = hc.accumulate(
        lambda part: jobs.loss_of(whole(*part.inputs, **part.shared), part.targets),
        batch,
        micro_batches,
        weight=weight,
    )
    return whole, found


def assert_same_step(model: nn.Module, whole: nn.Module) -> None:
    assert_same(gradients(model), gradients(whole))
    assert_same(model.state_dict(), whole.state_dict())


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
def test_gradients_are_those_of_accumulate(case: str, schedule: str, virtual: int, checkpoint: str) -> None:
    whole, expected = accumulated(case, 4)
    state = torch.get_rng_state()
    model, batch = make(case)
    model = hc.Pipeline(model, chunks=4, schedule=schedule, virtual_stages=virtual, checkpoint=checkpoint)
    torch.manual_seed(9)
    found = model.accumulate(batch, jobs.loss_of, weight=jobs.weight)
    assert torch.equal(found.loss, expected.loss) and found.weight == expected.weight
    assert_same_step(model, whole)
    assert torch.equal(state, torch.get_rng_state())


PLANNED = ("transformer", "batch norm", "mixed values", "frozen blocks")


@pytest.mark.parametrize(
    ("case", "schedule", "virtual", "budget"),
    [
        *((case, "1f1b", 1, "min") for case in PLANNED),
        ("transformer", "gpipe", 2, "min"),
        ("mixed values", "interleaved", 2, None),
    ],
)
def test_gradients_with_a_plan_are_those_of_accumulate(
    case: str, schedule: str, virtual: int, budget: str | None, quick_planner: None, tmp_path: Path
) -> None:
    whole, _ = accumulated(case, 4)
    model, batch = make(case)
    for name, block in list(model._modules.items()):  # a plan needs a block of its own at each place
        model._modules[name] = copy.deepcopy(block)
    part = batch.split(4)[0]
    jobs.plan_of(model, part, budget, stages=1, schedule=schedule, virtual_stages=virtual).save(
        tmp_path / "plan.json"
    )
    plan = hc.Plan.load(tmp_path / "plan.json")
    assert plan.pipeline is not None
    if budget is not None:
        dropped = [block.policy.title for block in plan.blocks if block.policy.title != "keep"]
        assert dropped or any(part.recompute for part in plan.pipeline.parts)
    model = hc.Pipeline(model, plan=plan)
    torch.manual_seed(9)
    model.accumulate(batch, jobs.loss_of, weight=jobs.weight)
    assert_same_step(model, whole)


def test_skips_of_a_recomputed_sequential() -> None:
    found = []
    for segments in (1, 3):
        model, batch = make("skips")
        hc.seed_blocks(model)
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


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_dropout_at_several_places_draws_by_its_place(checkpoint: str) -> None:
    def make_chain() -> nn.Sequential:
        torch.manual_seed(3)
        drop = nn.Dropout(0.5)
        return nn.Sequential(nn.Linear(8, 8), drop, nn.Linear(8, 8), drop, nn.Linear(8, 8), drop)

    batch = torch.randn(4, 8), torch.randn(4, 8)
    whole = hc.seed_blocks(make_chain())
    torch.manual_seed(9)
    hc.accumulate(lambda part: F.mse_loss(whole(part[0]), part[1]), batch, 2)
    model = hc.Pipeline(
        make_chain(), [3, 3], chunks=2, schedule="interleaved", virtual_stages=2, checkpoint=checkpoint
    )
    torch.manual_seed(9)
    model.accumulate(batch, F.mse_loss)
    assert_same(gradients(model), gradients(whole))


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


def test_what_does_not_fit_is_refused() -> None:
    model, batch = make("transformer")
    for arguments in ({"balance": [3, 4]}, {"balance": [7]}, {"schedule": "2f2b"}, {"virtual_stages": 0}):
        with pytest.raises(ValueError, match="balance|schedule|virtual_stages"):
            hc.Pipeline(model, chunks=4, **arguments)
    with pytest.raises(TypeError, match="Linear"):
        hc.Pipeline(nn.Linear(2, 2), chunks=4)
    pipeline = hc.Pipeline(model, chunks=4)
    with pytest.raises(TypeError, match="'surprise'"):
        pipeline(*batch.inputs, surprise=1)


def test_a_model_with_skips_is_not_planned() -> None:
    model, batch = make("skips")
    with pytest.raises(ValueError, match="Block '.*' pops the skip connection '.*'"):
        hc.plan(model, *batch.inputs)


def test_skips_without_a_partner_are_refused() -> None:
    for blocks in ([jobs.Down()], [jobs.Up(), jobs.Down()], [jobs.Down(), jobs.Down(), jobs.Up()]):
        with pytest.raises(ValueError, match="'skip'"):
            hc.Pipeline(nn.Sequential(*blocks), chunks=2)


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
