"""Lightning's Trainer over Horovod, with modules as Lightning's users write them."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hvd_ckpt as hc

pl = pytest.importorskip(
    "lightning.pytorch", reason="lightning is not installed: pip install -r install/requirements-tests.txt"
)
from lightning.pytorch.callbacks import BackboneFinetuning, EarlyStopping, ModelCheckpoint  # noqa: E402
from lightning.pytorch.plugins import MixedPrecision  # noqa: E402
from lightning.pytorch.tuner import Tuner  # noqa: E402

from hvd_ckpt.app.integrations.lightning import HorovodStrategy, SaveOnSignal  # noqa: E402

pytestmark = [
    pytest.mark.ranks(gloo=(2,)),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]

SAMPLES, WIDTH = 48, 8


def data(shuffle: bool = True, batch: int = 4, samples: int = SAMPLES) -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, WIDTH, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch, shuffle=shuffle)


class Regression(pl.LightningModule):
    """Blocks with dropout and batch norm, logged losses and a schedule."""

    def __init__(self, blocks: int = 2, rate: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(7 + hc.rank())  # rank 0's weights count
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Dropout(rate))
            for _ in range(blocks)
        )
        self.last = nn.Linear(WIDTH, 1)
        self.stepped = 0

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.mse_loss(self(x), y), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Sgd(Regression):
    """Where a gradient is zero but for roundings, Adam would step by them."""

    def __init__(self, rate: float = 0.1, lr: float = 0.05) -> None:
        super().__init__(rate=rate)
        self.lr = lr

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.5)


def trainer(folder: Any = None, strategy: Any = None, callbacks: Any = (), **settings: Any):
    settings = {"max_epochs": 2, "num_sanity_val_steps": 0, "limit_val_batches": 2, **settings}
    return pl.Trainer(
        accelerator="cpu",
        strategy=HorovodStrategy() if strategy is None else strategy,
        default_root_dir=folder,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )


def fitted(module, loader=None, seed: int = 3, ckpt_path=None, **settings: Any):
    run = trainer(**settings)
    torch.manual_seed(seed + hc.rank())
    run.fit(module, data() if loader is None else loader, data(shuffle=False), ckpt_path=ckpt_path)
    return run


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def same_bits(module: nn.Module, other: nn.Module) -> None:
    for (name, value), expected in zip(module.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(value, expected), name


def plain_loop(epochs: int = 2, accumulate: int = 1, clip: float = 0.0) -> nn.Module:
    """Steps of the same training as a loop of its own has them."""
    module = Regression(rate=0.0)  # as an evaluation of Lightning draws random numbers
    hc.broadcast_parameters(module.state_dict(), root_rank=0)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    optimizer = hc.DistributedOptimizer(optimizer, module.named_parameters())
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 20)
    sampler = torch.utils.data.DistributedSampler(data().dataset, hc.size(), hc.rank(), seed=0)
    torch.manual_seed(3 + hc.rank())
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        module.train()
        batches = list(DataLoader(data().dataset, 4, sampler=sampler, generator=torch.Generator()))
        for number, (x, y) in enumerate(batches):
            (F.mse_loss(module(x), y) / accumulate).backward()
            if (number + 1) % accumulate and number + 1 < len(batches):
                continue
            if clip:
                hc.clip_grad_norm_(module.parameters(), clip)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return module


@pytest.mark.ranks(gloo=(1, 2))
def test_the_bits_of_a_plain_loop() -> None:
    module = Regression(rate=0.0)
    run = fitted(module, strategy="hvd_ckpt", accumulate_grad_batches=2, gradient_clip_val=0.5)
    assert run.world_size == hc.size() and run.global_rank == hc.rank()
    assert run.global_step == 2 * (SAMPLES // 4 // hc.size() // 2)
    same_bits(module, plain_loop(accumulate=2, clip=0.5))
    hc.verify(module)
    for name in ("loss_epoch", "val_loss"):
        values = hc.allgather_object(run.callback_metrics[name].item())
        assert len(set(values)) == 1


class Gan(pl.LightningModule):
    """Two optimizers, as Lightning's guide has them: toggled, or each cleared before its backward pass."""

    def __init__(self, toggled: bool) -> None:
        super().__init__()
        torch.manual_seed(7 + hc.rank())
        self.automatic_optimization, self.toggled = False, toggled
        self.generator = nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.judge = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def training_step(self, batch):
        real, _ = batch
        first, second = self.optimizers()
        noise = torch.randn(len(real), 4)
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        for optimizer, loss_of in (
            (first, lambda: F.binary_cross_entropy_with_logits(self.judge(self.generator(noise)), ones)),
            (
                second,
                lambda: (
                    F.binary_cross_entropy_with_logits(self.judge(real), ones)
                    + F.binary_cross_entropy_with_logits(self.judge(self.generator(noise).detach()), zeros)
                ),
            ),
        ):
            if self.toggled:
                self.toggle_optimizer(optimizer)
            loss = loss_of()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
            optimizer.step()
            if self.toggled:
                self.untoggle_optimizer(optimizer)
            self.log("loss", loss, sync_dist=True)

    def configure_optimizers(self):
        return [torch.optim.Adam(part.parameters(), lr=1e-2) for part in (self.generator, self.judge)], []


