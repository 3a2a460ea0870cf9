"""Snapshots that are damaged, and snapshots that somebody has made who knows the format."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from hostile import ODD, Draw
from hypothesis import strategies as st
from snapshot_files import sign, write
from torch import Tensor, nn
from watch import Finding, Kind

from hvd_ckpt.reduction.buckets import BucketAssignment
from hvd_ckpt.snapshots import reader
from hvd_ckpt.snapshots.random_state import random_state, set_random_state
from hvd_ckpt.snapshots.reader import Snapshot, SnapshotError
from hvd_ckpt.training.config import Config, ConfigError
from hvd_ckpt.training.optim import build_optimizer
from hvd_ckpt.training.resume import (
    Progress,
    check_fits,
    check_resumed,
    check_state,
    load_optimizer,
    plan_text,
)

RANKS = 2


def same(one: Any, other: Any) -> bool:
    """Equal in type and content."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    return model, build_optimizer("adamw", model, 1e-3, 0.01)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(5, 3)).square().sum().backward()
    optimizer.step()


SAMPLES = 40


def state_of_run() -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]:
    """Weights, common and own, as a run has them."""
    model, optimizer = model_and_optimizer()
    step(model, optimizer)
    common = {
        "config": Config(
            "gpt-tiny", model_options={"layers": 1}, steps=4, precision="fp16", budget="0.5x"
        ).as_dict(),
        "steps": 4,
        "ranks": 1,
        "ema": None,
        "progress": Progress(step=2, position=8, best=1.5).model_dump(),
        "optimizer": optimizer.state_dict(),
        "scaler": torch.amp.GradScaler("cpu").state_dict(),
        "plan": '{"format": "hvd_ckpt plan"}\n',
        "samples": SAMPLES,
        "threads": 2,
    }
    names = [name for name, _ in model.named_parameters()]
    own = {
        "random": random_state(),
        "reduction": {
            "version": 2,
            "order": names[::-1],
            "sparse": {},
            "densified": {},
            "bucket_cap_bytes": float(25 << 20),
            "counts": dict.fromkeys(names, 1),
            "lower_counts": {},
        },
        "buffers": dict(model.named_buffers()),
        "logged": (3.5, 2.0),
    }
    return model.state_dict(), common, own


class _Snapshots(Kind):
    """Has two good snapshots of two ranks, of which the newer is fed to."""

    errors = (SnapshotError,)

    def prepare(self, folder: Path) -> None:
        self.good = folder / "good"
        weights, common, own = state_of_run()
        weights["tied"] = weights["0.weight"]
        for step in (1, 2):
            path = write(self.good, step, common, own, weights)
            shutil.copy(path / "rank-00000.pt", path / "rank-00001.pt")
            files = json.loads((path / "manifest.json").read_bytes())["files"]
            files |= {name.replace("rank-00000", "rank-00001"): dict(facts) for name, facts in files.items()}
            sign(path, ranks=RANKS, files=files)
        self.expected = reader.read(self.good / "step-00000001", 0)
        self.newer = self.good / "step-00000002"
        self.files = {path.name: path.read_bytes() for path in sorted(self.newer.iterdir())}

    def copied(self, folder: Path) -> Path:
        shutil.copytree(self.good, folder / "snapshots")
        return folder / "snapshots" / self.newer.name


class Damaged(_Snapshots):
    """Whatever happens to a snapshot's files, what is read is what was written; else the one before is found."""

    name = "snapshot-damaged"
    share = 14.0

    def feed(self, draw: Draw, folder: Path) -> str:
        path = self.copied(folder)
        for _ in range(draw.choice((1, 1, 2))):
            self._spoil(draw, path)
        return self._read(path)

    def _spoil(self, draw: Draw, path: Path) -> None:
        if path.is_symlink() or not path.is_dir():
            return
        present = sorted(file for file in path.iterdir() if file.is_file() and not file.is_symlink())
        way = draw.below(12)
        if not present or way == 0:
            moved = path.rename(path.with_name("moved"))
            path.symlink_to(draw.choice((moved, moved.parent / "step-00000001", "/", "nowhere")))
        elif way == 1:
            draw.choice(present).unlink()
        elif way == 2:
            (path / draw.choice(("more", "rank-00002.json", "a\nb", ".hidden"))).write_bytes(b"x")
        elif way == 3:
            path.rename(path.with_name("step-00000005"))
        elif way == 4:
            one, other = draw.choice(present), draw.choice(present)
            one.write_bytes(other.read_bytes())
        elif way == 5:
            shutil.rmtree(path)
            draw.replace(path, b"no folder")
        else:
            file = draw.choice(present)
            draw.spoil(file, self.files[draw.choice(sorted(self.files))])

    def _read(self, path: Path) -> str:
        found = reader.find(path.parent)
        assert found is not None
        got = reader.read(found, 0)
        if not all(
            same(getattr(got, part), getattr(self.expected, part))
            for part in ("weights", "replicated", "per_rank")
        ):
            raise Finding(f"{found.name} was read and is not what was written")
        if found.name != "step-00000001":
            return "the newer one"
        if not path.exists():
            return "the one before"
        try:  # what is read of a rank need not be what is damaged
            got = reader.read(path, draw_rank(path))
        except SnapshotError:
            return "the one before"
        if not same(got.replicated, self.expected.replicated):
            raise Finding("what was read is not what was written")
        return "the one before (this rank's part is whole)"


