"""The check of one architecture: plain PyTorch twice, then each way of recomputation."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from modes import MODES, classify, compare, train
from notes import Note
from quick_planner import quick_planner
from small import model_types
from subjects import Untrainable, subject_of
from table import LEFT_OUT, RIGHT

CAUSAL = (
    "bart", "bert", "bloom", "codegen", "ctrl", "deepseek_v3", "falcon", "gemma2", "gemma3_text", "gpt2",
    "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_oss", "gptj", "llama", "mamba", "mamba2", "mistral", "mixtral",
    "mpt", "olmo", "olmoe", "openai-gpt", "opt", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
    "rwkv", "starcoder2", "xglm", "xlnet", "roberta",
)  # fmt: skip
"""Model types that are trained with the head of a language model, too."""


class Architecture(NamedTuple):
    """A case."""

    name: str
    modes: tuple[str, ...] = ()


def draw(seed: int | str, ranks: int, of: Any) -> Architecture:
    """The architecture of a number or a name, in each way; heads in chunks are those of language models."""
    import transformers

    transformers.logging.set_verbosity_error()
    names = [*model_types(), *(f"{kind}:causal_lm" for kind in CAUSAL)]
    name = seed if isinstance(seed, str) else names[seed % len(names)]
    has_head = ":causal_lm" in name or ":masked_lm" in name
    return Architecture(name, tuple(mode for mode in MODES if mode != "chunks" or has_head))


def check(case: Architecture) -> Iterator[str]:
    """What is not right, after rows of the table."""
    return told(case, rows_of(case))


def told(case: Architecture, rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Rows, of which later ones count, and their failures."""
    for mode in case.modes:
        yield Note(
            json.dumps({"name": case.name, "mode": mode, "outcome": "error", "detail": "it ended the job"})
        )
    for row in rows:
        yield Note(json.dumps({"name": case.name, **row}))
        if row["outcome"] not in (*RIGHT, *LEFT_OUT):
            yield f"{row['mode']}: {row['outcome']}: {row['detail']}"


def rows_of(case: Architecture) -> Iterator[dict[str, Any]]:
    """Trains an architecture in each mode; what came out. One that plain PyTorch does not repeat is left out."""

    def left_out(outcome: str, detail: str) -> Iterator[dict[str, Any]]:
        return ({"mode": mode, "outcome": outcome, "detail": detail} for mode in case.modes)

    begin = time.monotonic()
    try:
        subject = subject_of(case.name)
        plain = train(subject)
    except Exception as error:
        own = isinstance(error, Untrainable)
        yield from left_out("untrainable", str(error) if own else f"{type(error).__name__}: {error}")
        return
    repeats = False
    for mode in case.modes:
        note = ""
        try:
            with quick_planner(smallest=True):
                trained = train(subject, MODES[mode])
            outcome, detail = compare(trained, plain)
            note = trained.note
        except Exception as error:
            outcome, detail = classify(error)
        if outcome != "equal" and not repeats:
            again, difference = compare(train(subject), plain)
            if again != "equal":
                yield from left_out("random", difference)
                return
            repeats = True
        seconds = round(time.monotonic() - begin, 1)
        begin = time.monotonic()
        yield {"mode": mode, "outcome": outcome, "detail": detail, "note": note, "seconds": seconds}
