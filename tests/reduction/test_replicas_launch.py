"""Logical replicas: the same bits on 1, 2 and 4 ranks, over Gloo and MPI, also resumed on another number of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from controllers import probe, run_ranks

pytestmark = pytest.mark.launch

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "helpers" / "scripts" / "replicas.py"


def hashes(ranks: int, controller: str, mode: str, folder: Path) -> dict[str, str]:
    arguments = ("4", mode, str(folder))
    status, output = run_ranks(ranks, SCRIPT, *arguments, controller=controller, PYTHONPATH=str(ROOT))
    assert status == 0, output
    return json.loads((folder / "hashes.json").read_text())


def test_the_same_bits_on_any_number_of_ranks(tmp_path: Path) -> None:
    expected = hashes(1, "gloo", "save", tmp_path)
    assert len(expected) == len(set(expected.values()))
    assert hashes(2, "gloo", "save", tmp_path) == expected
    assert hashes(4, "mpi" if probe("mpi").works else "gloo", "resume", tmp_path) == expected
