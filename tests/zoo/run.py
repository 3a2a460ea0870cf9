"""Trains every architecture of the installed transformers, and families of timm and torchvision, in every way of recomputation.

    python tests/zoo/run.py                                  # all, in all modes, into zoo.jsonl
    python tests/zoo/run.py gpt2 bert:masked_lm timm:resnet18 --modes min,segments --out /dev/stdout
    python tests/zoo/run.py --table --out zoo.jsonl          # the table of docs/zoo.md from the results

Each architecture runs in a process of its own. A row that is already in the file is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "helpers"), str(HERE.parents[1])]
os.environ["OMP_NUM_THREADS"] = "1"

STAGE = "stage 3"
MODES = ("segments", "reentrant", "min", "half", "chunks", STAGE)  # the quick ones first
SECONDS = 60
CAUSAL = (
    "bart", "bert", "bloom", "codegen", "ctrl", "deepseek_v3", "falcon", "gemma2", "gemma3_text", "gpt2",
    "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_oss", "gptj", "llama", "mamba", "mamba2", "mistral", "mixtral",
    "mpt", "olmo", "olmoe", "openai-gpt", "opt", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
    "rwkv", "starcoder2", "xglm", "xlnet", "roberta",
)  # fmt: skip
"""Model types that are trained with the head of a language model, too."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--out", type=Path, default=Path("zoo.jsonl"))
    parser.add_argument(
        "--table", action="store_true", help="print docs/zoo.md from the results, and run nothing"
    )
    parser.add_argument("--again", action="store_true", help="run what was not right once more")
    parser.add_argument("--trace", action="store_true", help="whole tracebacks on standard error")
    options = parser.parse_args()
    rows = read(options.out)
    if options.table:
        from table import page

        print(page(rows))
        return 0
    if options.again:
        rows = {
            key: row for key, row in rows.items() if row["outcome"] in ("equal", "rounding", "untrainable")
        }
    names = options.names or all_names()
    missing = [
        (name, mode)
        for name in names
        for mode in wanted(name, options.modes.split(","))
        if (name, mode) not in rows
    ]
    grouped: dict[str, list[str]] = {}
    for name, mode in missing:
        if mode != STAGE:
            grouped.setdefault(name, []).append(mode)
    run_all(list(grouped.items()), options)
    rows = read(options.out)
    on_ranks = [name for name, mode in missing if mode == STAGE and trains(name, rows)]
    if on_ranks:
        import ranks

        for row in ranks.run(on_ranks):
            write([row], options.out)
    return 0


def wanted(name: str, modes: list[str]) -> list[str]:
    """Heads in chunks are those of language models."""
    return [mode for mode in modes if mode != "chunks" or ":causal_lm" in name or ":masked_lm" in name]


def trains(name: str, rows: dict[tuple[str, str], dict[str, Any]]) -> bool:
    """Whether plain PyTorch trains it, as far as is known."""
    return all(
        row["outcome"] not in ("untrainable", "random", "slow", "not run")
        for (other, _), row in rows.items()
        if other == name
    )


def write(rows: Sequence[dict[str, Any]], path: Path) -> None:
    with open(path, "a") as file:
        file.write("".join(f"{json.dumps(row)}\n" for row in rows))


def all_names() -> list[str]:
    from shrinking import model_types
    from vision import vision_names

    return [*model_types(), *(f"{kind}:causal_lm" for kind in CAUSAL), *vision_names()]


def read(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """The rows of a file, by name and mode; later ones count."""
    if not path.is_file():
        return {}
    rows = map(json.loads, path.read_text().splitlines())
    return {(row["name"], row["mode"]): row for row in rows}


def run_all(missing: Sequence[tuple[str, list[str]]], options: argparse.Namespace) -> None:
    """Runs architectures, each in a fork of this process."""
    warnings.simplefilter("ignore")
    import torch
    import vision

    vision.load()
    import checks  # noqa: F401
    import transformers
    import transformers.modeling_utils

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    running: dict[int, Running] = {}
    queue = list(missing)
    while queue or running:
        while queue and len(running) < options.jobs:
            name, left = queue.pop(0)
            receive, send = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(receive)
                _child(name, left, send, options.trace)
            os.close(send)
            running[receive] = Running(psutil.Process(pid), name, left)
        ready, _, _ = select.select(list(running), [], [], 1.0)
        for receive, process in list(running.items()):
            text = os.read(receive, 1 << 16) if receive in ready else b""
            if text:
                process.text += text
                process.since = process.seconds()
            elif receive in ready or process.seconds() - process.since > SECONDS:
                os.close(receive)
                rows, lost = running.pop(receive).end(late=receive not in ready)
                write(rows, options.out)
                if lost:
                    queue.insert(0, (process.name, lost))


@dataclass
class Running:
    """A process that checks one architecture, with what it has told and the seconds of computing until then."""

    process: psutil.Process
    name: str
    modes: list[str]
    text: bytes = b""
    since: float = 0.0

    def seconds(self) -> float:
        """Seconds of computing so far."""
        try:
            times = self.process.cpu_times()
        except psutil.Error:
            return self.since
        return times.user + times.system

    def end(self, late: bool) -> tuple[list[dict[str, Any]], list[str]]:
        """Its rows, and the modes behind one that ended it. What ends it before any mode does so in all."""
        if late:
            self.process.kill()
        status = os.waitpid(self.process.pid, 0)[1]
        rows = [json.loads(line) for line in self.text.decode().splitlines()]
        lost = self.modes[len(rows) :]
        failed = lost[:1] if rows else lost
        why = (
            f"took over {SECONDS} s"
            if late
            else f"the process ended with {os.waitstatus_to_exitcode(status)}"
        )
        outcome = "slow" if late else "error"
        rows += [{"name": self.name, "mode": mode, "outcome": outcome, "detail": why} for mode in failed]
        return rows, lost[len(failed) :]


def _child(name: str, modes: list[str], send: int, traced: bool) -> None:
    if not traced:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    def tell(row: dict[str, Any]) -> None:
        os.write(send, (json.dumps({"name": name, **row}) + "\n").encode())

    try:
        from checks import check

        check(name, modes, tell, traced)
    finally:
        os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
