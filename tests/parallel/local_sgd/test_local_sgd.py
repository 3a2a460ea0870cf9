"""Local SGD: one rank, every step, a reference in one process, repeated and resumed runs, groups of ranks."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import operator
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from same import assert_same
from torch import nn
from torch.nn import functional

import hvd_ckpt as hc
from hvd_ckpt.app.compare.training import fingerprint
from hvd_ckpt.collectives.formats import WIRE_FORMATS
from hvd_ckpt.utils.memory import bytes_alive, memory_of_tensors, memory_since

pytestmark = pytest.mark.ranks(gloo=(1, 2, 3), mpi=(4,))

several = pytest.mark.ranks(gloo=(2, 3), mpi=(4,))
four = pytest.mark.ranks(mpi=(4,))
WIDTH = 10
Loss = Callable[[nn.Module, int], torch.Tensor]
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
AdamW = functools.partial(torch.optim.AdamW, lr=0.01)
Whole = functools.partial(torch.optim.SGD, lr=1.0)  # a step is the gradient


@pytest.fixture(autouse=True)
def _quick(one_thread: None) -> None:
    """Tiny operators run on one thread."""


def make_model(norm: bool = True, dropout: float = 0.2, checkpoint: bool = False) -> nn.Sequential:
    torch.manual_seed(7)
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH) if norm else nn.Identity()]
        layers += [nn.Tanh(), nn.Dropout(dropout)]
    layers.append(nn.Linear(WIDTH, 3))
    layers[4].weight = layers[0].weight  # tied
    return hc.CheckpointSequential(layers, segments=3) if checkpoint else nn.Sequential(*layers)


smooth_model = functools.partial(make_model, norm=False, dropout=0.0)


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    inputs = torch.randn(6, WIDTH, generator=generator)
    torch.manual_seed(10_000 * rank + step)
    return functional.cross_entropy(model(inputs), torch.arange(6) % 3)


def loss_here(model: nn.Module, step: int) -> torch.Tensor:
    return loss_of(model, step, hc.rank())


class Run:
    """A model that is trained by local SGD."""

    def __init__(
        self, make: Any = AdamW, model: nn.Module | None = None, loss: Loss = loss_here, **options: Any
    ) -> None:
        self.model = make_model() if model is None else model
        named = self.model.named_parameters()
        self.optimizer = hc.LocalSGD(
            make(self.model.parameters()), named_parameters=named, model=self.model, **options
        )
        self.loss, self.step = loss, 0

    def train(self, steps: int, uneven: bool = False) -> Run:
        for _ in range(steps):
            self.optimizer.zero_grad()
            if not uneven or (self.step + hc.rank()) % 3:
                self.loss(self.model, self.step).backward()
            self.optimizer.step()
            self.step += 1
        return self

    def state(self) -> bytes:
        file = io.BytesIO()
        with self.optimizer.gathered_parameters():
            torch.save((self.model.state_dict(), self.optimizer.state_dict(), self.step), file)
        return file.getvalue()

    def load(self, state: bytes) -> Run:
        weights, optimizer, self.step = torch.load(io.BytesIO(state), weights_only=True)
        with self.optimizer.gathered_parameters():
            self.model.load_state_dict(weights)
        self.optimizer.load_state_dict(optimizer)
        return self

    def hash(self) -> str:
        with self.optimizer.gathered_parameters():
            return digest(self.model)


def digest(model: nn.Module) -> str:
    return fingerprint(model.state_dict().items())


def assert_equal_on_all_ranks(model: nn.Module) -> None:
    assert len(set(hc.allgather_object(digest(model)))) == 1


def names_alike(model: nn.Module) -> list[str]:
    """The parameters that are equal on all ranks."""
    everyone = hc.allgather_object([value.detach() for value in model.parameters()])
    named = enumerate(model.named_parameters())
    return [name for number, (name, own) in named if all(torch.equal(each[number], own) for each in everyone)]


def weights_of(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.ranks(gloo=(1,))
@pytest.mark.parametrize("make", [SGD, AdamW])
def test_one_rank_is_the_wrapped_optimizer_bit_for_bit(make: Any) -> None:
    alone = make_model()
    optimizer = make(alone.parameters())
    for step in range(7):
        optimizer.zero_grad()
        loss_here(alone, step).backward()
        optimizer.step()
    run = Run(make, within="host", every=3, fragments=2, delay=2, wire="int8", moments="average").train(7)
    assert run.hash() == digest(alone)
    assert isinstance(run.optimizer, type(optimizer))
    assert sum(run.optimizer.traffic.sent.values()) == 0


FULL = {"every": 4, "moments": "average", "fragments": 2, "delay": 3, "wire": "int8", "outer": hc.Nesterov()}


def test_repeated_recomputed_and_resumed_runs_end_in_the_same_bits() -> None:
    plain = Run(**FULL)
    states = [plain.train(1, uneven=True).state() for _ in range(9)]
    want = plain.train(2, uneven=True).hash()
    assert Run(model=make_model(checkpoint=True), **FULL).train(11, uneven=True).hash() == want
    for done in (3, 5, 6, 9):
        assert Run(**FULL).load(states[done - 1]).train(11 - done, uneven=True).hash() == want, done


def reference(
    losses: Sequence[Loss], steps: int, delay: int, lr: float, momentum: float, wire: str = "fp32"
) -> list[torch.Tensor]:
    """DiLoCo of all workers in this process, in plain PyTorch, averaged every three steps; int8 in blocks of all parameters, not of
    a rank's rows. Takes the loss of each worker, from its model and the step; returns their weights."""
    models = [smooth_model() for _ in losses]
    optimizers = [AdamW(model.parameters()) for model in models]
    anchor = exact = weights_of(models[0])
    velocity, rests = torch.zeros_like(anchor), [torch.zeros_like(anchor) for _ in losses]
    under_way: list[tuple[int, list[torch.Tensor], torch.Tensor]] = []
    rounded = WIRE_FORMATS[wire].rounded if len(losses) > 1 else torch.clone

    def arrive(step: int) -> None:
        nonlocal anchor
        while under_way and step - under_way[0][0] >= delay:
            _, sent, anchor = under_way.pop(0)
            for model, values in zip(models, sent):
                result = weights_of(model) + (anchor - values)
                nn.utils.vector_to_parameters(result, model.parameters())

    for step in range(1, steps + 1):
        for model, optimizer, loss in zip(models, optimizers, losses):
            optimizer.zero_grad()
            loss(model, step - 1).backward()
            optimizer.step()
        arrive(step)
        if step % 3 == 0:
            sent = [weights_of(model) for model in models]
            changes = [anchor - values + rest for values, rest in zip(sent, rests)]
            travelled = [rounded(change) for change in changes]
            rests = [change - one for change, one in zip(changes, travelled)]
            gradient = sum(travelled) / len(travelled)
            velocity = momentum * velocity + gradient
            exact = exact - lr * (gradient + momentum * velocity)
            under_way.append((step, sent, anchor + rounded(exact - anchor)))
            if not delay:
                arrive(step)
    return [weights_of(model) for model in models]


