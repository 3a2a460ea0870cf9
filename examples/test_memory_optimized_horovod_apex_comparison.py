"""Comparison of memory-optimized training with Horovod and with Apex's DDP, under ``checkpoint_sequential``.

The model's forward pass is cut into ``--chunks`` segments that are recomputed in the backward pass. Every engine trains the same
batches, with one segment and with several. Each result is compared with one process that computes the batches of all ranks.

    python examples/test_memory_optimized_horovod_apex_comparison.py --chunks 1,2,4 --use_amp --np 2

Engines are this library, stock Horovod, PyTorch's DDP and NVIDIA Apex's DDP, if it is installed with a GPU. All other
options go to ``hvd-ckpt compare``. The exit status is 0 if this library is right everywhere.
"""

import argparse
import importlib.util
import subprocess
import sys

import torch


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--use_amp", action="store_true", help="Apex's O1 where Apex is, else torch.autocast (fp16)"
    )
    parser.add_argument("--engines", default="hvd_ckpt,horovod,ddp,apex")
    parser.add_argument("--workloads", default="bert,densenet")
    parser.add_argument("--scenarios", default="nothing")
    options, others = parser.parse_known_args(arguments)

    apex = torch.cuda.is_available() and importlib.util.find_spec("apex") is not None
    precision = ("apex-O1" if apex else "fp16") if options.use_amp else "fp32"
    chosen = [f"--{name}={getattr(options, name)}" for name in ("engines", "workloads", "scenarios")]
    device = "cuda" if apex else "cpu"
    command = ["hvd-ckpt", "compare", *chosen, "--precision", precision, "--device", device]
    return subprocess.call([*command, *others])


def test_memory_optimized_horovod_apex_comparison(tmp_path):
    assert main(["--quick", "--use_amp", "--output", str(tmp_path / "report")]) == 0


if __name__ == "__main__":
    sys.exit(main())
