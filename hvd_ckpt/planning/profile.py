"""Profile of a model: the cost of each block under each candidate policy, measured on this device with the user's own batch.

The chain for the solver has a pseudo-block at each end. These are the code before the first block (embeddings) and the code after
the last block (head and loss). Their cost is the cost of a step of the whole model less that of its blocks.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from hvd_ckpt.planning.blocks import find_blocks
from hvd_ckpt.planning.chain import Block, Choice, Item, Run, runs_of, span_of
from hvd_ckpt.planning.head import find_head, head_choices, without_head
from hvd_ckpt.planning.inputs import in_words
from hvd_ckpt.planning.kinds import NOTHING, KindProfiler
from hvd_ckpt.planning.plan import BlockPlan, Plan, applied
from hvd_ckpt.planning.policy import KEEP
from hvd_ckpt.planning.step import Step
from hvd_ckpt.utils.memory import free_memory

FITS = 0.5  # most of the free memory that a step without recomputation may need to be run


class Profile:
    """The measured chain of a model.

    Attributes:
        blocks: the blocks of the chain. The one that has a head in chunks is not among them.
        chain: the chain for the solver, with a pseudo-block at each end. The choices of the last one are those of head and loss:
            the first is without chunks, the last has the smallest peak.
        notes: by the index of the first block of a kind, why its choices are limited.
        waiting: for each block, bytes of the gradients of tied parameters that wait during its backward pass.
    """

    # The passes, each of which leaves the model as it was:
    #
    #     1. one forward pass finds the blocks; equal blocks form one kind, and one block of each kind is measured for all
    #     2. the head alone, whole and in chunks
    #     3. each kind of block by itself: a trace gives candidate policies; those that give the right bits are measured
    #     4. steps of the whole model with the leanest policies: kinds that go wrong in the model are kept whole
    #     5. steps of the whole model with marks: what runs around the blocks, and how fast blocks are in the model

    def __init__(
        self,
        step: Step,
        say: Callable[[str], None],
        blocks: Sequence[str] | None,
        chunk_head: bool,
    ) -> None:
        self.step = step
        # By the choice of the head: whether two steps from the same state give equal results.
        self._repeats: dict[int, bool] = {}
        # The outcome of the last step without recomputation.
        self._expected: dict[int, list[int]] = {}
        self.blocks = find_blocks(step.model, step.forward, blocks)
        self._head: str | None = None  # its name
        behind = NOTHING
        if chunk_head and blocks is None:
            behind = self._look_for_head(say)
        kinds = [index for index, block in enumerate(self.blocks) if block.like == index]
        say(f"found {len(self.blocks)} blocks of {len(kinds)} kinds")
        profiler = KindProfiler(step, len(kinds))
        self.notes, self._alone = profiler.notes, profiler.alone
        costs: dict[int, Block] = {}
        for done, index in enumerate(kinds):
            block = self.blocks[index]
            say(f"measuring block '{block.members[0]}' (kind {done + 1} of {len(kinds)})")
            costs[index] = profiler.measure(block)
        # Until all is measured, the costs of the blocks alone.
        self.chain = [NOTHING, *(costs[block.like] for block in self.blocks), behind]
        say("checking that recomputation changes nothing")
        self._check_in_place(kinds)
        say("measuring a step of the whole model")
        self.waiting = self._waiting_gradients()
        inner = [
            dataclasses.replace(block, joins_next=self._joins(index)).with_costs(
                lambda choice, extra=extra: {"backward_peak": choice.backward_peak + extra}  # type: ignore[misc]
            )
            for index, (block, extra) in enumerate(zip(self.chain[1:-1], self.waiting))
        ]
        self.chain = self._with_ends(inner)
        for block in self.blocks:  # inputs are large
            block.args, block.kwargs = None, None

    def _look_for_head(self, say: Callable[[str], None]) -> Block:
        """The choices of head and loss; if some are in chunks, the block that has the head is a block no more."""
        found = find_head(self.step)
        others = found and without_head(self.blocks, found[1].call.head)
        if found is None or others is None:
            return NOTHING
        say(f"measuring the head '{found[0]}' in chunks")
        choices = head_choices(self.step, found[1])
        if len(choices) == 1:
            return NOTHING
        self._head, self.blocks = found[0], others
        return dataclasses.replace(NOTHING, choices=tuple(choices))

    def _check_in_place(self, kinds: Sequence[int]) -> None:
        """Checks the leanest policies in the model, and keeps blocks whole that fail or give other values there."""
        lean = {kind: _leanest(self.chain[kind + 1]) for kind in kinds}
        kept = sum(block.choices[0].kept for block in self.chain[1:-1])
        fits = kept <= FITS * free_memory(self.step.device)

        def problem(those: Sequence[int]) -> str | None:
            choices = [lean[block.like] if block.like in those else 0 for block in self.blocks]
            return self.problem(self.without_segments(choices), fits)

        def keep_whole(kind: int, reason: str) -> None:
            lean[kind], whole = 0, self.chain[kind + 1].only(1)
            self.chain[1:-1] = [
                whole if found.like == kind else block for found, block in zip(self.blocks, self.chain[1:-1])
            ]
            self._alone.add(kind)
            self.notes[kind] = f"kept whole, and in no segment: {reason}"

        # All at once, which is one step if nothing is wrong. Otherwise
        # each kind alone, and then together those that are right alone.
        if problem(kinds) is None:
            return
        for kind in kinds:
            reason = problem([kind]) if lean[kind] else None
            if reason is not None:
                keep_whole(kind, f"in the model, recomputing it {reason}")
        reason = problem(kinds)
        if reason is not None:
            for kind in kinds:
                keep_whole(kind, f"together with others, recomputing it {reason}")

    def problem(self, items: Sequence[Item], compare: bool) -> str | None:
        """Describes what is wrong with a step under a schedule; None if it is right.

        It may be compared with a step without recomputation only if that fits into memory.
        """
        head = _head_of(items)
        try:
            with self._applied(items):
                outcome = self.step.outcome()
        except Exception as error:
            return f"fails ({in_words(error)})"
        if not compare or not self._repeats.get(head, True):
            return None
        if outcome != self._expected.get(head):
            # This is the first check, or the state is another than in the last one: weights, buffers, random numbers, sample.
            with self._applied(self.without_segments([0] * len(self.blocks), head)):
                self._expected[head] = self.step.outcome()
                if head not in self._repeats:
                    self._repeats[head] = self.step.outcome() == self._expected[head]
        right = not self._repeats[head] or outcome == self._expected[head]
        return None if right else "gives other values"

    def described(self) -> list[str]:
        """The notes, one line each, with the names of their blocks."""
        lines = []
        for kind, note in self.notes.items():
            names = [block.members[0] for block in self.blocks if block.like == kind]
            several = f"{names[0]} .. {names[-1]} ({len(names)} blocks)" if len(names) > 1 else names[0]
            lines.append(f"{several}: {note}.")
        return lines

    def _joins(self, index: int) -> bool:
        """Whether a block and the next one are neighbouring children of one plain ``nn.Sequential``."""
        if index + 1 >= len(self.blocks):
            return False
        this, following = self.blocks[index], self.blocks[index + 1]
        if this.container is None or this.container != following.container:
            return False
        if this.like in self._alone or following.like in self._alone:
            return False
        names = list(self.step.model.get_submodule(this.container)._modules)
        last, first = (name.rpartition(".")[2] for name in (this.members[-1], following.members[0]))
        return names.index(last) + 1 == names.index(first)

    def _waiting_gradients(self) -> list[int]:
        """For each block, bytes of the gradients of tied parameters. Such a gradient waits from the last use of the parameter to
        its first before it accumulates."""
        # The gradient of a tied parameter exists from the backward pass of its last user (the head, say) to that of its first (the
        # embedding), where both are added and accumulated. It waits during the backward passes of all blocks in between.
        waiting = [0] * len(self.blocks)
        users: defaultdict[nn.Parameter, set[int]] = defaultdict(set)
        inside: set[nn.Module] = set()
        for index, block in enumerate(self.blocks):
            for module in block.modules:
                inside.update(module.modules())
                for parameter in module.parameters():
                    users[parameter].add(index)
        for module in set(self.step.model.modules()) - inside:
            # Embeddings run before the blocks, other modules (a head) behind them.
            for parameter in module.parameters(recurse=False):
                users[parameter].add(-1 if isinstance(module, nn.Embedding) else len(waiting))
        for parameter, indices in users.items():
            if parameter.requires_grad:
                for index in range(max(min(indices), 0), max(indices)):
                    # At the first use, two gradients are added, and their sum is a third tensor.
                    waiting[index] += parameter.nbytes * (2 if index == min(indices) else 1)
        return waiting

    def _with_ends(self, inner: list[Block]) -> list[Block]:
        """The chain with pseudo-blocks at its ends, measured in a step that keeps as little as possible."""
        leanest = [_leanest(block) for block in inner]
        heads = self.chain[-1].choices
        with self._applied(self.without_segments(leanest, -1)):
            first, last = self.blocks[0].modules[0], self.blocks[-1].modules[-1]
            begin, after, forward, backward = self.step.ends(first, last)
            seconds = min(self.step.seconds() for _ in range(2))
        # Autocast drops its casts before the backward pass begins, and the bytes behind the last block include them.
        backward += sum(block.choices[choice].casts for block, choice in zip(inner, leanest))
        alone = sum(block.choices[choice].seconds for block, choice in zip(inner, leanest))
        if 0 < seconds < alone:  # blocks run faster in a step than by themselves
            pace = seconds / alone
            inner = [
                dataclasses.replace(block, forward_seconds=pace * block.forward_seconds).with_costs(
                    lambda choice: {"seconds": pace * choice.seconds}
                )
                for block in inner
            ]
        rest = max(seconds - alone, 0.0)
        before = Choice(0.0, begin.bytes, begin.peak_bytes, max(after, begin.bytes), policy=KEEP)
        choices = []
        for head in heads:  # the step ran with the last of them
            forward_peak, backward_peak = (
                max(most + head.peak - heads[-1].peak, 0) for most in (forward, backward)
            )
            own_seconds = max(rest + head.seconds - heads[-1].seconds, 0.0)
            choices.append(Choice(own_seconds, 0, forward_peak, backward_peak, policy=head.policy))
        ahead, behind = Block((before,), begin.bytes, 0.0, begin.peak_bytes), Block(tuple(choices), 0, 0.0, 0)
        return [ahead, *inner, behind]

    def without_segments(self, choices: Sequence[int], head: int = 0) -> tuple[Run, ...]:
        """A schedule with a choice for each block, and for the head."""
        return tuple(Run(*run) for run in enumerate((0, *choices, head)))

    def _applied(self, items: Sequence[Item]) -> AbstractContextManager[None]:
        return applied(self.step.model, self.plan_of(items))

    def plan_of(self, items: Sequence[Item], **facts: Any) -> Plan:
        """The plan of a schedule of the chain."""
        blocks: list[BlockPlan] = []

        def add(members: Sequence[str], choice: Choice, kept: int, added: float) -> None:
            modules = {name: self.step.model.get_submodule(name) for name in members}
            blocks.append(BlockPlan.of(modules, choice.policy, kept, added))

        for item in items[1:-1]:
            last = span_of(item)[-1]
            for run, depth in runs_of(item):
                block = self.chain[run.block]
                choice = block.choices[run.choice]
                added = choice.seconds - block.choices[0].seconds + depth * block.forward_seconds
                # A segment holds only the output of its last block.
                kept = choice.kept if not depth else block.output if run.block == last else 0
                add(self.blocks[run.block - 1].members, choice, kept, added)
        numbers = tuple(map(_numbers, items[1:-1]))
        heads = self.chain[-1].choices
        if (chosen := heads[_head_of(items)]).policy != KEEP:
            assert self._head is not None
            numbers = (*numbers, len(blocks))
            add([self._head], chosen, 0, chosen.seconds - heads[0].seconds)
        facts.setdefault("notes", tuple(self.described()))
        return Plan(tuple(blocks), numbers, autocast=self.step.autocast_name, **facts)


def _leanest(block: Block) -> int:
    """The choice that keeps least."""
    return min(range(len(block.choices)), key=lambda number: block.choices[number].kept)


def _head_of(items: Sequence[Item]) -> int:
    """The choice of the head: the pseudo-blocks at both ends are in no segment."""
    behind = items[-1]
    assert isinstance(behind, Run)
    return behind.choice


def _numbers(item: Item) -> Any:
    """An item as a plan has it: the number of its block, or those of its items in a tuple."""
    return item.block - 1 if isinstance(item, Run) else tuple(map(_numbers, item))
