"""Plans: for each block of a model, what its forward pass keeps and what is recomputed.

A plan is plain data: names, numbers and call numbers, made by the planner for one model and one shape of input.
:meth:`Plan.apply` gives each block its checkpoint policy, and :meth:`Plan.save` writes a JSON file that people can read. A plan
file may come from anywhere. So pydantic validates every value by the type hints below, and nothing in the file is executed or
imported. An unknown key is an error, since ignoring it could change what the plan does.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import BeforeValidator, Field, TypeAdapter
from torch import nn

from hvd_ckpt.planning.chain import MAX_NESTING
from hvd_ckpt.planning.policy import (
    KEEP,
    CheckpointPolicy,
    Text,
    apply_policy,
    apply_to_chain,
    base_class,
    expect_autocast,
    remove_policy,
)
from hvd_ckpt.processes.whole_model import shape_of_first
from hvd_ckpt.recompute.calls import tensors_in
from hvd_ckpt.recompute.sequential import places_of
from hvd_ckpt.utils.plain_data import dumps, parse_json, read_bytes, write_text
from hvd_ckpt.utils.schema import Strict, Wrong, shown
from hvd_ckpt.utils.text import check_instance, one_line, show_bytes

M = TypeVar("M", bound=nn.Module)

_GIVE = "give a file that Plan.save() wrote"
_REPAIR = "correct it, or make the plan again"


def _nested(value: Any, depth: int = 0) -> tuple[Any, ...]:
    """Validates nested items and turns lists into tuples."""
    if not isinstance(value, (list, tuple)) or (depth and not value):
        raise ValueError(
            "must be a list of block numbers and of such lists, which are segments and not empty"
        )
    if depth > MAX_NESTING:
        raise ValueError(f"segments are nested more than {MAX_NESTING} deep")
    for item in value:
        if isinstance(item, bool) or not isinstance(item, (int, list, tuple)):
            raise ValueError(f"has {shown(item)} where a block number or a list is expected")
    return tuple(item if isinstance(item, int) else _nested(item, depth + 1) for item in value)


Count = Annotated[int, Field(ge=0, lt=2**63)]
Bytes = Annotated[int, Field(gt=-(2**63), lt=2**63)]
_Moment = Annotated[str, Field(pattern="^(before|after)$")]
Items = Annotated[tuple[Any, ...], BeforeValidator(_nested)]
"""Numbers of blocks in order. A nested tuple is a segment that is recomputed as a whole; it holds items, too."""


class PlanError(ValueError):
    """A plan does not fit a model, or a plan file is invalid. The message is one line."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class Cost(NamedTuple):
    """Cost of a training step (forward, loss, backward).

    Attributes:
        peak_bytes: the most bytes allocated at a time, above the start of the step, when the gradients of the parameters exist.
        seconds: duration of the step.
    """

    peak_bytes: Count
    seconds: Annotated[float, Field(ge=0)]


_NOTHING = Cost(0, 0.0)


@dataclass(frozen=True)
class BlockPlan:
    """One block of the chain.

    Attributes:
        members: names of its modules as in ``model.named_modules()``. There are several only if one ``nn.Sequential`` calls them
            one after the other.
        kind: class of the module (or ``A+B+C``). With ``parameters``, it tells whether a model is the planned one.
        parameters: shapes of its parameters, in order.
        policy: its checkpoint policy.
        kept_bytes: bytes held between its forward and its backward pass, including its output.
        added_seconds: its time less its time without recomputation; may be negative.

    Raises:
        ValueError: the members are not different modules of one container.
    """

    members: tuple[Text, ...]
    kind: Text
    parameters: tuple[tuple[Count, ...], ...]
    policy: CheckpointPolicy
    kept_bytes: Count = 0
    added_seconds: float = 0.0

    def __post_init__(self) -> None:
        containers = {name.rpartition(".")[0] for name in self.members}
        if len(containers) != 1 or len(set(self.members)) < len(self.members):
            raise ValueError(
                f"members must be different modules of one container, got {shown(', '.join(self.members))}"
            )

    @classmethod
    def of(
        cls,
        members: Mapping[str, nn.Module],
        policy: CheckpointPolicy,
        kept_bytes: int = 0,
        added_seconds: float = 0.0,
    ) -> BlockPlan:
        """The plan of a block of these modules, given by their names."""
        modules = list(members.values())
        kind, shapes = kind_of(modules), parameter_shapes(modules)
        return cls(tuple(members), kind, shapes, policy, kept_bytes, added_seconds)

    @property
    def name(self) -> str:
        """``encoder.layer.3``, or ``features.0..4`` for several modules."""
        first, last = self.members[0], self.members[-1]
        return first if first == last else f"{first}..{last.rpartition('.')[2]}"


