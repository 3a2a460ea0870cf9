"""Warnings about a run are one line each; those about code are as Python prints them."""

from __future__ import annotations

import warnings

import pytest

from hvd_ckpt.utils import run_warnings


def test_a_warning_about_a_run_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        # pytest records warnings in place of printing them.
        warnings.showwarning = lambda *of: print(warnings.formatwarning(*of[:4]), end="")
        run_warnings.warn("the disk is full")
        warnings.warn("a mistake in code", stacklevel=1)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "Warning: the disk is full"
    assert "UserWarning: a mistake in code" in printed[1] and __file__ in printed[1]
