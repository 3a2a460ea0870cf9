"""The check of one architecture: plain PyTorch twice, then each way of recomputation."""

from __future__ import annotations

import copy
import functools
import json
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from inputs import samples
from modes import MODES, Subject, classify, compare, loss_of, seed, train
from notes import Note
from quick_planner import quick_planner
from small import RECIPES, model_class, model_types, small_config
from table import LEFT_OUT, RIGHT
from torch import nn

MOST_PARAMETERS = 32_000_000
MOST_SECONDS = 12.0  # for guesses of a sample
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
        plain, _ = train(subject)
    except Exception as error:
        own = isinstance(error, Untrainable)
        yield from left_out("untrainable", str(error) if own else f"{type(error).__name__}: {error}")
        return
    repeats = False
    for mode in case.modes:
        note = ""
        try:
            with quick_planner(smallest=True):
                trained, note = train(subject, MODES[mode])
            outcome, detail = compare(trained, plain)
        except Exception as error:
            outcome, detail = classify(error)
        if outcome != "equal" and not repeats:
            again, difference = compare(train(subject)[0], plain)
            if again != "equal":
                yield from left_out("random", difference)
                return
            repeats = True
        seconds = round(time.monotonic() - begin, 1)
        begin = time.monotonic()
        yield {"mode": mode, "outcome": outcome, "detail": detail, "note": note, "seconds": seconds}


class Untrainable(Exception):
    """Plain PyTorch does not build or train the architecture, with the reason."""


def subject_of(name: str) -> Subject:
    """A small model of an architecture with a sample that it trains with.

    Raises:
        Untrainable: there is none.
    """
    reasons = []
    try:
        config_class, kind = model_class(name)
    except Exception as error:
        raise Untrainable(_shown(error)) from error
    until = time.monotonic() + MOST_SECONDS
    for recipe in RECIPES:
        try:
            return _subject(name, config_class, kind, recipe, until)
        except Exception as error:
            reasons.append(f"{recipe}: {_shown(error)}")
    raise Untrainable("; ".join(dict.fromkeys(reasons)))


def _subject(name: str, config_class: Any, kind: Any, recipe: str, until: float) -> Subject:
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in kind(small_config(config_class, recipe)).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size / 1e6:.0f} million parameters")

    def make() -> nn.Module:
        seed(1)
        model: nn.Module = kind(small_config(config_class, recipe))
        return model.float()

    model = make().train()
    seed(3)
    reasons: list[str] = []
    for sample in samples(model, model.config):
        if time.monotonic() > until:
            break
        try:
            check_trains(model, sample)
            return Subject(name, make, functools.partial(copy.deepcopy, sample))
        except Exception as error:
            reasons.append(f"{', '.join(sample)}: {_shown(error)}")
    raise ValueError(reasons[0] if reasons else "no sample")


def check_trains(model: nn.Module, sample: dict[str, Any]) -> None:
    """A step of plain PyTorch.

    Raises:
        ValueError: it has no gradients, or ones that are not finite.
    """
    seed(2)
    loss = loss_of(model(**copy.deepcopy(sample)))
    loss.backward()
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    gradients = [gradient.to_dense() if gradient.is_sparse else gradient for gradient in found]
    if not all(torch.isfinite(value).all() for value in (loss, *gradients)):
        raise ValueError("loss or gradients are not finite")
    if not any(gradient.any() for gradient in gradients):
        raise ValueError("all gradients are zero")


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()[-200:]}".replace("\n", " ")
