"""The schedule of averages: arithmetic in steps, never in time, that is the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """When each fragment of the model is averaged.

    Attributes:
        every: steps between two averages of a fragment.
        fragments: their number; they are averaged in turn, evenly spread over ``every`` steps, the last one at its end.
        delay: steps from when an average leaves to when it is applied.

    Raises:
        ValueError: a number is out of range.
    """

    every: int
    fragments: int = 1
    delay: int = 0

    def __post_init__(self) -> None:
        for name, low, high in (
            ("every", 1, None),
            ("fragments", 1, self.every),
            ("delay", 0, self.every),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ValueError(f"{name} must be a whole number of at least {low}, not {value!r}")
            if high is not None and value > high:
                raise ValueError(f"{name}={value} must be at most every={high}")

    @property
    def half(self) -> int:
        """Steps from when an average leaves to when its parts are added up and gathered."""
        return (self.delay + 1) // 2

    def leaving(self, step: int) -> list[int]:
        """The fragments whose average leaves after ``step`` steps."""
        # Four fragments in 100 steps leave after steps 25, 50, 75 and 100 of a period; the last one has the offset 0.
        offsets = (
            (1 + fragment) * self.every // self.fragments % self.every for fragment in range(self.fragments)
        )
        return [fragment for fragment, offset in enumerate(offsets) if offset == step % self.every]


def block_of(name: str) -> str:
    """The block that a parameter or buffer belongs to: its name up to the first number, else that of the outermost module."""
    parts = name.split(".")
    for position, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: position + 1])
    return parts[0]


def assign_fragments(names: Sequence[str], fragments: int) -> dict[str, int]:
    """The fragment of each parameter: the model's blocks in turn; single parameters, where there are fewer blocks than fragments.

    Names alone decide, so recomputation and plans change nothing.

    Raises:
        ValueError: there are fewer parameters than fragments.
    """
    if len(names) < fragments:
        raise ValueError(f"fragments={fragments} is more than the {len(names)} parameters of the optimizer")
    keys = {name: block_of(name) for name in names}
    if len(set(keys.values())) < fragments:
        keys = {name: name for name in names}
    order = {key: number for number, key in enumerate(dict.fromkeys(keys.values()))}
    return {name: order[key] % fragments for name, key in keys.items()}
