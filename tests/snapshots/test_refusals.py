"""Snapshots of another optimizer, arguments that differ between ranks, and groups of parameters in another order."""

import warnings

import pytest
import torch
from one_process import batch, chain, same_everywhere, train
from same import assert_same
from sharded import distribute
from snapshot_files import resume, save
from torch import nn

import hvd_ckpt as hc
from hvd_ckpt.collectives import agreement
from hvd_ckpt.snapshots.folder import SnapshotError

pytestmark = pytest.mark.ranks(gloo=(2, 3), mpi=(4,))
SGD, ADAM, ADAMW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW


def on_all(kind, match, call, *arguments, **options):
    """An error on every rank, after which the ranks are in step."""
    with pytest.raises(kind, match=match):
        call(*arguments, **options)
    assert hc.allgather_object(hc.rank()) == list(range(hc.size()))


def distributed(model, bare=None, **options):
    bare = bare or SGD(model.parameters(), lr=0.1)
    return distribute(bare, named_parameters=model.named_parameters(), model=model, **options)


def made(kind=SGD, **options):
    model = chain()
    return model, distributed(model, kind(model.parameters(), lr=0.1), **options)


def snapshots_of(folder, model, optimizer, blocking=True, **more):
    return hc.Snapshots(folder, model=model, optimizer=optimizer, blocking=blocking, **more)


