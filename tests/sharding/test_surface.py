"""Tests of what a user holds of a sharded optimizer: param_groups and state of the model's parameters, as without shards."""

from __future__ import annotations

import contextlib
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from same import whole_weights
from sharded import distribute
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import hvd_ckpt as hc

pytestmark = pytest.mark.ranks(gloo=(1, 2, 3), mpi=(4,))

STAGES = (1, 2, 3)


def build(
    kind: Callable[..., Any], stage: int, dtype: Any = torch.float32, **options: Any
) -> tuple[nn.Module, Any]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 70), nn.Tanh(), nn.Linear(70, 3), nn.Linear(3, 3)).to(dtype)
    groups = [{"params": list(model[:2].parameters())}, {"params": list(model[2:].parameters())}]
    names = model.named_parameters()
    return model, distribute(kind(groups), names, model=model, shard=stage, **options)


def sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def adam(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.01, foreach=True)


def step(model: nn.Module, optimizer: Any, number: int) -> None:
    generator = torch.Generator().manual_seed(10 * number + hc.rank())
    x = torch.randn(4, 6, generator=generator).to(next(model.parameters()).dtype)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def same(model: nn.Module, optimizer: Any, wanted: nn.Module, plain: Any) -> None:
    theirs = whole_weights(wanted, plain)
    for name, value in whole_weights(model, optimizer).items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-5, atol=1e-6)


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
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
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
def test_a_closure_and_a_changed_step_find_the_parameters(stage: int) -> None:
    pairs = [build(adam, each) for each in (stage, 0)]
    for model, optimizer in pairs:
        for number in range(2):

            def closure(number: int = number, model: Any = model, optimizer: Any = optimizer) -> Any:
                assert next(iter(parameters(optimizer))) is model[0].weight
                optimizer.zero_grad()
                loss = model(torch.full((2, 6), float(number + hc.rank()))).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)
    same(*pairs[0], *pairs[1])


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


def decay(model: nn.Module, optimizer: Any) -> None:
    with torch.no_grad():
        for group in optimizer.param_groups:
            torch._foreach_mul_(list(group["params"]), 0.9)


def clamp(model: nn.Module, optimizer: Any) -> None:
    for parameter in parameters(optimizer):
        parameter.data.clamp_(-0.05, 0.05)


@torch.no_grad()
def swap(model: nn.Module, optimizer: Any) -> None:
    backup = [parameter.detach().clone() for parameter in parameters(optimizer)]
    for parameter in parameters(optimizer):
        parameter.copy_(parameter + 1.0)
    assert model(torch.ones(1, 6).to(backup[0].dtype)).abs().max() > 1
    for parameter, value in zip(parameters(optimizer), backup):
        parameter.copy_(value * 0.5)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("act", [decay, clamp, swap])
def test_weights_written_by_way_of_the_groups(act: Any, dtype: Any, stage: int) -> None:
    """Outside of the step; master weights follow. At stage 3 that is within gathered_parameters(), and an error elsewhere."""
    if dtype is torch.float32:
        acts_as_without_shards(act, stage, sgd, inside=True)
        if stage < 3:
            acts_as_without_shards(act, stage, sgd)
    else:
        (model, optimizer), (wanted, plain) = (build(sgd, each, dtype) for each in (stage, 0))
        for one, own in ((model, optimizer), (wanted, plain)):
            step(one, own, 0)
            with own.gathered_parameters():
                act(one, own)
        theirs = whole_weights(wanted, plain)
        for name, value in whole_weights(model, optimizer).items():
            torch.testing.assert_close(value, theirs[name], rtol=2e-2, atol=1e-3)
        for number, master in optimizer.state_dict().get("master_weights", {}).items():
            assert torch.equal(master.bfloat16(), optimizer.pieces[number].weights)
    if stage == 3:
        with pytest.raises(RuntimeError, match="parameter '0.weight' is split over the ranks"):
            act(*build(sgd, stage))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("act", [decay, swap])
