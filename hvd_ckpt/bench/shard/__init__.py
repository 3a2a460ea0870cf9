"""What sharding costs and saves: every stage of this library beside the same stage of PyTorch and DeepSpeed, on one GPT-lite.

contenders  who takes part, and their names
model       what is trained, on which samples
sessions    a contender under training; this library's
peers       PyTorch's and DeepSpeed's
counting    bytes: of tensors, of the heap, of the resident set, sent over sockets, asked of collectives
job         what the launcher tells the ranks, what they answer; starts a job
worker      one rank of a job: memory of each contender by itself, then time of all in turn
theory      bytes per parameter and per step that there should be
results     what the ranks of all jobs say of each contender, and the verdicts
report      tables, results.jsonl and shard.md
picture     shard.png
wire        formats on the wire: losses, errors, bytes
command     ``hvd-ckpt bench shard``
"""
