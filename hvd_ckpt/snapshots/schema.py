"""The files of a snapshot, and the manifest that describes them.

    RUN/snapshots/step-00000120/
        model.safetensors          weights and buffers as rank 0 has them
        replicated.pt              the other state that is the same on every rank, written by rank 0
        rank-00000.pt              per-rank state; one file for each rank, which writes it
        shard-00000.pt             where the optimizer's state is sharded: this rank's shard of it
        weights-00000.safetensors  where weights are sharded, too: this rank's shards, by parameter
        manifest.json              step, ranks, shards, and size and SHA-256 of each file: written last, read first

The manifest contains its own SHA-256, so every changed bit of a snapshot is detected. Hashes detect damage but are not a
signature, so everything that is read is also validated.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import time
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Annotated, Any, Literal, NamedTuple

import horovod
import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from hvd_ckpt.reduction.buckets import is_dense
from hvd_ckpt.sharding.layout import TensorSpec
from hvd_ckpt.sharding.state import ShardRange
from hvd_ckpt.utils.cuts import Cut, cut_of
from hvd_ckpt.utils.plain_data import dumps, loads, parse_json
from hvd_ckpt.utils.schema import Strict, Wrong, shown

MANIFEST = "manifest.json"
MODEL = "model.safetensors"
REPLICATED = "replicated.pt"

# A manifest lists about one shard for each rank and each group of parameters that are gathered together, twice: of weights and
# of optimizer state. That is 3 KiB for each rank of a model of 24 blocks. Other JSON files do not grow with ranks.
MAX_MANIFEST_BYTES = 256 << 20
MAX_STEP = 10**18
MAX_RANKS = 1_000_000
DAMAGED = "use the snapshot before it, or restore it from a copy"
_GIVE = "give the folder of a snapshot"

Natural = Annotated[int, Field(ge=0, lt=2**63)]


class FileEntry(Strict):
    """Size and SHA-256 of a file."""

    bytes: Natural
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class TensorMetadata(Strict):
    """A whole parameter: size, strides (without gaps; they give the order of its elements in memory), and dtype ("float32").

    ``cut``: the dimension along which tensor parallelism cuts it, and the number of blocks there; None where all parts have it.
    """

    size: tuple[Natural, ...]
    stride: tuple[Natural, ...]
    dtype: str
    cut: tuple[Natural, Annotated[int, Field(ge=1)]] | None = None

    @classmethod
    def of(cls, parameter: Tensor, spec: TensorSpec | None = None) -> TensorMetadata:
        spec, cut = spec or TensorSpec.of(parameter), cut_of(parameter)
        if cut is not None:
            spec = TensorSpec.of(torch.empty(cut.whole_shape(spec.shape), device="meta"))
        return cls(
            size=tuple(spec.shape),
            stride=tuple(spec.stride),
            dtype=str(parameter.dtype).removeprefix("torch."),
            cut=None if cut is None else (cut.dim, cut.blocks),
        )

    @property
    def how(self) -> Cut | None:
        """The cut of the parameter."""
        return None if self.cut is None else Cut(self.cut[0], self.size[self.cut[0]], self.cut[1])

    def spec_of(self, parts: int, part: int) -> TensorSpec:
        """Shape and strides of what a part has of it."""
        if self.how is None:
            return self.spec
        shape = list(self.size)
        shape[self.how.dim] = self.how.length(parts, part)
        return TensorSpec.of(torch.empty(shape, device="meta"))

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(torch.Size(self.size), self.stride)

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @model_validator(mode="after")
    def _is_dense(self) -> TensorMetadata:
        if not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise ValueError(f"{shown(self.dtype)} is not a dtype of this version of PyTorch")
        if len(self.stride) != len(self.size) or (self.numel and not is_dense(self.size, self.stride)):
            raise ValueError(f"the strides {list(self.stride)} do not fit the size {list(self.size)}")
        if self.cut is not None and (self.cut[0] >= len(self.size) or self.size[self.cut[0]] % self.cut[1]):
            raise ValueError(f"the cut {list(self.cut)} does not fit the size {list(self.size)}")
        return self


class ShardMetadata(NamedTuple):
    """A shard of a parameter: ``size`` elements from ``offset`` on, in the order of memory.

    In a manifest it is a list of the three, or in one of an earlier version an object.
    """

    name: str
    offset: Natural
    size: Annotated[int, Field(gt=0, lt=2**63)]

    @property
    def stop(self) -> int:
        return self.offset + self.size

    def overlaps(self, elements: ShardRange) -> bool:
        """Whether it has any of these elements of its parameter."""
        return self.offset < elements.stop and elements.start < self.stop

    @classmethod
    def of(cls, pieces: Iterable[Any]) -> tuple[ShardMetadata, ...]:
        """From lists of name, first and last + 1 element, as sharded optimizers have them."""
        return tuple(cls(name=name, offset=start, size=stop - start) for name, start, stop in pieces)


Shards = tuple[tuple[ShardMetadata, ...], ...]


class ShardingMetadata(Strict):
    """The elements of each parameter in the files of each rank.

    Attributes:
        stage: 0 to 3, as in :data:`hvd_ckpt.utils.text.STAGES`.
        pipeline_stages, tensor: numbers of stages and parts of the job; rank ``(stage * replicas + replica) * tensor + part``
            wrote the files of a part.
        parameters: all of the model, by name, and with pipeline stages the buffers that are part of its weights; tied ones once.
        optimizer: for each rank the shards that it has optimizer state of, in the order of that state.
        weights: for each rank the shards whose exact weights it has; None where rank 0 has written whole ones.

    The shard of a parameter that is cut is one of the slice of its rank's part.
    """

    stage: Annotated[int, Field(ge=0, le=3)]
    pipeline_stages: Annotated[int, Field(ge=1, le=MAX_RANKS)] = 1
    tensor: Annotated[int, Field(ge=1, le=MAX_RANKS)] = 1
    parameters: dict[str, TensorMetadata]
    optimizer: Shards
    weights: Shards | None

    @model_validator(mode="after")
    def _covers_parameters(self) -> ShardingMetadata:
        apart = self.pipeline_stages * self.tensor
        if (self.stage == 3 or apart > 1) and self.weights is None:
            raise ValueError("stage 3, or a job with pipeline stages or parts, has no shards of the weights")
        if self.stage == 0 and apart == 1:
            raise ValueError("stage 0 in a job without pipeline stages or parts has shards")
        if len(self.optimizer) % apart:
            raise ValueError(
                f"{len(self.optimizer)} ranks are not those of {self.pipeline_stages} pipeline stages and {self.tensor} parts"
            )
        for what, shards in (("optimizer", self.optimizer), ("weights", self.weights or ())):
            names = self._check_shards(what, shards)
            missing = [
                name for name, parameter in self.parameters.items() if parameter.numel and name not in names
            ]
            if what == "weights" and self.weights is not None and missing:
                raise ValueError(f"weights have no shard of {shown(missing[0])}")
        return self

    def _check_shards(self, what: str, shards: Shards) -> set[str]:
        """The names of the parameters in shards, which have to make up all of each."""
        by_name: dict[str, list[tuple[int, ShardMetadata]]] = {}
        for rank, of_rank in enumerate(shards):
            if len({shard.name for shard in of_rank}) < len(of_rank):
                raise ValueError(f"{what} has two shards of a parameter on one rank")
            for shard in of_rank:
                part = rank % self.tensor
                by_name.setdefault(shard.name, []).append((part, shard))
        for name, shards_of_parameter in by_name.items():
            whole = self.parameters.get(name)
            is_cut = whole is not None and whole.how is not None
            for part in range(self.tensor if is_cut else 1):
                # In order, each shard must begin where the last one ended: no gap and no overlap.
                reached = 0
                own = [shard for of_part, shard in shards_of_parameter if of_part == part or not is_cut]
                for shard in sorted(own, key=lambda shard: shard.offset):
                    if shard.offset != reached:
                        break
                    reached = shard.stop
                if whole is None or reached != whole.spec_of(self.tensor, part).numel:
                    raise ValueError(f"the shards of {what} do not have each element of {shown(name)} once")
        return set(by_name)


class RankShards(Strict):
    """One rank's part of :class:`ShardingMetadata`; only rank 0's has ``parameters``, which are those of all."""

    stage: int
    pipeline_stages: int = 1
    tensor: int = 1
    parameters: dict[str, TensorMetadata]
    optimizer: tuple[ShardMetadata, ...]
    weights: tuple[ShardMetadata, ...] | None


def merged(ranks: list[RankShards | None]) -> ShardingMetadata | None:
    """The shards of all ranks, in their order; None where nothing is sharded.

    Raises:
        Wrong: the ranks do not shard the same things.
        pydantic.ValidationError: the shards are not those of whole parameters.
    """
    parts = [part for part in ranks if part is not None]
    if not parts:
        return None
    first = parts[0]
    if len(parts) < len(ranks) or any(
        (part.stage, part.pipeline_stages, part.tensor, part.weights is None)
        != (first.stage, first.pipeline_stages, first.tensor, first.weights is None)
        for part in parts
    ):
        raise Wrong("ranks shard different things: give every rank the same settings")
    weights = tuple(part.weights for part in parts if part.weights is not None)
    return ShardingMetadata(
        stage=first.stage,
        pipeline_stages=first.pipeline_stages,
        tensor=first.tensor,
        parameters=first.parameters,
        optimizer=tuple(part.optimizer for part in parts),
        weights=None if first.weights is None else weights,
    )


def libraries() -> dict[str, str]:
    """The versions of Python, of this library and of those that compute."""
    modules: dict[str, Any] = {"torch": torch, "numpy": np, "horovod": horovod}
    versions = {name: str(module.__version__) for name, module in modules.items()}
    return {"python": platform.python_version(), "hvd_ckpt": version("hvd-ckpt"), **versions}


class Manifest(Strict):
    """The content of ``manifest.json``, but for its own hash.

    Attributes:
        step: training steps taken.
        ranks: number of ranks that wrote the snapshot.
        time: time of writing, in UTC, such as "2030-01-31T12:00:00Z".
        libraries: their versions.
        files: every other file of the snapshot.
        aliases: names of tied weights, and the name each is stored under.
        sharding: sharding of a run that splits state over its ranks.
    """

    format: Literal["hvd_ckpt snapshot"]
    version: Literal[1]
    step: Annotated[int, Field(ge=0, le=MAX_STEP)]
    ranks: Annotated[int, Field(ge=1, le=MAX_RANKS)]
    time: str
    libraries: dict[str, str]
    files: dict[str, FileEntry]
    aliases: dict[str, str]
    sharding: ShardingMetadata | None

    @model_validator(mode="after")
    def _has_its_files(self) -> Manifest:
        shards = () if self.sharding is None else (self.sharding.optimizer, self.sharding.weights)
        if any(of_ranks is not None and len(of_ranks) != self.ranks for of_ranks in shards):
            raise ValueError(f"sharding does not have shards of {self.ranks} ranks")
        names = {MODEL, REPLICATED}
        if len(self.files) >= self.ranks:  # or this would be long
            weights = self.sharding is not None and self.sharding.weights is not None
            names.update(
                name
                for rank in range(self.ranks)
                for name in files_of(rank, self.sharding is not None, weights)
            )
        if names != set(self.files):
            odd = min(names ^ set(self.files))
            raise ValueError(
                f"files are not those of a snapshot of {self.ranks} ranks: {shown(odd)} is missing or unknown"
            )
        return self

    @classmethod
    def of(
        cls,
        step: int,
        ranks: int,
        files: Mapping[str, FileEntry],
        aliases: Mapping[str, str],
        sharding: ShardingMetadata | None,
    ) -> Manifest:
        """A manifest of now, by this process.

        Raises:
            pydantic.ValidationError: the files or shards are not those of this number of ranks.
        """
        return cls(
            format="hvd_ckpt snapshot",
            version=1,
            step=step,
            ranks=ranks,
            time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            libraries=libraries(),
            files=dict(sorted(files.items())),
            aliases=dict(aliases),
            sharding=sharding,
        )

    @classmethod
    def parse(cls, content: bytes) -> Manifest:
        """The manifest in the content of its file.

        Raises:
            Wrong: it is not a manifest, or damaged.
        """
        document = loads(content, _GIVE, DAMAGED, MAX_MANIFEST_BYTES)
        if not isinstance(document, dict) or document.get("format") != "hvd_ckpt snapshot":
            raise Wrong(f'it does not say "format": "hvd_ckpt snapshot": {_GIVE}')
        if document.pop("sha256", None) != _hash(document):
            raise Wrong(f"its content is not what was written (its SHA-256 differs): {DAMAGED}")
        return parse_json(cls, json.dumps(document).encode(), _GIVE, DAMAGED, MAX_MANIFEST_BYTES)

    def encode(self) -> bytes:
        """The content of its file.

        Raises:
            Wrong: it is larger than it may be.
        """
        document = self.model_dump(mode="json")
        text = dumps({**document, "sha256": _hash(document)}).encode()
        if len(text) > MAX_MANIFEST_BYTES:
            raise Wrong(
                f"the manifest would be larger than {MAX_MANIFEST_BYTES >> 20} MiB: tie fewer weights"
            )
        return text


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.pt"


def shard_file(rank: int) -> str:
    return f"shard-{rank:05d}.pt"


def weights_file(rank: int) -> str:
    return f"weights-{rank:05d}.safetensors"


def files_of(rank: int, optimizer: bool, weights: bool) -> list[str]:
    """Names of the files that each rank writes.

    Args:
        optimizer: whether the optimizer's state is sharded.
        weights: whether weights are.
    """
    return [rank_file(rank)] + [shard_file(rank)] * optimizer + [weights_file(rank)] * weights


def _hash(document: dict[str, Any]) -> str:
    # Of the content and not of the text: the file may be indented in another way and keep its hash.
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
