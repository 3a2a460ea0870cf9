"""Optimizers with more state than a tensor or number of each parameter: it resumes with the same bits, or is refused when saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from one_process import batch, chain
from same import assert_same
from sharded import distribute
from torch import nn

import hvd_ckpt as hc
from hvd_ckpt.snapshots.folder import SnapshotError
from hvd_ckpt.utils.states import OptimizerState

pytestmark = pytest.mark.ranks(gloo=(1, 2))


class Own(torch.optim.SGD):
    """Keeps all kinds of state, and uses it."""

    calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("norms", []).append(parameter.grad.double().norm())
                state["all"] = torch.stack(state["norms"])  # grows
                state["none"], state["flag"], state["worst"] = None, True, float("inf")
                state["nested"] = {
                    "count": torch.tensor(2**40 + 1),
                    "of": (1, [parameter.grad.clone()], None),
                }
                parameter.grad.mul_(1 / (1 + state["all"].sum().float()))
        shared = self.state["shared"]
        shared["steps"] = shared.get("steps", 0) + 1
        shared["mode"] = ["warm", {"up": torch.ones(2)}]
        self.calls += 1
        self.param_groups[0]["lr"] *= 0.9 ** (shared["steps"] + self.calls)
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "calls": self.calls, "text": "x"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.calls = state_dict["calls"]
        super().load_state_dict({name: state_dict[name] for name in ("state", "param_groups")})


class Entry(torch.optim.SGD):
    """Keeps one more entry of each parameter."""

    value: Any = None

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["entry"] = self.value
        return super().step(closure)


def make(kind: Callable[..., Any], **options: Any) -> tuple[nn.Module, Any]:
    model = chain(2)
    return model, distribute(kind(model.parameters()), model.named_parameters(), model=model, **options)


def lbfgs(parameters: Any) -> Any:
    return torch.optim.LBFGS(parameters, lr=0.1, max_iter=3, history_size=4)


def own(parameters: Any) -> Any:
    return Own(parameters, lr=0.1, momentum=0.5)


def train(folder: Path, model: nn.Module, optimizer: Any, steps: int) -> int:
    with hc.Snapshots(folder, model=model, optimizer=optimizer, blocking=True) as snapshots:
        begun = snapshots.resume()
        for number in range(begun, steps):

            def closure(number: int = number) -> Any:
                optimizer.zero_grad()
                loss = model(batch(number, hc.rank())).square().mean()
                loss.backward()
                return loss

            if isinstance(optimizer, torch.optim.LBFGS):
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
            snapshots.save(number + 1)
    return begun


@pytest.mark.parametrize("kind", [lbfgs, own])
def test_state_of_any_form_resumes_with_the_same_bits(folder: Path, kind: Callable[..., Any]) -> None:
    model, optimizer = make(kind)
    train(folder / "whole", model, optimizer, 5)
    train(folder / "two", *make(kind), 3)
    again, resumed = make(kind)
    assert train(folder / "two", again, resumed, 5) == 3
    assert_same(dict(model.state_dict()), dict(again.state_dict()))
    assert_same(optimizer.state_dict(), resumed.state_dict())


@pytest.mark.ranks(mpi=(4,))
def test_the_state_of_each_rank_resumes_with_the_same_bits(folder: Path) -> None:
    """Adasum combines updates, so moments are those of a rank's own gradients."""
    if not hc.mpi_enabled():
        pytest.skip("Adasum needs MPI")

    def momentum(parameters: Any) -> Any:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    model, optimizer = make(momentum, op=hc.Adasum)
    train(folder / "whole", model, optimizer, 5)
    train(folder / "two", *make(momentum, op=hc.Adasum), 3)
    again, resumed = make(momentum, op=hc.Adasum)
    assert train(folder / "two", again, resumed, 5) == 3
    assert_same(dict(model.state_dict()), dict(again.state_dict()))
    assert_same(optimizer.state_dict(), resumed.state_dict())
    moments = hc.allgather_object(optimizer.state_dict()["state"][0]["momentum_buffer"])
    assert not torch.equal(moments[0], moments[1])


def refused(folder: Path, match: str, kind: Callable[..., Any], **options: Any) -> None:
    with pytest.raises(SnapshotError, match=match):
        train(folder, *make(kind, **options), 1)
    assert hc.allgather_object(hc.rank()) == list(range(hc.size()))
    assert not list(folder.rglob("manifest.json"))


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("x", r'optimizer: state\[0\].entry is "x".*keep a text in param_groups'),
        ([1, {"a": "x"}], r"""state\[0\].entry\[1\]\['a'\] is "x".*keep a text in param_groups"""),
        ({1, 2}, r"optimizer.state\[0\].entry is a builtins.set.*: store"),
    ],
    ids=str,
)
def test_state_that_cannot_be_loaded_is_refused_when_saved(folder: Path, value: Any, says: str) -> None:
    class Kind(Entry):
        pass

    Kind.value = value
    refused(folder, says, lambda parameters: Kind(parameters, lr=0.1))


class Key(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "more": 1}


class Shared(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        self.state["shared"]["steps"] = 1
        return super().step(closure)


class Column(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["entry"] = torch.ones(parameter.numel(), 1)
        return super().step(closure)


@pytest.mark.parametrize(
    ("kind", "value", "says"),
    [
        (Entry, [1], r"state\[.*\].entry is a list"),
        (Entry, torch.ones(3), r"state\[.*\].entry is a tensor of float32 \[3\]"),
        (Column, None, r"state\[.*\].entry is a tensor of float32 \[.*, 1\]"),
        (Key, None, "it has the entry 'more'"),
        (Shared, None, "it has the entry 'shared', which is not of a parameter"),
    ],
    ids=str,
)
@pytest.mark.parametrize("shard", [1, 3])
def test_split_state_of_another_form_is_refused_when_saved(
    folder: Path, kind: Any, value: Any, says: str, shard: int
) -> None:
    class Kind(kind):
        pass

    Kind.value = value
    says = f"step 1 was not written.*{says}.*shard='none'"
    refused(folder, says, lambda parameters: Kind(parameters, lr=0.1), shard=shard, elementwise=True)


def test_whole_state_of_another_form_is_not_split(folder: Path) -> None:
    class Kind(Entry):
        value = (1, 2)

    def kind(parameters: Any) -> Any:
        return Kind(parameters, lr=0.1)

    train(folder, *make(kind), 1)
    with pytest.raises(SnapshotError, match=r"state\[.*\].entry is a tuple.*shard='none'"):
        train(folder, *make(kind, shard=1, elementwise=True), 2)


def test_vectors_of_all_parameters_are_not_given_to_another_order(folder: Path) -> None:
    train(folder, *make(lbfgs), 2)
    model = chain(2)
    optimizer = hc.DistributedOptimizer(lbfgs(list(model.parameters())[::-1]), model.named_parameters())
    with pytest.raises(SnapshotError, match=r"optimizer.state\[.*this order is another one here"):
        train(folder, model, optimizer, 3)


@pytest.mark.parametrize("key", [9, True, 1.5, -1])
def test_a_number_that_is_not_of_a_parameter_is_no_key(key: Any) -> None:
    state = {"state": {key: {}}, "param_groups": [{"params": [0, 2]}]}
    with pytest.raises(ValueError, match=rf"state\[{key}\].*not of a parameter.*a text"):
        OptimizerState.check(state, "it")
