"""Supervised jobs: when they are launched again, with what settings, how they are stopped. Launchers here are shell scripts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from hvd_ckpt.app.cli.train import train
from hvd_ckpt.app.training import supervise as supervision
from hvd_ckpt.app.training.supervise import Commands, supervise
from hvd_ckpt.snapshots.stopping import SIGNALS


class Job:
    """A run's folder, and a launcher that notes each launch and does what the script says, with the folder in $RUN."""

    def __init__(self, folder: Path, script: str) -> None:
        self.run = folder / "run"
        self.run.mkdir()
        self._notes = folder / "notes"
        self._script = folder / "launcher.sh"
        self._script.write_text(f'RUN={self.run}\necho "$@" >>{self._notes}\n{script}\n')
        self.launcher = ["sh", str(self._script)]

    def supervise(self, max_restarts: int, grace: float = 20.0, resumed: bool = False) -> int:
        again = f"--resume={self.run}" if resumed else "--again"
        commands = Commands(self.launcher, ["--first"], [again], self.run, resumed)
        return supervise(commands, max_restarts, grace)

    def launches(self) -> list[str]:
        """The last word of each launch: the settings."""
        return [line.split()[-1] for line in self._notes.read_text().splitlines()]


@pytest.fixture(autouse=True)
def _signals_are_heeded() -> Iterator[None]:
    """Signals that are ignored where the tests were started, as by nohup or ``&`` in a script, stay ignored in a job."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_job_that_dies_is_resumed_until_it_is_done(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    orphan = (
        "setsid sh -c 'echo $$ >$RUN/../orphan; exec sleep 60' & while [ ! -s $RUN/../orphan ]; do :; done"
    )
    job = Job(
        tmp_path,
        "if test -e $RUN/config.yaml; then kill -0 $(cat $RUN/../orphan) 2>/dev/null && exit 9; exit 0; fi; "
        f"export RUN; touch $RUN/config.yaml; {orphan}; kill -9 $$",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervision, "LEFT_OVER_SECONDS", 0.3)  # for what outlives the launcher
        assert job.supervise(max_restarts=3) == 0
    assert job.launches() == ["--first", "--again"]
    line = "hvd-ckpt: the job ended (exit status 137, SIGKILL); restart 1 of 3 from the beginning\n"
    assert capfd.readouterr().err == line


def test_the_number_of_restarts_is_limited(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    job = Job(tmp_path, "touch $RUN/config.yaml; exit 7")
    assert job.supervise(max_restarts=1) == 7
    assert job.launches() == ["--first", "--again"]
    last = capfd.readouterr().err.splitlines()[-1]
    assert f"launched again 1 times; `hvd-ckpt train --resume {job.run}` resumes" in last


def test_a_job_that_died_before_its_first_step_begins_anew(tmp_path: Path) -> None:
    job = Job(
        tmp_path, "ls $RUN/* >/dev/null 2>&1 && exit 2; mkdir $RUN/snapshots; touch $RUN/plan.json; exit 1"
    )
    assert job.supervise(max_restarts=1) == 1  # and not 2, of a folder that is in use
    assert job.launches() == ["--first", "--first"]


def test_a_run_resumed_from_an_older_snapshot_uses_it_until_it_has_its_own(tmp_path: Path) -> None:
    """The later snapshots of the run are removed one by one when it has: it may be killed meanwhile."""
    job = Job(tmp_path, "test $(wc -l <$RUN/../notes) -lt 2 || mkdir -p $RUN/snapshots/step-00000003; exit 1")
    (job.run / "snapshots" / "step-00000004").mkdir(parents=True)
    (job.run / "config.yaml").touch()
    assert job.supervise(max_restarts=2, resumed=True) == 1
    assert job.launches() == ["--first", "--first", f"--resume={job.run}/snapshots/step-00000003"]


@pytest.mark.parametrize(
    "script, status, reason",
    [
        ("echo 'step 7: the loss is nan' >$RUN/failure.txt; exit 3", 1, "step 7: the loss is nan"),
        ("exit 2", 2, "invalid setting or command"),
        ("touch $RUN/stop; exit 3", 3, "stop' asked for a stop"),
    ],
)
def test_a_job_that_would_end_the_same_way_is_not_launched_again(
    script: str, status: int, reason: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job = Job(
        tmp_path, f"touch $RUN/config.yaml; test ! -e $RUN/failure.txt -a ! -e $RUN/stop || exit 9; {script}"
    )
    (job.run / "failure.txt").write_text("of another day\n")
    (job.run / "stop").touch()
    assert job.supervise(max_restarts=5) == status
    assert job.launches() == ["--first"]
    said = capfd.readouterr().err
    assert "not launched again: " in said and said.endswith(f"{reason}\n")
    assert not (job.run / "stop").exists()


def test_a_folder_in_which_nothing_began_can_be_used_again(tmp_path: Path) -> None:
    job = Job(tmp_path, "echo 'there is no such model' >$RUN/failure.txt; exit 1")
    assert job.supervise(max_restarts=5) == 1
    assert job.launches() == ["--first"] and not list(job.run.iterdir())


@pytest.mark.parametrize("name", ["TERM", "USR1"])
def test_a_signal_asks_for_a_stop_and_ends_the_restarts(name: str, tmp_path: Path) -> None:
    obey = "while [ ! -e $RUN/stop ]; do sleep 0.02; done; rm $RUN/stop"
    # Asked for in vain at first: a job that has just begun takes the file for one of the job before.
    job = Job(
        tmp_path,
        f"touch $RUN/config.yaml; kill -{name} $PPID; {obey}; {obey}; echo obeyed >>$RUN/../notes; exit 1",
    )
    assert job.supervise(max_restarts=5) == 128 + getattr(signal, f"SIG{name}")
    assert job.launches() == ["--first", "obeyed"]
    assert not (job.run / "stop").exists()


@pytest.mark.parametrize("begun", [True, False])
def test_a_job_that_cannot_be_asked_is_told_by_a_signal(
    begun: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "LAUNCHER_SECONDS", 2.0)
    begin = "touch $RUN/config.yaml;" if begun else ""
    note = "trap 'test -e $RUN/stop && echo asked >>$RUN/../notes; exit 0' TERM"
    job = Job(tmp_path, f"{begin} {note}; kill -TERM $PPID; sleep 20 & wait; exit 1")
    assert job.supervise(max_restarts=5, grace=0.2 if begun else 2) == 143
    assert job.launches() == (["--first", "asked"] if begun else ["--first"])


def test_the_job_ends_with_its_supervisor(tmp_path: Path) -> None:
    job = Job(tmp_path, "trap 'touch $RUN/told; exit' TERM; touch $RUN/config.yaml; sleep 20 & wait")
    program = (
        "import sys; from pathlib import Path; from hvd_ckpt.app.training.supervise import Commands, supervise\n"
        "supervise(Commands(sys.argv[2:], [], [], Path(sys.argv[1]), False), 3, 20.0)"
    )
    command = [sys.executable, "-c", program, str(job.run), *job.launcher]
    supervisor = subprocess.Popen(command, start_new_session=True)
    try:
        _wait_for(job.run / "config.yaml")
        supervisor.kill()
        _wait_for(job.run / "told")
    finally:
        supervisor.kill()
        supervisor.wait()


def _wait_for(path: Path) -> None:
    limit = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < limit, f"{path.name} did not come"
        time.sleep(0.02)


SETTINGS = ["--model=gpt-tiny", "--model-option=layers=2", "--model-option=width=32", "--tensorboard"]


def test_the_job_gets_the_settings_and_a_folder(tmp_path: Path) -> None:
    job = Job(tmp_path, 'printf "%s\\n" "$@" >$RUN/../words')
    (tmp_path / "run.yaml").write_text(f"output: {tmp_path / 'new'}\nsteps: 5\n")
    command = [str(tmp_path / "run.yaml"), *SETTINGS, "--lr", "1e-4", "--launcher", " ".join(job.launcher)]
    result = CliRunner().invoke(train, command)
    assert result.exit_code == 0, result.output
    words = (tmp_path / "words").read_text().splitlines()
    expected = [str(tmp_path / "run.yaml"), "--model=gpt-tiny", "--model-option=layers=2"]
    expected += ["--model-option=width=32", "--lr=1e-4", "--tensorboard", f"--output={tmp_path / 'new'}"]
    assert "HVD_CKPT_SUPERVISED=1" in words
    assert sorted(words[words.index("train") + 1 :]) == sorted(expected)
    assert (tmp_path / "new").is_dir()


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--np", "2", "--launcher", "sh"], "np 2 cannot be used with launcher sh"),
        (["--launcher", "no-such-launcher -np 2"], "there is no command 'no-such-launcher' here"),
        (["--launcher", "sh 'x"], "--launcher 'sh 'x': no closing quotation"),
        (["--np", "2", "--resume", "nowhere"], "cannot read the configuration 'nowhere/config.yaml'"),
        (["--max-restarts", "many"], "'many' is not a valid integer"),
        (["--max-restarts", "1", "--output", "."], "output: the folder '.' is not empty"),
    ],
)
def test_invalid_commands_are_one_line(arguments: list[str], said: str) -> None:
    _fails([*SETTINGS, *arguments], said)


def test_supervision_inside_a_launcher_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    _fails([*SETTINGS, "--max-restarts", "1"], "OMPI_COMM_WORLD_RANK is set")


def _fails(arguments: list[str], said: str) -> None:
    before = sorted(os.listdir())
    result = CliRunner().invoke(train, arguments)
    assert result.exit_code == 2
    assert result.output.startswith("Error: ") and result.output.count("\n") == 1
    assert said in result.output
    assert sorted(os.listdir()) == before
