"""Search for the chain of blocks in a model. A plan decides about each block.

The layers of deep models are children of an ``nn.Sequential`` or an ``nn.ModuleList``, and the forward pass calls one after the
other. One forward pass that saves nothing shows which of them it calls, in which order and with which arguments.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hvd_ckpt.planning.inputs import copied, tensors_of
from hvd_ckpt.planning.policy import base_class
from hvd_ckpt.recompute.calls import map_tensors
from hvd_ckpt.recompute.keeper import saving_nothing
from hvd_ckpt.recompute.reach import is_transformed
from hvd_ckpt.recompute.sequential import places_of
from hvd_ckpt.utils.torch_private import disable_dynamo, is_compiled

_LEAVES_WITH_WEIGHTS = 2  # number of leaf modules with weights in one block of consecutive leaf modules


@dataclass(eq=False)
class FoundBlock:
    """A block as the forward pass called it.

    Attributes:
        members: names of its modules. There are several only if an ``nn.Sequential`` calls them one after the other.
        modules: its modules.
        container: name of the plain ``nn.Sequential`` whose child it is, or None.
        args, kwargs: its arguments; None for a block that equals an earlier one or cannot be run by itself.
        obstacle: the reason why it cannot be run by itself, or None.
        like: index of the first block with the same class, configuration, parameters and input, which may be this one.
    """

    members: tuple[str, ...]
    modules: list[nn.Module]
    container: str | None
    args: tuple[Any, ...] | None = None
    kwargs: dict[str, Any] | None = None
    like: int = -1
    obstacle: str | None = None

    def __str__(self) -> str:
        return f"block '{self.members[0]}'"

    @property
    def compiled(self) -> bool:
        return any(is_compiled(module) for module in self.modules)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the block as a function."""
        result = self.modules[0](*args, **kwargs)
        for module in self.modules[1:]:
            result = module(result)
        return result


