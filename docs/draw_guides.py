"""The pictures of the guides: what a plan keeps, how buckets leave, what is a shard, and the schedules of a pipeline.

python docs/draw_guides.py
"""

from __future__ import annotations

import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))

from hvd_ckpt.parallel.pipeline.schedule import FORWARD, make_schedule, timeline  # noqa: E402

BLUE, GREEN, ORANGE, RED, GRAY, PALE = "#1b6ca8", "#66a182", "#edae49", "#d1495b", "#b8b8b8", "#f3f3f3"


class Picture:
    """Rectangles and texts on a white ground, whose size follows from them."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.width = self.height = 0.0

    def box(
        self, x: float, y: float, width: float, height: float, color: str, text: str = "", dashed: bool = False
    ) -> None:
        fill, stroke = (PALE, f'stroke="{color}" stroke-dasharray="3 2"') if dashed else (color, 'stroke="white"')
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2" fill="{fill}" {stroke}/>'
        )
        if text:
            dark = dashed or color in (ORANGE, GRAY, PALE)
            self.text(x + width / 2, y + height / 2, text, "middle", "#333" if dark else "white")
        self.width, self.height = max(self.width, x + width), max(self.height, y + height)

    def text(self, x: float, y: float, text: str, anchor: str = "start", color: str = "#333", size: int = 12) -> None:
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" dominant-baseline="central" '
            f'fill="{color}">{text}</text>'
        )

    def legend(self, x: float, y: float, entries: list[tuple[str, str, bool]]) -> None:
        for color, text, dashed in entries:
            self.box(x, y, 16, 12, color, dashed=dashed)
            self.text(x + 22, y + 6.5, text)
            x += 36 + 6.6 * len(text)
        self.width = max(self.width, x)

    def write(self, name: str) -> None:
        width, height = self.width + 14, self.height + 14
        body = "\n".join(self.parts)
        (DOCS / name).write_text(
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}" '
            f'font-family="sans-serif">\n<rect width="100%" height="100%" rx="6" fill="white"/>\n{body}\n</svg>\n',
            encoding="utf-8",
        )


def plan() -> None:
    """What six transformer layers keep for the backward pass, without a plan and with plans for two budgets."""
    picture = Picture()
    results = ["norm", "q, k, v", "attention", "norm", "up", "GELU", "down"]
    widths = [34, 66, 62, 34, 76, 76, 34]
    for row, (title, dropped) in enumerate(
        [
            ("no plan", [set()] * 6),
            ('budget="0.6x"', [{0, 3, 5}] * 6),
            ('budget="0.3x"', [{0, 3, 5}] + [{0, 1, 2, 3, 4, 5}] * 5),
        ]
    ):
        top = 40 + row * 106
        picture.text(14, top - 12, title, size=13)
        for layer in range(6):
            x = 14.0 + (layer % 2) * 420
            y = top + (layer // 2) * 26
            picture.text(x, y + 11, f"{layer + 1}")
            x += 14
            for index, (result, width) in enumerate(zip(results, widths)):
                picture.box(x, y, width - 2, 22, BLUE, result, dashed=index in dropped[layer])
                x += width
    picture.legend(14, 348, [(BLUE, "kept", False), (BLUE, "recomputed in the backward pass: cheap results first", True)])
    picture.write("plan.svg")


def buckets() -> None:
    """The backward pass of six layers on a rank, and the buckets beside it."""
    picture = Picture()
    left, unit = 130.0, 88.0
    for y, name in ((30, "backward pass"), (62, "bucket 1"), (94, "bucket 2"), (126, "bucket 3"), (158, "last bucket")):
        picture.text(14, y + 12, name)
    for index in range(6):
        picture.box(left + index * unit, 30, unit, 24, GRAY, f"layer {6 - index}")
    for number in range(3):
        start = left + (2 * number + 2) * unit
        picture.box(start, 62 + 32 * number, 1.3 * unit, 24, BLUE, f"layers {6 - 2 * number}, {5 - 2 * number}")
    picture.box(left + 7.3 * unit, 158, 0.7 * unit, 24, ORANGE, "flags")
    picture.box(left + 8 * unit, 30, 0.9 * unit, 24, GREEN, "step()")
    picture.legend(
        left,
        200,
        [(BLUE, "allreduce of a bucket, in the order of the first step", False), (ORANGE, "what ranks need to know", False)],
    )
    picture.write("buckets.svg")


def shards() -> None:
    """What each of four ranks holds at each stage of sharding."""
    picture = Picture()
    kinds = [("parameters", BLUE, 1), ("gradients", GREEN, 1), ("optimizer state", ORANGE, 2)]
    for stage, name in enumerate(("none", "optimizer", "gradients", "parameters")):
        left = 14 + stage * 196
        picture.text(left, 18, f'shard="{name}"', size=13)
        for rank in range(4):
            x = left + rank * 44
            picture.text(x + 20, 38, f"rank {rank}", "middle", size=11)
            y = 50.0
            for index, (_, color, size) in enumerate(kinds):
                height = 48 * size
                if stage >= 3 - index:
                    picture.box(x, y, 40, height, color, dashed=True)
                    picture.box(x, y + rank * height / 4, 40, height / 4, color)
                else:
                    picture.box(x, y, 40, height, color)
                y += height + 6
    picture.legend(14, 266, [(color, name, False) for name, color, _ in kinds] + [(GRAY, "on other ranks", True)])
    picture.write("sharding/stages.svg")


def schedules() -> None:
    """Two schedules of three stages and four micro-batches, where a backward pass takes twice as long as a forward pass."""
    picture = Picture()
    for row, name in enumerate(("gpipe", "1f1b")):
        top = 36 + row * 116
        picture.text(14, top - 14, f'schedule="{name}"', size=13)
        spans = timeline(make_schedule(name, 3, 4), [1, 1, 1], [2, 2, 2])
        for stage, actions in enumerate(spans):
            y = top + stage * 28
            picture.text(14, y + 12, f"stage {stage}")
            for action, start, end in actions:
                color = BLUE if action.kind == FORWARD else GREEN
                picture.box(74 + start * 40, y, (end - start) * 40, 24, color, str(action.micro_batch))
    picture.legend(
        74, 250, [(BLUE, "forward pass of a micro-batch", False), (GREEN, "backward pass", False)]
    )
    picture.write("schedules.svg")


if __name__ == "__main__":
    plan()
    buckets()
    shards()
    schedules()
