"""Where samples come from, and in which order."""

from hvd_ckpt.data.dataset import Dataset as Dataset
