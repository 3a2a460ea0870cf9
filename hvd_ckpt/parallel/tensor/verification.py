"""Verification by running: before training starts, the split model is compared with the whole one.

When a model is split, a copy of its modules keeps the whole weights. When the split model is first called, two twins, one whole and
one split, compute a forward and backward pass with the arguments of that call. Each part compares values, gradients and buffers. So
an error names what a wrong recipe changes, before the first step.
"""

from __future__ import annotations

import contextvars
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hvd_ckpt.parallel.tensor.twins import How, Pass, prepared, twin_of
from hvd_ckpt.processes import parts
from hvd_ckpt.processes.grid import current
from hvd_ckpt.recompute.containers import Arguments
from hvd_ckpt.utils import run_warnings
from hvd_ckpt.utils.fingerprint import fingerprint
from hvd_ckpt.utils.measure import is_undisturbed
from hvd_ckpt.utils.memory import free_memory
from hvd_ckpt.utils.torch_private import disable_dynamo

WEIGHTS = 4  # memory of a verification, in that of the whole model's weights in float64

Split = Callable[[nn.Module], None]
T = TypeVar("T")


_watched: weakref.WeakKeyDictionary[nn.Module, tuple[Verification, str]] = weakref.WeakKeyDictionary()


class Verification:
    """Compares a split model with the whole one in its first call, and again in its first call in training mode. After that, only
    which parameters are frozen.

    Args:
        whole: a copy of the whole model, which shares its weights; None to compare only what is frozen.
        split: splits a copy of it as the model is split.
    """

    def __init__(self, whole: nn.Module | None, split: Split) -> None:
        self.whole, self._split = whole, split
        self._verified: dict[str, bool] = {}  # by the name of a module, whether in training mode
        self._hooks: list[Any] = []
        self.is_used = False  # whether a module was called, or a step was taken

    def watch(self, modules: dict[str, nn.Module]) -> None:
        """Verifies the first of these modules of the split model that is called; those within it are then verified, too."""
        for name, module in modules.items():
            hook = module.register_forward_pre_hook(_before_call, with_kwargs=True)
            _watched[module] = self, name
            if name:  # what is frozen is compared in each call of the model
                self._hooks.append(hook)

    def forget(self) -> None:
        """Drops the whole weights."""
        self.whole = None
        for hook in self._hooks:
            hook.remove()

    def before_call(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Verifies a module with these arguments, unless that is done. Collective over the parts.

        Raises:
            ValueError: values or gradients differ from those of the whole model; raised on all parts.
        """
        # What is frozen on one part alone would leave the others in a sum of gradients.
        if self.whole is None:
            if name == "" and module.training and torch.is_grad_enabled():
                _agree_on_frozen(module)
            return
        if (known := self._verified.get(name)) or (known is False and not module.training):
            return
        self.is_used = True
        _raise_together(_follow(self.whole.get_submodule(name), module))
        _agree_on_frozen(module)
        # In a thread, which has none of the modes, hooks of saved tensors and autocast of this one.
        with ThreadPoolExecutor(1, "hvd_ckpt.parallel.tensor.verification") as thread:
            run = contextvars.copy_context().run
            compared = thread.submit(run, self._compare, self.whole, name, Arguments((args, kwargs))).result()
        # Modules within it have been compared with it.
        within = [f"{name}.{inner}".strip(".") for inner, _ in module.named_modules()] if compared else [name]
        for each in within:
            self._verified[each] = self._verified.get(each, False) or (compared and module.training)
        if self._verified.get(""):
            self.forget()

    def _compare(self, model: nn.Module, name: str, arguments: Arguments) -> bool:
        """Whether the module could be compared; raises ValueError on all parts if it differs."""
        part = model.get_submodule(name)
        device = next((one.device for one in part.parameters()), torch.device("cpu"))
        if not _fits(model, device):
            return False
        prints = [int(fingerprint(tensor)) for tensor in arguments.tensors]
        if name == "" and any(other != prints for other in _of_parts(prints)):
            raise ValueError(
                "tensor_parallel: the parts of a replica called the model with different arguments; give all parts of a replica "
                "the same batch, that of hc.rank() of hc.size()"
            )
        differs, problem = list[bool](), ""
        # Kernels of GPUs draw masks of attention that no other order of computation repeats. In training, what the module does in
        # evaluation is compared as well: later there are no whole weights to compare with.
        for draws in (True, False) if device.type == "cpu" else (False,):
            found = self._difference(model, name, arguments, How(True, True, draws, device))
            if found is None:
                break
            differs.append(any(_of_parts(bool(found))))
            if differs == [True, False]:
                problem = problem and f"{problem}, but only in training: random numbers or statistics differ"
            else:
                problem = found and found + ", but only in evaluation" * (differs == [False, True])
            if draws and not differs[-1] and not part.training:
                break
        _raise_together(
            problem
            and f"tensor_parallel: in the split model, {problem}; correct the recipe (row layers take what column layers give, "
            f'attention is "heads", modules that draw random numbers between split layers are "features"), or pass verify=False'
        )
        return bool(differs)

    def _difference(self, model: nn.Module, name: str, arguments: Arguments, how: How) -> str | None:
        """In words, how passes of the split and the whole module differ; None, on all parts, if they cannot be compared."""
        whole = _whole_pass(model, name, arguments, how)
        if whole is None:
            return None
        twin = prepared(model, whole.how)
        self._split(twin)
        try:
            found = Pass(twin, name, arguments, whole.how, whole)
        except Exception as error:
            raise ValueError(
                f"tensor_parallel: the split model raises {type(error).__name__} where the whole one does not: {error} "
                f"(correct the recipe, or pass verify=False)"
            ) from error
        # A module that is called by itself may give what its caller takes from a part.
        return None if name and any(_of_parts(found.shapes != whole.shapes)) else found.difference(whole)


def _whole_pass(model: nn.Module, name: str, arguments: Arguments, how: How) -> Pass | None:
    """The pass of the whole model; None if it cannot be computed from the arguments of a module within it."""
    best: Pass | None = None
    error: Exception | None = None
    for double, noise in ((True, True), (True, False), (False, False)):
        if best is not None and best.is_finite():
            break
        how = how._replace(double=double, noise=noise)
        try:
            best = Pass(prepared(model, how), name, arguments, how)
        except Exception as problem:
            error = problem
    state = 0 if best is None else 1 + 2 * best.how.double + best.how.noise
    alike = len(set(_of_parts(state))) == 1
    if best is None and name == "" and current().part == 0:
        # It may be written for parts. If the arguments are wrong, the model itself raises an error.
        run_warnings.warn(f"tensor_parallel does not verify the split model: the whole one raises {error!r}")
    return best if alike else None


@disable_dynamo
def _before_call(module: nn.Module, args: Any, kwargs: Any) -> None:
    verification, name = _watched.get(module, (None, ""))  # None for a copy of a model
    if verification is None or current().alone or is_undisturbed() or current().tensor == 1:
        return
    if not any(one.is_meta for one in (*Arguments((args, kwargs)).tensors, *module.parameters())):
        verification.before_call(name, module, args, kwargs)


def forget(parameters: Iterable[Tensor]) -> None:
    """Drops the whole weights of models with these parameters, whose optimizer has taken a step.

    A first step before any call, as of loops that create an optimizer's state, drops nothing.
    """
    kept: dict[Verification, list[nn.Module]] = {}
    for module, (verification, _) in _watched.items():  # blocks may be all that is left of a model
        if verification.whole is not None:
            kept.setdefault(verification, []).append(module)
    known = set(map(id, parameters)) if kept else set()
    for verification, modules in kept.items():
        if any(id(parameter) in known for module in modules for parameter in module.parameters()):
            if verification.is_used:
                verification.forget()
            verification.is_used = True


def copy_of(model: nn.Module) -> nn.Module | None:
    """A copy of a model that is not split yet; None, with a warning, if it cannot be copied."""
    assigned = [name for name, one in model.named_modules() if "forward" in vars(one)]
    try:
        if assigned:
            raise TypeError(f"the forward of '{assigned[0]}' is a function that was assigned to it")
        return twin_of(model)
    except Exception as error:
        if current().number == 0:
            run_warnings.warn(
                f"tensor_parallel does not verify the split model, which cannot be copied ({error})"
            )
        return None


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
    for part, text in enumerate(_of_parts(problem)):
        if text:
            raise ValueError(problem or f"{text} (on part {part})")


def _fits(whole: nn.Module, device: torch.device) -> bool:
    grid = current()
    here = max(grid.local_size, 1) if device.type == "cpu" else 1
    need = WEIGHTS * sum(8 * one.numel() for one in whole.parameters())
    enough = need * here < free_memory(device)
    if all(_of_parts(enough)):
        return True
    if grid.number == 0:
        run_warnings.warn(
            f"tensor_parallel does not verify the split model, which takes {need / 2**30:.1f} GiB of memory in each process"
        )
    return False


def _of_parts(value: T) -> list[T]:
    """The value of each part. Collective over the parts."""
    return current().gather_objects(value, stages=False)
