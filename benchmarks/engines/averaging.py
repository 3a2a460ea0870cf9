"""Engines that average weights: this library's, PyTorch's and torchft's, each as its documentation tells its user to write it."""

from __future__ import annotations

from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import hvd_ckpt as hc
from hvd_ckpt.app.compare.runner.engine import Engine, OnTorch
from hvd_ckpt.app.compare.runner.engines import HvdCkpt, variant

TORCHFT_TIMEOUT = timedelta(seconds=120)
_kept: list[Any] = []  # of torchft, whose servers must outlive a run


class Local(HvdCkpt):
    """This library's local SGD, with an average after ``every`` steps; buffers stay each rank's own, as with the others."""

    reduces_by = ""

    def wrap(self, model: nn.Module, optimizer: Optimizer, passes: int = 1) -> tuple[nn.Module, Optimizer]:
        return model, hc.LocalSGD(optimizer, list(model.named_parameters()), **self.options)


class ModelAverager(OnTorch):
    """PyTorch's PeriodicModelAverager, which averages the weights after each ``every`` steps of the optimizer."""

    def wrap(self, model: nn.Module, optimizer: Optimizer, passes: int = 1) -> tuple[nn.Module, Optimizer]:
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

        every = self.options["every"]
        # It counts steps from 0, and averages when `warmup_steps` and any number of periods have passed: with
        # this warm-up after `every` steps for the first time.
        averager = PeriodicModelAverager(period=every, warmup_steps=every - 1)
        optimizer.register_step_post_hook(lambda *_: averager.average_parameters(model.parameters()))
        return model, optimizer


class TorchftDiLoCo(Engine):
    """torchft's DiLoCo, whose hooks average after each ``every`` steps of the optimizer; each rank is a replica group.

    Args:
        every: steps between two averages.
        lr, momentum: of the outer optimizer.
    """

    @classmethod
    def unavailable(cls) -> str | None:
        return None if find_spec("torchft") else "torchft is not installed"

    def start(self, folder: Path) -> None:
        super().start(folder)
        hc.init()

    def mean(self, tensor: Tensor) -> Tensor:
        mean: Tensor = hc.allreduce(tensor)
        return mean

    def wrap(self, model: nn.Module, optimizer: Optimizer, passes: int = 1) -> tuple[nn.Module, Optimizer]:
        from torchft import Manager, ProcessGroupGloo
        from torchft._torchft import LighthouseServer
        from torchft.local_sgd import DiLoCo

        # Rank 0 has the server at which all replica groups meet. Each rank is a group of its own, and so has
        # a store of its own.
        port = None
        if self.rank == 0:
            server = LighthouseServer(bind="127.0.0.1:0", min_replicas=self.size)
            _kept.append(server)
            port = server.address().rpartition(":")[2]
        port = hc.broadcast_object(port, root_rank=0)
        distributed: Any = torch.distributed  # whose stores have no types
        store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        manager = Manager(
            pg=ProcessGroupGloo(timeout=TORCHFT_TIMEOUT),
            load_state_dict=model.load_state_dict,
            state_dict=model.state_dict,
            min_replica_size=self.size,
            use_async_quorum=False,
            timeout=TORCHFT_TIMEOUT,
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=store.port,
            lighthouse_addr=f"http://127.0.0.1:{port}",
            replica_id=f"rank{self.rank}",
            hostname="127.0.0.1",
            # All ranks have begun with the weights of rank 0.
            init_sync=False,
        )
        lr, momentum = self.options["lr"], self.options["momentum"]
        outer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, nesterov=True)
        diloco = DiLoCo(manager, [model], optimizer, outer, self.options["every"], pin_memory=False)
        diloco.__enter__()
        _kept.extend([store, manager, diloco])
        return model, optimizer


def _diloco(every: int, **options: Any) -> type[Engine]:
    """DiLoCo of this library; the momentum suits runs of some hundred steps."""
    return variant(Local, every=every, outer=hc.Nesterov(0.7, 0.7), **options)


ENGINES: dict[str, type[Engine]] = {
    **{f"local-{every}": variant(Local, every=every) for every in (10, 50)},
    **{f"diloco-{every}": _diloco(every) for every in (10, 50, 100)},
    "fragments-50": _diloco(50, fragments=4, delay=5),
    "int8-50": _diloco(50, wire="int8"),
    "averager": variant(ModelAverager, every=50),
    "torchft": variant(TorchftDiLoCo, every=50, lr=0.7, momentum=0.7),
}
