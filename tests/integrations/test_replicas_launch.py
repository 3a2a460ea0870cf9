"""Lightning with logical replicas: one hash on 1, 2 and 4 ranks, also resumed on another number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from controllers import run_ranks

pytest.importorskip(
    "lightning", reason="lightning is not installed: pip install -r install/requirements-tests.txt"
)
pytestmark = pytest.mark.launch

SCRIPT = Path(__file__).resolve().parents[1] / "helpers" / "scripts" / "lightning_replicas.py"


def hash_on(ranks: int, folder: Path, *checkpoint: str) -> str:
    status, output = run_ranks(ranks, SCRIPT, str(folder), *checkpoint, controller="gloo")
    assert status == 0, output
    return (folder / "hash").read_text()


def test_one_hash_on_any_number_of_ranks(tmp_path: Path) -> None:
    expected = hash_on(1, tmp_path)
    assert hash_on(2, tmp_path / "two") == expected
    assert hash_on(4, tmp_path / "four", str(tmp_path / "step=6.ckpt")) == expected
