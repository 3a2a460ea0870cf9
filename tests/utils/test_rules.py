"""The table of rules: each rule is provoked through the public API, and its sentence stands nowhere else."""

import ast
import re
from collections import Counter
from pathlib import Path

import lightning as L
import pytest
import torch
import transformers
from horovod.torch.elastic import TorchState
from sharded import distribute
from torch import nn

import hvd_ckpt as hc
from hvd_ckpt.app.integrations.lightning import HorovodStrategy
from hvd_ckpt.app.integrations.transformers import Trainer
from hvd_ckpt.utils import rules

pytestmark = pytest.mark.ranks(gloo=(2,))


@pytest.fixture(scope="module", autouse=True)
def _started():
    """Also in a process that no launcher has started."""
    hc.init()


def config(**settings):
    return lambda: hc.training.Config("gpt-tiny", **settings)


def model():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.1)


def wrap(**options):
    net = model()
    return distribute(sgd(net), net.named_parameters(), **options)


def optimizer(**options):
    return lambda: wrap(**options)


def unnamed(**options):
    """An optimizer that knows no module."""
    return lambda: distribute(sgd(model()), **options)


def local(**options):
    net = model()
    return lambda: hc.LocalSGD(sgd(net), net.named_parameters(), every=2, **options)


def estimate(**options):
    return lambda: hc.estimate_memory(model(), 2, **options)


def elastic(provoke):
    def within():
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HOROVOD_ELASTIC", "1")
            provoke()

    return within


def joined(make):
    def join():
        kept = make()
        hc.join()
        del kept

    return join


def split_parameters():
    net = model()
    kept = hc.DistributedOptimizer(sgd(net), net.named_parameters(), shard=3)
    hc.broadcast_parameters(net.named_parameters(), root_rank=0)
    del kept


def twice_differentiated():
    hidden = torch.randn(4, 4, requires_grad=True)
    loss = hc.chunked_cross_entropy(nn.Linear(4, 4), hidden, torch.zeros(4, dtype=torch.long), 2)
    torch.autograd.grad(loss, hidden, create_graph=True)


class Module(L.LightningModule):
    def __init__(self, automatic, optimizers):
        super().__init__()
        self.net, self.optimizers_made = model(), optimizers
        self.automatic_optimization = automatic

    def training_step(self, batch):
        return self.net(batch[0]).sum()

    def configure_optimizers(self):
        return [sgd(self.net) for _ in range(self.optimizers_made)]


def lightning(strategy, automatic=True, optimizers=1):
    def fit():
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 4)), batch_size=2)
        off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        trainer = L.Trainer(
            strategy=HorovodStrategy(**strategy), accelerator="cpu", max_steps=1, **dict.fromkeys(off, False)
        )
        trainer.fit(Module(automatic, optimizers), loader)

    return fit


def trainer(arguments, **options):
    def make():
        args = transformers.TrainingArguments("unused", report_to=[], use_cpu=True)
        for name, value in arguments.items():
            setattr(args, name, value)  # such as deepspeed, which would be imported
        Trainer(model=model(), args=args, train_dataset=[1, 2], **options)

    return make


