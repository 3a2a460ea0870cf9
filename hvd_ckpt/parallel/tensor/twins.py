"""Passes of twins: copies of a whole and a split model that compute the same forward and backward pass, and their differences.

Twins have their own weights, buffers and random states. So nothing of the model changes, and no hook of an optimizer or of sharding
runs. Their weights are moved a little, since weights that are zero would hide missing gradients. They compute in float64 where the
model lets them, so that rounding is small.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from hvd_ckpt.processes.grid import current
from hvd_ckpt.recompute.containers import Arguments
from hvd_ckpt.utils.cuts import cut_of
from hvd_ckpt.utils.measure import silent
from hvd_ckpt.utils.random_sources import global_sources

SEED = 20091
NOISE = 0.02  # added to weights, relative to 1 + their absolute value
# Relative differences that are rounding. Layers of a float64 model may compute in float32.
ALLOWED = {torch.float64: 1e-4, torch.float32: 5e-3}
ALLOWED_IN_HALVES = 0.2
SMALL = 1e-5  # a gradient beside the largest, which may be none
ROUNDING = 1e-6  # of float32, in elements of about 1 and in gradients relative to the largest
NAMES = 3  # of parameters in a message


class How(NamedTuple):
    """How a twin computes: in float64, with noise added to its weights, in training mode (with dropout), on a device."""

    double: bool
    noise: bool
    draws: bool
    device: torch.device


class Pass:
    """A forward and backward pass of a twin, with its values and gradients.

    Args:
        twin: a whole model, or a split one, of which the module ``name`` is called.
        like: the pass of the whole model, whose results have the shapes that get gradients.
    """

    def __init__(
        self, twin: nn.Module, name: str, arguments: Arguments, how: How, like: Pass | None = None
    ) -> None:
        self.how, module = how, twin.get_submodule(name)
        self.calls: dict[str, Tensor] = {}
        hooks = [
            one.register_forward_hook(lambda module, args, result, path=path: self._note(path, result))
            for path, one in module.named_modules()
        ]
        if not how.draws:
            module.eval()
        with _apart(how), silent():
            leaves = [_own(tensor, how) for tensor in arguments.tensors]
            # No leaves, which a model could not change in place, and copies of objects, such as a cache, which it fills.
            given = [leaf.clone() if leaf.requires_grad else leaf for leaf in leaves]
            args, kwargs = copy.deepcopy(arguments.rebuild(given), {id(one): one for one in given})
            outputs = Arguments(module(*args, **kwargs)).tensors
            for hook in hooks:
                hook.remove()
            self.outputs = [output.detach() for output in outputs]
            self.shapes = [output.shape for output in outputs]
            self._backward(outputs, like)
        parameters = dict(module.named_parameters())
        self.cuts = {path: cut_of(parameter) for path, parameter in parameters.items()}
        self.gradients = {path: parameter.grad for path, parameter in parameters.items()}
        self.inputs = [leaf.grad for leaf in leaves]
        self.buffers = {path: buffer.detach() for path, buffer in module.named_buffers()}

    def _note(self, path: str, result: Any) -> None:
        first = result[0] if isinstance(result, (tuple, list)) and result else result
        if isinstance(first, Tensor):
            self.calls[path] = first.detach()

    def _backward(self, outputs: list[Tensor], like: Pass | None) -> None:
        # Scores of attention and cached keys and values, (batch, heads, ...), are those of a part's heads.
        several = not all(output.dim() == 4 for output in outputs)
        chosen = [
            output
            for output in outputs
            if output.requires_grad and output.is_floating_point() and not (several and output.dim() == 4)
        ]
        generator = torch.Generator().manual_seed(SEED)
        gradients = [torch.randn(output.shape, generator=generator).to(output) for output in chosen]
        wanted = self.shapes if like is None else like.shapes
        fits = len(outputs) == len(wanted) and all(
            output.shape == shape or (several and output.dim() == 4) for output, shape in zip(outputs, wanted)
        )
        if chosen and fits:
            torch.autograd.backward(chosen, gradients)

    def is_finite(self) -> bool:
        gradients = [one for one in (*self.gradients.values(), *self.inputs) if one is not None]
        return not any(bool(one.isnan().any()) for one in (*self.outputs, *gradients))

    def difference(self, whole: Pass) -> str:
        """In words, how this pass of a split model differs from that of the whole one; empty if it does not."""
        count, part = current().tensor, current().part
        allowed = _allowed(whole)
        for number, (output, expected) in enumerate(zip(self.outputs, whole.outputs)):
            of_heads = output.dim() == 4 and len(self.outputs) > 1
            if of_heads and expected.shape[1:2] == (count * output.shape[1],):
                expected = expected.chunk(count, 1)[part]
            if output.shape != expected.shape:
                return f"a result has the shape {tuple(output.shape)} instead of {tuple(expected.shape)}"
            if (far := _value_distance(output, expected, allowed)) > allowed:
                what = self._first_call(whole, allowed) or f"result {number}"
                return f"{what} differs from that of the whole model by {far:.2g} of its norm"
        if len(self.outputs) != len(whole.outputs):
            return f"there are {len(self.outputs)} results instead of {len(whole.outputs)}"
        for name, buffer in self.buffers.items():
            there = whole.buffers.get(name)
            if there is None or there.shape != buffer.shape:
                continue
            if (far := _value_distance(buffer, there, allowed)) > allowed:
                return f"the buffer '{name}' differs from that of the whole model by {far:.2g} of its norm"
        pairs = {f"argument {number}": pair for number, pair in enumerate(zip(self.inputs, whole.inputs))}
        for name, gradient in self.gradients.items():
            there, cut = whole.gradients.get(name), self.cuts[name]
            there = there if there is None or cut is None else cut.of(there, count, part)
            pairs[f"'{name}'"] = gradient, there
        largest = max((float(there.norm()) for _, there in pairs.values() if there is not None), default=0.0)
        distances = {name: _distance_of(*pair, largest, allowed) for name, pair in pairs.items()}
        wrong = [f"the gradient of {name}" for name, far in distances.items() if far > allowed]
        if not wrong:
            return ""
        names = ", ".join(wrong[:NAMES]) + f" and {len(wrong) - NAMES} more" * (len(wrong) > NAMES)
        return f"{names}: differs from that of the whole model by up to {max(distances.values()):.2g} of its norm"

    def _first_call(self, whole: Pass, allowed: float) -> str:
        for path, value in self.calls.items():
            there = whole.calls.get(path)
            if not path or there is None or there.shape != value.shape:
                continue
            if _value_distance(value, there, allowed) > allowed:
                return f"the result of '{path}'"
        return ""


def twin_of(model: nn.Module) -> nn.Module:
    """A copy of a model that shares its weights, but not its gradients, buffers and hooks of parameters."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        if type(parameter) is nn.Parameter:
            memo[id(parameter)] = twin = nn.Parameter(parameter.detach(), parameter.requires_grad)
            twin.__dict__.update(parameter.__dict__)
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, Tensor) and value.grad_fn is not None:  # copy.deepcopy refuses these
                memo[id(value)] = value.detach().clone()
    return copy.deepcopy(model, memo)


