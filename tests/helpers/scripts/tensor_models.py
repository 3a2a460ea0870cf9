"""Jobs with tensor parallelism: every model trains like the whole one, to rounding. Arguments: tensor, cases; "sequence" after
them for sequence parallelism."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import hvd_ckpt as hc
from hvd_ckpt.app.models.gpt import gpt
from hvd_ckpt.app.models.transformer import bert, gpt2, roberta
from hvd_ckpt.app.models.xlnet import xlnet
from hvd_ckpt.planning import kinds
from hvd_ckpt.processes.grid import current
from hvd_ckpt.utils.cuts import cut_of

SIZES: dict[str, Any] = {"vocabulary": 43, "width": 16, "heads": 4, "layers": 2}
SEQUENCE = sys.argv[-1] == "sequence"
LENGTH, BATCH, STEPS = 8 if SEQUENCE else 7, 3, 2
CLOSE = 2e-5  # relative to the norm of a tensor


class Scores(nn.Module):
    """The model of ``transformers`` in a chain, by itself."""

    def __init__(self, chain: Any) -> None:
        super().__init__()
        self.model = chain.transformers_model

    def forward(self, tokens: Tensor, **masks: Tensor) -> Tensor:
        return self.model(tokens, **masks).logits


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": lambda: gpt(**SIZES, length=LENGTH, dropout=0.1),
    "gpt untied": lambda: gpt(**SIZES, length=LENGTH, dropout=0.1, tied=False),
    "bert": lambda: bert(**SIZES, length=LENGTH),
    "bert eager": lambda: bert(**SIZES, length=LENGTH, attention="eager"),
    "roberta": lambda: roberta(**SIZES, length=LENGTH),
    "gpt2": lambda: gpt2(**SIZES, length=LENGTH),
    "xlnet": lambda: xlnet(**SIZES),
    "BertForMaskedLM": lambda: Scores(bert(**SIZES, length=LENGTH)),
    "RobertaForMaskedLM": lambda: Scores(roberta(**SIZES, length=LENGTH)),
    "GPT2LMHeadModel": lambda: Scores(gpt2(**SIZES, length=LENGTH)),
    "XLNetLMHeadModel": lambda: Scores(xlnet(**SIZES)),
}


def batch_of(name: str, step: int) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + hc.rank())
    tokens = torch.randint(2, SIZES["vocabulary"], (BATCH, LENGTH), generator=generator)
    masks: dict[str, Tensor] = {}
    if "gpt" not in name.lower():
        mask = torch.ones(BATCH, LENGTH)
        mask[0, -2:] = 0
        masks = {"attention_mask": mask}
    if "xlnet" in name.lower():
        masks["perm_mask"] = torch.ones(LENGTH, LENGTH).triu().expand(BATCH, -1, -1).contiguous()
        masks["target_mapping"] = torch.eye(LENGTH).expand(BATCH, -1, -1).contiguous()
    targets = torch.randint(0, SIZES["vocabulary"], (BATCH, LENGTH), generator=generator)
    return tokens, masks, targets


def optimizer_of(model: nn.Module, make: Callable[..., Any] | None = None, **options: Any) -> Any:
    """By default SGD, of which an error in a gradient shows in full."""
    bare = (make or functools.partial(torch.optim.SGD, lr=0.1))(model.parameters())
    return hc.DistributedOptimizer(bare, model.named_parameters(), model=model, **options)


def loss_of(model: nn.Module, step: int = 0) -> Tensor:
    """Of a language model."""
    tokens, masks, targets = batch_of("gpt", step)
    return functional.cross_entropy(model(tokens, **masks).flatten(0, 1), targets.flatten())


def train(name: str, model: nn.Module) -> list[float]:
    optimizer = optimizer_of(model, functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    torch.manual_seed(5 + hc.rank())
    losses = []
    for step in range(STEPS):
        tokens, masks, targets = batch_of(name, step)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(tokens, **masks).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_close(found: Tensor, expected: Tensor, what: str, close: float = CLOSE) -> None:
    # Of what is zero but for rounding (the bias of keys, which softmax takes out) there is nothing to compare.
    error = (found.double() - expected.double()).norm() / max(float(expected.double().norm()), 1e-3)
    assert error <= close, f"{what}: relative difference {error:.2e}"


def assert_like_whole(model: nn.Module, whole: nn.Module, what: str, close: float = CLOSE) -> int:
    """Each parameter is the whole one's slice, to rounding, and copies are equal on all parts; returns the number of cuts."""
    grid, cut = current(), 0
    expected = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        there = expected[name].detach()
        if (how := cut_of(parameter)) is not None:
            there = how.of(there, grid.tensor, grid.part)
            cut += 1
        else:
            copies = grid.gather_objects(parameter.detach().clone())
            assert all(torch.equal(copies[0], other) for other in copies), (
                f"{what}: {name} differs between parts"
            )
        assert_close(parameter.detach(), there, f"{what}: {name}", close)
    return cut


def check(name: str) -> None:
    torch.manual_seed(3)
    whole = MODELS[name]().train()
    model = hc.tensor_parallel(copy.deepcopy(whole), sequence=SEQUENCE)
    losses, expected = train(name, model), train(name, whole)
    assert all(abs(a - b) < 1e-5 * b for a, b in zip(losses, expected)), (name, losses, expected)
    assert assert_like_whole(model, whole, name) > 5
    model.eval(), whole.eval()
    tokens, masks, _ = batch_of(name, 9)
    with torch.no_grad():
        assert_close(model(tokens, **masks), whole(tokens, **masks), f"{name}, evaluated")
        assert_close(copy.deepcopy(model)(tokens, **masks), whole(tokens, **masks), f"{name}, copied")


def run(cases: Mapping[str, Callable[[], None]]) -> None:
    """The main program of a script: all of its cases, or those of the second argument."""
    kinds._SECONDS_PER_KIND = 0.0  # times are not looked at
    hc.init(tensor=int(sys.argv[1]), stall_timeout=100)
    failed = []
    for name in sys.argv[2].split(",") if len(sys.argv) > 2 + SEQUENCE else cases:
        try:
            cases[name]()
        except AssertionError as error:  # the same on all parts, so the next case can run
            failed.append(f"{name}: {str(error)[:600]}")
    assert not failed, "\n".join(failed)
    print("equal", flush=True)


if __name__ == "__main__":
    run({name: functools.partial(check, name) for name in MODELS})
