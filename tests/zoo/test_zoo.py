"""Some architectures of tests/zoo in every way of recomputation; `python tests/seeds.py zoo` runs all."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

sys.path.append(str(Path(__file__).resolve().parent))
from checks import rows_of
from table import RIGHT

# Encoders, decoders and both; experts, recurrences and state spaces; pictures (convolutions, windows, batch norms), sound, video,
# several kinds of input; state in buffers, NumPy's random numbers, layers that are left out or shared, heads with their loss.
PLANNED = (
    "bert", "gpt2:causal_lm", "bart", "mixtral", "resnet", "big_bird", "mamba", "deberta-v2", "vit_mae", "swin",
)  # fmt: skip
RECOMPUTED = (
    "albert", "xlnet", "funnel", "llama:causal_lm", "qwen3_moe", "gpt_oss", "t5", "whisper", "wav2vec2", "levit", "segformer",
    "clip", "llava", "videomae", "deepseek_v3", "ibert", "rwkv", "poolformer",
)  # fmt: skip


@pytest.mark.parametrize("name", PLANNED)
def test_plan_and_regions(name: str, one_thread: None) -> None:
    assert wrong(name, ("segments", "reentrant", "min")) == []


@pytest.mark.parametrize("name", RECOMPUTED)
def test_regions(name: str, one_thread: None) -> None:
    assert wrong(name, ("segments", "reentrant")) == []


def wrong(name: str, modes: tuple[str, ...]) -> list[dict[str, Any]]:
    """What is not right of an architecture. Without reentrant recomputation it is the same to the bit."""
    rows = list(rows_of(name, modes))
    assert len(rows) == len(modes)
    return [
        row
        for row in rows
        if row["outcome"] not in RIGHT or (row["outcome"] == "rounding" and row["mode"] != "reentrant")
    ]
