"""Plans, configurations, environment variables, command lines, logs and recipes."""

from __future__ import annotations

import copy
import json
import os
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from click.testing import CliRunner
from hostile import ODD, TEXTS, Draw
from torch import nn
from watch import Feed, Finding, Kind, check_message

from benchmarks.__main__ import benchmarks
from hvd_ckpt.app.cli.main import main
from hvd_ckpt.app.models.gpt import gpt
from hvd_ckpt.app.training.config import Config, ConfigError, read_yaml
from hvd_ckpt.app.training.logs import Logs
from hvd_ckpt.parallel.tensor.recipes import is_split, tensor_parallel
from hvd_ckpt.planning.plan import Plan, PlanError
from hvd_ckpt.planning.request import plan
from hvd_ckpt.processes import launchers, runtime
from hvd_ckpt.processes.grid import Grid, pretending
from hvd_ckpt.processes.mpi import set_single_copy
from hvd_ckpt.utils.cuts import cut_of
from hvd_ckpt.utils.folders import cache_folder, new_folder


def plans(folder: Path) -> Feed:
    """A plan file gives a plan that fits the model, or none."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4)))
    plan(model, torch.ones(4, 8), budget="min").save(folder / "plan.json")
    content = (folder / "plan.json").read_bytes()

    def feed(draw: Draw, folder: Path) -> None:
        file, copy = folder / "plan.json", folder / "copy.json"
        file.write_bytes(content)
        if draw.chance(0.5):
            file.write_text(json.dumps(draw.changed(json.loads(content))))
        else:
            draw.spoil(file, b"{}")
        found = Plan.load(file)
        found.check(model)
        found.save(copy)
        if Plan.load(copy) != found:
            raise Finding("a plan that was read and written is another")

    return feed


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
    "data: !!binary é\n",
    "data: 2020-99-99\n",
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
    'data: "text:\\ud800\\0\\x1b[31m"\nmodel: gpt-tiny\n',
)


def yaml(folder: Path) -> Feed:
    """A configuration file gives settings that survive another file, or one line."""
    content = (
        "model: gpt-tiny\nmodel_options: {layers: 2}\nsteps: 20\nbatch: 8\naccumulate: 2\noptimizer: adamw\n"
        "optimizer_options: {betas: [0.9, 0.98], eps: 1e-6}\nlr: 1e-3\nbudget: 0.5x\nclip: 1.0\nvalidation-split: 0.1\n"
        "data: text:corpus.txt\n"
    )
    (folder / "config.yaml").write_text(content)
    values = json.loads(json.dumps(Config.make(read_yaml(folder / "config.yaml")).as_dict()))

    def feed(draw: Draw, folder: Path) -> None:
        file = folder / "config.yaml"
        file.write_text(content)
        way, line = draw.below(4), draw.choice(*HOSTILE_YAML)
        if way == 0:
            lines = content.splitlines(keepends=True)
            lines.insert(draw.below(len(lines)), line)
            file.write_text("".join(lines), "utf-8")
        elif way == 1:
            file.write_text(line, "utf-8")
        elif way == 2:
            file.write_text(json.dumps(draw.changed(values)))  # which is YAML
        else:
            draw.spoil(file, line.encode())
        survives(Config.make(read_yaml(file)), folder)

    return feed


def survives(made: Config, folder: Path) -> None:
    made.write_yaml(folder / "written.yaml")
    after = Config.make(read_yaml(folder / "written.yaml")).as_dict()
    for name, value in made.as_dict().items():
        if after[name] != value and repr(after[name]) != repr(value):  # nan is not equal to itself
            raise Finding(f"after a file, {name} is {after[name]!r:.99} and was {value!r:.99}")


def any_settings(draw: Draw, folder: Path) -> None:
    """Any value for any setting."""
    names = (*Config.model_fields, *Config.model_fields, *TEXTS)
    values = {draw.choice(*names): draw(ODD) for _ in range(draw.choice(1, 1, 2, 5))}
    survives(Config.make({"model": "gpt-tiny", **values}), folder)


VARIABLES = (
    *launchers.RANK_VARIABLES, *runtime.LOCAL_SIZE_VARIABLES, runtime.FUSION_VARIABLE, runtime.AUTOTUNE_VARIABLE,
    launchers.CYCLE, launchers.THREADS, runtime.MPI_PREFIX_VARIABLE, "HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE",
    "XDG_CACHE_HOME", "HOME",
)  # fmt: skip
NO_NUMBERS = (
    "rubbish", "nan", "1.5", "-3", "0", "", " 2 ", "9" * 5000, "٣", "²", "0x10", "1,2", "2\n", "/", "/proc/self/mem", "../..",
    "$HOME", "é",
)  # fmt: skip


def environment(draw: Draw, folder: Path) -> None:
    """Variables that hold rubbish: what is read of them is a number that can be, or an error of one line."""
    chosen = {draw.choice(*VARIABLES): draw.choice(*NO_NUMBERS) for _ in range(draw.choice(1, 1, 2, 4))}
    with mock.patch.dict(os.environ, chosen), mock.patch("hvd_ckpt.utils.folders.make_writable"):
        launchers.check_environment()
        rank, local = launchers.launched_rank() or 0, runtime._launched_local_size()
        if not (0 <= rank < 2**31 and 0 <= local < 2**31):
            raise Finding(f"rank {rank}, local size {local} of {chosen}")
        runtime._is_on(runtime.AUTOTUNE_VARIABLE)
        runtime._set_crowded_defaults()
        with suppress(OSError):  # makes it, wherever it is
            cache_folder()


def outputs(draw: Draw, folder: Path) -> None:
    """A folder to write to: a new or empty one, or an error; what is in the way stays."""
    place, way = folder / "run", draw.below(5)
    if way in (0, 2):
        place.mkdir()
    if way == 0:
        (place / "kept").write_text("kept")
    elif way == 1:
        place.symlink_to(draw.choice(folder.parent / "outside", "nowhere", "run", "/etc", "/dev/null"))
    elif way == 3:
        draw.replace(place, b"kept")
    elif way == 4:
        (folder / "file").touch()
        names = (folder / name for name in ("file/x", "x" * 300, "a\nb", ""))
        place = draw.choice("/dev/null/x", "/dev/null", *names)
    found = new_folder(str(place), "train")
    if not found.is_dir() or any(found.iterdir()) or not str(found).startswith(str(folder)):
        raise Finding(f"{found} is to be written to")


class Stop(Exception):
    """Instead of the work of a command whose arguments are accepted."""


STOPS = (
    "hvd_ckpt.app.cli.train.run",
    "hvd_ckpt.app.cli.plan.output_folder",
    "hvd_ckpt.app.training.build.first_step",
    "hvd_ckpt.app.compare.runner.options.output_folder",
)
BENCH = "python -m benchmarks"  # the program before the name of a suite
COMMANDS = (
    ("train",), ("train",), ("plan",), ("layout",), ("compare",), ("doctor",),
    (BENCH, "reduce"), (BENCH, "recompute"), (BENCH, "train"),
)  # fmt: skip
WORDS = (
    "--help", "--version", "-x", "--", "-", "", "@file", "nowhere.yaml", "/dev/zero", "/", "model=gpt-tiny", "--=", "--model=",
    "--steps", *TEXTS,
)  # fmt: skip
VALUES = (
    "1", "0", "-1", "2,4", "a,a", ",,", "gpt-tiny", "gpt-tinyy", "os:system", "nowhere:x", "x:", ":", "cpu", "cuda:99", "meta",
    "cuda:-1", "mkldnn", "0.3x", "1e999x", "90000000000GiB", "min", "layers=2", "layers=&a [*a]", "layers=!!int ''", "=", "layers=",
    "x=" + "[" * 2000, "auto", "mpi", "nan", "inf", "1e400", "9" * 5000, *TEXTS,
)  # fmt: skip


def command_lines(_: Path) -> Feed:
    """Any flags with any values: the work begins, help is shown, or one line says why not, with exit status 2."""
    set_single_copy({})  # starts a process, once
    flags: dict[tuple[str, ...], list[str]] = {}
    for command in COMMANDS:
        found: Any = benchmarks if command[0] == BENCH else main
        for word in command:
            found = found if word == BENCH else found.get_command(None, word)
        flags[command] = [name for one in found.params for name in one.opts if name.startswith("-")]

    def feed(draw: Draw, folder: Path) -> str:
        command = draw.choice(*COMMANDS)
        words = [*command, *(["--help"] if command == ("doctor",) else [])]  # which starts ranks
        if command[0] in ("train", "plan", "layout") and draw.chance(0.8):
            words += ["--model", draw.choice("gpt-tiny", draw.choice(*VALUES))]
        for _ in range(draw.below(5)):
            if draw.chance(0.8):
                words += [draw.choice(*flags[command]), draw.choice(*VALUES)]
            else:
                words.append(draw.choice(*WORDS))
        with ExitStack() as stack:
            for name in STOPS:
                stack.enter_context(mock.patch(name, side_effect=Stop))
            return answer([word.replace("\0", "") for word in words])

    return feed


def answer(words: list[str]) -> str:
    """Runs a command line; returns what came of it."""
    program = (benchmarks, words[1:]) if words[:1] == [BENCH] else (main, words)
    result = CliRunner().invoke(*program)
    if isinstance(result.exception, Stop):
        return "accepted"
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    if result.exit_code == 0:
        return "done, or help"
    if result.exit_code != 2:
        raise Finding(f"exit status {result.exit_code}: {result.output[:200]}")
    lines = result.output.splitlines() or [""]
    if not lines[-1].startswith("Error: ") or (len(lines) > 1 and not lines[0].startswith("Usage: ")):
        raise Finding(f"not a line that says Error, or more than one: {result.output[:300]!r}")
    check_message(lines[-1])
    return "refused with one line"


def logs(draw: Draw, folder: Path) -> None:
    """Logs that hold anything."""
    log = folder / "log.jsonl"
    records: list[Any] = [{"step": at, "kind": "train", "loss": 3.0 / at} for at in range(10, 130, 10)]
    spoilt = draw.chance(0.5)
    if not spoilt:
        records[draw.below(len(records))] = draw.changed(records[0])
    log.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    if spoilt:
        draw.spoil(log, b'{"step": 1, "kind": "train", "loss": NaN}\n' + b"[" * 20000)
    with Logs(folder, step=draw.below(200)):
        pass


MODULES = (
    "embedding", "embedding.tokens", "layer0", "layer*", "layer?.attention", "*.project", "*.output", "layer1.perceptron.0",
    "layer*.perceptron.2", "*.perceptron*", "layer0.attention_norm", "head.1", "head", "*", "", "[", "*.weight",
)  # fmt: skip
SPLITS = (
    "column", "row", "fused:3", "fused:0", "fused:2", "vocabulary", "heads:heads", "heads:", "heads", "heads:head_width,heads",
    "heads:training", "features", "block", "xlnet",
)  # fmt: skip


def recipes(draw: Draw, folder: Path) -> str:
    """Recipes and shapes that fit, or not: a model keeps slices of all that is split, or stays as it is."""
    width, heads = draw.choice((8, 4), (8, 2), (6, 3), (12, 4), (5, 1))
    vocabulary, tied = draw.choice(1, 3, 7, 12), draw.chance(0.5)
    model = gpt(vocabulary=vocabulary, length=4, width=width, heads=heads, layers=2, tied=tied)
    sizes = {name: one.numel() for name, one in model.named_parameters()}
    recipe: Any = {
        draw.choice(*MODULES, *TEXTS): draw.choice(*SPLITS) if draw.chance(0.9) else draw(ODD)
        for _ in range(draw.choice(1, 1, 2, 4))
    }
    if draw.chance(0.3):
        recipe = draw.choice(None, draw(ODD))
    tensor, sequence = draw.choice(1, 2, 2, 3, 4), draw.chance(0.2)
    of_all_parts = dict.fromkeys(sizes, 0)
    for part in range(tensor):
        other = copy.deepcopy(model)
        before = dict(other.named_parameters())
        with pretending(Grid(1, 1, 0, 0, tensor=tensor, part=part, alone=True)):
            try:
                tensor_parallel(other, recipe, sequence=sequence)
            except ValueError:
                if is_split(other) or any(one.numel() != sizes[name] for name, one in before.items()):
                    raise Finding("a recipe was refused, and a model was split") from None
                raise
        for name, parameter in other.named_parameters():
            if parameter is not before[name]:
                raise Finding(f"'{name}' is another object")
            of_all_parts[name] += parameter.numel() if cut_of(parameter) is not None or part == 0 else 0
    if of_all_parts != sizes:
        raise Finding("the parts do not make the whole")
    return "split"


KINDS = (
    Kind("plan", (PlanError, OSError), plans),  # OSError: as documented; the commands say so in one line
    Kind("yaml", (ConfigError,), yaml),
    Kind("settings", (ConfigError,), lambda _: any_settings),
    Kind("environment", (ValueError,), lambda _: environment),
    Kind("output", (ValueError,), lambda _: outputs),
    Kind("command line", (), command_lines),
    Kind("log", (ValueError,), lambda _: logs),
    Kind("recipe", (ValueError,), lambda _: recipes),
)
