"""Split layers: modules of a model get another class, and their parameters keep a slice.

Modules, names, ties, hooks and parameter objects remain the same. ``nn.Linear`` and the transposed ``Conv1D`` of transformers are
column or row parallel, ``nn.Embedding`` and the head are vocabulary parallel, and an attention module computes with its part of
the heads. With sequence parallelism a block computes with its part of the positions.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from hvd_ckpt.processes import parts
from hvd_ckpt.processes.grid import current
from hvd_ckpt.tensor.functions import (
    enter,
    enter_positions,
    gather_last,
    leave,
    leave_positions,
    share,
)
from hvd_ckpt.tensor.head import SplitVocabulary
from hvd_ckpt.tensor.random_state import WholeDraws, end_split
from hvd_ckpt.utils.cuts import Cut, cut_of, mark

_CUTS, _EDGES = "_hvd_ckpt_cuts", "_hvd_ckpt_edges"


class Edges(NamedTuple):
    """The functions that lead into what a module computes with its part, and out of it."""

    enter: Callable[[Tensor], Tensor]
    leave: Callable[[Tensor], Tensor]


WHOLE, POSITIONS = Edges(enter, leave), Edges(enter_positions, leave_positions)


def cuts_in(module: nn.Module) -> dict[str, Cut]:
    """The cuts of the module's own parameters, by name; empty for a module that is not split."""
    cuts: dict[str, Cut] = module.__dict__.get(_CUTS, {})
    return cuts


def is_transposed(module: nn.Module) -> bool:
    """Whether a linear layer's weight is (inputs, outputs), as in transformers' ``Conv1D``."""
    return type(module).__name__ == "Conv1D"


def split(module: nn.Module, kind: str, cuts: dict[str, Cut], edges: Edges) -> None:
    """Makes a module parallel: its parameters keep this part's slices, and its class computes with them.

    Args:
        kind: of :data:`FORWARDS`.
        edges: lead into what it computes with its part; ``unchanged`` where an attention module around it has done so.
    """
    grid = current()
    for name, cut in cuts.items():
        parameter = module.get_parameter(name)
        if cut_of(parameter) is None:  # else a tied one, which is cut already
            with torch.no_grad():
                parameter.data = cut.of(parameter.data, grid.tensor, grid.part)
            mark(parameter, cut)
    module.__dict__[_CUTS], module.__dict__[_EDGES] = cuts, edges
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
            mark(self.get_parameter(name), cut)

    members |= {"__reduce_ex__": reduce, "__setstate__": setstate}
    members |= {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(base.__name__, (base,), members)


def _new(base: Any, kind: str) -> nn.Module:
    made: Any = _parallel(base, kind)
    module: nn.Module = made.__new__(made)
    return module


def _edges(module: nn.Module) -> Edges:
    edges: Edges = module.__dict__[_EDGES]
    return edges


def _linear(module: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    weight = module.weight.t() if is_transposed(module) else module.weight
    return functional.linear(x, weight, bias)


def _column(base: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    def forward(self: Any, x: Tensor) -> Tensor:
        """This part's outputs, from whole inputs."""
        return _linear(self, _edges(self).enter(x), self.bias)

    return {"forward": forward}


def _row(base: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    def forward(self: Any, x: Tensor) -> Tensor:
        """Whole outputs, from this part's inputs; the bias is added once, after the sum."""
        total = _edges(self).leave(_linear(self, x, None))
        end_split()
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
        scores = _linear(self, _edges(self).enter(x), self.bias)
        cut, count = cuts_in(self)["weight"], current().tensor
        return gather_last(scores, [cut.length(count, part) for part in range(count)])

    return {"forward": embed if issubclass(base, nn.Embedding) else score, "vocabulary": vocabulary_of}


def vocabulary_of(module: nn.Module) -> SplitVocabulary:
    """This part's slice of the vocabulary of a vocabulary parallel layer."""
    grid, cut = current(), cuts_in(module)["weight"]
    return SplitVocabulary(*cut.ranges(grid.tensor, grid.part)[0], cut.size)


def _heads(base: Any) -> dict[str, Callable[..., Any]]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        edges, entered = _edges(self), dict[int, Tensor]()

        def into(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if edges.enter is enter_positions and not (value.dim() == 3 and value.is_floating_point()):
                return value  # a mask, of all positions
            # Query, key and value are often one tensor. Entered once, its gradient is summed over the parts once.
            if id(value) not in entered:
                entered[id(value)] = edges.enter(value)
            return entered[id(value)]

        args = tuple(map(into, args))
        kwargs = {name: into(value) for name, value in kwargs.items()}
        if not self.training:
            return base.forward(self, *args, **kwargs)
        with WholeDraws():
            return base.forward(self, *args, **kwargs)

    return {"forward": forward}


_summed: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()  # by their ids


def _block(base: Any) -> dict[str, Callable[..., Any]]:
    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The outputs for this part's positions."""
        for parameter in self.parameters():
            # Each part has the gradient of its own positions. The first of a copy of the model registers its own hooks.
            new = parameter.requires_grad and _summed.get(id(parameter)) is not parameter
            if new and cut_of(parameter) is None:
                parameter.register_hook(parts.add)
                _summed[id(parameter)] = parameter
        edges = _edges(self)
        with parts.inside("sequence"), WholeDraws(positions=True):
            result = base.forward(self, edges.enter(x), *args, **kwargs)
        if isinstance(result, tuple):
            return edges.leave(result[0]), *result[1:]
        return edges.leave(result)

    return {"forward": forward}


def _features(base: Any, method: str = "forward") -> dict[str, Callable[..., Any]]:
    def draws(self: Any, *args: Any, **kwargs: Any) -> Any:
        with WholeDraws():
            return getattr(base, method)(self, *args, **kwargs)

    return {method: draws}


def _xlnet(base: Any) -> dict[str, Callable[..., Any]]:
    def forward(self: Any, h: Tensor, g: Tensor | None, *args: Any, **kwargs: Any) -> Any:
        return base.forward(self, enter(h), None if g is None else enter(g), *args, **kwargs)

    def post_attention(self: Any, h: Tensor, attn_vec: Tensor, residual: bool = True) -> Any:
        # The residual connection is whole on each part, and its gradient joins those that are summed where h enters.
        attn_out = self.dropout(leave(torch.einsum("ibnd,hnd->ibh", attn_vec, self.o)))
        if residual:
            attn_out = attn_out + share(h, current().tensor)
        return self.layer_norm(attn_out)

    return {**_features(base, "rel_attn_core"), "forward": forward, "post_attention": post_attention}


FORWARDS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "column": _column,
    "row": _row,
    "vocabulary": _vocabulary,
    "heads": _heads,
    "features": _features,
    "block": _block,
    "xlnet": _xlnet,
}
