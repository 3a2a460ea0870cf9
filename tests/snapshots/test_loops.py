"""Tests of a user's own loop with Snapshots: stopped and resumed, sharded or not, it ends in the same bits."""

import contextlib
import dataclasses
import os
import re
import shutil
import signal
import time
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from same import assert_same
from sharded import distribute
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import ExponentialLR, MultiStepLR
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import hvd_ckpt as hc
from hvd_ckpt.snapshots import content, reader
from hvd_ckpt.snapshots.export import export
from hvd_ckpt.snapshots.folder import SnapshotError
from hvd_ckpt.snapshots.schema import Layout
from hvd_ckpt.snapshots.writer import SnapshotWriter

pytestmark = pytest.mark.ranks(gloo=(2,))

STEPS = 9


class Stream:
    """Rows of each rank as they come, of which it counts those that it has given."""

    def __init__(self):
        generator = torch.Generator().manual_seed(8 + hc.rank())
        self.rows, self.given = torch.randn(2 * STEPS * 5, 8, generator=generator), 0

    def __iter__(self):
        while self.given < len(self.rows):
            rows = self.rows[self.given : self.given + 5 + hc.rank()]
            self.given += len(rows)
            yield rows, torch.arange(len(rows)) % 4

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.given = state["given"]


class Loop:
    """A model with everything that has state; one of another ``seed`` begins with other weights and random numbers."""

    def __init__(self, seed=0, width=16, local=None, stream=False, **options):
        torch.manual_seed(5)
        data = TensorDataset(torch.randn(60, 8), torch.arange(60) % 4)
        torch.manual_seed(seed)
        self.sampler = hc.data.DistributedSampler(data, 5, seed=3, epochs=4)
        self.loader = Stream() if stream else hc.data.DataLoader(data, self.sampler)
        self.model = nn.Sequential(
            nn.Linear(8, width), nn.BatchNorm1d(width), nn.Dropout(0.2), nn.Linear(width, 4)
        )
        self.model[0].bias.requires_grad_(False)
        bare = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        make = distribute if local is None else hc.LocalSGD
        self.optimizer = make(bare, self.model.named_parameters(), **options, **(local or {}))
        self.scheduler = ExponentialLR(self.optimizer, 0.8)
        self.scaler = hc.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
        self.average = None
        if local is None:
            self.average = hc.AveragedWeights(self.optimizer, multi_avg_fn=get_ema_multi_avg_fn(0.8))
        torch.manual_seed(100 + hc.rank())

    def snapshots(self, folder, **options):
        parts = ("model", "optimizer", "scheduler", "scaler", "loader", "average")
        return hc.Snapshots(folder, **{name: getattr(self, name) for name in parts}, **options)

    def run(self, folder, signalled_at=None, every=4, steps=STEPS):
        """Trains to the end or to a stop; returns the last step, and why it stopped."""
        with self.snapshots(folder, keep=9) as snapshots:
            step, stop = snapshots.resume(), None
            for inputs, targets in self.loader:
                if step == signalled_at and hc.rank() == hc.size() - 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                self.optimizer.zero_grad()
                loss = functional.cross_entropy(self.model(inputs), targets)
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
                if self.average is not None:
                    self.average.update_parameters()
                self.scheduler.step()
                step += 1
                stop = snapshots.stop_requested()
                if stop or step % every == 0:
                    snapshots.save(step, half=step / 2)
                if stop or step == steps:
                    break
            return step, stop

    def weights(self):
        return {name: one.clone() for name, one in self.model.state_dict().items()}

    def results(self):
        """Weights and averages on every rank, whole."""
        with self.optimizer.gathered_parameters():
            found = self.weights()
        if self.average is not None:
            with self.average.applied(), self.optimizer.gathered_parameters():
                found |= {f"average {name}": one for name, one in self.weights().items()}
        return {**found, "lr": torch.tensor(self.optimizer.param_groups[0]["lr"]), "next": torch.rand(3)}


