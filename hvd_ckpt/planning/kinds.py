"""Policies and costs of one block of each kind, measured by itself.

A trace of the block gives candidate policies. Those that give the right bits are measured.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import nn

from hvd_ckpt.planning.block_runner import BlockRunner
from hvd_ckpt.planning.blocks import FoundBlock
from hvd_ckpt.planning.candidates import candidates
from hvd_ckpt.planning.chain import Block, Choice
from hvd_ckpt.planning.inputs import in_words
from hvd_ckpt.planning.policy import KEEP, RECOMPUTE, CheckpointPolicy
from hvd_ckpt.planning.step import Step
from hvd_ckpt.planning.trace import Trace, fastest, trace
from hvd_ckpt.utils.measure import undisturbed

_MANY_KINDS = 12  # with more kinds of blocks, fewer policies of each kind are measured
# The time to measure seconds in: of each kind of blocks at most, and of all kinds together if they are many. Each policy runs three
# times at least.
_SECONDS_PER_KIND = 1.5
_SECONDS = 12.0
NOTHING = Block((Choice(0.0, 0, 0, 0, policy=KEEP),), 0, 0.0, 0)
"""A block without costs, which is kept whole."""


class KindProfiler:
    """Measures one block of each kind by itself.

    Args:
        step: the step of the model.
        kinds: the number of kinds.

    Attributes:
        notes: by kind, why its choices are limited.
        alone: kinds of blocks that are in no segment.
    """

    def __init__(self, step: Step, kinds: int) -> None:
        self.notes: dict[int, str] = {}
        self.alone: set[int] = set()
        self._step = step
        self._most_policies = 4 if kinds > _MANY_KINDS else 8
        self._least_seconds = min(_SECONDS_PER_KIND, _SECONDS / max(kinds, 1))
        # By the form of the calls of a block: whether two runs from the same state give the same bits. With a policy: what is wrong
        # with it, or None.
        self._repeats: dict[object, bool] = {}
        self._problems: dict[tuple[object, CheckpointPolicy], str | None] = {}

    def measure(self, block: FoundBlock) -> Block:
        """The costs of a block under each of its policies. A block that cannot be run by itself is kept whole, with costs of 0."""
        if block.obstacle is None:
            try:
                return self._measure_alone(block)
            except Exception as error:
                block.obstacle = f"it cannot be run by itself ({in_words(error)})"
        self.notes[block.like] = f"kept whole, and in no segment: {block.obstacle}"
        self.alone.add(block.like)
        return NOTHING

    def _policies(self, block: FoundBlock, runner: BlockRunner) -> list[CheckpointPolicy]:
        """The policies under which a block gives the same bits as without a policy.

        These are "keep" and policies that drop results of calls, or "recompute" if the calls of the block cannot be seen.
        """
        traced = None if block.compiled else self._traced(block, runner)

        @functools.cache
        def expected() -> list[int]:
            return runner.outcome(KEEP, block.modules)

        # Kinds of blocks that make the same calls on tensors of other sizes, such as the layers of a DenseNet, are checked once.
        # All are checked again in the model.
        form = traced.form if isinstance(traced, Trace) else block.like
        if form not in self._repeats:
            self._repeats[form] = runner.outcome(KEEP, block.modules) == expected()
        repeats = self._repeats[form]

        def problem(policy: CheckpointPolicy) -> str | None:
            key = form, policy
            if key not in self._problems:
                try:
                    # Bits tell nothing if the block does not repeat its own: then it only has to run.
                    right = runner.outcome(policy, block.modules) == expected() or not repeats
                    self._problems[key] = None if right else "gives other values"
                except Exception as error:
                    self._problems[key] = f"fails ({in_words(error)})"
            return self._problems[key]

        whole = problem(RECOMPUTE)
        if whole or not repeats:
            self.alone.add(block.like)
            reason = f"recomputing it {whole}" if whole else "it gives other values in each run"
            self.notes[block.like] = f"in no segment: {reason}"
        right, wrong = [KEEP], [traced] if isinstance(traced, str) else []
        for policy in candidates(traced, self._most_policies)[1:] if isinstance(traced, Trace) else ():
            if failed := problem(policy):
                wrong.append(failed)
            else:
                right.append(policy)
        if not block.compiled and (len(right) > 1 or not (wrong or whole)):
            return right
        if whole or not repeats:
            reason = self.notes[block.like].partition(": ")[2]
            self.notes[block.like] = f"kept whole, and in no segment: {reason}"
            return [KEEP]
        if not block.compiled:
            self.notes[block.like] = (
                f"recomputed as a whole or not at all: dropping results of calls {wrong[-1]}"
            )
        return [KEEP, RECOMPUTE]

    def _traced(self, block: FoundBlock, runner: BlockRunner) -> Trace | str:
        """The calls of the block, or why they cannot be traced."""
        try:
            traces = []
            for _ in range(4):  # the first run is slower than any later one
                args, kwargs = runner.inputs()
                with undisturbed(nn.ModuleList(block.modules), self._step.device), self._step.autocast():
                    traces.append(trace(block, args, kwargs))
            return fastest(traces[1:])
        except Exception as error:
            return f"fails, as its calls cannot be traced ({in_words(error)})"

    def _measure_alone(self, block: FoundBlock) -> Block:
        assert block.args is not None and block.kwargs is not None
        runner = BlockRunner(self._step, block, block.args, block.kwargs)
        policies = self._policies(block, runner)
        # A first run allocates what later ones reuse, such as the gradients of parameters.
        runner.seconds(policies[:1], 0.0, least_rounds=1)
        keep, *others = runner.memory(policies)
        # Of policies with the same bytes, such as a compressed form with nothing to compress, one is measured further.
        with_bytes: dict[tuple[int, ...], Choice] = {}
        for choice in others:
            with_bytes.setdefault((choice.kept, choice.backward_peak, choice.casts), choice)
        useful = [keep, *with_bytes.values()]
        seconds = runner.seconds([choice.policy for choice in useful], self._least_seconds)
        choices = tuple(dataclasses.replace(choice, seconds=own) for choice, own in zip(useful, seconds))
        output, casts, working, forward = runner.first_pass()
        # The random state that a segment keeps is in host memory, which counts on the CPU alone.
        frame = torch.get_rng_state().nbytes if self._step.device.type == "cpu" else 0
        return Block(choices, output, forward, working, casts=casts, frame=frame)
