"""Execution of one step of a pipeline on one rank: the passes through its chunks, and the messages between chunks."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from hvd_ckpt.parallel.pipeline.microbatch import TotalTerms, add_loss, one_element, run_backward, silence
from hvd_ckpt.parallel.pipeline.random_state import forward_pass
from hvd_ckpt.parallel.pipeline.schedule import BACKWARD, FORWARD, Action, Edge
from hvd_ckpt.parallel.pipeline.skip import Key, Skip, skips_of_chunk
from hvd_ckpt.parallel.pipeline.transport import Received, Transport, put_together, take_apart
from hvd_ckpt.recompute.checkpoint import run_checkpointed
from hvd_ckpt.recompute.sequential import LayerSegment, as_arguments, cut
from hvd_ckpt.utils.frames import is_recomputing, without_recomputation

Recorder = Callable[[str, int, int], AbstractContextManager[Any]]
_NOT_RECORDED = contextlib.nullcontext()
FIRST_TAG = 16  # first tag of values and gradients; lower tags are for messages of a whole step


class Chunk:
    """Consecutive blocks of a chain that run on one rank.

    Args:
        chain: all blocks. Blocks of other ranks are only asked for the arguments that they accept.
        balance: number of blocks of each chunk.
        number: number of this chunk.
        skips: all skip connections of the chain.
        skip_targets: for each skip connection, the chunk that it leads to.
    """

    def __init__(
        self,
        chain: Sequence[nn.Module],
        balance: Sequence[int],
        number: int,
        skips: Sequence[Skip],
        skip_targets: Sequence[int],
    ) -> None:
        self.number, self.skips, self.skip_targets = number, skips, skip_targets
        self.own = range(sum(balance[:number]), sum(balance[: number + 1]))
        self._chain, self._balance = chain, balance
        self._segments: dict[frozenset[str], LayerSegment] = {}

    def run(
        self,
        arguments: tuple[Any, ...],
        given: Mapping[int, Tensor | None],
        shared: dict[str, Any],
        keeps: AbstractContextManager[None] | None,
        recomputing: Callable[[], AbstractContextManager[Any]],
    ) -> tuple[Any, dict[int, Tensor | None]]:
        """The forward pass of one micro-batch.

        Args:
            arguments: arguments of the first block.
            given: values of skip connections from other chunks, by their numbers.
            shared: keyword arguments that all blocks share.
            keeps: a context for a forward pass that keeps activations; None to recompute the whole chunk in the backward pass.
            recomputing: makes a context for a recomputation.

        Returns:
            The result of the last block, and the values of skip connections to other chunks.
        """
        segment = self._segment(frozenset(shared))
        accepted = segment.accepted_names
        shared = {name: value for name, value in shared.items() if name in accepted}
        # In the closure of compute(), where recomputation looks for modules.
        blocks, skips = list(segment.layers), self.skips

        def compute(
            arguments: tuple[Any, ...], given: Mapping[int, Tensor | None], shared: dict[str, Any]
        ) -> tuple[Any, dict[int, Tensor | None]]:
            assert blocks
            inside: dict[Key, Tensor | None] = {skips[number].key: value for number, value in given.items()}
            with skips_of_chunk(inside), recomputing() if is_recomputing() else _NOT_RECORDED:
                output = segment(*arguments, **shared)
            numbers = {skip.key: number for number, skip in enumerate(skips)}
            return output, {numbers[key]: value for key, value in inside.items()}

        if keeps is not None:
            with keeps:
                return compute(arguments, given, shared)
        result: tuple[Any, dict[int, Tensor | None]] = run_checkpointed(
            compute, (arguments, given, shared), {}
        )
        return result

    def _segment(self, shared: frozenset[str]) -> LayerSegment:
        """The blocks as one function that takes these keyword arguments. Kept, since reading signatures is slow."""
        if shared not in self._segments:
            # Of all stages: an argument that only blocks elsewhere accept is right, and all stages are given the same arguments.
            self._segments[shared] = cut(self._chain, self._balance, shared)[self.number]
        return self._segments[shared]


@dataclass
class _InFlight:
    """Tensors that a forward pass leaves for its backward pass; all of them require gradients.

    Attributes:
        received: leaves, whose gradients are sent back along their edge.
        sent: outputs, whose gradients come back along their edge.
        loss: the loss, on the last chunk.
    """

    received: dict[Edge, list[Tensor]] = field(default_factory=dict)
    sent: dict[Edge, list[Tensor]] = field(default_factory=dict)
    loss: Tensor | None = None


@dataclass
class MicroBatch:
    """One micro-batch.

    Attributes:
        inputs, targets, shared: as in :class:`hvd_ckpt.data.objectives.Batch`.
        terms: number of terms that its loss is the mean of.
        key: its random state; None in evaluation mode.
        keeps: the chunks that keep its activations and are not recomputed as a whole.
    """

    inputs: tuple[Any, ...]
    targets: Any
    shared: dict[str, Any]
    terms: float
    key: int | None
    keeps: Container[int]


@dataclass(frozen=True)
class RankChunks:
    """Chunks of one rank and their connections, the same in all steps.

    Attributes:
        chunks: chunks of this rank, by number.
        count: number of chunks of all ranks.
        edges: edges of the chain; their order numbers them.
        transport: messages to other stages; None in a job with one stage.
        prepare: splits the arguments of the model into those of the first block and shared ones.
        planned: whether chunks that keep activations follow the policies of a plan. If not, they keep everything.
    """

    chunks: Mapping[int, Chunk]
    count: int
    edges: Sequence[Edge]
    transport: Transport | None
    prepare: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]
    planned: bool


@dataclass(frozen=True)
class PassOptions:
    """Options of the passes of a step; the defaults are those of an evaluation.

    Attributes:
        loss_fn: takes the output of the model and the targets; None in an evaluation, which keeps the outputs.
        total: the number of terms of the whole batch, on the rank with the last chunk.
        backward: takes a loss and whether it is the last; None for ``loss.backward()``.
        context: makes a context for each forward pass, such as ``torch.autocast``.
    """

    loss_fn: Callable[[Any, Any], Tensor] | None = None
    total: TotalTerms | None = None
    backward: Callable[[Tensor, bool], Any] | None = None
    context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext


class Execution:
    """One step of one rank. Its methods run the actions of a schedule.

    Args:
        rank: chunks of this rank.
        micro_batches: micro-batches of this step.
        options: options of the passes.
        recorder: makes a context for each pass, and for each wait and recomputation within or after it. Its arguments are the kind,
            ``"forward"``, ``"backward"``, ``"wait"`` or ``"recompute"``, the chunk and the micro-batch.
    """

    def __init__(
        self,
        rank: RankChunks,
        micro_batches: Sequence[MicroBatch],
        options: PassOptions,
        recorder: Recorder | None,
    ) -> None:
        self.outputs: list[Any] = []
        self.loss: Tensor | None = None
        self._rank, self._options, self._micro_batches = rank, options, micro_batches
        self._recorded: Recorder = recorder or (lambda kind, chunk, micro_batch: _NOT_RECORDED)
        self._transport = cast(Transport, rank.transport)  # not used between chunks of one rank
        self._keeping = contextlib.nullcontext if rank.planned else without_recomputation
        self._in_flight: dict[tuple[int, int], _InFlight] = {}
        self._here: dict[tuple[Edge, int, str], Received] = {}  # between two chunks of this rank
        self._prepared: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self._terms = math.fsum(micro_batch.terms for micro_batch in micro_batches)

    def run(self, actions: Sequence[Action]) -> None:
        """Runs the actions in order, then waits until everything is sent."""
        # The receives of an action are posted before the action in front of it computes (_expect), so that messages arrive
        # meanwhile. Sends do not wait. So the ranks cannot deadlock in a schedule that make_schedule() makes.
        self._expect(actions[0])
        for action, following in itertools.zip_longest(actions, actions[1:]):
            with self._recorded(action.kind, action.chunk, action.micro_batch):
                (self._forward if action.kind == FORWARD else self._backward)(action, following)
            if self._transport is not None:
                self._transport.advance()
        if self._transport is not None:
            last = actions[-1]
            with self._recorded("wait", last.chunk, last.micro_batch):
                self._transport.flush()

    def _forward(self, action: Action, following: Action | None) -> None:
        chunk, index = self._rank.chunks[action.chunk], action.micro_batch
        micro_batch = self._micro_batches[index]
        in_flight = _InFlight()
        keeps = chunk.number in micro_batch.keeps
        arguments: tuple[Any, ...] = ()
        given: dict[int, Tensor | None] = {}
        for edge in action.receives:
            (values, skips), tensors = self._fetch(edge, index, FORWARD)
            if edge.source == chunk.number - 1:
                arguments = values
            given.update(skips)
            in_flight.received[edge] = [tensor for tensor in tensors if tensor.requires_grad]
        self._expect(following)
        with self._options.context():
            with forward_pass(micro_batch.key, chunk.own.start):
                first, shared = self._inputs(index)
                output, skips = chunk.run(
                    arguments if chunk.number else first,
                    given,
                    shared,
                    self._keeping() if keeps else None,
                    functools.partial(self._recorded, "recompute", chunk.number, index),
                )
            if chunk.number == self._rank.count - 1:
                if self._options.loss_fn is None:
                    self.outputs.append(output)
                    return
                with self._keeping() if keeps else contextlib.nullcontext():
                    in_flight.loss = one_element(self._options.loss_fn(output, micro_batch.targets))
                self.loss = add_loss(self.loss, in_flight.loss, micro_batch.terms, self._terms)
        # One message along each edge: the output to the next chunk, with the skip connections that lead there, and skip connections
        # alone to later chunks. Tensors that require gradients are noted, as their gradients come back in this order.
        for edge in action.sends:
            values = as_arguments(output) if edge.target == chunk.number + 1 else None
            to_target = {
                number: value for number, value in skips.items() if chunk.skip_targets[number] == edge.target
            }
            tensors = self._post(edge, index, FORWARD, (values, to_target))
            in_flight.sent[edge] = [tensor for tensor in tensors if tensor.requires_grad]
        if self._options.loss_fn is not None:
            self._in_flight[chunk.number, index] = in_flight

    def _backward(self, action: Action, following: Action | None) -> None:
        index = action.micro_batch
        micro_batch = self._micro_batches[index]
        # Taken out, so that the graph and its activations are freed with this pass.
        in_flight = self._in_flight.pop((action.chunk, index))
        roots: list[Tensor] = []
        gradients: list[Tensor] = []
        for edge in action.receives:
            # Nothing comes back for values that require no gradient. The
            # receiver knows these from the header, and sends nothing either.
            if outputs := in_flight.sent[edge]:
                for output, gradient in zip(outputs, self._fetch(edge, index, BACKWARD).value):
                    if gradient is not None:
                        roots.append(output)
                        gradients.append(gradient)
        self._expect(following)
        if in_flight.loss is not None:
            assert self._options.total is not None
            if in_flight.loss.requires_grad:  # else every block is frozen
                last = index == len(self._micro_batches) - 1
                run_backward(
                    in_flight.loss, micro_batch.terms, self._options.total, self._options.backward, last
                )
        # Only the loss is multiplied by the weight of the micro-batch. Gradients that arrive from the next stage include it.
        elif roots:
            if not micro_batch.terms:  # nothing of this micro-batch counts, not even a nan
                for root in roots:
                    silence(root)
            torch.autograd.backward(roots, gradients)
        for edge in action.sends:
            if leaves := in_flight.received[edge]:
                self._post(edge, index, BACKWARD, [leaf.grad for leaf in leaves])

    def _inputs(self, index: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The prepared arguments of a micro-batch, which are kept if the rank has several chunks."""
        if index not in self._prepared:
            micro_batch = self._micro_batches[index]
            self._prepared[index] = self._rank.prepare(*micro_batch.inputs, **micro_batch.shared)
        prepared = self._prepared[index]
        if len(self._rank.chunks) == 1:
            del self._prepared[index]
        return prepared

    # ------------------------------------------------------------------------------------------------ messages

    def _post(self, edge: Edge, index: int, kind: str, value: Any) -> list[Tensor]:
        address = self._address(edge, index, kind, edge.target if kind == FORWARD else edge.source)
        if address is not None:
            return self._transport.send(value, *address)
        # Between two chunks of one rank nothing is sent, but the graph is cut all the same, so that each chunk has a backward pass
        # of its own.
        structure, tensors = take_apart(value)
        copies = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
        self._here[edge, index, kind] = Received(put_together(structure, copies), copies)
        return tensors

    def _fetch(self, edge: Edge, index: int, kind: str) -> Received:
        here, there = (edge.target, edge.source) if kind == FORWARD else edge
        address = self._address(edge, index, kind, there)
        if address is None:
            return self._here.pop((edge, index, kind))
        what = f"the {'input' if kind == FORWARD else 'gradient'} of micro-batch {index}"
        with self._recorded("wait", here, index):
            received = self._transport.receive(*address, what)
        # A gradient shows that the value has arrived there, so that its memory can be freed.
        if kind == BACKWARD and (sent := self._address(edge, index, FORWARD, there)):
            self._transport.taken(*sent)
        return received

    def _expect(self, action: Action | None) -> None:
        """Posts the receives of the next action, so that its messages arrive while this one computes."""
        if action is None:
            return
        kind, index = action.kind, action.micro_batch
        for edge in action.receives:
            address = self._address(edge, index, kind, edge.source if kind == FORWARD else edge.target)
            # No gradient comes back for values that require none. And the next action may be the backward pass of the micro-batch
            # that is about to run forward: its outputs are not known yet, and _fetch() posts the receive.
            begun = self._in_flight.get((action.chunk, index), _InFlight())
            if address is not None and (kind == FORWARD or begun.sent.get(edge)):
                self._transport.expect(*address)

    def _address(self, edge: Edge, index: int, kind: str, chunk: int) -> tuple[int, int] | None:
        """The process of a chunk at the other end of an edge, and the tag of a message; None for another chunk of this rank."""
        if chunk in self._rank.chunks:
            return None
        # Evaluations have tags of their own, since their values need no gradients and so have other headers.
        # With two edges, a micro-batch has six tags:
        #
        #   edge 0: value, gradient, value of an evaluation | edge 1: value, gradient, value of an evaluation
        #
        what = int(kind == BACKWARD) if self._options.loss_fn is not None else 2
        number = index * len(self._rank.edges) + self._rank.edges.index(edge)
        grid = self._transport.grid
        return grid.process(chunk % grid.stages), FIRST_TAG + 3 * number + what
