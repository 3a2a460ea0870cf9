"""Tests of deferred batch norm: running statistics equal those pooled over the mini-batch, with any recomputation. And of convert()
of both kinds: the modules that it converts remain the same objects."""

import copy
import functools
import pickle

import horovod.torch as hvd
import pytest
import torch
from odd_blocks import POLICIES, under_policies
from same import assert_same, gradients
from torch import nn
from ways import CHAINS, by_function, plainly, reentrant

import hvd_ckpt as hc
from hvd_ckpt.batchnorm import DeferredBatchNorm, commit_batch_norm

SHAPES = {nn.BatchNorm1d: (7, 4), nn.BatchNorm2d: (7, 4, 3, 2), nn.BatchNorm3d: (7, 4, 2, 3, 2)}

pytestmark = pytest.mark.usefixtures("quick_planner")


def statistics(model):
    return [value for name, value in model.state_dict().items() if "running" in name or "tracked" in name]


@pytest.mark.parametrize(
    ("kind", "momentum", "parts"),
    [(nn.BatchNorm1d, None, 3), (nn.BatchNorm2d, 0.3, 1), (nn.BatchNorm3d, 0.3, 3)],
)
def test_deferred_norm_of_micro_batches_equals_batch_norm_of_the_whole_batch(kind, momentum, parts):
    plain = kind(4, momentum=momentum).double()
    deferred = DeferredBatchNorm.convert(copy.deepcopy(plain))
    torch.manual_seed(0)
    for step in range(3):
        batch = torch.randn(SHAPES[kind], dtype=torch.float64) * (step + 1) + 100
        whole, before = plain(batch), copy.deepcopy(statistics(deferred))
        outputs = [deferred(part) for part in batch.tensor_split(parts)]
        assert_same(statistics(deferred), before)  # nothing changes before the end of the mini-batch
        assert parts > 1 or torch.equal(outputs[0], whole)
        for _ in range(2):  # nothing was seen since the first
            commit_batch_norm(deferred)
            assert_same(statistics(deferred), statistics(plain), 1e-12)
    x = torch.randn(SHAPES[kind], dtype=torch.float64)
    assert_same(deferred.eval()(x), plain.eval()(x), 1e-12)
    commit_batch_norm(deferred)
    assert deferred.num_batches_tracked == 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolve = nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.act = nn.BatchNorm2d(4), nn.GELU()

    def forward(self, x):
        return x + self.act(self.norm(self.convolve(x)))


def chain():
    torch.manual_seed(3)
    return DeferredBatchNorm.convert(nn.Sequential(*(Block() for _ in range(6))).double())


def images():
    torch.manual_seed(4)
    return torch.randn(6, 4, 5, 5, dtype=torch.float64) * 2 + 1


@functools.cache
def plan():
    model = chain()
    model(images())  # planning must leave alone what was seen of an unfinished mini-batch
    before = [buffer.clone() for buffer in model.buffers()]
    made = hc.plan(model, torch.randn(8, 4, 12, 12, dtype=torch.float64), budget="0.6x")
    assert_same(list(model.buffers()), before)
    return made


WAYS = {
    **CHAINS,
    **POLICIES,
    "CheckpointFunction": by_function,
    "nested chain": lambda model, x: hc.checkpoint(hc.CheckpointSequential(model, 4, True), x),
    "plan": plainly,
    "policies in regions": under_policies(0, hc.checkpoint),
    "policies in reentrant regions": under_policies(0, reentrant),
    "compiled": lambda model, x: torch.compile(lambda y: hc.checkpoint(model, y), backend="eager")(x),
}


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("way", WAYS)
def test_recomputation_changes_nothing(way, parts):
    """Statistics are those pooled over what the layers saw, which hooks on a plain run tell."""
    reference, model = chain(), plan().apply(chain()) if way == "plan" else chain()
    seen = [[] for _ in reference]
    for block, inputs in zip(reference, seen):
        block.norm.register_forward_pre_hook(lambda _, args, inputs=inputs: inputs.append(args[0].detach()))
    expected, _ = hc.accumulate(lambda part: reference(part).square().mean(), images(), parts)
    loss, _ = hc.accumulate(
        lambda part: WAYS[way](model, part).square().mean(), images(), parts, checkpoint="except_last"
    )
    assert torch.equal(loss, expected)
    commit_batch_norm(model)
    for block, inputs in zip(model, seen):
        values = torch.cat(inputs).transpose(0, 1).flatten(1)
        assert len(inputs) == parts
        assert_same(block.norm.running_mean, 0.1 * values.mean(1), 1e-12)
        assert_same(block.norm.running_var, 0.9 + 0.1 * values.var(1), 1e-12)
        assert block.norm.num_batches_tracked == 1
    torch.testing.assert_close(gradients(model), gradients(reference), rtol=1e-10, atol=1e-12)


