"""A word-level LSTM language model as a chain.

Zaremba, Sutskever, Vinyals, "Recurrent Neural Network Regularization" (2014): an embedding, LSTM layers with dropout before,
between and after them, but never along the sequence, and a decoder. Their medium model for Penn Treebank (10,000 words) has
``width=650, dropout=0.5``, the large one ``width=1500, dropout=0.65``, both two layers.

One tensor flows through the chain. Every sequence of a batch therefore starts from a state of zeros, where the paper starts
from the last state of the sequence before.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

from hvd_ckpt.app.models.catalog import at_least_1, check_dropout


class Recurrence(nn.Module):
    """One LSTM layer over the whole sequence, without its final state: (batch, length, width) in and out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.lstm(hidden)[0]
        return output


def lstm_language_model(
    *, vocabulary: int, width: int = 650, layers: int = 2, dropout: float = 0.5, tied: bool = False
) -> nn.Sequential:
    """An LSTM language model: token numbers (batch, length) to scores of every token (batch, length, vocabulary).

    Args:
        vocabulary: the number of different tokens.
        width: of the embeddings and of every LSTM layer.
        layers: how many LSTM layers.
        dropout: of the embeddings and of what each LSTM layer returns.
        tied: the decoder's weights are the embeddings (Press and Wolf, "Using the Output Embedding to Improve Language
            Models", 2017): one parameter that is used in the first block and in the last.

    Weights start in [-1 / sqrt(width), 1 / sqrt(width)], embeddings included: about the paper's ranges.

    Raises:
        ValueError: for ``dropout`` outside [0, 1); vocabulary, width or layers below 1.
    """
    at_least_1(vocabulary=vocabulary, width=width, layers=layers)
    check_dropout(dropout)
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
