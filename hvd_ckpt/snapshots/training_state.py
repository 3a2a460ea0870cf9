"""Model, optimizer, loss scale and averages of a loop: what this rank saves of them, and loading of a snapshot into them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hvd_ckpt.distributed.precision import GradScaler
from hvd_ckpt.processes.grid import current
from hvd_ckpt.reduction.agreement import errors_on_all
from hvd_ckpt.sharding.averaging import AveragedWeights
from hvd_ckpt.sharding.layout import TensorSpec
from hvd_ckpt.snapshots.content import SavedState
from hvd_ckpt.snapshots.fits import buffers_kind, check_fits
from hvd_ckpt.snapshots.loading import load_average, load_optimizer, naming_snapshot, reading_weights
from hvd_ckpt.snapshots.model import ModelTensors
from hvd_ckpt.snapshots.period import apart_state, own_copy
from hvd_ckpt.snapshots.random_state import random_state, set_random_state
from hvd_ckpt.snapshots.ranges import Elements
from hvd_ckpt.snapshots.reader import Snapshot
from hvd_ckpt.snapshots.schema import Layout, TensorMetadata, libraries
from hvd_ckpt.snapshots.state import LoopRankState, LoopState, check_kinds, check_state
from hvd_ckpt.utils import run_warnings
from hvd_ckpt.utils.own_state import extra_states, set_extra_states
from hvd_ckpt.utils.schema import Wrong


class TrainingState:
    """What a loop trains, and what of it does not depend on the loop.

    Args:
        model, optimizer, scaler, average: as of :class:`.snapshots.Snapshots`.
        kinds: the names of the classes of optimizer and scheduler.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        scaler: GradScaler | None,
        average: AveragedWeights | None,
        kinds: Mapping[str, str | None],
    ) -> None:
        self._model, self._optimizer, self._scaler, self._average = model, optimizer, scaler, average
        self._kinds = dict(kinds)
        self._names: ModelTensors | None = None  # of the last save

    # -------------------------------------------------------------------------------- saving

    def replicas(self) -> dict[str, Any]:
        """The state of logical replicas, which is replicated. Collective: ranks gather their buffers."""
        replicas = self._optimizer.replicas
        if replicas is None:
            return {"replicas": None}
        replicas.average_buffers()  # for the weights
        return {"replicas": replicas.state_dict()}

    def saved(
        self, replicated: Mapping[str, Any], per_rank: Mapping[str, Any], alone: bool = False
    ) -> SavedState:
        """What this rank saves of the current state. Tensors are not copied.

        Args:
            replicated, per_rank: further state, or state that replaces that of this object.
            alone: all that this rank has, as if there were no others.

        Raises:
            Wrong: no run could resume from the state of the optimizer.
        """
        optimizer, grid = self._optimizer, current()
        names = self._names = self._names.renewed() if self._names else ModelTensors(self._model, optimizer)
        extra = copy.deepcopy(extra_states(self._model))
        ranges, values = names.saved(self._average, extra, alone)
        scaler = None if self._scaler is None else self._scaler.state_dict()
        return SavedState(
            replicated={
                "kinds": self._kinds,
                "groups": names.groups(),
                "options": [
                    {name: value for name, value in group.items() if name not in ("params", "param_names")}
                    for group in optimizer.param_groups
                ],
                "ema": None if self._average is None else {"n_averaged": self._average.n_averaged},
                "scaler": scaler,
                "threads": torch.get_num_threads(),
                "device": next(self._model.parameters()).device.type,
                "extra": extra,
                "mid_period": optimizer.is_local and not optimizer.in_sync,
                **replicated,
            },
            per_rank={
                "random": random_state(),
                "reduction": optimizer.reduction_state_dict(),
                "extra": extra,
                "local": apart_state(optimizer, scaler),
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
        with naming_snapshot(snapshot):
            check_state(snapshot, LoopState, LoopRankState)
            check_kinds(snapshot, self._kinds)
            check_fits(snapshot, self._model, self._optimizer)
            if (snapshot.replicated["replicas"] is None) != (self._optimizer.replicas is None):
                raise Wrong("only one of it and the optimizer has logical replicas")

    def load_weights(self, snapshot: Snapshot, whose: str = "") -> None:
        """Loads weights and buffers. Collective.

        Args:
            whose: see :func:`.loading.reading_weights`.
        """
        # Files are read before anything is changed, so an error leaves the model as it was.
        with errors_on_all("Snapshots: weights"):
            load = reading_weights(snapshot, self._model, self._optimizer, whose)
        load()

    def load(self, snapshot: Snapshot, options: bool) -> bool:
        """Loads everything except weights. Returns whether this includes this rank's own state. Collective.

        Args:
            options: see :func:`.loading.load_optimizer`.
        """
        optimizer = self._optimizer
        whose, apart = own_copy(snapshot, optimizer)
        if apart is not None:  # on all ranks alike
            self.load_weights(snapshot, whose)
        names = ModelTensors(self._model, optimizer)
        load_optimizer(snapshot, names, optimizer, options, whose)
        # The loaded master weights are exact. With lossy communication, the model had rounded ones, and resumes with the same bits.
        if names.layout is not None and optimizer.shard_stage < 3:
            store = optimizer.sharding.store
            if store.is_lossy:
                store.shards_changed([group for group in names.layout.groups if group.requires_grad])
        if self._average is not None:
            load_average(self._average, snapshot, names)
        with errors_on_all("Snapshots: resume"):
            of_rank = self._load_plain(snapshot, apart)
        if optimizer.is_local:
            optimizer.load_averages(None if apart is None else apart["averages"])
        return of_rank

    def _load_plain(self, snapshot: Snapshot, apart: Mapping[str, Any] | None) -> bool:
        replicated, optimizer = snapshot.replicated, self._optimizer
        scale = replicated["scaler"] if apart is None else apart["scaler"] or replicated["scaler"]
        if self._scaler is not None and scale is not None:
            self._scaler.load_state_dict(scale)
        set_extra_states(self._model, replicated.get("extra", {}))
        same_ranks: bool = snapshot.replicas == current().replicas and snapshot.per_rank is not None
        if current().number == 0 and (same_ranks or optimizer.replicas is not None):
            _warn_of_changes(snapshot, next(self._model.parameters()).device.type)
        # As many ranks as before: this rank has a random state and counts
        # of its own to resume with. Other numbers of ranks draw anew.
        if same_ranks:
            self._load_own(snapshot)
        if optimizer.replicas is not None:
            optimizer.replicas.load_state_dict(replicated["replicas"])
        return same_ranks

    def _load_own(self, snapshot: Snapshot) -> None:
        """Loads this rank's own state. Without it a rank draws new random states, and learns again when gradients are final.

        Its random state is the same on all pipeline stages; its buffers are on the stages of their blocks. The reducer learns
        again if there were other stages.
        """
        kind, grid, layout = buffers_kind(snapshot), current(), snapshot.layout
        buffers = [
            (f"{kind}/{name}", buffer)
            for name, buffer in self._model.named_buffers()
            if f"{kind}/{name}" in snapshot.tensors
        ]
        wanted = [
            Elements(name, 0, buffer.numel(), TensorMetadata.of(buffer.dtype, TensorSpec.of(buffer)))
            for name, buffer in buffers
        ]
        with naming_snapshot(snapshot), torch.no_grad():
            for (_, buffer), elements, flat in zip(buffers, wanted, snapshot.read(wanted)):
                buffer.copy_(elements.whole.unflatten(flat))
        own = snapshot.per_rank
        set_extra_states(self._model, own.get("extra", {}))
        same = (layout.stage, layout.pipeline_stages, layout.tensor)
        if same == (self._optimizer.shard_stage, grid.stages, grid.tensor):
            self._optimizer.load_reduction_state_dict(own["reduction"])
        set_random_state(own["random"])


def _warn_of_changes(snapshot: Snapshot, device: str) -> None:
    """Warns in one line of what may change the bits of the run's results: threads, kind of device, versions."""
    then = {"device": snapshot.replicated["device"], "CPU threads a rank": snapshot.replicated["threads"]}
    now: dict[str, Any] = {"device": device, "CPU threads a rank": torch.get_num_threads()}
    then.update(snapshot.manifest.libraries)
    now.update({name: libraries()[name] for name in ("torch", "hvd_ckpt", "horovod")})
    changed = [
        f"{name} {then[name]} (now {now[name]})" for name in now if then.get(name, now[name]) != now[name]
    ]
    if changed:
        run_warnings.warn(
            f"The run had {', '.join(changed)}: the bits of its results may change; give the same for the same, such as "
            f"OMP_NUM_THREADS={snapshot.replicated['threads']}."
        )