def test_under_autocast_and_without_gradients():
    model, plain = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)), nn.BatchNorm2d(4)
    DeferredBatchNorm.convert(model)
    x = images().float()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        hidden = model[0](x)
        assert hidden.dtype == torch.bfloat16
        plain(hidden)
        for part in x.tensor_split(3):
            model(part)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hc.checkpoint(model, x[:0]).sum().backward()  # an empty micro-batch
    commit_batch_norm(model)
    assert_same(statistics(model), statistics(plain), 1e-5)


def test_copies_and_state_dicts_in_the_middle_of_a_mini_batch():
    plain, x = nn.BatchNorm2d(4).double(), images()
    norm = DeferredBatchNorm.convert(copy.deepcopy(plain))
    plain(x)
    norm(x[:2])
    assert list(norm.state_dict()) == list(plain.state_dict())
    loaded, reset = copy.deepcopy(norm), copy.deepcopy(norm)
    loaded.load_state_dict(plain.state_dict())
    reset.reset_running_stats()
    commit_batch_norm(reset)
    assert reset.num_batches_tracked == 0
    copies = [copy.deepcopy(norm), pickle.loads(pickle.dumps(norm)), norm]
    for one in copies:
        one(x[2:])
    for one in [*copies, loaded]:
        commit_batch_norm(one)
        assert_same(statistics(one), statistics(plain), 1e-12)
    nn.BatchNorm2d(4).load_state_dict(norm.state_dict())
    assert copies[0].half().float().pending_mean.dtype == torch.float64


def test_without_running_statistics_it_is_a_batch_norm_and_errors():
    untracked = nn.BatchNorm1d(4, affine=False, track_running_stats=False)
    deferred, x = DeferredBatchNorm.convert(copy.deepcopy(untracked)), torch.randn(5, 4)
    assert torch.equal(deferred(x), untracked(x))
    commit_batch_norm(deferred)
    with pytest.raises(ValueError, match=r"made for 4 channels .* got \(2, 3\)"):
        deferred(torch.randn(2, 3))


# ---------------------------------------------------------------------------------------- conversion


class Elsewhere(nn.modules.batchnorm._BatchNorm):
    """A synchronized batch norm of another library, such as Apex's."""


class WithActivation(nn.BatchNorm2d):
    def forward(self, input):
        return super().forward(input).relu()


PLAIN = [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d]
SYNCHRONIZED = [nn.SyncBatchNorm, hvd.SyncBatchNorm, Elsewhere]
DEFAULTS = {"affine": True, "momentum": 0.1, "eps": 1e-5, "track_running_stats": True}


@pytest.mark.parametrize(
    ("target", "kind"),
    [(hc.SyncBatchNorm, kind) for kind in PLAIN + SYNCHRONIZED]
    + [(hc.DeferredBatchNorm, kind) for kind in PLAIN],
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"affine": False},
        {"momentum": None},
        {"track_running_stats": False},
        {"eps": 0.1, "momentum": 0.3},
    ],
    ids=str,
)
def test_everything_stays(target, kind, options):
    norm = kind(4, **options)
    for tensor in (*norm.parameters(), *norm.buffers()):
        tensor.data = torch.rand(tensor.shape).add(0.5).to(tensor.dtype)
    model = nn.Sequential(nn.Linear(4, 4), norm, norm).eval()
    before, parameters, called = copy.deepcopy(model.state_dict()), list(model.parameters()), []
    norm.register_forward_hook(lambda *_: called.append("after"))
    norm.register_forward_pre_hook(lambda *_: called.append("before"))
    model[0].train()
    assert target.convert(model) is model
    assert type(model[1]) is target and model[1] is model[2] is norm
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert not norm.training and model[0].training
    assert {name: getattr(norm, name) for name in DEFAULTS} == {**DEFAULTS, **options}
    assert_same(dict(model.state_dict()), dict(before))
    if norm.track_running_stats:
        model(torch.rand(3, 4))
        assert called == ["before", "after"] * 2


@pytest.mark.parametrize(
    ("target", "norm", "outcome"),
    [
        (hc.SyncBatchNorm, WithActivation(4), "refused"),
        (hc.SyncBatchNorm, nn.LazyBatchNorm2d(), "refused"),
        (hc.DeferredBatchNorm, nn.LazyBatchNorm2d(), "refused"),
        (hc.SyncBatchNorm, hc.DeferredBatchNorm(4), "stays"),
        (hc.DeferredBatchNorm, nn.SyncBatchNorm(4), "stays"),
        (hc.DeferredBatchNorm, hc.SyncBatchNorm(4), "stays"),
        (hc.DeferredBatchNorm, WithActivation(4), "stays"),
    ],
)
def test_others_stay_or_are_named_as_what_cannot_be_converted(target, norm, outcome):
    model, kind = nn.Sequential(nn.Linear(4, 4), norm), type(norm)
    if outcome == "refused":
        with pytest.raises(ValueError, match="'1'"):
            target.convert(model)
    else:
        assert type(target.convert(model)[1]) is kind


def test_a_model_that_is_a_batch_norm():
    norm = nn.SyncBatchNorm(3)
    assert hc.SyncBatchNorm.convert(norm) is norm and type(norm) is hc.SyncBatchNorm
