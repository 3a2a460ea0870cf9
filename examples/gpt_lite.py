"""GPT-lite on tinyshakespeare: recomputed every few blocks, its memory measured, and at the end it writes.

    horovodrun -np 2 python examples/gpt_lite.py --text tinyshakespeare.txt --interval 2

tinyshakespeare is a megabyte of Shakespeare's plays, the data set of Andrej Karpathy's char-rnn project (data/tinyshakespeare/
input.txt there). The sizes here suit a CPU; GPT-3's smallest (Brown et al., 2020) is `--width 768 --heads 12 --length 2048`.
"""

import click
import torch

import hvd_ckpt as hc
from hvd_ckpt.command_line import BadArgument, OneLineErrors
from hvd_ckpt.data.text import CausalText
from hvd_ckpt.data.tokens import Tokens
from hvd_ckpt.memory import measure_peak
from hvd_ckpt.models.gpt import gpt
from hvd_ckpt.models.objectives import NextOrHiddenToken
from hvd_ckpt.text import show_bytes
from hvd_ckpt.training.config import Config
from hvd_ckpt.training.trainer import Trainer


@click.command(cls=OneLineErrors, help=__doc__.splitlines()[0], context_settings={"show_default": True})
@click.option("--text", help="A file or a folder; without it the standard library's source.")
@click.option("--width", default=256)
@click.option("--heads", default=8)
@click.option("--layers", default=12)
@click.option("--length", type=click.IntRange(8), default=256)
@click.option("--interval", default=2, help="Blocks of a recomputed segment; 0 keeps everything.")
@click.option("--steps", default=300)
@click.option("--batch", default=8)
@click.option("--precision", default="fp32", help="fp32, bf16 or fp16.")
def main(text, width, heads, layers, length, interval, **settings):
    hc.init()
    torch.manual_seed(0)
    sizes = {"width": width, "heads": heads, "layers": layers, "length": length}
    try:
        config = Config("gpt", schedule="cosine", lr=1e-3, clip=1.0, eval_batches=20, **settings)
        data = CausalText(Tokens(text), length)
        train, test = data.split(0.05)
        model = gpt(vocabulary=data.tokens.vocabulary, **sizes)
        measure(model, train.batch(range(config.batch), [0] * config.batch), interval)
        trainer = Trainer(config, model, NextOrHiddenToken(), train, test)
    except ValueError as error:
        raise BadArgument(str(error)) from None
    outcome = trainer.run()
    if hc.rank() == 0:
        print(f"validation loss {outcome.evaluation['loss']:.4f}")
        print(write(model, "\n", 300, length))


def measure(model, batch, interval):
    """Prints the peak of a step with everything kept and with segments of ``interval`` blocks, which stay."""
    for model.checkpoint_interval in (0, interval):
        peak = measure_peak(
            lambda: NextOrHiddenToken().loss(model(*batch.inputs), batch).backward()
        ).peak_bytes
        if hc.rank() == 0:
            print(
                f"{len(model.to_layers())} blocks, checkpoint interval {model.checkpoint_interval}: {show_bytes(peak)}"
            )


@torch.no_grad()
def write(model, start, count, length):
    """Text after ``start``: each byte drawn from what the model expects."""
    model.eval()
    tokens = torch.tensor([list(start.encode())], device=next(model.parameters()).device)
    for _ in range(count):
        expected = model(tokens[:, -length:])[:, -1, :256].softmax(-1)  # a byte, no special token
        tokens = torch.cat([tokens, torch.multinomial(expected, 1)], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


if __name__ == "__main__":
    main()