def stopped_and_resumed(folder, stops_at, **options):
    """A loop that a signal stops ends in the same bits; returns that without a stop, its results, and the first and second part."""
    whole = Loop(**options)
    assert whole.run(folder / "whole") == (STEPS, None)
    expected = whole.results()
    handler = signal.getsignal(signal.SIGTERM)
    first = Loop(**options)
    assert first.run(folder / "run", signalled_at=2) == (stops_at, "SIGTERM")
    assert signal.getsignal(signal.SIGTERM) == handler
    saved = first.results()
    second = Loop(seed=7, **options)
    assert second.run(folder / "run") == (STEPS, None)
    assert_same(second.results(), expected)
    return SimpleNamespace(whole=whole, results=expected, first=first, saved=saved, second=second)


@pytest.mark.parametrize("options", [{}, {"shard": 1}, {"shard": 2, "wire": "bf16"}, {"shard": 3}], ids=str)
def test_a_loop_that_a_signal_stops_resumes_in_the_same_bits(folder, options):
    stopped_and_resumed(folder, 4, **options)  # the signal travels with the gradients of the next step


def test_a_stream_of_each_rank_resumes_where_it_was(folder, monkeypatch):
    stopped = stopped_and_resumed(folder, 4, stream=True)
    states = hc.allgather_object(stopped.first.loader.state_dict())
    assert states[0] != states[1]
    for replicas, changes in (3, {"ranks": 3}), (1, {"layout": Layout(pipeline_stages=2)}):

        def of_others(folder, changes=changes):
            found = reader.find(folder)
            return dataclasses.replace(found, manifest=found.manifest.model_copy(update=changes))

        monkeypatch.setattr("hvd_ckpt.snapshots.snapshots.find", of_others)
        with pytest.raises(SnapshotError, match=f"on each of {replicas} ranks, and there are 2: resume with"):
            Loop(stream=True).run(folder / "run")


# -------------------------------------------------------------------------------------------- local SGD

UNDER_WAY = {"every": 4, "outer": hc.Nesterov(), "fragments": 2, "delay": 3, "wire": "int8"}


def warns_of_a_new_period(does=True):
    is_told = does and hc.rank() == 0
    return pytest.warns(UserWarning, match="new period") if is_told else contextlib.nullcontext()


def test_a_loop_of_local_sgd_resumes_within_a_period_with_work_under_way(folder):
    # One fragment leaves after step 2 and is applied after step 5, when the other is under way.
    stopped = stopped_and_resumed(folder, 5, local=UNDER_WAY)
    weights = hc.allgather_object(stopped.results["3.weight"])
    assert not torch.equal(weights[0], weights[1])
    assert stopped.second.optimizer.divergence == stopped.whole.optimizer.divergence > 0

    for wrong in {}, {"local": {**UNDER_WAY, "every": 6}}:
        with pytest.raises(SnapshotError, match=r"step 8 lies within a period of local SGD"):
            Loop(**wrong).run(folder / "run")
    ended = Loop(local={"every": 3, "outer": hc.Nesterov()})
    assert ended.run(folder / "ended", every=3, steps=3) == (3, None)
    with warns_of_a_new_period():
        assert Loop(local={"every": 2}).run(folder / "ended", steps=4) == (4, None)
    with pytest.raises(ValueError, match="leave out average"):
        hc.Snapshots(folder, model=ended.model, optimizer=ended.optimizer, average=Loop().average)