@pytest.mark.parametrize(
    "shard, precision", [("none", "32-true"), ("none", "bf16-mixed"), ("optimizer", "32-true")]
)
def test_a_gan_with_two_optimizers(shard: str, precision: str) -> None:
    module, other = Gan(toggled=False), Gan(toggled=True)
    before = weights(module)
    torch.manual_seed(1)
    trainer(strategy=HorovodStrategy(shard=shard), precision=precision).fit(module, data())
    hc.verify(module)
    assert not any(torch.equal(before[name], now) for name, now in weights(module).items())
    torch.manual_seed(1)
    trainer(precision=precision).fit(other, data())
    for value, expected in zip(module.parameters(), other.parameters()):
        torch.testing.assert_close(value, expected)


class Toggled(Gan):
    """Gradients that a toggled optimizer's loss must not leave in the other network, which nothing clears."""

    def __init__(self) -> None:
        super().__init__(toggled=True)

    def training_step(self, batch):
        real, _ = batch
        noise = torch.ones(len(real), 4)
        losses = (lambda: -self.judge(self.generator(noise)).mean(), lambda: self.judge(real).mean())
        for optimizer, loss in zip(self.optimizers(), losses):
            self.toggle_optimizer(optimizer)
            self.manual_backward(loss())
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)


def test_toggled_optimizers_freeze_the_parameters_of_others() -> None:
    modules = [Toggled() for _ in range(2)]
    for module, shard in zip(modules, ("optimizer", "none")):
        trainer(strategy=HorovodStrategy(shard=shard)).fit(module, data(shuffle=False))
    for value, expected in zip(modules[0].parameters(), modules[1].parameters()):
        torch.testing.assert_close(value, expected)


class Tuned(Regression):
    """A model with a learning rate that the tuner searches for."""

    def __init__(self) -> None:
        super().__init__(rate=0.0)
        self.learning_rate = 0.01

    def train_dataloader(self):
        return data(shuffle=False)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate)


class FineTuned(Regression):
    """Its first layer joins the optimizer later."""

    def __init__(self) -> None:
        super().__init__(rate=0.0)
        self.backbone, self.learning_rate = self.first, 0.01

    def configure_optimizers(self):
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trained, lr=self.learning_rate)


@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
def test_fine_tuning_unfreezes_the_backbone(shard: str, folder) -> None:
    found = []
    for stage in (shard, "none"):
        module = FineTuned()
        run = trainer(
            folder, HorovodStrategy(shard=stage), [BackboneFinetuning(1, verbose=False)], max_epochs=3
        )
        run.fit(module, data(shuffle=False))
        groups = [len(group["params"]) for group in run.optimizers[0].param_groups]
        assert groups == [len(list(module.parameters())) - 2, 2]
        hc.verify(module)
        found.append(weights(module))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("given", [{"shard": "optimizer"}, {"shard": "parameters"}, {"replicas": 4}], ids=str)
def test_a_search_for_the_learning_rate_leaves_no_trace(given: dict[str, Any], folder) -> None:
    """Its trials find the same at each stage, and the fit after them is that without them."""
    found, modules = [], []
    for options, tuned in ((given, True), ({**given, "shard": "none"}, True), (given, False)):
        run, module = trainer(folder, HorovodStrategy(**options)), Tuned()
        if tuned:
            found.append(Tuner(run).lr_find(module, num_training=8, update_attr=False).results["loss"])
        run.fit(module)
        hc.verify(module)
        modules.append(module)
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    same_bits(modules[0], modules[2])


class Manual(Regression):
    """Manual optimization with accumulation and a closure."""

    def __init__(self, closure: bool) -> None:
        super().__init__(rate=0.0)
        self.automatic_optimization, self.closure = False, closure

    def training_step(self, batch, batch_idx):
        x, y = batch
        optimizer = self.optimizers()

        def closure():
            loss = F.mse_loss(self(x), y)
            optimizer.zero_grad()
            self.manual_backward(loss)
            return loss

        if self.closure:
            optimizer.step(closure=closure)
        else:
            closure()
            optimizer.step()


