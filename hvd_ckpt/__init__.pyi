"""The public names of hvd_ckpt and the modules that define them. ``__init__.py`` and type checkers read this file."""

from horovod.torch import (
    Adasum as Adasum,
    Average as Average,
    HorovodInternalError as HorovodInternalError,
    Max as Max,
    Min as Min,
    ProcessSet as ProcessSet,
    Product as Product,
    Sum as Sum,
    add_process_set as add_process_set,
    allgather as allgather,
    allgather_async as allgather_async,
    allreduce as allreduce,
    allreduce_ as allreduce_,
    allreduce_async as allreduce_async,
    allreduce_async_ as allreduce_async_,
    alltoall as alltoall,
    alltoall_async as alltoall_async,
    barrier as barrier,
    broadcast as broadcast,
    broadcast_ as broadcast_,
    broadcast_async as broadcast_async,
    broadcast_async_ as broadcast_async_,
    ccl_built as ccl_built,
    check_extension as check_extension,
    compression as compression,
    cuda_built as cuda_built,
    ddl_built as ddl_built,
    elastic as elastic,
    functions as functions,
    global_process_set as global_process_set,
    gloo_built as gloo_built,
    gloo_enabled as gloo_enabled,
    grouped_allgather as grouped_allgather,
    grouped_allgather_async as grouped_allgather_async,
    grouped_allreduce as grouped_allreduce,
    grouped_allreduce_ as grouped_allreduce_,
    grouped_allreduce_async as grouped_allreduce_async,
    grouped_allreduce_async_ as grouped_allreduce_async_,
    is_initialized as is_initialized,
    mpi_built as mpi_built,
    mpi_enabled as mpi_enabled,
    mpi_lib_v2 as mpi_lib_v2,
    mpi_ops as mpi_ops,
    mpi_threads_supported as mpi_threads_supported,
    nccl_built as nccl_built,
    optimizer as optimizer,
    poll as poll,
    remove_process_set as remove_process_set,
    rocm_built as rocm_built,
    shutdown as shutdown,
    sparse_allreduce_async as sparse_allreduce_async,
    start_timeline as start_timeline,
    stop_timeline as stop_timeline,
    sync_batch_norm as sync_batch_norm,
    synchronize as synchronize,
)

from hvd_ckpt import (
    data as data,
    training as training,
)
from hvd_ckpt.batchnorm import (
    DeferredBatchNorm as DeferredBatchNorm,
    SyncBatchNorm as SyncBatchNorm,
    commit_batch_norm as commit_batch_norm,
)
from hvd_ckpt.collectives.scatter import (
    grouped_reducescatter as grouped_reducescatter,
    grouped_reducescatter_async as grouped_reducescatter_async,
    reducescatter as reducescatter,
    reducescatter_async as reducescatter_async,
)
from hvd_ckpt.distributed.averaging import (
    AveragedWeights as AveragedWeights,
)
from hvd_ckpt.distributed.clipping import (
    clip_grad_norm_ as clip_grad_norm_,
)
from hvd_ckpt.distributed.optimizer import (
    DistributedOptimizer as DistributedOptimizer,
)
from hvd_ckpt.distributed.precision import (
    GradScaler as GradScaler,
    Precision as Precision,
)
from hvd_ckpt.distributed.shard import (
    Shard as Shard,
)
from hvd_ckpt.distributed.verification import (
    verify as verify,
)
from hvd_ckpt.offload.host_memory import (
    init_on_disk as init_on_disk,
)
from hvd_ckpt.parallel.local_sgd.construction import (
    LocalSGD as LocalSGD,
    Nesterov as Nesterov,
)
from hvd_ckpt.parallel.pipeline import (
    skip as skip,
)
from hvd_ckpt.parallel.pipeline.microbatch import (
    accumulate as accumulate,
)
from hvd_ckpt.parallel.pipeline.pipeline import (
    Pipeline as Pipeline,
)
from hvd_ckpt.parallel.pipeline.random_state import (
    seed_blocks as seed_blocks,
)
from hvd_ckpt.parallel.pipeline.stages import (
    StageLayout as StageLayout,
)
from hvd_ckpt.parallel.tensor.recipes import (
    tensor_parallel as tensor_parallel,
)
from hvd_ckpt.planning.budget import BudgetError as BudgetError
from hvd_ckpt.planning.plan import (
    Plan as Plan,
    PlanError as PlanError,
)
from hvd_ckpt.planning.request import (
    largest_batch as largest_batch,
    plan as plan,
)
from hvd_ckpt.prediction.layouts import (
    layouts as layouts,
)
from hvd_ckpt.prediction.memory import (
    estimate_memory as estimate_memory,
)
from hvd_ckpt.prediction.memory_estimate import (
    MemoryEstimate as MemoryEstimate,
)
from hvd_ckpt.processes.devices import (
    local_device as local_device,
)
from hvd_ckpt.processes.grid import (
    cross_rank as cross_rank,
    cross_size as cross_size,
    grid as grid,
    local_rank as local_rank,
    local_size as local_size,
    rank as rank,
    size as size,
)
from hvd_ckpt.processes.mpi import mpi_communicator as mpi_communicator
from hvd_ckpt.processes.runtime import controller as controller, init as init
from hvd_ckpt.recompute import (
    CheckpointFunction as CheckpointFunction,
    CheckpointSequential as CheckpointSequential,
    RecomputationMismatch as RecomputationMismatch,
    checkpoint as checkpoint,
    checkpoint_sequential as checkpoint_sequential,
    chunked_cross_entropy as chunked_cross_entropy,
    is_checkpointing as is_checkpointing,
    is_recomputing as is_recomputing,
    without_recomputation as without_recomputation,
)
from hvd_ckpt.reduction.broadcast import (
    allgather_object as allgather_object,
    broadcast_object as broadcast_object,
    broadcast_optimizer_state as broadcast_optimizer_state,
    broadcast_parameters as broadcast_parameters,
    join as join,
)
from hvd_ckpt.reduction.communicator import (
    Compression as Compression,
)
from hvd_ckpt.reduction.consistency import (
    WeightsDiffer as WeightsDiffer,
)
from hvd_ckpt.reduction.stats import (
    ReductionStats as ReductionStats,
)
from hvd_ckpt.snapshots.snapshots import (
    Snapshots as Snapshots,
)
from hvd_ckpt.utils.memory import (
    measure_peak as measure_peak,
)
