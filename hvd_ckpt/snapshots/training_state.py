"""What a loop trains and has a state: checks of it, what this rank saves of it, and loading of a snapshot into it.

The random state of a process is that of PyTorch on the CPU and on its current CUDA device, of NumPy's global one, and of Python's.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import horovod.torch as hvd
import numpy as np
import torch
from torch import Tensor, nn

from hvd_ckpt.collectives.agreement import described, errors_on_all, of_all_processes
from hvd_ckpt.collectives.asynchronous import ranks_of
from hvd_ckpt.data.sampler import DataLoader, DistributedSampler
from hvd_ckpt.distributed.averaging import AveragedWeights
from hvd_ckpt.distributed.precision import GradScaler
from hvd_ckpt.processes.grid import current
from hvd_ckpt.reduction.optimizer import ReducedOptimizer
from hvd_ckpt.sharding.state import numbered, ranges_of
from hvd_ckpt.sharding.surface import stepped_parameters
from hvd_ckpt.snapshots.content import SavedState
from hvd_ckpt.snapshots.fits import (
    PerRankState,
    ReplicatedState,
    check_fits,
    check_state,
    optimizer_values,
    validated,
)
from hvd_ckpt.snapshots.folder import SnapshotError
from hvd_ckpt.snapshots.model import ModelTensors, Part, options_of, own_buffers
from hvd_ckpt.snapshots.reader import Snapshot
from hvd_ckpt.snapshots.schema import Layout, Range, libraries, rank_file
from hvd_ckpt.snapshots.tensors import map_tensors, stored
from hvd_ckpt.utils import run_warnings
from hvd_ckpt.utils.elementwise import class_of
from hvd_ckpt.utils.own_state import extra_states, set_extra_states
from hvd_ckpt.utils.rules import check
from hvd_ckpt.utils.schema import Wrong, shown
from hvd_ckpt.utils.torch_private import pytree


@runtime_checkable
class _HasState(Protocol):
    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any, /) -> Any: ...


def check_arguments(
    model: Any, optimizer: Any, scheduler: Any, scaler: Any, loader: Any, average: Any, keep: Any
) -> None:
    """Raises TypeError or ValueError for the first argument that is wrong."""
    with_state = "which has state_dict() and load_state_dict(), or None"
    for name, value, kind, right in (
        ("optimizer", optimizer, ReducedOptimizer, "hc.DistributedOptimizer(...) of it"),
        ("model", model, nn.Module, "a torch.nn.Module"),
        ("scaler", scaler, torch.amp.GradScaler, "an hc.GradScaler, or None"),
        ("average", average, AveragedWeights, "hc.AveragedWeights, or None"),
        ("keep", keep, int, "a number of snapshots"),
        ("scheduler", scheduler, _HasState, f"a scheduler {with_state}"),
        (
            "loader",
            loader,
            _HasState,
            f"an hc.data.DataLoader, its DistributedSampler or a loader {with_state}",
        ),
    ):
        if not isinstance(value, kind) and not (value is None and right.endswith("or None")):
            raise TypeError(f"Snapshots: {name} is a {type(value).__name__}: give {right}")
    if keep < 1:
        raise ValueError(f"Snapshots: keep is {keep}: keep 1 snapshot or more")
    for name, state in extra_states(model).items():
        reason = (
            "with pipeline stages or parts, a snapshot holds" if current().model_parallel_size > 1 else ""
        )
        try:
            map_tensors(state, f"the state of module '{name}'", stored)
        except Wrong as error:
            reason = f"{error}; a snapshot holds plain values, tensors and"
        if reason:
            raise TypeError(
                f"Snapshots: the module '{name}' has a get_extra_state(), which returns a {type(state).__name__}; {reason} "
                "parameters and buffers: keep that state in buffers"
            )
    members = optimizer.members if optimizer.is_local else optimizer.process_set
    check({"Snapshots": True, "an optimizer of a process set": len(ranks_of(members)) < hvd.size()})
    if optimizer.is_local and average is not None:
        raise ValueError(
            "Snapshots: optimizer is one of LocalSGD, and has other weights on each rank: leave out average"
        )


@dataclass
class TrainingState:
    """What a loop trains; the arguments are those of :class:`.snapshots.Snapshots`."""

    model: nn.Module
    optimizer: Any
    scheduler: Any
    scaler: GradScaler | None
    loader: Any
    average: AveragedWeights | None

    @property
    def kinds(self) -> dict[str, str | None]:
        """The names of the classes of optimizer and scheduler, and whether the loader has one position or one of each rank."""
        loader = "DistributedSampler" if self._has_one_position else "a loader of each rank"
        of_loader = None if self.loader is None else loader
        return described(optimizer=class_of(self.optimizer), scheduler=self.scheduler, loader=of_loader)

    @property
    def _has_one_position(self) -> bool:
        """Whether the loader has the same state on every rank."""
        return isinstance(self.loader, (DistributedSampler, DataLoader))

    # -------------------------------------------------------------------------------- saving

    def of_loop(self, loop: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The further state of a loop of one's own, replicated and of this rank: that of scheduler and loader, and ``loop``."""
        scheduler, loader = (
            None if owner is None else owner.state_dict() for owner in (self.scheduler, self.loader)
        )
        return {"scheduler": scheduler, "loop": loop}, {"loader": loader}

    def replicas(self) -> dict[str, Any]:
        """The state of logical replicas, which is replicated. Collective: ranks gather their buffers."""
        replicas = self.optimizer.replicas
        if replicas is None:
            return {"replicas": None}
        replicas.average_buffers()  # for the weights
        return {"replicas": replicas.state_dict()}

    def saved(
        self, replicated: Mapping[str, Any], per_rank: Mapping[str, Any], alone: bool = False
    ) -> SavedState:
        """What this rank saves of the current state, or, if ``alone``, all that it has, as if there were no others. Tensors are not
        copied. The arguments are further state, or state that replaces that of this object. Raises Wrong if no run could resume
        from it."""
        optimizer, grid = self.optimizer, current()
        names, extra = ModelTensors(self.model, optimizer), extra_states(self.model)
        ranges, values = names.saved(self.average, extra, alone)
        scaler = None
        if self.scaler is not None:  # one that is disabled has no state
            scaler = map_tensors(self.scaler.state_dict(), "scaler", stored) or None
        apart = None
        if optimizer.is_local:
            averages = {} if optimizer.averaging is None else optimizer.averaging.state_dict()
            apart = {"scaler": scaler, "elements": _elements_of(optimizer), "averages": averages}
        return SavedState(
            replicated={
                "kinds": self.kinds,
                "groups": names.groups(),
                "options": options_of(optimizer.param_groups),
                "ema": None if self.average is None else self.average.n_averaged,
                "scaler": scaler,
                "threads": torch.get_num_threads(),
                "device": next(self.model.parameters()).device.type,
                "extra": extra,
                "mid_period": optimizer.is_local and not optimizer.in_sync,
                "scheduler": None,
                "loop": {},
                **replicated,
            },
            per_rank={
                "random": random_state(),
                "reduction": optimizer.reduction_state_dict(),
                "extra": extra,
                "local": apart,
                "loader": None,
                **values,
                **per_rank,
            },
            ranges=ranges,
            aliases=names.aliases,
            layout=Layout(
                stage=optimizer.shard_stage,
                pipeline_stages=grid.stages,
                tensor=grid.tensor,
                apart=optimizer.is_local,
            ),
        )

    # -------------------------------------------------------------------------------- loading

    def check(self, snapshot: Snapshot) -> None:
        """Raises SnapshotError unless the snapshot is of a loop with this model and optimizer; nothing is changed."""
        with snapshot.comparing():
            there = check_state(snapshot, ReplicatedState, PerRankState)
            for what, kind in there.kinds.items():
                own = self.kinds.get(what)
                if own is not None and kind is not None and own != kind:
                    raise Wrong(f"its {what} is {shown(kind)}, and the {what} here is {shown(own)}")
            if (there.replicas is None) != (self.optimizer.replicas is None):
                raise Wrong("only one of it and the optimizer has logical replicas")
        check_fits(snapshot, self.model, self.optimizer)

    def load_weights(self, snapshot: Snapshot, whose: str = "") -> None:
        """Loads weights and buffers, those of :attr:`.ModelTensors.copy`. Collective."""
        # Files are read before anything is changed, so an error leaves the model as it was.
        with errors_on_all("Snapshots: weights"):
            copy_all = ModelTensors(self.model, self.optimizer).reading(snapshot, whose)
        copy_all()

    def load(self, snapshot: Snapshot, options: bool) -> bool:
        """Loads everything except weights, and with ``options`` the options of the optimizer's groups, such as the learning rate.
        Returns whether this includes this rank's own state. Collective."""
        optimizer, replicated = self.optimizer, snapshot.replicated
        # Any number of ranks can load the weights of rank 0. A period continues only on the ranks and with the settings that it
        # began with, each rank or group of ranks with the copy of the weights that it has saved.
        names = ModelTensors(self.model, optimizer)
        apart, whose = self._apart_in(snapshot), ""
        if apart is not None:  # on all ranks alike
            whose = names.copy
            self.load_weights(snapshot, whose)
        elif optimizer.reduces_updates and snapshot.manifest.replicas == hvd.size():
            whose = self._own_state_in(snapshot)
        self._load_optimizer(snapshot, names, options, whose)
        # The loaded master weights are exact. With lossy communication, the model had rounded ones, and resumes with the same bits.
        if names.layout is not None and optimizer.shard_stage < 3 and optimizer.sharding.store.is_lossy:
            trained = [group for group in names.layout.groups if group.requires_grad]
            optimizer.sharding.store.shards_changed(trained)
        if self.average is not None and replicated["ema"] is not None:
            self._load_average(snapshot, names, self.average)
        same_ranks: bool = snapshot.manifest.replicas == current().replicas and snapshot.per_rank is not None
        with errors_on_all("Snapshots: resume"):
            scale = replicated["scaler"] if apart is None else apart["scaler"] or replicated["scaler"]
            if self.scaler is not None and scale is not None:
                self.scaler.load_state_dict(scale)
            set_extra_states(self.model, replicated.get("extra", {}))
            if current().number == 0 and (same_ranks or optimizer.replicas is not None):
                _warn_of_changes(snapshot, next(self.model.parameters()).device.type)
            # As many ranks as before: this rank has a random state and counts of its own to resume with. Other numbers of ranks
            # draw anew, and learn again when gradients are final.
            if same_ranks:
                self._load_own(snapshot)
            if optimizer.replicas is not None:
                optimizer.replicas.load_state_dict(replicated["replicas"])
        if optimizer.is_local:
            optimizer.load_averages(None if apart is None else apart["averages"])
        return same_ranks

    def load_loop(self, snapshot: Snapshot) -> None:
        """Loads scheduler and loader. Raises SnapshotError if each rank had a state of the loader, and there are others now; warns
        of what the snapshot has no state of."""
        manifest = snapshot.manifest
        # Ranks that share a model in stages or parts have the same data.
        if self.loader is not None and not self._has_one_position and manifest.replicas != current().replicas:
            raise SnapshotError(
                f"The snapshot of step {manifest.step} has a {type(self.loader).__name__}'s position on each of "
                f"{manifest.replicas} ranks, and there are {current().replicas}: resume with as many, or give an "
                "hc.data.DistributedSampler as loader"
            )
        # A rank that was not there takes the one position of all from the first.
        with snapshot.comparing():
            own = snapshot.per_rank or snapshot.state(rank_file(0))
            position = validated(PerRankState, own, "per_rank").loader
        replicated = snapshot.replicated
        given = {"scheduler": (self.scheduler, replicated["scheduler"]), "loader": (self.loader, position)}
        for owner, values in given.values():
            if owner is not None and values is not None:
                owner.load_state_dict(values)
        given["scaler"] = (
            self.scaler if self.scaler and self.scaler.is_enabled() else None,
            replicated["scaler"],
        )
        anew = [name for name, (owner, values) in given.items() if owner is not None and values is None]
        if anew and current().number == 0:
            run_warnings.warn(
                f"The snapshot of step {manifest.step} has no state of the {' and the '.join(anew)}, which begins anew."
            )

    def _load_optimizer(self, snapshot: Snapshot, names: ModelTensors, options: bool, whose: str) -> None:
        """Loads the optimizer's state. Collective."""
        optimizer, is_sharded = self.optimizer, names.layout is not None
        with errors_on_all("Snapshots: parts"), snapshot.comparing():
            values = optimizer_values(snapshot, {part.name for part in names.parts}, whose)
            wanted: list[tuple[dict[Any, Any], Any, str, Part]] = []
            state: dict[Any, Any] = {}
            masters: dict[int, Tensor] = {}
            for number, part in enumerate(names.parts):
                entries = dict(values["state"][part.name])
                if entries:
                    state[number] = entries
                wanted += [(entries, key, f"optimizer.{key}{whose}", part) for key in entries]
                if is_sharded and optimizer.pieces[number].has_master:
                    wanted.append((masters, number, f"master_weights{whose}", part))
            wanted = [one for one in wanted if f"{one[2]}/{one[3].name}" in snapshot.manifest.tensors]
            ranges = [names.range_of(kind, part) for *_, kind, part in wanted]
            for (place, key, _, part), flat in zip(wanted, snapshot.read(ranges)):
                # Offloaded state may be more than there is memory. It is copied from the file when it is loaded.
                place[key] = part.shaped(flat if optimizer.is_offloaded else flat.clone())
            of_groups = snapshot.replicated["options"] if options else options_of(optimizer.param_groups)
            loaded: dict[str, Any] = {
                "state": {**state, **values["others"]},
                "param_groups": numbered(of_groups, stepped_parameters(optimizer)),
                **values["more"],
            }
            for group, own in zip(loaded["param_groups"], optimizer.param_groups):
                if "param_names" in own:
                    group["param_names"] = own["param_names"]
            if is_sharded:
                loaded["pieces"] = [each[:3] for each in ranges_of(optimizer)]
                loaded["master_weights"] = masters
        saved = {number: dict(entries) for number, entries in state.items()}
        optimizer.load_state_dict(loaded)
        if not is_sharded:
            self._restore_types(snapshot, names, saved)

    def _restore_types(
        self, snapshot: Snapshot, names: ModelTensors, saved: Mapping[int, Mapping[str, Any]]
    ) -> None:
        """Gives state of whole parameters the types that it was saved with: PyTorch has made those of the parameters of them.

        Of parameters that were stepped in another type themselves, as master weights are, it stays: the run resumes in another
        precision.
        """

        def restored(saved: Any, loaded: Any) -> Any:
            is_cast = isinstance(saved, Tensor) and isinstance(loaded, Tensor) and loaded.dtype != saved.dtype
            return saved.to(loaded.device) if is_cast and loaded.shape == saved.shape else loaded

        there = snapshot.manifest.tensors
        for number, part in enumerate(names.parts):
            weight = there.get(f"master_weights/{part.name}", there.get(f"weights/{part.name}"))
            if number in saved and weight is not None and weight.torch_dtype == part.tensor.dtype:
                entries = self.optimizer.state.get(part.tensor, {})
                for key, value in saved[number].items():
                    if key != "step" and key in entries:  # PyTorch decides the type and place of this one
                        with suppress(ValueError):  # a class of one's own has loaded another structure
                            entries[key] = pytree.tree_map(restored, value, entries[key])

    def _load_average(self, snapshot: Snapshot, names: ModelTensors, average: AveragedWeights) -> None:
        """Loads the average of a snapshot; without one it begins anew, with the next update. Collective."""
        state = average.state_dict()
        with errors_on_all("Snapshots: average"), snapshot.comparing():
            # A parameter that was not trained may have no average.
            found = {
                number: part
                for number, part in enumerate(names.parts)
                if part.tensor.requires_grad or f"average/{part.name}" in snapshot.manifest.tensors
            }
            values = snapshot.read([names.range_of("average", part) for part in found.values()])
            state["averages"].update(zip(found, values))
        average.load_state_dict({**state, "n_averaged": snapshot.replicated["ema"]})

    def _load_own(self, snapshot: Snapshot) -> None:
        """Loads this rank's own state. Its random state is the same on all pipeline stages. The reducer learns again if there were
        other stages."""
        grid, layout, own = current(), snapshot.manifest.layout, snapshot.per_rank
        buffers = own_buffers(snapshot, self.model)
        wanted = [Range.of(name, buffer) for name, buffer in buffers.items()]
        with snapshot.comparing(), torch.no_grad():
            for each, flat in zip(wanted, snapshot.read(wanted)):
                buffers[each.name].copy_(each.whole.unflatten(flat))
        set_extra_states(self.model, own.get("extra", {}))
        same = (layout.stage, layout.pipeline_stages, layout.tensor)
        if same == (self.optimizer.shard_stage, grid.stages, grid.tensor):
            self.optimizer.load_reduction_state_dict(own["reduction"])
        set_random_state(own["random"])

    def _own_state_in(self, snapshot: Snapshot) -> str:
        """Whose state of the optimizer this rank loads, such as ``"@3"``: its own, if each rank has saved its own."""
        kinds = {name.partition("/")[0] for name in snapshot.manifest.tensors}
        own, apart = f"@{hvd.rank()}", snapshot.manifest.layout.apart
        has_own = any(kind.startswith("optimizer.") and kind.endswith(own) for kind in kinds)
        return own if has_own and not apart else ""

    def _apart_in(self, snapshot: Snapshot) -> dict[str, Any] | None:
        """The state of this rank between averages of local SGD; None if a new period begins. Collective: raises SnapshotError on
        every rank if it lies within a period, and the optimizer is not one of the same period and ranks; or it is damaged."""
        optimizer, same = self.optimizer, snapshot.manifest.replicas == hvd.size()
        own = snapshot.per_rank["local"] if snapshot.per_rank and same else None
        fault: str | None = None
        if not optimizer.is_local:
            fault = "the optimizer is not one of LocalSGD"
        elif own is None:
            fault = f"there are {hvd.size()} ranks, and it has the weights of {snapshot.manifest.ranks}"
        elif own["elements"] != _elements_of(optimizer):
            fault = "its ranks have other shards of the weights"
        else:
            try:
                optimizer.averaging.check(own["averages"])
            except ValueError as error:
                fault = str(error)
        # All ranks continue, or none: with other shards, some may have the same elements.
        faults = of_all_processes(fault, "Snapshots: period")
        fault = next(filter(None, [fault, *faults]), None)
        # At the end of a period, all ranks have the same weights, so any ranks may begin a new one.
        if fault is not None and snapshot.replicated["mid_period"]:
            raise SnapshotError(
                f"The snapshot of step {snapshot.manifest.step} lies within a period of local SGD, where ranks have weights of "
                f"their own: {fault}; give the same ranks and settings, or resume from a period's end (one fragment, no delay)."
            )
        if fault is not None and optimizer.is_local and hvd.rank() == 0:
            run_warnings.warn("A new period of local SGD begins; outer momentum, if any, is zero.")
        return own if fault is None else None


