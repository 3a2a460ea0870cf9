"""Tests of micro-batches: they give the gradients of the whole mini-batch, also of ranks that have different numbers of samples and
terms, and recompute or keep as requested."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from same import assert_same, gradients
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from ways import each_of

import hvd_ckpt as hc
from hvd_ckpt.data.objectives import Batch
from hvd_ckpt.planning.policy import CheckpointPolicy, apply_policy
from hvd_ckpt.recompute.tape import Policy

pytestmark = pytest.mark.ranks(gloo=(1,))

ROUNDING = 1e-9


class Counted(nn.Module):
    """Two layers and a count of how often they run."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.GELU())
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return self.layers(x)


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Counted() for _ in range(3)), nn.Linear(6, 5)).double()


def tokens(samples: int = 7, seed: int = 1, shift: int = 0) -> Batch:
    """Targets with rows that have 0 to 4 terms; -100 is none."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(5, (samples, 4), generator=generator)
    for row in range(samples):
        targets[row, (row + shift) % 5 :] = -100
    return Batch((torch.randn(samples, 4, 6, generator=generator, dtype=torch.float64),), targets)


def mean_loss(model: nn.Module, part: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(*part.inputs).flatten(0, 1), part.targets.flatten())


def terms(part: Batch) -> Tensor:
    return (part.targets != -100).sum()


RECOMPUTED = [(4, "always", 8), (4, "except_last", 7), (4, "never", 4)]


@pytest.mark.parametrize(
    ("use_reentrant", "parts", "checkpoint", "runs"),
    [
        *((None, parts, "always", runs) for parts, runs in ((1, 1), (3, 3), (100, 7))),
        *((use_reentrant, *row) for use_reentrant in (False, True) for row in RECOMPUTED),
    ],
)
def test_equals_the_whole_batch_weighted_by_tokens(
    use_reentrant: bool | None, parts: int, checkpoint: str, runs: int
) -> None:
    whole, plain = make(), make()
    expected = mean_loss(whole, tokens())
    expected.backward()
    model: nn.Module = plain
    if use_reentrant is not None:
        model = hc.CheckpointSequential(plain, 2, use_reentrant, keep_last=False)
    compute = functools.partial(mean_loss, model)
    loss, weight = hc.accumulate(compute, tokens(), parts, checkpoint=checkpoint, weight=terms)
    assert not loss.requires_grad and weight == float(terms(tokens()))
    # With as many parts as samples, row 0 has no terms: its mean is nan, and must not count.
    assert_same([loss, *gradients(model)], [expected.detach(), *gradients(whole)], ROUNDING)
    assert plain[0].runs == runs


def test_losses_in_half_precision_are_added_up_in_float32() -> None:
    weight = nn.Parameter(torch.ones((), dtype=torch.bfloat16))
    parts: list[Tensor] = []

    def compute(part: Tensor) -> Tensor:
        parts.append(part)
        return (weight * part).mean()

    loss, _ = hc.accumulate(compute, torch.ones(300, 1).bfloat16(), 400)
    assert len(parts) == 300 and all(len(part) == 1 for part in parts)  # at most as many as samples
    assert loss.dtype is torch.float32 and abs(float(loss) - 1) < 1e-4


class Overflowing(torch.autograd.Function):
    """The same values; the gradient is infinite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.full_like(gradient, float("inf"))


def test_an_overflow_is_seen_where_no_term_counts() -> None:
    weight = nn.Parameter(torch.ones(2))
    hc.accumulate(lambda part: Overflowing.apply(weight).sum(), torch.ones(2, 1), 1, weight=lambda part: 0)
    assert weight.grad is not None and weight.grad.isinf().all()


def test_any_tensors_weighted_by_samples() -> None:
    data: Any = {"inputs": (torch.randn(5, 6, dtype=torch.float64), None), "scale": 2.0}

    def compute(model: nn.Module, part: Any) -> Tensor:
        return (model(part["inputs"][0]) * part["scale"]).square().mean()

    whole, model = make(), make()
    expected = compute(whole, data)
    expected.backward()
    seen: list[bool] = []

    def backward(loss: Tensor, last: bool) -> None:
        seen.append(last)
        loss.backward()

    loss, weight = hc.accumulate(functools.partial(compute, model), data, 3, backward=backward)
    assert weight == 5 and seen == [False, False, True]
    assert_same([loss, *gradients(model)], [expected.detach(), *gradients(whole)], ROUNDING)


