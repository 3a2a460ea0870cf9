"""Trains architectures on the ranks of a job with sharded parameters, and compares with the run that is not sharded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SHARED = [str(HERE.parent / "helpers"), str(HERE.parents[1])]
sys.path[:0] = [str(HERE), *SHARED]

STALL = 40.0  # seconds after which an architecture is ended


def run(names: Sequence[str], ranks: int = 2) -> Iterator[dict[str, Any]]:
    """A row for each architecture; a job that an architecture ends is followed by another one with the rest."""
    left = list(names)
    while left:
        done = 0
        for row in _job(left, ranks):
            done += 1
            yield row
        left = left[done:]


def _job(names: Sequence[str], ranks: int) -> Iterator[dict[str, Any]]:
    """Rows in the order of the names, until an architecture ends the job or none is left."""
    from controllers import start_ranks

    with tempfile.TemporaryDirectory(prefix="hvd_ckpt_zoo_") as folder:
        log = Path(folder, "log")
        log.touch()
        with open(Path(folder, "output"), "w+") as output:
            job = start_ranks(
                ranks,
                Path(__file__),
                str(log),
                *names,
                output=output,
                PYTHONPATH=os.pathsep.join([str(HERE), *SHARED]),
            )
            told, since = 0, time.monotonic() + 20.0
            try:
                while told < len(names):
                    ended = job.poll() is not None
                    lines = log.read_text().splitlines()
                    for line in lines[told:]:
                        told, since = told + 1, time.monotonic()
                        yield json.loads(line)
                    late = time.monotonic() - since > STALL
                    if (ended or late) and told < len(names) and len(log.read_text().splitlines()) == told:
                        output.seek(0)
                        said = output.read().strip()[-400:].replace("\n", " ")
                        why = f"the ranks hang: {_stacks(folder)}" if late else f"the job ended: {said}"
                        yield {"name": names[told], "mode": "stage 3", "outcome": "error", "detail": why}
                        return
                    time.sleep(0.05)
            finally:
                job.terminate()
                try:
                    job.wait(10)
                except subprocess.TimeoutExpired:
                    job.kill()


def _stacks(folder: str) -> str:
    """The error of a rank for which the others wait."""
    errors = [path.read_text().strip().splitlines()[-1] for path in sorted(Path(folder).glob("log.*"))]
    return "; ".join(errors) or "no rank has raised an error"


def check(name: str, log: str | None = None) -> tuple[str, str]:
    """``equal``, ``rounding``, ... of an architecture on these ranks, and the detail; the same on every rank. Collective."""
    from modes import classify, compare
    from subjects import Untrainable, subject_of

    import hvd_ckpt as hc

    try:
        subject = subject_of(name)
        mine: tuple[str, str] = ("", "")
    except Exception as error:
        mine = ("untrainable", str(error) if isinstance(error, Untrainable) else repr(error))
    results = hc.allgather_object(mine)
    if any(outcome for outcome, _ in results):
        return next(result for result in results if result[0])
    try:
        kept = train(subject, "none")
        sharded = train(subject, "parameters")
        mine = compare(sharded, kept)
    except Exception as error:
        if log is not None:
            Path(f"{log}.{hc.rank()}").write_text("".join(traceback.format_exception(error)))
        mine = classify(error)
    results = hc.allgather_object(mine)
    order = ("error", "wrong", "memory", "refused", "rounding", "equal")
    return min(results, key=lambda result: order.index(result[0]))


def train(subject: Any, shard: str) -> Any:
    """Trains for a few steps, each rank with its own random numbers and order of the batch."""
    import torch
    from modes import STEPS, Outcome, loss_of, random_state, seed
    from torch import Tensor

    import hvd_ckpt as hc

    def sample() -> dict[str, Any]:
        values = subject.sample()
        return {
            name: value.flip(0) if isinstance(value, Tensor) and value.dim() and hc.rank() % 2 else value
            for name, value in values.items()
        }

    seed(1)
    model = subject.make().train()
    with torch.no_grad():
        model(**subject.sample())  # the same on all ranks, since a sharded optimizer broadcasts buffers
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = hc.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), shard=shard, model=model
    )
    seed(2 + hc.rank())
    values: dict[str, Tensor | None] = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model(**sample()))
        loss.backward()
        optimizer.step()
        values[f"loss {step}"] = loss.detach().clone()
        with optimizer.gathered_parameters():
            weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        values.update({f"weight {step} of {name}": weight for name, weight in weights.items()})
    values.update({f"buffer {name}": buffer.detach().clone() for name, buffer in model.named_buffers()})
    values.update(random_state())
    return Outcome(values)


def work(log: str, names: Sequence[str], tell: Callable[[dict[str, Any]], None]) -> None:
    """One rank of a job."""
    import torch
    import vision

    vision.load()
    import transformers

    import hvd_ckpt as hc

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    hc.init()
    torch.set_num_threads(1)
    for name in names:
        began = time.monotonic()
        Path(f"{log}.{hc.rank()}").unlink(missing_ok=True)
        outcome, detail = check(name, log)
        if hc.rank() == 0:
            seconds = round(time.monotonic() - began, 1)
            tell({"name": name, "mode": "stage 3", "outcome": outcome, "detail": detail, "seconds": seconds})


def _main() -> None:
    log, *names = sys.argv[1:]

    def tell(row: dict[str, Any]) -> None:
        with open(log, "a") as file:
            file.write(f"{json.dumps(row)}\n")

    work(log, names, tell)


if __name__ == "__main__":
    _main()
