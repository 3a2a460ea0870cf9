"""Small random models of transformers: one function that shrinks the configuration of any architecture."""

from __future__ import annotations

import functools
import importlib
import math
import re
from typing import Any

WIDTH = 32
IMAGE = 32
RECIPES = ("narrow", "16", "8", "short")
"""Ways to shrink, in the order in which they are tried. Of widths and heads: to the same small numbers everywhere; widths by a
factor, which keeps their relations; not at all."""

LAYERS = (
    r"(^|_)(n_)?(layers?|depths?|blocks|repeats|stacks)$|num_layers|n_layer|layers_per|hidden_layers|^depth_|num_.*_layers|"
    r"(blocks|layers|depth)_per"
)
HEADS = r"heads?$|_heads_|^n_head|num_attention_heads|head_num"
HEAD_WIDTH = r"head_dim|attention_head_size|^head_size|kv_channels|d_kv|lora_rank|key_dim|key_length|value_length|head_width"
WIDTHS = (
    r"hidden|dim$|dims$|_dim_|^dim|width|embd|d_model|ffn|d_ff|intermediate|channels?$|filters|embedding_size|d_inner|inner|planes|"
    r"_size$|output_size|embed|model_size|bottleneck|feature_size|lru|state_size|features$|units"
)
NOT_WIDTHS = (
    r"vocab|image|patch|kernel|window|sample|max_|crop|stride|pool|input_channels|num_channels|in_channels|in_chans|num_|group|chunk|"
    r"tile|merge|scale|factor|block_size|grid|ratio|bins|mel|batch|beam|context|frame|audio_channels|page|height|temporal|tokens|"
    r"image_channels|local_attn|_length|queue|codebook_size|expand|conv_size|output_stride|bucket|spatial"
)
IMAGES = "image_size|input_size$|img_size|image_height|image_width"
LIMITS = (  # of a number by its name; the first that matches
    ("vocab_size$|vocab$|num_embeddings|codebook_size|vocab_size_per|n_codes", 256),
    (IMAGES, IMAGE),
    ("sliding_window|attention_window|local_window|local_attention$", 4),
    (
        "max_.*(position|length|seq|len)|n_positions|positions$|n_ctx|context_length|seq_length|block_size$|max_len",
        64,
    ),
    ("experts_per|top_k|topk|moe_k$|router_k|active_experts|selected_experts", 2),
    ("experts$|n_routed|num_local_experts|moe_num", 4),
    ("num_queries|query_tokens|num_latents|queries$|num_query", 12),
    ("^n_groups?$|expert_group|^num_expert_groups?$", 2),
)
DERIVED = "out_features|out_indices|stage_names|transformers_version|architectures|_name_or_path"


def shrunk(config: dict[str, Any], recipe: str, ids: dict[str, int] | None = None) -> dict[str, Any]:
    """A configuration like ``config``, as nested dictionaries, with small numbers.

    Lists as long as the number of layers keep entries of a few layers, such that each combination of entries remains.
    """
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2} if ids is None else ids
    layers = max(
        (value for name, value in config.items() if _is_int(value) and _counts_layers(name)), default=0
    )
    kept = _kept_layers(config, layers)
    small: dict[str, Any] = {}
    for name, value in config.items():
        if re.fullmatch(DERIVED, name):
            continue
        if name == "per_layer_config" and value:
            parts = {int(layer): part for layer, part in value.items() if int(layer) in kept}
            small[name] = {str(kept.index(layer)): shrunk(part, recipe, ids) for layer, part in parts.items()}
        elif isinstance(value, dict) and name not in ("id2label", "label2id"):
            small[name] = shrunk(value, recipe, ids)
        elif isinstance(value, (list, tuple)) and value:
            small[name] = _list(name, list(value), recipe, kept, layers)
        elif _is_int(value):
            small[name] = _number(name, value, recipe, ids, len(kept))
        elif value == 0.0 and isinstance(value, float) and re.search("dropout|_pdrop", name):
            small[name] = 0.1
        else:
            small[name] = False if name == "use_cache" else value
    if "window_size" in config and _is_int(config.get("image_size")):
        small["image_size"] = min(
            config["image_size"], 2 * IMAGE
        )  # the last stage is no smaller than a window
    return small


def _kept_layers(config: dict[str, Any], layers: int) -> list[int]:
    """Numbers of layers, at least two (where there are as many), whose entries in the lists of the configuration differ."""
    lists = [value for value in config.values() if isinstance(value, (list, tuple)) and len(value) == layers]
    kinds: dict[str, int] = {}
    for number in range(layers):
        kinds.setdefault(repr([value[number] for value in lists]), number)
    first = sorted(kinds.values())[:4]
    others = [number for number in range(layers) if number not in first]
    return sorted([*first, *others[: max(2 - len(first), 0)]])


