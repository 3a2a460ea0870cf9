"""Splitting of a model's layers: :func:`tensor_parallel`, and recipes for known transformers.

A recipe maps names of modules to a kind of split, like PyTorch's ``parallelize_module``:

    "column"      ``nn.Linear``, or an ``nn.Embedding`` of numbers for each head: a part has a slice of the outputs
    "row"         ``nn.Linear``: a part has a slice of the inputs; outputs are summed
    "slice:0"     a parameter or buffer by itself: a part has a slice along this dimension, such as a scale of each head
    "fused:3"     "column" for a weight of 3 equal blocks, such as query, key and value: a part has its slice of each
    "vocabulary"  ``nn.Embedding``, or the ``nn.Linear`` that scores tokens: a part has a slice of the vocabulary
    "heads:a,b"   attention around such layers: a part has a slice of the heads, and the attributes a and b are divided
    "features"    a perceptron around such layers that draws random numbers between them
    "block"       a layer of the model, of which ``sequence=True`` gives each part a share of the positions
"""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

from hvd_ckpt.collectives.agreement import errors_on_all
from hvd_ckpt.parallel.tensor.copies import watch_copies
from hvd_ckpt.parallel.tensor.functions import SHARE, WHOLE
from hvd_ckpt.parallel.tensor.layers import Blocks, Place, cuts_in, is_transposed, split
from hvd_ckpt.parallel.tensor.verification import Verification, copy_of
from hvd_ckpt.processes.grid import current
from hvd_ckpt.utils.cuts import Cut
from hvd_ckpt.utils.fingerprint import fingerprint
from hvd_ckpt.utils.rules import check
from hvd_ckpt.utils.text import check_instance
from hvd_ckpt.utils.unmaterialized import check_shapes

Model = TypeVar("Model", bound=nn.Module)
Recipe = Mapping[str, str]

_BERT_LAYER = {
    "": "block",
    "attention.self": "heads:num_attention_heads,all_head_size",
    "attention.self.query": "column",
    "attention.self.key": "column",
    "attention.self.value": "column",
    "attention.output.dense": "row",
    "intermediate.dense": "column",
    "output.dense": "row",
}
RECIPES: dict[str, Recipe] = {
    # Of the classes of this library's models and of transformers', by the class of the module that the names are relative to.
    "Embedding": {"tokens": "vocabulary"},
    "EmbeddingsBlock": {"tokens": "vocabulary"},
    "GPTBlock": {
        "": "block",
        "attention": "heads:heads",
        "attention.project": "fused:3",
        "attention.output": "row",
        "perceptron.0": "column",
        "perceptron.2": "row",
    },
    "Chain": {"head.1": "vocabulary"},
    "GPT2Model": {"wte": "vocabulary"},
    "GPT2Block": {
        "": "block",
        "attn": "heads:num_heads,split_size",
        "attn.c_attn": "fused:3",
        "attn.c_proj": "row",
        "mlp.c_fc": "column",
        "mlp.c_proj": "row",
    },
    "GPT2LMHeadModel": {"lm_head": "vocabulary"},
    "HeadBlock": {"head": "vocabulary", "head.scores": "vocabulary"},  # XLNet's and GPT-2's
    "BertEmbeddings": {"word_embeddings": "vocabulary"},
    "BertLayer": _BERT_LAYER,
    "BertLMPredictionHead": {"decoder": "vocabulary"},
    "RobertaEmbeddings": {"word_embeddings": "vocabulary"},
    "RobertaLayer": _BERT_LAYER,
    "RobertaLMHead": {"decoder": "vocabulary"},
    "XLNetModel": {"word_embedding": "vocabulary"},
    "XLNetLayer": {"rel_attn": "xlnet", "ff": "features", "ff.layer_1": "column", "ff.layer_2": "row"},
    "XLNetLMHeadModel": {"lm_loss": "vocabulary"},
}
_XLNET_CUTS = {  # the dimension of heads in each parameter of its attention
    "q": 1, "k": 1, "v": 1, "o": 1, "r": 1, "r_r_bias": 0, "r_s_bias": 0, "r_w_bias": 0, "seg_embed": 1,
}  # fmt: skip
_KIND = re.compile(r"column|row|fused:[1-9]\d*|vocabulary|features|block|slice:\d|heads(:\w+(,\w+)*)?")


