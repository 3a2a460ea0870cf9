"""Errors of one rank under Lightning end all ranks, and are shown."""

from __future__ import annotations

from pathlib import Path

import pytest
from controllers import run_ranks

pytest.importorskip(
    "lightning", reason="lightning is not installed: pip install -r install/requirements-tests.txt"
)
pytestmark = pytest.mark.launch

SCRIPT = Path(__file__).resolve().parents[1] / "helpers" / "scripts" / "lightning_errors.py"


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("step", "ValueError: a bad sample"),
        ("validation", "ValueError: a bad sample"),
        ("callback", "ValueError: a bad sample"),
        ("saving", "ValueError: a bad sample"),
        ("worker", "ValueError: a bad sample"),
        ("interrupt", "ended by KeyboardInterrupt"),
        ("signal", "ended by SIGTERMException"),
        ("exit", "ended by SystemExit"),
    ],
)
def test_an_error_of_one_rank_ends_all(tmp_path: Path, where: str, says: str) -> None:
    status, output = run_ranks(2, SCRIPT, where, str(tmp_path), controller="gloo")
    assert status != 0
    assert says in output, output
    assert "rank 0 on host" in output  # which says why it ends
    assert "A checkpoint needs all ranks" in output
    assert not (tmp_path / "on_exception.ckpt").exists() and not (tmp_path / "own.ckpt").exists()