def policies_of(blocks: Sequence[BlockPlan]) -> str:
    """How many blocks have which kind of policy: ``keep 3, recompute 1``."""
    counts = Counter(block.policy.title.split()[0].rstrip(",") for block in blocks)
    return ", ".join(f"{kind} {count}" for kind, count in counts.items())


@dataclass(frozen=True)
class StagePlan:
    """Consecutive blocks that run on one pipeline stage: all blocks of the stage, or, with ``"interleaved"``, one of its parts.

    Attributes:
        blocks: number of blocks.
        recompute: whether they are recomputed as a whole from their input, under the policies of the blocks. If not, the policies
            alone decide.
        in_flight: number of micro-batches whose activations are held at a time.
        forward_seconds, backward_seconds: time of one micro-batch, where the backward pass includes all recomputation.
        state_bytes: parameters, buffers, gradients and optimizer state.
        activation_bytes: inputs, outputs, kept and recomputed tensors of all micro-batches in flight, at the peak.
        transport_bytes: gradients that are sent to the previous stage and received from the next stage.
    """

    blocks: Annotated[int, Field(ge=1)]
    recompute: bool
    in_flight: Annotated[int, Field(ge=1)]
    forward_seconds: Annotated[float, Field(ge=0)]
    backward_seconds: Annotated[float, Field(ge=0)]
    state_bytes: Count
    activation_bytes: Count
    transport_bytes: Count

    @property
    def seconds(self) -> float:
        """Time of one micro-batch, forward and backward."""
        return self.forward_seconds + self.backward_seconds

    @property
    def memory(self) -> int:
        """Bytes at the peak."""
        return self.state_bytes + self.activation_bytes + self.transport_bytes


@dataclass(frozen=True)
class PipelinePlan:
    """Cuts of a model into pipeline stages, and the cost of each.

    Attributes:
        stages, micro_batches, schedule: the pipeline that the plan was made for, see :class:`hvd_ckpt.Pipeline`.
        parts: parts in the order of the model; part c runs on stage ``c % stages``.

    Raises:
        ValueError: the number of parts is not a multiple of the stages.
    """

    stages: Annotated[int, Field(ge=1, le=2**20)]
    micro_batches: Annotated[int, Field(ge=1, le=2**20)]
    schedule: Annotated[str, Field(pattern="^(gpipe|1f1b|interleaved)$")]
    parts: tuple[StagePlan, ...]

    def __post_init__(self) -> None:
        if not self.parts or len(self.parts) % self.stages:
            raise ValueError(f"{len(self.parts)} parts cannot be spread evenly over {self.stages} stages")

    @property
    def virtual_stages(self) -> int:
        """Parts on each stage."""
        return len(self.parts) // self.stages

    @property
    def balance(self) -> list[int]:
        """Number of blocks in each part."""
        return [part.blocks for part in self.parts]

    @property
    def memory(self) -> list[int]:
        """Bytes of each stage. The parts of a stage peak at different times, so the peak of several parts may be lower."""
        return [sum(part.memory for part in self.parts[stage :: self.stages]) for stage in range(self.stages)]


