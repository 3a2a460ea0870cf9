"""The check of one architecture: plain PyTorch twice, then each way of recomputation."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from modes import MODES, classify, compare, quick_planner, train
from subjects import Untrainable, subject_of


def check(
    name: str, modes: Sequence[str], tell: Callable[[dict[str, Any]], None], traced: bool = False
) -> None:
    """Trains one architecture in each mode and tells what came out."""

    def tell_all(outcome: str, detail: str) -> None:
        for mode in modes:
            tell({"mode": mode, "outcome": outcome, "detail": detail})

    begin = time.monotonic()
    try:
        subject = subject_of(name)
        plain = train(subject)
        again = compare(train(subject), plain)
    except Untrainable as error:
        return tell_all("untrainable", str(error))
    except BaseException as error:
        if traced:
            traceback.print_exc()
        return tell_all("untrainable", f"{type(error).__name__}: {error}")
    if again[0] != "equal":
        return tell_all("random", again[1])
    for mode in modes:
        note = ""
        try:
            with quick_planner():
                outcome = train(subject, MODES[mode])
            result, detail = compare(outcome, plain)
            note = outcome.note
        except BaseException as error:
            if traced:
                traceback.print_exc()
            result, detail = classify(error)
        seconds = round(time.monotonic() - begin, 1)
        begin = time.monotonic()
        tell({"mode": mode, "outcome": result, "detail": detail, "note": note, "seconds": seconds})
    return None
