"""Tests of verification: by default, a recomputation with other bits than its first pass is an error that names the module."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from selective import drop_all
from torch import nn
from ways import Run, each_of, reentrant

from hvd_ckpt.recompute import RecomputationMismatch, checkpoint, verify_recomputation
from hvd_ckpt.recompute.tape import run_selectively
from hvd_ckpt.recompute.verify import VARIABLE

pytestmark = pytest.mark.usefixtures("one_thread")

GENERATOR = torch.Generator()
NUMBERS: list[float] = []  # by the key of a block, which its copies share


@pytest.fixture(autouse=True)
def default_setting() -> Iterator[None]:
    verify_recomputation("first")
    yield
    verify_recomputation("first")


def operator(name: str, function: Callable[[torch.Tensor, int, float], torch.Tensor]) -> Any:
    """A custom operator that saves its result for its backward pass."""
    schema = "(Tensor x, int key, float factor) -> Tensor"
    made = torch.library.custom_op(f"hvd_ckpt_verified::{name}", function, mutates_args=(), schema=schema)
    made.register_autograd(
        lambda ctx, gradient: (gradient * ctx.saved_tensors[0], None, None),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
    )
    return made


def changed(key: int, factor: float) -> float:
    NUMBERS[key] *= factor
    return NUMBERS[key]


OPERATORS = {
    "generator": operator("noisy", lambda x, key, factor: x * torch.rand(x.shape, generator=GENERATOR)),
    "number": operator("scaled", lambda x, key, factor: x * changed(key, factor)),
    "unfilled": operator("unfilled", lambda x, key, factor: torch.where(x > 0, x, changed(key, factor))),
}
"""What a plan drops, too: it runs a call again with the same arguments."""


class Faulty(nn.Module):
    """A block that computes something else when it runs again, while it is broken."""

    def __init__(self, fault: str, broken: bool = True, factor: float = 0.5) -> None:
        super().__init__()
        self.linear, self.fault, self.broken, self.factor = nn.Linear(8, 8), fault, broken, factor
        self.key, self.numbers = len(NUMBERS), [1.0]
        NUMBERS.append(1.0)
        self.large: torch.Tensor
        self.register_buffer("large", torch.ones(200, 200))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.linear(x))
        if self.fault in OPERATORS:
            h = OPERATORS[self.fault](h, self.key, self.factor if self.broken else 1.0)
        elif not self.broken:
            return h
        elif self.fault == "list":
            h = h * self.numbers[0]
            self.numbers[0] *= 0.5
        elif self.fault == "large buffer":
            h = h * self.large[0, 0].clone()
            self.large.mul_(0.5)
        elif self.fault == "fewer calls":
            for _ in range(round(4 * self.numbers[0])):
                h = torch.sin(h)
            self.numbers[0] *= 0.5
        return h.sin()


def on_tape(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Under one policy of the block in all passes."""
    if not hasattr(block, "policy"):
        block.policy = drop_all(block, x, keep=("linear",))
    return run_selectively(block, (x,), {}, block.policy)


def lost_noise(x: torch.Tensor) -> torch.Tensor:
    """RReLU as the last operation: its noise is saved before it is drawn, and recomputation stops early, right there."""
    return nn.functional.rrelu(x, training=True)


EVERY_WAY = each_of("non-reentrant", "reentrant", "lambda", "segments")
CHECKPOINT_AND_TAPE = pytest.mark.parametrize("run", [checkpoint, on_tape], ids=["checkpoint", "tape"])


def step(block: nn.Module, run: Run = checkpoint) -> None:
    run(block, torch.randn(5, 8)).square().sum().backward()


@EVERY_WAY
@pytest.mark.parametrize("fault", [*OPERATORS, "list"])
def test_faults_are_errors_that_name_the_module(fault: str, run: Run) -> None:
    with pytest.raises(RecomputationMismatch, match="Faulty"):
        step(Faulty(fault), run)


@pytest.mark.parametrize("fault", OPERATORS)
def test_faults_under_a_plan_are_errors_that_name_the_block_and_the_call(fault: str) -> None:
    name = OPERATORS[fault]._name
    with pytest.raises(RecomputationMismatch, match=rf"Faulty.*{name}.*without_recomputation"):
        step(Faulty(fault), on_tape)


def test_the_error_names_the_innermost_module() -> None:
    with pytest.raises(RecomputationMismatch, match=r"Sequential gave .*: in Faulty, a saved tensor"):
        step(nn.Sequential(nn.Linear(8, 8), nn.Sequential(Faulty("number"), nn.Tanh())))


@EVERY_WAY
def test_a_compiled_block_is_compiled_as_often_as_without_verification(run: Run) -> None:
    compiled = {"first": 0, "never": 0}
    for when in compiled:

        def backend(graph: Any, inputs: Any, when: str = when) -> Any:
            compiled[when] += 1
            return graph.forward

        torch.compiler.reset()
        verify_recomputation(when)
        inner: Any = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), backend=backend)
        block = nn.Sequential(inner, nn.Linear(8, 8))
        for _ in range(3):
            step(block, run)
    assert compiled["first"] == compiled["never"] > 0


@EVERY_WAY
def test_nothing_is_said_where_nothing_is_wrong(run: Run) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            step(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Tanh()), run)
            step(
                nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), run
            )  # fills its statistics after it saves them


