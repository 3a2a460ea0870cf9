"""DistributedOptimizer as a Horovod user meets it: its methods, its arguments, its errors."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import horovod.torch as stock
import pytest
import torch
from one_process import WIDTH, Scenario, batch, check, difference, fingerprint
from torch import nn

import hvd_ckpt as hc

pytestmark = pytest.mark.ranks(gloo=(1, 2), mpi=(4,))

alone = pytest.mark.skipif("hc.size() == 1", reason="one rank has nobody to differ from")


def chain(layers: int = 4, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(
        *[module for _ in range(layers) for module in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    ).to(dtype)


def sgd(model: nn.Module, lr: float = 0.1, **options: Any) -> Any:
    return hc.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9),
        named_parameters=model.named_parameters(),
        **options,
    )


def loss(model: nn.Module, step: int, rank: int | None = None) -> torch.Tensor:
    return (model(batch(step, hc.rank() if rank is None else rank)) - 0.3).square().mean()


def mean_loss(model: nn.Module, step: int) -> torch.Tensor:
    return torch.stack([loss(model, step, rank) for rank in range(hc.size())]).mean()


def same_everywhere(model: nn.Module) -> None:
    everywhere = hc.allgather_object(fingerprint(model))
    assert all(weights == everywhere[0] for weights in everywhere)


def raises_everywhere(kind: type[Exception], match: str, work: Callable[[], Any]) -> None:
    """The error must come on every rank, so nobody is left waiting."""
    with pytest.raises(kind, match=match):
        work()
    assert hc.allgather_object(hc.rank()) == list(range(hc.size()))


# ---------------------------------------------------------------------------------------------------- steps


def test_is_an_instance_of_the_wrapped_class_and_of_horovods_module() -> None:
    optimizer = sgd(chain())
    assert isinstance(optimizer, torch.optim.SGD)
    assert type(optimizer).__module__ == "horovod.torch.optimizer"
    assert type(optimizer).__name__ == "SGD"


def test_clipping_between_synchronize_and_step() -> None:
    model, reference = chain(), chain()
    optimizer, plain = sgd(model), torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for step in range(5):
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        with optimizer.skip_synchronize():
            optimizer.step()
        plain.zero_grad()
        mean_loss(reference, step).backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
        plain.step()
    assert difference(model, reference) < 1e-6
    same_everywhere(model)


@alone
def test_step_after_synchronize_warns_and_reduces_no_second_time() -> None:
    model = chain()
    optimizer = sgd(model, op=hc.Sum)
    loss(model, 0).backward()
    optimizer.synchronize()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    assert "optimizer.step() called without optimizer.skip_synchronize()" in str(caught[0].message)
    assert all(
        torch.equal(before, parameter.grad) for before, parameter in zip(gradients, model.parameters())
    )
    assert optimizer.reduction_stats.steps == 1


@alone
def test_zero_grad_before_step_is_an_error() -> None:
    model = chain()
    optimizer = sgd(model)
    loss(model, 0).backward()
    with pytest.raises(AssertionError, match="zero_grad"):
        optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    assert all(parameter.grad.abs().sum() == 0 for parameter in model.parameters())


def test_closures_are_evaluated_equally_often_everywhere() -> None:
    model, reference = chain(2, torch.float64), chain(2, torch.float64)
    calls = 0
    options = {"lr": 0.5, "max_iter": 8, "history_size": 5, "line_search_fn": "strong_wolfe"}
    optimizer = hc.DistributedOptimizer(
        torch.optim.LBFGS(model.parameters(), **options), named_parameters=model.named_parameters()
    )
    plain = torch.optim.LBFGS(reference.parameters(), **options)
    for step in range(3):

        def closure(step: int = step) -> torch.Tensor:
            nonlocal calls
            calls += 1
            optimizer.zero_grad()
            value = (model(batch(step, hc.rank()).double()) - 0.3).square().mean()
            value.backward()
            return value

        def plain_closure(step: int = step) -> torch.Tensor:
            plain.zero_grad()
            value = torch.stack(
                [(reference(batch(step, rank).double()) - 0.3).square().mean() for rank in range(hc.size())]
            ).mean()
            value.backward()
            return value

        ours, theirs = optimizer.step(closure), plain.step(plain_closure)
        assert abs(ours.item() - theirs.item()) < 1e-9
    assert len(set(hc.allgather_object(calls))) == 1
    assert difference(model, reference) < 1e-7
    same_everywhere(model)


@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_embeddings(as_dense: bool) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.often = nn.Embedding(20, WIDTH, sparse=True)
            self.sometimes = nn.Embedding(20, WIDTH, sparse=True)
            self.out = nn.Linear(WIDTH, 1)

    def backward(model: Any, step: int, rank: int) -> None:
        words = torch.randint(0, 20, (5 + rank,), generator=torch.Generator().manual_seed(100 * step + rank))
        hidden = model.often(words).sum(0)
        if step >= 2 and rank == 0:  # used for the first time in step 2, on one rank only
            hidden = hidden + model.sometimes(words).sum(0)
        model.out(hidden).square().sum().backward()

    scenario = Scenario(
        Words, backward, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.002), tolerance=1e-6
    )
    for cap in (25.0, 0.0001):
        optimizer = check(scenario, sparse_as_dense=as_dense, bucket_cap_mb=cap)
        often, sometimes = optimizer.param_groups[0]["params"][:2]
        assert often.grad.is_sparse and sometimes.grad.is_sparse


@pytest.mark.parametrize("clear", ["none", "never"])
def test_sparse_gradients_that_travel_dense_can_be_added_to(clear: str) -> None:
    """In the next pass, which may come late."""

    def backward(model: Any, step: int, rank: int) -> None:
        for part in range(1 + step % 2 + step // 3):
            words = torch.randint(
                20, (5,), generator=torch.Generator().manual_seed(100 * step + 10 * part + rank)
            )
            model(words).square().sum().backward()

    check(
        Scenario(
            lambda: nn.Sequential(nn.Embedding(20, WIDTH, sparse=True), nn.Linear(WIDTH, 1)),
            backward,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.001),
            tolerance=1e-6,
            static=False,
            clear=clear,
        ),
        sparse_as_dense=True,
        bucket_cap_mb=0.0001,
    )


@pytest.mark.skipif("hc.size() < 2", reason="needs ranks to divide")
def test_process_sets() -> None:
    evens, odds = stock_process_sets()
    mine = evens if hc.rank() % 2 == 0 else odds
    model = chain()
    optimizer = sgd(model, process_set=evens)
    torch.manual_seed(hc.rank())
    for step in range(4):
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.step()
    weights = hc.allgather_object(fingerprint(model))
    assert all(weights[rank] == weights[0] for rank in range(0, hc.size(), 2))
    assert all(weights[rank] != weights[0] for rank in range(1, hc.size(), 2))
    model = chain()
    optimizer = sgd(model, process_set=mine)
    for step in range(3):
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.step()
    weights = hc.allgather_object(fingerprint(model))
    assert all(weights[rank] == weights[rank % 2] for rank in range(hc.size()))
    hc.remove_process_set(odds)
    hc.remove_process_set(evens)


def stock_process_sets() -> tuple[Any, Any]:
    return (
        hc.add_process_set(list(range(0, hc.size(), 2))),
        hc.add_process_set(list(range(1, hc.size(), 2))),
    )


@alone
@pytest.mark.ranks(gloo=(1, 2, 4), mpi=(2, 4))
def test_adasum() -> None:
    if not hc.mpi_enabled():
        raises_everywhere(ValueError, "needs MPI", lambda: sgd(chain(), op=hc.Adasum))
        return
    model, other = chain(), chain()
    optimizer = sgd(model, op=hc.Adasum)
    theirs = stock.DistributedOptimizer(
        torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9),
        named_parameters=other.named_parameters(),
        op=stock.Adasum,
    )
    for step in range(5):
        for net, opt in ((model, optimizer), (other, theirs)):
            opt.zero_grad()
            loss(net, step).backward()
            opt.step()
    same_everywhere(model)
    assert difference(model, other) < 1e-6
    assert difference(model, chain()) > 1e-3


def test_uneven_data_with_join() -> None:
    """Rank r has r extra batches; every step's mean still divides by all ranks, as in Horovod."""
    size = hc.size()
    model, reference = chain(), chain()
    optimizer, plain = (
        sgd(model, bucket_cap_mb=0.0003),
        torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9),
    )
    for epoch in range(2):
        for step in range(3 + hc.rank()):
            optimizer.zero_grad()
            loss(model, 10 * epoch + step).backward()
            optimizer.step()
        last = hc.join()
        assert size == 1 or last == size - 1
        hc.broadcast_parameters(model.state_dict(), root_rank=max(last, 0))
        hc.broadcast_optimizer_state(optimizer, root_rank=max(last, 0))
        for step in range(3 + size - 1):
            plain.zero_grad()
            present = [rank for rank in range(size) if step < 3 + rank]
            (sum(loss(reference, 10 * epoch + step, rank) for rank in present) / size).backward()
            plain.step()
        assert difference(model, reference) < 1e-6
    same_everywhere(model)


