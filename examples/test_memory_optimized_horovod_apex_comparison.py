"""Memory-optimized training with Horovod and with Apex's DDP, compared: what does each do with ``checkpoint_sequential``?

The model's forward pass is cut into ``--chunks`` segments that are recomputed in the backward pass. Every engine trains the same
batches, with one segment and with several; one process that computes all ranks' batches says what is right.

    python examples/test_memory_optimized_horovod_apex_comparison.py --chunks 1,2,4 --use_amp --np 2

Engines are this library, stock Horovod, PyTorch's DDP and, where it is installed with a GPU, NVIDIA Apex's DDP. Every further
option goes to ``hvd-ckpt compare``. The exit status is 0 if this library is right everywhere.
"""

import argparse
import sys

from hvd_ckpt.bench.compare.command import compare
from hvd_ckpt.precision import apex_unavailable


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

    precision = "fp32"
    if options.use_amp:
        precision = "fp16" if apex_unavailable() else "apex-O1"
    device = "cpu" if apex_unavailable() else "cuda"
    chosen = [
        "--engines",
        options.engines,
        "--workloads",
        options.workloads,
        "--scenarios",
        options.scenarios,
    ]
    compare.main([*chosen, "--precision", precision, "--device", device, *others])


def test_memory_optimized_horovod_apex_comparison(tmp_path):
    import pytest

    with pytest.raises(SystemExit) as end:
        main(["--quick", "--use_amp", "--output", str(tmp_path / "report")])
    assert end.value.code == 0


if __name__ == "__main__":
    main(sys.argv[1:])
