"""Launches each bucket's allreduce once, in a fixed order.

The protocol, which every rank follows whatever its own gradients do:

* Bucket *i* + 1 is never launched before bucket *i*. In the backward pass a rank launches as far as its gradients are final;
  :meth:`Reducer.synchronize` launches the rest. So all ranks launch the same buckets in the same order.
* The last bucket leaves in ``synchronize()`` and carries control words: for each parameter whether it is used, and whether a
  gradient came late; and one word by which a rank asks for a meeting (:mod:`.meeting`). They travel in the bucket's own
  storage where that is float32, uncompressed and summed, and as a reduction of their own otherwise.
* After the control words all ranks know the same, and go through the rest together: late parts, sparse gradients, parameters
  that are used for the first time, the meeting.

The first step has no buckets: it learns in which order gradients become final on rank 0, places the parameters, and reduces
at the end. A parameter gets a place when it is first used, so an unused one costs nothing and keeps ``grad is None``.
Everything within a step is an allreduce (nothing is broadcast), so ranks that have called ``join()`` can be absent.
"""
from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from horovod.torch import mpi_ops
from horovod.torch.mpi_ops import Average, Sum
from torch.utils.weak import WeakTensorKeyDictionary

from . import compression as wire_formats
from .agreement import ParameterFacts, allgather_objects
from .buckets import MEBIBYTE, Bucket, lay_out
from .meeting import Meeting, Report
from .readiness import FireCounts
from .sparse import empty_sparse_like, reduce_sparse
from .stats import ReductionStats, StepStats

DEFAULT_BUCKET_CAP_MB = 25.0

# Which reducer counts a parameter's gradients: the newest one. Two that did would both launch them.
_owners: Any = WeakTensorKeyDictionary()


