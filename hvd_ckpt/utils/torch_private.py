"""Private names of PyTorch that this package relies on, and the check that this PyTorch has them.

PyTorch guarantees nothing about these names, so only this file imports them. (Benchmarks import what other libraries need where
they measure them.) Private attributes of objects are read where they are needed; :data:`ATTRIBUTES` lists them.

Raises:
    ImportError: PyTorch is older than :data:`OLDEST`, or lacks one of the names, which a newer version may.
"""

# ruff: noqa: F401, I001
# mypy: implicit-reexport
from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad

OLDEST = (2, 6)  # setup.cfg asks for the same

ATTRIBUTES: tuple[tuple[object, tuple[str, ...]], ...] = (
    (torch.Tensor, ("_version", "_post_accumulate_grad_hooks")),
    (torch.UntypedStorage, ("_cdata",)),
    (torch.autograd.Function, ("_backward_cls",)),
    (forward_ad, ("_current_level",)),
    (nn.Module(), ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set")),
)


def _version(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))


_release = re.match(r"(\d+)\.(\d+)", torch.__version__)
if _release is not None and (int(_release[1]), int(_release[2])) < OLDEST:
    raise ImportError(
        f"hvd_ckpt needs PyTorch {_version(OLDEST)} or newer, and this is PyTorch {torch.__version__}: install a newer "
        "one, then run `hvd-ckpt build-horovod`, which builds Horovod for it.",
        name="hvd_ckpt",
    )


def _top_hooks() -> Callable[[bool], tuple[Callable[..., Any], Callable[..., Any]] | None]:
    """A function that returns the innermost ``saved_tensors_hooks`` of this thread.

    PyTorch 2.6 has no such function, so there the contexts are watched as they are entered and left.
    """
    known = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    if known is not None:
        return known  # type: ignore[no-any-return]
    kind, local = torch.autograd.graph.saved_tensors_hooks, threading.local()
    enter, leave = kind.__enter__, kind.__exit__

    def enter_and_note(self: Any) -> Any:
        result = enter(self)
        local.__dict__.setdefault("hooks", []).append((self.pack_hook, self.unpack_hook))
        return result

    def leave_and_forget(self: Any, *error: object) -> None:
        local.hooks.pop()
        leave(self, *error)

    kind.__enter__, kind.__exit__ = enter_and_note, leave_and_forget  # type: ignore[method-assign]
    return lambda ignored: local.hooks[-1] if local.__dict__.get("hooks") else None


try:
    from torch import (
        _foreach_copy_ as foreach_copy_,
        _foreach_norm as foreach_norm,
        _foreach_zero_ as foreach_zero_,
    )
    from torch._C import (
        DisableTorchFunction,
        DisableTorchFunctionSubclass,
        _current_graph_task_id as current_graph_task_id,
        _get_cudnn_enabled,
        _get_mkldnn_enabled,
        _len_torch_dispatch_stack as _dispatch_modes,
        _len_torch_function_stack as _function_modes,
        _set_cudnn_enabled,
        _set_mkldnn_enabled,
        _storage_Use_Count as _storage_uses,
    )
    from torch._ops import _len_torch_dispatch_stack_pre_dispatch as _dispatch_modes_before
    from torch._C._functorch import peek_interpreter_stack as _functorch_level
    from torch._C._autograd import (
        DeviceType,
        _get_sequence_nr as sequence_number,
        _profiler_enabled as profiler_enabled,
    )
    from torch._compile import _disable_dynamo as disable_dynamo
    from torch._ops import OpOverload, OpOverloadPacket
    from torch._guards import TracingContext as _TracingContext
    from torch.autograd import (  # type: ignore[attr-defined]
        _unsafe_preserve_version_counter as unsafe_preserve_version_counter,
    )
    from torch.nn.modules.batchnorm import (
        _BatchNorm as AnyBatchNorm,
        _LazyNormBase as LazyNormBase,
        _NormBase as NormBase,
    )
    from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
    from torch.overrides import (
        _get_current_function_mode_stack as function_mode_stack,
        _pop_mode as pop_function_mode,
        _push_mode as push_function_mode,
    )
    from torch.utils import _pytree as pytree
    from torch.utils._device import DeviceContext
    from torch.utils._python_dispatch import (
        TorchDispatchMode,
        _disable_current_modes as disable_current_modes,
        _get_current_dispatch_mode_stack as dispatch_mode_stack,
    )
    from torch.utils.checkpoint import (
        _StopRecomputationError as StopRecomputationError,
    )

    global_step_hooks: tuple[dict[int, Any], dict[int, Any]] = (
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
    )  # of all optimizers, before and after their steps
    # Whether each library is used, read and set. (set_flags() of torch.backends also sets the precision of products.)
    LIBRARIES: Any = ((_get_cudnn_enabled, _set_cudnn_enabled), (_get_mkldnn_enabled, _set_mkldnn_enabled))
    tracing: Any = _TracingContext.try_get  # None unless torch.compile is tracing
    execution_engine: Any = torch.autograd.Variable._execution_engine
    flash_attention: Any = torch.ops.aten._scaled_dot_product_flash_attention
    top_saved_tensors_default_hooks = _top_hooks()

    for _owner, _names in ATTRIBUTES:
        for _name in _names:
            getattr(_owner, _name)
