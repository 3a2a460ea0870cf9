"""The public names of hvd_ckpt and where they are defined. ``__init__.py`` reads this file, and so do type checkers."""

from horovod.torch import (
    Adasum as Adasum,
)
from horovod.torch import (
    Average as Average,
)
from horovod.torch import (
    HorovodInternalError as HorovodInternalError,
)
from horovod.torch import (
    Max as Max,
)
from horovod.torch import (
    Min as Min,
)
from horovod.torch import (
    ProcessSet as ProcessSet,
)
from horovod.torch import (
    Product as Product,
)
from horovod.torch import (
    Sum as Sum,
)
from horovod.torch import (
    add_process_set as add_process_set,
)
from horovod.torch import (
    allgather as allgather,
)
from horovod.torch import (
    allgather_async as allgather_async,
)
from horovod.torch import (
    allreduce as allreduce,
)
from horovod.torch import (
    allreduce_ as allreduce_,
)
from horovod.torch import (
    allreduce_async as allreduce_async,
)
from horovod.torch import (
    allreduce_async_ as allreduce_async_,
)
from horovod.torch import (
    alltoall as alltoall,
)
from horovod.torch import (
    alltoall_async as alltoall_async,
)
from horovod.torch import (
    barrier as barrier,
)
from horovod.torch import (
    broadcast as broadcast,
)
from horovod.torch import (
    broadcast_ as broadcast_,
)
from horovod.torch import (
    broadcast_async as broadcast_async,
)
from horovod.torch import (
    broadcast_async_ as broadcast_async_,
)
from horovod.torch import (
    ccl_built as ccl_built,
)
from horovod.torch import (
    check_extension as check_extension,
)
from horovod.torch import (
    compression as compression,
)
from horovod.torch import (
    cross_rank as cross_rank,
)
from horovod.torch import (
    cross_size as cross_size,
)
from horovod.torch import (
    cuda_built as cuda_built,
)
from horovod.torch import (
    ddl_built as ddl_built,
)
from horovod.torch import (
    elastic as elastic,
)
from horovod.torch import (
    functions as functions,
)
from horovod.torch import (
    global_process_set as global_process_set,
)
from horovod.torch import (
    gloo_built as gloo_built,
)
from horovod.torch import (
    gloo_enabled as gloo_enabled,
)
from horovod.torch import (
    grouped_allgather as grouped_allgather,
)
from horovod.torch import (
    grouped_allgather_async as grouped_allgather_async,
)
from horovod.torch import (
    grouped_allreduce as grouped_allreduce,
)
from horovod.torch import (
    grouped_allreduce_ as grouped_allreduce_,
)
from horovod.torch import (
    grouped_allreduce_async as grouped_allreduce_async,
)
from horovod.torch import (
    grouped_allreduce_async_ as grouped_allreduce_async_,
)
from horovod.torch import (
    is_initialized as is_initialized,
)
from horovod.torch import (
    local_rank as local_rank,
)
from horovod.torch import (
    local_size as local_size,
)
from horovod.torch import (
    mpi_built as mpi_built,
)
from horovod.torch import (
    mpi_enabled as mpi_enabled,
)
from horovod.torch import (
    mpi_lib_v2 as mpi_lib_v2,
)
from horovod.torch import (
    mpi_ops as mpi_ops,
)
from horovod.torch import (
    mpi_threads_supported as mpi_threads_supported,
)
from horovod.torch import (
    nccl_built as nccl_built,
)
from horovod.torch import (
    optimizer as optimizer,
)
from horovod.torch import (
    poll as poll,
)
from horovod.torch import (
    rank as rank,
)
from horovod.torch import (
    remove_process_set as remove_process_set,
)
from horovod.torch import (
    rocm_built as rocm_built,
)
from horovod.torch import (
    shutdown as shutdown,
)
from horovod.torch import (
    size as size,
)
from horovod.torch import (
    sparse_allreduce_async as sparse_allreduce_async,
)
from horovod.torch import (
    start_timeline as start_timeline,
)
from horovod.torch import (
    stop_timeline as stop_timeline,
)
from horovod.torch import (
    sync_batch_norm as sync_batch_norm,
)
from horovod.torch import (
    synchronize as synchronize,
)

