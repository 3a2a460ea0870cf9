"""What a snapshot consists of: the file that is written last and read first.

``manifest.json`` names every other file with its size and SHA-256, and carries one of its own over its other keys, so that no bit
of a snapshot can change unnoticed. The sums find damage but are no signature, so everything is also checked for what it may be.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import re
import time
from dataclasses import dataclass
from typing import Any

import horovod
import numpy as np
import torch

from hvd_ckpt.json_file import MAX_BYTES, Wrong, dumps, loads, shown
from hvd_ckpt.training.hashed_file import DAMAGED, FileFacts

__all__ = ["COMMON", "MANIFEST", "MODEL", "Manifest", "new_manifest", "own_name", "parse_manifest", "text_of"]

FORMAT = "hvd_ckpt snapshot"
VERSIONS = (1,)

MANIFEST = "manifest.json"
MODEL = "model.safetensors"
COMMON = "common"

MAX_STEP = 10**18
MAX_RANKS = 1_000_000
_GIVE = "give a folder that snapshot.write() wrote"
_SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class Manifest:
    """What ``manifest.json`` says.

    Attributes:
        step: training steps taken.
        ranks: number of ranks that wrote it.
        time: when, in UTC, such as "2030-01-31T12:00:00Z".
        libraries: versions of what wrote it.
        files: every other file of the snapshot.
        aliases: names of tied weights, and the name each is stored under.
    """

    step: int
    ranks: int
    time: str
    libraries: dict[str, str]
    files: dict[str, FileFacts]
    aliases: dict[str, str]


def own_name(rank: int) -> str:
    """The name of a rank's own part, without its ending."""
    return f"rank-{rank:05d}"


def new_manifest(step: int, ranks: int, files: dict[str, FileFacts], aliases: dict[str, str]) -> Manifest:
    """A manifest of now, by this process."""
    libraries = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": str(np.__version__),
        "horovod": str(horovod.__version__),
    }
    return Manifest(
        step, ranks, time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), libraries, files, aliases
    )


def text_of(manifest: Manifest) -> bytes:
    """The content of its file.

    Raises:
        Wrong: it is larger than it may be.
    """
    document = {"format": FORMAT, "version": VERSIONS[-1], **dataclasses.asdict(manifest)}
    text = dumps({**document, "sha256": _checksum(document)}).encode()
    if len(text) > MAX_BYTES:
        raise Wrong(f"the manifest would be larger than {MAX_BYTES >> 20} MiB: tie fewer weights")
    return text


def parse_manifest(content: bytes) -> Manifest:
    """The manifest in the content of its file.

    Raises:
        Wrong: it is none, damaged, or of an unknown version.
    """
    document = loads(content, _GIVE, DAMAGED)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise Wrong(f'it does not say "format": "{FORMAT}": {_GIVE}')
    version = document.get("version")
    if type(version) is not int or version not in VERSIONS:
        known = " and ".join(map(str, VERSIONS))
        raise Wrong(
            f"it is of version {shown(version)}, and this library reads version {known}: use the version of hvd_ckpt "
            f"that wrote it"
        )
    fields = {field.name for field in dataclasses.fields(Manifest)}
    if set(document) != fields | {"format", "version", "sha256"}:
        odd = sorted(set(document) ^ (fields | {"format", "version", "sha256"}))
        raise _wrong(f"the key {shown(odd[0])} is missing or too many")
    if document.pop("sha256") != _checksum(document):
        raise _wrong("its content is not what was written (its SHA-256 differs)")
    ranks = _whole(document["ranks"], "ranks", 1, MAX_RANKS)
    files = _files(document["files"], ranks)
    aliases = _texts(document["aliases"], "aliases")
    return Manifest(
        step=_whole(document["step"], "step", 0, MAX_STEP),
        ranks=ranks,
        time=_text(document["time"], "time"),
        libraries=_texts(document["libraries"], "libraries"),
        files=files,
        aliases=aliases,
    )


def _files(value: Any, ranks: int) -> dict[str, FileFacts]:
    if not isinstance(value, dict) or len(value) != 3 + 2 * ranks:
        raise _wrong(f"files are not the {3 + 2 * ranks} that a snapshot of {ranks} ranks has")
    parts = [COMMON, *(own_name(rank) for rank in range(ranks))]
    expected = {MODEL} | {f"{part}.{ending}" for part in parts for ending in ("json", "safetensors")}
    for name, facts in value.items():
        if name not in expected:
            raise _wrong(f"files has {shown(name)}, which is no file of a snapshot of {ranks} ranks")
        if not isinstance(facts, dict) or set(facts) != {"bytes", "sha256"}:
            raise _wrong(f"files.{name} must have bytes and sha256")
        _whole(facts["bytes"], f"files.{name}.bytes", 0, 2**63 - 1)
        if not isinstance(facts["sha256"], str) or not _SHA256.fullmatch(facts["sha256"]):
            raise _wrong(
                f"files.{name}.sha256 is {shown(facts['sha256'])}, and must be 64 hexadecimal digits"
            )
    return {name: FileFacts(**facts) for name, facts in value.items()}


def _checksum(document: dict[str, Any]) -> str:
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _whole(value: Any, place: str, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise _wrong(f"{place} is {shown(value)}, and must be a whole number from {least} to {most}")
    return value


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise _wrong(f"{place} is {shown(value)}, and must be a text")
    return value


def _texts(value: Any, place: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise _wrong(f"{place} is {shown(value)}, and must be an object")
    return {name: _text(one, f"{place}.{shown(name)}") for name, one in value.items()}


def _wrong(what: str) -> Wrong:
    return Wrong(f"{what}: {DAMAGED}")