class Feed:
    """Has a state that it is given."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


class Broken(Feed):
    """Has a state on all ranks but one."""

    def state_dict(self):
        if hc.rank() == 1:
            raise KeyError("planted")
        return self.state


class Counting(nn.Linear):
    extra = None

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


def counting(extra, **options):
    model = nn.Sequential(nn.Linear(4, 4), Counting(4, 4))
    model[1].extra = extra
    return model, distributed(model, **options)


# -------------------------------------------------------------------------------------------- what is refused


def exponential(optimizer):
    return {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)}


def cosine(optimizer):
    return {"scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)}


def loader_of_each_rank(_):
    return {"loader": Feed({"at": hc.rank()})}


def loader_of_all(_):
    return {"loader": hc.data.DistributedSampler(torch.zeros(40), 2)}


@pytest.mark.parametrize("shard", [0, 2])
@pytest.mark.parametrize(
    ("then", "now", "says"),
    [
        ((SGD,), (ADAM,), "SGD.*Adam"),
        ((ADAM,), (ADAMW,), "Adam.*AdamW"),
        ((ADAM,), (SGD,), "Adam.*SGD"),
        ((SGD, exponential), (SGD, cosine), "ExponentialLR.*CosineAnnealingLR"),
        # Its position would be lost, and samples be read twice.
        ((SGD, loader_of_each_rank), (SGD, loader_of_all), 'loader is "a loader of each rank", .* here is "DistributedSampler"'),
        ((SGD, loader_of_all), (SGD, loader_of_each_rank), 'loader is "DistributedSampler", .* here is "a loader of each rank"'),
    ],
)  # fmt: skip
def test_another_optimizer_scheduler_or_kind_of_loader_is_refused(folder, then, now, says, shard):
    def loop(kind, parts=lambda optimizer: {}):
        model, optimizer = made(kind, shard=shard)
        return model, optimizer, parts(optimizer)

    model, optimizer, parts = loop(*then)
    train(model, optimizer, range(1))
    save(folder, model, optimizer, **parts)
    model, optimizer, parts = loop(*now)
    on_all(SnapshotError, says, resume, folder, model, optimizer, **parts)


@pytest.mark.parametrize(
    ("make", "more", "error", "says"),
    [
        (made, {"loader": Feed([1])}, SnapshotError, "loader is a list, and must be a valid dictionary"),
        (made, {"loader": Feed({0: 1})}, SnapshotError, r"the key loader\[0\] is 0, and must be a valid string"),
        (made, {"scheduler": Feed((1,))}, SnapshotError, "scheduler is a list, and must be a valid dictionary"),
        (made, {"scaler": hc.GradScaler("cpu", growth_interval=2**31)}, SnapshotError, "scaler.growth_interval is .* less than"),
        (made, {"scheduler": Broken({})}, KeyError, "planted"),
        (lambda: counting({"pattern": nn.Tanh()}), {}, TypeError,
         r"the module '1' has a get_extra_state\(\), which returns a dict; .*Tanh.*keep that state in buffers"),
    ],
)  # fmt: skip
def test_state_that_no_run_could_resume_from_is_refused_when_saved(folder, make, more, error, says):
    if error is SnapshotError:
        says = f"step 1 was not written, since it could not be resumed from: .*{says}"
    on_all(error, says, save, folder, *make(), **more)
    assert not list(folder.rglob("manifest.json"))


def test_steps_that_are_wrong_or_counted_from_the_start_again_are_refused(folder):
    """The next resume() would load the older snapshot of the larger step, and all that came after it would be lost."""
    model, optimizer = made()
    with snapshots_of(folder, model, optimizer) as snapshots:
        says = rf"different collective calls: .*save\(1\).*save\({hc.size()}\)"
        on_all(RuntimeError, says, snapshots.save, 1 + hc.rank())
        for wrong in ("x", -(10**30), 10**30):
            on_all(SnapshotError, "step ", snapshots.save, wrong)
        snapshots.save(4)  # which is not before a step that was refused
        snapshots.save(8)
        on_all(SnapshotError, "step 5 is before step 8", snapshots.save, 5)
    with snapshots_of(folder, model, optimizer) as snapshots:
        snapshots.resume()
        on_all(SnapshotError, "step 3 is before step 8", snapshots.save, 3)
        snapshots.save(8)
        snapshots.save(9)
        on_all(SnapshotError, "step 5 is before step 9", snapshots.save, 5)


def test_damage_found_by_one_rank_is_a_snapshot_error_on_all_ranks(folder):
    model, optimizer = made()
    save(folder, model, optimizer)
    if hc.rank() == 0:
        next(folder.rglob("replicated.pt")).write_bytes(b"")
    hc.barrier()
    with pytest.warns() if hc.rank() == 0 else pytest.MonkeyPatch.context():
        on_all(SnapshotError, "None of the snapshots in", resume, folder, model, optimizer)


@pytest.mark.parametrize("make", [hc.DistributedOptimizer, hc.LocalSGD])
def test_an_optimizer_of_some_ranks_is_refused(folder, make):
    """Without rank 0, the weights of its ranks would be lost."""
    model, members = chain(), hc.add_process_set([1])
    optimizer = make(SGD(model.parameters(), lr=0.1), model.named_parameters(), process_set=members)
    says = "Snapshots cannot be used with an optimizer of a process set: .*give it all ranks"
    on_all(ValueError, says, save, folder, model, optimizer)
    hc.remove_process_set(members)


@pytest.mark.parametrize(
    ("name", "value"),
    [("keep", 5), ("blocking", False), ("scheduler", exponential), ("scaler", hc.GradScaler("cpu")), ("folder", "other")],
)  # fmt: skip
def test_an_argument_on_one_rank(folder, name, value):
    model, optimizer = made()
    given = {"folder": folder, "model": model, "optimizer": optimizer, "blocking": True}
    if hc.rank() == 1:
        given[name] = value(optimizer)["scheduler"] if name == "scheduler" else value
    on_all(ValueError, f"Snapshots: {name} differs between ranks", hc.Snapshots, **given)


@pytest.mark.parametrize(
    ("name", "value", "error", "says"),
    [
        ("scaler", "x", TypeError, "scaler is a str"),
        ("average", 1, TypeError, "average is a int"),
        ("model", None, TypeError, "model is a NoneType"),
        ("loader", [], TypeError, "loader is a list"),
        ("keep", "3", TypeError, "keep is a str"),
        ("keep", 0, ValueError, "keep is 0"),
    ],
)
def test_a_wrong_argument_is_named_on_all_ranks(folder, name, value, error, says):
    model, optimizer = made()
    given = {"folder": folder, "model": model, "optimizer": optimizer, name: value}
    on_all(error, f"Snapshots: {says}", hc.Snapshots, **given)


# -------------------------------------------------------------------------------------------- what is not


@pytest.mark.parametrize("shard", [0, 1, 2, 3])
def test_a_save_between_backward_and_step_warns(folder, shard):
    model, optimizer = made(shard=shard)
    model(batch(0, hc.rank())).square().mean().backward()
    with pytest.warns(UserWarning, match=r"step 1 lacks the gradients .* save after step\(\)"):
        save(folder, model, optimizer)
    optimizer.step()
    with warnings.catch_warnings(), snapshots_of(folder, model, optimizer) as snapshots:
        warnings.simplefilter("error")
        snapshots.resume()
        train(model, optimizer, range(1, 2))
        snapshots.save(2)


@pytest.mark.parametrize("shard", [0, 1, 3])
@pytest.mark.parametrize("kind", [torch.tensor, lambda number: {"passes": number, "peaks": [0.5, number]}])
def test_each_ranks_extra_state_is_saved(folder, kind, shard):
    save(folder, *counting(kind(hc.rank() + 3), shard=shard))
    model, optimizer = counting(kind(-1), shard=shard)
    resume(folder, model, optimizer)
    assert model[1].extra == kind(hc.rank() + 3)


def test_a_first_save_exchanges_once_and_a_loss_with_its_graph_is_saved_as_a_number(folder, monkeypatch):
    model, optimizer = made()
    calls, unspied = [], agreement._sum

    def spying(values, name, process_set):
        calls.append(name)
        return unspied(values, name, process_set)

    scaler = hc.GradScaler("cpu", enabled=False)
    with snapshots_of(folder, model, optimizer, blocking=False, scaler=scaler) as snapshots:
        loss = model(batch(0, 0)).square().mean()
        with monkeypatch.context() as patch:
            patch.setattr(agreement, "_sum", spying)
            snapshots.save(1, best=loss)
        assert len(calls) == 1
        assert snapshots.resume() == 1 and torch.equal(snapshots.loop["best"], loss)


def groups(model, seed):
    """Two groups of parameters as sets give them: in an order of the rank and the run."""
    generator = torch.Generator().manual_seed(100 * seed + hc.rank())
    named = list(model.named_parameters())
    named = [named[place] for place in torch.randperm(len(named), generator=generator).tolist()]
    return [
        {"params": [one for name, one in named if name.endswith(end)], "weight_decay": decay}
        for end, decay in (("weight", 0.1), ("bias", 0.0))
    ]


@pytest.mark.parametrize("options", [{}, {"shard": 2}, {"local": True}], ids=str)
def test_state_finds_its_parameter_in_a_group_of_another_order(folder, options):
    """Momentum differs between parameters of one shape, so a state in the place of another would show."""

    def make(seed):
        model = chain()
        bare = ADAMW(groups(model, seed), lr=0.01)
        if "local" in options:
            return model, hc.LocalSGD(bare, model.named_parameters(), every=2, model=model)
        return model, distributed(model, bare, **options)

    model, optimizer = make(0)
    train(model, optimizer, range(1))
    save(folder, model, optimizer)
    again, resumed = make(1)
    resume(folder, again, resumed)
    for one, its_optimizer in (model, optimizer), (again, resumed):
        train(one, its_optimizer, range(1, 3))
    assert_same(again.state_dict(), model.state_dict())
    if "local" not in options:
        same_everywhere(model)


def test_a_warning_names_what_begins_anew(folder):
    save(folder, *made())
    model, optimizer = made()
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    loader = hc.data.DistributedSampler(range(40), batch_size=2)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        resume(folder, model, optimizer, scheduler=schedule, loader=loader)
    said = [str(one.message) for one in told if "begins anew" in str(one.message)]
    expected = "The snapshot of step 1 has no state of the scheduler and the loader, which begins anew."
    assert said == ([expected] if hc.rank() == 0 else [])
