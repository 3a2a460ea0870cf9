"""An error, wherever it happens, ends all ranks; its traceback, of `hvd-ckpt train` or a script, is shown once; nothing is left."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import psutil
import pytest
from controllers import HOROVODRUN, probe, run_ranks, start_ranks

pytestmark = pytest.mark.launch

SCRIPT = Path(__file__).resolve().parents[1] / "helpers" / "scripts" / "fail_somewhere.py"
UNCAUGHT = SCRIPT.with_name("uncaught.py")
MARK = "HVD_CKPT_TEST_OF_ENDINGS"


@pytest.mark.parametrize(
    "place, controller, layout", [("writer", "gloo", []), ("backward", "mpi", ["--pipeline=2"])]
)
def test_an_error_on_one_rank_ends_all(
    place: str, controller: str, layout: list[str], tmp_path: Path
) -> None:
    if controller == "mpi" and not probe("mpi").works:
        pytest.skip("MPI does not work here")
    text, scratch = tmp_path / "text.txt", tmp_path / "scratch"
    text.write_bytes(bytes(range(32, 127)) * 20)
    scratch.mkdir()
    settings = "--model gpt-tiny --model-option layers=1 --sequence-length 16 --steps 999999 --batch 2"
    settings += f" --snapshot-every 2 --data text:{text} --output {tmp_path / 'run'}"
    environment = {
        MARK: str(tmp_path),
        "TMPDIR": str(scratch),
        "OMPI_MCA_btl_vader_backing_directory": str(scratch),  # for its shared memory
    }
    words = [place, *settings.split(), *layout]
    status, output = run_ranks(2, SCRIPT, *words, controller=controller, **environment)
    assert status != 0
    lines = output.splitlines()
    assert sum(line.endswith(">:RuntimeError: planted on rank 1") for line in lines) == 1, output
    assert sum("rank 1 on host" in line and "ended by this error" in line for line in lines) == 1
    of_other = [line for line in lines if "rank 0 on host" in line]
    assert len(of_other) <= 1 and "Traceback" not in "".join(of_other)
    tracebacks = [line for line in lines if ">:" in line and "Traceback" in line]  # horovodrun adds its own
    assert len(tracebacks) == 1, output
    started = [process for process in psutil.process_iter() if has_mark(process, tmp_path)]
    assert not psutil.wait_procs(started, timeout=60)[1]  # mpirun does not wait for ranks that it has killed
    assert not [path for path in scratch.iterdir() if not path.name.startswith("torchinductor_")]
    assert [path.name for path in (tmp_path / "run" / "snapshots").iterdir() if ".tmp-" in path.name] == []


def has_mark(process: psutil.Process, folder: Path) -> bool:
    try:
        return process.environ().get(MARK) == str(folder)
    except psutil.Error:
        return False


def said_by_ranks(job: subprocess.Popen[str]) -> str:
    """What the ranks of a job that failed said, without the launcher's tags and its own traceback."""
    output, _ = job.communicate(timeout=300)
    assert job.returncode != 0, output
    output = re.sub(r"\[(1,)?\d\]<std(out|err)>:", "", output)
    return output.partition('Traceback (most recent call last):\n  File "' + HOROVODRUN[-1])[0]


def test_an_error_of_several_ranks_of_a_script_is_shown_once_and_another_one_too() -> None:
    """A hook of one's own hears every rank."""
    with start_ranks(3, UNCAUGHT, "differ") as differ, start_ranks(2, UNCAUGHT, "hook") as hook:
        said, heard = said_by_ranks(differ), said_by_ranks(hook)
    assert said.count("Traceback (most recent call last)") == 2, said
    assert said.count("KeyError: 'planted on the last rank'") == 1
    assert len(re.findall(r"(?m)^rank 2 on host .+: ended by this error:$", said)) == 1, said
    assert said.count("ValueError: planted on ranks") == 2
    others = re.findall(r"(?m)^rank [01] on host .+: ended by the same error: ValueError: planted", said)
    assert len(others) == 1
    assert heard.count("own hook: planted on ranks") == 2 and "Traceback" not in heard, heard
