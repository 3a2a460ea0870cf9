"""What a training run is told: one flat dataclass, from Python, from a YAML file, or from the flags of the command.

Every setting says in its metadata what it is for and what it may be, so that the flags, their help and the checks of a file all
come from here. A value that cannot be is found when the configuration is made, before anything is built.
"""

from __future__ import annotations

import dataclasses
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hvd_ckpt.json_file import write_text
from hvd_ckpt.names import CHECKPOINTS, PRECISIONS, one_line, unknown
from hvd_ckpt.sharding.stages import STAGES, stage_of
from hvd_ckpt.training import parsing
from hvd_ckpt.training.schedules import SCHEDULES
from hvd_ckpt.values import BROKEN, PlainLoader, converted

__all__ = ["BATCH_NORMS", "ON_NAN", "Config", "ConfigError", "read_yaml"]

BATCH_NORMS = ("local", "deferred", "deferred-ranks", "synchronized")
ON_NAN = ("stop", "skip", "ignore")
COMPRESSIONS = ("none", "fp16")
OFFLOADS = ("optimizer",)
WIRES = ("fp32", "fp16", "bf16", "int8")
MAX_BYTES = 1 << 20  # of a configuration file
MOST = 1 << 24  # of what a step holds all at once


class ConfigError(ValueError):
    """A setting is unknown or cannot have this value; one line.

    Attributes:
        passing: what is wrong may not be the next time: a file cannot be read or written at the moment.
    """

    def __init__(self, message: str, passing: bool = False) -> None:
        super().__init__(one_line(message))
        self.passing = passing


def _setting(default: Any, parse: parsing.Parser, help: str) -> Any:
    return field(default=default, metadata={"parse": parse, "help": help})


