"""A word-level LSTM language model, recomputed layer by layer, with a vocabulary made from its text and its perplexity.

    horovodrun -np 2 python examples/memonger_word_lm.py --text FILE --words 10000

The model is that of Zaremba et al. ("Recurrent neural network regularization", 2014). The weights of its decoder are the
embeddings: one parameter in the first and in the last block. Both add to its gradient, which is then reduced once.
"""

import math
import sysconfig
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import click
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.trainers import WordLevelTrainer

import hvd_ckpt as hc


@click.command(help=__doc__.splitlines()[0], context_settings={"show_default": True})
@click.option("--text", help="Text file; without it the standard library's source.")
@click.option("--words", type=click.IntRange(2), default=5000, help="The most frequent; others are <unk>.")
@click.option("--width", default=200)
@click.option("--length", type=click.IntRange(8), default=70)
@click.option("--batch", default=20, help="Samples of each rank in a step.")
@click.option("--steps", default=100)
@click.option("--precision", default="fp32", help="fp32, bf16 or fp16.")
def main(text, words, width, length, **settings):
    hc.init()
    with tempfile.TemporaryDirectory() as folder:
        config = hc.training.Config(
            "lstm-small", model_options={"width": width, "dropout": 0.2, "tied": True}, data=text and f"text:{text}",
            tokenizer=word_tokenizer(text, words, Path(folder)), sequence_length=length, lr=2e-3,
            weight_decay=0, clip=5.0, eval_batches=20, **settings,
        )  # fmt: skip
        chain, objective, train, test = hc.training.assemble(config)
    model = hc.CheckpointSequential(chain, segments=len(chain))
    show_costs(model, objective, train.batch(range(config.batch), [0] * config.batch))
    held_out = hc.training.Trainer(config, model, objective, train, test).run().evaluation["loss"]
    if hc.rank() == 0:
        print(f"validation perplexity: {math.exp(held_out):.1f}")


def show_costs(model, objective, batch):
    """Peak memory and time of a step."""

    def step():
        objective.loss(model(*batch.inputs), batch).backward()

    for name, context in (("kept", hc.without_recomputation), ("recomputed", nullcontext)):
        with context():
            peak = hc.measure_peak(step).peak_bytes
            start = time.perf_counter()
            step()
        if hc.rank() == 0:
            seconds = time.perf_counter() - start
            print(f"{name}: peak {peak / 2**20:.1f} MiB, {seconds:.3f} s a step", flush=True)


def word_tokenizer(text, words, folder):
    """The file of a tokenizer whose vocabulary rank 0 makes and all ranks get."""
    tokenizer = Tokenizer(WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    if hc.rank() == 0:
        files = [text] if text else map(str, sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
        trainer = WordLevelTrainer(vocab_size=words, special_tokens=["<unk>"], show_progress=False)
        tokenizer.train(list(files), trainer)
    file = folder / "words.json"
    file.write_text(hc.broadcast_object(tokenizer.to_str(), root_rank=0, name="vocabulary"))
    return str(file)


if __name__ == "__main__":
    main()
