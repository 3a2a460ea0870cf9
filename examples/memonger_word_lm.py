"""A word-level LSTM language model with a vocabulary made from its text, recomputed layer by layer; its perplexity.

    horovodrun -np 2 python examples/memonger_word_lm.py --text FILE --words 10000

The model is that of Zaremba et al. ("Recurrent neural network regularization", 2014). Its decoder's weights are the embeddings: one
parameter in the first block and in the last, both of which add to its gradient before it is reduced once.
"""

import math
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import click
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.trainers import WordLevelTrainer

import hvd_ckpt as hc
from hvd_ckpt.command_line import BadArgument, OneLineErrors
from hvd_ckpt.data.text import CausalText
from hvd_ckpt.data.tokens import Tokens, find_text_files, library_files
from hvd_ckpt.memory import measure_peak
from hvd_ckpt.models.lstm import lstm_language_model
from hvd_ckpt.models.objectives import NextOrHiddenToken
from hvd_ckpt.text import show_bytes
from hvd_ckpt.training.config import Config
from hvd_ckpt.training.trainer import Trainer


@click.command(cls=OneLineErrors, help=__doc__.splitlines()[0], context_settings={"show_default": True})
@click.option("--text", help="File or folder; without it the standard library's source.")
@click.option("--words", type=click.IntRange(2), default=5000, help="The most frequent; others are <unk>.")
@click.option("--width", default=200)
@click.option("--length", type=click.IntRange(8), default=70)
@click.option("--batch", default=20, help="Samples of each rank in a step.")
@click.option("--steps", default=100)
@click.option("--precision", default="fp32", help="fp32, bf16 or fp16.")
def main(text, words, width, length, **settings):
    hc.init()
    torch.manual_seed(0)
    try:
        config = Config("lstm", lr=2e-3, weight_decay=0, clip=5.0, eval_batches=20, **settings)
        train, test = CausalText(word_tokens(text, words), length).split(0.05)
        chain = lstm_language_model(vocabulary=train.tokens.vocabulary, width=width, dropout=0.2, tied=True)
        model = hc.CheckpointSequential(chain, segments=len(chain))
        show_costs(model, train.batch(range(config.batch), [0] * config.batch))
        trainer = Trainer(config, model, NextOrHiddenToken(), train, test)
    except ValueError as error:
        raise BadArgument(str(error)) from None
    loss = trainer.run().evaluation["loss"]
    if hc.rank() == 0:
        print(f"validation perplexity: {math.exp(loss):.1f}")


def show_costs(model, sample):
    """Peak memory and time of a step."""
    for name, context in (("kept", hc.without_recomputation), ("recomputed", nullcontext)):
        with context():
            peak = measure_peak(lambda: loss_of(model, sample).backward()).peak_bytes
            start = time.perf_counter()
            loss_of(model, sample).backward()
        if hc.rank() == 0:
            print(f"{name}: peak {show_bytes(peak)}, {time.perf_counter() - start:.3f} s a step", flush=True)


def loss_of(model, batch):
    return NextOrHiddenToken().loss(model(*batch.inputs), batch)


def word_tokens(text, words):
    """The text as words, by a vocabulary that rank 0 makes and all ranks get."""
    files = [str(file) for file in (find_text_files(text) if text else library_files())]
    tokenizer = Tokenizer(WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    if hc.rank() == 0:
        special = ["<unk>"]
        tokenizer.train(
            files, WordLevelTrainer(vocab_size=words, special_tokens=special, show_progress=False)
        )
    vocabulary = hc.broadcast_object(tokenizer.to_str(), root_rank=0, name="vocabulary")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "words.json")
        file.write_text(vocabulary)
        return Tokens(text, file)


if __name__ == "__main__":
    main()