def test_weights_that_one_rank_writes_are_an_error_on_every_rank(act: Any, stage: int) -> None:
    model, optimizer = build(sgd, stage)
    for number in range(3):
        step(model, optimizer, number)
    with optimizer.gathered_parameters():
        if hc.rank() == 0:
            act(model, optimizer)
    with pytest.raises(RuntimeError, match="parameter '") if hc.size() > 1 else contextlib.nullcontext():
        step(model, optimizer, 3)


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
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
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
            outputs.append((model(torch.ones(2, 6)), whole_weights(model, optimizer)))
        optimizer.train()

    acts_as_without_shards(evaluate, stage, ScheduleFree, inside, elementwise=True)
    torch.testing.assert_close(outputs[0][0], outputs[1][0])
    torch.testing.assert_close(outputs[0][1], outputs[1][1])


# -------------------------------------------------------------------------------------- state


def zero(model: Any, optimizer: Any) -> None:
    for parameter in model[2].parameters():
        for value in optimizer.state[parameter].values():
            value.zero_()


def zero_by_name(model: Any, optimizer: Any) -> None:
    for parameter in model[2].parameters():
        for name in ("step", "exp_avg", "exp_avg_sq"):
            optimizer.state[parameter][name].mul_(0)


def zero_lists(model: Any, optimizer: Any) -> None:
    torch._foreach_zero_(
        [optimizer.state[each][name] for each in parameters(optimizer) for name in ("exp_avg", "exp_avg_sq")]
    )


def empty(model: Any, optimizer: Any) -> None:
    for parameter in model[0].parameters():
        optimizer.state[parameter] = {}
    optimizer.state[model[2].weight].clear()
    optimizer.state.pop(model[2].bias)
    assert optimizer.state.pop(torch.nn.Parameter(torch.ones(2)), None) is None  # of another optimizer
    del optimizer.state[model[3].weight]


def replace(model: Any, optimizer: Any) -> None:
    for parameter in model.parameters():
        ramp = torch.arange(float(parameter.numel())).view(parameter.shape) / 1e4
        optimizer.state[parameter]["exp_avg"] = ramp
    optimizer.state[model[0].weight]["exp_avg_sq"] *= 0.5
    optimizer.state[model[0].bias].update(exp_avg=torch.zeros_like(model[0].bias), exp_avg_sq=torch.ones(70))
    optimizer.state[model[2].bias] = {
        "step": torch.tensor(5.0),
        "exp_avg": torch.ones(3),
        "exp_avg_sq": torch.ones(3),
    }


def save_and_restore(model: Any, optimizer: Any) -> None:
    saved = {
        each: {name: value.clone() for name, value in optimizer.state[each].items()}
        for each in parameters(optimizer)
    }
    zero(model, optimizer)
    for each, entries in saved.items():
        for name, value in entries.items():
            optimizer.state[each][name].copy_(value)


