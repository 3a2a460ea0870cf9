"""Tests of broadcasts of objects, weights and optimizers: they repair what a rank has changed, or all ranks raise one sentence."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from horovod.torch import mpi_ops
from one_process import (
    WIDTH,
    chain,
    check_weights,
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
from hvd_ckpt.collectives import agreement
from hvd_ckpt.processes import devices

pytestmark = pytest.mark.ranks(gloo=(1, 2), mpi=(4,))

several = pytest.mark.ranks(gloo=(2, 3), mpi=(4,))


def adam(model: nn.Module) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def trained_with_adam(steps: int, **options: Any) -> tuple[Any, Any]:
    model = chain()
    return trained(model, adam(model), steps, **options)


@pytest.mark.parametrize("name", [None, "objects"])
def test_the_ranks_values_need_not_be_of_one_type(name: str | None) -> None:
    value: Any = {"rank": 0} if hc.rank() == 0 else None
    assert hc.broadcast_object(value, 0, name) == {"rank": 0}
    values = [1, "one", None, lambda: 1][: hc.size()]
    gathered = hc.allgather_object(values[hc.rank()], name)
    assert gathered[:3] == values[:3]
    assert all(call() == 1 for call in gathered[3:])
    last = hc.size() - 1
    assert hc.broadcast_object([hc.rank()], root_rank=last, name=name) == [last]


@several
def test_an_object_may_be_too_large_for_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def broadcast(part: torch.Tensor, *args: Any, send: Any = mpi_ops.broadcast_, **options: Any) -> Any:
        sizes.append(part.numel())
        return send(part, *args, **options)

    monkeypatch.setattr(agreement, "LARGEST", 1000)
    monkeypatch.setattr(mpi_ops, "broadcast_", broadcast)
    content = bytes(range(256)) * 10
    assert hc.broadcast_object(content if hc.rank() == 1 else None, root_rank=1) == content
    assert sizes[:2] == [1000, 1000] and len(sizes) == 3
    everyone = [content[: 700 * rank] for rank in range(hc.size())]
    assert hc.allgather_object(everyone[hc.rank()]) == everyone


class OnGpu(nn.Parameter):
    """A parameter on a GPU that is not there."""

    is_cuda = True
    device = torch.device("cuda", 1)


def test_tensors_of_a_gpu_arrive_on_the_cpu() -> None:
    """The receiver has another GPU, or none."""
    value = [OnGpu(torch.full((2,), float(hc.rank()))), {"rank": hc.rank()}]
    for rank, (tensor, rest) in enumerate(hc.allgather_object(value)):
        assert isinstance(tensor, nn.Parameter) and tensor.device.type == "cpu" and not tensor.is_cuda
        assert tensor.requires_grad and tensor.tolist() == [rank, rank] and rest == {"rank": rank}
    tensor, _ = hc.broadcast_object(value, root_rank=0)
    assert tensor.tolist() == [0, 0] and (hc.rank() == 0 or tensor.device.type == "cpu")


@pytest.mark.ranks(mpi=(4,))
def test_a_process_set_has_a_root_of_its_own() -> None:
    members = hc.add_process_set([0, 2])
    try:
        if members.included():
            assert hc.broadcast_object(hc.rank() if hc.rank() else "root", 2, process_set=members) == 2
    finally:
        hc.remove_process_set(members)


class OddError(Exception):
    def __init__(self, number: int, text: str) -> None:
        super().__init__(text)
        self.number = number


@several
@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(2, "missing", "place"),
        KeyError("place"),
        OddError(3, "at this place"),
        TypeError("place"),
    ],
)
def test_an_error_of_one_rank_is_of_its_class_on_all(error: Exception) -> None:
    class Unsendable:
        def __reduce__(self) -> Any:
            raise error

    value = Unsendable() if hc.rank() == 1 else 1
    for send in (lambda: hc.broadcast_object(value, 1), lambda: hc.allgather_object(value)):
        assert raises_everywhere(type(error), "place", send).startswith("rank 1: ")
    assert hc.allgather_object(hc.rank()) == list(range(hc.size()))


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
    if hc.rank() == 0:  # only the root has a state
        twin = nn.Linear(WIDTH, WIDTH)
        loss(twin, 0).backward()
        alone = getattr(torch.optim, kind)(twin.parameters(), lr=0.01)
        alone.step(lambda: loss(twin, 0))
        optimizer.load_state_dict(alone.state_dict())
    hc.broadcast_optimizer_state(optimizer, root_rank=0)
    states = hc.allgather_object(optimizer.state_dict())
    assert all(str(state) == str(states[0]) for state in states)
    assert states[0]["state"]


def test_broadcast_optimizer_state_sends_what_is_of_no_parameter() -> None:
    optimizer = adam(chain(1))
    optimizer.state["all"] = {"steps": 3 + hc.rank(), "mean": torch.tensor([float(hc.rank())])}
    optimizer.state["more" if hc.rank() else "root"] = {"steps": 2}
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
    model, optimizer = trained_with_adam(0)
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
    check_weights(model, after)


@several
@pytest.mark.parametrize(
    "changes", [["load"], ["reduction"], ["reset"], ["load", "reduction", "reset"], []], ids=str
)
@pytest.mark.parametrize("call", ["broadcast_optimizer_state", "broadcast_parameters"])
def test_an_optimizer_in_use_that_a_rank_has_changed_by_itself(changes: list[str], call: str) -> None:
    """Or, without changes, that has loaded what ``broadcast_object`` has sent, and the root twice."""
    reference, unused = chain(), chain()
    plain, other = adam(reference), wrap(unused, adam(unused))  # which nothing happens to
    model, optimizer = trained_with_adam(3)
    train_for_all(reference, plain, range(3))
    state, learned = copy.deepcopy((optimizer.state_dict(), optimizer.reduction_state_dict()))
    perform: dict[str, Callable[[], Any]] = {
        "load": lambda: optimizer.load_state_dict(state),
        "reduction": lambda: optimizer.load_reduction_state_dict(
            {**learned, "order": learned["order"][::-1]}
        ),
        "reset": optimizer.reset_reduction,
    }
    optimizer.zero_grad()
    for change in changes if hc.rank() == hc.size() - 1 else ():
        perform[change]()
    if not changes:
        if hc.rank() == 0:
            optimizer.load_state_dict(state)
        optimizer.load_state_dict(hc.broadcast_object(state if hc.rank() == 0 else None))
    if call == "broadcast_parameters":
        hc.broadcast_parameters(model.state_dict(), root_rank=0)
    else:
        hc.broadcast_optimizer_state(optimizer, root_rank=0)
    orders = hc.allgather_object(optimizer.reduction_state_dict()["order"])
    assert orders == [learned["order"]] * hc.size()
    train(model, optimizer, range(3, 6))
    train_for_all(reference, plain, range(3, 6))
    check_weights(model, reference)
    assert optimizer.reduction_stats.last.control_messages == other.reduction_stats.steps == 0


@several
def test_an_optimizer_that_one_rank_collects_while_all_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has it any more, and Python collects it when it likes: on rank 0 as soon as ranks have told what they have."""
    model, optimizer = trained_with_adam(0)
    cycle: list[Any] = [trained_with_adam(2)[1]]
    if hc.rank() == 0:
        cycle[0].reset_reduction()
    gathering, gather = [], mpi_ops.allgather

    def gather_and_collect(*args: Any, **options: Any) -> Any:
        gathered = gather(*args, **options)
        if hc.rank() == 0:
            gathering.append(gc.collect())
        return gathered

    gc.disable()
    try:
        cycle.append(cycle)
        del cycle
        monkeypatch.setattr(mpi_ops, "allgather", gather_and_collect)
        hc.broadcast_parameters(model.state_dict(), root_rank=0)
    finally:
        gc.enable()
    assert bool(gathering) == (hc.rank() == 0)
    train(model, optimizer, range(2))
    same_everywhere(model)


