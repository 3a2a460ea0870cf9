"""Draws random programs.

What cannot be computed by one process to compare with, or is refused by design, is not drawn; the comments say which of the two.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from programs import (
    CARRIERS,
    ELEMENTWISE,
    IN_PARTS,
    KINDS,
    RECOMPUTE,
    REENTRANT,
    STATEFUL,
    Block,
    Pass,
    Program,
    Segment,
    Step,
)  # fmt: skip


def draw(seed: int, ranks: int, tensor: int = 1) -> Program:
    """The program of a seed."""
    return Draw(seed, ranks, tensor).program()


class Draw:
    """The choices that later ones depend on, in the order in which they are made."""

    def __init__(self, seed: int, ranks: int, tensor: int) -> None:
        self.seed, self.ranks, self.tensor = seed, ranks, tensor
        self.dice = random.Random(f"{seed} {ranks}" if tensor == 1 else f"{seed} {ranks} {tensor}")
        self.choose = self.dice.choice
        self.stage = self.choose([0, 0, 0, 1, 2, 2, 3, 3])
        # A split embedding refuses sparse gradients.
        self.embedding = self.choose(["", "", "dense", "sparse" if tensor == 1 else "dense"])
        if self.embedding == "sparse":
            self.optimizer = self.choose(["sgd", "adagrad"])  # PyTorch's others refuse sparse gradients
        else:
            lbfgs = self.stage == 0 and self.chance(0.06) and tensor == 1  # its line search sees one part
            self.optimizer = "lbfgs" if lbfgs else self.choose(ELEMENTWISE)
        self.lbfgs = self.optimizer == "lbfgs"
        self.half = not self.lbfgs and self.chance(0.2)
        self.scaler = not self.lbfgs and self.embedding != "sparse" and self.chance(0.15)
        self.segments = self.draw_segments()
        if not any(block.kind not in ("frozen", "again") for block in self.blocks):
            self.scaler = False  # there may be no gradient at all
        self.draw_owners()

    def chance(self, probability: float) -> bool:
        return self.dice.random() < probability

    @property
    def blocks(self) -> list[Block]:
        return [block for segment in self.segments for block in segment.blocks]

    # ---------------------------------------------------------------------------------- the model

    def draw_segments(self) -> list[Segment]:
        half_dtype = self.choose(
            ["bfloat16", "bfloat16" if self.scaler else "float16"]
        )  # float16 is not unscaled
        stateful = not self.lbfgs and self.chance(0.6)  # parametrizations give LBFGS gradients with gaps
        segments: list[Segment] = []
        linears: list[tuple[int, str]] = []
        blocks = 0
        for _ in range(self.choose([1, 2, 3, 4, 5])):
            carrier = self.choose(CARRIERS) if self.chance(0.2) else "tensor"
            own = []
            for _ in range(self.choose([1, 1, 2, 3])):
                kind = self.choose(STATEFUL) if stateful and self.chance(0.5) else self.choose(KINDS)
                if kind == "max_norm" and self.stage == 3:
                    kind = "linear"  # a weight that a forward pass writes is an error there
                if self.tensor > 1 and self.chance(0.5):
                    kind = self.choose(IN_PARTS)
                dtype = "float64" if not self.lbfgs and self.chance(0.1) and kind in KINDS else "float32"
                if self.half and kind in ("linear", "deep", "scale", "branch") and self.chance(0.5):
                    dtype = half_dtype
                of = -1
                if self.lbfgs and kind == "conv":
                    kind = "linear"  # PyTorch's takes contiguous gradients only
                if linears and self.chance(0.2):
                    # A plan has one policy for a block.
                    kind = self.choose(["again", "tied"] if carrier == "tensor" else ["tied"])
                    of, dtype = self.choose(linears)
                elif kind == "linear" and carrier == "tensor":
                    linears.append((blocks, dtype))
                own.append(Block(kind, dtype, of))
                blocks += 1
            recompute = self.choose(RECOMPUTE) if self.chance(0.8) else "keep"
            if carrier != "tensor" and recompute == "function":
                recompute = "hc_reentrant"  # CheckpointFunction takes tensors
            segments.append(Segment(tuple(own), recompute, carrier))
        kinds = {block.kind for segment in segments for block in segment.blocks}
        swap: dict[str, str] = {}
        if "max_norm" in kinds:
            # A second forward pass writes the weight that the node has saved, and autograd refuses that.
            swap["function"] = "hc_reentrant"
        if kinds & {"batchnorm", *STATEFUL} or any(one.carrier != "tensor" for one in segments):
            # PyTorch's own regions give the recomputation what the first pass has left.
            swap |= {"torch": "hc", "torch_reentrant": "hc_reentrant"}
        return [
            dataclasses.replace(one, recompute=swap.get(one.recompute, one.recompute)) for one in segments
        ]

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
        self.kinds = ["plain"] * 6 + ["two_forwards", "twice", "eval_first"]
        if not (reentrant or self.half or self.embedding or "attention" in kinds or self.tensor > 1):
            self.kinds.append("penalty")  # the others give no gradients of gradients
        self.closures = self.lbfgs or (not (self.scaler or self.several) and self.chance(0.15))
        # At stage 3 all ranks must run through the same units; what a forward pass writes to weights must be the same on all.
        self.writes = "max_norm" in kinds
        self.alike = self.stage == 3 or self.writes
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
        trap: tuple[str, int] | None = None
        if self.traps and self.chance(0.2):
            trap = self.choose(
                [("forward", self.dice.randrange(len(self.blocks))), ("backward", self.dice.randrange(count))]
            )
        return Pass(tuple(path), self.choose(self.kinds), self.choose([4, 4, 6]), trap)

    def draw_passes(self) -> tuple[tuple[Pass, ...], ...]:
        shorter = self.varying and self.chance(0.4)
        passes = []
        for _ in range(self.ranks):
            differs = shorter or (self.varying and self.chance(0.2))
            many = self.choose([0, 1, 2, 3]) if differs else self.usual
            passes.append(tuple(self.draw_pass() for _ in range(max(1, many) if self.scaler else many)))
        if self.alike or self.chance(0.5):
            passes = [passes[0]] * self.ranks
        if self.scaler and self.chance(0.2):
            rank = self.dice.randrange(self.ranks)
            passes[rank] = (*passes[rank][:-1], dataclasses.replace(passes[rank][-1], overflow=True))
        return tuple(passes)

    def draw_steps(self) -> list[Step]:
        steps: list[Step] = []
        pending: set[int] = set()  # optimizers whose gradients wait for a later step
        others: tuple[int, ...] = (0, 1) if self.several else (0,)
        grouped = False
        count = self.choose([4, 5, 6, 7])
        for number in range(count):
            passes = self.draw_passes()
            group = number > 0 and self.late and not grouped and (self.chance(0.4) or number == count - 2)
            grouped |= group
            events = ([("group",)] if group else []) + self.draw_events(number, bool(pending))
            clear = self.choose(["none", "zero", "plain", "model", "model_zero"])
            clear = clear if self.clear == "mixed" else self.clear
            if clear == "model_zero" and (pending or self.stage > 1):
                clear = "model"  # in place: an error where a gradient is on its way, or lies in shards
            settled = not pending
            stepping = others if self.chance(0.7) or number == count - 1 else (self.choose(others),)
            pending = set(others) - set(stepping)
            if self.several:  # what has left on some ranks only cannot be dropped
                passes = (passes[0],) * self.ranks
            how = self.draw_how(clear)
            if how == "closure" and clear == "never":
                clear = "none"
            # Set by hand, gradients replace what is there: nothing may be on its way.
            by_hand = self.by_hand and settled and clear != "never" and self.chance(0.5)
            drop: tuple[int, ...] = ()
            if self.drops and how != "closure" and self.chance(0.4):
                drop = (self.dice.randrange(len(self.segments)),)
            returns = "loss"
            if how == "closure" and not self.lbfgs:
                returns = self.choose(["loss", "loss", "float", "none", "dict", "tuple"])
            steps.append(Step(passes, tuple(events), clear, stepping, how, returns, by_hand, drop))
        return steps

    def draw_how(self, clear: str) -> str:
        how = self.choose(["step", "step", "step", "synchronize", "clip"])
        if self.closures and (self.lbfgs or self.chance(0.5)):
            return "closure"
        if self.skips and self.chance(0.4):
            how = "skip" if self.scaler else self.choose(["skip", "skip", "repeat", "twice"])
            if how == "repeat" and self.stage > 1:  # where no gradients are left for a second step
                how = "step"
        if (self.scaler and how == "synchronize") or (self.embedding == "sparse" and how == "clip"):
            how = "step"
        return how

    def draw_events(self, number: int, pending: bool) -> list[tuple[Any, ...]]:
        events: list[tuple[Any, ...]] = []
        if number and not pending:
            if self.chance(0.06):
                events.append(("rewrap", self.chance(0.5)))
            if self.chance(0.06):
                events.append(("rewind",))
            if self.chance(0.06):
                events.append(("reload",))
        if not pending and self.restores and self.chance(0.3):
            root = self.dice.randrange(self.ranks)
            loaders = {root, *(rank for rank in range(self.ranks) if self.chance(0.3))}
            events.append(("restore", tuple(sorted(loaders)), root, self.draw_restoring()))
        if number and not self.scaler and self.chance(0.1):
            events.append(("freeze", self.dice.randrange(len(self.segments)), self.chance(0.5)))
        if self.stage > 1 and number and not pending and self.chance(0.05):
            events.append(("passes", self.choose([1, 2, 3])))
        return events

    def draw_restoring(self) -> tuple[str, ...]:
        """Loads and broadcasts of the model, of the optimizers or of both, each broadcast some time after its load."""
        chains = [[f"load_{what}", f"broadcast_{what}"] for what in ("model", "optimizer")]
        if self.chance(0.3):
            chains = [self.choose(chains)]
        operations = []
        while chains:
            chain = self.choose(chains)
            operations.append(chain.pop(0))
            chains = [one for one in chains if one]
        return tuple(operations)

    # ---------------------------------------------------------------------------------- the rest

    def draw_options(self, steps: list[Step]) -> dict[str, Any]:
        stage = self.stage
        options: dict[str, Any] = {"bucket_cap_mb": self.choose([25.0, 0.001, 0.0003])}
        if self.chance(0.2):
            # With op=Sum, what is summed must be cleared before it is added to, or reduced, again.
            if self.clear != "never" and all(step.how != "repeat" for step in steps):
                options["op"] = "sum"
        elif self.chance(0.1):
            options["gradient_predivide_factor"] = self.choose([2.0, 3.0])
        if stage < 2 and self.chance(0.1):
            options["groups"] = self.choose([2, "segments"])
        if stage < 2 and self.embedding != "sparse" and self.chance(0.08):
            options["compression"] = "fp16"
        if stage < 2 and self.chance(0.2):
            options["keep_buckets"] = False
        if self.embedding == "sparse" and self.chance(0.3):
            options["sparse_as_dense"] = True
        if stage > 1 and self.chance(0.5):
            options["backward_passes_per_step"] = self.choose([1, self.usual, 3])
        if stage > 1 and self.chance(0.12):
            blockwise = [] if self.tensor > 1 else ["int8", {"gradients": "int8"}]
            options["wire"] = self.choose(["fp16", "bf16", *blockwise, {"parameters": "bf16"}])
        if stage and self.half and self.chance(0.5):
            options["master_weights"] = False
        if stage and self.chance(0.06):
            options["offload"] = "optimizer"
        return options

    def draw_join(self, steps: list[Step]) -> tuple[list[Step], tuple[int, ...]]:
        """Ranks that end early; the others' later steps ask for allreduces alone."""
        refused = self.stage or self.scaler or self.lbfgs or self.embedding == "sparse"
        if refused or self.alike or not self.chance(0.15):
            return steps, ()
        join = tuple(
            self.choose([len(steps), len(steps), len(steps) - 1, len(steps) - 2]) for _ in range(self.ranks)
        )
        everyone = {0, 1} if self.several else {0}
        if any(set(steps[count - 1].optimizers) != everyone for count in join):
            return steps, ()  # join() refuses gradients that are being reduced
        first = min(join)
        rest = [
            dataclasses.replace(
                # A second step() reduces what the first has left: averaged over the ranks that have not joined, it differs.
                step,
                events=(),
                drop=(),
                by_hand=False,
                how="step" if step.how in ("skip", "repeat") else step.how,
            )
            for step in steps[first : max(join)]
        ]
        return [*steps[:first], *rest], join

    def program(self) -> Program:
        self.draw_habits()
        steps, join = self.draw_join(self.draw_steps())
        others = {0, 1} if self.several else {0}
        settled = [
            at
            for at in range(1, len(steps))
            if set(steps[at - 1].optimizers) == others
            # At stages 2 and 3 gradients that no step has used are in shards, which no state has.
            and not (self.stage > 1 and steps[at - 1].how == "skip")
        ]
        options = self.draw_options(steps)
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
            options,
            self.choose(settled) if settled and not join else 0,
            self.choose(["float64", "bfloat16"]) if self.chance(0.15) else "float32",
            self.chance(0.5),
            join,
            self.tensor,
        )
