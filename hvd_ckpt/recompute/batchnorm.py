"""Running statistics that see each batch once, although recomputation runs the module again.

A batch norm in training mode updates ``running_mean``, ``running_var`` and ``num_batches_tracked`` whenever
it runs. In a recomputation those updates must go nowhere, yet the tensors that autograd saves must be the
same, in number, shape and dtype, so the buffers cannot simply be taken away. Instead, the batch norms that
counted a batch in the first pass get scratch copies of their buffers, with the values from before the first
pass, for as long as a recomputation runs. Nothing is patched and no hook stays behind: the real buffers come
back whatever the recomputation raises.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import horovod.torch as hvd
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes

from hvd_ckpt.recompute.sync_batch_norm import synchronized_once

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
_COUNTING_FORWARDS = ("torch.", "horovod.", "hvd_ckpt.")

Buffers = dict[str, torch.Tensor]


@dataclass
class _Observed:
    """One batch norm before the first pass."""

    module: _NormBase
    buffers: Buffers | None  # copies; None where a lazy module had none yet
    counter: torch.Tensor | None
    counter_version: int

    def updated(self) -> bool:
        """Whether the first pass ran the module in training mode."""
        counter = self.module._buffers.get("num_batches_tracked")
        if counter is not self.counter or _version(counter) != self.counter_version:
            return True
        return self.module.training and not _counts_batches(self.module)


class RunningStatistics:
    """Protects the normalization modules among ``modules`` in the recomputations of one checkpointed call.

    The training flags of all ``modules`` are put back to what they were in the first pass too: a model whose
    mode was switched between its forward and its backward pass is recomputed as it was.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modes = [(module, module.training) for module in modules]
        self._synchronized = [module for module in modules if isinstance(module, hvd.SyncBatchNorm)]
        self._norms = [
            module
            for module in modules
            if isinstance(module, _NormBase) and module._buffers.get("running_mean") is not None
        ]
        self._updated: list[_Observed] = []

    @contextlib.contextmanager
    def first_pass(self) -> Iterator[None]:
        """Around the first run: notes which modules count a batch, and their buffers before it."""
        with _disable_current_modes(), torch.no_grad():
            observed = [_observe(module) for module in self._norms]
        with synchronized_once(self._synchronized):
            try:
                yield
            finally:
                self._updated = [one for one in observed if one.updated()]

    @contextlib.contextmanager
    def recomputation(self) -> Iterator[None]:
        """Around every later run: the modules that counted a batch work on scratch copies."""
        with contextlib.ExitStack() as restore:
            for module, training in self._modes:
                if module.training != training:
                    restore.callback(setattr, module, "training", module.training)
                    module.training = training
            with _disable_current_modes(), torch.no_grad():
                for one in self._updated:
                    buffers = one.module._buffers
                    restore.callback(buffers.update, {name: buffers.get(name) for name in _BUFFERS})
                    buffers.update(_clones(_tensors(one.module) if one.buffers is None else one.buffers))
            restore.enter_context(synchronized_once(self._synchronized))
            yield


def _observe(module: _NormBase) -> _Observed:
    counter = module._buffers.get("num_batches_tracked")
    lazy = any(is_lazy(buffer) for buffer in module._buffers.values() if buffer is not None)
    return _Observed(module, None if lazy else _snapshot(module), counter, _version(counter))


# The last snapshot of each module with what it was taken of. A region that is given as a lambda reaches the whole model
# though it runs one block; without this, each of n regions would copy the statistics of all n blocks.
_snapshots: weakref.WeakKeyDictionary[nn.Module, tuple[Buffers, dict[str, int], Buffers]] = (
    weakref.WeakKeyDictionary()
)


def _snapshot(module: _NormBase) -> Buffers:
    """Copies of the buffers, made anew only if the module has run or was changed since the last time."""
    buffers = _tensors(module)
    versions = {name: _version(buffer) for name, buffer in buffers.items()}
    if _counts_batches(module) and (last := _snapshots.get(module)) is not None:
        sources, last_versions, copies = last
        if versions == last_versions and all(sources[name] is buffer for name, buffer in buffers.items()):
            return copies
    copies = _clones(buffers)
    _snapshots[module] = (buffers, versions, copies)
    return copies


def _tensors(module: _NormBase) -> Buffers:
    return {name: buffer for name in _BUFFERS if (buffer := module._buffers.get(name)) is not None}


def _clones(buffers: Buffers) -> Buffers:
    return {name: buffer.clone() for name, buffer in buffers.items()}


def _version(tensor: torch.Tensor | None) -> int:
    return -1 if tensor is None or tensor.is_inference() else tensor._version


def _counts_batches(module: _NormBase) -> bool:
    """Whether ``num_batches_tracked`` tells that the module ran. An instance norm never counts, and a
    subclass with a forward of its own may not: such modules are taken to have run."""
    counter = module._buffers.get("num_batches_tracked")
    if counter is None or counter.is_inference() or not isinstance(module, _BatchNorm):
        return False
    return type(module).forward.__module__.startswith(_COUNTING_FORWARDS)
