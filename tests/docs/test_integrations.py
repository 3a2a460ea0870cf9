"""The scripts of the pages on Lightning and Transformers run as they are written there."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

import hvd_ckpt as hc

pytestmark = pytest.mark.ranks(gloo=(2,))

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize("page, needs", [("lightning", "lightning"), ("transformers", "accelerate")])
def test_the_script_of_a_page(
    page: str,
    needs: str,
    folder: Path,
    quick_planner: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip(needs, reason=f"{needs} is not installed")
    monkeypatch.chdir(folder)
    for name in (
        "PL_GLOBAL_SEED",
        "PL_SEED_WORKERS",
    ):  # seed_everything() leaves them set, for all tests after this one
        monkeypatch.setenv(name, "0")
    block = re.search(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(), re.DOTALL)
    assert block is not None
    script = folder / f"train{hc.rank()}.py"
    script.write_text(block.group(1))
    runpy.run_path(str(script), run_name="__main__")
    losses = re.findall(r"^(?:val_)?loss ([\d.]+)", capsys.readouterr().out, re.MULTILINE)
    assert len(losses) == (hc.rank() == 0)
    assert all(float(loss) < (0.7 if page == "lightning" else 5.5) for loss in losses)
