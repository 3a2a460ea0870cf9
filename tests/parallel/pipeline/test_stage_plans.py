"""Tests of plans for pipeline stages: the best cuts and checkpoint policies within the memory of each stage."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

import pytest
import torch
from chains import network
from torch import Tensor, nn
from torch.nn import functional

import hvd_ckpt as hc
from hvd_ckpt.parallel.pipeline.balance import balance_costs, block_costs
from hvd_ckpt.parallel.pipeline.stages import StageLayout, StagePlanner
from hvd_ckpt.planning.blocks import children_of
from hvd_ckpt.planning.chain import Block, Choice, Run, simulate
from hvd_ckpt.planning.planner import Planner
from hvd_ckpt.planning.solver import Solver
from hvd_ckpt.utils.memory import recording_marks

KIB = 1024


def ways_of(chain: list[Block], in_flight: int) -> Iterator[tuple[int, float]]:
    """Peak and seconds of every choice of policies."""
    for choices in itertools.product(*(range(len(block.choices)) for block in chain)):
        yield simulate(chain, [Run(index, choice) for index, choice in enumerate(choices)], in_flight)


def test_policies_with_several_micro_batches_in_flight_are_the_best_of_all() -> None:
    generator = random.Random(1)
    for _ in range(60):
        chain = network(generator, generator.randint(2, 6), generator.randint(2, 3), joins=False)
        in_flight = generator.randint(2, 4)
        solver, every = Solver(chain, in_flight), list(ways_of(chain, in_flight))
        peaks = sorted(peak for peak, _ in every)
        assert solver.smallest.peak == peaks[0]
        for limit in (peaks[0], peaks[len(peaks) // 3], peaks[-1]):
            found = solver.solve(limit)
            assert found is not None and found.peak <= limit
            assert found.seconds <= 1.01 * min(seconds for peak, seconds in every if peak <= limit)


def ends(shared: int, behind: int) -> tuple[Block, Block]:
    """What runs before and behind the blocks of a measured chain."""
    before = Block((Choice(0.0, shared, shared, shared),), shared, 0.0, shared)
    return before, Block((Choice(0.001, 0, behind, behind),), 0, 0.0, 0)


def made(
    generator: random.Random, blocks: int, layout: StageLayout
) -> tuple[StagePlanner, list[Block], list[nn.Module]]:
    inner = network(generator, blocks, 2, joins=True)
    modules: list[nn.Module] = [nn.Linear(generator.randint(1, 600), 500) for _ in inner]
    before, behind = ends(5000, 1_000_000)
    return StagePlanner([before, *inner, behind], modules, layout), inner, modules


def exhaustive(inner: list[Block], modules: list[nn.Module], layout: StageLayout, limit: float) -> float:
    """The seconds of the shortest longest stage over all cuts, policies and stages that are recomputed as a whole."""
    best = math.inf
    for cuts in itertools.combinations(range(1, len(inner)), layout.stages - 1):
        longest = 0.0
        for stage, (first, end) in enumerate(itertools.pairwise((0, *cuts, len(inner)))):
            last = end == len(inner)
            blocks = [*inner[first:end], *([ends(5000, 1_000_000)[1]] if last else [])]
            given = inner[first - 1].output if first else 0
            sent = 0 if last else inner[end - 1].output
            fixed = 4 * sum(one.nbytes for module in modules[first:end] for one in module.parameters())
            count = min(layout.stages - stage, layout.micro_batches)
            if layout.schedule == "gpipe":
                count = layout.micro_batches
            fixed += layout.micro_batches * given + sent + count * (given + 5000)
            fastest = math.inf
            for choices in itertools.product(range(2), repeat=end - first):
                runs = [Run(index, choice) for index, choice in enumerate(choices)]
                rest = [Run(end - first, 0)] if last else []
                peak, seconds = simulate(blocks, [*runs, *rest], count)
                if fixed + peak <= limit:
                    fastest = min(fastest, seconds)
                peak, seconds = simulate(blocks, [tuple(runs), *rest], count)
                if fixed + peak + inner[end - 1].output <= limit:  # the output is held while it is recomputed
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
        before, behind = ends(5000, 1_000_000)
        planner = StagePlanner([before, *inner, behind], modules, StageLayout(2, 4))
        pipeline, _ = planner.pipeline(math.inf)
        states[tied] = [part.state_bytes for part in pipeline.parts]
    size = 8 * 8 * 4
    assert sum(states[False]) == 4 * 4 * size
    assert states[True] == [one + size for one in states[False]]  # the gradient of the other copy


# ------------------------------------------------------------------------------------ measured models


class Layer(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


def loss_of(output: Tensor, targets: object = None) -> Tensor:
    return output.square().mean()


def chain(blocks: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(blocks)))


@pytest.fixture(scope="module")
def planner() -> Planner:
    """Whatever this machine measures, no recomputation takes two seconds a block, and each other policy a little longer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "hvd_ckpt.planning.kinds.BlockRunner.seconds",
            lambda self, policies, least, least_rounds=3: [
                2.0 + 0.1 * number for number in range(len(policies))
            ],
        )
        model = chain()
        return Planner(model, torch.randn(512, 16), loss=loss_of, blocks=children_of(model))


