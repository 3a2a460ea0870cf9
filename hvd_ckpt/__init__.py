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

RENAMED = {  # earlier names of this library's own
    "stage": "grid().stage",
    "stages": "grid().stages",
    "tensor_rank": "grid().part",
    "tensor_size": "grid().tensor",
    "verify_weights": "verify(weights=...)",
    "verify_recomputation": "verify(recomputation=...)",
    "check_equal_weights": "verify(model)",
    "stash": "skip.stash",
    "pop": "skip.pop",
    "skippable": "skip.skippable",
    "balance_by_time": "Pipeline(balance='time', sample=...)",
    "balance_by_size": "Pipeline(balance='size', sample=...)",
    **{name: f"data.{name}" for name in ("Batch", "Objective", "DataLoader", "DistributedSampler")},
    **{name: f"training.{name}" for name in ("Config", "Trainer", "assemble")},
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        new = f": use hvd_ckpt.{RENAMED[name]}" if name in RENAMED else ""
        raise AttributeError(f"module 'hvd_ckpt' has no attribute {name!r}{new}")
    place = str(_MODULES[name])
    try:
        import_module("hvd_ckpt.utils.torch_private")  # refuses a PyTorch that does not fit
        module = import_module(place)
        if name not in vars(module):  # a room, or a module of one
            import_module(f"{place}.{name}")
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
