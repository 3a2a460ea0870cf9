"""The scripts of the documentation run as they are written there; that of a loop of one's own resumes in the same bits."""

from __future__ import annotations

import re
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from same import assert_same

import hvd_ckpt as hc

pytestmark = pytest.mark.ranks(gloo=(2,))

ROOT = Path(__file__).resolve().parents[2]


def scripts_of(page: str, heading: str = "") -> list[str]:
    """The scripts of a page, from a heading on."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text[text.index(heading) :], re.DOTALL)


OWN_LOOP = scripts_of("docs/own-loop.md")


@pytest.mark.parametrize(
    "page, heading, needs, losses, most",
    [
        ("README.md", "## Training script", "torch", 5, 1.0),  # ten classes: 2.3 before training
        ("docs/lightning.md", "", "lightning", 1, 0.7),
        ("docs/transformers.md", "", "accelerate", 1, 5.5),
    ],
)
def test_a_script_trains_and_rank_0_alone_tells_of_it(
    page, heading, needs, losses, most, folder, quick_planner, capsys, monkeypatch
) -> None:
    pytest.importorskip(needs, reason=f"{needs} is not installed")
    monkeypatch.chdir(folder)
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # which seed_everything() leaves set
        monkeypatch.setenv(name, "0")
    script = folder / f"train{hc.rank()}.py"
    script.write_text(scripts_of(page, heading)[0])
    runpy.run_path(str(script), run_name="__main__")
    found = re.findall(r"(?:^|\s)(?:val_)?loss ([\d.]+)", capsys.readouterr().out)
    assert len(found) == (losses if hc.rank() == 0 else 0)
    assert all(float(loss) < most for loss in found)


def test_the_script_resumes_in_the_same_bits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = folder / "train.py"
    if hc.rank() == 0:
        script.write_text(OWN_LOOP[0], encoding="utf-8")
        (folder / "stopped").mkdir()
        (folder / "whole").mkdir()
    hc.barrier()

    def stop(*_: object) -> None:
        signal.raise_signal(signal.SIGTERM)

    statuses: list[int] = []
    monkeypatch.setattr(sys, "exit", statuses.append)

    def run(name: str, **names: Any) -> dict[str, Any]:
        monkeypatch.chdir(folder / name)
        variables = runpy.run_path(str(script), init_globals=names, run_name="__main__")
        hc.barrier()
        return variables

    whole = run("whole")
    stopped = run("stopped", print=stop)  # rank 0 prints at step 20
    resumed = run("stopped")
    assert statuses == [0, 128 + signal.SIGTERM, 0]
    assert stopped["stop"] == "SIGTERM" and 20 <= stopped["step"] < whole["step"] == resumed["step"]
    assert any((folder / "stopped" / "plans").iterdir())
    assert_same(resumed["model"].state_dict(), whole["model"].state_dict())


def test_the_settings_for_a_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = folder / f"train{hc.rank()}.py"
    before, after = re.split(r"# 3\..*?(?=# 5\.)", OWN_LOOP[0], flags=re.DOTALL)
    script.write_text(before + OWN_LOOP[1] + after, encoding="utf-8")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "exit", lambda status: None)
    found = runpy.run_path(str(script), run_name="__main__")
    assert (found["shard"], found["step"]) == ("optimizer", 84)
    assert 0 < found["plan"].measured.peak_bytes <= found["rest"] < found["memory"]
