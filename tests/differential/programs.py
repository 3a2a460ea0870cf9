"""Random training programs, as plain data: a model, how it is recomputed, and what each rank does in each step.

A program is drawn from a seed and a number of ranks. What cannot be computed by one process to compare with, or is refused by
design, is not drawn; the comments say which of the two.
"""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass, field
from typing import Any

REENTRANT = ("hc_reentrant", "torch_reentrant", "sequential_reentrant", "module_reentrant")
RECOMPUTE = (
    *("keep", "hc", "nested", "function", "torch", "sequential", "module", "plan", "plan_segment"),
    *REENTRANT,
)
KINDS = ("linear", "deep", "norm", "batchnorm", "dropout", "conv", "scale", "branch", "unused", "frozen")
ELEMENTWISE = ("sgd", "momentum", "nesterov", "adam", "adamw", "adagrad", "rmsprop")


@dataclass(frozen=True)
class Block:
    """One module of the model.

    Attributes:
        kind: of :data:`KINDS`, or ``"again"`` (the block number ``of`` itself) or ``"tied"`` (a layer with its weight).
        dtype: of its parameters.
    """

    kind: str
    dtype: str = "float32"
    of: int = -1


@dataclass(frozen=True)
class Segment:
    """Blocks that follow each other, and how they are recomputed."""

    blocks: tuple[Block, ...]
    recompute: str = "keep"


