"""Split layers: modules of a model get another class, and their parameters keep a slice.

Modules, names, ties, hooks and parameter objects remain the same. ``nn.Linear`` and the transposed ``Conv1D`` of transformers are
column or row parallel, ``nn.Embedding`` and the head are vocabulary parallel, and an attention module computes with its part of
the heads. With sequence parallelism a block computes with its part of the positions. What runs in between, runs in a region.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from hvd_ckpt.parallel.tensor.functions import (
    ENTERED,
    SHARE,
    SPLIT,
    WHOLE,
    enter,
    gather_last,
    join_positions,
    kind_of,
    leave,
    leave_positions,
    mark_kind,
    split_positions,
    unchanged,
)
from hvd_ckpt.parallel.tensor.region import Region, active
from hvd_ckpt.processes import parts
from hvd_ckpt.processes.grid import current
from hvd_ckpt.recompute.calls import tensors_in
from hvd_ckpt.utils.cuts import Cut, cut_of, mark
from hvd_ckpt.utils.frames import is_recomputing
from hvd_ckpt.utils.torch_private import assert_async

_CUTS, _PLACE = "_hvd_ckpt_cuts", "_hvd_ckpt_place"

Result = TypeVar("Result")


class Place(NamedTuple):
    """Where a module is: the kind of the tensors around it, and of a block also its name and the blocks that it belongs to."""

    kind: int = WHOLE
    name: str = ""
    blocks: Blocks | None = None


class Blocks:
    """Consecutive blocks: positions are split where the first one begins, and joined where the last one ends.

    While the model runs, blocks must be called in this order, since in between a block hands its own positions on.

    Args:
        names: in the order of the model's modules.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names, self._reached = list(names), -1
        self._running = False  # the model, and not a block by itself

    def enter(self, name: str, x: Tensor) -> Tensor:
        """This part's positions of a block's input."""
        place = self.names.index(name)
        if self._running and len(self.names) > 1 and not is_recomputing():
            if place <= self._reached or (place > 0) == (self._reached < 0):
                self._refuse(name)
            self._reached = -1 if name == self.names[-1] else place
        return split_positions(x) if place == 0 else unchanged(x)

    def leave(self, name: str, x: Tensor) -> Tensor:
        """A block's output, of all positions if it is the last one."""
        return join_positions(x) if name == self.names[-1] else unchanged(x)

    def watch(self, model: nn.Module) -> None:
        """Checks the order in which the model calls its blocks whenever it runs."""
        model.register_forward_pre_hook(self._begin, prepend=True)
        model.register_forward_hook(self._end, always_call=True)

    def _begin(self, model: nn.Module, args: Any) -> None:
        self._running, self._reached = True, -1

    def _end(self, model: nn.Module, args: Any, result: Any) -> None:
        self._running = False
        if self._reached >= 0 and result is not None:  # else it has failed
            self._refuse("")

    def _refuse(self, name: str) -> None:
        called = f"called {name!r}" if name else "ended"
        after = repr(self.names[self._reached]) if self._reached >= 0 else "no other block"
        raise ValueError(
            f"tensor_parallel(sequence=True): the model {called} after {after}, but each of its blocks must be called once, from "
            f"{self.names[0]!r} to {self.names[-1]!r} in the order of its modules; leave sequence out"
        )


def cuts_in(module: nn.Module) -> dict[str, Cut]:
    """The cuts of the module's own parameters, by name; empty for a module that is not split."""
    cuts: dict[str, Cut] = module.__dict__.get(_CUTS, {})
    return cuts


def is_transposed(module: nn.Module) -> bool:
    """Whether a linear layer's weight is (inputs, outputs), as in transformers' ``Conv1D``."""
    return type(module).__name__ == "Conv1D"


def split(module: nn.Module, kind: str, cuts: dict[str, Cut], place: Place) -> None:
    """Makes a module parallel: its parameters keep this part's slices, and its class computes with them.

    Args:
        kind: of :data:`FORWARDS`.
    """
    grid = current()
    for name, cut in cuts.items():
        parameter = getattr(module, name)
        if cut_of(parameter) is None:  # else a tied one, which is cut already
            with torch.no_grad():
                parameter.data = cut.of(parameter.data, grid.tensor, grid.part)
            mark(parameter, cut)
    module.__dict__[_CUTS], module.__dict__[_PLACE] = cuts, place
    base: Any = type(module)
    module.__class__ = _parallel(base, kind)


