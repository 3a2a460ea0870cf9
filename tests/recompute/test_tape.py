"""Tests of selective recomputation: results, side effects and errors of plain autograd, with any results dropped."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from call_names import names_of_calls
from same import assert_same
from selective import checkpointed, drop_all, on_cpu, selectively, some
from torch import Tensor, nn
from torch.nn import functional as F

import hvd_ckpt as hc
from hvd_ckpt.recompute.tape import Policy, Tape, run_selectively
from hvd_ckpt.recompute.verify import verifying
from hvd_ckpt.utils.memory import measure_peak
from hvd_ckpt.utils.torch_private import top_saved_tensors_default_hooks

pytestmark = pytest.mark.usefixtures("one_thread")


class Gpt(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)
        x = x + F.dropout(self.project(attention.transpose(1, 2).reshape(x.shape)), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), 0.1)


class Bert(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 32), nn.Linear(32, width)
        self.norm, self.norm2, self.dropout = nn.LayerNorm(width), nn.LayerNorm(width), nn.Dropout(0.2)
        self.register_buffer("mask", torch.zeros(6).masked_fill(torch.arange(6) > 4, -1e4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (4, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2) / 2 + self.mask
        mixed = self.dropout(scores.softmax(-1)) @ v
        x = self.norm(x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2))))
        return self.norm2(x + self.dropout(self.down(F.gelu(self.up(x)))))


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3, padding=1),
            nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3, padding=1), nn.Dropout(0.2, inplace=True),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        out = self.layers(x)
        out += x
        return torch.cat([x[:, :0], out[:, :2].relu_(), out[:, 2:]], 1)


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, num_layers=2, dropout=0.3)

    def forward(self, x: Tensor) -> Tensor:
        out, (hidden, cell) = self.lstm(x)
        return out + hidden[-1] * cell.tanh().sum(0)


class Index(nn.Module):
    """Embedding, indices, several outputs, lists of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.bilinear = nn.Embedding(7, 8), nn.Parameter(torch.randn(8, 4))
        self.register_buffer("index", torch.tensor([[1, 2, 0], [6, 2, 2]]))

    def forward(self, x: Tensor) -> Tensor:
        left, right = (self.embedding(self.index).mean(1) * x).chunk(2, -1)
        parts = [one * other for one, other in zip((left + 1).unbind(), right.exp().split(1))]
        best, where = torch.cat(parts).sort(-1)
        values = torch.where(best > 0, best, left.gather(1, where)).index_select(1, where[0, :2])
        mixed = torch.einsum("bi,ij,bj->bi", torch.stack([x[:, :8], x.flip(1)]).sum(0), self.bilinear, right)
        return torch.cat([mixed, values.repeat(1, 2), torch.complex(left, right).conj().abs()], dim=1)[:, ::2]


class Custom(nn.Module):
    """A custom autograd function, a list of views changed in place, and running statistics of one's own."""

    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            square = x * x
            ctx.save_for_backward(square)
            return square * x

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            (square,) = ctx.saved_tensors
            return 3 * square * gradients[0]

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        first, second = hidden.view(-1, 8), hidden * 1.5
        shifted = second + self.mean
        F.relu(first, inplace=True)
        second[:, 0] = 0
        self.mean.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
        self.scale = self.scale * 0.9 + 0.1 * hidden.detach().var(0)
        return self.Cube.apply((hidden * shifted).sin()) * second + shifted**2 * self.scale


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)


BLOCKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "gpt": (Gpt, (2, 6, 16)),
    "bert": (Bert, (2, 6, 16)),
    "conv": (Conv, (2, 4, 6, 6)),
    "encoder": (encoder, (2, 6, 16)),
    "lstm": (Lstm, (5, 2, 8)),
    "index": (Index, (2, 8)),
    "custom": (Custom, (4, 8)),
}


