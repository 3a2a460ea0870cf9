"""Lightning's Trainer over Horovod, with modules as Lightning's users write them."""

from __future__ import annotations

import math
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from same import assert_same
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hvd_ckpt as hc

pl = pytest.importorskip(
    "lightning.pytorch", reason="lightning is not installed: pip install -r install/requirements-tests.txt"
)
from lightning.pytorch import callbacks as cb  # noqa: E402
from torchmetrics import MeanMetric  # noqa: E402

from hvd_ckpt.app.integrations.lightning import HorovodStrategy, SaveOnSignal  # noqa: E402

pytestmark = [
    pytest.mark.ranks(gloo=(2,)),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]

SAMPLES, WIDTH = 48, 8


def data(shuffle: bool = True, batch: int = 4, samples: int = SAMPLES) -> DataLoader:
    inputs = torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch, shuffle=shuffle)


class Regression(pl.LightningModule):
    """Blocks with dropout and batch norm, and logged losses; a schedule, unless another optimizer is given."""

    def __init__(self, blocks: int = 2, rate: float = 0.1, optimizer: Any = None) -> None:
        super().__init__()
        torch.manual_seed(7 + hc.rank())  # rank 0's weights count
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Dropout(rate))
            for _ in range(blocks)
        )
        self.last = nn.Linear(WIDTH, 1)
        self.optimizer = optimizer
        self.mean, self.epochs = MeanMetric(), []

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        self.mean.update(loss.detach())
        return loss

    def on_train_epoch_end(self):
        self.epochs.append(self.mean.compute().item())
        self.mean.reset()

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.mse_loss(self(x), y), sync_dist=True)

    def configure_optimizers(self):
        if self.optimizer is not None:
            return self.optimizer([parameter for parameter in self.parameters() if parameter.requires_grad])
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def sgd(rate: float) -> Any:
    return lambda parameters: torch.optim.SGD(parameters, lr=rate)


def fitted(module, loader=None, seed: int = 3, ckpt_path=None, strategy: Any = None, **settings: Any):
    """A Trainer that has trained a module, by default in two epochs of shuffled batches."""
    callbacks = settings.get("callbacks", [])
    saves = any(isinstance(callback, cb.Checkpoint) for callback in callbacks)
    settings = {"max_epochs": 2, "num_sanity_val_steps": 0, "limit_val_batches": 2, **settings}
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    strategy = strategy or HorovodStrategy()
    run = pl.Trainer(accelerator="cpu", strategy=strategy, enable_checkpointing=saves, **quiet, **settings)
    torch.manual_seed(seed + hc.rank())
    run.fit(module, data() if loader is None else loader, data(shuffle=False), ckpt_path=ckpt_path)
    return run


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


class Saves(cb.ModelCheckpoint):
    def __init__(self, folder, **when: Any) -> None:
        super().__init__(folder, filename="{step}", save_top_k=-1, **when)


# ------------------------------------------------------------------------------------ steps


@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
def test_fine_tuning_unfreezes_the_backbone(shard: str) -> None:
    """So a layer joins the optimizer later."""
    found = []
    for stage in (shard, "none"):
        module = Regression(rate=0.0, optimizer=sgd(0.01))
        module.backbone, module.learning_rate = module.first, 0.01
        unfreezing = cb.BackboneFinetuning(1, verbose=False)
        strategy = HorovodStrategy(shard=stage)
        run = fitted(module, data(shuffle=False), strategy=strategy, callbacks=[unfreezing], max_epochs=3)
        groups = [len(group["params"]) for group in run.optimizers[0].param_groups]
        assert groups == [len(list(module.parameters())) - 2, 2]
        hc.verify(module)
        found.append(weights(module))
    assert_same(found[0], found[1], 1e-4)