APEX = "apex-O1"
STAGES = {"pipeline": 2}
REPLICAS = {"replicas": 4}
LOCAL = {"local": 4}
RANKS = hc.ProcessSet([0])
CASES = {
    ("shard", rules.ELASTIC): elastic(optimizer(shard=1)),
    ("shard", "op=Adasum|Min|Max|Product"): optimizer(shard=1, op=hc.Max),
    ("shard", rules.APEX): config(shard=1, precision=APEX),
    ("shard=gradients|parameters", "compression"): config(shard=2, compression="fp16"),
    ("shard=gradients|parameters", "groups"): optimizer(shard=2, groups=2),
    ("shard=gradients|parameters", "several optimizers"): lightning({"shard": 2}, False, optimizers=2),
    ("shard=parameters", "load_best_model_at_end"): trainer({"load_best_model_at_end": True}, shard=3),
    ("shard=parameters", "broadcast_parameters"): split_parameters,
    ("shard=parameters", "model"): unnamed(shard=3),
    ("units", "shard=parameters"): optimizer(shard=2, units=[]),
    ("master_weights=True", "shard"): optimizer(master_weights=True),
    ("within", "shard=parameters or local"): config(shard="2,within=host"),
    ("offload", "shard"): optimizer(offload="optimizer"),
    ("offload=parameters", "shard=parameters"): config(shard="2,offload=parameters"),
    ("wire", "shard or local"): config(shard="none,wire=int8"),
    ("wire of gradients", "shard=gradients|parameters or local"): optimizer(shard=1, wire="fp16"),
    ("accumulate_locally", "shard=gradients|parameters"): config(shard="none,accumulate_locally=true"),
    ("replicas", "stages"): config(**REPLICAS, **STAGES),
    ("replicas", "tensor"): config(**REPLICAS, tensor=2),
    ("replicas", "shard=parameters"): config(**REPLICAS, shard=3),
    ("replicas", "master_weights=False"): optimizer(**REPLICAS, shard=1, master_weights=False),
    ("replicas", "wire"): config(**REPLICAS, shard="2,wire=bf16"),
    ("replicas", "compression"): config(**REPLICAS, compression="fp16"),
    ("replicas", "op=Sum|Adasum|Min|Max|Product"): optimizer(**REPLICAS, op=hc.Sum),
    ("replicas", "gradient_predivide_factor"): optimizer(**REPLICAS, gradient_predivide_factor=2.0),
    ("replicas", "process_set"): optimizer(**REPLICAS, process_set=RANKS),
    ("replicas", rules.OF_RANKS): config(**REPLICAS, batch_norm="synchronized"),
    ("replicas", rules.APEX): config(**REPLICAS, precision=APEX),
    ("replicas", "HorovodStrategy"): lightning(REPLICAS),
    ("replicas", rules.TRAINER): trainer({}, distributed=REPLICAS),
    ("replicas", "model"): unnamed(**REPLICAS),
    ("local", "stages"): config(**LOCAL, **STAGES),
    ("local", "tensor"): config(**LOCAL, tensor=2),
    ("local", "replicas"): config(**LOCAL, **REPLICAS),
    ("local", "wire=int4"): local(wire="int4"),
    ("local", "accumulate_locally"): config(local="4,within=host", shard="2,accumulate_locally=true"),
    ("local", "ema"): config(**LOCAL, ema=0.9),
    ("local", "every of verify"): config(**LOCAL, verify="every=4"),
    ("local", "compression"): config(**LOCAL, compression="fp16"),
    ("local", "bucket_cap_mb"): config(**LOCAL, bucket_cap_mb=1.0),
    ("local", rules.OF_RANKS): config(**LOCAL, batch_norm="synchronized"),
    ("local", rules.APEX): config(**LOCAL, precision=APEX),
    ("local + shard", "within"): config(**LOCAL, shard=1),
    ("outer_momentum", "outer_lr"): config(local="4,outer_momentum=0.9"),
    ("LocalSGD in an elastic job", "elastic"): elastic(local()),
    (rules.ELASTIC, "stages"): elastic(config(**STAGES)),
    (rules.ELASTIC, "tensor"): elastic(config(tensor=2)),
    (rules.ELASTIC, "within"): elastic(local(within="host", elastic=True)),
    (rules.ELASTIC, "fragments"): elastic(config(local="4,fragments=2")),
    (rules.ELASTIC, "delay"): elastic(config(local="4,delay=1")),
    (rules.ELASTIC, "an optimizer of LocalSGD in TorchState"): lambda: TorchState(optimizer=local()()),
    ("within", "process_set"): local(within="host", process_set=RANKS),
    ("within", "local of estimate_memory"): estimate(within=2, local={"every": 2}),
    ("within", "stages"): config(shard="3,within=host", **STAGES),
    ("stages", "segments"): config(**STAGES, segments=2),
    ("stages", rules.APEX): config(**STAGES, precision=APEX),
    ("stages", "optimizer=adafactor"): config(**STAGES, optimizer="Adafactor"),
    ("stages", "comm"): lambda: hc.init([0, 1], stages=2),
    ("balance", "a plan of stages"): config(pipeline="2,balance=[3,4]", budget="1GiB"),
    ("checkpoint=always|except_last|never", "a plan of stages"): config(
        **STAGES, budget="1GiB", checkpoint="never"
    ),
    ("checkpoint=auto", "stages"): config(checkpoint="auto"),
    ("schedule of pipeline", "stages"): config(pipeline="1,schedule=gpipe"),
    ("virtual_stages", "stages"): config(pipeline="1,virtual_stages=2"),
    ("balance", "stages"): config(pipeline="1,balance=[2,2]"),
    ("virtual_stages", "schedule of pipeline=interleaved"): config(pipeline="2,virtual_stages=2"),
    ("Pipeline", "chunks or plan"): lambda: hc.Pipeline(model()),
    ("balance of Pipeline=time|size", "sample"): lambda: hc.Pipeline(model(), "time", chunks=2),
    ("tensor", "wire=*int8*|*int4*"): config(tensor=2, shard="2,wire=int8"),
    ("tensor", "offload=parameters"): config(tensor=2, shard="3,offload=parameters"),
    ("tensor", "optimizer=adafactor"): config(tensor=2, optimizer="adafactor"),
    ("tensor", rules.APEX): config(tensor=2, precision=APEX),
    ("tensor", "comm"): lambda: hc.init([0, 1], tensor=2),
    ("tensor", "an optimizer that is made already"): estimate(tensor=2, optimizer=sgd(model())),
    ("gradient_predivide_factor", "op=Sum|Adasum|Min|Max|Product"): optimizer(
        op=hc.Sum, gradient_predivide_factor=2.0
    ),
    ("op=Adasum", "process_set"): optimizer(op=hc.Adasum, process_set=RANKS),
    ("join()", "an optimizer of LocalSGD"): joined(local()),
    ("join()", "shard"): joined(optimizer(shard=1)),
    ("join()", "replicas"): joined(optimizer(**REPLICAS)),
    ("budget", "plan"): config(budget="min", plan="plan.json"),
    ("budget", "segments"): config(budget="min", segments=2),
    ("budget", "manual optimization"): lightning({"budget": "0.5x"}, False),
    ("budget", "gradient_checkpointing"): trainer({"gradient_checkpointing": True}, budget="0.5x"),
    ("plan", "segments"): config(plan="plan.json", segments=2),
    ("chunked_cross_entropy", "create_graph"): twice_differentiated,
    ("a model on the meta device", "sample"): lambda: hc.estimate_memory(
        model().to("meta"), 2, sample=torch.ones(2, 4)
    ),
    ("steps", "epochs"): config(steps=3, epochs=1),
    ("global_batch", "batch"): config(global_batch=16, batch=8),
    ("global_batch", rules.ELASTIC): elastic(config(global_batch=16)),
    ("ema", rules.APEX): config(ema=0.9, precision=APEX),
    ("patience", "eval_every"): config(patience=2),
    ("patience", "validation_split=0.0"): config(patience=2, eval_every=1, validation_split=0.0),
    ("resume", "output"): config(resume="a", output="b"),
    ("avg_fn", "multi_avg_fn"): lambda: hc.AveragedWeights(wrap(), avg_fn=print, multi_avg_fn=print),
    ("HorovodStrategy", "lr_find()"): lambda: HorovodStrategy().save_checkpoint({}, ".lr_find_1.ckpt"),
    ("HorovodStrategy", "sync_dist_group"): lambda: HorovodStrategy().reduce(torch.ones(1), group=[0]),
    **{
        (name, rules.TRAINER): trainer({name: value})
        for name, value in {
            "auto_find_batch_size": True,
            "fp16": True,
            "train_sampling_strategy": "sequential",
            "enable_jit_checkpoint": True,
            "deepspeed": "zero.json",
            "fsdp": True,
        }.items()
    },
}

