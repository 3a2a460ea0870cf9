"""Models, data, losses and metrics of the user's own modules, named as ``module:attribute`` in the configuration."""

from __future__ import annotations

import inspect
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import numpy
from torch import Tensor, nn
from torch.utils.data import IterableDataset, Subset, default_collate

from hvd_ckpt.app.models.catalog import FACTS
from hvd_ckpt.app.training.config import Config, ConfigError
from hvd_ckpt.app.training.logs import KEYS
from hvd_ckpt.data.dataset import Dataset, Purpose, generator, validation_size
from hvd_ckpt.data.objectives import OBJECTIVES, Batch, Objective
from hvd_ckpt.utils.named import import_named
from hvd_ckpt.utils.text import unknown

KIND = "own"  # of data that --data names
ENDLESS = 1 << 62  # samples, more than any run takes


class OwnModel:
    """Builder of the model that a function returns, in place of a :class:`hvd_ckpt.app.models.catalog.Entry`.

    Args:
        kind: kind of the data that the model is trained on.

    Raises:
        ValueError: there is no such function.
    """

    folder: Path | None = None
    data: Mapping[str, int] = {}

    def __init__(self, name: str, kind: str) -> None:
        self.name, self.kind = name, kind
        self._function = import_named("model", name)
        self._parameters = inspect.signature(self._function).parameters
        self._takes_all = any(
            parameter.kind is parameter.VAR_KEYWORD for parameter in self._parameters.values()
        )

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Refuses options that the function does not take.

        Raises:
            ValueError: there is such an option; says the nearest right name.
        """
        for name in options:
            if name not in self._parameters and not self._takes_all:
                raise ValueError(unknown(f"option of {self.name}", name, self._parameters))

    def build(self, facts: Mapping[str, Any], options: Mapping[str, Any] | None = None) -> nn.Module:
        """The model, in training mode. A function may return ``(model, sample, loss)`` as for ``hvd-ckpt plan``.

        Raises:
            ValueError: the function returned something else.
        """
        taken = {name: value for name, value in facts.items() if name in self._parameters}
        made = self._function(**{**taken, **(options or {})})
        model = made[0] if isinstance(made, tuple) and made else made
        if not isinstance(model, nn.Module):
            raise ValueError(f"{self.name} returned {type(made).__name__}, and must return an nn.Module")
        return model.train()


class Samples:
    """A map-style ``torch.utils.data.Dataset`` of samples ``(input, target)`` or ``(input, target, shared)``, as a
    :class:`~hvd_ckpt.data.dataset.Dataset`.

    PyTorch's ``default_collate`` makes a batch of them. An input that is a tuple becomes several positional arguments of the model;
    ``shared`` is a dict of keyword arguments.
    """

    def __init__(self, samples: Any) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def batch(self, indices: Sequence[int], epoch: Sequence[int]) -> Batch:
        """The samples with these numbers, the same ones in each epoch."""
        return _collated([self._samples[index] for index in indices])


def _collated(samples: list[Any]) -> Batch:
    first = samples[0]
    if not isinstance(first, (tuple, list)) or len(first) not in (2, 3):
        keys = f" with the keys {', '.join(map(str, first))}" if isinstance(first, Mapping) else ""
        raise ValueError(f"a sample is a {type(first).__name__}{keys}")
    inputs, targets, *shared = default_collate(samples)
    return Batch(
        tuple(inputs) if isinstance(inputs, list) else (inputs,), targets, shared[0] if shared else {}
    )


class Stream:
    """An iterable of samples, pass after pass, numbered in the order in which they come; there are ``ENDLESS``.

    Every rank reads all of it and makes batches of its own samples, so the position is one number, and any number of ranks resumes
    from it. Samples from the lowest number of a batch on are kept until a batch is past them. Before each pass ``set_epoch`` of the
    iterable is called with its number, if there is such a method.

    Args:
        source: iterates over the same samples each time, given the pass.
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self.seek(0, 0)

    def __len__(self) -> int:
        return ENDLESS

    def batch(self, indices: Sequence[int], epoch: Sequence[int]) -> Batch:
        """The samples with these numbers. What has been dropped is read again, from the beginning of its pass.

        Raises:
            ValueError: a pass has no samples.
        """
        first, last = min(indices), max(indices)
        # Batches come in order, but the first was read before, to try functions on it or to plan.
        if first < self._first:
            self.seek(*self.pass_of(first))
        while self._first + len(self._kept) <= last:
            self._kept.append(self._read())
            self._drop(first)
        self._drop(first)
        return _collated([self._kept[index - first] for index in indices])

    def pass_of(self, index: int) -> tuple[int, int]:
        """The pass of a sample that has been read since :meth:`seek`, else the first one; and the number of its first sample."""
        return next((start for start in reversed(self._passes) if start[1] <= index), (0, 0))

    def seek(self, number: int, first: int) -> None:
        """Continues with a pass, and the number of its first sample."""
        # With passes of 3 samples: samples 0 1 2 are of pass 0, which starts at 0; samples 3 4 5 are of
        # pass 1, which starts at 3. `_passes` is then [(0, 0), (1, 3)].
        self._passes = [(number, first)]
        self._first, self._kept = first, deque[Any]()
        self._iterator = self._pass(number)

    def _pass(self, number: int) -> Iterator[Any]:
        if hasattr(self._source, "set_epoch"):
            self._source.set_epoch(number)
        return iter(self._source)

    def _read(self) -> Any:
        for sample in self._iterator:
            return sample
        (number, first), index = self._passes[-1], self._first + len(self._kept)
        # A pass without samples would be followed by the next one, and so on for ever.
        if index == first:
            raise ValueError(f"pass {number} over the stream has no samples")
        self._passes.append((number + 1, index))
        self._iterator = self._pass(number + 1)
        return self._read()

    def _drop(self, first: int) -> None:
        while self._kept and self._first < first:
            self._kept.popleft()
            self._first += 1


