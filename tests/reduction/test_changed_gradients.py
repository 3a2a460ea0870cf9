"""Tests of what code does to gradients between ``backward()`` and ``synchronize()``: it is right, or an error on every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from one_process import SMALL, chain, difference, loss, loss_of_all, same_everywhere, sgd, train, wrap
from torch import nn

import hvd_ckpt as hc

pytestmark = pytest.mark.ranks(gloo=(1, 2))

several = pytest.mark.ranks(gloo=(2,), mpi=(4,))
ONE_BUCKET = 25.0

IN_PLACE: dict[str, Callable[[nn.Module], Any]] = {
    "torch's clipping": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
    "torch's clipping by value": lambda model: nn.utils.clip_grad_value_(model.parameters(), 1e-4),
    "one gradient": lambda model: model[1][0].weight.grad.mul_(0.5),
    "noise": lambda model: [one.grad.add_(torch.randn_like(one)) for one in model.parameters()],
    "zeros": lambda model: model.zero_grad(set_to_none=False),
    "an alias": lambda model: model[1][0].bias.grad.detach().view(-1)[:1].fill_(3.0),
}
CHANGED = r"gradient of parameter '[\d.]+(weight|bias)' (was changed in place|is being added up|is split).*synchronize\(\)"


@contextlib.contextmanager
def raises_on_every_rank(message: str) -> Iterator[None]:
    with pytest.raises(RuntimeError, match=message):
        yield
    assert hc.allreduce(torch.ones(1), op=hc.Sum, name="all have raised") == hc.size()


@pytest.mark.parametrize(
    ("act", "bucket_cap_mb", "before"),
    [
        *((act, SMALL, 2) for act in IN_PLACE),
        *(("torch's clipping", *when) for when in ((ONE_BUCKET, 2), (SMALL, 0), (ONE_BUCKET, 0))),
    ],
)
@pytest.mark.parametrize("shard", [0, 1, 2, 3])
def test_changes_in_place_are_errors(act: str, bucket_cap_mb: float, shard: int, before: int) -> None:
    model = chain()
    optimizer = wrap(model, bucket_cap_mb=bucket_cap_mb, shard=shard)
    train(model, optimizer, range(before))
    optimizer.zero_grad()
    loss(model, before).backward()
    alone = hc.size() == 1
    with contextlib.nullcontext() if alone and shard < 2 else raises_on_every_rank(CHANGED):
        IN_PLACE[act](model)
        optimizer.step()
    with contextlib.suppress(
        RuntimeError
    ):  # where the act was an error, some gradients may have been changed before
        optimizer.synchronize()
    train(model, optimizer, range(before + 1, before + 3))
    with optimizer.gathered_parameters():
        same_everywhere(model)


@several
@pytest.mark.parametrize("shard", [0, 1])
@pytest.mark.parametrize("before", [0, 2])
def test_a_change_in_place_on_one_rank_is_an_error_on_all(shard: int, before: int) -> None:
    model = chain()
    optimizer = wrap(model, bucket_cap_mb=ONE_BUCKET, shard=shard)
    train(model, optimizer, range(before))
    optimizer.zero_grad()
    loss(model, before).backward()
    if hc.rank() == hc.size() - 1:
        model[1][0].weight.grad.mul_(0.5)
    with raises_on_every_rank(r"'1\.0\.weight' was changed in place.*clip_grad_norm_.*synchronize\(\)"):
        optimizer.step()


@several
def test_a_change_in_place_of_a_group_that_waits_is_an_error() -> None:
    """At stage 2, in a group that holds back for a parameter without a gradient."""
    model = nn.ModuleDict({"used": nn.Linear(8, 8), "unused": nn.Linear(8, 8)})
    optimizer = wrap(model, bucket_cap_mb=ONE_BUCKET, shard=2)
    model["used"](torch.ones(2, 8)).sum().backward()
    with raises_on_every_rank(r"'used\.\w+' was changed in place"):
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()


@pytest.mark.parametrize("of", ["an earlier replica", "the last replica", "all"])
@pytest.mark.parametrize("before", [0, 2])
def test_a_change_in_place_with_replicas_is_an_error(of: str, before: int) -> None:
    model = chain()
    optimizer = wrap(model, bucket_cap_mb=ONE_BUCKET, replicas=8)
    for step in range(before + 1):
        optimizer.zero_grad()
        with raises_on_every_rank(CHANGED) if step == before else contextlib.nullcontext():
            for place, replica in enumerate(optimizer.local_replicas()):
                with replica:
                    loss(model, step).backward()
                    of_this = {"an earlier replica": 0, "the last replica": 8 // hc.size() - 1}.get(of)
                    if step == before and place == of_this:
                        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            if step == before and of == "all":
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()


@pytest.mark.parametrize("shard", [0, 1])
def test_gradients_are_read_as_long_as_nothing_of_them_is_in_flight(shard: int) -> None:
    model, alone = chain(), chain()
    optimizer = wrap(model, shard=shard)
    for step in range(3):
        optimizer.zero_grad()
        alone.zero_grad()
        loss(model, step).backward()
        alone.load_state_dict(model.state_dict())
        loss(alone, step).backward()
        absent = 0
        for parameter, own in zip(model.parameters(), alone.parameters()):
            assert parameter.grad is not None and parameter.grad.shape == parameter.shape
            if type(parameter.grad) is torch.Tensor:
                assert torch.equal(parameter.grad, own.grad)  # type: ignore[arg-type]
                continue
            absent += 1
            for read in (torch.Tensor.clone, torch.Tensor.norm, torch.Tensor.tolist, lambda one: one + 1):
                with pytest.raises(
                    RuntimeError, match=r"gradient of parameter '.*optimizer\.synchronize\(\)"
                ):
                    read(parameter.grad)
        assert absent == 0 if step == 0 or hc.size() == 1 else absent > 3
        optimizer.synchronize()
        alone.zero_grad()
        loss_of_all(alone, step).backward()
        for parameter, mean in zip(model.parameters(), alone.parameters()):
            assert torch.allclose(parameter.grad, mean.grad, atol=1e-6)  # type: ignore[arg-type]
        with optimizer.skip_synchronize():
            optimizer.step()


@several
@pytest.mark.parametrize("shard", [0, 1, 2, 3])
def test_what_a_later_pass_adds_is_not_read_for_the_whole(shard: int) -> None:
    """The pass uses a part of the model, so what it adds has not left yet at any stage."""
    model, reference = chain(), chain()
    optimizer = wrap(
        model,
        bucket_cap_mb=ONE_BUCKET if shard > 1 else SMALL,
        shard=shard,
        **({"units": []} if shard == 3 else {}),
    )
    plain = sgd(reference)
    for step in range(3):
        optimizer.zero_grad()
        plain.zero_grad()
        loss(model, step).backward()
        loss_of_all(reference, step).backward()
        if step == 2:
            for part in (3, 4):
                loss(model[:2], step + part).backward()
                loss_of_all(reference[:2], step + part).backward()
                weight = model[1][0].weight
                assert weight.grad.shape == (8, 8)
                with pytest.raises(RuntimeError, match=r"'1\.0\.weight' is .*synchronize\(\)"):
                    weight.grad.norm()
        optimizer.step()
        plain.step()
    with optimizer.gathered_parameters():
        assert difference(model, reference) < 1e-5
    optimizer.zero_grad()
    for _ in range(3):
        loss(model, 0).backward()
    loss(model[:2], 1).backward()
    model[1][0].weight.grad = torch.ones(8, 8)
    with raises_on_every_rank(r"'1\.0\.weight' was replaced.*synchronize\(\)"):
        optimizer.step()


@several
def test_a_late_part_is_not_read_for_the_whole() -> None:
    model, reference = chain(), chain()
    optimizer, plain = wrap(model), torch.optim.SGD(reference.parameters(), lr=0.1)
    train(model, optimizer, range(2))
    for step in range(2):
        plain.zero_grad()
        loss_of_all(reference, step).backward()
        plain.step()
    optimizer.zero_grad()
    plain.zero_grad()
    for part in range(3):
        loss(model, part).backward()
        loss_of_all(reference, part).backward()
        asked = torch.autograd.grad(loss(model, part), model[3][0].weight)[0]
        assert asked.shape == (8, 8)
        with pytest.raises(RuntimeError, match=r"'3\.0\.weight' is being added up"):
            model[3][0].weight.grad.norm()
    optimizer.step()
    plain.step()
    assert difference(model, reference) < 1e-5
    same_everywhere(model)


@pytest.mark.parametrize("bucket_cap_mb", [SMALL, ONE_BUCKET])
@pytest.mark.parametrize("shard", [0, 1])
@pytest.mark.parametrize("steps", [1, 3])
def test_gradients_replaced_before_they_leave_are_taken(bucket_cap_mb: float, shard: int, steps: int) -> None:
    """A rule that is not linear, applied to each rank's gradients, as gradient surgery does."""
    model, reference = chain(), chain()
    optimizer, plain = (
        wrap(model, bucket_cap_mb=bucket_cap_mb, shard=shard),
        torch.optim.SGD(reference.parameters(), lr=0.1),
    )
    for step in range(steps):
        model.zero_grad()
        loss(model, step).backward()
        means = [torch.zeros_like(one) for one in reference.parameters()]
        for rank in range(hc.size()):
            reference.zero_grad()
            loss(reference, step, rank).backward()
            for mean, one in zip(means, reference.parameters()):
                mean += one.grad / one.grad.norm() / hc.size()  # type: ignore[union-attr]
        for mean, one in zip(means, reference.parameters()):
            one.grad = mean
        taken = step == 0 or bucket_cap_mb == ONE_BUCKET or hc.size() == 1
        with contextlib.nullcontext() if taken else raises_on_every_rank(r"synchronize\(\)"):
            for one in model.parameters():
                one.grad = one.grad / one.grad.norm()  # type: ignore[union-attr]
        if not taken:
            return
        optimizer.step()
        plain.step()
    assert difference(model, reference) < 1e-5