@dataclass(frozen=True)
class Plan:
    """Checkpoint policies of the blocks of one model, as :func:`hvd_ckpt.plan` returns them.

    Attributes:
        blocks: the chain, in the order in which the forward pass calls it.
        items: the schedule: numbers of blocks, and segments of them that are recomputed as a whole.
        sample: dtype and shape of each tensor of the sample batch.
        budget: budget in bytes; None for the fastest plan.
        autocast: dtype of the autocast that the plan was made under, such as ``"bfloat16"``, or None. Running the model under
            another dtype gives a warning.
        predicted: the predicted cost of a step.
        measured: the measured cost of a step with this plan, or None.
        baseline: the predicted cost without recomputation.
        smallest: the predicted cost of the plan with the smallest peak.
        frontier: predicted costs of the plans on the Pareto frontier, from the smallest peak to the fastest.
        timelines: (seconds, bytes) during one step: ``"before"`` without recomputation, if that was measured, and ``"after"`` with
            this plan.
        notes: one line for each block that is kept whole, recomputed as a whole or in no segment for another reason than its costs.
        pipeline: cuts into pipeline stages; None for a model without stages. With stages, the costs above are the bytes of the
            largest stage and the seconds of a step with all micro-batches.

    Raises:
        ValueError: the items do not list every block once and in order, a segment spans several containers, or the stages have
            another number of blocks.
    """

    blocks: tuple[BlockPlan, ...]
    items: Items
    sample: tuple[tuple[Text, tuple[Count, ...]], ...] = ()
    budget: Count | None = None
    autocast: Annotated[str, Field(pattern="^(bfloat16|float16)$")] | None = None
    predicted: Cost = _NOTHING
    measured: Cost | None = None
    baseline: Cost = _NOTHING
    smallest: Cost = _NOTHING
    frontier: tuple[Cost, ...] = ()
    timelines: dict[_Moment, tuple[tuple[float, Bytes], ...]] = field(default_factory=dict)
    notes: tuple[Text, ...] = ()
    pipeline: PipelinePlan | None = None

    def __post_init__(self) -> None:
        if blocks_of(self.items) != list(range(len(self.blocks))):
            raise ValueError(
                f"items must list the blocks 0 to {len(self.blocks) - 1}, each once and in order"
            )
        for item in self.items:
            if isinstance(item, tuple) and len({name.rpartition(".")[0] for name in self._members(item)}) > 1:
                raise ValueError("items have a segment of blocks that are not in one container")
        if self.pipeline is not None and sum(self.pipeline.balance) != len(self.blocks):
            raise ValueError(
                f"the stages have {sum(self.pipeline.balance)} blocks, and there are {len(self.blocks)}"
            )

    def __str__(self) -> str:
        """Two lines, for a log; ``hvd-ckpt plan --plan FILE`` shows tables and pictures."""
        limit = "the fastest" if self.budget is None else f"budget {show_bytes(self.budget)}"
        cost, kind = (self.predicted, "predicted") if self.measured is None else (self.measured, "measured")
        return (
            f"Plan of {len(self.blocks)} blocks: {policies_of(self.blocks)} ({limit})\n"
            f"  a step: {show_bytes(cost.peak_bytes)}, {1e3 * cost.seconds:.1f} ms ({kind}); without recomputation "
            f"{show_bytes(self.baseline.peak_bytes)}, {1e3 * self.baseline.seconds:.1f} ms"
        )

    def apply(self, model: M) -> M:
        """Gives the blocks of ``model`` their policies, in place; returns ``model``.

        Modules keep their names, parameters, buffers, hooks and ``state_dict``. Only the way in which their ``forward`` runs
        changes. An earlier plan of the model is removed first.

        Raises:
            PlanError: a block is missing in the model or differs from the planned one.
        """
        check_instance(model, nn.Module, "model must be a torch.nn.Module")
        # Blocks of one module get their policy themselves. Blocks of several modules, and segments, are run by their nn.Sequential,
        # inside which a block of one module still has its own policy.
        #
        # Checked before anything changes: a plan that does not fit leaves the model with the plan that it has.
        self.check(model)
        self.remove(model)
        modules = dict(model.named_modules())
        for block in self.blocks:
            if len(block.members) == 1:
                apply_policy(modules[block.members[0]], block.policy)
        for container, items in self._containers().items():
            apply_to_chain(modules[container], items)
        for module in modules.values():
            expect_autocast(module, self.autocast)
        return model

    def remove(self, model: M) -> M:
        """Undoes :meth:`apply`; returns ``model``. Does nothing for a model without a plan."""
        for module in model.modules():
            remove_policy(module)
        return model

    def check(self, model: nn.Module) -> None:
        """Checks whether the plan fits the model.

        Raises:
            PlanError: a block is missing in the model or differs from the planned one.
        """
        modules = dict(model.named_modules())
        misfit = f"The plan does not fit this {type(model).__name__}:"
        for block in self.blocks:
            if missing := [name for name in block.members if name not in modules]:
                raise PlanError(f"{misfit} it has no module '{missing[0]}'. Make a plan for this model.")
            members = [modules[name] for name in block.members]
            if (kind := kind_of(members)) != block.kind:
                raise PlanError(
                    f"{misfit} block '{block.name}' is of class {kind}, the plan was made for {block.kind}."
                )
            shapes = zip_longest(parameter_shapes(members), block.parameters)
            for number, (shape, planned) in enumerate(shapes):
                if shape != planned:
                    have, want = (
                        "no such parameter" if size is None else list(size) for size in (shape, planned)
                    )
                    raise PlanError(
                        f"{misfit} parameter {number} of block '{block.name}' has the shape {have}, the plan was made for {want}."
                    )
            is_linear = [base_class(member).forward for member in members] == [nn.Linear.forward]
            if block.policy.chunks is not None and not is_linear:
                raise PlanError(
                    f"{misfit} block '{block.name}' is of class {kind}, and only an nn.Linear can have a cross entropy in chunks."
                )
        for container in self._containers():
            if base_class(modules[container]).forward is not nn.Sequential.forward:
                raise PlanError(
                    f"{misfit} '{container or 'the model'}' is not a plain nn.Sequential, whose children the plan runs in segments."
                )
        for item in self.items:
            run = self._members(item)
            container = modules[run[0].rpartition(".")[0]]
            names = list(places_of(container))
            first, own = names.index(run[0].rpartition(".")[2]), [name.rpartition(".")[2] for name in run]
            if names[first : first + len(run)] != own:
                raise PlanError(
                    f"{misfit} '{run[0]}' to '{run[-1]}' are not children of it that follow each other."
                )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON. The file is written completely or not at all.

        Raises:
            PlanError: the plan cannot be read back, such as a plan with a cost that is not finite.
            OSError: the file cannot be written.
        """
        content = TypeAdapter(Plan).dump_python(self, mode="json", exclude_defaults=True)
        try:
            text = dumps({"format": "hvd_ckpt plan", "version": 2, "plan": content})
            # Read back before the file is written: a value that load() refuses must not replace a good file.
            parse_json(_PlanFile, text.encode(), _GIVE, _REPAIR)
        except (Wrong, ValueError) as error:
            raise PlanError(f"The plan cannot be written to '{path}': {error}.") from None
        write_text(text, Path(path))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Reads a plan that :meth:`save` wrote. Nothing in the file is executed.

        Raises:
            PlanError: the file is not a plan, is damaged, or is of another version.
            OSError: the file cannot be read.
        """
        try:
            return parse_json(_PlanFile, read_bytes(Path(path), _GIVE), _GIVE, _REPAIR).plan
        except Wrong as error:
            raise PlanError(f"The plan file '{path}' cannot be used: {error}.") from None

    def _containers(self) -> dict[str, list[Any]]:
        """For each ``nn.Sequential`` that runs children together or in segments: its items, with the names of its children."""
        containers: dict[str, list[Any]] = {}
        for item in self.items:
            members = self._members(item)
            if isinstance(item, tuple) or len(self.blocks[item].members) > 1:
                container = members[0].rpartition(".")[0]
                containers.setdefault(container, []).append(self._steps(item))
        return containers

    def _members(self, item: Any) -> list[str]:
        return [name for block in blocks_of([item]) for name in self.blocks[block].members]

    def _steps(self, item: Any) -> Any:
        """An item as ``apply_to_chain`` takes it: (names of children, policy), or a list of such items for a segment."""
        if isinstance(item, tuple):
            return [self._steps(inner) for inner in item]
        block = self.blocks[item]
        names = tuple(name.rpartition(".")[2] for name in block.members)
        # A block of one module has its policy on that module already, from apply(), also inside a segment.
        return names, (KEEP if len(names) == 1 else block.policy)


class _PlanFile(Strict):
    format: Literal["hvd_ckpt plan"]
    version: Literal[2]
    plan: Plan


def blocks_of(items: Sequence[Any]) -> list[int]:
    """The blocks in items, in order."""
    return [block for item in items for block in (blocks_of(item) if isinstance(item, tuple) else [item])]


@contextlib.contextmanager
def applied(model: nn.Module, plan: Plan) -> Iterator[None]:
    """A context in which the plan is applied to the model."""
    plan.apply(model)
    try:
        yield
    finally:
        plan.remove(model)


def kind_of(members: Sequence[nn.Module]) -> str:
    """The classes of modules as text: ``BertLayer``, ``Conv2d+BatchNorm2d``."""
    return "+".join(type(member).__name__ for member in members)


def parameter_shapes(members: Sequence[nn.Module]) -> tuple[tuple[int, ...], ...]:
    """Shapes of the parameters of modules, in order; of slices those of the first part, which may be a row longer."""
    return tuple(tuple(shape_of_first(parameter)) for member in members for parameter in member.parameters())


def sample_shapes(*values: Any) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Dtype and shape of each tensor in nested values, as :attr:`Plan.sample` has them."""
    return tuple(
        (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for tensor in tensors_in(*values)
    )
