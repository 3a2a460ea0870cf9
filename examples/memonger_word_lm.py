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
from hvd_ckpt.memory import measure_peak
from hvd_ckpt.models.lstm import lstm_language_model
from hvd_ckpt.models.objectives import NextOrHiddenToken
from hvd_ckpt.planning.budget import show_bytes
from hvd_ckpt.training.data.loader import Loader
from hvd_ckpt.training.data.stream import SampleStream
from hvd_ckpt.training.data.text import CausalText
from hvd_ckpt.training.data.text_files import find_text_files, library_files
from hvd_ckpt.training.data.tokens import Tokens
from hvd_ckpt.training.evaluation import evaluate


@click.command(cls=OneLineErrors, help=__doc__.splitlines()[0], context_settings={"show_default": True})
@click.option("--text", help="File or folder; without it the standard library's source.")
@click.option(
    "--words", type=click.IntRange(2), default=5000, help="The most frequent ones; others are <unk>."
)
@click.option("--width", type=click.IntRange(1), default=200)
@click.option("--length", type=click.IntRange(2), default=70)
@click.option("--batch", type=click.IntRange(1), default=20, help="Samples of each rank in a step.")
@click.option("--steps", type=click.IntRange(1), default=100)
@click.option("--lr", default=0.002)
def main(text, words, width, length, batch, steps, lr):
    hc.init()
    torch.manual_seed(0)
    objective = NextOrHiddenToken()
    try:
        train, test = CausalText(word_tokens(text, words), length).split(0.05)
    except ValueError as error:
        raise BadArgument(str(error)) from None
    chain = lstm_language_model(vocabulary=train.tokens.vocabulary, width=width, dropout=0.2, tied=True)
    model = hc.CheckpointSequential(chain, segments=len(chain))

    sample = train.batch(range(batch), [0] * batch)
    for name, context in (("kept", hc.without_recomputation), ("recomputed", nullcontext)):
        with context():
            peak = measure_peak(lambda: objective.loss(model(*sample.inputs), sample).backward()).peak_bytes
            start = time.perf_counter()
            objective.loss(model(*sample.inputs), sample).backward()
        if hc.rank() == 0:
            print(f"{name}: peak {show_bytes(peak)}, {time.perf_counter() - start:.3f} s a step", flush=True)

    optimizer = hc.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr), model.named_parameters())
    hc.broadcast_parameters(model.state_dict(), root_rank=0)
    torch.manual_seed(1 + hc.rank())
    with Loader(train, SampleStream(len(train), 0), batch, hc.rank(), hc.size()) as loader:
        for step, (part, _) in zip(range(1, steps + 1), loader):
            optimizer.zero_grad()
            loss = objective.loss(model(*part.inputs), part)
            loss.backward()
            optimizer.step()
            if step % 10 == 0 or step == steps:
                own = loss.item()
                if hc.rank() == 0:
                    print(f"step {step}: loss {own:.4f} on rank 0", flush=True)
    held_out = evaluate(model, test, objective, batch=batch, batches=20, autocast=nullcontext)["loss"]
    if hc.rank() == 0:
        print(f"perplexity of held-out text: {math.exp(held_out):.1f}")


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
    vocabulary = hc.broadcast_object(tokenizer.to_str(), root_rank=0)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "words.json")
        file.write_text(vocabulary)
        return Tokens(text, file)


if __name__ == "__main__":
    main()
