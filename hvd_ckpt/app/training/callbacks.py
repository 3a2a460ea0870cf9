"""Callbacks of a training run, and trackers: callbacks that write its log for TensorBoard, Weights & Biases or MLflow.

A callback is any object with some of the methods in :data:`METHODS`. They run only on the first process of a job, on its main
thread, so they must not communicate. An exception of a callback ends all ranks. An exception of a tracker gives a warning, and the
tracker is not called again.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hvd_ckpt.app.training.config import Config
from hvd_ckpt.processes.grid import current
from hvd_ckpt.utils.extras import explain_import_error, pip_command
from hvd_ckpt.utils.named import import_named
from hvd_ckpt.utils.text import unknown

if TYPE_CHECKING:
    from hvd_ckpt.app.training.trainer import Trainer

METHODS = ("on_begin", "on_log", "on_evaluation", "on_snapshot", "on_end")


class Tracker(ABC):
    """A callback that writes numbers of a run for a tool.

    Attributes:
        name: name of the tool.
    """

    name = ""

    @abstractmethod
    def write(self, numbers: dict[str, float], step: int) -> None:
        """Writes numbers of one step, by names such as ``train/loss``."""

    def on_log(self, record: Mapping[str, Any]) -> None:
        self.write(_numbers(record), record["step"])

    on_evaluation = on_log


class TensorBoard(Tracker):
    """Writes the folder ``tensorboard`` of the run."""

    name = "TensorBoard"

    def on_begin(self, trainer: Trainer) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # A resumed run writes steps again that a killed one had written: TensorBoard hides those.
        step = trainer.progress.step
        folder, purge = str(trainer.folder / "tensorboard"), step + 1 if step else None
        make: Any = SummaryWriter
        self._board = make(folder, purge_step=purge, flush_secs=30)

    def write(self, numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            kind, _, metric = name.partition("/")
            self._board.add_scalar(f"{metric}/{kind}", value, step)

    def on_end(self, outcome: Any) -> None:
        self._board.close()


class WandB(Tracker):
    """Writes a run of Weights & Biases, which its own variables configure (``WANDB_PROJECT``, ``WANDB_MODE``, ...)."""

    name = "wandb"

    def on_begin(self, trainer: Trainer) -> None:
        import wandb

        project = os.environ.get("WANDB_PROJECT", "hvd_ckpt")
        self._run = wandb.init(
            project=project,
            id=_identity(trainer, self.name, lambda: secrets.token_hex(8)),
            name=trainer.folder.name,
            dir=str(trainer.folder),
            config=trainer.config.as_dict(),
            resume="allow",
        )
        # A resumed run may write a step again, and wandb's own counter of steps never goes back.
        self._run.define_metric("*", step_metric="step")

    def write(self, numbers: dict[str, float], step: int) -> None:
        self._run.log({**numbers, "step": step})

    def on_end(self, outcome: Any) -> None:
        self._run.finish(exit_code=int(outcome is None))


class MLflow(Tracker):
    """Writes a run of MLflow, which its own variables configure (``MLFLOW_TRACKING_URI``, by default the
    folder ``mlflow`` of the run, ``MLFLOW_EXPERIMENT_NAME``, ...)."""

    name = "mlflow"

    def on_begin(self, trainer: Trainer) -> None:
        import mlflow

        # Of a server that does not answer, so that training waits for seconds and not for minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        if "MLFLOW_TRACKING_URI" not in os.environ:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # databases need more packages
            mlflow.set_tracking_uri((trainer.folder / "mlflow").resolve().as_uri())
        experiment = mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "hvd_ckpt"))
        self._client, settings = mlflow.MlflowClient(), trainer.config.as_dict()

        def make() -> str:
            made = self._client.create_run(experiment.experiment_id, run_name=trainer.folder.name)
            for name, value in settings.items():
                self._client.log_param(made.info.run_id, name, str(value)[:500])
            identity: str = made.info.run_id
            return identity

        self._run = _identity(trainer, self.name, make)
        self._client.update_run(self._run, status="RUNNING")

    def write(self, numbers: dict[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self._client.log_batch(self._run, [Metric(name, value, now, step) for name, value in numbers.items()])

    def on_end(self, outcome: Any) -> None:
        self._client.set_terminated(self._run, "FAILED" if outcome is None else "FINISHED")


TRACKERS: dict[str, type[Tracker]] = {"wandb": WandB, "mlflow": MLflow}


def callbacks_of(config: Config) -> list[Any]:
    """The configured callbacks, on the first process; on others nothing, after the same checks.

    Raises:
        ValueError: one is not installed, cannot be imported, or has no method of a callback.
    """
    if config.tracker is not None and importlib.util.find_spec(config.tracker) is None:
        raise ValueError(f"tracker {config.tracker}: it is not installed: {pip_command(config.tracker)}")
    make = None if config.callback is None else import_named("callback", config.callback)
    # The checks above run on every rank, and find the same; the callbacks themselves run on the first alone.
    if current().number != 0:
        return []
    made = []
    # An unsuitable callback must end all ranks, so it is made where errors are raised on all.
    if make is not None:
        try:
            inspect.signature(make).bind()
        except TypeError as error:
            raise ValueError(f"callback {config.callback}: it is made without arguments: {error}") from None
        made.append(make())
    for callback in made:
        methods = [
            name for name in dir(callback) if name.startswith("on_") and callable(getattr(callback, name))
        ]
        if not methods:
            raise ValueError(f"callback {config.callback}: it has none of the methods {', '.join(METHODS)}")
        for name in methods:
            if name not in METHODS:
                raise ValueError(
                    f"callback {config.callback}: {unknown('method of a callback', name, METHODS)}"
                )
    trackers: list[Any] = [TensorBoard()] if config.tensorboard else []
    return [*trackers, *([] if config.tracker is None else [TRACKERS[config.tracker]()]), *made]


class Callbacks:
    """Calls all callbacks of a run.

    Args:
        callbacks: in the order in which they are called.
        say: shows a line of text.
    """

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
                if not isinstance(callback, Tracker):
                    raise
                if callback in self._callbacks:
                    self._callbacks.remove(callback)
                reason = explain_import_error(error) if isinstance(error, ImportError) else None
                reason = reason or " ".join(f"{type(error).__name__}: {error}".split())
                rest = "nothing" if method == "on_begin" else "no more"
                self._say(f"Warning: {callback.name} gets {rest} of this run: {reason}")


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record, by names such as ``train/loss``."""
    kind = record.get("kind", "train")
    return {
        f"{kind}/{name}": value
        for name, value in record.items()
        if name != "step" and type(value) in (int, float)
    }


def _identity(trainer: Trainer, name: str, make: Callable[[], str]) -> str:
    """The tool's name of the run, which is kept in its folder and used by a resumed run."""
    file = trainer.folder / f"{name}-run.txt"
    if not file.is_file():
        file.write_text(make(), "utf-8")
    return file.read_text("utf-8")
