"""Verification by running: before training starts, the split model is compared with the whole one.

When a model is split, a copy of its modules keeps the whole weights. When the split model is first called, two twins, one whole and
one split, compute a forward and backward pass with the arguments of that call. Each part compares values, gradients and buffers. So
an error names what a wrong recipe changes, before the first step.

Twins have their own weights, buffers and random states. So nothing of the model changes, and no hook of an optimizer or of sharding
runs. Their weights are moved a little, since weights that are zero would hide missing gradients. They compute in float64 where the
model lets them, so that rounding is small.
"""

from __future__ import annotations

import contextvars
import copy
import random
import threading
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from hvd_ckpt.processes import parts
from hvd_ckpt.processes.grid import current
from hvd_ckpt.recompute.containers import Arguments
from hvd_ckpt.utils.cuts import cut_of
from hvd_ckpt.utils.measure import is_undisturbed, silent
from hvd_ckpt.utils.memory import free_memory
from hvd_ckpt.utils.torch_private import disable_dynamo

SEED = 20091
NOISE = 0.02  # added to weights, relative to 1 + their absolute value
ALLOWED = {
    torch.float64: 1e-4,
    torch.float32: 5e-3,
}  # relative differences; layers may compute in float32 in a float64 model
ALLOWED_IN_HALVES = 0.2
NAMES = 3  # of parameters in a message
MESSAGE_BYTES = 1200
WEIGHTS = 4  # memory of a verification, in that of the whole model's weights in float64

Split = Callable[[nn.Module], None]


class _Watched(NamedTuple):
    """A module of a split model; ``verification`` is None once the whole model (of name "") has been verified."""

    verification: Verification | None
    name: str
    hook: Any


_watched: weakref.WeakKeyDictionary[nn.Module, _Watched] = weakref.WeakKeyDictionary()


