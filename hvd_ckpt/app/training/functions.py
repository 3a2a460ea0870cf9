"""Data, losses and metrics by functions of the user, which the configuration names as ``module:attribute``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any

from torch import Tensor
from torch.utils.data import IterableDataset, default_collate

from hvd_ckpt.app.models.catalog import FACTS
from hvd_ckpt.app.training.config import Config
from hvd_ckpt.app.training.logs import KEYS
from hvd_ckpt.data.dataset import Dataset, NumberedSamples
from hvd_ckpt.data.objectives import OBJECTIVES, Batch, Objective
from hvd_ckpt.utils.named import import_named


class Samples(NumberedSamples):
    """A map-style ``torch.utils.data.Dataset`` of samples ``(input, target)`` or ``(input, target, shared)``, as a
    :class:`~hvd_ckpt.data.dataset.Dataset`.

    PyTorch's ``default_collate`` makes a batch of them. An input that is a tuple becomes several positional arguments of the model;
    ``shared`` is a dict of keyword arguments.
    """

    def __init__(self, samples: Any, seed: int) -> None:
        super().__init__(len(samples), seed)
        self._samples = samples

    def batch(self, indices: Sequence[int], epoch: Sequence[int]) -> Batch:
        """The samples with these numbers, the same ones in each epoch."""
        samples = [self._samples[number] for number in self._find(indices, epoch)[0].tolist()]
        first = samples[0]
        if not isinstance(first, (tuple, list)) or len(first) not in (2, 3):
            keys = f" with the keys {', '.join(map(str, first))}" if isinstance(first, Mapping) else ""
            raise ValueError(f"a sample is a {type(first).__name__}{keys}")
        inputs, targets, *shared = default_collate(samples)
        inputs = tuple(inputs) if isinstance(inputs, list) else (inputs,)
        return Batch(inputs, targets, shared[0] if shared else {})


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
        # A stream of samples may have a length all the same.
        if isinstance(data_set, IterableDataset) or not isinstance(data_set, Sized):
            raise ValueError(
                f"data: {name} returned {type(data_set).__name__}, and must return a data set with a length and numbered samples, "
                "or two, to train and to evaluate on; samples without numbers are for a loop of your own"
            )
    # Before data sets are wrapped, since a wrapper does not have the attributes of the user's own.
    facts = {fact: getattr(train, fact) for fact in FACTS if hasattr(train, fact)}
    samples, evaluated = Samples(train, config.seed), None if test is None else Samples(test, config.seed)
    if test is None:
        samples, evaluated = samples.split(config.validation_split)
    try:
        # One batch is made now, so that samples of a wrong form are an error here and not in the loader.
        samples.batch([0], [0]).split(1)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"data: no batch can be made of the samples of {name}, which are to be (input, target) or (input, target, shared) of "
            f"tensors: {type(error).__name__}: {reason}"
        ) from None
    return samples, evaluated, facts


class FunctionObjective(Objective):
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
    return FunctionObjective(base, loss, metrics)