def test_manual_optimization() -> None:
    modules = Manual(closure=True), Manual(closure=False)
    for module in modules:
        fitted(module)
        hc.verify(module)
    same_bits(*modules)


@pytest.fixture(scope="module")
def in_float32() -> nn.Module:
    module = Sgd(rate=0.0)
    fitted(module, gradient_clip_val=0.5)
    return module


@pytest.mark.parametrize(
    "shard, precision",
    [
        ("none", "bf16-mixed"),
        ("optimizer", "16-mixed"),
        ("gradients", "32-true"),
        ("parameters", "32-true"),
        ("parameters", "16-mixed"),
    ],
)
def test_sharding_and_precision(in_float32: nn.Module, shard: str, precision: str) -> None:
    """Close to the same training without either."""
    plugins = (
        [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**8))]
        if precision == "16-mixed"
        else []
    )
    given = {"plugins": plugins} if plugins else {"precision": precision}
    module = Sgd(rate=0.0)
    run = fitted(module, strategy=HorovodStrategy(shard=shard), gradient_clip_val=0.5, **given)
    if plugins:
        assert isinstance(run.precision_plugin.scaler, hc.GradScaler)
    hc.verify(module)
    loose = {"rtol": 0.1, "atol": 0.05} if precision != "32-true" else {"rtol": 1e-4, "atol": 1e-5}
    for value, expected in zip(module.parameters(), in_float32.parameters()):
        torch.testing.assert_close(value, expected, **loose)


def test_an_overflow_on_one_rank_is_skipped_by_all() -> None:
    class Overflows(Regression):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * float("inf") if batch_idx == 1 and hc.rank() == hc.size() - 1 else loss

    module = Overflows()
    run = fitted(
        module, plugins=[MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**8))]
    )
    hc.verify(module)
    assert run.precision_plugin.scaler.get_scale() == 2.0**6  # halved in each epoch
    assert all(value.isfinite().all() for value in module.parameters())


@pytest.mark.parametrize(
    "algorithm, shard",
    [
        ("norm", "none"),
        ("norm", "gradients"),
        ("value", "none"),
        ("value", "optimizer"),
        ("value", "gradients"),
    ],
)
def test_gradients_are_clipped(algorithm: str, shard: str) -> None:
    module = Sgd(rate=0.0, lr=1.0)
    settings = {
        "gradient_clip_val": 1e-3,
        "gradient_clip_algorithm": algorithm,
        "max_epochs": -1,
        "max_steps": 1,
    }
    hc.broadcast_parameters(module.state_dict(), root_rank=0)
    before = weights(module)
    fitted(module, strategy=HorovodStrategy(shard=shard), **settings)
    moved = torch.cat([(now - before[name]).flatten() for name, now in weights(module).items()])
    moved = moved.norm() if algorithm == "norm" else moved.abs().max()
    assert moved.item() == pytest.approx(1e-3, rel=1e-3)


class Skips(pl.LightningModule):
    """Skips a step by its gradients, as users do where a batch may be bad: the second one of the last rank is."""

    def __init__(self, manual: bool = False) -> None:
        super().__init__()
        self.automatic_optimization, self.net, self.seen = not manual, nn.Linear(WIDTH, 1), []
        for parameter in self.parameters():
            nn.init.constant_(parameter, 0.5)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self.net(x), y)
        if batch_idx == 1 and hc.rank() == hc.size() - 1:
            loss = loss * float("nan")
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        if self.net.weight.grad.isfinite().all():
            optimizer.step()
        return None

    def on_after_backward(self):
        gradient = self.net.weight.grad
        self.seen.append(gradient.clone())
        is_last = not self.trainer.fit_loop._should_accumulate()
        if self.automatic_optimization and is_last and not gradient.isfinite().all():
            self.zero_grad()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def one_process(accumulate: int) -> nn.Linear:
    """The training of :class:`Skips` in one process."""
    module = Skips()
    optimizer = torch.optim.SGD(module.net.parameters(), lr=0.1, momentum=0.9)
    parts = [
        list(DataLoader(data().dataset, 4, sampler=range(rank, SAMPLES, hc.size())))
        for rank in range(hc.size())
    ]
    for at in range(0, len(parts[0]), accumulate):
        optimizer.zero_grad()
        for batches in parts:
            for x, y in batches[at : at + accumulate]:
                (F.mse_loss(module.net(x), y) / accumulate / hc.size()).backward()
        if not at <= 1 < at + accumulate:
            optimizer.step()
    return module.net


