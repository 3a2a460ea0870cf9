"""BERT on text with Transformers' Trainer, gradient checkpointing, an optimizer over all ranks (needs ``accelerate``).

    horovodrun -np 2 python examples/hugging_face_trainer.py --text FILE

15 % of the tokens, bytes here, are hidden and predicted.
"""

import os
from pathlib import Path

import click
import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForMaskedLM, TrainingArguments

import hvd_ckpt as hc
from hvd_ckpt.app.integrations.transformers import Trainer

MASK, VOCABULARY = 256, 257


class MaskedBytes(Dataset):
    """Rows of bytes; what is hidden depends on the number of the row alone."""

    def __init__(self, text, length):
        rows = len(text) // length
        self.rows = torch.frombuffer(bytearray(text[: rows * length]), dtype=torch.uint8).view(rows, length)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index].long()
        hidden = torch.rand(row.shape, generator=torch.Generator().manual_seed(index)) < 0.15
        hidden[0] = True  # so that each row has a loss
        return {"input_ids": row.masked_fill(hidden, MASK), "labels": row.masked_fill(~hidden, -100)}


@click.command(help=__doc__.splitlines()[0], context_settings={"show_default": True})
@click.option("--text", default=os.__file__, help="A text file.")
@click.option("--steps", type=click.IntRange(1), default=20)
@click.option("--batch", type=click.IntRange(1), default=8, help="Samples of each rank in a micro-batch.")
@click.option("--accumulate", type=click.IntRange(1), default=2, help="Micro-batches of a step.")
@click.option("--length", type=click.IntRange(8, 512), default=128, help="Tokens of a sample.")
@click.option("--width", type=click.IntRange(4), default=64, help="A multiple of the 4 heads.")
@click.option("--layers", type=click.IntRange(1), default=2)
@click.option("--output", default="runs/hugging_face_trainer", help="Folder of the trained model.")
def main(text, steps, batch, accumulate, length, width, layers, output):
    hc.init()
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers}
    model = BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, num_attention_heads=4, **sizes))
    arguments = TrainingArguments(
        output,
        max_steps=steps,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulate,
        gradient_checkpointing=True,
        learning_rate=1e-3,
        logging_steps=2,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    data = MaskedBytes(Path(text).read_bytes(), length)
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.model_accepts_loss_kwargs = False  # a loss is the mean of its micro-batch, as BERT's is
    torch.manual_seed(1 + hc.rank())  # different dropout on each rank
    trainer.train()
    trainer.save_model()  # by rank 0
    for entry in trainer.state.log_history:
        if hc.rank() == 0 and "loss" in entry:
            print(f"step {entry['step']}: loss {entry['loss']:.4f}", flush=True)


if __name__ == "__main__":
    main()