def test_each_stage_has_its_own_micro_batches_in_flight(planner: Planner) -> None:
    plan = planner.plan_parts(StageLayout(3, 6), None)
    assert plan.pipeline is not None and plan.predicted.peak_bytes == max(plan.pipeline.memory)
    assert [part.in_flight for part in plan.pipeline.parts] == [3, 2, 1]
    plan = planner.plan_parts(StageLayout(3, 6, "gpipe"), None)
    assert plan.pipeline is not None and [part.in_flight for part in plan.pipeline.parts] == [6, 6, 6]


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


def test_states_are_counted_by_their_scale(planner: Planner) -> None:
    parameters = sum(one.nbytes for one in chain().parameters())
    for scale in (2.0, 4.0):
        pipeline = planner.plan_parts(StageLayout(3, 6, param_scale=scale), None).pipeline
        assert pipeline is not None
        assert sum(part.state_bytes for part in pipeline.parts) == scale * parameters


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
    x = torch.randn(4, 16)
    with pytest.raises(ValueError, match="Layer"):
        hc.plan(Layer(), x, layout=hc.StageLayout(2))
    twice = Layer()
    with pytest.raises(ValueError, match="'0'"):
        hc.plan(nn.Sequential(twice, Layer(), twice), x, layout=hc.StageLayout(2))
    for stages in (3, 1 << 20):  # refused before a schedule of all stages is made
        with pytest.raises(ValueError, match="2 blocks"):
            hc.plan(nn.Sequential(Layer(), Layer()), x, layout=hc.StageLayout(stages))
    for wrong in (
        {"stages": 0},
        {"chunks": 0},
        {"schedule": "2f2b"},
        {"virtual_stages": 2},
        {"param_scale": "4"},
    ):
        with pytest.raises(ValueError, match="stages|chunks|schedule|virtual|param_scale"):
            hc.StageLayout(**{"stages": 2, **wrong})


def test_a_pipeline_takes_a_plan_for_its_stages_alone(planner: Planner) -> None:
    plan = planner.plan_parts(StageLayout(1, 2), None)
    assert hc.Pipeline(chain(), plan=plan).balance == [6]
    with pytest.raises(ValueError, match="chunks"):
        hc.Pipeline(chain(), plan=plan, chunks=3)
    with pytest.raises(ValueError, match="checkpoint"):
        hc.Pipeline(chain(), plan=plan, checkpoint="never")
    with pytest.raises(ValueError, match="chunks"):
        hc.Pipeline(chain())
    with pytest.raises(hc.PlanError, match="2 stages"):
        hc.Pipeline(chain(), plan=planner.plan_parts(StageLayout(2, 2), None))
    with pytest.raises(hc.PlanError, match="6|blocks|module"):
        hc.Pipeline(chain(5), plan=plan)


class Slow(Layer):
    """Takes much longer than the others."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(200):
            x = super().forward(x)
        return x


def test_cuts_by_measured_time_and_bytes() -> None:
    x = torch.randn(256, 16)
    model = nn.Sequential(Slow(), Slow(), Layer(), Layer())
    assert balance_costs(block_costs("time", model, x, seconds=0.05), 2) == [1, 3]
    model = nn.Sequential(
        *(Layer() for _ in range(4)), Layer(), Layer(), nn.Linear(16, 20000), nn.Linear(20000, 16)
    )
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