@pytest.mark.parametrize(
    ("delay", "wire", "bound"), [(0, "fp32", 1e-5), (1, "fp32", 1e-5), (3, "fp32", 1e-5), (2, "int8", 4e-3)]
)
def test_a_delayed_average_is_what_one_process_computes(delay: int, wire: str, bound: float) -> None:
    run = Run(model=smooth_model(), every=3, delay=delay, outer=hc.Nesterov(0.7, 0.8), wire=wire)
    losses = [functools.partial(loss_of, rank=rank) for rank in range(hc.size())]
    wanted = reference(losses, 10, delay, 0.7, 0.8, wire)[hc.rank()]
    result = weights_of(run.train(10).model)
    assert float((result - wanted).abs().max()) <= bound
    assert float((result - weights_of(smooth_model())).abs().max()) > 10 * bound


def assert_means(model: nn.Module, states: list[dict[str, torch.Tensor]]) -> None:
    """Floating-point values are means of the ranks'."""
    for name, value in model.state_dict().items():
        if value.is_floating_point():
            mean = sum(state[name] for state in states) / hc.size()
            torch.testing.assert_close(value, mean, rtol=1e-4, atol=1e-6, msg=name)


@several
def test_within_averaged_a_model_is_the_mean_of_all_ranks(folder: Path) -> None:
    """A snapshot that was begun before has each rank's own weights."""
    run = Run(every=3).train(4)
    own = copy.deepcopy(run.model.state_dict())
    states = hc.allgather_object(own)
    with hc.Snapshots(folder, model=run.model, optimizer=run.optimizer) as snapshots:
        snapshots.save(4)
        with run.optimizer.averaged():
            assert_means(run.model, states)
    assert_same(run.model.state_dict(), own)
    run.train(1)
    with hc.Snapshots(folder, model=run.model, optimizer=run.optimizer) as snapshots:
        assert snapshots.resume() == 4
    assert_same(run.model.state_dict(), own)
    before = dict(run.train(2).optimizer.traffic.sent)
    with run.optimizer.averaged():
        assert run.optimizer.in_sync
    assert run.optimizer.traffic.sent == before  # all have the same


