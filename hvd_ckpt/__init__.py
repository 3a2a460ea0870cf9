"""hvd_ckpt: training of models that do not fit, with Horovod data parallelism and activation checkpointing.

``import hvd_ckpt as hvd`` replaces ``import horovod.torch as hvd``: every public name of ``horovod.torch`` is available.
``__init__.pyi`` lists the public names and their modules. Each name is imported when it is first used, so ``hvd-ckpt --help``
needs no PyTorch, and ``hvd-ckpt doctor`` needs no working Horovod.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

_MODULES = {
    name.name: node.module
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
    if isinstance(node, ast.ImportFrom)
    for name in node.names
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'hvd_ckpt' has no attribute {name!r}")
    try:
        import_module("hvd_ckpt.utils.torch_private")  # refuses a PyTorch that does not fit
        module = import_module(str(_MODULES[name]))
    except ImportError as error:
        from hvd_ckpt.utils.extras import explain_import_error

        text = explain_import_error(error)
        if text is None:
            raise
        raise ImportError(text, name=error.name) from None
    value = getattr(module, name)
    # From now on the name is found without this function.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