def test_a_rank_without_any_data_joins_before_the_first_step() -> None:
    model, reference = chain(), chain()
    optimizer = sgd(model, bucket_cap_mb=0.0003)
    steps = 0 if hc.rank() == 0 and hc.size() > 1 else 3
    for step in range(steps):
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.step()
    last = max(hc.join(), 0)
    hc.broadcast_parameters(model.state_dict(), root_rank=last)
    hc.broadcast_optimizer_state(optimizer, root_rank=last)
    for step in range(3):
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.step()
    same_everywhere(model)
    assert difference(model, reference) > 1e-3


# ---------------------------------------------------------------------------------------------------- state


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.step()


def test_state_moves_between_stock_and_this_library() -> None:
    unbroken, model = chain(), chain()
    adam = lambda net: torch.optim.AdamW(net.parameters(), lr=0.01)  # noqa: E731
    train(
        unbroken,
        hc.DistributedOptimizer(adam(unbroken), named_parameters=unbroken.named_parameters()),
        range(9),
    )
    state = None
    for part, library in enumerate((hc, stock, hc)):
        optimizer = library.DistributedOptimizer(adam(model), named_parameters=model.named_parameters())
        if state is not None:
            optimizer.load_state_dict(state)
        train(model, optimizer, range(3 * part, 3 * part + 3))
        state = copy.deepcopy(optimizer.state_dict())
        if library is stock:
            for _, parameter in model.named_parameters():
                parameter._backward_hooks = None
            replacement = chain()
            replacement.load_state_dict(model.state_dict())
            model = replacement
    assert difference(model, unbroken) < 1e-6
    same_everywhere(model)


