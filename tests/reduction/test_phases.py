"""Tests of the phases of a step: with any order of passes and calls, a step uses reduced gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from one_process import batch, chain, difference, loss, loss_of_all, same_everywhere, sgd, wrap
from torch import nn

import hvd_ckpt as hc

pytestmark = pytest.mark.ranks(gloo=(1, 2))

several = pytest.mark.ranks(gloo=(2,), mpi=(4,))
OPERATIONS = {"average": hc.Average, "sum": hc.Sum}


class Pair:
    """A distributed optimizer, and one process that does for all ranks what each of them does."""

    def __init__(self, op: Any = hc.Average, layers: int = 3, make: Any = sgd, **options: Any) -> None:
        self.op = op
        self.model, self.reference = chain(layers), chain(layers)
        self.optimizer = wrap(self.model, make(self.model), op=op, **options)
        self.bare = make(self.reference)

    @property
    def both(self) -> Iterator[tuple[nn.Module, Any]]:
        yield self.model, self.optimizer
        yield self.reference, self.bare

    def backward(self, step: int) -> None:
        loss(self.model, step).backward()
        loss_of_all(self.reference, step, self.op).backward()

    def uneven_backward(self, step: int, counts: Sequence[int]) -> None:
        """Backward passes, in other numbers on each rank: those of ``counts`` in turn, beginning with this step's."""

        def passes(rank: int) -> int:
            return counts[(step + rank) % len(counts)]

        divisor = hc.size() if self.op == hc.Average else 1
        for part in range(passes(hc.rank())):
            loss(self.model, 100 * part + step).backward()
        for rank in range(hc.size()):
            for part in range(passes(rank)):
                (loss(self.reference, 100 * part + step, rank) / divisor).backward()

    def set_by_hand(self, step: int, in_place: bool = False) -> None:
        """Gradients that differ between ranks, set without a backward pass."""
        ranks = range(hc.size())
        everywhere = sum(float(rank + step) for rank in ranks)
        mean = everywhere if self.op == hc.Sum else everywhere / hc.size()
        for model, value in ((self.model, float(hc.rank() + step)), (self.reference, mean)):
            for parameter in model.parameters():
                if in_place and parameter.grad is not None:
                    parameter.grad.fill_(value)
                else:
                    parameter.grad = torch.full_like(parameter, value)

    def do(self, words: str, step: int) -> None:
        """Words of :data:`WORDS`, some with a value behind a colon."""
        for word in words.split():
            name, _, value = word.partition(":")
            WORDS[name](self, step, value)

    def play(self, *steps: str) -> None:
        """Takes steps, whose weights are then those of one process."""
        for step, words in enumerate(steps):
            self.do(words, step)
        self.check()

    def step(self) -> None:
        self.optimizer.step()
        self.bare.step()

    def skip_step(self) -> None:
        with self.optimizer.skip_synchronize():
            self.optimizer.step()
        self.bare.step()

    def clear(self, how: str) -> None:
        for model, optimizer in self.both:
            CLEAR[how](model, optimizer)

    def clip(self, norm: float) -> None:
        hc.clip_grad_norm_(self.model.parameters(), norm)
        nn.utils.clip_grad_norm_(self.reference.parameters(), norm)

    def load(self) -> None:
        self.optimizer.load_state_dict(self.optimizer.state_dict())

    def check(self, tolerance: float = 1e-5) -> None:
        assert difference(self.model, self.reference) < tolerance
        same_everywhere(self.model)


WORDS: dict[str, Callable[[Pair, int, str], Any]] = {
    "backward": lambda pair, step, more: pair.backward(step + int(more or 0)),
    "uneven": lambda pair, step, counts: pair.uneven_backward(step, [int(count) for count in counts]),
    "hand": lambda pair, step, way: pair.set_by_hand(step, way == "in-place"),
    "sync": lambda pair, step, _: pair.optimizer.synchronize(),
    "clip": lambda pair, step, norm: pair.clip(float(norm)),
    "clear": lambda pair, step, how: pair.clear(how or "optimizer"),
    "load": lambda pair, step, _: pair.load(),
    "step": lambda pair, step, _: pair.step(),
    "skip": lambda pair, step, _: pair.skip_step(),
}
CLEAR: dict[str, Callable[[nn.Module, Any], Any]] = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer-zeros": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model": lambda model, optimizer: model.zero_grad(),
    "model-zeros": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "hand": lambda model, optimizer: [setattr(one, "grad", None) for one in model.parameters()],
    "hand-zeros": lambda model, optimizer: [
        setattr(one, "grad", torch.zeros_like(one)) for one in model.parameters()
    ],
    "never": lambda model, optimizer: None,
}


