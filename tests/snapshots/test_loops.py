"""Tests of a user's own loop with Snapshots: stopped and resumed, sharded or not, it ends in the same bits."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from same import assert_same
from sharded import distribute
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import hvd_ckpt as hc
from hvd_ckpt.snapshots import content, reader
from hvd_ckpt.snapshots.export import export
from hvd_ckpt.snapshots.folder import SnapshotError
from hvd_ckpt.snapshots.reader import Snapshot
from hvd_ckpt.snapshots.schema import Layout
from hvd_ckpt.snapshots.writer import SnapshotWriter

pytestmark = pytest.mark.ranks(gloo=(2,))

STEPS = 9
LAST = hc.size() - 1


class Loop:
    """A model with everything that has state."""

    def __init__(
        self,
        seed: int = 0,
        width: int = 16,
        local: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        torch.manual_seed(5)
        self.data = TensorDataset(torch.randn(60, 8), torch.arange(60) % 4)
        torch.manual_seed(seed)
        self.sampler = hc.data.DistributedSampler(self.data, 5, seed=3, epochs=4)
        self.loader: Any = hc.data.DataLoader(self.data, self.sampler)
        self.model = nn.Sequential(
            nn.Linear(8, width), nn.BatchNorm1d(width), nn.Dropout(0.2), nn.Linear(width, 4)
        )
        self.model[0].bias.requires_grad_(False)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        make: Any = distribute if local is None else hc.LocalSGD
        self.optimizer = make(optimizer, self.model.named_parameters(), **options, **(local or {}))
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.8)
        self.scaler = hc.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
        self.average = None
        if local is None:
            self.average = hc.AveragedWeights(
                self.optimizer,
                multi_avg_fn=get_ema_multi_avg_fn(0.8),
            )
        torch.manual_seed(100 + hc.rank())

    def snapshots(self, folder: Path, **options: Any) -> hc.Snapshots:
        parts = ("model", "optimizer", "scheduler", "scaler", "loader", "average")
        return hc.Snapshots(folder, **{name: getattr(self, name) for name in parts}, **options)

    def run(
        self,
        folder: Path,
        at: int = 0,
        disturb: Callable[[], None] = lambda: None,
        every: int = 4,
        steps: int = STEPS,
    ) -> tuple[int, str | None]:
        """Trains to the end or to a stop; returns the last step, and why it stopped."""
        with self.snapshots(folder, keep=9) as snapshots:
            step, stop = snapshots.resume(), None
            for inputs, targets in self.loader:
                if step == at and hc.rank() == LAST:
                    disturb()
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

    def results(self) -> dict[str, Tensor]:
        """Weights and averages on every rank, whole."""
        with self.optimizer.gathered_parameters():
            found = {name: one.clone() for name, one in self.model.state_dict().items()}
        if self.average is not None:
            with self.average.applied(), self.optimizer.gathered_parameters():
                found |= {f"average {name}": one.clone() for name, one in self.model.state_dict().items()}
        return {**found, "lr": torch.tensor(self.optimizer.param_groups[0]["lr"]), "next": torch.rand(3)}


@pytest.mark.parametrize(
    "options",
    [{}, {"shard": 1}, {"shard": 2, "wire": "bf16"}, {"shard": 3}],
    ids=str,
)
def test_a_loop_that_a_signal_stops_resumes_in_the_same_bits(folder: Path, options: dict[str, Any]) -> None:
    whole = Loop(**options)
    assert whole.run(folder / "whole") == (STEPS, None)
    expected = whole.results()

    before = signal.getsignal(signal.SIGTERM)
    stopped = Loop(**options).run(folder / "run", 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert stopped == (4, "SIGTERM")  # it travels with the gradients of the next step
    assert signal.getsignal(signal.SIGTERM) == before
    other = Loop(seed=7, **options)  # whose weights and random state are not those of the run
    assert other.run(folder / "run") == (STEPS, None)
    assert_same(other.results(), expected)


class Stream:
    """Rows of each rank as they come, of which it counts those that it has given."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(8 + hc.rank())
        self.rows, self.given = torch.randn(2 * STEPS * 5, 8, generator=generator), 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while self.given < len(self.rows):
            rows = self.rows[self.given : self.given + 5 + hc.rank()]
            self.given += len(rows)
            yield rows, torch.arange(len(rows)) % 4

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]


