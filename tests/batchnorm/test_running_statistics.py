"""Running statistics after training with recomputation are those of training without, bit for bit."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from same import assert_same
from torch import nn

from hvd_ckpt.batchnorm import SyncBatchNorm
from hvd_ckpt.recompute import (
    CheckpointFunction,
    CheckpointSequential,
    checkpoint,
    is_recomputing,
)
from hvd_ckpt.runtime import init

VARIANTS = pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])


@pytest.fixture(autouse=True, scope="module")
def _horovod() -> None:
    init()


class OwnForward(nn.BatchNorm2d):
    """Updates its statistics without counting batches."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.batch_norm(
            input, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.2, self.eps
        )


KINDS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "BatchNorm1d of vectors": (lambda: nn.BatchNorm1d(4), 0),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(4), 2),
    "cumulative average": (lambda: nn.BatchNorm2d(4, momentum=None), 2),
    "SyncBatchNorm, cumulative average": (lambda: SyncBatchNorm(4, momentum=None), 2),
    "without statistics": (lambda: nn.BatchNorm2d(4, track_running_stats=False), 2),
    "SyncBatchNorm without statistics": (lambda: SyncBatchNorm(4, track_running_stats=False), 2),
    "lazy": (nn.LazyBatchNorm2d, 2),
    "subclass with a forward of its own": (lambda: OwnForward(4), 2),
    "instance norm": (lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True), 2),
}