class Verification:
    """Compares a split model with the whole one in its first call, and again in its first call in training mode.

    Args:
        whole: a copy of the whole model, which shares its weights.
        split: splits a copy of it as the model is split.
    """

    def __init__(self, whole: nn.Module, split: Split) -> None:
        self._whole, self._split = whole, split
        self._evaluated: set[str] = set()
        self.is_used = False  # whether a module was called, or a step was taken

    def watch(self, modules: dict[str, nn.Module]) -> None:
        """Verifies the first of these modules of the split model that is called; those within it are then verified, too."""
        for name, module in modules.items():
            hook = module.register_forward_pre_hook(_before_call, with_kwargs=True)
            _watched[module] = _Watched(self, name, hook)

    def verify(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> bool:
        """Verifies a module with these arguments. Collective over the parts.

        Returns:
            Whether nothing is left to be verified of the module.

        Raises:
            ValueError: values or gradients differ from those of the whole model; raised on all parts.
        """
        if not module.training and name in self._evaluated:
            return False
        self._evaluated.add(name)
        self.is_used = True
        _raise_together(_follow(self._whole.get_submodule(name), module))
        _agree_on_frozen(module)
        if not _in_a_thread(lambda: self._compare(name, Arguments((args, kwargs)))):
            return False
        return module.training

    def _compare(self, name: str, arguments: Arguments) -> bool:
        part = self._whole.get_submodule(name)
        device = next((one.device for one in part.parameters()), torch.device("cpu"))
        if not _fits(self._whole, device):
            return False
        if name == "" and len({int(row) for row in parts.gather(_digest(arguments.tensors))}) > 1:
            raise ValueError(
                "tensor_parallel: the parts of a replica called the model with different arguments; give all parts of a replica "
                "the same batch, that of hc.rank() of hc.size()"
            )
        problem = ""
        # Kernels of GPUs draw masks of attention that no other order of computation repeats.
        for draws in (True, False) if device.type == "cpu" else (False,):
            whole = self._whole_pass(name, arguments, draws)
            if whole is None:
                return False
            twin = _prepared(self._whole, *whole.how)
            self._split(twin)
            try:
                found = _Pass(twin, name, arguments, whole.how, draws, device, whole)
            except Exception as error:
                raise ValueError(
                    f"tensor_parallel: the split model raises {type(error).__name__} where the whole one does not: {error} "
                    f"(correct the recipe, or pass verify=False)"
                ) from error
            # A module that is called by itself may give what its caller takes from a part.
            if name and any(map(bool, parts.gather(torch.tensor(found.shapes != whole.shapes)))):
                return False
            before, problem = problem, found.difference(whole)
            rows = parts.gather(torch.tensor(bool(problem)))
            if not any(map(bool, rows)):
                if draws:
                    return True
                problem = before and f"{before}, but not without dropout: random numbers differ"
                break
        _raise_together(
            problem
            and f"tensor_parallel: in the split model, {problem}; correct the recipe (row layers take what column layers give, "
            f'attention is "heads", modules that draw random numbers between split layers are "features"), or pass verify=False'
        )
        return True

    def _whole_pass(self, name: str, arguments: Arguments, draws: bool) -> _Pass | None:
        """The pass of the whole model; None if it cannot be computed from the arguments of a module within it."""
        best: _Pass | None = None
        error: Exception | None = None
        for how in (_How(True, True), _How(True, False), _How(False, False)):
            if best is not None and best.is_finite():
                break
            twin = _prepared(self._whole, *how)
            try:
                best = _Pass(twin, name, arguments, how, draws, next(twin.parameters()).device)
            except Exception as problem:
                error = problem
        state = 0 if best is None else 1 + 2 * best.how.double + best.how.noise
        alike = len({int(row) for row in parts.gather(torch.tensor(state))}) == 1
        if best is None and name == "" and current().part == 0:
            # It may be written for parts. If the arguments are wrong, the model itself raises an error.
            warnings.warn(
                f"tensor_parallel does not verify the split model: the whole one raises {error!r}",
                stacklevel=2,
            )
        return best if alike else None


class _How(NamedTuple):
    double: bool
    noise: bool


class _Pass:
    """A forward and backward pass of a twin, with its values and gradients.

    Args:
        twin: a whole model, or a split one, of which the module ``name`` is called.
        draws: False for evaluation mode, without dropout.
        like: the pass of the whole model, whose results have the shapes that get gradients.
    """

    def __init__(
        self,
        twin: nn.Module,
        name: str,
        arguments: Arguments,
        how: _How,
        draws: bool,
        device: torch.device,
        like: _Pass | None = None,
    ) -> None:
        self.how, module = how, twin.get_submodule(name)
        self.calls: dict[str, Tensor] = {}
        hooks = [
            one.register_forward_hook(lambda module, args, result, path=path: self._note(path, result))
            for path, one in module.named_modules()
        ]
        if not draws:
            module.eval()
        with _apart(device, how.double), silent():
            leaves = [_own(tensor, how.double, device) for tensor in arguments.tensors]
            # No leaves, which a model could not change in place.
            args, kwargs = arguments.rebuild(
                [leaf.clone() if leaf.requires_grad else leaf for leaf in leaves]
            )
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

    def _backward(self, outputs: list[Tensor], like: _Pass | None) -> None:
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

    def difference(self, whole: _Pass) -> str:
        """In words, how this pass of a split model differs from that of the whole one; empty if it does not."""
        count, part = current().tensor, current().part
        allowed = _allowed(whole)
        for number, (output, expected) in enumerate(zip(self.outputs, whole.outputs)):
            of_heads = output.dim() == 4 and len(self.outputs) > 1
            if of_heads and expected.shape[1:2] == (count * output.shape[1],):
                expected = expected.chunk(count, 1)[part]
            if output.shape != expected.shape:
                return f"a result has the shape {tuple(output.shape)} instead of {tuple(expected.shape)}"
            if (far := _distance(output, expected)) > allowed:
                what = self._first_call(whole, allowed) or f"result {number}"
                return f"{what} differs from that of the whole model by {far:.2g} of its norm"
        if len(self.outputs) != len(whole.outputs):
            return f"there are {len(self.outputs)} results instead of {len(whole.outputs)}"
        for name, buffer in self.buffers.items():
            there = whole.buffers.get(name)
            alike = there is not None and there.shape == buffer.shape
            if there is not None and alike and (far := _distance(buffer, there)) > allowed:
                return f"the buffer '{name}' differs from that of the whole model by {far:.2g} of its norm"
        pairs: dict[str, tuple[Tensor | None, Tensor | None]] = {
            f"the gradient of argument {number}": pair
            for number, pair in enumerate(zip(self.inputs, whole.inputs))
        }
        for name, gradient in self.gradients.items():
            there, cut = whole.gradients.get(name), self.cuts[name]
            pairs[f"the gradient of '{name}'"] = (
                gradient,
                there if there is None or cut is None else cut.of(there, count, part),
            )
        floor = (
            max((float(there.norm()) for _, there in pairs.values() if there is not None), default=0.0) * 1e-5
        )
        wrong = {
            name: far
            for name, (own, there) in pairs.items()
            if (far := _distance_of(own, there, floor)) > allowed
        }
        if not wrong:
            return ""
        names = ", ".join(list(wrong)[:NAMES]) + (
            f" and {len(wrong) - NAMES} more" if len(wrong) > NAMES else ""
        )
        return f"{names}: differs from that of the whole model by up to {max(wrong.values()):.2g} of its norm"

    def _first_call(self, whole: _Pass, allowed: float) -> str:
        for path, value in self.calls.items():
            there = whole.calls.get(path)
            if (
                path
                and there is not None
                and there.shape == value.shape
                and _distance(value, there) > allowed
            ):
                return f"the result of '{path}'"
        return ""


@disable_dynamo
def _before_call(module: nn.Module, args: Any, kwargs: Any) -> None:
    watched = _watched.get(module)  # of a copy of a model there is none
    if watched is None or parts.is_alone() or is_undisturbed() or current().tensor == 1:
        return
    if any(one.is_meta for one in (*Arguments((args, kwargs)).tensors, *module.parameters())):
        return
    if watched.verification is None:
        # What is frozen on one part alone would leave the others in a sum of gradients.
        if module.training and torch.is_grad_enabled():
            _agree_on_frozen(module)
    elif watched.verification.verify(watched.name, module, args, kwargs):
        _forget(module)


def _forget(module: nn.Module) -> None:
    for inner in module.modules():
        watched = _watched.pop(inner, None)
        if watched is not None and watched.name == "":
            _watched[inner] = watched._replace(verification=None)
        elif watched is not None:
            watched.hook.remove()


def forget(parameters: Iterable[Tensor]) -> None:
    """Drops the whole weights of models with these parameters, whose optimizer has taken a step.

    A first step before any call, as of loops that create an optimizer's state, drops nothing.
    """
    known = set(map(id, parameters)) if _watched else set()
    for module, (verification, name, _) in list(_watched.items()):
        # The whole model is watched as long as any of its modules is.
        if verification and name == "" and any(id(parameter) in known for parameter in module.parameters()):
            if verification.is_used:
                _forget(module)
            verification.is_used = True


def verification_of(model: nn.Module, split: Split) -> Verification | None:
    """The verification of a model that is not split yet; None, with a warning, if it cannot be copied."""
    assigned = [name for name, one in model.named_modules() if "forward" in vars(one)]
    try:
        if assigned:
            raise TypeError(f"the forward of '{assigned[0]}' is a function that was assigned to it")
        return Verification(_twin(model), split)
    except Exception as error:
        if current().number == 0:
            warnings.warn(
                f"tensor_parallel does not verify the split model, which cannot be copied ({error})",
                stacklevel=3,
            )
        return None


def _twin(model: nn.Module) -> nn.Module:
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


def _prepared(whole: nn.Module, double: bool, noise: bool) -> nn.Module:
    """A twin with weights of its own."""
    twin = _twin(whole)
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for parameter in twin.parameters():
            value = parameter.detach().clone()
            if value.is_floating_point():
                value = value.double() if double else value
                if noise:
                    draws = torch.randn(value.shape, generator=generator).to(value)
                    value += NOISE * (1 + value.abs()) * draws
            parameter.data = value
    return nn.Module.double(twin) if double else twin


def _own(tensor: Tensor, double: bool, device: torch.device) -> Tensor:
    own = tensor.detach().to(device, copy=True)
    if double and own.is_floating_point():
        own = own.double()
    return own.requires_grad_(tensor.requires_grad)


@contextmanager
def _apart(device: torch.device, double: bool) -> Iterator[None]:
    """A context with random states of its own, and float64 as the default dtype."""
    with ExitStack() as restored, torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        restored.callback(random.setstate, random.getstate())
        restored.callback(np.random.set_state, np.random.get_state())
        restored.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.manual_seed(SEED)
        random.seed(SEED)
        np.random.seed(SEED)
        if double:
            torch.set_default_dtype(torch.float64)
        yield


def _in_a_thread(run: Callable[[], bool]) -> bool:
    """Runs a function in a thread, which has none of the modes, hooks of saved tensors and autocast of this one."""
    results: list[bool] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(context.run(run))
        except BaseException as error:
            errors.append(error)

    context = contextvars.copy_context()
    thread = threading.Thread(target=call, name="hvd_ckpt.tensor.verification")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _follow(whole: nn.Module, module: nn.Module) -> str:
    """Gives the whole model the modes and frozen parameters of the split one; returns a problem in words."""
    theirs, parameters = dict(whole.named_modules()), dict(whole.named_parameters())
    for name, one in module.named_modules():
        if name in theirs:
            theirs[name].training = one.training
    for name, parameter in module.named_parameters():
        if name not in parameters:
            return (
                f"tensor_parallel cannot verify '{name}', which was added after the model was split; add it before, or pass "
                f"verify=False"
            )
        parameters[name].requires_grad_(parameter.requires_grad)
    return ""


def _agree_on_frozen(module: nn.Module) -> None:
    named = list(module.named_parameters())
    for part, row in enumerate(rows := parts.gather(torch.tensor([one.requires_grad for _, one in named]))):
        if len(different := (row != rows[0]).nonzero()):
            raise ValueError(
                f"requires_grad of parameter '{named[int(different[0])][0]}' differs between parts 0 and {part}; freeze it on all "
                f"parts or on none"
            )


def _raise_together(problem: str) -> None:
    """Raises ValueError on all parts if one has a problem. Collective over the parts."""
    content = problem.encode()[:MESSAGE_BYTES]
    own = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)
    own[: len(content)] = torch.tensor(list(content), dtype=torch.uint8)
    for part, row in enumerate(parts.gather(own)):
        if row[0]:
            text = bytes(row.tolist()).rstrip(b"\0").decode(errors="replace")
            raise ValueError(problem or f"{text} (on part {part})")


