"""Flat gradient buckets: how gradients are laid out in memory to be reduced together.

A bucket is one flat tensor of one dtype on one device; the gradient of each of its parameters is a view into it, so that
backward accumulates where the allreduce reads and nothing is copied. Storage is allocated when a bucket is first filled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from hvd_ckpt.reduction.summed import copied
from hvd_ckpt.torch_private import foreach_copy_, foreach_zero_

MEBIBYTE = 1 << 20
LAST_BUCKET_BYTES = MEBIBYTE


@dataclass
class Slot:
    """The place of one parameter in its bucket."""

    index: int
    parameter: torch.Tensor
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    view: torch.Tensor | None = None
    pointer: int = 0
    filled: bool = False  # there was a gradient when the bucket was last gathered

    @property
    def numel(self) -> int:
        return self.shape.numel()

    def is_home(self) -> bool:
        """True if the parameter's ``grad`` is the view itself, in its place: the usual case, told at little cost."""
        view = self.view
        return view is not None and self.parameter.grad is view and view.data_ptr() == self.pointer

    def holds(self, gradient: torch.Tensor) -> bool:
        """True if ``gradient`` lies here. Compares memory, not identity: ``Module.to`` keeps the tensor object and moves it."""
        view = self.view
        if view is None or gradient.layout is not torch.strided or gradient.data_ptr() != self.pointer:
            return False
        return (
            gradient.dtype is view.dtype
            and gradient.shape == view.shape
            and gradient.stride() == view.stride()
            and gradient.device == view.device
        )


@dataclass
class Bucket:
    """One flat tensor and the parameters whose gradients are views into it.

    Args:
        position: the bucket's place in the order of launches.
        dtype, device: of the storage, and of every parameter in it when it was laid out.
        words: extra elements at the end that carry control words (see :mod:`.reducer`).
    """

    position: int
    dtype: torch.dtype
    device: torch.device
    slots: list[Slot] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)  # of the slots
    numel: int = 0
    words: int = 0
    flat: torch.Tensor | None = None

    # State of the current step.
    waiting: int = 0
    launched: bool = False
    void: bool = False
    version: int = 0

    def add(self, index: int, parameter: torch.Tensor) -> None:
        self.slots.append(Slot(index, parameter, self.numel, parameter.shape, parameter.stride()))
        self.indices.append(index)
        self.numel += parameter.numel()

    @property
    def nbytes(self) -> int:
        """Bytes of the gradients in it, control words not counted."""
        return self.numel * self.dtype.itemsize

    def allocate(self) -> torch.Tensor:
        """The storage, made if need be and cut into views."""
        if self.flat is None:
            self.flat = torch.empty(self.numel + self.words, dtype=self.dtype, device=self.device)
        for slot in self.slots:
            view = slot.view
            if view is None or view.data_ptr() != slot.pointer or view.dtype is not self.dtype:
                self.view(slot)
        return self.flat

    def view(self, slot: Slot) -> torch.Tensor:
        """The part of the storage that belongs to a slot."""
        flat, view = self.flat, slot.view
        if flat is None:
            flat = self.allocate()
        expected = flat.data_ptr() + slot.offset * self.dtype.itemsize
        # A conversion of the model (``Module.to``) moves the view object itself.
        if view is None or view.data_ptr() != expected or view.dtype is not self.dtype:
            view = slot.view = _view(flat, slot)
            slot.pointer = view.data_ptr()
        return view

    def free(self) -> None:
        """Forgets the storage; it lives on while some parameter's ``grad`` is still a view into it."""
        self.flat = None
        for slot in self.slots:
            slot.view = None

    def fits_parameters(self) -> bool:
        """False if a parameter changed its dtype, device, size or layout since the bucket was laid out."""
        dtype, device = self.dtype, self.device
        return all(
            slot.parameter.dtype is dtype
            and slot.parameter.device == device
            and slot.parameter.shape == slot.shape
            and slot.parameter.stride() == slot.stride
            for slot in self.slots
        )

    def has_graph(self) -> bool:
        """True if some gradient was made with ``create_graph=True``: a view into the storage would lose its graph."""
        gradients = (slot.parameter.grad for slot in self.slots)
        return any(gradient is not None and gradient.requires_grad for gradient in gradients)

    def adopt(self, slot: Slot) -> None:
        """Brings the gradient of one parameter into the storage, if it can lie there, and makes it its ``grad``."""
        gradient = slot.parameter.grad
        if gradient is None or gradient.requires_grad or gradient.layout is not torch.strided:
            return
        if gradient.dtype is not self.dtype or gradient.device != self.device or gradient.shape != slot.shape:
            return
        if not slot.holds(gradient):
            view = self.view(slot)
            view.detach().copy_(gradient)
            copied(gradient, view)
            slot.parameter.grad = view

    def gather(self) -> torch.Tensor:
        """Brings every gradient into the storage and makes it the parameter's ``grad``; missing ones count as zero.

        A gradient that arrived elsewhere (after ``zero_grad(set_to_none=True)``, say) is copied in and let go.

        Returns:
            The storage: 1-D, control words at the end.
        """
        flat = self.allocate()
        sources: list[torch.Tensor] = []
        targets: list[torch.Tensor] = []
        missing: list[torch.Tensor] = []
        for slot in self.slots:
            gradient, view = slot.parameter.grad, slot.view
            assert view is not None
            slot.filled = gradient is not None
            if gradient is view:
                continue  # in its place: allocate() has looked
            if gradient is None:
                missing.append(view)
            elif not slot.holds(gradient):
                sources.append(gradient if gradient.layout is torch.strided else gradient.to_dense())
                targets.append(view)
                copied(gradient, view)
                slot.parameter.grad = view
        with torch.no_grad():
            if targets:
                foreach_copy_(targets, sources)
            if missing:
                foreach_zero_(missing)
        return flat


