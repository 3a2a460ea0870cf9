"""Tests of sharded training through the public API: it equals training without shards for any model."""

from __future__ import annotations

import copy
import functools
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_process import WIDTH as INPUTS, loss, train, wrap
from same import assert_same, whole_weights
from sharded import distribute
from torch import nn

import hvd_ckpt as hc

pytestmark = pytest.mark.ranks(gloo=(1, 2))

STAGES = (1, 2, 3)
WIDTH = 24

Make = Callable[[Any], torch.optim.Optimizer]


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)


class Model(nn.Module):
    """Four recomputed blocks; one that nobody uses; a frozen one; a layer that stands in two places."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7 + hc.rank())  # of which rank 0's are to win
        self.first = nn.Linear(INPUTS, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.blocks[2][0].weight.requires_grad_(False)
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.blocks[3][0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            x = block(x) if number == 1 else hc.checkpoint(block, x, use_reentrant=number == 3)
        return self.last(x)


def wrapped(model: nn.Module, make: Make, stage: int, **options: Any) -> Any:
    optimizer = wrap(model, make(model.parameters()), shard=stage, **{"bucket_cap_mb": 0.004, **options})
    if not stage:
        hc.broadcast_parameters(model.state_dict(), root_rank=0)
    return optimizer


def trained(
    make: Make, stage: int, kind: Callable[[], nn.Module] = Model, count: int = 4
) -> dict[str, torch.Tensor]:
    model = kind()
    optimizer = wrapped(model, make, stage)
    train(model, optimizer, range(count))
    return whole_weights(model, optimizer)


@functools.cache
def whole(make: Make) -> dict[str, torch.Tensor]:
    """Weights of the run that is not sharded."""
    return trained(make, 0)


def rounding() -> float:
    """The tolerance of sums over the ranks, which two add up in one order alone."""
    return 0.0 if hc.size() <= 2 else 1e-5


@pytest.mark.ranks(gloo=(1, 2), mpi=(4,))
@pytest.mark.parametrize("stage", [1, 2])
def test_norms_of_any_order_are_those_of_torch(stage: int) -> None:
    model, twin = Model(), Model()
    optimizer, plain = wrapped(model, momentum, stage), wrapped(twin, momentum, 0)
    cases = (0.0, (0, 0.5, 1, 3, -1, math.inf, -math.inf)), (math.inf, (2,)), (math.nan, (-math.inf,))
    for value, orders in cases:  # of one gradient; one of zeros counts, too
        for one, other in ((model, optimizer), (twin, plain)):
            handle = one.first.bias.register_hook(lambda g, value=value: torch.full_like(g, value))
            other.zero_grad()
            loss(one, 0).backward()
            handle.remove()
        plain.synchronize()
        for order in orders:
            ours = hc.clip_grad_norm_(model.parameters(), 1e9, order)
            theirs = nn.utils.clip_grad_norm_(twin.parameters(), 1e9, order)
            torch.testing.assert_close(ours, theirs, equal_nan=True)
            twice = [[one.first.weight, *one.parameters(), one.first.bias] for one in (model, twin)]
            ours = hc.clip_grad_norm_(twice[0], 1e9, order)
            torch.testing.assert_close(ours, nn.utils.clip_grad_norm_(twice[1], 1e9, order), equal_nan=True)


class Energy(nn.Module):
    """Of all parameters but the last."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self.all = nn.ParameterList(parameters)

    def forward(self) -> Any:
        return sum((one * one.conj()).sum().abs().double() for one in list(self.all)[:-1])


