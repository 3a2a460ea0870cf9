"""Tests of models, data, losses and metrics from the user's own module, and of errors in one line."""

from __future__ import annotations

import io
import re
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from same import assert_same

import hvd_ckpt as hc
from hvd_ckpt.app.training.build import check_functions

MODULE = """
import torch
from torch import nn
from torch.nn import functional
import hvd_ckpt as hc

def model(classes=3, width=4):
    return nn.Sequential(nn.Linear(2, width), nn.Linear(width, classes))

def planned():
    return model(classes=5, width=9), (torch.zeros(1, 2),), None

class Pairs(torch.utils.data.Dataset):
    classes = 5
    def __len__(self): return 20
    def __getitem__(self, index): return torch.full((2,), float(index)), index % 5

def data(): return Pairs(), Pairs()
def broken(): return [torch.zeros(2)]
def endless(): return iter(())
def number(): return 3
def nothing(): pass
def three(): return Pairs(), Pairs(), Pairs()
def fails(): return open("missing.bin")

class Records:
    # As a data set of Hugging Face: records are dicts, and batch() is another method.
    def __len__(self): return 20
    def __getitem__(self, index): return {"x": torch.zeros(2), "y": index}
    def batch(self, batch_size, drop_last_batch=False): raise AssertionError

class Wide(torch.utils.data.Dataset):
    def __len__(self): return 20
    def __getitem__(self, index): return torch.zeros(3), 0

class Stream:
    def __iter__(self): return iter([(torch.zeros(2), 0)] * 30)
class Boxes(Pairs):
    def __getitem__(self, index): return torch.zeros(2), {"box": torch.zeros(4)}
def each(output, target): return functional.cross_entropy(output, target, reduction="none")
def words(output, target): return "good"
def right(output, target): return (output.argmax(1) == target).double().mean()
loss = functional.cross_entropy
text = "model"

class Doubled(hc.data.Objective):
    unit = "pairs"
    def weight(self, batch): return 2.0 * len(batch)
    def loss(self, output, batch): return functional.cross_entropy(output, batch.targets)
    def metrics(self, output, batch): return {}
"""


OWN = {"model": "own_module:model", "data": "own_module:data", "loss": "own_module:loss"}


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "own_module.py").write_text(MODULE, "utf-8")
    monkeypatch.chdir(tmp_path)  # modules there are found
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one])
    yield
    sys.modules.pop("own_module", None)


def made(**settings: Any) -> Any:
    """The parts of a run, whose functions are then tried as before the first step, which changes nothing."""
    given = {name: value for name, value in {**OWN, **settings}.items() if value is not None}
    config = hc.training.Config(**given)
    parts = hc.training.assemble(config)
    before = {name: value.clone() for name, value in parts.model.state_dict().items()}
    try:
        check_functions(config, parts)
    finally:
        assert_same(parts.model.state_dict(), before)
    return parts


def test_the_parts_of_a_run() -> None:
    parts = made(metrics={"right": "own_module:right"})
    assert parts.model[-1].out_features == 5  # a fact of the data
    assert (len(parts.train), len(parts.test)) == (20, 20)
    batch = parts.train.batch([3, 9], [0, 0])
    assert batch.inputs[0].tolist() == [[3.0, 3.0], [9.0, 9.0]] and batch.targets.tolist() == [3, 4]
    output = torch.nn.functional.one_hot(torch.tensor([3, 0]), 5).float()
    assert parts.objective.weight(batch) == 2
    expected = torch.nn.functional.cross_entropy(output, batch.targets)
    assert torch.equal(parts.objective.loss(output, batch), expected)
    assert parts.objective.metrics(output, batch) == {"right": torch.tensor(0.5, dtype=torch.float64)}


