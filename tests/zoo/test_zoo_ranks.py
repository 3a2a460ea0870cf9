"""Some architectures of tests/zoo with sharded parameters."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

sys.path.append(str(Path(__file__).resolve().parent))
from ranks import outcome_of

pytestmark = pytest.mark.ranks(gloo=(2,))

ROUNDED = ("t5", "whisper")  # their encoder's states go into several units, which each add up a gradient
NAMES = (
    "bert", "gpt2:causal_lm", "t5", "mixtral", "resnet", "albert", "swin", "whisper", "mamba", "llava", "ibert", "deepseek_v3",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_stage_3(name: str, one_thread: None) -> None:
    outcome, detail = outcome_of(name)
    assert outcome == "equal" or (name in ROUNDED and outcome == "rounding"), detail
