"""Parameters of stage 3, which are split over the ranks and whole only while their unit runs (Rajbhandari et al., 2020)."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hvd_ckpt.collectives.agreement import raise_together
from hvd_ckpt.sharding.divergence import Divergence
from hvd_ckpt.sharding.layout import Group
from hvd_ckpt.sharding.module_hooks import SavedInPass
from hvd_ckpt.sharding.passes import Passes
from hvd_ckpt.sharding.unshard import Gathering, ShardedUnit
from hvd_ckpt.utils.unmaterialized import forget_split, note_split

Unit = tuple[list[nn.Module], list[Group]]  # modules, and the groups of their parameters


class ShardedParameters(Passes):
    """The weights of stage 3, which the hooks of the model's modules keep, so that it can be used when its optimizer is gone.

    Args:
        model: its parameters are those of the layout, and are placeholders from now on: of the right shape, and an error to read.
        units: modules that run one after the other, as :func:`hvd_ckpt.sharding.units.find_units` gave them, with the groups of
            their parameters; the last one is the model's own.
        gathering: the layout of all parameters, which still have their values, and how the ranks' shards are gathered.
        deferred: the model stays as it is until :meth:`split`.

    Attributes:
        shards: by group: this rank's exact values, 1-D.

    Raises:
        OffloadError: there is no room for the shards.
    """

    def __init__(
        self, model: nn.Module, units: Sequence[Unit], gathering: Gathering, deferred: bool = False
    ) -> None:
        self._model = weakref.ref(model)
        layout = self._layout = gathering.layout
        self._exchange = gathering.exchange
        titles = list(_titles(model, units))
        divergence = Divergence(self._exchange, titles)
        owners = [_owners(model, layout.parameters_of(groups)) for _, groups in units]
        self._modules = [*(modules for modules, _ in units[:-1]), [model, *owners[-1]]]
        self._layers = [*owners[:-1], []]
        own = []
        for (_, groups), used, title in zip(units, self._modules, titles):
            own.append(ShardedUnit(gathering, groups, len(used), title, divergence))
            if not deferred:
                own[-1].split()  # before the shards of the next unit need memory
        # By their places in the layout, which are not in the order of the units: the last block was laid out first.
        flats = sorted((flat for unit in own for flat in unit.flats), key=lambda flat: flat.group.position)
        self.shards = [flat.shard for flat in flats]
        super().__init__(own)
        self._handles: list[Any] = []
        if not deferred:
            self._begin()

    def split(self) -> None:
        """Splits the parameters of a model where that was deferred."""
        for unit in self.units:
            unit.split()
        self._begin()

    def _begin(self) -> None:
        self._handles = _hook(self, self._modules, self._layers)
        self._modules, self._layers = [], []
        note_split(zip(self._layout.names, self._layout.parameters))

    def shards_changed(self, groups: Collection[Group] | None = None) -> None:
        """The shards of these groups (or all) have been changed, as those of others that are trained may have been by their owners:
        what was gathered of them is stale. Collective."""
        self.reshard()
        wanted = list(self._layout.groups if groups is None else groups)
        stale = [*wanted, *(group for group in self._layout.groups if group.requires_grad)]
        for unit in self.units:
            unit.shards_changed(stale)
        self.summon_again()
        # As an in-place update of whole parameters does: a graph that has saved the old values then refuses
        # to run backward.
        torch.autograd.graph.increment_version(self._layout.parameters_of(wanted))

    def sync_from_model(self) -> None:
        """Keeps what was written to parameters within :meth:`gathered`, and refuses other changes. What a pass has written is
        refused where ranks come together.

        Raises:
            RuntimeError: a parameter was replaced, or given data, another dtype, device or shape.
        """
        model = self._model()
        for name, parameter in () if model is None else model.named_parameters():
            if self._layout.index(parameter) is None:
                raise RuntimeError(
                    f"parameter '{name}' is another one than when the parameters were split over the ranks; change values in "
                    "place inside optimizer.gathered_parameters(), or build the optimizer again"
                )
        self.keep_written()
        for unit in self.units:
            unit.check()

    def current_shards(self) -> list[torch.Tensor]:
        """The shards, after :meth:`sync_from_model`."""
        self.sync_from_model()
        return self.shards

    def find_written(self) -> RuntimeError | None:
        """The error of a pass that has written weights since the last synchronization."""
        first = None
        for unit in self.units:
            unit.find_written()
            first, unit.error = first or unit.error, None
        return first

    def _raise_error(self) -> None:
        """Raises that error on every rank, where ranks come together."""
        if not (self.summoned or self.busy):
            raise_together(self.find_written(), self._exchange.process_set, "the parameters of stage 3")

    def take_written(self) -> dict[int, int]:
        """Fingerprints of what this rank has written within :meth:`gathered` since the last call, by index."""
        written = {index: value for unit in self.units for index, value in unit.written.items()}
        for unit in self.units:
            unit.written.clear()
        return written

    def check_written(self, written: Sequence[Mapping[int, int]]) -> None:
        """Raises RuntimeError, the same on every rank, if the ranks have not :meth:`take_written` the same."""
        differing = {index for values in written for index, _ in values.items() ^ written[0].items()}
        if differing:
            raise RuntimeError(
                f"the ranks have written different values to parameter '{self._layout.names[min(differing)]}' inside "
                "optimizer.gathered_parameters(), and it is split over them (stage 3), so that only one of these could be kept; "
                "write the same on every rank"
            )

    def check_apart(self, what: str) -> None:
        """Raises RuntimeError inside :meth:`gathered`, or a forward or backward pass, where ``what`` would read old values."""
        if self.summoned:
            raise RuntimeError(
                f"{what} does not work inside optimizer.gathered_parameters(); enter that inside it"
            )
        if self.busy:
            raise RuntimeError(f"{what} does not work inside a forward or backward pass")

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """A context in which all parameters are whole and exact, whatever the format; what is written to them is kept. Collective.

        Raises:
            RuntimeError: inside a backward pass.
        """
        self._raise_error()
        self.summon()
        try:
            yield
        finally:
            self.release()

    @contextlib.contextmanager
    def collected(self, here: bool) -> Iterator[list[torch.Tensor]]:
        self._raise_error()
        with super().collected(here) as copies:
            yield copies

    def unshard(self) -> None:
        """Gives the model whole parameters of its own and takes all hooks off. Collective.

        Raises:
            RuntimeError: inside :meth:`gathered`, or a forward or backward pass.
        """
        if self.summoned:
            raise RuntimeError(
                "optimizer.unshard() does not work inside optimizer.gathered_parameters(); call it after it"
            )
        self._raise_error()
        self.summon()
        for unit in self.units:
            unit.materialize()
        # Not release(): units have no memory left to write back or to free.
        self.summoned = 0
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
    """The modules, the model apart, that have some of these parameters."""
    wanted = set(map(id, parameters))
    return [
        module
        for module in model.modules()
        if module is not model and any(id(parameter) in wanted for parameter in module._parameters.values())
    ]


def _hook(
    passes: Passes, modules: Sequence[Sequence[nn.Module]], layers: Sequence[Sequence[nn.Module]]
) -> list[Any]:
    """Registers the hooks.

    Args:
        modules: by unit, those that run one after the other; of the last unit, also those that have its parameters, which may run
            by themselves.
        layers: by unit, the modules that have its parameters; none for the last one.
    """
    handles: list[Any] = []
    whole_only = _Hook(passes, lambda *_: _require_whole(passes, "give or take a state_dict"))
    for unit, used, inside in zip(passes.units, modules, layers):
        for module in inside:
            if module not in used:
                ran = _Hook(passes, functools.partial(passes.post_layer, unit))
                handles.append(module.register_forward_hook(ran))
            elif not type(module).__module__.startswith("torch.nn."):  # hands on more than its output
                saved = SavedInPass()
                handles += [
                    module.register_forward_pre_hook(_Hook(passes, saved.before)),
                    module.register_forward_hook(_Hook(passes, saved.after), always_call=True),
                ]
    for unit, used in zip(passes.units, modules):
        for number, module in enumerate(used):
            # Prepended, since the user's own hooks may read parameters. Always called, since a forward pass that raises must
            # end, too: else its unit would count as running and never be freed.
            before = _Hook(passes, functools.partial(passes.pre_forward, unit, number))
            after = _Hook(passes, functools.partial(passes.post_forward, unit, number))
            handles += [
                module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
                module.register_forward_hook(after, always_call=True, with_kwargs=True),
            ]
    for module in dict.fromkeys(module for used in modules for module in used):
        handles += [
            module.register_state_dict_pre_hook(whole_only),  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(whole_only),  # type: ignore[no-untyped-call]
        ]
    return handles


class _Hook:
    """A hook that belongs to one model: a copy of the model, which is whole, gets none.

    Raises:
        RuntimeError: the model is copied or pickled where it is not whole.
    """

    def __init__(self, passes: Passes, call: Callable[..., Any]) -> None:
        self._passes, self._call = passes, call

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __deepcopy__(self, memo: Any) -> Any:
        _require_whole(self._passes, "be copied")
        return _no_hook

    def __reduce__(self) -> Any:
        _require_whole(self._passes, "be pickled")
        return functools.partial, (_no_hook,)


def _require_whole(passes: Passes, what: str) -> None:
    if not passes.summoned:
        raise RuntimeError(
            f"The parameters of this model are split over the ranks, so it cannot {what} as it is; do it inside "
            "'with optimizer.gathered_parameters():', on all ranks."
        )


def _no_hook(*args: Any) -> None:
    """Stands for the hooks in a copy of a model."""
