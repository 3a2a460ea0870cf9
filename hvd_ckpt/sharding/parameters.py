"""Stage 3: parameters are split over the ranks, and whole only while their unit runs (Rajbhandari et al., 2020)."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from hvd_ckpt.sharding.exchange import Exchange
from hvd_ckpt.sharding.formats import FP32, WireFormat
from hvd_ckpt.sharding.layout import Group, Layout
from hvd_ckpt.sharding.passes import GatherStats, Passes, ShardedUnit
from hvd_ckpt.sharding.units import check_memory
from hvd_ckpt.sharding.unshard import UnitParameters
from hvd_ckpt.unmaterialized import forget_split, note_split

__all__ = ["ShardedParameters"]

Unit = tuple[list[nn.Module], list[Group]]


class ShardedParameters:
    """The weights of stage 3.

    Hooks on the model's modules do the work, and hold what they need: the model can be used, also for evaluation, after this
    object is gone.

    Args:
        model: its parameters are those of the layout, and are placeholders from now on: of the right shape, and an error to read.
        layout: all of them, with their values.
        units: modules that run one after the other, as :func:`hvd_ckpt.sharding.units.find_units` gave them, with the groups of
            their parameters; the last one is the model's own.
        exchange, format: how the ranks' shards are gathered.

    Attributes:
        shards: by group: this rank's exact values, 1-D.
        stats: gathers since the start.

    Raises:
        ValueError: two parameters share memory; one has none.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        units: Sequence[Unit],
        exchange: Exchange,
        format: WireFormat = FP32,
    ) -> None:
        check_memory(list(zip(layout.names, layout.parameters)))
        self._model = weakref.ref(model)
        self._layout, self._exchange, self._format = layout, exchange, format
        own = [
            UnitParameters(layout, groups, exchange, format, title)
            for (_, groups), title in zip(units, _titles(model, units))
        ]
        self.shards: list[torch.Tensor] = [torch.empty(0)] * len(layout.groups)
        for (_, groups), parameters in zip(units, own):
            for group, shard in zip(groups, parameters.shards):
                self.shards[group.position] = shard
        owners = _owners(model, layout.parameters_of(units[-1][1]))
        modules = [*(modules for modules, _ in units[:-1]), [model, *owners]]
        self._passes = Passes([(one, len(used)) for one, used in zip(own, modules)])
        self.stats: GatherStats = self._passes.stats
        self._handles = _hook(self._passes, modules)
        note_split(zip(layout.names, layout.parameters))

    def publish(self, groups: Collection[Group] | None = None) -> None:
        """The shards (of these groups, or all) have been changed: what was gathered of them is stale. Collective."""
        self._passes.reset()
        wanted = list(self._layout.groups if groups is None else groups)
        torch.autograd.graph.increment_version(self._layout.parameters_of(wanted))

    def finish(self) -> None:
        """The backward passes are over: nothing is whole now."""
        self._passes.reset()

    def adopt(self) -> None:
        """Refuses changes that were written to parameters outside of :meth:`gathered`.

        Raises:
            RuntimeError: a parameter has been given data, another dtype, device or shape.
        """
        moved = self.check()
        if moved is not None:
            raise RuntimeError(moved)

    def check_apart(self, what: str) -> None:
        """Raises RuntimeError inside :meth:`gathered`, or a forward or backward pass, where ``what`` would read old values."""
        if self._passes.held or self._passes.busy:
            where = (
                "optimizer.gathered_parameters(); enter that inside it"
                if self._passes.held
                else "a forward or backward pass"
            )
            raise RuntimeError(f"{what} does not work inside {where}")

    def check(self) -> str | None:
        """One sentence if the parameters of the model are no longer those that were split, or their data is not; else None."""
        model = self._model()
        for name, parameter in () if model is None else model.named_parameters():
            if self._layout.index(parameter) is None:
                return (
                    f"parameter '{name}' is another one than when the parameters were split over the ranks; change values in "
                    "place inside optimizer.gathered_parameters(), or build the optimizer again"
                )
        return next(filter(None, (unit.parameters.check() for unit in self._passes.units)), None)

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Within it all parameters are whole and exact, whatever the format; what is written to them is kept. Collective.

        Raises:
            RuntimeError: inside a backward pass.
        """
        self._passes.hold()
        try:
            yield
        finally:
            self._passes.let_go()

    def remove(self) -> None:
        """Gives the model whole parameters of its own and takes all hooks off. Collective.

        Raises:
            RuntimeError: inside :meth:`gathered`, or a forward or backward pass.
        """
        if self._passes.held:
            raise RuntimeError(
                "optimizer.unshard() does not work inside optimizer.gathered_parameters(); call it after it"
            )
        self._passes.hold()
        for unit in self._passes.units:
            unit.parameters.give_back()
        self._passes.held = 0
        for handle in self._handles:
            handle.remove()
        self._handles = []
        forget_split(self._layout.parameters)
        torch.autograd.graph.increment_version(self._layout.parameters)  # what graphs have saved is gone


def _titles(model: nn.Module, units: Sequence[Unit]) -> Iterator[str]:
    """The name of each unit in messages: its first and last module, or the model itself."""
    names = {id(module): name for name, module in model.named_modules()}
    for modules, _ in units[:-1]:
        ends = dict.fromkeys(f"'{names[id(module)]}'" for module in (modules[0], modules[-1]))
        yield " to ".join(ends)
    yield f"the model, a {type(model).__name__}"


def _owners(model: nn.Module, parameters: Sequence[torch.Tensor]) -> list[nn.Module]:
    """The modules, the model apart, that have some of these parameters: they may be run by themselves."""
    wanted = set(map(id, parameters))
    return [
        module
        for module in model.modules()
        if module is not model and any(id(parameter) in wanted for parameter in module._parameters.values())
    ]


def _hook(passes: Passes, modules: Sequence[Sequence[nn.Module]]) -> list[Any]:
    handles: list[Any] = []
    stateful: dict[nn.Module, None] = {}
    for unit, used in zip(passes.units, modules):
        for number, module in enumerate(used):
            stateful[module] = None
            handles += [
                module.register_forward_pre_hook(
                    _Before(passes, unit, number), prepend=True, with_kwargs=True
                ),
                module.register_forward_hook(_After(passes, unit, number), always_call=True),
            ]
    for module in stateful:
        handles += [
            module.register_state_dict_pre_hook(_WholeOnly(passes)),  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(_WholeOnly(passes)),  # type: ignore[no-untyped-call]
        ]
    return handles


class _Hook:
    """A hook that belongs to one model: a copy of the model, which is whole, gets none.

    Raises:
        RuntimeError: the model is copied or pickled where it is not whole.
    """

    def __init__(self, passes: Passes) -> None:
        self.passes = passes

    def __deepcopy__(self, memo: Any) -> Any:
        self.require_whole("be copied")
        return _nothing

    def __reduce__(self) -> Any:
        self.require_whole("be pickled")
        return _nothing_more, ()

    def require_whole(self, what: str) -> None:
        if not self.passes.held:
            raise RuntimeError(
                f"The parameters of this model are split over the ranks, so it cannot {what} as it is; do it inside "
                "'with optimizer.gathered_parameters():', on all ranks."
            )


class _Before(_Hook):
    def __init__(self, passes: Passes, unit: ShardedUnit, number: int) -> None:
        super().__init__(passes)
        self.unit, self.number = unit, number

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        return self.passes.begin(self.unit, self.number, args, kwargs)


class _After(_Before):
    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self.passes.end(self.unit, self.number, module, output)


class _WholeOnly(_Hook):
    def __call__(self, module: nn.Module, *args: Any) -> None:
        self.require_whole("give or take a state_dict")


def _nothing(*args: Any) -> None:
    """Placeholder of the hooks in a copy of a model."""


def _nothing_more() -> Any:
    return _nothing