# ---------------------------------------------------------------------------------------------------- skipped steps


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("hand", ["hand", "hand:in-place"])
def test_gradients_set_by_hand(op: str, hand: str) -> None:
    turns = f"{hand} step", f"{hand} sync", f"{hand} sync skip", f"{hand} sync skip"
    Pair(OPERATIONS[op]).play(*turns * 2)


@several
@pytest.mark.parametrize("way", ["replaced", "in place", "dropped"])
def test_a_reduced_gradient_changed_on_one_rank_only_leaves_ranks_equal(way: str) -> None:
    model = chain(3)
    optimizer = wrap(model)
    for step in range(4):
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.synchronize()
        if hc.rank() == 0:
            weight = model[1][0].weight
            if way == "replaced":
                weight.grad = torch.ones_like(weight)
            elif way == "in place":
                weight.grad.mul_(2.0)
            else:
                weight.grad = None
        optimizer.step()
    same_everywhere(model)


@pytest.mark.parametrize("op", OPERATIONS)
def test_gradients_that_all_ranks_change_after_synchronize_are_not_reduced_again(op: str) -> None:
    pair = Pair(OPERATIONS[op])
    for step in range(4):
        pair.do("clear backward sync", step)
        for model, _ in pair.both:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pair.step()
        if hc.size() > 1:
            assert pair.optimizer.reduction_stats.steps == step + 1
    pair.check()


def test_a_second_synchronize_and_a_second_step() -> None:
    """Of a sum, which stock Horovod multiplies by the number of ranks, a second step is an error."""
    again = "clear backward sync sync skip skip"
    Pair(hc.Sum).play(*[again] * 4)
    Pair().play(*[f"{again} step"] * 4)


@several
def test_an_unreduced_gradient_within_skip_synchronize_is_an_error() -> None:
    model = chain(3)
    optimizer = wrap(model)
    for step in range(3):
        loss(model, step).backward()
        if step:
            optimizer.synchronize()
            loss(model, step).backward()
        with pytest.raises(RuntimeError, match="not reduced"), optimizer.skip_synchronize():
            optimizer.step()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()
    same_everywhere(model)


# ---------------------------------------------------------------------------------------------------- scalers


@pytest.mark.parametrize("name", ["fp32", "bf16"])
@pytest.mark.parametrize("unscale", ["always", "where it skips"])
def test_precision_after_a_step_that_is_left_out(name: str, unscale: str) -> None:
    pair = Pair()
    precision = hc.Precision(name, "cpu")
    for step in range(5):
        pair.model.zero_grad()
        pair.reference.zero_grad()
        precision.backward(loss(pair.model, step), pair.optimizer)
        loss_of_all(pair.reference, step).backward()
        if step % 2 or unscale == "always":
            precision.unscale(pair.optimizer)
        if step % 2 == 0:
            precision.step(pair.optimizer)
            pair.bare.step()
    pair.check()


@several
def test_a_backward_pass_between_unscale_and_step_is_an_error() -> None:
    model = chain(3)
    optimizer, scaler = wrap(model), hc.GradScaler("cpu", init_scale=8.0)
    for step in range(2):
        scaler.scale(loss(model, step)).backward()
        scaler.unscale_(optimizer)
        scaler.scale(loss(model, step)).backward()
        with pytest.raises(RuntimeError, match="not reduced"):
            scaler.step(optimizer)
        optimizer.synchronize()
        optimizer.zero_grad()
        scaler.update()


