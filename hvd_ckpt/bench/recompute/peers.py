"""Other projects, used as their documentation says, and imported only when they are measured.

A project that is missing or does not run here is an error of its own methods alone; the message becomes their row in the report.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hvd_ckpt.bench.recompute.measure import Forward
from hvd_ckpt.utils.memory import recording_peak

Builder = Callable[[nn.Sequential, torch.Tensor, int], Forward]
"""A chain, the inputs it will get, and the peak bytes of a step without recomputation, to what runs the chain."""


def inner_blocks(model: nn.Sequential) -> list[int]:
    """The blocks that a loop over layers covers: all but the first (embedding, stem) and the last (head)."""
    return list(range(1, len(model) - 1))


def walk(model: nn.Sequential, replaced: Mapping[int, Forward]) -> Forward:
    """A function that runs the chain with some blocks replaced."""
    calls: list[Forward] = [replaced.get(index, block) for index, block in enumerate(model)]

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        for call in calls:
            hidden = call(hidden)
        return hidden

    return forward


class _RandomState:
    """torch_remat leaves random numbers to its user; this is the hook that its documentation describes."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device if device.type == "cuda" else None

    def snapshot(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        return torch.get_rng_state(), None if self.cuda is None else torch.cuda.get_rng_state(self.cuda)

    def restore(self, state: tuple[torch.Tensor, torch.Tensor | None]) -> None:
        torch.set_rng_state(state[0])
        if self.cuda is not None and state[1] is not None:
            torch.cuda.set_rng_state(state[1], self.cuda)


def build_torch_remat(endings: Sequence[str]) -> Builder:
    """torch_remat (Meta): each layer a checkpoint; submodules whose names end so are regions whose activations are saved."""

    def save(remat: Any, module: nn.Module, name: str) -> None:
        region = remat.region(module.forward, name, recompute=False)

        def forward(*args: Any, **kwargs: Any) -> Any:
            result = region(*args, **kwargs)
            for tensor in (result,) if isinstance(result, torch.Tensor) else result:
                if isinstance(tensor, torch.Tensor):
                    remat.recompute_needs_tensor(tensor)
            return result

        module.forward = forward

    def build(model: nn.Sequential, inputs: torch.Tensor, needed: int) -> Forward:
        import torch_remat as remat

        # Saving and restoring 5 KB of random state is only for those who draw.
        draws = any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())
        hooks = (_RandomState(inputs.device),) if draws else ()
        replaced: dict[int, Forward] = {}
        for index in inner_blocks(model):
            for name, module in list(model[index].named_modules()):
                if any(f".{name}".endswith(f".{ending}") for ending in endings):
                    save(remat, module, name)
            make = remat.checkpoint(region_name=f"block{index}", recompute_state_hooks=hooks)
            replaced[index] = make(model[index])
        return walk(model, replaced)

    return build


class Ckptplan:
    """ckptplan: its documented pipeline, with one profile of the model for all budgets.

    On the CPU it measures no bytes and refuses to plan; there it is given those that this library measures for each block.
    """

    def __init__(self) -> None:
        self._profiles: tuple[Any, ...] = ()

    def build(self, fraction: float | None) -> Builder:
        """With a budget of that fraction of the activations it counts; None for every block that it will checkpoint."""

        def build(model: nn.Sequential, inputs: torch.Tensor, needed: int) -> Forward:
            import ckptplan

            blocks = ckptplan.declare_blocks(model, list(model.named_children()))
            self._profiles = self._profiles or self._profile(blocks, model, inputs)
            total = sum(profile.activation_bytes_estimate for profile in self._profiles)
            plan = ckptplan.plan_checkpoints(
                self._profiles,
                blocks,
                target_kind="activation_budget_bytes",
                target_value=0 if fraction is None else int(fraction * total),
                planner="checkpoint_all" if fraction is None else "dynamic_programming",
                on_infeasible="best_effort" if fraction is None else "raise",
            )
            forward: Forward = ckptplan.apply_plan(blocks, plan, (inputs,), None)
            return forward

        return build

    @staticmethod
    def _profile(blocks: Any, model: nn.Sequential, inputs: torch.Tensor) -> tuple[Any, ...]:
        import ckptplan

        profiles: tuple[Any, ...] = ckptplan.profile_blocks(
            blocks, (inputs,), device=inputs.device, num_warmup=1, num_trials=3
        )
        if inputs.device.type == "cuda":
            return profiles
        return tuple(
            dataclasses.replace(
                profile,
                timing_only=False,
                activation_bytes_estimate=count,
                activation_bytes_method="isolated_forward_delta",
            )
            for profile, count in zip(profiles, _bytes_kept(model, inputs))
        )


def _bytes_kept(model: nn.Sequential, inputs: torch.Tensor) -> list[int]:
    """Bytes that are still allocated after each block's forward pass, its output included."""
    kept = []
    hidden = inputs
    for block in model:
        with recording_peak(inputs.device) as memory:
            output = block(hidden)
        kept.append(memory.held_bytes)
        hidden = output.detach().requires_grad_()
        del output
    return kept


def build_compiled(budget: float) -> Builder:
    """``torch.compile`` with an activation memory budget: 1 for what it keeps by itself, 0 for as little as it can."""

    def compile_graph(
        graph: Any, inputs: Any
    ) -> Any:  # its own for each budget, or one's code would serve them all
        from torch._functorch import config
        from torch._inductor.compile_fx import compile_fx

        with config.patch(activation_memory_budget=budget):
            return compile_fx(graph, inputs)

    def build(model: nn.Sequential, inputs: torch.Tensor, needed: int) -> Forward:
        compiled: Forward = torch.compile(model, backend=compile_graph)
        return compiled

    return build


def build_rockmate(fraction: float) -> Builder:
    """rockmate (Inria): rotor over blocks, an integer program within each, at a fraction of the peak."""

    def build(model: nn.Sequential, inputs: torch.Tensor, needed: int) -> Forward:
        import rockmate

        if inputs.device.type != "cuda":
            raise RuntimeError("it plans for CUDA devices only")
        forward: Forward = rockmate.PureRockmate(model, (inputs,), budget=int(fraction * needed))
        return forward

    return build
