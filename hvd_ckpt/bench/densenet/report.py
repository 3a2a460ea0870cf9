"""What the table of a DenseNet over ranks and batch sizes says."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from hvd_ckpt.bench.densenet.case import WANTED_TIME, Case
from hvd_ckpt.bench.densenet.contenders import NAIVE, OURS, WANTED_MEMORY
from hvd_ckpt.bench.densenet.job import Entry
from hvd_ckpt.bench.table_report import TableReport
from hvd_ckpt.install.extras import say_no_pictures

__all__ = ["COLUMNS", "PICTURE", "Report"]

MIB = 1 << 20
PICTURE = "densenet.png"
COLUMNS = ("ranks", "batch", "contender", "peak MiB", "of naive", "step s", "of naive", "right")
NOTES = (
    "batch: images of a step over all ranks; peak: exact bytes that one step (zero_grad, forward pass, loss, backward pass, "
    "optimizer.step) has allocated at most above its start, with the gradients of the parameters already there, on the rank that "
    "needs most; step: its seconds on rank 0, which waits for all, median over rounds (rounds alternate: A B C, then C B A).",
    "of naive: as a ratio to the step that keeps everything; for times the median of the ratios within a round, with quartiles "
    "in brackets.",
    "right: whether weights and running statistics are, bit for bit, those of keeping everything after the same steps.",
    "checkpoint in each layer: torch.utils.checkpoint on concatenation, norm, activation and 1x1 convolution of each dense "
    "layer, as in torchvision's memory-efficient DenseNet and in the pytorch-checkpoint project (there reentrant).",
    "checkpoint_sequential: with the number of chunks that is fastest, on a few images, of those within "
    f"{WANTED_MEMORY} of naive's memory.",
    "plan: this library's, for that budget; one for a share of what keeping everything needs is made with at most --plan-images "
    "images, since the peaks of all batches have the same proportions.",
    "Everyone trains with hvd_ckpt's DistributedOptimizer, so nothing but recomputation differs.",
)


class Report(TableReport[Case]):
    """Contenders over ranks and batch sizes."""

    title = "DenseNet with recomputation, measured"
    columns = COLUMNS
    to_the_left = ("contender", "right")
    notes = NOTES

    def rows(self, case: Case) -> list[tuple[str, ...]]:
        return [
            (
                str(case.size),
                str(case.batch),
                entry.name,
                "-" if entry.peak_bytes is None else f"{entry.peak_bytes / MIB:.1f}",
                *_figures(case, entry),
                _right(entry),
            )
            for entry in case.entries
        ]

    def result(self, case: Case) -> dict[str, Any]:
        return {
            "ranks": case.size,
            "batch": case.batch,
            "threads": case.threads,
            "contenders": [_result(case, entry) for entry in case.entries],
            "note": case.note,
            "failed": case.failed,
        }

    def picture(self, folder: Path) -> str | None:
        try:
            from hvd_ckpt.bench.densenet.picture import draw
        except ImportError as error:
            say_no_pictures(error)
            return None
        draw(folder / PICTURE, self.cases)
        return f"![Memory and time over batch sizes]({PICTURE})"

    def remarks(self) -> list[str]:
        lines = [f"{case.title}: {case.note}" for case in self.cases if case.note]
        lines += [
            f"{case.title}, {entry.name}: {entry.failure}"
            for case in self.cases
            for entry in case.entries
            if entry.failure
        ]
        for case in self.cases:
            for entry in case.entries:
                met, time = case.met(entry), case.time(entry)
                if entry.family == OURS and met is not None and time is not None:
                    lines.append(
                        f"{case.title}, {entry.name}: memory {case.memory(entry):.2f} of naive, wanted at most {WANTED_MEMORY}: "
                        f"{_met(met[0])}; time {time.median:.2f}, wanted at most {WANTED_TIME:.2f}: {_met(met[1])}"
                    )
        return lines

    def told(self) -> dict[str, str]:
        threads = sorted({(case.size, case.threads) for case in self.cases if case.threads})
        return {
            "threads per rank": ", ".join(f"{count} at np={size}" for size, count in threads),
            "rounds": str(self.settings.get("rounds")),
        }


def _figures(case: Case, entry: Entry) -> tuple[str, str, str]:
    """Memory of naive, seconds, and time of naive."""
    memory, seconds, time = case.memory(entry), case.seconds(entry), case.time(entry)
    if memory is None or seconds is None or time is None:
        return "-", "-", "-"
    spread = "1" if entry.family == NAIVE else f"{time.median:.2f} [{time.low:.2f}, {time.high:.2f}]"
    return f"{memory:.2f}", f"{seconds:.3f}", spread


def _right(entry: Entry) -> str:
    if entry.failure:
        return "does not fit"
    return f"no: {', '.join(entry.differences)}" if entry.differences else "yes"


def _met(yes: bool) -> str:
    return "met" if yes else "not met"


def _result(case: Case, entry: Entry) -> dict[str, Any]:
    """A contender for programs: all seconds, and what was made of them."""
    time, met = case.time(entry), case.met(entry)
    return {
        **dataclasses.asdict(entry),
        "memory_of_naive": case.memory(entry),
        "time_of_naive": time and dataclasses.asdict(time),
        "memory_met": met and met[0],
        "time_met": met and met[1],
    }
