"""``hvd-ckpt plan``: its options. :mod:`hvd_ckpt.cli.plan_session` does the work.

Exit status 0 if the plan stays within its budget when measured, 1 if it does not, 2 for a bad argument, a budget that
cannot be met, or a plan file that cannot be used.
"""

from __future__ import annotations

from typing import Any

import click

from hvd_ckpt.cli.plan_cluster import cluster_options
from hvd_ckpt.command_line import BadArgument, OneLineErrors
from hvd_ckpt.models import catalog
from hvd_ckpt.planning.budget import parse_budget

__all__ = ["plan"]

FASTEST = "fastest"

HELP = f"""Decide what a model's forward pass keeps so that a training step fits a memory budget, and measure it.

Models: {catalog.overview()}; or a folder of a Hugging Face model; or module:function, a function of your own that returns
the model, a tuple of its sample arguments, and its loss (a function of its output) or None. It gets those of the sizes and options
below that you give.
"""


@click.command("plan", cls=OneLineErrors, help=HELP)
@click.option(
    "--model", "name", required=True, metavar="NAME", help="A name, a folder, or module:function, see above."
)
@click.option(
    "--model-option",
    "options",
    multiple=True,
    metavar="NAME=VALUE",
    help="Option of the model, such as layers=2; may be given several times.",
)
@click.option("--batch", type=click.IntRange(1), help="Samples in the batch.  [default: 8; 2 volumes]")
@click.option("--length", type=click.IntRange(2), help="Tokens of a sequence.  [default: by model]")
@click.option(
    "--vocabulary", type=click.IntRange(2), help="Different tokens.  [default: bytes and special tokens]"
)
@click.option("--pixels", type=click.IntRange(1), help="Of an image's or volume's side.  [default: by model]")
@click.option("--channels", type=click.IntRange(1), help="Of an image or volume.  [default: 1]")
@click.option("--classes", type=click.IntRange(2), help="Of images or voxels.  [default: as train's data]")
@click.option(
    "--budget",
    default=None,
    help=f"Peak of a step: 6GiB, 0.3x (of keep everything), 80% (of the device), min, {FASTEST}.  [default: {FASTEST}]",
)
@click.option(
    "--precision",
    type=click.Choice(["fp32", "bf16", "fp16"]),
    default="fp32",
    show_default=True,
    help="bf16, fp16: under autocast.",
)
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda, or cuda:N.")
@click.option(
    "--load",
    "file",
    metavar="FILE",
    default=None,
    help="Measure the plan in this file instead of making one.",
)
@click.option(
    "--peers", is_flag=True, help="Also measure what PyTorch's own checkpointing takes, for the picture."
)
@cluster_options
@click.option(
    "--output", metavar="FOLDER", default=None, help="For plan and pictures.  [default: runs/plan-<time>]"
)
def plan(
    budget: str | None,
    **others: Any,
) -> None:
    """The command; :data:`HELP` says what it does."""
    try:
        parse_budget(budget)
    except ValueError as error:
        raise BadArgument(f"--budget: {error}") from None
    from hvd_ckpt.cli import plan_session as session

    session.run(budget=budget, **others)
