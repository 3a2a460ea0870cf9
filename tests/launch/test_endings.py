"""An error on one rank, wherever it happens, ends all of them: its traceback is shown once, and nothing is left behind.

In the forward pass: test_rank_failure.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from controllers import HOROVODRUN, probe

SCRIPT = Path(__file__).parent / "scripts" / "fail_somewhere.py"
MARK = "HVD_CKPT_TEST_OF_ENDINGS"


@pytest.mark.parametrize("place, controller", [("writer", "gloo"), ("backward", "mpi"), ("data", "gloo")])
def test_an_error_on_one_rank_ends_all(place: str, controller: str, tmp_path: Path) -> None:
    if controller == "mpi" and not probe("mpi").works:
        pytest.skip("MPI does not work here")
    text, scratch = tmp_path / "text.txt", tmp_path / "scratch"
    text.write_bytes(bytes(range(32, 127)) * 20)
    scratch.mkdir()
    settings = f"--model gpt-tiny --model-option layers=1 --text {text} --length 16 --steps 999999 --batch 2 --snapshot-every 2"
    result = subprocess.run(
        [
            *HOROVODRUN,
            "-np",
            "2",
            f"--{controller}",
            sys.executable,
            str(SCRIPT),
            place,
            *settings.split(),
            "--output",
            str(tmp_path / "run"),
        ],
        env={
            **os.environ,
            MARK: str(tmp_path),
            "TMPDIR": str(scratch),
            "OMPI_MCA_btl_vader_backing_directory": str(scratch),  # for its shared memory
            "OMP_NUM_THREADS": "1",
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
        check=False,
    )
    assert result.returncode != 0
    lines = result.stdout.splitlines()
    assert sum(line.endswith(">:RuntimeError: planted on rank 1") for line in lines) == 1, result.stdout
    assert sum("rank 1 on host" in line and "ended by this error" in line for line in lines) == 1
    assert not [line for line in lines if "rank 0 on host" in line and "Traceback" in line]
    assert sum("rank 0 on host" in line for line in lines) <= 1
    assert sum("Traceback" in line for line in lines if ">:" in line) == 1, (
        result.stdout
    )  # horovodrun adds its own
    assert not [process for process in psutil.process_iter() if has_mark(process, tmp_path)]
    assert not [path for path in scratch.iterdir() if not path.name.startswith("torchinductor_")]
    assert [path.name for path in (tmp_path / "run" / "snapshots").iterdir() if ".tmp-" in path.name] == []


def has_mark(process: psutil.Process, folder: Path) -> bool:
    try:
        return process.environ().get(MARK) == str(folder)
    except psutil.Error:
        return False
