"""Training configuration: one schema for Python, YAML files and the command line.

Each field has a docstring, which is the help of its flag. Values are validated when the configuration is created,
before anything is built.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args

import yaml
from pydantic import ConfigDict, Field, ValidationError, model_validator
from typing_extensions import Self

from hvd_ckpt.app.training.field_types import (
    DATA,
    Count,
    Data,
    Local,
    Options,
    Planned,
    Positive,
    Segments,
    Sharded,
    Stages,
    Steps,
    Text,
    Verify,
    WithOptions,
    one_of,
)
from hvd_ckpt.processes.launchers import is_elastic
from hvd_ckpt.utils import rules
from hvd_ckpt.utils.named import is_named
from hvd_ckpt.utils.plain_data import BROKEN, PlainDumper, PlainLoader, read_bytes, write_text
from hvd_ckpt.utils.schema import Strict, Wrong, first_error
from hvd_ckpt.utils.text import CHECKPOINTS, PRECISIONS, SCHEDULES, one_line, unknown

MAX_BYTES = 1 << 20  # of a configuration file
MOST = 1 << 24  # of what a step holds all at once
BATCH_NORMS = ("local", "deferred", "deferred-ranks", "synchronized")
GROUPS = {  # the title of each group of settings, by its first one
    "model": "Model and data",
    "steps": "Training",
    "precision": "Numbers and memory",
    "replicas": "Ranks",
    "eval_every": "Evaluation, logs and snapshots",
    "on_nan": "The run",
}
RENAMED = {  # earlier names, and those of Lightning and transformers
    "learning_rate": "lr",
    "max_steps": "steps",
    "max_epochs": "epochs",
    "num_train_epochs": "epochs",
    "batch_size": "batch",
    "per_device_train_batch_size": "batch",
    "accumulate_grad_batches": "accumulate",
    "gradient_accumulation_steps": "accumulate",
    "gradient_clip_val": "clip",
    "max_grad_norm": "clip",
    "warmup_steps": "warmup",
    "lr_scheduler_type": "schedule",
    "output_dir": "output",
    "save_steps": "snapshot_every",
    "length": "sequence_length",
    "documents": "data lines:FILE",
    "local_steps": "local N",
    "stages": "pipeline N",
    "pipeline_schedule": "pipeline N,schedule=NAME",
    "load": "plan FILE",
    "held_out": "validation_split",
    "chunks": "accumulate",
    "micro_batches": "accumulate",
}
REMOVED = {  # and what does the same
    "np": "start the ranks with horovodrun -np N",
    "launcher": "start the ranks with this command",
    "max_restarts": "repeat hvd-ckpt train --resume RUN until its exit status is 0",
    "grace": "create the file 'stop' in the folder of the run and wait",
    "tracker": "give a callback that writes the log for your tool, or tensorboard",
    "prompt": "export a snapshot for transformers, whose generate() continues it",
    "peak_tflops": "divide the rate in the log by the peak of your devices",
}


class ConfigError(ValueError):
    """A setting is unknown or has a value that is not allowed; one line."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


@contextlib.contextmanager
def config_errors(*kinds: type[Exception], about: str = "") -> Iterator[None]:
    """A context in which errors, a ValueError and those of other ``kinds``, become a ConfigError ``about`` a setting."""
    expected: tuple[type[Exception], ...] = (ValueError, *kinds)
    try:
        yield
    except expected as error:
        raise ConfigError(f"{about}: {' '.join(str(error).split())}" if about else str(error)) from None


def instead_of(name: str) -> str | None:
    """What to do in place of a setting that there is not, or not any more; None for any other name."""
    name = name.replace("-", "_")
    if name in REMOVED or name in Config.model_fields:
        return REMOVED.get(name)
    with_options = (Data, Local, Planned, Segments, Sharded, Stages, Verify)
    of_options = [
        f"{setting} VALUE,{name}=VALUE"
        for setting, field in Config.model_fields.items()
        for kind in with_options
        if kind in (field.annotation, *get_args(field.annotation)) and name in kind.model_fields
    ]
    known = [RENAMED[name]] if name in RENAMED else [f"data {name}:PATH"] if name in DATA else of_options
    return f"did you mean {' or '.join(map(repr, known))}?" if known else None