class Manual(Regression):
    """Manual optimization with a closure; without one: tests/differential."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()

        def closure():
            loss = super(Manual, self).training_step(batch, batch_idx)
            optimizer.zero_grad()
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)


def test_manual_optimization_ends_in_the_bits_of_automatic_one() -> None:
    modules = Manual(optimizer=sgd(0.1)), Regression(optimizer=sgd(0.1))
    for module in modules:
        fitted(module)
        hc.verify(module)
    assert_same(*map(weights, modules))


@pytest.mark.parametrize("shard", ["gradients", "parameters"])
def test_reading_gradients_in_shards_names_the_way_out(shard: str) -> None:
    class Reads(Regression):
        def on_after_backward(self):
            self.last.weight.grad.norm()

    with pytest.raises(RuntimeError, match=r"last.weight' is split over the ranks: clip with hc.clip_grad"):
        fitted(Reads(), strategy=HorovodStrategy(shard=shard))


def test_gradients_that_a_hook_replaces_on_one_rank_are_averaged_again() -> None:
    class Doubles(pl.Callback):
        def on_after_backward(self, trainer, module):
            module.last.weight.grad = module.last.weight.grad * 2

    changes = []
    for callbacks in ([], [Doubles()] if hc.rank() == 0 else []):
        module = Regression(optimizer=sgd(0.25))
        start = hc.broadcast(module.last.weight.detach(), 0, name="test.start")
        fitted(module, callbacks=callbacks, max_steps=1)
        hc.verify(module)
        changes.append(module.last.weight.detach() - start)
    torch.testing.assert_close(changes[1], changes[0] * 1.5)


@pytest.mark.parametrize("shard", ["none", "gradients"])
def test_clipping_by_value_limits_an_infinite_gradient(shard: str) -> None:
    class Infinite(Regression):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) + (self.last.bias * math.inf).sum()

    module = Infinite(optimizer=sgd(1.0))
    start = hc.broadcast_object(module.last.bias.item(), 0)
    settings = {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value", "max_steps": 1}
    fitted(module, strategy=HorovodStrategy(shard=shard), **settings)
    assert module.last.bias.item() == pytest.approx(start - 0.1)
    assert all(parameter.isfinite().all() for parameter in module.parameters())


def test_what_a_setting_cannot_have_here_is_named() -> None:
    for said, given, settings in (
        ("devices=3", {}, {"devices": 3}),
        ("num_nodes=2", {}, {"num_nodes": 2}),
        ("budget", {"budget": "much"}, {}),
    ):
        with pytest.raises(ValueError, match=said):
            fitted(Regression(), strategy=HorovodStrategy(**given), **settings)


# ------------------------------------------------------------------------------------ stops, checkpoints, resumes


class Signal(pl.Callback):
    """A signal to rank 1 before its third step."""

    def __init__(self, number: signal.Signals) -> None:
        self.number = number

    def on_train_batch_start(self, trainer, *_):
        if hc.rank() == 1 and trainer.global_step == 2:
            signal.raise_signal(self.number)


@pytest.mark.parametrize("shard, number", [("none", signal.SIGTERM), ("parameters", signal.SIGUSR1)])
def test_a_signal_to_one_rank_stops_all_with_a_checkpoint(folder, shard, number) -> None:
    """A file for a run that has ended stops none."""
    (folder / "stop").touch()
    hc.barrier()
    whole, stopped, resumed = Regression(), Regression(), Regression()
    handler, stop = signal.getsignal(number), SaveOnSignal(folder)
    assert stop.ckpt_path is None
    fitted(whole, strategy=HorovodStrategy(shard=shard), callbacks=[stop])
    assert not (folder / "stop").exists()
    callbacks = [stop, Signal(number), cb.OnExceptionCheckpoint(folder)]
    with pytest.raises(SystemExit) as ended:
        fitted(stopped, strategy=HorovodStrategy(shard=shard), callbacks=callbacks)
    assert ended.value.code == 128 + number
    assert (folder / "on_exception.ckpt").is_file()  # a stop of all ranks leaves time for it
    assert signal.getsignal(number) is handler
    again = {"strategy": HorovodStrategy(shard=shard), "callbacks": [stop], "ckpt_path": stop.ckpt_path}
    fitted(resumed, seed=99, **again)
    assert_same(weights(resumed), weights(whole))
    assert stop.ckpt_path is None


@pytest.mark.parametrize("shard", ["none", "parameters"])
def test_a_resume_with_each_ranks_metrics(folder: Path, shard: str) -> None:
    whole, resumed = Regression(rate=0.0), Regression(rate=0.0)
    saves = Saves(folder, every_n_train_steps=3)
    fitted(whole, strategy=HorovodStrategy(shard=shard), callbacks=[saves])
    fitted(resumed, strategy=HorovodStrategy(shard=shard), ckpt_path=folder / "step=3.ckpt")
    assert_same(weights(resumed), weights(whole))
    assert resumed.epochs == whole.epochs


@pytest.mark.parametrize("shard", ["none", "parameters"])
def test_a_checkpoint_loads_without_this_library(folder: Path, shard: str) -> None:
    """Of an optimizer with an attribute like a wrapper."""

    def adamw(parameters: Any) -> torch.optim.Optimizer:
        optimizer: Any = torch.optim.AdamW(parameters)
        optimizer.optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
        return optimizer

    module, other = Regression(optimizer=adamw), Regression()
    saves = Saves(folder, every_n_epochs=1)
    fitted(module, callbacks=[saves], strategy=HorovodStrategy(shard=shard), gradient_clip_val=1.0)
    path = folder / f"step={2 * SAMPLES // 4 // hc.size()}.ckpt"
    state = torch.load(path, weights_only=True)
    other.load_state_dict(state["state_dict"])
    assert_same(weights(module), weights(other))
    assert len(state["optimizer_states"][0]["state"]) == len(weights(module))
    torch.optim.AdamW(other.parameters()).load_state_dict(state["optimizer_states"][0])


# ------------------------------------------------------------------------------------ what ranks ask each other


def test_what_is_logged_counts_all_ranks_and_stops_them_together() -> None:
    class Counts(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.ranks = MeanMetric()

        def validation_step(self, batch, batch_idx):
            self.ranks(torch.tensor(float(hc.rank())))
            self.log("ranks", self.ranks)
            self.log("worse", float(self.current_epoch) if hc.rank() == 0 else 0.0)  # not synchronized

    class Callback(pl.Callback):
        def __init__(self) -> None:
            self.mean = MeanMetric()

        def on_train_batch_end(self, *_):
            self.mean.update(float(hc.rank()))

    counts = Callback()
    run = fitted(Counts(), callbacks=[counts, cb.EarlyStopping("worse", patience=1)], max_epochs=9)
    assert run.current_epoch == 2
    copy = pickle.loads(pickle.dumps(counts.mean))
    found = run.callback_metrics["ranks"], counts.mean.compute(), copy.compute()
    assert {value.item() for value in found} == {(hc.size() - 1) / 2}


@pytest.mark.ranks(gloo=(1, 2))
def test_what_is_asked_of_ranks() -> None:
    run = fitted(Regression(), strategy="hvd_ckpt")
    assert run.world_size == hc.size() and run.global_rank == hc.rank()
    for name in ("loss_epoch", "val_loss"):
        assert len(set(hc.allgather_object(run.callback_metrics[name].item()))) == 1
    strategy = HorovodStrategy()
    rank, size = float(hc.rank()), hc.size()
    if hc.rank() > 0:  # after this, Horovod's numbers of unnamed messages differ between ranks
        hc.allreduce(torch.zeros(1), name="a step that rank 0 has no data for")
    hc.join()
    mean = (size - 1) / 2
    assert strategy.reduce(torch.tensor(rank)).item() == mean
    assert strategy.reduce(torch.tensor(hc.rank()), reduce_op="sum").item() == mean * size
    assert strategy.reduce(torch.tensor(rank), reduce_op=torch.distributed.ReduceOp.MAX).item() == size - 1
    assert strategy.broadcast({"rank": rank}) == {"rank": 0.0}
    own = torch.full((2,), rank, requires_grad=True)
    gathered = strategy.all_gather(own, sync_grads=True)
    assert gathered.view(size, 2)[:, 0].tolist() == [float(number) for number in range(size)]
    (gathered.sum() * (hc.rank() + 1)).backward()
    assert own.grad.tolist() == [size * (size + 1) / 2] * 2  # of all ranks' losses
    with pytest.raises(ValueError, match="sync_dist_group"):
        strategy.reduce(torch.tensor(rank), group=object())


# ------------------------------------------------------------------------------------ plans


@pytest.mark.parametrize("shard, precision", [("none", "bf16-mixed"), ("parameters", "32-true")])
def test_a_budget(quick_planner, monkeypatch, shard: str, precision: str) -> None:
    """The bits of the run without recomputation."""
    plans, plan = [], hc.plan

    def noted(*args, **options):
        plans.append(plan(*args, **options))
        return plans[-1]

    monkeypatch.setattr(hc, "plan", noted)
    module, other = Regression(blocks=8), Regression(blocks=8)
    batches = {"loader": data(batch=512, samples=1024), "precision": precision}
    fitted(module, strategy=HorovodStrategy(budget="0.6x", shard=shard), **batches)
    fitted(other, strategy=HorovodStrategy(shard=shard), **batches)
    hc.verify(module)
    assert_same(weights(module), weights(other))
    assert len(plans) == 1 and plans[0].measured.peak_bytes <= plans[0].budget


class Asks(Regression):
    """A step with hooks that asks for optimizers and ranks; ``inputs`` are those of the training."""

    def __init__(self) -> None:
        super().__init__(blocks=4)
        self.inputs: list[torch.Tensor] = []

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return {"x": batch[0], "y": batch[1]}

    def on_train_batch_start(self, batch, batch_idx):
        self.inputs.append(batch["x"].clone())

    def training_step(self, batch, batch_idx):
        assert self.trainer.optimizers[0].param_groups[0]["lr"] > 0
        loss = super().training_step((batch["x"], batch["y"]), batch_idx)
        assert self.all_gather(loss, sync_grads=True).shape == (hc.size(),)
        assert self.trainer.strategy.reduce(loss.detach()).shape == ()
        assert self.trainer.strategy.broadcast(batch_idx) == batch_idx
        self.trainer.strategy.barrier()
        self.mean.compute()
        return loss


@pytest.mark.parametrize("kind", ["loader", "generator", "iterator"])
def test_a_plan_leaves_the_first_batch_to_the_training(quick_planner, kind: str) -> None:
    def loader() -> Any:
        dataset = data().dataset
        if kind == "loader":
            return hc.data.DataLoader(dataset, hc.data.DistributedSampler(dataset, 4, epochs=1))
        if kind == "generator":
            return DataLoader(dataset, 4, shuffle=True, generator=torch.Generator().manual_seed(5))
        return iter([dataset[start : start + 4] for start in range(0, SAMPLES, 4)])

    planned, plain = Asks(), Asks()
    for budget, module in (("0.9x", planned), (None, plain)):
        settings = {"max_epochs": 1, "use_distributed_sampler": False, "limit_val_batches": 0}
        fitted(module, loader(), strategy=HorovodStrategy(budget=budget), **settings)
        hc.verify(module)
    assert len(plain.inputs) == (SAMPLES // 4 // hc.size() if kind == "loader" else SAMPLES // 4)
    assert_same(planned.inputs, plain.inputs)
