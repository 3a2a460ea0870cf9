"""``hvd-ckpt generate``: text that a trained language model writes.

Exit status 0 with text, 2 if the run cannot be used, or its model does not predict the next token.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from hvd_ckpt.app.cli.command_line import BadArgument, OneLineErrors
from hvd_ckpt.app.cli.export import snapshot_of
from hvd_ckpt.utils.text import printable


@click.command("generate", cls=OneLineErrors)
@click.argument("run", metavar="RUN_OR_SNAPSHOT")
@click.option("--prompt", required=True, metavar="TEXT", help="Text to continue.")
@click.option(
    "--tokens", type=click.IntRange(1), default=200, show_default=True, help="Number of tokens to generate."
)
@click.option(
    "--temperature",
    type=click.FloatRange(0),
    default=1.0,
    show_default=True,
    help="Temperature of the distribution; 0 takes the most likely token.",
)
@click.option("--top-k", type=click.IntRange(1), help="Draw from the K most likely tokens.")
@click.option(
    "--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Seed of the draws."
)
@click.option("--ema", is_flag=True, help="Use the moving averages of `hvd-ckpt train --ema`.")
def generate(
    run: str, prompt: str, tokens: int, temperature: float, top_k: int | None, seed: int, ema: bool
) -> None:
    """Continue a text with a causal language model (GPT-2, GPT-lite, LSTM) that `hvd-ckpt train` has trained.

    RUN_OR_SNAPSHOT is a snapshot, or the folder of a run, of which the newest undamaged snapshot is used. The number of ranks does
    not matter. The model sees as many tokens as a training sample has. For each token, all of them are computed again, on the CPU.
    """
    from hvd_ckpt.app.training.trained import generate as texts
    from hvd_ckpt.snapshots.folder import SnapshotError
    from hvd_ckpt.utils.schema import Wrong

    shown = text = ""
    plain = printable if sys.stdout.isatty() else str
    try:
        for number, text in enumerate(
            texts(snapshot_of(Path(run)), prompt, tokens, temperature, top_k, seed, ema)
        ):
            if number == 0:
                click.echo(plain(prompt), nl=False)
            # A text that ends within a character is shown when the character's other bytes are there.
            if text.startswith(shown) and not text.endswith("\ufffd"):
                click.echo(plain(text[len(shown) :]), nl=False)
                shown = text
    except (SnapshotError, Wrong, ValueError) as error:
        raise BadArgument(str(error)) from None
    # What is left: a text that ends within a character has not been shown to its end.
    click.echo(plain(text[len(shown) :]))
