"""What recomputing costs and saves: this library's plans beside keeping everything and all that others offer.

models      a GPT and an LSTM language model as plain chains
workloads   what a step consists of: model, batch, loss
chain       a chain run with blocks replaced, and copied without its parameters
contenders  keep everything, and what PyTorch offers
peers       other projects
compiled    torch.compile, with and without a budget
plans       ours, for budgets and for the contenders' peaks
measure     exact peaks, seconds, and whether the result is right
case        one workload from start to end
report      tables, results.json and report.md
picture     the points of time and memory
command     ``hvd-ckpt bench recompute``
"""
