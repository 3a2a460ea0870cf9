"""Some architectures of tests/zoo in every way of recomputation; `python tests/seeds.py zoo` runs all."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

sys.path.append(str(Path(__file__).resolve().parent))
from checks import Architecture, rows_of
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


MODES = {
    **dict.fromkeys(PLANNED, ("segments", "reentrant", "min")),
    **dict.fromkeys(RECOMPUTED, ("segments", "reentrant")),
}


@pytest.mark.parametrize("name", MODES)
def test_as_in_plain_pytorch(name: str, one_thread: None) -> None:
    rows = list(rows_of(Architecture(name, MODES[name])))
    # Without reentrant recomputation, to the bit.
    wrong = [
        row
        for row in rows
        if row["outcome"] not in (RIGHT if row["mode"] == "reentrant" else ("equal", "refused"))
    ]
    assert wrong == [] and len(rows) == len(MODES[name])
