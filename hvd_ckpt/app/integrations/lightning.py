"""Lightning over Horovod: a strategy for its Trainer, also by the name ``"hvd_ckpt"`` once this module is imported.

The launcher (``horovodrun``, ``mpirun``, ``torchrun``) starts the processes. The strategy keeps Lightning's loop: it provides
distributed optimizers, reduces gradients before hooks and clipping, and adds each rank's own state to checkpoints.
"""

from __future__ import annotations

import io
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import ParallelStrategy, StrategyRegistry
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_only as utilities_rank_zero_only
from torch import nn
from torchmetrics import Metric

import hvd_ckpt as hc
from hvd_ckpt.app.integrations.lightning_ending import Ending
from hvd_ckpt.app.integrations.lightning_optimizer import hand_on, unwrapped
from hvd_ckpt.app.integrations.lightning_plan import TrainingStep, apply_plan
from hvd_ckpt.app.integrations.loading import ResumableLoader, SeededLoader
from hvd_ckpt.app.integrations.stopping import Stopping
from hvd_ckpt.collectives.agreement import of_all_processes, of_first_process
from hvd_ckpt.snapshots.training_state import random_state, set_random_state
from hvd_ckpt.utils.measure import is_undisturbed
from hvd_ckpt.utils.own_state import load_own_state, own_state
from hvd_ckpt.utils.rules import check

STATE = "hvd_ckpt"  # key of a checkpoint
TRIAL = ".lr_find_"  # checkpoints that Lightning's tuner saves before it trains on trial
OPERATIONS = {"mean": hc.Average, "avg": hc.Average, "sum": hc.Sum, "max": hc.Max, "min": hc.Min}


