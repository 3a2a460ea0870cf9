"""Tests of what a user holds of a sharded optimizer: groups of the model's parameters as without shards, and state of pieces."""

from __future__ import annotations

import contextlib
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


def build(kind: Callable[..., Any], stage: int, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(WIDTH, 70), nn.Tanh(), nn.Linear(70, 3), nn.Linear(3, 3))
    groups = [{"params": list(model[:2].parameters())}, {"params": list(model[2:].parameters())}]
    names = model.named_parameters()
    return model, distribute(kind(groups), names, model=model, shard=stage, **options)


def sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def adam(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.01, foreach=True)


def step(model: nn.Module, optimizer: Any, number: int) -> None:
    train(model, optimizer, range(number, number + 1))


def parameters(optimizer: Any) -> Iterator[Any]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def acts_as_without_shards(
    act: Callable[[nn.Module, Any], Any],
    stage: int,
    kind: Callable[..., Any] = adam,
    inside: bool = False,
    **options: Any,
) -> None:
    """Two steps, the act, two more, at this stage and at stage 0."""
    pairs = [build(kind, each, **options) for each in (stage, 0)]
    for model, optimizer in pairs:
        for number in range(4):
            step(model, optimizer, number)
            if number == 1:
                with optimizer.gathered_parameters() if inside else contextlib.nullcontext():
                    act(model, optimizer)
    same(*pairs[0], *pairs[1])


# -------------------------------------------------------------------------------------- groups


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("offload", [None, "optimizer"])
def test_groups_hold_the_parameters_of_the_model_and_pieces_for_the_wrapped_step(
    stage: int, offload: str | None
) -> None:
    seen: list[tuple[str, bool]] = []

    class Watching(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            look("step", self)
            return super().step(closure)

    own: list[int] = []

    def look(where: str, optimizer: Any) -> None:
        seen.append((where, list(map(id, parameters(optimizer))) == own))

    model, optimizer = build(
        lambda groups: Watching(groups, lr=0.1, momentum=0.9), stage, elementwise=True, offload=offload
    )
    own += map(id, model.parameters())
    seen.clear()  # offload has tried out a step
    handles = [
        optimizer.register_step_pre_hook(lambda optimizer, *_: look("before", optimizer)),
        optimizer.register_step_post_hook(lambda optimizer, *_: look("after", optimizer)),
        register_optimizer_step_pre_hook(lambda optimizer, *_: look("global before", optimizer)),
        register_optimizer_step_post_hook(lambda optimizer, *_: look("global after", optimizer)),
    ]
    look("made", optimizer)
    step(model, optimizer, 0)
    look("stepped", optimizer)
    for handle in handles:
        handle.remove()
    steps = [entry for entry in seen if entry[0] == "step"]
    assert steps == [("step", False)] * len(steps)
    assert [entry for entry in seen if entry not in steps] == [
        (where, True) for where in ("made", "global before", "before", "after", "global after", "stepped")
    ]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert [names[id(parameter)] for parameter in parameters(optimizer)] == [*names.values()]


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_move_between_groups_and_strangers_are_refused(stage: int) -> None:
    def move(model: nn.Module, optimizer: Any) -> None:
        first, second = optimizer.param_groups
        second["params"].append(first["params"].pop())
        second["lr"], second["weight_decay"] = 0.2, 0.3

    acts_as_without_shards(move, stage, sgd)
    model, optimizer = build(sgd, stage)
    optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(3)))
    with pytest.raises(RuntimeError, match=r"param_groups\[0\]\['params'\]\[2\].*add_param_group"):
        step(model, optimizer, 0)


# -------------------------------------------------------------------------------------- weights


def clamp(model: nn.Module, optimizer: Any) -> None:
    for parameter in parameters(optimizer):
        parameter.data.clamp_(-0.05, 0.05)