class Reducer:
    """Reduces the gradients of ``named_parameters`` over ``process_set``, once per call of :meth:`synchronize`.

    Args:
        named_parameters: (name, parameter) pairs, the same on every rank and in the same order; frozen ones included.
        identity: a number that no other live reducer on these ranks has.
        op, prescale_factor, postscale_factor, compression, process_set, sparse_as_dense: as in Horovod.
        groups: number of buckets, or lists of parameters that travel together (replaces ``bucket_cap_mb``).
        bucket_cap_mb: size in MiB at which a bucket is closed.
        keep_buckets: keep the buckets' storage between steps; False frees it with the gradients.
    """

    def __init__(self, named_parameters: Sequence[tuple[str, torch.Tensor]], *, identity: int, op: int, prescale_factor: float,
                 postscale_factor: float, compression: Any, process_set: Any, sparse_as_dense: bool,
                 groups: Sequence[Sequence[torch.Tensor]] | int | None, bucket_cap_mb: float, keep_buckets: bool) -> None:
        self.names = [name for name, _ in named_parameters]
        self.parameters = [parameter for _, parameter in named_parameters]
        self.counts = FireCounts(len(self.names))
        self.stats = ReductionStats()
        self.order: list[int] = []  # placed dense parameters, in the order in which their gradients become final
        self.sparse: dict[int, int] = {}  # placed sparse parameters and their number of sparse dimensions
        self.densified: set[int] = set()  # sparse parameters that travel dense, in a bucket
        self.buckets: list[Bucket] = []
        self.active = False  # a gradient has arrived since the last synchronization

        self._name = f"hvd_ckpt.{identity}"
        self._op = op
        self._prescale, self._postscale = prescale_factor, postscale_factor
        self._compression = compression
        self._process_set = process_set
        self._sparse_as_dense = sparse_as_dense
        self._groups = groups
        self._cap_bytes = bucket_cap_mb * MEBIBYTE
        self._keep_buckets = keep_buckets
        self._bucket_of: list[Bucket | None] = [None] * len(self.names)
        self._late: set[int] = set()
        self._diverted: set[int] = set()
        self._handles: list[tuple[Bucket, int, torch.Tensor, Any]] = []
        self._next = 0
        self._step = StepStats()
        self._report = Report()
        self._late_parts: dict[int, torch.Tensor] = {}
        self._hooks: dict[int, list[Any]] = {}
        self._known = len(self.names)  # parameters whose facts all ranks have compared
        self._lock = threading.RLock()
        self._index_of = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        self._unhooked = list(range(len(self.parameters)))
        self.hook_parameters()

    # ------------------------------------------------------------------------------------------------ hooks

    def hook_parameters(self) -> None:
        """Registers hooks on the parameters that have none; those that are frozen now wait until they are unfrozen."""
        if not self._unhooked:
            return
        frozen = []
        for index in self._unhooked:
            parameter = self.parameters[index]
            if not parameter.requires_grad:
                frozen.append(index)
                continue
            owner = _owners.get(parameter)
            if owner is not None and owner() is not None:
                owner().release(parameter)
            _owners[parameter] = weakref.ref(self)
            reducer = weakref.ref(self)  # hooks outlive the optimizer; they must not keep it alive
            self._hooks[index] = [
                parameter.register_hook(_before_accumulation(reducer, index)),  # type: ignore[no-untyped-call]
                parameter.register_post_accumulate_grad_hook(_after_accumulation(reducer, index)),  # type: ignore[no-untyped-call]
            ]
        self._unhooked = frozen

    def release(self, parameter: torch.Tensor) -> None:
        """Stops counting a parameter's gradients; they are reduced in :meth:`synchronize`, if it is still called."""
        for hook in self._hooks.pop(self._index_of[id(parameter)], []):
            hook.remove()

    def add_parameters(self, named_parameters: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Takes parameters in that were added to the optimizer; the ranks compare them at the next synchronization."""
        for name, parameter in named_parameters:
            if id(parameter) in self._index_of:
                continue
            index = len(self.parameters)
            self._index_of[id(parameter)] = index
            self.names.append(name)
            self.parameters.append(parameter)
            self._bucket_of.append(None)
            self._unhooked.append(index)
            self.counts.extend(1)
        self.hook_parameters()

    def before_accumulation(self, index: int) -> None:
        """Keeps a late gradient out of the buffer in flight: it goes to a fresh tensor."""
        bucket = self._bucket_of[index]
        if bucket is not None and bucket.launched and index not in self._diverted:
            with self._lock:
                self._diverted.add(index)
                self.parameters[index].grad = None

    def after_accumulation(self, index: int) -> None:
        """Counts the accumulation and launches what has become final. (``torch.autograd.grad`` does not come here.)"""
        with self._lock:
            self.active = True
            fired = self.counts.fire(index)
            bucket = self._bucket_of[index]
            if bucket is None:
                return
            if bucket.launched:
                self._late.add(index)
            elif fired == self.counts.expected[index]:
                bucket.waiting -= 1
                if bucket.waiting == 0:
                    self._complete(bucket)
            elif fired == 1:
                # More parts are to come: accumulate them in the bucket rather than beside it.
                self._adopt(index, bucket)

    def _adopt(self, index: int, bucket: Bucket) -> None:
        gradient = self.parameters[index].grad
        if gradient is None or gradient.requires_grad or gradient.layout is not torch.strided or \
                gradient.dtype is not bucket.dtype or gradient.device != bucket.device:
            return
        bucket.allocate()
        slot = next(slot for slot in bucket.slots if slot.index == index)
        if not slot.holds(gradient):
            assert slot.view is not None
            slot.view.detach().copy_(gradient)
            self.parameters[index].grad = slot.view

    def _complete(self, bucket: Bucket) -> None:
        """All gradients of the bucket have arrived: launch it, and those behind it that were waiting for it."""
        if bucket.position != self._next:
            if bucket.fits_parameters():
                bucket.gather()
            return
        while self._may_leave_early() and self.buckets[self._next].waiting == 0:
            self._launch(in_backward=True)

    def _may_leave_early(self) -> bool:
        return self.counts.learned and self._linear and self._next < len(self.buckets) - 1

    @property
    def _linear(self) -> bool:
        """A late part can be added to what has been reduced already."""
        return self._op in (Average, Sum)

    # ------------------------------------------------------------------------------------------------ one step

    def synchronize(self) -> None:
        """Reduces the gradients of this step. Collective; afterwards every ``grad`` is the same on every rank.

        Raises:
            ValueError, RuntimeError: the ranks' models do not fit each other, or gradients were changed in flight; the same
                on every rank.
            horovod.common.exceptions.HorovodInternalError: a rank has gone.
        """
        try:
            self._synchronize()
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Forgets the step that has begun (after an error, or when a state is loaded)."""
        for _, handle, _, _ in self._handles:
            mpi_ops._handle_map.pop(handle, None)
        self._end_step(learn=False)

    def _synchronize(self) -> None:
        self.hook_parameters()
        replaced = self._inspect_flight()
        if replaced or len(self.parameters) != self._known:
            self._report.wanted = True
        riding = self._words_ride()
        while self._next < len(self.buckets):
            last = self._next == len(self.buckets) - 1
            self._launch(in_backward=False, words=self._control_words() if last and riding else None)
        words = None if riding else self._reduce_words(self._control_words())
        riding_words = self._finish_buckets()
        words = riding_words if words is None else words
        assert words is not None

        count = self._known
        used = [index for index, word in enumerate(words[:count]) if word > 0]
        late = [index for index, word in enumerate(words[count:2 * count]) if word > 0]
        meeting_wanted = words[2 * count] > 0

        self._hand_out(set(used), keep=set(replaced))
        self._add_late_parts(late)
        self._reduce_sparse([index for index in used if index in self.sparse])
        if meeting_wanted:
            used = self._meet(replaced, used)
        self._place([index for index in used if not self._is_placed(index)])
        self._step.late_gradients = [self.names[index] for index in late]
        self._end_step(learn=True)

    def _inspect_flight(self) -> list[int]:
        """Finds gradients that were replaced or changed by hand while they were in flight."""
        replaced = []
        for bucket in self.buckets:
            if not bucket.launched or bucket.void or bucket.flat is None:
                continue
            if bucket.flat._version != bucket.version:
                self._report.error = (
                    f"a gradient was changed in place between backward() and synchronize(), while it was being reduced (one of "
                    f"'{self.names[bucket.slots[0].index]}' to '{self.names[bucket.slots[-1].index]}'); call "
                    f"optimizer.synchronize() first, then change gradients, then step() within optimizer.skip_synchronize()")
                self._report.wanted = True
            for slot in bucket.slots:
                if slot.index in self._late:
                    continue
                gradient = slot.parameter.grad
                if gradient is None:
                    if slot.filled and slot.index not in self._diverted:
                        replaced.append(slot.index)
                elif slot.parameter.numel() and not slot.holds(gradient) and slot.parameter.dtype is bucket.dtype:
                    replaced.append(slot.index)
        return replaced

    def _control_words(self) -> torch.Tensor:
        """[is used] * n + [has a late gradient] * n + [wants a meeting], float32, on this rank."""
        count = self._known
        words = [0.0] * (2 * count + 1)
        for index, parameter in enumerate(self.parameters[:count]):
            if parameter.grad is not None:
                words[index] = 1.0
        for bucket in self.buckets:
            if bucket.void:
                self._report.void.extend(self.names[slot.index] for slot in bucket.slots)
                self._report.wanted = True
            elif bucket.launched:  # its gradients may be hidden from ``grad`` by a diversion
                for slot in bucket.slots:
                    if slot.index in self._diverted:
                        words[slot.index] = 1.0
        for index in self._late:
            words[count + index] = 1.0
        words[2 * count] = float(self._report.wanted)
        return torch.tensor(words, dtype=torch.float32)

    def _words_ride(self) -> bool:
        if not self.buckets:
            return False
        last = self.buckets[-1]
        return last.words == 2 * self._known + 1 and not last.launched

    def _reduce_words(self, words: torch.Tensor) -> list[float]:
        handle = mpi_ops.allreduce_async_(words, name=f"{self._name}.words.{words.numel()}", op=Sum, process_set=self._process_set)
        self._step.control_messages += 1
        reduced: list[float] = mpi_ops.synchronize(handle).tolist()
        return reduced

    def _launch(self, in_backward: bool, words: torch.Tensor | None = None) -> None:
        bucket = self.buckets[self._next]
        bucket.void = not bucket.fits_parameters()
        if bucket.void:
            # The model has been converted since. The other ranks (which should find the same) still expect this bucket; its
            # true gradients are reduced after the meeting that this asks for.
            self._report.wanted = True
            flat = torch.zeros(bucket.numel + bucket.words, dtype=bucket.dtype, device=bucket.device)
            if words is not None:
                words[-1] = 1.0
                for slot in bucket.slots:
                    self._report.void.append(self.names[slot.index])
        else:
            bucket.gather()
            assert bucket.flat is not None
            flat = bucket.flat
        if words is not None:
            with torch.no_grad():
                flat[bucket.numel:].copy_(words)
        elif bucket.words:
            with torch.no_grad():
                flat[bucket.numel:].zero_()
        wire, context = wire_formats.encode(flat, self._compression)
        handle = self._allreduce(wire, f"bucket.{bucket.position}")
        self._handles.append((bucket, handle, wire, (flat, context)))
        bucket.launched = True
        bucket.in_backward = in_backward
        bucket.version = flat._version
        self._step.launch_order.append(bucket.position)
        self._step.launches_in_backward += in_backward
        self._next += 1

    def _allreduce(self, tensor: torch.Tensor, name: str) -> int:
        handle: int = mpi_ops.allreduce_async_(
            tensor, name=f"{self._name}.{name}", op=self._op, prescale_factor=self._prescale,
            postscale_factor=self._postscale, process_set=self._process_set)
        return handle

    def _finish_buckets(self) -> list[float] | None:
        """Waits for all buckets, in order; returns the control words if the last one carried them."""
        words = None
        while self._handles:
            bucket, handle, wire, (flat, context) = self._handles.pop(0)
            mpi_ops.synchronize(handle)
            with torch.no_grad():
                wire_formats.decode(wire, context, self._compression, flat)
            if bucket.words:
                words = flat[bucket.numel:].tolist()
        return words

    def _hand_out(self, used: set[int], keep: set[int]) -> None:
        """Makes each ``grad`` the view that now holds the reduced gradient, but for those to ``keep``; puts late parts aside."""
        for bucket in self.buckets:
            if bucket.void:
                continue
            for slot in bucket.slots:
                index, parameter = slot.index, slot.parameter
                gradient = parameter.grad
                if index in self._late and gradient is not None:
                    self._late_parts[index] = gradient.detach()
                if index in keep:
                    continue
                if index not in used:
                    parameter.grad = None
                elif index in self.densified:
                    assert slot.view is not None
                    parameter.grad = slot.view.to_sparse()
                elif gradient is None:
                    self._give(slot.view, parameter)
                elif gradient is not slot.view or not slot.holds(gradient):
                    bucket.allocate()  # a conversion may have moved the view object itself
                    self._give(slot.view, parameter)
            if not self._keep_buckets:
                bucket.free()

    @staticmethod
    def _give(view: torch.Tensor | None, parameter: torch.Tensor) -> None:
        assert view is not None
        if view.dtype is parameter.dtype and view.device == parameter.device:
            parameter.grad = view
        else:  # converted in mid-backward, after its bucket had left
            parameter.grad = view.to(dtype=parameter.dtype, device=parameter.device)

    def _add_late_parts(self, late: Sequence[int]) -> None:
        """Reduces what came after a bucket had left, and adds it: averaging is linear."""
        for index in late:
            parameter = self.parameters[index]
            part = self._late_parts.get(index)
            reduced = self._reduce_single(index, part if part is not None else torch.zeros_like(parameter))
            if parameter.grad is None:
                parameter.grad = reduced
            else:
                with torch.no_grad():
                    parameter.grad.add_(reduced)
        self._late_parts = {}

    def _reduce_single(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """Reduces one gradient by itself; returns a tensor of its own."""
        with torch.no_grad():
            flat = gradient.to_dense() if gradient.layout is not torch.strided else gradient.detach()
            result = flat.clone(memory_format=torch.preserve_format)
            contiguous = result.contiguous().view(-1)
            wire, context = wire_formats.encode(contiguous, self._compression)
            mpi_ops.synchronize(self._allreduce(wire, f"single.{index}"))
            wire_formats.decode(wire, context, self._compression, contiguous)
            result.copy_(contiguous.view(result.shape))
        self._step.single_reductions.append(self.names[index])
        return result

    def _reduce_sparse(self, indices: Sequence[int]) -> None:
        for index in sorted(indices):
            parameter = self.parameters[index]
            gradient = parameter.grad
            if gradient is None:
                gradient = empty_sparse_like(parameter, self.sparse[index])
            elif gradient.layout is torch.strided:
                gradient = gradient.to_sparse(self.sparse[index])
            parameter.grad = reduce_sparse(gradient, f"{self._name}.sparse.{index}", self._op, self._process_set)
            self._step.single_reductions.append(self.names[index])

    # ------------------------------------------------------------------------------------------------ placing parameters

    def _is_placed(self, index: int) -> bool:
        return index in self.sparse or self._bucket_of[index] is not None

    def _place(self, fresh: Sequence[int]) -> None:
        """Gives a place to parameters that are used for the first time, and reduces them.

        The first step comes here with all of them: then buckets are made and launched. Later ones are reduced by
        themselves this once, and are in a bucket from the next step on.
        """
        if not fresh:
            return
        positions = torch.zeros(3, len(fresh), dtype=torch.float64)
        leader = self._process_set.rank() == 0
        for column, index in enumerate(fresh):
            gradient = self.parameters[index].grad
            if leader:
                positions[0, column] = self.counts.last_fire[index]
            if gradient is not None and gradient.is_sparse:
                positions[1, column] = 1
                positions[2, column] = gradient.sparse_dim()
        handle = mpi_ops.allreduce_async_(positions, name=f"{self._name}.place.{len(fresh)}", op=Sum, process_set=self._process_set)
        last_fire, ranks_sparse, sparse_dims = mpi_ops.synchronize(handle).tolist()
        self._step.control_messages += 1

        dims = {index: round(sparse_dims[column] / ranks_sparse[column])
                for column, index in enumerate(fresh) if ranks_sparse[column] > 0}
        if self._sparse_as_dense:
            self.densified.update(dims)
            dims = {}
        self.sparse.update(dims)
        # Rank 0's order; what did not fire there comes last, later layers first.
        never = float("inf")
        dense = sorted((last_fire[column] or never, -index) for column, index in enumerate(fresh) if index not in dims)
        dense_indices = [-negative for _, negative in dense]
        first = not self.order
        self.order.extend(dense_indices)
        self._reduce_sparse(list(dims))
        if first:
            self._lay_out()
            while self._next < len(self.buckets):
                self._launch(in_backward=False)
            self._finish_buckets()
            self._hand_out(set(dense_indices), keep=set())
        else:
            for index in dense_indices:
                self._reduce_in_place(index)
            self._lay_out()

    def _reduce_in_place(self, index: int) -> None:
        parameter = self.parameters[index]
        gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        reduced = self._reduce_single(index, gradient)
        parameter.grad = reduced.to_sparse() if index in self.densified else reduced

    def _lay_out(self) -> None:
        """Makes buckets for ``order``. Gradients stay where they are until their new bucket is filled."""
        groups: list[list[int]] | int | None
        if self._groups is None or isinstance(self._groups, int):
            groups = self._groups
        else:
            groups = [[self._index_of[id(parameter)] for parameter in group if id(parameter) in self._index_of]
                      for group in self._groups]
        self.buckets = lay_out(self.order, self.parameters, self._cap_bytes, groups)
        self._bucket_of = [None] * len(self.parameters)
        for bucket in self.buckets:
            for slot in bucket.slots:
                self._bucket_of[slot.index] = bucket
        self._next = 0
        if self.buckets:
            last = self.buckets[-1]
            if self._linear and last.dtype is torch.float32 and \
                    wire_formats.travels_as_is(last.dtype, self._compression):
                last.words = 2 * self._known + 1

    # ------------------------------------------------------------------------------------------------ meetings

    def _meet(self, replaced: Sequence[int], used: list[int]) -> list[int]:
        """All ranks compare what has changed, and raise together or go on together; returns the used parameters."""
        report = self._report
        report.table = [ParameterFacts.of(name, parameter) for name, parameter in zip(self.names, self.parameters)]
        report.replaced = [self.names[index] for index in replaced]
        report.used = [parameter.grad is not None for parameter in self.parameters]
        meeting = Meeting(allgather_objects(report, self._process_set, f"{self._name}.meeting"))
        meeting.check()
        self._known = len(self.parameters)
        used_anywhere = meeting.used()
        for index in [index for index, name in enumerate(self.names) if name in meeting.to_reduce]:
            if used_anywhere[index] and self._is_placed(index):
                self._reduce_in_place(index)
            elif not used_anywhere[index]:
                self.parameters[index].grad = None
        self._lay_out()
        return [index for index, word in enumerate(used_anywhere) if word]

    # ------------------------------------------------------------------------------------------------ between steps

    def reset(self) -> None:
        """Forgets order, layout and counts: the next step learns them anew. To be called on every rank."""
        self.abandon()
        self.order, self.sparse, self.densified = [], {}, set()
        self.counts = FireCounts(len(self.parameters))
        self._known = len(self.parameters)
        self._lay_out()

    def state_dict(self) -> dict[str, Any]:
        """Order, layout and learned counts, as plain data; the counts are this rank's own."""
        return {
            "version": 1,
            "order": [self.names[index] for index in self.order],
            "sparse": {self.names[index]: dims for index, dims in self.sparse.items()},
            "densified": [self.names[index] for index in sorted(self.densified)],
            "bucket_cap_bytes": self._cap_bytes,
            "counts": {name: count for name, count in zip(self.names, self.counts.expected)} if self.counts.learned else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up order, layout and counts, so that the next step is reduced as if training had never stopped.

        Raises:
            ValueError: the state names a parameter that is not here, or is of an unknown version.
        """
        if state.get("version") != 1:
            raise ValueError(f"reduction state of version {state.get('version')!r} cannot be read; this library reads version 1")
        index_of = {name: index for index, name in enumerate(self.names)}
        unknown = [name for name in [*state["order"], *state["sparse"], *state["densified"]] if name not in index_of]
        if unknown:
            raise ValueError(f"reduction state names parameter '{unknown[0]}', which this optimizer does not have; "
                             f"load a state that was saved with the same model")
        self.reset()
        if state["counts"] is not None:
            self.counts.restore([int(state["counts"].get(name, 0)) for name in self.names])
        self.order = [index_of[name] for name in state["order"]]
        self.sparse = {index_of[name]: int(dims) for name, dims in state["sparse"].items()}
        self.densified = {index_of[name] for name in state["densified"]}
        self._cap_bytes = float(state["bucket_cap_bytes"])
        self._lay_out()
        self._end_step(learn=False)

    def follow(self, state: dict[str, Any]) -> None:
        """Takes up another rank's order and layout, and keeps this rank's counts."""
        own = self.state_dict()["counts"]
        self.load_state_dict({**state, "counts": own})

    def _end_step(self, learn: bool) -> None:
        self.counts.close_step(learn)
        if learn:
            self.stats.close_step(self._step)
        self._step = StepStats()
        self._report = Report()
        self._late.clear()
        self._diverted.clear()
        self._late_parts = {}
        self._handles.clear()
        self._next = 0
        self.active = False
        for bucket in self.buckets:
            bucket.launched = bucket.in_backward = bucket.void = False
            bucket.waiting = sum(self.counts.expected[slot.index] > 0 for slot in bucket.slots)


def _before_accumulation(reducer: weakref.ref[Reducer], index: int) -> Callable[[torch.Tensor], None]:
    def hook(gradient: torch.Tensor) -> None:
        owner = reducer()
        if owner is not None:
            owner.before_accumulation(index)
    return hook


def _after_accumulation(reducer: weakref.ref[Reducer], index: int) -> Callable[[torch.Tensor], None]:
    def hook(parameter: torch.Tensor) -> None:
        owner = reducer()
        if owner is not None:
            owner.after_accumulation(index)
    return hook