@pytest.mark.ranks(gloo=(2,), mpi=(4,))
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float64,),
        (torch.bfloat16,),
        (torch.float16,),
        (torch.complex64,),
        (torch.float32, torch.float64),
        (torch.bfloat16, torch.float16),
        (torch.complex128, torch.bfloat16),
    ],
    ids=lambda dtypes: "-".join(str(dtype).removeprefix("torch.") for dtype in dtypes),
)
def test_a_norm_has_the_dtype_that_torch_gives_it(stage: int, dtypes: tuple[torch.dtype, ...]) -> None:
    def backward(shard: int) -> tuple[list[nn.Parameter], Any]:
        generator = torch.Generator().manual_seed(5)
        parameters = [
            nn.Parameter(torch.randn(9, generator=generator).to(dtypes[number % len(dtypes)]))
            for number in range(4)
        ]
        model = Energy(parameters)
        optimizer = hc.DistributedOptimizer(
            torch.optim.SGD(parameters[:3], lr=0.1), model.named_parameters(), shard=shard, model=model
        )
        model().backward()
        return parameters, optimizer

    parameters, optimizer = backward(stage)
    plain, unsharded = backward(0)
    unsharded.synchronize()
    tolerance = 1e-2 if any(torch.finfo(dtype).bits == 16 for dtype in dtypes) else 1e-6
    for order in (2.0, math.inf, 0.0):
        theirs = nn.utils.get_total_norm([one.grad for one in plain[:3] if one.grad is not None], order)
        ours = hc.clip_grad_norm_(parameters, 1e9, order)
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=0.0)
    optimizer.step()
    nothing = hc.clip_grad_norm_(parameters[3:], 1.0)
    assert nothing == 0.0 and nothing.dtype is torch.float32  # as in torch, where there are no gradients


