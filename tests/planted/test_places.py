"""Tests that all planted faults have a place, and their commands tests: code that moves takes them along."""

import ast
import re
import runpy
import shlex
from pathlib import Path

HERE = Path(__file__).resolve().parent
RUN = runpy.run_path(str(HERE / "run.py"))
FAULTS = list(RUN["faults"]())


def test_each_fault_can_be_planted():
    for fault in FAULTS:
        wrong = RUN["planted"](fault, (HERE.parents[1] / fault.file).read_text())
        assert wrong is not None, f"{fault.file} has no place for: {fault.what}"
        if fault.file.endswith(".py"):
            ast.parse(wrong)


def test_each_command_names_tests_that_are_there():
    for command in {fault.command for fault in FAULTS}:
        words = shlex.split(command)
        files = [HERE.parents[1] / word for word in words if word.startswith("tests/")]
        assert files and all(file.is_file() for file in files), command
        texts = " ".join(beside.read_text() for file in files for beside in file.parent.glob("*.py"))
        chosen = re.findall(r"\w+", words[words.index("-k") + 1]) if "-k" in words else []
        assert all(word in texts for word in chosen if word not in ("and", "or", "not")), command
