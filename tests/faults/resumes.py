"""The resume test: a job saves, a job of another layout resumes and saves again, and both snapshots have the same bits.

Drawn are pairs of layouts: numbers of ranks, sharding stages, offloading, groups, logical replicas, parts, pipeline stages, local
SGD. Where both jobs have the same layout, the next step must have the same bits, too. Pairs share launches.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

SIZES: dict[str, Any] = {"vocabulary": 24, "length": 6, "width": 16, "heads": 4, "layers": 2, "dropout": 0.0}
OPTIMIZERS: dict[str, dict[str, Any]] = {"AdamW": {"amsgrad": True}, "SGD": {"momentum": 0.9}, "Adagrad": {}}
SAVED, NEXT = 2, 3  # steps
TOGETHER = 10  # pairs of a case
HELPERS = str(Path(__file__).resolve().parents[1] / "helpers")


def _pair(rng: random.Random) -> dict[str, Any]:
    """A case: the layouts of two jobs, and what they have in common."""
    replicas = rng.choice((0, 0, 0, 0, 4))
    there, here = (_layout(rng, replicas) for _ in range(2))
    if rng.random() < 0.2:
        here = there
        if "local" in there and rng.random() < 0.5:
            there["local"] = SAVED + 1  # saved within a period
    # A tied weight of two stages has a whole gradient.
    split = any(one.get("stages", 1) > 1 and one["shard"] > 1 for one in (there, here))
    average = rng.random() < 0.3 and not ("local" in there or "local" in here)
    case = {"there": there, "here": here, "optimizer": rng.choice(list(OPTIMIZERS)), "average": average}
    dtype = rng.choice(("float32", "float32", "bfloat16"))
    return {**case, "dtype": dtype, "tied": rng.random() < 0.3 and not split}


def _layout(rng: random.Random, replicas: int) -> dict[str, Any]:
    ranks = rng.choice((1, 2, 4) if replicas else (1, 2, 3, 4))
    layout: dict[str, Any] = {"ranks": ranks}
    if replicas:
        return {**layout, "replicas": replicas, "shard": rng.choice((0, 1, 2))}
    groups = [[0, 1], [2, 3]] if ranks == 4 else None
    if rng.random() < 0.2:
        layout["local"] = SAVED
        if groups and rng.random() < 0.5:
            layout.update(within=groups, shard=rng.choice((1, 2, 3)))
        return layout
    layout["shard"] = rng.choice((0, 1, 2, 3))
    if ranks % 2 == 0:
        layout["stages"] = rng.choice((1, 1, 2))
        layout["tensor"] = rng.choice((1, 1, 2)) if ranks == 4 or layout["stages"] == 1 else 1
        layout["sequence"] = layout["tensor"] > 1 and rng.random() < 0.5
        if groups and layout["shard"] == 3 and layout["stages"] == layout["tensor"] == 1:
            layout["within"] = rng.choice((None, groups))
    if layout["shard"] and rng.random() < 0.3:
        whole = layout["shard"] == 3 and layout.get("tensor", 1) == 1 and rng.random() < 0.5
        layout["offload"] = "parameters" if whole else "optimizer"
    return layout


# ------------------------------------------------------------------------------------ on each rank


def take_part(folder: Path, case: dict[str, Any], resumes: bool) -> None:
    """Saves, or resumes and saves again."""
    from sharded import distribute

    import hvd_ckpt as hc
    from hvd_ckpt.app.models.gpt import gpt
    from hvd_ckpt.processes import runtime

    layout = case["here" if resumes else "there"]
    hc.shutdown()
    stages, tensor = layout.get("stages", 1), layout.get("tensor", 1)
    runtime.init(stages=stages, tensor=tensor, stall_timeout=100)
    torch.manual_seed(2 if resumes else 1)
    model: Any = gpt(**SIZES, tied=case["tied"]).to(getattr(torch, case["dtype"]))
    if tensor > 1:
        model = hc.tensor_parallel(model, sequence=layout.get("sequence", False))
    if stages > 1:
        model = hc.Pipeline(model, chunks=1)
    kind = getattr(torch.optim, case["optimizer"])
    wrapped = kind(model.parameters(), lr=0.01, **OPTIMIZERS[case["optimizer"]])
    options = {name: layout[name] for name in ("shard", "within", "offload", "replicas") if layout.get(name)}
    named = list(model.named_parameters())
    if "local" in layout:
        optimizer: Any = hc.LocalSGD(wrapped, named, every=layout["local"], model=model, **options)
    else:
        optimizer = distribute(wrapped, named, model=model, **options)
    average = hc.AveragedWeights(optimizer) if case["average"] else None

    def loss_of(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(scores.float().flatten(0, 1), tokens.flatten())

    def step() -> None:
        tokens = torch.arange(2 * SIZES["length"]).view(2, -1) % SIZES["vocabulary"]
        optimizer.zero_grad()
        if stages > 1:
            model.accumulate((tokens, tokens), loss_of)
        else:
            for each in optimizer.local_replicas() if "replicas" in layout else [contextlib.nullcontext()]:
                with each:
                    loss_of(model(tokens), tokens).backward()
        optimizer.step()
        if average is not None:
            average.update_parameters()

    def snapshots_in(name: str) -> hc.Snapshots:
        return hc.Snapshots(folder / name, model=model, optimizer=optimizer, average=average)

    if resumes:
        with snapshots_in("there") as snapshots:
            assert snapshots.resume() == SAVED
    else:
        for _ in range(SAVED):
            step()
    with snapshots_in("here" if resumes else "there") as snapshots:
        snapshots.save(SAVED)
    if case["there"] == case["here"]:
        step()
        with snapshots_in("here-next" if resumes else "there-next") as snapshots:
            snapshots.save(NEXT)


def work(folder: Path, part: str) -> None:
    """All cases of this part and of as many ranks that no launch before has taken."""
    import hvd_ckpt as hc

    hc.init()
    for number in hc.broadcast_object(_left(folder, part, hc.size()), 0):
        case, place = json.loads((folder / "cases.json").read_text())[number], folder / str(number)
        (place / f"{part}.taken").touch()
        try:
            take_part(place, case, part == "here")
        except Exception:
            (place / f"{part}.error").write_text(traceback.format_exc())
            raise


def _left(folder: Path, part: str, ranks: int) -> list[int]:
    """The cases of a part and of so many ranks that are still to be run."""
    return [
        number
        for number, case in enumerate(json.loads((folder / "cases.json").read_text()))
        if case[part]["ranks"] == ranks and not (folder / str(number) / f"{part}.taken").exists()
        if part == "there" or not (folder / str(number) / "there.error").exists()
    ]


# ------------------------------------------------------------------------------------ the test


def _faults(folder: Path, case: dict[str, Any]) -> Iterator[str]:
    """What is wrong with a pair."""
    from snapshot_files import read_snapshot

    for error in folder.glob("*.error"):
        yield f"{error.stem}: {error.read_text()}"
        return
    if not (folder / "here" / "snapshots").is_dir():
        yield "a rank ended without an error"
        return
    same = case["there"] == case["here"]
    for step, suffix in [(SAVED, ""), (NEXT, "-next")][: 1 + same]:
        name = f"step-{step:08d}"
        folders = (folder / f"{part}{suffix}" / "snapshots" for part in ("there", "here"))
        there, here = (read_snapshot(each / name, 0) for each in folders)
        kinds = {name.partition("/")[0] for name in {**there.manifest.tensors, **here.manifest.tensors}}
        if not {"weights"} <= kinds or sum(kind.startswith("optimizer.") for kind in kinds) == 0:
            yield f"{name} has {kinds}"
        for kind in kinds:
            if same or "@" not in kind:
                yield from _differing(kind, there, here)


def _differing(kind: str, there: Any, here: Any) -> Iterator[str]:
    """What differs in the tensors of a kind; where the new layout has another precision for them, from their values in it."""
    from faults.checks import differing

    before, after = there.whole_tensors(kind), here.whole_tensors(kind)
    if kind == "master_weights" and not after:
        return
    if kind == "master_weights" and not before:  # they begin with the weights
        before = {name: value for name, value in there.whole_tensors("weights").items() if name in after}
    for name in before.keys() & after.keys():
        before[name] = before[name].to(after[name].dtype)
    yield from differing(kind, before, after)


def draw(seed: int, ranks: int, controller: str) -> list[dict[str, Any]]:
    """Pairs of layouts."""
    rng = random.Random(seed)
    return [_pair(rng) for _ in range(TOGETHER)]


def check(cases: list[dict[str, Any]]) -> Iterator[str]:
    """Runs pairs; what is wrong."""
    from controllers import run_ranks
    from notes import Note

    with tempfile.TemporaryDirectory(prefix="hvd_ckpt_resumes_") as made:
        folder = Path(made)
        for number in range(len(cases)):
            (folder / str(number)).mkdir()
        (folder / "cases.json").write_text(json.dumps(cases))
        for part in ("there", "here"):
            for ranks in sorted({case[part]["ranks"] for case in cases}):
                while _left(folder, part, ranks):  # after an error, a new launch runs the others
                    environment = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1", "PYTHONPATH": HELPERS}
                    status, output = run_ranks(ranks, Path(__file__), str(folder), part, **environment)
                    if status:
                        yield f"{part} on {ranks} ranks: {output[-3000:]}"
        for number, case in enumerate(cases):
            if faults := list(_faults(folder / str(number), case)):
                yield f"pair {number}: {case}: {'; '.join(faults[:3])}"
    same = sum(case["there"] == case["here"] for case in cases)
    yield Note(f"{len(cases)} pairs, {same} of them with a further step")


if __name__ == "__main__":
    work(Path(sys.argv[1]), sys.argv[2])
