"""Recomputation with the state of the first pass: containers, shared tensors, and what is frozen or unfrozen between the passes."""

import pytest
import torch
from same import assert_same, gradients
from selective import drop_all, selectively
from torch import nn
from ways import VARIANTS, WAYS, plainly, reentrant

from hvd_ckpt.recompute import RecomputationMismatch, checkpoint


@VARIANTS
def test_a_first_write_of_another_modules_weight_is_an_error(run):
    layer = nn.Linear(8, 8)

    def function(x):
        with torch.no_grad():
            layer.weight.mul_(0.9)
        return torch.tanh(layer(x))

    y = run(function, torch.randn(4, 8, requires_grad=True))
    with pytest.raises(RecomputationMismatch, match="'Linear.weight' was written .* are not known"):
        y.sum().backward()


class Through(nn.Module):
    def __init__(self, run, block):
        super().__init__()
        self.run, self.block = run, block

    def forward(self, x):
        return self.run(self.block, x)


@pytest.mark.parametrize("way", ["non-reentrant", "reentrant", "lambda", "nested", "segments"])
def test_tensors_in_the_places_of_parameters_and_buffers(way):
    def trained(run):
        torch.manual_seed(0)
        norm, layer, found = nn.BatchNorm1d(8), nn.Linear(8, 8), []
        model = Through(run, nn.Sequential(layer, nn.Tanh(), norm, nn.Tanh()))
        for number in range(3):  # the values are other ones from the second on
            state = {name: value.detach() + number for name, value in model.state_dict().items()}
            for name, _ in model.named_parameters():
                state[name].requires_grad_()
            y = torch.func.functional_call(model, state, (torch.randn(4, 8),))
            y.square().sum().backward()
            found += [value.grad for value in state.values()]
            found += [value for name, value in state.items() if "running" in name]
            assert norm.num_batches_tracked == 0 and layer.weight.grad is None
        return found

    assert_same(trained(WAYS[way]), trained(plainly))


@pytest.mark.parametrize(
    "run", [reentrant, lambda block, x: block[2](checkpoint(lambda y: block[1](block[0](y)), x))]
)
def test_a_scripted_module_within_reach(run):
    def trained(run):
        torch.manual_seed(0)
        scripted = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2)))
        block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), scripted)
        for _ in range(4):
            run(block, torch.randn(4, 8)).square().sum().backward()
        return [*gradients(block), *block.buffers()]

    assert_same(trained(run), trained(plainly), 1e-4)  # it has other bits once it is optimized


class Cache:
    def __init__(self):
        self.states, self.calls = [], 0


@VARIANTS
def test_an_object_that_holds_tensors_and_that_blocks_write_to(run):
    def outcome(run):
        torch.manual_seed(0)
        layers, x = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), torch.randn(5, 8, requires_grad=True)
        cache, y = Cache(), x

        def function(y, cache, layer):
            cache.states.append(y.sin())
            cache.calls += 1
            return layer(torch.stack(cache.states).sum(0)).tanh()

        for layer in layers:
            y = run(function, y, cache, layer)
        y.square().sum().backward()
        assert cache.calls == 3 and len(cache.states) == 3
        return [x.grad, *gradients(layers)]

    if run is reentrant:  # what the first pass has stored has no graph
        with pytest.raises(RuntimeError, match="without returning it"):
            outcome(run)
    else:
        assert_same(outcome(run), outcome(plainly))


def test_reentrant_gradients_of_inputs_keep_their_strides():
    def gradient(run):
        strides = []
        y = torch.randn(2, 3, 4, requires_grad=True) * 1
        y.register_hook(lambda grad: strides.append(grad.stride()))
        run(lambda h: torch.tanh(h.transpose(1, 2).contiguous()), y).square().sum().backward()
        return strides

    assert gradient(reentrant) == gradient(plainly)


