"""Draws programs in which users act by hand, and in which little else happens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from drawing import Draw
from hand import ACTS, FLAGS, HOOKS, OF_GRADIENTS, READS, WEIGHTS, WEIGHTS_READ
from models import OPTIMIZERS
from programs import REENTRANT, Act, Program, Step


def draw(seed: int, ranks: int, tensor: int = 1) -> Program:
    """The program of a seed."""
    return DrawActs(seed, ranks).program()


class DrawActs(Draw):
    counts, own_counts = (1, 2, 3), (1, 1, 2)
    kinds = ("linear", "linear", "deep", "norm", "dropout", "scale", "branch", "unused", "frozen")
    ways = ("hc", "torch", "sequential", "module", "hc_reentrant", "torch_reentrant", "function")
    half_dtypes = ("bfloat16",)
    again, double = 0.1, 0.0

    def draw_features(self) -> None:
        self.stage = self.choose([0, 0, 0, 1, 1, 2, 3, 3])
        self.optimizer = self.choose(list(OPTIMIZERS)[:-1])
        self.families = [self.choose(list(ACTS)) for _ in range(self.choose([1, 1, 2, 3]))]
        freezes = "flags" in self.families
        # A frozen embedding leaves reentrant regions without gradients; a scaler raises where there is none at all.
        self.embedding = "" if freezes else self.choose(["", "", "", "dense"])
        self.scaler = not freezes and self.chance(0.15)
        self.half, self.lbfgs, self.stateful, self.carried = self.chance(0.08), False, False, 0.0
        self.everywhere = self.chance(0.6)  # all ranks do the same

    def draw_owners(self) -> None:
        super().draw_owners()
        if self.several:
            self.several, self.owners = False, [min(owner, 0) for owner in self.owners]

    def draw_habits(self) -> None:
        super().draw_habits()
        self.clear = self.choose(["none", "none", "zero", "plain", "model", "mixed"])
        self.usual = self.choose([1, 1, 2, 3])
        self.kinds_of_passes = ["plain"] if self.chance(0.8) else ["plain", "two_forwards"]
        self.alike, self.varying = True, self.chance(0.1)
        self.partial = self.traps = self.overflows = self.closures = False
        self.by_hand = self.drops = self.skips = False
        self.eventful = self.chance(0.2)
        self.surgery = "replaced" in self.families and self.chance(0.3)

    def draw_events(self, number: int, pending: bool) -> list[tuple[Any, ...]]:
        return super().draw_events(number, pending) if self.eventful else []

    def draw_how(self) -> str:
        return self.choose(["step", "step", "synchronize", "clip"])

    def draw_steps(self) -> list[Step]:
        steps = [replace(step, acts=tuple(self.draw_acts(step))) for step in super().draw_steps()]
        return self.with_drift(steps) if self.ranks > 1 and self.chance(0.06) else steps

    def draw_acts(self, step: Step) -> list[Act]:
        acts: list[Act] = []
        passes, everyone = len(step.passes[0]), tuple(range(self.ranks))
        if self.surgery:
            acts += [
                Act("collect", "pass", everyone, part=part, pause=self.choose([0.0, 0.01]))
                for part in range(passes)
            ]
            acts.append(Act("combine", "backward", everyone))
        if self.chance(0.6):
            acts += [self.draw_act(step, passes, everyone) for _ in range(self.choose([1, 1, 2, 3]))]
        return acts

    def draw_act(self, step: Step, passes: int, ranks: tuple[int, ...]) -> Act:
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
        own = (*READS, *WEIGHTS_READ) if place == "synchronized" else (*OF_GRADIENTS, *FLAGS)
        alone = kind in own and kind not in ("evaluate", "optimizer_zeros") and self.chance(0.6)
        if alone and not self.everywhere:
            ranks = (self.dice.randrange(self.ranks),)
        often = {0: 0.0, 3: 0.7}.get(self.stage, 0.15)
        return Act(
            kind,
            place,
            ranks,
            targets=tuple(self.dice.randrange(1000) for _ in range(self.choose([0, 1, 1, 2, 3]))),
            part=self.dice.randrange(max(1, passes - 1)) if place == "pass" else 0,
            through="groups" if self.chance(0.4) else "module",
            within=family == "weights" and kind != "evaluate" and self.chance(often),
            value=self.choose([1.5, 3.0]),
            pause=self.choose([0.0, 0.0, 0.01]),
        )

    def with_drift(self, steps: list[Step]) -> list[Step]:
        """One more act, of one rank alone, that gives it other weights."""
        rank, number = self.dice.randrange(self.ranks), self.choose([1, 2])
        kinds = [kind for kind in WEIGHTS if kind not in ("average", "away", "back")]
        kinds += ["lr"] * (self.stage == 0)
        act = Act(self.choose(kinds), "step", (rank,), within=self.stage == 3 and self.chance(0.7))
        drifted = replace(steps[number], acts=(*steps[number].acts, act))
        plain = replace(steps[number], events=(), acts=(), clear="none", how="step")
        return [*steps[:number], drifted, *[plain] * 5]

    def program(self) -> Program:
        program = super().program()
        once = all(block.kind not in ("again", "tied") for block in self.blocks)
        if once and not program.recomputed_as("function", *REENTRANT) and self.chance(0.15):
            kind, place = self.choose(list(HOOKS)), self.choose(["unwrapped", "wrapped"])
            targets = tuple(self.dice.randrange(1000) for _ in range(self.choose([1, 2])))
            hooks = Act(kind, place, tuple(range(self.ranks)), targets)
            first, *others = program.steps
            program = replace(program, steps=(replace(first, acts=(hooks, *first.acts)), *others))
        return replace(program, resume=0, default_dtype="float32")
