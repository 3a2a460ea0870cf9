"""Transformers' Trainer over Horovod, against plain loops and against itself."""

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
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

import hvd_ckpt as hc

pytest.importorskip(
    "accelerate", reason="accelerate is not installed: pip install -r install/requirements-tests.txt"
)
import transformers

from hvd_ckpt.app.integrations.transformers import SaveOnSignal, Seq2SeqTrainer, Trainer

pytestmark = pytest.mark.ranks(gloo=(2,))

SGD = {"optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 1e9}


class Rows(Dataset):
    """Rows of tokens, which have different numbers of labels."""

    def __init__(self, rows: int = 12) -> None:
        self.tokens = torch.randint(1, 32, (rows, 8), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.tokens[index]
        kept = torch.where(torch.arange(8) < 3 + index % 5, row, -100)
        kept[0] = -100  # which is never predicted
        return {"input_ids": row, "labels": kept}


def causal(dropout: float = 0.0) -> Any:
    torch.manual_seed(7 + hc.rank())
    sizes = {"vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, **drops, bos_token_id=0, eos_token_id=0)
    )


def arguments(folder: Any, kind: Any = transformers.TrainingArguments, **settings: Any) -> Any:
    given = {
        "per_device_train_batch_size": 2,
        "max_steps": 5,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "linear",
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "optim": "adamw_torch",
    }
    return kind(str(folder / "run"), **{**given, **settings})


def trained(
    folder: Any, resume: Any = None, model: Any = None, seed: int = 1, extra: Any = None, **settings: Any
) -> Any:
    """A Trainer that has trained, by default a model with dropout."""
    args, model, data = arguments(folder, **settings), model or causal(0.1), Rows()
    trainer = Trainer(model, args, train_dataset=data, eval_dataset=data, **(extra or {}))
    torch.manual_seed(seed + hc.rank())
    trainer.train(resume_from_checkpoint=resume)
    hc.barrier()
    return trainer


def same_bits(model: Any, other: Any) -> None:
    hc.verify(model)
    for (name, value), expected in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(value, expected), name


def test_a_causal_model_weighs_tokens_of_all_ranks(folder) -> None:
    """Rows have different numbers of tokens: one step is that of one process on all rows."""
    data, model = Rows(4 * hc.size()), causal()
    alone = copy.deepcopy(model)
    hc.broadcast_parameters(alone.state_dict(), root_rank=0)
    batch = {name: torch.stack([data[row][name] for row in range(len(data))]) for name in data[0]}
    loss = alone(**batch).loss
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 1e9)
    args = arguments(folder, gradient_accumulation_steps=2, max_steps=1, **SGD)
    trainer = Trainer(model, args, train_dataset=data)
    trainer.train()
    entry = next(entry for entry in trainer.state.log_history if "loss" in entry)
    assert entry["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert entry["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    torch.optim.SGD(alone.parameters(), lr=1.0).step()
    for value, expected in zip(trainer.model.parameters(), alone.parameters()):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shard", ["gradients", "parameters"])
def test_sharding_evaluates_generates_and_saves(folder, shard: str) -> None:
    settings = {"eval_strategy": "steps", "eval_steps": 2, "max_grad_norm": 0.1}
    trainer = trained(folder, model=causal(), extra={"shard": shard}, **settings)
    other = trained(folder, model=causal(), **settings)
    for value, expected in zip(trainer.model.parameters(), other.model.parameters()):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)
    made = trainer.model.generate(Rows().tokens[:2, :3], max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert made.shape[0] == 2
    trainer.save_model()
    hc.barrier()
    same_bits(transformers.GPT2LMHeadModel.from_pretrained(folder / "run"), trainer.model)


def test_generation_during_evaluation(folder) -> None:
    torch.manual_seed(7)
    config = transformers.BartConfig(
        vocab_size=32, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=32,
    )  # fmt: skip
    model = transformers.BartForConditionalGeneration(config)
    args = arguments(
        folder, transformers.Seq2SeqTrainingArguments, predict_with_generate=True, generation_max_length=6
    )
    shapes = []

    def seen(prediction):
        shapes.append(prediction.predictions.shape)
        return {}

    data = Rows(4)
    trainer = Seq2SeqTrainer(model, args, train_dataset=data, eval_dataset=data, compute_metrics=seen)
    trainer.train()
    trainer.evaluate()
    assert len(shapes[0]) == 2 and shapes[0][0] == len(data)  # tokens, not logits


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
def test_a_request_to_one_rank_stops_all_with_a_checkpoint(folder, monkeypatch, way: str, shard: str) -> None:
    monkeypatch.setattr("hvd_ckpt.processes.stopping.LOOK_SECONDS", 0.0)
    extra = {"shard": shard}
    whole = trained(folder, extra=extra)
    handler = signal.getsignal(signal.SIGTERM)
    stop = SaveOnSignal(folder / "run")
    with pytest.raises(SystemExit) as ended:
        trained(folder, extra={**extra, "callbacks": [stop, Asks(way)]})
    assert ended.value.code == (128 + signal.SIGTERM if way == "signal" else 0)
    assert signal.getsignal(signal.SIGTERM) is handler and not (folder / "run" / "stop").exists()
    assert len(list(Path(stop.checkpoint).glob("rng_state*.pth"))) == hc.size()
    stored = torch.load(Path(stop.checkpoint, "training_args.bin"), weights_only=False)
    assert type(stored) is transformers.TrainingArguments
    resumed = trained(folder, stop.checkpoint, seed=50, extra=extra)
    same_bits(resumed.model, whole.model)


def test_gradient_checkpointing_and_a_budget_keep_the_bits(folder, quick_planner) -> None:
    plain = trained(folder)
    same_bits(trained(folder, gradient_checkpointing=True).model, plain.model)
    same_bits(trained(folder, extra={"budget": "0.8x"}).model, plain.model)


def test_a_plan_leaves_what_samples_draw_to_the_training(folder, quick_planner) -> None:
    drawn: list[list[float]] = [[]]

    class Drawing(Rows):
        def __getitem__(self, index: int) -> dict[str, Any]:
            drawn[-1].append(numpy.random.rand() + random.random())
            return super().__getitem__(index)

    for budget in (None, "0.8x"):
        trainer = Trainer(causal(), arguments(folder), train_dataset=Drawing(), budget=budget)
        trainer.train()
        drawn.append([])
    without, planned, _ = drawn
    assert len(planned) > len(without) and planned[-len(without) :] == without


class Normed(torch.nn.Module):
    """A batch norm, whose statistics differ between ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 1)
        )

    def forward(self, x, labels):
        logits = self.layers(x)
        return {"loss": torch.nn.functional.mse_loss(logits, labels), "logits": logits}


class Points(Dataset):
    """The first ``size`` of some points; ``seen`` collects the numbers of those that are read."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x, self.y = (torch.randn(256, width, generator=generator)[:size] for width in (4, 1))
        self.seen: list[int] = []

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.seen.append(index)
        return {"x": self.x[index], "labels": self.y[index]}


def decided(folder: Any, model: Any = None, shard: str = "none", **settings: Any) -> Any:
    """A Trainer that has trained by its decisions; which are the same on all ranks."""
    names = {"callbacks", "compute_metrics", "optimizers"} & settings.keys()
    extra = {name: settings.pop(name) for name in names}
    given = {"per_device_train_batch_size": 4, "learning_rate": 0.03, "max_steps": 30}
    given |= {"lr_scheduler_type": "constant", "eval_strategy": "steps", "eval_steps": 1}
    given |= {"metric_for_best_model": "loss", "greater_is_better": False}
    args, data = arguments(folder, **{**given, **settings}), (Points(256), Points(64))
    trainer = Trainer(model or Normed(), args, None, *data, shard=shard, **extra)
    trainer.train()
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


@pytest.mark.parametrize("shard", ["none", "optimizer", "parameters"])
def test_ranks_choose_the_same_best_model_and_load_it(folder, shard: str) -> None:
    best = {} if shard == "parameters" else {"load_best_model_at_end": True}
    # The highest loss, so that the best model is not the last.
    trainer = decided(folder, shard=shard, save_strategy="best", max_steps=12, **best, greater_is_better=True)
    assert 0 < trainer.state.best_global_step < 12
    if best:
        found = trainer.evaluate()["eval_loss"]
        assert found == pytest.approx(trainer.state.best_metric)


@pytest.mark.parametrize("shard", ["none", "gradients"])
def test_ranks_stop_early_together(folder, shard: str) -> None:
    trainer = decided(folder, shard=shard, callbacks=[transformers.EarlyStoppingCallback(2)])
    assert trainer.state.global_step < 30


def test_an_evaluation_leaves_each_rank_its_own_statistics(folder) -> None:
    """So training does not depend on it."""
    often, never = decided(folder), decided(folder, eval_strategy="no")
    assert often.model.state_dict().keys() == never.model.state_dict().keys()
    for name, value in often.model.state_dict().items():
        assert torch.equal(value, never.model.state_dict()[name]), name


class Moody(transformers.TrainerCallback):
    """A callback that decides in another way on each rank, and logs on rank 0 alone."""

    def __init__(self, event: str, flag: str, when: int) -> None:
        self.flag, self.when, self.trainer, self.inside = flag, when, None, False
        setattr(self, event, self.decide)

    def decide(self, args, state, control, **others):
        if hc.rank() == 0 and self.trainer is not None and not self.inside:
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
def test_what_callbacks_of_the_user_decide_is_rank_0s(
    folder, event: str, flag: str, everywhere: bool
) -> None:
    callback = Moody(event, flag, 4)
    own = [callback] if everywhere or hc.rank() == 0 else []
    settings = {"save_strategy": "steps", "save_steps": 2} if event == "on_save" else {}
    settings |= {"eval_steps": 7} if flag == "should_evaluate" else {}
    settings |= {"max_steps": 10, "gradient_accumulation_steps": 2, "eval_on_start": True}
    trainer = decided(folder, shard="optimizer", callbacks=own, **settings)
    if flag == "should_training_stop":
        assert trainer.state.global_step < 7


def test_metrics_are_rank_0s(folder) -> None:
    own = {"compute_metrics": lambda found: {"own": float(hc.rank())}, "metric_for_best_model": "own"}
    assert decided(folder, max_steps=3, **own).state.best_metric == 0.0


@pytest.mark.parametrize(
    ("setting", "values"),
    [("max_steps", (3, 5)), ("eval_steps", (1, 2)), ("learning_rate", (0.1, 0.2)), ("seed", (1, 2))],
)
def test_settings_that_differ_between_ranks_are_named(folder, setting: str, values: tuple[Any, Any]) -> None:
    name = "data_seed" if setting == "seed" else setting
    with pytest.raises(ValueError, match=f"{name}.* differs between ranks"):
        decided(folder, **{setting: values[hc.rank()]})


class Noting(Normed):
    """Notes the first column of what it is trained with."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def forward(self, x, labels):
        self.seen.extend(x[:, 0].tolist())
        return super().forward(x, labels)


class Stream(IterableDataset):
    def __init__(self, points: Points) -> None:
        self.points = points

    def __len__(self) -> int:
        return len(self.points)

    def __iter__(self):
        return (self.points[index] for index in range(len(self.points)))


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


@pytest.mark.parametrize("kind", [OwnSampler, OwnLoader, OwnDistributedLoader, Trainer])
def test_data_of_the_user_are_divided_over_the_ranks(folder, kind: Any) -> None:
    points, model = Points(32), Noting()
    args = arguments(folder, per_device_train_batch_size=4, max_steps=-1, num_train_epochs=1)
    data = Stream(points) if kind is Trainer else points
    trainer = kind(model, args, train_dataset=data, eval_dataset=points)
    torch.manual_seed(hc.rank())
    trainer.train()
    assert trainer.state.global_step == trainer.state.max_steps == 32 // 4 // hc.size()
    seen = [value for of_rank in hc.allgather_object(model.seen) for value in of_rank]
    assert sorted(seen) == sorted(points.x[:, 0].tolist())
    model.seen.clear()
    trainer.evaluate()
    assert model.seen == points.x[:, 0].tolist()


def test_a_stop_stays_due_after_an_evaluation_that_is_not_the_best(folder) -> None:
    stop = SaveOnSignal(folder / "run")
    own = {"compute_metrics": lambda found: {"own": 0.0}, "metric_for_best_model": "own"}
    with pytest.raises(SystemExit):
        decided(folder, save_strategy="best", callbacks=[stop, Asks("signal")], **own)
    assert stop.checkpoint is not None and not stop.checkpoint.endswith("-1")


def test_losses_and_counts_are_those_of_all_ranks(folder) -> None:
    args = arguments(folder, max_steps=3, logging_steps=2, include_num_input_tokens_seen="all")
    trainer = Trainer(causal(), args, train_dataset=Rows())
    result = trainer.train()
    found = (result.training_loss, trainer.state.total_flos, trainer.state.num_input_tokens_seen)
    assert set(hc.allgather_object(found)) == {found}
    batch = {"input_ids": torch.zeros(2, 8)}
    of_a_batch = trainer.floating_point_ops(batch), batch["input_ids"].numel()
    assert found[1:] == tuple(3 * hc.size() * number for number in of_a_batch)
    if hc.rank() == 0:
        trainer.log({"loss": 1.0})
        assert trainer.state.log_history[-1]["loss"] == 1.0


@pytest.mark.parametrize("shard", ["optimizer", "parameters"])
def test_a_checkpoint_on_each_host(folder, monkeypatch, shard: str) -> None:
    monkeypatch.setattr(hc, "local_rank", lambda: 0)  # as if each rank were on a host of its own
    own = folder / str(hc.rank())
    settings = {"save_strategy": "steps", "save_steps": 3, "save_on_each_node": True}
    settings["extra"] = {"shard": shard}
    whole = trained(own, **settings)
    checkpoint = own / "run" / "checkpoint-3"
    assert len(torch.load(checkpoint / "optimizer.pt", weights_only=True)["state"]) > 0
    resumed = trained(own, str(checkpoint), seed=50, **settings)
    same_bits(resumed.model, whole.model)


class Kinds(transformers.TrainerCallback):
    def __init__(self) -> None:
        self.found: list[bool] = []

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        self.found.append(isinstance(optimizer.optimizer, torch.optim.SGD))


def test_another_training_has_the_users_optimizer(folder) -> None:
    models, kinds = [], Kinds()
    for shard in ("none", "parameters"):
        model = Normed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.03)
        settings = {"optimizers": (optimizer, None), "max_steps": 2, "eval_strategy": "no"}
        trainer = decided(folder, model, shard, callbacks=[kinds], **settings)
        trainer.train()
        models.append(model)
    assert kinds.found == [True] * 8
    for value, expected in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(value, expected)


def test_the_main_process_is_first(folder) -> None:
    args = arguments(folder)
    trainer = Trainer(Normed(), args, train_dataset=Points(8))
    assert trainer.is_world_process_zero() == (hc.rank() == 0)
    with args.main_process_first(local=False):
        if hc.rank() == 0:
            time.sleep(0.2)
            (folder / "made").touch()
        assert (folder / "made").exists()


def test_an_optimizer_with_an_attribute_like_a_wrapper(folder) -> None:
    model = Normed()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
    args = arguments(folder, max_steps=2)
    trainer = Trainer(model, args, train_dataset=Points(16), optimizers=(optimizer, None))
    assert trainer.create_optimizer() is trainer.create_optimizer()
    trainer.train()
    hc.verify(model)
