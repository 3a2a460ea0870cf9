"""Plans, configurations, environment variables, command lines and logs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from click.testing import CliRunner
from hostile import TEXTS, Draw
from torch import nn
from watch import Finding, Kind, check_message

from hvd_ckpt import command_line, runtime
from hvd_ckpt.bench.compare.engines import launched_rank_and_size
from hvd_ckpt.cli.main import main
from hvd_ckpt.folders import cache_folder, new_folder
from hvd_ckpt.planning.plan import Plan, PlanError
from hvd_ckpt.planning.planner import plan
from hvd_ckpt.training.config import Config, ConfigError, read_yaml


class Plans(Kind):
    """A plan file gives a plan that fits the model, or none."""

    name = "plan"
    share = 10.0
    errors = (PlanError,)

    def prepare(self, folder: Path) -> None:
        self.model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4)))
        made = plan(self.model, torch.ones(4, 8), budget="min")
        made.save(folder / "plan.json")
        self.content = (folder / "plan.json").read_bytes()

    def feed(self, draw: Draw, folder: Path) -> str:
        file = folder / "plan.json"
        file.write_bytes(self.content)
        if draw.chance(0.5):
            tree = draw.changed(json.loads(self.content))
            file.write_text(json.dumps(tree))
        else:
            draw.spoil(file, b"{}")
        try:
            found = Plan.load(file)
        except OSError as error:  # as documented; the commands say so in one line
            return f"refused: {type(error).__name__}"
        found.check(self.model)
        copy = folder / "copy.json"
        found.save(copy)
        if Plan.load(copy) != found:
            raise Finding("a plan that was read and written is another")
        return "accepted"


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{two}: &{two} [{', '.join([f'*{one}'] * 9)}]\n" for one, two in zip("abcdefghi", "bcdefghij")
)
HOSTILE_YAML = (
    BOMB + "model_options: *j\n",
    "model_options: &a [*a]\n",
    "model_options: &a {x: *a}\n",
    "model: !!python/object/apply:os.system ['true']\n",
    "model: !!python/name:os.system\n",
    "model_options: !!set {a, b}\n",
    "model: !!timestamp x\n",
    "steps: !!int ''\n",
    "lr: !!float x\n",
    "tensorboard: !!bool maybe\n",
    "text: !!binary é\n",
    "text: 2020-99-99\n",
    "steps: " + "9" * 5000 + "\n",
    "steps: 0x" + "f" * 300 + "\n",
    "lr: 1:60:60\n",
    "<<: {steps: 3}\nmodel: gpt-tiny\n",
    "model: gpt-tiny\nmodel: gpt-mini\n",
    "? [a, b]\n: 1\n",
    "model_options: " + "{a: " * 300 + "1" + "}" * 300 + "\n",
    "model: |\n  gpt-tiny\n  more\n",
    "model: gpt-tiny\n---\nmodel: gpt-mini\n",
    "model: =\n",
    "%YAML 9.9\n---\nmodel: x\n",
    'text: "\\ud800\\0\\x1b[31m"\nmodel: gpt-tiny\n',
)


class Yaml(Kind):
    """A configuration file gives settings that survive another file, or one line."""

    name = "yaml"
    share = 10.0
    errors = (ConfigError,)

    def prepare(self, folder: Path) -> None:
        self.content = (
            b"model: gpt-tiny\nmodel_options: {layers: 2}\nsteps: 20\nbatch: 8\naccumulate: 2\noptimizer: adamw\n"
            b"optimizer_options: {betas: [0.9, 0.98], eps: 1e-6}\nlr: 1e-3\nbudget: 0.5x\nclip: 1.0\nheld-out: 0.1\n"
            b"text: corpus.txt\n"
        )
        (folder / "config.yaml").write_bytes(self.content)
        self.values = json.loads(json.dumps(Config.make(read_yaml(folder / "config.yaml")).as_dict()))

    def feed(self, draw: Draw, folder: Path) -> str:
        file = folder / "config.yaml"
        file.write_bytes(self.content)
        way, line = draw.below(4), draw.choice(HOSTILE_YAML)
        if way == 0:
            lines = self.content.decode().splitlines(keepends=True)
            lines.insert(draw.below(len(lines)), line)
            file.write_bytes("".join(lines).encode("utf-8", "surrogatepass"))
        elif way == 1:
            file.write_bytes(line.encode("utf-8", "surrogatepass"))
        elif way == 2:
            file.write_text(json.dumps(draw.changed(self.values)))  # which is YAML
        else:
            draw.spoil(file, line.encode("utf-8", "surrogatepass"))
        made = Config.make(read_yaml(file))
        return _survives(made, folder)


def _survives(made: Config, folder: Path) -> str:
    made.write_yaml(folder / "written.yaml")
    again = Config.make(read_yaml(folder / "written.yaml"))
    before, after = made.as_dict(), again.as_dict()
    for name, value in before.items():
        if after[name] != value and repr(after[name]) != repr(value):  # nan is not equal to itself
            raise Finding(f"after a file, {name} is {after[name]!r:.99} and was {value!r:.99}")
    return "accepted"


class Settings(Kind):
    """Any value for any setting."""

    name = "settings"
    share = 8.0
    errors = (ConfigError,)

    def feed(self, draw: Draw, folder: Path) -> str:
        values = {"model": "gpt-tiny"}
        for _ in range(draw.choice((1, 1, 2, 5))):
            values[draw.choice((*Config.model_fields, *Config.model_fields, *TEXTS))] = draw.odd()
        return _survives(Config.make(values), folder)


VARIABLES = (
    *command_line.RANK_VARIABLES,
    *runtime.LOCAL_SIZE_VARIABLES,
    runtime.FUSION_VARIABLE,
    runtime.AUTOTUNE_VARIABLE,
    runtime.CYCLE_VARIABLE,
    runtime.THREADS_VARIABLE,
    runtime.MPI_PREFIX_VARIABLE,
    "HOROVOD_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "XDG_CACHE_HOME",
    "HOME",
)


NO_NUMBERS = (
    "rubbish", "nan", "1.5", "-3", "0", "", " 2 ", "9" * 5000, "٣", "²", "0x10", "1,2", "2\n", "/", "/proc/self/mem", "../..",
    "$HOME", "é",
)  # fmt: skip


class Environment(Kind):
    """Variables that hold rubbish: what is read of them is a number that can be, or an error of one line."""

    name = "environment"
    share = 8.0

    def feed(self, draw: Draw, folder: Path) -> str:
        chosen = {draw.choice(VARIABLES): draw.choice(NO_NUMBERS) for _ in range(draw.choice((1, 1, 2, 4)))}
        with mock.patch.dict(os.environ, chosen):
            runtime.check_environment()
            rank = command_line._launched_rank()
            local = runtime._launched_local_size()
            if not (0 <= rank < 2**31 and 0 <= local < 2**31):
                raise Finding(f"rank {rank}, local size {local} of {chosen}")
            runtime._is_on(runtime.AUTOTUNE_VARIABLE)
            with mock.patch.dict(os.environ):
                runtime._set_fusion_default()
                runtime._set_crowded_defaults()
            with mock.patch("hvd_ckpt.folders.make_writable"), suppress(OSError):  # makes it, wherever it is
                cache_folder()
            try:
                launched_rank_and_size()
            except RuntimeError as error:
                check_message(str(error))
        return "accepted"


class Outputs(Kind):
    """A folder to write to: a new or empty one, or an error; what is in the way stays."""

    name = "output"
    share = 3.0

    def feed(self, draw: Draw, folder: Path) -> str:
        place = folder / "run"
        way = draw.below(5)
        if way == 0:
            place.mkdir()
            (place / "kept").write_text("kept")
        elif way == 1:
            place.symlink_to(draw.choice((folder.parent / "outside", "nowhere", "run", "/etc", "/dev/null")))
        elif way == 2:
            place.mkdir()
        elif way == 3:
            draw.replace(place, b"kept")
        (folder / "file").touch()
        odd = (
            folder / "file" / "x",
            "/dev/null/x",
            "/dev/null",
            folder / ("x" * 300),
            folder / "a\nb",
            folder,
        )
        name = str(place if way < 4 else draw.choice(odd))
        found = new_folder(name, "train")
        if not found.is_dir() or any(found.iterdir()) or not str(found).startswith(str(folder)):
            raise Finding(f"{found} is to be written to")
        return "accepted"


class Stop(Exception):
    """Instead of the work of a command whose arguments are accepted."""


def _stop(*_: Any, **__: Any) -> Any:
    raise Stop


STOPS = (
    "hvd_ckpt.cli.train.run",
    "hvd_ckpt.cli.train.supervise",
    "hvd_ckpt.cli.plan.output_folder",
    "hvd_ckpt.cli.plan_models.build",
    "hvd_ckpt.bench.harness.options.output_folder",
)

COMMANDS = (
    ("train",), ("train",), ("plan",), ("compare",), ("bench", "reduce"), ("bench", "recompute"), ("bench", "train"), ("doctor",
    "--help"),
)  # fmt: skip
WORDS = (
    "--help", "--version", "-x", "--", "-", "", "@file", "nowhere.yaml", "/dev/zero", "/", "model=gpt-tiny", "--=", "--model=",
    "--steps",
    *TEXTS,
)  # fmt: skip
VALUES = (
    "1", "0", "-1", "2,4", "a,a", ",,", "gpt-tiny", "gpt-tinyy", "os:system", "nowhere:x", "x:", ":", "cpu", "cuda:99", "meta",
    "cuda:-1",
    "mkldnn", "0.3x", "1e999x", "90000000000GiB", "min", "layers=2", "layers=&a [*a]", "layers=!!int ''", "=", "layers=",
    "x=" + "[" * 2000, "auto", "mpi", "nan", "inf", "1e400", "9" * 5000, *TEXTS,
)  # fmt: skip


class CommandLines(Kind):
    """Any flags with any values: the work begins, help is shown, or one line says why not, with exit status 2."""

    name = "command line"
    errors = ()
    share = 8.0

    def prepare(self, folder: Path) -> None:
        self.flags: dict[tuple[str, ...], list[str]] = {}
        for command in COMMANDS:
            found: Any = main
            for word in command[: 2 - ("doctor" in command)]:
                found = found.get_command(None, word)
            self.flags[command] = [name for one in found.params for name in one.opts if name.startswith("-")]

    def feed(self, draw: Draw, folder: Path) -> str:
        command = draw.choice(COMMANDS)
        words = list(command)
        if command[0] in ("train", "plan") and draw.chance(0.8):
            words += ["--model", draw.choice(("gpt-tiny", draw.choice(VALUES)))]
        for _ in range(draw.below(5)):
            if draw.chance(0.8):
                words += [draw.choice(self.flags[command]), draw.choice(VALUES)]
            else:
                words.append(draw.choice(WORDS))
        with _stopped():
            result = CliRunner().invoke(main, [word.replace("\0", "") for word in words])
        return _answer(result)


@contextmanager
def _stopped() -> Iterator[None]:
    patches = []
    for name in STOPS:
        module, _, attribute = name.rpartition(".")
        if hasattr(import_module(module), attribute):
            patches.append(mock.patch(name, _stop))
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def _answer(result: Any) -> str:
    if isinstance(result.exception, Stop):
        return "accepted"
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    if result.exit_code == 0:
        return "done, or help"
    if result.exit_code != 2:
        raise Finding(f"exit status {result.exit_code}: {result.output[:200]}")
    lines = result.output.splitlines()
    said = lines[-1] if lines else ""
    if not said.startswith("Error: "):
        raise Finding(f"no line that says Error: {result.output[:200]!r}")
    if len(lines) > 1 and not lines[0].startswith("Usage: "):
        raise Finding(f"{len(lines)} lines: {result.output[:300]!r}")
    check_message(said)
    return "refused with one line"


class Logs(Kind):
    """Pictures of logs that hold anything."""

    name = "plot"
    errors = ()
    share = 2.0

    def prepare(self, folder: Path) -> None:
        kinds = ("train", "eval")
        records = [{"step": 10 * at, "kind": kinds[at % 3 == 0], "loss": 3.0 / (at + 1)} for at in range(12)]
        self.content = "".join(json.dumps(one) + "\n" for one in records).encode()
        (folder / "log.jsonl").write_bytes(self.content)
        CliRunner().invoke(
            main, ["plot", str(folder), "--output", str(folder / "loss.png")]
        )  # imports what it needs

    def feed(self, draw: Draw, folder: Path) -> str:
        log = folder / "run" / "log.jsonl"
        log.parent.mkdir()
        log.write_bytes(self.content)
        if draw.chance(0.5):
            lines = self.content.splitlines()
            at = draw.below(len(lines))
            lines[at] = json.dumps(draw.changed(json.loads(lines[at]))).encode()
            log.write_bytes(b"\n".join(lines) + b"\n")
        else:
            draw.spoil(log, b'{"step": 1, "kind": "train", "loss": NaN}\n' + b"[" * 20000)
        picture = folder / draw.choice(("loss.png", "a/b.png", "x.txt", "no\nne.png", "x" * 300 + ".png"))
        title = draw.choice(("Loss", *TEXTS)).replace("\0", "")
        name = draw.choice(("", "", "$x=", "a=", "_hidden=", "$\\frac{=", "é="))
        source = f"{name}{draw.choice((log, log.parent))}"
        words = ["plot", source, "--output", str(picture), "--title", title]
        return _answer(CliRunner().invoke(main, words))


KINDS: tuple[type[Kind], ...] = (Plans, Yaml, Settings, Environment, Outputs, CommandLines, Logs)
