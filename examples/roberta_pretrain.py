"""RoBERTa on text, from a Hugging Face folder or a configuration, by the library's trainer, and back into such a folder.

    horovodrun -np 2 python examples/roberta_pretrain.py --text FILE --folder FOLDER --precision bf16

FOLDER is one that `save_pretrained` wrote; config.json alone starts at random, and a tokenizer.json in it makes the tokens. What is
hidden changes with every epoch (Liu et al., "RoBERTa", 2019).
"""

from pathlib import Path

import click
import torch
from transformers import RobertaConfig

import hvd_ckpt as hc
from hvd_ckpt.command_line import BadArgument, OneLineErrors
from hvd_ckpt.data.text import MaskedText
from hvd_ckpt.data.tokens import Tokens
from hvd_ckpt.models.hugging_face import from_config, from_folder
from hvd_ckpt.models.objectives import NextOrHiddenToken
from hvd_ckpt.training.config import Config
from hvd_ckpt.training.trainer import Trainer


@click.command(cls=OneLineErrors, help=__doc__.splitlines()[0], context_settings={"show_default": True})
@click.option("--text", help="File or folder; without it the standard library's source.")
@click.option(
    "--folder", type=click.Path(exists=True, path_type=Path), help="Of a model; without it a small one."
)
@click.option("--length", type=click.IntRange(8), default=128)
@click.option("--steps", default=100)
@click.option("--batch", default=16, help="Samples of each rank in a step, in two micro-batches.")
@click.option(
    "--budget", help="Peak of a micro-batch's step: 0.4x, 2GiB, min; without it each layer is recomputed."
)
@click.option("--precision", default="fp32", help="fp32, bf16 or fp16.")
def main(text, folder, length, **settings):
    hc.init()
    torch.manual_seed(0)
    try:
        config = Config("roberta", accumulate=2, warmup=1, clip=1.0, eval_batches=20, **settings)
        tokenizer = folder / "tokenizer.json" if folder else None
        tokens = Tokens(text, tokenizer if tokenizer and tokenizer.is_file() else None)
        train, test = MaskedText(tokens, length).split(0.02)
        model = from_folder(folder) if folder else from_config(small(tokens.vocabulary, length))
        model.checkpoint_interval = 0 if config.budget else 1
        trainer = Trainer(config, model, NextOrHiddenToken(), train, test)
    except (ValueError, OSError) as error:
        raise BadArgument(str(error)) from None
    outcome = trainer.run()
    if hc.rank() == 0:
        print(
            f"validation loss {outcome.evaluation['loss']:.4f}, accuracy {outcome.evaluation['accuracy']:.3f}"
        )
        model.transformers_model.save_pretrained(outcome.folder / "model")
        print(f"for RobertaForMaskedLM.from_pretrained: {outcome.folder / 'model'}")


def small(vocabulary, length):
    return RobertaConfig(
        vocab_size=vocabulary,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=1024,
        max_position_embeddings=length + 2,  # positions count from the padding token's number, 1, plus one
    )


if __name__ == "__main__":
    main()
