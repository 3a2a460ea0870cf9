"""Options of a pipeline, the cuts that a plan gives, and the weights of blocks on other stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from hvd_ckpt.planning.plan import PipelinePlan, Plan, PlanError
from hvd_ckpt.utils.cuts import cut_of, mark
from hvd_ckpt.utils.rules import check


@dataclass(frozen=True)
class PipelineOptions:
    """Arguments of :class:`hvd_ckpt.Pipeline` besides the model."""

    balance: Sequence[int] | str | None = None
    plan: Plan | None = None
    chunks: int | None = None
    schedule: str | None = None
    checkpoint: str | None = None
    virtual_stages: int | None = None


def cuts_of(plan: Plan, stages: int, options: PipelineOptions) -> PipelinePlan:
    """The cuts of a plan.

    Args:
        plan: a plan for stages.
        stages: number of stages of the pipeline.
        options: options of the pipeline, which must not include what the plan gives.

    Raises:
        PlanError: the plan has no stages or another number of stages.
        ValueError: an option is given that the plan gives.
    """
    if plan.pipeline is None:
        raise PlanError(
            "The plan was made without stages: make one with hc.plan(..., layout=hc.StageLayout(hc.grid().stages))."
        )
    if plan.pipeline.stages != stages:
        raise PlanError(
            f"The plan was made for {plan.pipeline.stages} stages, and this job has {stages}: make one with "
            f"hc.plan(..., layout=hc.StageLayout({stages}))."
        )
    given = {name: value for name, value in vars(options).items() if name != "plan"}
    check(
        {"a plan of stages": True, **given, **{f"{name} of Pipeline": value for name, value in given.items()}}
    )
    return plan.pipeline


def release_weights(blocks: Sequence[nn.Module], kept: Sequence[nn.Module]) -> None:
    """Frees the weights of ``blocks``, except those of modules that the kept blocks have as well."""
    modules = {module for block in kept for module in block.modules()}
    for block in blocks:
        for module in block.modules():
            if module in modules:
                continue
            # The parameters stay, on the meta device: snapshots and the check
            # of a plan read names and shapes of the whole model from them.
            for name, parameter in list(module._parameters.items()):
                if parameter is not None:
                    # setattr() also updates the list of weights that a recurrent module keeps.
                    freed = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
                    if (cut := cut_of(parameter)) is not None:
                        mark(freed, cut)
                    setattr(module, name, freed)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to("meta")
