"""Head of a language model, and the cost of its cross entropy in chunks.

Dropping the logits would save nothing, since the loss needs them at once. So a plan has a number of chunks for the linear layer
that computes them (:mod:`hvd_ckpt.planning.deferred`). Head and loss, which run behind the last block, have one choice for each
number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from hvd_ckpt.planning.blocks import FoundBlock
from hvd_ckpt.planning.chain import Choice
from hvd_ckpt.planning.deferred import DeferredLogits, Use
from hvd_ckpt.planning.kinds import BlockRunner
from hvd_ckpt.planning.policy import KEEP, apply_policy, base_class, in_chunks, remove_policy
from hvd_ckpt.planning.step import Step
from hvd_ckpt.recompute.keeper import saving_nothing
from hvd_ckpt.utils.torch_private import is_compiled

_WIDER = 4  # a head has more than this many outputs for each input; the perceptron of a layer has no more
_LEAST_BYTES = 4 << 20  # bytes of logits from which the head is measured
_LEAST_ROWS = 32  # rows of a chunk, as a matrix product of fewer rows is slow
_LESS = 0.98  # share of the previous peak that a further choice must stay below
_FACTOR = 4  # from one number of chunks to the next


def head_choices(step: Step, loss: Use) -> list[Choice]:
    """Costs of head and loss by themselves, whole and in each number of chunks that needs less memory than the previous one."""
    head, hidden, targets = loss.call.head, loss.call.product.hidden, loss.targets
    assert targets is not None

    def run(hidden: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(head(hidden).to(loss.dtype), targets, **loss.options)

    policies, chunks = [KEEP], 1
    while chunks == 1 or len(targets) >= _LEAST_ROWS * chunks:
        policies.append(in_chunks(chunks))
        chunks *= _FACTOR
    own = hidden.detach().requires_grad_(hidden.requires_grad)
    runner = BlockRunner(step, run, (own, targets), {})
    choices: list[Choice] = []
    for policy in policies:
        # The policy is on the module, and the runner gets KEEP: the loss, which
        # the runner takes for a part of the block, makes the chunks.
        apply_policy(head, policy)
        try:
            (cost,) = runner.memory([KEEP])
            (seconds,) = runner.seconds([KEEP], 0.0, 1)
        finally:
            remove_policy(head)
        if not choices or cost.peak < _LESS * choices[-1].peak:
            choices.append(dataclasses.replace(cost, seconds=seconds, policy=policy))
    return choices


def find_head(step: Step) -> tuple[str, Use] | None:
    """The name of a linear layer whose result is used by one cross entropy and nothing else, and this use; None without one.

    One forward pass with its loss, which save nothing, shows where it is.
    """
    candidates: dict[nn.Module, str] = {}
    for name, module in step.model.named_modules():
        if is_compiled(module):
            return None
        if (
            not (name and isinstance(module, nn.Linear))
            or base_class(module).forward is not nn.Linear.forward
        ):
            continue
        weight = module._parameters.get("weight")  # not a weight that is computed, as in a weight norm
        if weight is not None and len(weight) > _WIDER * weight.shape[1]:
            candidates[module] = name
    if not candidates:
        return None
    calls: list[nn.Module] = []
    uses: list[Use] = []

    def called(module: nn.Module, _: Any, output: Any) -> None:
        calls.append(module)
        if isinstance(output, DeferredLogits):
            output.call.uses = uses

    handles = [module.register_forward_hook(called, prepend=True) for module in candidates]
    try:
        for module in candidates:
            apply_policy(module, in_chunks(1))
        with saving_nothing():
            step.loss()
    except Exception:  # code that needs a graph, or values of the logits
        return None
    finally:
        for module in candidates:
            remove_policy(module)
        for handle in handles:
            handle.remove()
    # Deferred logits are used by a cross entropy, and computed for most
    # other functions. One loss and no computation (below) make a head.
    found = list(uses)
    uses.clear()  # calls refer to the list, and it to them
    losses = [use for use in found if use.targets is not None]
    if len(losses) != 1:
        return None
    (loss,) = losses
    head, product = loss.call.head, loss.call.product
    if any(use.call.head is head for use in found if use is not loss):
        return None
    assert loss.targets is not None
    logits = len(loss.targets) * len(product.weight) * loss.dtype.itemsize
    if calls.count(head) != 1 or not product.weight.is_leaf or logits < _LEAST_BYTES:
        return None
    return candidates[head], loss


def without_head(blocks: Sequence[FoundBlock], head: nn.Module) -> list[FoundBlock] | None:
    """The blocks without the one that has the head, if any; None if that block is not the last one or is the only one."""
    owners = [
        index for index, block in enumerate(blocks) for module in block.modules if head in module.modules()
    ]
    if not owners:
        return list(blocks)
    alone = owners == [len(blocks) - 1] and len(blocks) > 1 and blocks[-1].like == len(blocks) - 1
    return list(blocks[:-1]) if alone else None