def is_stream(samples: Any) -> bool:
    """Whether samples have no numbers, but come one after the other."""
    return isinstance(samples, IterableDataset) or (
        not _are_numbered(samples) and hasattr(samples, "__iter__")
    )


def _are_numbered(samples: Any) -> bool:
    return hasattr(samples, "__len__") and (hasattr(samples, "__getitem__") or _makes_batches(samples))


def _makes_batches(samples: Any) -> bool:
    """Whether there is a method ``batch(indices, epoch)``; that of Hugging Face's data sets is another one."""
    method = getattr(samples, "batch", None)
    return callable(method) and "epoch" in inspect.signature(method).parameters


def open_data(config: Config) -> tuple[Dataset, Dataset | None, dict[str, Any]]:
    """Calls the function ``config.data``. Returns the samples to train and to evaluate on, and the facts of the data on which a
    model depends. These facts are attributes of the training samples.

    Raises:
        ValueError: there is no such function, or it returns something else.
    """
    assert config.data is not None
    name = config.data.path
    function = import_named("data", name)
    try:
        made = function()
    except (ValueError, OSError) as error:
        raise ValueError(
            f"data: {name} raised {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error
    if isinstance(made, tuple) and len(made) != 2:
        raise ValueError(f"data: {name} returned a tuple of {len(made)}, and must return one data set or two")
    train, test = made if isinstance(made, tuple) else (made, None)
    for data_set in (train,) if test is None else (train, test):
        if not _are_numbered(data_set) and not is_stream(data_set):
            raise ValueError(
                f"data: {name} returned {type(made).__name__}, and must return a data set with a length and numbered samples, or "
                "one to iterate over, or two, to train and to evaluate on"
            )
        if is_stream(data_set) and iter(data_set) is data_set:
            raise ValueError(
                f"data: {name} returned a {type(data_set).__name__}, which can be read once; return an object whose __iter__ "
                "begins anew"
            )
    # Before data sets are wrapped, since a wrapper does not have the attributes of the user's own.
    facts = {fact: getattr(train, fact) for fact in FACTS if hasattr(train, fact)}
    if is_stream(test):
        test = _beginning(config, test)
    if is_stream(train):
        if config.epochs is not None:
            raise ValueError(
                f"epochs {config.epochs}: {name} returned a stream, which has no length, give steps"
            )
        train = Stream(train)
    if test is None and (count := validation_size(len(train), config.validation_split)):
        if isinstance(train, Stream) or _makes_batches(train):
            stream = isinstance(train, Stream)
            kind, more = ("stream", " with eval_batches") if stream else ("data set that makes batches", "")
            raise ValueError(
                f"data: {name} returned one {kind}, which cannot be split, return a second one to evaluate on{more}, or give "
                "validation_split 0"
            )
        # Sorted, so that files are read in order; which samples are in a part is random all the same.
        order = generator(Purpose.SPLIT, config.seed).permutation(len(train))
        train, test = (Subset(train, numpy.sort(part).tolist()) for part in (order[count:], order[:count]))
    samples: Dataset = train if _makes_batches(train) else Samples(train)
    evaluated: Dataset | None = test if test is None or _makes_batches(test) else Samples(test)
    try:
        # One batch is made now, so that samples of a wrong form are an error here and not in the loader.
        samples.batch([0], [0])
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"data: no batch can be made of the samples of {name}, which are to be (input, target) or (input, target, shared) of "
            f"tensors: {type(error).__name__}: {reason}"
        ) from None
    return samples, evaluated, facts