def _list(name: str, values: list[Any], recipe: str, kept: list[int], layers: int) -> list[Any]:
    whole = all(map(_is_int, values))
    if whole and re.search(r"index|indices|indexes|_at$|taps|layers_to", name):
        return [value for value in values if value < len(kept)] or [max(len(kept) - 1, 0)]
    if len(values) == layers > max(len(kept), 4):
        values = [values[number] for number in kept]
    if not whole:
        return [_inner(name, value, recipe, kept) for value in values]
    if re.search("image_size|input_size|img_size", name):
        return [min(value, IMAGE) for value in values]
    if re.search(LAYERS, name) or "depth" in name:
        return [min(value, 1 + (number == 0)) for number, value in enumerate(values)]
    if recipe.isdigit():
        return [_divided(name, value, int(recipe)) for value in values]
    if recipe == "narrow" and re.search(HEADS, name):
        return [value // math.gcd(*values) for value in values]
    if recipe == "narrow" and _is_width(name) and values[0] > 16:
        return [max(8, round(value * 16 / values[0] / 8) * 8) for value in values]
    return [4 if "window" in name and value >= 64 else value for value in values]


def _inner(name: str, value: Any, recipe: str, kept: list[int]) -> Any:
    if isinstance(value, dict):
        return shrunk(value, recipe)
    return _list(name, list(value), recipe, kept, 0) if value and isinstance(value, (list, tuple)) else value


def _number(name: str, value: int, recipe: str, ids: dict[str, int], layers: int) -> int:
    if value < 0:
        return value
    if value > 2 and re.search(r"token_(id|index|idx)$|_token_id_|_token$|_id$", name):
        return ids.setdefault(name, 3 + len(ids))
    if re.search(r"^patch_size|vision_patch", name):
        return 8 if value >= 14 else value
    if name == "window_size" and value <= 16:
        return min(value, 2)
    if _counts_layers(name) and not re.search(HEADS, name):
        return min(value, max(layers, 2) if value == 0 or layers > 2 else 2)
    for pattern, most in LIMITS:
        if re.search(pattern, name):
            return min(value, most)
    if recipe.isdigit():
        return _divided(name, value, int(recipe))
    if recipe == "narrow" and re.search(HEAD_WIDTH, name):
        return min(value, 8)
    if recipe == "narrow" and re.search(HEADS, name):
        return min(value, 4)
    if recipe == "narrow" and _is_width(name):
        return min(value, 2 * WIDTH if re.search("intermediate|ffn|d_ff|inner|mlp", name) else WIDTH)
    return value


def _divided(name: str, value: int, factor: int) -> int:
    """A width, or a part of one, divided."""
    width = re.search(f"{HEAD_WIDTH}|{WIDTHS}|section", name) and not re.search(f"{NOT_WIDTHS}|{HEADS}", name)
    return value // factor if width and value >= factor and value % factor == 0 else value


def _counts_layers(name: str) -> bool:
    return bool(re.search(LAYERS, name)) and "feat_extract" not in name


def _is_width(name: str) -> bool:
    return bool(re.search(WIDTHS, name)) and not re.search(NOT_WIDTHS, name)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@functools.cache
def model_types() -> tuple[str, ...]:
    """The model types of the installed transformers."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return tuple(sorted(CONFIG_MAPPING_NAMES))


def model_class(name: str) -> tuple[type, type]:
    """The classes of configuration and model: ``gpt2``, or with one of the tasks of transformers: ``gpt2:causal_lm``.

    A type without a base model is represented by the first model class that has its configuration.
    """
    from transformers import PreTrainedModel
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind, _, task = name.partition(":")
    config = CONFIG_MAPPING[kind]
    mapping = getattr(modeling_auto, f"MODEL_FOR_{task.upper()}_MAPPING" if task else "MODEL_MAPPING")
    if config in mapping:
        model = mapping[config]
        return config, model[0] if isinstance(model, (list, tuple)) else model
    module = importlib.import_module(config.__module__.replace(".configuration_", ".modeling_"))
    for value in vars(module).values():
        own = (
            isinstance(value, type)
            and issubclass(value, PreTrainedModel)
            and value.__module__ == module.__name__
        )
        if own and value.config_class is config and not value.__name__.endswith("PreTrainedModel"):
            return config, value
    raise LookupError(f"no model class with the configuration of {kind!r}")


def small_config(config_class: Any, recipe: str) -> Any:
    """A small configuration."""
    whole = config_class().to_dict()
    whole.pop("model_type", None)
    return config_class.from_dict(shrunk(whole, recipe))
