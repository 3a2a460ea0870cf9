"""Tests of what a user holds of a sharded optimizer: groups of the model's parameters as without shards, and state of pieces."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from one_process import WIDTH, train
from same import assert_same_weights, whole_weights
from sharded import distribute
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import hvd_ckpt as hc

pytestmark = pytest.mark.ranks(gloo=(2,), mpi=(4,))

STAGES = (1, 2, 3)
same = functools.partial(assert_same_weights, exact=False)


def sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def adam(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.01, foreach=True)


def build(
    kind: Callable[..., Any], stage: int, first: bool = True, **options: Any
) -> tuple[nn.Sequential, Any]:
    """A model, and its optimizer with a group of its first layers, or without them, and one of the others."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(WIDTH, 70), nn.Tanh(), nn.Linear(70, 3), nn.Linear(3, 3))
    groups = [{"params": list(part.parameters())} for part in (model[:2], model[2:])]
    bare = kind(groups if first else groups[1:])
    return model, distribute(bare, model.named_parameters(), model=model, shard=stage, **options)


def step(model: nn.Module, optimizer: Any, number: int) -> None:
    train(model, optimizer, range(number, number + 1))


def parameters(optimizer: Any) -> Iterator[Any]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


# -------------------------------------------------------------------------------------- groups


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("offload", [None, "optimizer"])
def test_groups_hold_the_parameters_of_the_model_and_pieces_for_the_wrapped_step(
    stage: int, offload: str | None
) -> None:
    own: list[int] = []
    seen: list[tuple[str, bool]] = []

    def look(where: str) -> Callable[..., None]:
        return lambda optimizer, *_: seen.append((where, list(map(id, parameters(optimizer))) == own))

    class Watching(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            look("step")(self)
            return super().step(closure)

    model, optimizer = build(
        lambda groups: Watching(groups, lr=0.1, momentum=0.9), stage, elementwise=True, offload=offload
    )
    own += map(id, model.parameters())
    seen.clear()  # offload has tried out a step
    handles = [
        optimizer.register_step_pre_hook(look("before")),
        optimizer.register_step_post_hook(look("after")),
        register_optimizer_step_pre_hook(look("global before")),
        register_optimizer_step_post_hook(look("global after")),
    ]
    look("made")(optimizer)
    step(model, optimizer, 0)
    look("stepped")(optimizer)
    for handle in handles:
        handle.remove()
    assert {whole for where, whole in seen if where == "step"} == {False}
    assert [entry for entry in seen if entry[0] != "step"] == [
        (where, True) for where in ("made", "global before", "before", "after", "global after", "stepped")
    ]


@pytest.mark.parametrize("stage", STAGES)
def test_strangers_in_groups_are_refused(stage: int) -> None:
    model, optimizer = build(sgd, stage)
    optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(3)))
    with pytest.raises(RuntimeError, match=r"param_groups\[0\]\['params'\]\[2\].*add_param_group"):
        step(model, optimizer, 0)


# -------------------------------------------------------------------------------------- what acts as without shards


class Own(torch.optim.SGD):
    """Does what element-wise optimizers from elsewhere do."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, lr=0.01, momentum=0.9)


class Prepared(Own):
    """Makes state of the parameters of a group when it is added."""

    def add_param_group(self, param_group: Any) -> None:
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            self.state[parameter]["momentum_buffer"] = torch.full_like(parameter, 0.5)


class Decaying(Own):
    """Decays what requires a gradient, whether it has one or not."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in parameters(self):
            if parameter.requires_grad:
                parameter.mul_(0.9)
        return super().step(closure)


class Averaging(Own):
    """Moves weights by way of its state in two further methods, as schedule-free optimizers do (Defazio et al., 2024)."""

    @torch.no_grad()
    def eval(self) -> None:
        for parameter in parameters(self):
            parameter.add_(self.state[parameter]["momentum_buffer"], alpha=0.5)

    @torch.no_grad()
    def train(self) -> None:
        for parameter in parameters(self):
            parameter.sub_(self.state[parameter]["momentum_buffer"], alpha=0.5)