from hvd_ckpt.batchnorm import (
    DeferredBatchNorm as DeferredBatchNorm,
)
from hvd_ckpt.batchnorm import (
    SyncBatchNorm as SyncBatchNorm,
)
from hvd_ckpt.batchnorm import (
    commit_batch_norm as commit_batch_norm,
)
from hvd_ckpt.data.sampler import (
    DataLoader as DataLoader,
)
from hvd_ckpt.data.sampler import (
    DistributedSampler as DistributedSampler,
)
from hvd_ckpt.devices import (
    local_device as local_device,
)
from hvd_ckpt.distributed import (
    DistributedOptimizer as DistributedOptimizer,
)
from hvd_ckpt.grid import (
    stage as stage,
)
from hvd_ckpt.grid import (
    stages as stages,
)
from hvd_ckpt.local_sgd.construction import (
    LocalSGD as LocalSGD,
)
from hvd_ckpt.local_sgd.construction import (
    Nesterov as Nesterov,
)
from hvd_ckpt.memory import (
    measure_peak as measure_peak,
)
from hvd_ckpt.models.objectives import (
    Batch as Batch,
)
from hvd_ckpt.models.objectives import (
    Objective as Objective,
)
from hvd_ckpt.pipeline.microbatch import (
    accumulate as accumulate,
)
from hvd_ckpt.pipeline.pipeline import (
    Pipeline as Pipeline,
)
from hvd_ckpt.pipeline.random_state import (
    seed_blocks as seed_blocks,
)
from hvd_ckpt.pipeline.skip import (
    pop as pop,
)
from hvd_ckpt.pipeline.skip import (
    skippable as skippable,
)
from hvd_ckpt.pipeline.skip import (
    stash as stash,
)
from hvd_ckpt.planning.balance import (
    balance_by_size as balance_by_size,
)
from hvd_ckpt.planning.balance import (
    balance_by_time as balance_by_time,
)
from hvd_ckpt.planning.budget import BudgetError as BudgetError
from hvd_ckpt.planning.plan import (
    Plan as Plan,
)
from hvd_ckpt.planning.plan import (
    PlanError as PlanError,
)
from hvd_ckpt.planning.planner import (
    largest_batch as largest_batch,
)
from hvd_ckpt.planning.planner import (
    plan as plan,
)
from hvd_ckpt.precision import (
    GradScaler as GradScaler,
)
from hvd_ckpt.precision import (
    Precision as Precision,
)
from hvd_ckpt.recompute import (
    CheckpointFunction as CheckpointFunction,
)
from hvd_ckpt.recompute import (
    CheckpointSequential as CheckpointSequential,
)
from hvd_ckpt.recompute import (
    RecomputationMismatch as RecomputationMismatch,
)
from hvd_ckpt.recompute import (
    checkpoint as checkpoint,
)
from hvd_ckpt.recompute import (
    checkpoint_sequential as checkpoint_sequential,
)
from hvd_ckpt.recompute import (
    chunked_cross_entropy as chunked_cross_entropy,
)
from hvd_ckpt.recompute import (
    is_checkpointing as is_checkpointing,
)
from hvd_ckpt.recompute import (
    is_recomputing as is_recomputing,
)
from hvd_ckpt.recompute import (
    verify_recomputation as verify_recomputation,
)
from hvd_ckpt.recompute import (
    without_recomputation as without_recomputation,
)
from hvd_ckpt.reduction import (
    Compression as Compression,
)
from hvd_ckpt.reduction import (
    ReductionStats as ReductionStats,
)
from hvd_ckpt.reduction import (
    allgather_object as allgather_object,
)
from hvd_ckpt.reduction import (
    broadcast_object as broadcast_object,
)
from hvd_ckpt.reduction import (
    broadcast_optimizer_state as broadcast_optimizer_state,
)
from hvd_ckpt.reduction import (
    broadcast_parameters as broadcast_parameters,
)
from hvd_ckpt.reduction import (
    join as join,
)
from hvd_ckpt.reduction.consistency import (
    WeightsDiffer as WeightsDiffer,
)
from hvd_ckpt.reduction.consistency import (
    check_equal_weights as check_equal_weights,
)
from hvd_ckpt.reduction.scatter import (
    grouped_reducescatter as grouped_reducescatter,
)
from hvd_ckpt.reduction.scatter import (
    grouped_reducescatter_async as grouped_reducescatter_async,
)
from hvd_ckpt.reduction.scatter import (
    reducescatter as reducescatter,
)
from hvd_ckpt.reduction.scatter import (
    reducescatter_async as reducescatter_async,
)
from hvd_ckpt.reduction.weights import (
    verify_weights as verify_weights,
)
from hvd_ckpt.runtime import (
    controller as controller,
)
from hvd_ckpt.runtime import (
    init as init,
)
from hvd_ckpt.runtime import (
    mpi_communicator as mpi_communicator,
)
from hvd_ckpt.sharding.averaging import (
    AveragedWeights as AveragedWeights,
)
from hvd_ckpt.sharding.clipping import (
    clip_grad_norm_ as clip_grad_norm_,
)
from hvd_ckpt.sharding.estimate import (
    estimate_memory as estimate_memory,
)
from hvd_ckpt.sharding.host_memory import (
    init_on_disk as init_on_disk,
)
from hvd_ckpt.sharding.memory_estimate import (
    MemoryEstimate as MemoryEstimate,
)
from hvd_ckpt.snapshots.snapshots import (
    Snapshots as Snapshots,
)
from hvd_ckpt.training.build import (
    assemble as assemble,
)
from hvd_ckpt.training.config import (
    Config as Config,
)
from hvd_ckpt.training.trainer import (
    Trainer as Trainer,
)
