"""Snapshots of another optimizer, arguments that differ between ranks, and groups of parameters in another order."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from one_process import batch, chain, difference, same_everywhere, train
from sharded import distribute
from torch import nn

import hvd_ckpt as hc
from hvd_ckpt.collectives import agreement
from hvd_ckpt.snapshots.folder import SnapshotError

pytestmark = pytest.mark.ranks(gloo=(2, 3), mpi=(4,))


def on_all(kind: type[Exception], match: str, work: Callable[[], Any]) -> None:
    with pytest.raises(kind, match=match):
        work()
    assert hc.allgather_object(hc.rank()) == list(range(hc.size()))


def step(model: nn.Module, optimizer: Any, number: int) -> None:
    optimizer.zero_grad()
    model(batch(number, hc.rank())).square().mean().backward()
    optimizer.step()


def distributed(model: nn.Module, bare: torch.optim.Optimizer, **options: Any) -> Any:
    return distribute(bare, named_parameters=model.named_parameters(), model=model, **options)


def made(kind: Any = torch.optim.SGD, **options: Any) -> tuple[nn.Module, Any]:
    model = chain()
    return model, distributed(model, kind(model.parameters(), lr=0.1), **options)


def saved(folder: Path, model: nn.Module, optimizer: Any, **more: Any) -> None:
    with hc.Snapshots(folder, model=model, optimizer=optimizer, blocking=True, **more) as snapshots:
        snapshots.resume()
        snapshots.save(1)


def resume(folder: Path, model: nn.Module, optimizer: Any, **more: Any) -> None:
    with hc.Snapshots(folder, model=model, optimizer=optimizer, **more) as snapshots:
        assert snapshots.resume() == 1


@pytest.mark.parametrize("shard", [0, 2])
@pytest.mark.parametrize(
    ("then", "now"),
    [
        (torch.optim.SGD, torch.optim.Adam),
        (torch.optim.Adam, torch.optim.AdamW),
        (torch.optim.Adam, torch.optim.SGD),
    ],
)
def test_another_optimizer_is_refused(folder: Path, then: Any, now: Any, shard: int) -> None:
    model, optimizer = made(then, shard=shard)
    step(model, optimizer, 0)
    saved(folder, model, optimizer)
    says = f"{then.__name__}.*{now.__name__}"
    on_all(SnapshotError, says, lambda: resume(folder, *made(now, shard=shard)))


@pytest.mark.parametrize("shard", [0, 1, 2, 3])
def test_a_save_between_backward_and_step_warns(folder: Path, shard: int) -> None:
    model, optimizer = made(shard=shard)
    model(batch(0, hc.rank())).square().mean().backward()
    with pytest.warns(UserWarning, match=r"step 1 lacks the gradients .* save after step\(\)"):
        saved(folder, model, optimizer)
    optimizer.step()
    with warnings.catch_warnings(), hc.Snapshots(folder, model=model, optimizer=optimizer) as snapshots:
        warnings.simplefilter("error")
        snapshots.resume()
        step(model, optimizer, 1)
        snapshots.save(2)


class Counting(nn.Linear):
    extra: Any = None

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize("shard", [0, 1, 3])
@pytest.mark.parametrize("kind", [torch.tensor, lambda number: {"passes": number, "peaks": [0.5, number]}])
def test_each_ranks_extra_state_is_saved(folder: Path, kind: Any, shard: int) -> None:
    for now in (hc.rank() + 3, -1):
        model = nn.Sequential(nn.Linear(4, 4), Counting(4, 4))
        model[1].extra = kind(now)
        optimizer = distributed(model, torch.optim.SGD(model.parameters(), lr=0.1), shard=shard)
        (saved if now > 0 else resume)(folder, model, optimizer)
    assert model[1].extra == kind(hc.rank() + 3)


def test_extra_state_that_files_do_not_hold_is_refused(folder: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Counting(4, 4))
    model[1].extra = {"pattern": nn.Tanh()}
    optimizer = distributed(model, torch.optim.SGD(model.parameters(), lr=0.1))
    says = (
        r"the module '1' has a get_extra_state\(\), which returns a dict; .*Tanh.*keep that state in buffers"
    )
    on_all(TypeError, says, lambda: saved(folder, model, optimizer))


class Feed:
    """Has a state that it is given."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("loader", Feed([1]), "loader is a list, and must be a valid dictionary"),
        ("loader", Feed({0: 1}), r"the key loader\[0\] is 0, and must be a valid string"),
        ("scheduler", Feed((1,)), "scheduler is a list, and must be a valid dictionary"),
        ("scaler", hc.GradScaler("cpu", growth_interval=2**31), "scaler.growth_interval is .* less than"),
    ],
)
def test_state_that_no_run_could_resume_from_is_refused_when_saved(
    folder: Path, name: str, value: Any, says: str
) -> None:
    model, optimizer = made()
    says = f"step 1 was not written, since it could not be resumed from: .*{says}"
    on_all(SnapshotError, says, lambda: saved(folder, model, optimizer, **{name: value}))
    assert not list(folder.rglob("manifest.json"))