def test_loading_a_state_in_mid_training() -> None:
    model, optimizer = chain(), None
    optimizer = sgd(model, bucket_cap_mb=0.0003)
    train(model, optimizer, range(3))
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, range(3, 6))
    ended = fingerprint(model)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    train(model, optimizer, range(3, 6))
    assert fingerprint(model) == ended
    same_everywhere(model)


def test_existing_optimizer_state_is_kept_by_wrapping() -> None:
    model = chain()
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    mean_loss(model, 0).backward()
    plain.step()
    optimizer = hc.DistributedOptimizer(plain, named_parameters=model.named_parameters())
    assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))


def test_a_learning_rate_scheduler_made_before_or_after_wrapping() -> None:
    for before in (True, False):
        model = chain()
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5) if before else None
        optimizer = hc.DistributedOptimizer(plain, named_parameters=model.named_parameters())
        schedule = schedule or torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        train(model, optimizer, range(1))
        schedule.step()
        assert optimizer.param_groups[0]["lr"] == 0.05
        same_everywhere(model)


@alone
def test_reduction_state_resumes_bit_for_bit() -> None:
    def run(stop: bool) -> tuple[list[bytes], Any]:
        model = chain(6)
        optimizer = sgd(model, bucket_cap_mb=0.0006)
        train(model, optimizer, range(3))
        if stop:
            saved = copy.deepcopy(
                (model.state_dict(), optimizer.state_dict(), optimizer.reduction_state_dict())
            )
            model = chain(6)
            optimizer = sgd(model, bucket_cap_mb=25.0)
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            optimizer.load_reduction_state_dict(saved[2])
        train(model, optimizer, range(3, 6))
        return fingerprint(model), optimizer.reduction_stats.last

    assert run(stop=False) == run(stop=True)
    state = {
        "version": 2,
        "order": ["elsewhere"],
        "sparse": {},
        "densified": {},
        "bucket_cap_bytes": 1.0,
        "counts": None,
        "lower_counts": {},
    }
    with pytest.raises(ValueError, match="'elsewhere'"):
        sgd(chain()).load_reduction_state_dict(state)
    with pytest.raises(ValueError, match="version 7"):
        sgd(chain()).load_reduction_state_dict({"version": 7})


