"""RoBERTa on text with the library's trainer: reads a Hugging Face folder or a configuration, and writes such a folder.

    horovodrun -np 2 python examples/roberta_pretrain.py --text FILE --folder FOLDER --precision bf16

FOLDER is one that `save_pretrained` wrote. With config.json alone the weights are random, and a tokenizer.json in it makes the
tokens. Each epoch hides other tokens (Liu et al., "RoBERTa", 2019).
"""

import click

import hvd_ckpt as hc


@click.command(help=__doc__.splitlines()[0], context_settings={"show_default": True})
@click.option("--text", help="File or folder; without it the standard library's source.")
@click.option("--folder", default="roberta-mini", help="Of a model, or a model of the catalogue.")
@click.option("--length", type=click.IntRange(8), default=128)
@click.option("--steps", default=100)
@click.option("--batch", default=16, help="Samples of each rank in a step, in two micro-batches.")
@click.option(
    "--budget", help="Peak of a micro-batch's step: 0.4x, 2GiB, min; without it each layer is recomputed."
)
@click.option("--precision", default="fp32", help="fp32, bf16 or fp16.")
def main(text, folder, length, **settings):
    hc.init()
    config = hc.training.Config(
        folder, sequence_length=length, accumulate=2, warmup=1, clip=1.0, validation_split=0.02,
        eval_batches=20, data=text and f"text:{text}", **settings,
    )  # fmt: skip
    parts = hc.training.assemble(config)
    parts.model.checkpoint_interval = 0 if config.budget else 1
    outcome = hc.training.Trainer(config, *parts).run()
    if hc.rank() == 0:
        loss, accuracy = outcome.evaluation["loss"], outcome.evaluation["accuracy"]
        print(f"validation loss {loss:.4f}, accuracy {accuracy:.3f}")
        parts.model.transformers_model.save_pretrained(outcome.folder / "model")
        print(f"for RobertaForMaskedLM.from_pretrained: {outcome.folder / 'model'}")


if __name__ == "__main__":
    main()
