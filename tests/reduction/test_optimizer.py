"""Tests of DistributedOptimizer as a replacement for that of Horovod: methods, arguments, errors."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator
from typing import Any

import horovod.torch as stock
import pytest
import torch
from one_process import (
    WIDTH,
    chain,
    difference,
    fingerprint,
    loss,
    raises_everywhere,
    same_everywhere,
    train,
    train_for_all,
    wrap,
)
from torch import nn

import hvd_ckpt as hc

pytestmark = pytest.mark.ranks(gloo=(1, 2), mpi=(4,))

several = pytest.mark.ranks(gloo=(2,), mpi=(4,))


def momentum(model: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def with_momentum(model: nn.Module, **options: Any) -> Any:
    return wrap(model, momentum(model), **options)


# ---------------------------------------------------------------------------------------------------- steps


def test_a_copy_is_refused() -> None:
    with pytest.raises(TypeError, match="cannot be copied; copy the model"):
        copy.deepcopy(with_momentum(chain()))


def test_is_an_instance_of_the_wrapped_class_and_keeps_its_state() -> None:
    model = chain()
    plain = momentum(model)
    schedule = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5)
    train_for_all(model, plain, range(1))
    optimizer = wrap(model, plain)
    assert isinstance(optimizer, torch.optim.SGD)
    assert type(optimizer).__module__ == "horovod.torch.optimizer"
    assert type(optimizer).__name__ == "SGD"
    assert optimizer._parameter_names == {parameter: name for name, parameter in model.named_parameters()}
    assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5).step()
    assert optimizer.param_groups[0]["lr"] == 0.025


@several
def test_step_after_synchronize_warns_and_reduces_no_second_time() -> None:
    model = chain()
    optimizer = wrap(model, op=hc.Sum)
    loss(model, 0).backward()
    optimizer.synchronize()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    assert "optimizer.step() called without optimizer.skip_synchronize()" in str(caught[0].message)
    for before, parameter in zip(gradients, model.parameters()):
        assert torch.equal(before, parameter.grad)
    assert optimizer.reduction_stats.steps == 1


@several
def test_zero_grad_before_step_is_an_error() -> None:
    model = chain()
    optimizer = wrap(model)
    loss(model, 0).backward()
    with pytest.raises(AssertionError, match="zero_grad"):
        optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    assert all(parameter.grad.abs().sum() == 0 for parameter in model.parameters())


@several
def test_process_sets() -> None:
    evens, odds = (hc.add_process_set(list(range(first, hc.size(), 2))) for first in (0, 1))
    model = chain()
    train(model, wrap(model, process_set=evens), range(3))
    weights = hc.allgather_object(fingerprint(model))
    assert all(weights[rank] == weights[0] for rank in range(0, hc.size(), 2))
    assert all(weights[rank] != weights[0] for rank in range(1, hc.size(), 2))
    model = chain()
    train(model, wrap(model, process_set=odds if hc.rank() % 2 else evens), range(3))
    weights = hc.allgather_object(fingerprint(model))
    assert all(weights[rank] == weights[rank % 2] for rank in range(hc.size()))
    hc.remove_process_set(odds)
    hc.remove_process_set(evens)


@several
def test_adasum() -> None:
    if not hc.mpi_enabled():
        raises_everywhere(ValueError, "needs MPI", lambda: wrap(chain(), op=hc.Adasum))
        return
    model, other = chain(), chain()
    theirs = stock.DistributedOptimizer(
        momentum(other), named_parameters=other.named_parameters(), op=stock.Adasum
    )
    train(model, with_momentum(model, op=hc.Adasum), range(4))
    train(other, theirs, range(4))
    same_everywhere(model)
    assert difference(model, other) < 1e-6
    assert difference(model, chain()) > 1e-3


@several
def test_a_rank_without_any_data_joins_before_the_first_step() -> None:
    model = chain()
    optimizer = with_momentum(model)
    train(model, optimizer, range(3 if hc.rank() else 0))
    last = hc.join()
    hc.broadcast_parameters(model.state_dict(), root_rank=last)
    hc.broadcast_optimizer_state(optimizer, root_rank=last)
    train(model, optimizer, range(3))
    same_everywhere(model)
    assert difference(model, chain()) > 1e-3


@several
def test_other_operations_reduce_at_the_end() -> None:
    model = chain()
    optimizer = wrap(model, op=hc.Max)
    for step in range(3):
        optimizer.zero_grad()
        loss(model, step).backward()
        own = hc.allgather_object([parameter.grad.clone() for parameter in model.parameters()])
        optimizer.step()
        for parameter, *gradients in zip(model.parameters(), *own):
            assert torch.equal(parameter.grad, torch.stack(gradients).max(0).values)
        assert optimizer.reduction_stats.last.launches_in_backward == 0
    same_everywhere(model)


@several
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_sparse_gradients_are_gathered_in_their_type(dtype: torch.dtype) -> None:
    """Each rank has row 0, and one of its own."""
    table = nn.Parameter(torch.zeros(hc.size() + 1, 2, dtype=dtype))
    optimizer = hc.DistributedOptimizer(torch.optim.SGD([table], lr=0.1), [("table", table)])
    value = 2 + 3j if dtype.is_complex else 2
    rows = torch.full((2, 2), value, dtype=dtype)
    table.grad = torch.sparse_coo_tensor(torch.tensor([[0, hc.rank() + 1]]), rows, table.shape)
    optimizer.synchronize()
    expected = torch.full_like(table, value / hc.size()).detach()
    expected[0] = value
    assert table.grad.is_sparse and torch.equal(table.grad.to_dense(), expected)


@pytest.mark.parametrize("bucket_cap_mb", [25.0, 1e-4])
def test_a_notice_of_one_rank_reaches_all_with_the_gradients(bucket_cap_mb: float) -> None:
    model = chain(1)
    optimizer = wrap(model, bucket_cap_mb=bucket_cap_mb)
    seen = []
    for step in range(6):
        optimizer.zero_grad()
        loss(model, step).backward()
        if step in (0, 3) and hc.rank() == hc.size() - 1:
            optimizer.notify()
        optimizer.step()
        seen.append(optimizer.notified)
    assert seen == [True, False, False, True, False, False]
    assert optimizer.reduction_stats.last.control_messages == 0


# ---------------------------------------------------------------------------------------------------- state


def test_state_moves_between_stock_and_this_library() -> None:
    unbroken, model = chain(), chain()
    adam = lambda net: torch.optim.AdamW(net.parameters(), lr=0.01)  # noqa: E731
    train(unbroken, wrap(unbroken, adam(unbroken)), range(6))
    state = None
    for part, library in enumerate((hc, stock, hc)):
        weights, model = model.state_dict(), chain()  # without the hooks of the library before
        model.load_state_dict(weights)
        optimizer = library.DistributedOptimizer(adam(model), named_parameters=model.named_parameters())
        if state is not None:
            optimizer.load_state_dict(state)
        train(model, optimizer, range(2 * part, 2 * part + 2))
        state = copy.deepcopy(optimizer.state_dict())
    assert difference(model, unbroken) < 1e-6
    same_everywhere(model)


@several
def test_a_reduction_state_brings_its_buckets_and_fits_its_model() -> None:
    model = chain()
    optimizer = wrap(model)
    train(model, optimizer, range(3))
    state = optimizer.reduction_state_dict()
    resumed = wrap(model, bucket_cap_mb=25.0)
    resumed.load_reduction_state_dict(state)
    train(model, resumed, range(3, 4))
    assert resumed.reduction_stats.last == optimizer.reduction_stats.last
    with pytest.raises(ValueError, match="'elsewhere'"):
        resumed.load_reduction_state_dict({**state, "order": ["elsewhere"]})
    with pytest.raises(ValueError, match="version 7"):
        resumed.load_reduction_state_dict({"version": 7})
    with pytest.raises(ValueError, match="is a NoneType, and must be a dict"):
        resumed.load_reduction_state_dict(None)


@several
@pytest.mark.parametrize("everywhere", [True, False], ids=["on every rank", "on one rank"])
def test_a_parameter_put_in_place_of_another_is_an_error_everywhere(everywhere: bool) -> None:
    """As by code that prunes or splits: nobody would reduce its gradient, and the weights of the ranks would differ."""
    model = chain()
    optimizer = with_momentum(model)
    for replaces in (False, True):
        if replaces and (everywhere or hc.rank() == 0):
            model[0][0].weight = nn.Parameter(model[0][0].weight.detach().clone())
            optimizer.param_groups[0]["params"][0] = model[0][0].weight
        optimizer.zero_grad()
        loss(model, int(replaces)).backward()
        if replaces:
            raises_everywhere(
                RuntimeError, r"'params'\]\[0\].*make the DistributedOptimizer again", optimizer.step
            )
        else:
            optimizer.step()


@pytest.mark.parametrize("kind", ["AdamW", "LBFGS"])
def test_broadcast_optimizer_state_changes_nothing_but_the_others(kind: str) -> None:
    torch.manual_seed(hc.rank())
    model = nn.Linear(WIDTH, WIDTH)
    bare = getattr(torch.optim, kind)(model.parameters(), lr=0.01 * (1 + hc.rank()))
    optimizer = wrap(model, bare) if kind == "AdamW" else bare
    weights = fingerprint(model)
    hc.broadcast_optimizer_state(optimizer, root_rank=0)
    assert fingerprint(model) == weights
    assert all(parameter.grad is None for parameter in model.parameters())
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert all("step" not in state or float(state["step"]) == 0 for state in optimizer.state.values())
    state = optimizer.state_dict()
    if hc.rank() == 0:  # only the root has a state
        alone = getattr(torch.optim, kind)(model.parameters(), lr=0.01)

        def closure() -> torch.Tensor:
            alone.zero_grad()
            value = loss(model, 0)
            value.backward()
            return value

        alone.step(closure)
        torch.optim.Optimizer.zero_grad(alone)
        state = alone.state_dict()
    optimizer.load_state_dict(state)
    hc.broadcast_optimizer_state(optimizer, root_rank=0)
    states = hc.allgather_object(optimizer.state_dict())
    assert all(str(state) == str(states[0]) for state in states)
    assert states[0]["state"]


def test_broadcast_optimizer_state_sends_what_is_of_no_parameter() -> None:
    optimizer = momentum(chain(1))
    optimizer.state["all"] = {"steps": 3 + hc.rank(), "mean": torch.tensor([float(hc.rank())])}
    if hc.rank():
        optimizer.state["more"] = {"steps": 1}
    else:
        optimizer.state["root"] = {"steps": 2}
    hc.broadcast_optimizer_state(optimizer, root_rank=0)
    assert dict(optimizer.state) == {"all": {"steps": 3, "mean": torch.zeros(1)}, "root": {"steps": 2}}


def test_broadcast_parameters_of_every_dtype_and_shape() -> None:
    torch.manual_seed(hc.rank())
    state = {
        "half": torch.randn(3).half(),
        "brain": torch.randn(2, 2).bfloat16(),
        "flag": torch.rand(5) > 0.5,
        "count": torch.tensor(hc.rank()),
        "complex": torch.randn(2, dtype=torch.complex64),
        "empty": torch.empty(0),
        "turned": torch.randn(3, 4).t(),
    }
    hc.broadcast_parameters(state, root_rank=hc.size() - 1)
    everywhere = hc.allgather_object(state)
    assert all(torch.equal(other[name], everywhere[-1][name]) for other in everywhere for name in state)
    hc.broadcast_parameters(chain().named_parameters(), root_rank=0)
    with pytest.raises(ValueError, match="invalid params of type"):
        hc.broadcast_parameters(3, root_rank=0)


def test_elastic_state_around_the_optimizer() -> None:
    torch.manual_seed(hc.rank())
    model = chain()
    optimizer = wrap(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    state = hc.elastic.TorchState(model=model, optimizer=optimizer, batch=0)
    before = fingerprint(model)
    state.sync()
    assert fingerprint(model) == before
    train(model, optimizer, range(3))
    state.batch = 3
    state.save()
    committed = fingerprint(model)
    train(model, optimizer, range(3, 5))
    after = copy.deepcopy(model)
    loss(model, 9).backward()  # an interrupted step
    state.restore()
    assert fingerprint(model) == committed and state.batch == 3
    torch.optim.Optimizer.zero_grad(optimizer)
    state.sync()
    train(model, optimizer, range(3, 5))
    same_everywhere(model)
    assert difference(model, after) < 1e-6


# ---------------------------------------------------------------------------------------------------- errors


@several
@pytest.mark.parametrize("what", ["name", "shape", "dtype", "count", "requires_grad"])
def test_models_that_differ_between_ranks(what: str) -> None:
    model = chain()
    names: Iterator[tuple[str, nn.Parameter]] = model.named_parameters()
    if hc.rank() == hc.size() - 1:
        if what == "name":
            names = ((name.replace("1.", "two."), parameter) for name, parameter in names)
        elif what == "shape":
            model[1][0] = nn.Linear(WIDTH, WIDTH + 1)
        elif what == "dtype":
            model[1].double()
        elif what == "count":
            model.append(nn.Linear(1, 1))
        else:
            model[1].requires_grad_(False)
    raises_everywhere(
        ValueError,
        "4.weight" if what == "count" else "1.0.weight",
        lambda: hc.DistributedOptimizer(momentum(model), named_parameters=names),
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backward_passes_per_step": 0}, "backward_passes_per_step must be > 0, not 0"),
        ({"gradient_predivide_factor": 2.0, "op": hc.Sum}, "gradient_predivide_factor"),
        ({"gradient_predivide_factor": math.nan}, "gradient_predivide_factor must be a finite number"),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb must be > 0"),
        ({"groups": -1}, "groups should be"),
        ({"groups": [["x"]]}, "groups must consist of torch.Tensor"),
        ({"groups": [2]}, "groups should be"),
        ({"groups": [torch.ones(2)]}, "groups should be"),
        ({"groups": [iter([torch.ones(2)])]}, "groups should be"),
    ],
    ids=str,
)
def test_wrong_arguments(options: dict[str, Any], message: str) -> None:
    raises_everywhere(ValueError, message, lambda: wrap(chain(), **options))


@pytest.mark.parametrize(
    "options",
    [
        {"op": "sum"},
        {"op": [hc.Sum]},
        {"compression": None},
        {"compression": "fp16"},
        {"process_set": 0},
        {"process_set": None},
        {"bucket_cap_mb": "25"},
        {"backward_passes_per_step": 2.5},
        {"gradient_predivide_factor": "2"},
        {"keep_buckets": "no"},
        {"sparse_as_dense": "no"},
        {"shard": hc.Shard("gradients", master_weights="yes")},  # type: ignore[arg-type]
    ],
    ids=str,
)
def test_arguments_of_other_types(options: dict[str, Any]) -> None:
    name = "master_weights" if "shard" in options else next(iter(options))
    named = chain().named_parameters()
    raises_everywhere(
        TypeError,
        f"^{name} must be",
        lambda: hc.DistributedOptimizer(momentum(chain()), named_parameters=named, **options),
    )


def test_wrong_names_and_wrapping_twice() -> None:
    model = chain()
    names = list(model.named_parameters())

    def wrap_with(names: Any, trained: nn.Module | None = None) -> None:
        hc.DistributedOptimizer(momentum(model), named_parameters=names, model=trained)

    raises_everywhere(ValueError, "model has none of the parameters", lambda: wrap_with(names, chain()))

    missing = r"not named: parameter 2 of group 0 \(shape \(8, 8\)\)"
    raises_everywhere(ValueError, missing, lambda: wrap_with(names[:2]))
    raises_everywhere(ValueError, "tuples", lambda: wrap_with([(*pair, 1) for pair in names]))
    raises_everywhere(ValueError, "already", lambda: hc.DistributedOptimizer(wrap(model)))
    if hc.rank() == 0:  # an error of one rank is raised on all
        names[1] = (names[0][0], names[1][1])
    if hc.size() > 1 or hc.rank() == 0:
        raises_everywhere(ValueError, "Found duplicates: 0.0.weight", lambda: wrap_with(names))


def in_flight() -> tuple[nn.Sequential, Any]:
    """A model and its optimizer after a backward pass, in which all buckets but the last have left."""
    model = chain()
    optimizer = with_momentum(model)
    train(model, optimizer, range(2))
    optimizer.zero_grad()
    loss(model, 2).backward()
    return model, optimizer


@several
def test_a_gradient_changed_in_flight_is_an_error_everywhere() -> None:
    model = chain()
    optimizer = with_momentum(model)
    train(model, optimizer, range(2))
    kept = model[3][0].weight.grad
    optimizer.zero_grad(set_to_none=False)
    loss(model, 2).backward()
    if hc.rank() == 0:  # the memory that is in flight
        kept.mul_(0.5)
    changed = (
        r"'3.0.weight' was changed in place between backward\(\) and synchronize\(\).*hc\.clip_grad_norm_"
    )
    raises_everywhere(RuntimeError, changed, optimizer.step)


@several
def test_a_gradient_dropped_in_flight_is_dropped_or_an_error_everywhere() -> None:
    model, optimizer = in_flight()
    last = model[3][0]
    last.bias.grad = None
    optimizer.synchronize()
    assert last.weight.grad is not None and last.bias.grad is None
    model, optimizer = in_flight()
    if hc.rank() == 0:
        model[3][0].weight.grad = None
    raises_everywhere(
        RuntimeError,
        r"'3.0.weight' had its gradient dropped .* on rank 0 but not on rank 1; .*synchronize\(\) and then .*zero_grad\(\)",
        optimizer.step,
    )


@several
def test_a_model_converted_on_one_rank_is_an_error_everywhere() -> None:
    model = chain()
    optimizer = with_momentum(model)
    train(model, optimizer, range(2))
    optimizer.zero_grad()
    if hc.rank() == 0:
        model.double()
    loss(model, 2).backward()
    different = "dtype is torch.float64 on rank 0 and torch.float32 on rank 1"
    raises_everywhere(ValueError, different, optimizer.step)