def move(model: Any, optimizer: Any) -> None:
    first, second = optimizer.param_groups
    second["params"].append(first["params"].pop())
    second["lr"], second["weight_decay"] = 0.2, 0.3


def add_from_a_generator(model: Any, optimizer: Any) -> None:
    optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.1})
    assert [len(group["params"]) for group in optimizer.param_groups] == [4, 2]


def clamp_after_each_step(model: Any, optimizer: Any) -> None:
    def clamp(optimizer: Any, *_: Any) -> None:
        for parameter in parameters(optimizer):
            parameter.data.clamp_(-0.05, 0.05)

    optimizer.register_step_post_hook(clamp)


def freeze(model: Any, optimizer: Any) -> None:
    model[0].requires_grad_(False)


def evaluate(model: Any, optimizer: Any) -> Any:
    optimizer.eval()
    with torch.no_grad():
        output = model(torch.ones(2, WIDTH)), whole_weights(model, optimizer)
    optimizer.train()
    return output


def evaluate_inside(model: Any, optimizer: Any) -> Any:
    with optimizer.gathered_parameters():
        return evaluate(model, optimizer)


@pytest.mark.parametrize(
    ("act", "kind", "stages"),
    [
        (move, sgd, STAGES),
        (add_from_a_generator, Prepared, STAGES),
        (clamp_after_each_step, sgd, (1, 2)),
        (freeze, Decaying, STAGES),
        (evaluate, Averaging, STAGES),
        (evaluate_inside, Averaging, STAGES),
    ],
)
def test_what_is_done_between_steps_acts_as_without_shards(act: Any, kind: Any, stages: Any) -> None:
    def run(stage: int) -> tuple[Any, Any]:
        model, optimizer = build(kind, stage, first=kind is not Prepared, elementwise=stage > 0)
        for number in range(2):
            step(model, optimizer, number)
        found = act(model, optimizer)
        for number in range(2, 4):
            step(model, optimizer, number)
        return whole_weights(model, optimizer), found

    wanted = run(0)
    for stage in stages:
        torch.testing.assert_close(run(stage), wanted)


# -------------------------------------------------------------------------------------- state

USES: list[Callable[[Any, nn.Parameter], Any]] = [
    lambda state, parameter: state[parameter],
    lambda state, parameter: state.get(parameter),
    lambda state, parameter: state.pop(parameter, None),
    lambda state, parameter: parameter in state,
    lambda state, parameter: state.setdefault(parameter, {}),
    lambda state, parameter: state.update({parameter: {}}),
    lambda state, parameter: state.__setitem__(parameter, {"exp_avg": torch.ones(70, WIDTH)}),
]


@pytest.mark.parametrize("stage", STAGES)
def test_state_is_of_what_this_rank_has_and_that_of_a_whole_parameter_is_refused(stage: int) -> None:
    model, optimizer = build(adam, stage)
    assert not optimizer.state
    step(model, optimizer, 0)
    for use in USES:
        with pytest.raises(
            RuntimeError, match=r"parameter '0.weight' is split .*piece\.parameter.*full_state_dict"
        ):
            use(optimizer.state, model[0].weight)
    assert isinstance(optimizer.state, dict)
    assert [id(key) for key in optimizer.state] == [id(piece.parameter) for piece in optimizer.pieces]
    for piece in optimizer.pieces:
        entries = optimizer.state[piece.parameter]
        assert sorted(entries) == ["exp_avg", "exp_avg_sq", "step"]
        assert entries["exp_avg"].shape == (piece.stop - piece.start,)
    pickled = pickle.loads(pickle.dumps(optimizer.state))
    for each in (copy.copy(optimizer.state), copy.deepcopy(optimizer.state), pickled):
        assert type(each) is dict and len(each) == len(optimizer.pieces)
    assert "exp_avg" in str(optimizer.state_dict()["state"]) or not optimizer.pieces
    assert optimizer.state.pop(torch.nn.Parameter(torch.ones(2)), None) is None  # of another optimizer
    optimizer.state = {model[0].weight: {}}
    with pytest.raises(RuntimeError, match="parameter '0.weight'"):
        step(model, optimizer, 1)