class Config(Strict):
    """Settings of a training run.

    Raises:
        ConfigError: a value is not allowed. The message names the setting, the value and the allowed values.
    """

    model_config = ConfigDict(protected_namespaces=(), use_attribute_docstrings=True)

    model: Text
    """A name of the catalogue, a folder of a Hugging Face model, or module:function."""
    model_options: Options = Field({})
    """Options of the model, such as layers=2."""

    data: Data | None = None
    """What to train on: text:PATH, lines:FILE or jsonl:FILE (documents), tokens:PATH[,vocabulary=N,type=T], images:PATH,
    volumes:FILE, or module:function.  [default: by model]"""
    tokenizer: Text | None = None
    """JSON file of a tokenizer.  [default: bytes]"""
    sequence_length: Annotated[int, Field(ge=8, le=MOST)] | None = None
    """Tokens in a sample, and the longest input of a new model.  [default: by model]"""
    pixels: Annotated[int, Field(ge=4, le=MOST)] | None = None
    """Side of an image or volume.  [default: by model]"""
    loss: Text | None = None
    """module:function of output and targets.  [default: by kind of data]"""
    metrics: Options = Field({})
    """Further metrics, such as iou=my_module:iou."""
    validation_split: float = Field(0.05, ge=0, le=0.9)
    """Share of the samples to evaluate on."""

    steps: Count | None = None
    """Optimizer steps to take.  [default: 100]"""
    epochs: Count | None = None
    """Passes over the samples, instead of steps."""
    batch: int = Field(8, ge=1, le=MOST)
    """Samples of each rank, or of each replica, in a step."""
    global_batch: Annotated[int, Field(ge=1, le=MOST)] | None = None
    """Samples of all ranks in a step, instead of batch: a run that resumes on another number of ranks keeps them."""
    accumulate: Count = 1
    """Micro-batches that a batch is split into."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of weights, order of samples, masks and dropout."""
    optimizer: Text = "adamw"
    """A class of torch.optim in lower case."""
    optimizer_options: Options = Field({})
    """Further arguments of the optimizer, such as betas=[0.9,0.95]."""
    lr: Positive = 3e-4
    """Learning rate after the warm-up."""
    weight_decay: float = Field(0.01, ge=0)
    """Weight decay of weights, but not of biases and norms."""
    schedule: Annotated[str, one_of("schedule", *SCHEDULES)] = "linear"
    """Decay: constant, linear, cosine, inverse-sqrt, step."""
    warmup: int = Field(0, ge=0, lt=2**63)
    """Steps in which the learning rate rises."""
    layer_decay: Annotated[float, Field(gt=0, le=1)] | None = None
    """Learning rate of a block divided by that of the next block, such as 0.9."""
    freeze: Text | None = None
    """Names of parameters that are not trained, such as 'embedding*,*.bias'."""
    clip: Positive | None = None
    """Largest norm of all gradients together."""
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay, such as 0.999, of an exponential moving average of the weights.  [default: no average]"""
    precision: Annotated[str, one_of("precision", *PRECISIONS)] = "fp32"
    """fp32, fp16, bf16, apex-O0, apex-O1, apex-O2, apex-O3."""
    deterministic: bool = False
    """Use kernels that repeat bit for bit on GPUs; an operation without one is an error."""

    budget: Planned | None = None
    """Memory limit of a plan for the step of a micro-batch (with stages: for all of a stage): 6GiB, 0.3x, 80%, min. cache=FOLDER
    uses plans again, chunk_head=false never computes a head in chunks."""
    plan: Text | None = None
    """Plan file to use instead of making one."""
    segments: Segments | None = None
    """Recompute the chain of blocks in this number of segments; reentrant=true by PyTorch's variant."""
    verify: Verify = Verify()
    """Passes whose recomputed bits are compared (first, always, never, n for every n-th); weights=false: do not compare a part of
    the ranks' weights in every step; every=N: compare all weights every N steps.  [default: first]"""
    checkpoint: Annotated[str, one_of("checkpoint mode", *CHECKPOINTS, "auto")] = "always"
    """Micro-batches that are recomputed: always, except_last, never; in stages also auto."""
    batch_norm: Annotated[str, one_of("batch norm", *BATCH_NORMS)] = "local"
    """Statistics of batch norms: local, deferred, deferred-ranks, synchronized."""
    compression: Annotated[str, one_of("compression", "none", "fp16")] = "none"
    """Communication dtype of gradients: none, fp16."""
    bucket_cap_mb: Positive = 25.0
    """Size of a gradient bucket in MiB."""

    replicas: Count | None = None
    """Logical replicas, a power of two: any power of two of ranks up to it gives the same bits."""
    shard: Sharded = Sharded()
    """State that is split over the ranks: none, optimizer, gradients, parameters; or 0 to 3 (ZeRO). wire (communication format:
    fp32, fp16, bf16, int8; int4 only for gradients), offload (optimizer, or parameters with gradients and optimizer; to host memory
    on CUDA, to files in folder=FOLDER on a CPU), accumulate_locally=true (add up the gradients of a step on each rank and send them
    once; needs memory for whole gradients), within (host, or groups such as [[0,1],[2,3]], which keep a second copy of the
    parameters).  [default: none]"""
    local: Local | None = None
    """Local SGD: steps of each rank on its own between two averages of the parameters; outer_lr, outer_momentum (DiLoCo), fragments
    (parts that are averaged in turn), delay (steps that an average overlaps), wire (communication format of averages), within
    (host, or groups such as [[0,1],[2,3]], which reduce gradients in each step).  [default: no local SGD]"""
    pipeline: Stages = Stages()
    """Pipeline stages: consecutive blocks of the model on different ranks; schedule (gpipe, 1f1b, interleaved),
    virtual_stages, balance=[3,4].  [default: 1]"""
    tensor: Count = 1
    """Parts of each layer, on different ranks (tensor parallelism)."""
    eval_every: Count | None = None
    """Steps between evaluations.  [default: at the end only]"""
    eval_batches: Count | None = None
    """Batches of each rank in an evaluation.  [default: all validation samples]"""
    patience: Count | None = None
    """End after this number of evaluations without a lower loss."""
    log_every: Count = 10
    """Steps between log entries."""
    tensorboard: bool = False
    """Also write logs for TensorBoard."""
    callback: Text | None = None
    """module:class of your own with methods for events of the run."""
    profile: Steps | None = None
    """First and last step of a trace, such as 10:15."""
    snapshot_every: Count | None = None
    """Steps between snapshots.  [default: at the end only]"""
    keep_snapshots: Count = 2
    """Number of newest snapshots to keep."""
    blocking_snapshots: bool = False
    """Wait while a snapshot is written; saves rank 0 a copy of the state."""
    on_nan: Annotated[str, one_of("answer to a loss that is nan", "stop", "skip", "ignore")] = "stop"
    """When a rank's loss is nan or infinite: stop, skip, ignore."""
    stall_timeout: Positive = 1800.0
    """Seconds that a rank waits for the others before it ends."""
    commit_every: Count = 10
    """Steps between commits in an elastic job; with local, each average is a commit."""
    output: Text | None = None
    """Folder of the run.  [default: a new one in runs/]"""
    dry_run: bool = False
    """Print a summary of the run, and end."""
    resume: Text | None = None
    """Folder of a run or snapshot to resume from; the folder of a run is then also the output."""
    device: Text | None = None
    """cpu, cuda, or cuda:N.  [default: cuda by local rank, else cpu]"""

    def __init__(self, model: str | None = None, /, **settings: Any) -> None:
        if model is not None:
            settings["model"] = model
        for name in settings:
            self._check_known(name)
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise ConfigError(first_error(error)) from None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        rules.check(self._features(), {"stages": f"pipeline {self.pipeline.stages}"}, write=rules.setting)
        if self.global_batch is None and self.accumulate > self.batch:
            raise ValueError(
                f"accumulate {self.accumulate}: it is more than the batch of {self.batch} samples"
            )
        balance, parts = self.pipeline.balance, self.pipeline.parts_of_model
        if balance is not None and len(balance) != parts:
            raise ValueError(
                f"balance {balance}: it has {len(balance)} numbers of blocks, give one for each of {parts} parts"
            )
        if self.replicas is not None and self.replicas & (self.replicas - 1):
            raise ValueError(f"replicas {self.replicas}: it is not a power of two, give 1, 2, 4, 8, ...")
        return self

    def _features(self) -> dict[str, Any]:
        """The settings that differ from their defaults, with their options, and what follows from several of them."""
        given: dict[str, Any] = {}
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if value == field.default:
                continue
            if isinstance(value, WithOptions):
                options = value.given()
                given |= options | {f"{option} of {name}": set for option, set in options.items()}
                value = options.get(next(iter(type(value).model_fields)))
            given[name] = value
        return {
            **given,
            "model": self.model,
            **({"batch": self.batch} if "batch" in self.model_fields_set else {}),
            "module:function": is_named(self.model),
            "optimizer": self.optimizer.strip().lower(),
            "wire of gradients": given.get("wire"),
            rules.ELASTIC: is_elastic(),
            "a plan of stages": self.in_stages and (self.budget is not None or self.plan is not None),
        }

    @property
    def in_stages(self) -> bool:
        """Whether the model is cut into pipeline stages."""
        return self.pipeline.stages > 1

    def parts_of_batch(self, ranks: int) -> int:
        """Parts of a global batch: one for each rank, or for each logical replica."""
        return self.replicas or ranks

    def samples_of_step(self, ranks: int) -> int:
        """Samples of a step on that many ranks (of one pipeline stage)."""
        return self.global_batch or self.batch * self.parts_of_batch(ranks)

    def on_ranks(self, ranks: int) -> Config:
        """These settings on that many ranks (of one pipeline stage), with ``batch`` in place of ``global_batch``.

        Raises:
            ConfigError: the global batch cannot be divided among them.
        """
        if self.global_batch is None:
            return self
        parts = self.parts_of_batch(ranks)
        if self.global_batch % parts:
            owners = "replicas" if self.replicas else "ranks"
            raise ConfigError(
                f"global_batch {self.global_batch}: it cannot be divided among {parts} {owners}, give a multiple of {parts}"
            )
        settings = self.model_dump(exclude_defaults=True, exclude={"global_batch"})
        return Config(**settings, batch=self.global_batch // parts)

    @property
    def micro_batch(self) -> int:
        """Samples of the largest micro-batch.

        Raises:
            ConfigError: only the batch of all ranks is known.
        """
        if self.global_batch is not None:
            raise ConfigError(
                f"global_batch {self.global_batch}: give batch, the samples of one rank, instead"
            )
        return -(-self.batch // self.accumulate)

    @classmethod
    def make(cls, values: Mapping[str, Any]) -> Config:
        """The configuration with these values. Dashes in names become underscores, and None means the default.

        Raises:
            ConfigError: a name is unknown (names the nearest), the model is missing, or a value is not allowed.
        """
        for key in values:
            cls._check_known(str(key))
        given = {str(key).replace("-", "_"): value for key, value in values.items()}
        return cls(**{name: value for name, value in given.items() if value is not None})

    @classmethod
    def _check_known(cls, name: str) -> None:
        if (new := instead_of(name)) is not None:
            raise ConfigError(f"no setting '{name}': {new}")
        if name.replace("-", "_") not in cls.model_fields:
            raise ConfigError(unknown("setting", name, sorted(cls.model_fields)))

    def as_dict(self) -> dict[str, Any]:
        """All settings, as plain values."""
        return self.model_dump()

    def write_yaml(self, path: Path) -> None:
        """Writes the settings that differ from the defaults, with the model, as a file for :func:`read_yaml`.

        The file is written completely or not at all. A file with the same content is not changed.

        Raises:
            ConfigError: it cannot be written.
        """
        text = yaml.dump(self.model_dump(exclude_defaults=True), Dumper=PlainDumper, sort_keys=False)
        try:
            if not path.is_file() or path.read_bytes() != text.encode():
                write_text(text, path)
        except OSError as error:
            raise ConfigError(f"cannot write '{path}': {error.strerror}") from None


def read_yaml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The settings in a YAML file, unchecked, by names with underscores.

    Raises:
        ConfigError: it cannot be read, is not valid YAML, or holds no settings.
    """
    name = f"the configuration '{path}'"
    try:
        content = read_bytes(Path(path), "name a file")
    except Wrong as error:
        raise ConfigError(f"{name} {str(error).removeprefix('it ')}") from None
    except (OSError, ValueError) as error:  # a path with a NUL character
        raise ConfigError(f"cannot read {name}: {getattr(error, 'strerror', error)}") from None
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{name} is larger than {MAX_BYTES >> 20} MiB: give another file")
    try:
        values = yaml.load(content.decode("utf-8"), Loader=PlainLoader)
    except BROKEN as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}," if mark is not None else ""
        problem = getattr(error, "problem", None) or "it is nested too deeply, or has an invalid value"
        raise ConfigError(f"{name}{where} is not valid YAML: {problem}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{name} holds no settings: write lines such as 'model: bert-small'")
    return {str(key).replace("-", "_"): value for key, value in values.items()}
