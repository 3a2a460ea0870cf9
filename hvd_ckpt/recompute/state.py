"""State that a forward pass depends on besides its arguments, noted in the first pass and restored for each recomputation.

A recomputation must compute what the first pass computed, and leave no trace. The state may have changed in between, and some of it
changes each time the code runs:

- the random state of PyTorch, on the CPU and the devices of the arguments, of Python, of NumPy and of generators within reach;
- the training flags of the modules;
- which parameters and other tensors require gradients (a parameter may be frozen for the forward pass alone);
- the tensors that are parameters and buffers of the modules;
- those that the first pass has written: buffers, attributes of modules, parameters (:mod:`.written`);
- small buffers that were written after it.

The settings and modes around it are those of :mod:`.environment`.
"""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from hvd_ckpt.recompute.written import Copied, Namespace, Written, namespaces_of
from hvd_ckpt.utils.frames import aside
from hvd_ckpt.utils.random_sources import Source, drawing_from, global_sources, source_of, torch_sources
from hvd_ckpt.utils.torch_private import DisableTorchFunction


@contextlib.contextmanager
def requiring_grad(tensors: Sequence[Tensor], flags: Sequence[bool]) -> Iterator[None]:
    """A context in which the leaves among ``tensors`` require gradients as ``flags`` say. Afterwards, they do as before.

    A flag is set only where it differs. Hooks on a parameter and on the node that accumulates its gradient stay.
    """
    now = requires_grad_of(tensors)
    try:
        if now != flags:
            _require_grad(tensors, flags)
        yield
    finally:
        # Compared again: what has run may have frozen a parameter by itself, and not have come to the end.
        if requires_grad_of(tensors) != now:
            _require_grad(tensors, now)


def requires_grad_of(tensors: Iterable[Tensor]) -> list[bool]:
    """Whether each of some tensors requires a gradient."""
    # No mode and no subclass sees that the flags are read or set.
    with DisableTorchFunction():
        return [tensor.requires_grad for tensor in tensors]


def _require_grad(tensors: Iterable[Tensor], flags: Iterable[bool]) -> None:
    with DisableTorchFunction():
        for tensor, flag in zip(tensors, flags):
            if tensor.requires_grad != flag and tensor.is_leaf:
                tensor.requires_grad = flag


def _fill(named: dict[str, Tensor | None], values: dict[str, Tensor | None]) -> None:
    named.clear()
    named.update(values)


