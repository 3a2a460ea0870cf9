"""A workload on a text, of which a part is held out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from hvd_ckpt.app.compare.runner.workloads import Gpt

STRIDE = 7919  # windows from one sample to the next; prime, so that all windows have their turn
HELD_OUT = 512  # windows, the last ones


@dataclass(frozen=True)
class Text(Gpt):
    """A GPT on the bytes of a text, a file or by default the source text of Python's library."""

    name: ClassVar[str] = "text"
    changes: ClassVar[bool] = True

    text: str = ""

    @property
    def tokens(self) -> Any:
        return _tokens(self.text)

    def windows(self, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Inputs and targets of these windows of the text."""
        starts = [number * self.length for number in numbers]
        cut = [self.tokens[start : start + self.length + 1].astype("int64") for start in starts]
        tokens = torch.stack([torch.from_numpy(window) for window in cut])
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def draw(self, number: int, seed: int) -> tuple[Tensor, Tensor]:
        trained = (len(self.tokens) - 1) // self.length - HELD_OUT
        first = number * self.batch
        return self.windows([(seed + each) * STRIDE % trained for each in range(first, first + self.batch)])

    def held_out(self) -> tuple[Tensor, Tensor]:
        every = (len(self.tokens) - 1) // self.length
        return self.windows(range(every - HELD_OUT, every))


@cache
def _tokens(text: str) -> Any:
    from hvd_ckpt.app.datasets.tokens import Tokens

    return Tokens(text or None).array