@several
def test_torchs_scaler_does_not_decide_on_gradients_that_have_come_since() -> None:
    model = chain(3)
    optimizer, scaler = wrap(model), torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(loss(model, 0)).backward()
    optimizer.synchronize()
    model.zero_grad()
    scaler.scale(loss(model, 1)).backward()
    with pytest.raises(RuntimeError, match="before optimizer.synchronize"):
        scaler.step(optimizer)


def test_unscaling_twice_is_torchs_error() -> None:
    model = chain(2)
    optimizer, scaler = wrap(model), hc.GradScaler("cpu", init_scale=8.0)
    scaler.scale(loss(model, 0)).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    same_everywhere(model)


def test_a_scaler_steps_one_optimizer_while_another_accumulates() -> None:
    pairs = [Pair(), Pair()]
    scaler = hc.GradScaler("cpu", init_scale=8.0)
    for step in range(6):
        for place, pair in enumerate(pairs):
            scaler.scale(loss(pair.model, step + place)).backward()
            loss_of_all(pair.reference, step + place).backward()
        turn = pairs[step % 2]
        scaler.step(turn.optimizer)
        turn.bare.step()
        for _, optimizer in turn.both:
            optimizer.zero_grad()
        scaler.update()
    for pair in pairs:
        pair.check()


# ---------------------------------------------------------------------------------------------------- dropped gradients


@several
@pytest.mark.parametrize("drop", ["model", "hand"])
@pytest.mark.parametrize("again", [False, True], ids=["before step", "before another pass"])
@pytest.mark.parametrize("op", OPERATIONS)
def test_gradients_dropped_whichever_buckets_had_left(drop: str, again: bool, op: str) -> None:
    """Ranks run different numbers of passes, so that at each drop other buckets have left on each of them; before another pass, to
    which these must be equal, the same numbers."""
    passes = ["backward", "backward backward:100"] if again else ["uneven:121"] * 2
    drops = f"clear:{drop} {'backward:50' if again else ''}"
    Pair(OPERATIONS[op]).play(
        *(f"{passes[step % 2]} {drops if step % 3 == 2 else ''} step clear" for step in range(8))
    )


@several
def test_gradients_dropped_after_other_numbers_of_passes_and_before_another_pass() -> None:
    """Dropped by hand, those that had left on some ranks only are an error."""
    Pair().play(*["uneven:12 sync clear backward:50 step clear"] * 4)
    pair = Pair()
    pair.play(*["backward backward:100 step clear"] * 3)
    pair.do("uneven:12 clear:hand backward:50", 3)
    with pytest.raises(RuntimeError, match=r"synchronize\(\) and then optimizer\.zero_grad\(\)"):
        pair.optimizer.step()


@pytest.mark.parametrize("drop", ["model", "hand"])
@pytest.mark.parametrize("count", [2, 3])
def test_optimizers_in_turn_drop_the_others_gradients(drop: str, count: int) -> None:
    pairs = [Pair() for _ in range(count)]
    for step in range(3 * count):
        for place, pair in enumerate(pairs):
            pair.do(f"backward {'backward:100' * (step % 2)}", step + place)
        turn = pairs[step % count]
        for pair in pairs:
            if pair is not turn:
                pair.clear(drop)
        turn.do("step clear", step)
    for pair in pairs:
        pair.check()


@several
@pytest.mark.parametrize("in_place", [False, True])
def test_a_late_part_changed_by_hand(in_place: bool) -> None:
    """More passes than before: what ``grad`` shows is the last part only."""
    pair = Pair()
    pair.play(*["backward step clear"] * 3)
    pair.do("backward backward:10", 3)
    if in_place:
        with pytest.raises(RuntimeError, match="is being added up"):
            nn.utils.clip_grad_norm_(pair.model.parameters(), 1e-3)
    else:
        pair.clear("hand")
    pair.do("step clear", 3)
    pair.check()


