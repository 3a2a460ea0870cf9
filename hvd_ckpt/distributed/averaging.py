"""Running averages of the weights, split over the ranks as the optimizer's state is.

Polyak and Juditsky, "Acceleration of Stochastic Approximation by Averaging" (1992); Izmailov et al., "Averaging Weights Leads to
Wider Optima and Better Generalization" (2018). The functions that average are those of ``torch.optim.swa_utils``.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim.swa_utils import get_swa_avg_fn

from hvd_ckpt.collectives.agreement import errors_on_all
from hvd_ckpt.collectives.formats import sum_dtype
from hvd_ckpt.reduction.optimizer import ReducedOptimizer
from hvd_ckpt.sharding.state import Sources, ranges_of
from hvd_ckpt.sharding.surface import stepped_parameters
from hvd_ckpt.utils.rules import check
from hvd_ckpt.utils.torch_private import foreach_copy_


class AveragedWeights:
    """An average of the weights that a ``DistributedOptimizer`` updates: torch's ``AveragedModel`` for any stage of sharding.

    Each rank averages the weights that it updates: its shards or, at stage 0, whole parameters. So an update communicates nothing,
    and gives the same bits at every stage. There is no second model: :meth:`applied` puts the average into the trained model for a
    while. Averages of half-precision weights are float32. Buffers are not averaged, as with ``AveragedModel(use_buffers=False)``.
    The average of a parameter that joins the optimizer later begins with its value in the next update.

    Example::

        average = hc.AveragedWeights(optimizer, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.999))
        ...
        optimizer.step()
        average.update_parameters()
        ...
        with average.applied():
            evaluate(model)

    Args:
        optimizer: the result of ``DistributedOptimizer``, with weights that are equal on all ranks. The average begins with these
            weights.
        avg_fn: takes an average, a weight and ``n_averaged``, and returns the new average.
        multi_avg_fn: takes lists of averages and of weights, and ``n_averaged``, and changes the averages in place. Without both,
            all updates have equal weight (``get_swa_avg_fn()``).

    Attributes:
        n_averaged: number of updates so far; the first update copies the weights, as in torch.

    Raises:
        TypeError: the optimizer is not a ``DistributedOptimizer``.
        ValueError: both functions are given.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        avg_fn: Callable[[torch.Tensor, torch.Tensor, Any], torch.Tensor] | None = None,
        multi_avg_fn: Callable[[Any, Any, Any], Any] | None = None,
    ) -> None:
        if not isinstance(optimizer, ReducedOptimizer):
            raise TypeError(
                f"optimizer must be the result of DistributedOptimizer, not a bare {type(optimizer).__name__}; for a model that is "
                "not distributed use torch.optim.swa_utils.AveragedModel"
            )
        check({"avg_fn": avg_fn, "multi_avg_fn": multi_avg_fn})
        self.n_averaged = 0
        # called before averages or weights change: a snapshot may be copying them
        self.before_change: Callable[[], None] = lambda: None
        self._optimizer = optimizer
        self._avg_fn = avg_fn or get_swa_avg_fn()  # type: ignore[no-untyped-call]
        self._multi_avg_fn = multi_avg_fn
        self._averages: dict[torch.Tensor, torch.Tensor] = {}
        self._follow()

    @torch.no_grad()
    def update_parameters(self) -> None:
        """Updates the average with the current weights. Call it after ``optimizer.step()``, on every rank. Communicates
        nothing."""
        self._optimizer.check_own_weights("AveragedWeights.update_parameters()")
        self.before_change()
        sharding = getattr(self._optimizer, "sharding", None)
        if sharding is not None:  # weights may have been written since the step
            sharding.follow_model()
        groups: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = defaultdict(lambda: ([], []))
        for average, weight in self._follow():
            averages, weights = groups[average.device, average.dtype]
            averages.append(average)
            weights.append(weight.detach().to(average.dtype))
        for (device, _), (averages, weights) in groups.items():
            count = torch.tensor(self.n_averaged, device=device)
            if self.n_averaged == 0:
                foreach_copy_(averages, weights)
            elif self._multi_avg_fn is not None:
                self._multi_avg_fn(averages, weights, count)
            else:
                for average, weight in zip(averages, weights):
                    average.copy_(self._avg_fn(average, weight, count))
        self.n_averaged += 1

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """A context in which the model has the averaged weights, on every rank, to evaluate or save them. Collective.

        Afterwards the weights are restored bit for bit; a copy of this rank's weights is kept until then. In this context
        ``optimizer.step()`` and the saving of a snapshot are errors. Enter ``optimizer.gathered_parameters()`` inside of it, not
        around it.

        Raises:
            RuntimeError: inside ``optimizer.gathered_parameters()``, or a forward or backward pass.
        """
        self.before_change()
        sharding = getattr(self._optimizer, "sharding", None)
        changing: list[torch.Tensor] = []
        if sharding is not None:
            if sharding.passes is not None:
                sharding.passes.check_apart("AveragedWeights.applied()")
            sharding.follow_model()
            changing += [piece.weights for piece in sharding.pieces]
            # Whole parameters as well: put back from copies they need no gather, and have their
            # bits whatever a lossy wire makes of shards.
            if sharding.stage < 3:
                changing += sharding.layout.parameters
        pairs = self._follow()
        # What the optimizer steps: the masters of half-precision weights, else the same memory as above.
        changing += [weight for _, weight in pairs]
        kept = [tensor.detach().clone() for tensor in changing]
        with torch.no_grad():
            for average, weight in pairs:
                weight.copy_(average)
        if sharding is not None:
            sharding.shards_changed()
        try:
            with self._optimizer.with_other_weights("AveragedWeights.applied()"):
                yield
        finally:
            with torch.no_grad():
                for tensor, before in zip(changing, kept):
                    tensor.copy_(before)
            if sharding is not None and sharding.stage == 3:
                sharding.store.shards_changed()  # what is gathered there is read from the shards

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the average, or at stage 0 the whole average.

        ``"pieces"`` has the name, the first element and the last element + 1 of each tensor of ``"averages"``, as in
        ``optimizer.state_dict()``.
        """
        return {
            "n_averaged": self.n_averaged,
            "pieces": [[target.name, target.start, target.stop] for target in ranges_of(self._optimizer)],
            "averages": {number: average for number, (average, _) in enumerate(self._follow())},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Loads an average. Collective, if the optimizer is sharded.

        Args:
            state_dict: the result of :meth:`state_dict` on this rank of a job of the same size and stage, or of a job at stage 0.
                Or a list of the results on all ranks of a job of any size and stage.

        Raises:
            ValueError: an element of this rank's part is missing; raised on every rank.
        """
        parts = [state_dict] if isinstance(state_dict, Mapping) else list(state_dict)
        name, members = f"hvd_ckpt.{self._optimizer.identity}.averages", self._optimizer.process_set
        with errors_on_all(name, members) if self._optimizer.shard_stage else contextlib.nullcontext():
            loaded = self._assembled(parts)
        with torch.no_grad():
            for (average, _), value in zip(self._follow(), loaded):
                average.copy_(value)
        self.n_averaged = int(parts[0]["n_averaged"])

    def _follow(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each average, and the weight that it is of; those of parameters that were added later begin now."""
        parameters = list(itertools.chain.from_iterable(stepped_parameters(self._optimizer)))
        for parameter in parameters:
            if parameter not in self._averages:
                self._averages[parameter] = parameter.detach().to(sum_dtype(parameter.dtype), copy=True)
        # In the order of the groups, by which a state numbers them, and without parameters that are gone.
        self._averages = {parameter: self._averages[parameter] for parameter in parameters}
        return [(average, parameter.detach()) for parameter, average in self._averages.items()]

    def _assembled(self, parts: Sequence[Mapping[str, Any]]) -> list[torch.Tensor]:
        as_state = [
            {
                "pieces": part["pieces"],
                "state": {number: {"average": value} for number, value in part["averages"].items()},
            }
            for part in parts
        ]
        targets = ranges_of(self._optimizer)
        averages = Sources(as_state, []).states(targets)
        for number, target in enumerate(targets):
            if number not in averages:
                raise ValueError(
                    f"the average of '{target.name}' is in none of the parts; give those of all ranks"
                )
        return [averages[number]["average"] for number in range(len(targets))]
