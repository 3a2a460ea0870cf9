"""hvd_ckpt: training models that do not fit, with Horovod data parallelism and activation checkpointing.

``import hvd_ckpt as hvd`` serves as the one changed import of a Horovod script: every public name of ``horovod.torch`` is here.
The public names and their modules are listed in ``__init__.pyi``. Each is imported when it is first used: ``hvd-ckpt --help``
then needs no PyTorch, and ``hvd-ckpt doctor`` no working Horovod.
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
        import_module("hvd_ckpt.torch_private")  # refuses a PyTorch that does not fit
        module = import_module(str(_MODULES[name]))
    except ImportError as error:
        from hvd_ckpt.utils.extras import explain_import_error

        text = explain_import_error(error)
        if text is None:
            raise
        raise ImportError(text, name=error.name) from None
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
