"""Regions: the code around split layers, in which each function is told what the parts have whole and what they share.

Each tensor in a region is of one kind (:mod:`.functions`): whole, a share of the positions, or split by heads or features. A
function of whole tensors gives a whole one, on all parts with the same gradient. Where a whole tensor meets another kind, each part
has the gradient of its own heads, features or positions. So the whole tensor *enters* there: its gradient is summed over the parts,
whichever module holds it (a parameter of a norm of queries, a low-rank adapter, a memory that all positions attend to).
"""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hvd_ckpt.parallel.tensor.functions import (
    SHARE,
    SPLIT,
    WHOLE,
    enter,
    enter_positions,
    kind_of,
    mark_kind,
)
from hvd_ckpt.parallel.tensor.random_state import DRAWS
from hvd_ckpt.processes import parts
from hvd_ckpt.recompute.calls import call_name, map_tensors, tensors_in
from hvd_ckpt.utils.cuts import cut_of
from hvd_ckpt.utils.torch_private import DisableTorchFunction, sequence_number

_running = threading.local()  # autograd recomputes in threads of its own


def active() -> Region | None:
    """The innermost region that runs on this thread."""
    region: Region | None = getattr(_running, "region", None)
    return region


class Region(TorchFunctionMode):
    """A context in which whole tensors enter where they meet others, and random numbers are slices of those of the whole.

    Args:
        default: kind of the tensors from outside.
    """

    def __init__(self, default: int = WHOLE) -> None:
        super().__init__()
        self.default = default
        self._outer: Region | None = None
        self._start = 0  # number of the first node of autograd in the outermost region
        self._kinds: dict[Any, int] = {}  # of nodes of autograd
        # What has entered, with the tensor that its identity stands for. Parameters enter once for all regions inside
        # one another, other tensors for each, since these take memory as long as they are here.
        self._parameters: dict[tuple[int, bool], tuple[Tensor, Tensor]] = {}
        self._values: dict[tuple[int, bool], tuple[Tensor, Tensor]] = {}

    def __enter__(self) -> Region:
        self._outer = outer = active()
        self._values = {}
        if outer is None:
            self._parameters, self._kinds, self._start = {}, {}, sequence_number()
        else:
            self._parameters, self._kinds, self._start = outer._parameters, outer._kinds, outer._start
        _running.region = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        _running.region = self._outer
        self._outer, self._parameters, self._values, self._kinds = None, {}, {}, {}
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with DisableTorchFunction():
            kinds = [self.kind(tensor) for tensor in tensors_in(args, kwargs)]
            kind = functools.reduce(operator.or_, kinds, WHOLE)
            if kind and WHOLE in kinds and torch.is_grad_enabled():
                args, kwargs = map_tensors(self._entered, Tensor, (args, kwargs))
        draw = DRAWS.get(func) if kind & SPLIT or kind == SHARE else None
        if draw is not None:
            func = functools.partial(draw, kind)
        result = func(*args, **kwargs)
        with DisableTorchFunction():
            changed = args[:1] if call_name(func) == "__setitem__" else ()
            for tensor in tensors_in(result, changed):
                self.note(tensor, kind)
        return result

    def note(self, tensor: Tensor, kind: int) -> None:
        """Says of which kind a tensor is."""
        if not isinstance(tensor, torch.nn.Parameter):
            mark_kind(tensor, kind)
            if tensor.grad_fn is not None:
                self._kinds[tensor.grad_fn] = kind

    def kind(self, tensor: Tensor) -> int:
        """The kind of a tensor: the one that was noted, or that of what it has been computed from."""
        known = kind_of(tensor)
        if known is None and (isinstance(tensor, torch.nn.Parameter) or cut_of(tensor) is not None):
            return WHOLE if cut_of(tensor) is None else SPLIT
        with DisableTorchFunction():
            node = tensor.grad_fn
        if node is None or (known is not None and (not known or node in self._kinds)):
            return self.default if known is None else known
        # Inside an autograd function its result was noted, and the function itself was not.
        return self._kind_of_node(node, self.default if known is None else known)

    def _kind_of_node(self, node: Any, outside: int) -> int:
        """The kind of what a function computes that the mode has not seen: an autograd function, which PyTorch shows to no mode."""
        known = self._kinds.get(node, getattr(node, "hvd_ckpt_kind", None))
        if known is not None:
            return int(known)
        if type(node).__name__ == "AccumulateGrad":
            return self.kind(node.variable)
        if node._sequence_nr() < self._start:
            return outside
        following = [other for other, _ in node.next_functions]
        kinds = [WHOLE if other is None else self._kind_of_node(other, self.default) for other in following]
        kind = functools.reduce(operator.or_, kinds, WHOLE)
        whole = {place for place, other in enumerate(following) if other is not None and not kinds[place]}
        if kind and whole:
            # Nothing can enter before a function that has run. Its gradients are summed as they leave it instead.
            node.register_hook(functools.partial(_sum_gradients, whole))
        self._kinds[node] = kind
        return kind

    def _entered(self, tensor: Tensor) -> Tensor:
        return self.enter(tensor) if self.kind(tensor) == WHOLE else tensor

    def enter(self, tensor: Tensor) -> Tensor:
        """The tensor where it meets others; a share of the positions becomes all of them."""
        shared = self.kind(tensor) == SHARE
        if not shared and not (tensor.requires_grad and torch.is_grad_enabled()):
            return tensor
        memory = self._parameters if isinstance(tensor, torch.nn.Parameter) else self._values
        place = id(tensor), torch.is_grad_enabled()
        if place not in memory:
            entered = enter_positions(tensor) if shared else enter(tensor)
            memory[place] = tensor, entered
        return memory[place][1]


def _sum_gradients(
    places: set[int], inputs: Sequence[Tensor | None], outputs: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    return tuple(
        parts.add(gradient) if gradient is not None and place in places else gradient
        for place, gradient in enumerate(inputs)
    )