def test_nothing_to_learn_from_gives_zeros() -> None:
    batch, model = tokens(), make()
    batch.targets[:] = -100
    chain = hc.CheckpointSequential(model, 2)

    def compute(part: Batch) -> Tensor:
        valid = part.targets != -100
        return (chain(*part.inputs).square().sum(-1) * valid).sum() / valid.sum()

    assert hc.accumulate(compute, batch, 2, weight=terms) == (0, 0)
    assert_same(gradients(model), [torch.zeros_like(parameter) for parameter in model.parameters()])


def test_errors() -> None:
    compute = functools.partial(mean_loss, make())
    for wrong, error, message in [
        ({"micro_batches": 0}, ValueError, "at least 1, got 0"),
        ({"micro_batches": 2.0}, TypeError, "must be an int, got 2.0"),
        ({"checkpoint": "sometimes"}, ValueError, "one of always, except_last, never, got 'sometimes'"),
        ({"weight": lambda part: -1}, ValueError, "0 or more, got -1.0"),
        ({"weight": lambda part: float("nan")}, ValueError, "0 or more, got nan"),
        ({"mean_terms": -2.0}, ValueError, "0 or more, got -2.0"),
        ({"batch": {"a": torch.ones(3), "b": torch.ones(2, 1)}}, ValueError, r"the shapes \(3,\), \(2, 1\)"),
        ({"batch": Batch((torch.ones(4, 6),), torch.ones(3))}, ValueError, r"the shapes \(4, 6\), \(3,\)"),
        ({"batch": [1, 2]}, TypeError, r"no tensors and no split\(parts\).*int"),
        ({"compute": lambda part: part.inputs[0]}, TypeError, r"one element, got one of shape \(4, 4, 6\)"),
        ({"compute": lambda part: 1.0}, TypeError, "one element, got a float"),
    ]:
        arguments = {"compute": compute, "batch": tokens(), "micro_batches": 2, **wrong}
        with pytest.raises(error, match=message):
            hc.accumulate(**arguments)


# ------------------------------------------------------------------------------------ without recomputation


def results(block: nn.Module, compute: Callable[[Tensor], Any], *inside: bool) -> list[Tensor | None]:
    """Of a forward and a backward pass, each within ``without_recomputation()`` or not."""
    forward, backward = (hc.without_recomputation() if one else contextlib.nullcontext() for one in inside)
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(2, 6).requires_grad_()
    with forward:
        y = compute(x)
        assert not (inside[0] and hc.is_checkpointing())
    with backward:
        y.sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *gradients(block)]


@each_of("non-reentrant", "reentrant", "CheckpointFunction", "segments", "nested")
@pytest.mark.parametrize("backward_inside", [True, False])
def test_without_recomputation_a_call_just_runs(run: Callable[..., Any], backward_inside: bool) -> None:
    recomputed, kept = make()[0], make()[0]
    expected = results(recomputed, functools.partial(run, recomputed), False, False)
    assert_same(expected, results(kept, functools.partial(run, kept), True, backward_inside))
    assert recomputed.runs > 1 and kept.runs == 1


def test_a_backward_pass_inside_recomputes_as_the_forward_pass_did() -> None:
    """The inner region of a region that was recorded outside is a region in the recomputation, too."""
    found = []
    for backward_inside in (False, True):
        block = make()[0]

        def nested(x: Tensor, block: nn.Module = block) -> Any:
            return hc.checkpoint(lambda x: torch.as_tensor(hc.checkpoint(block, x.sin())).tanh().sin(), x)

        found.append([*results(block, nested, False, backward_inside), block.runs])
    assert found[0][-1] == 3
    assert_same(*found)


class CountGelu(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.ops.aten.gelu.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "policy",
    [
        CheckpointPolicy("recompute", recompute=True),
        CheckpointPolicy("drop", Policy(("linear", "gelu", "linear"), frozenset({1}))),
    ],
)
def test_blocks_with_a_policy_keep_what_they_would_drop(policy: CheckpointPolicy) -> None:
    found, runs = [], []
    for keep in (False, True):
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6)).double()
        apply_policy(block, policy)
        with CountGelu() as calls:
            found.append(results(block, block, keep, keep))
        runs.append(calls.count)
    assert runs == [2, 1]
    assert_same(*found)


