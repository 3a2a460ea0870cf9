"""Damaged snapshots, and snapshots forged by somebody who knows the format."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import shutil
from pathlib import Path

import torch
from hostile import ODD, Draw
from hypothesis import strategies as st
from same import same
from snapshot_files import (
    CONFIG,
    SAMPLES,
    divided,
    model_and_optimizer,
    read_snapshot,
    sign,
    state_of,
    state_of_run,
    step,
    write,
    write_ranks,
)
from torch import Tensor
from watch import Feed, Finding, Kind

from hvd_ckpt.app.training.config import Config, ConfigError
from hvd_ckpt.app.training.resume import Progress, check_resumed, check_state, plan_text
from hvd_ckpt.reduction.assignment import BucketAssignment
from hvd_ckpt.reduction.state import parts_of
from hvd_ckpt.snapshots import reader
from hvd_ckpt.snapshots.content import SavedState
from hvd_ckpt.snapshots.fits import check_fits
from hvd_ckpt.snapshots.folder import SnapshotError
from hvd_ckpt.snapshots.model import ModelTensors
from hvd_ckpt.snapshots.reader import HeldSnapshot, Snapshot
from hvd_ckpt.snapshots.training_state import set_random_state

PARTS = ("weights", "replicated", "per_rank")  # of what is read


def two_snapshots(folder: Path) -> dict[str, bytes]:
    """Writes two good snapshots of two ranks; returns the files of the newer."""
    replicated, per_rank, weights, ranges = state_of_run()
    weights["tied"] = weights["0.weight"]
    states = [state_of(weights, replicated, per_rank) for _ in range(2)]
    for rank, state in enumerate(states):
        state.ranges = divided([*state.ranges, *ranges], rank, 2)
    for number in (1, 2):
        path = write_ranks(folder / "good", number, states)
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


def damaged(prepared: Path) -> Feed:
    """Whatever happens to a snapshot's files, what is read is what was written; else the one before is found."""
    files = two_snapshots(prepared)
    expected = read_snapshot(prepared / "good" / "step-00000001", 0)

    def spoil(draw: Draw, path: Path) -> None:
        if path.is_symlink() or not path.is_dir():
            return
        present = sorted(file for file in path.iterdir() if file.is_file() and not file.is_symlink())
        way = draw.below(12)
        if not present or way == 0:
            moved = path.rename(path.with_name("moved"))
            path.symlink_to(draw.choice(moved, moved.parent / "step-00000001", "/", "nowhere"))
        elif way == 1:
            draw.choice(*present).unlink()
        elif way == 2:
            (path / draw.choice("more", "rank-00002.json", "a\nb", ".hidden")).write_bytes(b"x")
        elif way == 3:
            path.rename(path.with_name("step-00000005"))
        elif way == 4:
            draw.choice(*present).write_bytes(files[draw.choice(*files)])
        elif way == 5:
            draw.replace(path, b"no folder")
        elif way < 9:
            draw.flip(draw.choice(*present))
        else:
            draw.spoil(draw.choice(*present), files[draw.choice(*files)])

    def feed(draw: Draw, folder: Path) -> str:
        shutil.copytree(prepared / "good", folder / "snapshots")
        path = folder / "snapshots" / "step-00000002"
        for _ in range(draw.choice(1, 1, 2)):
            spoil(draw, path)
        found = reader.find(path.parent)
        assert found is not None
        got = read_snapshot(found.path, 0)
        if not all(same(getattr(got, part), getattr(expected, part)) for part in PARTS):
            raise Finding(f"{found.path.name} was read and is not what was written")
        if found.path.name != "step-00000001":
            return "the newer one"
        with contextlib.suppress(SnapshotError):  # what is read of another rank need not be what is damaged
            if path.exists() and not same(read_snapshot(path, 1).replicated, expected.replicated):
                raise Finding("what was read is not what was written")
        return "the one before"

    return feed


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