def test_a_stream_of_each_rank_resumes_where_it_was(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def streaming() -> Loop:
        loop = Loop()
        loop.loader = Stream()
        return loop

    whole = streaming()
    assert whole.run(folder / "whole") == (STEPS, None)
    expected = whole.results()
    stopped = streaming()
    assert stopped.run(folder / "run", 2, lambda: os.kill(os.getpid(), signal.SIGTERM)) == (4, "SIGTERM")
    states = hc.allgather_object(stopped.loader.state_dict())
    assert states[0] != states[1]
    other = streaming()
    assert other.run(folder / "run") == (STEPS, None)
    assert_same(other.results(), expected)

    for replicas, changes in (3, {"ranks": 3}), (1, {"layout": Layout(pipeline_stages=2)}):

        def of_others(folder: Path, changes: dict[str, Any] = changes) -> Snapshot | None:
            found = reader.find(folder)
            assert found is not None
            return dataclasses.replace(found, manifest=found.manifest.model_copy(update=changes))

        monkeypatch.setattr("hvd_ckpt.snapshots.snapshots.find", of_others)
        with pytest.raises(SnapshotError, match=f"on each of {replicas} ranks, and there are 2: resume with"):
            streaming().run(folder / "run")


UNDER_WAY = {"every": 4, "outer": hc.Nesterov(), "fragments": 2, "delay": 3, "wire": "int8"}


def test_a_loop_of_local_sgd_resumes_within_a_period_with_work_under_way(folder: Path) -> None:
    whole = Loop(local=UNDER_WAY)
    assert whole.run(folder / "whole") == (STEPS, None)
    expected = whole.results()
    weights = hc.allgather_object(expected["3.weight"])
    assert not torch.equal(weights[0], weights[1])

    stopped = Loop(local=UNDER_WAY)
    # One fragment leaves after step 2 and is applied after step 5, when the other is under way.
    assert stopped.run(folder / "run", 2, lambda: os.kill(os.getpid(), signal.SIGTERM)) == (5, "SIGTERM")
    other = Loop(seed=7, local=UNDER_WAY)
    assert other.run(folder / "run") == (STEPS, None)
    assert_same(other.results(), expected)
    assert other.optimizer.divergence == whole.optimizer.divergence > 0

    for wrong in {}, {"local": {**UNDER_WAY, "every": 6}}:
        with pytest.raises(SnapshotError, match=r"step 8 lies within a period of local SGD"):
            Loop(**wrong).run(folder / "run")
    ended = Loop(local={"every": 3, "outer": hc.Nesterov()})
    assert ended.run(folder / "ended", every=3, steps=3) == (3, None)
    with pytest.warns(UserWarning, match="new period") if hc.rank() == 0 else contextlib.nullcontext():
        assert Loop(local={"every": 2}).run(folder / "ended", steps=4) == (4, None)
    loop = Loop()
    with pytest.raises(ValueError, match="leave out average"):
        hc.Snapshots(folder, model=ended.model, optimizer=ended.optimizer, average=loop.average)


@pytest.mark.ranks(gloo=(2,), mpi=(4,))
@pytest.mark.parametrize("shard", [1, 2, 3])
def test_a_loop_of_local_sgd_that_is_sharded_within_groups_resumes_in_the_same_bits(
    folder: Path, shard: int
) -> None:
    groups = [[0, 1]] if hc.size() == 2 else [[0, 2], [1, 3]]
    local = {**UNDER_WAY, "within": groups, "shard": shard}
    whole = Loop(local=local)
    assert whole.run(folder / "whole") == (STEPS, None)
    expected = whole.results()
    ended = Loop(local=local)
    assert ended.run(folder / "run", every=7, steps=7) == (7, None)  # a fragment is under way
    ranks = hc.allgather_object(ended.results())
    assert torch.equal(ranks[0]["3.weight"], ranks[groups[0][1]]["3.weight"])
    assert hc.size() == 2 or not torch.equal(ranks[0]["3.weight"], ranks[1]["3.weight"])
    if hc.rank() == 0:
        written = reader.open_snapshot(folder / "run" / "snapshots" / "step-00000007")
        export(written, folder / "mean.safetensors")
        for name, value in load_file(folder / "mean.safetensors").items():
            if value.is_floating_point():
                torch.testing.assert_close(value, torch.stack([one[name] for one in ranks]).mean(0))

    other = Loop(seed=7, local=local)
    assert other.run(folder / "run") == (STEPS, None)
    assert_same(other.results(), expected)
    if hc.size() == 4:
        for wrong in {"shard": 0}, {"within": [[0, 1], [2, 3]]}:
            with pytest.raises(SnapshotError, match=r"lies within a period .*(other shards|groups)"):
                Loop(local={**local, **wrong}).run(folder / "run")


def test_a_period_with_other_shards_begins_anew_also_on_a_rank_that_has_the_same_elements(
    folder: Path,
) -> None:
    for begun, shard in enumerate((1, 0)):  # rank 0 has all elements of a small model in both
        model = nn.Linear(4, 4, bias=False)
        bare = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hc.LocalSGD(bare, model.named_parameters(), every=1, within=[[0, 1]], shard=shard)
        with hc.Snapshots(folder, model=model, optimizer=optimizer, blocking=True) as snapshots:
            warned = begun and hc.rank() == 0
            with pytest.warns(UserWarning, match="new period") if warned else contextlib.nullcontext():
                assert snapshots.resume() == begun
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            snapshots.save(begun + 1)
    weights = hc.allgather_object(model.weight.detach())
    assert torch.equal(weights[0], weights[1])


@pytest.fixture
def late_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = SnapshotWriter._copy
    monkeypatch.setattr(SnapshotWriter, "_copy", lambda writer, job: (time.sleep(0.3), copy(writer, job)))


@pytest.mark.usefixtures("late_copies")
def test_an_average_in_a_step_that_overflow_skips_waits_for_the_copy(folder: Path) -> None:
    loop = Loop(width=600, local={"every": 2})
    with loop.snapshots(folder / "run") as snapshots:
        for step in range(2):
            loss = loop.model(torch.full((4, 8), hc.rank() + 1.0)).square().sum()
            loop.scaler.scale(loss * (1e38 if step else 1.0)).backward()
            if step:
                own = {name: value.clone() for name, value in loop.model.state_dict().items()}
                snapshots.save(1)
            loop.scaler.step(loop.optimizer)
            loop.scaler.update()
    assert loop.optimizer.skipped_steps == 1
    again = Loop(width=600, local={"every": 2})
    with again.snapshots(folder / "run") as snapshots:
        assert snapshots.resume() == 1
    assert_same(again.model.state_dict(), own)
    assert not torch.equal(again.model[3].weight, loop.model[3].weight)


def test_another_sharding_resumes_and_a_snapshot_of_another_model_is_refused_on_every_rank(
    folder: Path,
) -> None:
    whole = Loop()
    assert whole.run(folder / "whole") == (STEPS, None)
    for options, steps in ({"shard": 3}, 3), ({}, 5), ({"shard": 1}, 7), ({"shard": 3}, STEPS):
        loop = Loop(**options)
        assert loop.run(folder / "run", every=1, steps=steps) == (steps, None)
    for name, value in whole.results().items():
        assert torch.allclose(loop.results()[name], value, atol=1e-5) or name == "next", name

    for options in {}, {"shard": 2}, {"shard": 3}:
        with pytest.raises(ValueError, match=r"step-00000009' cannot be used: weights.*of another model"):
            Loop(width=12, **options).run(folder / "run")
    loop = Loop()
    loop.sampler.seed = 4
    with pytest.raises(ValueError, match="seed 3, and here it is 4"):
        loop.run(folder / "run")
    with pytest.raises(TypeError, match="loader is a list"):
        hc.Snapshots(folder, model=loop.model, optimizer=loop.optimizer, loader=[])
    with pytest.raises(ValueError, match="keep is 0"):
        loop.snapshots(folder, keep=0)


@pytest.mark.usefixtures("late_copies")
def test_a_loop_that_goes_back_waits_for_the_snapshot_under_way(folder: Path) -> None:
    loop = Loop(width=600)
    with loop.snapshots(folder / "run") as snapshots:
        snapshots.save(1)
        assert snapshots.resume() == 1


@pytest.mark.usefixtures("late_copies")
def test_a_snapshot_holds_the_moment_of_its_save_however_late_it_is_copied(folder: Path) -> None:
    loop = Loop(width=600)  # beyond the tensors that are copied at once
    loop.scheduler = torch.optim.lr_scheduler.MultiStepLR(loop.optimizer, [1, 3])
    assert loop.run(folder / "run", every=2, steps=3) == (3, None)
    after_three = {name: value.clone() for name, value in loop.model.state_dict().items()}
    again = Loop(width=600)
    again.scheduler = torch.optim.lr_scheduler.MultiStepLR(again.optimizer, [1, 3])
    assert again.run(folder / "run", every=9, steps=3) == (3, None)  # from step 2
    assert_same(again.model.state_dict(), after_three)
    assert loop.optimizer.param_groups[0]["lr"] == again.optimizer.param_groups[0]["lr"] < 1e-3


@pytest.mark.usefixtures("late_copies")
def test_state_that_changes_right_after_a_save_is_saved_as_it_was(folder: Path) -> None:
    loop, history = Loop(width=600), torch.zeros(2000)
    loop.average.update_parameters()
    with torch.no_grad():
        loop.model[3].weight.add_(1.0)
    saved = {name: value.clone() for name, value in loop.model.state_dict().items()}
    with loop.snapshots(folder / "run") as snapshots:
        snapshots.save(1, history=history)
        history += 1
        with loop.average.applied():
            assert not torch.equal(loop.model[3].weight, saved["3.weight"])
        loop.average.update_parameters()
    again = Loop(width=600)
    with again.snapshots(folder / "run") as snapshots:
        assert snapshots.resume() == 1
    assert_same(again.model.state_dict(), saved)
    assert again.average.n_averaged == 1 and not snapshots.loop["history"].any()
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SnapshotError, match="resume"):
        Loop(width=600).snapshots(folder / "run").save(2)
    assert signal.getsignal(signal.SIGTERM) == handler