def step(
    model: nn.Module, x: Tensor, run: Callable[[nn.Module, Tensor], Tensor], autocast: str = ""
) -> list[Any]:
    """Two blocks' worth of training, and all that it leaves behind."""
    model, x = copy.deepcopy(model), x.clone().requires_grad_()
    torch.manual_seed(1)
    with contextlib.ExitStack() as stack:
        if autocast:
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
        out = run(model, run(model, x * 1.0))
        if autocast == "forward":
            stack.close()
        out.float().square().sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return [out.detach(), x.grad, *gradients, *model.buffers(), torch.get_rng_state()]


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def plain(model: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = model(x)
    return result


AUTOCAST = [
    (name, autocast)
    for name in BLOCKS
    for autocast in ("", "forward", "all")
    if not (
        autocast and name in ("index", "lstm")
    )  # these mix dtypes in ways that autocast on the CPU does not know
]


@pytest.mark.parametrize(("name", "autocast"), AUTOCAST)
def test_any_policy_is_bitwise_equal_to_plain_autograd(name: str, autocast: str) -> None:
    torch.manual_seed(0)
    make, shape = BLOCKS[name]
    model, x = make(), torch.randn(shape)
    with torch.autocast("cpu", torch.bfloat16, enabled=bool(autocast)):
        calls = names_of_calls(model, x)
    expected = step(model, x, plain, autocast)
    for seed in range(4 if autocast else 12):
        policy = some(calls, seed)
        assert_same(expected, step(model, x, selectively(policy), autocast))


def copied(block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Hooks that give back other memory, in another layout."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.contiguous().clone(), lambda t: t):
        return block(x)


def twice(block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    result: Tensor = hc.checkpoint(lambda y: hc.checkpoint(block, y).sin(), x)
    return result


OTHERS = [
    (name, around)
    for name in BLOCKS
    for around in (on_cpu, copied, checkpointed, twice)
    if not (name == "custom" and around in (checkpointed, twice))  # it changes its buffers each time it runs
]


@pytest.mark.parametrize(("name", "around"), OTHERS)
def test_equal_under_other_saved_tensor_hooks(name: str, around: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    make, shape = BLOCKS[name]
    model, x = make(), torch.randn(shape)
    calls = names_of_calls(model, x)

    def run(m: nn.Module, y: Tensor, policy: Policy | None = None) -> Tensor:
        def block(z: Tensor) -> Any:
            return m(z) if policy is None else run_selectively(m, (z,), {}, policy)

        block.module = m  # type: ignore[attr-defined]
        return around(block, y)

    expected = step(
        model, x, plain if around is copied else run
    )  # PyTorch itself is not exact under copying hooks
    for seed in range(4):
        policy = some(calls, seed)
        assert_same(expected, step(model, x, functools.partial(run, policy=policy)))


def test_region_with_its_own_policy_in_a_selective_run() -> None:
    def inner(x: Tensor) -> Tensor:
        result: Tensor = run_selectively(lambda y: y.sin().cos().exp(), (x,), {}, policy)
        return result

    policy = Policy(("sin", "cos", "exp"), frozenset({0, 1, 2}))
    x = torch.randn(4, requires_grad=True)
    outer = Policy(("mul",), frozenset({0}))
    out = run_selectively(lambda y: hc.checkpoint(inner, y * 2), (x,), {}, outer)
    assert torch.equal(
        torch.autograd.grad(out.sum(), x)[0], torch.autograd.grad((x * 2).sin().cos().exp().sum(), x)[0]
    )


def test_second_derivatives_retained_graphs_and_some_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Softplus(), nn.Linear(6, 6))
    x = torch.randn(3, 6, requires_grad=True)
    policy = drop_all(model, x)
    weights = [model[0].weight, model[4].weight]

    def derivatives(run: Callable[[], Tensor]) -> list[Tensor]:
        out = run()
        first = torch.autograd.grad(out.sum(), weights[1:], retain_graph=True)
        again = torch.autograd.grad(out.square().sum(), weights, retain_graph=True)
        last = torch.autograd.grad(out.square().sum(), weights)
        (slope,) = torch.autograd.grad(run().exp().sum(), x, create_graph=True)
        return [*first, *again, *last, slope, *torch.autograd.grad(slope.square().sum(), weights)]

    assert_same(derivatives(lambda: model(x)), derivatives(lambda: run_selectively(model, (x,), {}, policy)))


def test_side_effects_happen_once() -> None:
    torch.manual_seed(0)
    model, x = Conv(), torch.randn(2, 4, 6, 6)
    policy = drop_all(model, x)
    seen: list[str] = []
    model.layers[2].register_forward_hook(lambda *_: seen.append("forward"))
    model.layers[2].register_full_backward_hook(lambda *_: seen.append("backward"))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: seen.append("gradient"))
    run_selectively(model, (x,), {}, policy).sum().backward()
    assert sorted(seen) == ["backward", "forward"] + ["gradient"] * len(list(model.parameters()))
    assert model.layers[0].num_batches_tracked == 1
    assert torch.allclose(model.layers[0].running_mean, 0.1 * x.mean((0, 2, 3)))


def test_model_called_twice_before_backward_and_keyword_tensors() -> None:
    def attend(x: Tensor, *, scale: Tensor, masks: dict[str, Tensor]) -> Tensor:
        return torch.where(masks["keep"], (x * scale).exp(), x.sin()) * scale

    x, scale = torch.randn(4, 4, requires_grad=True), torch.randn(4, requires_grad=True)
    masks = {"keep": torch.randn(4, 4) > 0}
    policy = Policy(("mul", "exp", "sin", "where", "mul"), frozenset(range(5)))

    def gradients(run: Callable[[Tensor], Tensor]) -> list[Any]:
        one, two = run(x), run(x * 2)
        return list(torch.autograd.grad((one * two).sum(), [x, scale]))

    kwargs = {"scale": scale, "masks": masks}
    expected = gradients(lambda y: attend(y, **kwargs))  # type: ignore[arg-type]
    assert_same(expected, gradients(lambda y: run_selectively(attend, (y,), kwargs, policy)))


def test_memory_is_lower_and_comes_back_without_the_garbage_collector() -> None:
    torch.manual_seed(0)
    model, x = Bert(), torch.randn(64, 6, 16)
    calls = names_of_calls(model, x)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def train(policy: Policy, backward: bool = True) -> None:
        out = run_selectively(model, (x,), {}, policy)
        if backward:
            out.square().sum().backward()

    with no_collector(), verifying("never"):  # which takes memory of its own
        everything = measure_peak(lambda: train(Policy(calls, frozenset())))
        cheap = frozenset(i for i, call in enumerate(calls) if call not in ("linear", "matmul"))
        assert measure_peak(lambda: train(Policy(calls, cheap))).peak_bytes < 0.9 * everything.peak_bytes
        for seed in range(12):
            policy = some(calls, seed)
            assert measure_peak(functools.partial(train, policy)).held_bytes == 0
            assert measure_peak(functools.partial(train, policy, backward=False)).held_bytes == 0


def test_groups_that_read_each_other_are_freed() -> None:
    def cross(x: Tensor, y: Tensor) -> Tensor:
        a, b = x.sin(), y.sin()
        product = b * a.cos()
        mask = product > 0
        mask.logical_not_()
        return torch.where(mask, a * product, product).square()

    x, y = (torch.randn(64, requires_grad=True) for _ in range(2))
    for tensor in (x, y):
        tensor.grad = torch.zeros_like(tensor)
    with no_collector():
        for breaks in (range(9), (1, 2), (2, 3), ()):
            policy = drop_all(cross, x, y, keep=("logical_not_",), breaks=frozenset(breaks))
            train = functools.partial(selectively(policy), cross, x, y)
            train().sum().backward()
            assert measure_peak(lambda run=train: run().sum().backward()).held_bytes == 0  # type: ignore[misc]


def test_results_that_a_module_keeps_are_ordinary_tensors() -> None:
    model, x = Custom(), torch.randn(4, 8)
    policy = drop_all(model, x)
    run_selectively(model, (x,), {}, policy)
    assert model.scale.__dict__ == {}
    assert_same([model.scale], [pickle.loads(pickle.dumps(copy.deepcopy(model))).scale])


def test_code_on_another_path_keeps_everything_from_there() -> None:
    def branch(x: Tensor, other: bool) -> Tensor:
        y = x.sin()
        y = y.exp() if other else y.cos()
        return (y * y).tanh()

    x = torch.randn(4, requires_grad=True)
    policy = Policy(("sin", "cos", "mul", "tanh"), frozenset(range(4)))
    for other in (False, True):
        out = run_selectively(branch, (x, other), {}, policy)
        expected = torch.autograd.grad(branch(x, other).sum(), x)[0]
        assert torch.equal(torch.autograd.grad(out.sum(), x)[0], expected)


def test_without_gradients_and_after_exceptions_nothing_is_left() -> None:
    def fail(x: Tensor) -> Tensor:
        x.sin().mul(2)
        raise ValueError("on purpose")

    x = torch.randn(4, requires_grad=True)
    policy = Policy(("sin", "mul"), frozenset({0, 1}))
    with pytest.raises(ValueError, match="on purpose"):
        run_selectively(fail, (x,), {}, policy)
    assert not any(isinstance(m, Tape) for m in torch.overrides._get_current_function_mode_stack())
    assert top_saved_tensors_default_hooks(False) is None
    with torch.no_grad():
        assert not run_selectively(lambda y: y.sin() * 2, (x,), {}, policy).requires_grad


def test_compiled_module_inside() -> None:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    compiled = torch.compile(inner, backend="eager")
    x = torch.randn(3, 4, requires_grad=True)

    def function(y: Tensor, module: Callable[[Tensor], Tensor]) -> Tensor:
        return module(y.sin()).exp() * 2

    policy = drop_all(function, x, inner)
    out = run_selectively(function, (x, compiled), {}, policy)
    expected = torch.autograd.grad(function(x, inner).sum(), [x, *inner.parameters()])
    assert_same(list(torch.autograd.grad(out.sum(), [x, *inner.parameters()])), list(expected))


def test_threads_train_their_own_models() -> None:
    torch.manual_seed(0)
    cases = []
    for _ in range(2):
        model, x = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.LayerNorm(6)), torch.randn(2, 6)
        cases.append((model, x, drop_all(model, x)))
    found: dict[int, list[Any]] = {}

    def train(rank: int) -> None:
        model, x, policy = cases[rank]
        for _ in range(10):
            out = run_selectively(model, (x,), {}, policy)
            found[rank] = list(torch.autograd.grad(out.square().sum(), list(model.parameters())))

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank, (model, x, _) in enumerate(cases):
        expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
        assert_same(list(expected), found[rank])
