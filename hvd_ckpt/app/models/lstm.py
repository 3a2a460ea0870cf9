"""A word-level LSTM language model as a chain.

The model is that of Zaremba, Sutskever, Vinyals, "Recurrent Neural Network Regularization" (2014): an embedding, LSTM layers, and a
decoder. Dropout is applied before, between and after the layers, but not along the sequence. The medium model of the paper for Penn
Treebank (10,000 words) has ``width=650, dropout=0.5``, the large one ``width=1500, dropout=0.65``, and both have two layers.

One tensor flows through the chain. So each sequence of a batch starts from a state of zeros, where the paper starts from the last
state of the previous sequence.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

from hvd_ckpt.app.models.options import Probability, Size, validated


class Recurrence(nn.Module):
    """One LSTM layer over the whole sequence without its final state, from and to (batch, length, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lstm(hidden)[0]


@validated
def lstm_language_model(
    *, vocabulary: Size, width: Size = 650, layers: Size = 2, dropout: Probability = 0.5, tied: bool = False
) -> nn.Sequential:
    """An LSTM language model, from token numbers (batch, length) to scores of each token (batch, length, vocabulary).

    Args:
        vocabulary: number of different tokens.
        width: width of the embeddings and of each LSTM layer.
        layers: number of LSTM layers.
        dropout: dropout probability of the embeddings and of the outputs of each LSTM layer.
        tied: whether the weights of the decoder are the embeddings, so that the first and the last block share a parameter (Press
            and Wolf, "Using the Output Embedding to Improve Language Models", 2017).

    Weights, including embeddings, are initialized in [-1 / sqrt(width), 1 / sqrt(width)], close to the ranges of the paper.

    Raises:
        ValueError: ``dropout`` is outside [0, 1), or vocabulary, width or layers are below 1.
    """
    words = nn.Embedding(vocabulary, width)
    nn.init.uniform_(words.weight, -(width**-0.5), width**-0.5)
    chain: OrderedDict[str, nn.Module] = OrderedDict(embedding=nn.Sequential(words, nn.Dropout(dropout)))
    for layer in range(layers):
        chain[f"layer{layer}"] = nn.Sequential(
            OrderedDict(recurrence=Recurrence(width), dropout=nn.Dropout(dropout))
        )
    decoder = nn.Linear(width, vocabulary)
    if tied:
        decoder.weight = words.weight
    chain["decoder"] = decoder
    return nn.Sequential(chain)
