"""The training loop of ``hvd-ckpt train``, from Python: see :mod:`hvd_ckpt.app.training`."""

from hvd_ckpt.app.training.build import assemble
from hvd_ckpt.app.training.config import Config
from hvd_ckpt.app.training.trainer import Trainer

__all__ = ["Config", "Trainer", "assemble"]