# ------------------------------------------------------------------------------------ several ranks


several = pytest.mark.ranks(gloo=(2, 4))


def tokens_of(step: int, rank: int) -> Batch:
    """The batch of a rank, the same wherever it is made; the last has no terms."""
    part = tokens(5 + 2 * rank, 100 * step + rank, rank)
    if rank == hc.size() - 1:
        part.targets[:] = -100
    return part


@several
@pytest.mark.parametrize(
    ("checkpoint", "use_reentrant"),
    [("always", False), ("always", True), ("except_last", True), ("never", False)],
)
def test_trains_as_one_process_with_the_samples_of_all(checkpoint: str, use_reentrant: bool) -> None:
    plain, model = make(), hc.CheckpointSequential(make(), 3, use_reentrant, keep_last=False)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hc.DistributedOptimizer(optimizer, model.named_parameters(), bucket_cap_mb=3e-4)
    options = {"checkpoint": checkpoint, "weight": terms, "across_ranks": True}
    for step in range(3):
        reference.zero_grad()
        parts = [tokens_of(step, rank) for rank in range(hc.size())]
        inputs = torch.cat([part.inputs[0] for part in parts])
        expected = mean_loss(plain, Batch((inputs,), torch.cat([part.targets for part in parts])))
        expected.backward()
        optimizer.zero_grad()
        loss, weight = hc.accumulate(functools.partial(mean_loss, model), parts[hc.rank()], 3, **options)
        optimizer.synchronize()
        assert_same(gradients(model), gradients(plain), 1e-9)
        part = torch.stack([loss * weight, torch.tensor(weight).double()])
        losses = hc.allgather(part[None], name="losses")
        assert_same([losses[:, 0].sum() / losses[:, 1].sum()], [expected.detach()], 1e-9)
        with optimizer.skip_synchronize():
            optimizer.step()
        reference.step()
        last = optimizer.reduction_stats.last
        assert set(last.launches.values()) == {1} and len(last.launches) > 2
        assert step == 0 or not last.late_gradients


def seen_by(rank: int) -> list[Tensor]:
    """What a rank's norms see in a mini-batch; of several ranks, rank 1 sees nothing."""
    generator = torch.Generator().manual_seed(rank)
    parts = 0 if rank == 1 else 2 + rank
    return [torch.randn(3 + rank, 4, 5, generator=generator).double() * 3 + rank for _ in range(parts)]


@several
def test_statistics_pooled_over_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    allgather = hvd.allgather
    monkeypatch.setattr(
        hvd, "allgather", lambda *args, **kwargs: calls.append(1) or allgather(*args, **kwargs)
    )
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Conv1d(4, 3, 1), nn.BatchNorm1d(3, momentum=None)).double()
    hc.broadcast_parameters(model.state_dict(), root_rank=0)
    hc.DeferredBatchNorm.convert(model)
    for _ in range(2):
        for part in seen_by(hc.rank()):
            hc.checkpoint(model, part).sin().sum().backward()
        hc.commit_batch_norm(model, across_ranks=True)
    assert len(calls) == 2
    # The second norm sees what the first has normalized, by the statistics of each part.
    inner = nn.Sequential(nn.BatchNorm1d(4, affine=False, track_running_stats=False), model[1])
    everything = [part for rank in range(hc.size()) for part in seen_by(rank)]
    second = [inner(part).detach() for part in everything]
    for norm, inputs, weight in ((model[0], everything, 0.19), (model[2], second, 1.0)):
        values = torch.cat(inputs).transpose(0, 1).flatten(1)
        assert norm.num_batches_tracked == 2
        assert_same([norm.running_mean], [weight * values.mean(1)], 1e-9)
        assert_same([norm.running_var], [1 - weight + weight * values.var(1)], 1e-9)
    states = hc.allgather_object({name: value.tolist() for name, value in model.state_dict().items()})
    assert all(state == states[0] for state in states)