def tensor_parallel(
    model: Model, recipe: Recipe | None = None, *, sequence: bool = False, verify: bool = True
) -> Model:
    """Splits layers of a model over the parts of ``hc.init(tensor=...)``, in place: each part keeps its slices of their weights.

    Every part passes the same whole model, so the initial model is the same for any number of parts. With one part nothing
    changes. Call it before you create the optimizer. Collective over all processes.

    Args:
        model: the whole model, on all processes with the same weights.
        recipe: names of modules (``*`` matches any text), each with its kind of split (:mod:`hvd_ckpt.parallel.tensor.recipes`). By
            default, it is that of the GPT, GPT-2, BERT, RoBERTa and XLNet of this library and of ``transformers``.
        sequence: whether each part also has only 1 / t of the positions between split layers (sequence parallelism, Korthikanti et
            al., 2022). This applies to consecutive modules that the recipe calls blocks, with values of shape (batch, positions,
            width). Not for XLNet.
        verify: whether the first call of the split model compares it with the whole one, whose weights are kept until then: values
            and gradients of one forward and backward pass, of copies. See :mod:`hvd_ckpt.parallel.tensor.verification`.

    Returns:
        The model.

    Raises:
        ValueError: the recipe names a module that is not in the model, or a module cannot be split in the given way. Or a size is
            not a multiple of the number of parts, or weights or recipes differ between parts. Raised on every process. The first
            call of the model raises it if it computes other values or gradients than the whole model.
    """
    check_instance(model, nn.Module, "model must be a torch.nn.Module")
    grid = current()
    cuts: dict[str, dict[str, Cut]] = {}
    # Within parts.alone() one process stands for a part, and there is no other one to agree with.
    with contextlib.nullcontext() if grid.alone else errors_on_all("tensor_parallel"):
        check_shapes(model.named_parameters())
        chosen = {name: kind for name, kind in _chosen(model, recipe) if sequence or kind != "block"}
        if sequence and "block" not in chosen.values():
            raise ValueError(
                "tensor_parallel(sequence=True): the recipe has no blocks; name the layers that follow each other, such as "
                '{"layer*": "block"} (those of XLNet have two streams, and cannot be split so)'
            )
        for name, kind in chosen.items():
            module = model.get_submodule(_module_of(name, kind))
            cuts.setdefault(_module_of(name, kind), {}).update(_cuts_of(name, module, kind, grid.tensor))
        _check_ties(model, cuts)
    # Nothing of the model has been changed yet: either all parts split it, or none does.
    if grid.size > 1 and not grid.alone:
        _check_equal(model, chosen)
    if grid.tensor == 1:
        return model
    kinds = dict.fromkeys(cuts, "features")  # where a parameter is split by itself
    kinds |= {name: kind for name, kind in chosen.items() if name in cuts}
    split_kinds = _with_regions(kinds)
    verifies = verify and not grid.alone and not any(one.is_meta for one in model.parameters())
    whole = copy_of(model) if verifies else None
    _split(model, split_kinds, cuts)
    watched: dict[str, nn.Module] = {"": model}
    if whole is not None and not sequence:
        # A stage calls its blocks, not the model. Modules whose results may be those of a part are not verified alone.
        watched |= {name: one for name, one in model.named_modules() if name not in kinds and is_split(one)}
    Verification(whole, lambda twin: _split(twin, split_kinds, cuts)).watch(watched)
    watch_copies()
    return model