@pytest.mark.parametrize("stage", [1, 2])
def test_hooks_after_a_step_find_updated_weights_on_every_rank(stage: int) -> None:
    pairs = [build(sgd, each) for each in (stage, 0)]
    for model, optimizer in pairs:
        optimizer.register_step_post_hook(lambda optimizer, *_: clamp(nn.Identity(), optimizer))
        for number in range(3):
            step(model, optimizer, number)
            assert all(parameter.abs().max() <= 0.05 for parameter in model.parameters())
    same(*pairs[0], *pairs[1])


class ScheduleFree(torch.optim.Optimizer):
    """Defazio et al. (2024) in its simplest form: weights are y while training, and x, an average of z, in evaluation."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 0.1, "beta": 0.9, "k": 0, "training": True})

    @torch.no_grad()
    def eval(self) -> None:
        self._move(lambda group: 1 - 1 / group["beta"], False)

    @torch.no_grad()
    def train(self) -> None:
        self._move(lambda group: 1 - group["beta"], True)

    def _move(self, weight: Callable[[Any], float], training: bool) -> None:
        for group in self.param_groups:
            if group["training"] != training:
                for parameter in group["params"]:
                    if "z" in self.state[parameter]:
                        parameter.lerp_(end=self.state[parameter]["z"], weight=weight(group))
                group["training"] = training

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    z = self.state[parameter].setdefault("z", parameter.clone())
                    parameter.lerp_(end=z, weight=1 / group["k"])
                    parameter.add_(
                        parameter.grad, alpha=group["lr"] * (group["beta"] * (1 - 1 / group["k"]) - 1)
                    )
                    z.sub_(parameter.grad, alpha=group["lr"])


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("inside", [False, True])
def test_schedule_free_optimizers_change_to_evaluation_and_back(inside: bool, stage: int) -> None:
    outputs: list[Any] = []

    def evaluate(model: nn.Module, optimizer: Any) -> None:
        optimizer.eval()
        with torch.no_grad():
            outputs.append((model(torch.ones(2, WIDTH)), whole_weights(model, optimizer)))
        optimizer.train()

    acts_as_without_shards(evaluate, stage, ScheduleFree, inside, elementwise=True)
    torch.testing.assert_close(outputs[0][0], outputs[1][0])
    torch.testing.assert_close(outputs[0][1], outputs[1][1])


# -------------------------------------------------------------------------------------- state


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "use",
    [
        lambda state, parameter: state[parameter],
        lambda state, parameter: state.get(parameter),
        lambda state, parameter: state.pop(parameter, None),
        lambda state, parameter: parameter in state,
        lambda state, parameter: state.setdefault(parameter, {}),
        lambda state, parameter: state.update({parameter: {}}),
        lambda state, parameter: state.__setitem__(parameter, {"exp_avg": torch.ones(70, WIDTH)}),
    ],
)
def test_state_of_a_whole_parameter_is_refused(use: Any, stage: int) -> None:
    model, optimizer = build(adam, stage)
    step(model, optimizer, 0)
    with pytest.raises(
        RuntimeError, match=r"parameter '0.weight' is split .*piece\.parameter.*full_state_dict"
    ):
        use(optimizer.state, model[0].weight)
    optimizer.state = {model[0].weight: {}}
    with pytest.raises(RuntimeError, match="parameter '0.weight'"):
        step(model, optimizer, 1)


@pytest.mark.parametrize("stage", STAGES)
def test_state_is_a_mapping_of_what_this_rank_has(stage: int) -> None:
    model, optimizer = build(adam, stage)
    assert not optimizer.state
    step(model, optimizer, 0)
    assert isinstance(optimizer.state, dict)
    assert [id(key) for key in optimizer.state] == [id(piece.parameter) for piece in optimizer.pieces]
    for piece in optimizer.pieces:
        entries = optimizer.state[piece.parameter]
        assert sorted(entries) == ["exp_avg", "exp_avg_sq", "step"]
        assert entries["exp_avg"].shape == (piece.stop - piece.start,)
    copies = [
        copy.copy(optimizer.state),
        copy.deepcopy(optimizer.state),
        pickle.loads(pickle.dumps(optimizer.state)),
    ]
    assert all(type(each) is dict and len(each) == len(optimizer.pieces) for each in copies)
    assert "exp_avg" in str(optimizer.state_dict()["state"]) or not optimizer.pieces
    assert optimizer.state.pop(torch.nn.Parameter(torch.ones(2)), None) is None  # of another optimizer


class Counting(torch.optim.SGD):
    """Keeps a count of its steps that is of no parameter."""

    def step(self, closure: Any = None) -> Any:
        self.state["all"] = {"steps": self.state["all"].get("steps", 0) + 1}
        return super().step(closure)


@pytest.mark.parametrize("stage", STAGES)
def test_state_of_no_parameter_is_in_whole_states(stage: int) -> None:
    model, optimizer = build(lambda groups: Counting(groups, lr=0.1, momentum=0.9), stage, elementwise=True)
    for number in range(2):
        step(model, optimizer, number)
    state = optimizer.full_state_dict(all_ranks=True)
    assert state["state"]["all"] == {"steps": 2}
    optimizer.state["all"]["steps"] = 7
    optimizer.load_state_dict(state)
    assert optimizer.state["all"] == {"steps": 2}
    step(model, optimizer, 2)
    assert optimizer.state["all"] == {"steps": 3}


# -------------------------------------------------------------------------------------- frozen parameters


class Decaying(torch.optim.SGD):
    """Decays what requires a gradient, whether it has one or not."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    parameter.mul_(0.9)
        return super().step(closure)


