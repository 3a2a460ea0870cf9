"""Which optimizers may step on parts of parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hvd_ckpt.sharding.elementwise import check_elementwise, probe

Steps = Callable[[nn.Parameter, dict[str, Any], dict[str, Any]], None]


class Own(torch.optim.Optimizer):
    """An optimizer from elsewhere: what it does with a parameter, its state and its group is given."""

    def __init__(self, params: Any, update: Steps, lr: float = 1e-3, **values: Any) -> None:
        super().__init__(params, {"lr": lr, **values})
        self.update = update

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, self.state[parameter], group)


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(4))]


def sign(parameter: nn.Parameter, state: dict[str, Any], group: dict[str, Any]) -> None:
    assert parameter.grad is not None
    mean = state.setdefault("mean", torch.zeros_like(parameter))
    state["count"] = state.get("count", 0) + 1
    parameter.add_(mean.lerp(parameter.grad, 0.1).sign(), alpha=-group["lr"])
    mean.lerp_(parameter.grad, 0.01)


def by_norm(parameter: nn.Parameter, state: dict[str, Any], group: dict[str, Any]) -> None:
    assert parameter.grad is not None
    parameter.add_(parameter.grad * (parameter.norm() / parameter.grad.norm()), alpha=-group["lr"])


def noisy(parameter: nn.Parameter, state: dict[str, Any], group: dict[str, Any]) -> None:
    parameter.add_(torch.randn_like(parameter), alpha=group["lr"])


def schedule_free(parameter: nn.Parameter, state: dict[str, Any], group: dict[str, Any]) -> None:
    assert parameter.grad is not None
    group["k"] += 1
    parameter.add_(parameter.grad, alpha=-group["lr"] / group["k"])


ELEMENTWISE = [
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "ASGD",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
]


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_the_known_ones_pass_the_trial_too(name: str) -> None:
    optimizer = getattr(torch.optim, name)(parameters(), lr=1e-5)
    check_elementwise(type("Derived", (type(optimizer),), {})(parameters(), lr=1e-5))
    check_elementwise(optimizer)
    assert not probe(optimizer).mutates_groups


@pytest.mark.parametrize("name", ["LBFGS", "Adafactor", "Muon", "SparseAdam"])
def test_the_others_are_refused_with_a_reason(name: str) -> None:
    kind = getattr(torch.optim, name, None) or pytest.skip("not in this PyTorch")
    with pytest.raises(ValueError, match=rf"{name} .*supports shard='none' \(0\) only"):
        check_elementwise(kind([nn.Parameter(torch.ones(3, 2))]))


@pytest.mark.parametrize("lr", [1e-3, 0.0])
def test_one_from_elsewhere_is_tried_out(lr: float) -> None:
    check_elementwise(Own(parameters(), sign, lr))
    for update in (by_norm, noisy):
        with pytest.raises(ValueError, match="Own .*other results on the two parts"):
            check_elementwise(Own(parameters(), update, lr))


def test_a_norm_over_all_parameters_is_found() -> None:
    class Clipped(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 0.1)
            super().step()

    with pytest.raises(ValueError, match="Clipped"):
        check_elementwise(Clipped(parameters(), lr=0.1))


def test_what_a_trial_raises_is_said() -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("needs the moon\nand the sun")

    with pytest.raises(ValueError, match="Own .*RuntimeError: needs the moon and the sun"):
        check_elementwise(Own(parameters(), broken))

    class Around(torch.optim.SGD):
        pass

    around = Around(parameters(), lr=0.1)
    around.base = torch.optim.SGD(parameters(), lr=0.1)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="Around .*'base' is a SGD"):
        check_elementwise(around)


def test_a_trial_touches_nothing() -> None:
    own = parameters()
    optimizer = Own(own, sign, history=[1])
    optimizer.seen = [0]  # type: ignore[attr-defined]

    def update(parameter: nn.Parameter, state: dict[str, Any], group: dict[str, Any]) -> None:
        group["history"].append(2)
        optimizer_of_trial = group
        assert optimizer_of_trial is not optimizer.param_groups[0]
        sign(parameter, state, group)
        torch.rand(1)

    optimizer.update = update
    optimizer.register_step_post_hook(lambda *_: pytest.fail("a hook ran"))
    before = copy.deepcopy(optimizer.state_dict())
    random_state = torch.get_rng_state()
    assert probe(optimizer).mutates_groups
    assert optimizer.state_dict() == before and not optimizer.state
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(
        torch.equal(parameter, torch.ones_like(parameter)) and parameter.grad is None for parameter in own
    )


def test_facts_are_those_of_a_group_and_dtype() -> None:
    first, second = parameters()
    adam = torch.optim.Adam(
        [{"params": [first], "amsgrad": True, "fused": True}, {"params": [second], "maximize": True}]
    )
    float32, bfloat16 = torch.float32, torch.bfloat16
    averages = {"exp_avg": float32, "exp_avg_sq": float32}
    assert probe(adam, 0).state_keys == {**averages, "max_exp_avg_sq": float32}
    assert probe(adam, 1).state_keys == averages and probe(adam, 1).scalar_keys == ("step",)
    assert probe(adam, 1, bfloat16).state_keys == dict.fromkeys(averages, bfloat16)
    assert probe(torch.optim.SGD(parameters(), lr=1)).state_keys == {}
    assert probe(torch.optim.SGD(parameters(), lr=1, momentum=0.9)).state_keys == {"momentum_buffer": float32}
    assert probe(Own(parameters(), schedule_free, k=0)).mutates_groups
