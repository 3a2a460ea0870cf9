"""What ``estimate_memory`` says before there are ranks is what a step takes on them."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import hvd_ckpt as hc
from hvd_ckpt.memory import recording_marks
from hvd_ckpt.models.gpt import gpt

WITHIN = 0.05
BUCKET_CAP_MB = 0.25


def model(recompute: bool) -> torch.nn.Module:
    torch.manual_seed(0)
    return gpt(
        vocabulary=128, length=32, width=64, heads=2, layers=3, checkpoint_interval=1 if recompute else 0
    )


def batch() -> torch.Tensor:
    return torch.arange(4 * 32).view(4, 32) % 128


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.flatten(0, 1), batch().flatten())


def measured(stage: int, recompute: bool, **options: object) -> int:
    """The most bytes at a time in a job's third step, all that is held counted; of the rank that needs most."""
    tokens = batch()
    with recording_marks() as marks:
        trained = model(recompute)
        if options.pop("half", False):
            trained.bfloat16()
        optimizer = hc.DistributedOptimizer(
            torch.optim.AdamW(trained.parameters()),
            named_parameters=trained.named_parameters(),
            bucket_cap_mb=BUCKET_CAP_MB,
            shard=stage,
            **options,
        )
        for number in range(3):
            marks.mark(str(number))
            loss_of(trained(tokens)).backward()
            optimizer.step()
            optimizer.zero_grad()
        marks.mark("last")
    return max(hc.allgather_object(marks.marks[-1].peak_bytes, name="peak"))


CASES = [
    *[(stage, recompute, {}) for stage in range(4) for recompute in (False, True)],
    (1, True, {"half": True}),
    (3, True, {"offload": "optimizer"}),
    (2, True, {"wire": "int8"}),
]


@pytest.mark.parametrize(("stage", "recompute", "options"), CASES)
def test_a_step_takes_what_was_estimated(stage, recompute, options):
    half = options.get("half", False)
    estimate = hc.estimate_memory(
        model(recompute),
        hc.size(),
        stage,
        options.get("offload"),
        precision="bf16-params" if half else "fp32",
        sample=batch(),
        loss=loss_of,
        bucket_cap_mb=BUCKET_CAP_MB,
        wire=options.get("wire", "fp32"),
    )
    peak = measured(stage, recompute, **options)
    assert abs(estimate.recorded_peak / peak - 1) <= WITHIN, (estimate.recorded_peak, peak, str(estimate))
