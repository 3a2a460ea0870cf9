"""``hvd-ckpt bench scale`` as a whole command, which records steps of four ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from hvd_ckpt.bench.command import bench
from hvd_ckpt.bench.harness.jobs import load_json
from hvd_ckpt.bench.scale.command import MODELS, RECORDED
from hvd_ckpt.bench.scale.record import Recorded
from hvd_ckpt.bench.scale.sizes import Sizes, Split

pytestmark = pytest.mark.launch


def test_what_is_recorded_is_what_follows_from_sizes(tmp_path: Path) -> None:
    modes = ["parameters", "replicas", "tensor", "fsdp2"]
    options = ["--quick", "--modes", ",".join(modes), "--np", "4,64"]
    arguments = ["scale", *options, "--output", str(tmp_path / "report")]
    result = CliRunner().invoke(bench, arguments)
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "report" / "results.json").read_text())["results"]
    assert [(row["ranks"], row["efficiency"] > 0) for row in found] == [(4, True)] * 4 + [(64, True)] * 4
    assert (tmp_path / "report" / "scale.png").exists()
    sizes = Sizes(MODELS[RECORDED], 4, 1e12)
    for mode in modes[:2]:
        recorded = load_json(Recorded, tmp_path / "report" / "jobs" / mode / "rank0.json")
        shapes = [list(trace.shapes()) for trace in (recorded.trace, sizes.trace(mode, Split(4)))]
        if mode == "replicas":
            # First messages leave in one order, a bucket's second one once its first one is here: at any time.
            shapes = [
                sorted(found, key=lambda shape: (shape[0], shape[0] == "all_gather" and shape[1]))
                for found in shapes
            ]
        (kinds, nbytes), (same_kinds, same_nbytes) = (zip(*found) for found in shapes)
        assert kinds == same_kinds
        # Parts of sums are rounded up to whole elements.
        assert nbytes == pytest.approx(same_nbytes, rel=1e-4)
        assert recorded.trace.computing > 0 and len(recorded.seconds) == 3
    recorded = load_json(Recorded, tmp_path / "report" / "jobs" / "tensor" / "rank0.json")
    assert {kind for kind, _ in recorded.trace.shapes()} == {"exchange", "allreduce"}