def forged(prepared: Path) -> Feed:
    """Right checksums over wrong content: a SnapshotError, or a state."""
    files = two_snapshots(prepared)
    names = [name for name in files if name != "manifest.json"]

    def edit(draw: Draw, file: Path) -> None:
        content = files[file.name]
        if file.suffix == ".pt":
            torch.save(draw.changed(torch.load(io.BytesIO(content), weights_only=True), LEAF), file)
            return
        length = int.from_bytes(content[:8], "little")
        header = json.dumps(draw.changed(json.loads(content[8 : 8 + length]))).encode()
        file.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])

    def feed(draw: Draw, folder: Path) -> None:
        path = Path(shutil.copytree(prepared / "good" / "step-00000002", folder / "step-00000002"))
        for _ in range(draw.choice(1, 1, 2)):
            way, file = draw.below(6), path / draw.choice(*names)
            if way < 2:
                draw.spoil(file, files[draw.choice(*names)])
            elif way < 4 and file.is_file() and not file.is_symlink():
                edit(draw, file)
        if draw.chance(0.3):
            (path / "manifest.json").write_text(json.dumps(draw.changed(json.loads(files["manifest.json"]))))
        with contextlib.suppress(OSError, AttributeError, TypeError, KeyError, ValueError):
            sign(path)  # what cannot be signed stays as it is
        read_snapshot(path, draw.below(3))

    return feed


def resumed(prepared: Path) -> Feed:
    """State that is not of a run, or of another: an error before anything is used, or a run that continues."""
    good = read_snapshot(write(prepared, 2, *state_of_run()), 0)
    resume(good)

    def feed(draw: Draw, folder: Path) -> str | None:
        part = draw.choice("replicated", "replicated", "replicated", "per_rank", "per_rank", "weights")
        value = draw.changed(getattr(good, part), LEAF)
        ranks = draw.choice(1, 1, 2, 4)
        entries = value.items() if isinstance(value, dict) else [(None, None)]
        if part == "weights" and not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in entries):
            return "no snapshot"  # reading never gives such weights
        weights, replicated, per_rank = (value if name == part else getattr(good, name) for name in PARTS)
        named = [one for one in state_of(weights).ranges if one.name.isprintable()]
        drawn = OfThisRank.of(2, SavedState(replicated, per_rank, [*named, *state_of_run()[3]]))
        manifest = drawn.manifest.model_copy(update={"ranks": ranks})
        resume(dataclasses.replace(drawn, manifest=manifest))
        return None

    return feed


class OfThisRank(HeldSnapshot):
    """With plain values of this rank."""

    has_own = True


def resume(resumed: Snapshot) -> None:
    """What a trainer does with it."""
    config = Config.make(CONFIG)
    check_state(resumed)
    check_resumed(config, SAMPLES, resumed)
    model, optimizer = model_and_optimizer()
    check_fits(resumed, model, optimizer)
    ModelTensors(model).reading(resumed)()
    progress = Progress(**resumed.replicated["progress"])
    assert 4 / resumed.replicated["ranks"] > 0
    text = plan_text(config, resumed)
    assert text is None or isinstance(text, str)  # which is read as a plan
    assert progress.step >= 0 and progress.position >= 0 and not math.isnan(progress.best or 0)
    for loss, weight in resumed.replicated["logged"]:
        assert weight == 0 or math.isfinite(loss / weight) or not math.isfinite(loss)
    if resumed.replicated["scaler"] is not None:
        torch.amp.GradScaler("cpu").load_state_dict(resumed.replicated["scaler"])
    if resumed.per_rank is not None:
        _, learned = parts_of(resumed.per_rank["reduction"])
        if learned:
            assignment = BucketAssignment(list(model.named_parameters()), 25 << 20, None)
            try:
                assignment.load_state_dict(learned)
            except ValueError as error:  # as the trainer
                raise ConfigError(str(error)) from None
            assert sum(len(bucket.entries) for bucket in assignment.buckets) == len(assignment.order)
        set_random_state(resumed.per_rank["random"])
    for _ in range(2):
        step(model, optimizer)


KINDS = (
    Kind("snapshot-damaged", (SnapshotError,), damaged),
    Kind("snapshot-forged", (SnapshotError,), forged),
    Kind("resume", (ConfigError, SnapshotError), resumed),
)