class ForwardState:
    """The state around one first pass, for its recomputations.

    Args:
        arguments: the tensors among the arguments of the pass.
        modules: all modules that the pass can reach.
        generators: objects that draw random numbers and that the pass can reach.
        tensors: tensors that the pass can reach and no module has. Small ones that it writes are restored.
        preserve_random: whether to restore random states.
        learn: whether to copy and compare all buffers, to learn which of them this pass writes.
    """

    # Over time:
    #
    #     ForwardState()   notes training flags, and which tensors require gradients
    #     first_pass()     notes random states, and copies tensors that may be written
    #       note_written()   compares: which tensors are written, and what their values were before
    #     recomputation()  gives modules scratch copies of those values, runs, and gives the tensors back; any number of times
    #
    # note_written() also runs before a recomputation that comes in the middle of the first pass (a function may ask for gradients
    # of its own), since what the pass has written so far is what that recomputation must not see.

    def __init__(
        self,
        arguments: Sequence[Tensor],
        modules: Sequence[nn.Module],
        generators: Sequence[Any],
        tensors: Sequence[Tensor],
        preserve_random: bool,
        learn: bool,
    ) -> None:
        self._arguments, self._modules = arguments, modules
        self._modes = [(module, module.training) for module in modules]
        # Others may stand in their places by then, as after torch.func.functional_call().
        self._members: list[tuple[dict[str, Any], dict[str, Any]]] = [
            (named, dict(named)) for module in modules for named in (module._parameters, module._buffers)
        ]  # of scripted modules, too, which keep them
        self._leaves = [
            tensor for _, before in self._members for tensor in before.values() if tensor is not None
        ]
        self._leaves += tensors
        self._flags = requires_grad_of(self._leaves)
        # Other tensors that modules have as attributes, and whether they require gradients. Weakly, as a module may keep a large
        # result of each pass, which must not live until the backward pass.
        self._attributes: list[tuple[weakref.ref[Tensor], bool]] = []
        self._tensors = tensors
        self._learn = learn
        self._preserve_random, self._generators = preserve_random, generators
        self._random: list[Source] = []
        self._spaces: list[Namespace] | None = None  # while the pass is running
        self._written: list[Written] = []
        self._copied: list[Copied] = []
        self.lost: list[str] = []
        """Names of written tensors whose earlier values are unknown."""
        self.initialized = False
        """Whether the pass has initialized lazy tensors, so that no later pass will be like it."""

    @contextlib.contextmanager
    def first_pass(self) -> Iterator[None]:
        """A context for the first run of the function."""
        with DisableTorchFunction():
            self._spaces = namespaces_of(self._modules, self._tensors, self._learn)
            self._attributes = [
                (weakref.ref(tensor), tensor.requires_grad)
                for space in self._spaces
                if space.kind == "attributes"
                for _, tensor, _ in space.tensors
                if tensor.is_leaf
            ]
        generators = {id(generator): generator for generator in self._generators}
        generators.update(
            (id(generator), generator) for space in self._spaces for generator in space.generators
        )
        always: list[Source] = []
        others: list[Source] = []
        if self._preserve_random:
            always = torch_sources(self._arguments)
            others = [*global_sources(), *map(source_of, generators.values())]
        self._random = always + others
        self._arguments = ()
        try:
            yield
        finally:
            self.note_written()
            self._copied = [copied for space in self._spaces for copied in space.copied()]
            self._spaces = None
            # A source from which the pass has drawn nothing is not drawn from again either, so it need not be restored.
            self._random = always + [source for source in others if source.moved()]

    def note_written(self) -> bool:
        """Finds the tensors that the pass has written so far. Must be called before each recomputation.

        Returns:
            Whether the pass is still running.
        """
        if self._spaces is None:
            return False
        with DisableTorchFunction():
            self._written = [written for space in self._spaces for written in space.written()]
        self.lost = [written.name for written in self._written if written.lost]
        self.initialized = any(written.initialized for written in self._written)
        return True

    @contextlib.contextmanager
    def recomputation(self) -> Iterator[None]:
        """A context for each later run of the function."""
        with contextlib.ExitStack() as restore:
            for module, training in self._modes:
                if module.training != training:
                    restore.callback(setattr, module, "training", module.training)
                    # Not by train(), which would set all submodules and may do more in a class that overrides it.
                    module.training = training
            for named, before in self._members:
                if len(named) != len(before) or not all(map(operator.is_, named.values(), before.values())):
                    restore.callback(_fill, named, dict(named))
                    _fill(named, before)
            # Autograd accumulates by the flags of that time and not of the forward pass, so they are as they were once this ends.
            tensors, flags = self._leaves, self._flags
            if self._attributes:
                alive = [
                    (tensor, flag)
                    for reference, flag in self._attributes
                    if (tensor := reference()) is not None
                ]
                tensors = [*tensors, *(tensor for tensor, _ in alive)]
                flags = [*flags, *(flag for _, flag in alive)]
            restore.enter_context(requiring_grad(tensors, flags))
            restore.enter_context(drawing_from(self._random))
            with DisableTorchFunction():
                changed = [copied.written() for copied in self._copied if copied.is_changed()]
            if self._written or changed:
                scratch: dict[int, Tensor] = {}
                with aside():
                    for written in (*self._written, *changed):
                        restore.callback(written.give(scratch))
            yield