class Counting(Own):
    """Keeps a count of its steps that is of no parameter."""

    def step(self, closure: Any = None) -> Any:
        self.state["all"] = {"steps": self.state["all"].get("steps", 0) + 1}
        return super().step(closure)


@pytest.mark.parametrize("stage", STAGES)
def test_state_of_no_parameter_is_in_whole_states(stage: int) -> None:
    model, optimizer = build(Counting, stage, elementwise=True)
    step(model, optimizer, 0)
    state = optimizer.full_state_dict(all_ranks=True)
    assert state["state"]["all"] == {"steps": 1}
    optimizer.state["all"]["steps"] = 7
    optimizer.load_state_dict(state)
    step(model, optimizer, 1)
    assert optimizer.state["all"] == {"steps": 2}


# -------------------------------------------------------------------------------------- the wrapped optimizer


@pytest.mark.parametrize("stage", [0, *STAGES])
@pytest.mark.parametrize("loads", ["wrapper", "wrapped"])
def test_groups_stay_those_of_the_wrapped_optimizer_whoever_loads_a_state(loads: str, stage: int) -> None:
    torch.manual_seed(3)
    model = nn.Linear(WIDTH, 3)
    bare = torch.optim.AdamW(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.ExponentialLR(bare, 0.5)
    optimizer: Any = hc.DistributedOptimizer(bare, model.named_parameters(), model=model, shard=stage)
    later = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)
    groups, group = optimizer.param_groups, optimizer.param_groups[0]
    step(model, optimizer, 0)
    state = optimizer.full_state_dict(all_ranks=True)
    state["param_groups"][0]["weight_decay"] = 0.25
    for value in state["state"].values():
        value["exp_avg"].fill_(3.0)
    (optimizer if loads == "wrapper" else bare).load_state_dict(state)
    for holder in (optimizer, bare, schedule.optimizer, later.optimizer):
        assert holder.param_groups is groups and holder.param_groups[0] is group
    assert group["weight_decay"] == 0.25 and group["params"] == list(model.parameters())
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.25
    again = optimizer.full_state_dict(all_ranks=True)
    assert all(bool((value["exp_avg"] == 3).all()) for value in again["state"].values())
    step(model, optimizer, 1)


@pytest.mark.parametrize("stage", [0, *STAGES])
def test_groups_that_are_assigned_become_those_of_both_optimizers(stage: int) -> None:
    """As Lightning's BackboneFinetuning does in a resume."""
    pairs = []
    for assigned in (True, False):
        bares: list[Any] = []
        model, optimizer = build(
            lambda groups, bares=bares: bares.append(sgd(groups)) or bares[0], stage, False
        )
        step(model, optimizer, 0)
        (first,) = optimizer.param_groups
        more = {**first, "lr": 0.2, "params": list(model[0].parameters())}
        if assigned:
            optimizer.param_groups = [{**first, "params": list(first["params"])}, more]
        else:
            optimizer.add_param_group(more)
        numbers = ([0, 1, 2, 3], [4, 5])
        groups = [{**group, "params": own} for group, own in zip(optimizer.param_groups, numbers)]
        optimizer.load_state_dict({"state": {}, "param_groups": groups})
        for number in range(1, 3):
            step(model, optimizer, number)
        assert bares[0].param_groups is optimizer.param_groups and optimizer.param_groups[0] is first
        pairs.append((model, optimizer))
    same(*pairs[0], *pairs[1])
