"""``hvd-ckpt train``: flags and files to a configuration, one line for what cannot be, a run.

Exit status 0 after a run, 2 for a setting that cannot be; anything that goes wrong in training itself is a traceback.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from hvd_ckpt.command_line import BadArgument, OneLineErrors
from hvd_ckpt.models.catalog import overview
from hvd_ckpt.training.config import Config, ConfigError, read_yaml
from hvd_ckpt.values import named

__all__ = ["train"]

# One setting of these replaces the others.
ALTERNATIVES = ({"steps", "epochs"}, {"budget", "plan", "segments", "reentrant"})


def _flag(setting: dataclasses.Field[Any]) -> click.Option:
    name = setting.name.replace("_", "-")
    help = setting.metadata["help"]
    default = setting.default
    if default is not None and default is not dataclasses.MISSING and default is not False:
        help += f"  [default: {default}]"
    if default is False:
        return click.Option([f"--{name}/--no-{name}", setting.name], default=None, help=help)
    if setting.name.endswith("_options"):
        one = name.removesuffix("s")
        return click.Option([f"--{one}", setting.name], multiple=True, metavar="NAME=VALUE", help=help)
    return click.Option([f"--{name}", setting.name], default=None, metavar="VALUE", help=help)


def _train(file: str | None, **flags: Any) -> None:
    try:
        run(_config(file, flags))
    except ConfigError as error:
        raise BadArgument(str(error)) from None


def _config(file: str | None, flags: dict[str, Any]) -> Config:
    """What the file says, and before it the flags."""
    values = _underscored(read_yaml(file)) if file is not None else {}
    resume = flags["resume"] or values.get("resume")
    if resume is not None:
        told = {*values, *(name for name, value in flags.items() if value is not None)}
        values = {**_settings_of_run(str(resume), told), **values}
    for name, value in flags.items():
        if name.endswith("_options"):
            try:
                given = named("--" + name.removesuffix("s").replace("_", "-"), value)
            except ValueError as error:
                raise ConfigError(str(error)) from None
            if given:
                values[name] = {**(values.get(name) or {}), **given}
        elif value is not None:
            values[name] = value
    return Config.make(values)


def _underscored(values: dict[str, Any]) -> dict[str, Any]:
    return {name.replace("-", "_"): value for name, value in values.items()}


def _settings_of_run(resume: str, given: set[str]) -> dict[str, Any]:
    """What a run, or the run of a snapshot, was told; what is given now may say otherwise, such as more steps."""
    folder = Path(resume)
    if (folder / "manifest.json").is_file():
        folder = folder.resolve().parent.parent
    values = read_yaml(folder / "config.yaml")
    replaced = {"output", "resume"}
    for alternatives in ALTERNATIVES:
        if given & alternatives:
            replaced |= alternatives
    return {name: value for name, value in values.items() if name not in replaced}


def run(config: Config) -> None:
    """Trains as configured, on all ranks.

    Raises:
        ConfigError: on every rank alike.
    """
    import horovod.torch as hvd

    from hvd_ckpt import runtime
    from hvd_ckpt.training.agreement import errors_everywhere
    from hvd_ckpt.training.assembly import assemble
    from hvd_ckpt.training.trainer import Trainer

    runtime.init()
    for turn in (True, False):  # the first rank of each machine encodes the text, the others find its tokens
        with errors_everywhere("hvd_ckpt.train.assembly"):
            if turn == (hvd.local_rank() == 0):
                assembly = assemble(config)
    trainer = Trainer(config, assembly.model, assembly.objective, assembly.train, assembly.test)
    outcome = trainer.run()
    if hvd.rank() == 0:
        end = "ended early" if outcome.ended_early else "done"
        click.echo(f"{end} after {outcome.steps} steps: {outcome.folder}")


train = OneLineErrors(
    "train",
    callback=_train,
    params=[
        click.Argument(["file"], required=False, metavar="[FILE]"),
        *[_flag(setting) for setting in dataclasses.fields(Config)],
    ],
    help=f"""Train a model over all ranks: horovodrun -np 2 hvd-ckpt train --model bert-small ...

    Settings come from a YAML FILE, whose keys are the names of the flags, and from the flags, which go before it.

    Models: {overview()}, or a folder of a Hugging Face model.
    """,
    context_settings={"help_option_names": ["-h", "--help"]},
)