@several
def test_a_gradient_set_by_hand_before_a_late_part() -> None:
    """A rank does not use the parameter, whose bucket leaves empty there; then it sets a gradient, and a pass adds to it."""
    pair = Pair()
    for step in range(5):
        for _, optimizer in pair.both:
            optimizer.zero_grad()
        used = 3 if hc.rank() == 0 else 2
        loss(pair.model[:used], step).backward()
        for rank in range(hc.size()):
            (loss(pair.reference[: 3 if rank == 0 else 2], step, rank) / hc.size()).backward()
        if step > 2:
            for model, ranks in ((pair.model, 1), (pair.reference, (hc.size() - 1) / hc.size())):
                weight = model[2][0].weight
                if hc.rank() or model is pair.reference:
                    mine = torch.full_like(weight, ranks)
                    weight.grad = mine if weight.grad is None else weight.grad + mine
            if hc.rank():
                loss(pair.model, step + 10).backward()
            for rank in range(1, hc.size()):
                (loss(pair.reference, step + 10, rank) / hc.size()).backward()
        pair.step()
    pair.check()


@several
def test_a_model_converted_while_another_optimizers_gradients_accumulate() -> None:
    pairs = [Pair(), Pair()]
    for step in range(7):
        for place, pair in enumerate(pairs):
            if step == 4:
                pair.model.double()
                pair.reference.double()
            pair.do("backward", step + place)
        pairs[step % 2].do("step clear", step)
    for pair in pairs:
        pair.check()


# ---------------------------------------------------------------------------------------------------- clearing and loading


@several
@pytest.mark.parametrize("how", ["step", "clip", "some parameters", "one rank", "no backward pass"])
def test_a_sum_that_is_not_cleared_is_an_error_on_every_rank(how: str) -> None:
    """More is added to it, or it would be reduced again with what is new. Stock Horovod multiplies it by the number of ranks."""
    pair = Pair(hc.Sum)
    for step in range(3):
        pair.do(f"clear backward {'clip:0.3' if how == 'clip' else ''} step", step)
        torch.autograd.grad(loss(pair.model, step), list(pair.model.parameters()))  # adds nothing
    pair.check()
    if how == "some parameters":
        loss(pair.model[:1], 3).backward()
    elif how != "no backward pass" and (how != "one rank" or hc.rank() == 1):
        loss(pair.model, 3).backward()
    with pytest.raises(RuntimeError, match="is a sum over the ranks already"):
        pair.optimizer.step()
    pair.do("clear backward step", 4)
    pair.check()


class OwnSignatures(torch.optim.SGD):
    """Methods with other arguments and defaults than those of PyTorch."""

    def zero_grad(self, names: Any = (), *, set_to_none: bool = False) -> None:
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> str:
        super().load_state_dict(state_dict)
        return "strict" if strict else "not strict"

    def step(self, closure: Any = None, *, factor: float = 1.0) -> Any:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.data.sub_(0.1 * factor * parameter.grad)
        return factor


@pytest.mark.parametrize("stage", [0, 1])
def test_arguments_and_values_of_the_wrapped_optimizers_methods(stage: int) -> None:
    model = chain(2)
    optimizer = wrap(model, OwnSignatures(model.parameters(), lr=0.1), shard=stage, elementwise=True)
    loss(model, 0).backward()
    assert optimizer.step(factor=2.0) == 2.0
    optimizer.zero_grad(["any"])
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())
    optimizer.zero_grad(set_to_none=True)
    assert all(parameter.grad is None for parameter in model.parameters())
    if stage == 0:
        assert optimizer.load_state_dict(optimizer.state_dict(), strict=False) == "not strict"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("then", ["step", "zero_grad"])
def test_a_state_loaded_between_backward_and_step(stage: int, then: str) -> None:
    if hc.size() == 1 and stage > 1:
        pytest.skip("needs ranks")
    pair = Pair(shard=stage)
    loads = ["load", "sync load", "load"]
    if then == "zero_grad":
        loads = [
            f"{load} clear{':optimizer-zeros' * (place > 0)} backward:10" for place, load in enumerate(loads)
        ]
    for step, load in enumerate(["", "", *loads]):
        pair.do(f"backward {load} step clear", step)
    with pair.optimizer.gathered_parameters():
        pair.check()


@several
def test_a_state_loaded_on_one_rank() -> None:
    load = "load" if hc.rank() == 0 else ""
    Pair().play(*[f"backward {load} step clear"] * 4)