def find_blocks(
    model: nn.Module, forward: Callable[[], Any], names: Sequence[str] | None = None
) -> list[FoundBlock]:
    """The blocks of ``model`` in the order in which ``forward()`` calls them.

    Args:
        forward: runs the model on the sample.
        names: names of the modules that are the blocks, as in ``model.named_modules()``. A name that ends in ``.*`` means all
            children. By default, blocks are the children of each ``nn.Sequential`` and ``nn.ModuleList`` that is not inside another
            block.

    Blocks that a forward pass calls more than once or not at all are left out.

    Raises:
        ValueError: a name is not that of a module, a named module is inside another one, or no block is called. Or a block pops a
            skip connection of another block, so it cannot be measured by itself.
    """
    proposed = _named(model, names) if names is not None else proposed_blocks(model)
    calls: dict[str, int] = {}
    called: dict[str, FoundBlock] = {}
    signatures: dict[Any, int] = {}

    @disable_dynamo
    def before(block: FoundBlock, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        key = block.members[0]
        calls[key] = calls.get(key, 0) + 1
        if calls[key] > 1:
            return
        called[key] = block  # in the order of calls
        if is_transformed(module, args, kwargs):
            block.obstacle = "it runs inside a transform of torch.func"
            # A kind of its own: no signature equals a name.
            block.like = signatures.setdefault(key, len(signatures))
            return
        signature = _signature(block, args, kwargs)
        if signature not in signatures:
            signatures[signature] = len(signatures)
            # Copied before the block runs, which may write its input in
            # place. Blocks of a known kind get no copy: inputs are large.
            block.args, block.kwargs = copied((args, kwargs), _detached)
        block.like = signatures[signature]

    handles = [
        block.modules[0].register_forward_pre_hook(functools.partial(before, block), with_kwargs=True)
        for block in proposed
        if not isinstance(block.modules[0], torch.jit.ScriptModule)  # which has no hooks
    ]
    try:
        try:
            # With gradients, so that inputs require them as in training. The tensors that autograd would save are dropped at once.
            with torch.enable_grad(), saving_nothing():
                forward()
        except Exception:
            # Code that needs a graph, such as torch.autograd.grad: run again with the whole graph.
            for state in (calls, called, signatures):
                state.clear()
            for block in proposed:
                block.args = block.kwargs = block.obstacle = None
            with torch.enable_grad():
                forward()
    finally:
        for handle in handles:
            handle.remove()
    inputs = {block.like: (block.args, block.kwargs) for block in called.values() if block.args is not None}
    blocks = [block for key, block in called.items() if calls[key] == 1]
    if not blocks:
        raise ValueError(
            f"No chain of blocks was found in this {type(model).__name__}: none of its nn.Sequential and nn.ModuleList children is "
            "called exactly once. Name the modules to plan for with blocks=[...]."
        )
    for block in blocks:
        _check_skips(block)
    first: dict[int, int] = {}  # the first block of a kind may have been left out, as it is called twice
    for index, block in enumerate(blocks):
        kind = block.like
        block.like = first.setdefault(kind, index)
        block.args, block.kwargs = inputs.get(kind, (None, None)) if block.like == index else (None, None)
    return blocks


def _check_skips(block: FoundBlock) -> None:
    """Raises ValueError if the block pops a skip connection that another block has stashed (see ``hc.skip.skippable``)."""
    inside = [part for module in block.modules for part in module.modules()]
    stashed, popped = (
        {
            (getattr(part, "_skip_namespace", None), name)
            for part in inside
            for name in getattr(part, names, ())
        }
        # Read by name, since the classes of skip connections are in `pipeline`, a room above this one.
        for names in ("_stashed_names", "_popped_names")
    )
    for _, name in popped - stashed:
        raise ValueError(
            f"Block '{block.members[0]}' pops the skip connection '{name}', so it cannot be measured by itself: such a model has "
            "no plan. Use pipeline stages with a balance of your own, or segments."
        )


def proposed_blocks(model: nn.Module) -> list[FoundBlock]:
    """The possible blocks of a model, in the order of its modules. A forward pass may call only some of them."""
    # Which modules become blocks:
    #
    #     children of an nn.Sequential or an nn.ModuleList that are composite modules, one block each (transformer layers)
    #     leaf children of an nn.Sequential, joined until a block has two leaves with weights (convolution and norm)
    #     a child that is itself a container of several composite modules is opened (the stages of a ResNet)
    #     a child that stands at several places runs as it is
    #     any other module is searched for containers (a model that has an encoder)
    blocks: list[FoundBlock] = []
    places = Counter(id(child) for module in model.modules() for child in places_of(module).values())

    def visit(name: str, module: nn.Module) -> None:
        inside = f"{name}." if name else ""
        if not _is_container(module):
            for child_name, child in module.named_children():
                visit(f"{inside}{child_name}", child)
            return
        leaves: dict[str, nn.Module] = {}
        plain = _is_plain(module)

        def flush() -> None:
            if len(leaves) > 1 or any(map(_has_weights, leaves.values())):
                blocks.append(FoundBlock(tuple(leaves), list(leaves.values()), name))
            leaves.clear()

        for child_name, child in places_of(module).items():
            full, is_alone = f"{inside}{child_name}", places[id(child)] == 1
            if is_alone and plain and not list(child.children()):
                leaves[full] = child
                if sum(map(_has_weights, leaves.values())) == _LEAVES_WITH_WEIGHTS:
                    flush()
                continue
            flush()
            if is_alone and _holds_chain(child):
                visit(full, child)
            elif is_alone:
                blocks.append(FoundBlock((full,), [child], name if plain else None))
        flush()

    visit("", model)
    return blocks


def children_of(model: nn.Module) -> list[str]:
    """The names of the blocks of a chain that can be cut into parts.

    Raises:
        ValueError: the model is not a chain, or a block occurs several times in it.
    """
    if not isinstance(model, nn.Sequential):
        raise ValueError(f"stages need a chain or an nn.Sequential, got {type(model).__name__}")
    children = places_of(model)
    places = list(children.values())
    for name, child in children.items():
        if places.count(child) > 1:
            raise ValueError(
                f"block '{name}' stands at several places of the chain: give each place a block of its own"
            )
    return list(children)


def check_called(model: nn.Module, blocks: Sequence[FoundBlock]) -> None:
    """Raises ValueError unless ``blocks`` include all of :func:`children_of` a chain."""
    called = {block.members[0] for block in blocks}
    for name in children_of(model):
        if name not in called:
            raise ValueError(f"stages need a chain that calls each block once, but not block '{name}'")


def _is_container(module: nn.Module) -> bool:
    if isinstance(module, nn.ModuleList):
        return len(module) > 1
    # One with a forward of its own probably loops over its children, if all of them are composite.
    return isinstance(module, nn.Sequential) and (
        _is_plain(module) or (len(module) > 1 and all(list(child.children()) for child in module))
    )


def _is_plain(module: nn.Module) -> bool:
    """Whether it runs its children one after the other, as an ``nn.Sequential`` does."""
    return base_class(module).forward is nn.Sequential.forward


def _has_weights(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _holds_chain(module: nn.Module) -> bool:
    """Whether a child of a chain is a stage of several composite blocks, and so not one block itself."""
    return (
        isinstance(module, (nn.Sequential, nn.ModuleList))
        and _is_container(module)
        and sum(bool(list(child.children())) for child in module) > 1
    )


def _named(model: nn.Module, names: Sequence[str]) -> list[FoundBlock]:
    modules = dict(model.named_modules())
    blocks: dict[str, FoundBlock] = {}
    for name in names:
        if name.endswith(".*") and name[:-2] in modules:
            chosen = [f"{name[:-2]}.{child}" for child, _ in modules[name[:-2]].named_children()]
        elif name == "*":
            chosen = [child for child, _ in model.named_children()]
        elif name in modules:
            chosen = [name]
        else:
            raise ValueError(
                f"blocks: '{name}' is not a module of this {type(model).__name__}: see model.named_modules()"
            )
        for member in chosen:
            parent = member.rpartition(".")[0]
            container = parent if _is_plain(modules[parent]) else None
            blocks.setdefault(member, FoundBlock((member,), [modules[member]], container))
    for name, outer in itertools.permutations(blocks, 2):
        if name.startswith(f"{outer}."):
            raise ValueError(f"blocks: '{name}' lies in '{outer}', which is named as well: name one of them.")
    return list(blocks.values())


def _signature(block: FoundBlock, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors = tuple(
        (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device, tensor.requires_grad)
        for tensor in tensors_of((args, kwargs))
    )
    shape = repr(map_tensors(lambda tensor: "tensor", Tensor, (args, sorted(kwargs))))
    if " at 0x" in shape:  # an object without a __repr__ of its own
        shape = ""
    parameters = tuple(
        (name, parameter.dtype, tuple(parameter.shape), parameter.requires_grad)
        for module in block.modules
        for name, parameter in module.named_parameters()
    )
    return (
        tuple(base_class(module) for module in block.modules),
        # The settings of the modules, as far as extra_repr() shows them:
        # blocks that differ elsewhere count as equal and are measured once.
        repr(block.modules),
        parameters,
        tensors,
        shape,
    )


def _detached(tensor: Tensor) -> Tensor:
    """A copy of an input without its graph. The model may change the input later."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