class Broken(Feed):
    """Has a state on all ranks but one."""

    def state_dict(self) -> Any:
        if hc.rank() == 1:
            raise KeyError("planted")
        return self.state


def test_what_one_rank_does_in_a_save_is_an_error_on_all_ranks(folder: Path) -> None:
    model, optimizer = made()
    with hc.Snapshots(folder, model=model, optimizer=optimizer, blocking=True) as snapshots:
        says = rf"different collective calls: .*save\(1\).*save\({hc.size()}\)"
        on_all(RuntimeError, says, lambda: snapshots.save(1 + hc.rank()))
        for wrong in ("x", -(10**30), 10**30):
            on_all(SnapshotError, "step ", lambda wrong=wrong: snapshots.save(wrong))
        snapshots.save(1)  # which is not before a step that was refused
    other = folder / "other"
    on_all(KeyError, "planted", lambda: saved(other, model, optimizer, scheduler=Broken({})))


def test_a_loss_with_its_graph_is_saved_as_a_number(folder: Path) -> None:
    model, optimizer = made()
    with hc.Snapshots(folder, model=model, optimizer=optimizer, blocking=True) as snapshots:
        loss = model(batch(0, 0)).square().mean()
        snapshots.save(1, best=loss)
        assert snapshots.resume() == 1 and torch.equal(snapshots.loop["best"], loss)


def test_a_first_save_exchanges_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = chain(), list[str]()
    optimizer = distributed(model, torch.optim.SGD(model.parameters(), lr=0.1))
    unspied = agreement._sum

    def spying(values: Any, name: str, process_set: Any) -> Any:
        calls.append(name)
        return unspied(values, name, process_set)

    with hc.Snapshots(folder, model=model, optimizer=optimizer) as snapshots:
        monkeypatch.setattr(agreement, "_sum", spying)
        snapshots.save(1)
        assert len(calls) == 1


Part = Callable[[Any], Any]  # of an optimizer
PARTS: dict[str, tuple[str, Part]] = {
    "exponential": ("scheduler", lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)),
    "cosine": ("scheduler", lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)),
    "of each rank": ("loader", lambda optimizer: Feed({"at": hc.rank()})),
    "of all": ("loader", lambda optimizer: hc.data.DistributedSampler(torch.zeros(40), 2)),
}


@pytest.mark.parametrize(
    ("there", "here", "says"),
    [
        ("exponential", "cosine", "ExponentialLR.*CosineAnnealingLR"),
        # Its position would be lost, and samples be read twice.
        ("of each rank", "of all", 'loader is "a loader of each rank", .* here is "DistributedSampler"'),
        ("of all", "of each rank", 'loader is "DistributedSampler", .* here is "a loader of each rank"'),
    ],
)
def test_another_part_is_refused(folder: Path, there: str, here: str, says: str) -> None:
    model, optimizer = made()
    parts = [{name: make(optimizer)} for name, make in (PARTS[there], PARTS[here])]
    saved(folder, model, optimizer, **parts[0])
    on_all(SnapshotError, says, lambda: resume(folder, model, optimizer, **parts[1]))


def test_a_disabled_scaler_resumes(folder: Path) -> None:
    model, scaler = chain(), hc.GradScaler("cpu", enabled=False)
    optimizer = distributed(model, torch.optim.SGD(model.parameters(), lr=0.1))
    saved(folder, model, optimizer, scaler=scaler)
    resume(folder, model, optimizer, scaler=scaler)


@pytest.mark.parametrize("make", [hc.DistributedOptimizer, hc.LocalSGD])
def test_an_optimizer_of_some_ranks_is_refused(folder: Path, make: Any) -> None:
    """Without rank 0, the weights of its ranks would be lost."""
    model, members = chain(), hc.add_process_set([1])
    bare = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = make(bare, model.named_parameters(), process_set=members)
    says = "Snapshots cannot be used with an optimizer of a process set: .*give it all ranks"
    on_all(ValueError, says, lambda: saved(folder, model, optimizer))
    hc.remove_process_set(members)


@pytest.mark.parametrize("shard", [1, 3])
def test_half_precision_shards_resume_whole(folder: Path, shard: int) -> None:
    """The moments are those of float32 master weights, which a whole optimizer has not."""

    def make(**options: Any) -> tuple[nn.Module, Any]:
        model = chain(2, torch.bfloat16)
        return model, distributed(model, torch.optim.Adam(model.parameters(), lr=0.01), **options)

    model, optimizer = make(shard=shard)
    train(model, optimizer, range(2))
    saved(folder, model, optimizer)
    again, whole = make()
    resume(folder, again, whole)
    train(model, optimizer, range(2, 4))
    train(again, whole, range(2, 4))
    with optimizer.gathered_parameters():
        assert difference(model, again) < 0.01


