"""The memory that a training step takes on a rank, part by part, as a table."""

from __future__ import annotations

from dataclasses import dataclass, field

from hvd_ckpt.sharding import STAGES
from hvd_ckpt.text import show_bytes

PARTS = (
    "parameters",
    "buffers",
    "gradients",
    "optimizer_state",
    "master_weights",
    "activations",
    "buckets",
    "temporaries",
)
_WHEN = {
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "step": "in the optimizer's step",
    "gather": "as parameters are gathered after the step",
}


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that a training step takes on a rank, on the one that needs most; see :func:`hvd_ckpt.estimate_memory`.

    Attributes:
        ranks: number of ranks.
        stage: 0 to 3, what is split over them.
        offload: None or ``"optimizer"``.
        parameters: weights that are there all the time: all of them, or (stage 3) this rank's shard; with the padding of shards.
        buffers: of the model, such as running statistics.
        gradients: when all of them are reduced: whole, or (stages 2 and 3) this rank's shard.
        optimizer_state: of this rank's shard; 0 where it is offloaded.
        master_weights: float32 copies of half-precision weights; 0 where they are offloaded.
        activations: the most that forward and backward pass hold, gradients not counted; None if there was no sample.
        buckets: the most that communication holds: gradients waiting for their bucket, buffers on their way, and (stage 3)
            parameters that are gathered for a while.
        temporaries: the most that the optimizer's step allocates for a while.
        offloaded: bytes of optimizer state and master weights that are kept elsewhere (pinned host memory, files).
        peak: the most that is held at one time. Less than the sum of all parts, which are not at their highest together.
        peak_phase: when that is: ``"forward"``, ``"backward"``, ``"step"``, or ``"gather"`` (of stepped parameters).
        at_peak: what each part holds then; its values add up to the peak.
        recorded_peak: the most that is held at one time without what Horovod's own threads allocate (the results of gathers and
            alltoalls until they are copied): what :func:`hvd_ckpt.memory.recording_peak` sees on a CPU.
    """

    ranks: int
    stage: int
    offload: str | None
    parameters: int
    buffers: int
    gradients: int
    optimizer_state: int
    master_weights: int
    activations: int | None
    buckets: int
    temporaries: int
    offloaded: int
    peak: int
    peak_phase: str
    at_peak: dict[str, int] = field(default_factory=dict)
    recorded_peak: int = 0

    @property
    def model_state(self) -> int:
        """Parameters, gradients, optimizer state and master weights together."""
        return self.parameters + self.gradients + self.optimizer_state + self.master_weights

    def table(self) -> str:
        """The parts and the peak as lines of text."""
        split = STAGES[self.stage] if self.stage else "nothing"
        head = f"shard {self.stage} ({split} split), {self.ranks} rank{'s' if self.ranks > 1 else ''}"
        if self.offload:
            head += f", {self.offload} offloaded"
        rows = [("per rank", "at most", "at the peak")]
        for name in PARTS:
            most = getattr(self, name)
            shown = "not known" if most is None else show_bytes(most)
            rows.append((name.replace("_", " "), shown, show_bytes(self.at_peak.get(name, 0))))
        if self.offloaded:
            rows.append(("offloaded", show_bytes(self.offloaded), ""))
        rows.append((f"peak, {_WHEN[self.peak_phase]}", "", show_bytes(self.peak)))
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [
            f"{name:<{widths[0]}}  {most:>{widths[1]}}  {then:>{widths[2]}}".rstrip()
            for name, most, then in rows
        ]
        if self.activations is None:
            lines.append("The peak is without activations: no sample batch was given.")
        return "\n".join([head, *lines])

    def __str__(self) -> str:
        return self.table()
