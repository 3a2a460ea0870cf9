"""Execution of one step of a pipeline on one rank: the passes through its chunks, and the messages between chunks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hvd_ckpt.parallel.pipeline.microbatch import Accumulation, one_element, silence
from hvd_ckpt.parallel.pipeline.random_state import forward_pass
from hvd_ckpt.parallel.pipeline.schedule import BACKWARD, FORWARD, Action, Edge, chain_edges
from hvd_ckpt.parallel.pipeline.skip import Key, find_skips, skips_of_chunk
from hvd_ckpt.parallel.pipeline.transport import VALUE_TAG, Received, Transport
from hvd_ckpt.recompute.calls import tensors_in
from hvd_ckpt.recompute.checkpoint import run_checkpointed
from hvd_ckpt.recompute.sequential import LayerSegment, as_arguments, cut
from hvd_ckpt.utils.frames import without_recomputation
from hvd_ckpt.utils.spans import span


class Chunks:
    """Chunks of consecutive blocks of a chain: their connections, and those that run on this rank; the same in all steps.

    Args:
        chain: all blocks. Blocks of other ranks are only asked for the arguments that they accept.
        balance: number of blocks of each chunk. Chunk c is on stage ``c % stages``.
        transport: messages between chunks.
        prepare: splits the arguments of the model into those of the first block and shared ones.
        planned: whether chunks that keep activations follow the policies of a plan. If not, they keep everything.

    Attributes:
        count, own: number of all chunks, and the numbers of those of this rank.
        chunk_of: the chunk of each block.
        keeping: makes a context for a forward pass that keeps activations.
        skips: the connection of each skip connection, which may begin and end in one chunk.
        edges: edges of the chain; their order numbers them.
    """

    def __init__(
        self,
        chain: Sequence[nn.Module],
        balance: Sequence[int],
        transport: Transport,
        prepare: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]],
        planned: bool,
    ) -> None:
        self.transport, self.prepare = transport, prepare
        self.keeping = nullcontext if planned else without_recomputation
        self.count = len(balance)
        self.own = range(transport.grid.stage, self.count, transport.grid.stages)
        self.chunk_of = [chunk for chunk, length in enumerate(balance) for _ in range(length)]
        skips = find_skips(chain)
        self.skips = [Edge(self.chunk_of[skip.source], self.chunk_of[skip.target]) for skip in skips]
        self.edges = chain_edges(self.count, [edge for edge in self.skips if edge.source != edge.target])
        self._chain, self._balance, self._keys = chain, balance, [skip.key for skip in skips]
        self._segments: dict[frozenset[str], list[LayerSegment]] = {}  # by the names of shared arguments

    def run(
        self,
        chunk: int,
        arguments: tuple[Any, ...],
        given: Mapping[int, Tensor | None],
        shared: dict[str, Any],
        keeps: bool,
    ) -> tuple[Any, dict[int, Tensor | None]]:
        """The forward pass of one micro-batch through a chunk.

        Args:
            arguments: arguments of the first block.
            given: values of skip connections from other chunks, by their numbers.
            shared: keyword arguments that all blocks share.
            keeps: whether activations are kept. If not, the whole chunk is recomputed in the backward pass.

        Returns:
            The result of the last block, and the values of skip connections to other chunks.
        """
        if (names := frozenset(shared)) not in self._segments:  # kept, since reading signatures is slow
            # Of all stages: an argument that only blocks elsewhere accept is right, and all stages are given the same arguments.
            self._segments[names] = cut(self._chain, self._balance, names)
        segment = self._segments[names][chunk]
        accepted = segment.accepted_names
        shared = {name: value for name, value in shared.items() if name in accepted}
        # In the closure of compute(), where recomputation looks for modules.
        blocks, keys = list(segment.layers), self._keys

        def compute(
            arguments: tuple[Any, ...], given: Mapping[int, Tensor | None], shared: dict[str, Any]
        ) -> tuple[Any, dict[int, Tensor | None]]:
            assert blocks
            inside: dict[Key, Tensor | None] = {keys[number]: value for number, value in given.items()}
            with skips_of_chunk(inside):
                output = segment(*arguments, **shared)
            return output, {keys.index(key): value for key, value in inside.items()}

        compute.__qualname__ = str(segment)  # in errors and traces
        if keeps:
            with self.keeping():
                return compute(arguments, given, shared)
        result: tuple[Any, dict[int, Tensor | None]] = run_checkpointed(
            compute, (arguments, given, shared), {}
        )
        return result


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
        key: its random state; None in evaluation mode.
        keeps: the chunks that keep its activations and are not recomputed as a whole.
    """

    inputs: tuple[Any, ...]
    targets: Any
    shared: dict[str, Any]
    key: int | None
    keeps: Container[int]