@pytest.mark.parametrize(
    "shard, accumulate, manual",
    [("none", 1, False), ("none", 2, False), ("optimizer", 1, False), ("none", 1, True)],
)
def test_ranks_skip_a_step_together(shard: str, accumulate: int, manual: bool) -> None:
    """``on_after_backward`` and the code behind ``manual_backward()`` see the mean over the ranks, as under ddp."""
    module = Skips(manual)
    sampler = torch.utils.data.DistributedSampler(data().dataset, hc.size(), hc.rank(), shuffle=False)
    run = trainer(
        strategy=HorovodStrategy(shard=shard), accumulate_grad_batches=accumulate, max_epochs=1,
        use_distributed_sampler=False,
    )  # fmt: skip
    run.fit(module, DataLoader(data().dataset, 4, sampler=sampler))
    seen = hc.allgather_object(module.seen)
    for number, (first, last) in enumerate(zip(seen[0], seen[-1], strict=True)):
        if (number + 1) % accumulate == 0:
            assert torch.equal(first.nan_to_num(), last.nan_to_num()), number
        else:  # nothing is reduced yet
            assert not torch.equal(first, last), number
    expected = one_process(accumulate)
    torch.testing.assert_close(module.net.weight, expected.weight)
    torch.testing.assert_close(module.net.bias, expected.bias)


@pytest.mark.parametrize("shard", ["gradients", "parameters"])
def test_reading_gradients_in_shards_names_the_way_out(shard: str) -> None:
    with pytest.raises(
        RuntimeError, match=r"net.weight' is split over the ranks: clip with hc.clip_grad_norm_"
    ):
        trainer(strategy=HorovodStrategy(shard=shard), max_epochs=1).fit(Skips(), data())


class Saves(ModelCheckpoint):
    def __init__(self, folder, **when: Any) -> None:
        super().__init__(folder, filename="{step}", save_top_k=-1, **when)


@pytest.mark.parametrize(
    "shard, when",
    [
        ("none", {"every_n_train_steps": 5}),
        ("none", {"every_n_train_steps": 8}),  # of the second epoch
        ("optimizer", {"every_n_epochs": 1}),
        ("parameters", {"every_n_train_steps": 5}),
    ],
)
def test_a_resume_in_the_same_bits(folder, shard: str, when: dict[str, int]) -> None:
    """In the middle of an epoch and at its end, with dropout, batch norm, momentum and a schedule."""
    whole, resumed = Regression(), Regression()
    per_epoch = SAMPLES // 4 // hc.size()
    fitted(whole, strategy=HorovodStrategy(shard=shard), callbacks=[Saves(folder, **when)])
    path = folder / f"step={when.get('every_n_train_steps', per_epoch)}.ckpt"
    run = fitted(resumed, strategy=HorovodStrategy(shard=shard), seed=99, ckpt_path=path)
    assert run.global_step == 2 * per_epoch
    same_bits(resumed, whole)
    for (name, value), expected in zip(resumed.named_buffers(), whole.buffers(), strict=True):
        assert torch.equal(value, expected), name


class Signal(pl.Callback):
    """A signal to rank 1 before its third step."""

    def __init__(self, number: signal.Signals) -> None:
        self.number = number

    def on_train_batch_start(self, trainer, *_):
        if hc.rank() == 1 and trainer.global_step == 2:
            signal.raise_signal(self.number)


@pytest.mark.parametrize("shard, number", [("none", signal.SIGTERM), ("parameters", signal.SIGUSR1)])
def test_a_signal_to_one_rank_stops_all_with_a_checkpoint(folder, shard: str, number: signal.Signals) -> None:
    whole, stopped, resumed = Regression(), Regression(), Regression()
    fitted(whole, strategy=HorovodStrategy(shard=shard))
    handler, stop = signal.getsignal(number), SaveOnSignal(folder)
    assert stop.ckpt_path is None
    with pytest.raises(SystemExit) as ended:
        fitted(stopped, strategy=HorovodStrategy(shard=shard), callbacks=[stop, Signal(number)])
    assert ended.value.code == 128 + number
    assert signal.getsignal(number) is handler
    fitted(
        resumed, strategy=HorovodStrategy(shard=shard), callbacks=[stop], seed=99, ckpt_path=stop.ckpt_path
    )
    same_bits(resumed, whole)
    assert stop.ckpt_path is None


