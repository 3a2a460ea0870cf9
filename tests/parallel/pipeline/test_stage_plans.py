"""Tests of plans for pipeline stages: the best cuts and checkpoint policies within the memory of each stage."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from chains import network
from residual import Residual
from torch import Tensor, nn

import hvd_ckpt as hc
from hvd_ckpt.parallel.pipeline.balance import balance_costs, block_costs
from hvd_ckpt.parallel.pipeline.stages import StageLayout, StagePlanner
from hvd_ckpt.planning.blocks import children_of
from hvd_ckpt.planning.chain import Block, Choice, Run, simulate
from hvd_ckpt.planning.planner import Planner
from hvd_ckpt.utils.memory import recording_marks

KIB = 1024


BEFORE = Block((Choice(0.0, 5000, 5000, 5000),), 5000, 0.0, 5000)
BEHIND = Block((Choice(0.001, 0, 1_000_000, 1_000_000),), 0, 0.0, 0)
"""What runs before and behind the blocks of a measured chain."""


def made(
    generator: random.Random, blocks: int, layout: StageLayout
) -> tuple[StagePlanner, list[Block], list[nn.Module]]:
    inner = network(generator, blocks, 2, joins=True)
    modules: list[nn.Module] = [nn.Linear(generator.randint(1, 600), 500) for _ in inner]
    return StagePlanner([BEFORE, *inner, BEHIND], modules, layout), inner, modules


def exhaustive(inner: list[Block], modules: list[nn.Module], layout: StageLayout, limit: float) -> float:
    """The seconds of the shortest longest stage over all cuts, policies and stages that are recomputed as a whole."""
    best = math.inf
    for cuts in itertools.combinations(range(1, len(inner)), layout.stages - 1):
        longest = 0.0
        for stage, (first, end) in enumerate(itertools.pairwise((0, *cuts, len(inner)))):
            last = end == len(inner)
            given = inner[first - 1].output if first else 0
            sent = 0 if last else inner[end - 1].output
            count = min(layout.stages - stage, layout.micro_batches)
            if layout.schedule == "gpipe":
                count = layout.micro_batches
            fixed = 4 * sum(one.nbytes for module in modules[first:end] for one in module.parameters())
            fixed += layout.micro_batches * given + sent + count * (given + 5000)
            fastest = math.inf
            for choices in itertools.product(range(2), repeat=end - first):
                runs = tuple(Run(index, choice) for index, choice in enumerate(choices))
                # As a whole, the output is held while it is recomputed.
                for kept, held in ((runs, 0), ((runs,), inner[end - 1].output)):
                    blocks = [*inner[first:end], *([BEHIND] * last)]
                    peak, seconds = simulate(blocks, [*kept, *([Run(end - first, 0)] * last)], count)
                    if fixed + peak + held <= limit:
                        fastest = min(fastest, seconds)
            longest = max(longest, fastest)
        best = min(best, longest)
    return best


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_stages_are_the_best_of_all_cuts_and_policies(schedule: str) -> None:
    generator = random.Random(4)
    recomputed = 0
    for _ in range(12):
        layout = StageLayout(generator.randint(2, 3), 4, schedule)
        planner, inner, modules = made(generator, generator.randint(layout.stages, 5), layout)
        most = max(planner.baseline.memory)
        for limit in (planner.smallest, (planner.smallest + most) // 2, most):
            pipeline, choices = planner.pipeline(limit)
            assert max(pipeline.memory) <= limit and len(choices) == len(inner) == sum(pipeline.balance)
            longest = max(part.seconds for part in pipeline.parts)
            assert longest <= 1.01 * exhaustive(inner, modules, layout, limit)
            recomputed += sum(part.recompute for part in pipeline.parts)
            if schedule == "1f1b":
                assert not pipeline.parts[-1].recompute
        assert exhaustive(inner, modules, layout, 0.98 * planner.smallest) == math.inf
    assert recomputed


def test_parts_of_an_interleaved_schedule_share_the_budget() -> None:
    layout = StageLayout(2, 4, "interleaved", 2)
    planner, _, _ = made(random.Random(5), 8, layout)
    pipeline, _ = planner.pipeline(planner.smallest)
    assert len(pipeline.parts) == 4 and pipeline.virtual_stages == 2
    assert all(2 * part.memory <= planner.smallest for part in pipeline.parts)
    assert [part.in_flight for part in pipeline.parts] == [4, 3, 2, 1]


def test_a_tied_parameter_is_counted_on_each_of_its_stages() -> None:
    inner = network(random.Random(6), 4, 2, joins=False)
    modules: list[nn.Module] = [nn.Linear(8, 8, bias=False) for _ in inner]
    states = {}
    for tied in (False, True):
        if tied:
            modules[3].weight = modules[0].weight
        pipeline, _ = StagePlanner([BEFORE, *inner, BEHIND], modules, StageLayout(2, 4)).pipeline(math.inf)
        states[tied] = [part.state_bytes for part in pipeline.parts]
    size = 8 * 8 * 4
    assert sum(states[False]) == 4 * 4 * size
    assert states[True] == [one + size for one in states[False]]  # the gradient of the other copy


# ------------------------------------------------------------------------------------ measured models


def loss_of(output: Tensor, targets: object = None) -> Tensor:
    return output.square().mean()


def chain(blocks: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Residual() for _ in range(blocks)))


@pytest.fixture(scope="module")
def planner() -> Planner:
    """Whatever this machine measures, no recomputation takes two seconds a block, and each other policy a little longer."""

    def seconds(runner: Any, policies: Any, least: Any, least_rounds: int = 3) -> list[float]:
        return [2.0 + 0.1 * number for number in range(len(policies))]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hvd_ckpt.planning.kinds.BlockRunner.seconds", seconds)
        model = chain()
        return Planner(model, torch.randn(512, 16), loss=loss_of, blocks=children_of(model))


def test_each_stage_has_its_own_micro_batches_in_flight_and_states(planner: Planner) -> None:
    parameters = sum(one.nbytes for one in chain().parameters())
    for schedule, scale, in_flight in (("1f1b", 2.0, [3, 2, 1]), ("gpipe", 4.0, [6, 6, 6])):
        plan = planner.plan_parts(StageLayout(3, 6, schedule, param_scale=scale), None)
        assert plan.pipeline is not None and plan.predicted.peak_bytes == max(plan.pipeline.memory)
        assert [part.in_flight for part in plan.pipeline.parts] == in_flight
        assert sum(part.state_bytes for part in plan.pipeline.parts) == scale * parameters


def test_a_budget_that_is_too_small_names_the_smallest_that_works(planner: Planner) -> None:
    layout = StageLayout(2, 8, "gpipe")
    with pytest.raises(hc.BudgetError) as caught:
        planner.plan_parts(layout, 10 * KIB)
    smallest = caught.value.smallest
    assert str(smallest) in str(caught.value) and "\n" not in str(caught.value)
    plan = planner.plan_parts(layout, smallest)
    assert plan.pipeline is not None and plan.predicted.peak_bytes <= smallest == plan.budget
    assert caught.value.nearest is not None and caught.value.nearest.pipeline == plan.pipeline
    with pytest.raises(hc.BudgetError):
        planner.plan_parts(layout, smallest - 1)


def test_budgets_in_words(planner: Planner) -> None:
    layout = StageLayout(2, 8)
    fastest = planner.plan_parts(layout, None).pipeline
    half = planner.plan_parts(layout, "0.8x")
    smallest = planner.plan_parts(layout, "min").pipeline
    assert half.budget == int(0.8 * half.baseline.peak_bytes) >= half.predicted.peak_bytes
    assert fastest is not None and smallest is not None
    longest = [max(part.seconds for part in one.parts) for one in (fastest, smallest)]
    assert longest[1] <= 2 * longest[0] and max(smallest.memory) <= max(fastest.memory)


@pytest.mark.parametrize(("schedule", "budget"), [("gpipe", None), ("gpipe", "min"), ("1f1b", "min")])
def test_the_activations_of_a_stage_are_those_predicted(
    planner: Planner, schedule: str, budget: str | None
) -> None:
    """Of one stage in this process, with all micro-batches in flight (GPipe) or one."""
    count = 4
    plan = planner.plan_parts(StageLayout(1, count, schedule), budget)
    assert plan.pipeline is not None
    (part,) = plan.pipeline.parts
    assert part.recompute == (schedule == "gpipe" and budget == "min")
    model = hc.Pipeline(chain(), plan=plan)
    batch = torch.randn(count * 512, 16), torch.zeros(count * 512)
    model.accumulate(batch, loss_of)  # makes the gradients
    with recording_marks(torch.device("cpu")) as marks:
        model.accumulate(batch, loss_of)
        marks.mark("end")
    measured = marks.marks[-1].peak_bytes
    assert 0.8 * part.activation_bytes <= measured <= 1.05 * part.activation_bytes


def test_models_without_a_chain_of_blocks_are_refused(quick_planner: None) -> None:
    x, twice = torch.randn(4, 16), Residual()
    for model, stages, said in (
        (Residual(), 2, "Residual"),
        (nn.Sequential(twice, Residual(), twice), 2, "'0'"),
        *((chain(2), stages, "2 blocks") for stages in (3, 1 << 20)),  # before a schedule of all is made
    ):
        with pytest.raises(ValueError, match=said):
            hc.plan(model, x, layout=hc.StageLayout(stages))
    for name, value in {
        "stages": 0,
        "chunks": 0,
        "schedule": "2f2b",
        "virtual_stages": 2,
        "param_scale": "4",
    }.items():
        with pytest.raises(ValueError, match=name.split("_")[0]):
            hc.StageLayout(**{"stages": 2, name: value})


def test_a_pipeline_takes_a_plan_for_its_stages_alone(planner: Planner) -> None:
    plan, other = (planner.plan_parts(StageLayout(stages, 2), None) for stages in (1, 2))
    assert hc.Pipeline(chain(), plan=plan).balance == [6]
    refused: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: hc.Pipeline(chain(), plan=plan, chunks=3), ValueError, "chunks"),
        (lambda: hc.Pipeline(chain(), plan=plan, checkpoint="never"), ValueError, "checkpoint"),
        (lambda: hc.Pipeline(chain()), ValueError, "chunks"),
        (lambda: hc.Pipeline(chain(), plan=other), hc.PlanError, "2 stages"),
        (lambda: hc.Pipeline(chain(5), plan=plan), hc.PlanError, "6|blocks|module"),
    ]
    for call, error, said in refused:
        with pytest.raises(error, match=said):
            call()


class Slow(Residual):
    """Takes much longer than the others."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        for _ in range(200):
            x = super().forward(x)
        return x


def test_cuts_by_measured_time_and_bytes() -> None:
    model = nn.Sequential(Slow(), Slow(), *chain(2))
    assert balance_costs(block_costs("time", model, torch.randn(256, 16), seconds=0.05), 2) == [1, 3]
    model = nn.Sequential(*chain(), nn.Linear(16, 20000), nn.Linear(20000, 16))
    costs = block_costs("size", model, torch.randn(1, 16))
    assert balance_costs(costs, 2) == [7, 1]
    assert balance_costs(costs, 3) == [6, 1, 1]
    assert all(one.grad is None for one in model.parameters())
    with pytest.raises(ValueError, match="8 blocks"):
        balance_costs(costs, 9)


def test_a_tied_parameter_counts_in_its_first_block() -> None:
    blocks = [nn.Linear(8, 8, bias=False) for _ in range(4)]
    blocks[3].weight = blocks[0].weight
    pipeline = hc.Pipeline(nn.Sequential(*blocks), chunks=1, schedule="interleaved", virtual_stages=2)
    assert pipeline.balance == [1, 3]
