"""Tests of the scenarios of the comparison: this library ends each as one process does."""

from __future__ import annotations

from pathlib import Path

import pytest

import hvd_ckpt as hc
from hvd_ckpt.app.compare.cells import Cell, TrainingSettings
from hvd_ckpt.app.compare.reference import largest_difference, make_reference
from hvd_ckpt.app.compare.runner.engines import HvdCkpt
from hvd_ckpt.app.compare.scenarios import SCENARIOS
from hvd_ckpt.app.compare.training import train
from hvd_ckpt.app.compare.workloads import make_workload

pytestmark = pytest.mark.ranks(gloo=(2, 3))


@pytest.mark.parametrize(
    ("name", "variant"), [(name, variant) for name, one in SCENARIOS.items() for variant in one.variants]
)
def test_a_scenario_ends_as_in_one_process(name: str, variant: str, one_thread: None) -> None:
    engine, settings = HvdCkpt(), TrainingSettings(steps=6, seed=7)
    engine.start(Path())
    workload = make_workload(name, settings)
    trained = train(workload, engine, Cell(name, variant, 3), settings)
    expected = make_reference(workload, hc.size(), settings)
    found = dict(trained.model.named_parameters())
    assert largest_difference(found, expected.parameters, expected.start)[1] < workload.tolerance