def test_noise_that_is_saved_before_it_is_drawn() -> None:
    x = torch.randn(50, 50, requires_grad=True)
    y = checkpoint(
        lost_noise, x
    )  # may be recomputed with the noise's own memory, which still holds the noise
    with pytest.raises(RecomputationMismatch, match="lost_noise.*early_stop=False"):
        y.sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint(lost_noise, x, early_stop=False).sum().backward()


def test_a_recomputation_that_saves_fewer_tensors() -> None:
    with pytest.raises(RecomputationMismatch, match="Faulty"):
        step(Faulty("fewer calls"))


def passes(block: Faulty, run: Run, broken: set[int], count: int = 4) -> int | None:
    """The number of the first pass, from 1, whose mismatch is found; in those of ``broken`` there is one."""
    for number in range(1, count + 1):
        block.broken = number in broken
        try:
            step(block, run)
        except RecomputationMismatch:
            return number
    return None


@CHECKPOINT_AND_TAPE
@pytest.mark.parametrize(
    "when, broken, found",
    [
        ("first", {1}, 1),
        ("first", {2, 3, 4}, None),
        ("never", {1, 2, 3, 4}, None),
        ("always", {3}, 3),
        (2, {2, 4}, None),
        (2, {2, 3}, 3),
        ("3", {2, 3, 4}, 4),
    ],
)
def test_which_passes_are_verified(when: str | int, broken: set[int], found: int | None, run: Run) -> None:
    verify_recomputation(when)
    assert passes(Faulty("number"), run, broken) == found


def test_all_passes_before_the_first_recomputation_are_verified() -> None:
    blocks = nn.ModuleList([Faulty("number", broken=False), Faulty("number", broken=True)])
    y = torch.randn(5, 8)
    for number in range(2):  # lambdas that reach both blocks
        y = checkpoint(lambda x, number=number: blocks[number](x), y)
    with pytest.raises(RecomputationMismatch):
        y.sum().backward()


@CHECKPOINT_AND_TAPE
def test_another_mode_is_verified_again(run: Run) -> None:
    block = Faulty("number", broken=False)
    step(block, run)
    block.broken = True
    step(block, run)
    block.eval()
    with pytest.raises(RecomputationMismatch):
        step(block, run)


def test_another_policy_at_the_place_of_an_old_one_is_verified() -> None:
    block = Faulty("number")
    for number in range(20):  # a freed policy gives its place in memory to the next one
        block.policy = drop_all(block, torch.randn(5, 8), keep=("linear",), breaks=frozenset({number}))
        with pytest.raises(RecomputationMismatch):
            step(block, on_tape)
        block.broken = False
        step(block, on_tape)
        block.broken = True


def scaled(linear: nn.Module, x: torch.Tensor, called: set[bool]) -> torch.Tensor:
    """Other results in the first call than in later calls. The tensors that autograd saves are the same."""
    factor = 2.0 if called else 3.0
    called.add(True)
    return linear(x) * factor


VARIANTS: dict[str, Callable[..., torch.Tensor]] = {
    "non-reentrant": lambda *args: checkpoint(scaled, *args),
    "reentrant": lambda *args: reentrant(scaled, *args),
    "other random numbers": lambda *args: checkpoint(
        scaled, *args, use_reentrant=True, preserve_rng_state=False
    ),
}


@pytest.mark.parametrize("before", VARIANTS)
def test_each_variant_is_verified(before: str) -> None:
    linear = nn.Linear(8, 8)
    if before != "reentrant":
        # The first of these does not need the factor again, and the last is not verified.
        VARIANTS[before](linear, torch.ones(5, 8, requires_grad=True), set()).sum().backward()
    with pytest.raises(RecomputationMismatch, match="scaled"):
        VARIANTS["reentrant"](linear, torch.ones(5, 8, requires_grad=True), set()).sum().backward()


@pytest.mark.parametrize("when", ["sometimes", 0, -1, True, 1.5, None, ""])
def test_invalid_settings(when: Any) -> None:
    with pytest.raises(ValueError, match="recomputation must be"):
        verify_recomputation(when)


@pytest.mark.parametrize("value, said", [("never", "never"), ("5", "5"), ("nonsense", "ValueError")])
def test_environment_variable(value: str, said: str) -> None:
    code = "import hvd_ckpt.recompute.verify as verify; print(verify._when)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, VARIABLE: value},
    )
    assert said in done.stdout + done.stderr


@CHECKPOINT_AND_TAPE
def test_a_rounding_is_a_warning_or_an_error_under_deterministic_algorithms(run: Run) -> None:
    with pytest.warns(UserWarning, match="rounds in another way.*deterministic"):
        step(Faulty("number", factor=1 + 1e-6), run)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RecomputationMismatch):
            step(Faulty("number", factor=1 + 1e-6), run)
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_large_buffer_that_is_written_late() -> None:
    block = Faulty("large buffer", broken=False)
    step(block)
    block.broken = True
    with pytest.raises(RecomputationMismatch, match=r"Faulty\.large"):
        step(block)
    block.zero_grad()
    step(block)  # it is known now


@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr"])
@each_of("non-reentrant", "reentrant", "lambda", "segments")
def test_blocks_with_a_sparse_buffer(layout: str, run: Run) -> None:
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("edges", torch.eye(5).to_sparse(layout=getattr(torch, layout)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sparse.mm(self.edges, self.linear(x)).tanh()

    block = Graph()
    for _ in range(3):
        step(block, run)
