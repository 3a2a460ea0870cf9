"""Draws random programs.

What cannot be computed by one process to compare with, or is refused by design, is not drawn; the comments say which of the two.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from layers import IN_PARTS, KINDS, STATEFUL
from models import CARRIERS, OPTIMIZERS, WAYS
from programs import REENTRANT, Block, Pass, Program, Segment, Step


def draw(seed: int, ranks: int, tensor: int = 1) -> Program:
    """The program of a seed."""
    return Draw(seed, ranks, tensor).program()


class Draw:
    """The choices that later ones depend on, in the order in which they are made."""

    # Of the models.
    counts, own_counts = (1, 2, 3, 4, 5), (1, 1, 2, 3)  # of segments, and of blocks in one
    kinds: Sequence[str] = tuple(KINDS)
    ways: Sequence[str] = tuple(WAYS)
    half_dtypes: tuple[str, ...] = ("bfloat16", "float16")
    again, double = 0.2, 0.1  # how often blocks are used again, and of float64

    def __init__(self, seed: int, ranks: int, tensor: int = 1) -> None:
        self.seed, self.ranks, self.tensor = seed, ranks, tensor
        self.dice = random.Random(f"{type(self).__name__} {seed} {ranks} {tensor}")
        self.choose = self.dice.choice
        self.draw_features()
        self.segments = self.draw_segments()
        self.draw_owners()

    def draw_features(self) -> None:
        """What models are made for."""
        self.stage = self.choose([0, 0, 0, 1, 2, 2, 3, 3])
        # A split embedding refuses sparse gradients.
        self.embedding = self.choose(["", "", "dense", "sparse" if self.tensor == 1 else "dense"])
        if self.embedding == "sparse":
            self.optimizer = self.choose(["sgd", "adagrad"])  # PyTorch's others refuse sparse gradients
        elif self.stage == 0 and self.tensor == 1 and self.chance(0.06):
            self.optimizer = "lbfgs"  # its line search sees one part
        else:
            self.optimizer = self.choose(list(OPTIMIZERS)[:-1])
        self.lbfgs = self.optimizer == "lbfgs"
        self.half = not self.lbfgs and self.chance(0.2)
        self.scaler = not self.lbfgs and self.embedding != "sparse" and self.chance(0.15)
        self.stateful = not self.lbfgs and self.chance(0.6)  # parametrizations give LBFGS gradients with gaps
        self.carried = 0.2

    def chance(self, probability: float) -> bool:
        return self.dice.random() < probability

    @property
    def blocks(self) -> list[Block]:
        return [block for segment in self.segments for block in segment.blocks]

    # ---------------------------------------------------------------------------------- the model

    def draw_segments(self) -> list[Segment]:
        # float16 is not unscaled.
        self.half_dtype = "bfloat16" if self.scaler else self.choose(self.half_dtypes)
        segments: list[Segment] = []
        blocks: list[Block] = []
        linears: list[Block] = []  # that may be used again
        for _ in range(self.choose(self.counts)):
            carrier = self.choose(list(CARRIERS)[:-1]) if self.chance(self.carried) else "tensor"
            first = len(blocks)
            for _ in range(self.choose(self.own_counts)):
                blocks.append(self.draw_block(linears, carrier, len(blocks)))
            recompute = self.choose(self.ways) if self.chance(0.8) else "keep"
            segments.append(Segment(tuple(blocks[first:]), recompute, carrier))
        if all(block.kind in ("frozen", "again") for block in blocks):
            self.scaler = False  # there may be no gradient at all
        kinds = {block.kind for block in blocks}
        hidden = bool(kinds & {"batchnorm", *STATEFUL}) or any(one.carrier != "tensor" for one in segments)
        return [replace(one, recompute=self.usable(one, kinds, hidden)) for one in segments]

    def usable(self, segment: Segment, kinds: set[str], hidden: bool) -> str:
        """How a segment can be recomputed in a model with these kinds of blocks, or with hidden state."""
        if segment.recompute == "function" and (segment.carrier != "tensor" or "max_norm" in kinds):
            # It takes tensors; and a second forward pass writes the weight that it has saved, which autograd refuses.
            return "hc_reentrant"
        # PyTorch's own regions give the recomputation what the first pass has left.
        return segment.recompute.replace("torch", "hc") if hidden else segment.recompute

    def draw_block(self, linears: list[Block], carrier: str, number: int) -> Block:
        if linears and self.chance(self.again):
            # A plan has one policy for a block.
            kind = self.choose(["again", "tied"] if carrier == "tensor" else ["tied"])
            return replace(self.choose(linears), kind=kind)
        kind = self.choose(tuple(STATEFUL) if self.stateful and self.chance(0.5) else self.kinds)
        if self.tensor > 1 and self.chance(0.5):
            kind = self.choose(list(IN_PARTS))
        # A weight that a forward pass writes is an error at stage 3; PyTorch's LBFGS takes contiguous gradients only.
        if (kind == "max_norm" and self.stage == 3) or (kind == "conv" and self.lbfgs):
            kind = "linear"
        dtype = "float32"
        if self.half and kind in ("linear", "deep", "scale", "branch") and self.chance(0.5):
            dtype = self.half_dtype
        elif kind in KINDS and not self.lbfgs and self.chance(self.double):
            dtype = "float64"
        if kind == "linear" and carrier == "tensor":
            linears.append(Block(kind, dtype, number))
        return Block(kind, dtype)

    def draw_owners(self) -> None:
        segments = self.segments
        self.several = (
            self.stage < 3 and not self.lbfgs and not self.scaler and len(segments) > 1 and self.chance(0.2)
        )
        self.late = not self.lbfgs and len(segments) > 1 and self.chance(0.2)
        new = [any(block.kind != "again" for block in segment.blocks) for segment in segments]
        self.owners = [self.choose([0, 1]) if self.several and has else 0 for has in new]
        if self.late:
            self.owners[self.choose([at for at, has in enumerate(new) if has])] = -1
        owned = {owner for owner, has in zip(self.owners, new) if has} | ({0} if self.embedding else set())
        if 0 not in owned or (self.several and 1 not in owned):
            self.owners, self.several, self.late = [0] * len(segments), False, False

    # ---------------------------------------------------------------------------------- steps

    def draw_habits(self) -> None:
        """What all steps have in common."""
        reentrant = any(one.recompute in (*REENTRANT, "function") for one in self.segments)
        kinds = {block.kind for block in self.blocks}
        self.clear = self.choose(
            ["none", "none", "zero", "plain", "model", "mixed", "never" if self.stage == 0 else "none"]
        )
        self.usual = self.choose([1, 1, 1, 2, 3])
        self.varying = self.chance(0.3)
        # A scaler raises where an optimizer has no gradient at all.
        self.partial = not self.scaler and self.chance(0.3)
        self.traps = not self.scaler and not self.lbfgs and self.chance(0.25)
        self.overflows = True
        self.kinds_of_passes = ["plain"] * 6 + ["two_forwards", "twice", "eval_first"]
        if not (reentrant or self.half or self.embedding or "attention" in kinds or self.tensor > 1):
            self.kinds_of_passes.append("penalty")  # the others give no gradients of gradients
        self.closures = self.lbfgs or (not (self.scaler or self.several) and self.chance(0.15))
        # At stage 3 all ranks must run through the same units; what a forward pass writes to weights must be the same on all.
        self.alike = self.stage == 3 or "max_norm" in kinds
        # Where gradients do not come from hooks, stages 2 and 3 have none; reentrant regions refuse torch.autograd.grad.
        self.by_hand = not reentrant and self.stage < 2 and self.embedding != "sparse" and self.chance(0.3)
        self.drops = not self.scaler and self.chance(0.25)
        self.skips = self.chance(0.3)
        self.restores = self.stage == 0 and self.chance(0.4)

    def draw_pass(self) -> Pass:
        count = len(self.segments)
        path = [number for number in range(count) if not (self.partial and self.chance(0.3))]
        if self.partial and path and self.chance(0.3):
            path.insert(self.dice.randrange(len(path)), self.choose(path))
        trap = None
        if self.traps and self.chance(0.2):
            kind = self.choose(["forward", "backward"])
            trap = (kind, self.dice.randrange(count if kind == "backward" else len(self.blocks)))
        return Pass(tuple(path), self.choose(self.kinds_of_passes), self.choose([4, 4, 6]), trap)

    def draw_passes(self) -> tuple[tuple[Pass, ...], ...]:
        shorter = self.varying and self.chance(0.4)
        passes = []
        for _ in range(self.ranks):
            differs = shorter or (self.varying and self.chance(0.2))
            many = self.choose([0, 1, 2, 3]) if differs else self.usual
            passes.append(tuple(self.draw_pass() for _ in range(max(1, many) if self.scaler else many)))
        if self.alike or self.chance(0.5):
            passes = [passes[0]] * self.ranks
        if self.scaler and self.overflows and self.chance(0.2):
            rank = self.dice.randrange(self.ranks)
            passes[rank] = (*passes[rank][:-1], replace(passes[rank][-1], overflow=True))
        return tuple(passes)

    def draw_steps(self) -> list[Step]:
        steps: list[Step] = []
        pending: set[int] = set()  # optimizers whose gradients wait for a later step
        others = (0, 1) if self.several else (0,)
        count = self.choose([4, 5, 6, 7])
        grouped = self.dice.randrange(1, count - 1) if self.late else 0
        for number in range(count):
            passes = self.draw_passes()
            if self.several:  # what has left on some ranks only cannot be dropped
                passes = (passes[0],) * self.ranks
            events = [("group",)] * (0 < number == grouped) + self.draw_events(number, bool(pending))
            clear = self.clear
            if clear == "mixed":
                clear = self.choose(["none", "zero", "plain", "model", "model_zero"])
            if clear == "model_zero" and (pending or self.stage > 1):
                clear = "model"  # in place: an error where a gradient is on its way, or lies in shards
            how = self.draw_how()
            if how == "closure" and clear == "never":
                clear = "none"
            # Set by hand, gradients replace what is there: nothing may be on its way.
            by_hand = self.by_hand and not pending and clear != "never" and self.chance(0.5)
            drops = self.drops and how != "closure" and self.chance(0.4)
            returns = "loss"
            if how == "closure" and not self.lbfgs:
                returns = self.choose(["loss", "loss", "float", "none", "dict", "tuple"])
            stepping = others if self.chance(0.7) or number == count - 1 else (self.choose(others),)
            pending = set(others) - set(stepping)
            drop = (self.dice.randrange(len(self.segments)),) if drops else ()
            steps.append(Step(passes, tuple(events), clear, stepping, how, returns, by_hand, drop))
        return steps

    def draw_how(self) -> str:
        if self.closures and (self.lbfgs or self.chance(0.5)):
            return "closure"
        how = self.choose(["step", "step", "step", "synchronize", "clip"])
        if self.skips and self.chance(0.4):
            how = "skip" if self.scaler else self.choose(["skip", "skip", "repeat", "twice"])
        if how == "repeat" and self.stage > 1:  # where no gradients are left for a second step
            how = "step"
        if (self.scaler and how == "synchronize") or (self.embedding == "sparse" and how == "clip"):
            how = "step"
        return how

    def draw_events(self, number: int, pending: bool) -> list[tuple[Any, ...]]:
        later, settled = number > 0, not pending
        events: list[tuple[Any, ...]] = []
        if later and settled:
            drawn = [("rewrap", self.chance(0.5)), ("rewind",), ("reload",)]
            events += [event for event in drawn if self.chance(0.06)]
        if settled and self.restores and self.chance(0.3):
            root = self.dice.randrange(self.ranks)
            loaders = {root, *(rank for rank in range(self.ranks) if self.chance(0.3))}
            events.append(("restore", tuple(sorted(loaders)), root, self.draw_restoring()))
        if later and not self.scaler and self.chance(0.1):
            events.append(("freeze", self.dice.randrange(len(self.segments)), self.chance(0.5)))
        if later and settled and self.stage > 1 and self.chance(0.05):
            events.append(("passes", self.choose([1, 2, 3])))
        return events

    def draw_restoring(self) -> tuple[str, ...]:
        """Loads and broadcasts of the model, of the optimizers or of both, each broadcast some time after its load."""
        both = ["model", "optimizer"]
        order = 2 * (both if self.chance(0.7) else [self.choose(both)])
        self.dice.shuffle(order)
        verbs = ["broadcast" if what in order[:at] else "load" for at, what in enumerate(order)]
        return tuple(f"{verb}_{what}" for verb, what in zip(verbs, order))

    # ---------------------------------------------------------------------------------- the rest

    def draw_options(self, steps: list[Step]) -> dict[str, Any]:
        stage, dense = self.stage, self.embedding != "sparse"
        # With op=Sum, what is summed must be cleared before it is added to, or reduced, again.
        sums = self.clear != "never" and all(step.how != "repeat" for step in steps)
        wires: list[Any] = ["fp16", "bf16", {"parameters": "bf16"}]
        if self.tensor == 1:
            wires += ["int8", {"gradients": "int8"}]
        drawn = [  # whether it can be had, how often it is, and its values
            (sums, 0.2, "op", ["sum"]),
            (True, 0.1, "gradient_predivide_factor", [2.0, 3.0]),
            (stage < 2, 0.1, "groups", [2, "segments"]),
            (stage < 2 and dense, 0.08, "compression", ["fp16"]),
            (stage < 2, 0.2, "keep_buckets", [False]),
            (not dense, 0.3, "sparse_as_dense", [True]),
            (stage > 1, 0.5, "backward_passes_per_step", [1, self.usual, 3]),
            (stage > 1, 0.12, "wire", wires),
            (stage > 0 and self.half, 0.5, "master_weights", [False]),
            (stage > 0, 0.06, "offload", ["optimizer"]),
        ]
        options: dict[str, Any] = {"bucket_cap_mb": self.choose([25.0, 0.001, 0.0003])}
        for can, often, name, values in drawn:
            if can and self.chance(often):
                options[name] = self.choose(values)
        if "op" in options:
            options.pop("gradient_predivide_factor", None)
        return options

    def draw_join(self, steps: list[Step]) -> tuple[list[Step], tuple[int, ...]]:
        """Ranks that end early; the others' later steps ask for allreduces alone."""
        refused = self.stage or self.scaler or self.lbfgs or self.embedding == "sparse"
        if refused or self.alike or not self.chance(0.15):
            return steps, ()
        join = tuple(len(steps) - self.choose([0, 0, 1, 2]) for _ in range(self.ranks))
        if not all(self.settles(steps[count - 1]) for count in join):
            return steps, ()  # join() refuses gradients that are being reduced
        first, last = min(join), max(join)
        rest = [replace(step, events=(), drop=(), by_hand=False) for step in steps[first:last]]
        # A second step() reduces what the first has left: averaged over the ranks that have not joined, it differs.
        rest = [replace(step, how="step") if step.how in ("skip", "repeat") else step for step in rest]
        return [*steps[:first], *rest], join

    def settles(self, step: Step) -> bool:
        """Whether no optimizer waits for a later step."""
        return set(step.optimizers) == ({0, 1} if self.several else {0})

    def program(self) -> Program:
        self.draw_habits()
        steps, join = self.draw_join(self.draw_steps())
        settled = [
            at
            for at, before in enumerate(steps[:-1], 1)
            # At stages 2 and 3 gradients that no step has used are in shards, which no state has.
            if self.settles(before) and not (self.stage > 1 and before.how == "skip")
        ]
        return Program(
            self.seed,
            self.ranks,
            tuple(self.segments),
            tuple(steps),
            self.embedding,
            self.optimizer,
            tuple(self.owners),
            self.stage,
            self.scaler,
            self.draw_options(steps),
            resume=self.choose(settled) if settled and not join else 0,
            default_dtype=self.choose(["float64", "bfloat16"]) if self.chance(0.15) else "float32",
            math_kernel=self.chance(0.5),
            join=join,
            tensor=self.tensor,
        )