@several
@pytest.mark.parametrize("shard", [1, 2, 3])
def test_a_sharded_state_that_one_rank_loads_is_refused_on_all(shard: int) -> None:
    unsharded = chain()
    plain = adam(unsharded)
    train_for_all(unsharded, plain, range(2))
    model, optimizer = trained_with_adam(0, shard=shard)

    def resume() -> None:
        if hc.rank() == 0:
            optimizer.load_state_dict(plain.state_dict())
        hc.broadcast_optimizer_state(optimizer, root_rank=0)

    raises_everywhere(RuntimeError, "different collective calls: .*load.* on rank 0.*broadcast", resume)
    optimizer.load_state_dict(plain.state_dict())
    hc.broadcast_optimizer_state(optimizer, root_rank=0)
    train(model, optimizer, range(2))


@several
def test_calls_that_differ_are_named_on_all_ranks() -> None:
    model = chain()
    optimizer = wrap(model)

    def differ() -> None:
        if hc.rank():
            hc.broadcast_parameters(model.state_dict(), root_rank=0)
        else:
            hc.broadcast_optimizer_state(optimizer, root_rank=0)

    raises_everywhere(RuntimeError, "broadcast_optimizer_state.*rank 0.*broadcast_parameters.*rank 1", differ)
    train(model, optimizer, range(2))
    same_everywhere(model)