@pytest.mark.ranks(gloo=(2,), mpi=(4,))
@pytest.mark.parametrize("shard", [1, 2, 3])
def test_a_loop_of_local_sgd_that_is_sharded_within_groups_resumes_in_the_same_bits(folder, shard):
    groups = [[0, 1]] if hc.size() == 2 else [[0, 2], [1, 3]]
    local = {**UNDER_WAY, "within": groups, "shard": shard}
    stopped = stopped_and_resumed(folder, 5, local=local)
    ranks = hc.allgather_object(stopped.saved)
    assert torch.equal(ranks[0]["3.weight"], ranks[groups[0][1]]["3.weight"])
    assert hc.size() == 2 or not torch.equal(ranks[0]["3.weight"], ranks[1]["3.weight"])
    if hc.rank() == 0:
        written = reader.open_snapshot(folder / "run" / "snapshots" / "step-00000005")
        export(written, folder / "mean.safetensors")
        for name, value in load_file(folder / "mean.safetensors").items():
            if value.is_floating_point():
                torch.testing.assert_close(value, torch.stack([one[name] for one in ranks]).mean(0))
    if hc.size() == 4:
        for wrong in {"shard": 0}, {"within": [[0, 1], [2, 3]]}:
            with pytest.raises(SnapshotError, match=r"lies within a period .*(other shards|groups)"):
                Loop(local={**local, **wrong}).run(folder / "run")


def test_a_period_with_other_shards_begins_anew_also_on_a_rank_that_has_the_same_elements(folder):
    for begun, shard in enumerate((1, 0)):  # rank 0 has all elements of a small model in both
        model = nn.Linear(4, 4, bias=False)
        bare = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hc.LocalSGD(bare, model.named_parameters(), every=1, within=[[0, 1]], shard=shard)
        with hc.Snapshots(folder, model=model, optimizer=optimizer, blocking=True) as snapshots:
            with warns_of_a_new_period(begun):
                assert snapshots.resume() == begun
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            snapshots.save(begun + 1)
    weights = hc.allgather_object(model.weight.detach())
    assert torch.equal(weights[0], weights[1])


# -------------------------------------------------------------------------------------------- moments


@pytest.fixture
def late_copies(monkeypatch):
    """Of loops that are as wide as 600; small tensors are copied at once."""
    copy = SnapshotWriter._copy
    monkeypatch.setattr(SnapshotWriter, "_copy", lambda writer, job: (time.sleep(0.3), copy(writer, job)))


@pytest.mark.usefixtures("late_copies")
def test_an_average_in_a_step_that_overflow_skips_waits_for_the_copy(folder):
    loop = Loop(width=600, local={"every": 2})
    with loop.snapshots(folder / "run") as snapshots:
        for step in range(2):
            loss = loop.model(torch.full((4, 8), hc.rank() + 1.0)).square().sum()
            loop.scaler.scale(loss * (1e38 if step else 1.0)).backward()
            if step:
                own = loop.weights()
                snapshots.save(1)
            loop.scaler.step(loop.optimizer)
            loop.scaler.update()
        assert loop.optimizer.skipped_steps == 1
        assert not torch.equal(loop.model[3].weight, own["3.weight"])
        assert snapshots.resume() == 1
    assert_same(loop.weights(), own)


@pytest.mark.usefixtures("late_copies")
def test_a_snapshot_holds_the_moment_of_its_save_however_late_it_is_copied(folder):
    def loop():
        made = Loop(width=600)
        made.scheduler = MultiStepLR(made.optimizer, [1, 3])
        return made

    first, again = loop(), loop()
    assert first.run(folder / "run", every=2, steps=3) == (3, None)
    assert again.run(folder / "run", every=9, steps=3) == (3, None)  # from step 2
    assert_same(again.weights(), first.weights())
    assert first.optimizer.param_groups[0]["lr"] == again.optimizer.param_groups[0]["lr"] < 1e-3


@pytest.mark.usefixtures("late_copies")
def test_state_that_changes_right_after_a_save_is_saved_as_it_was(folder):
    """Also where the loop itself goes back, which waits for the snapshot under way."""
    loop, history = Loop(width=600), torch.zeros(2000)
    loop.average.update_parameters()
    with torch.no_grad():
        loop.model[3].weight.add_(1.0)
    saved = loop.weights()
    with loop.snapshots(folder / "run") as snapshots:
        snapshots.save(1, history=history)
        history += 1
        with loop.average.applied():
            assert not torch.equal(loop.model[3].weight, saved["3.weight"])
        loop.average.update_parameters()
        assert snapshots.resume() == 1
    assert_same(loop.weights(), saved)
    assert loop.average.n_averaged == 1 and not snapshots.loop["history"].any()
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SnapshotError, match="resume"):
        Loop(width=600).snapshots(folder / "run").save(2)
    assert signal.getsignal(signal.SIGTERM) == handler