def test_add_param_group_in_mid_training() -> None:
    model, reference = chain(), chain()
    head, reference_head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    reference_head.load_state_dict(head.state_dict())
    optimizer, plain = sgd(model), torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for step in range(6):
        if step == 3:
            optimizer.add_param_group({"params": list(head.parameters()), "lr": 0.05})
            plain.add_param_group({"params": list(reference_head.parameters()), "lr": 0.05})
        optimizer.zero_grad()
        value = model(batch(step, hc.rank()))
        (head(value) if step >= 3 else value).square().mean().backward()
        optimizer.step()
        plain.zero_grad()
        values = [reference(batch(step, rank)) for rank in range(hc.size())]
        torch.stack(
            [(reference_head(v) if step >= 3 else v).square().mean() for v in values]
        ).mean().backward()
        plain.step()
    assert difference(model, reference) < 1e-6 and difference(head, reference_head) < 1e-6
    same_everywhere(head)
    if hc.size() > 1:
        assert "allreduce.noname.1.0" in optimizer.reduction_state_dict()["order"]


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Adagrad", "NAdam", "LBFGS"])
def test_broadcast_optimizer_state_changes_nothing_but_the_others(kind: str) -> None:
    torch.manual_seed(hc.rank())
    model = nn.Linear(WIDTH, WIDTH)
    options = {"lr": 0.01 * (1 + hc.rank())}
    optimizer = getattr(torch.optim, kind)(model.parameters(), **options)
    if kind != "LBFGS":
        optimizer = hc.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    weights = fingerprint(model)
    hc.broadcast_optimizer_state(optimizer, root_rank=0)
    assert fingerprint(model) == weights
    assert all(parameter.grad is None for parameter in model.parameters())
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert all("step" not in state or float(state["step"]) == 0 for state in optimizer.state.values())
    torch.optim.Optimizer.zero_grad(optimizer)
    if hc.rank() == 0:  # only the root has a state

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            value = model(batch(0, 0)).square().mean()
            value.backward()
            return value

        if kind == "LBFGS":
            optimizer.step(closure)
        else:
            closure()
            type(optimizer)._wrapped_class.step(optimizer) if hasattr(
                type(optimizer), "_wrapped_class"
            ) else super(type(optimizer), optimizer).step()
    hc.broadcast_optimizer_state(optimizer, root_rank=0)
    states = hc.allgather_object(optimizer.state_dict())
    assert all(str(state) == str(states[0]) for state in states)
    assert str(states[0]["state"]) != "{}" or kind == "SGD"


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


@alone
def test_broadcast_parameters_of_different_models_is_an_error_everywhere() -> None:
    model = nn.Linear(3, 4 if hc.rank() == 0 else 5)
    raises_everywhere(
        ValueError, "weight|bias", lambda: hc.broadcast_parameters(model.state_dict(), root_rank=0)
    )


def test_elastic_state_around_the_optimizer() -> None:
    torch.manual_seed(hc.rank())
    model = chain()
    optimizer = hc.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.01),
        named_parameters=model.named_parameters(),
        bucket_cap_mb=0.0003,
    )
    state = hc.elastic.TorchState(model=model, optimizer=optimizer, batch=0)
    before = fingerprint(model)
    state.sync()
    assert fingerprint(model) == before
    train(model, optimizer, range(3))
    state.batch = 3
    state.save()
    committed = fingerprint(model)
    train(model, optimizer, range(3, 5))
    after = fingerprint(model)
    loss(model, 9).backward()  # an interrupted step
    state.restore()
    assert fingerprint(model) == committed and state.batch == 3
    torch.optim.Optimizer.zero_grad(optimizer)
    state.sync()
    train(model, optimizer, range(3, 5))
    same_everywhere(model)
    assert difference(model, chain()) > 0
    assert max(float((a - b).abs().max()) for a, b in zip(model.parameters(), _restore(after, model))) < 1e-6