def creeping(
    dtype: torch.dtype, stage: int, **options: Any
) -> tuple[nn.Module, Any, dict[str, torch.Tensor]]:
    """Twelve updates, each of which by itself is lost in bfloat16, and what they come to."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 8)).to(dtype)
    optimizer = wrapped(model, lambda parameters: torch.optim.SGD(parameters, lr=5e-5), stage, **options)
    start = whole_weights(model, optimizer)
    creep(model, optimizer, 12, dtype)
    end = whole_weights(model, optimizer)
    assert (start["1.bias"].float() - end["1.bias"].float() > 1e-3).all()  # 12 updates of 2e-4
    return model, optimizer, end


def creep(model: nn.Module, optimizer: Any, count: int, dtype: torch.dtype) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.ones(4, 16, dtype=dtype)).float().sum().backward()
        optimizer.step()


def test_half_precision_weights_follow_float32_masters() -> None:
    results = []
    for stage in STAGES:
        model, optimizer, end = creeping(torch.bfloat16, stage)
        assert all(value.dtype is torch.bfloat16 for value in end.values())
        assert set(optimizer.state_dict()["master_weights"]) == set(range(len(optimizer.pieces)))
        assert all(piece.parameter.dtype is torch.float32 for piece in optimizer.pieces)
        results.append(end)
        with optimizer.gathered_parameters():  # what is written from outside counts
            model[0].weight.data.fill_(2.0)
        creep(model, optimizer, 1, torch.bfloat16)
        assert whole_weights(model, optimizer)["0.weight"].float().mean() > 1.9
    assert_same(results[1], results[2])
    torch.manual_seed(0)
    optimizer = wrapped(nn.Linear(4, 4).to(torch.bfloat16), momentum, 2, master_weights=False)
    assert "master_weights" not in optimizer.state_dict()


@pytest.mark.parametrize("stage", [2, 3])
def test_wire_format_of_weights_does_not_round_the_kept_weights(stage: int) -> None:
    creeping(torch.float32, stage, wire={"parameters": "bf16"})


@pytest.mark.ranks(gloo=(1, 2), mpi=(4,))
@pytest.mark.parametrize("stage", STAGES)
def test_a_state_goes_on_bit_for_bit_here_and_at_any_other_stage(stage: int) -> None:
    reference = whole(adam)
    model = Model()
    optimizer = wrapped(model, adam, stage)
    train(model, optimizer, range(2))
    values, part = whole_weights(model, optimizer), copy.deepcopy(optimizer.state_dict())
    full = optimizer.full_state_dict()
    assert (full is None) == (hc.rank() != 0)
    everywhere = optimizer.full_state_dict(all_ranks=True)
    assert_same(everywhere, hc.broadcast_object(full))

    for other in {1: (1, 0, 2), 2: (2, 3), 3: (3, 1)}[stage]:
        twin = Model()
        with torch.no_grad():
            for name, parameter in twin.named_parameters():
                parameter.copy_(values[name])
        again = wrapped(twin, adam, other)
        again.load_state_dict(copy.deepcopy(everywhere) if other != stage else part)
        train(twin, again, range(2, 4))
        assert_same(whole_weights(twin, again), reference, rounding())
    if full is not None:  # as the bare optimizer has it
        twin = Model()
        bare = adam(twin.parameters())
        bare.load_state_dict(full)
        moments = {number: one["exp_avg"].shape for number, one in bare.state_dict()["state"].items()}
        assert moments.keys() == full["state"].keys()
        shapes = [parameter.shape for parameter in twin.parameters()]
        assert all(shape == shapes[number] for number, shape in moments.items())
    hc.barrier()


def test_schedules_and_state_from_before() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.scale = nn.Parameter(torch.tensor(2.0))
            self.linear = nn.Linear(INPUTS, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scale * self.linear(x)

    def run(stage: int, make: Make) -> tuple[dict[str, torch.Tensor], float]:
        model = Scaled()
        bare = make(model.parameters())
        model(torch.ones(1, INPUTS)).sum().backward()
        bare.step()
        bare.zero_grad()
        schedule = torch.optim.lr_scheduler.StepLR(bare, 1, gamma=0.5)
        optimizer = hc.DistributedOptimizer(bare, model.named_parameters(), shard=stage, model=model)
        for number in range(3):
            train(model, optimizer, range(number, number + 1))
            schedule.step()
        optimizer.state_dict()
        return whole_weights(model, optimizer), optimizer.param_groups[0]["lr"]

    for make, stages in ((adam, (1, 3)), (torch.optim.Adagrad, (2,))):
        reference, rate = run(0, make)
        for stage in stages:
            ours, own_rate = run(stage, make)
            assert own_rate == rate
            assert_same(ours, reference, rounding())


@pytest.mark.ranks(gloo=(2,), mpi=(4,))
@pytest.mark.parametrize("stage", STAGES)
def test_a_state_that_one_rank_alone_has_before_is_an_error_on_every_rank(stage: int) -> None:
    model = Model()
    bare = momentum(model.parameters())
    if hc.rank() == 0:
        loss(model, 0).backward()
        bare.step()
        bare.zero_grad()
    with pytest.raises(ValueError, match=r"has a state.*load it on every rank.*True on rank 0 and False on"):
        hc.DistributedOptimizer(bare, model.named_parameters(), shard=stage, model=model)
    bare.state.clear()
    train(model, wrapped(model, momentum, stage), range(1))


def test_a_part_that_is_not_this_ranks_is_refused() -> None:
    model = Model()
    optimizer = wrapped(model, adam, 2)
    train(model, optimizer, range(1))
    part = hc.broadcast_object(optimizer.state_dict(), 0, name="part")
    if hc.size() > 1:
        with pytest.raises(ValueError, match="full_state_dict"):  # on rank 0, whose part it is, too
            optimizer.load_state_dict(part)
    part = optimizer.state_dict()
    part["pieces"] = [["elsewhere", 0, 1]]
    with pytest.raises(ValueError, match="full_state_dict"):
        optimizer.load_state_dict(part)
    shifted = optimizer.state_dict()
    shifted["pieces"] = [[name, start + 1, stop + 1] for name, start, stop in shifted["pieces"]]
    with pytest.raises(ValueError, match="full_state_dict"):
        optimizer.load_state_dict(shifted)
    whole: Any = optimizer.full_state_dict(all_ranks=True)
    whole["state"][0]["exp_avg"] = whole["state"][0]["exp_avg"][1:]
    with pytest.raises(ValueError, match="elements and not"):
        optimizer.load_state_dict(whole)


def test_unshardable_configurations_are_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(3, 3)

    def refused(
        match: str, make: Make = adam, kind: type[Exception] = ValueError, named: Any = None, **options: Any
    ) -> None:
        with pytest.raises(kind, match=match):
            distribute(
                make(model.parameters()),
                named_parameters=named if named is not None else model.named_parameters(),
                **options,
            )

    refused("give model=model", shard=3, named=list(model.named_parameters()))
    refused("LBFGS", lambda p: torch.optim.LBFGS(p), shard=1)
    refused("elementwise=True", type("Own", (torch.optim.SGD,), {}), shard=1)
    refused("shard must be one of", shard="zero")
    refused("shard must be one of", shard=4)
    refused("shard must be one of", shard="4")
    refused("use Average or Sum", shard=1, op=hc.Max)
    refused("needs shard", offload="optimizer")
    refused("needs shard", wire="int8")
    refused("wire", shard=2, wire="fp7")
    refused("give 'int8' for parameters", shard=3, wire={"parameters": "int4"})
    refused("offload must be None, 'optimizer' or 'parameters'", shard=2, offload="weights")
    refused("needs shard parameters", shard=2, offload="parameters")
    refused("use wire instead", shard=2, compression=hc.Compression.fp16)
    refused("use compression", shard=1, wire={"gradients": "fp16"})
    if hc.size() > 1:
        refused("shard differs between ranks", shard=1 + hc.rank() % 2)
        refused(
            "is not part of this Linear",
            shard=3,
            model=model,
            units=[model, nn.Linear(1, 1)][: 1 + hc.rank() % 2],
        )
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    refused("elastic", shard=1)
    monkeypatch.delenv("HOROVOD_ELASTIC")
    optimizer = wrapped(model, adam, 1)
    with pytest.raises(ValueError, match="join"):
        hc.join()
    with pytest.raises(ValueError, match="already"):
        optimizer.add_param_group({"params": [model.weight]})


@pytest.mark.ranks(gloo=(3,))
def test_a_process_set_shards_among_its_ranks() -> None:
    members = hc.add_process_set(range(1, hc.size()))
    try:
        model = nn.Linear(6, 6)
        optimizer = hc.DistributedOptimizer(
            momentum(model.parameters()),
            named_parameters=model.named_parameters(),
            shard=2,
            process_set=members,
            model=model,
        )
        model(torch.full((2, 6), float(hc.rank()))).sum().backward()
        optimizer.step()
        values = hc.allgather_object([value.tolist() for value in model.state_dict().values()], name="set")
        assert all(value == values[1] for value in values[1:])
        assert (getattr(optimizer, "shard_stage", 0) == 2) == members.included()
    finally:
        hc.remove_process_set(members)


class Gaps(Model):
    """Parameters that do not fill consecutive memory, or whose elements share it."""

    def __init__(self, gaps: bool = True) -> None:
        super().__init__()
        keep: Any = nn.Identity() if gaps else torch.Tensor.contiguous
        self.first.weight = nn.Parameter(keep(torch.randn(WIDTH, 20)[:, 4:12]))
        self.blocks[1][0].bias = nn.Parameter(keep(torch.ones(1).expand(WIDTH)))
        self.unused.weight = nn.Parameter(keep(torch.randn(WIDTH, 2 * WIDTH)[:, ::2]))


@pytest.mark.ranks(gloo=(1, 2), mpi=(4,))
@pytest.mark.parametrize("stage", [2, 3])
def test_parameters_with_gaps_keep_their_values(stage: int) -> None:
    reference = trained(adam, 0, kind=lambda: Gaps(False), count=2)
    assert_same(trained(adam, stage, kind=Gaps, count=2), reference, rounding())

    model = Gaps()
    values = torch.arange(480.0).view(WIDTH, 20)[:, 4:12]
    optimizer = wrapped(model, adam, stage)
    if stage < 3:
        late = nn.Parameter(values)
        optimizer.add_param_group({"params": [late]})
        assert late.data_ptr() != values.data_ptr()
        assert torch.equal(late, values)


@pytest.mark.parametrize("stage", [1, 3])
def test_two_parameters_over_one_memory_are_refused(stage: int) -> None:
    for parts in (("weight", "weight"), ("weight", "bias"), ("bias", "weight")):
        model = Model()
        for block, name in zip(model.blocks, parts):  # the first two
            memory = model.blocks[3][0].weight.data
            setattr(block[0], name, nn.Parameter(memory[:, 1:5] if name == "weight" else memory[0]))
        with pytest.raises(ValueError, match=r"'blocks\.\S+' and '\S+' are two that share memory.*clone\(\)"):
            wrapped(model, adam, stage)
    model = Model()
    model.head = nn.Parameter(model.unused.weight.data, requires_grad=False)  # which is in no optimizer
    for empty, what in (
        (nn.LazyLinear(3), "is lazy"),
        (nn.Linear(2, 3, device="meta"), "is on the meta device"),
    ):
        with pytest.raises(ValueError, match=f"'weight' has no values yet: it {what}"):
            wrapped(empty, descent, stage)
    with pytest.raises(ValueError, match="share memory"):
        wrapped(model, lambda parameters: adam([one for one in parameters if one.requires_grad]), stage)
    hc.barrier()


def descent(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.parametrize("stage", STAGES)
def test_one_optimizer_follows_another_once_parameters_are_whole_again(stage: int) -> None:
    reference = whole(descent)
    model = Model()
    optimizer = wrapped(model, descent, stage)
    train(model, optimizer, range(2))
    loss(model, 9).backward()  # nothing comes of it
    old = loss(model, 9)
    if stage == 3:
        for other in range(4):
            with pytest.raises(ValueError, match=r"'first\.weight' is split .* call optimizer\.unshard\(\)"):
                wrapped(model, adam, other)
        with optimizer.gathered_parameters(), pytest.raises(RuntimeError, match=r"unshard\(\) does not work"):
            optimizer.unshard()
        with pytest.raises(ValueError, match=r"'first\.weight', which is split.* leave this call out"):
            hc.broadcast_parameters(model.named_parameters(), root_rank=0)
        with optimizer.gathered_parameters():
            hc.broadcast_parameters(model.state_dict(), root_rank=0)
    reducer = weakref.ref(optimizer.reducer) if optimizer.reducer is not None else lambda: None
    optimizer.unshard()
    assert reducer() is None  # so it counts no gradient of the next one
    if stage == 3:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            old.backward()
    model.zero_grad()
    hc.broadcast_parameters(model.state_dict(), root_rank=0)
    for used in (optimizer.step, optimizer.zero_grad, optimizer.state_dict, optimizer.unshard):
        with pytest.raises(RuntimeError, match=r"given the model its parameters back in unshard\(\)"):
            used()

    again = wrapped(model, descent, stage % 3 + 1)
    train(model, again, range(2, 4))
    assert_same(whole_weights(model, again), reference, 1e-5)
    again.unshard()
    assert_same(dict(model.named_parameters()), reference, 1e-5)
    first, _ = wrapped(model, descent, 1), wrapped(model, descent, 3)
    alone = "by another DistributedOptimizer, which alone can step"
    with pytest.raises(
        RuntimeError, match="DistributedOptimizer that was made over it last" if hc.size() > 1 else alone
    ):
        first.step()


def test_autocast_keeps_no_copies_of_whole_parameters() -> None:
    """Its cache would: of every unit that has run, until autocast ends."""
    width, count = 128, 16
    blocks = [nn.Sequential(nn.Linear(width, width, bias=False), nn.Tanh()) for _ in range(count)]
    model = hc.CheckpointSequential(nn.Sequential(*blocks), segments=count)
    optimizer = wrapped(model, momentum, 3)

    def forward() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.ones(1, width))

    forward()
    cast = 2 * width * width
    assert hc.measure_peak(forward).peak_bytes < count * cast
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.ones(1, width)).float().square().mean()
    loss.backward()
    optimizer.step()
