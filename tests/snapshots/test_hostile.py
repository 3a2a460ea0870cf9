"""Tests of hostile or damaged states and of states of other models: one line that names the place."""

import copy

import pytest
import torch
from snapshot_files import model_and_optimizer, read_snapshot, state_of, state_of_run, write, write_ranks

from hvd_ckpt.app.training.resume import check_state
from hvd_ckpt.processes.launchers import check_environment
from hvd_ckpt.snapshots.content import SavedState
from hvd_ckpt.snapshots.fits import check_fits, optimizer_values
from hvd_ckpt.snapshots.folder import SnapshotError
from hvd_ckpt.snapshots.reader import open_snapshot
from hvd_ckpt.snapshots.schema import Layout, Range
from hvd_ckpt.utils.cuts import Cut, mark
from hvd_ckpt.utils.schema import Wrong


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    return read_snapshot(write(tmp_path_factory.mktemp("snapshots"), 2, *state_of_run()), 0)


def test_state_of_a_run_is_valid_and_no_key_of_it_may_be_missing(resumed):
    check_state(resumed)
    check_fits(resumed, *model_and_optimizer())
    for part in ("replicated", "per_rank"):
        for key in getattr(resumed, part):
            forged = copy.deepcopy(resumed)
            del getattr(forged, part)[key]
            with pytest.raises(SnapshotError, match=f"{part}: {key} is missing"):
                check_state(forged)


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        (("replicated", "progress", "step"), -1, "replicated: progress.step is -1"),
        (("replicated", "progress", "best"), "1", 'progress.best is "1"'),
        (("replicated", "progress", "more"), 1, "progress.more"),
        (("replicated", "config", "batch"), 0, "replicated.config: batch is 0"),
        (("replicated", "groups", 0), ["a", "a"], "replicated: groups and options are not of groups"),
        (("replicated", "options"), [], "replicated: groups and options are not of groups"),
        (("per_rank", "optimizer", "state", "a"), 3, "per_rank: optimizer.state.a is 3"),
        (("replicated", "scaler", "scale"), -1.0, "scaler.scale is -1.0"),
        (("replicated", "samples"), torch.ones(2), "samples is a Tensor"),
        (("per_rank", "reduction", "order"), ["a", "a"], "reduction: order has a name twice"),
        (("replicated", "logged"), [(1.0, float("inf"))], r"logged\[0\]\[1\] is inf"),
        (("replicated", "logged"), [(torch.tensor(1.0), 2.0)], r"logged\[0\]\[0\].*tensor"),
    ],
)
def test_invalid_state_is_refused_with_its_key(resumed, place, value, says):
    forged = copy.deepcopy(resumed)
    inner = {"replicated": forged.replicated, "per_rank": forged.per_rank}
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    with pytest.raises(SnapshotError, match=f"cannot be used: .*{says}"):
        check_state(forged)


@pytest.mark.parametrize("value", [None, [], 3, {"optimizer": 3}, {"optimizer": {"state": []}}], ids=str)
def test_a_file_of_any_rank_must_have_the_state_of_one(resumed, tmp_path, value):
    forged = read_snapshot(write(tmp_path, 2, resumed.replicated, value), 0)
    with pytest.raises(SnapshotError, match="per_rank: "):
        check_state(forged)
    with pytest.raises(Wrong, match="rank-00000.pt: "):
        optimizer_values(forged, {"0.weight"})


def assert_of_another(says, snapshot, model, optimizer):
    with pytest.raises(SnapshotError, match=says):
        check_fits(snapshot, model, optimizer)


def test_state_of_another_model_or_other_options_is_refused(resumed):
    says = r"weights\[.*must be a tensor of float32 .*of another model"
    assert_of_another(says, resumed, *model_and_optimizer(5))
    model, optimizer = model_and_optimizer()
    amsgrad = torch.optim.AdamW(model.parameters(), 1e-3, amsgrad=True)
    says = "has no max_exp_avg_sq, which this optimizer with its options needs"
    assert_of_another(says, resumed, model, amsgrad)
    forged, name = copy.deepcopy(resumed), "optimizer.exp_avg/0.weight"
    forged.manifest.tensors[name] = forged.manifest.tensors[name].model_copy(update={"size": (3,)})
    says = r'exp_avg\["0.weight"\] is a tensor of float32 \[3\], and must be'
    assert_of_another(says, forged, model, optimizer)


def test_a_buffer_that_was_cut_into_other_parts_stays_unless_it_is_of_another_model(tmp_path):
    """As slopes of heads, which a recipe of tensor parallelism slices."""
    replicated, per_rank, weights, ranges = state_of_run()
    states = []
    for rank in range(2):
        half = Range.of(f"buffers@{rank}/slopes", torch.zeros(2))
        own = [*state_of(weights).ranges, *ranges] if rank == 0 else []
        states.append(SavedState(replicated, per_rank, [*own, half], {}, Layout(tensor=2)))
    snapshot = open_snapshot(write_ranks(tmp_path, 2, states))
    model, optimizer = model_and_optimizer()
    has_none = 'buffers@0 has "slopes": the snapshot is of another model'
    assert_of_another(has_none, snapshot, model, optimizer)
    model.register_buffer("other", torch.zeros(2), persistent=False)
    assert_of_another(has_none, snapshot, model, optimizer)
    model.register_buffer("slopes", torch.ones(4), persistent=False)
    has_a_larger_one = r'buffers@0\["slopes"\] is .*\[2\], and must be .*\[4\]'
    assert_of_another(has_a_larger_one, snapshot, model, optimizer)
    mark(model.slopes, Cut(0, 4))
    check_fits(snapshot, model, optimizer)


@pytest.mark.parametrize(
    ("variable", "value"),
    [("OMP_NUM_THREADS", "x"), ("HOROVOD_CYCLE_TIME", "nan"), ("HOROVOD_SIZE", "9" * 5000)],
)
def test_a_variable_that_is_not_a_number_is_named(monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=f"{variable} is '{value[:5]}"):
        check_environment()
