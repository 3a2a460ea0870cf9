"""Buckets: flat storage for the gradients of several parameters, which are reduced together."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from hvd_ckpt.utils.torch_private import foreach_copy_, foreach_zero_, uses_of

# A bucket is one flat tensor of one dtype on one device; the gradient of each of its parameters is a view into it, so that
# backward accumulates where the allreduce reads and nothing is copied. Storage is allocated when a bucket is first filled.


MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class TensorSpec:
    """Shape and strides of a whole parameter; the strides, which have no gaps, give the order of its elements in memory."""

    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """The tensor's own, or those of its contiguous copy where it has gaps or elements that share memory."""
        packed = tensor if is_packed(tensor) else torch.empty(tensor.shape, device="meta")
        return cls(tensor.shape, packed.stride())

    @property
    def numel(self) -> int:
        return self.shape.numel()

    def flatten(self, whole: torch.Tensor) -> torch.Tensor:
        """The elements of a tensor of this shape in the parameter's memory order, 1-D; a view where its strides allow."""
        whole = whole.detach()
        if whole.layout is not torch.strided:
            whole = whole.to_dense()
        if whole.stride() != self.stride:
            whole = torch.empty_strided(
                self.shape, self.stride, dtype=whole.dtype, device=whole.device
            ).copy_(whole)
        return whole.as_strided((self.numel,), (1,))

    def unflatten(self, flat: torch.Tensor, offset: int = 0) -> torch.Tensor:
        """A view of consecutive elements, from ``offset`` on, as the whole parameter."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + offset)


def is_packed(tensor: torch.Tensor) -> bool:
    """Whether a tensor fills consecutive memory, each place with one element."""
    return tensor.is_contiguous() or not tensor.numel() or is_dense(tensor.shape, tensor.stride())


@dataclass(slots=True)
class GradientEntry:
    """The place of one parameter in its bucket."""

    index: int
    parameter: torch.Tensor
    offset: int
    spec: TensorSpec
    stride: tuple[int, ...]  # the parameter's, which may have gaps
    view: torch.Tensor | None = None
    pointer: int = 0
    filled: bool = False  # there was a gradient when the bucket was last gathered

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


@dataclass(slots=True)
class Bucket:
    """One flat tensor and the parameters whose gradients are views into it.

    Args:
        position: the bucket's place in the order of launches.
        dtype, device: dtype and device of the storage, and of every parameter in it when it was laid out.
        flags: extra elements at the end that carry control flags (see :mod:`.reducer`).
    """

    position: int
    dtype: torch.dtype
    device: torch.device
    entries: list[GradientEntry] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)  # of the entries
    numel: int = 0
    flags: int = 0
    flat: torch.Tensor | None = None

    # State of the current step.
    waiting: int = 0  # parameters whose gradient is not complete yet
    launched: bool = False
    void: bool = False  # was sent as zeros, since a parameter has been converted

    def add(self, index: int, parameter: torch.Tensor) -> None:
        spec = TensorSpec.of(parameter)
        self.entries.append(GradientEntry(index, parameter, self.numel, spec, parameter.stride()))
        self.indices.append(index)
        self.numel += parameter.numel()

    @property
    def nbytes(self) -> int:
        """Bytes of the gradients in it, control flags not counted."""
        return self.numel * self.dtype.itemsize

    def allocate(self) -> torch.Tensor:
        """The storage, made if need be."""
        if self.flat is None:
            self.hold(torch.empty(self.numel + self.flags, dtype=self.dtype, device=self.device))
        assert self.flat is not None
        return self.flat

    def hold(self, flat: torch.Tensor) -> None:
        """Makes this the storage."""
        self.flat = flat
        for entry in self.entries:
            self.view(entry)

    def _is_kept(self) -> bool:
        """Whether code has kept a tensor that shares the storage, such as ``p.grad.detach()`` of an earlier step."""
        return self.flat is not None and uses_of(self.flat.untyped_storage()) > _USES + len(self.entries)

    def view(self, entry: GradientEntry) -> torch.Tensor:
        """The part of the storage that belongs to an entry."""
        flat, view = self.flat, entry.view
        if flat is None:
            flat = self.allocate()
        expected = flat.data_ptr() + entry.offset * self.dtype.itemsize
        # A conversion of the model (``Module.to``) moves the view object itself.
        if view is None or view.data_ptr() != expected or view.dtype is not self.dtype:
            view = entry.view = view_of(flat, entry)
            entry.pointer = view.data_ptr()
        return view

    def free(self) -> None:
        """Forgets the storage; it lives on while some parameter's ``grad`` is still a view into it."""
        self.flat = None
        for entry in self.entries:
            entry.view = None

    def fits_parameters(self) -> bool:
        """False if a parameter changed its dtype, device, size or layout since the bucket was laid out."""
        dtype, device = self.dtype, self.device
        for entry in self.entries:
            parameter = entry.parameter
            if (
                parameter.dtype is not dtype
                or parameter.device != device
                or parameter.shape != entry.spec.shape
                or parameter.stride() != entry.stride
            ):
                return False
        return True

    def may_leave(self) -> bool:
        """False if some gradient was made with ``create_graph=True``: a view into the storage would lose its graph."""
        for entry in self.entries:
            gradient = entry.parameter.grad
            if gradient is not None and gradient.requires_grad:
                return False
        return True

    def adopt(self, entry: GradientEntry) -> None:
        """Brings the gradient of one parameter into the storage, if it can lie there, and makes it its ``grad``."""
        gradient = entry.parameter.grad
        if gradient is None or gradient.requires_grad or gradient.layout is not torch.strided:
            return
        if (gradient.dtype, gradient.device, gradient.shape) != (self.dtype, self.device, entry.spec.shape):
            return
        if not entry.holds(gradient):
            with torch.no_grad():
                view = self.view(entry)
            if sys.getrefcount(view) > _REFERENCES or self._is_kept():
                return
            view.detach().copy_(gradient)
            entry.parameter.grad = view

    def gather(self) -> torch.Tensor:
        """Brings every gradient into the storage and makes it the parameter's ``grad``; missing ones count as zero.

        A gradient that arrived elsewhere (after ``zero_grad(set_to_none=True)``, say) is copied in and let go.

        Returns:
            The storage: 1-D, control flags at the end.
        """
        is_new, flat = self.flat is None, self.allocate()
        sources: list[torch.Tensor] = []
        targets: list[torch.Tensor] = []
        missing: list[torch.Tensor] = []
        copied: list[tuple[torch.Tensor, torch.Tensor]] = []
        with torch.no_grad():
            for entry in self.entries:
                parameter, view = entry.parameter, entry.view
                gradient = parameter.grad
                # ``Module.to`` may have moved the view, which was the parameter's ``grad``, out of this storage.
                if view is None or view.data_ptr() != entry.pointer:
                    view = self.view(entry)
                entry.filled = gradient is not None
                if gradient is view:
                    continue
                if sys.getrefcount(view) > _REFERENCES:
                    # Another parameter has it as its gradient, or code has kept an earlier one: that stays as it is.
                    self.free()
                    return self.gather()
                if gradient is None:
                    missing.append(view)
                    continue
                sources.append(gradient if gradient.layout is torch.strided else gradient.to_dense())
                targets.append(view)
                copied.append((parameter, view))
            if (targets or missing) and not is_new and self._is_kept():
                self.free()
                return self.gather()
            if targets:
                foreach_copy_(targets, sources)
            if missing:
                foreach_zero_(missing)
            for parameter, view in copied:
                parameter.grad = view
        return flat


def _without_others() -> tuple[int, int]:
    entry = [torch.empty(0, dtype=torch.float32)]  # in the place of an entry, which refers to its view
    view = entry[0]
    return sys.getrefcount(view), uses_of(view.untyped_storage())


_REFERENCES, _USES = _without_others()
# Of a view without others, and of a storage without views. More tell that another parameter has the view as its gradient, or that
# code has kept it or what shares its memory: it must not be written.


def view_of(flat: torch.Tensor, entry: GradientEntry) -> torch.Tensor:
    """An entry's part of ``flat``, with the strides of the parameter's elements in memory (channels-last weights, say).

    It counts its versions by itself: they tell which gradient of a bucket was changed in place.
    """
    return entry.spec.unflatten(flat, entry.offset).data


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements, of which there are some, fill consecutive places, in whatever order of dimensions."""
    # In channels-last memory a shape of [2, 3, 4, 4] has the strides 48, 1, 12, 3: in ascending order 1, 3, 12, 48. Each must
    # be the product of the sizes that come before it: 1, 3, 3 * 4, 3 * 4 * 4.
    expected = 1
    for stride, size in sorted(zip(strides, shape)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
