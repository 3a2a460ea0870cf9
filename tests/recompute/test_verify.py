"""Tests of verification: by default, a recomputation with other bits than its first pass is an error that names the module."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import pytest
import torch
from odd_blocks import operator
from selective import drop_all, selectively
from torch import nn
from ways import each_of, reentrant

from hvd_ckpt.recompute import RecomputationMismatch, checkpoint, verify_recomputation
from hvd_ckpt.recompute.verify import VARIABLE

pytestmark = pytest.mark.usefixtures("one_thread")

GENERATOR = torch.Generator()
NUMBERS: list[float] = []  # by the key of a block, which its copies share


@pytest.fixture(autouse=True)
def default_setting():
    verify_recomputation("first")
    yield
    verify_recomputation("first")


def changed(key, factor):
    NUMBERS[key] *= factor
    return NUMBERS[key]


SCHEMA = "(Tensor x, int key, float factor) -> Tensor"
OPERATORS = {
    "generator": operator(
        "drawn", lambda x, key, factor: x * torch.rand(x.shape, generator=GENERATOR), SCHEMA
    ),
    "number": operator("scaled", lambda x, key, factor: x * changed(key, factor), SCHEMA),
    "unfilled": operator("unfilled", lambda x, key, factor: x.where(x > 0, changed(key, factor)), SCHEMA),
}
"""What a plan drops, too: it runs a call again with the same arguments."""


class Faulty(nn.Module):
    """A block that computes something else when it runs again, while it is broken."""

    def __init__(self, fault, broken=True, factor=0.5):
        super().__init__()
        self.linear, self.fault, self.broken, self.factor = nn.Linear(8, 8), fault, broken, factor
        self.key, self.numbers = len(NUMBERS), [1.0]
        NUMBERS.append(1.0)
        self.register_buffer("large", torch.ones(200, 200))

    def forward(self, x):
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


def on_tape(block, x):
    """Under one policy of the block in all passes."""
    if not hasattr(block, "policy"):
        block.policy = drop_all(block, x, keep=("linear",))
    return selectively(block.policy)(block, x)


EVERY_WAY = each_of("non-reentrant", "reentrant", "lambda", "segments")
CHECKPOINT_AND_TAPE = pytest.mark.parametrize("run", [checkpoint, on_tape], ids=["checkpoint", "tape"])


def step(block, run=checkpoint):
    run(block, torch.randn(5, 8)).square().sum().backward()


@EVERY_WAY
@pytest.mark.parametrize("fault", [*OPERATORS, "list", "fewer calls"])
def test_faults_are_errors_that_name_the_module(fault, run):
    with pytest.raises(RecomputationMismatch, match="Faulty|is not there again"):
        step(Faulty(fault), run)


@pytest.mark.parametrize("fault", OPERATORS)
def test_faults_under_a_plan_are_errors_that_name_the_block_and_the_call(fault):
    name = OPERATORS[fault]._name
    with pytest.raises(RecomputationMismatch, match=rf"Faulty.*{name}.*without_recomputation"):
        step(Faulty(fault), on_tape)


def test_the_error_names_the_innermost_module():
    with pytest.raises(RecomputationMismatch, match=r"Sequential gave .*: in Faulty, a saved tensor"):
        step(nn.Sequential(nn.Linear(8, 8), nn.Sequential(Faulty("number"), nn.Tanh())))


def test_a_large_buffer_that_is_written_late():
    block = Faulty("large buffer", broken=False)
    step(block)
    block.broken = True
    with pytest.raises(RecomputationMismatch, match=r"Faulty\.large"):
        step(block)
    block.zero_grad()
    step(block)  # it is known now


def lost_noise(x):
    """RReLU as the last operation: its noise is saved before it is drawn, and recomputation stops early, right there."""
    return nn.functional.rrelu(x, training=True)


def test_noise_that_is_saved_before_it_is_drawn():
    x = torch.randn(50, 50, requires_grad=True)
    # It may be recomputed with the noise's own memory, which still holds the noise.
    y = checkpoint(lost_noise, x)
    with pytest.raises(RecomputationMismatch, match="lost_noise.*early_stop=False"):
        y.sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint(lost_noise, x, early_stop=False).sum().backward()


@CHECKPOINT_AND_TAPE
def test_a_rounding_is_a_warning_or_an_error_under_deterministic_algorithms(run):
    with pytest.warns(UserWarning, match="rounds in another way.*deterministic"):
        step(Faulty("number", factor=1 + 1e-6), run)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RecomputationMismatch):
            step(Faulty("number", factor=1 + 1e-6), run)
    finally:
        torch.use_deterministic_algorithms(False)


@EVERY_WAY
def test_a_compiled_block_is_compiled_as_often_as_without_verification(run):
    compiled = []

    def backend(graph, inputs):
        compiled[-1] += 1
        return graph.forward

    for when in ("first", "never"):
        compiled.append(0)
        torch.compiler.reset()
        verify_recomputation(when)
        inner = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), backend=backend)
        block = nn.Sequential(inner, nn.Linear(8, 8))
        for _ in range(3):
            step(block, run)
    assert compiled[0] == compiled[1] > 0


@EVERY_WAY
def test_nothing_is_said_where_nothing_is_wrong(run):
    layers = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 8)
    block = nn.Sequential(*layers, nn.BatchNorm1d(8))  # which fills its statistics after it saves them
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            step(block, run)


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
def test_which_passes_are_verified(when, broken, found, run):
    verify_recomputation(when)
    block = Faulty("number")
    for number in range(1, (found or 5)):
        block.broken = number in broken
        step(block, run)
    block.broken = True
    if found:
        with pytest.raises(RecomputationMismatch):
            step(block, run)


def test_all_passes_before_the_first_recomputation_are_verified():
    blocks = nn.ModuleList([Faulty("number", broken=False), Faulty("number", broken=True)])
    y = torch.randn(5, 8)
    for number in range(2):  # lambdas that reach both blocks
        y = checkpoint(lambda x, number=number: blocks[number](x), y)
    with pytest.raises(RecomputationMismatch):
        y.sum().backward()


@CHECKPOINT_AND_TAPE
def test_another_mode_is_verified_again(run):
    block = Faulty("number", broken=False)
    step(block, run)
    block.broken = True
    step(block, run)
    block.eval()
    with pytest.raises(RecomputationMismatch):
        step(block, run)


def test_another_policy_at_the_place_of_an_old_one_is_verified():
    block = Faulty("number")
    for number in range(20):  # a freed policy gives its place in memory to the next one
        block.policy = drop_all(block, torch.randn(5, 8), keep=("linear",), breaks=frozenset({number}))
        with pytest.raises(RecomputationMismatch):
            step(block, on_tape)
        block.broken = False
        step(block, on_tape)
        block.broken = True


def scaled(linear, x, called):
    """Other results in the first call than in later calls. The tensors that autograd saves are the same."""
    factor = 2.0 if called else 3.0
    called.add(True)
    return linear(x) * factor


@pytest.mark.parametrize(
    "before", [None, checkpoint, lambda *args: reentrant(*args, preserve_rng_state=False)]
)
def test_each_variant_is_verified(before):
    linear = nn.Linear(8, 8)

    def train(run):
        run(scaled, linear, torch.ones(5, 8, requires_grad=True), set()).sum().backward()

    if before is not None:
        train(before)  # the first of these does not need the factor again, and the last is not verified
    with pytest.raises(RecomputationMismatch, match="scaled"):
        train(reentrant)


@pytest.mark.parametrize("when", ["sometimes", 0, -1, True, 1.5, None, ""])
def test_invalid_settings(when):
    with pytest.raises(ValueError, match="recomputation must be"):
        verify_recomputation(when)


@pytest.mark.parametrize("value, said", [("5", "5"), ("nonsense", "ValueError")])
def test_environment_variable(value, said):
    command = [sys.executable, "-c", "import hvd_ckpt.recompute.verify as v; print(v._when)"]
    environment = {**os.environ, VARIABLE: value}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert said in done.stdout + done.stderr
