"""Callbacks of a training run, and the one that writes its log for TensorBoard.

A callback is any object with some of the methods in :data:`METHODS`. They run only on the first process of a job, on its main
thread, so they must not communicate. An exception of a callback ends all ranks. One of TensorBoard's gives a warning, and it is
not called again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hvd_ckpt.app.training.config import Config
from hvd_ckpt.processes.grid import current
from hvd_ckpt.utils.extras import explain_import_error
from hvd_ckpt.utils.named import import_named
from hvd_ckpt.utils.text import unknown

if TYPE_CHECKING:
    from hvd_ckpt.app.training.trainer import Trainer

METHODS = ("on_begin", "on_log", "on_evaluation", "on_snapshot", "on_end")


class TensorBoard:
    """Writes the folder ``tensorboard`` of the run."""

    def on_begin(self, trainer: Trainer) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # A resumed run writes steps again that a killed one had written: TensorBoard hides those.
        step = trainer.progress.step
        folder, purge = str(trainer.folder / "tensorboard"), step + 1 if step else None
        self._board = SummaryWriter(folder, purge_step=purge, flush_secs=30)

    def on_log(self, record: Mapping[str, Any]) -> None:
        for name, value in record.items():
            if name != "step" and type(value) in (int, float):
                self._board.add_scalar(f"{name}/{record.get('kind', 'train')}", value, record["step"])

    on_evaluation = on_log

    def on_end(self, outcome: Any) -> None:
        self._board.close()


def callbacks_of(config: Config) -> list[Any]:
    """The configured callbacks, on the first process; on others nothing, after the same checks.

    Raises:
        ValueError: it cannot be imported, or has no method of a callback.
    """
    make = None if config.callback is None else import_named("callback", config.callback)
    # The checks above run on every rank, and find the same; the callbacks themselves run on the first alone.
    if current().number != 0:
        return []
    callbacks: list[Any] = [TensorBoard()] if config.tensorboard else []
    # An unsuitable callback must end all ranks, so it is made where errors are raised on all.
    if make is not None:
        try:
            inspect.signature(make).bind()
        except TypeError as error:
            raise ValueError(f"callback {config.callback}: it is made without arguments: {error}") from None
        callback = make()
        methods = [
            name for name in dir(callback) if name.startswith("on_") and callable(getattr(callback, name))
        ]
        if not methods:
            raise ValueError(f"callback {config.callback}: it has none of the methods {', '.join(METHODS)}")
        if others := [name for name in methods if name not in METHODS]:
            raise ValueError(
                f"callback {config.callback}: {unknown('method of a callback', others[0], METHODS)}"
            )
        callbacks.append(callback)
    return callbacks


class Callbacks:
    """Calls all callbacks of a run."""

    def __init__(self, callbacks: list[Any], say: Callable[[str], None]) -> None:
        self._callbacks, self._say = callbacks, say

    def __call__(self, method: str, argument: Any) -> None:
        """Calls a method, one of :data:`METHODS`, of all that have it."""
        callbacks = list(self._callbacks)
        # The end is told once, also if a callback raises there and the run ends a second time.
        if method == "on_end":
            self._callbacks.clear()
        for callback in callbacks:
            function = getattr(callback, method, None)
            if function is None:
                continue
            try:
                function(argument)
            except Exception as error:
                if not isinstance(callback, TensorBoard):
                    raise
                if callback in self._callbacks:
                    self._callbacks.remove(callback)
                reason = explain_import_error(error) if isinstance(error, ImportError) else None
                reason = reason or " ".join(f"{type(error).__name__}: {error}".split())
                rest = "nothing" if method == "on_begin" else "no more"
                self._say(f"Warning: TensorBoard gets {rest} of this run: {reason}")
