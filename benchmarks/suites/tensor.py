"""Time steps of a GPT whose layers are split over ranks, beside PyTorch's parallelize_module over Gloo."""

from benchmarks.suite import Suite

tensor = Suite(
    engines=("parts", "torch-parts"),
    workloads=("gpt",),
    columns=("peak",),
    against={"of torch-parts": "torch-parts"},
    sizes={"gpt": {"batch": 4, "length": 128, "layers": 4, "vocabulary": 4096}},
    quick_sizes={"gpt": {"batch": 2, "length": 32, "width": 32, "heads": 2, "layers": 2}},
    np="2",
    rounds=27,
    warm_up=2,
    quick={"rounds": 2},
    lr=0.01,
    together=True,
    threads=1,
    notes=("Both models live in the same processes. peak: of a part, with its gradients and activations.",),
)
