"""Skip connections by name, across blocks of a chain and across pipeline stages.

The protocol is that of torchgpipe (Kim et al., 2020). A module is decorated with the names that it stashes and pops, and its
``forward`` is a generator that yields :class:`stash` and :class:`pop`. Such a module runs in any ``nn.Sequential``. In a
:class:`hvd_ckpt.Pipeline`, a stashed tensor is sent directly to the stage that pops it::

    @hc.skip.skippable(stash=["skip"])
    class Down(nn.Module):
        def forward(self, x):
            x = self.conv(x)
            yield hc.skip.stash("skip", x)
            return self.pool(x)

    @hc.skip.skippable(pop=["skip"])
    class Up(nn.Module):
        def forward(self, x):
            skip = yield hc.skip.pop("skip")
            return self.conv(torch.cat([self.upsample(x), skip], dim=1))

    level = "level 1"                                 # any object: the same names are different connections in each
    nn.Sequential(Down().isolate(level), ..., Up().isolate(level))
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn

from hvd_ckpt.utils.frames import is_recomputing, remembered

Module = TypeVar("Module", bound=type[nn.Module])
Key = tuple[Hashable, str]
STASHED, POPPED = "_stashed_names", "_popped_names"  # attributes of decorated classes


class stash:  # named as in torchgpipe
    """``yield stash(name, tensor)`` keeps a tensor for the module that pops the name."""

    def __init__(self, name: str, tensor: Tensor | None) -> None:
        self.name, self.tensor = name, tensor


class pop:  # named as in torchgpipe
    """``tensor = yield pop(name)`` takes the tensor that was stashed under the name."""

    def __init__(self, name: str) -> None:
        self.name = name


class _ThreadSkips(threading.local):
    def __init__(self) -> None:
        self.outside: dict[Key, Tensor | None] = {}  # tensors of models that run without a pipeline
        self.inside: list[dict[Key, Tensor | None]] = []  # tensors of chunks that run in a pipeline


_thread = _ThreadSkips()


@contextlib.contextmanager
def skips_of_chunk(given: dict[Key, Tensor | None]) -> Iterator[dict[Key, Tensor | None]]:
    """A context in which modules stash into ``given`` and pop from it. What is left at the end goes to other chunks."""
    _thread.inside.append(given)
    try:
        yield given
    finally:
        _thread.inside.pop()


def skippable(stash: Sequence[str] = (), pop: Sequence[str] = ()) -> Callable[[Module], Module]:
    """Class decorator for modules whose ``forward`` yields :class:`stash` and :class:`pop`.

    The decorated class has a method ``isolate(namespace)``, after which the names of the module belong to the namespace. A
    namespace is any hashable object. In recomputed segments of a model without a pipeline, use the non-reentrant variant.

    Args:
        stash, pop: the names. Each name must be stashed by one module and popped by a later one.

    Raises:
        TypeError: (in the forward pass) ``forward`` yields something else.
        ValueError: (in the forward pass) a name was not declared, or is popped and was not stashed.
    """
    stashed, popped = tuple(stash), tuple(pop)

    def decorate(module_class: Module) -> Module:
        forward: Any = module_class.forward

        @functools.wraps(forward)
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            return _run(self, forward(self, *args, **kwargs), stashed, popped)

        def isolate(self: Any, namespace: Hashable) -> Any:
            self._skip_namespace = namespace
            return self

        for attribute, value in (
            ("forward", run), ("isolate", isolate), (STASHED, stashed), (POPPED, popped),
        ):  # fmt: skip
            setattr(module_class, attribute, value)
        return module_class

    return decorate


def _run(module: Any, passes: Generator[Any, Any, Any], stashed: Sequence[str], popped: Sequence[str]) -> Any:
    """Runs the generator of a ``forward`` to its end, and does what it yields."""
    answer: Any = None
    while True:
        try:
            request = passes.send(answer)
        except StopIteration as end:
            return end.value
        if isinstance(request, stash):
            _put(_key(module, request.name, stashed), request.tensor)
            answer = None
        elif isinstance(request, pop):
            answer = _take(_key(module, request.name, popped))
        else:
            raise TypeError(f"{type(module).__name__} must yield stash or pop, got {type(request).__name__}")


def _key(module: Any, name: str, declared: Sequence[str]) -> Key:
    if name not in declared:
        raise ValueError(
            f"{type(module).__name__} uses the skip connection '{name}', which its @skippable does not declare"
        )
    return getattr(module, "_skip_namespace", None), name


def _put(key: Key, tensor: Tensor | None) -> None:
    # A view is a node of its own in the graph. So the gradients of the connection are added to each other before they are added to
    # those of the tensor's other uses, as they are if the connection leads to another process.
    if tensor is not None:
        tensor = tensor.view_as(tensor)
    if _thread.inside:
        _thread.inside[-1][key] = tensor
    # A recomputation must not stash again: the tensor was popped already, and the name may belong to the next batch by now.
    elif not is_recomputing():
        _thread.outside[key] = tensor


def _take(key: Key) -> Tensor | None:
    if _thread.inside:
        return _popped(_thread.inside[-1], key)
    # The first pass takes the tensor away. A recomputation gets what the first pass got.
    return remembered(lambda: _popped(_thread.outside, key))


def _popped(stashed: dict[Key, Tensor | None], key: Key) -> Tensor | None:
    if key not in stashed:
        raise ValueError(f"the skip connection '{key[1]}' is popped, but nothing was stashed under that name")
    return stashed.pop(key)


class Skip(NamedTuple):
    """A skip connection: its key, and the numbers of the blocks that stash and pop it."""

    key: Key
    source: int
    target: int


def find_skips(blocks: Sequence[nn.Module]) -> list[Skip]:
    """The skip connections of a chain, in the order in which they are stashed.

    Raises:
        ValueError: a name is stashed or popped twice, popped before it is stashed, only stashed or only popped.
    """
    stashed: dict[Key, int] = {}
    popped: dict[Key, int] = {}
    for number, block in enumerate(blocks):
        for module in block.modules():
            namespace = getattr(module, "_skip_namespace", None)
            for attribute, declared in ((STASHED, stashed), (POPPED, popped)):
                for name in getattr(module, attribute, ()):
                    if (namespace, name) in declared:
                        raise ValueError(
                            f"the skip connection '{name}' is used twice: isolate(namespace) its modules"
                        )
                    declared[namespace, name] = number
    # Found before the first step. In a pipeline, a stage would wait for a tensor that no other one sends.
    for key in stashed.keys() ^ popped.keys():
        raise ValueError(
            f"the skip connection '{key[1]}' must be stashed by one module and popped by another"
        )
    for key, source in stashed.items():
        if popped[key] < source:
            raise ValueError(f"the skip connection '{key[1]}' is popped before it is stashed")
    return [Skip(key, source, popped[key]) for key, source in stashed.items()]
