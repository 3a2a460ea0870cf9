"""The files of a snapshot, and the manifest that describes them.

    RUN/snapshots/step-00000120/
        replicated.pt             plain values that are the same on every rank, written by rank 0
        rank-00000.pt             plain values of a rank; one file for each, which writes it
        rank-00000.safetensors    the elements of tensors that the rank has written
        manifest.json             step, ranks, tensors, and of each file size, SHA-256 and ranges: written last, read first

Every tensor is a set of one-dimensional ranges, each element in one of them. Its elements lie in one flat order, which
:class:`TensorMetadata` describes. The name of a tensor has a kind before the first slash: ``weights/0.bias``,
``optimizer.exp_avg/0.bias``, ``master_weights/0.bias``, ``average/0.bias``, and ``buffers@3/1.running_mean`` of rank 3. With
``@3``, it is that of rank 3 (and of the ranks that have the same), and differs between ranks; of an optimizer or in local SGD, that
of rank 0 has no number.

The manifest contains its own SHA-256, so every changed bit of a snapshot is detected. Hashes detect damage but are not a
signature, so everything that is read is also validated.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import platform
from importlib.metadata import version
from typing import Annotated, Any, Literal, NamedTuple

import horovod
import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from hvd_ckpt.reduction.buckets import TensorSpec, is_dense
from hvd_ckpt.utils.cuts import Cut
from hvd_ckpt.utils.plain_data import dumps, loads, parse_json
from hvd_ckpt.utils.schema import Strict, Wrong, shown

MANIFEST = "manifest.json"
REPLICATED = "replicated.pt"

# A manifest lists about one range for each tensor of a parameter, and one more for each edge between ranks. Other JSON files do not
# grow with ranks.
MAX_MANIFEST_BYTES = 256 << 20
MAX_STEP = 10**18
MAX_RANKS = 1_000_000
DAMAGED = "use the snapshot before it, or restore it from a copy"
OTHER_MODEL = "the snapshot is of another model"
_GIVE = "give the folder of a snapshot"

Natural = Annotated[int, Field(ge=0, lt=2**63)]


class FileEntry(Strict):
    """Size and SHA-256 of a file."""

    bytes: Natural
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class CutMetadata(Strict):
    """How tensor parallelism cuts a tensor along ``dim``: the first and last + 1 index there of each range of each part."""

    dim: Natural
    parts: tuple[tuple[tuple[Natural, Natural], ...], ...]

    def length(self, part: int) -> int:
        """The size of a part along the dimension."""
        return sum(stop - start for start, stop in self.parts[part])


class TensorMetadata(Strict):
    """A whole tensor, and the order of its elements.

    The flat order is that of memory, given by the strides (without gaps; None for a contiguous tensor). The elements of a tensor
    that is cut are those of its parts, one part after the other, and each part is contiguous.
    """

    dtype: str
    size: tuple[Natural, ...]
    stride: tuple[Natural, ...] | None = None
    cut: CutMetadata | None = None

    @classmethod
    @functools.lru_cache(maxsize=4096)  # layers are alike, and each save asks again
    def of(
        cls, dtype: torch.dtype, spec: TensorSpec, cut: Cut | None = None, parts: int = 1
    ) -> TensorMetadata:
        """The metadata of a tensor, of which ``spec`` is the shape that this process's part has."""
        name = str(dtype).removeprefix("torch.")
        if cut is None or parts == 1:
            plain = torch.empty_strided(spec.shape, spec.stride, device="meta").is_contiguous()
            return cls(dtype=name, size=tuple(spec.shape), stride=None if plain else tuple(spec.stride))
        ranges = tuple(tuple(cut.ranges(parts, part)) for part in range(parts))
        return cls(
            dtype=name, size=tuple(cut.whole_shape(spec.shape)), cut=CutMetadata(dim=cut.dim, parts=ranges)
        )

    def __str__(self) -> str:
        return f"a tensor of {self.dtype} {list(self.size)}"

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def place_of(self, part: int) -> tuple[int, int]:
        """The first and last + 1 element of a part; of what is not cut, every part has all."""
        if self.cut is None:
            return 0, self.numel
        each = self.numel // max(self.size[self.cut.dim], 1)
        start = each * sum(self.cut.length(before) for before in range(part))
        return start, start + each * self.cut.length(part)

    def unflatten(self, flat: Tensor) -> Tensor:
        """The whole tensor of all its elements; a view, unless it is cut."""
        if self.cut is None:
            return flat.view(self.size) if self.stride is None else flat.as_strided(self.size, self.stride)
        whole = flat.new_empty(self.size)
        for part in range(len(self.cut.parts)):
            start, stop = self.place_of(part)
            size = list(self.size)
            size[self.cut.dim] = self.cut.length(part)
            whole.index_copy_(self.cut.dim, self._indices(part), flat[start:stop].view(size))
        return whole

    def flatten(self, whole: Tensor) -> Tensor:
        """All elements of the whole tensor, 1-D."""
        if self.cut is not None:
            parts = range(len(self.cut.parts))
            return torch.cat(
                [whole.index_select(self.cut.dim, self._indices(part)).flatten() for part in parts]
            )
        if self.stride is None:
            return whole.reshape(-1)
        flat = torch.empty(self.numel, dtype=whole.dtype)
        flat.as_strided(self.size, self.stride).copy_(whole)
        return flat

    def _indices(self, part: int) -> Tensor:
        assert self.cut is not None
        return torch.cat([torch.arange(start, stop) for start, stop in self.cut.parts[part]])

    @model_validator(mode="after")
    def _is_dense(self) -> TensorMetadata:
        if not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise ValueError(f"{shown(self.dtype)} is not a dtype of this version of PyTorch")
        if self.stride is not None and (
            len(self.stride) != len(self.size) or (self.numel and not is_dense(self.size, self.stride))
        ):
            raise ValueError(f"the strides {list(self.stride)} do not fit the size {list(self.size)}")
        if self.cut is not None:
            ranges = sorted(
                of_part for part in self.cut.parts for of_part in part if of_part[0] != of_part[1]
            )
            edges = [0, *(stop for _, stop in ranges)]
            size = self.size[self.cut.dim] if self.cut.dim < len(self.size) else -1
            if self.stride is not None or [start for start, _ in ranges] != edges[:-1] or edges[-1] != size:
                raise ValueError(
                    f"the cut along dimension {self.cut.dim} does not fit the size {list(self.size)}"
                )
        return self