ELSEWHERE = {  # rules whose error needs more: three ranks, stages, a split model
    ("chunks of Pipeline", "a plan of stages"): "tests/helpers/scripts/stages.py",
    ("schedule of Pipeline", "a plan of stages"): "tests/helpers/scripts/stages.py",
    ("virtual_stages of Pipeline", "a plan of stages"): "tests/helpers/scripts/stages.py",
    ("join()", "process_set"): "tests/reduction/test_apart.py",
    ("Snapshots", "an optimizer of a process set"): "tests/snapshots/test_refusals.py",
    ("tensor", "dropout of channels or alpha dropout"): "tests/parallel/tensor/test_cuts.py",
    ("tensor", "dropout of attention with enable_gqa"): "tests/helpers/scripts/tensor_modes.py",
    ("tensor", "max_norm, sparse or scale_grad_by_freq"): "tests/helpers/scripts/tensor_modes.py",
    ("checkpoint(partition=True)", "tensor_parallel(sequence=True)"): "tests/helpers/scripts/tensor_modes.py",
    ("gradient_predivide_factor", "ROCm"): "no machine of the tests",
}
PROVOKED = [rule for rule in rules.RULES if (rule.feature, rule.other) in CASES]
TABLE = [(rule.feature, rule.other) for rule in rules.RULES]
LIBRARY = Path(rules.__file__).parent.parent
SENTENCE = re.compile(
    r"cannot be (used|combined) (with|in)\b|does not go with|needs shard|works on all ranks only"
)


def test_each_rule_has_a_test_and_stands_once():
    assert {*CASES, *ELSEWHERE} == {*TABLE} and not {*CASES} & {*ELSEWHERE}
    assert max(Counter(TABLE).values()) == 1


@pytest.mark.parametrize("rule", PROVOKED, ids=lambda rule: f"{rule.feature} {rule.other}")
def test_what_breaks_a_rule_is_one_sentence(rule):
    with pytest.raises((ValueError, RuntimeError)) as caught:
        CASES[rule.feature, rule.other]()
    said = str(caught.value)
    assert rule.reason in said and rule.way_out in said
    assert "\n" not in said


def test_no_such_sentence_stands_anywhere_else():
    for path in sorted(LIBRARY.rglob("*.py")):
        if path.name == "rules.py":
            continue
        for raised in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(raised, ast.Raise):
                assert not SENTENCE.search(ast.unparse(raised)), f"{path}:{raised.lineno}"