@several
@pytest.mark.parametrize("ranks", ["all ranks", "one rank"])
@pytest.mark.parametrize("again", [False, True], ids=["before step", "before another pass"])
def test_a_gradient_replaced_in_flight_is_an_error(ranks: str, again: bool) -> None:
    model = chain()
    optimizer = wrap(model)
    train(model, optimizer, range(2))
    optimizer.zero_grad()
    loss(model, 2).backward()
    if ranks == "all ranks" or hc.rank() == 0:
        model[3][0].weight.grad = torch.ones(8, 8)
    if again:
        loss(model, 3).backward()
    with raises_on_every_rank(r"'3\.0\.weight' was replaced.*synchronize\(\)"):
        optimizer.step()
    train(model, optimizer, range(2))
    same_everywhere(model)


@several
@pytest.mark.parametrize("in_place", [False, True])
def test_hooks_that_change_gradients(in_place: bool) -> None:
    """Registered before the optimizer was made, they change what is reduced; later ones change what has been counted."""

    def halve(parameter: torch.Tensor) -> None:
        gradient: Any = parameter.grad
        parameter.grad = gradient.mul_(0.5) if in_place else gradient * 0.5

    model, reference = chain(), chain()
    for one in (*model.parameters(), *reference.parameters()):
        one.register_post_accumulate_grad_hook(halve)
    optimizer, plain = wrap(model), torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        plain.zero_grad()
        loss(model, step).backward()
        loss_of_all(reference, step).backward()
        optimizer.step()
        plain.step()
    assert difference(model, reference) < 1e-5
    for cap in (SMALL, ONE_BUCKET):
        model = chain()
        optimizer = wrap(model, bucket_cap_mb=cap)
        train(model, optimizer, range(2))
        handles = [one.register_post_accumulate_grad_hook(halve) for one in model.parameters()]
        optimizer.zero_grad()
        if in_place or cap == SMALL:
            with raises_on_every_rank(r"synchronize\(\)"):
                loss(model, 2).backward()
                optimizer.step()
        for handle in handles:
            handle.remove()


