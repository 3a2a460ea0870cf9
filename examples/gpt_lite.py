"""GPT-lite on tinyshakespeare: recomputes segments of a few blocks, measures its memory, and writes text at the end.

    horovodrun -np 2 python examples/gpt_lite.py --text tinyshakespeare.txt --interval 2

tinyshakespeare is a megabyte of Shakespeare's plays, the data set of Andrej Karpathy's char-rnn project (data/tinyshakespeare/
input.txt there). The sizes here suit a CPU. GPT-3 Small (Brown et al., 2020) is `--width 768 --heads 12 --length 2048`.
"""

import click
import torch

import hvd_ckpt as hc


@click.command(help=__doc__.splitlines()[0], context_settings={"show_default": True})
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
    sizes = {"width": width, "heads": heads, "layers": layers}
    config = hc.training.Config(
        "gpt-lite", model_options=sizes, sequence_length=length, schedule="cosine", lr=1e-3, clip=1.0,
        eval_batches=20, data=text and f"text:{text}", **settings,
    )  # fmt: skip
    parts = hc.training.assemble(config)
    measure(parts, config.batch, interval)
    outcome = hc.training.Trainer(config, *parts).run()
    if hc.rank() == 0:
        print(f"validation loss {outcome.evaluation['loss']:.4f}")
        print(write(parts.model, "\n", 300, length))


def measure(parts, count, interval):
    """Prints the peak of a step with everything kept and with segments of ``interval`` blocks, which stay."""
    model, batch = parts.model, parts.train.batch(range(count), [0] * count)
    for model.checkpoint_interval in (0, interval):
        memory = hc.measure_peak(lambda: parts.objective.loss(model(*batch.inputs), batch).backward())
        if hc.rank() == 0:
            blocks = f"{len(model.to_layers())} blocks, checkpoint interval {model.checkpoint_interval}"
            print(f"{blocks}: {memory.peak_bytes / 2**20:.1f} MiB")


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
