"""Accelerate over Horovod, against a plain loop: the same bits; and the example of transformers' Trainer."""

from __future__ import annotations

import importlib
import itertools
import sys
from pathlib import Path

import pytest
import torch
from same import assert_same
from torch.utils.data import DataLoader, DistributedSampler

import hvd_ckpt as hc

pytest.importorskip("accelerate")
pytestmark = pytest.mark.ranks(gloo=(2,))

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PASSES, ACCUMULATE, BATCH, CLIP, RATE = 10, 2, 2, 0.5, 1e-2


@pytest.fixture(scope="module")
def example():
    """The script, imported by name, as checkpoints pickle the arguments' class."""
    sys.path.insert(0, str(EXAMPLES))
    yield vars(importlib.import_module("hugging_face_trainer"))
    sys.path.remove(str(EXAMPLES))


def build(example):
    torch.manual_seed(7 + hc.rank())  # rank 0's weights count
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = example["BertForMaskedLM"](example["BertConfig"](vocab_size=example["VOCABULARY"], **sizes))
    model.gradient_checkpointing_enable()
    return model.train()


def plain_loop(example, data, accelerator=None):
    """The model and the loss of each micro-batch of some clipped steps."""
    model = build(example)
    hc.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    optimizer = hc.DistributedOptimizer(optimizer, model.named_parameters())
    if accelerator is not None:
        optimizer = accelerator.prepare(optimizer)
    loader = DataLoader(data, BATCH, sampler=DistributedSampler(data, hc.size(), hc.rank(), seed=3))
    torch.manual_seed(hc.rank())
    losses = []
    for batch in itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), PASSES):
        loss = model(**batch).loss / ACCUMULATE
        loss.backward() if accelerator is None else accelerator.backward(loss)
        losses.append(loss.item())
        if len(losses) % ACCUMULATE == 0:
            hc.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
    return model, losses


def test_accelerate_ends_in_the_bits_of_a_plain_loop(example, folder):
    """That of the Trainer; its own loop: tests/differential/transformers_loops.py."""
    data = example["MaskedBytes"](bytes(range(33, 125)) * 3, 16)  # 17 rows: 5 micro-batches an epoch
    arguments = example["TrainingArguments"](str(folder / "run"), use_cpu=True, report_to=[])
    trainer = example["Trainer"](build(example), arguments, train_dataset=data)
    model, losses = plain_loop(example, data)
    other, others = plain_loop(example, data, trainer.accelerator)
    assert losses == others
    hc.verify(other)
    assert_same(dict(other.named_parameters()), dict(model.named_parameters()))


def test_the_example_trains_and_leaves_a_model(example, folder, capsys):
    settings = "--steps 2 --batch 2 --accumulate 1 --length 16 --width 16 --layers 1 --output"
    example["main"].main([*settings.split(), str(folder / "run")], standalone_mode=False)
    hc.barrier()
    assert capsys.readouterr().out.count("step 2: loss ") == (hc.rank() == 0)
    example["BertForMaskedLM"].from_pretrained(folder / "run")
