"""Memory and time of sharding: the command of :mod:`benchmarks.shard`."""

from benchmarks.shard.command import shard as shard
