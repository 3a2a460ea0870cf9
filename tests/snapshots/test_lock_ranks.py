"""The lock of a run's folder, in loops and runs on several ranks: a second one is refused on all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hvd_ckpt as hc
from hvd_ckpt.app.training.config import ConfigError
from hvd_ckpt.snapshots.folder import SnapshotError
from hvd_ckpt.snapshots.lock import LOCK_FILE

pytestmark = pytest.mark.ranks(gloo=(2,))


def loop(folder: Path) -> Any:
    model = torch.nn.Linear(2, 2)
    optimizer = hc.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    return hc.Snapshots(folder, model=model, optimizer=optimizer)


def test_two_loops_in_one_folder(folder: Path) -> None:
    first, second, late = loop(folder), loop(folder), loop(folder)
    for each in (first, second, late):
        assert each.resume() == 0  # which only reads
    assert first.stop_requested() is None
    for call in (second.stop_requested, lambda: second.save(1)):
        with pytest.raises(SnapshotError, match="in use by .*process"):
            call()
    first.save(1)
    first.close()
    with pytest.raises(SnapshotError, match="since resume"):
        late.save(1)  # of the beginning
    with second:
        assert second.resume() == 1
        second.save(2)
    third = loop(folder)
    third.resume()
    third.save(3)
    third.__exit__(KeyError, KeyError(), None)
    with loop(folder) as fourth:
        assert fourth.resume() in (2, 3)
        fourth.stop_requested()
    hc.barrier()
    assert not (folder / LOCK_FILE).exists()


def test_a_run_of_the_command_in_one_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    data = {"sequence_length": 8, "model_options": {"layers": 1, "width": 8, "heads": 1}, "eval_batches": 1}

    def run(steps: int, **settings: Any) -> Any:
        config = hc.training.Config("gpt-tiny", steps=steps, **data, **settings)
        return hc.training.Trainer(config, *hc.training.assemble(config))

    run(1, output=str(folder / "run")).run()
    first = run(2, resume=str(folder / "run"))
    written = (folder / "run" / "config.yaml").read_bytes()
    for _ in range(2):
        with pytest.raises(ConfigError, match="in use by"):
            run(3, resume=str(folder / "run"))
    hc.barrier()
    assert (folder / "run" / "config.yaml").read_bytes() == written
    first.run()
    run(3, resume=str(folder / "run")).run()
    hc.barrier()
    assert not (folder / "run" / LOCK_FILE).exists()


def test_a_run_starts_again_in_the_folder_of_a_start_that_was_killed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not where it would mix with files of the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    data = {"sequence_length": 8, "model_options": {"layers": 1, "width": 8, "heads": 1}, "eval_batches": 1}

    def run(output: Path) -> Any:
        config = hc.training.Config("gpt-tiny", steps=1, **data, output=str(output))
        return hc.training.Trainer(config, *hc.training.assemble(config))

    left = (LOCK_FILE, ".config.yaml.0", ".plan.json.0", "plan.json", "stop")
    if hc.rank() == 0:
        for name in ("run", "mixed"):
            (folder / name).mkdir()
            for file in left:
                (folder / name / file).write_text("{}")
        (folder / "mixed" / "notes").write_text("mine")
    hc.barrier()
    assert run(folder / "run").run().stopped is None
    with pytest.raises(ConfigError, match="is not empty"):
        run(folder / "mixed")
    with pytest.raises(ConfigError, match="is not empty"):
        run(folder / "run")  # which has run
    hc.barrier()
    assert {path.name for path in (folder / "mixed").iterdir()} == {*left, "notes"}
