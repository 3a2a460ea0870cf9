"""Cost of what a model runs before the first block of its chain (embeddings) and behind the last one (head and loss).

One step has marks at both ends of the chain. Hooks on the first and the last block mark the forward pass, and hooks on their input
and output mark the backward pass.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from hvd_ckpt.planning.step import Step
from hvd_ckpt.recompute.calls import tensors_in
from hvd_ckpt.utils.measure import no_collection
from hvd_ckpt.utils.memory import Mark, recording_marks


class Ends(NamedTuple):
    """Memory at both ends of a chain.

    Attributes:
        begin: the mark before the first block, forward.
        after: peak bytes of the backward pass before the first block.
        forward, backward: peak bytes of head and loss, above the bytes held behind the last block.
    """

    begin: Mark
    after: int
    forward: int
    backward: int


def measure_ends(step: Step, first: nn.Module, last: nn.Module) -> Ends:
    """Measures one step of a chain that begins with the module ``first`` and ends with ``last``."""
    # The marks of a step, and what runs between them. Each has the peak since the one before it:
    #
    #     start -- embeddings -- first block -- blocks -- last block -- head and loss -- loss            forward
    #     loss -- loss and head -- gradient -- blocks -- input -- embeddings -- end                      backward
    #
    # If the input of the first block requires no gradient, "input" is missing and nothing before the blocks has a backward pass.
    seen: set[str] = set()
    handles = []
    # The copies of the sample are made before the recording begins, so their bytes do not count.
    sample, recording = step.sample(), recording_marks(step.device)
    with no_collection(), sample as (own_args, own_kwargs), recording as marks:

        def once(name: str) -> None:
            if name not in seen:
                seen.add(name)
                marks.mark(name)

        def on_gradient(values: Any, name: str) -> None:
            for tensor in tensors_in(values):
                if tensor.requires_grad:
                    tensor.register_hook(lambda gradient: once(name))  # type: ignore[no-untyped-call]
                    return

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            if "first block" not in seen:
                once("first block")
                on_gradient((args, kwargs), "input")

        def behind(module: nn.Module, args: Any, output: Any) -> None:
            if "last block" not in seen:
                once("last block")
                on_gradient(output, "gradient")

        handles.append(first.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(last.register_forward_hook(behind))
        try:
            step.run_on(own_args, own_kwargs, marks)
        finally:
            for handle in handles:
                handle.remove()
        marks.mark("end")
    by_name = {mark.name: mark for mark in marks.marks}
    begin, end = by_name["first block"], by_name["last block"]
    after = by_name["end"].peak_bytes if "input" in by_name else begin.peak_bytes
    forward, backward = (
        by_name[name].peak_bytes - end.bytes if name in by_name else 0 for name in ("loss", "gradient")
    )
    return Ends(begin, after, max(forward, 0), backward)
