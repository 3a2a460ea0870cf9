"""Engines that are wrong on purpose, each in one way that a comparison has to find."""

from __future__ import annotations

import random
import time

import horovod.torch as hvd

from hvd_ckpt.app.compare.runner.engine import Engine
from hvd_ckpt.app.compare.runner.engines import HvdCkpt
from hvd_ckpt.processes.launchers import launched_rank, launched_size


class Alone(Engine):
    """Reduces nothing and starts nowhere in particular: every rank goes its own way."""

    def start(self, folder):
        self.rank, self.size = launched_rank(), launched_size()

    def wrap(self, model, optimizer, passes=1):
        return model, optimizer


class Faulty(Alone):
    """Rank 1 never ends its second step with the reentrant variant; with the other it raises, on two lines."""

    calls = 0

    def checkpoint_sequential(self, functions, segments, *inputs, use_reentrant, **shared):
        self.calls += 1
        if not use_reentrant and self.rank == 1:
            raise ArithmeticError("planted on rank 1\nand more that nobody wants in a table")
        if not use_reentrant or (self.rank == 1 and self.calls == 2):
            time.sleep(3600)
        return super().checkpoint_sequential(
            functions, segments, *inputs, use_reentrant=use_reentrant, **shared
        )


class Broken(Alone):
    """Does not even start."""

    def start(self, folder):
        super().start(folder)
        raise RuntimeError("no network for you")


class Absent(Alone):
    """Needs what no machine has."""

    @classmethod
    def unavailable(cls):
        return "it was planted so"


class Twice(HvdCkpt):
    """Reduces every gradient again, in an order left to chance: the weights are right all the same."""

    def wrap(self, model, optimizer, passes=1):
        model, optimizer = super().wrap(model, optimizer, passes)
        step = optimizer.step

        def step_again():
            optimizer.synchronize()
            parameters = list(model.named_parameters())
            random.SystemRandom().shuffle(parameters)
            handles = [hvd.allreduce_async_(parameter.grad, name=name) for name, parameter in parameters]
            for handle in handles:
                hvd.synchronize(handle)
            with optimizer.skip_synchronize():
                step()

        optimizer.step = step_again
        return model, optimizer
