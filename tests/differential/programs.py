"""Random training programs, as plain data: a model, how it is recomputed, and what each rank does in each step.

:mod:`drawing` draws them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

REENTRANT = ("hc_reentrant", "torch_reentrant", "sequential_reentrant", "module_reentrant")


@dataclass(frozen=True)
class Block:
    """One module of the model.

    Attributes:
        kind: of :data:`layers.LAYERS` (of ``IN_PARTS`` in a job with parts), or ``"again"`` (the block number ``of`` itself) or
            ``"tied"`` (a layer with its weight).
        dtype: of its parameters.
    """

    kind: str
    dtype: str = "float32"
    of: int = -1


@dataclass(frozen=True)
class Segment:
    """Blocks that follow each other, and how they are recomputed: one of :data:`models.WAYS`.

    Attributes:
        carrier: of :data:`models.CARRIERS`, in which blocks hand activations on, and which they change.
    """

    blocks: tuple[Block, ...]
    recompute: str = "keep"
    carrier: str = "tensor"


@dataclass(frozen=True)
class Pass:
    """A forward and a backward pass of one rank.

    Attributes:
        path: numbers of the segments that it runs through.
        kind: ``"two_forwards"``: two losses, one backward pass; ``"twice"``: a second backward pass through the same graph;
            ``"eval_first"``: after a forward pass without gradients; ``"penalty"``: with the gradient of a gradient;
            ``"graph"``: and one of those gradients that ``backward(create_graph=True)`` has left.
        trap: ``("forward" | "backward", number)``: an error that the program catches, in a block's forward pass or behind a
            segment's output.
        overflow: the loss is infinite.
    """

    path: tuple[int, ...]
    kind: str = "plain"
    batch: int = 4
    trap: tuple[str, int] | None = None
    overflow: bool = False


@dataclass(frozen=True)
class Act:
    """What a user does by hand to gradients, weights, the optimizer's state, groups or flags.

    Attributes:
        kind: of :data:`hand.ACTS`.
        place: ``"cleared"``, after gradients were; ``"pass"``, after backward pass ``part``; ``"backward"``, after all of them;
            ``"synchronized"``, between ``synchronize()``, or a scaler's ``unscale_()``, and ``step()``; ``"step"``, after it.
            Of hooks, which are acts of the first step: ``"unwrapped"``, before there is an optimizer; ``"wrapped"``.
        ranks: that do it.
        targets: numbers of parameters, modulo how many there are; empty: all of them.
        through: where they are taken from: ``"module"``, ``"groups"``, those of the optimizer, or ``"pieces"``, all of its own.
        within: inside ``gathered_parameters()``.
        value: of factors and bounds.
        pause: seconds before it, in which what has left may arrive.
    """

    kind: str
    place: str
    ranks: tuple[int, ...]
    targets: tuple[int, ...] = ()
    part: int = 0
    through: str = "module"
    within: bool = False
    value: float = 1.5
    pause: float = 0.0


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        passes: of each rank.
        events: what happens before it: ``("freeze", segment, bool)``, ``("group",)``, ``("rewrap", keep the old one)``,
            ``("rewind",)``, ``("passes", backward_passes_per_step)``, ``("reload",)`` (each optimizer's own state),
            ``("contiguous",)`` (all parameters), ``("restore", ranks that load, root, operations)``, of :data:`RESTORING`.
        clear: how gradients are cleared: ``"none"``, ``"zero"``, ``"plain"`` (without arguments), ``"never"``; ``"model"``,
            ``"model_zero"``: by the model, whose optimizers do not see it.
        optimizers: numbers of those that step.
        how: ``"step"``, ``"synchronize"`` (by hand, before it; with a scaler unscaled), ``"twice"`` (two times by hand),
            ``"warned"`` (by hand, before a step that may reduce, too), ``"clip"``, ``"closure"``, ``"repeat"`` (two steps),
            ``"skip"`` (synchronized, or unscaled, and no step).
        returns: what a closure returns: ``"loss"``, ``"float"``, ``"none"``, ``"dict"``, ``"tuple"``.
        by_hand: gradients are computed by ``torch.autograd.grad`` and set.
        drop: segments whose gradients every rank sets to None after its backward passes.
        acts: what users do in it by hand, in this order at each place.
        raises: a pattern: a RuntimeError that matches it ends the step on every rank, and nothing is updated.
    """

    passes: tuple[tuple[Pass, ...], ...]
    events: tuple[tuple[Any, ...], ...] = ()
    clear: str = "none"
    optimizers: tuple[int, ...] = (0,)
    how: str = "step"
    returns: str = "loss"
    by_hand: bool = False
    drop: tuple[int, ...] = ()
    acts: tuple[Act, ...] = ()
    raises: str = ""


RESTORING = ("load_model", "load_optimizer", "broadcast_model", "broadcast_optimizer")


@dataclass(frozen=True)
class Program:
    """What a job does.

    Attributes:
        embedding: ``""``, ``"dense"`` or ``"sparse"``: what comes before the segments.
        optimizer: of :data:`models.OPTIMIZERS`.
        owners: of each segment, which optimizer has it; -1: the first one, from an event ``("group",)`` on.
        options: of ``DistributedOptimizer``.
        resume: after so many steps the second run stops and is resumed.
        default_dtype: while the job runs; the model has its own.
        math_kernel: attention may use this kernel alone, in forward passes.
        tensor: parts of a layer, which also split the embedding; ranks are replicas then.
        join: how many steps each rank takes before it calls ``join()``; empty: all, and no ``join()``.
    """

    seed: int
    ranks: int
    segments: tuple[Segment, ...]
    steps: tuple[Step, ...]
    embedding: str = ""
    optimizer: str = "sgd"
    owners: tuple[int, ...] = ()
    stage: int = 0
    scaler: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    resume: int = 0
    default_dtype: str = "float32"
    math_kernel: bool = False
    join: tuple[int, ...] = ()
    tensor: int = 1

    @property
    def blocks(self) -> list[Block]:
        return [block for segment in self.segments for block in segment.blocks]

    @property
    def passes(self) -> list[Pass]:
        return [one for step in self.steps for rank in step.passes for one in rank]

    @property
    def acts(self) -> list[Act]:
        return [act for step in self.steps for act in step.acts]

    def recomputed_as(self, *kinds: str) -> bool:
        return any(segment.recompute in kinds for segment in self.segments)

    def present(self, number: int) -> list[int]:
        """The ranks that take this step."""
        return [rank for rank in range(self.ranks) if not self.join or number < self.join[rank]]

    # ---------------------------------------------------------------------------------- how it rounds

    @property
    def reorders(self) -> bool:
        """Whether recomputation adds up the parts of a gradient in another order: region by region."""
        again = any(block.kind in ("again", "tied") for block in self.blocks)
        again |= any(segment.carrier != "tensor" for segment in self.segments)  # blocks share an activation
        # Which gradients leave between the two backward passes through one graph depends on its regions.
        again |= any(one.kind in ("twice", "two_forwards") for one in self.passes)
        again |= any(len(set(one.path)) < len(one.path) for one in self.passes)
        return again and self.recomputed_as("function", *REENTRANT)

    @property
    def clips(self) -> bool:
        return any(step.how == "clip" for step in self.steps)

    @property
    def lossy(self) -> bool:
        """Whether gradients or weights are rounded on their way, or a sharded optimizer updates float32 copies of half-precision
        weights, which one process does not have."""
        copies = self.stage > 0 and any(block.dtype in ("float16", "bfloat16") for block in self.blocks)
        return copies or "compression" in self.options or "wire" in self.options
