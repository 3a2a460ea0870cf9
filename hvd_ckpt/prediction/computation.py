"""The computation of a model, block by block, for any budget of activations: measured on this device, or counted in operations.

A :class:`Computation` is a chain of blocks with their costs, as the planner has it. Measured ones are the planner's own. Counted
ones need no memory and no device: the model is on the meta device, seconds are operations over a stated rate, and each block is
either kept whole or recomputed as a whole, alone or in segments.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from hvd_ckpt.parallel.pipeline.stages import Solvers, StageLayout, StagePlanner
from hvd_ckpt.parallel.tensor.recipes import tensor_parallel
from hvd_ckpt.planning.blocks import children_of
from hvd_ckpt.planning.chain import Block, Choice, Solution, all_kept, runs_of
from hvd_ckpt.planning.plan import PipelinePlan
from hvd_ckpt.planning.planner import Planner
from hvd_ckpt.planning.solver import Solver
from hvd_ckpt.planning.step import Sample
from hvd_ckpt.processes import parts
from hvd_ckpt.recompute.calls import map_tensors, tensors_in
from hvd_ckpt.utils.measure import silent
from hvd_ckpt.utils.torch_private import DisableTorchFunction, flash_attention, identity_of

NOTABLE = 0.03  # of a step: what measurements of blocks can tell apart


class Passes(NamedTuple):
    """Forward and backward pass of a micro-batch under a plan.

    Attributes:
        peak: bytes of activations at most.
        forward, backward: seconds of each block.
        recomputing: seconds of recomputation among them.
        planned: whether they need a plan.
    """

    peak: int
    forward: list[float]
    backward: list[float]
    recomputing: float
    planned: bool = True


@dataclass
class Computation:
    """A model's chain of blocks for micro-batches of one size.

    Attributes:
        chain: its blocks between the code before and the code behind them.
        names: of the modules of each block.
        in_chain: whether the model can be cut into pipeline stages.
    """

    chain: Sequence[Block]
    names: Sequence[Sequence[str]]
    in_chain: bool
    _solvers: Solvers = field(default_factory=dict)

    @functools.cached_property
    def _solver(self) -> Solver:
        return Solver(self.chain)

    @functools.cached_property
    def kept(self) -> Solution:
        """The schedule without recomputation."""
        return all_kept(self.chain)

    @property
    def smallest(self) -> int:
        """Bytes of activations of the plan that needs fewest."""
        return self._solver.smallest.peak

    @property
    def boundary(self) -> int:
        """Bytes that a block hands to the next one, at most."""
        return max((block.output for block in self.chain[1:-2]), default=0)

    def passes(self, budget: int) -> Passes | None:
        """The fastest passes within so many bytes of activations, or None if none fit."""
        kept, fastest = self.kept, self._solver.fastest
        # Plans that are hardly faster than no recomputation may not be faster at all.
        planned = kept.peak > budget or fastest.seconds < (1 - NOTABLE) * kept.seconds
        solution: Solution | None = kept
        if planned:
            solution = fastest if fastest.peak <= budget else self._solver.solve(budget)
        if solution is None or solution.peak > budget:
            return None
        forward = [block.forward_seconds for block in self.chain]
        total = [
            self.chain[run.block].choices[run.choice].seconds + depth * forward[run.block]
            for run, depth in itertools.chain.from_iterable(map(runs_of, solution.items))
        ]
        begin, *inner, end = (max(each - first, 0.0) for each, first in zip(total, forward))
        # What runs before and behind the blocks counts with the first and with the last one.
        inner[0] += begin
        inner[-1] += end
        again = max(solution.seconds - kept.seconds, 0.0)
        # A planner that measures both may prefer no recomputation, if it fits.
        peak = kept.peak if kept.peak <= budget else solution.peak
        return Passes(peak, forward[1:-1], inner, again, planned)

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The modules of each block."""
        return [nn.ModuleList(map(model.get_submodule, names)) for names in self.names]

    def stages(self, model: nn.Module, layout: StageLayout, budget: int) -> tuple[int, PipelinePlan | None]:
        """The smallest budget of a stage for which there is a plan, and the fastest plan within ``budget``."""
        planner = StagePlanner(self.chain, self.blocks(model), layout, self._solvers)
        return planner.smallest, planner.pipeline(budget)[0] if planner.smallest <= budget else None


