"""Everything that runs on a GPU, each in processes of its own; :mod:`gpu.checks` has what they do."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import pytest
from gpu.machine import run_command
from gpu.session import Session

from hvd_ckpt.app.compare.runner.jobs import JobError, rank_environment

pytestmark = [pytest.mark.launch, pytest.mark.gpu]

COMPARE = "--quick --engines hvd_ckpt,horovod,ddp --workloads nothing --scenarios plain,tied --variants none,non-reentrant"


@dataclass(frozen=True)
class Check:
    """A function of :mod:`gpu.checks` with numbers that it takes, a time limit, and what :meth:`Session.need` must find.

    Its bits must be those of the check ``bits_of``. It runs on one rank, or on the ``least`` of ranks and more, which share GPUs if
    there are fewer; those that are not ``dry`` on GPUs only.
    """

    name: str
    function: str
    seconds: float
    needs: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    bits_of: str = ""
    least: int = 1
    dry: bool = True


def of_ranks(name: str, function: str, seconds: float, *needs: str, least: int = 2, **more: object) -> Check:
    return Check(name, function, seconds, ("ranks", *needs), least=least, **more)


NVLS = {"NCCL_NVLS_ENABLE": "1"}
CHECKS = (
    Check("operations", "operations", 120, dry=False),
    Check("stages", "divided:1,1", 180, dry=False),
    Check("replicas", "replicas", 120, dry=False),
    Check("sanitizer", "sanitized", 240, ("GPU",), environment={"TORCH_CUDA_SANITIZER": "1"}),
    Check("offload", "offload", 180),
    Check("snapshot", "snapshot", 180),
    Check("planner", "planner", 300),
    Check("overflow", "overflow", 120),
    Check("ddp", "ddp", 180, dry=False),
    of_ranks("operations of ranks", "operations", 120),
    of_ranks("stages of ranks", "divided:1,1", 240),
    of_ranks("replicas of ranks", "replicas", 120, bits_of="replicas"),
    of_ranks("batchnorm of ranks", "batchnorm", 120),
    of_ranks("pipeline of ranks", "divided:0,1", 240),
    of_ranks("parts of ranks", "divided:1,0", 180, dry=False),
    of_ranks("parts and replicas", "divided:1,2", 240, least=4, dry=False),
    of_ranks("stages and replicas", "divided:2,1", 240, least=4, dry=False),
    of_ranks("stages, parts and replicas", "divided:2,2", 300, least=8),
    of_ranks("ddp of ranks", "ddp", 180, "NCCL"),
    of_ranks("overlap", "overlap", 180, "GPU", "NCCL"),
    of_ranks("sums", "repeated_sums", 120, "NCCL"),
    of_ranks("sums with NVLS", "repeated_sums", 120, "GPU", "NCCL", environment=NVLS),
)


@contextlib.contextmanager
def failing_in_one_line() -> Iterator[None]:
    """Of an assertion on a rank, without the type of its error, which repeats the verdict."""
    try:
        yield
    except (JobError, OSError) as error:
        pytest.fail(str(error).removeprefix("AssertionError: "), pytrace=False)


def test_machine(gpu: Session, record_property: pytest.FixtureRequest) -> None:
    """The GPUs, their driver and libraries, PyTorch and Horovod."""
    record_property("facts", gpu.facts)
    with failing_in_one_line():
        record_property("found", gpu.look())


def test_build(gpu: Session, record_property: pytest.FixtureRequest) -> None:
    """Horovod is built for these GPUs."""
    if not gpu.torch or "error" in gpu.torch:
        pytest.skip("PyTorch does not load")
    record_property("facts", gpu.facts)
    with failing_in_one_line():
        record_property("found", gpu.build(900))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_check(gpu: Session, check: Check, record_property: pytest.FixtureRequest) -> None:
    if gpu.device == "cpu" and not check.dry:
        pytest.skip("in a dry run another check does the same")
    with failing_in_one_line():
        if not gpu.torch:
            gpu.look()
        ranks = max(gpu.ranks, check.least) if check.least > 1 else 1
        gpu.need(*check.needs, ranks=ranks)
        record_property("ranks", ranks)
        outcome = gpu.run(check.function, check.name, check.seconds, ranks, check.environment)
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
    with failing_in_one_line():
        if not gpu.torch:
            gpu.look()
        gpu.need()
        folder = gpu.jobs / "compare" / "report"
        words = f"compare {COMPARE} --np {gpu.gpus} --device cuda --output".split()
        command = [sys.executable, "-m", "hvd_ckpt.app.cli.main", *words, str(folder)]
        run_command(command, gpu.log("compare"), rank_environment(), gpu.left(300))
    record_property("found", f"this library is right in every cell: {folder / 'report.md'}")
