"""Draws programs in which users act by hand, and in which little else happens."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from drawing import Draw
from hand import ACTS, FLAGS, IN_PLACE, READS, REPLACED, WEIGHTS, WEIGHTS_READ
from programs import ELEMENTWISE, REENTRANT, Act, Block, Pass, Program, Segment, Step

SIMPLE = ("linear", "linear", "deep", "norm", "dropout", "scale", "branch", "unused", "frozen")
SIMPLE_RECOMPUTE = (
    "keep", "keep", "hc", "torch", "sequential", "module", "hc_reentrant", "torch_reentrant", "function",
)  # fmt: skip


def draw(seed: int, ranks: int, tensor: int = 1) -> Program:
    """The program of a seed."""
    return DrawActs(seed, ranks).program()


class DrawActs(Draw):
    def __init__(self, seed: int, ranks: int) -> None:
        self.seed, self.ranks, self.tensor = seed, ranks, 1
        self.dice = random.Random(f"acts {seed} {ranks}")
        self.choose = self.dice.choice
        self.stage = self.choose([0, 0, 0, 1, 1, 2, 3, 3])
        self.embedding = self.choose(["", "", "", "dense"])
        self.optimizer = self.choose(ELEMENTWISE)
        self.lbfgs = False
        self.half = self.chance(0.08)
        self.scaler = self.chance(0.15)
        self.segments = self.draw_segments()
        if all(block.kind == "frozen" for block in self.blocks):
            self.segments.append(Segment((Block("linear"),)))
        self.draw_owners()
        self.families = [self.choose(list(ACTS)) for _ in range(self.choose([1, 1, 2, 3]))]
        if "flags" in self.families:
            self.embedding = ""  # frozen, it would leave reentrant regions without gradients
        self.scaler &= "flags" not in self.families  # it raises where there is no gradient at all
        self.everywhere = self.chance(0.6)  # all ranks do the same

    def draw_segments(self) -> list[Segment]:
        segments, linears, blocks = [], [], 0
        for _ in range(self.choose([1, 2, 3])):
            own = []
            for _ in range(self.choose([1, 1, 2])):
                kind, of, dtype = self.choose(SIMPLE), -1, "float32"
                if self.half and kind in ("linear", "deep", "scale", "branch") and self.chance(0.5):
                    dtype = "bfloat16"
                if linears and self.chance(0.1):
                    kind = self.choose(["again", "tied"])
                    of, dtype = self.choose(linears)
                elif kind == "linear":
                    linears.append((blocks, dtype))
                own.append(Block(kind, dtype, of))
                blocks += 1
            segments.append(Segment(tuple(own), self.choose(SIMPLE_RECOMPUTE)))
        return segments

    def draw_owners(self) -> None:
        super().draw_owners()
        if self.several:
            self.several, self.owners = False, [min(owner, 0) for owner in self.owners]

    def draw_habits(self) -> None:
        super().draw_habits()
        self.clear = self.choose(["none", "none", "zero", "plain", "model", "mixed"])
        self.usual = self.choose([1, 1, 2, 3])
        self.varying, self.partial, self.traps, self.closures = self.chance(0.1), False, False, False
        self.kinds = ["plain"] if self.chance(0.8) else ["plain", "two_forwards"]
        self.alike, self.by_hand, self.drops, self.skips, self.writes = True, False, False, False, False
        self.eventful = self.chance(0.2)
        self.restores = self.restores and self.eventful
        self.surgery = "replaced" in self.families and self.chance(0.3)

    def draw_passes(self) -> tuple[tuple[Pass, ...], ...]:
        return tuple(
            tuple(dataclasses.replace(one, overflow=False) for one in own) for own in super().draw_passes()
        )

    def draw_events(self, number: int, pending: bool) -> list[tuple[Any, ...]]:
        return super().draw_events(number, pending) if self.eventful else []

    def draw_how(self, clear: str) -> str:
        return self.choose(["step", "step", "synchronize", "clip"])

    def draw_steps(self) -> list[Step]:
        steps = super().draw_steps()
        acted = [
            dataclasses.replace(step, acts=tuple(self.draw_acts(number, step)))
            for number, step in enumerate(steps)
        ]
        if self.ranks > 1 and self.chance(0.06):
            acted = self.with_drift(acted)
        return acted

    def draw_acts(self, number: int, step: Step) -> list[Act]:
        acts: list[Act] = []
        passes = len(step.passes[0])
        if self.surgery:
            everyone = tuple(range(self.ranks))
            acts += [
                Act("collect", "pass", everyone, part=part, pause=self.choose([0.0, 0.01]))
                for part in range(passes)
            ]
            acts.append(Act("combine", "backward", everyone))
        if self.chance(0.4):
            return acts
        return acts + [self.draw_act(step, passes) for _ in range(self.choose([1, 1, 2, 3]))]

    def draw_act(self, step: Step, passes: int) -> Act:
        family = self.choose(self.families)
        kind = self.choose(list(ACTS[family]))
        if self.optimizer == "adagrad" and kind in ("state_pop", "state_empty", "state_clear"):
            kind = "state_zero_"  # it makes its state once
        if kind in ("collect", "combine") or (self.scaler and kind in ("dropped", "model_none")):
            kind = "doubled"  # a scaler raises where there is no gradient at all
        places = ["cleared", "backward", "backward", "step"]
        places += ["pass"] * (passes > 1)
        places += ["synchronized", "synchronized"] * (step.how == "synchronize" and family != "flags")
        place = self.choose(places)
        if kind == "optimizer_zeros" and place == "synchronized":
            place = "step"  # clears what the step would use
        if kind == "kept":  # of a gradient that a later step does not change
            place, kind = "step", kind if self.clear in ("none", "plain", "model") else "norm"
        part = self.dice.randrange(max(1, passes - 1)) if place == "pass" else 0
        ranks = tuple(range(self.ranks))
        mine = (*READS, *WEIGHTS_READ) if place == "synchronized" else (*READS, *IN_PLACE, *REPLACED, *FLAGS)
        if (
            not self.everywhere
            and kind in mine
            and kind not in ("evaluate", "optimizer_zeros")
            and self.chance(0.6)
        ):
            ranks = (self.dice.randrange(self.ranks),)
        targets = tuple(self.dice.randrange(1000) for _ in range(self.choose([0, 1, 1, 2, 3])))
        through = "groups" if self.chance(0.4) else "module"
        writes = family == "weights"
        within = (
            writes and self.stage > 0 and kind != "evaluate" and self.chance(0.7 if self.stage == 3 else 0.15)
        )
        value = self.choose([1.5, 3.0])
        return Act(kind, place, ranks, targets, part, through, within, value, self.choose([0.0, 0.0, 0.01]))

    def with_drift(self, steps: list[Step]) -> list[Step]:
        """One more act, of one rank alone, that gives it other weights."""
        rank, number = self.dice.randrange(self.ranks), self.choose([1, 2])
        kinds = [kind for kind in WEIGHTS if kind not in ("average", "away", "back")]
        if self.stage == 0:
            kinds += ["lr"]
        act = Act(self.choose(kinds), "step", (rank,), within=self.stage == 3 and self.chance(0.7))
        plain = dataclasses.replace(steps[number], events=(), acts=(), clear="none", how="step")
        steps = [*steps[:number], dataclasses.replace(steps[number], acts=(*steps[number].acts, act))]
        return [*steps, *[plain] * 5]

    def program(self) -> Program:
        program = super().program()
        hooks = ()
        once = not any(block.kind in ("again", "tied") for block in self.blocks)
        if (
            once
            and not any(one.recompute in (*REENTRANT, "function") for one in self.segments)
            and self.chance(0.15)
        ):
            kinds = ["pre_mul", "post_mul", "post_replace", "post_read"]
            hooks = tuple(
                (self.choose(kinds), self.dice.randrange(1000), self.chance(0.5))
                for _ in range(self.choose([1, 2]))
            )
        return dataclasses.replace(program, hooks=hooks, resume=0, default_dtype="float32")
