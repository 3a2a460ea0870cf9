"""Transformers' Trainer over Horovod: ``Trainer`` and ``Seq2SeqTrainer``, with memory plans, sharding and resume with the same
bits.

They override methods of the Trainer and keep its loop. Accelerate sees one process, whatever the launcher. Ranks decide together:
whether to save, evaluate, log or stop is what rank 0's callbacks and metrics say.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch.utils.data import DistributedSampler
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_utils import get_last_checkpoint

import hvd_ckpt as hc
from hvd_ckpt.app.integrations.stopping import Stopping
from hvd_ckpt.app.integrations.transformers_data import DividingAccelerator
from hvd_ckpt.collectives.agreement import agree_on_options, described, of_all_processes, of_first_process
from hvd_ckpt.utils.own_state import load_own_state, own_state
from hvd_ckpt.utils.random_sources import global_sources
from hvd_ckpt.utils.rules import TRAINER, check


def _backend(state: Any, *args: Any, **kwargs: Any) -> Any:
    # Accelerate would split the rank's samples over the processes that the variables of torchrun or MPI tell it of.
    # Without an address, as under mpirun, it cannot connect to these anyway, even before hc.init().
    if hc.is_initialized() or "MASTER_ADDR" not in os.environ:
        return None, DistributedType.NO
    return _prepare_backend(state, *args, **kwargs)


_prepare_backend = PartialState._prepare_backend
PartialState._prepare_backend = _backend

FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")
OF_LOOP = (  # events that the Trainer's loop alone has
    "on_train_begin", "on_epoch_begin", "on_step_begin", "on_pre_optimizer_step", "on_optimizer_step", "on_substep_end",
    "on_step_end", "on_epoch_end",
)  # fmt: skip
IN_LOOP = ("on_log", "on_evaluate", "on_save")  # events that a program may have on one rank, too
OF_A_RANK = (  # settings that may differ between ranks begin with one of these
    "output_dir", "run_name", "project", "trackio_", "report_to", "disable_tqdm", "log_", "hub_", "push_to_hub", "seed",
    "data_seed", "dataloader_", "use_cpu", "local_rank", "ddp_", "do_", "debug", "skip_memory_metrics", "resume_from_checkpoint",
    "eval_accumulation_steps",
)  # fmt: skip


class _Callbacks(CallbackHandler):
    """The callbacks of a Trainer. What those of the user's decide in the loop is rank 0's decision, on all ranks."""

    in_loop = False  # in a part of the loop that logs, evaluates and saves
    agreed: frozenset[str] = frozenset()
    _event = ""

    def agree(self) -> None:
        """Collects the events for which some rank has a callback of the user's. Collective.

        Those of transformers and of this library decide by what is the same on all ranks, and need no message.
        """
        events = {
            event
            for event in (*OF_LOOP, *IN_LOOP)
            for callback in self.callbacks
            if getattr(callback, event).__module__.partition(".")[0] not in ("transformers", "hvd_ckpt")
        }
        self.agreed = frozenset().union(*of_all_processes(events, "Trainer: callbacks"))

    def call_event(self, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        outer, self._event = self._event, event
        try:
            control = super().call_event(event, args, state, control, **kwargs)
        finally:
            self._event = outer
        # A callback may log or evaluate on one rank.
        if not outer and event in self.agreed and (event in OF_LOOP or self.in_loop):
            flags = torch.tensor([bool(getattr(control, flag)) for flag in FLAGS], dtype=torch.uint8)
            for flag, value in zip(FLAGS, hc.broadcast(flags, 0, name="Trainer: decisions").tolist()):
                setattr(control, flag, bool(value))
        return control


def _stored(args: Any, protocol: Any) -> Any:
    """Has arguments stored as those of the user's class."""
    return object.__new__, (type(args).__base__,), vars(args)


@contextlib.contextmanager
def _main_process_first(args: Any, local: bool = True, desc: str = "work") -> Iterator[None]:
    """As the method of training arguments, with Horovod's barrier."""
    is_first = (args.local_process_index if local else args.process_index) == 0
    if not is_first:
        hc.barrier()
    try:
        yield
    finally:
        if is_first:
            hc.barrier()


_OF_RANKS = {
    "process_index": property(lambda args: hc.rank()),
    "local_process_index": property(lambda args: hc.local_rank()),
    "world_size": property(lambda args: hc.size()),
    "device": property(lambda args: torch.device("cpu") if args.use_cpu else hc.local_device()),
    "n_gpu": property(lambda args: int(args.device.type == "cuda")),
    "main_process_first": _main_process_first,
    "__reduce_ex__": _stored,
}
"""What training arguments say of processes here, so that rank 0 alone logs and writes."""


