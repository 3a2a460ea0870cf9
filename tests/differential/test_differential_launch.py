"""Some random programs in parts of a layer, and loops of trainers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1]))
from seeds import Job

pytestmark = pytest.mark.launch


@pytest.mark.parametrize(
    ("kind", "needs", "ranks", "tensor", "first", "number"),
    [
        ("core", "torch", 4, 2, 100, 12),
        ("lightning", "lightning", 2, 1, 24, 16),
        ("transformers", "accelerate", 2, 1, 300, 12),
    ],
)
def test_random_cases(kind: str, needs: str, ranks: int, tensor: int, first: int, number: int) -> None:
    pytest.importorskip(
        needs, reason=f"{needs} is not installed: pip install -r install/requirements-tests.txt"
    )
    found = Job(kind, ranks, tensor, "gloo", 60.0).run(range(first, first + number))
    assert not found.failures and len(found.done) == number
