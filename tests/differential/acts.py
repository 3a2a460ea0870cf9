"""What users do by hand in a program, as plain data; :mod:`hand` performs it."""

from __future__ import annotations

from dataclasses import dataclass

READS = (
    "norm",
    "item",
    "clone",
    "isnan",
    "is_none",
    "data",
    "numpy",
    "deepcopy",
    "total_norm",
    "dot",
    "kept",
)
IN_PLACE = (
    *("mul_", "add_", "zero_", "copy_", "clamp_", "index", "foreach_mul_", "clip_norm", "clip_value"),
    *("data_mul_", "model_zeros", "optimizer_zeros"),
)
REPLACED = (
    "doubled",
    "random",
    "zeros",
    "cloned",
    "swapped",
    "data_set",
    "dropped",
    "model_none",
    "collect",
    "combine",
)
WEIGHTS_READ = ("weight_norm", "weight_item", "vector", "state_dict", "evaluate")
WEIGHTS = (
    *(
        "weight_mul_",
        "weight_clamp_",
        "weight_copy_",
        "weight_data_mul_",
        "weight_foreach",
        "weight_init",
        "weight_data_set",
    ),
    *("load_model", "average", "away", "back"),
)
STATE_READ = ("state_norm", "state_keys")
STATE = ("state_zero_", "state_set", "state_pop", "state_empty", "state_clear", "state_load")
GROUPS = ("lr", "weight_decay", "momentum")
FLAGS = ("freeze", "unfreeze")
ACTS = {
    "read": READS,
    "in_place": IN_PLACE,
    "replaced": REPLACED,
    "weights": (*WEIGHTS, *WEIGHTS_READ),
    "state": (*STATE, *STATE_READ),
    "groups": GROUPS,
    "flags": FLAGS,
}
PLACES = ("cleared", "pass", "backward", "synchronized", "step")


@dataclass(frozen=True)
class Act:
    """What a user does by hand to gradients, weights, the optimizer's state, groups or flags.

    Attributes:
        kind: of :data:`ACTS`.
        place: of :data:`PLACES`: after gradients were cleared; after backward pass ``part``; after all of them; between
            ``synchronize()``, or a scaler's ``unscale_()``, and ``step()``; after ``step()``.
        ranks: that do it.
        targets: numbers of parameters, modulo how many there are; empty: all of them.
        through: where they are taken from: ``"module"`` or ``"groups"``, those of the optimizer.
        within: inside ``gathered_parameters()``.
        value: of factors and bounds.
        pause: seconds before it, in which what has left may arrive.
    """

    kind: str
    place: str
    ranks: tuple[int, ...]
    targets: tuple[int, ...] = ()
    part: int = 0
    through: str = "module"
    within: bool = False
    value: float = 1.5
    pause: float = 0.0
