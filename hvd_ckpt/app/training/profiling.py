"""Profiles of a run: traces of some steps, and the share of the devices' peak that it uses."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from typing_extensions import Self

from hvd_ckpt.app.training.build import Assembly
from hvd_ckpt.app.training.config import Config
from hvd_ckpt.app.training.field_types import first_and_last
from hvd_ckpt.app.training.report import Report
from hvd_ckpt.processes.grid import current
from hvd_ckpt.processes.parts import alone
from hvd_ckpt.utils import run_warnings

# Dense half-precision TFLOP/s by a part of the device's name, from the vendors' data sheets; the first that fits counts.
PEAKS = {
    "B200": 2250.0, "H200": 989.0, "H100 PCIe": 756.0, "H100 NVL": 835.0, "H100": 989.0, "A100": 312.0, "MI300X": 1307.0,
    "L40S": 362.0, "L4": 121.0, "A10": 125.0, "V100": 125.0,
}  # fmt: skip
PASSES = 3  # a backward pass computes two products for each of the forward pass; recomputation is no use of the model


class StepTrace:
    """Writes a trace of ``torch.profiler`` of the configured steps, each process a file. A context manager around the loop.

    Args:
        steps: first and last, counted from 1, such as ``10:15``; None for no trace.
        folder: folder of the run.
        report: report of the run, which does not count the time that writing takes.
    """

    def __init__(self, steps: str | None, folder: Path, report: Report) -> None:
        self._steps = None if steps is None else first_and_last(steps)
        self._file = folder / "profile" / f"rank-{current().number:05}.json"
        self._report = report
        self._profiler: Any = None

    def before(self, step: int) -> None:
        """The step with this number begins."""
        if self._steps is None or self._profiler is not None or not self._steps[0] <= step <= self._steps[1]:
            return
        self._profiler = torch.profiler.profile()
        self._profiler.start()

    def after(self, step: int) -> None:
        """The step is over; after the last of the trace it is written."""
        if self._profiler is not None and self._steps is not None and step >= self._steps[1]:
            with self._report.meter.excluded():
                self._write()

    def _write(self) -> None:
        """Ends the trace and writes it. A file that cannot be written is a warning: it must not end the training."""
        if self._profiler is None:
            return
        # Forgotten first: an error while it is written must not write it again at the end of the run.
        profiler, self._profiler, self._steps = self._profiler, None, None
        profiler.stop()
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(self._file))
        except (OSError, RuntimeError) as error:
            self._report.say(f"Warning: the trace '{self._file}' is not written: {error}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._write()


def utilization_of_a_unit(config: Config, parts: Assembly, device: torch.device) -> float | None:
    """The share of all devices' peak that one unit per second uses (model FLOPs utilization, Chowdhery et al., "PaLM", 2022).

    The forward pass of one sample is counted by ``torch.utils.flop_counter``, on the first process only.

    Args:
        parts: with the whole model.

    Returns:
        None if no peak is given or known for this device and precision, on other processes, or if the model computes nothing that
        can be counted.
    """
    peak = config.peak_tflops
    if peak is None and device.type == "cuda" and config.precision not in ("fp32", "apex-O0"):
        name = torch.cuda.get_device_name(device)
        peak = next((peak for part, peak in PEAKS.items() if part in name), None)
    if peak is None or current().number != 0:
        return None
    model, objective, train, _ = parts
    # In stages the whole model is on the CPU still.
    place = next(model.parameters()).device
    sample = train.batch([0], [0]).to(place)
    counter, training = FlopCounterMode(display=False), model.training
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.enter_context(torch.random.fork_rng([place] if place.type == "cuda" else []))
            stack.enter_context(torch.no_grad())
            # Other kernels for attention, and fused recurrences, are not all counted.
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            # The arguments of ``mkldnn.flags`` differ between versions of PyTorch.
            mkldnn: Any = torch.backends.mkldnn
            stack.callback(setattr, mkldnn, "enabled", mkldnn.enabled)
            mkldnn.enabled = False
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
            stack.enter_context(alone())
            stack.enter_context(counter)
            model.eval()(*sample.inputs, **sample.shared)
    # The counter does not know every operation. The run itself may well succeed, and only has no MFU.
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        run_warnings.warn(f"No MFU: the operations of one sample cannot be counted: {reason}")
        return None
    finally:
        model.train(training)
    flops = PASSES * counter.get_total_flops() * current().tensor / objective.units(sample)
    return flops / (peak * 1e12 * current().size) or None