def test_failed_saves_warn_and_raise_at_close(folder: Path) -> None:
    loop = Loop()
    told: list[str] = []
    snapshots = loop.snapshots(folder / "run", warn=told.append)
    snapshots.save(1, fine=hc.rank() == 0)
    snapshots.save(2, odd={1, 2})
    with pytest.raises(SnapshotError, match="step 2"):
        snapshots.close()
    assert [text.count("odd is a builtins.set") for text in told] == [1] * (hc.rank() == 0)
    assert [path.name for path in (folder / "run" / "snapshots").iterdir()] == ["step-00000001"]


@pytest.mark.parametrize("blocking", [False, True])
def test_the_last_snapshot_is_tried_again_when_older_ones_have_made_room(
    folder: Path, monkeypatch: pytest.MonkeyPatch, blocking: bool
) -> None:
    save, place = content.save_state, folder / "run" / "snapshots"

    def full(path: Path, state: Any) -> Any:
        if len(list(place.glob("step-*"))) > 2:
            raise OSError(28, os.strerror(28), str(path))
        return save(path, state)

    monkeypatch.setattr(content, "save_state", full)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    loop, told = Loop(), list[str]()
    with loop.snapshots(folder / "run", keep=9, warn=told.append, blocking=blocking) as snapshots:
        for step in range(1, 5):
            snapshots.save(step)
    (said,) = (one for of_rank in hc.allgather_object(told) for one in of_rank)
    assert sorted(path.name for path in place.iterdir()) == ["step-00000003", "step-00000004"]
    says = r"step 4 was .*No space left.*: make room for [\d,]{5,} bytes more\. .* newest snapshot stays"
    assert re.search(says, said)
    with Loop().snapshots(folder / "run") as snapshots:
        assert snapshots.resume() == 4
