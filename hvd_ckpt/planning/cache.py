"""Cache of plans, which reuses a plan of an earlier process if nothing that it depends on has changed.

The key of a plan is a digest. It covers the model (classes with their code, settings, shapes of parameters), the shapes and dtypes
of the sample, and of the code of the loss. It also includes the settings of the plan, the device, the number of threads, and the
versions of PyTorch and of this library. It does not depend on the values of tensors.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import re
import types
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hvd_ckpt.planning.plan import Plan, PlanError
from hvd_ckpt.recompute.calls import map_tensors
from hvd_ckpt.utils.folders import make_writable


def cached(
    folder: str | os.PathLike[str],
    key: str,
    model: nn.Module,
    make: Callable[[], Plan],
    say: Callable[[str], None],
) -> Plan:
    """Reads the plan with that key from ``folder``, or calls ``make`` and writes its plan there.

    A file that is invalid or does not fit the model is replaced.

    Raises:
        ValueError: the folder is not writable.
    """
    path = Path(folder) / f"plan-{key}.json"
    try:
        make_writable(path.parent)
    except OSError as error:
        raise ValueError(f"the plan cache '{folder}' cannot be written to: {error.strerror}") from None
    with contextlib.suppress(FileNotFoundError, PlanError):
        plan = Plan.load(path)
        plan.check(model)
        say(f"taking the plan in {path}")
        return plan
    plan = make()
    plan.save(path)
    return plan


def key_of(
    model: nn.Module, sample: Any, loss: Any, device: torch.device, settings: Mapping[str, Any]
) -> str:
    """The key of a plan, as hexadecimal digits."""
    capability = torch.backends.cpu.get_cpu_capability()
    processor = f"{platform.machine()} {platform.processor()} {capability} {os.cpu_count()}"
    facts = [
        version("hvd-ckpt"),
        torch.__version__,
        device.type,
        torch.cuda.get_device_name(device) if device.type == "cuda" else processor,
        str(torch.get_num_threads()),
        *_model(model),
        repr(map_tensors(_shape, Tensor, sample)),
        *_code(loss),
        repr(sorted(settings.items())),
    ]
    digest = hashlib.sha256()
    for fact in facts:
        # Addresses in texts differ between processes.
        digest.update(re.sub(r" at 0x[0-9a-fA-F]+", "", fact).encode(errors="replace") + b"\0")
    return digest.hexdigest()[:32]


def _shape(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} {tensor.device} {tensor.requires_grad}"


def _model(model: nn.Module) -> Iterator[str]:
    yield repr(getattr(model, "config", None))  # of a model of transformers
    numbers: dict[int, int] = {}  # tied parameters have one number
    kinds: dict[type, None] = {}
    for name, module in model.named_modules():
        kinds.update(dict.fromkeys(type(module).__mro__))
        plain = {key: value for key, value in vars(module).items() if _is_plain(value)}
        yield f"{name} {type(module)} {module.extra_repr()} {sorted(plain.items())}"
        for own, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                yield f"{own} {numbers.setdefault(id(tensor), len(numbers))} {_shape(tensor)}"
    for kind in kinds:
        if not kind.__module__.startswith(("torch.", "builtins")):
            for value in vars(kind).values():
                yield from _code(value)


_PLAIN = (bool, int, float, str, type(None))


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return isinstance(value, (*_PLAIN, torch.dtype))


_DEPTH = 8  # levels of values that a function refers to


def _code(value: Any, depth: int = _DEPTH) -> Iterator[str]:
    """Texts by which a value differs from others; for a function, its code and the values that it refers to."""
    if isinstance(value, (functools.partial, types.MethodType, types.FunctionType)):
        parts: tuple[Any, ...]
        if isinstance(value, functools.partial):
            parts = (value.func, value.args, value.keywords)
        elif isinstance(value, types.MethodType):
            parts = (value.__func__, value.__self__)
        else:
            # An empty cell belongs to a variable that is not assigned yet, and raises when it is read.
            cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
            parts = (value.__code__, cells, value.__defaults__, value.__kwdefaults__)
        yield from _code(parts, depth)
    elif isinstance(value, types.CodeType):
        yield f"{value.co_code!r} {value.co_names}"
        yield from _code(value.co_consts, depth)
    elif isinstance(value, nn.Module):
        yield from _model(value)
    elif isinstance(value, Tensor):
        yield _shape(value)
    elif isinstance(value, (tuple, list, dict)) and depth:
        for item in value.items() if isinstance(value, dict) else value:
            yield from _code(item, depth - 1)
    elif isinstance(value, _PLAIN):
        yield repr(value)
    else:
        yield str(type(value))
        if not isinstance(value, (type, types.ModuleType)):
            yield from _code(getattr(value, "__dict__", None), depth - 1)