class HorovodStrategy(ParallelStrategy):
    """Trains a LightningModule over all ranks of a Horovod job, recomputed and sharded as asked for.

    ::

        trainer = Trainer(strategy=HorovodStrategy(budget="0.5x"), max_epochs=3)    # under horovodrun -np 4

    Args:
        budget: memory budget of activations, as in :func:`hvd_ckpt.plan`; the plan is made for the first batch before training.
            Needs automatic optimization.
        shard: the states that are split over the ranks, as in :func:`hvd_ckpt.DistributedOptimizer`.
        options: further arguments of :func:`hvd_ckpt.DistributedOptimizer`.

    Raises:
        ValueError: a setting of the Trainer or the module cannot be used with these; raised when training begins, on every rank.
    """

    strategy_name = "hvd_ckpt"
    is_distributed = True  # samplers are distributed, and sync_dist=True is heard
    num_nodes = 1  # as the Trainer sets it
    optimizers: list[Any]
    _launcher: Ending

    def __init__(
        self,
        budget: int | float | str | None = None,
        shard: hc.Shard | str | int = "none",
        **options: Any,
    ) -> None:
        check({"HorovodStrategy": True, "replicas": options.get("replicas"), "model": True})
        hc.init()
        super().__init__(cluster_environment=LightningEnvironment())  # asked for nothing
        self._launcher = Ending()
        # Lightning decorates functions with either of the two, and each has a rank of its own.
        rank_zero_only.rank = utilities_rank_zero_only.rank = hc.rank()
        self._budget = budget
        self._options = {"shard": shard, **options}
        self._accumulates = False  # more backward passes follow before the step
        self._asks = True  # code of the user's runs between a backward pass and the step
        self._weights_only: bool | None = None  # of the checkpoint that was loaded
        self._random: Any = None  # random state to resume with

    # -------------------------------------------------------------------------------- processes and messages

    global_rank = property(lambda self: hc.rank())
    local_rank = property(lambda self: hc.local_rank())
    node_rank = property(lambda self: hc.cross_rank())
    world_size = property(lambda self: hc.size())

    @property
    def root_device(self) -> torch.device:
        if isinstance(self.accelerator, CPUAccelerator):
            return torch.device("cpu")
        device = hc.local_device()
        if device.type == "cpu":
            raise ValueError(
                "Trainer(accelerator='gpu'): this Horovod has no operations on GPUs; give accelerator='cpu'"
            )
        return device

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": hc.size(), "rank": hc.rank()}

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """A tensor's mean (or sum, max, min) over the ranks; anything else as it is. Collective."""
        self._launcher.check("reduce()")
        check({"HorovodStrategy": True, "sync_dist_group": group})
        name = str(reduce_op).rpartition(".")[2].lower()
        if name not in OPERATIONS:
            raise ValueError(f"reduce_op={reduce_op!r} is not one of {', '.join(OPERATIONS)}")
        if not isinstance(tensor, torch.Tensor):
            return tensor
        averages = OPERATIONS[name] == hc.Average and not tensor.is_floating_point()
        value = tensor.float() if averages else tensor
        if is_undisturbed():  # the planner runs steps on one rank
            return value
        return hc.allreduce(value, op=OPERATIONS[name], name="hvd_ckpt.lightning.reduce")

    def barrier(self, name: str | None = None) -> None:
        """Returns when all ranks have come here."""
        self._launcher.check("barrier()")
        if not is_undisturbed():
            hc.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The object of one rank, on every rank. Collective."""
        self._launcher.check("broadcast()")
        return obj if is_undisturbed() else hc.broadcast_object(obj, src)

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """All ranks' tensors, of one shape, in a new first dimension. Collective."""
        self._launcher.check("all_gather()")
        check({"HorovodStrategy": True, "sync_dist_group": group})
        row = (tensor if sync_grads else tensor.detach())[None]
        if is_undisturbed():
            gathered = torch.cat([row] * hc.size())
        else:
            gathered = hc.allgather(row.detach(), name="hvd_ckpt.lightning.all_gather")
            if row.requires_grad:
                gathered = torch.cat((gathered[: hc.rank()], row, gathered[hc.rank() + 1 :]))
                gathered.register_hook(
                    lambda gradient: hc.allreduce(
                        gradient.contiguous(), op=hc.Sum, name="hvd_ckpt.lightning.gradient"
                    )
                )
        return gathered if hc.size() > 1 else gathered[0]

    # -------------------------------------------------------------------------------- before training

    def setup_environment(self) -> None:
        """Raises ValueError where the Trainer was given other processes than the launcher has started."""
        devices = len(self.parallel_devices or [])
        for name, given, possible in (
            ("devices", devices, (1, hc.local_size(), torch.cuda.device_count())),
            ("num_nodes", self.num_nodes, (1, hc.cross_size())),
        ):
            if given not in possible:
                raise ValueError(
                    f"Trainer({name}={given}): the launcher has started {hc.size()} processes on {hc.cross_size()} hosts; leave "
                    f"{name} out"
                )
        super().setup_environment()

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        plugin = self.precision_plugin
        scaler = getattr(plugin, "scaler", None)
        if scaler is not None and not isinstance(scaler, hc.GradScaler):
            # Lightning's scaler sees its own rank's gradients: with shards, one rank would skip a step that the others take.
            plugin.scaler = hc.GradScaler(plugin.device, enabled=scaler.is_enabled())
            plugin.scaler.load_state_dict(scaler.state_dict())
        plugin.clip_grad_by_norm, plugin.clip_grad_by_value = self._clip_norm, self._clip_value
        module = self.lightning_module
        asks = not module.automatic_optimization or any(
            is_overridden(name, hooked)
            for hooked in (module, *trainer.callbacks)
            for name in ("on_after_backward", "optimizer_step")
            if hasattr(hooked, name)
        )
        self._asks = any(of_all_processes(asks, "HorovodStrategy: hooks"))
        for wrapper in self._lightning_optimizers:
            hand_on(wrapper)

    def model_to_device(self) -> None:
        self.model.to(self.root_device)

    def _setup_model(self, model: nn.Module) -> nn.Module:
        trainer = self.lightning_module.trainer
        if self._layer_sync is not None:
            hc.SyncBatchNorm.convert(model)
        attributes = (value for callback in trainer.callbacks for value in vars(callback).values())
        for owner in (model, *attributes):
            for metric in metrics_in(owner).values() if isinstance(owner, nn.Module) else ():
                # By default, metrics gather by torch.distributed, which has no process group here.
                if metric.dist_sync_fn is None:
                    metric.dist_sync_fn, metric.distributed_available_fn = gather_state, is_initialized
        hc.broadcast_parameters([*model.named_parameters(), *model.named_buffers()], root_rank=0)
        return TrainingStep(model) if trainer.training else model

    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        bare_optimizers, shard = self.optimizers, self._options["shard"]
        check({
            "budget": self._budget,
            "manual optimization": not self.lightning_module.automatic_optimization,
            "shard": hc.Shard.of(shard).name,
            "several optimizers": len(bare_optimizers) > 1,
            "model": True,
        })  # fmt: skip
        if self._budget is not None:
            apply_plan(self, self._budget)
        named = list(self.model.named_parameters())
        self.optimizers = [
            hc.DistributedOptimizer(bare, named, model=self.model, **self._options)
            for bare in bare_optimizers
        ]
        if self.optimizers[0].shard_stage == 3:  # which gathers parameters that the training step then uses
            trainer.fit_loop.epoch_loop.val_loop.inference_mode = False

    def process_dataloader(self, dataloader: Any) -> Any:
        trainer = self.lightning_module.trainer
        if not trainer.training or not isinstance(dataloader, torch.utils.data.DataLoader):
            return dataloader
        if hasattr(dataloader, "state_dict"):
            return dataloader
        if isinstance(dataloader.dataset, torch.utils.data.IterableDataset):
            return SeededLoader(dataloader, lambda: trainer.current_epoch)
        return ResumableLoader(dataloader, lambda: trainer.current_epoch, lambda: trainer.is_last_batch)

    # -------------------------------------------------------------------------------- a step

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        # Else Lightning leaves out schedules on a plateau at the end of an epoch that was resumed in its middle.
        self.lightning_module.trainer.fit_loop._restarting = False

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """A backward pass, after whose last one before a step hooks and the user's code see the gradients of all ranks."""
        module, plugin = self.lightning_module, self.precision_plugin
        loss = plugin.pre_backward(closure_loss, module)
        plugin.backward(loss, module, optimizer, *args, **kwargs)
        if not self._accumulates:
            self._reduce()
        return plugin.post_backward(loss, module)

    def _reduce(self) -> None:
        for optimizer in self.optimizers:
            # While one is toggled, the parameters of the others are frozen.
            if any(parameter.requires_grad for parameter in parameters_of(optimizer)):
                optimizer.synchronize()

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """A context in which backward passes accumulate gradients of this rank's own."""
        before, self._accumulates = self._accumulates, True
        try:
            yield
        finally:
            self._accumulates = before

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: LightningModule | None = None, **kwargs: Any
    ) -> Any:
        """Takes a step with gradients that :meth:`backward` has reduced; what has changed since is reduced again."""

        def reduced() -> Any:
            result = closure()
            # The user's code may have changed gradients, on this rank alone even. Finding that out takes a small message.
            optimizer.synchronize() if self._asks else optimizer.reduce_for_caller()
            return result

        with optimizer.without_reduction():
            return super().optimizer_step(optimizer, reduced, model, **kwargs)

    def _clip_norm(self, optimizer: Any, clip_val: float) -> None:
        hc.clip_grad_norm_(unwrapped(optimizer), clip_val)

    def _clip_value(self, optimizer: Any, clip_val: float) -> None:
        optimizer = unwrapped(optimizer)
        optimizer.reduce_for_caller()
        in_shards = optimizer.shard_stage > 1
        clipped = [piece.parameter for piece in optimizer.pieces] if in_shards else parameters_of(optimizer)
        # A rank may have no part of what has gradients, and PyTorch refuses none.
        if clipped := [parameter for parameter in clipped if parameter.grad is not None]:
            torch.nn.utils.clip_grad_value_(clipped, clip_val)
        optimizer.note_changes()  # the same on all ranks

    # -------------------------------------------------------------------------------- checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._launcher.check("A checkpoint")
        for optimizer in self.optimizers:
            if optimizer.shard_stage == 3:
                return optimizer.full_model_state_dict(self.lightning_module) or {}
        return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return unwrapped(optimizer).full_state_dict() or {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        check({"HorovodStrategy": True, "lr_find()": Path(filepath).name.startswith(TRIAL)})
        if "optimizer_states" in checkpoint:
            # Lightning calls this on every rank, and its own method writes on rank 0 alone: the place to gather what each rank has.
            # As bytes, since unsigned integers of random states cannot be pickled.
            buffer = io.BytesIO()
            torch.save(self._state_of_rank(), buffer)
            stored = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
            checkpoint[STATE] = {"ranks": hc.allgather_object(stored)}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        self._weights_only = weights_only
        return super().load_checkpoint(checkpoint_path, weights_only)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        ranks = checkpoint.get(STATE, {"ranks": []})["ranks"]
        if len(ranks) != hc.size():
            return  # each rank draws new random numbers
        stored = io.BytesIO(ranks[hc.rank()].numpy().tobytes())
        # Extra states of modules may contain objects, which are unpickled only if the user asks for that.
        state = torch.load(stored, weights_only=self._weights_only is not False)
        for optimizer, reduction in zip(self.optimizers, state["reduction"]):
            optimizer.load_reduction_state_dict(reduction)
        load_own_state(self.lightning_module, state["module"])
        for name, metric in metrics_in(self.lightning_module).items():
            if name in state["metrics"]:
                metric._update_count, values = state["metrics"][name]
                vars(metric).update(values)
        self._random = state["random"]

    def _state_of_rank(self) -> dict[str, Any]:
        metrics = metrics_in(self.lightning_module).items()
        return {
            "random": random_state(),
            "module": own_state(self.lightning_module),
            # What metrics have counted on this rank, which no state_dict() has.
            "metrics": {name: (metric.update_count, metric.metric_state) for name, metric in metrics},
            "reduction": [optimizer.reduction_state_dict() for optimizer in self.optimizers],
        }

    def on_train_start(self) -> None:
        if self._random is not None:
            # As late as this: until here, Lightning may draw numbers for its loaders and checks.
            set_random_state(self._random)
            self._random = None

    def on_train_end(self) -> None:
        for optimizer in self.optimizers:
            if optimizer.shard_stage == 3 and not optimizer.is_offloaded:
                optimizer.unshard()


class SaveOnSignal(Stopping, Callback):
    """Saves a checkpoint and exits, on all ranks after the same step, when one gets SIGTERM, SIGINT (Ctrl-C), SIGUSR1 or SIGHUP, or
    the folder has a file ``stop``. The exit status is 128 + the number of the signal, 0 after the file.

    ::

        stop = SaveOnSignal("runs/digits")
        trainer = Trainer(strategy=HorovodStrategy(), callbacks=[stop])
        trainer.fit(module, data, ckpt_path=stop.ckpt_path)

    Args:
        folder: where ``stopped.ckpt`` is written. A training that ends by itself removes it.
    """

    @property
    def ckpt_path(self) -> Path | None:
        """The checkpoint of an earlier stop, or None; as rank 0 finds it. Collective."""
        path = self._folder / "stopped.ckpt"
        return path if of_first_process(path.is_file(), "SaveOnSignal") else None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Lightning's own handler ends this rank alone. One of the user's stays.
        handlers = getattr(signal.getsignal(signal.SIGTERM), "signal_handlers", ())
        if len(handlers) == 1:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.begin()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if self.is_asked(trainer.strategy.optimizers):
            path = self._folder / "stopped.ckpt"
            trainer.save_checkpoint(path)
            self.leave(f"ckpt_path={str(path)!r}")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.end()
        if hc.rank() == 0:
            (self._folder / "stopped.ckpt").unlink(missing_ok=True)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.end()


def metrics_in(module: nn.Module) -> dict[str, Metric]:
    """The metrics of a module, by name."""
    return {name: one for name, one in module.named_modules() if isinstance(one, Metric)}


def gather_state(value: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    """The state of a metric on each rank, in place of torchmetrics' function. Collective."""
    return [value] * hc.size() if is_undisturbed() else hc.allgather_object(value)


def is_initialized() -> bool:
    """Whether metrics have ranks to gather from."""
    return bool(hc.is_initialized())  # whose own function cannot be pickled


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters in the groups of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


StrategyRegistry.register(
    HorovodStrategy.strategy_name, HorovodStrategy, "Horovod with recomputation and sharding", override=True
)
