"""Engines that are wrong on purpose, each in one way that a comparison has to find."""

from __future__ import annotations

import time

from torch import nn

from hvd_ckpt.comparison.engines import Engine, launched_rank_and_size


class Alone(Engine):
    """Reduces nothing: every rank goes its own way."""

    title = "alone"

    def start(self, folder):
        self.rank, self.size = launched_rank_and_size()

    def wrap(self, model, optimizer):
        return model, optimizer


class Forgetful(Alone):
    """Starts every rank at equal weights, then trains on each alone."""

    def wrap(self, model, optimizer):
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.01)
        return model, optimizer


class Sleeper(Alone):
    """Rank 1 never comes back from its second step of a recomputed cell."""

    def checkpoint_sequential(self, functions, segments, *inputs, **keywords):
        self.calls = getattr(self, "calls", 0) + 1
        if self.rank == 1 and self.calls == 2:
            time.sleep(3600)
        return super().checkpoint_sequential(functions, segments, *inputs, **keywords)


class Raiser(Alone):
    """Rank 1 raises, on several lines, in a recomputed cell; rank 0 waits for it."""

    def checkpoint_sequential(self, functions, segments, *inputs, **keywords):
        if self.rank == 1:
            raise ArithmeticError("planted on rank 1\nand more that nobody wants in a table")
        time.sleep(3600)


class Broken(Alone):
    """Does not even start."""

    def start(self, folder):
        super().start(folder)
        raise RuntimeError("no network for you")
