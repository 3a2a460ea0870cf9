"""Local SGD of others, on the ranks of a job: PyTorch's ``PeriodicModelAverager``, and DiLoCo of torchft.

Both average over a ``torch.distributed`` group over Gloo that the ranks of this machine form.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hvd_ckpt as hc

TIMEOUT = timedelta(seconds=120)
_kept: list[Any] = []  # of torchft, which must outlive a method


def torch_averager(model: nn.Module, every: int, rendezvous: Path) -> Callable[[], None]:
    """PyTorch's averages of parameters; the result is to be called after each step.

    Args:
        rendezvous: a file of this job.
    """
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=hc.rank(), world_size=hc.size()
        )
    averager = PeriodicModelAverager(period=every, warmup_steps=every - 1)
    return lambda: averager.average_parameters(model.parameters())


def add_torchft_diloco(
    model: nn.Module, optimizer: torch.optim.Optimizer, every: int, lr: float, momentum: float
) -> None:
    """Has torchft's hooks average the model after each ``every`` steps of the optimizer; each rank is a replica group."""
    from torchft import Manager, ProcessGroupGloo
    from torchft._torchft import LighthouseServer
    from torchft.local_sgd import DiLoCo

    port = None
    if hc.rank() == 0:
        server = LighthouseServer(bind="127.0.0.1:0", min_replicas=hc.size())
        _kept.append(server)
        port = server.address().rpartition(":")[2]
    port = hc.broadcast_object(port, root_rank=0)
    distributed: Any = torch.distributed  # whose stores have no types
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=hc.size(),
        use_async_quorum=False,
        timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=f"http://127.0.0.1:{port}",
        replica_id=f"rank{hc.rank()}",
        hostname="127.0.0.1",
        init_sync=False,
    )
    outer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, nesterov=True)
    diloco = DiLoCo(manager, [model], optimizer, outer, every, pin_memory=False)
    diloco.__enter__()
    _kept.extend([store, manager, diloco])
