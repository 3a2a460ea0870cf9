"""Chains of layers that are recomputed segment by segment.

A chain of n layers in about sqrt(n) segments needs memory for the inputs of the segments and for the activations of one segment
(Chen, Xu, Zhang, Guestrin, 2016). The last segment is kept and not recomputed, since the backward pass begins with it.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hvd_ckpt.recompute.checkpoint import run_checkpointed
from hvd_ckpt.recompute.region import Chained, Options
from hvd_ckpt.utils.frames import is_recomputing

Layer = Callable[..., Any]


def checkpoint_sequential(
    functions: nn.Sequential | Iterable[Layer],
    segments: int | Sequence[int],
    *inputs: Any,
    use_reentrant: bool | None = False,
    preserve_rng_state: bool = True,
    keep_last: bool = True,
    **shared: Any,
) -> Any:
    """Runs ``functions`` one after the other on ``inputs``, and recomputes all segments but the last in the backward pass.

    Args:
        functions: an ``nn.Sequential`` or an iterable of callables. A plain tuple that a layer returns becomes the positional
            arguments of the next layer. If the layer accepts one argument but not that many, it gets the tuple itself.
        segments: the number of segments of equal length (as in PyTorch, the last one also gets the remainder), or the number of
            layers in each segment.
        inputs: the arguments of the first layer: tensors with or without gradients, or any other values.
        use_reentrant, preserve_rng_state: as in :func:`hvd_ckpt.checkpoint`.
        keep_last: whether to keep the activations of the last segment instead of recomputing them.
        shared: keyword arguments; each layer gets those that it accepts.

    Raises:
        TypeError: ``segments`` is neither an int nor a sequence of ints, or ``functions`` are not callables. Or a layer cannot
            take the number of its arguments, or no layer accepts a shared keyword argument.
        ValueError: ``segments`` is less than 1 or larger than the number of layers, or the lengths do not sum to that number.

    If the first layer of a segment raises an error in the first pass, the error is raised again with the segment and its layers in
    the message.
    """
    options = Options(use_reentrant, preserve_rng_state)
    return _run(_layers(functions), segments, keep_last, options, inputs, shared)


def split(layers: int, segments: int | Sequence[int]) -> list[int]:
    """The number of layers in each segment. An int is split as in PyTorch: the last segment gets the remainder.

    Raises:
        TypeError, ValueError: as in :func:`checkpoint_sequential`.
    """
    if isinstance(segments, int) and not isinstance(segments, bool):
        if segments < 1:
            raise ValueError(f"segments must be at least 1, got {segments}.")
        if segments > layers:
            raise ValueError(f"segments must be at most the number of layers, {layers}, got {segments}.")
        length = layers // segments
        return [length] * (segments - 1) + [layers - length * (segments - 1)]
    if not isinstance(segments, (list, tuple)):
        raise TypeError(
            f"segments must be an int or the number of layers in each segment, got {segments!r} of type "
            f"{type(segments).__name__}."
        )
    for length in segments:
        if isinstance(length, bool) or not isinstance(length, int):
            raise TypeError(
                f"The number of layers in a segment must be an int, got {length!r} in {segments!r}."
            )
        if length < 1:
            raise ValueError(f"Each segment must have at least 1 layer, got {length} in {segments!r}.")
    if sum(segments) != layers:
        raise ValueError(
            f"The segments {list(segments)!r} have {sum(segments)} layers together, but there are {layers} layers."
        )
    return list(segments)


class CheckpointSequential(nn.Sequential):
    """An ``nn.Sequential`` whose forward pass is :func:`checkpoint_sequential`.

    It holds the same modules under the same names as ``model``, so a ``state_dict`` of either loads into the other. Under
    :class:`torch.no_grad`, it runs without recomputation. It takes several inputs, and keyword arguments that the layers share.

    Args:
        model: an ``nn.Sequential`` whose class has no ``forward`` of its own, or an iterable of modules.
        segments, use_reentrant, preserve_rng_state, keep_last: as in :func:`checkpoint_sequential`.
    """

    def __init__(
        self,
        model: nn.Sequential | Iterable[nn.Module],
        segments: int | Sequence[int],
        use_reentrant: bool | None = False,
        preserve_rng_state: bool = True,
        keep_last: bool = True,
    ) -> None:
        super().__init__(_named_modules(model))
        if isinstance(model, nn.Sequential):
            # The flag of this container alone, which begins in training mode. Its modules keep theirs.
            self.training = model.training
        self.segments = segments if isinstance(segments, int) else tuple(split(len(self), segments))
        self.use_reentrant = use_reentrant
        self.preserve_rng_state = preserve_rng_state
        self.keep_last = keep_last
        # For their errors, which are better raised here than in the first step.
        split(len(self), self.segments)
        Options(use_reentrant, preserve_rng_state)

    def forward(self, *inputs: Any, **shared: Any) -> Any:
        options = Options(self.use_reentrant, self.preserve_rng_state)
        return _run(list(self), self.segments, self.keep_last, options, inputs, shared)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):  # a part of the chain has other segments, so it is a plain nn.Sequential
            return nn.Sequential(OrderedDict(list(self._modules.items())[index]))
        return super().__getitem__(index)

    def extra_repr(self) -> str:
        return f"segments={self.segments}, use_reentrant={self.use_reentrant}, keep_last={self.keep_last}"


def _run(
    layers: Sequence[Layer],
    segments: int | Sequence[int],
    keep_last: bool,
    options: Options,
    inputs: tuple[Any, ...],
    shared: dict[str, Any],
) -> Any:
    if not inputs and "input" in shared:  # PyTorch's name for the only input
        inputs = (shared.pop("input"),)
    parts = cut(layers, split(len(layers), segments), shared)
    result: Any = None
    for part in parts:
        keywords = {name: value for name, value in shared.items() if name in part.accepted_names}
        kept = keep_last and part is parts[-1]
        result = part(*inputs, **keywords) if kept else run_checkpointed(part, inputs, keywords, options)
        inputs = as_arguments(result)
    return result


@dataclass(eq=False)
class LayerSegment(Chained):
    """Consecutive layers of a chain as one function.

    Args:
        layers: the layers.
        accepted: for each layer the names of the shared keyword arguments that it accepts.
        number, count: number of this segment, from 1, and of all segments.
        first: index of its first layer in the chain.
    """

    layers: Sequence[Layer]
    accepted: Sequence[frozenset[str]]
    number: int
    count: int
    first: int

    @property
    def accepted_names(self) -> frozenset[str]:
        return frozenset().union(*self.accepted)

    def __str__(self) -> str:
        last = self.first + len(self.layers) - 1
        where = f"layer {last}" if last == self.first else f"layers {self.first} to {last}"
        names = [_name(layer) for layer in self.layers]
        shown = ", ".join(names if len(names) <= 6 else [*names[:3], "...", *names[-2:]])
        return f"segment {self.number} of {self.count} ({where}: {shown})"

    def __call__(self, *values: Any, **shared: Any) -> Any:
        result: Any = None
        for offset, (layer, accepted) in enumerate(zip(self.layers, self.accepted)):
            keywords = {name: shared[name] for name in accepted if name in shared}
            arguments = self._arguments(offset, values, keywords)
            try:
                result = layer(*arguments, **keywords)
            except Exception as error:
                # Only in the first pass: what a recomputation is given has fit before.
                if offset or is_recomputing() or not _is_misfit(error):
                    raise
                raise type(error)(
                    f"The first layer of {self} failed on what it was given, {_described(arguments)}: {error}"
                ) from error
            values = as_arguments(result)
        return result

    def _arguments(self, offset: int, values: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, ...]:
        """The arguments of a layer: each value for itself, or, if the layer does not take that many, all of them as one tuple."""
        if len(values) == 1:
            return values
        layer = self.layers[offset]
        signature = _signature(layer)
        if signature is None or _binds(signature, values, keywords):
            return values
        # A layer may have returned one structured value, a tuple. The model's own inputs came as separate arguments.
        if self.first + offset > 0 and _binds(signature, (values,), keywords):
            return (values,)
        source = "the model was given" if self.first + offset == 0 else "the layer before it returns"
        raise TypeError(
            f"In {self}, layer {self.first + offset} ({_name(layer)}) takes the arguments {signature}, but {source} "
            f"{len(values)} values{': ' * bool(values)}{_described(values)}."
        )


def _is_misfit(error: Exception) -> bool:
    """Whether an error may come from inputs that do not fit the layer.

    Subclasses of the four classes have a meaning for whoever catches them (out of memory, a lost rank, the end of a recomputation).
    They are raised unchanged.
    """
    if type(error) not in (TypeError, ValueError, IndexError, RuntimeError):
        return False
    return not re.search("out of memory|allocate memory|alloc_failed", str(error), re.IGNORECASE)


def _layers(functions: nn.Sequential | Iterable[Layer]) -> list[Layer]:
    if isinstance(functions, Mapping) or not isinstance(functions, Iterable):
        raise TypeError(
            f"functions must be an nn.Sequential or a sequence of callables, got {type(functions).__name__}."
        )
    layers = list(functions)
    for index, layer in enumerate(layers):
        if not callable(layer):
            raise TypeError(f"Layer {index} cannot be called: it is of type {type(layer).__name__}.")
    return layers


def places_of(model: nn.Module) -> OrderedDict[str, nn.Module]:
    """The children of a module by name, one that stands at several places once for each, which ``named_children()`` skips."""
    return OrderedDict((name, child) for name, child in model._modules.items() if child is not None)


def _named_modules(model: nn.Sequential | Iterable[nn.Module]) -> OrderedDict[str, nn.Module]:
    if isinstance(model, nn.Sequential):
        if type(model).forward not in (nn.Sequential.forward, CheckpointSequential.forward):
            by_itself = hasattr(model, "checkpoint_interval")
            instead = (
                "set its checkpoint_interval"
                if by_itself
                else "use checkpoint_sequential inside that forward"
            )
            raise TypeError(
                f"{type(model).__name__} has a forward of its own, which a CheckpointSequential would not run: {instead} instead."
            )
        return places_of(model)
    named: OrderedDict[str, nn.Module] = OrderedDict()
    for index, layer in enumerate(_layers(model)):
        if not isinstance(layer, nn.Module):
            raise TypeError(
                f"CheckpointSequential holds modules, but layer {index} is of type {type(layer).__name__}: wrap it in a "
                "module or use checkpoint_sequential."
            )
        named[str(index)] = layer
    return named


def cut(layers: Sequence[Layer], lengths: Sequence[int], shared: Collection[str]) -> list[LayerSegment]:
    """Segments of these lengths, which take the keyword arguments of these names.

    Raises:
        TypeError: no layer accepts one of them.
    """
    accepted = [accepted_names(layer, shared) if shared else frozenset[str]() for layer in layers]
    for name in shared:
        if not any(name in names for names in accepted):
            raise TypeError(f"None of the {len(layers)} layers accepts the keyword argument {name!r}.")
    ends = list(itertools.accumulate(lengths))
    return [
        LayerSegment(
            layers[end - length : end], accepted[end - length : end], number, len(lengths), end - length
        )
        for number, (length, end) in enumerate(zip(lengths, ends), start=1)
    ]


def accepted_names(layer: Layer, shared: Iterable[str]) -> frozenset[str]:
    signature = _signature(layer)
    if signature is None:
        return frozenset()
    parameters = signature.parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return frozenset(shared)
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(shared).intersection(one.name for one in parameters if one.kind in by_name)


def _signature(layer: Layer) -> inspect.Signature | None:
    try:
        return inspect.signature(layer.forward if isinstance(layer, nn.Module) else layer)
    except (TypeError, ValueError):  # a built-in function without a signature
        return None


def _binds(signature: inspect.Signature, values: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    try:
        signature.bind(*values, **keywords)
    except TypeError:
        return False
    return True


def as_arguments(result: Any) -> tuple[Any, ...]:
    """The result of a layer as the positional arguments of the next layer."""
    # A subclass of tuple has named parts and is one structured value.
    return result if type(result) is tuple else (result,)


def _described(values: Sequence[Any]) -> str:
    return ", ".join(
        f"{str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
        if isinstance(value, torch.Tensor)
        else type(value).__name__
        for value in values
    )


def _name(layer: Layer) -> str:
    return (
        type(layer).__name__
        if isinstance(layer, nn.Module)
        else getattr(layer, "__name__", type(layer).__name__)
    )
