"""Tests of torch_private: one file for private names of PyTorch, and one sentence if PyTorch does not fit."""

import configparser
import re
import sys
from pathlib import Path

import pytest
import torch
import torch._compile

import hvd_ckpt as hc
from hvd_ckpt.app.cli import doctor
from hvd_ckpt.utils import torch_private
from hvd_ckpt.utils.extras import explain_import_error

ROOT = Path(__file__).resolve().parents[2]
PRIVATE = re.compile(r"\btorch(\.\w+)*\._(?!_)\w+|from torch[\w.]* import \(?[^)\n]*(?<!as )\b_(?!_)\w+")
OLDEST = ".".join(map(str, torch_private.OLDEST))


def test_private_names_are_in_one_file_and_setup_asks_for_the_oldest_version():
    """Benchmarks import what their peers need."""
    elsewhere = [
        f"{path}:{number}: {line}"
        for path in sorted((ROOT / "hvd_ckpt").rglob("*.py"))
        if path.name != "torch_private.py" and "bench" not in path.parts
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if PRIVATE.search(line)
    ]
    assert elsewhere == []
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert f"torch>={OLDEST}" in setup["options"]["install_requires"].split()


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda patch: patch.setattr(torch, "__version__", "2.4.1+cpu"), ["2.4.1", OLDEST]),
        (lambda patch: patch.delattr(torch._compile, "_disable_dynamo"), ["2.99.0", "_disable_dynamo"]),
        (lambda patch: patch.setattr(torch.nn.Module, "__init__", lambda self: None), ["_modules"]),
    ],
    ids=["an older one", "one without a name", "one without an attribute"],
)
def test_a_pytorch_that_does_not_fit_is_one_sentence(monkeypatch, spoil, says):
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    spoil(monkeypatch)
    monkeypatch.delitem(sys.modules, "hvd_ckpt.utils.torch_private")
    with pytest.raises(ImportError) as caught:
        hc.__getattr__("init")
    said = str(caught.value)
    assert all(one in said for one in says) and "\n" not in said
    assert explain_import_error(caught.value) == said
    if OLDEST in says:
        assert any("2.4.1" in finding.problem for finding in doctor.of_torch(doctor.torch_facts()))
