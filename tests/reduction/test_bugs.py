"""Regression tests, one for each bug that was found later."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from one_process import chain, loss, same_everywhere, train, wrap
from torch import nn

import hvd_ckpt as hc

pytestmark = pytest.mark.ranks(gloo=(2,), mpi=(4,))


def mean_gradients(model: nn.Module, total: Any) -> list[torch.Tensor]:
    """Gradients of the mean of ``total(rank)``, by one process."""
    copied = copy.deepcopy(model)
    torch.stack([total(copied, rank) for rank in range(hc.size())]).mean().backward()
    return [parameter.grad for parameter in copied.parameters()]


def losses_of(step: int) -> Any:
    return lambda model, rank: loss(model, step, rank)


def same(model: nn.Module, expected: list[torch.Tensor]) -> bool:
    return all(torch.allclose(one.grad, other, atol=1e-6) for one, other in zip(model.parameters(), expected))


def test_a_penalty_on_gradients_keeps_its_graph() -> None:
    def total(net: nn.Module, rank: int, step: int) -> torch.Tensor:
        value = loss(net, step, rank)
        value.backward(create_graph=True)
        return sum(parameter.grad.square().sum() for parameter in net.parameters())

    model = chain()
    optimizer = wrap(model)
    for step in range(4):
        optimizer.zero_grad()
        expected = []
        for rank in range(hc.size()):
            other = copy.deepcopy(model)
            total(other, rank, step).backward()
            expected.append([parameter.grad.detach() for parameter in other.parameters()])
        total(model, hc.rank(), step).backward()
        optimizer.synchronize()
        means = [torch.stack(gradients).mean(0) for gradients in zip(*expected)]
        assert same(model, means)
        with optimizer.skip_synchronize():
            optimizer.step()


def test_a_layout_changed_on_one_rank_is_an_error_on_all() -> None:
    torch.manual_seed(1)
    model = nn.Conv2d(3, 4, 3)
    optimizer = wrap(model)
    for step in range(3):
        optimizer.zero_grad(set_to_none=False)
        if step == 2 and hc.rank() == 0:
            model.to(memory_format=torch.channels_last)
        model(torch.ones(2, 3, 5, 5)).square().mean().backward()
        if step == 2:
            with pytest.raises((ValueError, RuntimeError), match="'weight'.* on rank"):
                optimizer.step()
        else:
            optimizer.step()


def test_a_layout_changed_on_all_ranks() -> None:
    torch.manual_seed(1)
    model = nn.Conv2d(3, 4, 3)
    optimizer = wrap(model)
    for step in range(4):
        optimizer.zero_grad(set_to_none=False)
        if step == 2:
            model.to(memory_format=torch.channels_last)
        x = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(step))
        expected = mean_gradients(model, lambda net, rank, x=x: net((rank + 1) * x).square().mean())
        for parameter in model.parameters():  # the copy took the cleared gradients along
            parameter.grad = None if parameter.grad is None else parameter.grad.zero_()
        model((hc.rank() + 1) * x).square().mean().backward()
        optimizer.step()
        assert same(model, expected)


def test_join_where_one_rank_has_collected_an_optimizer() -> None:
    old = [wrap(chain())]
    model = chain()
    optimizer = wrap(model)
    if hc.rank() == 0:
        old.clear()
        gc.collect()
    train(model, optimizer, range(2 + hc.rank()))
    last = hc.join()
    hc.broadcast_parameters(model.state_dict(), root_rank=last)
    train(model, optimizer, range(2))
    same_everywhere(model)


def test_elastic_ranks_that_have_built_different_numbers_of_optimizers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    survivors = [wrap(chain()) for _ in range(2 if hc.rank() == 0 else 0)]
    model = chain()
    optimizer = wrap(model)
    state = hc.elastic.TorchState(model=model, optimizer=optimizer)
    state.sync()
    train(model, optimizer, range(3))
    same_everywhere(model)
    del survivors


class Polite(torch.optim.SGD):
    """An optimizer that extends the base class's methods."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)

    def add_param_group(self, param_group: Any) -> None:
        super().add_param_group(param_group)


def test_an_optimizer_that_calls_its_base_class() -> None:
    model = chain()
    bare = Polite(list(model.parameters())[2:], lr=0.1)
    optimizer = hc.DistributedOptimizer(bare, named_parameters=model.named_parameters())
    train(model, optimizer, range(2))
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.add_param_group({"params": list(model.parameters())[:2]})
    train(model, optimizer, range(2))
    assert isinstance(optimizer, Polite)
    assert optimizer.reduction_stats.steps == 4


def test_step_hooks_run_once_after_loading_a_state() -> None:
    model = chain()
    optimizer = wrap(model)
    calls: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(optimizer.reduction_stats.steps))
    train(model, optimizer, range(1))
    optimizer.load_state_dict(optimizer.state_dict())
    train(model, optimizer, range(1))
    assert calls == [1, 2]  # once per step, and after the reduction


def test_a_rank_that_does_not_use_the_first_bucket_still_overlaps() -> None:
    model = chain(6)
    optimizer = wrap(model)
    for step in range(4):
        optimizer.zero_grad()
        used = model if hc.rank() == 0 else model[:4]
        loss(used, step).backward()
        optimizer.step()
    stats = optimizer.reduction_stats.last
    assert stats.launches_in_backward == len(stats.launch_order) - 1
    assert stats.late_gradients == []
