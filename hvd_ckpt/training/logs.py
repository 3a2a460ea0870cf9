"""What is written down while a model trains: a line of JSON for each record, and TensorBoard.

A record is a flat dictionary. Those of a training run have these keys, and more for metrics:

    step      optimizer steps taken
    kind      ``train`` or ``eval``
    loss      mean since the record before; of an evaluation, over all its samples
    lr        learning rate of the last step
    rate      units per second, over all ranks
    unit      what is counted: ``tokens``, ``images``, ...
    memory    peak bytes of the process; ``memory_of`` says which bytes
    seconds   of training since the record before, evaluations and snapshots left out; of an evaluation, its own

Only rank 0 writes.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvd_ckpt.install.extras import explain_import_error

__all__ = ["JsonLines", "Logs", "TensorBoard", "read"]

MAX_BYTES = 1 << 30

_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The records of a :class:`JsonLines` file; a last line that a killed process left unfinished is not among them.

    Raises:
        ValueError: the file cannot be read, or a line is no record; the message names file and line.
    """
    try:
        about = os.stat(path)
        if not stat.S_ISREG(about.st_mode) or about.st_size > MAX_BYTES:
            raise ValueError(
                f"the log '{path}' is no file, or larger than {MAX_BYTES >> 30} GiB: name another"
            )
        content = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read the log '{path}': {error.strerror}") from None
    return [record for _, record in _records(path, content)]


class JsonLines:
    """Appends records to a file, each as one line of JSON, with the operating system as soon as ``write`` returns.

    JSON has no infinities: numbers that are not finite become ``"nan"``, ``"inf"`` and ``"-inf"``, which :func:`read` turns back.

    Args:
        path: of the file; folders are made, an unfinished last line is cut off, and whole lines stay.

    Raises:
        ValueError: there is something of that name which is no file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.is_symlink() or (self.path.exists() and not self.path.is_file()):
            raise ValueError(f"the log '{self.path}' is a link or a device: remove it")
        self._file = self.path.open("ab", buffering=0)
        self._file.truncate(self.path.read_bytes().rfind(b"\n") + 1)

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends a record, or nothing. Values are numbers (also in tensors of one element), strings, booleans or None.

        Raises:
            TypeError: a value is something else.
            OSError: it cannot be written, such as to a full disk.
        """
        plain = {name: _plain(value) for name, value in record.items()}
        line = json.dumps(plain, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        end = self._file.seek(0, os.SEEK_END)
        try:
            written = 0
            while written < len(line):
                written += self._file.write(line[written:])
        except OSError:
            self._file.truncate(end)
            raise

    def rewind(self, step: int) -> None:
        """Drops everything from the first record of a later step on: a run that resumes at ``step`` writes it anew.

        Raises:
            ValueError: a line is no record; the message names file and line.
        """
        content = self.path.read_bytes()
        for start, record in _records(self.path, content):
            if record.get("step", step) > step:
                self._file.truncate(start)
                return

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class TensorBoard:
    """Draws the numbers of records in TensorBoard, as ``loss/train``, ``loss/eval``, and so on.

    Where TensorBoard is not installed, or cannot be imported, nothing is written.

    Args:
        folder: for its event files.

    Attributes:
        unavailable: why nothing is written, or None.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.unavailable: str | None = None
        self._writer: Any = None
        self._purge: int | None = None
        try:
            from torch.utils.tensorboard import SummaryWriter
        except Exception as error:  # versions that do not fit each other raise more than ImportError
            text = explain_import_error(error) if isinstance(error, ImportError) else None
            self.unavailable = f"No TensorBoard log: {text or error}"
        else:
            self._make_writer = SummaryWriter

    def write(self, record: Mapping[str, Any]) -> None:
        """Adds each number of a record, under its name and kind, at its step."""
        if self.unavailable is not None:
            return
        if self._writer is None:
            self._writer = self._make_writer(str(self.folder), purge_step=self._purge, flush_secs=30)
        kind = record.get("kind", "train")
        for name, value in record.items():
            number = _plain(value)
            if name != "step" and isinstance(number, (int, float)) and not isinstance(number, bool):
                self._writer.add_scalar(f"{name}/{kind}", number, record["step"])

    def rewind(self, step: int) -> None:
        """Has TensorBoard hide what was written of later steps."""
        self.close()
        self._purge = step + 1

    def close(self) -> None:
        """Writes out what is still in memory."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class Logs:
    """Both logs of a run: ``log.jsonl`` and the folder ``tensorboard``. For rank 0; a context manager that closes them.

    Args:
        folder: of the run.
        tensorboard: whether that log is wanted.

    Attributes:
        unavailable: why there is no TensorBoard log although it is wanted, or None.
    """

    def __init__(self, folder: str | os.PathLike[str], tensorboard: bool = True) -> None:
        self.path = Path(folder) / "log.jsonl"
        self._logs: list[JsonLines | TensorBoard] = [JsonLines(self.path)]
        self.unavailable: str | None = None
        if tensorboard:
            board = TensorBoard(Path(folder) / "tensorboard")
            self.unavailable = board.unavailable
            self._logs.append(board)

    def write(self, record: Mapping[str, Any]) -> None:
        """Writes a record to each log; see :meth:`JsonLines.write`."""
        for log in self._logs:
            log.write(record)

    def rewind(self, step: int) -> None:
        """Takes back what was written of steps after this one; see :meth:`JsonLines.rewind`."""
        for log in self._logs:
            log.rewind(step)

    def close(self) -> None:
        """Closes both."""
        for log in self._logs:
            log.close()

    def __enter__(self) -> Logs:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _plain(value: Any) -> Any:
    """The value as JSON knows it."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value


def _records(path: str | os.PathLike[str], content: bytes) -> list[tuple[int, dict[str, Any]]]:
    """Every record in whole lines, with the offset of its first byte."""
    found, start = [], 0
    for number, line in enumerate(content[: content.rfind(b"\n") + 1].splitlines(keepends=True), start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict) or not isinstance(record.get("step", 0), int):
            raise ValueError(
                f"log '{path}', line {number}: not a record, which is a JSON object with a whole step"
            )
        known = {
            name: _NOT_FINITE.get(value, value) if isinstance(value, str) else value
            for name, value in record.items()
        }
        found.append((start, known))
        start += len(line)
    return found