@several
@pytest.mark.parametrize("shard", [0, 1, 2, 3])
def test_hooks_do_not_take_a_part_for_the_whole(shard: int) -> None:
    """As in PyTorch, a hook finds the sum of a step's passes; where an earlier part has left, it is refused."""

    def normalize(parameter: torch.Tensor) -> None:
        gradient: Any = parameter.grad
        parameter.grad = gradient / (1 + gradient.norm())

    model, reference = chain(), chain()
    for one in (*model.parameters(), *reference.parameters()):
        one.register_post_accumulate_grad_hook(normalize)
    optimizer = wrap(model, shard=shard, backward_passes_per_step=2)
    for step in range(3):
        optimizer.zero_grad()
        means = [torch.zeros_like(one) for one in reference.parameters()]
        for part in range(2):
            loss(model, step + part).backward()
        for rank in range(hc.size()):
            reference.zero_grad()
            for part in range(2):
                loss(reference, step + part, rank).backward()
            for mean, one in zip(means, reference.parameters()):
                mean += one.grad / hc.size()  # type: ignore[operator]
        optimizer.step()
        with torch.no_grad():
            for mean, one in zip(means, reference.parameters()):
                one -= 0.1 * mean
    with optimizer.gathered_parameters():
        assert difference(model, reference) < 1e-5
    optimizer.zero_grad()
    loss(model, 3).backward()
    loss(model, 4).backward()
    with raises_on_every_rank(r"gradient of parameter '.*synchronize\(\)"):
        loss(model, 5).backward()


