"""Where a run computes, and in which precision."""

from __future__ import annotations

import horovod.torch as hvd
import torch

from hvd_ckpt.precision import Precision
from hvd_ckpt.training.config import Config, ConfigError

__all__ = ["device_of", "precision_of"]


def device_of(config: Config) -> torch.device:
    """The device of the configuration: by default the GPU of this rank's number on its machine, or the CPU where there is none.

    Raises:
        ConfigError: it is not here, or neither a CPU nor a CUDA device.
    """
    name = config.device
    if name is None:
        name = f"cuda:{hvd.local_rank()}" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device '{name}': give cpu, cuda, or cuda:N") from None
    if device.type == "cuda":
        number = hvd.local_rank() if device.index is None else device.index
        if number >= torch.cuda.device_count():
            raise ConfigError(f"device '{name}': there is no such device here, see `hvd-ckpt doctor`")
        device = torch.device("cuda", number)
        torch.cuda.set_device(device)
    elif device.type != "cpu":
        raise ConfigError(f"device '{name}': give cpu, cuda, or cuda:N")
    return device


def precision_of(config: Config, device: torch.device) -> Precision:
    """The recipe of the configuration's precision.

    Raises:
        ConfigError: it needs what is not here.
    """
    try:
        return Precision(config.precision, device.type)
    except RuntimeError as error:
        raise ConfigError(str(error)) from None
