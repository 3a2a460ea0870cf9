"""A training step of the user's model on the sample, which planning runs many times and whose effects it undoes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hvd_ckpt.planning.inputs import copied, fingerprints, left_by, tensors_of
from hvd_ckpt.recompute.calls import tensors_in
from hvd_ckpt.recompute.verify import verifying
from hvd_ckpt.utils.measure import no_collection, noting_written, now, undisturbed
from hvd_ckpt.utils.memory import Mark, Marks, recording_marks

Timeline = tuple[tuple[float, int], ...]
"""(seconds, bytes) during a step."""


class Sample(NamedTuple):
    """A batch: arguments of the model and the loss of its output, or None as for :func:`hvd_ckpt.plan`."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss: Callable[[Any], Tensor] | None


class Ends(NamedTuple):
    """Memory at both ends of a chain: of what a model runs before the first block (embeddings) and behind the last (head and loss).

    Attributes:
        begin: the mark before the first block, forward.
        after: peak bytes of the backward pass before the first block.
        forward, backward: peak bytes of head and loss, above the bytes held behind the last block.
    """

    begin: Mark
    after: int
    forward: int
    backward: int


class Step:
    """A training step of the user's model on the sample: forward, loss, backward."""

    def __init__(self, model: nn.Module, sample: Sample, autocast: torch.dtype | None = None) -> None:
        self.device = device_of(model, sample.args)
        self.model, self._sample, self._autocast = model, sample, autocast

    @property
    def autocast_name(self) -> str | None:
        """The dtype of autocast, such as ``"bfloat16"``, or None."""
        return None if self._autocast is None else str(self._autocast).removeprefix("torch.")

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """A context for the forward pass."""
        if self._autocast is None:
            yield
            return
        with torch.autocast(self.device.type, dtype=self._autocast):
            yield
        # Its end frees the casts of weights only if it is not inside another one, as that in which a plan may be asked for.
        torch.clear_autocast_cache()

    @contextlib.contextmanager
    def sample(self) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Gives copies of the sample to one forward pass, which may change them.

        Leaves that require gradients are the caller's own tensors, since a loss may use their gradients. Their gradients are
        restored.
        """
        # A copy of a leaf would be another leaf, and a loss that asks for the gradient of the caller's tensor would not find it.
        leaves: list[tuple[Tensor, Tensor | None]] = []

        def own(tensor: Tensor) -> Tensor:
            if tensor.requires_grad and tensor.is_leaf:
                leaves.append((tensor, tensor.grad))
                # The step adds to no gradient of the caller: that one is put back
                # afterwards, and the bytes of the new one are part of the step.
                tensor.grad = None
                return tensor
            return tensor.detach().clone().requires_grad_(tensor.requires_grad)

        try:
            yield copied((self._sample.args, dict(self._sample.kwargs)), own)
        finally:
            for leaf, gradient in leaves:
                leaf.grad = gradient

    def note_written(self) -> None:
        """Finds the parameters that a forward pass writes, so that they can be restored after each pass."""
        # Code that needs a graph, such as torch.autograd.grad, fails without gradients.
        for grad in (False, True):
            try:
                with torch.set_grad_enabled(grad), noting_written(self.model):
                    self.forward()
                return
            except Exception:  # code that cannot run under a dispatch mode may fail, too; errors of the model itself show later
                continue

    def forward(self) -> Any:
        """The output of the model."""
        with self.sample() as (args, kwargs), self.autocast():
            return self.model(*args, **kwargs)

    def loss(self) -> Tensor:
        """Runs the forward pass and the loss."""
        with self.sample() as (args, kwargs):
            return self._loss(args, kwargs)

    def run(self) -> None:
        """Runs one step; gradients accumulate."""
        with self.sample() as (args, kwargs):
            self._run(args, kwargs)

    @contextlib.contextmanager
    def recorded(self) -> Iterator[tuple[Callable[[], Tensor], Marks]]:
        """A recording of memory, to which the function that it gives adds one step. The copies of the sample are made before it
        begins, so their bytes do not count."""
        with no_collection(), self.sample() as (args, kwargs), recording_marks(self.device) as marks:
            yield lambda: self._run(args, kwargs, marks), marks
            marks.mark("end")

    def seconds(self) -> float:
        """The seconds that a step takes."""
        with no_collection(), self.sample() as (args, kwargs):
            start = now(self.device)
            self._run(args, kwargs)
            return now(self.device) - start

    def peak(self) -> tuple[int, Timeline]:
        """Peak bytes of a step above its start, and some hundred points of the bytes over time (on CPU only)."""
        with self.recorded() as (run, marks):
            run()
        return max(mark.peak_bytes for mark in marks.marks), _thinned(tuple(marks.timeline))

    def ends(self, first: nn.Module, last: nn.Module) -> Ends:
        """Memory of a step at both ends of a chain that begins with the module ``first`` and ends with ``last``."""
        # Hooks set marks, of which each has the peak since the one before it:
        #
        #     start -- embeddings -- first block -- blocks -- last block -- head and loss -- loss            forward
        #     loss -- loss and head -- gradient -- blocks -- input -- embeddings -- end                      backward
        #
        # If the input of the first block requires no gradient, "input" is missing: nothing before the blocks has a backward pass.
        seen: set[str] = set()
        with self.recorded() as (run, marks):

            def once(name: str) -> None:
                if name not in seen:
                    seen.add(name)
                    marks.mark(name)

            def reached(forward: str, backward: str, values: Any) -> None:
                if forward not in seen:
                    once(forward)
                    tensor = next((tensor for tensor in tensors_in(values) if tensor.requires_grad), None)
                    if tensor is not None:
                        tensor.register_hook(lambda gradient: once(backward))  # type: ignore[no-untyped-call]

            handles = [
                first.register_forward_pre_hook(
                    lambda _, *given: reached("first block", "input", given), with_kwargs=True
                ),
                last.register_forward_hook(lambda *given: reached("last block", "gradient", given[-1])),
            ]
            try:
                run()
            finally:
                for handle in handles:
                    handle.remove()
        by_name = {mark.name: mark for mark in marks.marks}
        begin, end = by_name["first block"], by_name["last block"]
        after = by_name["end"].peak_bytes if "input" in by_name else begin.peak_bytes
        forward, backward = (
            by_name[name].peak_bytes - end.bytes if name in by_name else 0 for name in ("loss", "gradient")
        )
        return Ends(begin, after, max(forward, 0), backward)

    def outcome(self) -> list[int]:
        """Fingerprints of loss, gradients and buffers after a step from the current state, which is restored."""
        with undisturbed(self.model, self.device), verifying("always"), self.sample() as (args, kwargs):
            inputs = [
                tensor for tensor in tensors_of((args, kwargs)) if tensor.requires_grad and tensor.is_leaf
            ]
            return [*fingerprints([self._run(args, kwargs)]), *left_by(self.model, inputs)]

    def _loss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        with torch.enable_grad(), self.autocast():
            return self._loss_of(self.model(*args, **kwargs))

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], marks: Marks | None = None) -> Tensor:
        """Runs one step on arguments from :meth:`sample`; returns the loss."""
        with torch.enable_grad():
            loss = self._loss(args, kwargs)
            if marks is not None:
                marks.mark("loss")
            loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _loss_of(self, output: Any) -> Tensor:
        if self._sample.loss is not None:
            loss = self._sample.loss(output)
        elif isinstance(output, Tensor) and output.numel() == 1:
            loss = output
        elif isinstance(getattr(output, "loss", None), Tensor):
            loss = output.loss
        else:
            floats = [tensor.float().sum() for tensor in tensors_of(output) if tensor.requires_grad]
            loss = torch.stack(floats).sum() if floats else output
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            what = (
                f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            )
            raise ValueError(
                f"loss must give one number that requires a gradient, got {what}: pass loss=function of the model's output."
            )
        return loss


def surrounding_autocast(device: torch.device) -> torch.dtype | None:
    """The dtype of the autocast that this thread runs under on the device; None without one."""
    if not torch.amp.is_autocast_available(device.type) or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


@contextlib.contextmanager
def as_outside(device: torch.device) -> Iterator[None]:
    """A context like outside of all autocast, ``no_grad`` and inference mode: a :class:`Step` has its own."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if surrounding_autocast(device) is not None:
            stack.enter_context(torch.autocast(device.type, enabled=False))
        yield


def device_of(model: nn.Module, args: tuple[Any, ...]) -> torch.device:
    """The device of a model and its arguments."""
    for tensor in (*model.parameters(), *tensors_of(args)):
        return tensor.device
    return torch.device("cpu")


def _thinned(timeline: Timeline, points: int = 400) -> Timeline:
    """A timeline of at most ``points`` points, among them the highest and the lowest of each stretch."""
    if len(timeline) <= points:
        return timeline
    # Two points are kept of each stretch.
    width = -(-len(timeline) * 2 // points)
    kept: list[tuple[float, int]] = []
    for start in range(0, len(timeline), width):
        part = timeline[start : start + width]
        ends = (max(part, key=lambda point: point[1]), min(part, key=lambda point: point[1]))
        kept += sorted(set(ends))
    return tuple(kept)
