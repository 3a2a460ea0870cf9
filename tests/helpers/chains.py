"""Chains of blocks for a solver."""

from __future__ import annotations

import random

from hvd_ckpt.planning.chain import Block, Choice

MB = 1_000_000


def block(*choices: tuple[float, int, int, int], output=2, forward=1.0, working=3, joins=True) -> Block:
    """Choices are (seconds, kept, forward peak, backward peak)."""
    return Block(tuple(Choice(*choice) for choice in choices), output, forward, working, joins)


def network(rng: random.Random, blocks: int, choices: int, joins: bool) -> list[Block]:
    """Bytes and seconds as measured ones are: the less is kept, the more is replayed."""
    chain = []
    for _ in range(blocks):
        output, forward = rng.randint(2 * MB, 8 * MB), rng.uniform(0.01, 0.03)
        inside = output * rng.randint(8, 30)
        ways = []
        for number in range(choices):
            share = 1 - number / max(choices - 1, 1) if choices > 1 else 1.0
            kept = int(output + inside * share * rng.uniform(0.9, 1.1))
            seconds = forward * (3 + (1 - share) * rng.uniform(0.5, 1.2))
            ways.append((seconds, kept, kept + output, kept + inside + 2 * output))
        chain.append(block(*ways, output=output, forward=forward, working=3 * output, joins=joins))
    return chain
