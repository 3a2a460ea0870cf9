"""A test that all planted faults have a place: code that moves takes them along."""

import ast
import runpy
from pathlib import Path

HERE = Path(__file__).resolve().parent


def test_each_fault_can_be_planted():
    run = runpy.run_path(str(HERE / "run.py"))
    for fault in run["faults"]():
        wrong = run["planted"](fault, (HERE.parents[1] / fault.file).read_text())
        assert wrong is not None, f"{fault.file} has no place for: {fault.what}"
        if fault.file.endswith(".py"):
            ast.parse(wrong)