@several
def test_roots_that_are_no_rank_or_differ() -> None:
    model = chain()
    calls: list[Callable[[int], Any]] = [
        lambda root: hc.broadcast_parameters(model.state_dict(), root_rank=root),
        lambda root: hc.broadcast_optimizer_state(adam(model), root_rank=root),
        lambda root: hc.broadcast_object(1, root_rank=root),
    ]
    for call in calls:
        raises_everywhere(ValueError, f"root_rank .*{hc.size()}", lambda call=call: call(hc.size()))
    for call in calls[:2]:
        raises_everywhere(ValueError, "root_rank differs", lambda call=call: call(int(hc.rank() == 1)))


@several
@pytest.mark.parametrize(
    ("value", "where"),
    [
        (None, "last"),
        (torch.zeros(3), "last"),
        (torch.zeros(WIDTH, WIDTH, device="meta"), "last"),
        (torch.eye(3).to_sparse(), "everywhere"),
    ],
    ids=["missing", "shape", "meta", "sparse"],
)
def test_a_parameter_that_differs_or_cannot_be_sent_is_named(value: Any, where: str) -> None:
    state = dict(chain().state_dict())
    if where == "everywhere" or hc.rank() == hc.size() - 1:
        state["1.0.weight"] = value
    state = {name: tensor for name, tensor in state.items() if tensor is not None}
    raises_everywhere(
        ValueError, "'1.0.weight' (is|differs)", lambda: hc.broadcast_parameters(state, root_rank=0)
    )


def test_a_horovod_without_operations_on_gpus_refuses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Horovod itself would wait forever."""
    monkeypatch.setattr(devices.hvd, "cuda_built", lambda: False)
    monkeypatch.setattr(devices.hvd, "rocm_built", lambda: False)
    weight = OnGpu(torch.zeros(2))
    named, sgd = [("weight", weight)], torch.optim.SGD([weight], lr=0.1)
    calls: dict[str, Callable[[], object]] = {
        "weight": lambda: hc.DistributedOptimizer(sgd, named),
        "'weight'": lambda: hc.LocalSGD(sgd, named),
        "weight'": lambda: hc.broadcast_parameters(named, root_rank=0),
        "group 0": lambda: hc.broadcast_optimizer_state(sgd, root_rank=0),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=rf"{name}.*cuda:1.*build-horovod"):
            call()


def test_parameters_on_another_gpu_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices.hvd, "cuda_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.warns(UserWarning, match=r"cuda:1.*cuda:0"):
        devices.check_devices([("weight", OnGpu(torch.zeros(2)))])