class Weighted(nn.Module):
    """A layer with a buffer and an argument in a container, whose gradients can be asked for like those of its parameters."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.register_buffer("offset", torch.zeros(8))

    def forward(self, x, more=()):
        weight = more[0] if more else self.weight
        return self.norm(torch.tanh(self.linear(x) + self.offset) * weight.exp()) * weight

    def holding(self, more):
        """Has its other argument as an attribute."""
        self.weight = more[0]
        return self


def on_a_tape(block, x, more):
    policy = drop_all(block, x.detach(), [more[0].detach()], keep=("linear",))
    return selectively(policy)(block, x, more)


FREEZING = {
    **{name: WAYS[name] for name in ("non-reentrant", "reentrant", "nested")},
    "no early stop": lambda block, x, more: checkpoint(block, x, more, early_stop=False),
    "lambda": lambda block, x, more: checkpoint(lambda y: block(y, more), x),
    "reentrant lambda": lambda block, x, more: reentrant(lambda y: block(y, more), x),
    "segments": lambda block, x, more: WAYS["segments"](block.holding(more), x),
    "reentrant segments": lambda block, x, more: WAYS["reentrant segments"](block.holding(more), x),
    "tape": on_a_tape,
}


def gradients_around_a_change(run, at_forward, at_backward):
    """Gradients of a block, of which other tensors require them in the forward pass than in the backward pass."""
    torch.manual_seed(0)
    block, x, weight = Weighted(), torch.randn(5, 8, requires_grad=True), torch.randn(8)
    leaves = {**dict(block.named_parameters()), "offset": block.offset, "argument": weight, "input": x}

    def require(names):
        for name, tensor in leaves.items():
            tensor.requires_grad_(name.partition(".")[0] in names.split())

    require(at_forward)
    loss = run(block, x, [weight]).square().sum()
    require(at_backward)
    flags = [tensor.requires_grad for tensor in leaves.values()]
    for _ in range(2):
        loss.backward(retain_graph=True)
        assert [tensor.requires_grad for tensor in leaves.values()] == flags
    return [tensor.grad for tensor in leaves.values()]


@pytest.mark.parametrize("way", FREEZING)
@pytest.mark.parametrize(
    "at_forward, at_backward",
    [
        ("input", "input linear norm offset argument"),
        ("input linear norm offset argument", "input"),
        ("linear norm offset argument", "linear"),
        ("linear", "norm"),
        ("linear norm", "input argument offset"),
        ("argument", "linear"),
        ("input linear", "input linear"),
    ],
)
def test_parameters_that_are_frozen_or_unfrozen_between_the_passes(at_forward, at_backward, way):
    ours, plain = (
        gradients_around_a_change(run, at_forward, at_backward) for run in (FREEZING[way], plainly)
    )
    assert_same(ours, plain)


@pytest.mark.parametrize("way", ["non-reentrant", "reentrant"])
def test_a_block_that_is_frozen_inside_and_unfrozen_after(way):
    class Judged(Weighted):
        def forward(self, x, more):
            self.linear.requires_grad_(False)
            out = super().forward(x, more).sin()
            self.linear.requires_grad_(True)  # after the last saved tensor, where recomputation stops
            return out

    block, x = Judged(), torch.randn(5, 8, requires_grad=True)
    FREEZING[way](block, x, [torch.randn(8)]).sum().backward()
    assert all(parameter.requires_grad for parameter in block.parameters())
    assert block.linear.weight.grad is None and block.norm.weight.grad is not None
    assert x.grad is not None


class Shifted(nn.Module):
    """Adds a buffer, which others write, or which it writes past the version counter after some passes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.zeros(4))
        self.passes = 0

    def forward(self, x):
        y = (x + self.shift).exp()
        if self.passes > 1:
            self.shift.data.mul_(0.5).add_(x.detach().mean(0))
        return y


@pytest.mark.parametrize("norm", [False, True])
def test_a_buffer_that_is_written_after_the_first_pass_has_its_earlier_values(norm):
    module = nn.BatchNorm1d(4).eval() if norm else Shifted()
    x = torch.randn(3, 4).requires_grad_()
    expected = torch.autograd.grad(module(x).sum(), x)
    checkpoint(module, x).sum().backward()  # verified
    y = checkpoint(module, x).sum()
    if norm:
        module.train()
        module(2 * x)
    else:
        module.shift.add_(1)
    now = {name: buffer.clone() for name, buffer in module.named_buffers()}
    assert_same(torch.autograd.grad(y, x), expected)
    assert_same(dict(module.named_buffers()), now)


def test_a_buffer_that_later_passes_write_past_its_version_counter():
    def outcome(run):
        torch.manual_seed(0)
        module, losses = Shifted(), []
        x = torch.randn(3, 4).requires_grad_()
        for module.passes in range(5):
            losses.append(run(module, x).sum())
            losses[-1].backward()
        return [x.grad, module.shift, *(loss.detach() for loss in losses)]

    assert_same(outcome(checkpoint), outcome(plainly))
