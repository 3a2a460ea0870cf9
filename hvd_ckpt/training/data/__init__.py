"""Where samples come from, and in which order."""

from hvd_ckpt.training.data.dataset import Dataset as Dataset
