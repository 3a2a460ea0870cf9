"""Samples for models of transformers, guessed from the parameters of their forward passes; the first that trains is taken."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

BATCH, LENGTH = 2, 8
MOST_GUESSES = 40
Sample = dict[str, Any]


def samples(model: nn.Module, config: Any) -> Iterator[Sample]:
    """Guesses of keyword arguments for ``model.forward``."""
    parameters = {
        name: parameter
        for name, parameter in inspect.signature(model.forward).parameters.items()
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    }

    def there(*names: str) -> list[str]:
        return [name for name in names if name in parameters and name not in first]

    required = [name for name, parameter in parameters.items() if parameter.default is parameter.empty]
    first = list(required)
    first += there(getattr(model, "main_input_name", "input_ids"))
    first = first or there("input_ids", "pixel_values", "input_features")
    both = there("input_ids", "pixel_values")
    more = there("attention_mask", "decoder_input_ids", "labels")
    some = there("attention_mask", "labels")
    sets = [first + both + more, first + more, first + some, first, first + both + some, first + both]
    guesses = []
    for names in dict.fromkeys(map(tuple, sets)):
        if all(name in MAKERS or name in required for name in names):
            options = [_options(name, config) for name in names]
            guesses.append([dict(zip(names, values)) for values in itertools.product(*options)])
    for group in itertools.zip_longest(*guesses):
        yield from (guess for guess in group[:MOST_GUESSES] if guess is not None)
    try:
        yield dict(model.dummy_inputs)
    except Exception:
        return


def _options(name: str, config: Any) -> list[Any]:
    made = MAKERS.get(name, _states)(Facts(config))
    return made if isinstance(made, list) else [made]


class Facts:
    """What a configuration, or one that is part of it, says."""

    def __init__(self, config: Any) -> None:
        self.parts = [config, *(value for value in vars(config).values() if hasattr(value, "to_dict"))]
        inside = [inner for part in self.parts[1:] for inner in vars(part).values()]
        self.parts += [inner for inner in inside if hasattr(inner, "to_dict")]

    def find(self, names: str, default: int) -> Any:
        """The first of these settings."""
        for part, name in itertools.product(self.parts, names.split()):
            value = getattr(part, name, None)
            if isinstance(value, (int, list, tuple)) and not isinstance(value, bool):
                return value
        return default

    def number(self, names: str, default: int) -> int:
        """The first of these settings, or the first number of a list."""
        value = self.find(names, default)
        return value if isinstance(value, int) else value[0]

    @property
    def width(self) -> Any:
        return self.find("hidden_size d_model embed_dim dim", 32)


def _tokens(length: int = LENGTH) -> Callable[[Facts], Tensor]:
    def make(facts: Facts) -> Tensor:
        vocabulary = facts.number("vocab_size text_vocab_size codebook_size", 64)
        return torch.randint(vocabulary // 2, vocabulary, (BATCH, length))

    return make


def _mask(facts: Facts) -> Tensor:
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1, -2:] = 0
    return mask


def _states(facts: Facts) -> Tensor:
    return torch.randn(BATCH, LENGTH, facts.width)


def _randoms(*shapes: tuple[Any, ...]) -> list[Tensor]:
    return [torch.randn(shape) for shape in shapes]


def _pixels(facts: Facts) -> list[Tensor]:
    channels = facts.find("num_channels in_channels in_chans", 3)
    channels = channels if isinstance(channels, int) and channels < 16 else 3
    size = facts.find("image_size input_size img_size", 32)
    size = (size, size) if isinstance(size, int) else (size[0], size[-1])
    frames = facts.find("num_frames frames_per_clip", 2)
    frames = frames if isinstance(frames, int) else 2
    return _randoms(
        (BATCH, channels, *size), (BATCH, channels, 64, 64), (BATCH, frames, channels, *size), (BATCH, 1, channels, *size),
        (BATCH, channels, 224, 224),
    )  # fmt: skip


def _features(facts: Facts) -> list[Tensor]:
    bins = facts.find("num_mel_bins n_mels mel_bins input_feat_per_channel feature_size input_size", 80)
    positions, spectrum = facts.find("max_source_positions", 64), facts.find("spec_size", 64)
    length = facts.find("max_length", 64)
    return _randoms(
        (BATCH, bins, 2 * positions), (BATCH, 64, bins), (BATCH, bins, 64), (BATCH, length, bins),
        (BATCH, 1, spectrum, bins), (BATCH, 64, 160),
    )  # fmt: skip


def _values(facts: Facts) -> list[Tensor]:
    length, bins = facts.find("max_length", 64), facts.find("num_mel_bins", 80)
    return [*_randoms((BATCH, 4800), (BATCH, 1, 4800), (BATCH, length, bins)), _tokens()(facts)]


def _patches(facts: Facts) -> list[Tensor]:
    size = facts.find("in_channels num_channels", 3) * facts.number("patch_size", 8) ** 2
    times = facts.find("temporal_patch_size", 1)
    width = facts.width if isinstance(facts.width, int) else facts.width[0]
    return _randoms((BATCH, LENGTH, width), (16, size * times), (16, size), (BATCH, 16, width))


def _series(facts: Facts) -> list[Tensor]:
    length, channels = (
        facts.find("context_length prompt_length", 16),
        facts.find("num_input_channels input_size", 1),
    )
    return _randoms((BATCH, length, channels), (BATCH, length))


def _grid(facts: Facts) -> Tensor:
    return torch.tensor([[1, 4, 4]])


MAKERS: dict[str, Callable[[Facts], Any]] = {
    "input_ids": _tokens(),
    "labels": _tokens(),
    "decoder_input_ids": _tokens(6),
    "attention_mask": _mask,
    "decoder_attention_mask": lambda facts: torch.ones(BATCH, 6, dtype=torch.long),
    "pixel_values": _pixels,
    "pixel_values_videos": lambda facts: _pixels(facts)[2],
    "input_features": _features,
    "spectrogram": _features,
    "input_values": _values,
    "hidden_states": _patches,
    "inputs_embeds": _patches,
    "encoder_hidden_states": _states,
    "grid_thw": _grid,
    "image_grid_thw": _grid,
    "past_values": _series,
}
