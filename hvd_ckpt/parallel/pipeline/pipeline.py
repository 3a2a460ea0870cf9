"""``Pipeline``: a chain whose blocks are on several ranks, which compute different micro-batches at the same time."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hvd_ckpt.collectives.agreement import agree_on_options, described, errors_on_all
from hvd_ckpt.distributed.clipping import clip_grad_norm_
from hvd_ckpt.parallel.pipeline.balance import balance_costs, block_bytes, block_costs, check_balance, cuts_of
from hvd_ckpt.parallel.pipeline.chain import Chain
from hvd_ckpt.parallel.pipeline.execution import Chunks, Execution, MicroBatch
from hvd_ckpt.parallel.pipeline.microbatch import (
    Accumulated,
    Accumulation,
    check_options,
    concatenated,
    fields_of,
    keeps_activations,
    split_batch,
    terms_of,
)
from hvd_ckpt.parallel.pipeline.random_state import draw_key, seed_each
from hvd_ckpt.parallel.pipeline.schedule import (
    FORWARD,
    Schedule,
    followed_at_once,
    make_schedule,
    virtual_stages_of,
)
from hvd_ckpt.parallel.pipeline.tied import find_shared, summed_over_stages, unchanged, with_buffers
from hvd_ckpt.parallel.pipeline.transport import LOSS_TAG, STEP_TAG, Transport
from hvd_ckpt.planning.plan import Plan
from hvd_ckpt.processes.grid import current
from hvd_ckpt.processes.links import StageFailed
from hvd_ckpt.processes.whole_model import number_parameters
from hvd_ckpt.recompute.calls import tensors_in
from hvd_ckpt.recompute.sequential import CheckpointSequential, places_of
from hvd_ckpt.utils.cuts import cut_of, mark
from hvd_ckpt.utils.fingerprint import fingerprint, fingerprints
from hvd_ckpt.utils.rules import check
from hvd_ckpt.utils.text import CHECKPOINTS
from hvd_ckpt.utils.unmaterialized import check_shapes


class Pipeline(nn.Module):
    """A chain of blocks in pipeline stages, combined with data parallelism and recomputation (GPipe, Huang et al., 2019).

    ::

        hc.init(stages=2)
        torch.manual_seed(seed + hc.rank())                     # the replica: the same on all its stages
        model = hc.Pipeline(model, chunks=8)                    # the same model on every rank, which keeps its own blocks
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer = hc.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        for inputs, targets in loader:                          # the same batch on all stages of a replica
            optimizer.zero_grad()
            loss, _ = model.accumulate((inputs, targets), functional.cross_entropy)
            optimizer.step()

    The weights after a step equal those of ``hc.accumulate`` with the whole model on each rank, bit for bit, for any number of
    stages, schedule and ``checkpoint``. If the model draws random numbers, the whole model must be given to
    :func:`hvd_ckpt.seed_blocks`. In two cases, weights are equal up to rounding. In the first, blocks on several stages share a
    parameter. In the second, there are more than two replicas, since Horovod's order of additions depends on the place in a
    bucket.

    Parameters and buffers have the names of the whole model. After construction, only the blocks on this rank have weights; the
    other blocks of the model are on the meta device.

    Args:
        model: a chain of this library (including ``transformers`` models) or an ``nn.Sequential``, the same on every rank. Its own
            recomputation (``checkpoint_interval``) is not used; see ``checkpoint``.
        balance: number of blocks in each chunk of the model, ``stages * virtual_stages`` numbers. By default the largest chunk has
            the fewest bytes of parameters and buffers; with ``"time"`` the slowest takes the fewest seconds, and with ``"size"``
            the largest has the fewest bytes of states and kept activations, both measured on ``sample``.
        sample: a micro-batch: the argument of the model, a tuple of several, or a :class:`hvd_ckpt.data.Batch`.
        plan: a plan of ``hc.plan(..., layout=hc.StageLayout(hc.grid().stages))``, which is applied to the model. It sets
            ``balance``, ``chunks``, ``schedule`` and ``virtual_stages``, which must not be given, and ``checkpoint="auto"``.
        chunks: number of micro-batches of a batch; required without a plan.
        schedule: ``"gpipe"``, ``"1f1b"`` or ``"interleaved"``, see :mod:`hvd_ckpt.parallel.pipeline.schedule`.
        checkpoint: the micro-batches whose blocks are recomputed from their input in the backward pass, as in torchgpipe:
            ``"always"``, ``"except_last"`` (the default without a plan), ``"never"``. ``"auto"`` recomputes a micro-batch unless
            its backward pass follows at once on that rank: with ``"1f1b"``, the last stage recomputes nothing and the others nearly
            all. With a plan, ``"auto"`` recomputes the chunks that the plan names, and blocks of other chunks follow their
            policies.
        virtual_stages: number of chunks of the model on each rank; by default 2 with ``"interleaved"``, else 1. Chunk c is on stage
            ``c % stages``.

    Raises:
        TypeError: the model is not a chain.
        ValueError: an argument is invalid or differs between ranks.
        hvd_ckpt.PlanError: the plan was made for another model or number of stages, or without stages.
    """

    def __init__(
        self,
        model: nn.Sequential,
        balance: Sequence[int] | str | None = None,
        *,
        sample: Any = None,
        plan: Plan | None = None,
        chunks: int | None = None,
        schedule: str | None = None,
        checkpoint: str | None = None,
        virtual_stages: int | None = None,
    ) -> None:
        super().__init__()
        given: dict[str, Any] = {
            "balance": balance, "chunks": chunks, "schedule": schedule, "checkpoint": checkpoint,
            "virtual_stages": virtual_stages,
        }  # fmt: skip
        options = described(model=model, plan=plan, **given, sample=sample is not None)
        agree_on_options("Pipeline", options, None)
        of_pipeline = {f"{name} of Pipeline": value for name, value in given.items()}
        of_plan = {"a plan of stages": True, **given} if plan is not None else {}
        check({"Pipeline": True, "plan": plan, "chunks": chunks, "sample": sample, **of_pipeline, **of_plan})
        costs = block_costs(balance, model, sample) if isinstance(balance, str) and plan is None else None
        with errors_on_all("Pipeline"):
            names, blocks = self._lay_out(model, plan, given, costs)
        # Before any weight is freed: an error here leaves the whole model to the caller.
        self._check_equal(model)
        kept = {number for number, chunk in enumerate(self._chunks.chunk_of) if chunk in self._chunks.own}
        # In the order of the model, also with several chunks on this rank:
        # parameters(), and so the reducer's buckets, have that order.
        for number in sorted(kept):
            self.add_module(names[number], blocks[number])
        _release_weights(
            [block for number, block in enumerate(blocks) if number not in kept], list(self.children())
        )
        self._failed = ""
        self.training = model.training

    def _lay_out(
        self, model: nn.Sequential, plan: Plan | None, given: dict[str, Any], costs: Sequence[float] | None
    ) -> tuple[Sequence[str], Sequence[nn.Module]]:
        """Checks the arguments and lays out chunks and schedule.

        Returns:
            Names of all blocks, and the blocks.
        """
        if not isinstance(model, nn.Sequential) or type(model).forward not in (
            nn.Sequential.forward, Chain.forward, CheckpointSequential.forward,
        ):  # fmt: skip
            raise TypeError(f"Pipeline takes a chain or an nn.Sequential, got {type(model).__name__}")
        if not len(model):
            raise ValueError("Pipeline takes a chain of at least one block, got an empty one")
        check_shapes(model.named_parameters())
        grid = current()
        self._plan = planned = None if plan is None else cuts_of(plan, grid.stages)
        balance, chunks, schedule, checkpoint, virtual = given.values()
        if plan is not None and planned is not None:
            plan.apply(model)
            balance, chunks, schedule, checkpoint, virtual = (
                planned.balance, planned.micro_batches, planned.schedule, "auto", planned.virtual_stages
            )  # fmt: skip
        schedule, checkpoint = schedule or "1f1b", checkpoint or "except_last"
        check_options(chunks, checkpoint, (*CHECKPOINTS, "auto"))
        virtual = virtual_stages_of(schedule, virtual)
        names, blocks = zip(*places_of(model).items())
        parts = grid.stages * virtual
        if balance is None or isinstance(balance, str):
            balance = balance_costs(costs or block_bytes(blocks), parts)
        self.balance = check_balance(balance, len(blocks), parts)
        self.micro_batches, self.schedule, self.checkpoint = chunks, schedule, checkpoint
        self._virtual, self._grid = virtual, grid
        self._transport = Transport(grid)
        prepare = model.prepare if isinstance(model, Chain) else lambda *inputs, **shared: (inputs, shared)
        self._chunks = Chunks(blocks, self.balance, self._transport, prepare, planned is not None)
        chunk_of = self._chunks.chunk_of
        self._schedules: dict[int, Schedule] = {}
        # Made for its checks: a schedule that is impossible is an error here, on all ranks, and not in the first step.
        self._schedule_for(chunks)
        number_parameters(model)
        first: dict[Tensor, str] = {}
        whole = model.state_dict(keep_vars=True).items()
        self._first_names = {name: first.setdefault(tensor, name) for name, tensor in whole}
        stage_of = [chunk % grid.stages for chunk in chunk_of]
        tied = find_shared(blocks, names, stage_of, nn.Module.named_parameters)
        self._tied = [tie for tie in tied if grid.stage in tie.places]
        apart = find_shared(blocks, names, chunk_of, with_buffers)
        self._apart = [one for one in apart if not set(one.places).isdisjoint(self._chunks.own)]
        seed_each(list(blocks))
        return names, blocks

    def accumulate(
        self,
        batch: Any,
        loss_fn: Callable[[Any, Any], Tensor],
        *,
        weight: Callable[[Any], float | Tensor] | None = None,
        across_ranks: bool = False,
        backward: Callable[[Tensor, bool], Any] | None = None,
        forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> Accumulated:
        """Adds the gradients of a mini-batch to the parameters' ``grad``, as :func:`hvd_ckpt.accumulate` does.

        Collective over the stages of a replica, each of which gets the same batch.

        Args:
            batch: a :class:`hvd_ckpt.data.objectives.Batch`, or ``(inputs, targets)`` or ``(inputs, targets, shared)``. ``inputs``
                is the argument of the model, or a tuple of several positional arguments, and ``targets`` are those of the loss.
                ``shared`` is a dict of keyword arguments that all blocks share, such as masks. The batch is split along the first
                dimension of its tensors. Micro-batches may differ in size.
            loss_fn: takes the output of the model and the targets of a micro-batch, and returns the mean loss. It is called on the
                last stage.
            weight: takes a micro-batch, in the form of ``batch``, and returns the number of terms that its loss is the mean of; by
                default its number of samples.
            across_ranks: whether to weight by the terms of all replicas, see :func:`hvd_ckpt.accumulate`.
            backward: takes a loss and whether it is the last, and runs the backward pass on the last stage, such as
                ``lambda loss, last: scaler.scale(loss).backward()``.
            forward_context: makes a context for each forward pass, such as ``precision.autocast``.

        Returns:
            Loss and weight of the mini-batch, on all stages.

        Raises:
            hvd_ckpt.processes.links.StageFailed: another stage has failed.
        """
        with self._failing_together():
            if not callable(loss_fn):
                raise TypeError(f"loss_fn must be a function of output and targets, got {loss_fn!r}")
            if not torch.is_grad_enabled():
                raise RuntimeError("accumulate() computes gradients: call it outside of torch.no_grad()")
            parts = split_batch(batch, self.micro_batches)
            terms, micro_batches = [terms_of(part, weight) for part in parts], self._micro_batches(parts)
            last = self._chunks.count - 1 in self._chunks.own
            # Only the last stage has losses to weight, and its replicas
            # are a Horovod world of their own: other stages take no part.
            accumulation = Accumulation(terms, across_ranks and last, backward=backward)
            execution = Execution(self._chunks, micro_batches, loss_fn, accumulation, forward_context)
            # The sum comes after all backward passes, and before the reduction.
            with summed_over_stages(self._tied, self._transport):
                try:
                    execution.run(self._schedule_for(len(parts))[self._grid.stage])
                finally:
                    accumulation.factor()  # always waited for, since the next call sends under the same name
            return Accumulated(self._loss_everywhere(accumulation.loss), accumulation.weight)

    def forward(self, *inputs: Any, **shared: Any) -> Any:
        """Runs the model without gradients, micro-batch by micro-batch. Collective over the stages of a replica.

        Returns:
            The output of the whole batch on the last stage, None on the others. Tensors of the micro-batches are joined along their
            first dimension. A tensor without dimensions, such as a mean loss, becomes a vector with a number for each micro-batch,
            as in ``torch.nn.DataParallel``. Other values are those of the last micro-batch.
        """
        with self._failing_together(), torch.no_grad():
            parts = split_batch((inputs, None, shared), self.micro_batches)
            execution = Execution(self._chunks, self._micro_batches(parts))
            actions = self._schedule_for(len(parts))[self._grid.stage]
            execution.run([action for action in actions if action.kind == FORWARD])
            return concatenated(execution.outputs) if execution.outputs else None

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """:func:`hvd_ckpt.clip_grad_norm_` of this stage's parameters, by the norm over all stages. Collective over all ranks."""
        return clip_grad_norm_(self.parameters(), max_norm, norm_type, error_if_nonfinite)

    @property
    def sent_bytes(self) -> int:
        """Bytes that this process has sent to other stages since the model was made."""
        return self._transport.sent_bytes

    def extra_repr(self) -> str:
        return (
            f"stage={self._grid.stage}, stages={self._grid.stages}, balance={self.balance}, chunks={self.micro_batches}, "
            f"schedule={self.schedule!r}, checkpoint={self.checkpoint!r}"
        )

    # ------------------------------------------------------------------------------------------------ parts of a step

    def _schedule_for(self, micro_batches: int) -> Schedule:
        if micro_batches not in self._schedules:
            self._schedules[micro_batches] = make_schedule(
                self.schedule, self._grid.stages, micro_batches, self._virtual, self._chunks.edges
            )
        return self._schedules[micro_batches]

    def _micro_batches(self, parts: Sequence[Any]) -> list[MicroBatch]:
        fields = [fields_of(part) for part in parts]
        facts = zip(fields, self._keys(fields), self._kept_chunks(len(parts)))
        return [MicroBatch(*values, key, keeps) for values, key, keeps in facts]

    def _kept_chunks(self, count: int) -> list[set[int]]:
        """For each micro-batch, the chunks of this rank that are not recomputed as a whole."""
        own = set(self._chunks.own)
        if self.checkpoint != "auto":
            kept = [keeps_activations(self.checkpoint, index == count - 1) for index in range(count)]
            return [own if keeps else set() for keeps in kept]
        # "auto": a micro-batch whose backward pass follows at once is kept, and so are chunks that the plan does not recompute.
        at_once = followed_at_once(self._schedule_for(count)[self._grid.stage])
        planned = {chunk for chunk in own if self._plan and not self._plan.parts[chunk].recompute}
        return [planned | {chunk for chunk in own if (chunk, index) in at_once} for index in range(count)]

    def _keys(self, micro_batches: Sequence[tuple[Any, Any, dict[str, Any]]]) -> list[int | None]:
        """The random state of each micro-batch. Every stage draws it, and the stages compare it with that of stage 0, as they do
        targets and shared arguments. Inputs are those of stage 0 alone."""
        # All stages must draw, so that their generators stay equal.
        keys = [draw_key() if self.training else None for _ in micro_batches]
        stages = self._grid.stages
        between = [(edge.source % stages, edge.target % stages) for edge in self._chunks.edges]
        between += [pair for tie in self._tied for pair in itertools.combinations(tie.places, 2)]
        self._transport.open_lanes(between, (*self.parameters(), *self.buffers()))
        if stages == 1:
            return keys
        prints = fingerprints([one for _, *others in micro_batches for one in tensors_in(others)])
        # The host waits for the device once.
        batches = torch.stack([one.to(prints[0].device) for one in prints]).tolist() if prints else []
        facts = {"numbers of micro-batches": len(keys), "batches": batches, "random states": keys}
        if self._grid.stage == 0:
            for stage in range(1, stages):
                self._transport.send(facts, self._grid.process(stage), STEP_TAG)
            return keys
        given = self._transport.receive(self._grid.process(0), STEP_TAG, "the beginning of a step").value
        if wrong := [what for what, fact in facts.items() if fact != given[what]]:
            raise ValueError(
                f"stages 0 and {self._grid.stage} have different {wrong[0]}: give the stages of a replica the same batch, that of "
                f"hc.rank() of hc.size(), and the same random state, such as by torch.manual_seed(seed + hc.rank()), and draw the "
                f"same numbers on all of them"
            )
        return keys

    def _loss_everywhere(self, loss: Tensor | None) -> Tensor:
        """The loss, which the last stage sends to the others."""
        last = self._grid.stages - 1
        if self._grid.stage != last:
            return self._transport.receive(self._grid.process(last), LOSS_TAG, "the loss").tensors[0]
        assert loss is not None
        for stage in range(last):
            self._transport.send(loss, self._grid.process(stage), LOSS_TAG)
        self._transport.flush()
        return loss

    @contextlib.contextmanager
    def _failing_together(self) -> Iterator[None]:
        """A context in which an error on this rank is sent to the others and ends them."""
        if self._failed:
            raise RuntimeError(f"a pipeline cannot be used after an error in it: {self._failed}")
        try:
            with unchanged(self._apart):
                yield
        except BaseException as error:
            # Messages of this step may still arrive, under tags that the next step would use. So the pipeline cannot be used again.
            self._failed = f"{type(error).__name__}: {error}"
            if not isinstance(error, StageFailed):
                self._transport.fail(error)
            raise

    # ------------------------------------------------------------------------------------------------ construction

    def _check_equal(self, model: nn.Module) -> None:
        """Raises ValueError on every rank unless all stages have the same model, cuts and values of shared parameters."""
        shapes = [(name, tuple(one.shape), str(one.dtype)) for name, one in model.named_parameters()]
        facts: dict[str, Any] = {
            "cuts": (self.balance, self.micro_batches, self.schedule, self.checkpoint, self._virtual),
            "models": (shapes, self._chunks.skips),
        }
        for tie in self._tied:
            whole = tie.what
            facts[f"values of '{tie.name}'"] = 0 if whole.is_meta else int(fingerprint(whole))
        known: dict[str, tuple[int, Any]] = {}
        for stage, theirs in enumerate(self._grid.gather_objects(facts, parts=False)):
            for what, fact in theirs.items():
                first, expected = known.setdefault(what, (stage, fact))
                if fact != expected:
                    raise ValueError(
                        f"Pipeline: stages {first} and {stage} have different {what}: give all stages the same arguments and "
                        f"model, with the same values, such as by torch.manual_seed(seed) before it is made"
                    )


def _release_weights(blocks: Sequence[nn.Module], kept: Sequence[nn.Module]) -> None:
    """Frees the weights of ``blocks``, except those of modules that the kept blocks have as well."""
    modules = {module for block in kept for module in block.modules()}
    for block in blocks:
        for module in block.modules():
            if module in modules:
                continue
            # The parameters stay, on the meta device: snapshots and the check
            # of a plan read names and shapes of the whole model from them.
            for name, parameter in list(module._parameters.items()):
                if parameter is not None:
                    # setattr() also updates the list of weights that a recurrent module keeps.
                    freed = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
                    if (cut := cut_of(parameter)) is not None:
                        mark(freed, cut)
                    setattr(module, name, freed)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to("meta")