class Peak(nn.Module):
    """Divides by a running peak, which only its extra state has."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 1.0

    def get_extra_state(self):
        return {"peak": self.peak}

    def set_extra_state(self, state) -> None:
        self.peak = state["peak"]

    def forward(self, x):
        self.peak = 0.9 * self.peak + 0.1 * float(x.detach().abs().max())
        return x / self.peak


@pytest.mark.parametrize("shard", ["none", "parameters"])
def test_a_resume_with_each_ranks_extra_state_and_metrics(folder, shard: str) -> None:
    from torchmetrics import MeanMetric

    class Scaled(Regression):
        def __init__(self) -> None:
            super().__init__(rate=0.0)
            self.blocks.append(Peak())
            self.mean, self.epochs = MeanMetric(), []

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.mean.update(loss.detach())
            return loss

        def on_train_epoch_end(self):
            self.epochs.append(self.mean.compute().item())
            self.mean.reset()

    whole, resumed = Scaled(), Scaled()
    strategy = HorovodStrategy(shard=shard)
    fitted(whole, strategy=strategy, callbacks=[Saves(folder, every_n_train_steps=3)])
    strategy = HorovodStrategy(shard=shard)
    fitted(resumed, strategy=strategy, ckpt_path=folder / "step=3.ckpt")
    same_bits(resumed, whole)
    assert resumed.blocks[-1].peak == whole.blocks[-1].peak
    assert len(set(hc.allgather_object(whole.blocks[-1].peak))) == hc.size()
    assert resumed.epochs == whole.epochs


def test_a_checkpoint_loads_without_this_library(folder) -> None:
    module = Regression()
    fitted(module, callbacks=[Saves(folder, every_n_epochs=1)], strategy=HorovodStrategy(shard="parameters"))
    state = torch.load(folder / f"step={2 * SAMPLES // 4 // hc.size()}.ckpt", weights_only=True)
    other = Regression()
    other.load_state_dict(state["state_dict"])
    same_bits(module, other)
    torch.optim.AdamW(other.parameters()).load_state_dict(state["optimizer_states"][0])


def test_all_ranks_stop_early() -> None:
    class Worse(Regression):
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", float(self.current_epoch) if hc.rank() == 0 else 0.0)  # not synchronized

    run = fitted(Worse(), callbacks=[EarlyStopping("val_loss", patience=1)], max_epochs=9)
    assert run.current_epoch == 2


@pytest.mark.ranks(gloo=(1, 2))
def test_what_is_asked_of_ranks() -> None:
    strategy = HorovodStrategy()
    rank, size = float(hc.rank()), hc.size()
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


def test_a_metric_counts_all_ranks() -> None:
    from torchmetrics import MeanMetric

    class Counts(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.mean = MeanMetric()

        def validation_step(self, batch, batch_idx):
            self.mean(torch.tensor(float(hc.rank())))
            self.log("mean", self.mean)

    run = fitted(Counts())
    assert run.callback_metrics["mean"].item() == (hc.size() - 1) / 2


@pytest.mark.parametrize("shard, precision", [("none", "bf16-mixed"), ("parameters", "32-true")])
def test_a_budget(quick_planner, monkeypatch, shard: str, precision: str) -> None:
    """The bits of the run without recomputation."""

    class Long(Regression):
        def __init__(self) -> None:
            super().__init__(blocks=8)

    plans, plan = [], hc.plan
    monkeypatch.setattr(
        hc, "plan", lambda *args, **options: plans.append(plan(*args, **options)) or plans[-1]
    )
    module, other = Long(), Long()
    batches = {"loader": data(batch=512, samples=1024), "precision": precision}
    fitted(module, strategy=HorovodStrategy(budget="0.5x", shard=shard), **batches)
    fitted(other, strategy=HorovodStrategy(shard=shard), **batches)
    same_bits(module, other)
    assert len(plans) == 1 and plans[0].measured.peak_bytes <= plans[0].budget


def refused(match: str, module: Any = None, strategy: Any = None, **settings: Any) -> None:
    with pytest.raises(ValueError, match=match):
        fitted(module or Regression(), strategy=strategy, **settings)


def test_what_a_setting_cannot_have_here_is_named() -> None:
    refused("devices=3", devices=3)
    refused("num_nodes=2", num_nodes=2)
    refused("budget=", Manual(closure=True), HorovodStrategy(budget="0.5x"))
    refused("replicas=4", Manual(closure=True), HorovodStrategy(replicas=4))
    refused("accumulate_grad_batches=2", strategy=HorovodStrategy(replicas=4), accumulate_grad_batches=2)
    refused("shard='gradients'", Gan(toggled=True), HorovodStrategy(shard="gradients"))
    refused("shard='parameters'", Gan(toggled=True), HorovodStrategy(shard="parameters"))
    refused("budget", strategy=HorovodStrategy(budget="much"))
    refused("replicas", strategy=HorovodStrategy(replicas=3))
