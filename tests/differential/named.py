"""Programs by name: what random ones come upon seldom, and what was once wrong.

A step is a text: digits are the segments of a pass, with what is special of it behind a colon; passes are divided by spaces,
and ranks by a bar, of which the last one is that of all further ranks. In a step ``"0123 3:two_forwards|0123"`` rank 0 takes a
second pass, through the last segment alone and with two losses.

Further parts, each behind a semicolon, are attributes of the step, events before it (``"before passes 2"``) and acts: kind, place
with the number of a pass behind a colon, and the ranks that do it, by default all. After the first pass of
``"0123 0123; how=skip; dropped pass:0 1"`` rank 1 drops its gradients.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from programs import Act, Block, Pass, Program, Segment, Step

WHOLE, TWICE, THRICE = "0123", "0123 0123", "0123 0123 0123"
SHARDED, ANY = (0, 2), (0, 1, 2, 3)
RECOMPUTED = ("keep", "hc", "hc_reentrant")
SMALL = 0.0002  # MiB: a bucket for each parameter

Steps = Sequence[str | tuple[str, dict[str, Any]]]


@dataclass(frozen=True)
class Named:
    """A program on any number of ranks.

    Attributes:
        steps: texts, some with further attributes of the step.
        blocks: of each segment, joined by ``+``; ``"tied0"`` and ``"again0"`` are of block 0, ``"linear:float64"`` has a dtype.
        recompute, stages: each way in which it is run.
        resume: after so many steps it is resumed; 0: it is run again.
        options: of the optimizer.
        more: further attributes of the program.
    """

    steps: Steps
    blocks: str = "linear linear linear linear"
    recompute: tuple[str, ...] = ("keep",)
    stages: tuple[int, ...] = SHARDED
    resume: int = 2
    options: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)

    def program(self, ranks: int, stage: int, recompute: str = "keep") -> Program:
        segments = tuple(
            Segment(tuple(map(_block, text.split("+"))), recompute) for text in self.blocks.split()
        )
        more = {"owners": (0,) * len(segments), "optimizer": "momentum", "resume": self.resume, **self.more}
        if "join" in more:
            more["join"] = tuple(_of(more["join"], rank) for rank in range(ranks))
        options = {"bucket_cap_mb": SMALL, **self.options}
        steps = tuple(_step(step, ranks) for step in self.steps)
        return Program(0, ranks, segments, steps, stage=stage, options=options, **more)


def _of(values: Sequence[Any], rank: int) -> Any:
    return values[min(rank, len(values) - 1)]


def _block(text: str) -> Block:
    text, _, dtype = text.partition(":")
    kind = text.rstrip("0123456789")
    return Block(kind, dtype or "float32", int(text[len(kind) :] or -1))


def _pass(text: str) -> Pass:
    path, _, what = text.partition(":")
    trap = what.rstrip("0123456789")
    return Pass(
        tuple(map(int, path)),
        "plain" if what == "overflow" or trap != what else what or "plain",
        trap=(trap, int(what[len(trap) :])) if trap != what else None,
        overflow=what == "overflow",
    )


def _step(given: str | tuple[str, dict[str, Any]], ranks: int) -> Step:
    text, more = (given, {}) if isinstance(given, str) else given
    text, *parts = text.split("; ")
    own = [tuple(map(_pass, passes.split())) for passes in text.split("|")]
    values: dict[str, Any] = {"acts": (), "events": ()}
    for part in parts:
        name, equals, value = part.partition("=")
        if equals:
            values[name] = _literal(value)
        elif part.startswith("before "):
            values["events"] += (tuple(map(_literal, part.split()[1:])),)
        else:
            values["acts"] += (_act(part, ranks),)
    return Step(tuple(_of(own, rank) for rank in range(ranks)), **{**values, **more})


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def _act(text: str, ranks: int) -> Act:
    kind, place, *some = text.split()
    place, _, part = place.partition(":")
    return Act(kind, place, tuple(map(int, some or range(ranks))), part=int(part or 0))


OPERATIONS: dict[str, dict[str, Any]] = {"averaged": {}, "summed": {"op": "sum"}}
LATE = [WHOLE] * 3 + ["0123 3|0123"] * 2
UNEVEN = ["0123|012"] * 2 + ["03 1|0123", "013|023"]
LOAD_BOTH = ("load_model", "load_optimizer")
BROADCAST_BOTH = ("broadcast_model", "broadcast_optimizer")

NAMED: dict[str, Named] = {
    # Graphs.
    "plain": Named([WHOLE] * 5, recompute=RECOMPUTED, stages=ANY),
    "accumulated": Named([TWICE] * 4, recompute=("keep", "hc_reentrant"), stages=ANY),
    "more and fewer passes": Named([THRICE, THRICE, TWICE, TWICE, THRICE, THRICE]),
    "late on one rank": Named(LATE, recompute=("keep", "hc_reentrant")),
    "late within a pass": Named([WHOLE] * 3 + ["30123|0123"] * 2, recompute=("hc_reentrant",)),
    "uneven": Named(UNEVEN, recompute=("keep", "hc_reentrant"), stages=(0, 1, 2)),
    "no pass on one rank": Named([WHOLE, "0123|", "|0123 0123", WHOLE]),
    "unused": Named(["012"] * 4, stages=ANY),
    "idle for a while": Named([WHOLE, "012", "012", "012", WHOLE], stages=(0, 2, 3)),
    "tied": Named([WHOLE] * 4, "linear linear tied0 again1", RECOMPUTED, ANY),
    "two backward passes through a graph": Named(["0123:twice"] * 4, recompute=("keep", "hc"), stages=ANY),
    "two losses": Named(["0123:two_forwards"] * 4, recompute=("keep", "hc_reentrant"), stages=ANY),
    "a penalty on gradients": Named(["0123:penalty"] * 4, recompute=("keep", "hc"), stages=ANY),
    "a penalty on gradients that have a graph": Named(["0123:graph"] * 4, stages=(0,), resume=0),
    "evaluated first": Named(["0123:eval_first"] * 4, "dropout batchnorm linear linear", ("keep", "hc"), ANY),
    "random and running": Named([WHOLE] * 4, "dropout batchnorm+dropout running numpy", ("hc", "hc_reentrant", "module"), ANY),
    "a layer changes its weight": Named([WHOLE] * 4, "linear max_norm+linear linear linear", stages=(1, 2)),
    "dtypes": Named([WHOLE] * 4, "linear:float64 scale linear:bfloat16 linear:float16", stages=ANY),
    "errors that are caught": Named([WHOLE, "0123:forward2 0123|0123", "0123|0123:backward1 0123", WHOLE]),
    "errors that are caught on all ranks": Named(
        [WHOLE, "0123:forward2", "0123:backward1 0123", WHOLE], recompute=RECOMPUTED, stages=ANY
    ),
    # Steps.
    "clipped": Named(["0123; how=clip"] * 4, stages=ANY),
    "synchronized": Named(["0123; how=synchronize"] * 4, stages=ANY),
    "synchronized twice": Named(["0123; how=twice"] * 4),
    "synchronized twice, summed": Named(["0123; how=twice"] * 4, options={"op": "sum"}),
    "stepped twice": Named(["0123; how=repeat"] * 4, stages=(0, 1)),
    "synchronized in vain after other numbers of passes": Named(
        ["0123|0123 0123; how=skip", WHOLE, "0123 0123|0123; how=skip", WHOLE] * 2, stages=(0,), resume=0
    ),
    **{
        f"every other step left out, cleared by {clear}": Named(
            [f"0123; clear={clear}; how={how}" for how in ("synchronize", "skip", "clip", "skip", "step")],
            stages=(0,) if clear in ("never", "model_zero") else SHARDED, resume=0,
        )
        for clear in ("none", "zero", "plain", "model", "model_zero", "never")
    },
    "cleared in many ways": Named(
        [f"0123; clear={one}" for one in ("none", "zero", "model", "never", "model_zero", "plain", "never")], stages=(0, 1)
    ),
    "cleared while some are unused": Named(
        [f"{text}; clear={clear}" for text in UNEVEN[:2] for clear in ("zero", "model", "zero", "none")]
    ),
    "gradients by hand": Named([f"0123; by_hand={number % 2 == 0}" for number in range(5)], stages=(0, 1), resume=0),
    "gradients by hand on one rank": Named([WHOLE, "0123|; by_hand=True", "0123|; by_hand=True; how=twice", WHOLE], stages=(0,)),
    "dropped": Named(["0123 0123|0123", "0123 0123|0123; drop=3,"] * 2 + ["0123 0123|0123"], stages=(0, 1, 2)),
    "closures": Named([f"0123; how=closure; returns={one}" for one in ("loss", "float", "none", "dict", "tuple")], stages=(0, 2)),
    "line search": Named(["0123; how=closure"] * 3, stages=(0,), more={"optimizer": "lbfgs"}),
    "left out by a scaler": Named(
        [WHOLE, "0123; how=skip; clear=model", "0123; how=clip; clear=plain", "0123; how=skip; clear=zero", WHOLE],
        resume=0, more={"scaler": True},
    ),
    "an overflow on one rank": Named([WHOLE, "0123|0123:overflow", WHOLE, WHOLE], stages=ANY, more={"scaler": True}),
    # Events.
    "frozen and unfrozen": Named([WHOLE, "0123; before freeze 1 False", "0123; before freeze 1 True"] * 2, stages=ANY),
    **{
        f"frozen, then cleared by {clear}": Named(
            [first, f"0123; clear={clear}; before freeze 3 False", "0123; clear=zero"],
            stages=(2, 3), resume=0, more={"optimizer": "nesterov"},
        )
        for first, clear in ((WHOLE, "none"), (WHOLE, "zero"), ("0123; dropped step", "never"))
    },
    "a group added": Named(
        [WHOLE, WHOLE, "0123; before group", WHOLE, WHOLE], stages=ANY, resume=3, more={"owners": (0, -1, 0, 0)}
    ),
    "wrapped again": Named([WHOLE, WHOLE, "0123; before rewrap False", "0123; before rewrap True"], stages=ANY),
    "loaded": Named([WHOLE, WHOLE, "0123; before reload", "0123; before rewind", WHOLE], stages=ANY),
    **{
        f"loaded by ranks {loaders} and broadcast: {' '.join(order)}": Named(
            [WHOLE, (WHOLE, {"events": (("restore", loaders, loaders[0], order),)}), WHOLE], stages=(0,)
        )
        for loaders in ((0,), (1,))
        for order in ((*LOAD_BOTH, *BROADCAST_BOTH), (*LOAD_BOTH, *BROADCAST_BOTH[::-1]), ("load_optimizer", "broadcast_optimizer"))
    },
    "a layout that changes": Named(
        [f"0123; clear=zero{'; before contiguous' * (number == 2)}" for number in range(4)], "conv linear conv linear", stages=(0,)
    ),
    "two optimizers in turn, each without what the other one drops": Named(
        [f"{text}; {rest}" for text in (WHOLE, TWICE, WHOLE) for rest in ("optimizers=0,; drop=1, 2", "optimizers=1,; drop=0, 3")],
        stages=(0,), resume=0, more={"owners": (0, 1, 1, 0)},
    ),
    "two optimizers in turn": Named(
        [f"0123; optimizers={ones}" for ones in ("0,", "0, 1", "1,", "0,", "0, 1")], stages=(0, 1, 2), resume=0,
        more={"owners": (0, 1, 1, 0)},
    ),
    "a rank joins": Named([WHOLE] * 4, stages=(0,), resume=0, more={"join": (3, 4)}),
    "the number of passes is set on the way": Named([WHOLE] * 2 + ["0123; passes backward", TWICE, TWICE], stages=(2, 3), resume=0),
    "the number of passes is set later": Named([WHOLE, f"{TWICE}; before passes 2", TWICE, TWICE], stages=(2, 3)),
    # By hand; each kind at each place: named_acts.
    **{
        f"gradients by hand alone, {kind}, {operation}": Named(
            [
                f"; clear=never; how={how}; {kind if number else 'random'} cleared"
                for number, how in enumerate(("step", "skip", "synchronize", "synchronize") * 2)
            ],
            stages=(0,), resume=0, options=options,
        )
        for kind in ("random", "copy_")
        for operation, options in OPERATIONS.items()
    },
    **{
        f"clipped before a step that may reduce, {operation}": Named(
            ["0123; how=warned; clip_norm synchronized"] * 4, stages=(0,), options=options
        )
        for operation, options in OPERATIONS.items()
    },
    **{  # Whichever buckets had left.
        f"{kind} {when}, {operation}": Named(steps, stages=(0,), resume=0, options=options)
        for kind in ("dropped", "model_none")
        for operation, options in OPERATIONS.items()
        for when, steps in (
            ("before a step", ["0123|0123 0123", "0123 0123|0123", f"0123; {kind} backward"] * 3),
            ("between passes", [WHOLE, TWICE, f"{TWICE}; {kind} pass:0", TWICE, WHOLE, f"0123 {TWICE}; {kind} pass:1", WHOLE]),
        )
    },
    "dropped after other numbers of passes": Named(
        [TWICE] * 3 + [f"{TWICE}|0123 {TWICE}; dropped pass:0 0; dropped pass:1 1; raises=and then optimizer.zero_grad"],
        stages=(0,), resume=0,
    ),
    "a gradient by hand before a late part": Named(
        ["0123|012"] * 3 + [("0123|012 0123", {"acts": (Act("random", "pass", (1,), targets=(6,)),)})] * 2, stages=(0,), resume=0
    ),
    "a state loaded before a step": Named(
        [WHOLE, WHOLE, "0123; state_load backward", "0123; how=warned; state_load synchronized", "0123; state_load backward"],
        stages=ANY, resume=0,
    ),
    "a state loaded before gradients are cleared": Named(
        [WHOLE, WHOLE, f"{TWICE}; state_load pass:0; optimizer_zeros pass:0", "0123; how=skip; state_load synchronized", WHOLE],
        stages=ANY, resume=0,
    ),
    "a state loaded on one rank": Named(["0123; state_load backward 0"] * 4, stages=(0,), resume=0),
    **{
        f"{what} loaded, which drops gradients": Named(
            [WHOLE, WHOLE, f"{TWICE}; {what} pass:0", f"0123; how=skip; {what} synchronized", TWICE], stages=stages, resume=0
        )
        for what, stages in (("order", (0, 2)), ("reset", (0, 3)))
    },
    # Refused.
    **{
        f"cleared by nobody, {text} {how}": Named(
            [WHOLE, f"{text}; clear=never; how={how}; raises=nobody has cleared"] * 2 + [WHOLE], stages=stages, resume=0
        )
        for text, how, stages in (
            *((WHOLE, how, (2, 3)) for how in ("step", "synchronize", "closure")),
            ("0123|", "step", (2,)), ("3", "step", (2, 3)), ("", "step", (2, 3)),
        )
    },
    "cleared by nobody before a scaler's step": Named(
        [WHOLE, "0123; clear=never; raises=nobody has cleared"], stages=(2, 3), resume=0, more={"scaler": True}
    ),
    **{
        f"a sum cleared by nobody, {text} after {how}": Named(
            [f"0123; how={how}"] * 3 + [f"{text}; clear=never; raises=is a sum over the ranks already", WHOLE],
            stages=(0,), resume=0, options={"op": "sum"},
        )
        for how, text in (("step", WHOLE), ("clip", WHOLE), ("step", "0"), ("step", "|0123"), ("step", ""))
    },
    # Sparse gradients.
    **{
        f"sparse gradients{' that travel dense' * dense}, cleared by {clear}": Named(
            [f"{text}; clear={clear}" for text in ("01", "01 01|01") * 2],
            "linear linear", stages=(0,), options={"sparse_as_dense": dense},
            more={"embedding": "sparse", "optimizer": "sgd"},
        )
        for dense, clear in ((False, "none"), (False, "zero"), (True, "none"), (True, "zero"), (True, "never"))
    },
    # Options.
    **{
        f"{name}, {steps}": Named(
            LATE if steps == "late" else UNEVEN, stages=stages, options=options, resume=3 if steps == "late" else 2
        )
        for name, options, stages in (
            ("sums", {"op": "sum"}, SHARDED),
            ("divided before", {"gradient_predivide_factor": 4.0}, SHARDED),
            ("two groups", {"groups": 2}, (0,)),
            ("groups of parameters", {"groups": "segments"}, (0,)),
            ("no kept buckets", {"keep_buckets": False}, (0,)),
            ("compressed", {"compression": "fp16"}, (0,)),
            ("one bucket", {"bucket_cap_mb": 25.0}, SHARDED),
            ("two passes in a step", {"backward_passes_per_step": 2}, SHARDED),
        )
        for steps in ("late", "uneven")
    },
    **{
        f"accumulated, {options}": Named([TWICE] * 4, stages=stages, options=options)
        for options, stages in (
            ({"backward_passes_per_step": 2}, (2, 3)), ({"wire": "int8"}, (2, 3)), ({"wire": {"parameters": "bf16"}}, (2, 3)),
            ({"offload": "optimizer"}, (1, 2, 3)),
        )
    },
    **{
        f"default dtype {dtype}{' with a scaler' * scaler}": Named(
            [WHOLE, "0123; how=clip", WHOLE], stages=ANY, more={"default_dtype": dtype, "scaler": scaler}
        )
        for dtype, scaler in (("float64", False), ("bfloat16", True))
    },
}  # fmt: skip

RESUMED: dict[str, Named] = {
    "a frozen block is unfrozen, cleared by the model": Named(
        [
            f"{passes}; clear=model"
            for passes in ("2", "1 2; before freeze 1 True", "11 2:twice 02", "2 112 012:twice", "12 022 2:twice")
        ],
        "linear frozen linear",
        stages=(2, 3),
    ),
    "more and fewer passes": NAMED["more and fewer passes"],
    "idle for a while": NAMED["idle for a while"],
    "uneven": NAMED["uneven"],
    "unused, in another format": Named(["012"] * 3, stages=(2,), options={"wire": "bf16"}),
    **{
        f"cleared by {clears}": Named(
            [f"{text}; clear={clear}" for text, clear in zip((WHOLE, "012", WHOLE, "012", "012"), clears)],
            stages=ANY, more={"optimizer": "nesterov"},
        )
        for clears in (
            ("zero",) * 5, ("none", "zero", "zero", "none", "zero"), ("none", "none", "none", "model", "zero"),
        )
    },
    **{
        name: named for name, named in NAMED.items() if name.startswith("sparse") and name.endswith("zero")
    },
}  # fmt: skip
"""Those that are resumed after every step."""


def draw(seed: int | str, ranks: int, tensor: int = 1) -> Program:
    """The program of a name or a number, at its last stage and as it is recomputed last."""
    named = NAMED[seed if isinstance(seed, str) else list(NAMED)[seed % len(NAMED)]]
    return named.program(ranks, named.stages[-1], named.recompute[-1])
