"""Bad arguments of the benchmark commands: one line that names the option and the value, and exit status 2."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.__main__ import benchmarks as bench
from hvd_ckpt.app.compare.command import compare

COMPARE = [
    ("--np 0", "--np is 0"),
    ("--controller smoke", "'smoke'"),
    ("--engines nccl", "no engine 'nccl': choose among hvd_ckpt, horovod, horovod-groups, ddp"),
    ("--engines ddp", "--subject hvd_ckpt"),
    ("--engines ,", "--engines"),
    ("--workloads gpt", "--workloads: 'gpt'"),
    ("--scenarios easy,plain", "--scenarios: 'easy'"),
    ("--workloads nothing --scenarios nothing", "nothing to compare"),
    ("--scenarios plain --workloads nothing --variants explicit", "nothing to compare"),
    ("--precision apex-O1", "--precision apex-O1: NVIDIA Apex"),
    ("--device cuda", "--device cuda"),
    ("--chunks 2,0", "--chunks: '0'"),
    ("--text no/such/file", "--text: cannot read the text 'no/such/file'"),
    ("--text empty", "'empty'"),
    ("--output full", "--output: the folder 'full'"),
    ("--output empty", "--output: cannot write to 'empty'"),
    ("surplus", "surplus"),
]
BENCH = [
    ("reduce --np two", "--np: 'two'"),
    ("reduce --controller nccl", "--controller: 'nccl'"),
    ("reduce --workloads resnet", "--workloads: 'resnet'"),
    ("reduce --engines ddp,ddp", "--engines: 'ddp'"),
    ("reduce --rounds 0", "--rounds is 0"),
    ("reduce --device cuda", "--device cuda"),
    ("shard --device cuda", "--device cuda"),
    ("recompute --device meta", "'meta'"),
    ("recompute --np 0", "--np: '0'"),
    ("recompute --engines half", "--engines: no engine 'half'"),
    ("layouts --np 3 --link 100", "--np 3: on hosts there are 1, 2, 4"),
    ("scale --np 12", "--np 12: give numbers up to local=8"),
    ("shard --stage 4", "--stage: '4'"),
    ("shard --stage 3 --engines ddp", "nothing to measure"),
    ("shard --wire fp8", "--wire: 'fp8'"),
    ("snapshots --output empty", "--output: "),
    ("replicas --engines pull", "--engines: no engine 'pull'"),
    ("replicas --np 2,3", "--np 3: give powers of two up to --replicas 4"),
    ("train --workloads gpt-huge", "--workloads: 'gpt-huge'"),
    ("train --accumulate 1,8", "--accumulate: '8'"),
    ("local --set batch", "--set: 'batch' has no value"),
    ("local --set batch=[", "--set: '[' is not a value"),
    ("local --set batch=*a", "--set: '*a' is not a value"),
    ("local --set heds=2", "--set heds: the sizes of text are "),
    ("scale --set links=100", "--set links: the sizes of gpt-1.3b are "),
    ("scale --set link=fast", "--set link=fast: give such as link=25.0"),
    ("scale --set link=.nan", "--set link=nan: give such as link=25.0"),
    ("scale --set stages=0", "--set stages=0: give such as stages=8"),
]


@pytest.mark.parametrize(
    ("group", "arguments", "message"),
    [*((compare, *one) for one in COMPARE), *((bench, *one) for one in BENCH)],
    ids=[arguments for arguments, _ in (*COMPARE, *BENCH)],
)
def test_a_bad_argument_is_one_line(group, arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("empty").touch()
    Path("full").mkdir()
    Path("full/file").touch()
    result = CliRunner().invoke(group, arguments.split())
    assert result.exit_code == 2
    assert result.output.startswith("Error: ") and message in result.output
    assert result.output.count("\n") == 1
    assert not Path("runs").exists()