@pytest.mark.parametrize("gradients", [False, True])
def test_clearing_after_a_group_of_parameters_that_have_gradients(gradients: bool) -> None:
    pair = Pair(make=lambda model: torch.optim.SGD(model[1:].parameters(), lr=0.1))
    for step in range(5):
        pair.do("backward step", step)
        if step == 2:
            for model, optimizer in pair.both:
                assert model[0][0].weight.grad is not None
                optimizer.add_param_group({"params": list(model[0].parameters())})
        for model, optimizer in pair.both:
            optimizer.zero_grad()
            if step < 2 and not gradients:
                model[0].zero_grad()
    pair.check()


# ---------------------------------------------------------------------------------------------------- closures


class SAM(torch.optim.SGD):
    """Sharpness-aware minimization (Foret et al., 2021): earlier gradients move the weights, the closure's step them."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        before = [parameter.clone() for group in self.param_groups for parameter in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=0.5)
        self.zero_grad()
        with torch.enable_grad():
            value = closure()
        for parameter, kept in zip(parameters, before):
            parameter.copy_(kept)
        super().step()
        return value


@pytest.mark.parametrize("op", OPERATIONS)
def test_a_step_with_a_closure_after_a_backward_pass(op: str) -> None:
    pair = Pair(OPERATIONS[op], make=lambda model: SAM(model.parameters(), lr=0.1))
    for step in range(4):
        pair.backward(step)
        if step == 2:
            pair.optimizer.synchronize()

        def closure(step: int = step) -> torch.Tensor:
            value = loss(pair.model, step)
            value.backward()
            return value

        def reference_closure(step: int = step) -> torch.Tensor:
            value = loss_of_all(pair.reference, step, pair.op)
            value.backward()
            return value

        pair.optimizer.step(closure)
        pair.bare.step(reference_closure)
        pair.clear("optimizer")
    pair.check()


@several
@pytest.mark.parametrize(
    "returned", ["tuple", "dict", "none", "text", "tensor", "float", "one element", "none on one rank"]
)
def test_what_a_closure_returns(returned: str) -> None:
    model = chain(2)
    optimizer = wrap(model)

    def closure() -> Any:
        optimizer.zero_grad()
        output = model(batch(0, hc.rank()))
        value = output.square().mean()
        value.backward()
        own = torch.tensor(float(hc.rank()))
        return {
            "tuple": (value, output),
            "dict": {"loss": value},
            "none": None,
            "text": "done",
            "tensor": own,
            "float": float(hc.rank()),
            "one element": own.view(1),
            "none on one rank": own if hc.rank() else None,
        }[returned]

    result = optimizer.step(closure)
    mean = (hc.size() - 1) / 2
    if returned in ("tensor", "one element"):
        assert torch.equal(result, torch.tensor(mean).view(result.shape))
        assert result.dim() == (returned == "one element")
    elif returned == "float":
        assert result == mean and isinstance(result, float)
    elif returned == "tuple":
        assert isinstance(result[0], torch.Tensor) and result[0].requires_grad
    elif returned == "none on one rank":
        assert result is None if hc.rank() == 0 else float(result) == hc.rank()
    else:
        assert result == {"none": None, "text": "done"}.get(returned, result)
    same_everywhere(model)


def test_gradients_without_any_backward_pass_in_a_closure() -> None:
    pair = Pair()
    for step in range(4):
        pair.backward(step)
        pair.optimizer.step(lambda: torch.ones(()))
        pair.bare.step()
        pair.clear("optimizer")
    pair.check()


# ---------------------------------------------------------------------------------------------------- schedules, default dtypes


@pytest.mark.parametrize("stepped", [True, False])
def test_a_schedule_made_before_wrapping_knows_of_steps(stepped: bool) -> None:
    model = chain(1)
    bare = sgd(model)
    schedule = torch.optim.lr_scheduler.StepLR(bare, 1, gamma=0.5)
    optimizer = wrap(model, bare)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(2):
            loss(model, step).backward()
            if stepped:
                optimizer.step()
            schedule.step()
    assert any("lr_scheduler.step()" in str(warning.message) for warning in caught) == (not stepped)
    assert optimizer.param_groups[0]["lr"] == 0.025
