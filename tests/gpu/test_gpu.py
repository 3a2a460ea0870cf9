"""Everything that runs on a GPU, each in processes of its own; :mod:`gpu.checks` and :mod:`gpu.ranks` have what they do."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from gpu.machine import run_command
from gpu.session import Session

from hvd_ckpt.app.compare.runner.jobs import JobError, rank_environment

pytestmark = [pytest.mark.launch, pytest.mark.gpu]

COMPARE = "--quick --engines hvd_ckpt,horovod,ddp --workloads nothing --scenarios plain,tied --variants none,non-reentrant"


@dataclass(frozen=True)
class Check:
    """A check on ranks.

    Attributes:
        function: the module and function that they run, and numbers that it takes.
        seconds: its time limit.
        needs: as in :meth:`Session.need`.
        several: whether it runs on several ranks.
        environment: further variables of its ranks.
        bits_of: the check whose bits must be the same.
        least: of ranks, which share GPUs if there are fewer.
        dry: whether a dry run on the CPU has it.
    """

    name: str
    function: str
    seconds: float
    needs: tuple[str, ...] = ()
    several: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    bits_of: str = ""
    least: int = 2
    dry: bool = True


def _of_ranks(name: str, function: str, seconds: float, *needs: str, **more: object) -> Check:
    return Check(name, function, seconds, ("ranks", *needs), True, **more)


CHECKS = (
    Check("operations", "checks.operations", 120, dry=False),
    Check("optimizer", "checks.optimizer", 120, dry=False),
    Check("stages", "ranks.divided:1,1", 180, dry=False),
    Check("replicas", "ranks.replicas", 120, dry=False),
    Check("sanitizer", "checks.sanitized", 240, ("GPU",), environment={"TORCH_CUDA_SANITIZER": "1"}),
    Check("offload", "checks.offload", 180),
    Check("snapshot", "checks.snapshot", 180),
    Check("planner", "checks.planner", 300),
    Check("overflow", "checks.overflow", 120),
    Check("ddp", "checks.ddp", 180, dry=False),
    _of_ranks("operations of ranks", "checks.operations", 120),
    _of_ranks("optimizer of ranks", "checks.optimizer", 180),
    _of_ranks("stages of ranks", "ranks.divided:1,1", 240),
    _of_ranks("replicas of ranks", "ranks.replicas", 120, bits_of="replicas"),
    _of_ranks("batchnorm of ranks", "ranks.batchnorm", 120),
    _of_ranks("pipeline of ranks", "ranks.divided:0,1", 240),
    _of_ranks("parts of ranks", "ranks.divided:1,0", 180, dry=False),
    _of_ranks("parts and replicas", "ranks.divided:1,2", 240, least=4, dry=False),
    _of_ranks("stages and replicas", "ranks.divided:2,1", 240, least=4, dry=False),
    _of_ranks("stages, parts and replicas", "ranks.divided:2,2", 300, least=8),
    _of_ranks("ddp of ranks", "checks.ddp", 180, "NCCL"),
    _of_ranks("overlap", "ranks.overlap", 180, "GPU", "NCCL"),
    _of_ranks("sums", "ranks.repeated_sums", 120, "NCCL"),
    _of_ranks(
        "sums with NVLS", "ranks.repeated_sums", 120, "GPU", "NCCL", environment={"NCCL_NVLS_ENABLE": "1"}
    ),
)


def failed(error: Exception) -> None:
    """Fails the test in one line. A rank writes the type of its error in front, which repeats the verdict."""
    pytest.fail(str(error).removeprefix("Failed: "), pytrace=False)


def test_machine(gpu: Session, record_property: pytest.FixtureRequest) -> None:
    """The GPUs, their driver and libraries, PyTorch and Horovod."""
    try:
        record_property("found", gpu.look())
    except (JobError, OSError) as error:
        failed(error)
    finally:
        record_property("facts", gpu.facts)


def test_build(gpu: Session, record_property: pytest.FixtureRequest) -> None:
    """Horovod is built for these GPUs."""
    if not gpu.builds.torch or "error" in gpu.builds.torch:
        pytest.skip("PyTorch does not load")
    try:
        record_property("found", gpu.build(900))
    except (JobError, OSError) as error:
        failed(error)
    finally:
        record_property("facts", gpu.facts)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_check(gpu: Session, check: Check, record_property: pytest.FixtureRequest) -> None:
    if gpu.device == "cpu" and not check.dry:
        pytest.skip("in a dry run another check does the same")
    if not gpu.builds.torch:
        gpu.look()
    ranks = max(gpu.ranks, check.least) if check.several else 1
    gpu.need(*check.needs, ranks=ranks)
    record_property("ranks", ranks)
    try:
        outcome = gpu.run(check.function, check.name, check.seconds, ranks, check.environment)
    except (JobError, OSError) as error:
        failed(error)
        return
    if outcome.skipped:
        pytest.skip(outcome.text)
    record_property("found", outcome.text)
    record_property("values", outcome.values)
    if "digest" in outcome.values:
        gpu.digests[check.name] = outcome.values["digest"]
    expected = gpu.digests.get(check.bits_of)
    assert expected in (None, gpu.digests.get(check.name)), f"the bits differ from those of '{check.bits_of}'"


def test_compare(gpu: Session, record_property: pytest.FixtureRequest) -> None:
    """A small ``hvd-ckpt compare``."""
    if gpu.device == "cpu":
        pytest.skip("on the CPU it has tests of its own")
    if not gpu.builds.torch:
        gpu.look()
    gpu.need()
    folder = gpu.jobs / "compare" / "report"
    words = ["compare", *COMPARE.split(), "--np", str(gpu.gpus), "--device", "cuda", "--output", str(folder)]
    command = [sys.executable, "-m", "hvd_ckpt.app.cli.main", *words]
    try:
        run_command(command, gpu.log("compare"), rank_environment(), gpu.left(300))
    except (JobError, OSError) as error:
        failed(error)
    record_property("found", f"this library is right in every cell: {folder / 'report.md'}")
