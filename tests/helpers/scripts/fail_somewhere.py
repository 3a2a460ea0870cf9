"""``hvd-ckpt train`` whose rank 1 fails in its third step, at the place in the first argument; the others are flags."""

from __future__ import annotations

import itertools
import os
import sys
from typing import Any

import torch

from hvd_ckpt.app.cli.main import main
from hvd_ckpt.data.objectives import NextOrHiddenToken
from hvd_ckpt.snapshots import writer


def fails_on_its_third_call(function: Any) -> Any:
    calls = itertools.count(1)

    def called(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 3:
            raise RuntimeError("planted on rank 1")
        return function(*args, **kwargs)

    return called


class Fails(torch.autograd.Function):
    """The identity, whose third backward pass fails."""

    fail = staticmethod(fails_on_its_third_call(lambda: None))

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        Fails.fail()
        return gradient


place, *flags = sys.argv[1:]
rank = next(int(os.environ[name]) for name in ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK") if name in os.environ)
if rank == 1 and place == "backward":
    loss = NextOrHiddenToken.loss
    NextOrHiddenToken.loss = lambda *args: Fails.apply(loss(*args))
elif rank == 1:
    assert place == "writer"
    writer.write_content = fails_on_its_third_call(writer.write_content)
sys.argv[1:] = ["train", *flags]
main()
