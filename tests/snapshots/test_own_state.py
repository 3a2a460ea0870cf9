"""Optimizers with more state than a tensor or number of each parameter: it resumes with the same bits, or is refused when saved."""

import pytest
import torch
from one_process import batch, chain
from same import assert_same
from sharded import distribute

import hvd_ckpt as hc
from hvd_ckpt.snapshots.folder import SnapshotError
from hvd_ckpt.utils.states import OptimizerState

pytestmark = pytest.mark.ranks(gloo=(1, 2))


class Own(torch.optim.SGD):
    """Keeps all kinds of state, and uses it."""

    calls = 0

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state.setdefault("norms", []).append(parameter.grad.double().norm())
            state["all"] = torch.stack(state["norms"])  # grows
            state["none"], state["flag"], state["worst"] = None, True, float("inf")
            state["nested"] = {"count": torch.tensor(2**40 + 1), "of": (1, [parameter.grad.clone()], None)}
            parameter.grad.mul_(1 / (1 + state["all"].sum().float()))
        shared = self.state["shared"]
        shared["steps"] = shared.get("steps", 0) + 1
        shared["mode"] = ["warm", {"up": torch.ones(2)}]
        self.calls += 1
        self.param_groups[0]["lr"] *= 0.9 ** (shared["steps"] + self.calls)
        return super().step(closure)

    def state_dict(self):
        return {**super().state_dict(), "calls": self.calls, "text": "x"}

    def load_state_dict(self, state_dict):
        self.calls = state_dict["calls"]
        super().load_state_dict({name: state_dict[name] for name in ("state", "param_groups")})


def own(parameters):
    return Own(parameters, lr=0.1, momentum=0.5)


def lbfgs(parameters):
    return torch.optim.LBFGS(parameters, lr=0.1, max_iter=3, history_size=4)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def made(kind, **options):
    model = chain(2)
    return model, distribute(kind(model.parameters()), model.named_parameters(), model=model, **options)


def train(folder, model, optimizer, steps):
    """Saves after each step; returns the step from which it has resumed."""
    with hc.Snapshots(folder, model=model, optimizer=optimizer, blocking=True) as snapshots:
        begun = snapshots.resume()
        for number in range(begun, steps):

            def closure(number=number):
                optimizer.zero_grad()
                loss = model(batch(number, hc.rank())).square().mean()
                loss.backward()
                return loss

            if isinstance(optimizer, torch.optim.LBFGS):
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
            snapshots.save(number + 1)
    return begun


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (lbfgs, {}),
        (own, {}),
        # Adasum combines updates, so moments are those of a rank's own gradients.
        pytest.param(momentum, {"op": hc.Adasum}, marks=pytest.mark.ranks(mpi=(4,))),
    ],
)
def test_state_of_any_form_resumes_with_the_same_bits(folder, kind, options):
    if options and not hc.mpi_enabled():
        pytest.skip("Adasum needs MPI")
    model, optimizer = made(kind, **options)
    train(folder / "whole", model, optimizer, 5)
    train(folder / "two", *made(kind, **options), 3)
    again, resumed = made(kind, **options)
    assert train(folder / "two", again, resumed, 5) == 3
    assert_same(dict(model.state_dict()), dict(again.state_dict()))
    assert_same(optimizer.state_dict(), resumed.state_dict())
    if options:
        moments = hc.allgather_object(optimizer.state_dict()["state"][0]["momentum_buffer"])
        assert not torch.equal(moments[0], moments[1])


def odd(entry=lambda parameter: None, more=(), shared=()):
    """A kind of optimizer that keeps one more entry of each parameter, and others of none."""

    class Odd(torch.optim.SGD):
        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["entry"] = entry(parameter)
            for key in shared:
                self.state[key]["steps"] = 1
            return super().step(closure)

        def state_dict(self):
            return {**super().state_dict(), **dict.fromkeys(more, 1)}

    return lambda parameters: Odd(parameters, lr=0.1)


WHOLE = {}
SPLIT = [{"shard": shard, "elementwise": True} for shard in (1, 3)]


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        (odd(lambda parameter: "x"), WHOLE, r'optimizer: state\[0\].entry is "x".*keep a text in param_groups'),
        (odd(lambda parameter: [1, {"a": "x"}]), WHOLE, r"state\[0\].entry\[1\]\['a'\] is \"x\".*keep a text in param_gr"),
        (odd(lambda parameter: {1, 2}), WHOLE, r"optimizer.state\[0\].entry is a builtins.set.*: store"),
        *[(odd(shared=[key]), WHOLE, rf"state\[{key}\].*not of a parameter.*a text") for key in (9, 1.5, -1)],
        *[
            (kind, split, f"step 1 was not written.*{says}.*shard='none'")
            for split in SPLIT
            for kind, says in (
                (odd(lambda parameter: [1]), r"state\[.*\].entry is a list"),
                (odd(lambda parameter: torch.ones(3)), r"state\[.*\].entry is a tensor of float32 \[3\]"),
                (odd(lambda parameter: torch.ones(parameter.numel(), 1)), r"state\[.*\].entry is a tensor of float32 \[.*, 1\]"),
                (odd(more=["more"]), "it has the entry 'more'"),
                (odd(shared=["shared"]), "it has the entry 'shared', which is not of a parameter"),
            )
        ],
    ],
)  # fmt: skip
def test_state_that_cannot_be_loaded_or_split_is_refused_when_saved(folder, kind, options, says):
    with pytest.raises(SnapshotError, match=says):
        train(folder, *made(kind, **options), 1)
    assert hc.allgather_object(hc.rank()) == list(range(hc.size()))
    assert not list(folder.rglob("manifest.json"))


def test_whole_state_of_another_form_is_not_split(folder):
    kind = odd(lambda parameter: (1, 2))
    train(folder, *made(kind), 1)
    with pytest.raises(SnapshotError, match=r"state\[.*\].entry is a tuple.*shard='none'"):
        train(folder, *made(kind, **SPLIT[0]), 2)


def test_vectors_of_all_parameters_are_not_given_to_another_order(folder):
    train(folder, *made(lbfgs), 2)
    model, optimizer = made(lambda parameters: lbfgs(list(parameters)[::-1]))
    with pytest.raises(SnapshotError, match=r"optimizer.state\[.*this order is another one here"):
        train(folder, model, optimizer, 3)


def test_a_truth_value_is_not_the_number_of_a_parameter():
    with pytest.raises(ValueError, match=r"state\[True\].*not of a parameter.*a text"):
        OptimizerState.check({"state": {True: {}}, "param_groups": [{"params": [0, 2]}]}, "it")