@pytest.mark.parametrize("shard", [0, 2])
def test_within_averaged_what_would_be_lost_is_refused(shard: int, folder: Path) -> None:
    """Steps (also of a scaler that may skip), states, groups and snapshots; afterwards all is as if nothing had been tried."""
    options = {"every": 3, "within": "host", "shard": shard} if shard else {"every": 3}
    run, undisturbed = Run(SGD, **options).train(1), Run(SGD, **options).train(5)
    state, scaler = run.optimizer.state_dict(), hc.GradScaler("cpu")
    added = [nn.Parameter(torch.ones(2))]
    with hc.Snapshots(folder, model=run.model, optimizer=run.optimizer) as snapshots:
        snapshots.save(1)
        refused: list[Callable[[], Any]] = [
            run.optimizer.step,
            lambda: scaler.step(run.optimizer),
            lambda: run.optimizer.load_state_dict(state),
            lambda: run.optimizer.add_param_group({"params": added}),
            lambda: snapshots.save(1),
            snapshots.resume,
        ]
        with run.optimizer.averaged():
            for call in refused:
                with pytest.raises(RuntimeError, match=r"LocalSGD\.averaged\(\)"):
                    call()
    run.train(4)
    assert run.hash() == undisturbed.hash()


@several
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_before_and_after_the_mean(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    weight = nn.Parameter(torch.randn(64).to(dtype))
    twin = weight.detach().clone()
    optimizer = Run(Whole, nn.ParameterList([weight]), every=1).optimizer
    generator = torch.Generator().manual_seed(hc.rank())
    for _ in range(5):
        weight.grad = torch.randn(64, generator=generator).to(dtype)
        own = hc.allgather_object((twin - weight.grad).double())
        twin = (sum(own) / len(own)).to(dtype)
        optimizer.step()
        assert torch.equal(weight.detach(), twin)


@several
def test_what_int8_rounds_away_is_sent_later() -> None:
    weight = nn.Parameter(torch.zeros(64))
    optimizer = Run(Whole, nn.ParameterList([weight]), every=1, wire="int8").optimizer
    gradient = torch.full((64,), 0.3)
    gradient[0] = 127.0  # levels are whole numbers, so 0.3 rounds to 0
    for _ in range(10):
        weight.grad = gradient.clone()
        optimizer.step()
    assert torch.allclose(weight.detach()[1:], torch.tensor(-3.0), atol=1.0)


@several
@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_parameters_of_every_type_are_averaged(wire: str) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.complex64)
    model = nn.ParameterList([*(torch.ones(5, 3, dtype=dtype).t() for dtype in dtypes), torch.tensor(1.0)])
    optimizer = Run(Whole, model, every=1, wire=wire).optimizer
    for parameter in model:
        parameter.grad = torch.full_like(parameter, float(hc.rank()))
    optimizer.step()
    mean = (hc.size() - 1) / 2
    for parameter in model:
        assert torch.allclose(parameter.detach(), torch.full_like(parameter, 1 - mean), rtol=1e-2, atol=1e-6)
    assert_equal_on_all_ranks(model)


@several
@pytest.mark.parametrize("moments", ["local", "average"])
def test_moments_and_float_buffers_are_averaged_and_integers_stay_each_ranks_own(moments: str) -> None:
    run = Run(every=2, moments=moments).train(1)
    model, optimizer = run.model, run.optimizer
    model[1].num_batches_tracked += 10 * hc.rank()
    counts = model[1].num_batches_tracked.clone()
    states = hc.allgather_object(model.state_dict())
    assert len(set(hc.allgather_object(digest(model)))) == hc.size()
    optimizer.zero_grad()
    optimizer.step()  # no gradients: an average alone
    assert_means(model, states)
    assert torch.equal(model[1].num_batches_tracked, counts)
    floats = {name: value for name, value in model.state_dict().items() if value.is_floating_point()}
    assert len(set(hc.allgather_object(fingerprint(floats.items())))) == 1
    for name in ("exp_avg", "exp_avg_sq"):
        own = [(name, state[name]) for state in optimizer.state.values()]
        assert (len(set(hc.allgather_object(fingerprint(own)))) == 1) == (moments == "average")
    assert optimizer.divergence > 0