class Block(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.scale = nn.Parameter(torch.tensor(1.2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(x * self.scale).sin()
        return out


def outcome(module: nn.Module, *tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    """Gradients, statistics and whatever else is given."""
    return [
        *(None if p.grad is None else p.grad.clone() for p in module.parameters()),
        *(buffer.clone() for buffer in module.buffers()),
        *tensors,
    ]


def batches(dimensions: int, count: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(5)
    return [torch.randn(6, 4, *[3] * dimensions) * 2 + 1 for _ in range(count)]


def train(
    module: nn.Module,
    run: Callable[[torch.Tensor], torch.Tensor],
    dimensions: int,
    backward_passes: int = 2,
    raw_data: bool = False,
    **autocast: Any,
) -> list[torch.Tensor | None]:
    for x in batches(dimensions):
        x.requires_grad_(not raw_data)
        with torch.autocast("cpu", **(autocast or {"enabled": False})):
            y = run(x)
        for index in range(backward_passes):
            y.float().square().sum().backward(retain_graph=index < backward_passes - 1)
    return outcome(module, x.grad)


@VARIANTS
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(use_reentrant: bool, kind: str) -> None:
    make, dimensions = KINDS[kind]
    plain = Block(make())
    expected = train(plain, plain, dimensions)
    block = Block(make())
    buffers = dict(block.norm._buffers)
    assert_same(
        expected, train(block, lambda x: checkpoint(block, x, use_reentrant=use_reentrant), dimensions)
    )
    # The buffers themselves are the module's own again, not the copies.
    assert all(block.norm._buffers[name] is buffer for name, buffer in buffers.items())


@VARIANTS
def test_under_autocast(use_reentrant: bool) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(4, 4, 2), nn.BatchNorm2d(4), SyncBatchNorm(4), nn.ReLU())

    plain, model = make(), make()
    expected = train(plain, plain, 2, dtype=torch.bfloat16)
    run = functools.partial(checkpoint, model, use_reentrant=use_reentrant)
    assert_same(expected, train(model, run, 2, dtype=torch.bfloat16))


class Trainer:
    def __init__(self, model: nn.Module) -> None:
        self.models = {"main": model}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.models["main"](x)
        return out


GLOBAL: dict[str, nn.Module] = {}


def through_a_global(x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = GLOBAL["block"](x)
    return out


class Named:
    pass


HOLDER = Named()


def through_a_global_object(x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = HOLDER.block(x)  # type: ignore[attr-defined]
    return out


def ways(block: nn.Module) -> dict[str, Callable[[torch.Tensor, bool], torch.Tensor]]:
    GLOBAL["block"] = block
    HOLDER.block = block  # type: ignore[attr-defined]
    layers = [block]

    def run(function: Callable[..., Any], *more: Any) -> Callable[[torch.Tensor, bool], torch.Tensor]:
        return lambda x, reentrant: checkpoint(function, x, *more, use_reentrant=reentrant)

    def decorated() -> Callable[[torch.Tensor], torch.Tensor]:
        @functools.wraps(block.forward)
        def wrapper(x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = block(x)
            return out

        return wrapper

    return {
        "method": run(block.forward),
        "closure": run(lambda x: block(x)),
        "decorated": run(decorated()),
        "list in a closure": run(lambda x: layers[0](x)),
        "default": run(lambda x, m=block: m(x)),
        "partial with a keyword": run(functools.partial(lambda x, m: m(x), m=block)),
        "argument": run(lambda x, m: m(x), block),
        "method of an object": run(Trainer(block).forward),
        "global": run(through_a_global),
        "global object": run(through_a_global_object),
        "another function": run(lambda x: through_a_global(x)),
        "nested function": run(lambda x: (lambda y: block(y))(x)),
        "CheckpointSequential": lambda x, reentrant: CheckpointSequential(
            layers, 1, use_reentrant=reentrant, keep_last=False
        )(x),
        "CheckpointFunction": lambda x, _: CheckpointFunction.apply(block, 1, x, *block.parameters()),
    }


@VARIANTS
@pytest.mark.parametrize("way", list(ways(nn.Identity())))
def test_every_way_to_hold_the_module(use_reentrant: bool, way: str) -> None:
    """Parameters get gradients, too, though the input needs none."""
    plain, block = Block(nn.BatchNorm2d(4)), Block(nn.BatchNorm2d(4))
    expected = train(plain, plain, 2, raw_data=True)
    run = ways(block)[way]
    assert_same(expected, train(block, lambda x: run(x, use_reentrant), 2, raw_data=True))


@VARIANTS
def test_two_forward_passes_before_the_backward_pass(use_reentrant: bool) -> None:
    def run(recompute: bool) -> list[torch.Tensor | None]:
        block = Block(nn.BatchNorm2d(4, momentum=None))
        first, second = batches(2, 2)
        y, z = (
            checkpoint(block, x, use_reentrant=use_reentrant) if recompute else block(x)
            for x in (first, second)
        )
        (y.sum() * 2 + z.square().sum()).backward()
        return outcome(block.norm)  # the scale is used twice: its gradient equals to rounding only

    assert_same(run(False), run(True))


@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("inner", [False, True])
def test_nested(outer: bool, inner: bool) -> None:
    def run(recompute: bool) -> list[torch.Tensor | None]:
        first, second = Block(nn.BatchNorm2d(4)), Block(nn.BatchNorm2d(4))
        both = nn.ModuleList([first, second])

        def outside(x: torch.Tensor) -> torch.Tensor:
            hidden = first(x)
            hidden = checkpoint(second, hidden, use_reentrant=inner) if recompute else second(hidden)
            return hidden.tanh().sin()

        return train(
            both, lambda x: checkpoint(outside, x, use_reentrant=outer) if recompute else outside(x), 2
        )

    assert_same(run(False), run(True))


@VARIANTS
def test_module_used_twice_and_modes_mixed_in_one_region(use_reentrant: bool) -> None:
    def run(recompute: bool) -> list[torch.Tensor | None]:
        norm, frozen = nn.BatchNorm2d(4, affine=False), nn.BatchNorm2d(4, affine=False)
        frozen.running_mean.fill_(0.5)  # type: ignore[union-attr]
        frozen.eval()

        def function(x: torch.Tensor) -> torch.Tensor:
            norm.train()
            y = norm(norm(x * 3 + 1).sin() + 2).exp()
            norm.eval()  # normalizes by what the two uses above have left in the statistics
            y = frozen(norm(y)).sin()
            norm.train()
            return y

        def call(x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = (
                checkpoint(function, x, use_reentrant=use_reentrant) if recompute else function(x)
            )
            return out

        return train(nn.ModuleList([norm, frozen]), call, 2)

    assert_same(run(False), run(True))


@VARIANTS
def test_a_region_that_runs_some_of_its_modules(use_reentrant: bool) -> None:
    def run(recompute: bool) -> list[torch.Tensor | None]:
        blocks = nn.ModuleList(Block(nn.BatchNorm2d(4)) for _ in range(3))

        def call(x: torch.Tensor) -> torch.Tensor:
            for index in (0, 2):
                part = functools.partial(lambda index, x: blocks[index](x), index)
                x = checkpoint(part, x, use_reentrant=use_reentrant) if recompute else part(x)
            return x

        return train(blocks, call, 2)

    assert_same(run(False), run(True))


@VARIANTS
def test_evaluation_mode_and_no_grad_change_nothing(use_reentrant: bool) -> None:
    block = Block(nn.BatchNorm2d(4)).eval()
    before = copy.deepcopy(block.norm.state_dict())
    train(block, lambda x: checkpoint(block, x, use_reentrant=use_reentrant), 2)
    assert all(torch.equal(before[name], value) for name, value in block.norm.state_dict().items())
    plain = Block(nn.BatchNorm2d(4))
    block = copy.deepcopy(plain)
    with torch.no_grad():
        for x in batches(2):
            assert torch.equal(plain(x), checkpoint(block, x, use_reentrant=use_reentrant))
    assert_same(outcome(plain), outcome(block))


@VARIANTS
def test_buffers_come_back_when_the_recomputation_raises(use_reentrant: bool) -> None:
    norm = nn.BatchNorm2d(4)

    def function(x: torch.Tensor) -> torch.Tensor:
        y = norm(x)
        if is_recomputing():
            raise KeyError("broken")
        return y.sin().cos()

    (x,) = batches(2, 1)
    y = checkpoint(function, x.requires_grad_(), use_reentrant=use_reentrant)
    buffers = dict(norm._buffers)
    values = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    with pytest.raises(KeyError, match="broken"):
        y.sum().backward()
    assert all(norm._buffers[name] is buffer for name, buffer in buffers.items())
    assert all(torch.equal(values[name], buffer) for name, buffer in norm.named_buffers())


def test_selective_checkpointing() -> None:
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    def contexts() -> Any:
        return create_selective_checkpoint_contexts([torch.ops.aten.convolution.default])

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))

    plain, model = make(), make()
    expected = train(plain, plain, 2, backward_passes=1)
    run = functools.partial(checkpoint, model, context_fn=contexts)
    assert_same(expected, train(model, run, 2, backward_passes=1))


@pytest.mark.parametrize(("where", "use_reentrant"), [("around", False), ("inside", True)])
def test_compiled(where: str, use_reentrant: bool) -> None:
    plain, block = Block(nn.BatchNorm2d(4)), Block(nn.BatchNorm2d(4))
    expected = train(plain, plain, 2)
    inside = torch.compile(block, backend="eager") if where == "inside" else block
    run: Any = functools.partial(checkpoint, inside, use_reentrant=use_reentrant)
    assert_same(expected, train(block, torch.compile(run, backend="eager") if where == "around" else run, 2))


def test_statistics_loaded_between_two_passes() -> None:
    def run(recompute: bool) -> list[torch.Tensor | None]:
        norm = nn.BatchNorm2d(4, affine=False)

        def function(x: torch.Tensor) -> torch.Tensor:
            y = norm.train()(x)
            z: torch.Tensor = norm.eval()(y).sin()
            return z

        results = []
        for index, x in enumerate(batches(2)):
            norm.running_var.fill_(2.0 + index)  # type: ignore[union-attr]
            x.requires_grad_()
            (checkpoint(function, x) if recompute else function(x)).sum().backward()
            results.append(x.grad)
        return outcome(norm, *results)

    assert_same(run(False), run(True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}])
def test_sync_batch_norm_on_one_rank_is_batch_norm(dtype: torch.dtype, kind: dict[str, Any]) -> None:
    plain, synchronized = nn.BatchNorm2d(4, dtype=dtype, **kind), SyncBatchNorm(4, dtype=dtype, **kind)
    assert_same(
        train(plain, lambda x: plain(x.to(dtype)), 2),
        train(synchronized, lambda x: synchronized(x.to(dtype)), 2),
    )
    (x,) = batches(2, 1)
    assert torch.equal(plain.eval()(x.to(dtype)), synchronized.eval()(x.to(dtype)))


def test_sync_batch_norm_errors() -> None:
    with pytest.raises(ValueError, match=r"at least 2 dimensions.*got \(4,\)"):
        SyncBatchNorm(4)(torch.randn(4))
    with pytest.raises(ValueError, match=r"made for 4 channels, got an input of shape \(2, 3\)"):
        SyncBatchNorm(4)(torch.randn(2, 3))