def prepared(whole: nn.Module, how: How) -> nn.Module:
    """A twin with weights of its own."""
    twin = twin_of(whole)
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for parameter in twin.parameters():
            value = parameter.detach().clone()
            if value.is_floating_point():
                value = value.double() if how.double else value
                if how.noise:
                    draws = torch.randn(value.shape, generator=generator).to(value)
                    value += NOISE * (1 + value.abs()) * draws
            parameter.data = value
    return nn.Module.double(twin) if how.double else twin


def _own(tensor: Tensor, how: How) -> Tensor:
    copy = tensor.detach().to(how.device, copy=True)
    if how.double and copy.is_floating_point():
        copy = copy.double()
    return copy.requires_grad_(tensor.requires_grad)


@contextmanager
def _apart(how: How) -> Iterator[None]:
    """A context with random states of its own, and float64 as the default dtype."""
    devices = [how.device] if how.device.type == "cuda" else []
    with ExitStack() as restored, torch.random.fork_rng(devices=devices):
        for source in global_sources():
            restored.callback(source.restore)
        restored.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.manual_seed(SEED)
        random.seed(SEED)
        np.random.seed(SEED)
        if how.double:
            torch.set_default_dtype(torch.float64)
        yield


def _allowed(whole: Pass) -> float:
    if whole.how.double:
        return ALLOWED[torch.float64]
    dtypes = {one.dtype for one in whole.outputs if one.is_floating_point()}
    return max((ALLOWED.get(dtype, ALLOWED_IN_HALVES) for dtype in dtypes), default=ALLOWED[torch.float32])


def _value_distance(own: Tensor, there: Tensor, allowed: float) -> float:
    # A mean behind a normalization is zero but for rounding, whose own norm says nothing.
    return _distance(own, there, ROUNDING / allowed * max(1, there.numel()) ** 0.5)


def _distance(own: Tensor, there: Tensor, floor: float) -> float:
    """The norm of the difference relative to that of ``there``. Equal infinities and nans do not differ."""
    if own.is_complex():
        own, there = torch.view_as_real(own), torch.view_as_real(there)
    own, there = own.double(), there.double()
    same = (own == there) | (own.isnan() & there.isnan())
    far = float(torch.where(same, 0.0, own - there).norm())
    norm = float(torch.where(there.isfinite(), there, 0.0).norm())
    return far / max(norm, floor) if far == far else float("inf")


def _distance_of(own: Tensor | None, there: Tensor | None, largest: float, allowed: float) -> float:
    if own is None or there is None:
        one = own if own is not None else there
        return 0.0 if one is None or float(one.norm()) <= SMALL * largest else float("inf")
    if own.is_sparse or there.is_sparse:
        own, there = own.to_dense(), there.to_dense()
    if own.shape != there.shape:
        return float("inf")
    # A gradient that is zero but for rounding is another one in another order: of a bias before a batch normalization, say, or
    # of that of the keys of attention. Twins in float64 round as float32 where the model converts its activations.
    return _distance(own, there, max(max(SMALL, ROUNDING / allowed) * largest, 1e-9))
