"""Optimizers of tests that are given options of shards by name, beside those of ``DistributedOptimizer``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import hvd_ckpt as hc

NAMES = {field.name for field in dataclasses.fields(hc.Shard)} - {"states"}


def in_shard(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, with those of shards in an ``hc.Shard``."""
    how = {name: value for name, value in options.items() if name in NAMES}
    others = {name: value for name, value in options.items() if name not in how}
    return {**others, "shard": hc.Shard(options.get("shard", "none"), **how)} if how else others


def distribute(*arguments: Any, **options: Any) -> Any:
    """A ``DistributedOptimizer`` with these options."""
    return hc.DistributedOptimizer(*arguments, **in_shard(options))