def _fits(whole: nn.Module, device: torch.device) -> bool:
    grid = current()
    here = max(grid.local_size, 1) if device.type == "cpu" else 1
    need = WEIGHTS * sum(8 * one.numel() for one in whole.parameters())
    enough = need * here < free_memory(device)
    if all(map(bool, parts.gather(torch.tensor(enough)))):
        return True
    if grid.number == 0:
        warnings.warn(
            f"tensor_parallel does not verify the split model, which takes {need / 2**30:.1f} GiB of memory in each process",
            stacklevel=2,
        )
    return False


def _digest(tensors: list[Tensor]) -> Tensor:
    digest = 0
    for tensor in tensors:
        content = tensor.detach().cpu().contiguous().reshape(-1)
        digest = zlib.crc32(content.view(torch.uint8).numpy().data, digest)
    return torch.tensor(digest)


def _allowed(whole: _Pass) -> float:
    if whole.how.double:
        return ALLOWED[torch.float64]
    dtypes = {one.dtype for one in whole.outputs if one.is_floating_point()}
    return max((ALLOWED.get(dtype, ALLOWED_IN_HALVES) for dtype in dtypes), default=ALLOWED[torch.float32])


def _distance(own: Tensor, there: Tensor, floor: float = 1e-9) -> float:
    """The norm of the difference relative to that of ``there``. Equal infinities and nans do not differ."""
    if own.is_complex():
        own, there = torch.view_as_real(own), torch.view_as_real(there)
    own, there = own.double(), there.double()
    same = (own == there) | (own.isnan() & there.isnan())
    far = float(torch.where(same, 0.0, own - there).norm())
    norm = float(torch.where(there.isfinite(), there, 0.0).norm())
    return far / max(norm, floor) if far == far else float("inf")


def _distance_of(own: Tensor | None, there: Tensor | None, floor: float) -> float:
    if own is None or there is None:
        one = own if own is not None else there
        return 0.0 if one is None or float(one.norm()) <= floor else float("inf")
    if own.is_sparse or there.is_sparse:
        own, there = own.to_dense(), there.to_dense()
    return float("inf") if own.shape != there.shape else _distance(own, there, max(floor, 1e-9))