@dataclass
class Config:
    """The settings of a run; each field's metadata holds its help. Values are checked and converted when it is made.

    Raises:
        ConfigError: a value cannot be; names the setting, the value and what it may be.
    """

    model: str = field(
        metadata={
            "parse": parsing.text,
            "help": "A name of the catalogue, or a folder of a Hugging Face model.",
        }
    )
    model_options: dict[str, Any] = field(
        default_factory=dict,
        metadata={"parse": parsing.mapping, "help": "Options of the model, such as layers=2."},
    )

    text: str | None = _setting(
        None, parsing.text, "Text file or folder to train on.  [default: the standard library's source]"
    )
    tokenizer: str | None = _setting(None, parsing.text, "JSON file of a tokenizer.  [default: bytes]")
    length: int | None = _setting(None, parsing.whole(8, MOST), "Tokens of a sequence.  [default: by model]")
    images: str | None = _setting(
        None, parsing.text, "Folder of images by class, or .npz file.  [default: scikit-learn's digits]"
    )
    pixels: int | None = _setting(
        None, parsing.whole(4, MOST), "Of an image's or volume's side.  [default: by model]"
    )
    volumes: str | None = _setting(
        None, parsing.text, ".npz file of volumes and labels.  [default: synthetic ellipsoids]"
    )
    held_out: float = _setting(
        0.05, parsing.number(0, 0.9), "Share of the samples that is only evaluated on."
    )

    steps: int | None = _setting(None, parsing.whole(1), "Optimizer steps to take.  [default: 100]")
    epochs: int | None = _setting(
        None, parsing.whole(1), "Times to go through the samples, instead of steps."
    )
    batch: int = _setting(8, parsing.whole(1, MOST), "Samples of a step on each rank.")
    accumulate: int = _setting(1, parsing.whole(1), "Micro-batches that a batch is split into.")
    seed: int = _setting(0, parsing.whole(0), "Of weights, order of samples, masks and dropout.")
    optimizer: str = _setting("adamw", parsing.text, "Of torch.optim, in lower case.")
    optimizer_options: dict[str, Any] = field(
        default_factory=dict,
        metadata={"parse": parsing.mapping, "help": "Further arguments of it, such as eps=1e-6."},
    )
    lr: float = _setting(3e-4, parsing.number(0, above=True), "Learning rate after the warm-up.")
    weight_decay: float = _setting(0.01, parsing.number(0), "Of weights, not of biases and norms.")
    schedule: str = _setting(
        "linear", parsing.one_of("schedule", SCHEDULES), "Decay: " + ", ".join(SCHEDULES) + "."
    )
    warmup: int = _setting(0, parsing.whole(0), "Steps in which the learning rate rises to its full height.")
    final_lr: float = _setting(
        0.0, parsing.number(0, 1), "Share of the learning rate that is left at the end (linear, cosine)."
    )
    clip: float | None = _setting(
        None, parsing.number(0, above=True), "Largest norm of all gradients together."
    )
    ema: float | None = _setting(
        None,
        parsing.number(0, 1, above=True),
        "Decay, such as 0.999, of an exponential moving average of the weights.  [default: none is kept]",
    )
    precision: str = _setting("fp32", parsing.one_of("precision", PRECISIONS), ", ".join(PRECISIONS) + ".")

    budget: str | int | None = _setting(
        None, parsing.budget, "Peak of a micro-batch's step, for a plan: 6GiB, 0.3x, 80%, min."
    )
    plan: str | None = _setting(None, parsing.text, "Plan file to use instead of making one.")
    segments: int | None = _setting(
        None, parsing.whole(1), "Recompute the chain of blocks in this many segments."
    )
    reentrant: bool = _setting(False, parsing.truth, "Recompute segments by PyTorch's reentrant variant.")
    checkpoint: str = _setting(
        "always",
        parsing.one_of("checkpoint mode", CHECKPOINTS),
        "Micro-batches that are recomputed: always, except_last, never.",
    )
    batch_norm: str = _setting(
        "local",
        parsing.one_of("batch norm", BATCH_NORMS),
        "Statistics of batch norms: " + ", ".join(BATCH_NORMS) + ".",
    )
    compression: str = _setting(
        "none", parsing.one_of("compression", COMPRESSIONS), "Of gradients on the wire: none, fp16."
    )
    bucket_cap_mb: float = _setting(25.0, parsing.number(0, above=True), "Size of a gradient bucket in MiB.")

    shard: str = _setting(
        "none", parsing.stage, "What is split over the ranks: " + ", ".join(STAGES) + "; or 0 to 3 (ZeRO)."
    )
    wire: str = _setting(
        "fp32",
        parsing.one_of("wire format", WIRES),
        "Of sharded gradients and parameters on the wire: " + ", ".join(WIRES) + ".",
    )
    accumulate_locally: bool = _setting(
        False,
        parsing.truth,
        "Add a step's sharded gradients up on each rank, and send them once; takes their whole size in memory.",
    )
    offload: str | None = _setting(
        None,
        parsing.one_of_or_none("thing to offload", OFFLOADS),
        "Keep it on disk (CPU) or in host memory (CUDA): optimizer, none.",
    )
    offload_folder: str | None = _setting(
        None, parsing.text, "For offloaded state on a CPU.  [default: the temporary folder]"
    )

    eval_every: int | None = _setting(
        None, parsing.whole(1), "Steps between evaluations.  [default: at the end only]"
    )
    eval_batches: int | None = _setting(
        None, parsing.whole(1), "Batches of each rank in an evaluation.  [default: all held-out samples]"
    )
    patience: int | None = _setting(
        None, parsing.whole(1), "End after this many evaluations without a lower loss."
    )
    log_every: int = _setting(10, parsing.whole(1), "Steps between log entries.")
    tensorboard: bool = _setting(False, parsing.truth, "Also write logs for TensorBoard.")
    snapshot_every: int | None = _setting(
        None, parsing.whole(1), "Steps between snapshots.  [default: at the end only]"
    )
    keep_snapshots: int = _setting(2, parsing.whole(1), "Newest snapshots to keep.")
    blocking_snapshots: bool = _setting(
        False, parsing.truth, "Stand still while a snapshot is written; spares rank 0 a copy of the state."
    )
    on_nan: str = _setting(
        "stop",
        parsing.one_of("answer to a loss that is nan", ON_NAN),
        "When a rank's loss is nan or infinite: " + ", ".join(ON_NAN) + ".",
    )
    check_weights: int | None = _setting(
        None, parsing.whole(1), "Steps between checks that all ranks have the same weights.  [default: never]"
    )
    stall_timeout: float = _setting(
        1800.0, parsing.number(0, above=True), "Seconds a rank waits for the others before it ends."
    )
    commit_every: int = _setting(10, parsing.whole(1), "Steps between commits in an elastic job.")
    output: str | None = _setting(None, parsing.text, "Folder of the run.  [default: runs/train-<time>]")
    dry_run: bool = _setting(False, parsing.truth, "Say what the run is about to do, and end.")
    resume: str | None = _setting(
        None,
        parsing.text,
        "Folder of a run or snapshot to go on from; a run's folder is also the output then.",
    )
    device: str | None = _setting(
        None, parsing.text, "cpu, cuda, or cuda:N.  [default: cuda by local rank, else cpu]"
    )

    def __post_init__(self) -> None:
        for setting in dataclasses.fields(self):
            value = getattr(self, setting.name)
            if value is not None or setting.default is not None:
                setattr(self, setting.name, _checked(setting, value))
        self._check_together()

    def _check_together(self) -> None:
        if self.steps is not None and self.epochs is not None:
            raise ConfigError(f"steps {self.steps} and epochs {self.epochs}: give one of them")
        recomputing = [name for name in ("budget", "plan", "segments") if getattr(self, name) is not None]
        if len(recomputing) > 1:
            raise ConfigError(f"{' and '.join(recomputing)}: give one of them, each says what is recomputed")
        if self.reentrant and self.segments is None:
            raise ConfigError("reentrant: it is a variant of recomputing segments, give segments as well")
        if self.accumulate > self.batch:
            raise ConfigError(
                f"accumulate {self.accumulate}: a batch of {self.batch} has fewer samples, give at most {self.batch}"
            )
        if self.ema == 1:
            raise ConfigError("ema 1.0: the average would never move, give less than 1")
        if self.ema is not None and self.precision.startswith("apex"):
            raise ConfigError(f"ema {self.ema}: Apex replaces the parameters, give precision fp16 or bf16")
        if self.patience is not None and self.eval_every is None:
            raise ConfigError(f"patience {self.patience}: it counts evaluations, give eval_every as well")
        if self.patience is not None and not self.held_out:
            raise ConfigError(f"patience {self.patience}: nothing is held out to evaluate on, give held_out")
        if self.resume is not None and self.output is not None:
            raise ConfigError(f"output {self.output}: a resumed run goes on in its own folder, leave it out")
        self._check_sharding()

    def _check_sharding(self) -> None:
        if self.offload is not None and not self.stage:
            raise ConfigError(
                f"offload {self.offload}: it is of sharded runs, give shard {STAGES[1]} or more as well, or offload none"
            )
        if self.offload_folder is not None and self.offload is None:
            raise ConfigError(
                f"offload_folder {self.offload_folder}: nothing is offloaded, give offload as well"
            )
        if self.wire != "fp32" and self.stage < 2:
            raise ConfigError(
                f"wire {self.wire}: it is of sharded gradients, give shard {STAGES[2]} or {STAGES[3]} as well"
            )
        if self.accumulate_locally and self.stage < 2:
            raise ConfigError(
                f"accumulate_locally: it is of sharded gradients, give shard {STAGES[2]} or {STAGES[3]} as well"
            )
        if self.stage >= 2 and self.compression != "none":
            raise ConfigError(
                f"compression {self.compression}: sharded gradients are not allreduced, give wire {self.compression} instead"
            )
        if self.stage and self.precision.startswith("apex"):
            raise ConfigError(
                f"shard {self.shard}: Apex replaces the parameters, which were split by then, give precision fp16 or bf16"
            )

    @property
    def stage(self) -> int:
        """What is split over the ranks, as a number from 0 to 3."""
        return stage_of(self.shard)

    @property
    def micro_batch(self) -> int:
        """Samples of the largest micro-batch."""
        return -(-self.batch // self.accumulate)

    @classmethod
    def make(cls, values: Mapping[str, Any]) -> Config:
        """The configuration with these values; dashes in names are taken as underscores.

        Raises:
            ConfigError: a name is unknown (says the nearest), the model is missing, or a value cannot be.
        """
        known = {setting.name for setting in dataclasses.fields(cls)}
        given = {}
        for key, value in values.items():
            name = str(key).replace("-", "_")
            if name not in known:
                raise ConfigError(unknown("setting", str(key), sorted(known)))
            if value is not None:
                given[name] = value
        if "model" not in given:
            raise ConfigError("model: give one, see the list in `hvd-ckpt train --help`")
        return cls(**given)

    def as_dict(self) -> dict[str, Any]:
        """All settings, as plain values."""
        return dataclasses.asdict(self)

    def write_yaml(self, path: Path) -> None:
        """Writes the settings that differ from the defaults, with the model, as a file that :func:`read_yaml` takes.

        The file is there whole or not at all; one that says the same already is left as it is.

        Raises:
            ConfigError: it cannot be written.
        """
        values = {
            setting.name: getattr(self, setting.name)
            for setting in dataclasses.fields(self)
            if setting.name == "model" or getattr(self, setting.name) not in (setting.default, {})
        }
        text = yaml.safe_dump(values, sort_keys=False)
        try:
            if not path.is_file() or path.read_bytes() != text.encode():
                write_text(text, path)
        except OSError as error:
            raise ConfigError(f"cannot write '{path}': {error.strerror}", passing=True) from None


def _checked(setting: dataclasses.Field[Any], value: Any) -> Any:
    try:
        return setting.metadata["parse"](value)
    except ValueError as error:
        raise ConfigError(f"{setting.name} {_shown(value)}: {error}") from None


def _shown(value: Any) -> str:
    if isinstance(value, int) and abs(value) >= 2**63:
        return "(a very large number)"
    text = value if isinstance(value, str) else repr(value)
    return repr(text if len(text) <= 60 else text[:57] + "...") if isinstance(value, str) else text[:60]


class _UniqueKeys(PlainLoader):
    """YAML forgets the first of two equal keys; a configuration had better not."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(f"line {key.start_mark.line + 1}: the name of a setting must be a text")
            if key.value in seen:
                raise ConfigError(f"line {key.start_mark.line + 1}: the setting '{key.value}' is given twice")
            seen.add(key.value)
        return dict(super().construct_mapping(node, deep))


def read_yaml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The settings in a YAML file, unchecked.

    Raises:
        ConfigError: it cannot be read, is no YAML, or holds no settings.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ConfigError(f"the configuration '{path}' is a folder or a device: name a file")
        with open(path, "rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration '{path}': {error.strerror}") from None
    except ConfigError:
        raise
    except ValueError as error:  # no path
        raise ConfigError(f"cannot read the configuration '{path}': {error}") from None
    if len(content) > MAX_BYTES:
        raise ConfigError(
            f"the configuration '{path}' is larger than {MAX_BYTES >> 20} MiB: give another file"
        )
    try:
        values = yaml.load(content.decode("utf-8"), Loader=_UniqueKeys)
    except UnicodeDecodeError as error:
        raise ConfigError(f"the configuration '{path}' is no text: byte {error.start} is no UTF-8") from None
    except ConfigError as error:
        raise ConfigError(f"the configuration '{path}', {error}") from None
    except BROKEN as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or "it is nested too deeply or has a value that is none"
        raise ConfigError(f"the configuration '{path}'{where} is no YAML: {problem}") from None
    if not isinstance(values, dict):
        raise ConfigError(
            f"the configuration '{path}' holds no settings: write lines such as 'model: bert-small'"
        )
    return {
        str(name): converted(value) if isinstance(value, dict) else value for name, value in values.items()
    }