@pytest.mark.parametrize("shard", [1, 3])
def test_a_parameter_without_elements_is_no_obstacle(folder: Path, shard: int) -> None:
    for options in {"shard": shard}, {}, {"shard": shard}:
        model = nn.Linear(4, 4)
        model.empty = nn.Parameter(torch.zeros(0, 2))
        optimizer = distributed(model, torch.optim.Adam(model.parameters(), lr=0.01), **options)
        with hc.Snapshots(folder, model=model, optimizer=optimizer, blocking=True) as snapshots:
            begun = snapshots.resume()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            snapshots.save(begun + 1)
    assert begun == 2


def test_steps_that_are_counted_from_the_start_again_are_refused(folder: Path) -> None:
    """The next resume() would load the older snapshot of the larger step, and all that came after it would be lost."""
    model, optimizer = made()
    for steps in ((4, 8), (8, 9)):
        with hc.Snapshots(folder, model=model, optimizer=optimizer, blocking=True) as snapshots:
            resumed = snapshots.resume()
            if resumed:
                on_all(SnapshotError, "step 3 is before step 8", lambda: snapshots.save(3))
            for number in steps:
                snapshots.save(number)
            on_all(SnapshotError, f"step 5 is before step {steps[-1]}", lambda: snapshots.save(5))


def test_damage_found_by_one_rank_is_a_snapshot_error_on_all_ranks(folder: Path) -> None:
    model, optimizer = made()
    saved(folder, model, optimizer)
    if hc.rank() == 0:
        next(folder.rglob("replicated.pt")).write_bytes(b"")
    hc.barrier()
    with pytest.warns() if hc.rank() == 0 else pytest.MonkeyPatch.context():
        on_all(SnapshotError, "", lambda: resume(folder, model, optimizer))


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("keep", lambda folder, optimizer: 5),
        ("blocking", lambda folder, optimizer: True),
        ("scheduler", lambda folder, optimizer: PARTS["exponential"][1](optimizer)),
        ("scaler", lambda folder, optimizer: hc.GradScaler("cpu")),
        ("folder", lambda folder, optimizer: folder / "other"),
    ],
)
def test_an_argument_on_one_rank(folder: Path, name: str, make: Any) -> None:
    model, optimizer = made()
    given: dict[str, Any] = {"folder": folder, "model": model, "optimizer": optimizer}
    given |= {name: make(folder, optimizer)} if hc.rank() == 1 else {}
    on_all(ValueError, f"Snapshots: {name} differs between ranks", lambda: hc.Snapshots(**given))


@pytest.mark.parametrize(
    ("name", "value"), [("scaler", "x"), ("average", 1), ("model", None), ("keep", "3"), ("loader", 1)]
)
def test_a_wrong_argument_is_named_on_all_ranks(folder: Path, name: str, value: Any) -> None:
    model, optimizer = made()
    given: dict[str, Any] = {"folder": folder, "model": model, "optimizer": optimizer, name: value}
    on_all(TypeError, f"Snapshots: {name} is a {type(value).__name__}", lambda: hc.Snapshots(**given))


def groups(model: nn.Module, seed: int) -> list[dict[str, Any]]:
    """Two groups of parameters as sets give them: in an order of the rank and the run."""
    generator = torch.Generator().manual_seed(100 * seed + hc.rank())
    named = list(model.named_parameters())
    named = [named[place] for place in torch.randperm(len(named), generator=generator).tolist()]
    return [
        {"params": [one for name, one in named if name.endswith(end)], "weight_decay": decay}
        for end, decay in (("weight", 0.1), ("bias", 0.0))
    ]


@pytest.mark.parametrize("options", [{}, {"shard": 2}, {"local": True}], ids=str)
def test_state_finds_its_parameter_in_a_group_of_another_order(folder: Path, options: dict[str, Any]) -> None:
    """Momentum differs between parameters of one shape, so a state in the place of another would show."""

    def make(seed: int) -> tuple[nn.Module, Any]:
        model = chain()
        bare = torch.optim.AdamW(groups(model, seed), lr=0.01)
        if "local" in options:
            local = hc.LocalSGD(bare, named_parameters=model.named_parameters(), every=2, model=model)
            return model, local
        return model, distributed(model, bare, **options)

    model, optimizer = make(0)
    step(model, optimizer, 0)
    saved(folder, model, optimizer)
    step(model, optimizer, 1)
    step(model, optimizer, 2)
    again, resumed = make(1)
    resume(folder, again, resumed)
    step(again, resumed, 1)
    step(again, resumed, 2)
    for one, other in zip(model.parameters(), again.parameters()):
        assert torch.equal(one, other)
    if "local" not in options:
        same_everywhere(model)


def test_a_warning_names_what_begins_anew(folder: Path) -> None:
    saved(folder, *made())
    model, optimizer = made()
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    loader = hc.data.DistributedSampler(range(40), batch_size=2)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        resume(folder, model, optimizer, scheduler=schedule, loader=loader)
    said = [str(one.message) for one in told if "begins anew" in str(one.message)]
    expected = "The snapshot of step 1 has no state of the scheduler and the loader, which begins anew."
    assert said == ([expected] if hc.rank() == 0 else [])
