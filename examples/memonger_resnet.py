"""ResNet on images, up to 1001 layers: memory for several numbers of segments, then training with the best number in theory.

    horovodrun -np 2 python examples/memonger_resnet.py --depth 1001 --batch 4

n blocks in k segments take the memory of about n / k + k blocks, and one more forward pass. k = sqrt(n) takes the least (Chen et
al., "Training deep nets with sublinear memory cost", 2016). Images are scikit-learn's digits, or a folder of folders by class.
"""

import math
import time

import click

import hvd_ckpt as hc


@click.command(help=__doc__.splitlines()[0], context_settings={"show_default": True})
@click.option("--depth", default=164, help="20, 32, 44, 56, 110, 164, 1001, 1202, or 18, 34, 50, 101, 152.")
@click.option("--images", help="Folder or .npz file; without it digits.")
@click.option("--pixels", type=click.IntRange(8), default=32)
@click.option("--steps", default=50)
@click.option("--batch", default=16, help="Images of each rank in a step.")
@click.option("--precision", default="fp32", help="fp32, bf16 or fp16.")
def main(depth, images, **settings):
    data = images and f"images:{images}"
    hc.init()
    config = hc.training.Config(
        f"resnet-{depth}", optimizer="sgd", lr=0.02, validation_split=0.1, data=data, **settings
    )
    parts = hc.training.assemble(config)
    batch = parts.train.batch(range(config.batch), [0] * config.batch)
    best = round(math.sqrt(len(parts.model)))
    for segments in (1, 2, best):
        model = hc.CheckpointSequential(
            parts.model, segments
        )  # of the same modules; one segment keeps everything
        show_cost(model, batch, parts.objective)
    outcome = hc.training.Trainer(config, model, parts.objective, parts.train, parts.test).run()
    if hc.rank() == 0:
        loss, accuracy = outcome.evaluation["loss"], outcome.evaluation["accuracy"]
        print(f"validation loss {loss:.4f}, accuracy {accuracy:.3f}")


def show_cost(model, batch, objective):
    """Peak memory and time of a step."""

    def step():
        objective.loss(model(*batch.inputs), batch).backward()

    peak = hc.measure_peak(step).peak_bytes
    start = time.perf_counter()
    step()
    seconds = time.perf_counter() - start
    model.zero_grad()
    if hc.rank() == 0:
        what = f"{len(model)} blocks in {model.segments} segment{'s' * (model.segments > 1)}"
        print(f"{what}: peak {peak / 2**20:.1f} MiB, {seconds:.3f} s a step", flush=True)


if __name__ == "__main__":
    main()