@several
@pytest.mark.parametrize("tokens", [None, [1.0, 3.0, 0.0, 4.0], [0.0, 3.0, 1.0, 4.0]])
def test_ranks_count_by_their_steps_or_tokens(tokens: list[float] | None) -> None:
    steps = [3, 1, 0, 2]
    weight = nn.Linear(1, 1, bias=False)
    optimizer = Run(Whole, weight, every=3).optimizer
    start = weight.weight.item()
    for step in range(3):
        optimizer.zero_grad()
        if step < steps[hc.rank()]:
            (weight.weight * 2.0 ** -hc.rank()).sum().backward()
        if tokens is not None:
            optimizer.weigh(tokens[hc.rank()] / 3)
        optimizer.step()
    counted = (tokens or steps)[: hc.size()]
    moved = [2.0**-rank * steps[rank] for rank in range(hc.size())]
    mean = sum(map(operator.mul, counted, moved)) / sum(counted)
    assert weight.weight.item() == pytest.approx(start - mean, abs=1e-5)
    squares = sum(each**2 for each in moved)
    assert optimizer.divergence == pytest.approx((squares / hc.size()) ** 0.5, rel=1e-4)


def test_an_overflow_skips_a_step_of_its_rank_alone() -> None:
    run, scaler = Run(model=make_model(norm=False), every=4), hc.GradScaler("cpu", init_scale=4.0)
    model = run.model
    for step in range(4):
        run.optimizer.zero_grad()
        loss = loss_here(model, step) * (float("inf") if step == 1 and hc.rank() == 0 else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(run.optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(run.optimizer)
        scaler.update()
    assert run.optimizer.skipped_steps == (1 if hc.rank() == 0 else 0)
    assert hc.size() == 1 or torch.isfinite(weights_of(model)).all()
    assert_equal_on_all_ranks(model)
    torch_scaler = torch.amp.GradScaler("cpu")
    torch_scaler.scale(loss_of(model, 4, 0)).backward()
    with pytest.raises(RuntimeError, match=r"hvd_ckpt\.GradScaler"):
        torch_scaler.step(run.optimizer)


@pytest.mark.parametrize("within", [None, pytest.param([[0, 2], [1, 3]], marks=four)])
@pytest.mark.parametrize("outer", [None, hc.Nesterov()])
@pytest.mark.parametrize("wire", ["fp32", "int8"])
def test_the_estimate_of_memory_has_anchor_and_outer_optimizer(outer: Any, wire: str, within: Any) -> None:
    """A group shares the anchor."""
    options = {"every": 4, "outer": outer, "wire": wire, "fragments": 2, "delay": 1}
    before = memory_of_tensors()
    model = nn.Sequential(nn.Linear(300, 256), nn.Linear(256, 200))
    group = len(within[0]) if within else 1
    estimate = hc.estimate_memory(model, hc.size(), local={**options, "within": group})
    assert (estimate.averages == 0) == (hc.size() == 1 and outer is None)
    optimizer = Run(Whole, model, **options, within=within).optimizer
    for _ in range(7):  # the last average that has left has arrived
        optimizer.step()
    kept = pytest.approx(estimate.parameters + estimate.averages, rel=0.01)
    limit = time.monotonic() + 20  # in which Horovod's thread lets go of messages that have arrived
    while (held := bytes_alive(memory_since(before))) != kept and time.monotonic() < limit:
        time.sleep(0.05)
    assert held == kept
    for _ in range(2):
        optimizer.step()
    optimizer.close()


@several
def test_fragments_are_averaged_in_turn_and_gathered_after_half_of_the_delay() -> None:
    run = Run(model=make_model(norm=False), every=4, fragments=2).train(2)
    assert names_alike(run.model) == ["0.weight", "0.bias", "8.weight", "8.bias"]
    assert names_alike(run.train(2).model) == ["4.bias", "12.weight", "12.bias"]
    run = Run(every=4, delay=4).train(5)
    assert run.optimizer.traffic.sent["reduce_scatter"] > 0 == run.optimizer.traffic.sent["all_gather"]
    assert run.train(1).optimizer.traffic.sent["all_gather"] > 0


def test_groups_are_added_and_frozen_in_mid_run_and_embeddings_are_sparse() -> None:
    words, one, two = nn.Embedding(5, 4, sparse=True), nn.Linear(4, 4), nn.Linear(4, 4)
    named = list(nn.ModuleDict({"words": words, "one": one, "two": two}).named_parameters())
    first = torch.optim.SGD([*words.parameters(), *one.parameters()], lr=0.1)
    optimizer = hc.LocalSGD(first, named, every=2, delay=1, outer=hc.Nesterov())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            two(one(words(torch.tensor([hc.rank(), 4])))).square().sum().backward()
            optimizer.step()
            schedule.step()

    train(3)
    torch.manual_seed(hc.rank())
    nn.init.normal_(two.weight)
    optimizer.add_param_group({"params": two.parameters()})
    train(2)
    one.requires_grad_(False)
    train(3)
    frozen = one.weight.clone()
    train(5)
    assert torch.equal(frozen, one.weight)
    assert all(bool(torch.isfinite(parameter).all()) for _, parameter in named)
    assert optimizer.param_groups[1]["lr"] < 0.1


# ------------------------------------------------------------------------------------ groups


def group_loss(model: nn.Module, step: int, group: int, place: int | None = None) -> torch.Tensor:
    """The loss of a group of two ranks, or the part of one of them."""
    inputs = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(100 * group + step))
    return model(inputs if place is None else inputs[4 * place : 4 * place + 4]).square().mean()


@four
@pytest.mark.parametrize("shard", [0, 1, 3])
def test_gradients_are_reduced_within_groups_and_averages_made_between_them(shard: int) -> None:
    group, place = hc.rank() % 2, hc.rank() // 2
    loss = functools.partial(group_loss, group=group, place=place)
    options = {"every": 3, "delay": 1, "outer": hc.Nesterov(0.6, 0.8), "within": [[0, 2], [1, 3]]}

    with contextlib.ExitStack() as stack:

        def make(shard: Any = shard, **more: Any) -> Run:
            run = Run(model=smooth_model(), loss=loss, shard=shard, **options, **more)
            stack.callback(run.optimizer.close)
            return run

        run = make().train(8)
        losses = [functools.partial(group_loss, group=one) for one in range(2)]
        wanted = reference(losses, 8, 1, 0.6, 0.8)[group]
        with run.optimizer.gathered_parameters():
            assert torch.allclose(weights_of(run.model), wanted, atol=1e-5)
        hashes = hc.allgather_object(run.hash())
        assert hashes[0] == hashes[2] != hashes[1] == hashes[3]
        with run.optimizer.averaged(), run.optimizer.gathered_parameters():
            assert_equal_on_all_ranks(run.model)
        assert hc.allgather_object(run.hash()) == hashes

        more: dict[str, Any] = {"fragments": 2, "wire": "int8", "moments": "average"}
        whole = make(**more).train(4)
        state = whole.state()
        want = whole.train(5).hash()
        offload = hc.Shard(shard, offload="parameters" if shard == 3 else "optimizer") if shard else 0
        for other in (shard, offload):
            assert make(other, **more).load(state).train(5).hash() == want


@pytest.mark.ranks(gloo=(1, 2))
def test_ranks_of_one_host_are_one_group() -> None:
    """Nothing is sent for averages, and the outer optimizer's work is split over the group."""
    results = []
    options: dict[str, Any] = {"every": 2, "within": "host", "outer": hc.Nesterov()}
    for shard in range(4):
        run = Run(model=smooth_model(), shard=shard, **options).train(5)
        with run.optimizer.gathered_parameters():
            results.append(weights_of(run.model).clone())
            assert_equal_on_all_ranks(run.model)
        assert run.optimizer.traffic.sent["reduce_scatter"] == 0
    assert all(torch.allclose(result, results[0], atol=1e-6) for result in results)
    plain = Run(model=smooth_model(), within="host").train(5)
    assert not torch.equal(results[0], weights_of(plain.model))


@four
def test_a_process_set_that_is_there_is_used_and_left() -> None:
    members = hc.add_process_set([0, 2])
    runs = [Run(model=make_model(False), within=[[0, 2], [1, 3]], every=2) for _ in range(2)]
    for run in runs:
        run.train(1).optimizer.close()
    assert hc.remove_process_set(members)
    assert hc.remove_process_set(hc.add_process_set([1, 3]))  # which those that were added are not


# ------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("options", "value"),
    [
        ({"every": 0}, "every must be .* not 0"),
        ({"every": 4, "delay": 5}, "delay=5"),
        ({"every": 4, "fragments": 5}, "fragments=5"),
        ({"fragments": 50}, "50 is more than the 13"),
        ({"every": 4, "moments": {"exp_avg": 8}}, "'local' .* or 'average' .*, not {'exp_avg': 8}"),
        ({"moments": "global"}, "global"),
        ({"shard": hc.Shard("none", offload="optimizer")}, "offload='optimizer' needs shard"),
        ({"shard": hc.Shard(1, wire="int8"), "within": "host"}, "leave wire out"),
        ({"wire": "int4"}, "int4"),
        ({"within": "rack"}, "rack"),
        ({"within": 5}, "lists of ranks, such as .* not 5"),
        ({"within": [["0"]]}, "lists of ranks"),
        ({"within": [[0], [0]]}, "each of the ranks"),
        ({"outer": 0.7}, "0.7"),
        ({"outer": torch.optim.LBFGS}, "LBFGS"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], value: str) -> None:
    with pytest.raises(ValueError, match=value):
        Run(**options)


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(every=4, outer=hc.Nesterov()).train(1)
    load, lazy = run.optimizer.load_state_dict, nn.Sequential(nn.LazyLinear(2))

    def changed(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        state = run.optimizer.state_dict()
        change(state["local_sgd"])
        return state

    def without_anchor(own: dict[str, Any]) -> None:
        del next(iter(own["fragments"][0]["runs"].values()))["exact"]

    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: Run(every=5).load(run.state()), "every=4, and this rank has every=5"),
        (lambda: load(changed(lambda own: own["key"].clear())), "every=None"),
        (lambda: load(changed(lambda own: own["fragments"].append(own["fragments"][0]))), "fragments=2"),
        (lambda: load(changed(without_anchor)), r"no anchor of 'weights\."),
        (lambda: Run(SGD, lazy), "'0.weight' has no shape yet"),
        (lambda: Run(lambda _: run.optimizer, run.model), "DistributedOptimizer already"),
        (lambda: run.optimizer.weigh(-1), "-1"),
        (hc.join, "LocalSGD"),
    ]
    for call, said in refused:
        with pytest.raises(ValueError, match=said):
            call()
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    with pytest.raises(ValueError, match="elastic"):
        Run()


