"""V-Net segments ellipsoids in noisy volumes: a step without recomputation, one within a budget, then training by Dice.

    horovodrun -np 2 python examples/memonger_vnet.py --pixels 64 --budget min

Three-dimensional segmentation (Milletari et al., "V-Net", 2016) needs much memory even with a batch of one. Skip
connections reach over most of the network, and the planner recomputes around them. The volumes are synthetic, or those of an .npz
file with the arrays volumes and labels, (N, D, H, W) both.
"""

import click

import hvd_ckpt as hc


@click.command(help=__doc__.splitlines()[0], context_settings={"show_default": True})
@click.option("--volumes", help=".npz file; without it ellipsoids.")
@click.option("--pixels", type=click.IntRange(16), default=32, help="Of a volume's side, a multiple of 16.")
@click.option("--width", default=8, help="Maps of the first stage.")
@click.option("--budget", default="min", help="Peak of a step: 0.5x, 2GiB, min.")
@click.option("--steps", default=30)
@click.option("--batch", default=4, help="Volumes of each rank in a step.")
@click.option("--precision", default="fp32", help="fp32, bf16 or fp16.")
def main(width, volumes, **settings):
    hc.init()
    config = hc.training.Config(
        "vnet", model_options={"width": width}, lr=1e-3, weight_decay=1e-4, validation_split=0.1,
        eval_batches=4, data=volumes and f"volumes:{volumes}", **settings,
    )  # fmt: skip
    trainer = hc.training.Trainer(config, *hc.training.assemble(config))
    if hc.rank() == 0:
        for name, cost in (("kept", trainer.plan.baseline), ("recomputed", trainer.plan.measured)):
            print(f"{name}: peak {cost.peak_bytes / 2**20:.1f} MiB, {cost.seconds:.3f} s a step", flush=True)
    outcome = trainer.run()
    if hc.rank() == 0:
        print(f"validation loss {outcome.evaluation['loss']:.4f}, Dice {outcome.evaluation['dice']:.3f}")


if __name__ == "__main__":
    main()