@pytest.mark.parametrize("stage", STAGES)
def test_an_optimizer_sees_which_parameters_are_frozen(stage: int) -> None:
    acts_as_without_shards(
        lambda model, optimizer: model[0].requires_grad_(False),
        stage,
        lambda groups: Decaying(groups, lr=0.1),
        elementwise=True,
    )


@pytest.mark.parametrize("stage", STAGES)
def test_a_group_is_added_from_a_generator(stage: int) -> None:
    class Prepared(torch.optim.SGD):
        """Makes state of the parameters of a group when it is added."""

        def add_param_group(self, param_group: Any) -> None:
            super().add_param_group(param_group)
            for parameter in self.param_groups[-1]["params"]:
                self.state[parameter]["momentum_buffer"] = torch.full_like(parameter, 0.5)

    pairs = []
    for each in (stage, 0):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(WIDTH, 70), nn.Tanh(), nn.Linear(70, 3))
        bare = Prepared(model[2].parameters(), lr=0.01, momentum=0.9)
        optimizer: Any = hc.DistributedOptimizer(
            bare, model.named_parameters(), model=model, shard=hc.Shard(each, elementwise=True)
        )
        step(model, optimizer, 0)
        optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.1})
        assert [len(group["params"]) for group in optimizer.param_groups] == [2, 2]
        for number in range(1, 4):
            step(model, optimizer, number)
        pairs.append((model, optimizer))
    same(*pairs[0], *pairs[1])


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
    weights = []
    for assigned in (True, False):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(WIDTH, 70), nn.Tanh(), nn.Linear(70, 3))
        bare = torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)
        optimizer: Any = hc.DistributedOptimizer(bare, model.named_parameters(), model=model, shard=stage)
        step(model, optimizer, 0)
        first, more = optimizer.param_groups[0], {**optimizer.param_groups[0], "lr": 0.2}
        more["params"] = list(model[0].parameters())
        if assigned:
            optimizer.param_groups = [{**first, "params": list(first["params"])}, more]
        else:
            optimizer.add_param_group(more)
        optimizer.load_state_dict({"state": {}, "param_groups": numbered(optimizer)})
        for number in range(1, 3):
            step(model, optimizer, number)
        assert bare.param_groups is optimizer.param_groups and bare.param_groups[0] is first
        weights.append(whole_weights(model, optimizer))
    torch.testing.assert_close(weights[0], weights[1])


def numbered(optimizer: Any) -> list[dict[str, Any]]:
    return [
        {**group, "params": [2 * number, 2 * number + 1]}
        for number, group in enumerate(optimizer.param_groups)
    ]
