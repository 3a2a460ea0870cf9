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
    required = [name for name, parameter in parameters.items() if parameter.default is parameter.empty]
    main = getattr(model, "main_input_name", "input_ids")
    first = [*required, *([main] if main in parameters and main not in required else [])]
    first += [
        name for name in ("input_ids", "pixel_values", "input_features") if name in parameters and not first
    ]
    both = [name for name in ("input_ids", "pixel_values") if name in parameters and name not in first]
    more = [
        name
        for name in ("attention_mask", "decoder_input_ids", "labels")
        if name in parameters and name not in first
    ]
    some = [name for name in more if name != "decoder_input_ids"]
    sets = [first + both + more, first + more, first + some, first, first + both + some, first + both]
    seen: set[tuple[str, ...]] = set()
    guesses = []
    for names in sets:
        if tuple(names) not in seen and all(name in _MAKERS or name in required for name in names):
            seen.add(tuple(names))
            options = [_options(name, config) for name in names]
            guesses.append([dict(zip(names, values)) for values in itertools.product(*options)])
    for group in itertools.zip_longest(*guesses):
        yield from (guess for guess in group[:MOST_GUESSES] if guess is not None)
    try:
        yield dict(model.dummy_inputs)
    except Exception:
        return


def _options(name: str, config: Any) -> list[Any]:
    maker = _MAKERS.get(name)
    if maker is None:
        return [torch.randn(BATCH, LENGTH, _find(config, _WIDTH_NAMES, 32))]
    made = maker(config)
    return made if isinstance(made, list) else [made]


_WIDTH_NAMES = ("hidden_size", "d_model", "embed_dim", "dim")


def _find(config: Any, names: tuple[str, ...], default: Any) -> Any:
    """The first of these settings, in the configuration or in one that is part of it."""
    parts = [config, *(value for value in vars(config).values() if hasattr(value, "to_dict"))]
    parts += [inner for part in parts[1:] for inner in vars(part).values() if hasattr(inner, "to_dict")]
    for part in parts:
        for name in names:
            value = getattr(part, name, None)
            if isinstance(value, (int, list, tuple)) and not isinstance(value, bool):
                return value
    return default


def _tokens(length: int = LENGTH) -> Callable[[Any], Any]:
    def make(config: Any) -> Tensor:
        vocabulary = _find(config, ("vocab_size", "text_vocab_size", "codebook_size"), 64)
        vocabulary = vocabulary[0] if isinstance(vocabulary, (list, tuple)) else vocabulary
        return torch.randint(vocabulary // 2, vocabulary, (BATCH, length))

    return make


def _mask(config: Any) -> Tensor:
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1, -2:] = 0
    return mask


def _pixels(config: Any) -> list[Tensor]:
    channels = _find(config, ("num_channels", "in_channels", "in_chans"), 3)
    channels = channels if isinstance(channels, int) and channels < 16 else 3
    size = _find(config, ("image_size", "input_size", "img_size"), 32)
    height, width = (size, size) if isinstance(size, int) else (size[0], size[-1])
    frames = _find(config, ("num_frames", "frames_per_clip"), 2)
    frames = frames if isinstance(frames, int) else 2
    return [
        torch.randn(BATCH, channels, height, width),
        torch.randn(BATCH, channels, 64, 64),
        torch.randn(BATCH, frames, channels, height, width),
        torch.randn(BATCH, 1, channels, height, width),
        torch.randn(BATCH, channels, 224, 224),
    ]


def _features(config: Any) -> list[Tensor]:
    bins = _find(
        config,
        ("num_mel_bins", "n_mels", "mel_bins", "input_feat_per_channel", "feature_size", "input_size"),
        80,
    )
    positions = _find(config, ("max_source_positions",), 64)
    spectrum = _find(config, ("spec_size",), 64)
    length = _find(config, ("max_length",), 64)
    return [
        torch.randn(BATCH, bins, 2 * positions),
        torch.randn(BATCH, 64, bins),
        torch.randn(BATCH, bins, 64),
        torch.randn(BATCH, length, bins),
        torch.randn(BATCH, 1, spectrum, bins),
        torch.randn(BATCH, 64, 160),
    ]


def _values(config: Any) -> list[Tensor]:
    bins = _find(config, ("num_mel_bins",), 80)
    length = _find(config, ("max_length",), 64)
    return [
        torch.randn(BATCH, 4800),
        torch.randn(BATCH, 1, 4800),
        torch.randn(BATCH, length, bins),
        *([tokens] if (tokens := _tokens()(config)) is not None else []),
    ]


def _boxes(config: Any) -> Tensor:
    corner = torch.randint(0, 8, (BATCH, LENGTH, 2))
    return torch.cat([corner, corner + torch.randint(1, 8, (BATCH, LENGTH, 2))], -1)


def _patches(config: Any) -> list[Tensor]:
    patch = _find(config, ("patch_size",), 8)
    patch = patch if isinstance(patch, int) else patch[0]
    channels = _find(config, ("in_channels", "num_channels"), 3)
    times = _find(config, ("temporal_patch_size",), 1)
    width = _find(config, _WIDTH_NAMES, 32)
    return [
        torch.randn(BATCH, LENGTH, width if isinstance(width, int) else width[0]),
        torch.randn(16, channels * times * patch * patch),
        torch.randn(16, channels * patch * patch),
        torch.randn(BATCH, 16, width if isinstance(width, int) else width[0]),
    ]


def _series(config: Any) -> list[Tensor]:
    length = _find(config, ("context_length", "prompt_length"), 16)
    channels = _find(config, ("num_input_channels", "input_size"), 1)
    return [torch.randn(BATCH, length, channels), torch.randn(BATCH, length)]


_MAKERS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("input_ids", "text_input_ids", "decoder_input_ids_", "query_ids"), _tokens()),
    "decoder_input_ids": _tokens(6),
    "labels": _tokens(),
    "attention_mask": _mask,
    "decoder_attention_mask": lambda config: torch.ones(BATCH, 6, dtype=torch.long),
    **dict.fromkeys(("pixel_values", "images", "flat_pixel_values"), _pixels),
    **dict.fromkeys(("pixel_values_videos", "pixel_values_frames"), lambda config: _pixels(config)[2]),
    **dict.fromkeys(("input_features", "audio_features", "spectrogram"), _features),
    **dict.fromkeys(("input_values", "padded_values"), _values),
    **dict.fromkeys(("hidden_states", "inputs_embeds", "embeddings"), _patches),
    "encoder_hidden_states": lambda config: torch.randn(BATCH, LENGTH, _find(config, _WIDTH_NAMES, 32)),
    "grid_thw": lambda config: torch.tensor([[1, 4, 4]]),
    "image_grid_thw": lambda config: torch.tensor([[1, 4, 4]]),
    "bbox": _boxes,
    "past_values": _series,
    "prompt_pixel_values": lambda config: _pixels(config)[0],
}
