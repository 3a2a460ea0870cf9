"""The stages that a plan gives, and the weights of blocks that are on other stages."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from hvd_ckpt.planning.plan import PipelinePlan, Plan, PlanError
from hvd_ckpt.utils.cuts import cut_of, mark


def cuts_of(plan: Plan, stages: int, checkpoint: str | None, given: Sequence[str]) -> PipelinePlan:
    """The stages of a plan, for a pipeline of so many that was given no other arguments about them."""
    if plan.pipeline is None:
        raise PlanError("The plan was made without stages: make one with hc.plan(..., stages=hc.stages()).")
    if plan.pipeline.stages != stages:
        raise PlanError(
            f"The plan was made for {plan.pipeline.stages} stages, and this job has {stages}: make one with "
            f"hc.plan(..., stages={stages})."
        )
    if given or checkpoint not in (None, "auto"):
        raise ValueError(
            f"Pipeline: the plan gives {', '.join(given or ['checkpoint'])} already: leave it out"
        )
    return plan.pipeline


def release_weights(blocks: Sequence[nn.Module], kept: Sequence[nn.Module]) -> None:
    """Frees the weights of blocks, but for those of modules that other blocks have as well."""
    modules = {module for block in kept for module in block.modules()}
    for block in blocks:
        for module in block.modules():
            if module in modules:
                continue
            for name, parameter in list(module._parameters.items()):
                if parameter is not None:
                    # setattr() also reaches the list of weights that a recurrent module keeps.
                    freed = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
                    if (cut := cut_of(parameter)) is not None:
                        mark(freed, cut)
                    setattr(module, name, freed)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to("meta")
