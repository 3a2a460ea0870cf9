"""Tests of DistributedOptimizer as a replacement for that of Horovod: methods, arguments, state, errors."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import horovod.torch as stock
import pytest
import torch
from one_process import (
    WIDTH,
    chain,
    check_weights,
    difference,
    fingerprint,
    loss,
    raises_everywhere,
    same_everywhere,
    train,
    train_for_all,
    trained,
    wrap,
)
from torch import nn

import hvd_ckpt as hc

pytestmark = pytest.mark.ranks(gloo=(1, 2), mpi=(4,))

several = pytest.mark.ranks(gloo=(2,), mpi=(4,))


def momentum(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def test_is_an_instance_of_the_wrapped_class_and_keeps_its_state() -> None:
    model = chain()
    plain = momentum(model)
    train_for_all(model, plain, range(1))
    optimizer = wrap(model, plain)
    assert isinstance(optimizer, torch.optim.SGD)
    assert type(optimizer).__module__ == "horovod.torch.optimizer"
    assert type(optimizer).__name__ == "SGD"
    assert optimizer._parameter_names == {parameter: name for name, parameter in model.named_parameters()}
    assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))
    with pytest.raises(TypeError, match="cannot be copied; copy the model"):
        copy.deepcopy(optimizer)


@pytest.mark.parametrize("stepped", [True, False])
def test_schedules_made_before_wrapping_and_after_it(stepped: bool) -> None:
    """The first knows of steps."""
    model = chain(1)
    bare = momentum(model)
    schedule = torch.optim.lr_scheduler.StepLR(bare, 1, gamma=0.5)
    optimizer = wrap(model, bare)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(2):
            loss(model, step).backward()
            if stepped:
                optimizer.step()
            schedule.step()
    assert any("lr_scheduler.step()" in str(warning.message) for warning in caught) == (not stepped)
    assert optimizer.param_groups[0]["lr"] == 0.025
    torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5).step()
    assert optimizer.param_groups[0]["lr"] == 0.0125


@several
def test_step_hooks_run_once_after_loading_a_state() -> None:
    model = chain()
    optimizer = wrap(model)
    calls: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(optimizer.reduction_stats.steps))
    train(model, optimizer, range(1))
    optimizer.load_state_dict(optimizer.state_dict())
    train(model, optimizer, range(1))
    assert calls == [1, 2]  # once per step, and after the reduction


@several
def test_step_after_synchronize_warns_and_reduces_no_second_time() -> None:
    model = chain()
    optimizer = wrap(model, op=hc.Sum)
    loss(model, 0).backward()
    optimizer.synchronize()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    with pytest.warns(UserWarning, match="step.. called without optimizer.skip_synchronize"):
        optimizer.step()
    assert all(torch.equal(before, p.grad) for before, p in zip(gradients, model.parameters()))
    assert optimizer.reduction_stats.steps == 1
    optimizer.zero_grad(set_to_none=False)
    assert not any(parameter.grad.any() for parameter in model.parameters())


@several
def test_process_sets() -> None:
    evens, odds = (hc.add_process_set(list(range(first, hc.size(), 2))) for first in (0, 1))
    for own in evens, odds if hc.rank() % 2 else evens:
        model = chain()
        train(model, wrap(model, process_set=own), range(3))
        weights = hc.allgather_object(fingerprint(model))
        if own is evens and hc.rank() % 2:  # each trains by itself
            assert weights.count(fingerprint(model)) == 1
        else:
            assert weights[hc.rank() % 2 :: 2] == [fingerprint(model)] * (hc.size() // 2)
    assert weights[0] != weights[1]
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
    train(model, wrap(model, momentum(model), op=hc.Adasum), range(4))
    train(other, theirs, range(4))
    same_everywhere(model)
    assert difference(model, other) < 1e-6
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
        if step in (0, 3) and hc.rank() == hc.size() - 1:
            optimizer.notify()
        train(model, optimizer, range(step, step + 1))
        seen.append(optimizer.notified)
    assert seen == [True, False, False, True, False, False]
    assert optimizer.reduction_stats.last.control_messages == 0


def test_state_moves_between_stock_and_this_library() -> None:
    model = chain()
    unbroken, _ = trained(model, torch.optim.AdamW(model.parameters(), lr=0.01), steps=6)
    weights, state = chain().state_dict(), None
    for part, library in enumerate((hc, stock, hc)):
        model = chain()  # without the hooks of the library before
        model.load_state_dict(weights)
        plain = torch.optim.AdamW(model.parameters(), lr=0.01)
        optimizer = library.DistributedOptimizer(plain, named_parameters=model.named_parameters())
        if state is not None:
            optimizer.load_state_dict(state)
        train(model, optimizer, range(2 * part, 2 * part + 2))
        weights, state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    check_weights(model, unbroken)


@several
def test_a_reduction_state_brings_its_buckets_and_fits_its_model() -> None:
    model, optimizer = trained(chain(), steps=3)
    state = optimizer.reduction_state_dict()
    resumed = wrap(model, bucket_cap_mb=25.0)
    resumed.load_reduction_state_dict(state)
    train(model, resumed, range(3, 4))
    assert resumed.reduction_stats.last == optimizer.reduction_stats.last
    for wrong, message in (
        ({**state, "order": ["elsewhere"]}, "'elsewhere'"),
        ({"version": 7}, "version 7"),
        (None, "is a NoneType, and must be a dict"),
    ):
        with pytest.raises(ValueError, match=message):
            resumed.load_reduction_state_dict(wrong)


WRONG_VALUES: list[tuple[dict[str, Any], str]] = [
    ({"backward_passes_per_step": 0}, "backward_passes_per_step must be > 0, not 0"),
    ({"gradient_predivide_factor": math.nan}, "gradient_predivide_factor must be a finite number"),
    ({"bucket_cap_mb": 0}, "bucket_cap_mb must be > 0"),
    ({"groups": [["x"]]}, "groups must consist of torch.Tensor"),
    *(
        ({"groups": value}, "groups should be")
        for value in (-1, [2], [torch.ones(2)], [iter([torch.ones(2)])])
    ),
]
OTHER_TYPES: dict[str, tuple[Any, ...]] = {
    "op": ("sum", [hc.Sum]),
    "compression": (None, "fp16"),
    "process_set": (0, None),
    "bucket_cap_mb": ("25",),
    "backward_passes_per_step": (2.5,),
    "gradient_predivide_factor": ("2",),
    "keep_buckets": ("no",),
    "sparse_as_dense": ("no",),
}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        *((options, ValueError, message) for options, message in WRONG_VALUES),
        *(({name: one}, TypeError, f"^{name} must be") for name, many in OTHER_TYPES.items() for one in many),
        ({"shard": 2, "master_weights": "yes"}, TypeError, "^master_weights must be"),
    ],
    ids=str,
)
def test_wrong_values_and_other_types(options: dict[str, Any], error: type[Exception], message: str) -> None:
    raises_everywhere(error, message, lambda: wrap(chain(), **options))


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
    raises_everywhere(ValueError, "Found duplicates: 0.0.weight", lambda: wrap_with(names))


def set_layer(model: nn.Sequential, layer: nn.Module) -> None:
    model[1][0] = layer


MODELS_APART: dict[str, Callable[[nn.Sequential], Any]] = {
    "name": lambda model: model[1].append(model[1].pop(0)),
    "shape": lambda model: set_layer(model, nn.Linear(WIDTH, WIDTH + 1)),
    "dtype": lambda model: model[1].double(),
    "count": lambda model: model.append(nn.Linear(1, 1)),
    "requires_grad": lambda model: model[1].requires_grad_(False),
}


@several
@pytest.mark.parametrize("what", MODELS_APART)
def test_models_that_differ_between_ranks(what: str) -> None:
    model = chain()
    if hc.rank() == hc.size() - 1:
        MODELS_APART[what](model)
    named = "4.weight" if what == "count" else "1.0.weight"
    raises_everywhere(ValueError, named, lambda: wrap(model))


UNREDUCED, UNCLEARED = "would use gradients that are not reduced", r"zero_grad\(\) was called after"
REPLACED = r"'params'\]\[0\].*make the DistributedOptimizer again"
WRONG_STEPS: list[tuple[int, str, type[Exception], str]] = [
    # Calls in a wrong order, with the scaler of this library or torch's.
    (0, "backward zero_grad", AssertionError, UNCLEARED),
    (2, "backward zero_grad", AssertionError, UNCLEARED),
    (0, "backward step_alone", RuntimeError, UNREDUCED),
    (2, "backward step_alone", RuntimeError, UNREDUCED),
    (0, "backward synchronize backward step_alone", RuntimeError, UNREDUCED),
    (2, "backward synchronize backward step_alone", RuntimeError, UNREDUCED),
    (0, "backward unscale backward scaler.step", RuntimeError, UNREDUCED),
    (2, "backward unscale backward scaler.step", RuntimeError, UNREDUCED),
    (0, "backward unscale unscale", RuntimeError, "already been called"),
    (0, "torch's backward scaler.step", RuntimeError, "use hvd_ckpt.GradScaler"),
    (0, "torch's backward unscale scaler.step", RuntimeError, "use hvd_ckpt.GradScaler"),
    (0, "torch's backward synchronize clear backward scaler.step", RuntimeError, "use hvd_ckpt.GradScaler"),
    # What rank 0 alone does to a gradient in flight, or to the model.
    (2, "backward halve@0 step", RuntimeError, r"'3.0.weight' was changed in place.*hc\.clip_grad_norm_"),
    (2, "backward drop@0 step", RuntimeError, r"'3.0.weight' had its gradient dropped .* on rank 0 but not on "
     r"rank 1; .*synchronize\(\) and then .*zero_grad\(\)"),
    (2, "convert@0 backward step", ValueError, "torch.float64 on rank 0 and torch.float32 on rank 1"),
    (2, "transpose@0 backward step", ValueError, "'3.0.weight'.* on rank"),
    # A parameter in place of another, as by code that prunes or splits: nobody would reduce its gradient.
    (2, "replace@0 backward step", RuntimeError, REPLACED),
    (2, "replace backward step", RuntimeError, REPLACED),
]  # fmt: skip


@several
@pytest.mark.parametrize(("before", "calls", "error", "message"), WRONG_STEPS)
def test_what_is_wrong_in_a_step_is_an_error_everywhere(
    before: int, calls: str, error: type[Exception], message: str
) -> None:
    """After some steps; in the last one the buckets but one leave in the backward pass."""
    model, optimizer = trained(chain(), steps=before)
    kind = torch.amp.GradScaler if calls.startswith("torch's") else hc.GradScaler
    scaler: Any = kind("cpu", init_scale=8.0)
    weight = model[3][0].weight
    memory = weight.grad  # is in flight after the backward pass

    def step_alone() -> None:
        with optimizer.skip_synchronize():
            optimizer.step()

    def transpose() -> None:
        weight.data = weight.detach().t().contiguous().t()

    def replace() -> None:
        model[0][0].weight = nn.Parameter(model[0][0].weight.detach().clone())
        optimizer.param_groups[0]["params"][0] = model[0][0].weight

    perform: dict[str, Callable[[], Any]] = {
        "backward": lambda: scaler.scale(loss(model, 0)).backward(),
        "clear": model.zero_grad,
        "zero_grad": optimizer.zero_grad,
        "synchronize": optimizer.synchronize,
        "step": optimizer.step,
        "step_alone": step_alone,
        "unscale": lambda: scaler.unscale_(optimizer),
        "scaler.step": lambda: scaler.step(optimizer),
        "halve": lambda: memory.mul_(0.5),
        "drop": lambda: setattr(weight, "grad", None),
        "convert": model.double,
        "transpose": transpose,
        "replace": replace,
    }
    optimizer.zero_grad(set_to_none=False)
    *words, last = calls.removeprefix("torch's ").split()
    for word in words:
        if not word.endswith("@0") or hc.rank() == 0:
            perform[word.removesuffix("@0")]()
    raises_everywhere(error, message, perform[last])
    if last == "step":
        return
    optimizer.synchronize()  # and training goes on
    step_alone()
    train(model, optimizer, range(2))
    same_everywhere(model)