@pytest.mark.parametrize("bucket_cap_mb", [SMALL, ONE_BUCKET])
@pytest.mark.parametrize("shard", [0, 1])
def test_gradients_that_code_keeps_stay_as_they_are(bucket_cap_mb: float, shard: int) -> None:
    model = chain()
    optimizer = wrap(model, bucket_cap_mb=bucket_cap_mb, shard=shard)
    kept, copies = [], []
    for step in range(3):
        optimizer.zero_grad()
        for part in range(2):
            loss(model, 2 * step + part).backward()
            if part == 0:  # one pass per task, as for gradient surgery
                kept += [parameter.grad for parameter in model.parameters()]
                copies += [parameter.grad.clone() for parameter in model.parameters()]
                model.zero_grad()
        optimizer.step()
        kept += [parameter.grad for parameter in model.parameters()]
        copies += [parameter.grad.clone() for parameter in model.parameters()]
    assert all(map(torch.equal, kept, copies))


@pytest.mark.parametrize("bucket_cap_mb", [SMALL, ONE_BUCKET])
@pytest.mark.parametrize("shard", [0, 1])
def test_gradients_may_change_places(bucket_cap_mb: float, shard: int) -> None:
    first, second = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    model = nn.ParameterList([first, second])
    optimizer = wrap(model, bucket_cap_mb=bucket_cap_mb, shard=shard)
    mean = (1 + hc.size()) / 2
    for _ in range(3):
        optimizer.zero_grad(set_to_none=False)
        for part in range(2):
            ((first + 10 * second).sum() * (part + 1) * (1 + hc.rank())).backward()
            if part == 0:
                first.grad, second.grad = second.grad, first.grad
        optimizer.synchronize()
        assert torch.equal(first.grad, torch.full((3,), 12 * mean))
        assert torch.equal(second.grad, torch.full((3,), 21 * mean))
        with optimizer.skip_synchronize():
            optimizer.step()


@pytest.mark.parametrize("bucket_cap_mb", [SMALL, ONE_BUCKET])
@pytest.mark.parametrize("shard", [0, 1, 2, 3])
def test_parameters_may_be_unfrozen_between_passes(bucket_cap_mb: float, shard: int) -> None:
    model, whole = chain(), chain()
    for one in (model, whole):
        one[2].requires_grad_(False)
    optimizer, plain = wrap(model, bucket_cap_mb=bucket_cap_mb, shard=shard), sgd(whole)
    for step in range(3):
        for one in (model, whole):
            one.zero_grad()  # the optimizer's would look for parameters that are not frozen any more
        for part in range(3):
            loss(model, 3 * step + part).backward()
            loss_of_all(whole, 3 * step + part).backward()
            for one in (model, whole) if step else ():
                one[2].requires_grad_(True)
        optimizer.step()
        plain.step()
    with optimizer.gathered_parameters():
        assert difference(model, whole) < 1e-6