except (ImportError, AttributeError) as error:
    _lacking = str(error).split(" (")[0]
    raise ImportError(
        f"hvd_ckpt relies on a private name that PyTorch {torch.__version__} lacks ({_lacking}): install PyTorch "
        f"{_version(OLDEST)}, which has it, then run `hvd-ckpt build-horovod`, which builds Horovod for it.",
        name="hvd_ckpt",
    ) from None


def run_first(parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Any | None:
    """Registers a post-accumulate hook that runs before the parameter's other ones; returns its handle, or None without others."""
    others: dict[int, Any] = dict(parameter._post_accumulate_grad_hooks or {})
    if not others:
        return None
    handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    hooks = parameter._post_accumulate_grad_hooks
    for key in others:  # behind the new one, under the keys that their handles know
        hooks[key] = hooks.pop(key)
    return handle


def untraceable(kind: type[torch.Tensor]) -> None:
    """Makes compiled code call functions of this tensor class eagerly, if ``torch.compile`` has been imported."""
    dynamo = sys.modules.get("torch._dynamo")
    kinds = getattr(dynamo.config, "nontraceable_tensor_subclasses", None) if dynamo is not None else None
    if kinds is not None:  # PyTorch 2.6 traces no subclasses
        kinds.add(kind)


def in_dispatch_mode() -> bool:
    """Whether a dispatch mode is active on this thread."""
    return bool(_dispatch_modes() or _dispatch_modes_before())  # type: ignore[no-untyped-call]


def in_mode() -> bool:
    """Whether a torch function mode or a dispatch mode is active on this thread."""
    return bool(_function_modes() or _dispatch_modes())


def in_functorch() -> bool:
    """Whether a transform of :mod:`torch.func` is running."""
    return _functorch_level() is not None


def identity_of(storage: torch.UntypedStorage) -> int:
    """A number that no other storage has while this one is there."""
    number: int = storage._cdata
    return number


def uses_of(storage: torch.UntypedStorage) -> int:
    """How many tensors lie in a storage; more by a fixed number for what asks."""
    return _storage_uses(storage._cdata)


def dual_level() -> int:
    """The level of forward-mode derivatives; -1 outside."""
    return forward_ad._current_level


assert_async = torch._assert_async
"""Raises on the device where a condition does not hold, without a wait of the host."""

PRIVATE_OBSERVERS = ("torch.cuda._sanitizer", "torch.distributed._tools.", "torch.utils._debug_mode")
"""Modules whose modes watch a run."""


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether a module was compiled by ``module.compile()`` or ``torch.compile``."""
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