@dataclass(frozen=True)
class Pass:
    """A forward and a backward pass of one rank.

    Attributes:
        path: numbers of the segments that it runs through.
        kind: ``"two_forwards"``: two losses, one backward pass; ``"twice"``: a second backward pass through the same graph;
            ``"eval_first"``: after a forward pass without gradients; ``"penalty"``: with the gradient of a gradient.
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
class Step:
    """One step.

    Attributes:
        passes: of each rank.
        events: what happens before it: ``("freeze", segment, bool)``, ``("group",)``, ``("rewrap", keep the old one)``,
            ``("rewind",)``, ``("passes", backward_passes_per_step)``.
        clear: how gradients are cleared: ``"none"``, ``"zero"``, ``"never"``.
        optimizers: numbers of those that step.
        how: ``"step"``, ``"synchronize"`` (by hand, before it), ``"clip"``, ``"closure"``.
    """

    passes: tuple[tuple[Pass, ...], ...]
    events: tuple[tuple[Any, ...], ...] = ()
    clear: str = "none"
    optimizers: tuple[int, ...] = (0,)
    how: str = "step"


@dataclass(frozen=True)
class Program:
    """What a job does.

    Attributes:
        embedding: ``""``, ``"dense"`` or ``"sparse"``: what comes before the segments.
        optimizer: of :data:`ELEMENTWISE`, or ``"lbfgs"``.
        owners: of each segment, which optimizer has it; -1: the first one, from an event ``("group",)`` on.
        shared: a second optimizer has all parameters, too.
        options: of ``DistributedOptimizer``.
        resume: after so many steps the second run stops and is resumed.
    """

    seed: int
    ranks: int
    segments: tuple[Segment, ...]
    steps: tuple[Step, ...]
    embedding: str = ""
    optimizer: str = "sgd"
    owners: tuple[int, ...] = ()
    shared: bool = False
    stage: int = 0
    scaler: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    resume: int = 0

    @property
    def blocks(self) -> list[Block]:
        return [block for segment in self.segments for block in segment.blocks]

    @property
    def passes(self) -> list[Pass]:
        return [one for step in self.steps for rank in step.passes for one in rank]

    def recomputed_as(self, *kinds: str) -> bool:
        return any(segment.recompute in kinds for segment in self.segments)

    def has(self, event: str) -> bool:
        return any(one[0] == event for step in self.steps for one in step.events)

    @property
    def dtypes(self) -> set[str]:
        return {block.dtype for block in self.blocks}

    @property
    def sums_in_another_order(self) -> bool:
        """Whether recomputation adds up the parts of a gradient in another order: region by region."""
        again = any(block.kind in ("again", "tied") for block in self.blocks)
        again |= any(len(set(one.path)) < len(one.path) or one.kind == "two_forwards" for one in self.passes)
        return again and self.recomputed_as("function", *REENTRANT)

    @property
    def stops_in_another_place(self) -> bool:
        """Whether an error in the backward pass comes when a parameter has a part of its gradient, and has none otherwise."""
        return self.sums_in_another_order and any(
            one.trap is not None and one.trap[0] == "backward" for one in self.passes
        )

    @property
    def master_weights(self) -> bool:
        """Whether a sharded optimizer updates float32 copies of half-precision weights; one process has none."""
        return self.stage > 0 and bool(self.dtypes & {"float16", "bfloat16"})

    @property
    def lossy(self) -> bool:
        """Whether gradients or weights are rounded on their way."""
        return "compression" in self.options or "wire" in self.options


def draw(seed: int, ranks: int) -> Program:
    """The program of a seed."""
    dice = random.Random(f"{seed} {ranks}")

    def chance(probability: float) -> bool:
        return dice.random() < probability

    stage = dice.choice([0, 0, 0, 1, 2, 2, 3, 3])
    embedding = dice.choice(["", "", "dense", "sparse"])
    if embedding == "sparse":
        optimizer = dice.choice(["sgd", "adagrad"])  # PyTorch's others refuse sparse gradients
    else:
        optimizer = "lbfgs" if stage == 0 and chance(0.06) else dice.choice(ELEMENTWISE)
    half = optimizer != "lbfgs" and chance(0.2)
    scaler = optimizer != "lbfgs" and embedding != "sparse" and chance(0.15)
    half_dtype = dice.choice(["bfloat16", "bfloat16" if scaler else "float16"])  # float16 is not unscaled

    blocks = 0
    segments: list[Segment] = []
    linears: list[tuple[int, str]] = []
    for _ in range(dice.choice([1, 2, 3, 4, 5])):
        own = []
        for _ in range(dice.choice([1, 1, 2, 3])):
            kind = dice.choice(KINDS)
            dtype = "float64" if optimizer != "lbfgs" and chance(0.1) else "float32"
            if half and kind in ("linear", "deep", "scale", "branch") and chance(0.5):
                dtype = half_dtype
            of = -1
            if optimizer == "lbfgs" and kind == "conv":
                kind = "linear"  # PyTorch's takes contiguous gradients only
            if linears and chance(0.2):
                kind = dice.choice(["again", "tied"])
                of, dtype = dice.choice(linears)
            elif kind == "linear":
                linears.append((blocks, dtype))
            own.append(Block(kind, dtype, of))
            blocks += 1
        segments.append(Segment(tuple(own), dice.choice(RECOMPUTE) if chance(0.8) else "keep"))
    if any(block.kind == "batchnorm" for segment in segments for block in segment.blocks):
        # PyTorch's own regions update running statistics twice.
        swap = {"torch": "hc", "torch_reentrant": "hc_reentrant"}
        segments = [Segment(one.blocks, swap.get(one.recompute, one.recompute)) for one in segments]

    if not any(block.kind not in ("frozen", "again") for segment in segments for block in segment.blocks):
        scaler = False  # there may be no gradient at all
    several = stage < 3 and optimizer != "lbfgs" and not scaler and len(segments) > 1 and chance(0.2)
    shared = stage == 0 and not several and not scaler and optimizer != "lbfgs" and chance(0.06)
    late = optimizer != "lbfgs" and len(segments) > 1 and chance(0.2)
    new = [any(block.kind != "again" for block in segment.blocks) for segment in segments]
    owners = [dice.choice([0, 1]) if several and has else 0 for has in new]
    if late:
        owners[dice.choice([at for at, has in enumerate(new) if has])] = -1
    if 0 not in owners or (several and 1 not in owners):
        owners, several, late = [0] * len(segments), False, False

    clear = dice.choice(["none", "none", "none", "zero", "mixed", "never" if stage == 0 else "none"])
    usual = dice.choice([1, 1, 1, 2, 3])
    varying = chance(0.3)
    partial = not scaler and chance(0.3)  # a scaler raises where an optimizer has no gradient at all
    traps = not scaler and optimizer != "lbfgs" and chance(0.25)
    kinds = ["plain"] * 6 + ["two_forwards", "twice", "eval_first"]
    reentrant = any(one.recompute in (*REENTRANT, "function") for one in segments)
    if not (reentrant or half or embedding):  # these give no gradients of gradients
        kinds.append("penalty")
    closures = optimizer == "lbfgs" or (not scaler and not several and not shared and chance(0.15))

    def draw_pass() -> Pass:
        path = [number for number in range(len(segments)) if not (partial and chance(0.3))]
        if partial and path and chance(0.3):
            path.insert(dice.randrange(len(path)), dice.choice(path))
        trap: tuple[str, int] | None = None
        if traps and chance(0.2):
            trap = dice.choice(
                [("forward", dice.randrange(blocks)), ("backward", dice.randrange(len(segments)))]
            )
        return Pass(tuple(path), dice.choice(kinds), dice.choice([4, 4, 6]), trap)

    def draw_passes(count: int) -> tuple[Pass, ...]:
        return tuple(draw_pass() for _ in range(count))

    steps: list[Step] = []
    pending: set[int] = set()
    others: tuple[int, ...] = (0, 1) if several or shared else (0,)
    grouped = False
    count = dice.choice([4, 5, 6, 7])
    for number in range(count):
        shorter = varying and chance(0.4)
        passes = []
        for _ in range(ranks):
            many = dice.choice([0, 1, 2, 3]) if shorter or (varying and chance(0.2)) else usual
            passes.append(draw_passes(max(1, many) if scaler else many))
        if stage == 3 or chance(0.5):  # at stage 3 all ranks must run through the same units
            passes = [passes[0]] * ranks
        if scaler and chance(0.2):
            rank = dice.randrange(ranks)
            passes[rank] = (*passes[rank][:-1], dataclasses.replace(passes[rank][-1], overflow=True))
        events: list[tuple[Any, ...]] = []
        if number and late and not grouped and (chance(0.4) or number == count - 2):
            events.append(("group",))
            grouped = True
        if number and not pending:
            if chance(0.06):
                events.append(("rewrap", chance(0.5)))
            if chance(0.06) and "never" not in clear:
                events.append(("rewind",))
        if number and not scaler and chance(0.1):
            events.append(("freeze", dice.randrange(len(segments)), chance(0.5)))
        if stage > 1 and number and not pending and chance(0.05):
            events.append(("passes", dice.choice([1, 2, 3])))
        stepping = others if shared or chance(0.7) or number == count - 1 else (dice.choice(others),)
        pending = set(others) - set(stepping)
        how = dice.choice(["step", "step", "step", "synchronize", "clip"])
        if (scaler and how == "synchronize") or (embedding == "sparse" and how == "clip"):
            how = "step"
        if closures and (optimizer == "lbfgs" or chance(0.5)):
            how = "closure"
        cleared = dice.choice(["none", "zero"]) if clear == "mixed" else clear
        if how == "closure" and cleared == "never":
            cleared = "none"
        steps.append(Step(tuple(passes), tuple(events), cleared, stepping, how))

    options: dict[str, Any] = {"bucket_cap_mb": dice.choice([25.0, 0.001, 0.0003])}
    if chance(0.2):
        options["op"] = "sum"
    elif chance(0.1):
        options["gradient_predivide_factor"] = dice.choice([2.0, 3.0])
    if stage < 2 and chance(0.1):
        options["groups"] = dice.choice([2, "segments"])
    if stage < 2 and embedding != "sparse" and chance(0.08):
        options["compression"] = "fp16"
    if stage < 2 and chance(0.2):
        options["keep_buckets"] = False
    if embedding == "sparse" and chance(0.3):
        options["sparse_as_dense"] = True
    if stage > 1 and chance(0.5):
        options["backward_passes_per_step"] = dice.choice([1, usual, 3])
    if stage > 1 and chance(0.12):
        options["wire"] = dice.choice(["fp16", "bf16", "int8", {"parameters": "bf16"}, {"gradients": "int8"}])
    if stage and half and chance(0.5):
        options["master_weights"] = False
    if stage and chance(0.06):
        options["offload"] = "optimizer"

    settled = [at for at in range(1, count) if set(steps[at - 1].optimizers) == set(others)]
    return Program(
        seed,
        ranks,
        tuple(segments),
        tuple(steps),
        embedding,
        optimizer,
        tuple(owners),
        shared,
        stage,
        scaler,
        options,
        dice.choice(settled) if settled else 0,
    )