def _view(flat: torch.Tensor, slot: Slot) -> torch.Tensor:
    """A slot's part of ``flat``, with the parameter's strides where they are dense (channels-last weights, say)."""
    with torch.no_grad():
        if slot.numel and _is_dense(slot.shape, slot.stride):
            return flat.as_strided(slot.shape, slot.stride, slot.offset)
        return flat[slot.offset : slot.offset + slot.numel].view(slot.shape)


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """True if the elements fill consecutive places, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(strides, shape)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def lay_out(
    order: Sequence[int],
    parameters: Sequence[torch.Tensor],
    cap_bytes: float,
    groups: Iterable[Sequence[int]] | int | None = None,
) -> list[Bucket]:
    """Packs parameters into buckets.

    Args:
        order: indices of the parameters to place, in the order in which their gradients become final.
        parameters: all parameters, by index.
        cap_bytes: a bucket is closed before it grows past this size (one parameter may be larger by itself).
        groups: instead of the cap, a number of buckets, or lists of parameter indices that each travel together
            (the meaning of ``groups`` in Horovod); a parameter in no list travels alone.

    Returns:
        Buckets in launch order. Without ``groups`` the last one is small (about 1 MiB): it cannot leave before the backward
        pass is over, so the less it holds the more can leave early.
    """
    keys = _group_keys(order, groups)
    total_tail = 0
    tail_from = len(order)
    if keys is None:
        while tail_from > 0:
            size = _nbytes(parameters[order[tail_from - 1]])
            if tail_from < len(order) and total_tail + size > min(cap_bytes, LAST_BUCKET_BYTES):
                break
            total_tail += size
            tail_from -= 1

    closed: list[tuple[int, Bucket]] = []  # (position in the order of its last parameter, bucket)
    open_buckets: dict[object, tuple[int, Bucket]] = {}
    for place, index in enumerate(order):
        parameter = parameters[index]
        kind = (parameter.dtype, parameter.device)
        key: object = (kind, place >= tail_from if keys is None else keys[index])
        entry = open_buckets.get(key)
        limit = cap_bytes if keys is None and place < tail_from else float("inf")
        if entry is not None and entry[1].nbytes + _nbytes(parameter) > limit:
            closed.append(entry)
            entry = None
        bucket = entry[1] if entry is not None else Bucket(0, parameter.dtype, parameter.device)
        bucket.add(index, parameter)
        open_buckets[key] = (place, bucket)
    closed.extend(open_buckets.values())
    closed.sort(key=lambda entry: entry[0])
    buckets = [bucket for _, bucket in closed]
    for position, bucket in enumerate(buckets):
        bucket.position = position
    return buckets


def _nbytes(parameter: torch.Tensor) -> int:
    return parameter.numel() * parameter.dtype.itemsize


def _group_keys(
    order: Sequence[int], groups: Iterable[Sequence[int]] | int | None
) -> dict[int, object] | None:
    if groups is None or groups == 0:
        return None
    if isinstance(groups, int):
        count = min(groups, max(len(order), 1))
        base, longer = divmod(len(order), count)
        keys: dict[int, object] = {}
        start = 0
        for group in range(count):
            size = base + (group < longer)
            for index in order[start : start + size]:
                keys[index] = group
            start += size
        return keys
    keys = {index: ("alone", index) for index in order}
    for number, group_of_indices in enumerate(groups):
        for index in group_of_indices:
            keys[index] = number
    return keys