def draw_rank(path: Path) -> int:
    return len(path.name) % RANKS


LEAF = (
    ODD
    | st.sampled_from(((), (1, 2), (None,), {1: 2}, {(): 0}))
    | st.builds(
        lambda shape, dtype: torch.zeros(shape, dtype=getattr(torch, dtype)),
        st.lists(st.integers(0, 4), max_size=2),
        st.sampled_from(["float32", "float64", "int64", "uint8", "bool", "complex64", "bfloat16"]),
    )
)
"""A value of any type that a state file can hold."""


class Forged(_Snapshots):
    """Right checksums over wrong content: a SnapshotError, or a tree."""

    name = "snapshot-forged"
    share = 14.0

    def feed(self, draw: Draw, folder: Path) -> str:
        path = self.copied(folder)
        names = [name for name in self.files if name != "manifest.json"]
        for _ in range(draw.choice((1, 1, 2))):
            way = draw.below(6)
            file = path / draw.choice(names)
            if way < 2:
                draw.spoil(file, self.files[draw.choice(names)])
            elif way < 4 and file.is_file() and not file.is_symlink():
                self._edit(draw, file)
        if draw.chance(0.3):
            manifest = draw.changed(json.loads(self.files["manifest.json"]))
            (path / "manifest.json").write_text(json.dumps(manifest))
        with contextlib.suppress(
            OSError, AttributeError, TypeError, KeyError, ValueError
        ):  # what cannot be signed stays as it is
            sign(path)
        reader.read(path, draw.below(3))
        return "accepted"

    def _edit(self, draw: Draw, file: Path) -> None:
        content = self.files[file.name]
        if file.suffix == ".pt":
            state = torch.load(io.BytesIO(content), weights_only=True)
            torch.save(draw.changed(state, LEAF), file)
            return
        length = int.from_bytes(content[:8], "little")
        header = json.dumps(draw.changed(json.loads(content[8 : 8 + length]))).encode()
        file.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])


class Resumed(Kind):
    """A tree that is none of a run, or of another: an error before anything is used, or a run that goes on."""

    name = "resume"
    share = 18.0
    errors = (ConfigError, SnapshotError)

    def prepare(self, folder: Path) -> None:
        weights, common, own = state_of_run()
        path = write(folder, 2, common, own, weights)
        self.good = reader.read(path, 0)
        self._go_on(self.good)

    def feed(self, draw: Draw, folder: Path) -> str:
        good = self.good
        parts = {"replicated": good.replicated, "per_rank": good.per_rank, "weights": good.weights}
        part = draw.choice(("replicated", "replicated", "replicated", "per_rank", "per_rank", "weights"))
        parts[part] = draw.changed(parts[part], LEAF)
        ranks = draw.choice((1, 1, 2, 4))
        if part == "weights" and not (
            isinstance(parts["weights"], dict)
            and all(
                isinstance(name, str) and isinstance(one, Tensor) for name, one in parts["weights"].items()
            )
        ):
            return "no snapshot"  # reading never gives such weights
        resumed = Snapshot(
            good.step, ranks, parts["weights"], parts["replicated"], parts["per_rank"], good.manifest
        )
        return self._go_on(resumed)

    def _go_on(self, resumed: Snapshot) -> str:
        """What a trainer does with it."""
        config = Config("gpt-tiny", model_options={"layers": 1}, steps=4, precision="fp16", budget="0.5x")
        check_state(resumed)
        check_resumed(config, SAMPLES, resumed)
        model, optimizer = model_and_optimizer()
        check_fits(resumed, model, optimizer)
        model.load_state_dict(resumed.weights)
        progress = Progress(**resumed.replicated["progress"])
        assert 4 / resumed.replicated["ranks"] > 0
        text = plan_text(config, resumed)
        assert text is None or isinstance(text.encode("utf-8"), bytes)
        assert progress.step >= 0 and progress.position >= 0 and not math.isnan(progress.best or 0)
        load_optimizer(
            dataclasses.replace(resumed, replicated=copy.deepcopy(resumed.replicated)), None, optimizer
        )
        if resumed.replicated["scaler"] is not None:
            torch.amp.GradScaler("cpu").load_state_dict(resumed.replicated["scaler"])
        if resumed.per_rank is not None:
            buffers = dict(model.named_buffers())
            with torch.no_grad():
                for name, value in resumed.per_rank["buffers"].items():
                    buffers[name].copy_(value)
            if resumed.per_rank["reduction"]:
                assignment = BucketAssignment(list(model.named_parameters()), 25 << 20, None)
                try:
                    assignment.load_state_dict(resumed.per_rank["reduction"])
                except ValueError as error:  # as the trainer
                    raise ConfigError(str(error)) from None
                assert sum(len(bucket.entries) for bucket in assignment.buckets) == len(assignment.order)
            loss, weight = resumed.per_rank["logged"]
            assert loss / weight if weight else True
            set_random_state(resumed.per_rank["random"])
        step(model, optimizer)
        step(model, optimizer)
        return "accepted"


KINDS: tuple[type[Kind], ...] = (Damaged, Forged, Resumed)