@contextlib.contextmanager
def as_part(model: nn.Module, tensor: int) -> Iterator[nn.Module]:
    """The model, or a copy of it of which this process has the first of ``tensor`` parts of each layer."""
    if tensor == 1:
        yield model
        return
    with parts.alone(tensor):
        yield tensor_parallel(copy.deepcopy(model))


def measured(model: nn.Module, sample: Sample, say: Callable[[str], None], **options: Any) -> Computation:
    """The computation as the planner, which takes ``options``, measures it on the model's device."""
    in_chain = isinstance(model, nn.Sequential)
    if in_chain:
        options = {**options, "blocks": children_of(model)}
    planner = Planner(model, *sample.args, kwargs=sample.kwargs, loss=sample.loss, say=say, **options)
    names = [block.members for block in planner.profile.blocks]
    return Computation(planner.chain, names, in_chain)


class _FlashAttention(TorchFunctionMode):
    """Attention on the meta device as devices run it, where PyTorch would keep the scores of all pairs."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        run = _flash if func is functional.scaled_dot_product_attention else func
        return run(*args, **(kwargs or {}))


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **_: Any,
) -> Tensor:
    with DisableTorchFunction():
        result: Tensor = flash_attention(
            query.contiguous(), key.contiguous(), value.contiguous(), 0.0, is_causal
        )[0]
    return result


def counted(model: nn.Module, sample: Sample, rate: float) -> Computation:
    """The computation by the operations of matrix products, ``rate`` of them a second, and the tensors that autograd saves, of a
    chain, which runs on the meta device.

    Raises:
        ValueError: the model is not a chain.
    """
    names = children_of(model)
    tensors = (*model.parameters(), *model.buffers())
    if not all(one.is_meta for one in tensors):
        # A copy without values: what the memo has counts as copied.
        model = copy.deepcopy(model, {id(one): _on_meta(one) for one in tensors})
        sample = map_tensors(_on_meta, Tensor, sample)
    own = {identity_of(parameter.untyped_storage()) for parameter in model.parameters()}
    values: Any = sample.args
    chain = [Block((Choice(0.0, 0, 0, 0),), 0, 0.0, 0)]
    for child in map(model.get_submodule, names):
        arguments = values if isinstance(values, tuple) else (values,)
        given = {identity_of(tensor.untyped_storage()) for tensor in tensors_in(arguments)} | own
        saved: dict[int, int] = {}

        def pack(tensor: Tensor, given: set[int] = given, saved: dict[int, int] = saved) -> Tensor:
            storage = tensor.untyped_storage()
            if identity_of(storage) not in given:
                saved[identity_of(storage)] = storage.nbytes()
            return tensor

        counter = FlopCounterMode(display=False)
        saving = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with _FlashAttention(), counter, saving, silent():
            values = child(*arguments, **sample.kwargs)
        outputs = {identity_of(tensor.untyped_storage()): tensor.nbytes for tensor in tensors_in(values)}
        chain.append(_block(counter.get_total_flops() / rate, sum(saved.values()), outputs, saved))
    # The loss keeps the logarithms of the last output, and its gradient comes beside them.
    last = chain[-1].output
    chain.append(Block((Choice(0.0, last, 2 * last, 3 * last),), 0, 0.0, 0))
    return Computation(chain, [[name] for name in names], True)


def _on_meta(tensor: Tensor) -> Tensor:
    there = tensor.detach().to("meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(there, tensor.requires_grad)
    return there.requires_grad_(tensor.requires_grad)


def _block(seconds: float, inside: int, outputs: dict[int, int], saved: dict[int, int]) -> Block:
    output = sum(outputs.values())
    kept = inside + sum(nbytes for storage, nbytes in outputs.items() if storage not in saved)
    # The gradients of inputs and of weights take a forward pass each. At most the gradients of a block's widest tensors, about
    # as much as its largest saved one twice, are there beside what it keeps.
    beside = output + 2 * max([*saved.values(), output])
    whole = Choice(3 * seconds, kept, kept, kept + beside)
    again = Choice(4 * seconds, output, kept, output + kept + beside)
    return Block((whole, again), output, seconds, kept, joins_next=True)
