"""Layouts of jobs whose links and computation are measured, on real ranks; the command tries them by training."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from controllers import run_ranks

pytestmark = pytest.mark.launch
SCRIPT = Path(__file__).parents[1] / "helpers" / "scripts" / "layouts.py"


@pytest.mark.parametrize("controller", ["gloo", "mpi"])
def test_all_ranks_have_the_rows_that_the_first_has_measured(controller: str) -> None:
    status, output = run_ranks(2, SCRIPT, controller=controller)
    assert status == 0 and output.count("right") == 2, output


def test_the_command_trains_with_the_best_and_writes_it(tmp_path: Path) -> None:
    file = tmp_path / "best.yaml"
    model = "--model gpt-tiny --model-option layers=2 --model-option width=32 --sequence-length 16"
    options = ["--batch", "2", "--memory", "64MiB", "--try", "2", "--output", str(file)]
    status, output = run_ranks(2, SCRIPT, "layout", *model.split(), *options)
    assert status == 0 and "tried" in output and "Best:" in output, output
    settings = yaml.safe_load(file.read_text())
    assert settings["model"] == "gpt-tiny" and settings["model_options"] == {"layers": 2, "width": 32}
