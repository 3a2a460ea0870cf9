"""Programs by name: what random ones come upon seldom, and what was once wrong.

A step is a text: digits are the segments of a pass, with what is special of it behind a colon; passes are divided by spaces,
and ranks by a bar, of which the last one is that of all further ranks. In a step ``"0123 3:two_forwards|0123"`` rank 0 takes a
second pass, through the last segment alone and with two losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from programs import Block, Pass, Program, Segment, Step

WHOLE = "0123"
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
    own = [tuple(map(_pass, passes.split())) for passes in text.split("|")]
    return Step(tuple(_of(own, rank) for rank in range(ranks)), **more)


def _each(text: str, name: str, *values: Any) -> Steps:
    """A step for each value of an attribute."""
    return [(text, {name: value}) for value in values]


LATE = [WHOLE] * 3 + ["0123 3|0123"] * 2
UNEVEN = ["0123|012"] * 2 + ["03 1|0123", "013|023"]
LOAD_BOTH = ("load_model", "load_optimizer")
BROADCAST_BOTH = ("broadcast_model", "broadcast_optimizer")

NAMED: dict[str, Named] = {
    # Graphs.
    "plain": Named([WHOLE] * 5, recompute=RECOMPUTED, stages=ANY),
    "accumulated": Named(["0123 0123"] * 4, recompute=("keep", "hc_reentrant"), stages=ANY),
    "more and fewer passes": Named(["0123 0123 0123"] * 2 + ["0123 0123"] * 2 + ["0123 0123 0123"] * 2),
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
    "evaluated first": Named(["0123:eval_first"] * 4, "dropout batchnorm linear linear", ("keep", "hc"), ANY),
    "random and running": Named(
        [WHOLE] * 4, "dropout batchnorm+dropout running numpy", ("hc", "hc_reentrant", "module"), ANY
    ),
    "a layer changes its weight": Named([WHOLE] * 4, "linear max_norm+linear linear linear", stages=(1, 2)),
    "dtypes": Named([WHOLE] * 4, "linear:float64 scale linear:bfloat16 linear:float16", stages=ANY),
    "errors that are caught": Named([WHOLE, "0123:forward2 0123|0123", "0123|0123:backward1 0123", WHOLE]),
    "errors that are caught on all ranks": Named(
        [WHOLE, "0123:forward2", "0123:backward1 0123", WHOLE], recompute=RECOMPUTED, stages=ANY
    ),
    # Steps.
    "clipped": Named(_each(WHOLE, "how", *["clip"] * 4), stages=ANY),
    "synchronized": Named(_each(WHOLE, "how", *["synchronize"] * 4), stages=ANY),
    "synchronized twice": Named(_each(WHOLE, "how", *["twice"] * 4)),
    "stepped twice": Named(_each(WHOLE, "how", *["repeat"] * 4), stages=(0, 1)),
    **{
        f"every other step left out, cleared by {clear}": Named(
            [(WHOLE, {"clear": clear, "how": how}) for how in ("synchronize", "skip", "clip", "skip", "step")],
            stages=(0,) if clear in ("never", "model_zero") else SHARDED,
            resume=0,
        )
        for clear in ("none", "zero", "plain", "model", "model_zero", "never")
    },
    "cleared in many ways": Named(
        _each(WHOLE, "clear", "none", "zero", "model", "never", "model_zero", "plain", "never"), stages=(0, 1)
    ),
    "cleared while some are unused": Named(
        [(text, {"clear": clear}) for text in UNEVEN[:2] for clear in ("zero", "model", "zero", "none")]
    ),
    "gradients by hand": Named(
        [(WHOLE, {"by_hand": number % 2 == 0}) for number in range(5)], stages=(0, 1), resume=0
    ),
    "gradients by hand on one rank": Named(
        [WHOLE, ("0123|", {"by_hand": True}), ("0123|", {"by_hand": True, "how": "twice"}), WHOLE], stages=(0,)
    ),
    "dropped": Named(
        [("0123 0123|0123", {"drop": (3,)} if number % 2 else {}) for number in range(5)], stages=(0, 1, 2)
    ),
    "closures": Named(
        [(WHOLE, {"how": "closure", "returns": one}) for one in ("loss", "float", "none", "dict", "tuple")],
        stages=(0, 2),
    ),
    "line search": Named(_each(WHOLE, "how", *["closure"] * 3), stages=(0,), more={"optimizer": "lbfgs"}),
    "left out by a scaler": Named(
        [
            (WHOLE, {"how": how, "clear": clear})
            for how, clear in (("step", "none"), ("skip", "model"), ("clip", "plain"), ("skip", "zero"), ("step", "none"))
        ],
        resume=0, more={"scaler": True},
    ),
    "an overflow on one rank": Named(
        [WHOLE, "0123|0123:overflow", WHOLE, WHOLE], stages=ANY, more={"scaler": True}
    ),
    # Events.
    "frozen and unfrozen": Named(
        [(WHOLE, {"events": (("freeze", 1, number % 2 == 0),)} if number else {}) for number in range(5)],
        stages=ANY,
    ),
    "a group added": Named(
        [(WHOLE, {"events": (("group",),)} if number == 2 else {}) for number in range(5)],
        stages=ANY, resume=3, more={"owners": (0, -1, 0, 0)},
    ),
    "wrapped again": Named(
        [WHOLE, WHOLE, (WHOLE, {"events": (("rewrap", False),)}), (WHOLE, {"events": (("rewrap", True),)})],
        stages=ANY,
    ),
    "loaded": Named(
        [WHOLE, WHOLE, (WHOLE, {"events": (("reload",),)}), (WHOLE, {"events": (("rewind",),)}), WHOLE], stages=ANY
    ),
    **{
        f"loaded by ranks {loaders} and broadcast: {' '.join(order)}": Named(
            [WHOLE, (WHOLE, {"events": (("restore", loaders, loaders[0], order),)}), WHOLE], stages=(0,)
        )
        for loaders in ((0,), (1,))
        for order in ((*LOAD_BOTH, *BROADCAST_BOTH), (*LOAD_BOTH, *BROADCAST_BOTH[::-1]), ("load_optimizer", "broadcast_optimizer"))
    },
    "two optimizers in turn": Named(
        _each(WHOLE, "optimizers", (0,), (0, 1), (1,), (0,), (0, 1)), stages=(0, 1, 2), resume=0,
        more={"owners": (0, 1, 1, 0)},
    ),
    "a rank joins": Named([WHOLE] * 4, stages=(0,), resume=0, more={"join": (3, 4)}),
    "the number of passes is set later": Named(
        [WHOLE, ("0123 0123", {"events": (("passes", 2),)}), "0123 0123", "0123 0123"], stages=(2, 3)
    ),
    # Sparse gradients.
    **{
        f"sparse gradients{' that travel dense' * dense}, cleared by {clear}": Named(
            [("01 01|01", {"clear": clear}) if number % 2 else ("01", {"clear": clear}) for number in range(4)],
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
        f"accumulated, {options}": Named(["0123 0123"] * 4, stages=stages, options=options)
        for options, stages in (
            ({"backward_passes_per_step": 2}, (2, 3)), ({"wire": "int8"}, (2, 3)), ({"wire": {"parameters": "bf16"}}, (2, 3)),
            ({"offload": "optimizer"}, (1, 2, 3)),
        )
    },
    **{
        f"default dtype {dtype}{' with a scaler' * scaler}": Named(
            _each(WHOLE, "how", "step", "clip", "step"), stages=ANY, more={"default_dtype": dtype, "scaler": scaler}
        )
        for dtype, scaler in (("float64", False), ("bfloat16", True))
    },
}  # fmt: skip

RESUMED: dict[str, Named] = {
    "more and fewer passes": NAMED["more and fewer passes"],
    "idle for a while": NAMED["idle for a while"],
    "uneven": NAMED["uneven"],
    "unused, in another format": Named(["012"] * 3, stages=(2,), options={"wire": "bf16"}),
    **{
        f"cleared by {clears}": Named(
            [(text, {"clear": clear}) for text, clear in zip((WHOLE, "012", WHOLE, "012", "012"), clears)],
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