# -------------------------------------------------------------------------------------------- others, and failures


def test_another_sharding_resumes_and_a_snapshot_of_another_model_is_refused_on_every_rank(folder):
    whole = Loop()
    assert whole.run(folder / "whole") == (STEPS, None)
    for options, steps in ({"shard": 3}, 3), ({}, 5), ({"shard": 1}, 7), ({"shard": 3}, STEPS):
        loop = Loop(**options)
        assert loop.run(folder / "run", every=1, steps=steps) == (steps, None)
    found = loop.results()
    for name, value in whole.results().items():
        assert torch.allclose(found[name], value, atol=1e-5) or name == "next", name

    for options in {}, {"shard": 2}, {"shard": 3}:
        with pytest.raises(ValueError, match=r"step-00000009' cannot be used: weights.*of another model"):
            Loop(width=12, **options).run(folder / "run")
    loop = Loop()
    loop.sampler.seed = 4
    with pytest.raises(ValueError, match="seed 3, and here it is 4"):
        loop.run(folder / "run")


def test_failed_saves_warn_and_raise_at_close(folder):
    told = []
    snapshots = Loop().snapshots(folder / "run", warn=told.append)
    snapshots.save(1, fine=hc.rank() == 0)
    snapshots.save(2, odd={1, 2})
    with pytest.raises(SnapshotError, match="step 2"):
        snapshots.close()
    assert [text.count("odd is a builtins.set") for text in told] == [1] * (hc.rank() == 0)
    assert os.listdir(folder / "run" / "snapshots") == ["step-00000001"]


@pytest.mark.parametrize("blocking", [False, True])
def test_the_last_snapshot_is_tried_again_when_older_ones_have_made_room(folder, monkeypatch, blocking):
    save, place = content.save_state, folder / "run" / "snapshots"

    def full(path, state):
        if len(list(place.glob("step-*"))) > 2:
            raise OSError(28, os.strerror(28), str(path))
        return save(path, state)

    monkeypatch.setattr(content, "save_state", full)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    told = []
    with Loop().snapshots(folder / "run", keep=9, warn=told.append, blocking=blocking) as snapshots:
        for step in range(1, 5):
            snapshots.save(step)
    (said,) = (one for of_rank in hc.allgather_object(told) for one in of_rank)
    assert sorted(os.listdir(place)) == ["step-00000003", "step-00000004"]
    says = r"step 4 was .*No space left.*: make room for [\d,]{5,} bytes more\. .* newest snapshot stays"
    assert re.search(says, said)
    with Loop().snapshots(folder / "run") as snapshots:
        assert snapshots.resume() == 4


def test_a_folder_that_rank_0_could_not_make_holds_up_no_later_snapshot(folder, monkeypatch):
    """The other ranks look for it no longer than rank 0 has tried."""
    monkeypatch.setattr(content, "RANK_SECONDS", 1e9)
    loop, blocked = Loop(), folder / "snapshots"
    with loop.snapshots(folder, warn=lambda text: None) as snapshots:
        assert snapshots.resume() == 0
        for step, is_blocked in enumerate((True, True, False), 1):
            if hc.rank() == 0:
                blocked.unlink(missing_ok=True)
                if is_blocked:
                    blocked.symlink_to("/proc/nowhere")
            hc.barrier()
            snapshots.save(step)
            if is_blocked:
                with pytest.raises(SnapshotError, match=f"of step {step}, could not be written"):
                    snapshots.wait()
        snapshots.wait()
        assert [path.name for path in blocked.iterdir()] == ["step-00000003"]