class Execution:
    """One step of one rank, by default of an evaluation. Its methods run the actions of a schedule.

    Args:
        chunks: those of this rank.
        micro_batches: micro-batches of this step.
        loss_fn: takes the output of the model and the targets; None in an evaluation, which keeps the outputs.
        accumulation: adds up the losses, and runs their backward passes; None in an evaluation.
        context: makes a context for each forward pass, such as ``torch.autocast``.
    """

    def __init__(
        self,
        chunks: Chunks,
        micro_batches: Sequence[MicroBatch],
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        accumulation: Accumulation | None = None,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.outputs: list[Any] = []
        self._chunks, self._transport, self._micro_batches = chunks, chunks.transport, micro_batches
        self._loss_fn, self._accumulation, self._context = loss_fn, accumulation, context
        self._in_flight: dict[tuple[int, int], _InFlight] = {}
        self._prepared: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def run(self, actions: Sequence[Action]) -> None:
        """Runs the actions in order, then waits until everything is sent."""
        # The receives of an action are posted before the action in front of it computes (_expect), so that messages arrive
        # meanwhile. Sends do not wait. So the ranks cannot deadlock in a schedule that make_schedule() makes.
        self._expect(actions[0])
        for action, following in itertools.zip_longest(actions, actions[1:]):
            with _span(action.kind, action.chunk, action.micro_batch):
                (self._forward if action.kind == FORWARD else self._backward)(action, following)
            self._transport.advance()
        with _span("wait", actions[-1].chunk, actions[-1].micro_batch):
            self._transport.flush()

    def _forward(self, action: Action, following: Action | None) -> None:
        chunk, index = action.chunk, action.micro_batch
        micro_batch = self._micro_batches[index]
        in_flight = _InFlight()
        keeps = chunk in micro_batch.keeps
        arguments: tuple[Any, ...] = ()
        given: dict[int, Tensor | None] = {}
        for edge in action.receives:
            (values, skips), tensors = self._fetch(edge, index, FORWARD)
            if edge.source == chunk - 1:
                arguments = values
            given.update(skips)
            in_flight.received[edge] = [tensor for tensor in tensors if tensor.requires_grad]
        self._expect(following)
        with self._context():
            with forward_pass(micro_batch.key, self._chunks.chunk_of.index(chunk)):
                first, shared = self._inputs(index)
                output, skips = self._chunks.run(chunk, arguments if chunk else first, given, shared, keeps)
            if chunk == self._chunks.count - 1:
                if self._loss_fn is None or self._accumulation is None:
                    self.outputs.append(output)
                    return
                with self._chunks.keeping() if keeps else nullcontext():
                    in_flight.loss = one_element(self._loss_fn(output, micro_batch.targets))
                if not in_flight.loss.requires_grad and any(one.requires_grad for one in tensors_in(output)):
                    raise RuntimeError(
                        "loss_fn returned a loss without a gradient: compute it from the output, without detach()"
                    )
                self._accumulation.add(index, in_flight.loss)
        # One message along each edge: the output to the next chunk, with the skip connections that lead there, and skip connections
        # alone to later chunks. Tensors that require gradients are noted, as their gradients come back in this order.
        for edge in action.sends:
            values = as_arguments(output) if edge.target == chunk + 1 else None
            to_target = {
                number: value
                for number, value in skips.items()
                if self._chunks.skips[number].target == edge.target
            }
            address = self._address(edge, index, FORWARD, edge.target)
            tensors = self._transport.send((values, to_target), *address)
            in_flight.sent[edge] = [tensor for tensor in tensors if tensor.requires_grad]
        if self._loss_fn is not None:
            self._in_flight[chunk, index] = in_flight

    def _backward(self, action: Action, following: Action | None) -> None:
        index, accumulation = action.micro_batch, self._accumulation
        assert accumulation is not None
        # Taken out, so that the graph and its activations are freed with this pass.
        in_flight = self._in_flight.pop((action.chunk, index))
        roots: list[Tensor] = []
        gradients: list[Tensor] = []
        for edge in action.receives:
            for output, gradient in zip(in_flight.sent[edge], self._fetch(edge, index, BACKWARD).value):
                if gradient is not None:
                    roots.append(output)
                    gradients.append(gradient)
        self._expect(following)
        if in_flight.loss is not None:
            if in_flight.loss.requires_grad:  # else every block is frozen
                accumulation.backward(index, in_flight.loss)
        # Only the loss is multiplied by the weight of the micro-batch. Gradients that arrive from the next stage include it.
        elif roots:
            if not accumulation.terms[index]:  # nothing of this micro-batch counts, not even a nan
                for root in roots:
                    silence(root)
            torch.autograd.backward(roots, gradients)
        # Also where nothing requires a gradient: the message shows that the values have arrived, so that their memory is freed.
        for edge in action.sends:
            address = self._address(edge, index, BACKWARD, edge.source)
            self._transport.send([leaf.grad for leaf in in_flight.received[edge]], *address)

    def _inputs(self, index: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The prepared arguments of a micro-batch, which are kept if the rank has several chunks."""
        if index not in self._prepared:
            micro_batch = self._micro_batches[index]
            self._prepared[index] = self._chunks.prepare(*micro_batch.inputs, **micro_batch.shared)
        prepared = self._prepared[index]
        if len(self._chunks.own) == 1:
            del self._prepared[index]
        return prepared

    # ------------------------------------------------------------------------------------------------ messages

    def _fetch(self, edge: Edge, index: int, kind: str) -> Received:
        here, there = (edge.target, edge.source) if kind == FORWARD else edge
        what = f"the {'input' if kind == FORWARD else 'gradient'} of micro-batch {index}"
        with nullcontext() if there in self._chunks.own else _span("wait", here, index):
            received = self._transport.receive(*self._address(edge, index, kind, there), what)
        if kind == BACKWARD:
            self._transport.flush(*self._address(edge, index, FORWARD, there))
        return received

    def _expect(self, action: Action | None) -> None:
        """Posts the receives of the next action, so that its messages arrive while this one computes."""
        if action is None:
            return
        for edge in action.receives:
            there = edge.source if action.kind == FORWARD else edge.target
            self._transport.expect(*self._address(edge, action.micro_batch, action.kind, there))

    def _address(self, edge: Edge, index: int, kind: str, chunk: int) -> tuple[int, int]:
        """The process of a chunk at the other end of an edge, and the tag of a message."""
        # Evaluations have tags of their own, since their values need no gradients and so have other headers.
        # With two edges, a micro-batch has six tags:
        #
        #   edge 0: value, gradient, value of an evaluation | edge 1: value, gradient, value of an evaluation
        #
        what = int(kind == BACKWARD) if self._loss_fn is not None else 2
        number = index * len(self._chunks.edges) + self._chunks.edges.index(edge)
        grid = self._transport.grid
        return grid.process(chunk % grid.stages), VALUE_TAG + 3 * number + what


def _span(kind: str, chunk: int, micro_batch: int) -> AbstractContextManager[None]:
    return span(kind, lambda: f"{kind} chunk {chunk}, micro-batch {micro_batch}")
