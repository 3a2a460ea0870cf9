"""Samples of data sets in tests, and calls that refuse something."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hvd_ckpt.data.objectives import Batch


def whole(data: Any) -> Batch:
    """All samples of a data set, in one batch."""
    batch: Batch = data.batch(range(len(data)), [0] * len(data))
    return batch


def same_batch(one: Batch, other: Batch) -> bool:
    """Whether two batches have the same values."""
    ours, theirs = ((*batch.inputs, batch.targets, *batch.shared.values()) for batch in (one, other))
    return all(map(torch.equal, ours, theirs))


def assert_refused(
    says: str, call: Callable[..., Any], *arguments: Any, error: type[Exception] = ValueError, **options: Any
) -> None:
    """A call that is wrong says so in one line."""
    with pytest.raises(error) as caught:
        call(*arguments, **options)
    assert says in str(caught.value) and "\n" not in str(caught.value)
