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
from hvd_ckpt.snapshots.hashed_file import DAMAGED, FileFacts
from hvd_ckpt.snapshots.shards import Shards, parse_shards

__all__ = [
    "COMMON",
    "MANIFEST",
    "MODEL",
    "Manifest",
    "files_of",
    "new_manifest",
    "own_name",
    "parse_manifest",
    "shard_name",
    "text_of",
    "weights_name",
]

FORMAT = "hvd_ckpt snapshot"
VERSIONS = (1, 2)  # the second is that of a sharded run

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
        shards: which rank has which part of what is split over the ranks; None if nothing is.
    """

    step: int
    ranks: int
    time: str
    libraries: dict[str, str]
    files: dict[str, FileFacts]
    aliases: dict[str, str]
    shards: Shards | None = None


def own_name(rank: int) -> str:
    """The name of a rank's own part, without its ending."""
    return f"rank-{rank:05d}"


def shard_name(rank: int) -> str:
    """The name of a rank's part of the optimizer's state, without its ending."""
    return f"shard-{rank:05d}"


def weights_name(rank: int) -> str:
    """The name of the file with a rank's part of the weights."""
    return f"weights-{rank:05d}.safetensors"


def files_of(rank: int, optimizer: bool, weights: bool) -> list[str]:
    """Names of the files that any rank writes, sorted.

    Args:
        optimizer: whether the optimizer's state is split over the ranks.
        weights: whether weights are.
    """
    parts = [own_name(rank)] + [shard_name(rank)] * optimizer
    names = [f"{part}.{ending}" for part in parts for ending in ("json", "safetensors")]
    return names + [weights_name(rank)] * weights


def new_manifest(
    step: int,
    ranks: int,
    files: dict[str, FileFacts],
    aliases: dict[str, str],
    shards: Shards | None = None,
) -> Manifest:
    """A manifest of now, by this process."""
    libraries = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": str(np.__version__),
        "horovod": str(horovod.__version__),
    }
    return Manifest(
        step, ranks, time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), libraries, files, aliases, shards
    )


def text_of(manifest: Manifest) -> bytes:
    """The content of its file.

    Raises:
        Wrong: it is larger than it may be.
    """
    document = {"format": FORMAT, "version": VERSIONS[0], **dataclasses.asdict(manifest)}
    if manifest.shards is None:
        del document["shards"]
    else:
        document.update(version=VERSIONS[1], shards=manifest.shards.plain())
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
    if version == VERSIONS[0]:
        fields.remove("shards")
    if set(document) != fields | {"format", "version", "sha256"}:
        odd = sorted(set(document) ^ (fields | {"format", "version", "sha256"}))
        raise _wrong(f"the key {shown(odd[0])} is missing or too many")
    if document.pop("sha256") != _checksum(document):
        raise _wrong("its content is not what was written (its SHA-256 differs)")
    ranks = _whole(document["ranks"], "ranks", 1, MAX_RANKS)
    shards = _shards(document["shards"], ranks) if version == VERSIONS[1] else None
    files = _files(document["files"], ranks, shards)
    aliases = _texts(document["aliases"], "aliases")
    return Manifest(
        step=_whole(document["step"], "step", 0, MAX_STEP),
        ranks=ranks,
        time=_text(document["time"], "time"),
        libraries=_texts(document["libraries"], "libraries"),
        files=files,
        aliases=aliases,
        shards=shards,
    )


def _shards(value: Any, ranks: int) -> Shards:
    try:
        return parse_shards(value, ranks)
    except Wrong as error:
        raise _wrong(str(error)) from None


def _files(value: Any, ranks: int, shards: Shards | None) -> dict[str, FileFacts]:
    split = (shards is not None, shards is not None and shards.weights is not None)
    count = 3 + len(files_of(0, *split)) * ranks
    if not isinstance(value, dict) or len(value) != count:
        raise _wrong(f"files are not the {count} that a snapshot of {ranks} ranks has")
    expected = {MODEL, f"{COMMON}.json", f"{COMMON}.safetensors"}
    expected.update(name for rank in range(ranks) for name in files_of(rank, *split))
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
