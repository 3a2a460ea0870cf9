"""The folder of a run's snapshots: listing, naming, replacing and removing snapshots.

Ranks write into ``.step-00000120.tmp-<token>``, which gets its name when all of it is on the disk. An existing snapshot of the
same step is ``.step-00000120.old-<token>`` between two renames, and counts as a snapshot if the second rename does not happen.

This module does not import PyTorch.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hvd_ckpt.utils.schema import Wrong
from hvd_ckpt.utils.text import one_line

Warn = Callable[[str], None]

SNAPSHOT = re.compile(r"step-([0-9]{8,19})")
_REPLACED = re.compile(r"\.(step-[0-9]{8,19})\.old-[0-9a-f]{8}")
_TEMPORARY = re.compile(r"\.step-[0-9]{8,19}\.tmp-[0-9a-f]{8}")


class SnapshotError(ValueError):
    """A snapshot cannot be written or read; one line."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


def temporary_name(step: int, token: str | None = None) -> str:
    """The name of a snapshot that is being written or removed, with a new token unless 8 hexadecimal digits are given."""
    return f".{name_of(step)}.tmp-{token or secrets.token_hex(4)}"


def is_left_over(name: str) -> bool:
    """Whether it is the name of a snapshot that was being written or removed."""
    return bool(_TEMPORARY.fullmatch(name) or _REPLACED.fullmatch(name))


def name_of(step: int) -> str:
    """The name of the snapshot of a step."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """The step in a snapshot's name: ``step-00000120``, or that of one that is being replaced, ``.step-00000120.old-01234567``."""
    return int(path.name.rpartition("step-")[2].partition(".")[0])


def names_in(folder: Path) -> list[str]:
    """All names in a folder, sorted; an empty list if it does not exist. Raises SnapshotError if it cannot be read."""
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise SnapshotError(
            f"'{folder}' cannot be read ({error.strerror}): name the folder of a run's snapshots."
        ) from None


def list_snapshots(folder: Path) -> list[Path]:
    """All snapshots, complete or not, newest first."""
    named: dict[str, str] = {}
    for name in names_in(folder):  # those that were being replaced sort before those in place
        replaced = _REPLACED.fullmatch(name)
        if replaced or SNAPSHOT.fullmatch(name):
            named[replaced[1] if replaced else name] = name
    by_step = {int(known[5:]): name for known, name in named.items() if known == name_of(int(known[5:]))}
    return [folder / by_step[step] for step in sorted(by_step, reverse=True)]


def remove(paths: Iterable[Path], warn: Warn) -> None:
    """Removes snapshots and what interrupted writes have left.

    All snapshots are renamed first, the oldest one first, which takes almost no time. Then the files are removed. If this is
    interrupted, nothing that is left looks like a snapshot, and the newest one of the snapshots has stayed to the last. Warns of
    each that cannot be removed.
    """
    aside = []
    for path in sorted(paths, key=step_of):
        with _warning(path, warn):
            named = _REPLACED.fullmatch(path.name) or SNAPSHOT.fullmatch(path.name)
            aside.append(path.rename(path.with_name(temporary_name(step_of(path)))) if named else path)
    for folder in {path.parent for path in aside}:
        with suppress(OSError):
            sync_folder(folder)
    for path in aside:
        with _warning(path, warn):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


@contextmanager
def _warning(path: Path, warn: Warn) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        pass
    except OSError as error:
        warn(f"The old snapshot '{path}' cannot be removed: {error.strerror}.")


def discard(temporary: Path) -> None:
    """Removes a folder that other ranks may still be writing to. It is renamed first, so that a late rank finds no folder to write
    to. Files that fail to be removed stay under that name."""
    with suppress(OSError):
        temporary = temporary.rename(temporary.with_name(temporary_name(step_of(temporary))))
    shutil.rmtree(temporary, ignore_errors=True)


def make_folder(folder: Path) -> None:
    """Makes a folder and those above it, and flushes them to the disk."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Flushes the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put_in_place(temporary: Path, place: Path, warn: Warn) -> None:
    """Gives a complete snapshot its name; one that has the name is removed (:func:`remove`), but not before. Raises OSError if it
    cannot be renamed; the one that had the name has it still."""
    # What a kill leaves, and what a run that resumes takes for the snapshot of this step:
    #
    #     before the first rename      step-N                      the old one; .step-N.tmp-T is left over
    #     between the two renames      .step-N.old-T               the old one, by list_snapshots(); .step-N.tmp-T is left over
    #     after the second rename      step-N                      the new one, since its name sorts behind .step-N.old-T
    #     after remove()               step-N                      the new one
    #
    # If no snapshot has the name, the first rename is missing and the second alone decides.
    replaced = temporary.with_name(temporary.name.replace(".tmp-", ".old-"))
    if os.path.lexists(place):
        place.rename(replaced)
    try:
        temporary.rename(place)
    except BaseException:
        if os.path.lexists(replaced):
            replaced.rename(place)
        raise
    # The rename is on the disk before the old snapshot goes: else a power failure could take both.
    sync_folder(place.parent)
    if os.path.lexists(replaced):
        remove([replaced], warn)


def is_short(error: Exception) -> bool:
    """Whether there is no room for a file on the disk, which removing others may give."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def reason_of(error: Exception) -> str:
    """An error in one line, with the way out."""
    if isinstance(error, Wrong):
        return str(error)
    if isinstance(error, OSError) and error.errno:
        full = is_short(error) or error.errno == errno.EFBIG
        way_out = "make room" if full else "name a folder that can be written to"
        return f"{os.strerror(error.errno)}{f' ({error.filename})' if error.filename else ''}: {way_out}"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
