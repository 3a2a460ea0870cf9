"""Tests of torch_private: one file for private names of PyTorch, and one sentence if PyTorch does not fit."""

from __future__ import annotations

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


def test_private_names_are_in_one_file() -> None:
    """Benchmarks import what their peers need."""
    elsewhere = [
        f"{path}:{number}: {line}"
        for path in sorted((ROOT / "hvd_ckpt").rglob("*.py"))
        if path.name != "torch_private.py" and "bench" not in path.parts
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if PRIVATE.search(line)
    ]
    assert elsewhere == []


def test_setup_asks_for_the_oldest_version() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    oldest = ".".join(map(str, torch_private.OLDEST))
    assert f"torch>={oldest}" in setup["options"]["install_requires"].split()


def first_use(monkeypatch: pytest.MonkeyPatch) -> ImportError:
    monkeypatch.delitem(sys.modules, "hvd_ckpt.utils.torch_private")
    with pytest.raises(ImportError) as caught:
        hc.__getattr__("init")
    assert explain_import_error(caught.value) == str(caught.value)
    assert "\n" not in str(caught.value)
    return caught.value


def test_an_older_pytorch_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.4.1+cpu")
    text = str(first_use(monkeypatch))
    assert "2.4.1" in text and ".".join(map(str, torch_private.OLDEST)) in text
    assert any("2.4.1" in finding.problem for finding in doctor.of_torch(doctor.torch_facts()))


def test_a_pytorch_that_dropped_a_name_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    monkeypatch.delattr(torch._compile, "_disable_dynamo")
    text = str(first_use(monkeypatch))
    assert "2.99.0" in text and "_disable_dynamo" in text


def test_a_pytorch_that_dropped_an_attribute_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.Module, "__init__", lambda self: None)
    assert "_modules" in str(first_use(monkeypatch))
