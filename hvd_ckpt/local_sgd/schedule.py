"""The schedule of averages: arithmetic in steps, never in time, that is the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Moments = str | Mapping[str, int]


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
        place = step % self.every
        return [fragment for fragment in range(self.fragments) if self._offset(fragment) == place]

    def turn(self, fragment: int, step: int) -> int:
        """Number of averages of a fragment that have left after ``step`` steps."""
        # With every=100 and offset 25 a fragment leaves after steps 25, 125, ..., of which the first would
        # count as 0. With offset 0 it leaves after steps 100, 200, ..., which count as 1, 2, ...
        return (step - self._offset(fragment)) // self.every + (1 if self._offset(fragment) else 0)

    def _offset(self, fragment: int) -> int:
        # Four fragments in 100 steps leave after steps 25, 50, 75 and 100 of a period; the last one has the offset 0.
        return (fragment + 1) * self.every // self.fragments % self.every


def check_moments(moments: object, every: int) -> None:
    """Checks the argument ``moments``.

    Raises:
        ValueError: it is neither ``"local"``, ``"average"`` nor periods by name, or a period is no multiple of ``every``.
    """
    if isinstance(moments, str) and moments in ("local", "average"):
        return
    if not isinstance(moments, Mapping) or not all(isinstance(name, str) for name in moments):
        raise ValueError(
            f"moments must be 'local', 'average', or steps by name such as {{'exp_avg': {3 * every}}}, not {moments!r}"
        )
    for name, period in moments.items():
        if isinstance(period, bool) or not isinstance(period, int) or period < 1 or period % every:
            raise ValueError(f"moments[{name!r}] must be a multiple of every={every}, not {period!r}")


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
