"""The lock of a run's folder, in loops and runs on several ranks: a second one is refused on all of them."""

import pytest
import torch

import hvd_ckpt as hc
from hvd_ckpt.app.training.config import ConfigError
from hvd_ckpt.snapshots.folder import SnapshotError
from hvd_ckpt.snapshots.lock import LOCK_FILE

pytestmark = pytest.mark.ranks(gloo=(2,))


def test_two_loops_in_one_folder(folder):
    def loop():
        model = torch.nn.Linear(2, 2)
        bare = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = hc.DistributedOptimizer(bare, model.named_parameters())
        return hc.Snapshots(folder, model=model, optimizer=optimizer)

    first, second, late = loop(), loop(), loop()
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
    third = loop()
    third.resume()
    third.save(3)
    third.__exit__(KeyError, KeyError(), None)
    with loop() as fourth:
        assert fourth.resume() in (2, 3)
        fourth.stop_requested()
    hc.barrier()
    assert not (folder / LOCK_FILE).exists()


def test_runs_of_the_command_in_one_folder(folder, monkeypatch):
    """One starts where a start was killed, and not where it would mix with files of the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    small = {"sequence_length": 8, "model_options": {"layers": 1, "width": 8, "heads": 1}, "eval_batches": 1}

    def trainer(steps, **place):
        config = hc.training.Config("gpt-tiny", steps=steps, **small, **place)
        return hc.training.Trainer(config, *hc.training.assemble(config))

    left = (LOCK_FILE, ".config.yaml.0", ".plan.json.0", "plan.json", "stop")
    run, mixed = folder / "run", folder / "mixed"
    if hc.rank() == 0:
        for place in (run, mixed):
            place.mkdir()
            for file in left:
                (place / file).write_text("{}")
        (mixed / "notes").write_text("mine")
    hc.barrier()
    assert trainer(1, output=str(run)).run().stopped is None
    for place in (mixed, run):  # the second has run
        with pytest.raises(ConfigError, match="is not empty"):
            trainer(1, output=str(place))
    hc.barrier()
    assert {path.name for path in mixed.iterdir()} == {*left, "notes"}

    first = trainer(2, resume=str(run))
    written = (run / "config.yaml").read_bytes()
    for _ in range(2):
        with pytest.raises(ConfigError, match="in use by"):
            trainer(3, resume=str(run))
    hc.barrier()
    assert (run / "config.yaml").read_bytes() == written
    first.run()
    trainer(3, resume=str(run)).run()
    hc.barrier()
    assert not (run / LOCK_FILE).exists()