def _split(model: nn.Module, kinds: Mapping[str, str], cuts: Mapping[str, Mapping[str, Cut]]) -> None:
    """Splits the modules of these names, in their order."""
    count, modules = current().tensor, dict(model.named_modules())
    blocks = [name for name in modules if kinds.get(name) == "block"]
    # Blocks of one container follow each other.
    consecutive = {
        parent: Blocks([name for name in blocks if _parent(name) == parent])
        for parent in map(_parent, blocks)
    }
    for name, kind in kinds.items():
        kind, _, options = kind.partition(":")
        inside = kind == "block" or any(name.startswith(f"{block}.") for block in blocks)
        place, module = Place(SHARE if inside else WHOLE, name, consecutive.get(_parent(name))), modules[name]
        split(module, "column" if kind == "fused" else kind, dict(cuts.get(name, {})), place)
        for attribute in options.split(",") if kind == "heads" and options else ():
            setattr(module, attribute, getattr(module, attribute) // count)
    for following in consecutive.values():
        following.watch(model)


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _module_of(name: str, kind: str) -> str:
    """Name of the module that is split, or has the parameter or buffer that is."""
    return _parent(name) if kind.startswith("slice") else name


def _with_regions(kinds: Mapping[str, str]) -> dict[str, str]:
    """The kinds of split by name, and of modules in which a column layer hands its part to a row layer, which are regions, too."""
    regions = [name for name, kind in kinds.items() if kind.startswith(("heads", "features", "block"))]
    rows = [name for name, kind in kinds.items() if kind == "row"]
    added = dict[str, str]()
    for name, kind in kinds.items():
        if not kind.startswith(("column", "fused")):
            continue
        around = _parent(name)
        while around and not any(row.startswith(f"{around}.") for row in rows):
            around = _parent(around)
        known = [*regions, *added]
        if rows and not any(not other or f"{around}.".startswith(f"{other}.") for other in known):
            added[around] = "features"
    return {**kinds, **added}


def is_split(model: nn.Module) -> bool:
    """Whether :func:`tensor_parallel` has split layers of the model."""
    return any(cuts_in(module) for module in model.modules())


def _chosen(model: nn.Module, recipe: Recipe | None) -> Iterator[tuple[str, str]]:
    """Name and kind of each module, parameter or buffer that is split."""
    modules = dict(model.named_modules())
    if is_split(model):
        raise ValueError("tensor_parallel: the model is split already; call it once")
    if recipe is None:
        known = _known(modules)
        if not known:
            classes = sorted({type(module).__name__ for module in modules.values()})
            raise ValueError(
                f"tensor_parallel has no recipe for a {type(model).__name__} with modules of {', '.join(classes)}; give one, "
                f'such as {{"*.up": "column", "*.down": "row"}}'
            )
        yield from known.items()
        return
    if not isinstance(recipe, Mapping):
        raise ValueError(
            f"tensor_parallel: the recipe must map names of modules to kinds of split, got {recipe!r:.99}"
        )
    tensors = {
        f"{prefix}.{name}".lstrip("."): None
        for prefix, module in modules.items()
        for name in (*module._parameters, *module._buffers)
        if getattr(module, name) is not None
    }
    for pattern, kind in recipe.items():
        if not isinstance(pattern, str) or not isinstance(kind, str) or not _KIND.fullmatch(kind):
            raise ValueError(
                f"tensor_parallel: {pattern!r:.99} is to be split by {kind!r:.99}; give column, row, fused:3, slice:0, vocabulary, "
                f"heads:ATTRIBUTES, features or block"
            )
        named: Mapping[str, Any] = tensors if kind.startswith("slice") else modules
        names = [name for name in named if fnmatch.fnmatchcase(name, pattern)]
        if not names:
            nearest = difflib.get_close_matches(pattern, named, 3, 0.0)
            what = "module" if named is modules else "parameter or buffer"
            raise ValueError(
                f"tensor_parallel: the model has no {what} {pattern!r:.99}; the nearest are "
                f"{', '.join(map(repr, nearest)) or 'none'}"
            )
        for name in names:
            # A pattern names the outermost of modules within one another: "layer*" is layer0, and nothing in it.
            if not any(name.startswith(f"{other}.") or other == "" != name for other in names):
                yield name, kind


def _known(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    known: dict[str, str] = {}
    seen: set[nn.Module] = set()
    for prefix, module in modules.items():
        recipe = next(
            (RECIPES[kind.__name__] for kind in type(module).__mro__ if kind.__name__ in RECIPES), {}
        )
        for relative, kind in recipe.items():
            name = f"{prefix}.{relative}".strip(".")
            there = modules.get(name)
            fits = kind != "vocabulary" or isinstance(there, (nn.Linear, nn.Embedding))
            # Modules come from the outside in, so where two recipes name one module, that of the outer one counts.
            if there is not None and fits and there not in seen:
                seen.add(there)
                known[name] = kind
    return known


def _cuts_of(name: str, module: nn.Module, kind: str, parts: int) -> dict[str, Cut]:
    """The cuts of the parameters of a module.

    Raises:
        ValueError: it cannot be split so.
    """
    kind, _, options = kind.partition(":")
    where = f"tensor_parallel: {name!r}, {'of' if kind == 'slice' else 'a'} {type(module).__name__},"
    if kind in ("heads", "features", "block"):
        for attribute in options.split(",") if options else ():
            value = getattr(module, attribute, None)
            if not isinstance(value, int):
                raise ValueError(f"{where} has no whole number {attribute!r}; name those of heads or widths")
            if value % parts:
                raise ValueError(f"{where} has {attribute}={value}, which tensor={parts} does not divide")
        return {}
    if kind == "slice":
        attribute, dim = name.rpartition(".")[2], int(options)
        tensor = getattr(module, attribute)
        if attribute in module._buffers and attribute not in module._non_persistent_buffers_set:
            raise ValueError(
                f"{where} is a buffer, which is split only if it was registered with persistent=False"
            )
        if dim >= tensor.dim():
            raise ValueError(f"{where} has {tensor.dim()} dimensions, so no slices along dimension {dim}")
        _check_divides(where, f"elements along dimension {dim}", tensor.shape[dim], parts)
        return {attribute: Cut(dim, tensor.shape[dim])}
    _check_computes_itself(where, module)
    if kind == "xlnet":
        heads = module.get_parameter("q").shape[1]
        _check_divides(where, "heads", heads, parts)
        return {parameter: Cut(dim, heads) for parameter, dim in _XLNET_CUTS.items()}
    if kind in ("vocabulary", "column") and isinstance(module, nn.Embedding):
        wrong = module.max_norm is not None or module.sparse or module.scale_grad_by_freq
        check({"tensor": parts, "max_norm, sparse or scale_grad_by_freq": wrong},
              {"max_norm, sparse or scale_grad_by_freq": f"{where} of max_norm, sparse or scale_grad_by_freq"})  # fmt: skip
        if kind == "vocabulary":
            return {"weight": Cut(0, module.num_embeddings)}
        _check_divides(where, "outputs", module.embedding_dim, parts)
        return {"weight": Cut(1, module.embedding_dim)}
    if not (isinstance(module, nn.Linear) or is_transposed(module)):
        raise ValueError(
            f"{where} cannot be split by {kind}, which is for nn.Linear{' and nn.Embedding' * (kind != 'row')}"
        )
    weight = module.get_parameter("weight")
    outputs, inputs = (1, 0) if is_transposed(module) else (0, 1)
    dim = inputs if kind == "row" else outputs
    blocks = int(options) if kind == "fused" else 1
    size = weight.shape[dim]
    if kind != "vocabulary":
        _check_divides(where, "inputs" if kind == "row" else "outputs", size, parts * blocks)
    elif size < parts:
        raise ValueError(f"{where} has {size} outputs, fewer than tensor={parts}")
    cuts = {"weight": Cut(dim, size, blocks)}
    if kind != "row" and module._parameters.get("bias") is not None:
        cuts["bias"] = Cut(0, size, blocks)
    return cuts


def _check_computes_itself(where: str, module: nn.Module) -> None:
    """Raises ValueError for a layer whose ``forward`` or parameters a split one would replace."""
    overridden = "forward" in module.__dict__ or (
        isinstance(module, (nn.Linear, nn.Embedding))
        and type(module).forward not in (nn.Linear.forward, nn.Embedding.forward)
    )
    if overridden:
        raise ValueError(
            f"{where} has a forward method of its own, which a split layer would drop; split a plain layer within it"
        )
    # A parametrization makes weight a property of the class, older functions and pruning make it an attribute.
    for name in ("weight", "bias"):
        if isinstance(getattr(module, name, None), Tensor) and name not in module._parameters:
            raise ValueError(
                f"{where} computes its {name} from other parameters (a parametrization, weight_norm, spectral_norm or pruning), "
                f"which cannot be split; split the layer without it"
            )


def _check_ties(model: nn.Module, cuts: Mapping[str, Mapping[str, Cut]]) -> None:
    known: dict[Tensor, Cut | None] = {}
    for name, module in model.named_modules():
        if not (isinstance(module, (nn.Linear, nn.Embedding)) or is_transposed(module)):
            continue  # it may have the parameter of a layer within, as the heads of transformers do
        for attribute, parameter in module.named_parameters(recurse=False):
            cut = cuts.get(name, {}).get(attribute)
            if known.setdefault(parameter, cut) != cut:
                raise ValueError(
                    f"tensor_parallel: the {attribute} of {name!r} is tied to one that is cut in another way, or not at all; give "
                    f"both modules the same kind of split"
                )


def _check_divides(where: str, what: str, size: int, parts: int) -> None:
    if size % parts:
        raise ValueError(
            f"{where} has {size} {what}, which {parts} does not divide; choose another size, or init(tensor=)"
        )


def _check_equal(model: nn.Module, kinds: Mapping[str, str]) -> None:
    """Raises ValueError on all parts where one has another recipe or model. Collective."""
    digests = {
        name: (tuple(tensor.shape), 0 if tensor.is_meta else int(fingerprint(tensor)))
        for name, tensor in model.state_dict(keep_vars=True).items()
    }
    ours = current().gather_objects((dict(kinds), digests), stages=False)
    first_recipe, first_weights = ours[0]
    for part, (recipe, weights) in enumerate(ours):
        if recipe != first_recipe:
            raise ValueError(f"tensor_parallel: parts 0 and {part} have different recipes; give all the same")
        both = {**first_weights, **weights}
        if names := [name for name in both if first_weights.get(name) != weights.get(name)]:
            raise ValueError(
                f"tensor_parallel: {names[0]!r} differs between parts 0 and {part}; give all the same model, such as by "
                f"torch.manual_seed(seed) before it is made"
            )