class Range(NamedTuple):
    """Elements ``start`` to ``stop`` of a tensor, which a rank writes or wants to read.

    Attributes:
        name: of the tensor, with its kind.
        whole: the whole tensor, and the order of its elements; of what is wanted the order that it has here.
        values: the elements, 1-D; None of what is wanted.
        changing: whether they may change right after a save, such as the buffers of a batch norm.
    """

    name: str
    start: int
    stop: int
    whole: TensorMetadata
    values: Any = None
    changing: bool = False

    @classmethod
    def of(cls, name: str, tensor: Tensor, changing: bool = False) -> Range:
        """All elements of a tensor that is not cut."""
        spec = TensorSpec.of(tensor)
        whole = TensorMetadata.of(tensor.dtype, spec)
        return cls(name, 0, whole.numel, whole, spec.flatten(tensor), changing)


Ranges = dict[str, tuple[Natural, Natural]]


class Layout(Strict):
    """How the ranks that wrote a snapshot shared the model.

    Attributes:
        stage: of sharding, 0 to 3, as in :data:`hvd_ckpt.utils.text.STAGES`.
        pipeline_stages, tensor: numbers of stages and parts; rank ``(stage * replicas + replica) * tensor + part`` is that of a
            part.
        apart: whether ranks have weights and buffers of their own, between which there are averages.
    """

    stage: Annotated[int, Field(ge=0, le=3)] = 0
    pipeline_stages: Annotated[int, Field(ge=1, le=MAX_RANKS)] = 1
    tensor: Annotated[int, Field(ge=1, le=MAX_RANKS)] = 1
    apart: bool = False


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
        layout: how the ranks shared the model.
        files: every other file of the snapshot.
        ranges: for each rank, by tensor, the first and last + 1 element of the range in its safetensors file.
        tensors: all tensors, by name.
        aliases: names of tied weights, and the name each is stored under.
    """

    format: Literal["hvd_ckpt snapshot"]
    version: Literal[3]
    step: Annotated[int, Field(ge=0, le=MAX_STEP)]
    ranks: Annotated[int, Field(ge=1, le=MAX_RANKS)]
    time: str
    libraries: dict[str, str]
    layout: Layout
    files: dict[str, FileEntry]
    ranges: tuple[Ranges, ...]
    tensors: dict[str, TensorMetadata]
    aliases: dict[str, str]

    @property
    def replicas(self) -> int:
        """Number of ranks on each stage and part."""
        return self.ranks // (self.layout.pipeline_stages * self.layout.tensor)

    @model_validator(mode="after")
    def _has_each_file_and_element_once(self) -> Manifest:
        names = {REPLICATED}
        if len(self.files) >= self.ranks:  # or this would be long
            names.update(name for rank in range(self.ranks) for name in files_of(rank))
        if names != set(self.files):
            odd = min(names ^ set(self.files))
            raise ValueError(
                f"files are not those of a snapshot of {self.ranks} ranks: {shown(odd)} is missing or unknown"
            )
        if len(self.ranges) != self.ranks:
            raise ValueError(f"ranges are those of {len(self.ranges)} ranks, and there are {self.ranks}")
        if self.ranks % (self.layout.pipeline_stages * self.layout.tensor):
            raise ValueError(
                f"{self.ranks} ranks are not those of {self.layout.pipeline_stages} pipeline stages and {self.layout.tensor} parts"
            )
        for name in self.by_tensor.keys() - self.tensors.keys():
            raise ValueError(f"ranges has {shown(name)}, and tensors has not")
        for name, tensor in self.tensors.items():
            # In order, each range must begin where the last one ended: no gap and no overlap.
            reached = 0
            for start, stop, _ in self.by_tensor.get(name, ()):
                if start != reached or stop <= start:
                    break
                reached = stop
            if reached != tensor.numel:
                raise ValueError(f"the ranges do not have each element of {shown(name)} once")
        for alias, name in self.aliases.items():
            if f"weights/{alias}" in self.tensors or f"weights/{name}" not in self.tensors:
                raise ValueError(
                    f"aliases has {shown(alias)} of {shown(name)}, which does not fit the weights"
                )
        return self

    @functools.cached_property
    def by_tensor(self) -> dict[str, list[tuple[int, int, int]]]:
        """The ranges of each tensor, in order: first and last + 1 element, and the rank that has it."""
        found: dict[str, list[tuple[int, int, int]]] = {}
        for rank, ranges in enumerate(self.ranges):
            for name, (start, stop) in ranges.items():
                found.setdefault(name, []).append((start, stop, rank))
        return {name: sorted(ranges) for name, ranges in found.items()}

    def all_of(self, name: str) -> Range:
        """All elements of a tensor, to read them as they lie there."""
        return Range(name, 0, self.tensors[name].numel, self.tensors[name])

    def names(self, kind: str) -> dict[str, str]:
        """The tensors of a kind: the names of parameters or buffers, and those of the tensors."""
        return {name[len(kind) + 1 :]: name for name in self.tensors if name.startswith(f"{kind}/")}

    @classmethod
    def parse(cls, content: bytes) -> Manifest:
        """The manifest in the content of its file. Raises Wrong if it is not one, or damaged."""
        document = document_of(content)
        if document.get("version") in (1, 2):
            raise Wrong("an earlier version wrote it: convert it with 'hvd-ckpt export --convert OLD NEW'")
        return cls.of(document)

    @classmethod
    def of(cls, document: dict[str, Any]) -> Manifest:
        """The manifest of a document, without its own hash. Raises Wrong if it is not one."""
        return parse_json(cls, json.dumps(document).encode(), _GIVE, DAMAGED, MAX_MANIFEST_BYTES)

    def encode(self) -> bytes:
        """The content of its file. Raises Wrong if it is larger than it may be."""
        document = self.model_dump(mode="json", exclude_none=True)
        text = dumps({**document, "sha256": _hash_of(document)}).encode()
        if len(text) > MAX_MANIFEST_BYTES:
            raise Wrong(
                f"the manifest would be larger than {MAX_MANIFEST_BYTES >> 20} MiB: tie fewer weights"
            )
        return text


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.pt"


def tensors_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def files_of(rank: int) -> tuple[str, str]:
    """Names of the files that each rank writes."""
    return rank_file(rank), tensors_file(rank)


def document_of(content: bytes) -> dict[str, Any]:
    """The document in the content of a manifest's file. Raises Wrong unless it is one, as it was written."""
    document = loads(content, _GIVE, DAMAGED, MAX_MANIFEST_BYTES)
    if not isinstance(document, dict) or document.get("format") != "hvd_ckpt snapshot":
        raise Wrong(f'it does not say "format": "hvd_ckpt snapshot": {_GIVE}')
    if document.pop("sha256", None) != _hash_of(document):
        raise Wrong(f"its content is not what was written (its SHA-256 differs): {DAMAGED}")
    return document


def _hash_of(document: dict[str, Any]) -> str:
    # Of the content and not of the text: the file may be indented in another way and keep its hash.
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