def _restore(raw: list[bytes], like: nn.Module) -> list[torch.Tensor]:
    return [
        torch.frombuffer(bytearray(data), dtype=p.dtype).view(p.shape)
        for data, p in zip(raw, like.parameters())
    ]


# ---------------------------------------------------------------------------------------------------- errors


@alone
@pytest.mark.parametrize("what", ["name", "shape", "dtype", "count", "requires_grad"])
def test_models_that_differ_between_ranks(what: str) -> None:
    model = chain()
    names = dict(model.named_parameters())
    if hc.rank() == hc.size() - 1:
        if what == "name":
            names = {name.replace("2.", "two."): parameter for name, parameter in names.items()}
        elif what == "shape":
            model[2] = nn.Linear(WIDTH, WIDTH + 1)
        elif what == "dtype":
            model[2].double()
        elif what == "count":
            model.append(nn.Linear(1, 1))
        else:
            model[2].requires_grad_(False)
    if what != "name":
        names = dict(model.named_parameters())
    where = "8.weight" if what == "count" else "2.weight"
    raises_everywhere(
        ValueError,
        where,
        lambda: hc.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=names.items()
        ),
    )


@alone
def test_an_error_of_one_rank_at_construction_is_raised_on_all() -> None:
    model = chain()
    names = list(model.named_parameters())
    if hc.rank() == 0:
        names[1] = (names[0][0], names[1][1])
    raises_everywhere(
        ValueError,
        "Found duplicates: 0.weight",
        lambda: hc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=names),
    )


@pytest.mark.parametrize(
    "options, message",
    [
        ({"backward_passes_per_step": 0}, "backward_passes_per_step must be > 0, not 0"),
        ({"gradient_predivide_factor": 2.0, "op": hc.Sum}, "gradient_predivide_factor"),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb must be > 0"),
        ({"groups": -1}, "groups should be"),
        ({"groups": [["x"]]}, "groups must consist of torch.Tensor"),
    ],
    ids=str,
)
def test_wrong_arguments(options: dict[str, Any], message: str) -> None:
    raises_everywhere(ValueError, message, lambda: sgd(chain(), **options))


def test_unnamed_parameters_and_wrapping_twice() -> None:
    model = chain()
    raises_everywhere(
        ValueError,
        r"not named: parameter 2 of group 0 \(shape \(8, 8\)\)",
        lambda: hc.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=list(model.named_parameters())[:2]
        ),
    )
    raises_everywhere(ValueError, "already", lambda: hc.DistributedOptimizer(sgd(model)))


def warmed_up(**options: Any) -> tuple[nn.Sequential, Any]:
    model = chain()
    optimizer = sgd(model, bucket_cap_mb=0.0003, **options)
    train(model, optimizer, range(2))
    optimizer.zero_grad()
    return model, optimizer


@alone
def test_a_gradient_scaled_in_flight_is_an_error_everywhere() -> None:
    model, optimizer = warmed_up()
    loss(model, 2).backward()
    if hc.rank() == 0:
        model[6].weight.grad.mul_(0.5)
    raises_everywhere(
        RuntimeError, r"changed in place between backward\(\) and synchronize\(\)", optimizer.step
    )


@alone
def test_clipping_with_torchs_function_in_flight_names_this_librarys() -> None:
    model, optimizer = warmed_up()
    loss(model, 2).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    raises_everywhere(RuntimeError, r"hvd_ckpt\.clip_grad_norm_", optimizer.step)