@several
def test_ranks_that_differ_are_refused(folder: Path) -> None:
    run = Run(every=2).train(3)
    state = run.optimizer.state_dict()
    own = {name: value for name, value in state.items() if name != "local_sgd"}
    run.optimizer.load_state_dict(own)  # a new period, in the middle of one
    with pytest.raises(hc.WeightsDiffer, match=r"'0\.weight' differs between ranks 0 and 1"):
        run.train(1)
    apart = {**state, "local_sgd": {**state["local_sgd"], "step": 3 + hc.rank()}}
    with pytest.raises(ValueError, match="step of the state differs between ranks: 3 on rank 0"):
        run.optimizer.load_state_dict(apart)
    run.optimizer.load_state_dict(state)
    run.train(1)
    assert run.optimizer.in_sync
    run.optimizer.param_groups[0]["lr"] = 0.1 + 0.1 * hc.rank()
    snapshots = hc.Snapshots(folder, model=run.model, optimizer=run.optimizer)
    with pytest.raises(ValueError, match="options of the optimizer differ between ranks in step 4"):
        snapshots.save(4)


def test_a_loop_in_an_elastic_job_commits_the_model_at_averages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    run = Run(every=2, elastic=True)
    with pytest.raises(ValueError, match="give the model alone, and make the optimizer anew"):
        hc.elastic.TorchState(model=run.model, optimizer=run.optimizer)
    state = hc.elastic.TorchState(model=run.model)
    for step in range(1, 6):
        assert run.train(1).optimizer.in_sync == (step % 2 == 0)
        if run.optimizer.in_sync:
            state.save()
            committed = digest(run.model)
    state.restore()
    assert digest(run.model) == committed
    Run(model=run.model, every=2, elastic=True).train(2)
    assert_equal_on_all_ranks(run.model)