def _beginning(config: Config, stream: Any) -> list[Any]:
    """The samples of a stream that are evaluated."""
    if config.eval_batches is None:
        raise ValueError(f"data: {config.data} returned a stream to evaluate on, give eval_batches")
    return list(itertools.islice(stream, config.eval_batches * config.global_batch(hvd.size())))


def kind_of_data(config: Config) -> str:
    """The kind of data that a model of the user's own is trained on, by the setting that names them.

    Raises:
        ConfigError: none does.
    """
    if config.data is None:
        raise ConfigError(
            f"model {config.model}: give data: a function that returns samples, or text, tokens, images or volumes"
        )
    return "causal" if config.data.is_text else config.data.kind


class OwnObjective(Objective):
    """A loss and metrics that are functions of the model's output and the targets.

    Args:
        base: an objective whose loss, or whose metrics, these replace or add to; None for means over samples.
        loss: None for that of ``base``.
    """

    def __init__(
        self,
        base: Objective | None,
        loss: Callable[..., Tensor] | None,
        metrics: Mapping[str, Callable[..., Tensor]],
    ) -> None:
        self._base, self._loss, self._metrics = base, loss, metrics
        self.unit = "samples" if base is None else base.unit

    def weight(self, batch: Batch) -> float:
        return float(len(batch)) if self._base is None else self._base.weight(batch)

    def loss(self, output: Any, batch: Batch) -> Tensor:
        if self._loss is not None:
            return self._loss(output, batch.targets)
        assert self._base is not None
        return self._base.loss(output, batch)

    def metrics(self, output: Any, batch: Batch) -> dict[str, Tensor]:
        known = {} if self._base is None or self._loss is not None else self._base.metrics(output, batch)
        return {**known, **{name: metric(output, batch.targets) for name, metric in self._metrics.items()}}

    def of_loss(self, loss: float) -> dict[str, float]:
        return {} if self._base is None or self._loss is not None else self._base.of_loss(loss)

    def units(self, batch: Batch) -> int:
        return len(batch) if self._base is None else self._base.units(batch)


def of_own(config: Config) -> bool:
    """Whether the data are those of a function of the user."""
    return config.data is not None and config.data.kind == KIND


def objective_of(config: Config, kind: str) -> Objective:
    """The loss and metrics of a run: those of its kind of data, replaced by what the configuration names.

    Raises:
        ValueError: a function cannot be imported, or data of one's own have no loss.
    """
    base = OBJECTIVES[kind]() if kind in OBJECTIVES else None
    metrics = {}
    for name, function in config.metrics.items():
        if name in KEYS:
            raise ValueError(f"metrics: {name} is a key of the log already, choose another name")
        if not isinstance(function, str):
            raise ValueError(f"metrics: {name} is {function!r}, give the name of a function, module:function")
        metrics[name] = import_named("metric", function)
    loss: Any = None if config.loss is None else import_named("loss", config.loss)
    if isinstance(loss, type) and issubclass(loss, Objective):
        base, loss = loss(), None
    elif loss is None and base is None:
        raise ValueError(f"loss: give a function of output and targets for the data {config.data}")
    if base is not None and loss is None and not metrics:
        return base
    return OwnObjective(base, loss, metrics)