@alone
def test_a_gradient_replaced_in_flight_is_reduced_or_an_error_everywhere() -> None:
    model, optimizer = warmed_up()
    loss(model, 2).backward()
    model[6].weight.grad = torch.full_like(model[6].weight, float(hc.rank()))
    model[6].bias.grad = None
    optimizer.synchronize()
    assert torch.allclose(model[6].weight.grad, torch.full_like(model[6].weight, (hc.size() - 1) / 2))
    assert model[6].bias.grad is None
    model, optimizer = warmed_up()
    loss(model, 2).backward()
    if hc.rank() == 0:
        model[6].weight.grad = torch.zeros_like(model[6].weight)
    raises_everywhere(
        RuntimeError,
        "'6.weight' had its gradient replaced .* on rank 0 but not on rank 1|on rank 1 but not on rank 0",
        optimizer.step,
    )


@alone
def test_a_model_converted_on_one_rank_is_an_error_everywhere() -> None:
    model, optimizer = warmed_up()
    if hc.rank() == 0:
        model.double()
    (model(batch(2, hc.rank()).to(model[0].weight.dtype)) - 0.3).square().mean().backward()
    raises_everywhere(
        ValueError, "dtype is torch.float64 on rank 0 and torch.float32 on rank 1", optimizer.step
    )


@alone
def test_a_model_converted_in_mid_backward() -> None:
    model, optimizer = warmed_up()
    reference = copy.deepcopy(model).double()
    hidden = model[:4](batch(2, hc.rank()))
    hidden.register_hook(lambda gradient: model[6].double() and None)
    (model[4:](hidden) - 0.3).square().mean().backward()
    optimizer.synchronize()
    (
        torch.stack(
            [(reference(batch(2, rank).double()) - 0.3).square().mean() for rank in range(hc.size())]
        ).mean()
    ).backward()
    assert model[6].weight.grad.dtype is torch.float64
    for ours, theirs in zip(model.parameters(), reference.parameters()):
        assert torch.allclose(ours.grad.double(), theirs.grad, atol=1e-6)


def test_two_optimizers_take_turns_and_the_newest_counts() -> None:
    model = chain()
    first = sgd(model, bucket_cap_mb=0.0003)
    train(model, first, range(2))
    second = sgd(model, bucket_cap_mb=0.0003)
    reference = copy.deepcopy(model)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        second.zero_grad()
        loss(model, step).backward()
        second.step()
        plain.zero_grad()
        mean_loss(reference, step).backward()
        plain.step()
    assert difference(model, reference) < 1e-6


def test_gradients_of_gans_flow_through_two_optimizers() -> None:
    generator, critic = chain(), chain()
    optimizers = [sgd(generator, bucket_cap_mb=0.0003), sgd(critic, bucket_cap_mb=0.0003)]
    for step in range(6):
        for turn, optimizer in enumerate(optimizers):
            generator.requires_grad_(turn == 0)
            critic.requires_grad_(turn == 1)
            for other in optimizers:
                other.zero_grad()
            critic(generator(batch(step, hc.rank()))).square().mean().backward()
            optimizer.step()
    same_everywhere(generator)
    same_everywhere(critic)


@alone
def test_other_operations_reduce_at_the_end() -> None:
    model = chain()
    optimizer = hc.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        op=hc.Max,
        bucket_cap_mb=0.0003,
    )
    for step in range(3):
        optimizer.zero_grad()
        loss(model, step).backward()
        own = hc.allgather_object([parameter.grad.clone() for parameter in model.parameters()])
        optimizer.step()
        for parameter, *gradients in zip(model.parameters(), *own):
            assert torch.equal(parameter.grad, torch.stack(gradients).max(0).values)
        assert optimizer.reduction_stats.last.launches_in_backward == 0
    same_everywhere(model)


@pytest.mark.parametrize("bucket_cap_mb", [25.0, 1e-4])
def test_a_notice_of_one_rank_reaches_all_with_the_gradients(bucket_cap_mb: float) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = hc.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), bucket_cap_mb=bucket_cap_mb
    )
    seen = []
    for step in range(6):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        if step in (0, 3) and hc.rank() == hc.size() - 1:
            optimizer.notify()
        optimizer.step()
        seen.append(optimizer.notified)
    assert seen == [True, False, False, True, False, False]
    assert optimizer.reduction_stats.last.control_messages == 0