@functools.cache
def _parallel(base: Any, kind: str) -> Any:
    """A class like ``base`` that computes in parallel. Copies and pickles of its modules make it by calling this again."""
    members: dict[str, Any] = dict(FORWARDS[kind](base))

    def reduce(self: nn.Module, protocol: Any) -> Any:
        return _new, (base, kind), self.__dict__.copy()

    def setstate(self: nn.Module, state: dict[str, Any]) -> None:
        nn.Module.__setstate__(self, state)  # type: ignore[no-untyped-call]
        for name, cut in cuts_in(self).items():  # a copy of a parameter knows nothing
            mark(getattr(self, name), cut)

    members |= {"__reduce_ex__": reduce, "__setstate__": setstate}
    members |= {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(base.__name__, (base,), members)


def _new(base: Any, kind: str) -> nn.Module:
    made: Any = _parallel(base, kind)
    module: nn.Module = made.__new__(made)
    return module


def _place(module: nn.Module) -> Place:
    place: Place = module.__dict__.get(_PLACE, Place())  # a slice of a Sequential has its class alone
    return place


def _region_of(module: nn.Module) -> AbstractContextManager[Region]:
    """The region that is active, or one of the module's own."""
    region = active()
    return Region(_place(module).kind) if region is None else nullcontext(region)


def _linear(module: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    weight = module.weight.t() if is_transposed(module) else module.weight
    return functional.linear(x, weight, bias)


def _column(base: Any) -> dict[str, Callable[..., Any]]:
    def forward(self: Any, x: Tensor) -> Tensor:
        """This part's outputs, from whole inputs or from a share of the positions."""
        with _region_of(self) as region:
            return _linear(self, x if region.kind(x) & (SPLIT | ENTERED) else region.enter(x), self.bias)

    def look_up(self: Any, tokens: Tensor) -> Any:
        """This part's numbers of each token."""
        with _region_of(self):
            return base.forward(self, tokens)

    return {"forward": look_up if issubclass(base, nn.Embedding) else forward}


def _row(base: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    def forward(self: Any, x: Tensor) -> Tensor:
        """Whole outputs or a share of the positions, from this part's inputs; the bias is added once, after the sum."""
        with _region_of(self) as region:
            kind = region.kind(x)
            # What was computed outside of all regions was not noted.
            marked = x if kind & SPLIT else mark_kind(x.view_as(x), kind | SPLIT)
            total = (leave_positions if kind & SHARE else leave)(_linear(self, marked, None))
            return total if self.bias is None else total + self.bias

    return {"forward": forward}


def _vocabulary(base: type[nn.Module]) -> dict[str, Any]:
    def embed(self: Any, tokens: Tensor) -> Tensor:
        """Each part looks up the tokens that it has, and the sum has all."""
        vocabulary, padding = vocabulary_of(self), self.padding_idx
        places, here = vocabulary.local(tokens)
        if padding is not None:
            padding = padding - vocabulary.start if vocabulary.start <= padding < vocabulary.stop else None
        # Row 0 stands for tokens of other parts, and is set to zero below, so that it gets no gradient from them.
        rows = functional.embedding(places, self.weight, padding)
        return leave(rows.masked_fill(~here[..., None], 0.0))

    def score(self: Any, x: Tensor) -> Tensor:
        """The scores of all tokens, gathered. ``hc.chunked_cross_entropy`` of this head gathers none."""
        scores = _linear(self, enter(x), self.bias)
        cut, count = cuts_in(self)["weight"], current().tensor
        return gather_last(scores, [cut.length(count, part) for part in range(count)])

    return {"forward": embed if issubclass(base, nn.Embedding) else score, "vocabulary": vocabulary_of}


class SplitVocabulary(NamedTuple):
    """A slice of the vocabulary: its first and last + 1 token, and the size of the whole.

    It is what :func:`hvd_ckpt.chunked_cross_entropy` asks a vocabulary parallel head for. No part ever has the logits of all
    tokens, not even of one row.
    """

    start: int
    stop: int
    size: int

    def entering(self, hidden: Tensor) -> Tensor:
        """The head's input, whose gradients are summed over the parts, once for all chunks."""
        return enter(hidden)

    def local(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Places of tokens or targets within the slice, and whether they are there; elsewhere the place is 0.

        Raises:
            IndexError: a token is not in the whole vocabulary. On a GPU it is an assertion of the device, as with a whole layer.
        """
        if tokens.device.type == "cpu" and tokens.numel():
            least, greatest = (int(bound) for bound in torch.aminmax(tokens))
            if least < 0 or greatest >= self.size:
                raise IndexError(
                    f"token {least if least < 0 else greatest} is outside of the vocabulary of {self.size} tokens, which is split "
                    f"over the parts; give tokens and targets from 0 to {self.size - 1}"
                )
        elif tokens.device.type == "cuda":
            assert_async(((tokens >= 0) & (tokens < self.size)).all(), "a token is outside of the vocabulary")
        here = (tokens >= self.start) & (tokens < self.stop)
        return (tokens - self.start).masked_fill(~here, 0), here

    def log_softmax(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logarithms of probabilities: the slice's (rows, slice), the targets' (rows, 1), and the mean of all tokens' (rows, 1).

        Two messages of three numbers a row in all. Collective over the parts.

        Args:
            logits: logits of the slice.
            targets: (rows, 1), of the whole vocabulary.
        """
        # By the maximum of all parts, so that exponentials of different slices can be added.
        shifted = logits - parts.maximum(logits.amax(-1, keepdim=True))
        place, here = self.local(targets)
        # Zero where another part has the target, so that the sum over the parts is the target's score.
        scores = shifted.gather(1, place).masked_fill(~here, 0.0)
        sums = torch.cat([shifted.exp().sum(-1, keepdim=True), scores, shifted.sum(-1, keepdim=True)], -1)
        exponentials, of_targets, of_all = torch.split(parts.add(sums), 1, -1)
        norm = exponentials.log()
        return shifted.sub_(norm), of_targets - norm, of_all / self.size - norm


def vocabulary_of(module: nn.Module) -> SplitVocabulary:
    """This part's slice of the vocabulary of a vocabulary parallel layer."""
    grid, cut = current(), cuts_in(module)["weight"]
    return SplitVocabulary(*cut.ranges(grid.tensor, grid.part)[0], cut.size)


def _region(base: Any) -> dict[str, Callable[..., Any]]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with Region(_place(self).kind) as region:
            return _known(region, base.forward(self, *args, **kwargs))

    # transformers reads the arguments of a model.
    return {"forward": functools.wraps(base.forward)(forward)}


def _heads(base: Any) -> dict[str, Callable[..., Any]]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with Region(_place(self).kind) as region:

            def all_positions(value: Any) -> Any:
                # Attention reads the number of positions, so they must be there before a layer asks for them. Masks are
                # of all positions.
                hidden = isinstance(value, Tensor) and value.dim() == 3 and value.is_floating_point()
                return region.enter(value) if hidden and region.kind(value) == SHARE else value

            args = tuple(map(all_positions, args))
            kwargs = {name: all_positions(value) for name, value in kwargs.items()}
            return _known(region, base.forward(self, *args, **kwargs))

    return {"forward": functools.wraps(base.forward)(forward)}


def _known(region: Region, result: Result) -> Result:
    """The results, after the region has seen which of its tensors they come from."""
    for tensor in tensors_in(result):
        region.kind(tensor)
    return result


def _block(base: Any) -> dict[str, Callable[..., Any]]:
    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The outputs for this part's positions."""
        _, name, blocks = _place(self)
        assert blocks is not None
        marked = mark_kind(blocks.enter(name, x), SHARE)
        for other in tensors_in(args, kwargs):
            if kind_of(other) is None:
                mark_kind(other, WHOLE)  # such as a memory to which all positions attend
        with parts.inside("sequence"), Region(SHARE) as region:
            result = _known(region, base.forward(self, marked, *args, **kwargs))
        if isinstance(result, tuple):
            return blocks.leave(name, result[0]), *result[1:]
        return blocks.leave(name, result)

    return {"forward": functools.wraps(base.forward)(forward)}


def _xlnet(base: Any) -> dict[str, Callable[..., Any]]:
    def post_attention(self: Any, h: Tensor, attn_vec: Tensor, residual: bool = True) -> Any:
        """The original's, with a sum over the parts: its projection is of parameters, and no row layer."""
        attn_out = self.dropout(leave(torch.einsum("ibnd,hnd->ibh", attn_vec, self.o)))
        return self.layer_norm(attn_out + h if residual else attn_out)

    return {**_region(base), "post_attention": post_attention}


FORWARDS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "column": _column,
    "row": _row,
    "vocabulary": _vocabulary,
    "heads": _heads,
    "features": _region,
    "block": _block,
    "xlnet": _xlnet,
}