def begin_anew(model: Any, optimizer: Any) -> None:
    optimizer.state = defaultdict(dict)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "act",
    [
        zero,
        zero_by_name,
        zero_lists,
        empty,
        replace,
        save_and_restore,
        begin_anew,
        lambda _, own: own.state.clear(),
    ],
)
@pytest.mark.parametrize("offload", [None, "optimizer"])
def test_state_is_reset_and_set_by_parameter(offload: str | None, act: Any, stage: int) -> None:
    pairs = [build(adam, stage, offload=offload), build(adam, 0)]
    for model, optimizer in pairs:
        for number in range(4):
            step(model, optimizer, number)
            if number == 1:
                act(model, optimizer)
    same(*pairs[0], *pairs[1])


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "use",
    [
        lambda value, _: value.norm(),
        lambda value, _: value.mean(),
        lambda value, _: value.tolist(),
        lambda value, _: value[0],
        lambda value, _: value.__setitem__(0, 1.0),
        lambda value, _: value.cumsum(0),
        lambda value, _: value.mul_(torch.rand_like(value) > 0.9),
        lambda value, _: value.normal_(),
        lambda value, _: torch.ones(70, 6).lerp_(value, 0.5),
        lambda value, _: value.copy_(torch.ones(value.shape)),
        lambda value, _: torch._foreach_add_([value], [torch.ones(value.shape)]),
        lambda value, _: pickle.dumps(value),
        lambda value, other: value.add_(other),
    ],
)
def test_what_needs_other_elements_of_a_state_is_refused(use: Any, stage: int) -> None:
    model, optimizer = build(adam, stage)
    step(model, optimizer, 0)
    value, other = (optimizer.state[parameter]["exp_avg"] for parameter in model[0].parameters())
    with pytest.raises(RuntimeError, match="state of parameter '0.weight'.*full_state_dict"):
        use(value, other)
    if optimizer.state[model[0].weight]:
        with pytest.raises(ValueError, match=r"'exp_avg' of parameter '0.weight' .* shape \(7, 60\)"):
            optimizer.state[model[0].weight]["exp_avg"] = torch.ones(7, 60)
    with pytest.raises(KeyError, match="no parameter of this optimizer"):
        optimizer.state[torch.ones(3)]


@pytest.mark.parametrize("stage", STAGES)
def test_state_is_a_mapping_of_what_this_rank_has(stage: int) -> None:
    model, optimizer = build(adam, stage)
    for parameter in model.parameters():
        assert not optimizer.state[parameter] and parameter not in optimizer.state
    step(model, optimizer, 0)
    own = {piece.name: piece for piece in optimizer.pieces}
    names = dict(model.named_parameters())
    assert isinstance(optimizer.state, dict) and len(optimizer.state) == len(own)
    assert {id(parameter) for parameter in optimizer.state} == {id(names[name]) for name in own}
    for name, parameter in names.items():
        entries = optimizer.state[parameter]
        assert isinstance(entries, dict) and (parameter in optimizer.state) == (name in own) == bool(entries)
        assert sorted(entries) == (["exp_avg", "exp_avg_sq", "step"] if name in own else [])
        assert (
            optimizer.state.get(parameter, {}).keys()
            == entries.keys()
            == {**entries}.keys()
            == entries.copy().keys()
        )
        if name in own:
            piece = own[name]
            plain = optimizer.state[piece.parameter]["exp_avg"]
            assert type(plain) is torch.Tensor and plain.shape == entries["exp_avg"].shape == (
                piece.stop - piece.start,
            )
            entries["exp_avg"].fill_(2.0)
            assert bool((plain == 2).all()) and name in repr(entries)
    assert "exp_avg" in str(optimizer.state_dict()["state"]) or not own


# -------------------------------------------------------------------------------------- frozen parameters


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_are_frozen_and_unfrozen_by_way_of_the_groups(stage: int) -> None:
    pairs = [build(adam, each) for each in (stage, 0)]
    for model, optimizer in pairs:
        for number in range(6):
            for parameter in optimizer.param_groups[number % 2]["params"]:
                parameter.requires_grad_(number in (0, 1))
            before = whole_weights(model, optimizer)
            step(model, optimizer, number)
            after = whole_weights(model, optimizer)
            if number > 1:
                frozen = "0.weight" if number % 2 == 0 else "2.weight"
                assert torch.equal(before[frozen], after[frozen])
            for parameter in parameters(optimizer):
                parameter.requires_grad_(True)
            assert all(parameter.requires_grad for parameter in model.parameters())
    same(*pairs[0], *pairs[1])


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
        model = nn.Sequential(nn.Linear(6, 70), nn.Tanh(), nn.Linear(70, 3))
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
    model = nn.Linear(6, 3)
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
        model = nn.Sequential(nn.Linear(6, 70), nn.Tanh(), nn.Linear(70, 3))
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
