"""Transformers' Trainer over Horovod: against one process, against itself, and what ranks decide together."""

from __future__ import annotations

import copy
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from same import assert_same
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

import hvd_ckpt as hc

pytest.importorskip(
    "accelerate", reason="accelerate is not installed: pip install -r install/requirements-tests.txt"
)
import transformers

from hvd_ckpt.app.integrations.transformers import SaveOnSignal, Seq2SeqTrainer, Trainer

pytestmark = pytest.mark.ranks(gloo=(2,))

ROUNDING = 1e-4


class Rows(Dataset):
    """Rows of tokens, which have different numbers of labels; ``drawn`` has random numbers, one for each row that is read."""

    def __init__(self, rows: int = 12) -> None:
        self.tokens = torch.randint(1, 32, (rows, 8), generator=torch.Generator().manual_seed(0))
        self.drawn: list[float] = []

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.drawn.append(numpy.random.rand() + random.random())
        row = self.tokens[index]
        kept = torch.where(torch.arange(8) < 3 + index % 5, row, -100)
        kept[0] = -100  # which is never predicted
        return {"input_ids": row, "labels": kept}


class Points(Dataset):
    """The first ``size`` of some points."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x, self.y = (torch.randn(256, width, generator=generator)[:size] for width in (4, 1))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.x[index], "labels": self.y[index]}


class Stream(Points, IterableDataset):
    """Points that are not asked for by number."""

    def __iter__(self):
        return (self[index] for index in range(len(self)))


def causal(dropout: float = 0.0) -> Any:
    torch.manual_seed(7 + hc.rank())
    sizes = {"vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, **drops, bos_token_id=0, eos_token_id=0)
    )


class Normed(torch.nn.Module):
    """A batch norm, whose statistics differ between ranks; ``seen`` has the first column of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 1)
        )
        self.seen: list[float] = []

    def forward(self, x, labels):
        self.seen.extend(x[:, 0].tolist())
        logits = self.layers(x)
        return {"loss": torch.nn.functional.mse_loss(logits, labels), "logits": logits}


OF_TRAINER = {"shard", "budget", "callbacks", "compute_metrics", "optimizers"}


def trained(
    folder: Path,
    model: Any = None,
    resume: Any = None,
    drawn_from: int = 1,
    kind: Any = Trainer,
    **settings: Any,
) -> Any:
    """A Trainer that has trained, by default a model with dropout."""
    own = {name: settings.pop(name) for name in OF_TRAINER & settings.keys()}
    data = settings.pop("data", None) or Rows()
    given = {"per_device_train_batch_size": 2, "max_steps": 5, "learning_rate": 1e-2, "logging_steps": 1}
    given |= {"lr_scheduler_type": "linear", "optim": "adamw_torch", "save_strategy": "no"}
    given |= {"use_cpu": True, "report_to": [], "disable_tqdm": True, **settings}
    generates = kind is Seq2SeqTrainer
    of_kind = transformers.Seq2SeqTrainingArguments if generates else transformers.TrainingArguments
    args = of_kind(str(folder / "run"), **given)
    trainer = kind(model or causal(0.1), args, train_dataset=data, eval_dataset=data, **own)
    for callback in own.get("callbacks", ()):
        callback.trainer = trainer
    torch.manual_seed(drawn_from + hc.rank())
    trainer.train(resume_from_checkpoint=resume)
    hc.barrier()
    hc.verify(trainer.model)
    return trainer


def decided(folder: Path, model: Any = None, **settings: Any) -> Any:
    """One that has decided about its steps, its best model and its rates, the same on all ranks, by evaluations of points."""
    given = {"per_device_train_batch_size": 4, "learning_rate": 0.03, "max_steps": 30}
    given |= {"lr_scheduler_type": "constant", "eval_strategy": "steps", "eval_steps": 1}
    given |= {"metric_for_best_model": "loss", "greater_is_better": False}
    trainer = trained(folder, model or Normed(), **{**given, "data": Points(64), **settings})
    state = trainer.state
    found = {
        "step": state.global_step,
        "best": (state.best_metric, state.best_global_step, state.best_model_checkpoint),
        "metrics": [entry["eval_loss"] for entry in state.log_history if "eval_loss" in entry],
        "rates": [entry["learning_rate"] for entry in state.log_history if "learning_rate" in entry],
        "model": {name: value.tolist() for name, value in trainer.model.state_dict().items()},
    }
    for other in hc.allgather_object(found):
        assert other == found
    return trainer