def test_other_forms() -> None:
    split = made(data="own_module:Pairs", validation_split=0.25, model_options={"width": 7})
    assert (len(split.train), len(split.test)) == (15, 5) and split.model[0].out_features == 7
    drawn = (one.batch([i], [0]) for one in (split.train, split.test) for i in range(len(one)))
    assert {int(batch.inputs[0][0, 0]) for batch in drawn} == set(range(20))
    assert made(model="own_module:planned").model[0].out_features == 9
    assert made(loss="own_module:Doubled").objective.weight(split.train.batch([0], [0])) == 2
    of_text = {"data": "text:own_module.py", "metrics": {"right": "own_module:right"}}
    on_text = hc.training.assemble(hc.training.Config(model="own_module:model", **of_text))
    assert on_text.objective.unit == "tokens"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"model": "own_module:missing"}, "no model 'own_module:missing'"),
        ({"model": "nowhere:model"}, "no model 'nowhere:model': No module named 'nowhere'"),
        ({"model": "own_module:text"}, "'own_module:text' is a str"),
        ({"model": "own_module:number"}, "returned int, and must return an nn.Module"),
        ({"model_options": {"widht": 3}}, "did you mean 'width'"),
        ({"data": None}, "give data"),
        ({"data": "own_module:endless"}, "own_module:endless returned"),
        ({"data": "own_module:broken", "validation_split": 0.0}, "no batch can be made"),
        ({"loss": None}, "loss: give a function"),
        ({"loss": "own_module:missing"}, "no loss 'own_module:missing'"),
        ({"metrics": {"one": 3}}, "metrics: one is 3"),
        ({"metrics": {"loss": "own_module:right"}}, "metrics: loss is a key of the log"),
        ({"data": "own_module:nothing"}, "own_module:nothing returned NoneType"),
        ({"data": "own_module:fails"}, "data: own_module:fails raised FileNotFoundError: [Errno 2]"),
        ({"data": "own_module:three"}, "own_module:three returned a tuple of 3"),
        ({"data": "own_module:Records"}, "a sample is a dict with the keys x, y"),
        ({"data": "own_module:Boxes"}, "no batch can be made of the samples of own_module:Boxes"),
        ({"data": "own_module:Stream", "steps": 3}, "samples without numbers are for a loop of your own"),
        ({"sequence_length": 8}, "trained on own_module:data, leave it out"),
        ({"data": "own_module:Wide"}, "model own_module:model"),
        ({"data": "own_module:Wide"}, "shape (8, 3)"),
        ({"loss": "own_module:each"}, "loss own_module:each: it returned shape (8,)"),
        ({"metrics": {"right": "own_module:words"}}, 'metrics: right returned "good"'),
    ],
)
def test_errors_are_one_line(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        made(**settings)
    assert "\n" not in str(caught.value)


def test_images_in_tar_files_of_webdataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for shard in range(2):
        with tarfile.open(tmp_path / f"{shard}.tar", "w") as tar:
            for number in range(10):
                image = io.BytesIO()
                Image.new("L", (8, 8), 10 * shard + number).save(image, "png")
                for suffix, content in (("png", image.getvalue()), ("cls", str(number % 3).encode())):
                    member = tarfile.TarInfo(f"part/{shard}{number}.{suffix}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    monkeypatch.setenv("IMAGES", str(tmp_path))
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2] / "examples")
    own = {"model": "own_models:vit", "data": "own_data:images"}
    parts = made(**own, loss="torch.nn.functional:cross_entropy", validation_split=0.2)
    assert (len(parts.train), len(parts.test)) == (16, 4) and parts.model[-1].linear.out_features == 3
    seen = {}
    for data in (parts.train, parts.test):
        batch = data.batch(range(len(data)), [0] * len(data))
        assert batch.inputs[0].shape[1:] == (1, 8, 8)
        shades = (batch.inputs[0][:, 0, 3, 5] * 255).round().int().tolist()
        seen.update(zip(shades, batch.targets.tolist()))
    assert seen == {shade: shade % 10 % 3 for shade in range(20)}
    (tmp_path / "1.tar").unlink()
    with tarfile.open(tmp_path / "1.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("0.png"))
    with pytest.raises(ValueError, match="sample /0 lacks its image or its .cls"):
        made(**own)
