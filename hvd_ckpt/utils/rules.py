"""The rules of what goes with what: one table for constructors, plans, ``hvd-ckpt train``, integrations and documentation.

A feature is the name of a setting or an argument that is given, ``shard``, or of one with certain values,
``shard=gradients|parameters`` (patterns of :mod:`fnmatch`). ``local + shard`` is given where both are. A caller gives its
settings to :func:`check`; what is not among them breaks no rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

ONE = "leave one of them out"
ELASTIC = "an elastic job"
TRAINER = "hvd_ckpt's Trainer of transformers"
APEX = "precision=apex*"
OF_RANKS = "batch_norm=deferred-ranks|synchronized"  # batch norms whose statistics are those of all ranks


@dataclass(frozen=True)
class Rule:
    """A feature that cannot be used with another one, or needs it.

    Attributes:
        feature, other: names of features; for a rule that ``needs``, ``other`` may be several, joined by ``or``.
        reason: why, as a clause.
        way_out: what to do.
        needs: whether the feature needs the other one.
    """

    feature: str
    other: str
    reason: str
    way_out: str = ONE
    needs: bool = False

    def is_broken(self, given: Mapping[str, Any]) -> bool:
        """Whether settings break it."""
        if not _are_given(self.feature, given):
            return False
        if self.needs:
            return not any(_is_given(other, given) for other in self.other.split(" or "))
        return _are_given(self.other, given)

    def sentence(self, given: Mapping[str, Any], write: Callable[[str, Any], str]) -> str:
        """The error for settings that break it."""
        feature = _written(self.feature, given, write)
        if self.needs:
            return f"{feature} needs {in_words(self.other)}: {self.reason}; {self.way_out}"
        return f"{feature} cannot be used with {_written(self.other, given, write)}: {self.reason}; {self.way_out}"


def apart(feature: str, others: Iterable[tuple[str, str] | tuple[str, str, str]]) -> list[Rule]:
    """Rules of one feature: each other one with the reason and, if it is not to leave one of them out, the way out."""
    return [
        Rule(feature, other, reason, way_out[0] if way_out else ONE) for other, reason, *way_out in others
    ]


def needs(feature: str, other: str, reason: str, way_out: str) -> list[Rule]:
    return [Rule(feature, other, reason, way_out, needs=True)]


# fmt: off
RULES: tuple[Rule, ...] = (
    # ---------------------------------------------------------------- shards (ZeRO)
    *apart("shard", (
        (ELASTIC, "a worker that dies takes its shard along", "start again from snapshots instead (hvd-ckpt train --resume)"),
        ("op=Adasum|Min|Max|Product", "shards are sums or averages", "use Average or Sum"),
        (APEX, "Apex replaces the parameters after they were split", "use precision fp16 or bf16"),
    )),
    *apart("shard=gradients|parameters", (
        ("compression", "gradients that are split are not allreduced", "use wire instead"),
        ("groups", "gradients that are split have groups of their own", "leave groups out, or use bucket_cap_mb or units"),
        ("several optimizers", "each would split the gradients of all", "use shard optimizer"),
    )),
    *apart("shard=parameters", (
        ("load_best_model_at_end", "no rank has a whole model to load it into", "load it after train()"),
        ("broadcast_parameters", "all ranks began with rank 0's values already",
         "leave this call out, or make it inside optimizer.gathered_parameters()"),
    )),
    *needs("shard=parameters", "model", "the module whose parameters are split must be known", "give model=model"),
    *apart("within", (
        ("process_set", "its groups are of all ranks"),
        ("stages", "its groups are of all ranks"),
        ("local of estimate_memory", "groups of local SGD are given in local, as its 'within'"),
    )),
    *needs("units", "shard=parameters", "only parameters that are split are gathered", "leave units out"),
    *needs("master_weights=True", "shard", "the copies are kept in shards", "leave master_weights out"),
    *needs("within", "shard=parameters or local", "groups have a copy of the split parameters, or reduce between averages",
           "give one of them as well"),
    *needs("offload", "shard", "what is offloaded is a shard", "give shard optimizer, gradients or parameters as well"),
    *needs("offload=parameters", "shard=parameters", "whole parameters stay where they are", "give shard parameters as well"),
    *needs("wire", "shard or local", "it is the format of shards and averages", "give one of them as well"),
    *needs("wire of gradients", "shard=gradients|parameters or local",
           "gradients that are not split travel in Horovod's formats", "use compression, or shard gradients or parameters as well"),
    *needs("accumulate_locally", "shard=gradients|parameters", "whole gradients are added up on each rank anyway",
           "give shard gradients or parameters as well"),
    # ---------------------------------------------------------------- logical replicas
    *apart("replicas", (
        ("stages", "micro-batches of stages are not those of replicas"),
        ("tensor", "replicas are of whole models"),
        ("shard=parameters", "replicas are added up as whole gradients", "use shard optimizer or gradients"),
        ("master_weights=False", "PyTorch rounds the last elements of a half-precision tensor in another way, so steps of shards "
         "would depend on the number of ranks", "leave master_weights out"),
        ("wire", "it rounds what ranks send, and one rank sends nothing"),
        ("compression", "it rounds the sums of ranks"),
        ("op=Sum|Adasum|Min|Max|Product", "the mean of all replicas is taken", "use Average"),
        ("gradient_predivide_factor", "it rounds by the number of ranks"),
        ("process_set", "the ranks of the whole job compute them"),
        (OF_RANKS, "its statistics depend on the ranks", "use local or deferred, in a model torch.nn.BatchNorm"),
        (APEX, "Apex reduces after one backward pass", "use precision fp16 or bf16"),
        ("HorovodStrategy", "its loop has no replicas", "use hvd-ckpt train, or a loop of your own"),
        (TRAINER, "its loop has no replicas", "use hvd-ckpt train, or a loop of your own"),
    )),
    *needs("replicas", "model", "each replica has buffers of its own", "give model=model"),
    # ---------------------------------------------------------------- local SGD
    *apart("local", (
        ("stages", "each rank steps on a whole model"),
        ("tensor", "each rank steps on a whole model", "use DistributedOptimizer, or tensor=1"),
        ("replicas", "ranks that step on their own have different weights"),
        ("wire=int4", "it is for sharded gradients", "use int8 or a wider format for averages"),
        ("accumulate_locally", "gradients are reduced within groups in each step"),
        ("ema", "ranks have weights of their own between averages"),
        ("every of verify", "ranks have weights of their own between averages"),
        ("compression", "gradients stay on their rank", "use wire instead"),
        ("bucket_cap_mb", "averages have other buckets"),
        (OF_RANKS, "each step would wait for all ranks", "use local or deferred"),
        (APEX, "Apex replaces the parameters", "use precision fp16 or bf16"),
    )),
    *needs("local + shard", "within", "it splits over the ranks of a group", "give within as well"),
    *needs("outer_momentum", "outer_lr", "it is the outer optimizer's", "give outer_lr as well"),
    *needs("LocalSGD in an elastic job", "elastic", "each rank has weights of its own between averages",
           "commit when optimizer.in_sync, make the optimizer anew after each change of ranks, and give elastic=True"),
    *apart(ELASTIC, (
        ("stages", "a worker that dies takes its stage along", "start with a fixed -np"),
        ("tensor", "a worker that dies takes its parts of layers along", "start with a fixed -np"),
        ("within", "ranks of the groups come and go"),
        ("fragments", "it commits where an average has left all ranks with the same weights"),
        ("delay", "it commits where an average has left all ranks with the same weights"),
        ("an optimizer of LocalSGD in TorchState", "its ranks cannot change",
         "give the model alone, and make the optimizer anew in the function that hc.elastic.run calls"),
    )),
    # ---------------------------------------------------------------- pipeline stages
    *apart("stages", (
        ("segments", "each stage is one segment", "use checkpoint or a budget"),
        (APEX, "Apex wants the whole model", "use precision fp16 or bf16"),
        ("optimizer=adafactor", "snapshots of stages need a state with a value for each element", "use adamw"),
        ("comm", "it makes the communicators of its replicas itself"),
    )),
    *(Rule(setting, "a plan of stages", "the plan chooses it", "leave it out") for setting in (
        "balance", "checkpoint=always|except_last|never", "chunks of Pipeline", "schedule of Pipeline",
        "virtual_stages of Pipeline",
    )),
    *needs("checkpoint=auto", "stages", "it is of pipeline stages", "give stages as well"),
    *needs("schedule of pipeline", "stages", "it is of pipeline stages", "give stages as well"),
    *needs("virtual_stages", "stages", "it is of pipeline stages", "give stages as well"),
    *needs("balance", "stages", "it is of pipeline stages", "give stages as well"),
    *needs("virtual_stages", "schedule of pipeline=interleaved", "others have one part on each stage", "give that as well"),
    *needs("Pipeline", "chunks or plan", "it divides a batch into micro-batches", "give their number"),
    *needs("balance of Pipeline=time|size", "sample", "blocks are measured on it", "give a micro-batch"),
    # ---------------------------------------------------------------- tensor parts
    *apart("tensor", (
        ("wire=*int8*|*int4*", "a block has one scale, so parts would round what all have alike differently", "use bf16 or fp16"),
        ("offload=parameters", "its files hold whole layers"),
        ("optimizer=adafactor", "its state has no value for each element", "use adamw"),
        (APEX, "Apex wants whole gradients", "use precision fp16 or bf16"),
        ("comm", "it makes the communicators of its replicas itself"),
        ("an optimizer that is made already", "it has the parameters of the whole model", "give its class"),
        ("dropout of channels or alpha dropout", "its random numbers cannot be split", "use dropout"),
        ("dropout of attention with enable_gqa", "its heads cannot be split", "repeat keys and values instead"),
        ("max_norm, sparse or scale_grad_by_freq", "an embedding with them cannot be split", "leave them out"),
    )),
    *apart("checkpoint(partition=True)", (
        ("tensor_parallel(sequence=True)", "each part has 1 / t of the inputs already", "leave partition out"),
    )),
    # ---------------------------------------------------------------- Horovod's arguments
    *apart("gradient_predivide_factor", (
        ("op=Sum|Adasum|Min|Max|Product", "it divides an average", "use Average"),
        ("ROCm", "it is not supported yet"),
    )),
    *apart("op=Adasum", (("process_set", "it works on all ranks only", "use Average, or the global process set"),)),
    *apart("join()", (
        ("an optimizer of LocalSGD", "a rank without data goes on to call its step(), without gradients",
         "give every rank as many batches"),
        ("shard", "each rank holds a part that the others need in every step", "give every rank as many batches"),
        ("replicas", "all of them take part in every step", "give every rank as many batches"),
        ("process_set", "join() knows nothing of it", "give every rank as many batches"),
    )),
    # ---------------------------------------------------------------- snapshots
    *apart("Snapshots", (
        ("an optimizer of a process set", "the other ranks have weights of their own", "give it all ranks"),
    )),
    # ---------------------------------------------------------------- recomputation
    *apart("budget", (
        ("plan", "each sets what is recomputed"), ("segments", "each sets what is recomputed"),
        ("manual optimization", "the strategy calls the passes that are planned", "use automatic_optimization"),
        ("gradient_checkpointing", "the budget chooses what is recomputed"),
    )),
    *apart("plan", (("segments", "each sets what is recomputed"),)),
    *apart("chunked_cross_entropy", (
        ("create_graph", "it cannot be differentiated twice", "leave create_graph out, or use torch.nn.functional.cross_entropy "
         "(in a plan: chunk_head=False)"),
    )),
    *apart("a model on the meta device", (("sample", "it cannot be run", "leave sample out, or build the model"),)),
    # ---------------------------------------------------------------- settings of a run
    *apart("steps", (("epochs", "both set the length of the run"),)),
    *apart("global_batch", (
        ("batch", "both set the samples of a step"),
        (ELASTIC, "its ranks come and go", "use batch"),
    )),
    *apart("ema", ((APEX, "Apex replaces the parameters", "use precision fp16 or bf16"),)),
    *needs("patience", "eval_every", "it counts evaluations", "give eval_every as well"),
    *apart("patience", (("validation_split=0.0", "it counts evaluations", "give a validation_split above 0"),)),
    *apart("resume", (("output", "a resumed run writes to its own folder"),)),
    *apart("avg_fn", (("multi_avg_fn", "each computes the average"),)),
    # ---------------------------------------------------------------- integrations
    *(Rule(setting, TRAINER, reason, way_out) for setting, reason, way_out in (
        ("auto_find_batch_size", "ranks would choose batches of different sizes", "use per_device_train_batch_size or budget"),
        ("fp16", "Accelerate's scaler does not ask other ranks of an overflow", "use bf16"),
        ("train_sampling_strategy", "samples are in the order of a DistributedSampler", "leave it out"),
        ("enable_jit_checkpoint", "ranks would save at different steps after a signal", "use save_steps"),
        ("deepspeed", "it has ranks of its own", "use shard"),
        ("fsdp", "it has ranks of its own", "use shard"),
    )),
    *apart("HorovodStrategy", (
        ("sync_dist_group", "it reduces over all ranks"),
        ("lr_find()", "its trials train the ranks that the fit begins with", "search in a Trainer without this strategy"),
    )),
)
# fmt: on


Write = Callable[[str, Any], str]


def argument(name: str, value: Any) -> str:
    """A name and a value as an argument of Python."""
    return f"{name.partition(' of ')[0]}={value!r}" if _is_plain(value) else name


def setting(name: str, value: Any) -> str:
    """A name and a value as a setting of a command."""
    return f"{name.partition(' of ')[0]} {value}" if _is_plain(value) else name


def check(
    given: Mapping[str, Any], words: Mapping[str, str] = MappingProxyType({}), write: Write = argument
) -> None:
    """Raises ValueError for the first rule that settings break.

    Args:
        given: settings and other features by name; those that are None, "none" or False are not given.
        words: those that are not written as arguments of these names.
        write: as for :func:`refusal`.
    """
    if reason := refusal(given, lambda name, value: words.get(name) or write(name, value)):
        raise ValueError(reason)


def refusal(given: Mapping[str, Any], write: Write) -> str | None:
    """The sentence about the first rule that settings break, or None.

    Args:
        write: writes a name and a value as the user does.
    """
    broken = next((rule for rule in RULES if rule.is_broken(given)), None)
    return None if broken is None else broken.sentence(given, write)


def _is_plain(value: Any) -> bool:
    return isinstance(value, (str, int, float, list, tuple, dict)) and value is not True


def in_words(feature: str) -> str:
    """A feature of the table in words: ``shard=gradients|parameters`` is "shard gradients or parameters"."""
    return feature.replace("=", " ").replace("|", " or ").replace(" + ", " and ").replace("*", "")


def _are_given(features: str, given: Mapping[str, Any]) -> bool:
    return all(_is_given(feature, given) for feature in features.split(" + "))


def _is_given(feature: str, given: Mapping[str, Any]) -> bool:
    name, _, values = feature.partition("=")
    # "checkpoint(partition=True)" is a name as a whole.
    if "(" in name:
        name, values = feature, ""
    value = given.get(name)
    if value is None or (isinstance(value, str) and value == "none"):
        return False
    if not values:
        return value is not False
    text = str(value).strip()
    return any(fnmatchcase(text, pattern) for pattern in values.split("|"))


def _written(features: str, given: Mapping[str, Any], write: Callable[[str, Any], str]) -> str:
    names = [feature if "(" in feature else feature.partition("=")[0] for feature in features.split(" + ")]
    return " and ".join(write(name, given[name]) for name in names)