# ------------------------------------------------------------------------------------ what is computed


def test_a_causal_model_weighs_tokens_of_all_ranks(folder: Path) -> None:
    """Rows have different numbers of tokens: one step is that of one process on all rows."""
    data, model = Rows(4 * hc.size()), causal()
    alone = copy.deepcopy(model)
    hc.broadcast_parameters(alone.state_dict(), root_rank=0)
    loss = alone(**{name: torch.stack([row[name] for row in data]) for name in data[0]}).loss
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 1e9)
    sgd = {"optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 1e9}
    trainer = trained(folder, model, data=data, gradient_accumulation_steps=2, max_steps=1, **sgd)
    entry = next(entry for entry in trainer.state.log_history if "loss" in entry)
    assert entry["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert entry["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    torch.optim.SGD(alone.parameters(), lr=1.0).step()
    assert_same(trainer.model.state_dict(), alone.state_dict(), ROUNDING)


@pytest.mark.parametrize("shard", ["gradients", "parameters"])
def test_sharding_evaluates_generates_and_saves(folder: Path, shard: str) -> None:
    settings = {"eval_strategy": "steps", "eval_steps": 2, "max_grad_norm": 0.1}
    trainer, whole = (trained(folder, causal(), shard=stage, **settings) for stage in (shard, "none"))
    assert_same(trainer.model.state_dict(), whole.model.state_dict(), ROUNDING)
    made = trainer.model.generate(Rows().tokens[:2, :3], max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert made.shape[0] == 2
    trainer.save_model()
    hc.barrier()
    loaded = transformers.GPT2LMHeadModel.from_pretrained(folder / "run")
    assert_same(loaded.state_dict(), trainer.model.state_dict())


def test_generation_during_evaluation(folder: Path) -> None:
    torch.manual_seed(7)
    sizes = {f"{part}_{what}": 1 for part in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    sizes |= {"vocab_size": 32, "d_model": 16, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    config = transformers.BartConfig(**sizes, max_position_embeddings=32)
    model, shapes, data = transformers.BartForConditionalGeneration(config), [], Rows(4)
    settings = {"predict_with_generate": True, "generation_max_length": 6, "kind": Seq2SeqTrainer}
    settings["compute_metrics"] = lambda found: shapes.append(found.predictions.shape) or {}
    trained(folder, model, data=data, **settings).evaluate()
    assert len(shapes[0]) == 2 and shapes[0][0] == len(data)  # tokens, not logits


def test_gradient_checkpointing_and_a_budget_keep_the_bits_and_what_samples_draw(folder, quick_planner):
    plain, recomputed, planned = (
        trained(folder, data=Rows(), **how)
        for how in ({}, {"gradient_checkpointing": True}, {"budget": "0.8x"})
    )
    for other in (recomputed, planned):
        assert_same(other.model.state_dict(), plain.model.state_dict())
    drawn, for_a_plan_too = plain.train_dataset.drawn, planned.train_dataset.drawn
    assert len(for_a_plan_too) > len(drawn) and for_a_plan_too[-len(drawn) :] == drawn


def test_losses_and_counts_are_those_of_all_ranks_and_the_main_process_is_first(folder: Path) -> None:
    trainer = trained(folder, causal(), max_steps=3, logging_steps=2, include_num_input_tokens_seen="all")
    state, batch = trainer.state, {"input_ids": torch.zeros(2, 8)}
    of_a_batch = trainer.floating_point_ops(batch), batch["input_ids"].numel()
    assert (state.total_flos, state.num_input_tokens_seen) == tuple(3 * hc.size() * one for one in of_a_batch)
    losses = [entry["train_loss"] for entry in state.log_history if "train_loss" in entry]
    assert len(losses) == 1 and set(hc.allgather_object(losses[0])) == set(losses)
    assert trainer.is_world_process_zero() == (hc.rank() == 0)
    with trainer.args.main_process_first(local=False):
        if hc.rank() == 0:
            trainer.log({"loss": 1.0})  # on one rank
            assert state.log_history[-1]["loss"] == 1.0
            time.sleep(0.2)
            (folder / "made").touch()
        assert (folder / "made").exists()


def test_another_training_has_the_users_optimizer(folder: Path) -> None:
    """Which has an attribute like a wrapper."""

    class Kinds(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
            found.append(isinstance(optimizer.optimizer, torch.optim.SGD))

    trainers, found = [], []
    for shard in ("none", "parameters"):
        model = Normed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.03)
        optimizer.optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
        settings = {"optimizers": (optimizer, None), "max_steps": 2, "eval_strategy": "no"}
        trainer = decided(folder, model, shard=shard, callbacks=[Kinds()], **settings)
        assert trainer.create_optimizer() is trainer.create_optimizer()
        trainer.train()
        trainers.append(trainer)
    assert found == [True] * 8
    assert_same(*(dict(trainer.model.named_parameters()) for trainer in trainers), tolerance=1e-5)


# ------------------------------------------------------------------------------------ data


class OwnSampler(Trainer):
    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return WeightedRandomSampler(torch.ones(32), 32, replacement=False)


class OwnLoader(Trainer):
    def get_train_dataloader(self) -> Any:
        loader = DataLoader(self.train_dataset, 4, shuffle=True, collate_fn=self.data_collator)
        return self.accelerator.prepare(loader)


class OwnDistributedLoader(Trainer):
    def get_train_dataloader(self) -> Any:
        sampler = hc.data.DistributedSampler(self.train_dataset, 4, epochs=1)
        return self.accelerator.prepare(hc.data.DataLoader(self.train_dataset, sampler))


@pytest.mark.parametrize(
    ("kind", "data"),
    [(OwnSampler, Points), (OwnLoader, Points), (OwnDistributedLoader, Points), (Trainer, Stream)],
)
def test_data_of_the_user_are_divided_over_the_ranks(folder: Path, kind: Any, data: Any) -> None:
    points, model = data(32), Normed()
    settings = {"per_device_train_batch_size": 4, "max_steps": -1, "num_train_epochs": 1}
    trainer = trained(folder, model, kind=kind, data=points, **settings)
    assert trainer.state.global_step == trainer.state.max_steps == 32 // 4 // hc.size()
    seen = [value for of_rank in hc.allgather_object(model.seen) for value in of_rank]
    assert sorted(seen) == sorted(points.x[:, 0].tolist())
    model.seen.clear()
    trainer.evaluate(Points(32))
    assert model.seen == points.x[:, 0].tolist()


# ------------------------------------------------------------------------------------ stops and resumes


class Asks(transformers.TrainerCallback):
    """Asks for a stop before the third step: rank 1 by a signal, or rank 0 by the file."""

    def __init__(self, way: str) -> None:
        self.way = way

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2 and self.way == "signal" and hc.rank() == 1:
            signal.raise_signal(signal.SIGTERM)
        if state.global_step == 2 and self.way == "file" and hc.rank() == 0:
            Path(args.output_dir, "stop").touch()


@pytest.mark.parametrize("way, shard", [("signal", "none"), ("file", "parameters")])
def test_a_request_to_one_rank_stops_all_with_a_checkpoint(folder, monkeypatch, way, shard) -> None:
    monkeypatch.setattr("hvd_ckpt.processes.stopping.LOOK_SECONDS", 0.0)
    whole = trained(folder, shard=shard)
    handler, stop = signal.getsignal(signal.SIGTERM), SaveOnSignal(folder / "run")
    with pytest.raises(SystemExit) as ended:
        trained(folder, shard=shard, callbacks=[stop, Asks(way)])
    assert ended.value.code == (128 + signal.SIGTERM if way == "signal" else 0)
    assert signal.getsignal(signal.SIGTERM) is handler and not (folder / "run" / "stop").exists()
    assert len(list(Path(stop.checkpoint).glob("rng_state*.pth"))) == hc.size()
    stored = torch.load(Path(stop.checkpoint, "training_args.bin"), weights_only=False)
    assert type(stored) is transformers.TrainingArguments
    resumed = trained(folder, resume=stop.checkpoint, drawn_from=50, shard=shard)
    assert_same(resumed.model.state_dict(), whole.model.state_dict())


@pytest.mark.parametrize("shard", ["optimizer", "parameters"])
def test_a_checkpoint_on_each_host(folder: Path, monkeypatch: pytest.MonkeyPatch, shard: str) -> None:
    monkeypatch.setattr(hc, "local_rank", lambda: 0)  # as if each rank were on a host of its own
    own = folder / str(hc.rank())
    settings = {"save_strategy": "steps", "save_steps": 3, "save_on_each_node": True, "shard": shard}
    whole = trained(own, **settings)
    checkpoint = own / "run" / "checkpoint-3"
    assert len(torch.load(checkpoint / "optimizer.pt", weights_only=True)["state"]) > 0
    resumed = trained(own, resume=str(checkpoint), drawn_from=50, **settings)
    assert_same(resumed.model.state_dict(), whole.model.state_dict())


# ------------------------------------------------------------------------------------ decisions


@pytest.mark.parametrize("shard", ["none", "optimizer", "gradients", "parameters"])
def test_ranks_stop_early_together_with_the_same_best_model(folder: Path, shard: str) -> None:
    """Which is that of the highest loss here, so that it is not the last. Training does not depend on evaluations."""
    loads = {"load_best_model_at_end": True} if shard in ("none", "optimizer") else {}
    best = {"callbacks": [transformers.EarlyStoppingCallback(2)], "save_strategy": "best", **loads}
    trainer = decided(folder, shard=shard, max_steps=12, greater_is_better=True, **best)
    steps = trainer.state.global_step
    assert 0 < trainer.state.best_global_step < steps < 12
    if loads:
        assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric)
    else:  # as the statistics of each rank stay its own
        without = decided(folder, shard=shard, eval_strategy="no", max_steps=steps)
        assert_same(trainer.model.state_dict(), without.model.state_dict())


class Moody(transformers.TrainerCallback):
    """A callback that decides in another way on each rank, and logs on rank 0 alone."""

    trainer: Any
    inside = False

    def __init__(self, event: str, flag: str, when: int) -> None:
        self.flag, self.when = flag, when
        setattr(self, event, self.decide)

    def decide(self, args, state, control, **others):
        if hc.rank() == 0 and not self.inside:
            self.inside = True  # as the log is an event, too
            self.trainer.log({"own": 1.0})
            self.inside = False
        setattr(control, self.flag, state.global_step >= self.when + 3 * hc.rank())
        return control


@pytest.mark.parametrize(
    ("event", "flag"),
    [
        ("on_step_end", "should_training_stop"),
        ("on_step_begin", "should_epoch_stop"),
        ("on_substep_end", "should_training_stop"),
        ("on_step_end", "should_save"),
        ("on_evaluate", "should_training_stop"),
        ("on_log", "should_evaluate"),
        ("on_log", "should_save"),
        ("on_optimizer_step", "should_log"),
        ("on_save", "should_training_stop"),
    ],
)
@pytest.mark.parametrize("everywhere", [True, False])
def test_what_callbacks_of_the_user_decide_is_rank_0s(folder, event, flag, everywhere) -> None:
    own = [Moody(event, flag, 4)] if everywhere or hc.rank() == 0 else []
    settings = {"save_strategy": "steps", "save_steps": 2} if event == "on_save" else {}
    settings |= {"eval_steps": 7} if flag == "should_evaluate" else {}
    settings |= {"max_steps": 10, "gradient_accumulation_steps": 2, "eval_on_start": True}
    trainer = decided(folder, shard="optimizer", callbacks=own, **settings)
    if flag == "should_training_stop":
        assert trainer.state.global_step < 7


def test_metrics_are_rank_0s_and_a_stop_stays_due_after_an_evaluation_that_is_not_the_best(folder) -> None:
    own = {"compute_metrics": lambda found: {"own": float(hc.rank())}, "metric_for_best_model": "own"}
    assert decided(folder, max_steps=3, **own).state.best_metric == 0.0
    stop = SaveOnSignal(folder / "run")
    with pytest.raises(SystemExit):
        decided(folder, save_strategy="best", callbacks=[stop, Asks("signal")], **own)
    assert stop.checkpoint is not None and not stop.checkpoint.endswith("-1")


@pytest.mark.parametrize(
    ("setting", "values"),
    [("max_steps", (3, 5)), ("eval_steps", (1, 2)), ("learning_rate", (0.1, 0.2)), ("seed", (1, 2))],
)
def test_settings_that_differ_between_ranks_are_named(folder: Path, setting: str, values: Any) -> None:
    name = "data_seed" if setting == "seed" else setting
    with pytest.raises(ValueError, match=f"{name}.* differs between ranks"):
        decided(folder, **{setting: values[hc.rank()]})