class _OverHorovod:
    """Methods of the Trainer that depend on ranks.

    Args:
        budget: memory budget of activations, as in :func:`hvd_ckpt.plan`; the plan is made for the first batch.
        shard: the states that are split over the ranks, as in :func:`hvd_ckpt.DistributedOptimizer`.
        distributed: further arguments of :func:`hvd_ckpt.DistributedOptimizer`.
        others: arguments of the Trainer. Each rank trains on its part of ``train_dataset`` and evaluates on all of
            ``eval_dataset``.

    Raises:
        ValueError: a setting cannot be used with Horovod, or with another setting; the message names it.
    """

    def __init__(
        self: Any,
        model: Any = None,
        args: Any = None,
        *positional: Any,
        budget: int | float | str | None = None,
        shard: hc.Shard | str | int = "none",
        distributed: dict[str, Any] | None = None,
        **others: Any,
    ) -> None:
        hc.init()
        args = transformers.TrainingArguments() if args is None else args
        self._distributed: Any = None
        self._budget, self._options = budget, {"shard": shard, **(distributed or {})}
        _check(args, budget, shard, self._options)
        if type(args).__dict__.get("__reduce_ex__") is not _stored:
            # These are properties of the class of arguments, so this object
            # gets a class of its own; others of the user's stay as they are.
            args.__class__ = type(type(args).__name__, (type(args),), dict(_OF_RANKS))
        # If Accelerate has connected the ranks for the arguments, it is told anew.
        AcceleratorState._reset_state(reset_partial_state=True)
        args.distributed_state = PartialState(cpu=args.device.type == "cpu")
        super().__init__(model, args, *positional, **others)  # type: ignore[call-arg]
        self._given_pair = self.optimizer, self.lr_scheduler
        make = self.get_train_dataloader  # which the class of a user may override
        self.get_train_dataloader = lambda: self.accelerator.for_training(make)
        self.callback_handler.__class__ = _Callbacks
        if self.train_dataset is not None and not hasattr(self.train_dataset, "__len__"):
            raise ValueError(
                "Trainer: train_dataset has no length, so that it cannot be split over ranks; give numbered samples"
            )

    def create_accelerator_and_postprocess(self: Any) -> None:
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.accelerator.__class__ = DividingAccelerator

    def create_optimizer(self: Any, model: Any = None) -> Any:
        """The Trainer's optimizer over all ranks, made after the plan."""
        # The Trainer asks again after Accelerate has wrapped the optimizer: the one that was made stays.
        if self.optimizer is not None and _unwrapped(self.optimizer) is self._distributed:
            return self.optimizer
        if self._budget is not None:
            # The batch of the plan is drawn aside: training then draws the same random numbers as without a budget.
            with contextlib.ExitStack() as aside:
                for source in global_sources():
                    aside.callback(source.restore)
                aside.enter_context(torch.random.fork_rng())
                aside.enter_context(self.compute_loss_context_manager())
                inputs = self._prepare_inputs(next(iter(self.get_train_dataloader())))
            dtype = torch.bfloat16 if self.args.bf16 else None
            plan = hc.plan(self.model, kwargs=inputs, budget=self._budget, autocast=dtype)
            plan.apply(self.model)
        optimizer = super().create_optimizer(model)  # type: ignore[misc]
        hc.broadcast_parameters([*self.model.named_parameters(), *self.model.named_buffers()], root_rank=0)
        named = self.model.named_parameters()
        self.optimizer = hc.DistributedOptimizer(optimizer, named, model=self.model, **self._options)
        self._distributed = self.optimizer  # which Accelerate will wrap
        return self.optimizer

    @property
    def _data_seed(self: Any) -> int:
        return self.args.seed if self.args.data_seed is None else self.args.data_seed

    def _get_train_sampler(self: Any, train_dataset: Any = None) -> Any:
        data = self.train_dataset if train_dataset is None else train_dataset
        return DistributedSampler(data, hc.size(), hc.rank(), seed=self._data_seed)

    def _init_training_state(self: Any, max_steps: int, *args: Any) -> Any:
        where = super()._init_training_state(max_steps, *args)  # type: ignore[misc]
        settings = {
            field.name: getattr(self.args, field.name)
            for field in dataclasses.fields(self.args)
            if not field.name.startswith(OF_A_RANK)
        }
        facts = {
            **settings,
            "data_seed": self._data_seed,
            "len(train_dataset)": None if self.train_dataset is None else len(self.train_dataset),
            "number of steps": max_steps,
            "step of the checkpoint": self.state.global_step,
        }
        agree_on_options("Trainer", described(**facts), None)
        self.callback_handler.agree()
        return where

    def _maybe_log_save_evaluate(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.control.should_log:
            self._average_loss()
        with self._in_loop():
            super()._maybe_log_save_evaluate(*args, **kwargs)  # type: ignore[misc]

    def _evaluate(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._in_loop(), self._buffers_of_first_rank():
            return super()._evaluate(*args, **kwargs)  # type: ignore[misc]

    def evaluation_loop(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluates or predicts. By the metrics of an evaluation in the training loop ranks decide: there they are rank 0's."""
        output = super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]
        if self.callback_handler.in_loop:
            output = output._replace(metrics=of_first_process(output.metrics, "Trainer: metrics"))
        return output

    def _determine_best_metric(self: Any, *args: Any, **kwargs: Any) -> bool:
        # With save_strategy="best" the result replaces should_save: a save that a callback has asked for stays due.
        is_best = super()._determine_best_metric(*args, **kwargs)  # type: ignore[misc]
        return bool(is_best or self.control.should_save)

    @contextlib.contextmanager
    def _in_loop(self: Any) -> Iterator[None]:
        before, self.callback_handler.in_loop = self.callback_handler.in_loop, True
        try:
            yield
        finally:
            self.callback_handler.in_loop = before

    @contextlib.contextmanager
    def _buffers_of_first_rank(self: Any) -> Iterator[None]:
        """A context in which each rank has rank 0's buffers, which are those that are saved. Afterwards those that have not
        changed are the rank's own again. Collective."""
        before = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        self._share_buffers()
        shared = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        yield
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                if name in shared and torch.equal(buffer, shared[name]):
                    buffer.copy_(before[name])

    def _share_buffers(self: Any) -> None:
        hc.broadcast_parameters(dict(self.model.named_buffers()), root_rank=0)

    def _get_num_items_in_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        items = super()._get_num_items_in_batch(*args, **kwargs)  # type: ignore[misc]
        if items is None or not self.args.average_tokens_across_devices:
            return items
        # Each rank divides its loss by this number, and gradients are averaged: with the mean over
        # the ranks, that makes the mean over the tokens of all of them.
        return hc.allreduce(torch.as_tensor(items, dtype=torch.float32), name="items of a batch")

    def _clip_grad_norm(self: Any, model: Any) -> Any:
        # In the order of the model, not of the optimizer's groups, since the norm's last bit depends on it: as
        # the Trainer itself does, but without parameters whose gradients are not reduced.
        stepped = {id(one) for group in self._distributed.param_groups for one in group["params"]}
        chosen = [one for one in self.model.parameters() if id(one) in stepped]
        return hc.clip_grad_norm_(chosen, self.args.max_grad_norm)

    def _get_grad_norm(self: Any, model: Any, grad_norm: Any = None) -> Any:
        # Without clipping there is no norm yet. A limit of infinity changes no gradient, and gives the norm
        # over all ranks.
        return hc.clip_grad_norm_(self._distributed, math.inf) if grad_norm is None else grad_norm

    def _finalize_training(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._average_loss()
        return super()._finalize_training(*args, **kwargs)  # type: ignore[misc]

    def _average_loss(self: Any) -> None:
        """Averages the sum of losses since the last log over the ranks."""
        self._tr_loss.copy_(hc.allreduce(self._tr_loss, name="training loss"))

    def store_flos(self: Any) -> None:
        """Adds the floating-point operations of all ranks since the last call."""
        self.current_flos = _sum(float(self.current_flos), "floating-point operations")
        super().store_flos()  # type: ignore[misc]

    def _track_num_input_tokens(self: Any, inputs: Any) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)  # type: ignore[misc]
        if self.args.include_num_input_tokens_seen != "no":
            seen = _sum(self.state.num_input_tokens_seen - before, "input tokens")
            self.state.num_input_tokens_seen = before + seen

    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Trains; afterwards the model is whole and the same on every rank."""
        result = super().train(*args, **kwargs)  # type: ignore[misc]
        self._share_buffers()
        if self._distributed.shard_stage == 3:
            self._distributed.unshard()
            # For another training, which wraps them anew.
            self.optimizer, self.lr_scheduler = self._given_pair
        return result

    def save_model(self: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the model, whole, on rank 0, or on one rank of each host with ``save_on_each_node``."""
        if self._distributed is None or self._distributed.shard_stage < 3:
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
            return
        state = self._distributed.full_model_state_dict(self.model, self.args.save_on_each_node)
        if self.args.should_save:
            self._save(output_dir, state_dict=state)

    def _save_checkpoint(self: Any, *args: Any, **kwargs: Any) -> None:
        super()._save_checkpoint(*args, **kwargs)  # type: ignore[misc]
        # Each rank has looked whether the folder is there, maybe before rank 0 has made it.
        best = self.state.best_model_checkpoint
        self.state.best_model_checkpoint = of_first_process(best, "Trainer: best model")

    def _load_best_model(self: Any) -> None:
        # Rank 0 reads its files, which other hosts may lack.
        if hc.rank() == 0:
            super()._load_best_model()  # type: ignore[misc]
        hc.broadcast_parameters(self.model.state_dict(), root_rank=0)

    def _save_optimizer_and_scheduler(self: Any, output_dir: str) -> None:
        # Gathered on all ranks, before rank 0 writes. It replaces the
        # file of the wrapped optimizer, which has this rank's part alone.
        state = self._distributed.full_state_dict(self.args.save_on_each_node)
        super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        if self.args.should_save:
            torch.save(state, Path(output_dir, "optimizer.pt"))

    def _save_rng_state(self: Any, output_dir: str) -> None:
        super()._save_rng_state(output_dir)  # type: ignore[misc]
        state = {"reduction": self._distributed.reduction_state_dict(), "module": own_state(self.model)}
        torch.save(state, Path(output_dir, f"hvd_ckpt_{hc.rank()}_of_{hc.size()}.pt"))

    def _load_rng_state(self: Any, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)  # type: ignore[misc]
        path = Path(checkpoint or "", f"hvd_ckpt_{hc.rank()}_of_{hc.size()}.pt")
        if checkpoint is None or not path.is_file():
            return  # of other ranks: each draws new random numbers
        state = torch.load(path, weights_only=True)
        self._distributed.load_reduction_state_dict(state["reduction"])
        load_own_state(self.model, state["module"])


class Trainer(_OverHorovod, transformers.Trainer):  # type: ignore[misc]
    __doc__ = f"``transformers.Trainer`` over all ranks of a Horovod job.\n\n    {_OverHorovod.__doc__}"


class Seq2SeqTrainer(_OverHorovod, transformers.Seq2SeqTrainer):  # type: ignore[misc]
    """``transformers.Seq2SeqTrainer`` in the same way: it generates during evaluation."""


class SaveOnSignal(Stopping, transformers.TrainerCallback):
    """Saves a checkpoint and exits, on all ranks after the same step, when one gets SIGTERM, SIGINT (Ctrl-C), SIGUSR1 or SIGHUP, or
    the folder has a file ``stop``. The exit status is 128 + the number of the signal, 0 after the file.

    ::

        stop = SaveOnSignal(arguments.output_dir)
        trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[stop])
        trainer.train(resume_from_checkpoint=stop.checkpoint)

    Args:
        folder: ``output_dir`` of the training arguments.
    """

    @property
    def checkpoint(self) -> str | None:
        """The newest checkpoint in the folder, or None; as rank 0 finds it. Collective."""
        found = get_last_checkpoint(self._folder) if self._folder.is_dir() else None
        return of_first_process(found, "SaveOnSignal")

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        if self.is_asked([_unwrapped(optimizer)]):
            control.should_save = control.should_training_stop = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._reason is not None:
            self.leave(f"resume_from_checkpoint={str(self._folder / f'checkpoint-{state.global_step}')!r}")

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.end()


def _sum(value: Any, name: str) -> Any:
    """The sum of the ranks' numbers."""
    dtype = torch.float64 if isinstance(value, float) else torch.int64
    return hc.allreduce(torch.tensor(value, dtype=dtype), op=hc.Sum, name=name).item()


def _unwrapped(optimizer: Any) -> Any:
    """The optimizer in Accelerate's wrapper; one without a wrapper as it is."""
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def _check(args: Any, budget: Any, shard: Any, options: dict[str, Any]) -> None:
    """Raises ValueError for a setting that cannot be used with Horovod, or with another one."""
    names = (
        "auto_find_batch_size", "fp16", "gradient_checkpointing", "load_best_model_at_end", "enable_jit_checkpoint", "deepspeed",
        "fsdp",
    )  # fmt: skip
    given = {name: getattr(args, name, None) or None for name in names}
    strategy = args.train_sampling_strategy
    check({
        **given,
        "train_sampling_strategy": None if strategy == "random" else strategy,
        TRAINER: True,
        "replicas": options.get("replicas"),
        "budget": budget,
        "shard": hc.Shard.of(shard).name,
        "model": True,
    })  # fmt: skip