def _elements_of(optimizer: Any) -> list[tuple[str, int, int]]:
    """This rank's elements of the parameters."""
    return sorted(elements[:3] for elements in ranges_of(optimizer))


def _warn_of_changes(snapshot: Snapshot, device: str) -> None:
    """Warns in one line of what may change the bits of the run's results: threads, kind of device, versions."""
    replicated, own, there = snapshot.replicated, libraries(), snapshot.manifest.libraries
    pairs: list[tuple[str, Any, Any]] = [("device", replicated["device"], device)]
    pairs.append(("CPU threads a rank", replicated["threads"], torch.get_num_threads()))
    pairs += [(name, there.get(name, own[name]), own[name]) for name in ("torch", "hvd_ckpt", "horovod")]
    changed = [f"{name} {then} (now {now})" for name, then, now in pairs if then != now]
    if changed:
        run_warnings.warn(
            f"The run had {', '.join(changed)}: the bits of its results may change; give the same for the same, such as "
            f"OMP_NUM_THREADS={snapshot.replicated['threads']}."
        )


# ------------------------------------------------------------------------------------ random state


def seed_all(seed: int) -> None:
    """Seeds PyTorch on all devices, NumPy's global generator, and Python's."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def seed_of_rank(seed: int, step: int) -> int:
    """Ranks drop out different units; a run that resumes without its random state draws new ones."""
    rank: int = hvd.rank()
    # Different for all steps below 1 000 003 and ranks below 100 003, as digits of a number are.
    return ((seed * 1_000_003 + step) * 100_003 + rank + 1) % 2**63


def random_state() -> dict[str, Any]:
    """All of this process's random states, as a state dict that a snapshot can hold.

    Of CUDA devices it is the current one's, whatever its number: a rank may have another one when it resumes.
    """
    name, table, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "numpy": (name, torch.from_numpy(table), *rest),
        "python": random.getstate(),
    }


def set_random_state(state: Any) -> None:
    """Restores what :func:`random_state` returned. That of a CUDA device goes to the current one, if there is any. Raises
    SnapshotError if it is invalid."""
    try:
        name, table, position, *rest = state["numpy"]
        if not 0 <= position <= len(table):  # NumPy would read beyond its table
            raise ValueError(f"the position {position} is not in a table of {len(table)} numbers")
        random.setstate(state["python"])
        np.random.set_state((name, table.numpy(), position, *rest))
        torch.set_rng_state(state["torch"])
        if state["cuda"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
    except (AttributeError, LookupError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise SnapshotError(
            f"The random state cannot be restored ({type(error).__name__}: {reason}): leave it and seed anew, or use another "
            "snapshot."
        ) from None
