"""Optimizer state in files: the same bits in less memory, and errors that change nothing."""

from __future__ import annotations

import copy
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import Case, run_forked
from same import assert_same
from torch import nn

import hvd_ckpt as hc
from hvd_ckpt.offload.host_memory import OffloadError
from hvd_ckpt.offload.shards import Offload

CPU = torch.device("cpu")
SIZES = (5, 1000, 333, 1)


def made(kind: Any = torch.optim.Adam, **options: Any) -> torch.optim.Optimizer:
    """An optimizer of two groups, whose parameters have gradients."""
    generator = torch.Generator().manual_seed(0)
    own = [nn.Parameter(torch.randn(size, generator=generator)) for size in SIZES]
    optimizer = kind(
        [{"params": own[:2]}, {"params": own[2:], "weight_decay": 0.1}], **{"lr": 0.01, **options}
    )
    set_gradients(optimizer, 0)
    return optimizer


def set_gradients(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Some parameter has none in each step but the first."""
    generator = torch.Generator().manual_seed(step)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for position, parameter in enumerate(parameters):
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = None if step and position == step % len(parameters) else gradient


def values_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Weights and state."""
    return [optimizer.param_groups, optimizer.state_dict()["state"]]


@pytest.mark.parametrize(
    "name, options",
    [
        ("AdamW", {"amsgrad": True}),
        ("SGD", {"momentum": 0.9}),
        ("SGD", {}),
        ("Adagrad", {"initial_accumulator_value": 0.5}),
        ("NAdam", {}),
        ("ASGD", {}),
    ],
)
def test_the_bits_are_those_without_offload(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    offload, kind = Offload(tmp_path, CPU), getattr(torch.optim, name)
    plain, offloaded = made(kind, **options), made(kind, **options)
    for number in range(4):
        set_gradients(plain, number)
        set_gradients(offloaded, number)
        plain.step()
        offload.step(offloaded, offloaded.step)
    assert_same(values_of(offloaded), values_of(plain))
    assert not list(tmp_path.iterdir())


class Counting(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["lr"] *= 0.999999
        super().step()


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_an_optimizer_that_counts_in_its_groups_is_refused(lr: Any, tmp_path: Path) -> None:
    optimizer = made(Counting, lr=lr)
    with pytest.raises(ValueError, match="Counting cannot be offloaded: .*param_groups"):
        Offload(tmp_path, CPU).step(optimizer, optimizer.step)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    if os.geteuid() or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("cannot mount a file system here")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@pytest.mark.filterwarnings("ignore:.*is itself in memory")
def test_a_full_disk_changes_nothing_and_the_step_can_be_tried_again(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(60 * 1024))
    plain, full, offload = made(), made(), Offload(small_disk, CPU)
    with pytest.raises(OffloadError, match=r"No space left.*KiB are needed, .* free.*offload_folder"):
        offload.step(full, full.step)
    assert_same(values_of(full), values_of(plain))
    ballast.unlink()
    offload.step(full, full.step)
    plain.step()
    assert_same(values_of(full), values_of(plain))


def test_folders_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    optimizer = made()
    (tmp_path / "file").touch()
    for name, reason in (("missing", "No such file"), ("file", "Not a directory")):
        offload = Offload(tmp_path / name, CPU)
        with pytest.raises(OffloadError, match=rf"'{tmp_path / name}' \({reason}.*are needed"):
            offload.step(optimizer, optimizer.step)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        with pytest.raises(OffloadError, match="ulimit -f"):
            Offload(tmp_path, CPU).reserve(optimizer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_same(values_of(optimizer), values_of(made()))


def test_modules_that_are_copied_on_disk_are_there_too(tmp_path: Path) -> None:
    def encoder() -> nn.Module:
        torch.manual_seed(0)
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(128, 2, 256, batch_first=True), 3)

    with hc.init_on_disk(tmp_path):
        model = encoder()
        tied = copy.deepcopy(nn.ModuleList([one := nn.Linear(128, 256), one]))
    files = [
        tuple(int(end, 16) for end in line.split()[0].split("-"))
        for line in Path("/proc/self/maps").read_text("utf-8").splitlines()
        if str(tmp_path) in line
    ]
    large = [one for one in (*model.parameters(), *tied.parameters()) if one.nbytes >= 64 << 10]
    assert len(large) == 3 * 4 + 1 and tied[0].weight is tied[1].weight
    assert all(any(start <= one.data_ptr() < stop for start, stop in files) for one in large)
    assert all(torch.equal(*both) for both in zip(model.parameters(), encoder().parameters()))


IMPORTS = """
import ctypes, resource, sys
from pathlib import Path
import torch
from torch import nn
import hvd_ckpt as hc
"""
LARGE_MODEL = """
ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: what is freed leaves the process, where the heap would keep some of it

def held(*kinds):  # bytes of this process, by the kernel's names
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(kinds))

def model(layers, width):
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)])

def train(model, steps, **options):
    optimizer = hc.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.01), model.named_parameters(), shard=hc.Shard(3, **options)
    )
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.ones(4, next(model.parameters()).shape[1])).square().mean()
        loss.backward()
        optimizer.step()
    return loss.item(), held("RssFile", "RssShmem")

hc.init()
folder = sys.argv[1]
train(model(2, 8), 2, offload="parameters", offload_folder=folder)  # starts what a first step starts
soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
resource.setrlimit(resource.RLIMIT_DATA, (held("VmData") + (32 << 20), hard))
try:
    model(24, 1024)  # 96 MiB of parameters, as many of gradients, and a state of 192 MiB
except RuntimeError as error:
    print("can't allocate memory" in str(error))
mapped = held("RssFile", "RssShmem")
torch.manual_seed(0)
with hc.init_on_disk(folder):
    large = model(24, 1024)
loss, held_at_the_end = train(large, 2, offload="parameters", offload_folder=folder)
print(held_at_the_end - mapped < 16 << 20)
resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
torch.manual_seed(0)
print(loss == train(model(24, 1024), 2)[0])
"""


def test_what_is_larger_than_the_memory_that_is_left_trains(tmp_path: Path) -> None:
    """In a process of its own: one that has run other tests has memory of theirs to use again."""
    case = Case(LARGE_MODEL, {"OMP_NUM_THREADS": "1"}, (str(tmp_path),))
    result = run_forked(IMPORTS, {"large": case})["large"]
    assert result.stdout.split() == ["True"] * 3, result.stderr
    assert not list(tmp_path.iterdir())
