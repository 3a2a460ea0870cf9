"""Models of timm and torchvision: of each family one of the smallest.

PyPI offers a torchvision for GPUs, whose operators (non-maximum suppression and the like) do not load beside a PyTorch for CPUs.
They are declared here, so that the rest can be imported. The families below train without them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from modes import Subject, seed
from torch import nn

CLASSES = 10
SIZES = (64, 96, 128, 224, 299)
_OPERATORS = (
    "nms", "qnms", "roi_align", "qroi_align", "_roi_align_backward", "ps_roi_align", "_ps_roi_align_backward", "roi_pool",
    "_roi_pool_backward", "ps_roi_pool", "_ps_roi_pool_backward", "deform_conv2d", "_deform_conv2d_backward",
)  # fmt: skip
_library: Any = None

TIMM = (
    "halonet_h1", "test_byobnet", "cait_xxs24_224", "coat_tiny", "convit_tiny", "convmixer_768_32",
    "convnext_zepto_rms", "cpubone_nano", "crossvit_tiny_240", "csatv2", "cs3darknet_focus_s", "cspnext_tiny",
    "davit_tiny", "deit_tiny_patch16_224", "densenet121", "dla46x_c", "dpn48b", "edgenext_xx_small",
    "efficientformer_l1", "efficientformerv2_s0", "mnasnet_small", "efficientvim_m1", "efficientvit_b0",
    "efficientvit_m0", "eva02_tiny_patch14_224", "fasternet_t0", "fastvit_t12", "focalnet_tiny_srf",
    "gcvit_xxtiny", "ghostnet_050", "hardcorenas_b", "hgnetv2_b0", "hiera_tiny_224", "hrnet_w18_small",
    "iformer_t", "inception_next_atto", "inception_v3", "lcnetv2_small", "levit_128s", "lowformer_b0",
    "test_mambaout", "maxvit_pico_rw_256", "poolformerv2_s12", "gmlp_ti16_224", "mobilenetv3_small_050",
    "mobilevit_xxs", "mvitv2_tiny", "nest_tiny", "nextvit_small", "test_nfnet", "pit_ti_224", "pvt_v2_b0",
    "rdnet_tiny", "regnetx_002", "repghostnet_050", "repvit_m1", "res2next50", "resnest14d", "test_resnet",
    "resnetv2_18", "rexnet_100", "selecsls42", "legacy_seresnet18", "sequencer2d_s", "shvit_s1", "skresnet18",
    "starnet_s050", "swiftformer_xs", "swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256",
    "swinv2_cr_tiny_224", "tiny_vit_5m_224", "tnt_s_legacy_patch16_224", "tresnet_m", "twins_svt_small",
    "visformer_tiny", "test_vit", "test_vit_relpos", "vitamin_small_224", "volo_d1_224",
    "ese_vovnet19b_slim_dw", "legacy_xception", "xception41p", "xcit_nano_12_p8_224",
)  # fmt: skip

TORCHVISION: dict[str, dict[str, Any]] = {
    "alexnet": {}, "convnext_tiny": {}, "densenet121": {}, "efficientnet_b0": {}, "efficientnet_v2_s": {}, "googlenet": {},
    "inception_v3": {}, "lraspp_mobilenet_v3_large": {}, "fcn_resnet50": {}, "deeplabv3_mobilenet_v3_large": {}, "maxvit_t": {},
    "mc3_18": {}, "mnasnet0_5": {}, "mobilenet_v2": {}, "mobilenet_v3_small": {}, "mvit_v2_s": {}, "r2plus1d_18": {},
    "r3d_18": {}, "regnet_x_400mf": {}, "regnet_y_400mf": {}, "resnet18": {}, "resnext50_32x4d": {}, "s3d": {},
    "shufflenet_v2_x0_5": {}, "squeezenet1_1": {}, "swin3d_t": {}, "swin_t": {}, "swin_v2_t": {}, "vgg11_bn": {},
    "vit_b_16": {}, "wide_resnet50_2": {},
}  # fmt: skip


def load() -> bool:
    """Makes torchvision and timm importable; whether they are installed."""
    global _library
    if _library is None and not hasattr(torch.ops.torchvision, "nms"):
        _library = torch.library.Library("torchvision", "DEF")
        for name in _OPERATORS:
            _library.define(f"{name}(Tensor input) -> Tensor")
    try:
        import timm  # noqa: F401
        import torchvision  # noqa: F401
    except ImportError:
        return False
    return True


def vision_names() -> list[str]:
    """All names, if the packages are installed."""
    return (
        [f"timm:{name}" for name in TIMM] + [f"torchvision:{name}" for name in TORCHVISION] if load() else []
    )


def vision_subject(name: str) -> Subject:
    """A model of timm or torchvision with small pictures.

    Raises:
        ValueError: it trains with none of the sizes.
    """
    from subjects import Untrainable, check_trains

    if not load():
        raise Untrainable("timm and torchvision are not installed")
    package, _, kind = name.partition(":")
    reason = ""
    for size in SIZES:
        for create in _makers(package, kind, size):
            for shape in ((2, 3, size, size), (2, 3, 4, size, size), (2, 3, 16, size, size)):
                make = functools.partial(_make, create)
                sample = functools.partial(_sample, package, shape)
                try:
                    check_trains(make().train(), sample())
                except Exception as error:
                    reason = f"{type(error).__name__}: {str(error)[-200:]}"
                    if "size" in reason or "shape" in reason or "dim" in reason or shape[2] != 3:
                        continue
                else:
                    return Subject(name, make, sample)
    raise Untrainable(reason)


def _makers(package: str, kind: str, size: int) -> list[Callable[[], nn.Module]]:
    if package == "timm":
        import timm

        return [
            functools.partial(timm.create_model, kind, num_classes=CLASSES, img_size=size),
            functools.partial(timm.create_model, kind, num_classes=CLASSES),
        ]
    from torchvision import models

    options: dict[str, Any] = {"num_classes": CLASSES}
    if kind in ("googlenet", "inception_v3"):
        options["init_weights"] = False
    if kind.startswith(("fcn", "lraspp", "deeplab")):
        options["weights_backbone"] = None
    return [functools.partial(models.get_model, kind, **options)]


def _make(create: Callable[[], nn.Module]) -> nn.Module:
    seed(1)
    return create()


def _sample(package: str, shape: tuple[int, ...]) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        torch.manual_seed(3)
        return {"x": torch.randn(shape)}
