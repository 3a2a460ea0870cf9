"""checkpoint(): the same numbers with less memory, whatever the function takes and returns."""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections import namedtuple
from typing import Any

import pytest
import torch
from same import assert_same, gradients
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from hvd_ckpt.frames import replay
from hvd_ckpt.recompute import checkpoint, is_checkpointing, is_recomputing

VARIANTS = pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])


class Recorder(nn.Module):
    """Notes what the flags say each time it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[bool, bool]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append((is_checkpointing(), is_recomputing()))
        return x.sin()


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Dropout(0.4), nn.Linear(8, 6), nn.Tanh())


@VARIANTS
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("input_needs_grad", [False, True])
def test_equals_no_recomputation_with_dropout(
    use_reentrant: bool, autocast: bool, input_needs_grad: bool
) -> None:
    def train(recompute: bool) -> tuple[list[torch.Tensor | None], torch.Tensor]:
        torch.manual_seed(1)
        first, second = mlp(), mlp()
        x = torch.randn(5, 6, requires_grad=input_needs_grad)
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                if recompute:
                    y = checkpoint(first, x, use_reentrant=use_reentrant)
                    y = checkpoint(second, y, use_reentrant=use_reentrant)
                else:
                    y = second(first(x))
            y.float().square().sum().backward()
        return [*gradients(first, second), x.grad], torch.get_rng_state()

    plain, plain_state = train(recompute=False)
    recomputed, state = train(recompute=True)
    assert_same(plain, recomputed)
    assert torch.equal(plain_state, state)  # later random numbers are the same too


def test_without_preserved_random_state_dropout_differs() -> None:
    torch.manual_seed(0)
    x = torch.ones(1000, requires_grad=True)
    y = checkpoint(nn.functional.dropout, x, preserve_rng_state=False)
    y.square().sum().backward()
    assert x.grad is not None
    assert not torch.equal(x.grad == 0, y == 0)


@VARIANTS
def test_activations_are_not_kept(use_reentrant: bool) -> None:
    inner: list[weakref.ref[torch.Tensor]] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        hidden = x.exp()
        inner.append(weakref.ref(hidden))
        return hidden.sin()

    x = torch.randn(4, requires_grad=True)
    y = checkpoint(function, x, use_reentrant=use_reentrant)
    gc.collect()
    assert inner[0]() is None
    y.sum().backward()
    assert len(inner) == 2
    assert x.grad is not None


@VARIANTS
def test_flags_tell_the_first_pass_from_the_recomputation(use_reentrant: bool) -> None:
    module = Recorder()
    x = torch.randn(3, requires_grad=True)
    module(x)
    y = checkpoint(module, x, use_reentrant=use_reentrant)
    assert not is_checkpointing() and not is_recomputing()
    y.sum().backward()
    with torch.no_grad():
        checkpoint(module, x, use_reentrant=use_reentrant)
    assert module.seen == [(False, False), (True, False), (False, True), (False, False)]
    assert not is_checkpointing() and not is_recomputing()


@VARIANTS
def test_flags_are_restored_when_the_function_raises(use_reentrant: bool) -> None:
    runs = []

    def function(x: torch.Tensor, fail_at: int) -> torch.Tensor:
        runs.append(None)
        if len(runs) == fail_at:
            raise KeyError("broken")
        return x.sin().cos()

    x = torch.randn(3, requires_grad=True)
    with pytest.raises(KeyError, match="broken"):
        checkpoint(function, x, 1, use_reentrant=use_reentrant)
    assert not is_checkpointing()
    runs.clear()
    y = checkpoint(function, x, 2, use_reentrant=use_reentrant)
    with pytest.raises(KeyError, match="broken"):
        y.sum().backward()
    assert not is_recomputing()


@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("inner", [False, True])
def test_nested(outer: bool, inner: bool) -> None:
    def train(recompute: bool) -> tuple[list[torch.Tensor | None], Recorder]:
        torch.manual_seed(3)
        first, second, recorder = mlp(), mlp(), Recorder()

        def inside(x: torch.Tensor) -> torch.Tensor:
            return recorder(second(x))

        def outside(x: torch.Tensor) -> torch.Tensor:
            hidden = first(x)
            hidden = checkpoint(inside, hidden, use_reentrant=inner) if recompute else inside(hidden)
            return hidden.tanh() * 2

        x = torch.randn(5, 6, requires_grad=True)
        y = checkpoint(outside, x, use_reentrant=outer) if recompute else outside(x)
        y.square().sum().backward()
        return [*gradients(first, second), x.grad], recorder

    plain, _ = train(recompute=False)
    recomputed, recorder = train(recompute=True)
    assert_same(plain, recomputed)
    assert recorder.seen[0] == (True, False)
    assert all(recomputing for _, recomputing in recorder.seen[1:])
    assert len(recorder.seen) > 1


@VARIANTS
def test_nested_structures_keywords_and_non_tensors(use_reentrant: bool) -> None:
    Pair = namedtuple("Pair", ["left", "right"])

    def compute(
        x: torch.Tensor,
        pair: Any,
        table: dict[str, Any],
        *,
        args: torch.Tensor,
        function_: str,
        nothing: None,
    ) -> dict[str, Any]:
        assert function_ == "double" and nothing is None and isinstance(pair, Pair)
        table.setdefault("note", 7)
        hidden = (x * pair.left + table["items"][0] * pair.right).sin() * args * table["factor"]
        return {"hidden": hidden, "rest": [hidden.cos(), Pair(3, hidden.detach().argmax()), None, function_]}

    def run(recompute: bool) -> tuple[list[torch.Tensor | None], Any]:
        torch.manual_seed(0)
        x, left, right, item, scale = (torch.randn(4, requires_grad=True) for _ in range(5))
        call = functools.partial(checkpoint, compute, use_reentrant=use_reentrant) if recompute else compute
        table = {"items": [item], "factor": 2.5}
        out = call(x, Pair(left, right), table, args=scale, function_="double", nothing=None)
        assert table["note"] == 7  # what the function does to its containers is seen
        (out["hidden"].square() + out["rest"][0]).sum().backward()
        return [tensor.grad for tensor in (x, left, right, item, scale)], out

    (plain, plain_out), (recomputed, out) = run(False), run(True)
    assert all(gradient is not None for gradient in plain)
    assert_same(plain, recomputed)
    assert isinstance(out["rest"][1], Pair) and out["rest"][1].left == 3
    assert torch.equal(out["rest"][1].right, plain_out["rest"][1].right)
    assert out["rest"][2:] == [None, "double"]


def test_a_keyword_tensor_changed_in_place_is_an_error() -> None:
    x, scale = torch.randn(3, requires_grad=True), torch.ones(3)
    y = checkpoint(lambda x, scale: (x * scale).sin(), x, scale=scale)
    scale.add_(1)
    with pytest.raises(RuntimeError, match="inplace operation"):
        y.sum().backward()


@VARIANTS
def test_same_tensor_returned_twice(use_reentrant: bool) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * 2
        return y, y

    x = torch.ones(2, requires_grad=True)
    first, second = checkpoint(function, x, use_reentrant=use_reentrant)
    (first * 5 + second * 7).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [24.0, 24.0]


@VARIANTS
def test_unused_output_leaves_its_parameter_without_gradient(use_reentrant: bool) -> None:
    used, unused = nn.Linear(3, 3), nn.Linear(3, 3)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return used(x).sin(), unused(x).sin()

    y, _ = checkpoint(function, torch.randn(2, 3, requires_grad=True), use_reentrant=use_reentrant)
    y.sum().backward()
    assert used.weight.grad is not None
    assert unused.weight.grad is None


@VARIANTS
def test_no_arguments_at_all(use_reentrant: bool) -> None:
    parameter = nn.Parameter(torch.ones(3))
    checkpoint(lambda: parameter.exp().sin(), use_reentrant=use_reentrant).sum().backward()
    assert parameter.grad is not None


@VARIANTS
def test_frozen_first_segment(use_reentrant: bool) -> None:
    frozen, trained = nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 3)
    runs = []

    def first(x: torch.Tensor) -> torch.Tensor:
        runs.append(None)
        out: torch.Tensor = frozen(x).sin()
        return out

    hidden = checkpoint(first, torch.randn(2, 3), use_reentrant=use_reentrant)
    assert not hidden.requires_grad
    checkpoint(trained, hidden, use_reentrant=use_reentrant).sum().backward()
    assert frozen.weight.grad is None
    assert trained.weight.grad is not None
    assert len(runs) == 1


@pytest.mark.filterwarnings("ignore:None of the results")
@VARIANTS
def test_parameters_within_reach_but_not_used(use_reentrant: bool) -> None:
    both = nn.ModuleList([nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 3)])
    hidden = checkpoint(lambda x: both[0](x).sin(), torch.randn(2, 3), use_reentrant=use_reentrant)
    both[1](hidden).sum().backward()
    assert both[0].weight.grad is None
    assert both[1].weight.grad is not None


def test_result_that_does_not_depend_on_the_input() -> None:
    x, other = torch.randn(2, requires_grad=True), torch.randn(2, requires_grad=True)
    y = checkpoint(lambda x: x.detach().sin(), x)
    (y * other).sum().backward()
    assert x.grad is None
    assert torch.equal(other.grad, x.detach().sin())  # type: ignore[arg-type]


def test_a_reentrant_region_without_gradients_is_an_error() -> None:
    x = torch.randn(2, requires_grad=True)
    result = checkpoint(
        lambda x, data: {"both": (x.detach() * data, 3)}, x, torch.randn(2), use_reentrant=True
    )
    with pytest.raises(RuntimeError, match="requires_grad=True"):
        result["both"][0].sum().backward()


def test_a_reentrant_region_some_of_whose_results_need_gradients() -> None:
    x = torch.randn(2, requires_grad=True)
    constant, result = checkpoint(lambda x: (x.detach().sin(), x.cos()), x, use_reentrant=True)
    constant.sum().backward(retain_graph=True)
    assert x.grad is None
    result.sum().backward()
    assert torch.equal(x.grad, -x.detach().sin())  # type: ignore[arg-type]


def test_a_reentrant_region_that_is_recomputed_for_nothing_warns() -> None:
    layer, head = nn.Linear(3, 3), nn.Linear(3, 3)
    hidden = checkpoint(lambda x: layer(x).detach(), torch.randn(2, 3), use_reentrant=True)
    with pytest.warns(UserWarning, match="recomputed for nothing"):
        head(hidden).sum().backward()
    assert layer.weight.grad is None
    assert head.weight.grad is not None


@VARIANTS
def test_two_backward_passes_through_one_region(use_reentrant: bool) -> None:
    def train(recompute: bool) -> list[torch.Tensor | None]:
        torch.manual_seed(2)
        model = mlp()
        x = torch.randn(5, 6, requires_grad=True)
        y = checkpoint(model, x, use_reentrant=use_reentrant) if recompute else model(x)
        y.sum().backward(retain_graph=True)
        y.square().sum().backward()
        return [*gradients(model), x.grad]

    assert_same(train(recompute=False), train(recompute=True))


def test_autograd_grad_and_gradients_of_gradients() -> None:
    model = mlp().eval()
    x = torch.randn(2, 6, requires_grad=True)

    def penalty(y: torch.Tensor) -> torch.Tensor:
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(slope.square().sum(), x)
        return second

    assert torch.equal(penalty(model(x)), penalty(checkpoint(model, x)))


def test_gradients_computed_inside_the_function() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.sin().exp()
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y * slope

    x = torch.randn(3, requires_grad=True)
    function(x).sum().backward()
    expected, x.grad = x.grad, None
    checkpoint(function, x, early_stop=False).sum().backward()
    assert torch.allclose(x.grad, expected)  # type: ignore[arg-type]


def test_early_stop_and_context_fn_reach_pytorch() -> None:
    entered: list[str] = []

    @contextlib.contextmanager
    def note(name: str):  # type: ignore[no-untyped-def]
        entered.append(name)
        yield

    steps: list[int] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        steps.append(1)
        y = x.sin().cos()
        steps.append(2)
        return y

    x = torch.randn(3, requires_grad=True)
    contexts = (note("first pass"), note("recomputation"))
    checkpoint(function, x, context_fn=lambda: contexts).sum().backward()
    assert entered == ["first pass", "recomputation"]
    assert steps == [1, 2, 1]  # the recomputation stopped at the last saved tensor
    steps.clear()
    checkpoint(function, x, early_stop=False).sum().backward()
    assert steps == [1, 2, 1, 2]


def test_debug_shows_the_operators() -> None:
    runs: list[None] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        runs.append(None)
        return x.sin() if len(runs) == 1 else x[:1].sin()

    x = torch.randn(3, requires_grad=True)
    with pytest.raises(torch.utils.checkpoint.CheckpointError, match="aten"):
        checkpoint(function, x, debug=True).sum().backward()


def test_selective_checkpointing_with_a_replayed_value() -> None:
    # The replayed computation uses the same operators as the region, which selective checkpointing counts.
    def function(x: torch.Tensor) -> torch.Tensor:
        scale = replay(lambda: (2 * x.detach() @ x.detach()).mean())
        return (x @ x).sin() @ x * scale

    def contexts() -> Any:
        return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])

    torch.manual_seed(0)
    x = torch.randn(3, 3, requires_grad=True)
    function(x).sum().backward()
    expected, x.grad = x.grad, None
    checkpoint(function, x, context_fn=contexts).sum().backward()
    assert torch.equal(x.grad, expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("inner", [False, True])
def test_replay_computes_once_in_nested_regions(outer: bool, inner: bool) -> None:
    computed: list[int] = []

    def once(x: torch.Tensor) -> torch.Tensor:
        def compute() -> float:
            computed.append(1)
            return float(len(computed))

        return x.sin() * replay(compute)

    def inside(x: torch.Tensor) -> torch.Tensor:
        return once(once(x)).cos()

    def outside(x: torch.Tensor) -> torch.Tensor:
        return once(checkpoint(inside, once(x), use_reentrant=inner)).cos()

    x = torch.randn(3, requires_grad=True)
    y = checkpoint(outside, x, use_reentrant=outer)
    assert len(computed) == 4
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert len(computed) == 4
    gradient, x.grad = x.grad, None
    computed.clear()
    once(once(once(once(x))).cos()).cos().sum().backward()
    assert torch.allclose(gradient, 2 * x.grad)  # type: ignore[arg-type,operator]


def test_replay_of_a_function_that_changes_is_an_error() -> None:
    runs: list[None] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        runs.append(None)
        for _ in runs:
            x = x * replay(lambda: 2.0)
        return x.sin()

    x = torch.randn(3, requires_grad=True)
    y = checkpoint(function, x)
    with pytest.raises(RuntimeError, match="asked for 2 value"):
        y.sum().backward()


@VARIANTS
def test_training_mode_switched_before_the_backward_pass(use_reentrant: bool) -> None:
    model = mlp().eval()
    x = torch.randn(4, 6, requires_grad=True)
    model(x).square().sum().backward()
    expected, x.grad = x.grad, None
    y = checkpoint(model, x, use_reentrant=use_reentrant)
    model.train()
    y.square().sum().backward()
    assert torch.equal(x.grad, expected)  # type: ignore[arg-type]
    assert all(module.training for module in model.modules())


def test_errors() -> None:
    x = torch.randn(2, requires_grad=True)
    with pytest.raises(TypeError, match="something to call, got int"):
        checkpoint(3, x)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="use_reentrant must be True or False, got 'yes'"):
        checkpoint(torch.sin, x, use_reentrant="yes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="use_reentrant=False"):
        checkpoint(torch.sin, x, use_reentrant=True, debug=True)
    with pytest.raises(ValueError, match="determinism_check"):
        checkpoint(torch.sin, x, determinism_check="perhaps")
