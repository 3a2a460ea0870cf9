"""hvd_ckpt: training models that do not fit, with Horovod data parallelism and activation checkpointing.

``import hvd_ckpt as hvd`` serves as the one changed import of a Horovod script: every public name of ``horovod.torch`` is here.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from horovod.torch import (
        Adasum,
        Average,
        HorovodInternalError,
        Max,
        Min,
        ProcessSet,
        Product,
        Sum,
        add_process_set,
        allgather,
        allgather_async,
        allreduce,
        allreduce_,
        allreduce_async,
        allreduce_async_,
        alltoall,
        alltoall_async,
        barrier,
        broadcast,
        broadcast_,
        broadcast_async,
        broadcast_async_,
        ccl_built,
        check_extension,
        compression,
        cross_rank,
        cross_size,
        cuda_built,
        ddl_built,
        elastic,
        functions,
        global_process_set,
        gloo_built,
        gloo_enabled,
        grouped_allgather,
        grouped_allgather_async,
        grouped_allreduce,
        grouped_allreduce_,
        grouped_allreduce_async,
        grouped_allreduce_async_,
        is_initialized,
        local_rank,
        local_size,
        mpi_built,
        mpi_enabled,
        mpi_lib_v2,
        mpi_ops,
        mpi_threads_supported,
        nccl_built,
        optimizer,
        poll,
        rank,
        remove_process_set,
        rocm_built,
        shutdown,
        size,
        sparse_allreduce_async,
        start_timeline,
        stop_timeline,
        sync_batch_norm,
        synchronize,
    )

    from hvd_ckpt.distributed import DistributedOptimizer
    from hvd_ckpt.planning.budget import BudgetError
    from hvd_ckpt.planning.plan import Plan, PlanError
    from hvd_ckpt.planning.planner import largest_batch, plan
    from hvd_ckpt.precision import GradScaler, Precision
    from hvd_ckpt.recompute import (
        CheckpointFunction,
        CheckpointSequential,
        DeferredBatchNorm,
        SyncBatchNorm,
        checkpoint,
        checkpoint_sequential,
        commit_batch_norm,
        is_checkpointing,
        is_recomputing,
        without_recomputation,
    )
    from hvd_ckpt.reduction import (
        Compression,
        ReductionStats,
        allgather_object,
        broadcast_object,
        broadcast_optimizer_state,
        broadcast_parameters,
        join,
    )
    from hvd_ckpt.reduction.drift import WeightsDiffer, check_equal_weights
    from hvd_ckpt.reduction.scatter import (
        grouped_reducescatter,
        grouped_reducescatter_async,
        reducescatter,
        reducescatter_async,
    )
    from hvd_ckpt.runtime import controller, init, mpi_communicator
    from hvd_ckpt.sharding.averaging import AveragedWeights
    from hvd_ckpt.sharding.clipping import clip_grad_norm_
    from hvd_ckpt.sharding.estimate import MemoryEstimate, estimate_memory
    from hvd_ckpt.training.microbatch import accumulate

# Names are imported when they are first used: `hvd-ckpt --help` then needs no PyTorch, and `hvd-ckpt doctor` no working Horovod.
_OWN = {
    "hvd_ckpt.distributed": ("DistributedOptimizer",),
    "hvd_ckpt.planning.budget": ("BudgetError",),
    "hvd_ckpt.planning.plan": (
        "Plan",
        "PlanError",
    ),
    "hvd_ckpt.planning.planner": (
        "largest_batch",
        "plan",
    ),
    "hvd_ckpt.precision": (
        "GradScaler",
        "Precision",
    ),
    "hvd_ckpt.recompute": (
        "CheckpointFunction",
        "CheckpointSequential",
        "DeferredBatchNorm",
        "SyncBatchNorm",
        "checkpoint",
        "checkpoint_sequential",
        "commit_batch_norm",
        "is_checkpointing",
        "is_recomputing",
        "without_recomputation",
    ),
    "hvd_ckpt.reduction": (
        "Compression",
        "ReductionStats",
        "allgather_object",
        "broadcast_object",
        "broadcast_optimizer_state",
        "broadcast_parameters",
        "join",
    ),
    "hvd_ckpt.reduction.drift": (
        "WeightsDiffer",
        "check_equal_weights",
    ),
    "hvd_ckpt.reduction.scatter": (
        "grouped_reducescatter",
        "grouped_reducescatter_async",
        "reducescatter",
        "reducescatter_async",
    ),
    "hvd_ckpt.runtime": (
        "controller",
        "init",
        "mpi_communicator",
    ),
    "hvd_ckpt.sharding.averaging": ("AveragedWeights",),
    "hvd_ckpt.sharding.clipping": ("clip_grad_norm_",),
    "hvd_ckpt.sharding.estimate": (
        "MemoryEstimate",
        "estimate_memory",
    ),
    "hvd_ckpt.training.microbatch": ("accumulate",),
}
_HOMES = {name: module for module, names in _OWN.items() for name in names}

__all__ = [
    "Adasum",
    "Average",
    "AveragedWeights",
    "BudgetError",
    "CheckpointFunction",
    "CheckpointSequential",
    "Compression",
    "DeferredBatchNorm",
    "DistributedOptimizer",
    "GradScaler",
    "HorovodInternalError",
    "Max",
    "MemoryEstimate",
    "Min",
    "Plan",
    "PlanError",
    "Precision",
    "ProcessSet",
    "Product",
    "ReductionStats",
    "Sum",
    "SyncBatchNorm",
    "WeightsDiffer",
    "accumulate",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "check_equal_weights",
    "check_extension",
    "checkpoint",
    "checkpoint_sequential",
    "clip_grad_norm_",
    "commit_batch_norm",
    "compression",
    "controller",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "estimate_memory",
    "functions",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_checkpointing",
    "is_initialized",
    "is_recomputing",
    "join",
    "largest_batch",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_communicator",
    "mpi_enabled",
    "mpi_lib_v2",
    "mpi_ops",
    "mpi_threads_supported",
    "nccl_built",
    "optimizer",
    "plan",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "sync_batch_norm",
    "synchronize",
    "without_recomputation",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'hvd_ckpt' has no attribute {name!r}")
    try:
        import_module("hvd_ckpt.torch_private")  # refuses a PyTorch that does not fit
        module = import_module(_HOMES.get(name, "horovod.torch"))
    except ImportError as error:
        from hvd_ckpt.install.extras import explain_import_error

        text = explain_import_error(error)
        if text is None:
            raise
        raise ImportError(text, name=error.name) from None
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
