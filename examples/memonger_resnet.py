"""ResNet on images, to 1001 layers: memory by the number of recomputed segments, then training with its square root.

    horovodrun -np 2 python examples/memonger_resnet.py --depth 1001 --batch 4

n blocks cut into k segments take about n / k + k blocks' memory, the least near k = sqrt(n), for one more forward pass (Chen et
al., "Training deep nets with sublinear memory cost", 2016). Images are scikit-learn's digits, or a folder of folders by class.
"""

import math
import time

import click
import torch

import hvd_ckpt as hc
from hvd_ckpt.command_line import BadArgument, OneLineErrors
from hvd_ckpt.data.images import open_images
from hvd_ckpt.memory import measure_peak
from hvd_ckpt.models.objectives import Classification
from hvd_ckpt.models.resnet import resnet
from hvd_ckpt.models.sizes import RESNETS
from hvd_ckpt.text import show_bytes
from hvd_ckpt.training.config import Config
from hvd_ckpt.training.trainer import Trainer


@click.command(cls=OneLineErrors, help=__doc__.splitlines()[0], context_settings={"show_default": True})
@click.option("--depth", type=int, default=164, help=", ".join(map(str, sorted(RESNETS))))
@click.option("--images", help="Folder or .npz file; without it digits.")
@click.option("--pixels", type=click.IntRange(8), default=32)
@click.option("--steps", default=50)
@click.option("--batch", default=16, help="Images of each rank in a step.")
@click.option("--precision", default="fp32", help="fp32, bf16 or fp16.")
def main(depth, images, pixels, **settings):
    hc.init()
    torch.manual_seed(0)
    try:
        train, test = open_images(images, pixels).split(0.1)
        model = resnet(depth, channels=train.channels, classes=train.classes)
        segments = round(math.sqrt(len(model)))
        config = Config(f"resnet-{depth}", segments=segments, optimizer="sgd", lr=0.02, **settings)
        show_costs(model, train.batch(range(config.batch), [0] * config.batch), (1, 2, segments))
        trainer = Trainer(config, model, Classification(), train, test)
    except (ValueError, OSError) as error:
        raise BadArgument(str(error)) from None
    outcome = trainer.run()
    if hc.rank() == 0:
        print(
            f"validation loss {outcome.evaluation['loss']:.4f}, accuracy {outcome.evaluation['accuracy']:.3f}"
        )


def show_costs(model, batch, numbers_of_segments):
    """Peak memory and time of a step; one segment keeps everything."""
    for segments in numbers_of_segments:
        chain = hc.CheckpointSequential(model, segments)  # of the same modules

        def step(chain=chain):
            Classification().loss(chain(*batch.inputs), batch).backward()

        peak = show_bytes(measure_peak(step).peak_bytes)
        start = time.perf_counter()
        step()
        if hc.rank() == 0:
            blocks = f"{len(chain)} blocks in {segments} segment{'s' * (segments > 1)}"
            print(f"{blocks}: peak {peak}, {time.perf_counter() - start:.3f} s a step", flush=True)
    model.zero_grad()


if __name__ == "__main__":
    main()
